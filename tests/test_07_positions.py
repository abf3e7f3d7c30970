"""Chapter 07's RoPE: known values, an independent form, its laws, and the traps of precision."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from shared.randomness import generator


def noise(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=generator(7, "rope", shape), dtype=dtype)


def at(table, position):
    return tuple(half[position : position + 1] for half in table)


def apply_rope_half_split(x, cos, sin):
    """Another layout (Hugging Face's Llama): the same turns, but channel i is paired with i + D/2."""
    x0, x1 = x.chunk(2, dim=-1)
    return torch.cat((x0 * cos - x1 * sin, x1 * cos + x0 * sin), dim=-1)


def exact_rotation(x, position, base=10_000.0):
    """Pair i of x (D) as a complex number times e^(i·position·base^(−2i/D)), in float64."""
    D = len(x)
    angles = position * base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    turned = torch.view_as_complex(x.double().view(-1, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten()


def test_known_values_of_both_layouts(modern):
    x, table = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), at(modern.build_rope_cache(5, 4), 3)
    assert modern.apply_rope(x, *table)[0].tolist() == pytest.approx(
        [-1.2722325, -1.8388650, 2.8786681, 4.0881866], abs=3e-7
    )
    assert apply_rope_half_split(x, *table)[0].tolist() == pytest.approx(
        [-1.4133525, 1.8791181, -2.8288575, 4.0581911], abs=3e-7
    )


def test_rotate_half_is_a_quarter_turn(modern):
    assert modern.rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [-2.0, 1.0, -4.0, 3.0]


@pytest.mark.parametrize(("D", "base"), [(2, 10_000.0), (6, 500.0), (64, 100_000.0)])
def test_every_position_is_the_complex_rotation(modern, D, base):
    x = noise(D)
    turned = modern.apply_rope(x.expand(13, D), *modern.build_rope_cache(13, D, base=base))
    for position in range(13):
        assert (turned[position] - exact_rotation(x, position, base)).abs().max() < 1e-6


def test_the_layouts_are_one_rotation_under_a_permutation_and_position_0_cannot_tell_them_apart(modern):
    x, table = noise(2, 3, 7, 10), modern.build_rope_cache(7, 10)
    order = torch.cat((torch.arange(0, 10, 2), torch.arange(1, 10, 2)))
    turned = modern.apply_rope(x, *table)
    assert torch.equal(apply_rope_half_split(x[..., order], *table), turned[..., order])
    mixed = apply_rope_half_split(x, *table)
    assert (
        torch.equal(mixed[..., 0, :], turned[..., 0, :])
        and (mixed - turned)[..., 1:, :].abs().amax((0, 1, 3)).min() > 0.1
    )


def test_identity_at_0_and_lengths_everywhere(modern):
    x = noise(2, 3, 9, 8)
    turned = modern.apply_rope(x, *modern.build_rope_cache(9, 8))
    assert torch.equal(turned[..., 0, :], x[..., 0, :])
    assert (turned.norm(dim=-1) - x.norm(dim=-1)).abs().max() < 1e-6


def test_scores_depend_on_distance_alone_to_a_million(modern):
    table = modern.build_rope_cache(1_000_006, 8)
    q, k = (F.normalize(noise(8, dtype=torch.float32), dim=0) for _ in "qk")
    k = k.flip(0)
    scores = [
        (modern.apply_rope(q[None], *at(table, m + 5)) @ modern.apply_rope(k[None], *at(table, m)).T).item()
        for m in (0, 1, 17, 1_000, 100_000, 999_999, 1_000_000)
    ]
    law = (exact_rotation(q, 5) @ k.double()).item()
    assert scores == pytest.approx([law] * 7, abs=1e-5)


def test_angles_are_exact_where_float32_and_bfloat16_are_not(modern):
    table = modern.build_rope_cache(100_001, 64)
    frequency = 10_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    for position, bounds in ((1_000, (1e-6, 1)), (100_000, (5e-4, 1))):
        exact = (position * frequency).cos()
        assert (table[0][position].double() - exact).abs().max() < 1e-7
        narrow = (torch.tensor(float(position)) * frequency.float()).cos()
        assert bounds[0] < (narrow.double() - exact).abs().max() < bounds[1]
    coarse = (1_000 * frequency.bfloat16().double()).cos()
    assert (coarse - (1_000 * frequency).cos()).abs().max() > 0.25  # of a cosine: garbage


def test_an_odd_head_and_a_position_past_the_table_are_refused_with_both_numbers(modern):
    with pytest.raises(ValueError, match="got 7"):
        modern.build_rope_cache(5, 7)
    with pytest.raises(ValueError, match="6 positions don't fit a RoPE table of 5"):
        modern.apply_rope(torch.ones(6, 4), *modern.build_rope_cache(5, 4))
    with pytest.raises(ValueError, match="got 5"):
        modern.ModernGPT(modern.ModernConfig(d_model=15, n_heads=3, position_type="rope"), 23)


# ---------------------------------------------------------------- in the model


def rotary_model(modern, **config):
    shape = {"block_size": 11, "n_layers": 2, "n_heads": 3, "d_model": 24, "position_type": "rope"}
    model = modern.ModernGPT(modern.ModernConfig(**{**shape, **config}), 23)
    modern.gpt.init_parameters(model, seed=1)
    return model


def test_rotary_attention_written_out_by_hand(modern):
    """Scores between rotated rows of the plain projections, one pair of positions at a time, forward and gradient."""
    attention = rotary_model(modern, rope_base=300.0).blocks[0].attn.double()
    x = noise(2, 5, 24).requires_grad_()
    q, k, v = ((x @ w.T + b) for w, b in zip(attention.qkv.weight.split(24), attention.qkv.bias.split(24)))
    rows = []
    for h in range(3):
        channels = slice(8 * h, 8 * h + 8)
        for t in range(5):
            scores = [
                [
                    sum(exact_rotation(q[b, t, channels], t - s, 300.0) * k[b, s, channels]) / math.sqrt(8)
                    for s in range(t + 1)
                ]
                for b in range(2)
            ]
            weights = torch.stack([torch.stack(row) for row in scores]).softmax(-1)
            rows.append(torch.einsum("bs,bsd->bd", weights, v[:, : t + 1, channels]))
    heads = torch.stack(rows, dim=1).view(2, 3, 5, 8).transpose(1, 2).flatten(2)
    reference = heads @ attention.proj.weight.T + attention.proj.bias
    ours = attention(x)
    assert (ours - reference).abs().max() < 1e-7  # the tables are float32
    inputs, upstream = [x, attention.qkv.weight, attention.qkv.bias], noise(5, 2, 24).transpose(0, 1)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(reference, inputs, upstream)
    ):
        assert (mine - theirs).abs().max() < 1e-5


def test_the_tables_stay_float32_and_out_of_the_state_dict(modern):
    model = rotary_model(modern)
    before = [block.attn.cos.clone() for block in model.blocks]
    assert not [name for name in model.state_dict() if "cos" in name or "sin" in name]
    for narrow in (copy.deepcopy(model).bfloat16(), copy.deepcopy(model).half(), copy.deepcopy(model).to("cpu")):
        for block, cos in zip(narrow.blocks, before):
            assert block.attn.cos.dtype == block.attn.sin.dtype == torch.float32 and torch.equal(block.attn.cos, cos)
    q, _, _ = copy.deepcopy(model).bfloat16().blocks[0].attn.heads(noise(1, 4, 24).bfloat16())
    assert q.dtype == torch.bfloat16


def test_a_longer_table_takes_the_same_weights_and_learned_positions_do_not(modern):
    short, long = rotary_model(modern), rotary_model(modern, block_size=29)
    long.load_state_dict(short.state_dict())
    idx = torch.randint(23, (2, 11), generator=generator(1, "idx"))
    assert torch.allclose(long(idx)[0], short(idx)[0], atol=1e-6)
    with pytest.raises(RuntimeError, match="position_embedding"):
        rotary_model(modern, position_type="learned", block_size=29).load_state_dict(
            rotary_model(modern, position_type="learned").state_dict()
        )


def test_the_model_sees_order_through_rope_and_not_without_positions(modern):
    idx = torch.randint(23, (1, 9), generator=generator(1, "idx"))
    swapped = idx.clone()
    swapped[0, [1, 4]] = idx[0, [4, 1]]
    for position_type, sees in (("rope", True), ("learned", True), ("none", False)):
        model = rotary_model(modern, position_type=position_type, n_layers=1).double()
        change = (model(swapped)[0] - model(idx)[0])[0, -1].abs().max().item()
        assert (change > 1e-9) is sees


def test_the_head_stays_tied_through_build_load_move_and_copy(modern):
    model = rotary_model(modern)
    loaded = rotary_model(modern)
    loaded.load_state_dict(model.state_dict())
    for m in (model, loaded, copy.deepcopy(model), copy.deepcopy(model).to(torch.bfloat16)):
        assert m.lm_head.weight is m.token_embedding.weight
