"""How the products of a decode layer are cut, one frozen record per architecture."""

import dataclasses

BLOCK = 64  # columns of weights: the rows of one matrix instruction; also the rows of weights in one load


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What depends on the chip."""

    num_clusters: int = 66  # of two CTAs: one CTA on every multiprocessor, all at once
    smem_bytes: int = 170_000  # of a CTA, for weights, tokens and exchanged sums
    token_slots: int = 3  # loads of tokens under way

    def weight_slots(self, tokens: int) -> int:
        """Loads of weights (16 KB each) under way: what the rest leaves free."""
        rest = self.token_slots * tokens * 2 * BLOCK * 2 + 2 * BLOCK * tokens * 4 + 8192
        return min(12, (self.smem_bytes - rest) // (2 * BLOCK * BLOCK * 2))


TUNING = {"sm_90": Tuning()}  # H100, H200
DEFAULT = TUNING["sm_90"]
