"""Chapter 37: the details in a real model.

SmolLM2-135M-Instruct, a language model that others trained, runs in the blocks of the last chapters: RMSNorm, SwiGLU,
RoPE and the tied head come from chapter 07. New here: key and value heads that queries share, and a memory for them.

    python build.py                 three answers, perplexity on a fixed text, speed and memory (--tiny is the same)
    python build.py --full          the same, then the perplexity of more text by the length of the context
    python build.py --prompt "..."  one answer, as it is written
    python build.py --chat          a conversation; an empty line or Ctrl-D ends it

Shapes: B batch, T positions, C = d_model, H heads, G = n_kv_heads, D = head_dim = C / H, V = vocab_size.
"""

import argparse
import codecs
import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import files, chapters, cli, data
from shared.console import Table, say
from shared.console import UserError
from shared.experiment import log_text

gpt, modern = chapters.load_build(5), chapters.load_build(7)
# From the steps: the file, its tokenizer, the shape and the numbers of the model in it, and how it is measured.
step_01, step_02, step_04, step_05 = (chapters.load_step(37, step) for step in (1, 2, 4, 5))
GroupedConfig, fast = chapters.load_step(37, 3).GroupedConfig, step_05.fast

# ---------------------------------------------------------------- attention


class GroupedQueryAttention(modern.RotaryAttention):
    """Neighbouring query heads share one key and one value head (Ainslie et al. 2023). Shapes: G = n_kv_heads."""

    def __init__(self, cfg: GroupedConfig):
        super().__init__(cfg)
        self.n_kv_heads = cfg.n_kv_heads
        self.qkv = nn.Linear(cfg.d_model, (cfg.n_heads + 2 * cfg.n_kv_heads) * cfg.head_dim, bias=cfg.bias)

    def shared_heads(self, x: torch.Tensor, start: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C), whose first position is `start` -> queries (B, H, T, D), keys and values (B, G, T, D)."""
        B, T, _ = x.shape
        H, G = self.n_heads, self.n_kv_heads
        qkv = self.qkv(x).view(B, T, H + 2 * G, self.head_dim).transpose(1, 2)
        turned = self.turn(qkv[:, : H + G], start)  # queries and keys together
        return turned[:, :H], turned[:, H:], qkv[:, H + G :]

    def turn(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """RoPE on heads (B, heads, T, D) whose first position is `start`."""
        return modern.apply_rope(x, self.cos[start:], self.sin[start:])

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries, keys, values, each (B, H, T, D)."""
        q, k, v = self.shared_heads(x)
        group = self.n_heads // self.n_kv_heads
        # Each head `group` times in a row: k0 k0 k0 k1 k1 k1. Tiling them, k0 k1 k0 k1, would mix up who reads whom.
        return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


class KeyValueCache:
    """One layer's keys and values of every position read so far, for one text."""

    def __init__(self, cfg: GroupedConfig, n_positions: int, like: torch.Tensor):
        self.keys = like.new_empty(1, cfg.n_kv_heads, n_positions, cfg.head_dim)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next T positions' (1, G, T, D) -> all so far (1, G, length, D). ValueError if they don't fit."""
        end = self.length + k.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(f"{end} positions don't fit a cache of {self.keys.shape[2]}")
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class CachedAttention(GroupedQueryAttention):
    """Step 03's attention; with a cache, x is what follows the positions in it."""

    cache: KeyValueCache | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C); B is 1 with a cache."""
        if self.cache is None:
            return super().forward(x)
        T, past = x.shape[1], self.cache.length
        q, k, v = self.shared_heads(x, start=past)
        k, v = self.cache.append(k, v)
        # Position past + t sees the past + t + 1 first keys. A single new token sees all there are: no mask.
        mask = None if T == 1 or past == 0 else x.new_ones(T, past + T, dtype=torch.bool).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=past == 0, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))


# ---------------------------------------------------------------- block and model


class RealBlock(modern.ModernBlock):
    def make_attention(self, cfg: GroupedConfig) -> nn.Module:
        return GroupedQueryAttention(cfg)


class RealGPT(modern.ModernGPT):
    """Chapter 07's model with step 03's attention."""

    def make_block(self, cfg: GroupedConfig) -> nn.Module:
        return RealBlock(cfg)

    def states(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> what the head reads (B, T, C): logits for 49,152 tokens are too many to want them all."""
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return self.norm_f(x)


