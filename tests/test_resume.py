"""Runs are files: what is kept, what is trained again, and what becomes of damaged ones."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared import chapters, files, runs, training
from shared.console import UserError

sys.path.insert(0, str(Path(__file__).parent))

from crew import (  # noqa: E402, F401: fixtures among them
    SCRIPT,
    TEXT,
    alive,
    build,
    children,
    histories,
    run_files,
    small,
    text,
    trained,
    until,
)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.slow
def test_a_killed_parent_leaves_no_worker_and_the_run_goes_on_to_the_same_bits(
    small, here, text, tmp_path
):
    out, whole = tmp_path / "out", tmp_path / "whole"
    flags = ["--data", str(text), "--seeds", "1", "--steps", "80", "--workers", "1"]
    waits = ["--pause", "0.01", "--every", "0"]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *flags, *waits, "--output-dir", str(out)],
        stdout=subprocess.DEVNULL,
    )
    try:
        until(lambda: run_files(out, "unfinished.pt"))
        workers = children(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(workers) == 1
    until(lambda: not alive(workers[0]), seconds=10)
    kept = training.load_checkpoint(run_files(out, "unfinished.pt")[0])
    assert 0 < len(kept["history"]["losses"]) < 80 and not run_files(out)

    resumed_from = []
    experiment = small.Small(0.01, 0.0)
    plan = small.plan_of([*flags, "--output-dir", str(out)])
    report = lambda run, done, *_: resumed_from.append(done)  # noqa: E731
    for _ in runs.train_missing(plan, experiment, [], report):
        break  # the first variant alone: the other never began
    first = len(kept["history"]["losses"])
    assert resumed_from[0] > first
    plan = small.plan_of([*flags, "--output-dir", str(whole)])
    next(runs.train_missing(plan, experiment, []))
    assert histories(out) == histories(whole) and len(histories(out)) == 1
    one, other = (torch.load(run_files(folder, "pt")[0]) for folder in (out, whole))
    assert one["model"].keys() == {"table", "steps_seen"} == other["model"].keys()
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    assert not run_files(out, "unfinished.pt")


def test_only_what_is_missing_is_trained(build, tmp_path):
    status, out = build("--seeds", "2")
    assert status == 0 and trained(out) == 4
    first = {path: path.stat().st_mtime_ns for path in run_files(tmp_path / "out")}
    status, out = build("--seeds", "3")
    assert status == 0 and trained(out) == 2
    assert "4 of 6 runs are stored already; 2 to train." in out
    assert all(path.stat().st_mtime_ns == then for path, then in first.items())
    status, again = build("--seeds", "3")
    assert "6 of 6 runs are stored already; none to train." in again and trained(again) == 0
    table = again[again.index("model ") :].split("\n\n")[0]
    assert table in out  # the same numbers, read or trained
    status, out = build("--seeds", "3", "--fresh")
    assert status == 0 and trained(out) == 6 and "stored" not in out


def test_the_first_seeds_models_are_kept_and_all_with_keep(build, tmp_path):
    build("--seeds", "2")
    assert [path.name.split("_")[1] for path in run_files(tmp_path / "out", "pt")] == ["seed-1"] * 2
    build("--seeds", "2", "--keep", folder="all")
    assert len(run_files(tmp_path / "all", "pt")) == 4


def test_other_settings_are_other_runs(build, text, tmp_path):
    build("--seeds", "1")
    for other in (["--steps", "20"], ["--set", "learning_rate=0.01"], ["--every", "50"]):
        status, out = build("--seeds", "1", *other)
        assert trained(out) == 2
    assert len(run_files(tmp_path / "out")) == 8
    text.write_text(TEXT + "!", encoding="utf-8")
    status, out = build("--seeds", "1")
    assert trained(out) == 2 and len(run_files(tmp_path / "out")) == 10
    text.write_text(TEXT, encoding="utf-8")
    status, out = build("--seeds", "1")
    assert "2 of 2 runs are stored already" in out


def test_an_edited_model_trains_again_and_a_comment_does_not(build, tmp_path):
    source = SCRIPT.read_text(encoding="utf-8")
    edits = {
        "plain": source,
        "comment": source.replace("class Bigrams", "# a remark\n\nclass Bigrams"),
        "edited": source.replace("self.steps_seen.sin()", "self.steps_seen.cos()"),
    }
    assert len(set(edits.values())) == 3
    loaded = {}
    for name, content in edits.items():
        path = tmp_path / f"{name}.py"
        path.write_text(content, encoding="utf-8")
        loaded[name] = chapters.load_file(path)
    assert trained(build("--seeds", "1", module=loaded["plain"])[1]) == 2
    assert trained(build("--seeds", "1", module=loaded["comment"])[1]) == 0
    status, out = build("--seeds", "1", "--report", module=loaded["edited"])
    assert status == 0 and trained(out) == 0  # --report says what there is
    status, out = build("--seeds", "1", module=loaded["edited"])
    assert trained(out) == 2 and "The code has changed: 2 stored runs are trained again." in out


def test_report_trains_nothing(build, tmp_path):
    with pytest.raises(UserError, match="--report: no run of this plan is stored"):
        build("--report")
    build("--seeds", "1")
    (tmp_path / "out" / "results.json").unlink()
    status, out = build("--seeds", "2", "--report")
    assert status == 0 and "2 of 4 runs are not there." in out and trained(out) == 0
    results = files.read_json(tmp_path / "out" / "results.json", "results")
    assert [run["seed"] for run in results["runs"]] == [1, 1] and not results["complete"]


def test_a_damaged_or_foreign_run_is_named_and_fresh_trains_it(build, tmp_path):
    build("--seeds", "1")
    one, other = run_files(tmp_path / "out")
    whole = one.read_bytes()
    changed = whole.replace(b'"parameters": ', b'"parameters": 1')
    damages = [whole[:-40], b"", b"\0" * 99, b"[]", b"{}", b"null", b"\xff", changed]
    damages.append(other.read_bytes())  # whole, but another run
    short = json.loads(whole)
    short["history"]["losses"].pop()
    del short["sha256"]
    short["sha256"] = runs.sha256_of(short)
    damages.append(json.dumps(short).encode("utf-8"))  # its checksum is right, a loss is missing
    for damage in damages:
        one.write_bytes(damage)
        with pytest.raises(UserError) as error:
            build("--seeds", "1")
        assert str(one) in str(error.value) and "--fresh" in str(error.value)
        assert "\n" not in str(error.value)
    assert trained(build("--seeds", "1", "--fresh")[1]) == 2
    assert trained(build("--seeds", "1")[1]) == 0


def test_a_damaged_or_foreign_checkpoint_is_named_and_fresh_starts_over(
    build, small, tmp_path, monkeypatch
):
    stop = RuntimeError("stopped by the test")

    def stopping(self, model, told):
        model.steps_seen += 1
        if model.steps_seen == 25:
            raise stop

    with monkeypatch.context() as patch:
        patch.setattr(small.Small, "after_step", stopping)
        with pytest.raises(RuntimeError, match="stopped by the test"):
            build("--every", "0")
    (path,) = run_files(tmp_path / "out", "unfinished.pt")
    whole = path.read_bytes()
    flipped = bytearray(whole)
    content = torch.load(path)
    at = whole.index(content["model"]["table"].numpy().tobytes())
    flipped[at] ^= 1  # one bit of a parameter, which torch itself would load
    foreign = training.as_bytes({**content, "of": "another run"})
    empty = training.as_bytes({"of": path.name, "model": {}})
    for damage in (whole[:-1000], b"", b"no zip", bytes(flipped), foreign, empty):
        path.write_bytes(damage)
        with pytest.raises(UserError) as error:
            build("--every", "0")
        assert str(path) in str(error.value) and "--fresh" in str(error.value)
    status, out = build("--every", "0", "--fresh")
    assert status == 0 and trained(out) == 4 and not path.exists()


def test_a_checkpoint_that_is_whole_is_gone_on_from(build, small, tmp_path, monkeypatch):
    """The twin of the test above: without a damage the same files are read."""
    with monkeypatch.context() as patch:
        patch.setattr(small.Small, "inspect", lambda *_: (_ for _ in ()).throw(KeyError("stop")))
        with pytest.raises(KeyError):
            build("--every", "0")
    steps = []
    monkeypatch.setattr(small.Small, "after_step", lambda self, model, told: steps.append(1))
    build("--every", "0", "--seeds", "1")
    assert len(steps) == 10 + 30  # the first run from step 20 on, the second from its start


def test_a_full_disk_at_a_checkpoint_ends_nothing(build, monkeypatch, capsys):
    def full(self, path, share):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(training.State, "save", full)
    capsys.readouterr()
    printed = []
    monkeypatch.setattr(training.console, "complain", printed.append)
    status, out = build("--every", "0", "--seeds", "1")
    assert status == 0 and trained(out) == 2
    assert "No space left on device" in printed[0] and ".unfinished.pt" in printed[0]


def test_a_loss_that_is_not_finite_is_said_and_not_stored(build, small, tmp_path, monkeypatch):
    def infinite(self, model, idx, targets):
        loss = training.plain_loss(model, idx, targets)[0]
        bad = model.cfg.scale == 0.5 and model.steps_seen >= 6
        return loss, loss * math.inf if bad else loss, None

    with monkeypatch.context() as patch:
        patch.setattr(small.Small, "training_loss", infinite)
        status, out = build("--seeds", "1")
    assert status == 1 and "FAILED: half, seed 1: the loss became inf at step 7" in out
    assert [path.name.split("_")[0] for path in run_files(tmp_path / "out")] == ["one"]
    status, out = build("--seeds", "1")
    assert status == 0 and trained(out) == 1


def test_a_lack_of_memory_ends_its_run_alone(build):
    status, out = build("--seeds", "1", "--set", f"batch_size={10**13}")
    assert status == 1 and out.count("there is not enough memory for it") >= 2


def test_a_folder_that_another_run_holds_is_refused(build, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    with files.held(folder):
        with pytest.raises(UserError, match="another run is writing to .*; wait for it") as error:
            build()
        assert "\n" not in str(error.value) and not (folder / "runs").exists()
    assert build("--seeds", "1")[0] == 0


def test_where_locks_are_unknown_the_run_goes_on(build, monkeypatch):
    def unknown(handle):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files, "lock", unknown)
    assert build("--seeds", "1")[0] == 0
