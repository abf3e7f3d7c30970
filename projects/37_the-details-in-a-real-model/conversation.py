"""The conversation of chapter 37: flags, an answer as it is written, message after message.

build.py holds the model and uses this file. Nothing here knows how a token comes about.
"""

import argparse
import codecs
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli
from shared.console import UserError, say

import torch

# A model may write any byte; those that steer a terminal must not get there.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def parse(description: str, argv: list[str] | None) -> argparse.Namespace:
    """Read the flags. UserError for one that can't be followed."""
    parser = cli.OneLineParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    preset = parser.add_mutually_exclusive_group()
    flag = {"action": "store_true"}
    preset.add_argument("--tiny", **flag, help="three answers and a perplexity (the default)")
    preset.add_argument("--full", **flag, help="also the perplexity by length of the context")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT", help="answer this and stop")
    what.add_argument("--chat", action="store_true", help="hold a conversation")
    path = {"type": cli.not_empty, "metavar": "PATH"}
    add("--weights", **path, help="another GGUF file of the llama architecture")
    add("--data", **path, help="a UTF-8 text file, or a folder of them, to measure on instead")
    add("--output-dir", **path, help="where results go (default: outputs/ here)")
    number = {"type": cli.natural, "metavar": "N"}
    add("--tokens", **number, default=256, help="longest answer (default 256)")
    add("--seed", **number, default=1, help="of the draws at a temperature above 0")
    add("--temperature", type=temperature, metavar="T", default=0.0, help="0: the likeliest token")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    options = parser.parse_args(argv)
    if options.chat and sys.stdin is None:
        raise UserError("--chat reads from standard input, which is closed")
    if options.output_dir is not None:
        options.output_dir = Path(options.output_dir)
    options.device = cli.resolve_device(options.device, "full" if options.full else "tiny")
    options.draws = torch.Generator(options.device).manual_seed(options.seed)
    return options


def temperature(text: str) -> float:
    """argparse type: a number from 0 to 10."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 10:  # so NaN is refused, too
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 10")
    return value


def write_answer(tokens: Iterable[int], tokenizer) -> list[int]:
    """Print the tokens of an answer as they come. Returns them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may be several tokens
    written = []
    for token in tokens:
        written.append(token)
        if token != tokenizer.end:
            text = decoder.decode(tokenizer.encoding.decode_single_token_bytes(token))
            print(CONTROLS.sub("", text), end="", flush=True)
    print(decoder.decode(b"", final=True), flush=True)  # "�" for half a letter at the end
    return written


def read_message() -> str:
    """The next line that a person types, without the spaces around it; "" at the end of input."""
    try:
        return input("\n> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"standard input is not {error.encoding} text: it holds the byte 0x{byte:02x}"
        ) from None


def chat(
    reply: Callable[[list[int]], Iterator[int]], tokenizer, n_positions: int, n_new: int
) -> int:
    """Talk until an empty line, the end of input, or until n_positions are read.

    reply(ids) yields up to n_new tokens of an answer to what was said so far and to ids.
    """
    say("Type a message. An empty line or Ctrl-D ends the conversation.")
    n_read = 0
    unread = []  # the end of the last answer, which the model wrote and hasn't read
    while message := read_message():
        try:
            ids = unread + tokenizer.chat(message, first=not unread)
        except UserError as error:  # a byte that has no token
            say(str(error))
            continue
        if n_read + len(ids) + n_new > n_positions:
            say(f"The conversation has filled the {n_positions:,} positions that the model reads.")
            return 0
        written = write_answer(reply(ids), tokenizer)
        n_read += len(ids) + len(written) - 1  # the last token is written, not read
        unread = [written[-1]]
        if written[-1] != tokenizer.end:  # cut short: the turn is closed in its place
            unread.append(tokenizer.end)
        unread += tokenizer.encode("\n")
    return 0
