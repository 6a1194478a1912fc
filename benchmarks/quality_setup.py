"""One way to keep the cache of one request, and what a model says with it: for `benchmarks.quality`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tangram_jax as tj
from models.config import ModelConfig
from tangram_jax.scorers import Scorer

ANSWER_TOKENS = 24


@partial(jax.jit, static_argnames=("config", "plan", "scorer"), donate_argnames="cache")
def _chunk(
    params: Any, cache: tj.Cache, tokens: jax.Array, count: jax.Array, *, config: Any, plan: Any, scorer: Any
) -> tuple[jax.Array, tj.Cache]:
    """Logits f32[V] after the last of `count` tokens i32[T] of row 0."""
    return tj.prefill_chunk(
        params, config, plan, cache, scorer=scorer, row=jnp.int32(0), tokens=tokens, count=count
    )


@partial(jax.jit, static_argnames=("config", "plan", "scorer"), donate_argnames="cache")
def _continuation(
    params: Any, cache: tj.Cache, tokens: jax.Array, *, config: Any, plan: Any, scorer: Any
) -> tuple[jax.Array, tj.Cache]:
    """Logits f32[T, V] after each of `tokens` i32[T]."""
    chunk = tj.Chunk(jnp.int32(0), tokens, jnp.int32(tokens.shape[0]))
    return tj.step(params, config, plan, scorer, cache, chunk, None, all_logits=True)


@partial(jax.jit, static_argnames=("config", "plan"), donate_argnames="cache")
def _decode(
    params: Any, cache: tj.Cache, token: jax.Array, *, config: Any, plan: Any
) -> tuple[jax.Array, tj.Cache]:
    """Next token i32[1] (greedy) after `token` i32[1] of row 0."""
    logits, cache = tj.decode_step(params, config, plan, cache, rows=jnp.zeros(1, jnp.int32), tokens=token)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache


@dataclass
class Setup:
    """One way to keep the cache, with one row of pages; results are appended sample by sample."""

    label: str
    plan: tj.CachePlan
    scorer: Scorer
    config: ModelConfig
    params: Any
    max_tokens: int
    chunk: int
    dtype: Any = jnp.float32  # of the cache
    against: Setup | None = None  # which other one it is compared with, sample by sample
    results: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pages = self.plan.pages(self.max_tokens, ANSWER_TOKENS)
        self.cache = tj.init_cache(
            self.plan,
            self.config,
            num_pages=pages,
            max_requests=1,
            max_tokens=self.max_tokens + ANSWER_TOKENS,
            max_tail=ANSWER_TOKENS,
            dtype=self.dtype,
        )
        self.static = {"config": self.config, "plan": self.plan}

    def memory(self, tokens: int) -> float:
        """Bytes of the pages of `tokens` tokens over those of full KV in float32 without page rounding; rings aside."""
        pages = int(self.plan.group_pages(tokens)[: self.plan.num_groups].sum())
        entry = 2 * self.config.head_dim * jnp.dtype(jnp.float32).itemsize
        page_bytes = self.plan.page_bytes(self.config.head_dim, self.dtype)
        return pages * page_bytes / (entry * tokens * self.plan.group_of.size)

    def start(self) -> None:
        self.cache = tj.release(self.plan, self.cache, jnp.int32(0))
        self.count = 0

    def prefill(self, tokens: np.ndarray) -> jax.Array:
        """Runs `tokens` in chunks; returns the logits f32[V] after the last."""
        for first in range(0, len(tokens), self.chunk):
            part = tokens[first : first + self.chunk]
            self._reserve(len(part), 0)
            padded = np.zeros(self.chunk, np.int32)
            padded[: len(part)] = part
            logits, self.cache = _chunk(
                self.params, self.cache, padded, np.int32(len(part)), scorer=self.scorer, **self.static
            )
        return logits

    def continuation(self, tokens: np.ndarray) -> jax.Array:
        """Logits f32[T, V] after each of `tokens`, which all see the compressed context."""
        self._reserve(len(tokens), 0)
        logits, self.cache = _continuation(self.params, self.cache, tokens, scorer=self.scorer, **self.static)
        return logits

    def answer(self, logits: jax.Array) -> list[int]:
        """Greedy tokens, the first from `logits` f32[V], up to the end of the turn."""
        self._reserve(0, ANSWER_TOKENS)
        token = jnp.argmax(logits)[None].astype(jnp.int32)
        ids: list[int] = []
        while len(ids) < ANSWER_TOKENS and int(token[0]) not in self.config.eos_token_ids:
            ids.append(int(token[0]))
            token, self.cache = _decode(self.params, self.cache, token, **self.static)
        return ids

    def _reserve(self, more: int, tail: int) -> None:
        self.count += more
        self.cache = tj.reserve(self.plan, self.cache, jnp.int32(0), jnp.int32(self.count), jnp.int32(tail))
