"""Compare a run with the one whose results are committed under a chapter's expected/."""

import json
from pathlib import Path

# How far another machine's means may lie from the committed ones, in nats. Machines round differently and training
# amplifies it: with other instruction sets forced (ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE) no mean moved by
# more than 0.0002, so a gap of 0.005 is something else.
BAND = {"validation_loss": 0.005, "difference": 0.005}


def compare(record: dict, folder: Path, band: float | None = None) -> str:
    """In words: are this run's losses within `band` (None: within BAND) of those in folder/results.json?"""
    bands = BAND if band is None else dict.fromkeys(BAND, band)
    path = folder / "results.json"
    if not path.exists():
        return "expected/ holds no results yet, so there is nothing to compare with."
    expected = json.loads(path.read_text(encoding="utf-8"))
    why_not = difference_in_settings(record["settings"], expected["settings"])
    if why_not:
        return f"Not compared with expected/: {why_not}."
    if not record["complete"]:
        return "Not compared with expected/: not every run finished."
    outside, widest = [], 0.0
    for mine, theirs in zip(record["variants"], expected["variants"], strict=True):
        for key, band in bands.items():
            if mine[key] is None:  # the baseline has no difference to itself
                continue
            gap = abs(mine[key]["mean"] - theirs[key]["mean"])
            widest = max(widest, gap)
            if gap > band:
                outside.append(
                    f"{mine['variant']}: {key.replace('_', ' ')} {mine[key]['mean']:+.3f}, expected "
                    f"{theirs[key]['mean']:+.3f} within {band}"
                )
    if outside:
        return "This machine's numbers lie OUTSIDE the expected bands:\n" + "\n".join(f"  {line}" for line in outside)
    judged = [key for key in bands if any(variant[key] for variant in record["variants"])]
    within = ", ".join(f"{key.replace('_', ' ')} within {bands[key]}" for key in judged)
    return f"As expected: every mean lies inside the bands around expected/ ({within}; furthest off: {widest:.3f})."


def difference_in_settings(mine: dict, theirs: dict) -> str | None:
    """The first setting in which two runs differ, in words; None if they asked for the same."""
    if mine["corpus"]["sha256"] != theirs["corpus"]["sha256"]:
        return "the corpus is another text (its SHA-256 differs)"
    for name in ("preset", "seeds", "training", "variants", "corpus"):
        if mine[name] != theirs[name]:
            return f"{name} differ from a default --tiny run" if name != "preset" else "it holds a --tiny run"
    return None
