"""What may befall a run: a line that a person can act on, never a traceback."""

import inspect
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shared import chapters, cli, console, data, files, runs, training
from shared.console import UserError

sys.path.insert(0, str(Path(__file__).parent))

from crew import (  # noqa: E402, F401: fixtures among them
    SCRIPT,
    alive,
    build,
    children,
    run_files,
    small,
    text,
    until,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and shells of POSIX")


# ---------------------------------------------------------------- signals


def start(text, folder, *flags):
    """The small build on two workers, with more steps than a test waits for."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--data", str(text), "--output-dir", str(folder), "--workers",
         "2", "--steps", "100000", "--pause", "0.002", "--every", "0", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_a_killed_worker_ends_its_run_alone_and_sigterm_ends_all(text, tmp_path):
    process = start(text, tmp_path / "out")
    try:
        until(lambda: len(run_files(tmp_path / "out", "unfinished.pt")) == 2)
        first = children(process.pid)
        os.kill(first[0], signal.SIGKILL)
        until(lambda: set(children(process.pid)) - set(first))  # another takes the next run
        workers = children(process.pid)
        for _ in range(2):  # GNU timeout sends each signal twice
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143 and err == "ended\n"
    assert "FAILED: its process was killed (exit code -9)" in out
    assert out.splitlines()[-1].startswith("0 of 4 runs have finished and are kept; the same")
    assert len(workers) == 2 and not any(map(alive, [*first, *workers]))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_ctrl_c_ends_all_when_the_reader_of_the_pipe_has_gone_too(text, tmp_path):
    """As in `build.py | tee log`: Ctrl-C reaches both, and tee is the first to go."""
    process = start(text, tmp_path / "out", "--workers", "1")
    try:
        until(lambda: run_files(tmp_path / "out", "unfinished.pt"))
        workers = children(process.pid)
        process.stdout.close()
        process.stdout = None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and err == "interrupted\n"
    assert workers and not any(map(alive, workers))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_first_second_a_signal_ends_a_script_without_a_traceback(number, tmp_path):
    """From the import of shared on, while torch is being imported."""
    script = tmp_path / "projects" / "05_a" / "build.py"
    script.parent.mkdir(parents=True)
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import shared\n"
        "print('importing', flush=True)\n"
        "time.sleep(60)\n",
        encoding="utf-8",
    )
    (tmp_path / "shared").mkdir()
    source = Path(inspect.getfile(chapters)).with_name("__init__.py").read_text(encoding="utf-8")
    (tmp_path / "shared" / "__init__.py").write_text(source, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (-number, "")  # which a shell reports as 130 or 143


def test_elsewhere_the_import_of_shared_changes_no_signal(tmp_path):
    code = "import shared, signal; print(signal.getsignal(signal.SIGINT).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=chapters.PROJECTS.parent,
        capture_output=True,
        encoding="utf-8",
    )
    assert (done.stdout, done.stderr) == ("default_int_handler\n", "")


def test_one_more_signal_within_two_seconds_changes_nothing(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(cli, "last_signal", -1e9)
    monkeypatch.setattr(cli.time, "monotonic", lambda: clock[0])
    with pytest.raises(KeyboardInterrupt):
        cli.end(signal.SIGINT, None)
    clock[0] += 1.0
    cli.end(signal.SIGINT, None)
    cli.end(signal.SIGTERM, None)
    clock[0] += 5.0
    with pytest.raises(cli.Ended):  # whoever still waits after a while is heard
        cli.end(signal.SIGTERM, None)


def test_ctrl_c_waits_while_a_worker_starts():
    """It is neither lost nor seen by the process that starts within."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            with runs.ctrl_c_waits():
                os.kill(os.getpid(), signal.SIGINT)
                seen = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())
                time.sleep(0.01)
                reached = True
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen and reached
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


# ---------------------------------------------------------------- disks and folders


