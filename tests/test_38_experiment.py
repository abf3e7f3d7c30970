"""Chapter 38's experiment: recipes of equal size whose details act, balance biases that move, and a run's files."""

import json
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared import chapters
from shared.console import UserError

BUILD = chapters.chapter_folder(38) / "build.py"
NAMES = list(chapters.load_build(38).RECIPES)


@pytest.fixture(scope="module")
def build():
    """Chapter 38's build.py."""
    return chapters.load_build(38)


@dataclass(frozen=True)
class Sizes:
    """What at_equal_size() needs of a plan."""

    configs: dict[str, Any]
    corpus: Any
    baseline: str = "Llama 3"


@cache
def sized(preset: str, vocab_size: int, **changes) -> dict:
    """The configs of all recipes by the model's name, at equal size."""
    build = chapters.load_build(38)
    cfg = replace(build.PRESETS[preset].model, **changes)
    variants = build.variants(cfg, NAMES)
    plan = Sizes({v.name: replace(cfg, **v.changes) for v in variants}, SimpleNamespace(vocab_size=vocab_size))
    return build.at_equal_size(plan).configs


def used(build, cfg, vocab_size: int) -> int:
    """How many of a model's numbers one token uses: those of top_k experts, and all that are no expert's."""
    total = 0
    for name, p in build.on_meta(cfg, vocab_size).named_parameters():
        part = name.partition(".experts.")[2]
        if not part or int(part.split(".")[0]) < cfg.top_k:
            total += p.numel()
    return total


# ---------------------------------------------------------------- equal size


@pytest.mark.parametrize(("preset", "vocab_size"), [("tiny", 95), ("full", 4_096)])
def test_a_token_uses_as_many_parameters_in_every_recipe(build, preset, vocab_size):
    counts = {name: used(build, cfg, vocab_size) for name, cfg in sized(preset, vocab_size).items()}
    assert len(counts) == len(NAMES)
    assert max(counts.values()) <= 1.01 * min(counts.values()), counts


def test_the_width_that_makes_up_for_a_tied_head_by_hand(build):
    """A head of 95 · 64 numbers is as much as 16 more columns in each of two MLPs, at 3 · 64 numbers a column."""
    configs = sized("tiny", 95)
    assert configs["Llama 3"].d_hidden == 170  # the 8/3 rule, as in chapter 07
    assert round(95 * 64 / (2 * 3 * 64)) == 16
    assert configs["SmolLM3"].d_hidden == 170 + 16


def test_a_recipe_that_is_larger_without_its_mlp_is_refused(build):
    with pytest.raises(UserError, match="an MLP of width 1 Qwen2 takes 37,696 parameters, Llama 3 only 37,440"):
        sized("tiny", 95, d_hidden=1)


# ---------------------------------------------------------------- details that act


