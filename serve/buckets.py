"""The shapes that exist: all programs are compiled for them at start-up."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CHUNKS = (32, 128, 512, 2048, 8192)
# Of these, tokens of several chunks in one step. Longer ones keep a GPU busy alone.
PACKED = (128, 512)
# From so many tokens on a chunk keeps a GPU busy: an empty decode slot beside it takes as long as a token.
BUSY = 512
LEAST_FEW = 16  # so few of all slots, a quarter or less, are worth a second program
# Tokens of a chunk whose logits are all computed: 2048 of a large vocabulary would take a gigabyte.
MOST_SCORED = 512


class Shape(NamedTuple):
    """The shape of a program."""

    chunk: int | None  # token slots
    places: int = 1  # chunks in them
    slots: int | None = None  # decode slots
    scores: bool = False  # every token of the chunk
    drafts: int = 0  # of each decode slot

    @property
    def rows_alone(self) -> bool:
        """Whether all that its program is given is rows that decode: those of the step before, mostly."""
        return not self.chunk and not self.drafts

    @property
    def name(self) -> str:
        chunks = f"chunk of {self.chunk}" if self.places == 1 else f"{self.places} chunks in {self.chunk}"
        parts = [chunks] if self.chunk else []
        parts += [f"{self.slots} decode slots"] if self.slots else []
        parts += [f"{self.drafts} drafts each"] if self.drafts else []
        return " + ".join([*parts, "prompt logprobs"] if self.scores else parts)


@dataclass(frozen=True)
class Buckets:
    """The shapes that exist."""

    mixed_chunks: tuple[int, ...]  # token slots of a chunk beside decode slots, ascending
    largest_chunk: int  # token slots of a chunk alone
    batches: tuple[int, ...]  # decode slots, ascending
    prompt_logprobs: int  # token slots of a chunk whose every token is scored
    packed_chunks: tuple[int, ...] = ()  # token slots of several chunks: some of `mixed_chunks`
    places: int = 1  # of such chunks
    drafts: int = 0  # of each decode slot at most, where drafts are verified
    draft_slots: tuple[int, ...] = ()  # decode slots of such steps, ascending: some of `batches`
    few: int = 0  # rows of logits of large chunks beside few decode tokens, one of `batches`; 0: all are beside all slots
    large: int = BUSY  # token slots of these at least; tests have smaller ones

    def logits(self, chunk: int) -> tuple[int, ...]:
        """Rows of logits of the programs with so large a chunk beside decode slots, ascending.

        The same for one chunk and for several, which have fewer decode slots for it: so the same programs sample both.
        """
        every = self.batches[-1] + 1
        return (self.few, every) if self.few and chunk >= self.large else (every,)

    @property
    def shapes(self) -> list["Shape"]:
        """Those of all programs, what takes longest to compile first.

        Small chunks come with all decode slots alone, which cost little if empty.
        """
        several = [(c, self.places) for c in self.packed_chunks]
        mixed = [(c, 1) for c in self.mixed_chunks]
        return [
            *(Shape(c, n, rows - n) for c, n in several for rows in self.logits(c)),
            Shape(self.prompt_logprobs, scores=True),
            *(Shape(c, n, rows - n) for c, n in mixed for rows in self.logits(c)),
            Shape(self.largest_chunk),
            *(Shape(None, 1, b) for b in self.batches),
            *(Shape(None, 1, b, drafts=self.drafts) for b in self.draft_slots),
        ]

    def packed(self, count: int, decoding: int) -> tuple[int, int, int]:
        """(token slots, chunks, decode slots) of the least program for chunks of `count` tokens and `decoding` others."""
        size = next(c for c in self.packed_chunks if c >= count)
        return size, self.places, self._slots(size, self.places, decoding)

    def single(self, count: int, decoding: int) -> tuple[int, int | None]:
        """(token slots, decode slots) of the same of one chunk; (`largest_chunk`, None) if only that holds it, alone."""
        size = next((c for c in self.mixed_chunks if c >= count), None)
        return (size, self._slots(size, 1, decoding)) if size else (self.largest_chunk, None)

    def _slots(self, chunk: int, places: int, decoding: int) -> int:
        return next(rows - places for rows in self.logits(chunk) if rows - places >= decoding)

    def batch(self, count: int) -> int:
        return next(b for b in self.batches if b >= count)

    def draft_batch(self, count: int) -> int:
        return next(b for b in self.draft_slots if b >= count)


def make_buckets(
    max_num_seqs: int,
    max_tokens: int,
    window: int,
    max_model_len: int,
    places: int = 1,
    drafts: int = 0,
    drafting: int = 0,
) -> Buckets:
    """Few shapes, at most four times apart: every chunk and batch runs in the next larger one.

    Batches beyond 16 are twice apart: a GPU takes 8% longer for products with 64 tokens than with 32, but only 3% longer for
    a step of 16 tokens than of 4.

    `places`: chunks that a step may have. Each has scores and writes of its own: four take twice as long to
    compile as one, and on a CPU a minute to load again (on a GPU two seconds). `drafts`: of a decode slot, where at most
    `drafting` sequences decode.
    """
    least = -(-window // 8) * 8
    # As long as the longest request, in the multiples of 64 tokens that the kernels take that score a chunk's entries.
    most = max(min(max_tokens, -(-max_model_len // 64) * 64), least)
    # Streams wait for one mixed chunk between two tokens: the largest chunk runs alone.
    mixed = [least, *(c for c in CHUNKS if least < c < most)]
    sizes = (1, 4, *(16 << i for i in range(max_num_seqs.bit_length())))
    batches = {*(n for n in sizes if n < max_num_seqs), max(1, max_num_seqs // 2), max_num_seqs}
    places = min(places, max_num_seqs)
    few = max((n for n in batches if 4 * n <= max_num_seqs), default=0)
    return Buckets(
        mixed_chunks=tuple(mixed),
        largest_chunk=most,
        batches=tuple(sorted(batches)),
        prompt_logprobs=max(c for c in mixed if c <= max(MOST_SCORED, least)),
        # Attention has as many token slots for each of them: together no more than the largest chunk, nor more memory.
        packed_chunks=tuple(c for c in mixed if c in PACKED and c * places <= most) if places > 1 else (),
        places=places,
        drafts=drafts,
        draft_slots=tuple(b for b in sorted(batches) if drafts and b <= drafting),
        few=few if few >= LEAST_FEW else 0,
    )


def pad(tokens: np.ndarray | None, size: int) -> np.ndarray:
    """`tokens` i32[n] and zeros up to `size`."""
    assert tokens is not None
    out = np.zeros(size, np.int32)
    out[: len(tokens)] = tokens
    return out
