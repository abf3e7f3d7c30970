"""Chapter 18: mixture of experts.

Chapter 07's GPT with its MLPs made sparse: more parameters, the same compute. Then the chapter's experiment: five
routers against a dense model of equal active parameters, and what their experts came to do.

    python build.py --tiny      on a laptop CPU, in about a minute (the default)
    python build.py --full      the same experiment at a size for one GPU, with its grouped matrix product

Shapes: B batch, T positions, C = d_model, N = B · T tokens, E experts, k = top_k, M pairs of a token and an expert
that computes it, R rows: M and the padding of the experts' slices.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, comparison, data, experiment, figures, kernels, report
from shared.console import Table
from shared.plan import Plan, Preset, make_plan
from shared.training import TrainingSettings

gpt = chapters.load_build(5)
modern = chapters.load_build(7)  # the previous chapter's GPT: everything that this one doesn't change
look = chapters.load_step(18, 9)  # the instruments that look inside a trained model

# ---------------------------------------------------------------- config


@dataclass(frozen=True)
class SparseConfig(modern.ModernConfig):
    """Chapter 07's shape with experts for the MLP; d_hidden is the width of one expert."""

    mlp_type: str = "moe"
    d_hidden: int | None = 85
    n_experts: int = 8
    top_k: int = 2
    router_type: str = "top_k"  # who chooses, one of ROUTERS
    capacity_factor: float = 1.25  # "switch": an expert takes at most so many times its fair share of tokens
    balance_weight: float = 0.01  # the auxiliary loss counts so much in what is minimised
    bias_speed: float = 0.003  # "bias": so far an expert's bias moves in one step


# ---------------------------------------------------------------- dispatch

SLICE_ROWS = 8  # libraries prepare a product anew for each new shape, which can take longer than the product


class Spread(torch.autograd.Function):
    """tokens (N, C) -> rows (R, C), row r a copy of tokens[token[r]]. Its gradient, Collect, adds in a fixed order."""

    @staticmethod
    def forward(ctx, tokens, token, place, first):
        ctx.save_for_backward(token, place, first)
        return tokens.index_select(0, token)

    @staticmethod
    def backward(ctx, grad):
        return Collect.apply(grad.contiguous(), *ctx.saved_tensors), None, None, None


class Collect(torch.autograd.Function):
    """rows (R, C) -> (N, C): each token's rows summed. Its gradient is Spread (an idle row's is undone by weight 0)."""

    @staticmethod
    def forward(ctx, rows, token, place, first):
        ctx.save_for_backward(token, place, first)
        return F.embedding_bag(place, rows, first, mode="sum")  # token n's: rows[place[first[n] : first[n + 1]]]

    @staticmethod
    def backward(ctx, grad):
        return Spread.apply(grad, *ctx.saved_tensors), None, None, None


