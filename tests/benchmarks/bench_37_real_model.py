"""Chapter 37's model against Hugging Face transformers: the same weights, threads and prompt, turn by turn.

    python tests/benchmarks/bench_37_real_model.py

Needs the chapter's packages, and `pip install transformers==5.24.0` for the comparison; without it, only our own
numbers are measured. Exit status 1 if we are slower in reading or writing, if the cache is less than 5 times as fast
as reading again at 256 tokens, if opening takes 15 seconds or memory 2.5 GB. About two minutes on an idle machine.
"""

import importlib.util
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli
from shared.checks import Checks
from shared.console import Table, say

real = chapters.load_build(37)
N_PROMPT, N_NEW, TRIES = 1024, 48, 3


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
def theirs(model, ids: list[int], n_new: int) -> tuple[float, float, list[int]]:
    """Seconds to read ids, seconds for each of n_new more tokens, and the tokens."""
    started = time.perf_counter()
    seen = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    tokens = [int(seen.logits[0, -1].argmax())]
    read = time.perf_counter()
    for _ in range(n_new):
        seen = model(torch.tensor([tokens[-1:]]), cache=seen.cache, use_cache=True)
        tokens.append(int(seen.logits[0, -1].argmax()))
    return read - started, (time.perf_counter() - read) / n_new, tokens


def ours(model, ids: list[int], n_new: int) -> tuple[float, float, list[int]]:
    """The same of ours."""
    with model.remembering(len(ids) + n_new):
        started = time.perf_counter()
        writing = real.stream(model, ids, 1 + n_new)
        tokens = [next(writing)]
        read = time.perf_counter()
        tokens += writing
    return read - started, (time.perf_counter() - read) / n_new, tokens


def in_turn(actions: dict) -> dict[str, tuple[float, float, list[int]]]:
    """Each action TRIES times, one after the other, so that a busy moment hits all alike; the fastest of each part."""
    tries = {name: [] for name in actions}
    for _ in range(TRIES):
        for name, action in actions.items():
            tries[name].append(action())
    return {name: (min(t[0] for t in seen), min(t[1] for t in seen), seen[0][2]) for name, seen in tries.items()}


def against_transformers(model, file, ids: list[int], checks: Checks) -> None:
    other = transformers_model(file, model.cfg, model.vocab_size)

    def within_fast(action, *arguments):
        def run():
            with real.step_05.fast(model):
                return action(*arguments)

        return run

    seen = in_turn(
        {
            "ours": within_fast(ours, model, ids, N_NEW),
            "transformers": lambda: theirs(other, ids, N_NEW),
            "transformers, with our choice of kernels": within_fast(theirs, other, ids, N_NEW),
        }
    )
    say()
    rows = [[name, f"{read:.2f}", f"{1 / write:.1f}"] for name, (read, write, _) in seen.items()]
    say(Table([f"{torch.get_num_threads()} threads", f"seconds to read {N_PROMPT:,}", "tokens a second writing"], rows))
    read, write, tokens = seen.pop("ours")
    for name, (their_read, their_write, their_tokens) in seen.items():
        checks.equal(f"{name}: the tokens that we write", their_tokens, tokens)
        checks.between(f"{name}: our time to read over theirs", read / their_read, 0, 1)
        checks.between(f"{name}: our time to write over theirs", write / their_write, 0, 1)


def main() -> int:
    checks, started = Checks(), time.perf_counter()
    file = real.step_01.WeightsFile(real.step_01.packaged_weights())
    tokenizer, model = real.step_02.Tokenizer(file), real.step_04.load_model(file, real.CachedGPT)
    checks.between("seconds to open the file and build the model", time.perf_counter() - started, 0, 15)
    ids = tokenizer.encode(real.step_05.evaluation_text())[:N_PROMPT]
    with real.step_05.fast(model):
        _, write, _ = min((ours(model, ids[:256], 8) for _ in range(TRIES)), key=lambda seen: seen[1])
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
