"""Step 14: watch the load in training.

Step 04 said why experts may collapse: who is chosen learns, and is chosen more for it. Does it
happen? Train one small model three times, from the same start and on the same text: without any
balancing, with the balance loss of step 04, and with the bias of step 07. Every few steps, count
how many tokens each expert gets.

Training minimises the cross-entropy plus a weight times the balance loss. The balance loss is
computed for each layer alone, and then averaged. If one layer used only experts 0 to 3, and the
next only 4 to 7, the two together would look balanced, and neither is.

    python step_14_watch-the-load-in-training.py

draws outputs/step_14.png: a band is an expert, its height its part of all choices.
build.py does the same with larger models and several seeds.

Shapes: E experts, k = top_k; load (E,).
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, figures, training
from shared.checks import Checks

gpt = chapters.load_build(5)
max_violation = chapters.load_step(18, 4).max_violation
switch_balance_loss = chapters.load_step(18, 4).switch_balance_loss
SparseConfig = chapters.load_step(18, 5).SparseConfig
SparseGPT = chapters.load_step(18, 8).SparseGPT

CONFIG = SparseConfig(block_size=16, d_model=32, n_heads=2, d_hidden=24, balance_weight=0.03)
SETTINGS = training.TrainingSettings(steps=120, observe_every=4)

# ---------------------------------------------------------------- the idea


def training_loss(model: nn.Module, idx: torch.Tensor, targets: torch.Tensor) -> tuple:
    """(what is minimised, the cross-entropy that is reported, what the routers did)."""
    _, cross_entropy, routings = model.forward_with_routing(idx, targets)
    balance = [switch_balance_loss(routing.logits, model.cfg.top_k) for routing in routings]
    mean = torch.stack(balance).mean()
    minimised = cross_entropy + model.cfg.balance_weight * mean
    return minimised, cross_entropy, routings


def after_step(model: nn.Module, routings: list) -> None:
    """After the optimizer's step: move the bias of the routers that have one."""
    for block, routing in zip(model.blocks, routings):
        if model.cfg.router_type == "bias":
            block.mlp.update_bias(routing)


def observe(model: nn.Module, idx: torch.Tensor) -> dict:
    """The last layer's load by expert on one batch, as parts of 1."""
    _, _, routings = model.forward_with_routing(idx)
    load = routings[-1].chosen.sum(0).cpu().double()
    return {"load": (load / load.sum()).tolist()}


# ---------------------------------------------------------------- look at it


def train(corpus: data.Corpus, **changes) -> training.History:
    model = SparseGPT(replace(CONFIG, **changes), corpus.vocab_size)
    gpt.init_parameters(model, seed=1)
    return training.train(
        model,
        corpus,
        SETTINGS,
        seed=1,
        training_loss=training_loss,
        after_step=after_step,
        observe=observe,
    )


def draw_picture(histories: dict[str, training.History]) -> Path:
    figure = figures.new_figure(9, 3)
    panels = figure.subplots(1, len(histories), sharey=True)
    for axes, (name, history) in zip(panels, histories.items()):
        steps = [one["step"] for one in history.observations]
        figures.bands(axes, steps, [one["load"] for one in history.observations])
        axes.set(title=name, xlabel="step")
    panels[0].set_ylabel("part of the load")
    return figures.save(figure, __file__)


def main() -> int:
    corpus = data.load_corpus("docs", "char", CONFIG.block_size)
    corpus = replace(corpus, validation=corpus.validation[:10_000])
    histories = {
        "no balancing": train(corpus, balance_weight=0.0),
        "balance loss": train(corpus),
        "bias": train(corpus, balance_weight=0.0, router_type="bias"),
    }
    rows = []
    uneven = {}
    for name, history in histories.items():
        last = [one["load"] for one in history.observations[-10:]]
        mean = torch.tensor(last, dtype=torch.float64).mean(0)
        uneven[name] = max_violation(mean)
        rows.append([name, f"{mean.max():.0%}", f"{uneven[name]:.2f}", f"{history.train_loss:.2f}"])
    console.say("Eight experts, last layer, mean of the last 40 steps; an even share is 12.5 %:")
    console.say()
    console.say(console.Table(["model", "largest load", "MaxVio", "training loss"], rows))
    console.say("\nCompare the loads, then the losses: the first model is lopsided, and its loss")
    console.say(f"doesn't show it. The picture is {draw_picture(histories)}.")

    checks = Checks()
    checks.between("MaxVio without balancing", uneven["no balancing"], 0.8, 3)
    ratio = uneven["balance loss"] / uneven["no balancing"]
    checks.between("MaxVio, balance loss over no balancing", ratio, 0, 0.7)
    ratio = uneven["bias"] / uneven["no balancing"]
    checks.between("MaxVio, bias over no balancing", ratio, 0, 0.7)
    gap = abs(histories["no balancing"].train_loss - histories["balance loss"].train_loss)
    checks.between("training losses: nats apart", gap, 0, 0.1)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
