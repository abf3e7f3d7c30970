"""Chapter 18: mixture of experts.

Chapter 07's GPT with sparse MLPs: more parameters, the same compute. Then the chapter's experiment:
five routers against a dense model of equal active parameters, and what their experts came to do.

    python build.py --tiny      on a laptop CPU, in about a minute (the default)
    python build.py --full      the same experiment at a size for one GPU

The layers and the model are the same code as in the steps, where each is explained. If you know
them, read on from "looking inside" and "experiment".

Shapes: B batch, T positions, C = d_model, N = B · T tokens, E experts, k = top_k, M pairs of a
token and an expert that computes it, R rows: M and the idle rows of the experts' slices.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, data, figures, report, runs
from shared.cli import Plan, Preset, Variant
from shared.console import Table
from shared.training import TrainingSettings

import torch
import torch.nn as nn
import torch.nn.functional as F

gpt = chapters.load_build(5)
modern = chapters.load_build(7)  # the previous chapter's GPT: what this chapter doesn't change

# ---------------------------------------------------------------- config


@dataclass(frozen=True)
class SparseConfig(modern.ModernConfig):
    """Chapter 07's shape with experts for the MLP; d_hidden is the width of one expert."""

    mlp_type: str = "moe"
    d_hidden: int | None = 85
    n_experts: int = 8
    top_k: int = 2
    router_type: str = "top_k"  # who chooses, one of ROUTERS
    capacity_factor: float = 1.25  # "switch": capacity = this times the fair share
    balance_weight: float = 0.01  # the weight of the balance loss in what is minimised
    bias_speed: float = 0.003  # "bias": how far an expert's bias moves after each step


# ---------------------------------------------------------------- dispatch

# Row counts are rounded up to a multiple of this, so that few different shapes occur: a library
# prepares the product of each new shape, which can take longer than the product.
SLICE_ROWS = 8


class Slices(NamedTuple):
    """Which row belongs to which token and expert: all slices, one after another."""

    sizes: list[int]  # E numbers: the rows of each expert's slice
    token: torch.Tensor  # (R,): the token of each row; an idle row names token 0
    place: torch.Tensor  # (M,): the row of each pair, in the tokens' order: 0A 0B 1A 2B 3A 3B
    first: torch.Tensor  # (N,): where in place each token's pairs begin, for Collect to add them


def make_slices(chosen: torch.Tensor) -> Slices:
    """chosen (N, E) bool -> the Slices in which each expert finds the tokens that chose it."""
    load = chosen.sum(0)  # (E,): tokens of each expert
    eights = (load + SLICE_ROWS - 1) // SLICE_ROWS  # (E,): load / 8, rounded up
    rows = eights * SLICE_ROWS  # (E,): rows of each slice
    start = rows.cumsum(0) - rows  # (E,): the row where each slice begins
    rank = chosen.cumsum(0) - 1  # (N, E): how many tokens stand before this one in the slice
    row = start + rank  # (N, E): the row of each token in each slice, if it chose that expert
    place = row[chosen]  # (M,): the rows of the pairs, token by token

    sizes = rows.tolist()
    owner = chosen.nonzero()[:, 0]  # (M,): the token of each pair
    token = place.new_zeros(sum(sizes))  # (R,): idle rows keep the 0
    token[place] = owner

    count = chosen.sum(1)  # (N,): pairs of each token
    first = count.cumsum(0) - count  # (N,): how many pairs the tokens before this one have
    return Slices(sizes, token, place, first)


class Spread(torch.autograd.Function):
    """tokens (N, C) -> rows (R, C): row r is a copy of token number token[r].

    Its gradient is Collect. Autograd's own gradient of tokens[token] would add the rows
    one by one, on a GPU in any order, so that two runs may differ in the last bits.
    """

    @staticmethod
    def forward(ctx, tokens, token, place, first):
        ctx.save_for_backward(token, place, first)
        return tokens.index_select(0, token)

    @staticmethod
    def backward(ctx, grad):
        gradient = Collect.apply(grad.contiguous(), *ctx.saved_tensors)
        return gradient, None, None, None  # none for token, place and first


