"""Chapter 38 without its originals: the laws of each detail, what a config refuses, and the counts."""

import dataclasses
import functools
import math
from dataclasses import replace

import pytest
import torch

from shared import chapters

VOCABULARY = 31
SIZES = {"block_size": 24, "n_layers": 5, "n_heads": 6, "n_kv_heads": 3, "d_model": 30, "d_head": 10, "d_hidden": 14}
NAMES = list(chapters.load_build(38).RECIPES)


@pytest.fixture(scope="module")
def build():
    """Chapter 38's build.py."""
    return chapters.load_build(38)


def small(build, name: str, **changes):
    """A recipe's config at a small size, with a window that is shorter than the texts here."""
    fields = SIZES | build.RECIPES[name].changes | changes
    if fields.get("window"):
        fields["window"] = 3
    if fields.get("attention") == "latent":
        fields |= {"d_rope": 4, "n_kv_heads": 6}
    return build.DetailedConfig(**fields)


def make(build, cfg):
    """A model in float64 whose numbers, vectors included, depend on names and shapes alone."""
    model = build.DetailedGPT(cfg, VOCABULARY).double().eval()
    build.gpt.init_parameters(model, seed=1, std=0.3)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.copy_(torch.linspace(0.4, 1.4, len(p)))
        for buffer in model.buffers():
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    return model


def tokens(length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_causal_and_sees_as_far_as_its_windows_let_it(build, name):
    """Gradient of one position's logits by what every position embeds: none for later ones, nor beyond all windows."""
    model = make(build, small(build, name))
    embedded = []
    model.token_embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output.requires_grad_()))
    logits, _ = model(tokens(20))
    logits[0, 16].square().sum().backward(inputs=embedded)
    reached = embedded[0].grad[0].abs().sum(-1) > 0
    windows = [block.attn.cfg.window for block in model.blocks]
    first = 0 if None in windows else 16 - sum(window - 1 for window in windows)
    assert reached.tolist() == [first <= t <= 16 for t in range(20)]


@pytest.mark.parametrize("name", NAMES)
def test_an_untrained_recipe_guesses_evenly(build, name):
    cfg = small(build, name, embedding_scale=1.0, n_layers=2)
    model = build.DetailedGPT(cfg, VOCABULARY)
    build.init_parameters(model, seed=1)
    loss = model(tokens(9), tokens(10)[:, 1:])[1]
    assert loss.item() == pytest.approx(math.log(VOCABULARY), abs=0.2)


def test_gains_of_one_plus_w_and_sinks_start_at_nothing(build):
    gemma = build.DetailedGPT(small(build, "gemma3", n_layers=1), VOCABULARY)
    oss = build.DetailedGPT(small(build, "gpt-oss", n_layers=1), VOCABULARY)
    for model in (gemma, oss):
        build.init_parameters(model, seed=1)
    assert all(m.weight.eq(0).all() for m in gemma.modules() if isinstance(m, build.GainPlusOne))
    assert all(block.attn.sinks.eq(0).all() for block in oss.blocks)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_can_be_trained_in_bfloat16_and_copied(build, name):
    """Positions stay exact: a model in bfloat16 turns by tables in float32."""
    model = build.DetailedGPT(small(build, name, n_layers=2), VOCABULARY)
    build.init_parameters(model, seed=1)
    loss = model.bfloat16()(tokens(9), tokens(9))[1]
    loss.backward()
    assert torch.isfinite(loss)
    for block in model.blocks:
        assert block.attn.cos is None or block.attn.cos.dtype == torch.float32


# ---------------------------------------------------------------- laws of the details


def test_visible_by_hand(build):
    all_past = build.visible(2, 4, None, torch.device("cpu"))
    window = build.visible(4, 4, 2, torch.device("cpu"))
    assert all_past.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert window.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_a_soft_cap_leaves_small_numbers_and_holds_large_ones(build):
    x = torch.tensor([-1e9, -1e-3, 0.0, 1e-3, 1e9], dtype=torch.float64)
    torch.testing.assert_close(build.softcap(x, 30.0)[1:4], x[1:4], rtol=1e-8, atol=0)
    assert build.softcap(x, 30.0).abs().max() <= 30
    assert build.softcap(x, None) is x


