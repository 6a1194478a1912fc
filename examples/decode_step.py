"""Prefill and decode without the server: params, plan and cache are pytrees, the steps are functions under `jax.jit`.

    python examples/decode_step.py                                          # a tiny random model, no download
    python examples/decode_step.py --model smollm2-135m-instruct "What is the capital of France?"

What a program of your own needs is all here: three objects (params, plan, cache), two steps (`prefill_chunk` and
`decode_step`), and `reserve`, which gives a row its pages. Nothing is imported from `serve`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tangram_jax as tj
from calibrate import shipped_profile
from models.config import ModelConfig
from models.registry import LoadedModel, load_model
from models.testing import random_params, tiny_config, tiny_tokenizer

CHUNK = 64  # tokens of a prefill step: one shape, so one compilation, whatever the length of a prompt

# The model's shape, the plan and the scorer are static: they are hashable, and a program is compiled for each. The
# cache is donated: the pool is written in place, never copied, and the old `cache` must not be used again.
prefill_chunk = jax.jit(
    tj.prefill_chunk, static_argnames=("model_config", "plan", "scorer"), donate_argnames="cache"
)


def prefill(
    params: Any, config: ModelConfig, plan: tj.CachePlan, cache: tj.Cache, row: int, prompt: Sequence[int]
) -> tuple[jax.Array, tj.Cache]:
    """Run `prompt` chunk by chunk. Returns (logits f32[V] after its last token, cache).

    After every chunk each head keeps its own best entries, as many as the plan's law says for the tokens so far:
    the pages of the whole prompt are a fraction of full KV from the first chunk on.
    """
    for start in range(0, len(prompt), CHUNK):
        part = np.asarray(prompt[start : start + CHUNK], np.int32)
        logits, cache = prefill_chunk(
            params,
            config,
            plan,
            cache,
            scorer=tj.get_scorer("expected_attention"),
            row=np.int32(row),
            tokens=np.pad(part, (0, CHUNK - len(part))),
            count=np.int32(len(part)),
        )
    return logits, cache


@partial(jax.jit, static_argnames=("config", "plan", "count"), donate_argnames="cache")
def decode(
    params: Any,
    config: ModelConfig,
    plan: tj.CachePlan,
    cache: tj.Cache,
    first: jax.Array,
    *,
    count: int,
) -> tuple[jax.Array, tj.Cache]:
    """Greedy decoding of rows 0..B-1 in one program: `first` i32[B] and up to `count` - 1 tokens more.

    The cache is part of the loop's state, so pages, tables and counts are carried on the device and the host is not
    asked between two tokens. Returns (tokens i32[B, count], cache); -1 where all rows had ended before.
    """
    rows = jnp.arange(first.shape[0], dtype=jnp.int32)
    stops = jnp.asarray(config.eos_token_ids, jnp.int32)
    tokens = jnp.full((first.shape[0], count), -1, jnp.int32).at[:, 0].set(first)

    def ended(token: jax.Array) -> jax.Array:
        return (token[:, None] == stops).any(axis=1)

    def more(state: tuple[Any, ...]) -> jax.Array:
        index, _, done, _, _ = state
        return (index < count) & ~done.all()

    def one_token(state: tuple[Any, ...]) -> tuple[Any, ...]:
        index, token, done, tokens, cache = state
        # Appends the token to every head group of its row, whole; attention reads each group at its own length.
        logits, cache = tj.decode_step(params, config, plan, cache, rows=rows, tokens=token)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return index + 1, token, done | ended(token), tokens.at[:, index].set(token), cache

    state = (jnp.int32(1), first, ended(first), tokens, cache)
    _, _, _, tokens, cache = lax.while_loop(more, one_token, state)
    return tokens, cache


def generate(
    params: Any, config: ModelConfig, plan: tj.CachePlan, prompts: Sequence[Sequence[int]], count: int
) -> tuple[list[list[int]], tj.Cache]:
    """Greedy answers of up to `count` tokens to several prompts, decoded together; the cache at the end."""
    # How many pages a request takes is known before it runs, from its number of tokens alone.
    pages = sum(plan.pages(len(prompt), count) for prompt in prompts)
    cache = tj.init_cache(
        plan,
        config,
        num_pages=pages,
        max_requests=len(prompts),
        max_tokens=max(map(len, prompts)) + count,
        max_tail=count,  # the answer is kept whole; docs/calibration.md says how to compress it meanwhile
    )
    first = []
    for row, prompt in enumerate(prompts):
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(len(prompt)), np.int32(count))
        logits, cache = prefill(params, config, plan, cache, row, prompt)
        first.append(jnp.argmax(logits))
    tokens, cache = decode(params, config, plan, cache, jnp.stack(first).astype(jnp.int32), count=count)
    answers = []
    for row in np.asarray(tokens).tolist():
        end = next((i for i, token in enumerate(row) if token < 0 or token in config.eos_token_ids), count)
        answers.append(row[:end])
    return answers, cache


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefill and decode without the server.")
    parser.add_argument("prompts", nargs="*", default=["Why do bees dance?", "Name a river in Europe."])
    parser.add_argument("--model", help="a model name or path (default: a tiny random model)")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer, at most (default 32)")
    parser.add_argument(
        "--retention", type=float, default=0.5, help="kept fraction of the KV cache (default 0.5)"
    )
    arguments = parser.parse_args()
    if arguments.tokens < 1 or not 0 < arguments.retention <= 1:
        parser.error("--tokens must be at least 1, and --retention above 0 and at most 1")

    if arguments.model:
        model = load_model(arguments.model)
    else:
        config = tiny_config()
        model = LoadedModel(config, random_params(config, 0), tiny_tokenizer(), config.name)

    # Budgets of the heads: those calibrated for this model if we ship them, otherwise the same for all.
    path = shipped_profile(model.name)
    if path:
        profile = dataclasses.replace(tj.BudgetProfile.load(path), retention=arguments.retention).normalized()
    else:
        layers = len(model.config.full_layers)  # those with a sliding window have no budgets
        profile = tj.BudgetProfile.uniform(layers, model.config.num_kv_heads, arguments.retention)
    # Which heads share pages, and how many entries each group holds after n tokens. Fixed from here on.
    sliding = tj.SlidingLayers.of(model.config, max_tail=arguments.tokens)
    plan = tj.CachePlan.build(profile, heads_per_page=1, page_size=16, cluster="layer", sliding=sliding)

    prompts = [
        model.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in arguments.prompts
    ]
    answers, cache = generate(model.params, model.config, plan, prompts, arguments.tokens)
    for text, prompt, answer in zip(arguments.prompts, prompts, answers, strict=True):
        print(f"> {text}")
        print(model.tokenizer.decode(answer) if arguments.model else f"token ids {answer}")
        print(
            f"  {len(prompt)} prompt tokens in {plan.pages(len(prompt))} pages of {plan.page_size} entries "
            f"({plan.retention(len(prompt)):.2f} of full KV), {len(answer)} generated tokens kept whole"
        )
    print(f"{cache.num_pages - int(cache.num_free)} of {cache.num_pages} pages in use")


if __name__ == "__main__":
    main()
