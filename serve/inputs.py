"""What a step's work is to the compiled programs: arrays of the bucket that holds it, and whose each row of logits is."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from serve.buckets import Buckets, pad
from serve.sequence import ChunkWork, Sequence, Work
from tangram_jax.packed import Packed, packed_slots
from tangram_jax.step import Chunk


class Drafts(NamedTuple):
    """Drafts of the tokens after the next one of each decode slot."""

    tokens: np.ndarray  # i32[decode slots, most]
    counts: np.ndarray  # i32[decode slots]: tokens of each slot that are there, the next one too: at least 1

    @classmethod
    def none(cls, slots: int, most: int) -> "Drafts":
        return cls(np.zeros((slots, most), np.int32), np.ones(slots, np.int32))


@dataclass(frozen=True)
class Inputs:
    """Arguments of one step. Row i of its logits is of `sequences[i]` (None: it means nothing) and of row `logits_of[i]`.

    With `drafts` a row of them is a slot's: as many logits, one after each token.
    """

    chunk: Chunk | Packed | None
    rows: np.ndarray | None  # i32[decode slots]
    next_tokens: np.ndarray | None  # i32[T]: of a chunk whose every token is scored
    sequences: list[Sequence | None]
    logits_of: list[int]
    drafts: Drafts | None = None

    @cached_property
    def follows_grammar(self) -> bool:
        """Whether what is sampled depends on the last tokens of some."""
        return any(s.grammar for s in self.sequences if s)


def inputs_of(work: Work, buckets: Buckets, num_rows: int) -> Inputs:
    """The least program that does `work`, its empty places filled with `num_rows`, which is no row."""
    chunk: Chunk | Packed | None = None
    following = slots = drafts = None
    places = len(work.chunks)
    if len(work.chunks) > 1:
        tokens = sum(packed_slots(len(c.tokens)) for c in work.chunks)
        size, places, slots = buckets.packed(tokens, len(work.decode))
        chunk = _packed(work.chunks, size, places, num_rows)
    elif work.chunks:
        (only,) = work.chunks
        count = len(only.tokens)
        size = buckets.prompt_logprobs
        if not work.scores_prompt:
            size, slots = buckets.single(count, len(work.decode))
        chunk = Chunk(np.int32(_row(only.sequence)), pad(only.tokens, size), np.int32(count))
        following = pad(only.next_tokens, size) if work.scores_prompt else None
    elif work.drafts:
        slots = buckets.draft_batch(len(work.decode))
        drafts = Drafts.none(slots, buckets.drafts)
        for i, sequence in enumerate(work.decode):
            guess = work.drafts.get(sequence, ())
            drafts.tokens[i, : len(guess)] = guess
            drafts.counts[i] += len(guess)
    elif work.decode:
        slots = buckets.batch(len(work.decode))
    sequences = [c.sequence if c.last else None for c in work.chunks]
    logits_of = [_row(c.sequence) if c.last else num_rows for c in work.chunks]
    empty = places - len(work.chunks)
    sequences += [*[None] * empty, *work.decode]
    logits_of += [num_rows] * empty
    rows = None
    if slots is not None:
        rows = np.full(slots, num_rows, np.int32)
        rows[: len(work.decode)] = [_row(s) for s in work.decode]
        logits_of += rows.tolist()
    return Inputs(chunk, rows, following, sequences, logits_of, drafts)


def _row(sequence: Sequence) -> int:
    assert sequence.state is not None
    return sequence.state.row


def _packed(chunks: list[ChunkWork], size: int, places: int, num_rows: int) -> Packed:
    empty = places - len(chunks)
    rows, nothing = [_row(c.sequence) for c in chunks], np.zeros(0, np.int32)
    texts = [c.tokens for c in chunks] + [nothing] * empty
    return Packed.of(np.array(rows + [num_rows] * empty, np.int32), texts, size)