def logits(build, cfg) -> tuple[list, torch.Tensor]:
    """The shapes of a model, and its logits, with weights as large as in training."""
    model = build.DetailedGPT(cfg, 95).double()
    build.init_parameters(model, seed=1, std=0.15)
    idx = torch.randint(95, (1, cfg.block_size), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return [(name, p.shape) for name, p in model.named_parameters()], model(idx)[0]


@pytest.mark.parametrize("name", NAMES)
def test_each_detail_acts_at_our_size(build, name):
    """With any one of its fields as in chapter 37 a recipe is another model, or none. What 1 + w does, weight decay
    does it: both gains start at 1."""
    cfg = sized("tiny", 95)[build.RECIPES[name].labels["model"]]
    shapes, ours = logits(build, cfg)
    changes = build.fitted(name, build.PRESETS["tiny"].model)
    assert set(build.RECIPES[name].changes) - set(changes) <= {"rope_base", "rope_scaling"}
    for field in changes.keys() - {"norm_gain"}:
        default = build.DetailedConfig.__dataclass_fields__[field].default
        if changes[field] == default:
            continue  # as many experts a token as in chapter 07
        try:
            shapes_without, without = logits(build, replace(cfg, **{field: default}))
        except ValueError:
            continue  # a window without its size: no such model
        assert shapes_without != shapes or (without - ours).abs().max() > 1e-9, field


def test_windows_patterns_and_factors_by_hand(build):
    tiny = {name: build.fitted(name, build.PRESETS["tiny"].model) for name in NAMES}
    full = {name: build.fitted(name, build.PRESETS["full"].model) for name in NAMES}
    assert tiny["mistral"]["window"] == 16 and full["mistral"]["window"] == 64
    assert tiny["gemma3"]["layer_kinds"] == ("window", "full")
    assert full["gemma3"]["layer_kinds"] == ("window",) * 5 + ("full",)
    assert tiny["smollm3"]["layer_kinds"] == ("full", "no positions")
    for name, width in (("granite", 2_048), ("cohere", 8_192)):  # logits that start as large as at that width
        published = build.RECIPES[name].changes["logit_scale"]
        assert tiny[name]["logit_scale"] * 64**0.5 == pytest.approx(published * width**0.5)


# ---------------------------------------------------------------- training


def test_the_balance_bias_moves_in_training_and_at_no_other_time(build):
    cfg = sized("tiny", 95)["DeepSeek-V3"]
    experiment = build.SideBySide()
    model = experiment.build_model(cfg, 95, seed=1)
    idx, targets = torch.randint(95, (2, 3, 20), generator=torch.Generator().manual_seed(1))
    model(idx, targets)
    objective, loss, told = experiment.training_loss(model, idx, targets)
    assert objective is loss and loss.item() == model(idx, targets)[1].item()
    routers = [block.mlp for block in model.blocks]
    assert list(told) == routers and all(router.balance_bias.eq(0).all() for router in routers)
    loads = [[(router.route(told[router].flatten(0, 1))[1] == e).sum() for e in range(16)] for router in routers]
    experiment.after_step(model, told)
    for router, load in zip(routers, loads):
        assert sum(load) == 60 * 4
        expected = [0.003 * (15 - n).sign().item() for n in load]  # 60 tokens, 4 of 16 experts each: 15 is the mean
        assert router.balance_bias.tolist() == pytest.approx(expected)
        assert router.balance_bias.abs().max() > 0


def test_a_start_of_another_size_is_read(build):
    cfg = build.PRESETS["tiny"].model
    matrices = [
        build.SideBySide().build_model(replace(cfg, init_std=std), 95, seed=1).blocks[0].attn.qkv.weight
        for std in (0.02, 0.04, "fan_in")
    ]
    torch.testing.assert_close(2 * matrices[0], matrices[1])
    torch.testing.assert_close(matrices[0] / 0.02, matrices[2] * 8)  # 64 inputs: 1/8


# ---------------------------------------------------------------- the command


@pytest.fixture
def small(build, monkeypatch):
    """Presets small enough for a test: the same paths, a fraction of the work."""
    for name in ("tiny", "full"):
        preset = build.PRESETS[name]
        model = replace(preset.model, block_size=8, n_layers=2, n_heads=2, d_model=16)
        training = replace(preset.training, batch_size=2, steps=4)
        monkeypatch.setitem(build.PRESETS, name, replace(preset, model=model, training=training, seeds=2))
    return build


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "some text.txt"
    path.write_text("To be, or not to be: that is the question.\n" * 30, encoding="utf-8")
    return path


def test_a_run_leaves_whole_files_and_says_what_they_say(small, here, tmp_path, text_file, capsys):
    flags = ["--data", str(text_file), "--output-dir", str(tmp_path / "out")]
    assert small.main([*flags, "--recipes", "deepseek-v3", "gemma2", "gpt-oss"]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()} - {".lock", "README.txt", "runs"}
    assert names == {"curves.png", "differences.png", "results.json", "run_log.txt"}
    record = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    models = ["Llama 3", "Gemma 2", "gpt-oss", "DeepSeek-V3"]
    assert record["complete"] and [v["variant"] for v in record["variants"]] == models
    out = capsys.readouterr().out
    assert "[8/8]" in out and "\x1b" not in out
    log = (tmp_path / "out" / "run_log.txt").read_text(encoding="utf-8").replace(str(text_file), "")
    assert max(map(len, log.splitlines())) <= 80
    table = out[out.index("what sets it apart") :]
    rows = {model: table[table.index(f"\n{model} ") :] for model in models}
    assert "score_cap 5;" in rows["Gemma 2"] and "n_experts 16;" in rows["DeepSeek-V3"]
    widths = {model: record["settings"]["variants"][model]["d_hidden"] for model in models}
    assert all(f" {widths[model]} " in rows[model].split("\n")[1] + " " for model in models)
    # The same command trains nothing, and what it says of its settings is what the file holds.
    assert small.main([*flags, "--recipes", "all", "--report"]) == 0
    assert "26 of 34 runs are not there" in capsys.readouterr().out


def test_a_record_equals_what_its_file_holds(small, here, tmp_path, text_file):
    """So a run can be compared with expected/: a tuple comes back as a list."""
    flags = ["--data", str(text_file), "--output-dir", str(tmp_path), "--seeds", "1", "--recipes", "smollm3"]
    assert small.main(flags) == 0
    settings = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["settings"]
    assert settings["variants"]["SmolLM3"]["layer_kinds"] == ["full", "no positions"]
    options = small.cli.options_from(small.cli.build_parser("").parse_args(flags[:6]), tmp_path)
    plan = small.cli.make_plan("", small.PRESETS["tiny"], small.variants(small.PRESETS["tiny"].model, ["smollm3"]), options)
    assert small.report.settings_record(small.at_equal_size(plan)) == settings


def test_the_baseline_alone_and_the_full_path_on_a_cpu(small, here, tmp_path, text_file, capsys):
    flags = ["--full", "--device", "cpu", "--data", str(text_file), "--tokenizer", "bpe4k", "--seeds", "1"]
    assert small.main([*flags, "--recipes", "llama3", "--output-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "bpe4k, a vocabulary of 4,096" in out and "against" not in out
    assert not (tmp_path / "differences.png").exists()


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--recipes", "qwen4"], "invalid choice: 'qwen4'"),
        (["--recipes"], "expected at least one argument"),
        (["--show", "qwen4"], "invalid choice: 'qwen4'"),
        (["--set", "window=8"], "the variants themselves set window"),
        (["--set", "n_kv_heads=3"], "n_heads 4 is not divisible by n_kv_heads 3"),
        (["--set", "d_hidden=1"], "give a larger d_hidden, or a smaller block_size"),
        (["--set", "rope_scaling=4"], "give none"),
    ],
)
def test_what_it_refuses(run_here, flags, said):
    status, out, err = run_here(BUILD, *flags)
    assert (status, out, err.count("\n")) == (2, "", 1) and said in err
