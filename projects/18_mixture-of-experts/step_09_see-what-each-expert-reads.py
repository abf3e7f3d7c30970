"""Step 09: see what each expert reads.

Step 08 put experts into a model; this one looks at what a trained one does with them: how even the load is, which
experts nobody uses, and how far the kind of token decides the expert. It leaves out what an expert computes.

    python step_09_see-what-each-expert-reads.py

trains a small sparse model for 60 steps, prints what its experts read and the checks; about eight seconds.

V kinds of token, E experts, L layers."""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, comparison, console, data, figures, kernels, report, training
from shared.checks import Checks
from shared.comparison import Result
from shared.console import Table

SHOWN = 6  # so many kinds of token are named for an expert,
COMMON = 200  # of those that are at least one in so many tokens: rare ones go anywhere by chance
MEASURES = {  # what look_inside() finds: the header and format of its column, and what it means
    "max_violation": ("MaxVio", ".2f", "the busiest expert's load over the mean load, minus 1; 0 is perfect balance"),
    "dead": ("dead", ".1f", "experts of all layers that no token of the validation part reached"),
    "dropped": ("dropped", ".1%", "tokens that no expert computed"),
    "entropy": ("entropy", ".2f", "of the router's probabilities, as a part of ln E, its largest"),
    "told": ("told", ".2f", "how much of the uncertainty about its expert the kind of a token takes away, 0 to 1"),
    "told_untrained": ("untrained", ".2f", "the same before training: a random router also treats equals alike"),
}


@torch.no_grad()
def route(model: nn.Module, corpus: data.Corpus) -> tuple[torch.Tensor, float, float]:
    """Route the validation part: how often each kind met each expert (L, V, E), the part of tokens that met none,
    and the mean entropy of the router's probabilities over ln E."""
    L, V, E = model.cfg.n_layers, corpus.vocab_size, model.cfg.n_experts
    counts, dropped, entropy, n = torch.zeros(L, V, E, dtype=torch.float64), 0, 0.0, 0
    device = next(model.parameters()).device
    for idx, _ in data.all_windows(corpus.validation, model.cfg.block_size, training.EVAL_BATCH):
        for layer, (logits, chosen) in enumerate(model.forward_with_routing(idx.to(device))[2]):
            for e, taken in enumerate(chosen.cpu().unbind(1)):
                counts[layer, :, e] += torch.bincount(idx.flatten()[taken], minlength=V)
            dropped += (~chosen.any(1)).sum().item()
            entropy += torch.special.entr(logits.softmax(-1)).sum().item()
            n += idx.numel()
    return counts, dropped / n, entropy / n / math.log(E)


def information(counts: torch.Tensor) -> float:
    """How much of the uncertainty about the column the row takes away: I(row; column) / H(column) of counts (V, E)."""
    p = counts / counts.sum()
    joint, rows, columns = (torch.special.entr(x).sum() for x in (p, p.sum(1), p.sum(0)))
    return ((rows + columns - joint) / columns).item() if columns > 0 else 0.0


def favourites(counts: torch.Tensor, totals: torch.Tensor) -> list[list[tuple[int, float]]]:
    """For each expert the kinds of which it gets the largest parts, as (kind, part of its tokens).

    counts (V, E), totals (V) how often each kind occurs at all.
    """
    parts = torch.where(totals * COMMON >= totals.sum(), counts.t() / totals, 0.0)  # (E, V)
    best = parts.topk(min(SHOWN, len(totals)))
    return [list(zip(*row)) for row in zip(best.indices.tolist(), best.values.tolist())]


def look_inside(model: nn.Module, untrained: nn.Module, corpus: data.Corpus) -> dict:
    """The MEASURES of a model, and the load and favourites of its last layer; plain data."""
    counts, dropped, entropy = route(model.eval(), corpus)
    load = counts.sum(1)  # (L, E)
    best = favourites(counts[-1], torch.bincount(corpus.validation[:-1], minlength=corpus.vocab_size))
    return {
        "max_violation": (load.amax(1) / load.mean(1) - 1).mean().item(),
        "dead": (load == 0).sum().item(),
        "dropped": dropped,
        "entropy": entropy,
        "told": sum(map(information, counts)) / len(counts),
        "told_untrained": sum(map(information, route(untrained.eval(), corpus)[0])) / len(counts),
        "load": (load[-1] / load[-1].sum()).tolist(),
        "favourites": [[(repr(corpus.tokenizer.decode([i])), part) for i, part in row if part > 0] for row in best],
    }