class CachedBlock(modern.ModernBlock):
    def make_attention(self, cfg: GroupedConfig) -> nn.Module:
        return CachedAttention(cfg)


class CachedGPT(RealGPT):
    """Step 04's model, which can remember."""

    def make_block(self, cfg: GroupedConfig) -> nn.Module:
        return CachedBlock(cfg)

    @contextmanager
    def remembering(self, n_positions: int) -> Iterator[None]:
        """Within it, each call reads on where the one before ended. ValueError for more positions than block_size."""
        if n_positions > self.cfg.block_size:
            raise ValueError(f"{n_positions} positions don't fit a block_size of {self.cfg.block_size}")
        for block in self.blocks:
            block.attn.cache = KeyValueCache(self.cfg, n_positions, self.token_embedding.weight)
        try:
            yield
        finally:
            for block in self.blocks:
                block.attn.cache = None


@torch.inference_mode()
def stream(
    model: CachedGPT, ids: list[int], n_new: int, end: int = -1, temperature: float = 0.0, draws=None
) -> Iterator[int]:
    """Within model.remembering(): read ids, then yield up to n_new tokens, or up to `end`.

    temperature 0 takes the likeliest; else they come from softmax(logits / temperature) and the generator `draws`.
    """
    for _ in range(n_new):
        idx = torch.tensor([ids], device=model.token_embedding.weight.device)
        with fast(model) if len(ids) > 1 else nullcontext():  # a single token waits for memory, not for products
            last = model.states(idx)[0, -1]
        logits = model.lm_head(last)  # (V,): what follows the last position
        if temperature == 0:
            ids = [int(logits.argmax())]
        else:
            ids = [int(torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=draws))]
        yield ids[0]
        if ids[0] == end:
            return


# ---------------------------------------------------------------- conversation

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model may write an escape byte, a terminal must not get it


