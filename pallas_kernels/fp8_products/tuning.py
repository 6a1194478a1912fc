"""Tuning of the products with FP8 weights, frozen records for each generation of GPUs, by compute capability."""

import dataclasses

import jax

from pallas_kernels.fp8_products.packing import BYTES, TILE
from pallas_kernels.support import num_sms, record_for

SHARED = 200 * 1024  # bytes of an SM's shared memory for what is under way
ROWS = (8, 16, 32, 64, 128, 256)  # that a block may have


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What depends on the chip, and on how many tokens there are."""

    rows: int  # tokens of a block
    warpgroups: int = 1  # computing ones of a CTA, 64 columns each, sharing the tokens; as many as divide the columns
    per_sm: int = 1  # CTAs of an SM
    splits: int = 1  # of the depth, each a unit of work of its own; their sums are added up by XLA
    deep: int = 4  # tiles along the depth that a step loads, at most; as many as divide the depth
    num_ctas: int | None = None

    def shape(self, across: int, deep: int) -> tuple[int, int, int, int]:
        """For weights of so many tiles.

        (Computing warpgroups of a CTA, splits, tiles along the depth of a step, steps under way.)
        """
        wgs = max(n for n in range(1, self.warpgroups + 1) if across % n == 0)
        splits = max(n for n in range(1, self.splits + 1) if deep % n == 0)
        deep //= splits
        step = max(n for n in range(1, self.deep + 1) if deep % n == 0)
        out = wgs * self.rows * TILE * (4 if splits > 1 else 2)
        of_step = step * (wgs * BYTES + self.rows * TILE * 2)
        stages = (SHARED // self.per_sm - out) // of_step
        return wgs, splits, step, max(2, min(stages, deep // step + 1))

    def ctas(self) -> int:
        """CTAs of a call."""
        return num_sms() * self.per_sm if self.num_ctas is None else self.num_ctas


TUNING = {"9.0": Tuning(rows=8)}


def tuning_for(tokens: int, across: int, deep: int, device: jax.Device | None = None) -> Tuning:
    """For so many tokens and tiles of weights, on the device, by default the first."""
    record = record_for(TUNING, device)
    rows = next((n for n in ROWS if n >= tokens), ROWS[-1])
    return dataclasses.replace(record, rows=rows)
