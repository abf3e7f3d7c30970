"""Chapter 07's parts and its experiment, from the command line to the files that it leaves."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from shared import chapters
from shared.randomness import generator
from shared.training import TrainingSettings

BUILD = chapters.chapter_folder(7) / "build.py"
COUNTS = {
    "LayerNorm+GELU": 105_216,
    "RMSNorm+GELU": 104_896,
    "LayerNorm+SwiGLU": 104_320,
    "RMSNorm+SwiGLU": 104_000,
}


def changes(modern):
    return {variant.name: variant.changes for variant in modern.VARIANTS}


def model_of(modern, variant, vocab_size=48, seed=1, **config):
    model = modern.ModernGPT(modern.ModernConfig(**changes(modern)[variant], **config), vocab_size)
    modern.gpt.init_parameters(model, seed)
    return model


@pytest.mark.parametrize(("variant", "count"), COUNTS.items())
def test_the_four_variants_have_exactly_their_sizes(modern, variant, count):
    assert modern.gpt.count_parameters(model_of(modern, variant)) == count
    assert list(changes(modern)) == list(COUNTS)


ALL_TYPES = [
    (n, m, p)
    for n in ("layernorm", "rmsnorm")
    for m in ("gelu", "relu2", "swiglu", "moe")
    for p in ("learned", "rope", "none")
]


@pytest.mark.parametrize(("norm", "mlp", "position"), ALL_TYPES)
def test_every_variant_starts_near_guessing_and_is_causal(modern, norm, mlp, position):
    config = modern.ModernConfig(block_size=13, norm_type=norm, mlp_type=mlp, position_type=position)
    model = modern.ModernGPT(config, 48)
    modern.gpt.init_parameters(model, seed=1)
    idx, targets = (torch.randint(48, (6, 13), generator=generator(1, name)) for name in ("idx", "targets"))
    _, loss = model(idx, targets)
    assert abs(loss.item() - math.log(48)) < 0.25
    x = model.embed(idx[:2]).detach().requires_grad_()
    hidden = x
    for block in model.blocks:
        hidden = block(hidden)
    for t in (0, 5, 12):
        (gradient,) = torch.autograd.grad(hidden[:, t].sum(), x, retain_graph=True)
        assert ((gradient.abs().sum((0, 2)) > 0).tolist()) == [position <= t for position in range(13)]


def test_variants_share_the_start_of_every_parameter_that_they_share(modern):
    models = {variant: dict(model_of(modern, variant).named_parameters()) for variant in changes(modern)}
    reference = models["LayerNorm+GELU"]
    shared = {name for model in models.values() for name in model if name in reference}
    assert "blocks.1.attn.qkv.weight" in shared and "token_embedding.weight" in shared
    for model in models.values():
        for name in shared & model.keys():
            assert torch.equal(model[name], reference[name]), name


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_every_norm_has_the_eps_of_the_config(modern, norm):
    model = modern.ModernGPT(modern.ModernConfig(norm_type=norm, norm_eps=0.5), 48)
    eps = [module.eps for module in model.modules() if hasattr(module, "eps")]
    assert eps == [0.5] * 5  # two in each of two blocks, and the last


def test_an_unknown_part_is_refused_with_the_valid_ones(modern):
    for name, valid in (("norm_type", "layernorm, rmsnorm, none"), ("mlp_type", "gelu, relu2, swiglu, moe")):
        with pytest.raises(ValueError, match=f"unknown {name} 'x'; valid: {valid}"):
            modern.ModernConfig(**{name: "x"})
    with pytest.raises(ValueError, match="valid: layernorm, rmsnorm, none"):
        modern.make_norm("x", 8)


def test_rmsnorm_by_hand_and_against_torch(modern):
    assert modern.RMSNorm(4)(torch.tensor([1.0, 2, 3, 4])).tolist() == pytest.approx(
        [0.3651481, 0.7302963, 1.0954444, 1.4605925], abs=1e-6
    )
    ours, theirs = modern.RMSNorm(24, eps=1e-4), torch.nn.RMSNorm(24, eps=1e-4)
    gain = torch.randn(24, generator=generator(1, "gain"))
    x = torch.randn(5, 3, 24, generator=generator(1, "x"), requires_grad=True)
    upstream = torch.randn(5, 3, 24, generator=generator(1, "upstream"))
    for norm in (ours, theirs):
        norm.weight.data.copy_(gain)
    for mine, reference in zip(
        torch.autograd.grad(ours(x), [x, ours.weight], upstream),
        torch.autograd.grad(theirs(x), [x, theirs.weight], upstream),
    ):
        assert torch.allclose(mine, reference, rtol=1e-5, atol=1e-5)
    assert torch.allclose(ours(x), theirs(x), rtol=1e-6, atol=1e-6)


def test_swiglu_by_hand(modern):
    """gate 2, up 3: silu(2) · 3, with every matrix 1 x 1."""
    swiglu = modern.SwiGLU(1, 1)
    for linear, value in ((swiglu.gate_proj, 2.0), (swiglu.up_proj, 3.0), (swiglu.down_proj, 1.0)):
        linear.weight.data.fill_(value)
    assert swiglu(torch.ones(1)).item() == pytest.approx(5.2847825, abs=1e-6)
    assert modern.SwiGLU(64).down_proj.in_features == 170


# ---------------------------------------------------------------- the experiment


@pytest.fixture
def small(modern, monkeypatch):
    """Presets small enough for a test: the same paths, a fraction of the work."""
    for name, size in (("tiny", 12), ("full", 16)):
        preset = modern.PRESETS[name]
        model = replace(preset.model, block_size=8, n_layers=1, n_heads=2, d_model=size)
        training = replace(preset.training, batch_size=2, steps=4)
        monkeypatch.setitem(modern.PRESETS, name, replace(preset, model=model, training=training, seeds=2))
    return modern


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "some text.txt"
    path.write_text("To be, or not to be: that is the question.\n" * 30, encoding="utf-8")
    return path


def without_times(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    for run in record["runs"]:
        del run["ms_per_step"]
    del record["environment"]["workers"]
    return record


def test_a_run_leaves_whole_files_and_twice_the_same(small, forked, tmp_path, text_file, capsys):
    for name, workers in (("one", "1"), ("two", "2")):
        assert small.main(["--data", str(text_file), "--workers", workers, "--output-dir", str(tmp_path / name)]) == 0
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert {"run_log.txt", "results.json", "curves.png", "differences.png"} <= set(files)
    assert all((tmp_path / "one" / f).read_bytes().startswith(b"\x89PNG") for f in files if f.endswith(".png"))
    one, two = (without_times(tmp_path / name / "results.json") for name in ("one", "two"))
    assert one == two
    assert (tmp_path / "one" / "README.txt").read_text(encoding="utf-8").startswith("All of this may be deleted")
    assert one["complete"] and len(one["runs"]) == 8 and all(len(run["losses"]) == 4 for run in one["runs"])
    assert [v["variant"] for v in one["variants"]] == list(COUNTS)
    log = (tmp_path / "one" / "run_log.txt").read_text(encoding="utf-8")
    out = capsys.readouterr().out
    for run in one["variants"]:
        assert f"{run['validation_loss']['mean']:.3f}" in log and f"{run['parameters']:,}" in out
    assert one["settings"]["corpus"]["sha256"] in out and "\x1b" not in out
    assert "Not compared with expected/: the corpus is another text" in out


def test_the_table_and_the_sentences_say_what_the_runs_say(small, here, tmp_path, text_file):
    small.main(["--data", str(text_file), "--seeds", "3", "--output-dir", str(tmp_path)])
    record = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    losses = {(run["variant"], run["seed"]): run["validation_loss"] for run in record["runs"]}
    log = (tmp_path / "run_log.txt").read_text(encoding="utf-8")
    answers = []
    for row in record["variants"][1:]:
        gaps = [losses[row["variant"], s] - losses["LayerNorm+GELU", s] for s in (1, 2, 3)]
        mean = sum(gaps) / 3
        half = 4.302653 * math.sqrt(sum((g - mean) ** 2 for g in gaps) / 2 / 3)
        assert row["difference"]["mean"] == pytest.approx(mean) and row["difference"]["half_width"] == pytest.approx(
            half
        )
        assert f"{mean:+.3f} ± {half:.3f}" in log
        answers.append(answer(mean, half))
    levels = dict(zip(sorted(range(3), key=lambda i: answers[i][0]), (0.05 / 3, 0.05 / 2, 0.05)))
    for i, row in enumerate(record["variants"][1:]):
        surer = [answers[j][0] <= levels[j] for j in range(3) if levels[j] <= levels[i]]
        said = answers[i][1] if all(surer) else "can't tell"
        assert row["difference"]["verdict"] == said and said in log


def answer(mean: float, half: float) -> tuple[float, str]:
    """Of three seeds: the surest answer, and how wrong it may be (Student's share for two degrees of freedom)."""
    error = half / 4.302653

    def wrong(t):
        return 1 - t / math.sqrt(2 + t * t)

    equal = wrong(max(0.02 - abs(mean), 0) / error)
    different = wrong(abs(mean) / error)
    if equal <= different:
        return equal, "equal"
    return different, "lower" if mean < 0 else "higher"


def test_the_full_path_runs_on_a_cpu_and_says_what_it_will_cost(small, here, tmp_path, text_file, capsys):
    flags = ["--full", "--device", "cpu", "--data", str(text_file), "--tokenizer", "bpe4k", "--steps", "3"]
    assert small.main([*flags, "--output-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("This is the preset for a GPU, and no GPU is in use") == 1
    assert "bpe4k, a vocabulary of 4,096" in out
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["settings"]["preset"] == "full"


def test_a_diverging_run_is_named_with_its_step_and_the_status_is_1(
    small, here, tmp_path, text_file, capsys, monkeypatch
):
    preset = small.PRESETS["tiny"]
    monkeypatch.setitem(small.PRESETS, "tiny", replace(preset, training=replace(preset.training, learning_rate=1e38)))
    assert small.main(["--data", str(text_file), "--seeds", "1", "--output-dir", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "FAILED: LayerNorm+GELU, seed 1: the loss became nan at step 2" in out
    record = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert record["complete"] is False and all(run["error"] for run in record["runs"])


def test_the_presets_are_the_chapters(modern):
    tiny, full = modern.PRESETS["tiny"], modern.PRESETS["full"]
    shape = (tiny.model.block_size, tiny.model.n_layers, tiny.model.n_heads, tiny.model.d_model)
    assert shape == (32, 2, 4, 64) and tiny.seeds == 6 and (tiny.corpus, tiny.tokenizer) == ("docs", "char")
    plain = replace(tiny.training, observe_every=0)
    assert plain == TrainingSettings(steps=200, batch_size=32, learning_rate=3e-3, clip=1.0)
    assert (full.model.block_size, full.model.n_layers, full.model.d_model) == (256, 6, 384)
    assert (full.training.precision, full.training.compile) == ("bfloat16", "inductor")


# ---------------------------------------------------------------- as a person runs it


def test_tiny_runs_by_its_path_without_a_network(run_script, tmp_path):
    """A sitecustomize that forbids every connection rides along into the worker processes too."""
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\n"
        "def refuse(self, address, *rest):\n"
        "    if self.family != getattr(socket, 'AF_UNIX', None):\n"
        "        raise RuntimeError(f'a connection to {address}')\n"
        "    return real(self, address, *rest)\n"
        "real = socket.socket.connect\n"
        "socket.socket.connect = refuse\n",
        encoding="utf-8",
    )
    out_dir = tmp_path / "out é"
    status, out, err = run_script(
        BUILD, "--tiny", "--steps", "2", "--seeds", "1", "--workers", "1", "--output-dir", str(out_dir),
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert "[4/4]" in out and "ln 95 = 4.554" in out and (out_dir / "results.json").exists()


def test_errors_come_before_training_and_are_one_line(run_here, tmp_path):
    (tmp_path / "binary").write_bytes(b"\x00\x01" * 1000)
    (tmp_path / "a file").write_text("", encoding="utf-8")
    for flags, says in (
        (["--data", str(tmp_path / "binary")], "is not text"),
        (["--output-dir", str(tmp_path / "a file")], "can't write to --output-dir"),
        (["--tiny", "--full"], "not allowed with"),
    ):
        status, out, err = run_here(BUILD, *flags)
        assert (status, out, err.count("\n")) == (2, "", 1), (flags, out, err)
        assert err.startswith("build.py: error: ") and says in err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no process groups to interrupt")
@pytest.mark.slow
def test_ctrl_c_keeps_finished_runs_and_writes_no_half_file(tmp_path, text_file):
    command = [sys.executable, str(BUILD), "--data", str(text_file), "--steps", "4", "--seeds", "400"]
    command += ["--output-dir", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", start_new_session=True
    )
    for line in process.stdout:
        if line.startswith("[3/1600]"):
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "interrupted\n" and "of 1600 runs have finished and are kept" in out
    kept = [json.loads(p.read_text(encoding="utf-8")) for p in (tmp_path / "runs").glob("*.json")]
    assert len(kept) >= 3 and all(len(run["history"]["losses"]) == 4 for run in kept)
    assert not list(tmp_path.glob("**/.*.json*")), "no half-written file stays"
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and children_left(process.pid):
        time.sleep(0.1)
    assert not children_left(process.pid)


def children_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