def write_answer(model: CachedGPT, tokenizer, ids: list[int], options: argparse.Namespace) -> list[int]:
    """Within model.remembering(): read ids and print the answer as it comes. Returns its tokens."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be spread over several tokens
    written = []
    for token in stream(model, ids, options.tokens, tokenizer.end, options.temperature, options.draws):
        written.append(token)
        if token != tokenizer.end:
            text = decoder.decode(tokenizer.encoding.decode_single_token_bytes(token))
            print(CONTROLS.sub("", text), end="", flush=True)
    print(flush=True)
    return written


def answer(model: CachedGPT, tokenizer, message: str, options: argparse.Namespace) -> list[int]:
    """Answer one message; a model that knows no chat continues it as plain text."""
    ids = tokenizer.chat(message) if tokenizer.chats else tokenizer.encode(message)
    if not 0 < len(ids) <= model.cfg.block_size - options.tokens:
        longest = model.cfg.block_size - options.tokens
        raise UserError(
            f"--prompt comes to {len(ids):,} tokens; it must have 1 to {longest:,} to leave room for an answer"
        )
    with model.remembering(len(ids) + options.tokens):
        return write_answer(model, tokenizer, ids, options)


def chat(model: CachedGPT, tokenizer, options: argparse.Namespace) -> int:
    """Talk until an empty line, the end of input, or a full memory."""
    say("Type a message. An empty line or Ctrl-D ends the conversation.")
    unread = []  # the end of the last answer, which the model wrote and hasn't read
    with model.remembering(model.cfg.block_size):
        while True:
            try:
                message = input("\n> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                message = ""
            if not message:
                return 0
            try:
                ids = unread + tokenizer.chat(message, first=not unread)
            except UserError as error:
                say(str(error))
                continue
            if model.blocks[0].attn.cache.length + len(ids) + options.tokens > model.cfg.block_size:
                say(f"The conversation has filled the {model.cfg.block_size:,} positions that the model can read.")
                return 0
            written = write_answer(model, tokenizer, ids, options)
            unread = [written[-1], *([] if written[-1] == tokenizer.end else [tokenizer.end]), *tokenizer.encode("\n")]


# ---------------------------------------------------------------- measurements

PROMPTS = (
    "What is the capital of France?",
    "Explain what a tokenizer does in one sentence.",
    "Name three primary colors.",
)
N_EVALUATED = 1024
CONTEXTS = (32, 128, 512, 2048, 8192)
BAND = 0.002  # nats: how far another machine's loss may lie off; machines add in different orders


def peak_memory() -> str:
    """The most memory that this process has held, where the system says so."""
    try:
        import resource
    except ModuleNotFoundError:
        return "not told by this system"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return f"{peak / 1e9:.2f} GB"


def speed(model: CachedGPT, ids: list[int], n_new: int = 64) -> tuple[float, float]:
    """Tokens a second when reading ids at once, and when writing n_new more one by one."""
    with model.remembering(len(ids) + n_new):
        started = time.perf_counter()
        writing = stream(model, ids, 1 + n_new)
        next(writing)
        read = time.perf_counter()
        written = sum(1 for _ in writing)
        return len(ids) / (read - started), written / (time.perf_counter() - read)


def report(model: CachedGPT, ids: torch.Tensor, options: argparse.Namespace) -> tuple[list, dict]:
    """Measure; returns what there is to say, as text and tables, and the same as plain data."""
    part = ids[: 1 + N_EVALUATED]
    loss, (reading, writing) = step_05.mean_loss(model, part), speed(model, part[:-1].tolist())
    found = {"loss": loss, "reading": reading, "writing": writing, "memory": peak_memory(), "opening": options.seconds}
    rows = [
        [f"perplexity on {len(part) - 1:,} tokens", f"{math.exp(loss):.3f}"],
        ["their mean loss, nats a token", f"{loss:.4f}"],
        ["reading, tokens a second", f"{reading:.0f}"],
        ["writing, tokens a second", f"{writing:.1f}"],
        ["seconds to open and build", f"{options.seconds:.1f}"],
        ["most memory held", found["memory"]],
    ]
    blocks = [Table(["measured", "value"], rows)]
    if options.full:
        lengths = [length for length in CONTEXTS if length <= min(model.cfg.block_size, len(ids) - 1)]
        found["by_context"] = {length: step_05.mean_loss(model, ids, length) for length in lengths}
        rows = [[f"{length:,}", f"{loss:.4f}", f"{math.exp(loss):.3f}"] for length, loss in found["by_context"].items()]
        blocks += [f"All {len(ids) - 1:,} tokens, read in windows:", Table(["window", "loss", "perplexity"], rows)]
    return blocks, found


def compare(found: dict, folder: Path) -> str:
    """In words: is this run's loss the one in folder/results.json?"""
    path = folder / "results.json"
    expected = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if any(found[key] != expected.get(key) for key in ("weights_sha256", "text_sha256")):
        return "Not compared with expected/: other weights or another text."
    gap = found["loss"] - expected["loss"]
    where = "As expected: the loss lies within" if abs(gap) <= BAND else "The loss lies OUTSIDE"
    return f"{where} the band of {BAND} around the one in expected/ (off by {gap:+.6f})."


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the flags. UserError for one that can't be followed."""
    parser = cli.OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    preset, what = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    preset.add_argument("--tiny", action="store_true", help="three answers and a short text (the default)")
    preset.add_argument("--full", action="store_true", help="more text, and the perplexity by length of the context")
    what.add_argument("--prompt", metavar="TEXT", help="answer this and stop")
    what.add_argument("--chat", action="store_true", help="hold a conversation")
    parser.add_argument("--weights", metavar="PATH", help="another GGUF file of the llama architecture")
    parser.add_argument("--tokens", type=cli.natural, metavar="N", default=256, help="longest answer (default 256)")
    parser.add_argument("--temperature", type=temperature, metavar="T", default=0.0, help="0: the likeliest (default)")
    parser.add_argument(
        "--seed", type=cli.natural, metavar="N", default=1, help="of the draws at a temperature above 0"
    )
    parser.add_argument("--data", metavar="PATH", help="a UTF-8 text file, or a folder of them, to measure on instead")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="where results go (default: outputs/ here)")
    options = parser.parse_args(argv)
    options.device = cli.resolve_device(options.device, "full" if options.full else "tiny")
    options.draws = torch.Generator(options.device).manual_seed(options.seed)
    return options


