"""Results of a step under way on the device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from serve.request import PromptLogprob
from serve.sequence import ChunkWork, Sequence

TOP_LOGPROBS = 20


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of the tokens after each of a chunk's: handles, see `Handles`."""

    logprobs: jax.Array  # f32[T]
    top_ids: jax.Array  # i32[T, TOP_LOGPROBS]
    top_logprobs: jax.Array  # f32[T, TOP_LOGPROBS]

    def note(self, chunk: ChunkWork) -> None:
        """Read them and put them in their places in the chunk's sequence; its first token has none."""
        sequence = chunk.sequence
        assert sequence.prompt_logprobs is not None
        count = sequence.sampling.prompt_logprobs or 0
        logprobs, ids, tops = (np.asarray(x) for x in (self.logprobs, self.top_ids, self.top_logprobs))
        for i in range(len(chunk.tokens)):
            at = chunk.start + i + 1
            if at < sequence.prompt_length:
                pairs = list(zip(ids[i, :count].tolist(), tops[i, :count].tolist(), strict=True))
                sequence.prompt_logprobs[at] = PromptLogprob(float(logprobs[i]), pairs)


class Sampled(NamedTuple):
    """One token that was sampled, and its log-probabilities if its request wants them."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


@dataclass(frozen=True)
class Handles:
    """Results under way, to the host's memory; row i belongs to sequence i, None where the sample means nothing.

    A step that verified drafts has several tokens in a row, of which the first `right` count.
    """

    sequences: list[Sequence | None]
    tokens: jax.Array | None  # i32[B], or i32[B, S]; what follows has S as well
    logprobs: jax.Array | None = None  # f32[B]
    top_ids: jax.Array | None = None  # i32[B, TOP_LOGPROBS]
    top_logprobs: jax.Array | None = None  # f32[B, TOP_LOGPROBS]
    prompt: PromptScores | None = None
    right: jax.Array | None = None  # i32[B]
    counts: np.ndarray | None = None  # i32[B]: the drafts of each row and one

    @property
    def _has_scores(self) -> bool:
        """Whether there are log-probabilities that somebody wants."""
        return self.logprobs is not None and any(
            s and s.sampling.logprobs is not None for s in self.sequences
        )

    def tokens_alone(self) -> list[int] | None:
        """Wait for the tokens of all rows, if no sequence has more of them than one and nobody wants scores."""
        if self.tokens is None or self.right is not None or self._has_scores:
            return None
        tokens: list[int] = np.asarray(self.tokens).tolist()
        return tokens

    def results(self) -> Iterator[tuple[Sequence, int, list[Sampled]]]:
        """Wait for them: each sequence, how many of its drafts were wrong, and its tokens."""
        if self.tokens is None:
            return
        size = len(self.tokens)
        tokens = np.asarray(self.tokens).reshape(size, -1)
        right = np.ones(size, np.int32) if self.right is None else np.asarray(self.right)
        counts = right if self.counts is None else self.counts
        scores = None
        if self._has_scores:
            scores = [
                np.asarray(x).reshape(*tokens.shape, -1)
                for x in (self.logprobs, self.top_ids, self.top_logprobs)
            ]
        for i, sequence in enumerate(self.sequences):
            if sequence is None:
                continue
            count, sampled = sequence.sampling.logprobs, []
            for j, token in enumerate(tokens[i, : right[i]].tolist()):
                if count is None or scores is None:
                    sampled.append(Sampled(token))
                    continue
                logprob, ids, tops = (x[i, j] for x in scores)
                pairs = list(zip(ids[:count].tolist(), tops[:count].tolist(), strict=True))
                sampled.append(Sampled(token, float(logprob[0]), pairs))
            yield sequence, int(counts[i] - right[i]), sampled