class Collect(torch.autograd.Function):
    """rows (R, C) -> (N, C): for each token the sum of its rows. Its gradient is Spread.

    embedding_bag sums groups of unequal size: group n is rows[place[first[n] : first[n + 1]]].
    Going back, idle rows get the gradient of token 0; their gate is 0, so it comes to nothing.
    """

    @staticmethod
    def forward(ctx, rows, token, place, first):
        ctx.save_for_backward(token, place, first)
        return F.embedding_bag(place, rows, first, mode="sum")

    @staticmethod
    def backward(ctx, grad):
        gradient = Spread.apply(grad, *ctx.saved_tensors)
        return gradient, None, None, None


def run_experts(
    experts: nn.ModuleList, rows: torch.Tensor, gates: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    """Each expert once, on its slice of rows (R, C): gate · expert(row), (R, C). gates (R, 1)."""
    slices = zip(experts, rows.split(sizes), gates.split(sizes))
    return torch.cat([gate * expert(row) for expert, row, gate in slices])


def dispatch_in_groups(
    tokens: torch.Tensor,  # (N, C)
    weight: torch.Tensor,  # (N, E): the gates
    chosen: torch.Tensor,  # (N, E) bool
    experts: nn.ModuleList,
    run: Callable = run_experts,  # computes all slices
) -> torch.Tensor:
    """Token n's output, (N, C): Σ over its chosen e of weight[n, e] · experts[e](tokens[n])."""
    sizes, token, place, first = make_slices(chosen)
    gate = weight.masked_select(chosen)  # (M,): the gate of each pair
    gates = weight.new_zeros(len(token))  # (R,): idle rows keep the 0
    gates[place] = gate
    rows = Spread.apply(tokens, token, place, first)  # (R, C)
    y = run(experts, rows, gates[:, None], sizes)  # (R, C), in bfloat16 under autocast
    return Collect.apply(y.to(tokens.dtype), token, place, first)


def grouped_product_fits(
    device_type: str, capability: tuple[int, int], dtype: torch.dtype, weight_shape: torch.Size
) -> bool:
    """Whether F.grouped_mm has a kernel of its own for such a device, dtype and weight.

    It has one for bfloat16 on NVIDIA GPUs of compute capability 9 and 10, if each row of a weight
    is a whole number of 16-byte words, which 8 numbers fill. Elsewhere it is a loop of its own.
    """
    has_kernel = device_type == "cuda" and capability[0] in (9, 10)
    aligned = all(size % 8 == 0 for size in weight_shape)
    return has_kernel and dtype == torch.bfloat16 and aligned


def run_grouped(
    experts: nn.ModuleList, rows: torch.Tensor, gates: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    """What run_experts() computes, for all experts in three products, in bfloat16."""
    return gates * grouped_experts(experts, rows.bfloat16(), sizes)


def grouped_experts(experts: nn.ModuleList, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """down(silu(gate(row)) · up(row)) in the dtype of rows (R, C) -> (R, C).

    An expert without rows gets a slice of zeros: on capability 10 F.grouped_mm gave the weights of
    empty slices gradients that are not zero (pytorch issue 172439).
    """
    zeros = rows.new_zeros(SLICE_ROWS, rows.shape[1])
    slices = [part if len(part) else zeros for part in rows.split(sizes)]
    filled = [len(part) for part in slices]
    x = torch.cat(slices)
    ends = torch.tensor(filled, device=x.device).cumsum(0, dtype=torch.int32)  # where slices end

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        weights = torch.stack([getattr(expert, name).weight for expert in experts])
        return F.grouped_mm(x, weights.to(x.dtype).transpose(1, 2), offs=ends)

    hidden = F.silu(product(x, "gate_proj")) * product(x, "up_proj")
    y = product(hidden, "down_proj").split(filled)
    return torch.cat([part[:size] for part, size in zip(y, sizes)])  # without the zeros


def dispatch(
    tokens: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, experts: nn.ModuleList
) -> torch.Tensor:
    """dispatch_in_groups(), with the grouped product on a GPU that has a kernel for it."""
    kind = tokens.device.type
    capability = (0, 0)
    if kind == "cuda":
        capability = torch.cuda.get_device_capability(tokens.device)
    dtype = tokens.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    fits = grouped_product_fits(kind, capability, dtype, experts[0].gate_proj.weight.shape)
    run = run_grouped if fits else run_experts
    return dispatch_in_groups(tokens, weight, chosen, experts, run)


# ---------------------------------------------------------------- routers


class Routing(NamedTuple):
    """What one layer's router did with N tokens."""

    logits: torch.Tensor  # (N, E) float32, with their gradient
    chosen: torch.Tensor  # (N, E) bool: which experts compute which tokens


def top_k_mask(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores (N, E) -> (N, E) bool, true at each row's k largest.

    Of equal scores the lowest expert numbers win: a stable sort promises that, torch.topk doesn't.
    """
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]  # (N, k): experts
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter(1, best, True)  # true in the columns that best names


def expert_capacity(n_tokens: int, n_experts: int, top_k: int, capacity_factor: float) -> int:
    """How many tokens an expert takes: capacity_factor · k · N / E, rounded up, at least one."""
    share = capacity_factor * top_k * n_tokens / n_experts
    # round() first: in floats 1.1 · 50 / 5 is 11.000000000000002, which would become 12.
    return max(1, math.ceil(round(share, 9)))


class GroupedMoE(modern.MoE):
    """Chapter 07's MoE with a dispatch for its loop, and a second output: what the router did.

    Another router overrides decide().
    """

    causal = True  # whether exchanging later tokens for others leaves a token's output as it is

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E), each row's sum 1, and chosen (N, E) bool: the best k."""
        probabilities = logits.softmax(-1)
        chosen = top_k_mask(probabilities, self.top_k)
        weight = probabilities * chosen
        return weight / weight.sum(-1, keepdim=True), chosen

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """x (..., C) -> (..., C), and the Routing of its N tokens."""
        tokens = x.reshape(-1, x.shape[-1])
        # Autocast would turn the router's product to bfloat16, too coarse to choose by (step 12).
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(tokens.float(), self.router.weight.float())
        weight, chosen = self.decide(logits)
        y = dispatch(tokens, weight, chosen, self.experts)
        return y.view_as(x), Routing(logits, chosen)


class SwitchMoE(GroupedMoE):
    """One expert a token, and in training a limit for each expert (Fedus et al. 2022, section 2.2).

    A full expert takes no more tokens. A token that finds its expert full is dropped: the layer's
    output for it is zero, and the residual stream carries it past the layer. Tokens are served in
    their order, so no later token pushes an earlier one out; but how many are served grows with
    how many there are. In evaluation nothing is dropped: a token's output depends on it alone.
    """

    fewest = 1  # its gate is no constant, so one expert a token will do

    def __init__(self, cfg: SparseConfig):
        super().__init__(cfg)
        self.capacity_factor = cfg.capacity_factor
        if cfg.top_k != 1 or cfg.capacity_factor <= 0:
            raise ValueError(
                "SwitchMoE needs top_k 1 and a capacity_factor above 0 (none would get in), "
                f"got {cfg.top_k} and {cfg.capacity_factor}"
            )

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E), the probability itself; chosen (N, E), at most one."""
        probabilities = logits.softmax(-1)
        chosen = top_k_mask(probabilities, self.top_k)
        if self.training:
            n_tokens, n_experts = logits.shape
            capacity = expert_capacity(n_tokens, n_experts, self.top_k, self.capacity_factor)
            queue_position = chosen.cumsum(0)  # (N, E): 1 for the first token of an expert
            chosen = chosen & (queue_position <= capacity)
        return probabilities * chosen, chosen


class BiasMoE(GroupedMoE):
    """Balance without a loss (Wang et al. 2024, DeepSeek-V3): each expert has a bias.

    The bias enters the choice, not the gate. The paper adds it to sigmoids; here it is added to the
    softmax, so that nothing else changes.
    """

    def __init__(self, cfg: SparseConfig):
        super().__init__(cfg)
        self.bias_speed = cfg.bias_speed
        self.register_buffer("balance_bias", torch.zeros(cfg.n_experts))

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E) without the bias, and chosen (N, E) bool with it."""
        probabilities = logits.softmax(-1)
        chosen = top_k_mask(probabilities + self.balance_bias, self.top_k)
        weight = probabilities * chosen
        return weight / weight.sum(-1, keepdim=True), chosen

    @torch.no_grad()
    def update_bias(self, routing: Routing) -> None:
        """After a training step: up by bias_speed if the load was below the mean, down if above."""
        load = routing.chosen.sum(0).float()
        self.balance_bias += self.bias_speed * (load.mean() - load).sign()


class ExpertChoiceMoE(GroupedMoE):
    """Each expert takes the k · N / E tokens that want it most (Zhou et al. 2022).

    Always balanced, and not causal: a later token can take an earlier one's place.
    """

    causal = False
    fewest = 1  # its gate is no constant, so one expert a token will do

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E), the probabilities, and chosen (N, E), equal loads."""
        n_tokens, n_experts = logits.shape
        probabilities = logits.softmax(-1)
        share = expert_capacity(n_tokens, n_experts, self.top_k, capacity_factor=1.0)
        by_expert = top_k_mask(probabilities.t(), share)  # (E, N): each row an expert's choice
        chosen = by_expert.t()
        return probabilities * chosen, chosen


ROUTERS = {
    "top_k": GroupedMoE,
    "switch": SwitchMoE,
    "bias": BiasMoE,
    "expert_choice": ExpertChoiceMoE,
}


def switch_balance_loss(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """E · Σ f_e · P_e over the experts (Fedus et al. 2022, eq. 4) of one layer's logits (N, E).

    f_e is the part of the N · k choices that fall on expert e, P_e its mean probability. At balance
    the loss is 1 for any k. (Mixtral's doesn't divide f by k, and is k at balance.) f counts
    choices, and a count has no gradient: the gradient flows through P alone.
    """
    n_experts = logits.shape[-1]
    probabilities = logits.softmax(-1)
    chosen = top_k_mask(probabilities, top_k).float()  # (N, E)
    f = chosen.mean(0) / top_k  # (E,)
    P = probabilities.mean(0)  # (E,)
    return n_experts * (f * P).sum()


# ---------------------------------------------------------------- block and model


class SparseBlock(modern.ModernBlock):
    """Chapter 07's block with experts; it also returns what the router did."""

    def make_mlp(self, cfg: SparseConfig) -> nn.Module:
        if cfg.router_type not in ROUTERS:
            valid = ", ".join(ROUTERS)
            raise ValueError(f"unknown router_type {cfg.router_type!r}; valid: {valid}")
        return ROUTERS[cfg.router_type](cfg)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """x (B, T, C) -> (B, T, C), and the Routing of its B · T tokens."""
        x = x + self.attn(self.norm1(x))
        y, routing = self.mlp(self.norm2(x))
        x = x + y
        return x, routing


class SparseGPT(modern.ModernGPT):
    """Chapter 07's GPT of sparse blocks: forward() as ever, forward_with_routing() tells more."""

    def make_block(self, cfg: SparseConfig) -> nn.Module:
        return SparseBlock(cfg)

    def forward_with_routing(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[Routing]]:
        """Like forward(), and each layer's Routing. ValueError if T exceeds block_size."""
        T = idx.shape[1]
        if T > self.cfg.block_size:
            raise ValueError(f"{T} tokens don't fit a block_size of {self.cfg.block_size}")
        x = self.embed(idx)
        routings = []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        logits = self.lm_head(self.norm_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss, routings

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids (B, T) -> logits (B, T, V) and the mean cross-entropy in nats, or None.

        Nothing is added to the loss: the balance loss is the experiment's business.
        """
        logits, loss, _ = self.forward_with_routing(idx, targets)
        return logits, loss


def active_parameters(model: nn.Module) -> int:
    """The model's parameters without those of the experts that a token doesn't use."""
    idle = 0
    for module in model.modules():
        if isinstance(module, modern.MoE):
            unused = len(module.experts) - module.top_k
            idle += unused * gpt.count_parameters(module.experts[0])
    return gpt.count_parameters(model) - idle


def generate(
    model: nn.Module, idx: torch.Tensor, max_new_tokens: int, **options
) -> torch.Tensor:
    """Chapter 05's generate() and its options, in evaluation mode, where no token is dropped.

    ValueError for a model with a layer that isn't causal.
    """
    for module in model.modules():
        if not getattr(module, "causal", True):
            name = type(module).__name__
            raise ValueError(f"{name} can't generate: it chooses by later tokens, and has none yet")
    was_training = model.training
    model.eval()
    try:
        return gpt.generate(model, idx, max_new_tokens, **options)
    finally:
        model.train(was_training)


# ---------------------------------------------------------------- looking inside

LOOK_WINDOWS = 64  # windows of text that are routed together
SHOWN = 6  # how many tokens are named for an expert
COMMON = 200  # only tokens that are at least one in this many: rare ones go anywhere by chance
MEASURES = {  # what look_inside() finds: the header of its column, its format, what it means
    "max_violation": ("MaxVio", ".2f", "the busiest expert's load over the mean load, minus 1"),
    "dead": ("dead", ".1f", "experts of all layers that no token of the validation part reached"),
    "dropped": ("dropped", ".1%", "tokens that no expert computes, in training mode"),
    "entropy": ("entropy", ".2f", "of the router's probabilities, divided by ln E, its largest"),
    "told": ("told", ".2f", "how much a token tells of its expert: 0 nothing, 1 all (of 2: 0.67)"),
    "told_untrained": ("untrained", ".2f", "the same before training"),
}


@torch.no_grad()
def count_meetings(model: nn.Module, corpus: data.Corpus) -> tuple[torch.Tensor, float, float]:
    """Route the validation part and count: how often each token id met each expert, (L, V, E).

    Also the part of the tokens that met no expert, and the mean entropy of the router's
    probabilities over ln E. In training mode, so that a Switch drops what it drops in training.
    """
    E = model.cfg.n_experts
    device = next(model.parameters()).device
    was_training = model.training
    model.train()
    counts = torch.zeros(model.cfg.n_layers, corpus.vocab_size, E, dtype=torch.float64)
    n = 0
    dropped = 0
    entropy = 0.0
    for idx, _ in data.all_windows(corpus.validation, model.cfg.block_size, LOOK_WINDOWS):
        _, _, routings = model.forward_with_routing(idx.to(device))
        for layer, (logits, chosen) in enumerate(routings):
            for e, taken in enumerate(chosen.cpu().unbind(1)):
                met = idx.flatten()[taken]
                counts[layer, :, e] += torch.bincount(met, minlength=corpus.vocab_size)
            n += len(chosen)
            dropped += (~chosen.any(1)).sum().item()
            entropy += torch.special.entr(logits.softmax(-1)).sum().item()
    model.train(was_training)
    return counts, dropped / n, entropy / n / math.log(E)


def information(counts: torch.Tensor) -> float:
    """How much the row tells about the column: counts (V, E) -> 0, nothing, to 1, everything.

    The columns' entropy is the uncertainty about the column; the answer is the part of it that goes
    away once the row is known.
    """
    p = counts / counts.sum()
    entropy_part = torch.special.entr  # -p log p, and 0 where p is 0
    of_pairs = entropy_part(p).sum()
    of_rows = entropy_part(p.sum(1)).sum()
    of_columns = entropy_part(p.sum(0)).sum()
    if of_columns == 0:
        return 0.0  # one column takes all: there is nothing to tell
    # The uncertainty about a pair is that about its row, and what is then left about its column.
    left = of_pairs - of_rows
    return ((of_columns - left) / of_columns).item()


def favourites(counts: torch.Tensor, totals: torch.Tensor) -> list[list[tuple[int, float]]]:
    """For each expert the tokens of which it gets the largest parts, as (token id, part).

    counts (V, E); totals (V,) how often each token occurs at all.
    """
    common = totals * COMMON >= totals.sum()
    parts = torch.where(common, counts.t() / totals, 0.0)  # (E, V)
    best = parts.topk(min(SHOWN, len(totals)))
    found = []
    for tokens, values in zip(best.indices.tolist(), best.values.tolist()):
        found.append(list(zip(tokens, values)))
    return found


def look_inside(model: nn.Module, untrained: nn.Module, corpus: data.Corpus) -> dict:
    """The MEASURES of a model, and the load and favourites of its last layer; plain data."""
    counts, dropped, entropy = count_meetings(model, corpus)
    before, _, _ = count_meetings(untrained, corpus)
    load = counts.sum(1)  # (L, E)
    totals = torch.bincount(corpus.validation[:-1], minlength=corpus.vocab_size)
    named = [
        [(repr(corpus.tokenizer.decode([i])), part) for i, part in row if part > 0]
        for row in favourites(counts[-1], totals)
    ]
    return {
        "max_violation": (load.amax(1) / load.mean(1) - 1).mean().item(),
        "dead": (load == 0).sum().item(),
        "dropped": dropped,
        "entropy": entropy,
        "told": sum(map(information, counts)) / len(counts),
        "told_untrained": sum(map(information, before)) / len(before),
        "load": (load[-1] / load[-1].sum()).tolist(),
        "favourites": named,
    }


def describe(
    results: list[runs.Result], variants: list[str], shown: str
) -> list[str | Table]:
    """The MEASURES of each variant, means over seeds; the favourites of `shown`, first seed."""

    def cell(variant: str, key: str) -> str:
        mean = runs.mean_of(results, variant, lambda result: result.found[key])
        return report.number(mean, MEASURES[key][1])

    rows = [[variant, *(cell(variant, key) for key in MEASURES)] for variant in variants]
    table = Table(["model", *(header for header, _, _ in MEASURES.values())], rows)
    legend = "\n".join(f"- {header}: {meaning}" for header, _, meaning in MEASURES.values())
    found = {"load": [], "favourites": []}
    for result in reversed(results):  # the first seed's comes last
        if result.run.variant == shown and result.found:
            found = result.found
    head = "What the routers do with the validation part, means over seeds:"
    title = f"What {shown} reads (last layer, first seed):"
    return [head, table, legend, title, favourites_table(found)]


def favourites_table(found: dict) -> Table:
    """The load of each expert, and the tokens of which it gets the largest parts."""
    rows = []
    for e, load in enumerate(found["load"]):
        names = ", ".join(f"{name} {part:.0%}" for name, part in found["favourites"][e])
        rows.append([str(e), f"{load:.0%}", names])
    return Table(["expert", "load", "of which tokens it gets the largest parts"], rows)


def load_figure(results: list[runs.Result]) -> dict:
    """expert_load.png: the loads over training, first and last layer; {} where nobody looked."""
    panels = {}
    for result in results:
        seen = [one for one in result.history.observations if "loads" in one]
        if not seen:
            continue
        steps = [one["step"] for one in seen]
        lines = []
        for n in sorted({0, len(seen[0]["loads"]) - 1}):
            lines.append((f"layer {n + 1}", steps, [one["loads"][n] for one in seen]))
        panels[result.run.variant] = lines
    if not panels:
        return {}
    title = "Load by expert over training, first seed; bands of one height are perfect balance"
    return {"expert_load.png": figures.shares(panels, "step", "part of the load", title)}


# ---------------------------------------------------------------- experiment

PRESETS = {
    "tiny": Preset(
        SparseConfig(),
        TrainingSettings(observe_every=10),
        corpus="docs",
        tokenizer="char",
        seeds=3,
    ),
    "full": Preset(
        SparseConfig(
            block_size=256, n_layers=6, n_heads=6, d_model=384, d_hidden=512, bias_speed=0.001
        ),
        TrainingSettings(
            steps=2000,
            batch_size=64,
            learning_rate=1e-3,
            warmup=100,
            final_rate=0.1,
            observe_every=20,
            precision="bfloat16",
        ),
        corpus="source",
        tokenizer="bpe4k",
        seeds=8,
    ),
}
DENSE = "dense"
TOP_2 = "top-2 + loss"
EXPERT_CHOICE = "expert choice"  # not causal: its loss doesn't compare


def variant(name: str, **changes) -> Variant:
    return Variant(name, labels={"model": name}, changes=changes)


def variants(cfg: SparseConfig) -> list[Variant]:
    """The routers beside a dense model, which comes first as the baseline.

    All have the same active width, top_k · d_hidden, and the sparse ones the same total: Switch has
    half as many experts, twice as wide.
    """
    width = cfg.top_k * cfg.d_hidden
    few = cfg.n_experts // 2
    return [
        variant(DENSE, mlp_type="swiglu", d_hidden=width),
        variant(TOP_2),
        variant("top-2 alone", balance_weight=0.0),
        variant("Switch + loss", router_type="switch", top_k=1, n_experts=few, d_hidden=width),
        variant("top-2 + bias", router_type="bias", balance_weight=0.0),
        variant(EXPERT_CHOICE, router_type="expert_choice", balance_weight=0.0),
    ]


def is_sparse(model: nn.Module) -> bool:
    """Asked of the method and not of the class: a compiled model is no SparseGPT."""
    return hasattr(model, "forward_with_routing")


class SparseOrDense(runs.Experiment):
    """Sparse models with different routers against a dense one."""

    # One rounding may send a token elsewhere: other instruction sets moved means by up to 0.015.
    band = 0.04

    def build_model(self, config: SparseConfig, vocab_size: int, seed: int) -> nn.Module:
        if config.mlp_type == "moe":
            model = SparseGPT(config, vocab_size)
        else:
            model = modern.ModernGPT(config, vocab_size)
        gpt.init_parameters(model, seed, config.init_std)
        return model

    def training_loss(self, model: nn.Module, idx: torch.Tensor, targets: torch.Tensor) -> tuple:
        """(cross-entropy + balance_weight · the layers' mean balance loss, cross-entropy alone,
        what the routers did)."""
        if not is_sparse(model):
            return super().training_loss(model, idx, targets)
        _, cross_entropy, routings = model.forward_with_routing(idx, targets)
        losses = [switch_balance_loss(routing.logits, model.cfg.top_k) for routing in routings]
        balance = torch.stack(losses).mean()
        return cross_entropy + model.cfg.balance_weight * balance, cross_entropy, routings

    def after_step(self, model: nn.Module, told: list[Routing] | None) -> None:
        """Move the bias of the routers that have one."""
        for block, routing in zip(model.blocks, told or []):
            if isinstance(block.mlp, BiasMoE):
                block.mlp.update_bias(routing)

    def observe(self, model: nn.Module, idx: torch.Tensor) -> dict:
        """The load of each expert in each layer, as parts of 1."""
        if not is_sparse(model):
            return {}
        _, _, routings = model.forward_with_routing(idx)
        loads = [routing.chosen.sum(0).cpu().double() for routing in routings]
        return {"loads": [(load / load.sum()).tolist() for load in loads]}

    def inspect(self, model: nn.Module, corpus: data.Corpus, seed: int) -> dict:
        found = {"active": active_parameters(model)}
        if is_sparse(model):
            untrained = self.build_model(model.cfg, model.vocab_size, seed)
            untrained.to(model.lm_head.weight.device)
            found |= look_inside(model, untrained, corpus)
        return found


def summarize(plan: Plan, results: list[runs.Result]) -> list[str | Table]:
    """The finding, the losses, the routing, and which tokens the experts of one model get most."""

    active = {r.found["active"] for r in results if r.found}
    blocks: list[str | Table] = [report.comparison_table(plan, results), report.caption(plan)]
    if active:
        blocks.append(
            f"Of these parameters one token uses {min(active):,} to {max(active):,}, whatever the "
            f"model. The loss of {EXPERT_CHOICE} doesn't compare: its router saw the tokens that "
            "were to be predicted."
        )
    finding = report.finding(plan, results, leave_out=EXPERT_CHOICE)
    routers = [name for name in plan.names if name != DENSE]
    blocks += describe(results, routers, shown=TOP_2)
    return [finding, *blocks] if finding else blocks


def draw(plan: Plan, results: list[runs.Result]) -> dict:
    """The figures of this run by file name; the loads are the first seed's."""
    first = [r for r in results if r.run.seed == plan.seeds[0] and r.history and r.found]
    return {"curves.png": figures.curves(plan, results), **load_figure(first)}


def main(argv: list[str] | None = None) -> int:
    here = Path(__file__).parent
    options = cli.parse(__doc__, argv, here / "outputs")
    preset = PRESETS[options.preset]
    title = "Mixture of experts: five routers beside a dense model"
    plan = cli.make_plan(title, preset, variants(preset.model), options)
    return report.carry_out(SparseOrDense(), plan, summarize, draw, here / "expected")


if __name__ == "__main__":
    cli.run_build(__file__)