def exit_of(main, capfd):
    """(status, standard error) of a script whose main() this is."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    capfd.readouterr()
    try:
        with pytest.raises(SystemExit) as stop:
            cli.run(main)
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(number, handler)
    return stop.value.code, capfd.readouterr().err


def fill_disk(monkeypatch, names):
    """From now on there is no room for files whose path holds one of `names`."""
    real = os.replace

    def replace(source, target):
        if any(name in str(target) for name in names):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)


def test_a_disk_that_is_full_before_is_said_before_training(
    small, text, tmp_path, monkeypatch, capfd
):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", full)
    argv = ["--data", str(text), "--output-dir", str(tmp_path / "out")]
    status, err = exit_of(lambda: small.main(argv), capfd)
    assert status == 2 and err.count("\n") == 1
    assert f"can't write to --output-dir {tmp_path / 'out'}: No space left on device" in err


def test_a_disk_that_fills_during_names_the_file_and_keeps_what_it_can(
    small, here, text, tmp_path, monkeypatch, capsys
):
    fill_disk(monkeypatch, ["half_seed"])
    argv = ["--data", str(text), "--output-dir", str(tmp_path / "out"), "--seeds", "1"]
    assert small.main(argv) == 1
    out = capsys.readouterr().out
    assert "FAILED: half, seed 1: it was trained, but can't be kept: [Errno 28]" in out
    assert "runs/half_seed-1_" in out
    assert [path.name[:3] for path in run_files(tmp_path / "out")] == ["one"]
    left_over = [p.name for p in (tmp_path / "out" / "runs").iterdir() if p.name.startswith(".")]
    assert left_over == []  # no half-written file stays on a disk that is full


def test_a_disk_that_fills_at_the_end_names_the_file_and_loses_no_run(
    small, here, text, tmp_path, monkeypatch, capfd
):
    argv = ["--data", str(text), "--output-dir", str(tmp_path / "out"), "--seeds", "1"]
    with monkeypatch.context() as patch:
        fill_disk(patch, ["results.json"])
        status, err = exit_of(lambda: small.main(argv), capfd)
    assert status == 1 and err.count("\n") == 1
    assert "No space left on device" in err and str(tmp_path / "out" / "results.json") in err
    assert len(run_files(tmp_path / "out")) == 2
    assert small.main(argv) == 0


def test_a_small_disk_that_is_really_full(text, tmp_path, small, here, capfd):
    """The same on a file system of 100 KB, where this process may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)], capture_output=True
    )
    if mount.returncode:
        assert not list(disk.iterdir())  # no such right here; the tests above stand for it
        return
    try:
        (disk / "ballast").write_bytes(b"\0" * 4096 * 20)
        argv = ["--data", str(text), "--output-dir", str(disk / "out"), "--seeds", "3"]
        status, err = exit_of(lambda: small.main(argv), capfd)
        assert status == 1 and err.count("\n") == 1 and "No space left on device" in err
        kept = len(run_files(disk / "out"))
        (disk / "ballast").unlink()
        assert small.main(argv[:-1] + ["1"]) == 0 and kept >= 1
        capfd.readouterr()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        status, err = exit_of(lambda: small.main(argv), capfd)
        assert status == 2 and "can't write to --output-dir" in err and "Read-only" in err
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_chapters_folder_that_stands_twice_is_named_and_hinders_no_other(
    tmp_path, monkeypatch, capsys
):
    for name in ("05_gpt", "05_gpt copy", "07_details", "07_notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "build.py").write_text("value = 1\n", encoding="utf-8")
    (tmp_path / "07_notes" / "build.py").unlink()  # a folder without a build is no chapter
    monkeypatch.setattr(chapters, "PROJECTS", tmp_path)
    with pytest.raises(SystemExit) as stop:
        chapters.load_build(5)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert "chapter 5 stands twice: '05_gpt' and '05_gpt copy'" in err
    assert chapters.load_build(7).value == 1
    assert chapters.load_file(tmp_path / "05_gpt copy" / "build.py").value == 1


# ---------------------------------------------------------------- streams and clocks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "redirections", "status"),
    [("-m cProfile -o profile", "<&- >&-", 0), ("", "2>&- | head -n 1", 141)],
)
def test_closed_streams_are_no_error(runner, redirections, status, text, tmp_path, small, capsys):
    """And under another program's __main__, as cProfile is, workers find the build."""
    folder = tmp_path / "éà 名前 out"
    command = (
        f"set -o pipefail; cd {str(tmp_path)!r}; {sys.executable!r} {runner} {str(SCRIPT)!r} --data {str(text)!r} "
        f"--output-dir {str(folder)!r} --seeds 1 --workers 1 {redirections}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, encoding="utf-8", timeout=120)
    assert (done.returncode, done.stderr) == (status, "")
    if status == 0:
        assert len(run_files(folder)) == 2 and (folder / "results.json").exists()
        assert (tmp_path / "profile").stat().st_size > 1_000
        flags = ["--data", str(text), "--output-dir", str(folder), "--seeds", "1", "--report"]
        assert small.main(flags) == 0 and f"Written to {folder}" in capsys.readouterr().out
    else:
        assert done.stdout == "A test\n"


def test_a_jumping_clock_moves_nothing(build, monkeypatch):
    """The time of day is asked nowhere; what is measured comes from clocks that only go forward."""
    monkeypatch.setattr(time, "time", lambda: float(torch.randint(2**40, ()).item()))
    status, out = build("--seeds", "1")
    times = [float(t) for t in re.findall(r"([0-9.]+) ms/step", out)]
    assert status == 0 and len(times) >= 2 and all(0 < t < 10_000 for t in times)
    for module in (training, console, runs, cli, files, data):
        asked = re.search(r"time\.time\(|datetime\.now|import datetime", inspect.getsource(module))
        assert not asked, module
    assert time.get_clock_info("perf_counter").monotonic
    assert time.get_clock_info("monotonic").monotonic


# ---------------------------------------------------------------- texts


def refusal(source, tokenizer="char"):
    with pytest.raises(UserError) as error:
        data.load_corpus(Path(source), tokenizer, 8)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_giant_line_and_one_repeated_character_are_texts_like_any_other(tmp_path, build):
    line = tmp_path / "line.txt"
    line.write_text("ab" * 1_000_000, encoding="utf-8")
    corpus = data.load_corpus(line, "char", 8)
    assert (corpus.vocab_size, len(corpus.train)) == (2, 1_800_000)
    for character in ("a", " ", "\n", "é"):
        line.write_text(character * 1_000_000, encoding="utf-8")
        corpus = data.load_corpus(line, "bpe4k", 8)
        ids = torch.cat([corpus.train, corpus.validation]).tolist()
        assert corpus.tokenizer.decode(ids) == character * 1_000_000
    line.write_text("a" * 1000, encoding="utf-8")
    status, out = build("--data", str(line), "--seeds", "1")
    assert status == 0 and "ln 1 = 0.000" in out


def test_only_a_blank_longer_than_any_in_a_text_is_cut():
    tokenizer = data.BytePairTokenizer(data.bpe4k_encoding())
    text = "def f(x):\n" + " " * 9_998 + "return x\n\n\n\tnew = 'line'  \n" * 3
    assert data.pieces_of(text) == [text]
    assert tokenizer.encode(text) == tokenizer.encoding.encode_ordinary(text)
    long = "a" + " " * 25_000 + "b" + "\n" * 10_000 + "c"
    assert [len(piece) for piece in data.pieces_of(long)] == [1, 10_000, 10_000, 5_001, 10_001]
    assert list(tokenizer.encode_all([text, long, ""])) == [
        tokenizer.encode(text), tokenizer.encode(long), []
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode(long)) == long


def test_what_is_no_text_is_named(tmp_path):
    folder = tmp_path / "имя с пробелом"
    folder.mkdir()
    assert "is empty" in refusal(folder)
    (folder / "a.txt").write_text("abc " * 100, encoding="utf-8")
    assert data.load_corpus(folder, "char", 8).vocab_size == 4
    (folder / "b.bin").write_bytes(b"abc\0def")
    assert f"{folder / 'b.bin'} is not text: it holds a NUL byte at 3" in refusal(folder)
    (folder / "b.bin").write_bytes(b"abc\xff")
    assert "is not UTF-8 text: byte 0xff at 3" in refusal(folder)
    (folder / "b.bin").unlink()
    (folder / "loop").symlink_to(folder / "loop")  # a file that can't be opened, for root neither
    assert data.load_corpus(folder, "char", 8).vocab_size == 4
    assert "can't be the name of a file" in refusal("a\0b")
    assert "File name too long" in refusal("a" * 5000)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("abc " * 100, encoding="utf-8")

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert refusal(tmp_path) == f"can't read {tmp_path / 'a.txt'}: Permission denied"


# ---------------------------------------------------------------- what a GPU would refuse


class OnDevice(torch.Tensor):
    """A tensor on a device of this file's own: torch takes it for one on "meta"."""

    @staticmethod
    def __new__(cls, value):
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device="meta"
        )

    def __init__(self, value):
        self.value = value

    def tolist(self):
        return self.value.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


