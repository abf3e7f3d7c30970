"""The flags of every build.py, frozen, and what a person reads after a wrong one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch

from shared import chapters, cli
from shared.console import UserError
from shared.training import TrainingSettings

TRAINING_BUILDS = [
    p for p in sorted(chapters.PROJECTS.glob("*/build.py"))
]
FLAGS = {
    "--help", "--tiny", "--full", "--steps", "--seed", "--seeds", "--data", "--tokenizer", "--device", "--workers",
    "--output-dir", "--set", "--fresh", "--report", "--keep",
}  # fmt: skip


def flags_of(parser):
    return {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}


def test_the_flags_are_frozen():
    parser = cli.build_parser("")
    assert flags_of(parser) == FLAGS
    choices = {action.dest: action.choices for action in parser._actions if action.choices}
    assert choices == {"tokenizer": ("char", "bpe4k", "r50k_base"), "device": ("auto", "cpu", "cuda", "mps")}


def test_the_defaults():
    options = cli.parse("", [], Path("here"))
    assert (options.preset, options.steps, options.seed, options.seeds) == ("tiny", None, 1, None)
    assert (options.data, options.tokenizer, options.device, options.output_dir) == (None, None, "cpu", Path("here"))
    assert options.workers == cli.usable_cores()
    assert cli.parse("", ["--full"], Path("here")).preset == "full"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--tiny", "--full"], "not allowed with"),
        (["--steps", "0"], "'0' is not a whole number from 1 up"),
        (["--seeds", "-3"], "'-3' is not a whole number"),
        (["--seed", "0"], "'0' is not"),
        (["--workers", "1.5"], "'1.5' is not"),
        (["--steps", "many"], "'many' is not"),
        (["--steps", "²"], "is not a whole number"),
        (["--steps"], "expected one argument"),
        (["--seeds", "1001"], "give at most 1000"),
        (["--tokenizer", "words"], "'words'"),
        (["--device", "tpu"], "'tpu'"),
        (["--step", "5"], "unrecognized arguments: --step"),  # no abbreviations: they change meaning as flags come
        (["--data", ""], "the path is empty"),  # an unset shell variable must not mean the default
        (["--output-dir="], "the path is empty"),
        (["extra"], "unrecognized arguments: extra"),
    ],
)
def test_a_wrong_flag_is_one_sentence(argv, says):
    with pytest.raises(UserError, match=says) as error:
        cli.parse("", argv, Path("here"))
    assert "\n" not in str(error.value)


def test_a_device_that_is_not_there_is_refused_and_auto_takes_what_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda: this torch sees no such device; use --device cpu"):
        cli.parse("", ["--device", "cuda"], Path("here"))
    assert cli.parse("", ["--full"], Path("here")).device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert cli.parse("", ["--full"], Path("here")).device == "cuda"
    assert cli.parse("", ["--full"], Path("here")).workers == 3  # one a GPU
    assert cli.parse("", ["--tiny"], Path("here")).device == "cpu"  # the reference


def exit_of(main):
    with pytest.raises(SystemExit) as stop:
        cli.run(main)
    return stop.value.code


def test_exit_statuses(capsys):
    def raising(error):
        def main():
            raise error

        return main

    assert exit_of(lambda: 0) == 0
    assert exit_of(lambda: 1) == 1
    assert exit_of(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert exit_of(raising(UserError("--data x: no such\nfile"))) == 2
    err = capsys.readouterr().err
    assert err.endswith("error: --data x: no such file\n") and err.count("\n") == 1
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        cli.run(lambda: 1 // 0)


def test_a_closed_pipe_and_a_full_disk_are_no_traceback(run_script, tmp_path):
    """As with `| head` and `> /dev/full`: 141 without a word, and 1 with one line."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(chapters.PROJECTS.parent)!r})\n"
        "from shared import cli, console\n"
        "def main():\n"
        "    if sys.argv[1] == 'pipe':\n"
        "        here, there = os.pipe()\n"
        "        os.close(here)\n"
        "    else:\n"
        "        there = os.open('/dev/full', os.O_WRONLY)\n"
        "    os.dup2(there, 1)\n"
        "    console.say('text')\n"
        "    return 0\n"
        "cli.run(main)\n",
        encoding="utf-8",
    )
    assert run_script(script, "pipe") == (141, "", "")
    if Path("/dev/full").exists():
        status, _, err = run_script(script, "full")
        assert status == 1 and err.count("\n") == 1 and "No space left" in err


