"""Step 09: read the header byte by byte. (Best read after step 01.)

In a GGUF file nothing marks where a value ends. Only the order says what a byte means: after the
name of a field comes a number for its kind, and the kind says how many bytes the value takes. So
we must read from the first byte on and leave nothing out. A cursor does that: it knows where it
is, take() hands over the next value, and the cursor stands behind it.

    47 47 55 46  03 00 00 00  10 01 00 00 00 00 00 00
    G  G  U  F   version 3    272 tensors, in 8 bytes

The lowest byte of a number comes first: 10 01 means 16 + 256 = 272. A string is its length in 8
bytes, then its letters. A list is the kind of its entries, how many they are, then the entries.

    python step_09_read-the-header-byte-by-byte.py

The numbers of the tensors come after the header; step 10 unpacks some.
"""

import math
import struct
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli
from shared.checks import Checks
from shared.console import Table, say

real = chapters.load_build(37)  # the finished chapter: what is not on this page
inspection = real.inspection
plausible = real.plausible

# ---------------------------------------------------------------- the idea

# The kinds of number in the file: its code for each, and the letter by which Python's struct
# module, which turns bytes into values, knows it.
LETTERS = {
    0: "B",  # a whole number of 8 bits, never negative
    1: "b",  # the same with a sign
    2: "H",  # 16 bits
    3: "h",
    4: "I",  # 32 bits
    5: "i",
    6: "f",  # float32
    7: "?",  # true or false
    10: "Q",  # 64 bits
    11: "q",
    12: "d",  # float64
}
STRING = 8
ARRAY = 9


class Cursor:
    """Reads bytes from the first to the last. Each call takes the next ones and moves on."""

    def __init__(self, raw: np.ndarray):
        self.raw = raw
        self.at = 0

    def take(self, letter: str) -> int | float | bool | bytes:
        """One value of the kind that `letter` means to struct."""
        # "<": the lowest byte first. What struct returns is always a tuple.
        (value,) = struct.unpack_from("<" + letter, self.raw, self.at)
        self.at += struct.calcsize("<" + letter)
        return value

    def string(self) -> str:
        """A string: its length in bytes, then the bytes."""
        length = self.take("Q")
        # "13s" is 13 bytes.
        return self.take(f"{length}s").decode("utf-8", errors="replace")

    def value(self, kind: int):
        """A number, a string, or a list: the kind of its entries, their number, the entries."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.take(LETTERS[kind])
        kind_inside = self.take("I")
        length = plausible(self.take("Q"))
        return [self.value(kind_inside) for _ in range(length)]


def read_header(raw: np.ndarray) -> tuple[dict, list[tuple], int]:
    """What stands before the numbers in a GGUF file.

    Returns the metadata, (name, shape, packing, offset) of each tensor, and the byte at which the
    numbers begin: a tensor's offset counts from there.
    """
    cursor = Cursor(raw)
    if cursor.take("4s") != b"GGUF" or cursor.take("I") not in (2, 3):
        raise ValueError("it is no GGUF file of version 2 or 3")
    n_tensors = plausible(cursor.take("Q"))
    n_fields = plausible(cursor.take("Q"))
    metadata = {}
    for _ in range(n_fields):
        name = cursor.string()
        if name in metadata:
            raise ValueError(f"it holds {name} twice")
        kind = cursor.take("I")
        metadata[name] = cursor.value(kind)
    tensors = []
    for _ in range(n_tensors):
        name = cursor.string()
        n_axes = plausible(cursor.take("I"))
        sizes = [cursor.take("Q") for _ in range(n_axes)]
        shape = tuple(reversed(sizes))  # the file names the length of a row first, torch last
        packing = cursor.take("I")
        offset = cursor.take("Q")
        tensors.append((name, shape, packing, offset))
    alignment = inspection.alignment(metadata)
    first = math.ceil(cursor.at / alignment) * alignment  # up to the next multiple of 32
    return metadata, tensors, first


# ---------------------------------------------------------------- look at it


def main() -> int:
    raw = np.memmap(real.packaged_weights(), mode="r")
    metadata, tensors, first = read_header(raw)
    say(f"The file begins with {bytes(raw[:16]).hex(' ')}.")
    say(f"Some of its {len(metadata)} fields:\n")
    shown = [[name, str(value)] for name, value in metadata.items() if name.startswith("llama.")]
    say(Table(["field", "value"], shown))
    say(f"\nand the first of its {len(tensors)} tensors:\n")
    rows = []
    for name, shape, packing, offset in tensors[:6]:
        rows.append([name, str(shape), str(packing), f"{offset:,}"])
    say(Table(["name", "shape", "packing", "offset"], rows))
    say(f"\nPacking 0 is float32, 3 is Q4_1, 8 is Q8_0. The numbers begin at byte {first:,}:")
    say("the header is that long because the vocabulary stands in it.")

    checks = Checks()
    number = bytes([0x10, 1, 0, 0])
    string = bytes([2, 0, 0, 0, 0, 0, 0, 0]) + b"hi"  # a length in 8 bytes, then the letters
    cursor = Cursor(np.frombuffer(number + string, np.uint8))
    checks.equal("10 01 00 00 is 272", cursor.take("I"), 272)
    checks.equal("then a string of two letters", cursor.string(), "hi")
    checks.equal("and the cursor is behind it", cursor.at, 14)
    checks.equal("entries in the list of tokens", len(metadata["tokenizer.ggml.tokens"]), 49_152)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
