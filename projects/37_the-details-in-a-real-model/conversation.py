"""The conversation of chapter 37: flags, the forms of a chat, message after message.

build.py holds the model and uses this file. Nothing here knows how a token comes about.
"""

import argparse
import codecs
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
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
    add("--weights", **path, help="another model's GGUF file (README.md says which)")
    add("--data", **path, help="a UTF-8 text file, or a folder of them, to measure on instead")
    add("--output-dir", **path, help="where results go (default: outputs/ here)")
    number = {"type": cli.natural, "metavar": "N"}
    add("--tokens", **number, help="longest answer (default 256)")
    add("--context", **number, default=8_192, help="most positions to read (default 8192)")
    add("--seed", **number, default=1, help="of the draws at a temperature above 0")
    add("--temperature", type=temperature, metavar="T", default=0.0, help="0: the likeliest token")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    options = parser.parse_args(argv)
    if options.chat and sys.stdin is None:
        raise UserError("--chat reads from standard input, which is closed")
    if options.context < 2:
        raise UserError("--context 1 holds no question and an answer; give 2 or more")
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


# ---------------------------------------------------------------- the forms of a chat


@dataclass(frozen=True)
class ChatForm:
    """How a model was trained to read a conversation."""

    turn: str  # from a message, {}, up to where the answer begins
    end: str  # the token that ends an answer
    gap: str = ""  # what stands between it and the next message
    opening: str = ""  # what stands before the first message


# A file says its form as a template, a small program. We don't run it: one of these pieces tells
# which form it makes.
FORMS = {
    "<|im_start|>": ChatForm(  # ChatML: SmolLM2, Qwen, ...
        turn="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        end="<|im_end|>",
        gap="\n",
    ),
    "<|start_header_id|>": ChatForm(  # Llama 3
        turn="<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        end="<|eot_id|>",
    ),
    "<start_of_turn>": ChatForm(  # Gemma
        turn="<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
        end="<end_of_turn>",
        gap="\n",
    ),
    "[INST]": ChatForm(turn="[INST] {} [/INST]", end="</s>"),  # Mistral
    "<|START_OF_TURN_TOKEN|>": ChatForm(  # Command R
        turn="<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        end="<|END_OF_TURN_TOKEN|>",
    ),
    "<|start_of_role|>": ChatForm(  # Granite
        turn="<|start_of_role|>user<|end_of_role|>{}<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>",
        end="<|end_of_text|>",
        gap="\n",
    ),
    "<｜User｜>": ChatForm(  # DeepSeek
        turn="<｜User｜>{}<｜Assistant｜>", end="<｜end▁of▁sentence｜>"
    ),
}
KNOWN = "ChatML, Llama 3, Gemma, Mistral, Command R, Granite, DeepSeek"
# The instruction that a ChatML template puts before a conversation which has none of its own; or
# the template's code for one of its own.
INSTRUCTION = re.compile(r"<\|im_start\|>system(?:\n|\\n)[^{}<]+<\|im_end\|>(?:\n|\\n)")


def find_instruction(template: str) -> str:
    """What a ChatML template puts before a conversation which has no instruction; mostly nothing.

    In the template it is a text in quotes, with \\n for a new line. Where the quotes end within
    it, code puts it together, from an instruction that only other conversations have.
    """
    letters = {"n": "\n", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
    for found in INSTRUCTION.finditer(template):
        quote = template[: found.start()][-1:]
        if quote not in ("'", '"') or quote not in re.sub(r"\\.", "", found[0]):
            return re.sub(r"\\(.)", lambda pair: letters.get(pair[1], pair[0]), found[0])
    return ""


def find_form(file, special: dict[str, int]) -> ChatForm | None:
    """The form of the chat that a file was trained for; None if it names none that we know."""
    template = file.metadata.get("tokenizer.chat_template", "")
    if not template and "<|im_start|>" in special:
        template = "<|im_start|>"
    for sign, form in FORMS.items():
        if sign in template and form.end in special:
            return replace(form, opening=find_instruction(template))
    return None


def find_start(file, usual: bool = False) -> list[int]:
    """The ids that stand before every text: the file's first token, if it wants one.

    `usual`: whether its kind of tokenizer has one where the file says nothing of it.
    """
    template = file.metadata.get("tokenizer.chat_template", "")
    wanted = file.metadata.get("tokenizer.ggml.add_bos_token", usual) or "bos_token" in template
    first = file.metadata.get("tokenizer.ggml.bos_token_id")
    return [first] if wanted and first is not None else []


def find_ends(file, special: dict[str, int], form: ChatForm | None) -> set[int]:
    """The ids that end an answer: of a text, a turn, a message, and what the chat's form names."""
    names = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")]
    ends = {file.metadata[name] for name in names if name in file.metadata}
    if form:
        ends.add(special[form.end])
    return ends


# ---------------------------------------------------------------- talking


def write_answer(tokens: Iterable[int], tokenizer) -> list[int]:
    """Print the tokens of an answer as they come. Returns them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a letter may be several tokens
    written = []
    for token in tokens:
        written.append(token)
        if token not in tokenizer.ends:
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
    close = [tokenizer.special[tokenizer.form.end], *tokenizer.encode(tokenizer.form.gap)]
    unread = []  # the end of the last answer, which the model hasn't read
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
        unread = close
        if written[-1] not in tokenizer.ends:  # cut short by --tokens
            unread = [written[-1], *close]
    return 0
