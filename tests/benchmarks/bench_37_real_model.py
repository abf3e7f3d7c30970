"""Chapter 37's model against Hugging Face transformers: the same weights, threads and prompt, turn by turn.

    python tests/benchmarks/bench_37_real_model.py      (about two minutes; OMP_NUM_THREADS sets the threads)

Needs the chapter's packages, and `pip install transformers==5.24.0` for the comparison; without it, only our own
numbers are measured. Exit status 1 if we are slower in reading or writing, if the cache is less than 5 times as fast
as reading again at 256 tokens, or if opening takes 15 seconds or memory 2.5 GB.
"""

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli
from shared.checks import Checks
from shared.console import Table, say

real = chapters.load_build(37)
N_PROMPT, N_NEW, TRIES = 1024, 24, 4


def transformers_model(file, cfg, vocab_size: int):
    """Their Llama with the same numbers; queries and keys sorted for RoPE on halves, which is theirs."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=cfg.d_model, intermediate_size=cfg.d_hidden,
        num_hidden_layers=cfg.n_layers, num_attention_heads=cfg.n_heads, num_key_value_heads=cfg.n_kv_heads,
        max_position_embeddings=cfg.block_size, rms_norm_eps=cfg.norm_eps, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_base},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()

    def halves(name: str) -> torch.Tensor:
        rows = file.read(name).unflatten(0, (-1, cfg.head_dim // 2, 2))
        return rows.transpose(1, 2).flatten(0, 2)

    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for i in range(cfg.n_layers):
        ours, theirs = f"blk.{i}.", f"model.layers.{i}."
        names |= {f"{ours}attn_{letter}": f"{theirs}self_attn.{letter}_proj" for letter in "qkv"}
        names |= {f"{ours}ffn_{part}": f"{theirs}mlp.{part}_proj" for part in ("gate", "up", "down")}
        names |= {f"{ours}attn_output": f"{theirs}self_attn.o_proj", f"{ours}attn_norm": f"{theirs}input_layernorm"}
        names |= {f"{ours}ffn_norm": f"{theirs}post_attention_layernorm"}
    state = {
        f"{theirs}.weight": (halves if ours.endswith(("attn_q", "attn_k")) else file.read)(f"{ours}.weight")
        for ours, theirs in names.items()
    }
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


@torch.inference_mode()
def theirs(model, ids: list[int]) -> Iterator[int]:
    """Their greedy tokens; the first comes when ids have been read."""
    seen = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    while True:
        token = int(seen.logits[0, -1].argmax())
        yield token
        seen = model(torch.tensor([[token]]), cache=seen.cache, use_cache=True)


def ours(model, ids: list[int]) -> Iterator[int]:
    """The same of ours."""
    with real.remembering(model, len(ids) + N_NEW):
        yield from real.stream(model, ids, 1 + N_NEW)


def in_turn(writers: dict) -> dict[str, tuple[float, float, list[int]]]:
    """{name: start} -> {name: (seconds to read, seconds a token, tokens)}.

    They take turns at every token, so that a busy moment of the machine hits all alike. Of the readings the fastest
    counts, of the tokens the median.
    """
    reading, writing, tokens = ({name: [] for name in writers} for _ in range(3))
    for _ in range(TRIES):
        running = {name: start() for name, start in writers.items()}
        for i in range(1 + N_NEW):
            for name, writer in running.items():
                started = time.perf_counter()
                token = next(writer)
                (writing if i else reading)[name].append(time.perf_counter() - started)
                tokens[name].append(token)
        for writer in running.values():
            writer.close()
    return {name: (min(reading[name]), statistics.median(writing[name]), tokens[name]) for name in writers}


def against_transformers(model, file, ids: list[int], checks: Checks) -> None:
    other = transformers_model(file, model.cfg, model.vocab_size)
    seen = in_turn(
        {
            "ours": lambda: ours(model, ids),
            "transformers": lambda: theirs(other, ids),
        }
    )
    rows = [[name, f"{read:.2f}", f"{1 / write:.1f}"] for name, (read, write, _) in seen.items()]
    say(Table([f"threads: {torch.get_num_threads()}", f"seconds to read {len(ids):,}", "tokens a second"], rows))
    (read, write, tokens), (their_read, their_write, their_tokens) = seen["ours"], seen["transformers"]
    checks.true("tokens as transformers writes them", f"{len(tokens)} tokens", "the same", their_tokens == tokens)
    checks.between("our time to read over theirs", read / their_read, 0, 1)
    checks.between("our time to write over theirs", write / their_write, 0, 1)


def main() -> int:
    checks, started = Checks(), time.perf_counter()
    file = real.WeightsFile(real.packaged_weights())
    tokenizer = real.Tokenizer(file)
    model = real.load_model(file)
    checks.between("seconds to open the file and build the model", time.perf_counter() - started, 0, 15)
    ids = tokenizer.encode(real.evaluation_text())[:N_PROMPT]
    write = in_turn({"ours": lambda: ours(model, ids[:256])})["ours"][1]
    again = []
    with torch.inference_mode():
        for _ in range(TRIES):
            began = time.perf_counter()
            model.states(torch.tensor([ids[:256]]))
            again.append(time.perf_counter() - began)
    checks.between("times as fast with the cache at 256 tokens", min(again) / write, 5, 1000)
    memory = real.peak_memory()
    checks.between("most memory so far, GB", float(memory.split()[0]), 0, 2.5)
    if importlib.util.find_spec("transformers"):
        against_transformers(model, file, ids, checks)
    else:
        say("transformers is not installed, so nothing is compared with it; pip install transformers==5.24.0")
    return checks.report()


if __name__ == "__main__":
    cli.run(main)