class Device(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


def computed(func, args, kwargs):
    """func on the CPU; its results are on the device unless sent away. float64 is refused there."""
    target = kwargs.get("device")
    flat = torch.utils._pytree.tree_leaves((args, kwargs))
    there = any(isinstance(leaf, OnDevice) for leaf in flat)
    there = there if target is None else torch.device(target).type == "meta"
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain = tree_map_only(OnDevice, lambda tensor: tensor.value, (args, kwargs))
    out = func(*plain[0], **plain[1])
    if not there:
        return out
    if func._schema.is_mutable and not func._schema.name.endswith("out"):
        return args[0] if isinstance(out, torch.Tensor) else out

    def wrap(tensor):
        if tensor.dtype == torch.float64:
            raise TypeError(f"{func}: this device has no float64")
        return OnDevice(tensor)

    return tree_map_only(torch.Tensor, wrap, out)


def test_the_device_of_this_test_refuses_float64():
    with Device():
        x = torch.ones(3).to("meta")
        assert x.device.type == "meta" and (x + 1).sum().item() == 6
        assert x.cpu().double().sum().item() == 3  # moved first, widened after
        with pytest.raises(TypeError, match="no float64"):
            x.double()


def test_the_loop_and_the_evaluation_need_no_float64_on_the_device(
    small, text, tmp_path, monkeypatch
):
    """Apple's GPUs have none. The numbers are those of the CPU."""
    plan = small.plan_of(["--data", str(text), "--output-dir", str(tmp_path)])
    corpus = plan.corpus

    def trained(device):
        model = small.Bigrams(small.Config(), corpus.vocab_size, seed=1)
        settings = training.TrainingSettings(steps=12, batch_size=4, observe_every=5, device=device)
        experiment = small.Small()
        history = training.train(
            model, corpus, settings, 1, after_step=experiment.after_step, observe=experiment.observe
        )
        return history

    expected = trained("cpu")
    supported = ["cpu", "meta"]  # of AdamW in one kernel
    optimizer = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: supported)
    with Device():
        history = trained("meta")
    assert history.losses == pytest.approx(expected.losses, abs=1e-6)
    assert history.validation_loss == pytest.approx(expected.validation_loss, abs=1e-6)
    assert len(history.observations) == 2


@pytest.mark.parametrize(("units", "precision"), [(True, "bfloat16"), (False, "float16")])
def test_bfloat16_is_used_where_a_gpu_has_units_for_it(units, precision, monkeypatch):
    def supported(including_emulation=True):
        return units or including_emulation  # torch says yes for a T4 too, and emulates

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert cli.usable_precision("bfloat16") == precision
    assert cli.usable_precision("float32") == "float32"