def dispatch(tokens: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, experts: nn.ModuleList) -> torch.Tensor:
    """Σ over the chosen e of weight[n, e] · experts[e](tokens[n]): tokens (N, C) -> (N, C).

    weight (N, E), chosen (N, E) bool. Each expert runs once, on its slice: one row for every token that chose it,
    then idle rows of weight 0 up to a multiple of SLICE_ROWS.
    """
    load, count = chosen.sum(0), chosen.sum(1)  # tokens of each expert (E,), experts of each token (N,)
    slices = -(-load // SLICE_ROWS) * SLICE_ROWS
    start = slices.cumsum(0) - slices
    place = (chosen.cumsum(0) - 1 + start)[chosen]  # (M,): the row of each pair, pairs sorted by token
    sizes = slices.tolist()
    token = place.new_zeros(sum(sizes)).scatter(0, place, chosen.nonzero()[:, 0])  # (R,): the token of each row
    gates = weight.new_zeros(sum(sizes)).scatter(0, place, weight.masked_select(chosen))[:, None]  # (R, 1)
    plan = (token, place, count.cumsum(0) - count)  # (N,): where in place each token's pairs begin
    y = run_experts(experts, Spread.apply(tokens, *plan), gates, sizes)
    return Collect.apply(y.to(tokens.dtype), *plan)


def run_experts(experts: nn.ModuleList, rows: torch.Tensor, gates: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Rows (R, C) and gates (R, 1), cut into a slice of the given size for each expert -> gate · expert(row)."""
    if kernels.grouped_product_fits(rows, experts[0].gate_proj.weight.shape):
        return gates * grouped_experts(experts, rows.bfloat16(), sizes)
    slices = zip(experts, rows.split(sizes), gates.split(sizes))
    return torch.cat([gate * expert(row) for expert, row, gate in slices])  # one by one: a slice fits the cache


def grouped_experts(experts: nn.ModuleList, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """All experts in three products, in the dtype of rows (R, C): down(silu(gate(row)) · up(row)), (R, C)."""
    gate, up, down = (
        torch.stack([getattr(expert, name).weight for expert in experts]).to(rows.dtype).transpose(1, 2)
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    ends = torch.tensor(sizes, device=rows.device).cumsum(0, dtype=torch.int32)  # where each slice ends
    hidden = F.silu(F.grouped_mm(rows, gate, offs=ends)) * F.grouped_mm(rows, up, offs=ends)
    return F.grouped_mm(hidden, down, offs=ends)


# ---------------------------------------------------------------- routers


class Routing(NamedTuple):
    """What one layer's router did with N tokens."""

    logits: torch.Tensor  # (N, E) float32, with their gradient
    chosen: torch.Tensor  # (N, E) bool: which experts compute which tokens


def top_k_mask(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores (N, E) -> (N, E) bool, true at each row's k largest; of equal ones the lowest numbers win."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]  # topk doesn't promise an order of ties
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)


def expert_capacity(n_tokens: int, n_experts: int, top_k: int, capacity_factor: float) -> int:
    """How many tokens one expert takes: the fair share k · N / E times the factor, rounded up, and at least one."""
    return max(1, math.ceil(capacity_factor * top_k * n_tokens / n_experts))


class GroupedMoE(modern.MoE):
    """Chapter 07's MoE with a dispatch for its loop, and a second output: what the router did.

    Another router overrides decide(). ValueError for k = 1 with gates that sum to 1: the router would never learn.
    """

    causal = True  # whether a token's output is the same whatever comes after it
    renormalizes = True  # whether a token's gates sum to 1

    def __init__(self, cfg: modern.ModernConfig):
        super().__init__(cfg)
        if self.renormalizes and cfg.top_k == 1 < cfg.n_experts:
            raise ValueError(
                "top_k 1 with renormalised gates makes every gate the constant 1, so the router gets no gradient; "
                "use a top_k of 2 or more, or SwitchMoE"
            )

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E) and chosen (N, E) bool: the k likeliest experts, weights summing to 1."""
        probabilities = logits.softmax(-1)
        chosen = top_k_mask(probabilities, self.top_k)
        weight = probabilities * chosen
        return weight / weight.sum(-1, keepdim=True), chosen

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """x (..., C) -> (..., C), and the Routing of its N tokens."""
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):  # the router stays float32 where other products don't
            logits = F.linear(tokens.float(), self.router.weight.float())
        weight, chosen = self.decide(logits)
        return dispatch(tokens, weight, chosen, self.experts).view_as(x), Routing(logits, chosen)


class SwitchMoE(GroupedMoE):
    """One expert a token, and no expert more tokens than its capacity (Fedus et al. 2022, section 2.2).

    An expert takes tokens in their order, so none is pushed out by a later one. A token that finds its expert full
    is dropped: its output is zero, and the residual stream carries it past the layer.
    """

    renormalizes = False

    def __init__(self, cfg: SparseConfig):
        super().__init__(cfg)
        self.capacity_factor = cfg.capacity_factor
        if cfg.top_k != 1 or cfg.capacity_factor <= 0:
            given = f"got {cfg.top_k} and {cfg.capacity_factor}"
            raise ValueError(f"SwitchMoE needs top_k 1 and a capacity_factor above 0 (none would get in), {given}")

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E), the probability itself, and chosen (N, E) bool, at most one a token."""
        probabilities = logits.softmax(-1)
        wanted = top_k_mask(probabilities, self.top_k)
        chosen = wanted & (wanted.cumsum(0) <= expert_capacity(*logits.shape, self.top_k, self.capacity_factor))
        return probabilities * chosen, chosen


class BiasMoE(GroupedMoE):
    """Balance without a loss (Wang et al. 2024, DeepSeek-V3): a bias picks experts, and never weighs them."""

    def __init__(self, cfg: SparseConfig):
        super().__init__(cfg)
        self.bias_speed = cfg.bias_speed
        self.register_buffer("balance_bias", torch.zeros(cfg.n_experts))

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E) and chosen (N, E) bool: the bias is in the choice alone."""
        probabilities = logits.softmax(-1)
        chosen = top_k_mask(probabilities + self.balance_bias, self.top_k)  # the paper's scores are sigmoids
        weight = probabilities * chosen
        return weight / weight.sum(-1, keepdim=True), chosen

    @torch.no_grad()
    def update_bias(self, routing: Routing) -> None:
        """After a training step: bias_speed up for an expert whose load was below the mean, down for one above."""
        load = routing.chosen.sum(0).float()
        self.balance_bias += self.bias_speed * (load.mean() - load).sign()


class ExpertChoiceMoE(GroupedMoE):
    """Each expert takes the k · N / E tokens that want it most (Zhou et al. 2022): balanced, and not causal."""

    causal = False
    renormalizes = False

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E), the probabilities, and chosen (N, E) bool, equally many for each expert."""
        probabilities = logits.softmax(-1)
        chosen = top_k_mask(probabilities.t(), expert_capacity(*logits.shape, self.top_k, capacity_factor=1.0)).t()
        return probabilities * chosen, chosen


