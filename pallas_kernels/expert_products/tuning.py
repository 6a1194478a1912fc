"""Tuning of the expert products, frozen records for each generation of GPUs, by compute capability."""

import dataclasses
import math

import jax

from pallas_kernels.expert_products import mxfp4
from pallas_kernels.support import num_sms, record_for

ROWS = 64  # of one computing warpgroup: those of its matrix instructions
DEPTH = 64  # of one step: a row of 128 bytes
BOX = 64  # columns of a tile are a multiple of it
MANY_TOKENS = (
    128  # from which on `gather_rows` is worth it, and weights of tokens are worth a kernel of their own
)
# Of what one kernel deals to experts: every CTA chooses for all tokens.
MOST_TOKENS, MOST_EXPERTS, MOST_CHOSEN = 128, 128, 32
ALIGN = 8  # rows; an expert's begin at a multiple of it, as loads do


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What depends on the chip, and on how many rows an expert has on average."""

    warpgroups: int  # computing ones, 64 rows each
    columns: int  # of a tile's weights, all parts together
    stages: int  # steps under way
    num_ctas: int | None = None  # one per SM by default
    load_registers: int = 40
    compute_registers: int = 232

    @property
    def rows(self) -> int:
        """Rows of one tile."""
        return self.warpgroups * ROWS

    @property
    def once(self) -> bool:
        """Whether few experts have several blocks of rows, each of which reads their weights."""
        return self.warpgroups == 1

    def ctas(self) -> int:
        """CTAs of a call: one per SM unless told otherwise."""
        return num_sms() if self.num_ctas is None else self.num_ctas


# Few rows an expert: the memory's pace counts, and that all multiprocessors have a part of the weights.
FEW = Tuning(warpgroups=1, columns=128, stages=8)
MANY = Tuning(warpgroups=2, columns=128, stages=5)
TUNING = {
    "9.0": (FEW, MANY),  # H100, H200
}


def tuning_for(rows: int, num_experts: int, device: jax.Device | None = None) -> Tuning:
    """For `rows` rows dealt to `num_experts` experts, on the device, by default the first."""
    few, many = record_for(TUNING, device)
    return few if rows <= 32 * num_experts else many


def goes_directly(tokens: int, per_token: int, num_experts: int) -> bool:
    """Whether a direct plan is worth it: an expert that tokens share is read from the L2, and unpacked, for each of them.

    A token may be the only one, with an empty slot beside it. Of four tokens of Qwen3-30B-A3B's three rows in 32 have an
    expert that another one has too.
    """
    return tokens <= 2 or tokens * per_token <= num_experts // 4


SHARED = 192 * 1024  # bytes of an SM's shared memory for what is under way


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedTuning:
    """The same for packed weights (`packed_gpu`)."""

    up_to: float  # rows of an expert on average
    rows: int  # of a block: 8 to 256
    per_sm: int  # computing warpgroups of an SM, 64 columns each
    warpgroups: int = 1  # of these in one CTA, sharing rows, at most; as many as divide the columns
    deep: int  # tiles along the depth that a step loads, at most; as many as divide the depth
    num_ctas: int | None = None

    @property
    def once(self) -> bool:
        """See `Tuning.once`."""
        return self.up_to <= self.rows

    def shape(
        self, across: int, deep: int, parts: int, tile_bytes: int, size: int = 2
    ) -> tuple[int, int, int]:
        """For weights of so many tiles, of so many bytes each, and rows of numbers of so many bytes.

        (Warpgroups of a CTA, tiles along the depth of a step, steps under way.)
        """
        wgs = max(n for n in range(1, self.warpgroups + 1) if across % n == 0)
        step = max(n for n in range(1, self.deep + 1) if deep % n == 0)
        bytes_of_step = step * (wgs * parts * tile_bytes + self.rows * mxfp4.TILE * size)
        stages = SHARED // self.ctas_per_sm(wgs) // bytes_of_step
        return wgs, step, max(2, min(stages, deep // step + 1))

    def ctas_per_sm(self, wgs: int) -> int:
        """CTAs of so many warpgroups."""
        return max(1, self.per_sm // wgs)

    def ctas(self, wgs: int) -> int:
        """CTAs of a call."""
        return num_sms() * self.ctas_per_sm(wgs) if self.num_ctas is None else self.num_ctas


PACKED_FEW = PackedTuning(up_to=5, rows=8, per_sm=3, deep=5)
PACKED_SOME = PackedTuning(up_to=12, rows=16, per_sm=4, deep=5)
PACKED_MORE = PackedTuning(up_to=20, rows=32, per_sm=3, warpgroups=3, deep=3)
PACKED_MANY = PackedTuning(up_to=math.inf, rows=64, per_sm=3, warpgroups=3, deep=3)
PACKED_TUNING = {
    "9.0": (PACKED_FEW, PACKED_SOME, PACKED_MORE, PACKED_MANY),
}
FP8_FEW = PackedTuning(up_to=3, rows=8, per_sm=4, deep=4)
FP8_SOME = PackedTuning(up_to=12, rows=16, per_sm=4, deep=2)
FP8_MORE = PackedTuning(up_to=48, rows=64, per_sm=3, warpgroups=3, deep=2)
FP8_MANY = PackedTuning(up_to=math.inf, rows=128, per_sm=2, warpgroups=2, deep=2)
FP8_TUNING = {
    "9.0": (FP8_FEW, FP8_SOME, FP8_MORE, FP8_MANY),
}
LEAST_NARROW = 48  # rows of an expert on average that are worth being made FP8 too
NARROW_MANY = PackedTuning(up_to=math.inf, rows=128, per_sm=2, warpgroups=2, deep=2)
NARROW_TUNING = {
    "9.0": (NARROW_MANY,),
}


def packed_tuning_for(
    rows: int,
    num_experts: int,
    *,
    fp8: bool = False,
    narrow: bool = False,
    device: jax.Device | None = None,
) -> PackedTuning:
    """For `rows` rows dealt to `num_experts` experts in FP8, or in MXFP4, on the device, by default the first.

    `narrow`: the rows are in FP8 too.
    """
    records = record_for(NARROW_TUNING if narrow else FP8_TUNING if fp8 else PACKED_TUNING, device)
    return next(tuning for tuning in records if rows <= tuning.up_to * num_experts)
