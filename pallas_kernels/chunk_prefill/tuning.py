"""Tuning of the chunk prefill kernel, one frozen record for each generation of GPUs, by compute capability."""

import dataclasses

import jax

from pallas_kernels.support import num_sms, record_for

ROWS = 64  # of one computing warpgroup: those of its matrix instructions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What depends on the chip."""

    warpgroups: int = 2  # computing ones, 64 rows each
    # Heads of 64 leave registers for so many; a tile of theirs then takes so much longer than one of `warpgroups`.
    most_warpgroups: int = 3
    larger_tile: float = 1.31
    tile_bytes: int = 32768  # keys (or values) of one step; the entries follow from the head dimension
    stages: int = 2  # blocks of keys in flight, and as many of values
    ping_pong: bool = True  # one warpgroup's softmax while another's products run: they take turns
    # From this head dimension on, a block's product with values and the next one's with keys are in flight together.
    fused_from: int = 256
    merge_columns: tuple[int, int] = (16, 64)  # least and most of `columns`
    merge_elements: int = 128  # of a row, read at a time from the results of pieces
    num_ctas: int | None = None  # one per SM by default
    load_registers: int = 40  # of a thread

    @property
    def compute_registers(self) -> int:
        """Of a thread: what a multiprocessor's threads have together by default, but for the loading ones'."""
        by_default = 512 // (self.warpgroups + 1) // 8 * 8
        return (by_default * (self.warpgroups + 1) - self.load_registers) // self.warpgroups // 8 * 8

    def for_chunk(self, tokens: int, kv_heads: int, group: int, head_dim: int) -> "Tuning":
        """With more warpgroups where they pay."""
        if head_dim > 64 or self.warpgroups >= self.most_warpgroups:
            return self
        more = dataclasses.replace(self, warpgroups=self.most_warpgroups, load_registers=32)
        shape = tokens, kv_heads, group
        return more if more.rounds(*shape) * self.larger_tile < self.rounds(*shape) else self

    def rounds(self, tokens: int, kv_heads: int, group: int) -> int:
        """Tiles of the CTA that has most."""
        return -(-(-(-tokens // self.positions(group)) * kv_heads) // self.ctas())

    def block(self, head_dim: int) -> int:
        """Entries of one step."""
        return min(max(self.tile_bytes // (2 * head_dim), 64), 128)

    def columns(self, head_dim: int, tiles: int, num_ctas: int) -> int:
        """Of a cut tile's output, that one CTA puts together at a time: so many that each has some, if tiles are few."""
        least, most = self.merge_columns
        columns = min(head_dim, most)
        while columns > least and tiles * (head_dim // columns) * 2 <= num_ctas:
            columns //= 2
        return columns

    def ctas(self) -> int:
        """CTAs of a call: one per SM unless told otherwise."""
        return num_sms() if self.num_ctas is None else self.num_ctas

    def positions(self, group: int) -> int:
        """Tokens of one tile, for G query heads per KV head. A few rows stay empty where G does not divide them."""
        return self.warpgroups * ROWS // group


TUNING = {
    "9.0": Tuning(),  # H100, H200
}
DEFAULT = TUNING["9.0"]


def tuning_for(device: jax.Device | None = None) -> Tuning:
    """The record of the device's generation, by default the first device's: see `support.record_for`."""
    return record_for(TUNING, device)
