"""Tuning of the chunk prefill kernel, one frozen record per architecture."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What depends on the chip."""

    warpgroups: int = 2  # computing ones, 64 rows each
    tile_bytes: int = 32768  # keys (or values) of one step; the entries follow from the head dimension
    stages: int = 2  # blocks of keys in flight, and as many of values
    ping_pong: bool = True  # one warpgroup's softmax while another's products run
    overlap: bool = False  # a warpgroup's own softmax while its previous product with values runs
    num_ctas: int | None = None  # one per SM by default
    load_registers: int = 40
    compute_registers: int = 232

    def block(self, head_dim: int) -> int:
        """Entries of one step."""
        return min(max(self.tile_bytes // (2 * head_dim), 64), 128)


TUNING = {
    "sm_90": Tuning(),  # H100, H200
}
DEFAULT = TUNING["sm_90"]
