"""Step 13: make experts of a dense model.

Must a sparse model start from zero? No: take a trained dense model, and let each expert be a copy
of its MLP (upcycling; Komatsuzaki et al. 2023). If the gates of a token sum to 1, then

    gate_1 · MLP(x) + gate_2 · MLP(x) = (gate_1 + gate_2) · MLP(x) = MLP(x)

so the sparse model computes what the dense one did, whatever its new routers say. It starts at the
dense loss, and training then makes the experts different.

If the gates are the probabilities themselves, as in Switch and in expert choice, their sum isn't 1.
Each MLP then writes less (or more) than the rest of the model has learned to expect, and the loss
starts higher.

    python step_13_make-experts-of-a-dense-model.py

trains a small dense model for 60 steps, makes four sparse ones of it and draws outputs/step_13.png:
where they start.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, figures, training
from shared.checks import Checks

gpt = chapters.load_build(5)
modern = chapters.load_build(7)
SparseConfig = chapters.load_step(18, 5).SparseConfig
SparseGPT = chapters.load_step(18, 8).SparseGPT
active_parameters = chapters.load_step(18, 8).active_parameters

# ---------------------------------------------------------------- the idea


def upcycle(dense: modern.ModernGPT, cfg: SparseConfig, seed: int) -> SparseGPT:
    """A sparse model whose experts are all copies of the dense one's MLPs, of the same width."""
    sparse = SparseGPT(cfg, dense.vocab_size)
    gpt.init_parameters(sparse, seed, cfg.init_std)  # only the routers will keep these numbers
    state = sparse.state_dict()
    for name, value in dense.state_dict().items():
        if ".mlp." not in name:
            state[name] = value
            continue
        for e in range(cfg.n_experts):
            copy = name.replace(".mlp.", f".mlp.experts.{e}.")  # blocks.0.mlp.experts.3.up_proj...
            state[copy] = value
    sparse.load_state_dict(state)
    return sparse


# ---------------------------------------------------------------- look at it


def draw_picture(loss: dict[str, float]) -> Path:
    figure = figures.new_figure(7, 3)
    axes = figure.subplots()
    axes.axvline(loss["dense"], color="0.6", linestyle="--")
    axes.plot(list(loss.values()), list(loss), "o", markersize=9)
    axes.invert_yaxis()
    axes.set(xlabel="loss at the start, nats a character")
    return figures.save(figure, __file__)


@torch.no_grad()
def main() -> int:
    corpus = data.load_corpus("docs", "char", 32)
    cfg = SparseConfig(mlp_type="swiglu", d_hidden=90)
    dense = modern.ModernGPT(cfg, corpus.vocab_size)
    gpt.init_parameters(dense, seed=1)
    with torch.enable_grad():
        training.train(dense, corpus, training.TrainingSettings(steps=60), seed=1)
    plans = {
        "top-2 of 8": {},
        "top-2 with a bias": {"router_type": "bias"},
        "Switch": {"router_type": "switch", "top_k": 1},
        "expert choice": {"router_type": "expert_choice"},
    }
    models = {"dense": dense}
    for name, plan in plans.items():
        models[name] = upcycle(dense, replace(cfg, mlp_type="moe", **plan), seed=2)
    idx = corpus.validation[: 24 * 32].view(24, 32)
    targets = corpus.validation[1 : 24 * 32 + 1].view(24, 32)
    loss = {}
    rows = []
    for name, model in models.items():
        loss[name] = model.eval()(idx, targets)[1].item()
        sizes = [f"{gpt.count_parameters(model):,}", f"{active_parameters(model):,}"]
        rows.append([name, *sizes, f"{loss[name]:.4f}"])
    console.say("A dense model, and sparse ones whose experts are copies of its MLPs:")
    console.say()
    console.say(console.Table(["model", "stored", "active", "loss"], rows))
    console.say("\nCompare the losses: where gates sum to 1 it is the dense one's.")
    console.say(f"The picture is {draw_picture(loss)}.")

    checks = Checks()
    for name in ("top-2 of 8", "top-2 with a bias"):
        checks.close(f"{name}: the dense loss", loss[name], loss["dense"], 1e-5)
    for name in ("Switch", "expert choice"):
        checks.between(f"{name}: nats above it", loss[name] - loss["dense"], 0.05, 5)
    written = gpt.generate(dense, idx[:1, :5], 20, temperature=0)
    ours = gpt.generate(models["top-2 of 8"], idx[:1, :5], 20, temperature=0)
    checks.equal("top-2 writes what the dense one writes", ours, written)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
