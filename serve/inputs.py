"""What a step's work is to the compiled programs: arrays of the bucket that holds it, and whose each row of logits is."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from serve.buckets import Buckets, Shape, pad
from serve.sequence import ChunkWork, Sequence, Work
from tangram_jax.packed import Packed, packed_slots
from tangram_jax.step import Chunk


class Drafts(NamedTuple):
    """Drafts of the tokens after the next one of each decode slot."""

    tokens: Any  # i32[decode slots, most]
    counts: Any  # i32[decode slots]: tokens of each slot that are there, the next one too: at least 1

    @classmethod
    def none(cls, slots: int, most: int) -> "Drafts":
        return cls(np.zeros((slots, most), np.int32), np.ones(slots, np.int32))


class Arguments(NamedTuple):
    """Of one step, i32 all: as arrays of the host, or inside a program."""

    rows: Any  # [R]: the row of the cache that each row of logits is of, decode slots last; of no row: it means nothing
    chunk: Chunk | Packed | None = None
    next_tokens: Any = None  # [T]: of a chunk whose every token is scored
    drafts: Drafts | None = None

    @classmethod
    def none(cls, shape: Shape, no_row: int) -> "Arguments":
        """Of a step of that shape which does nothing."""
        slots, places = shape.slots or 0, shape.places if shape.chunk else 0
        chunk: Chunk | Packed | None = None
        if shape.chunk:
            tokens = np.zeros(shape.chunk, np.int32)
            chunk = Chunk(np.int32(0), tokens, np.int32(1))
            if places > 1:
                chunk = Packed(np.full(places, no_row, np.int32), tokens, np.zeros(places, np.int32))
        return cls(
            np.full(places + slots, no_row, np.int32),
            chunk,
            np.zeros(shape.chunk or 0, np.int32) if shape.scores else None,
            Drafts.none(slots, shape.drafts) if shape.drafts else None,
        )

    def flat(self) -> np.ndarray:
        """All in one array: handing one to a program takes the host 0.05 ms."""
        if self.chunk is None and self.drafts is None:
            rows: np.ndarray = self.rows
            return rows
        return np.concatenate([np.ravel(part) for part in jax.tree.leaves(self)])

    @classmethod
    def of(cls, flat: jax.Array, shape: Shape) -> "Arguments":
        """What `flat` was made of."""
        parts, tree = jax.tree.flatten(cls.none(shape, 0))
        ends = np.cumsum([part.size for part in parts])[:-1].tolist()
        split = jnp.split(jnp.asarray(flat), ends)
        return jax.tree.unflatten(tree, [a.reshape(part.shape) for a, part in zip(split, parts, strict=True)])


@dataclass(frozen=True)
class Inputs:
    """What one step is given. Row i of its logits is of `sequences[i]` (None: it means nothing).

    With drafts a row of them is a slot's: as many logits, one after each token.
    """

    shape: Shape
    arguments: Arguments
    sequences: list[Sequence | None]

    @cached_property
    def follows_grammar(self) -> bool:
        """Whether what is sampled depends on the last tokens of some."""
        return any(s.grammar for s in self.sequences if s)


def inputs_of(work: Work, buckets: Buckets, num_rows: int) -> Inputs:
    """The least program that does `work`, its empty places filled with `num_rows`, which is no row."""
    chunk: Chunk | Packed | None = None
    following = drafts = size = slots = None
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
    sequences += [*[None] * (places - len(work.chunks)), *work.decode]
    rows = np.full(places + (slots or 0), num_rows, np.int32)
    rows[: len(sequences)] = [num_rows if s is None else _row(s) for s in sequences]
    shape = Shape(size, max(places, 1), slots, work.scores_prompt, buckets.drafts if work.drafts else 0)
    return Inputs(shape, Arguments(rows, chunk, following, drafts), sequences)


def _row(sequence: Sequence) -> int:
    assert sequence.state is not None
    return sequence.state.row


def _packed(chunks: list[ChunkWork], size: int, places: int, num_rows: int) -> Packed:
    empty = places - len(chunks)
    rows, nothing = [_row(c.sequence) for c in chunks], np.zeros(0, np.int32)
    texts = [c.tokens for c in chunks] + [nothing] * empty
    return Packed.of(np.array(rows + [num_rows] * empty, np.int32), texts, size)