def test_a_sink_takes_what_the_keys_leave(build):
    attention = build.SinkAttention(small(build, "gpt-oss"))
    scores = torch.randn(2, 6, 4, 5, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        attention.sinks.copy_(torch.arange(6.0) - 3)
        weights = attention.weigh(scores)
    assert weights.shape == scores.shape
    taken = attention.sinks.exp().view(1, 6, 1) / (attention.sinks.exp().view(1, 6, 1) + scores.exp().sum(-1))
    torch.testing.assert_close(weights.sum(-1), 1 - taken)


def test_without_gains_a_norm_may_come_before_or_after_the_turn(build):
    cfg = small(build, "nanochat")
    before = make(build, replace(cfg, attention="head norm"))
    after = make(build, cfg)
    torch.testing.assert_close(before(tokens(9))[0], after(tokens(9))[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["RopeScaling", "NTKScaling", "Llama3Scaling", "YaRNScaling"])
def test_scaling_slows_the_slowest_pair_and_keeps_the_fastest(build, kind):
    trained = {"trained": 2_000} if kind in ("Llama3Scaling", "YaRNScaling") else {}
    scaling = getattr(build, kind)(factor=8.0, **trained)
    slowed = build.rope_speeds(10_000.0, 64) / scaling.speeds(10_000.0, 64)
    fastest = 8.0 if kind == "RopeScaling" else 1.0  # linear scaling slows all alike
    assert slowed[0].item() == pytest.approx(fastest)
    assert slowed[-1].item() == pytest.approx(8.0)
    assert (slowed.diff() >= -1e-12).all()


def test_llama3_mixes_as_yarn_is_written_and_not_as_it_is_programmed(build):
    """By the number of turns (Peng et al. 2023, section 3.2) with the ends 1 and 4; YaRN's code goes by the pair."""
    llama = build.Llama3Scaling(factor=8.0, trained=2_000).speeds(10_000.0, 64)
    yarn = build.YaRNScaling(factor=8.0, trained=2_000, fast=4.0, slow=1.0, whole=False).speeds(10_000.0, 64)
    differ = (llama / yarn - 1).abs() > 1e-9
    turns = 2_000 * build.rope_speeds(10_000.0, 64) / (2 * math.pi)
    assert differ.tolist() == ((turns > 1) & (turns < 4)).tolist()


def test_a_balance_bias_moves_the_choice_and_not_the_gates(build):
    cfg = small(build, "deepseek-v3", n_experts=6, top_k=2, n_groups=3, top_groups=3, renormalise=False, gate_scale=1.0)
    moe = build.SigmoidMoE(cfg).double()
    x = torch.randn(7, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moe.balance_bias[4] = 10.0
    gates, chosen = moe.route(x)
    assert (chosen[:, 0] == 4).all()
    torch.testing.assert_close(gates, moe.router(x).sigmoid().gather(1, chosen))


def test_a_token_stays_within_its_groups(build):
    cfg = small(build, "deepseek-v3", n_experts=15, top_k=4, n_groups=5, top_groups=2)
    moe = build.SigmoidMoE(cfg).double()
    x = torch.randn(50, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, chosen = moe.route(x)
    assert all(len(set(row)) <= 2 for row in (chosen // 3).tolist())


def test_of_equal_experts_the_lowest_numbers_are_chosen(build):
    cfg = small(build, "deepseek-v3", n_experts=12, top_k=3, n_groups=4, top_groups=2)
    moe = build.SigmoidMoE(cfg)
    torch.nn.init.zeros_(moe.router.weight)
    assert moe.route(torch.ones(2, 30))[1].tolist() == [[0, 1, 2]] * 2


# ---------------------------------------------------------------- counts


def rounds_to(count: int, published: str) -> bool:
    """Whether a count is what was published, which may be rounded or cut off: less than one in its last digit away."""
    unit = {"B": 1e9, "M": 1e6}.get(published[-1], 1)
    digits = published.rstrip("BM").replace(",", "")
    last = unit * 10.0 ** -len(digits.partition(".")[2])
    return abs(count - unit * float(digits)) < last


def test_rounds_to():
    assert rounds_to(7_615_616_512, "7.61B") and rounds_to(7_605_000_000, "7.61B") and rounds_to(12, "12")
    assert not rounds_to(7_625_616_512, "7.61B") and not rounds_to(13, "12")


@pytest.mark.parametrize("name", NAMES)
def test_counts_at_the_published_shape_are_the_published_ones(build, name, monkeypatch):
    """Without starts for the 47,000 matrices of a DeepSeek-V3, which take half of the time and don't count."""
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda matrix: None)
    published = build.PUBLISHED[name]
    shown = {counted: (here, theirs) for counted, here, theirs in build.counts_table(name).rows}
    for counted, said in {
        "parameters": published.parameters,
        "without embedding and head": published.inner,
        "that a token uses": published.active,
    }.items():
        if said:
            here, theirs = shown[counted]
            left_out = 0
            if name == "gpt-oss" and counted == "that a token uses":  # its makers leave the embedding out
                left_out = published.vocab_size * published.shape["d_model"]
            assert theirs == said and rounds_to(int(here.replace(",", "")) - left_out, said)


def test_every_recipe_has_a_published_shape(build):
    assert list(build.PUBLISHED) == list(build.RECIPES)


def test_the_cache_by_hand(build):
    """Gemma 2: 2 · 8 heads · 256 numbers a layer, in 21 layers for 4,096 tokens at most. DeepSeek-V3: 576 a layer."""
    gemma = build.at_published_shape("gemma2")
    assert build.cache_bytes(gemma, 1) == 2 * 42 * 2 * 8 * 256
    assert build.cache_bytes(gemma, 8_192) == 2 * 21 * (4_096 + 8_192) * 2 * 8 * 256
    layer = build.LatentAttention(build.DetailedConfig(attention="latent", kv_rank=512, d_rope=64, d_head=192))
    assert layer.n_cached == 576


def test_keys_and_values_can_be_made_of_what_the_latent_cache_keeps(build):
    """A text in three pieces: what each leaves in the cache, side by side, gives the keys and values of the whole."""
    attention = make(build, small(build, "deepseek-v3", n_layers=1)).blocks[0].attn
    x = torch.randn(2, 9, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pieces = [attention.shorten(x[:, start:end], start) for start, end in ((0, 4), (4, 5), (5, 9))]
    kept = [torch.cat(parts, dim=1) for parts in zip(*pieces)]
    assert sum(part.shape[-1] for part in kept) == attention.n_cached
    _, keys, values = attention.heads(x)
    k, v = attention.lengthen(*kept)
    torch.testing.assert_close(k, keys, rtol=0, atol=1e-12)
    torch.testing.assert_close(v, values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_can_be_read_in_pieces(build, name):
    """Heads are made with the position where a piece begins, and mix() takes the queries for the last positions."""
    attention = make(build, small(build, name, n_layers=1)).blocks[0].attn
    x = torch.randn(2, 9, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first, last = attention.heads(x[:, :6]), attention.heads(x[:, 6:], start=6)
    keys, values = (torch.cat(parts, dim=2) for parts in zip(first[1:], last[1:]))
    torch.testing.assert_close(attention.mix(last[0], keys, values), attention(x)[:, 6:], rtol=0, atol=1e-12)


# ---------------------------------------------------------------- the config


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"norm_place": "behind"}, "unknown norm_place 'behind'; valid: before, after, both, parallel"),
        ({"layer_kinds": ("full", "local")}, "unknown kind of layer 'local'"),
        ({"layer_kinds": ("window",)}, "window is None"),
        ({"n_experts": 7, "n_groups": 2}, "7 experts don't make 2 equal groups"),
        ({"n_experts": 8, "n_groups": 2, "top_groups": 3}, "of which a token chooses 3"),
        ({"rotated": 0.2}, "RoPE can't turn 3 of 16 channels in pairs"),
        ({"rotated": 1.5}, "RoPE can't turn 24 of 16 channels in pairs"),
        ({"attention": "latent", "d_rope": 18}, "RoPE can't turn 18 of 16 channels in pairs"),
    ],
)
def test_a_config_refuses_what_it_does_not_know(build, changes, said):
    with pytest.raises(ValueError) as error:
        build.DetailedConfig(**changes)
    assert said in str(error.value)


def test_as_it_stands_the_config_is_chapter_37s_model(build):
    """Same names, same numbers, same logits."""
    sizes = {"block_size": 16, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "d_model": 24, "d_hidden": 20}
    theirs = build.real.RealGPT(build.real.GroupedConfig(**sizes), VOCABULARY)
    build.gpt.init_parameters(theirs, seed=1, std=0.3)
    ours = build.DetailedGPT(build.DetailedConfig(**sizes), VOCABULARY)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(tokens(11))[0], theirs(tokens(11))[0], rtol=0, atol=1e-5)


# Of each field a value that must change the model, and what must hold for it to matter.
MOE = {"mlp_type": "moe", "n_experts": 6, "top_k": 2}
SIGMOID = MOE | {"router": "sigmoid", "n_groups": 3, "top_groups": 2}
LATENT = {"attention": "latent", "d_rope": 4, "n_kv_heads": 6}
WINDOW = {"layer_kinds": ("window",), "window": 3}
OTHER = {
    "block_size": (16, {"position_type": "learned"}),
    "n_layers": (2, {}),
    "n_heads": (3, {}),
    "d_model": (36, {}),
    "bias": (True, {}),
    "norm_type": ("layernorm", {}),
    "mlp_type": ("relu2", {}),
    "position_type": ("none", {}),
    "norm_eps": (1e-2, {}),
    "d_hidden": (15, {}),
    "multiple_of": (64, {"d_hidden": None}),
    "rope_base": (50.0, {}),
    "n_experts": (7, MOE),
    "top_k": (3, MOE),
    "n_kv_heads": (2, {}),
    "tied": (False, {}),
    "norm_place": ("after", {}),
    "norm_gain": ("1 + w", {}),
    "norm_bias": (False, {"norm_type": "layernorm"}),
    "attention": ("sink", {}),
    "d_head": (8, {}),
    "qkv_bias": (True, {}),
    "layer_kinds": (("no positions",), {}),
    "window": (4, WINDOW),
    "score_scale": (0.9, {}),
    "score_cap": (0.5, {}),
    "rotated": (0.4, {}),
    "window_rope_base": (50.0, WINDOW),
    "rope_scaling": ("linear", {}),
    "q_rank": (11, LATENT),
    "kv_rank": (11, LATENT),
    "d_rope": (6, LATENT),
    "d_value": (11, LATENT),
    "activation": ("gelu_tanh", {}),
    "gated_mlp": ("clamped", {}),
    "router": ("sigmoid", MOE),
    "d_expert": (9, MOE),
    "n_dense_layers": (2, MOE),
    "n_shared_experts": (1, MOE),
    "renormalise": (False, MOE),
    "gate_scale": (2.0, MOE),
    "n_groups": (2, SIGMOID),
    "top_groups": (1, SIGMOID),
    "embedding_scale": ("sqrt", {}),
    "embedding_norm": (True, {}),
    "residual_scale": (0.5, {}),
    "logit_scale": (0.5, {}),
    "logit_cap": (0.5, {}),
}
STARTS = {"init_std"}  # read where parameters get their start, by the experiment


@functools.cache
def effect(cfg) -> tuple[dict, list]:
    """What a config leads to: names and shapes, and logits."""
    model = make(chapters.load_build(38), cfg)
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    return shapes, model(tokens(7))[0].tolist()


@pytest.mark.parametrize("field", OTHER)
def test_every_field_of_the_config_is_read(build, field):
    value, holds = OTHER[field]
    if field == "rope_scaling":
        value = build.RopeScaling(4.0)
    base = build.DetailedConfig(**SIZES | {"n_layers": 3} | holds)
    assert effect(replace(base, **{field: value})) != effect(base)


def test_the_same_config_has_the_same_effect(build):
    base = build.DetailedConfig(**SIZES | {"n_layers": 3})
    assert effect.__wrapped__(base) == effect.__wrapped__(base)


def test_no_field_is_forgotten_above(build):
    assert {field.name for field in dataclasses.fields(build.DetailedConfig)} == set(OTHER) | STARTS


# ---------------------------------------------------------------- the command


def test_the_command_shows_recipes(build, capsys):
    assert build.main(["--show"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in NAMES)
    assert build.main(["--show", "gemma2"]) == 0
    assert capsys.readouterr().out.count("8,324,201,984") == 2