def temperature(text: str) -> float:
    """argparse type: a number from 0 to 10."""
    try:
        if 0 <= (value := float(text)) <= 10:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 10")


def setting(file, model: CachedGPT, text: str, options: argparse.Namespace) -> tuple[str, dict]:
    """What is run on what, in words and as plain data."""
    cfg = model.cfg
    hashes = {"weights_sha256": hashlib.sha256(file.raw).hexdigest()}
    hashes["text_sha256"] = hashlib.sha256(text.encode("utf-8")).hexdigest()
    words = (
        f"model   {file.metadata.get('general.name', file.path.name)}: {gpt.count_parameters(model):,} parameters, "
        f"{cfg.n_layers} layers, d_model {cfg.d_model}, {cfg.n_heads} query heads on {cfg.n_kv_heads} keys and values\n"
        f"from    {file.path.name}, {len(file.raw):,} bytes, SHA-256 {hashes['weights_sha256']}\n"
        f"text    {options.data or 'documentation of torch'}, SHA-256 {hashes['text_sha256']}\n"
        f"device  {options.device}, threads: {torch.get_num_threads()}, float32"
    )
    return words, hashes


def experiment(file, model: CachedGPT, tokenizer, options: argparse.Namespace) -> int:
    """Three answers, what was measured, and where it is kept."""
    here = Path(__file__).parent
    folder = options.output_dir or here / "outputs"
    files.claim_folder(folder)
    text = "".join(data.texts_at(Path(options.data))) if options.data else step_05.evaluation_text()
    ids = torch.tensor(tokenizer.encode(text))
    if len(ids) < 2:
        raise UserError(f"--data {options.data} holds {len(ids)} tokens; give a text of some hundred words")
    words, hashes = setting(file, model, text, options)
    say(words)
    said = []
    for message in PROMPTS:
        print(f"\n> {message}")
        written = [token for token in answer(model, tokenizer, message, options) if token != tokenizer.end]
        said.append(f"> {message}\n{tokenizer.encoding.decode(written)}")
    blocks, found = report(model, ids, options)
    found |= hashes | {"answers": said}
    blocks.append(compare(found, here / "expected"))
    for block in blocks:
        say()
        say(block)
    files.write_text(folder / "run_log.txt", log_text([words, *said, *blocks]))
    files.write_json(folder / "results.json", found)
    say(f"\nwritten to {folder}: run_log.txt, results.json")
    return 0


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    started = time.perf_counter()
    file = step_01.WeightsFile(options.weights or step_01.packaged_weights())
    tokenizer, model = step_02.Tokenizer(file), step_04.load_model(file, CachedGPT).to(options.device)
    options.seconds = time.perf_counter() - started
    if tokenizer.n_tokens != model.vocab_size:
        raise file.refusal(f"it has {tokenizer.n_tokens:,} tokens and embeddings for {model.vocab_size:,}")
    if options.tokens >= model.cfg.block_size:
        raise UserError(
            f"--tokens {options.tokens} leaves no room for a question: the model reads {model.cfg.block_size:,}"
        )
    if options.chat and not tokenizer.chats:
        raise UserError(f"--chat: {file.path.name} knows no chat, only --prompt, whose text it continues")
    if options.chat:
        return chat(model, tokenizer, options)
    if options.prompt is not None:
        answer(model, tokenizer, options.prompt, options)
        return 0
    return experiment(file, model, tokenizer, options)


if __name__ == "__main__":
    cli.run(main)
