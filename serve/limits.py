"""How much a server runs and stores."""

from dataclasses import dataclass

ROOM = 64  # tail tokens that are reserved at a time
# Empty slots of a chunk: on an H200 a quarter of what a step of an 8B model takes without one.
WORTH_A_STEP = 256


@dataclass(frozen=True)
class Limits:
    max_running: int
    max_stored: int
    max_model_len: int
    max_tail: int  # tail tokens after which a generation is compressed
    max_chunk: int  # tokens of a chunk
    chunks_beside_decode: tuple[int, ...]  # while others decode, so that their streams go on; ascending
    prompt_logprob_chunk: int
    packed_chunks: tuple[int, ...] = ()  # tokens of several chunks in one step: some of these sizes
    packed_places: int = 1  # chunks in such a step at most
    least_shared: int = 128  # tokens that several prompts must begin with to be prefilled once
    drafts: int = 0  # tokens drafted for a sequence at a time; 0: none
    drafting: int = 0  # sequences that may run where there are drafts
    lookup: tuple[int, int] = (2, 4)  # tokens that a draft follows elsewhere in its sequence, least and most
    host_bytes: int = 0  # of host memory, for stored rows that must leave the pool

    @property
    def decode_beside_packed(self) -> int:
        """Sequences that decode beside packed chunks at most; see `Buckets.logits`."""
        return self.max_running + 1 - self.packed_places

    @property
    def nearly_full(self) -> int:
        """Tail tokens from which on a generation is compressed together with another one that must be."""
        return max(self.max_tail * 3 // 4, 1)

    def room(self, left: int) -> int:
        """Tail tokens to reserve at a time for a sequence with `left` to go."""
        return min(ROOM, self.max_tail, max(left, 0))

    def worth_packing(self, tokens: int, chunks: int) -> bool:
        """Whether `tokens` of several chunks in one step cost less than the steps that this saves."""
        size = next(size for size in self.packed_chunks if size >= tokens)
        return size - tokens <= WORTH_A_STEP * (chunks - 1)

    def chunk_size(self, ahead: int, beside_decode: bool) -> int:
        """Most tokens of the next chunk of a prompt with `ahead` tokens to go.

        A chunk costs what its program has slots for, and two small ones beside decode steps cost less than a large one
        that is half empty, though they take a step more.
        """
        sizes = self.chunks_beside_decode
        if not beside_decode and ahead * 2 > self.max_chunk:
            return self.max_chunk
        if ahead > sizes[-1]:
            return sizes[-1]
        at = next(i for i, size in enumerate(sizes) if size >= ahead)
        smaller = sizes[max(at - 1, 0)]
        return smaller if ahead <= 2 * smaller <= sizes[at] - WORTH_A_STEP else sizes[at]
