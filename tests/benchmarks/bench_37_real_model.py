"""How fast chapter 37's model reads and writes: with and without its memory, and against transformers.

The same weights, thread and prompt. `pip install transformers==5.24.0` for the comparison; without
it only our own ratio is measured.
"""

import importlib.util
import os
import time
from collections.abc import Callable, Iterator

import torch
from ratios import Ratio

from shared import chapters, console

real = chapters.load_build(37)
N_PROMPT = 512
N_NEW = 24
ROUNDS = 3


def transformers_model(file, cfg, vocab_size: int):
    """Their Llama with the same numbers; queries and keys sorted for RoPE on halves, which is theirs."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=cfg.d_model,
        intermediate_size=cfg.d_hidden,
        num_hidden_layers=cfg.n_layers,
        num_attention_heads=cfg.n_heads,
        num_key_value_heads=cfg.n_kv_heads,
        max_position_embeddings=cfg.block_size,
        rms_norm_eps=cfg.norm_eps,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_base},
    )
    model = LlamaForCausalLM(config).eval()

    def halves(name: str) -> torch.Tensor:
        rows = file.read(name).unflatten(0, (-1, cfg.head_dim // 2, 2))
        return rows.transpose(1, 2).flatten(0, 2)

    state = {}
    for ours, theirs in their_names(cfg.n_layers).items():
        turned = ours.endswith(("attn_q", "attn_k"))
        read = halves if turned else file.read
        state[f"{theirs}.weight"] = read(f"{ours}.weight")
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def their_names(n_layers: int) -> dict[str, str]:
    """Names in the file -> names in transformers, both without ".weight"."""
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for i in range(n_layers):
        ours = f"blk.{i}."
        theirs = f"model.layers.{i}."
        names |= {f"{ours}attn_{letter}": f"{theirs}self_attn.{letter}_proj" for letter in "qkv"}
        names |= {
            f"{ours}ffn_{part}": f"{theirs}mlp.{part}_proj" for part in ("gate", "up", "down")
        }
        names[f"{ours}attn_output"] = f"{theirs}self_attn.o_proj"
        names[f"{ours}attn_norm"] = f"{theirs}input_layernorm"
        names[f"{ours}ffn_norm"] = f"{theirs}post_attention_layernorm"
    return names


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


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def ratios() -> list[Ratio]:
    file = real.WeightsFile(real.packaged_weights())
    model = real.load_model(file)
    ids = real.Tokenizer(file).encode(real.evaluation_text())[:N_PROMPT]
    found = [memory_against_reading_again(model, ids[:256])]
    if importlib.util.find_spec("transformers"):
        found += against_transformers(
            model, transformers_model(file, model.cfg, model.vocab_size), ids
        )
    else:
        console.say("transformers is not installed, so nothing is compared with it")
    return found


def memory_against_reading_again(model, ids: list[int]) -> Ratio:
    """One more token after these ids: with what is remembered, over reading all of them again."""
    rounds = []
    with torch.inference_mode():
        for _ in range(ROUNDS):
            again = timed(lambda: model.states(torch.tensor([ids])))
            writer = ours(model, ids)
            next(writer)
            rounds.append(timed(lambda: next(writer)) / again)  # noqa: B023: called at once
            writer.close()
    return Ratio("a token after 256 with memory / reading all again", rounds, at_most=0.2)


def against_transformers(model, other, ids: list[int]) -> list[Ratio]:
    """They take turns at every token, so that a busy moment of the machine hits both."""
    reading = []
    writing = []
    for _ in range(ROUNDS):
        mine = ours(model, ids)
        their = theirs(other, ids)
        reading.append(timed(lambda: next(mine)) / timed(lambda: next(their)))  # noqa: B023
        for _ in range(N_NEW):
            writing.append(timed(lambda: next(mine)) / timed(lambda: next(their)))  # noqa: B023
        mine.close()
    return [
        Ratio("reading 512 tokens / transformers", reading, at_most=1.0),
        Ratio("writing a token / transformers", writing, at_most=1.0),
    ]
