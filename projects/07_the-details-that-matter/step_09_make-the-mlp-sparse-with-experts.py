"""Step 09: can a model have more parameters without more work for each token?

In a dense model every token meets every weight. Here several MLPs stand side by side, the experts,
each one a SwiGLU of step 07. A router looks at the token and picks the k experts that suit it best;
the others do nothing for this token. So a token costs the work of k experts, however many there
are. Here k = 2 of 4, each as wide as the dense MLP was: the layer holds four times the weights of
that MLP, and a token costs twice its work.

The router is one matrix. It scores each expert, and a softmax makes the scores into shares. The k
largest shares, divided by their sum, are the gates: they weigh the outputs. Through these factors
the gradient reaches the router: an expert that helps gets a larger share.

    python step_09_make-the-mlp-sparse-with-experts.py

draws outputs/step_09.png. Chapter 18 shows what goes wrong, and how to make it fast.
Shapes: N tokens, C = d_model, E = n_experts, k = top_k.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, figures, training
from shared.checks import Checks
from shared.randomness import generator

gpt = chapters.load_build(5)
step_07 = chapters.load_step(7, 7)
SwiGLU = step_07.SwiGLU
swiglu_hidden = step_07.swiglu_hidden

# ---------------------------------------------------------------- the idea


@dataclass(frozen=True)
class ExpertsConfig(step_07.MLPConfig):
    n_experts: int = 4  # SwiGLU experts in the layer
    top_k: int = 2  # experts that each token uses


class MoE(nn.Module):
    """n_experts SwiGLU MLPs; each token uses the top_k that the router prefers (Shazeer 2017)."""

    fewest = 2  # the gate of one is always 1, and its router learns nothing; chapter 18 has others

    def __init__(self, cfg: gpt.GPTConfig):
        super().__init__()
        least = min(self.fewest, cfg.n_experts)  # where there is one expert, k is 1
        if not least <= cfg.top_k <= cfg.n_experts:
            raise ValueError(f"top_k {cfg.top_k} is not from {least} to n_experts {cfg.n_experts}")
        self.top_k = cfg.top_k
        d_hidden = cfg.d_hidden or swiglu_hidden(cfg.d_model, cfg.multiple_of)
        self.router = nn.Linear(cfg.d_model, cfg.n_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(cfg.d_model, d_hidden) for _ in range(cfg.n_experts))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens x (N, C) -> gates (N, k) of sum 1, and the chosen experts (N, k), best first."""
        with torch.autocast(x.device.type, enabled=False):  # choose in float32, whatever x is
            logits = F.linear(x.float(), self.router.weight.float())  # (N, E)
        probabilities = logits.softmax(-1)
        # A stable sort keeps equal probabilities in the order of the experts; topk may not.
        probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
        chosen = order[:, : self.top_k]
        gates = probabilities[:, : self.top_k]
        return gates / gates.sum(-1, keepdim=True), chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C): each token's experts, weighted by its gates."""
        tokens = x.reshape(-1, x.shape[-1])  # (N, C)
        gates, chosen = self.route(tokens)
        y = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            # Which tokens chose expert e, and whether as their first choice (0), second (1), …
            token, choice = torch.where(chosen == e)
            weighted = gates[token, choice, None] * expert(tokens[token])
            y = y.index_add(0, token, weighted.to(y.dtype))  # add each row to its token's row of y
        return y.view_as(x)


# ---------------------------------------------------------------- look at it


class ExpertsGPT(gpt.GPT):
    """Chapter 05's model with experts in every block."""

    def make_block(self, cfg: ExpertsConfig) -> nn.Module:
        block = super().make_block(cfg)
        block.mlp = MoE(cfg)
        return block


@torch.no_grad()
def draw_picture(model: ExpertsGPT, corpus: data.Corpus, text: str) -> Path:
    """Which expert of the first block takes which character of a text, and with what gate."""
    x = model.embed(torch.tensor([corpus.tokenizer.encode(text)]))
    block = model.blocks[0]
    x = x + block.attn(block.norm1(x))
    gates, chosen = block.mlp.route(block.norm2(x)[0])
    shares = torch.zeros(len(text), model.cfg.n_experts)
    shares.scatter_(1, chosen, gates)  # each gate into the column of its expert
    figure = figures.new_figure(8, 2.4)
    axes = figure.subplots()
    axes.imshow(shares.T.tolist(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(text)), ["_" if c == " " else c for c in text])
    axes.set_yticks(range(model.cfg.n_experts), [f"expert {e}" for e in range(model.cfg.n_experts)])
    axes.set_title("the darker, the larger the gate")
    return figures.save(figure, __file__)


def one_by_one(moe: MoE, tokens: torch.Tensor) -> torch.Tensor:
    """Token by token, with a softmax over the k best scores alone, which gives the same gates."""
    rows = []
    for token in tokens:
        scores, best = (moe.router.weight @ token).topk(moe.top_k)
        outputs = [moe.experts[e](token) for e in best]
        rows.append(scores.softmax(0) @ torch.stack(outputs))
    return torch.stack(rows)


def main() -> int:
    corpus = data.load_corpus("docs", "char", 32)
    corpus = replace(corpus, validation=corpus.validation[:2000])  # we don't look at that loss
    model = ExpertsGPT(ExpertsConfig(), corpus.vocab_size)
    gpt.init_parameters(model, seed=1)
    training.train(model, corpus, training.TrainingSettings(steps=100, batch_size=16), seed=1)
    console.say(f"picture: {draw_picture(model, corpus, 'Returns a tensor (float): x * 2')}")
    console.say("Read a column: the two experts of one character. Experts 0 and 1 share the")
    console.say("letters; the closing bracket goes mostly to 3, the digit to 2 and 3. Expert 0")
    console.say("has most of the work, which chapter 18 mends.")

    checks = Checks()
    moe = model.blocks[0].mlp
    tokens = torch.randn(24, 64, generator=generator(1, "step_09"))
    checks.close("MoE: as its definition", moe(tokens), one_by_one(moe, tokens), 1e-5)
    expert = 3 * 64 * swiglu_hidden(64)
    checks.equal("parameters, with router", gpt.count_parameters(moe), 4 * expert + 4 * 64)
    for twin in moe.experts:
        twin.load_state_dict(moe.experts[0].state_dict())
    checks.close("equal experts: one MLP", moe(tokens), moe.experts[0](tokens), 1e-5)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
