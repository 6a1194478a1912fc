"""Tuning of the ragged decode kernel, one frozen record for each generation of GPUs, by compute capability."""

import dataclasses

import jax

from pallas_kernels.support import record_for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What depends on the chip. Sizes in bytes of the pool's 16-bit entries."""

    tile_bytes: int = 32768  # keys (or values) of one step; the entries follow from the head dimension
    packed_bytes: int = 16384  # the same of byte pages: what unpacking leaves room for in registers
    turns: int = 2  # computing warpgroups for these: unpacking is more than one can do at the memory's pace
    slots: int = 4  # tiles in flight, keys and values counted apart; more crowd the memory and are slower
    small_page: int = 2048  # bytes of one head's keys: so small ones are loaded by each warp on its own
    merge_unroll: int = 8  # partial results read at a time; more are read in vain where items have few
    long_merge_unroll: int = 16  # where items have many
    merge_slices: int = 8  # of an item's output, put together by as many CTAs where its pieces are many
    many_pieces: int = 10
    slice_registers: int = 96  # of a thread, for the pieces of a slice that are read at a time
    most_made: int = 128  # numbers of a head that the kernel makes itself: for more it lacks registers
    most_rows_made: int = 128  # requests; of more the kernel takes as long itself as others do
    kinds_made: tuple[str, ...] = ("H100", "H200")  # parts of the names of devices on which that was measured

    def block(self, head_dim: int, page_size: int, *, packed: bool = False) -> int:
        """Entries of one step: a multiple of 64 (a matrix instruction's rows) and of the page. `packed`: pages of bytes."""
        entries = self.packed_bytes // head_dim if packed else self.tile_bytes // (2 * head_dim)
        return max(entries, 64, page_size)

    def unroll(self, pieces: int, head_dim: int, queries: int) -> int:
        """Partial results [head_dim, queries] read at a time, of some `pieces` of an item: as many as the registers hold."""
        if pieces >= 8 and head_dim * queries <= 1024:
            return self.long_merge_unroll
        return max(1, self.merge_unroll * 8 // queries)

    def slices(self, elements: int) -> int:
        """Of an output of `elements`: each has as many for every thread of a warpgroup, one at least."""
        return max(n for n in (1, 2, 4, 8) if n <= self.merge_slices and elements % (128 * n) == 0)

    def num_slots(self, tile: int) -> int:
        """Tiles of so many bytes in flight: more or fewer where they are not of `tile_bytes`."""
        return max(3, self.slots * self.tile_bytes // tile)


TUNING = {
    "9.0": Tuning(),  # H100, H200
}
DEFAULT = TUNING["9.0"]


def tuning_for(device: jax.Device | None = None) -> Tuning:
    """The record of the device's generation, by default the first device's: see `support.record_for`."""
    return record_for(TUNING, device)