@dataclass(frozen=True)
class Config:
    block_size: int = 8
    wide: bool = False
    hidden: int | None = None
    start: float | Literal["fan_in"] = 0.02
    kind: str = "a"

    def __post_init__(self):
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")


def changed(*assignments):
    preset = cli.Preset(Config(), TrainingSettings(), "docs", "char", 1)
    variants = [cli.Variant("a", {}, {}), cli.Variant("b", {}, {"kind": "b"})]
    options = cli.parse("", [f"--set={text}" for text in assignments], Path("here"))
    return cli.with_changes(preset, variants, options.changes)


def test_set_changes_a_field_by_its_type():
    config, training = changed(
        "block_size=16", "wide=true", "hidden=12", "start=fan_in", "learning_rate=1e-2"
    )
    assert config == Config(16, True, 12, "fan_in")
    assert training == TrainingSettings(learning_rate=1e-2)
    assert changed("hidden=none", "start=0.5")[0] == Config(start=0.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nope=1", "no such field; there are: block_size, wide, hidden, start, batch_size"),
        ("block_size=many", "block_size=many: give a whole number"),
        ("block_size=0", "at least 1, got 0"),
        ("wide=1", "give true or false"),
        ("learning_rate=nan", "give a number"),
        ("learning_rate=-1", "above 0"),
        ("kind=c", "the variants themselves set kind"),
        ("steps=3", "no such field"),  # it has a flag of its own
        ("nope", "is not FIELD=VALUE"),
        ("=3", "is not FIELD=VALUE"),
    ],
)
def test_a_wrong_set_is_refused(text, says):
    with pytest.raises(UserError, match=says):
        changed(text)


def test_a_plan_is_the_preset_the_variants_and_the_flags(tmp_path):
    text = tmp_path / "text"
    text.write_text("abcd" * 400, encoding="utf-8")
    training = TrainingSettings(
        steps=50, observe_every=40, precision="bfloat16", compile="inductor"
    )
    preset = cli.Preset(Config(), training, "docs", "char", seeds=3)
    variants = [cli.Variant("a", {}, {}), cli.Variant("b", {}, {"kind": "b"})]
    flags = ["--data", str(text), "--seed", "4", "--set=hidden=12", "--set=clip=0.5"]

    def plan(*more):
        options = cli.parse("", [*flags, "--device", "cpu", *more], tmp_path / "out")
        return cli.make_plan("", preset, variants, options)

    whole = plan()
    # Every variant gets the field of --set.
    assert whole.configs == {"a": Config(hidden=12), "b": Config(hidden=12, kind="b")}
    assert whole.seeds == [4, 5, 6] and plan("--seeds", "1").seeds == [4]
    # A CPU computes in float32 and compiles nothing; a short run is looked into at its end.
    assert whole.training == TrainingSettings(steps=50, observe_every=40, clip=0.5)
    assert plan("--steps", "7").training == TrainingSettings(steps=7, observe_every=7, clip=0.5)


def test_old_gpus_get_float16_and_not_an_emulation(monkeypatch):
    for native, precision in ((True, "bfloat16"), (False, "float16")):
        monkeypatch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True, native=native: including_emulation or native,
        )
        assert cli.usable_precision("bfloat16") == precision
    assert cli.usable_precision("float32") == "float32"


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, 1e6),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 1e6),
        ({}, 1e6),
    ],
)
def test_a_containers_share_of_the_cores_counts(tmp_path, content, cores):
    (tmp_path / "cpu").mkdir()
    for name, text in content.items():
        (tmp_path / name).write_text(text + "\n", encoding="ascii")
    assert cli.cpu_quota(tmp_path) == cores
