"""Tuning of the chunk prefill kernel, one frozen record per architecture."""

import dataclasses

from pallas_kernels.support import num_sms

ROWS = 64  # of one computing warpgroup: those of its matrix instructions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What depends on the chip."""

    warpgroups: int = 2  # computing ones, 64 rows each
    tile_bytes: int = 32768  # keys (or values) of one step; the entries follow from the head dimension
    stages: int = 2  # blocks of keys in flight, and as many of values
    ping_pong: bool = True  # one warpgroup's softmax while another's products run
    # From this head dimension on, a block's product with values and the next one's with keys are in flight together.
    fused_from: int = 256
    num_ctas: int | None = None  # one per SM by default
    load_registers: int = 40
    compute_registers: int = 232

    def block(self, head_dim: int) -> int:
        """Entries of one step."""
        return min(max(self.tile_bytes // (2 * head_dim), 64), 128)

    def ctas(self) -> int:
        """CTAs of a call: one per SM unless told otherwise."""
        return num_sms() if self.num_ctas is None else self.num_ctas

    def positions(self, group: int) -> int:
        """Tokens of one tile, for G query heads per KV head."""
        rows = self.warpgroups * ROWS
        if rows % padded_group(group):
            raise ValueError(f"{self.warpgroups} warpgroups cannot share {group} query heads")
        return rows // padded_group(group)


def padded_group(group: int) -> int:
    """Query heads per KV head as the kernel holds them: the next power of two."""
    return 1 << (group - 1).bit_length()


def preferred(group: int) -> bool:
    """Whether the kernel is faster than the composition with cuDNN.

    It was in all 36 cases of benchmarks/results/2026-11-21-chunk-prefill.md (G = 2, 4, 8; D = 64, 128, 256; chunks of 512 to
    8192, no history to 100K), by 1.08 to 3.2 times, so neither length nor head dimension is in the rule. Groups that are no
    power of two are padded to one and the padding's work is lost: from a quarter of it on (G = 3, 5, 6, 9 to 12) the
    composition runs.
    """
    return group / padded_group(group) > 0.75


TUNING = {
    "sm_90": Tuning(),  # H100, H200
}
DEFAULT = TUNING["sm_90"]
