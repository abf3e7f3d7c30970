"""Runs on several ranks: dealt out or one model together, and when one of them dies."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared import chapters, cli, runs, training

SCRIPT = Path(__file__).with_name("small_build.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a text.txt"
    path.write_text("the cat sat on the mat and the dog sat on the cat. " * 20, encoding="utf-8")
    return path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun(folder, text, *flags, restarts=0):
    """Two ranks of the small build: (status, stdout, stderr)."""
    done = subprocess.run(
        [*TORCHRUN, "--master-port", free_port(), "--max-restarts", str(restarts), str(SCRIPT),
         "--data", str(text), "--output-dir", str(folder), *flags],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def two_ranks(script, *flags):
    """Two processes as torchrun starts them: (status, stdout, stderr) of each."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *flags],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                 "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                 "PYTHONIOENCODING": "utf-8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120) for rank in ranks]
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said)]


def one_process(folder, text, *flags):
    """The same runs in this process, by their names."""
    small = chapters.load_file(SCRIPT)
    plan = small.plan_of(["--data", str(text), "--output-dir", str(folder), *flags])
    context = runs.Context(small.Small(), plan)
    wanted = runs.Store(plan, context.experiment).wanted()
    return plan, [runs.train_one(context, run, lambda *_: None) for run in wanted]


def numbers(results):
    """By run, its numbers but the times."""
    return {
        str(r.run): (r.history.losses, r.history.validation_loss, r.history.observations, r.found)
        for r in results
    }


@pytest.mark.slow
def test_dealt_runs_are_those_of_one_process_and_rank_0_has_all(text, tmp_path):
    """Each rank has a folder of its own, as on machines without a shared file system."""
    flags = ("--data", str(text), "--output-dir", str(tmp_path / "ranks"), "--apart")
    (status, out, err), second = two_ranks(SCRIPT, *flags)
    assert status == 0, err
    assert second == (0, "", "")
    assert out.count("A test") == 1 and "2 ranks of torchrun" in out  # rank 0 alone speaks
    assert out.count("validation loss") == 4 and "[4/4]" in out and "FAILED" not in out
    assert len(list((tmp_path / "ranks/0/runs").glob("*.json"))) == 4
    plan, results = one_process(tmp_path / "alone", text)
    recorded = json.loads((tmp_path / "ranks" / "0" / "results.json").read_text(encoding="utf-8"))
    assert recorded["complete"] and recorded["environment"]["ranks"] == 2
    alone = numbers(results)
    for run in recorded["runs"]:
        theirs = run["losses"], run["validation_loss"], run["observations"], run["found"]
        assert theirs == alone[f"{run['variant']}, seed {run['seed']}"]
    assert not (tmp_path / "ranks" / "1" / "results.json").exists()
    mine = sorted(p.name.split("_")[0] for p in (tmp_path / "ranks/1/runs").glob("*.json"))
    assert mine == ["half", "half"]  # what rank 1 trained, on its own disk


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_and_a_restart_goes_on(text, tmp_path):
    """Rank 1 is killed in its second run; torchrun starts both again, which read what is there.

    torchrun's store outlives the restart, with the addresses of the ranks that have gone in it:
    without a store of their own, the new ones wait for them for ever, in every other attempt.
    """
    marker = tmp_path / "died"
    flags = ("--die", str(marker), "--every", "0", "--steps", "40")
    status, out, err = torchrun(tmp_path / "ranks", text, *flags, restarts=1)
    assert status == 0 and marker.exists(), err
    # torchrun names the rank whose end it sees first: the killed one, or the one that missed it.
    assert "Traceback" not in err
    assert "exitcode: -9" in err or "another rank has ended" in err
    assert out.count("A test") == 2 and "runs are stored already" in out
    plan, results = one_process(tmp_path / "alone", text, "--steps", "40")
    recorded = json.loads((tmp_path / "ranks" / "results.json").read_text(encoding="utf-8"))
    assert recorded["complete"] and len(recorded["runs"]) == 4
    alone = numbers(results)
    for run in recorded["runs"]:
        assert run["losses"] == alone[f"{run['variant']}, seed {run['seed']}"][0]


