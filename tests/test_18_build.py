"""Chapter 18's model and its experiment, from the command line to the files that it leaves."""

import copy
import dataclasses
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from shared import chapters
from shared.randomness import generator

BUILD = chapters.chapter_folder(18) / "build.py"
VARIANTS = ["dense", "top-2 + loss", "top-2 alone", "Switch + loss", "top-2 + bias", "expert choice"]
step_09 = chapters.load_step(18, 9)
step_13 = chapters.load_step(18, 13)


def model_of(sparse, variant: str = "top-2 + loss", vocab_size: int = 48, seed: int = 1, **changes):
    preset = sparse.PRESETS["tiny"].model
    config = replace(preset, **{**changes_of(sparse, preset)[variant], **changes})
    return sparse.SparseOrDense().build_model(config, vocab_size, seed)


def changes_of(sparse, cfg) -> dict[str, dict]:
    """A variant's name -> the fields of cfg that it changes."""
    return {variant.name: variant.changes for variant in sparse.variants(cfg)}


def batch(T: int = 32, B: int = 6, vocab_size: int = 48) -> list[torch.Tensor]:
    return [torch.randint(vocab_size, (B, T), generator=generator(18, name)) for name in ("idx", "targets")]


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_starts_near_guessing(sparse, variant):
    loss = model_of(sparse, variant)(*batch())[1].item()
    assert abs(loss - math.log(48)) < 0.25


@pytest.mark.parametrize("preset", ["tiny", "full"])
def test_active_parameters_are_equal_and_so_are_the_totals_of_sparse_models(sparse, gpt, preset):
    cfg = sparse.PRESETS[preset].model
    sizes = {}
    for name, changes in changes_of(sparse, cfg).items():
        with torch.device("meta"):
            model = (modern_or_sparse(sparse, changes))(replace(cfg, **changes), 95)
        sizes[name] = (sparse.active_parameters(model), gpt.count_parameters(model))
    active, total = zip(*sizes.values())
    routers = cfg.n_layers * cfg.n_experts * cfg.d_model
    assert max(active) - min(active) <= routers < 0.01 * min(active)
    assert max(total[1:]) - min(total[1:]) <= routers and total[0] == active[0] < total[1]
    assert list(sizes) == VARIANTS


def modern_or_sparse(sparse, changes: dict):
    return sparse.modern.ModernGPT if changes.get("mlp_type") == "swiglu" else sparse.SparseGPT


def test_forward_returns_the_cross_entropy_and_nothing_else(sparse):
    model, (idx, targets) = model_of(sparse, balance_weight=100.0), batch()
    logits, loss = model(idx, targets)
    assert logits.shape == (6, 32, 48) and model(idx)[1] is None
    torch.testing.assert_close(loss, F.cross_entropy(logits.transpose(1, 2), targets))
    again, same, routings = model.forward_with_routing(idx, targets)
    assert torch.equal(again, logits) and torch.equal(same, loss) and len(routings) == 2
    assert all(r.logits.shape == (192, 8) and r.logits.requires_grad and r.chosen.sum() == 384 for r in routings)
    with pytest.raises(ValueError, match="33 tokens don't fit a block_size of 32"):
        model(torch.zeros(1, 33, dtype=torch.int64))


def test_a_single_expert_is_the_dense_model(sparse):
    dense = model_of(sparse, "dense", d_hidden=29)
    alone = step_13.upcycle(dense, replace(dense.cfg, mlp_type="moe", n_experts=1, top_k=1), seed=2)
    idx, targets = batch()
    torch.testing.assert_close(alone(idx, targets)[0], dense(idx, targets)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("router_type", "k"), [("top_k", 2), ("top_k", 3), ("bias", 2), ("switch", 1)])
def test_upcycling_keeps_the_loss_if_gates_sum_to_1(sparse, router_type, k):
    """With larger weights than at the start, as training makes them; no Switch drops a token here."""
    dense = model_of(sparse, "dense", d_hidden=29)
    sparse.gpt.init_parameters(dense, seed=1, std=0.1)
    cfg = replace(
        dense.cfg, mlp_type="moe", n_experts=5, top_k=k, router_type=router_type, capacity_factor=5.0, init_std=0.1
    )
    model, (idx, targets) = step_13.upcycle(dense, cfg, seed=2), batch()
    gap = abs(model(idx, targets)[1] - dense(idx, targets)[1]).item()
    assert gap > 1e-3 if router_type == "switch" else gap < 1e-6
    assert model.lm_head.weight is model.token_embedding.weight


