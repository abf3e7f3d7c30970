"""Step 01: open the weights file.

A real model comes as one file. It has to say what the model is (its shape, its vocabulary), which
tensors there are, and their numbers. A GGUF file says them in this order:

    magic     the four letters GGUF, then the version of the format
    counts    how many tensors, how many fields
    fields    name, kind, value; name, kind, value; ...       (called the metadata)
    tensors   name, shape, packing, where its numbers begin; ...
    padding   up to a multiple of 32 bytes
    numbers   of one tensor after the other

Most numbers are quantized: one takes 5 bits instead of 32, so it is less exact and the file is
small. A packing is one way to do that, always for a block of numbers at a time. The package gguf
unpacks a tensor when we ask for it; step 10 unpacks one by hand. Step 09 shows read_header(),
which reads all that stands before the numbers.

    python step_01_open-the-weights-file.py

What the numbers mean comes in step 04, which puts them into our model.
"""

import importlib.util
import math
import struct
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli
from shared.checks import Checks
from shared.console import Table, UserError, say

if importlib.util.find_spec("gguf"):  # without it, WeightsFile says what to type
    import gguf

real = chapters.load_build(37)  # the finished chapter: what is not on this page
inspection = real.inspection
installed = real.installed
read_header = real.read_header

# ---------------------------------------------------------------- the idea

StoredTensor = namedtuple("StoredTensor", "shape packing start n_bytes")  # shape as torch writes it


class WeightsFile:
    """A GGUF file: its .metadata, and where each of its .tensors lies.

    UserError, with the file's name and the reason, for one that can't be read or is damaged.
    """

    def __init__(self, path: str | Path):
        installed("gguf")
        self.path = Path(path)
        self.raw, header = self.open()
        self.metadata, listed, first = header  # first: the byte where the numbers begin
        self.tensors = {}
        for name, shape, packing, offset in listed:
            if name in self.tensors:
                raise self.refusal(f"it lists the tensor {name} twice")
            self.tensors[name] = self.locate(name, shape, packing, first + offset)
        inspection.check_places(self)

    def locate(self, name: str, shape: tuple[int, ...], packing: int, start: int) -> StoredTensor:
        """How a tensor is packed, and which bytes of the file are its numbers."""
        if packing not in list(gguf.GGMLQuantizationType):
            why = f"is packed in a way that gguf doesn't know (number {packing})"
            raise self.refusal(f"tensor {name} {why}")
        packing = gguf.GGMLQuantizationType(packing)  # the number, and its name
        block, block_bytes = gguf.GGML_QUANT_SIZES[packing]  # Q4_1: 32 numbers take 20 bytes
        if not shape or shape[-1] % block:
            why = f"of shape {shape} doesn't divide into {packing.name}'s blocks of {block}"
            raise self.refusal(f"tensor {name} {why}")
        n_bytes = math.prod(shape) // block * block_bytes
        end = start + n_bytes
        if end > len(self.raw):
            why = f"tensor {name} ends at byte {end:,}, the file at {len(self.raw):,}"
            raise self.refusal(f"it is truncated: {why}")
        return StoredTensor(shape, packing, start, n_bytes)

    @np.errstate(all="ignore")  # load_model() refuses what is no number
    def read(self, name: str) -> torch.Tensor:
        """The tensor called `name`, unpacked to float32."""
        stored = self.tensors[name]
        packed = self.raw[stored.start : stored.start + stored.n_bytes]
        packed = packed.reshape(*stored.shape[:-1], -1)  # (rows, bytes of a row)
        try:
            numbers = gguf.quants.dequantize(packed, stored.packing)
        except NotImplementedError:
            why = f"is packed as {stored.packing.name}, which gguf can't unpack"
            raise self.refusal(f"tensor {name} {why}") from None
        return torch.from_numpy(np.require(numbers, np.float32, "W"))  # W: writable, for torch

    def open(self) -> tuple[np.ndarray, tuple]:
        """The file's bytes and its header, or the reason why there is none."""
        if self.path.exists() and not self.path.is_file():
            raise self.refusal("it is not a regular file")  # a pipe would let us wait for ever
        try:
            raw = np.memmap(self.path, mode="r")  # the bytes, read from disk when used
            return raw, read_header(raw)
        except (struct.error, KeyError, RecursionError):
            why = "it ends before its list of tensors does, or that list is damaged"
        except OSError as error:
            why = error.strerror or str(error)
        except ValueError as error:  # empty, or no GGUF file
            why = str(error)
        raise self.refusal(why)

    def refusal(self, why: str) -> UserError:
        return UserError(f"{self.path} can't be used: {inspection.one_line(why)}")


# ---------------------------------------------------------------- look at it


def main() -> int:
    file = WeightsFile(real.packaged_weights())
    stored = list(file.tensors.values())
    rows = []
    for packing in sorted({tensor.packing for tensor in stored}):
        tensors = [tensor for tensor in stored if tensor.packing == packing]
        numbers = sum(math.prod(tensor.shape) for tensor in tensors)
        n_bits = 8 * sum(tensor.n_bytes for tensor in tensors)
        rows.append([packing.name, str(len(tensors)), f"{numbers:,}", f"{n_bits / numbers}"])
    say(Table(["packing", "tensors", "numbers", "bits a number"], rows))
    n_numbers = sum(math.prod(tensor.shape) for tensor in stored)
    say(f"\nFour numbers in five take 5 bits. So {n_numbers:,} of them fit a file of")
    say(f"{len(file.raw) / 1e6:.0f} MB; in float32 they take {4 * n_numbers / 1e6:.0f} MB.")

    checks = Checks()
    theirs = {t.name: (t.data_offset, t.n_bytes) for t in gguf.GGUFReader(file.path).tensors}
    ours = {name: (tensor.start, tensor.n_bytes) for name, tensor in file.tensors.items()}
    checks.true("tensors where gguf has them", f"{len(ours)} places", "same", ours == theirs)
    checks.equal("numbers in all", n_numbers, 134_515_008)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