ROUTERS = {"top_k": GroupedMoE, "switch": SwitchMoE, "bias": BiasMoE, "expert_choice": ExpertChoiceMoE}


def switch_balance_loss(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """E · Σ f_e · P_e over the experts (Fedus et al. 2022, eq. 4) of one layer's logits (N, E).

    f_e is the part of the N · k assignments that expert e gets, P_e its mean probability: 1 at balance for any k.
    (Mixtral's convention doesn't divide f by k and has k at balance.) The gradient flows through P alone.
    """
    probabilities = logits.softmax(-1)
    fraction = top_k_mask(probabilities, top_k).float().mean(0) / top_k
    return logits.shape[-1] * (fraction * probabilities.mean(0)).sum()


# ---------------------------------------------------------------- block and model


class SparseBlock(modern.ModernBlock):
    """Chapter 07's block with experts; it hands on what the router did."""

    def make_mlp(self, cfg: SparseConfig) -> nn.Module:
        if cfg.router_type not in ROUTERS:
            raise ValueError(f"unknown router_type {cfg.router_type!r}; valid: {', '.join(ROUTERS)}")
        return ROUTERS[cfg.router_type](cfg)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """x (B, T, C) -> (B, T, C), and the Routing of its B · T tokens."""
        x = x + self.attn(self.norm1(x))
        y, routing = self.mlp(self.norm2(x))
        return x + y, routing


class SparseGPT(modern.ModernGPT):
    """Chapter 07's GPT of sparse blocks. forward() returns what it always did, forward_with_routing() more."""

    def make_block(self, cfg: SparseConfig) -> nn.Module:
        return SparseBlock(cfg)

    def forward_with_routing(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple:
        """Like forward(), with the list of the layers' Routing as a third. ValueError if T exceeds block_size."""
        if idx.shape[1] > self.cfg.block_size:
            raise ValueError(f"{idx.shape[1]} tokens don't fit a block_size of {self.cfg.block_size}")
        x, routings = self.embed(idx), []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        logits = self.lm_head(self.norm_f(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss, routings

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple:
        """Token ids (B, T) -> logits (B, T, V) and the mean cross-entropy in nats, with nothing added to it."""
        return self.forward_with_routing(idx, targets)[:2]


def active_parameters(model: nn.Module) -> int:
    """How many of the model's numbers a token meets: all but those of the experts that it doesn't use."""
    layers = [module for module in model.modules() if isinstance(module, modern.MoE)]
    idle = sum((len(moe.experts) - moe.top_k) * gpt.count_parameters(moe.experts[0]) for moe in layers)
    return gpt.count_parameters(model) - idle


def generate(model: nn.Module, idx: torch.Tensor, max_new_tokens: int, **options) -> torch.Tensor:
    """Chapter 05's generate() and its options. ValueError for a model with a layer that isn't causal."""
    for module in model.modules():
        if not getattr(module, "causal", True):
            raise ValueError(f"{type(module).__name__} can't generate: it chooses by later tokens, and has none yet")
    return gpt.generate(model, idx, max_new_tokens, **options)


# ---------------------------------------------------------------- experiment

PRESETS = {
    "tiny": Preset(SparseConfig(), TrainingSettings(observe_every=10), corpus="docs", tokenizer="char", seeds=3),
    "full": Preset(
        SparseConfig(block_size=256, n_layers=6, n_heads=6, d_model=384, d_hidden=512, bias_speed=0.001),
        TrainingSettings(
            steps=2000, batch_size=64, learning_rate=1e-3, warmup=100, final_rate=0.1, observe_every=20, autocast=True
        ),
        corpus="source", tokenizer="bpe4k", seeds=3,
    ),
}  # fmt: skip
NOT_CAUSAL = "expert choice"


def variants(cfg: SparseConfig) -> dict[str, dict]:
    """What differs from cfg; the first is the baseline. All have the same active width, top_k · d_hidden, and the
    sparse ones the same total: Switch has half as many experts, twice as wide."""
    width = cfg.top_k * cfg.d_hidden
    return {
        "dense": {"mlp_type": "swiglu", "d_hidden": width},
        "top-2 + loss": {},
        "top-2 alone": {"balance_weight": 0.0},
        "Switch + loss": {"router_type": "switch", "top_k": 1, "n_experts": cfg.n_experts // 2, "d_hidden": width},
        "top-2 + bias": {"router_type": "bias", "balance_weight": 0.0},
        NOT_CAUSAL: {"router_type": "expert_choice", "balance_weight": 0.0},
    }


class SparseOrDense(comparison.Experiment):
    """Sparse models with different routers against a dense one."""

    band = 0.04  # one rounding may send a token elsewhere: other instruction sets moved means by up to 0.015 nats

    def build_model(self, variant: str, config: dict, vocab_size: int, seed: int) -> nn.Module:
        cfg = SparseConfig(**config)
        model = (SparseGPT if cfg.mlp_type == "moe" else modern.ModernGPT)(cfg, vocab_size)
        gpt.init_parameters(model, seed, cfg.init_std)
        return model

    def training_loss(self, model: nn.Module, idx: torch.Tensor, targets: torch.Tensor) -> tuple:
        """(cross-entropy + balance_weight · the layers' mean auxiliary loss, the cross-entropy alone)."""
        if not isinstance(model, SparseGPT):
            return super().training_loss(model, idx, targets)
        _, cross_entropy, routings = model.forward_with_routing(idx, targets)
        balance = torch.stack([switch_balance_loss(r.logits, model.cfg.top_k) for r in routings]).mean()
        for block, routing in zip(model.blocks, routings):
            if isinstance(block.mlp, BiasMoE):
                block.mlp.update_bias(routing)
        return cross_entropy + model.cfg.balance_weight * balance, cross_entropy

    def observe(self, model: nn.Module, idx: torch.Tensor) -> dict:
        if not isinstance(model, SparseGPT):
            return {}
        loads = [routing.chosen.sum(0).double() for routing in model.forward_with_routing(idx)[2]]
        return {"loads": [(load / load.sum()).tolist() for load in loads]}  # as parts of 1

    def inspect(self, model: nn.Module, corpus: data.Corpus, seed: int) -> dict:
        found = {"active": active_parameters(model)}
        if isinstance(model, SparseGPT):
            untrained = self.build_model("", vars(model.cfg), model.vocab_size, seed).to(model.lm_head.weight.device)
            found |= look.look_inside(model, untrained, corpus)
        return found


def summarize(plan: Plan, results: list[comparison.Result]) -> list[str | Table]:
    """The losses, the routing, and which tokens the experts of one model get most."""
    losses = report.comparison_table(
        plan,
        results,
        labels={"model": lambda variant: variant + " (not causal)" * (variant == NOT_CAUSAL)},
        extra={"active": lambda v: report.number(comparison.mean_of(results, v, lambda r: r.found["active"]), ",.0f")},
    )
    causal = [variant for variant in plan.variants if variant not in (plan.baseline, NOT_CAUSAL)]
    pairs = [(variant, plan.baseline) for variant in causal] + [("top-2 alone", "top-2 + loss")]
    sentences = [report.difference_sentence(plan, results, *pair) for pair in pairs]
    sentences.append(report.size_and_time_sentence(results, "top-2 + loss", plan.baseline))
    sentences.append(f"The loss of {NOT_CAUSAL} doesn't compare: its router saw the tokens that were to be predicted.")
    said = "As measured in this run:\n" + "\n".join(f"- {sentence}" for sentence in sentences if sentence)
    return [losses, said, *look.describe(results, [*causal, NOT_CAUSAL], shown="top-2 + loss")]


def draw(plan: Plan, results: list[comparison.Result]) -> dict:
    """The figures of this run by file name; the loads are the first seed's."""
    first = [r for r in results if r.run.seed == plan.seeds[0] and r.history and r.found]
    return {"curves.png": figures.curves(plan, results), **look.load_figure(first)}


def main(argv: list[str] | None = None) -> int:
    here = Path(__file__).parent
    options = cli.parse(__doc__, argv, here / "outputs")
    preset = PRESETS[options.preset]
    plan = make_plan("Mixture of experts: five routers beside a dense model", preset, variants(preset.model), options)
    return experiment.carry_out(SparseOrDense, plan, summarize, draw, here / "expected")


if __name__ == "__main__":
    cli.run(main)
