"""Results of a step under way on the device."""

from dataclasses import dataclass

import jax

from serve.sequence import Sequence

TOP_LOGPROBS = 20


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of the tokens after each of a chunk's: handles, see `Handles`."""

    logprobs: jax.Array  # f32[T]
    top_ids: jax.Array  # i32[T, TOP_LOGPROBS]
    top_logprobs: jax.Array  # f32[T, TOP_LOGPROBS]


@dataclass(frozen=True)
class Handles:
    """Results under way on the device; row i belongs to sequence i, None where the sample means nothing."""

    sequences: list[Sequence | None]
    tokens: jax.Array | None
    logprobs: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None
    prompt: PromptScores | None = None