@pytest.mark.slow
def test_two_ranks_train_chapter_05s_model_together(text, tmp_path):
    """Each takes half the rows of a batch; the end is that of one process within 1e-5."""
    build = chapters.chapter_folder(5) / "build.py"
    flags = ["--data", str(text), "--steps", "12", "--set", "d_model=16", "--set", "block_size=8"]
    folder = tmp_path / "ranks"
    first, second = two_ranks(build, *flags, "--output-dir", str(folder))
    assert (first[0], second[:2]) == (0, (0, "")), (first, second)
    assert "[1/1] GPT, seed 1: validation loss" in first[1]

    gpt = chapters.load_build(5)
    options = cli.parse("", [*flags, "--output-dir", str(tmp_path / "alone")], tmp_path)
    plan = cli.make_plan("", gpt.PRESETS["tiny"], gpt.VARIANTS, options)
    experiment = gpt.OneGPT()
    store = runs.Store(plan, experiment)
    (run,) = store.wanted()
    alone = runs.train_one(runs.Context(experiment, plan), run, lambda *_: None)
    recorded = json.loads((folder / "results.json").read_text(encoding="utf-8"))["runs"][0]
    assert recorded["losses"] == pytest.approx(alone.history.losses, abs=1e-5)
    assert recorded["validation_loss"] == pytest.approx(alone.history.validation_loss, abs=1e-5)
    together = training.load_checkpoint(folder / "runs" / store.path(run, "pt").name)["model"]
    model = training.load_checkpoint(store.path(run, "pt"))["model"]
    gaps = [(model[name] - together[name]).abs().max().item() for name in model]
    assert 0 < max(gaps) < 1e-5  # not 0: other sums, so it was not one process by mistake


def test_a_rank_that_has_gone_is_a_line_and_a_mistake_of_ours_keeps_its_traceback():
    with pytest.raises(runs.RankGone, match="another rank has ended; what was finished is kept"):
        with runs.ranks_needed():
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    with pytest.raises(RuntimeError, match="shapes"):
        with runs.ranks_needed():
            raise RuntimeError("the shapes don't match")
    assert issubclass(runs.RankGone, OSError)  # which cli.run says in a line


def test_the_environment_says_which_rank_this_is(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert runs.world() == runs.World(0, 1, 0)
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert runs.world() == runs.World(0, 1, 0)  # left over from elsewhere: nobody to connect to
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert runs.world() == runs.World(3, 4, 1)
    assert cli.default_workers("cpu") == 1


def test_gpus_are_dealt_out_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = [runs.device_of("cuda", worker) for worker in range(4)]
    assert devices == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert runs.device_of("cpu", 3) == "cpu" and runs.device_of("mps", 1) == "mps"


def test_the_readmes_commands_name_flags_that_exist():
    from torch.distributed.run import get_args_parser

    readme = (chapters.PROJECTS.parent / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Many cores, GPUs and machines\n")[1].split("\n## ")[0]
    commands = [
        command
        for block in re.findall(r"```\w*\n(.*?)```", section, flags=re.DOTALL)
        for command in block.replace("\\\n", " ").split("\n")
        if "build.py" in command
    ]
    by_torchrun = [command for command in commands if "torchrun" in command]
    assert len(commands) == 4 and len(by_torchrun) == 3  # one node, Slurm, SkyPilot
    for command in commands:
        before, after = command.split("build.py")
        cli.parse("", shlex.split(after, comments=True), Path("here"))
        if command in by_torchrun:
            words = re.sub(r"\$\([^)]*\)|\$\w+", "1", before.split("torchrun")[1])
            read = get_args_parser().parse_args([*shlex.split(words), "build.py"])
            assert read.nproc_per_node == "8" and read.training_script == "build.py"
    assert "--requeue" in section and "sky jobs launch" in section
    assert (chapters.PROJECTS / "07_the-details-that-matter" / "build.py").exists()
