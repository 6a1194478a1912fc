"""Tuning of the expert products, one frozen record per architecture."""

import dataclasses

from pallas_kernels.support import num_sms

ROWS = 64  # of one computing warpgroup: those of its matrix instructions
DEPTH = 64  # of one step: a row of 128 bytes
BOX = 64  # columns of a tile are a multiple of it
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

    def ctas(self) -> int:
        """CTAs of a call: one per SM unless told otherwise."""
        return num_sms() if self.num_ctas is None else self.num_ctas


# Few rows an expert: the memory's pace counts, and that all multiprocessors have a part of the weights.
FEW = Tuning(warpgroups=1, columns=128, stages=8)
MANY = Tuning(warpgroups=2, columns=128, stages=5)


def tuning_for(rows: int, num_experts: int) -> Tuning:
    """For `rows` rows dealt to `num_experts` experts."""
    return FEW if rows <= 32 * num_experts else MANY
