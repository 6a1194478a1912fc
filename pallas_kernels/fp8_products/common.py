"""How a call is cut into units of work."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gates import Gate

i32, f32 = jnp.int32, jnp.float32
BAND = 8  # blocks of tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    blocks: int  # of tokens
    rows: int  # of a block
    part: int  # of them, that a matrix instruction takes
    stored: int  # of these at once
    columns: int  # of the weights, as many as a CTA takes at once
    warpgroups: int  # computing ones, a tile's columns each
    splits: int  # of the depth, CTAs of a cluster
    steps: int  # of a unit
    deep_step: int  # tiles along the depth that one step loads
    stages: int  # steps under way
    num_ctas: int
    narrow: bool  # tokens in FP8 too
    gate: Gate | None
    interpreted: bool

    @property
    def span(self) -> int:
        """Tiles along the depth of one matrix product: tokens in rows of 128 bytes, if a step has so many."""
        return 2 if self.narrow and self.deep_step % 2 == 0 else 1

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(First row, rows) of a block's."""
        return pieces_of(self.rows, self.part)

    @property
    def in_parts(self) -> bool:
        """Whether the interpreter leaves parts of the depth, as it has no clusters."""
        return self.interpreted and self.splits > 1

    @property
    def units(self) -> int:
        return self.blocks * self.columns

    @property
    def shares(self) -> list[tuple[int, int]]:
        """(First row, rows) of a block that each CTA of a cluster finishes."""
        return pieces_of(self.rows, self.stored)


def pieces_of(rows: int, most: int) -> list[tuple[int, int]]:
    """(First row, rows) of each."""
    return [(first, min(most, rows - first)) for first in range(0, rows, most)]


class Unit:
    """The n-th unit of a CTA."""

    def __init__(self, cfg: Config, n: Any) -> None:
        number = n * cfg.num_ctas + lax.axis_index("cta")
        # Those under way at a time have few blocks and few columns between them, so that the L2 holds what they read.
        band = lax.div(number, i32(BAND * cfg.columns)) * BAND
        within = number - band * cfg.columns
        blocks = jnp.minimum(cfg.blocks - band, BAND)
        column = lax.div(within, blocks)
        block = band + within - column * blocks
        self.column = column * (1 if cfg.gate else cfg.warpgroups)
        self.split = lax.axis_index("split") if cfg.splits > 1 else i32(0)
        self.row = pl.multiple_of(block * cfg.rows, cfg.rows)
        self.first = self.split * cfg.steps * cfg.deep_step
        self.apart = cfg.columns if cfg.gate else 1  # tiles of columns between those of two warpgroups

    def tile(self, wg: Any) -> Any:
        """Of the weights, a warpgroup's."""
        return self.column + wg * self.apart