def test_a_checkpoint_holds_the_bias_and_the_tie_survives_a_copy(sparse):
    model = model_of(sparse, "top-2 + bias")
    model.blocks[1].mlp.balance_bias += torch.arange(8) / 8
    other = copy.deepcopy(model_of(sparse, "top-2 + bias", seed=2))
    assert other.lm_head.weight is other.token_embedding.weight
    other.load_state_dict(model.state_dict())
    idx, targets = batch()
    assert torch.equal(model(idx, targets)[0], other(idx, targets)[0])
    other.blocks[1].mlp.balance_bias.zero_()
    assert not torch.equal(model(idx, targets)[0], other(idx, targets)[0])


# What each field of the config changes that nothing else does: a field that nobody reads would change nothing.
OTHER = {
    "block_size": 16, "n_layers": 3, "n_heads": 2, "d_model": 32, "bias": False, "norm_type": "layernorm",
    "mlp_type": "swiglu", "position_type": "rope", "norm_eps": 0.5, "d_hidden": 40, "multiple_of": 64,
    "rope_base": 3.0, "n_experts": 5, "top_k": 3, "init_std": 0.1, "router_type": "expert_choice",
    "capacity_factor": 0.3, "balance_weight": 0.5, "bias_speed": 0.7,
}  # fmt: skip
READ_WITH = {  # what must hold for a field to matter
    "multiple_of": {"d_hidden": None},
    "rope_base": {"position_type": "rope"},
    "capacity_factor": {"router_type": "switch", "top_k": 1},
    "bias_speed": {"router_type": "bias"},
}


@pytest.mark.parametrize("field", OTHER)
def test_every_field_of_the_config_is_read(sparse, field):
    experiment, base = sparse.SparseOrDense(), replace(sparse.SparseConfig(), **READ_WITH.get(field, {}))

    def effect(cfg):
        model = experiment.build_model(cfg, 48, seed=1)
        idx, targets = (x[:, : cfg.block_size] for x in batch())
        objective, _, told = experiment.training_loss(model, idx, targets)
        objective.backward()
        experiment.after_step(model, told)
        biases = [x.tolist() for name, x in model.named_buffers() if "balance_bias" in name]
        return objective.item(), {n: p.grad.norm().item() for n, p in model.named_parameters()}, biases

    assert effect(replace(base, **{field: OTHER[field]})) != effect(base) == effect(base)


def test_no_field_is_forgotten_above(sparse):
    assert {field.name for field in dataclasses.fields(sparse.SparseConfig)} == set(OTHER)


# ---------------------------------------------------------------- training


def test_what_is_minimised_and_what_is_reported(sparse):
    experiment, (idx, targets) = sparse.SparseOrDense(), batch()
    for variant, weight in (("top-2 + loss", 0.01), ("top-2 alone", 0.0), ("Switch + loss", 0.01), ("dense", 0.0)):
        model = model_of(sparse, variant)
        objective, reported, _ = experiment.training_loss(model, idx, targets)
        assert reported.item() == pytest.approx(F.cross_entropy(model(idx)[0].transpose(1, 2), targets).item())
        if variant == "dense":
            assert objective is reported
            continue
        routings, k = model.forward_with_routing(idx)[2], model.cfg.top_k
        balance = sum(sparse.switch_balance_loss(r.logits, k).item() for r in routings) / 2
        assert (objective - reported).item() == pytest.approx(weight * balance, abs=2e-6)


def test_the_bias_moves_in_training_and_at_no_other_time(sparse):
    experiment, model, (idx, targets) = sparse.SparseOrDense(), model_of(sparse, "top-2 + bias"), batch()
    before = copy.deepcopy(model.state_dict())
    seen = experiment.observe(model, idx)
    model(idx, targets)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [sum(layer) for layer in seen["loads"]] == pytest.approx([1, 1])
    _, _, told = experiment.training_loss(model, idx, targets)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    experiment.after_step(model, told)
    for block, load in zip(model.blocks, seen["loads"]):
        signs = [(1 / 8 > part) - (1 / 8 < part) for part in load]
        assert block.mlp.balance_bias.tolist() == pytest.approx([0.003 * sign for sign in signs])