def describe(results: list[Result], variants: list[str], shown: str) -> list[str | Table]:
    """The MEASURES of each variant, in means over seeds, and the favourites of one at its first seed."""

    def cell(variant: str, key: str) -> str:
        return report.number(comparison.mean_of(results, variant, lambda r: r.found[key]), MEASURES[key][1])

    rows = [[variant, *(cell(variant, key) for key in MEASURES)] for variant in variants]
    table = Table(["model", *(header for header, _, _ in MEASURES.values())], rows)
    legend = "\n".join(f"- {header}: {meaning}" for header, _, meaning in MEASURES.values())
    found = next((r.found for r in results if r.run.variant == shown and r.found), {"load": [], "favourites": []})
    head = "What the routers do with the validation part, means over seeds:"
    return [head, table, legend, f"What {shown} reads (last layer, first seed):", favourites_table(found)]


def favourites_table(found: dict) -> Table:
    reads = [", ".join(f"{name} {part:.0%}" for name, part in names) for names in found["favourites"]]
    rows = [[str(e), f"{load:.0%}", names] for e, (load, names) in enumerate(zip(found["load"], reads))]
    return Table(["expert", "load", "of which tokens it gets the largest parts"], rows)


def load_figure(results: list[Result]) -> dict:
    """expert_load.png, the loads over training in the first and last layer; no figure where nobody looked."""
    panels = {}
    for result in results:
        seen = [o for o in result.history.observations if "loads" in o]
        for n in sorted({0, len(seen[0]["loads"]) - 1}) if seen else []:
            line = (f"layer {n + 1}", [o["step"] for o in seen], [o["loads"][n] for o in seen])
            panels.setdefault(result.run.variant, []).append(line)
    title = "Load by expert over training, one band for each expert; bands of one height are perfect balance"
    return {"expert_load.png": figures.shares(panels, "step", "part of the load", title)} if panels else {}


def main() -> int:
    build = chapters.load_build(18)
    corpus = data.load_corpus("docs", "char", build.SparseConfig().block_size)
    experiment, config = build.SparseOrDense(), vars(build.SparseConfig())
    model, untrained = (experiment.build_model("", config, corpus.vocab_size, seed=1) for _ in range(2))
    settings = training.TrainingSettings(steps=60)
    with kernels.fastest_float32():
        training.train(model, corpus, settings, seed=1, training_loss=experiment.training_loss)
        found = look_inside(model, untrained, corpus)
        pairs = int(route(model, corpus)[0].sum())
    console.say("Top-2 of 8 experts with the auxiliary loss, after 60 steps, the last layer:")
    console.say()
    console.say(favourites_table(found))
    console.say(f"\nOf the uncertainty about its expert a token's kind takes away {found['told']:.0%},")
    console.say(f"and took {found['told_untrained']:.0%} before training.")

    checks = Checks()
    checks.close("one expert for each kind: 1", information(torch.diag(torch.tensor([3.0, 4.0, 5.0]))), 1, 1e-6)
    checks.close("kind and expert independent: 0", information(torch.ones(5, 3)), 0, 1e-6)
    noisy = torch.tensor([[3.0, 1.0], [1.0, 3.0]])  # a channel that errs one time in four carries 1 − h(1/4) bits
    checks.close("wrong one time in four", information(noisy), 0.1887219, 1e-6)
    counts, totals = torch.tensor([[30.0, 10.0], [5.0, 15.0], [0.1, 0.0]]), torch.tensor([40.0, 20.0, 0.1])
    by_hand = [[(0, 0.75), (1, 0.25), (2, 0.0)], [(1, 0.75), (0, 0.25), (2, 0.0)]]
    checks.equal("favourites of a table by hand", favourites(counts, totals), by_hand)
    checks.equal("pairs of a token and an expert", pairs, (len(corpus.validation) - 1) * 2 * 2)  # layers, k
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
