"""The shapes that exist: all programs are compiled for them at start-up."""

from dataclasses import dataclass

import numpy as np

CHUNKS = (32, 128, 512, 2048, 8192)
# Tokens of a chunk whose logits are all computed: 2048 of a large vocabulary would take a gigabyte.
MOST_SCORED = 512


@dataclass(frozen=True)
class Buckets:
    """The shapes that exist."""

    mixed_chunks: tuple[int, ...]  # token slots of a chunk beside all decode slots, ascending
    largest_chunk: int  # token slots of a chunk alone
    batches: tuple[int, ...]  # decode slots, ascending
    prompt_logprobs: int  # token slots of a chunk whose every token is scored

    @property
    def sizes(self) -> list[tuple[int | None, int | None]]:
        """(chunk, decode slots) of every program. Small chunks come with decode slots, which cost little if empty."""
        mixed: list[tuple[int | None, int | None]] = [(c, self.batches[-1]) for c in self.mixed_chunks]
        return [*mixed, (self.largest_chunk, None), *((None, b) for b in self.batches)]

    def mixed(self, count: int) -> int | None:
        """The least chunk that holds `count` tokens beside decode slots; None if only the chunk alone does."""
        return next((c for c in self.mixed_chunks if c >= count), None)

    def batch(self, count: int) -> int:
        return next(b for b in self.batches if b >= count)


def make_buckets(max_num_seqs: int, max_tokens: int, window: int, max_model_len: int) -> Buckets:
    """Few shapes, at most four times apart: every chunk and batch runs in the next larger one.

    Batches beyond 16 are twice apart: a GPU takes 8% longer for products with 64 tokens than with 32, but only 3% longer for
    a step of 16 tokens than of 4.
    """
    least = -(-window // 8) * 8
    # As long as the longest request, in the multiples of 64 tokens that the kernels take that score a chunk's entries.
    most = max(min(max_tokens, -(-max_model_len // 64) * 64), least)
    # Streams wait for one mixed chunk between two tokens: the largest chunk runs alone.
    mixed = [least, *(c for c in CHUNKS if least < c < most)]
    sizes = (1, 4, *(16 << i for i in range(max_num_seqs.bit_length())))
    batches = {*(n for n in sizes if n < max_num_seqs), max(1, max_num_seqs // 2), max_num_seqs}
    return Buckets(
        mixed_chunks=tuple(mixed),
        largest_chunk=most,
        batches=tuple(sorted(batches)),
        prompt_logprobs=max(c for c in mixed if c <= max(MOST_SCORED, least)),
    )


def pad(tokens: np.ndarray | None, size: int) -> np.ndarray:
    """`tokens` i32[n] and zeros up to `size`."""
    assert tokens is not None
    out = np.zeros(size, np.int32)
    out[: len(tokens)] = tokens
    return out