def test_a_sparse_model_learns_and_the_loss_balances_it(sparse):
    """Sixty steps on a repeating text: the loss falls far below guessing, and the auxiliary loss evens the load."""
    experiment, sequence = sparse.SparseOrDense(), torch.arange(400) % 12
    worst = {}
    for weight in (0.0, 1.0):
        model = model_of(sparse, balance_weight=weight, d_model=16, n_heads=2, d_hidden=8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(60):
            rows = sequence[step : step + 33 * 8].view(8, 33)
            objective, loss, _ = experiment.training_loss(model, rows[:, :-1], rows[:, 1:])
            optimizer.zero_grad()
            objective.backward()
            optimizer.step()
        assert loss.item() < 0.5 * math.log(48)
        loads = experiment.observe(model, sequence[:256].view(8, 32))["loads"]
        worst[weight] = max(max(load) * 8 for load in loads)
    assert worst[1.0] < worst[0.0]


# ---------------------------------------------------------------- the look inside


def test_information_is_0_and_1_where_it_must_be():
    assert step_09.information(torch.diag(torch.tensor([1.0, 5.0, 2.0]))) == pytest.approx(1, abs=1e-6)
    assert step_09.information(torch.outer(torch.tensor([1.0, 4.0, 2.0]), torch.tensor([3.0, 1.0]))) == pytest.approx(
        0, abs=1e-6
    )
    assert step_09.information(torch.tensor([[7.0, 0.0], [2.0, 0.0]])) == 0.0  # one expert takes all: nothing to tell
    errs = torch.tensor([[0.89, 0.11], [0.11, 0.89]])  # h(0.11) is 0.4999 bits
    assert step_09.information(errs) == pytest.approx(0.5001, abs=1e-4)


def test_rare_kinds_are_nobodys_favourites():
    counts = torch.tensor([[600.0, 0.0], [0.0, 400.0], [1.0, 0.0]])
    assert step_09.favourites(counts, counts.sum(1))[0] == [(0, 1.0), (1, 0.0), (2, 0.0)]


def test_the_look_inside_counts_what_happened(sparse):
    """Against a model whose router is known: the expert is the parity of the token's number."""
    corpus = type("Corpus", (), {})()
    corpus.validation, corpus.vocab_size = torch.arange(331) % 7, 7
    corpus.tokenizer = type("Tokenizer", (), {"decode": staticmethod(lambda ids: f"<{ids[0]}>")})
    model = model_of(sparse, "Switch + loss", vocab_size=7, capacity_factor=9.0, n_layers=1)

    class Parity:
        def __call__(self, idx):
            return None, None, [sparse.Routing(torch.zeros(idx.numel(), 4), F.one_hot(idx.flatten() % 2, 4).bool())]

    model.forward_with_routing = Parity()
    found = sparse.look_inside(model, model, corpus)
    assert found["told"] == pytest.approx(1) and found["told_untrained"] == pytest.approx(1)
    assert found["dead"] == 2 and found["dropped"] == 0 and found["entropy"] == pytest.approx(1)
    even = sum(token % 2 == 0 for token in corpus.validation[:-1].tolist())
    assert found["load"] == pytest.approx([even / 330, 1 - even / 330, 0, 0])
    assert found["max_violation"] == pytest.approx(4 * even / 330 - 1)
    assert sorted(name for name, _ in found["favourites"][1]) == ["'<1>'", "'<3>'", "'<5>'"]


def test_trained_and_untrained_are_told_apart(sparse):
    """The untrained router is the one that the seed gives; only the trained one's numbers follow the model."""
    corpus = type("Corpus", (), {})()
    corpus.validation = torch.randint(23, (700,), generator=generator(18, "text"))
    corpus.vocab_size, corpus.tokenizer = 23, type("Tokenizer", (), {"decode": staticmethod(str)})
    experiment, model = sparse.SparseOrDense(), model_of(sparse, vocab_size=23)
    fresh = experiment.inspect(model, corpus, seed=1)
    assert fresh["told"] == fresh["told_untrained"]
    for block in model.blocks:
        torch.nn.init.normal_(block.mlp.router.weight, generator=generator(18, "router"))
    changed = experiment.inspect(model, corpus, seed=1)
    assert changed["told_untrained"] == fresh["told_untrained"] and changed["told"] != fresh["told"]
    assert experiment.inspect(model, corpus, seed=2)["told_untrained"] != fresh["told_untrained"]


# ---------------------------------------------------------------- the experiment


@pytest.fixture
def small(sparse, monkeypatch):
    """Presets small enough for a test: the same paths, a fraction of the work."""
    for name, size in (("tiny", 12), ("full", 16)):
        preset = sparse.PRESETS[name]
        model = replace(preset.model, block_size=8, n_layers=2, n_heads=2, d_model=size, d_hidden=6)
        training = replace(preset.training, batch_size=2, steps=4, observe_every=2)
        monkeypatch.setitem(sparse.PRESETS, name, replace(preset, model=model, training=training, seeds=2))
    return sparse


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "some text.txt"
    path.write_text("To be, or not to be: that is the question.\n" * 30, encoding="utf-8")
    return path


def test_a_run_leaves_whole_files_and_says_what_they_say(small, forked, tmp_path, text_file, capsys):
    flags = ["--data", str(text_file), "--output-dir", str(tmp_path / "out é")]
    assert small.main(flags) == 0
    names = sorted(path.name for path in (tmp_path / "out é").iterdir())
    names = [name for name in names if name not in (".lock", "README.txt", "runs")]
    assert names == ["curves.png", "expert_load.png", "results.json", "run_log.txt"]
    assert all((tmp_path / "out é" / n).read_bytes().startswith(b"\x89PNG") for n in names if n.endswith(".png"))
    record = json.loads((tmp_path / "out é" / "results.json").read_text(encoding="utf-8"))
    assert record["complete"] and [v["variant"] for v in record["variants"]] == VARIANTS
    out = capsys.readouterr().out
    assert "[12/12]" in out and "\x1b" not in out
    for run in record["runs"]:
        sees_experts = run["variant"] != "dense"
        assert [o["step"] for o in run["observations"]] == [2, 4]
        assert all(("loads" in o) == sees_experts for o in run["observations"])
        assert ("told" in run["found"]) == sees_experts
    for variant in VARIANTS[1:]:
        found = [run["found"] for run in record["runs"] if run["variant"] == variant]
        row = next(line for line in out.splitlines() if line.startswith(variant) and "%" in line)
        assert f"{sum(f['max_violation'] for f in found) / 2:.2f}" in row
        assert f"{sum(f['dropped'] for f in found) / 2:.1%}" in row
    said = " ".join(out.split())  # sentences are folded
    assert "The loss of expert choice doesn't compare" in said
    active = sorted(run["found"]["active"] for run in record["runs"])
    assert f"one token uses {active[0]:,} to {active[-1]:,}" in said
    finding = said[said.index("Validation loss against dense") :].partition(". ")[0]
    assert "top-2 + bias (" in finding and "expert choice" not in finding


def test_the_full_path_runs_on_a_cpu(small, here, tmp_path, text_file, capsys):
    flags = ["--full", "--device", "cpu", "--data", str(text_file), "--tokenizer", "bpe4k", "--seeds", "1"]
    assert small.main([*flags, "--output-dir", str(tmp_path)]) == 0
    assert "bpe4k, a vocabulary of 4,096" in capsys.readouterr().out


def test_a_diverging_run_is_named_and_the_table_still_comes(
    small, here, tmp_path, text_file, capsys, monkeypatch
):
    preset = small.PRESETS["tiny"]
    monkeypatch.setitem(small.PRESETS, "tiny", replace(preset, training=replace(preset.training, learning_rate=1e38)))
    assert small.main(["--data", str(text_file), "--seeds", "1", "--output-dir", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert (
        "FAILED: dense, seed 1: the loss became nan" in out and "failed" in out and " nan" not in out.split("MaxVio")[1]
    )


def test_by_its_path_it_refuses_in_one_line(run_here):
    status, out, err = run_here(BUILD, "--steps", "0")
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("build.py: error: ")
