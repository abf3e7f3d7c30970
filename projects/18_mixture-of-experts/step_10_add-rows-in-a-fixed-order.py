"""Step 10: add rows in a fixed order.

Step 03 copies tokens into rows and later sums each token's rows. PyTorch can do both in one line:
tokens[token], and index_add. Why build them ourselves? Because of the sums. index_add adds the rows
one by one to where they belong. On a GPU thousands of threads do that at once, in any order, and
in floats (a + b) + c is not a + (b + c). Two runs of one program then differ in the last bits, and
soon in everything.

The way out: group the rows by token first. Then each sum has one owner, who adds its rows in their
order. F.embedding_bag does just that: it sums groups of unequal size.

Copying and summing belong together. If a token was copied into three rows, its gradient is the sum
of the three rows' gradients; if rows were summed, each gets a copy of the sum's gradient. So each
of the two is the other's backward pass.

    python step_10_add-rows-in-a-fixed-order.py

prints a small example. Step 03 uses both.

Three lists say which belong together. For rows that hold tokens 0, 2, 1, 2:

    token   0 2 1 2    the token of each row
    place   0 2 1 3    the rows, sorted by token: token 0's, token 1's, the two of token 2
    first   0 1 2      where in place each token's rows begin

Shapes: N tokens, C channels, R rows; token (R,), first (N,), place (M,): idle rows are in no sum.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console
from shared.checks import Checks
from shared.randomness import generator

# ---------------------------------------------------------------- the idea


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

    embedding_bag sums groups of unequal size: group n is what place names from first[n] up to
    first[n + 1]. Going back, idle rows get the gradient of token 0; their gate is 0, so it comes
    to nothing.
    """

    @staticmethod
    def forward(ctx, rows, token, place, first):
        ctx.save_for_backward(token, place, first)
        return F.embedding_bag(place, rows, first, mode="sum")

    @staticmethod
    def backward(ctx, grad):
        gradient = Spread.apply(grad, *ctx.saved_tensors)
        return gradient, None, None, None


# ---------------------------------------------------------------- look at it


def main() -> int:
    tokens = torch.tensor([[1.0], [10.0], [100.0]])  # three tokens of one channel
    token = torch.tensor([0, 2, 1, 2])
    place = torch.tensor([0, 2, 1, 3])
    first = torch.tensor([0, 1, 2])
    rows = Spread.apply(tokens, token, place, first)
    sums = Collect.apply(rows, token, place, first)
    table = [
        ["tokens", str(tokens.flatten().tolist())],
        ["spread into rows", str(rows.flatten().tolist())],
        ["collected again", str(sums.flatten().tolist())],
    ]
    console.say(console.Table(["", "values"], table))
    console.say("\nThe last token has two rows, so it comes back twice as large: 200.")
    console.say()

    small = torch.tensor([1e8, 1.0, -1e8, 1.0])
    one_order = ((small[0] + small[1]) + small[2]) + small[3]
    other_order = ((small[0] + small[2]) + small[1]) + small[3]
    console.say(f"In float32, 1e8 + 1 - 1e8 + 1 is {one_order:g}, and 1e8 - 1e8 + 1 + 1 is")
    console.say(f"{other_order:g}: the order of a sum matters.")

    checks = Checks()
    checks.equal("rows: copies of tokens 0, 2, 1, 2", rows, tokens[token])
    draw = generator(1, "step_10")
    grad = torch.randn(4, 1, generator=draw)
    leaf = tokens.clone().requires_grad_()
    Spread.apply(leaf, token, place, first).backward(grad)
    by_autograd = tokens.clone().requires_grad_()
    by_autograd[token].backward(grad)
    checks.close("gradient of Spread = PyTorch's", leaf.grad, by_autograd.grad, 1e-6)
    added = torch.zeros(3, 1).index_add(0, token, grad)
    checks.close("Collect = index_add", Collect.apply(grad, token, place, first), added, 1e-6)
    wide = torch.randn(4, 3, generator=draw).double().requires_grad_()
    # gradcheck changes each input a little, and compares what then happens with the gradient.
    agree = torch.autograd.gradcheck(lambda x: Collect.apply(x, token, place, first), wide)
    checks.equal("gradient of Collect, by small changes", agree, True)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
