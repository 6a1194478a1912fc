"""A step as the engine runs it, as a function of nothing else: other processes trace it as well (`serve.tracers`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from serve.buckets import Shape
from serve.handles import TOP_LOGPROBS
from serve.inputs import Arguments, Drafts
from tangram_jax import sampling
from tangram_jax.cache import Cache
from tangram_jax.plan import CachePlan
from tangram_jax.scorers import Scorer
from tangram_jax.sharding import TensorParallel
from tangram_jax.step import Chunk, Decode, step


def step_program(
    config: ModelConfig, plan: CachePlan, scorer: Scorer, parallel: TensorParallel | None = None
) -> Callable[..., Any]:
    """For `jax.jit` with `shape` static and the cache donated."""

    def run_step(
        params: Any, cache: Cache, sampler_ints: jax.Array, flat: jax.Array, *, shape: Shape
    ) -> tuple[jax.Array, Cache, tuple[jax.Array, ...] | None, tuple[jax.Array, Drafts | None] | None]:
        """`flat` of `Arguments`. Returns the logits, the cache, the scores of a prompt and what the sampler is given of
        `flat`, if that is not all of it.
        """
        all_rows, chunk, next_tokens, drafts = Arguments.of(flat, shape)
        decode = None
        if shape.slots:
            rows = all_rows[-shape.slots :]
            tokens = sampler_ints.at[rows, sampling.Ints.LAST_TOKEN].get(mode="fill", fill_value=0)
            decode = Decode(rows, tokens)
            if drafts is not None:
                tokens = jnp.concatenate([tokens[:, None], drafts.tokens], axis=1)
                decode = Decode(rows, tokens, drafts.counts)
        one = parallel.step if parallel else partial(step, config=config, plan=plan)
        logits, cache = one(
            params, scorer=scorer, cache=cache, chunk=chunk, decode=decode, all_logits=shape.scores
        )
        rest = None if shape.rows_alone else (all_rows, drafts)
        if not shape.scores:
            return logits, cache, None, rest
        assert isinstance(chunk, Chunk)
        scores = sampling.token_logprobs(logits, next_tokens, TOP_LOGPROBS)
        return jax.lax.dynamic_slice_in_dim(logits, chunk.valid - 1, 1), cache, scores, rest

    return run_step


def like_step(params: Any, cache: Cache, *rest: Any, shape: Shape) -> Any:
    """The tree structure of what a program of `step_program` returns."""
    drafts = Drafts(0, 0) if shape.drafts else None
    return 0, cache, (0, 0, 0) if shape.scores else None, None if shape.rows_alone else (0, drafts)
