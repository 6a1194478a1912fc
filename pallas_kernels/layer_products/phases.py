"""The products that the kernel works through, one after another, and what of each is a CTA's."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.gates import Gate
from pallas_kernels.layer_products.tuning import COLUMNS, STEP, TOKENS, Tuning, splits

i32 = jnp.int32
STRIDE = 32  # of counters, so that each has a cache line
COUNTERS = 5 * STRIDE


@dataclasses.dataclass(frozen=True)
class Phase:
    """One product: `source` [T, depth] times `weights` [depth, columns], or [depth, 2 columns] with gates first.

    Names are keys of the kernel's operands and results. What becomes of it goes to `out`: f32[splits, rows, columns], the
    parts of a split depth, which are added up then; or [T, columns], let through by gates.
    """

    number: int
    source: str
    weights: str
    out: str
    depth: int
    columns: int
    gate: Gate | None = None
    splits: int = 1

    @property
    def pieces(self) -> int:
        """Of COLUMNS columns, that a tile has."""
        return 2 if self.gate else 1

    @property
    def tiles(self) -> int:
        return self.columns // COLUMNS

    @property
    def ctas(self) -> int:
        return self.tiles * self.splits

    @property
    def left(self) -> int:
        """Place of the counter of warpgroups that have left their sums."""
        return 2 * self.number * STRIDE

    @property
    def added(self) -> int:
        """Place of the counter of tokens whose parts are added up."""
        return (2 * self.number + 1) * STRIDE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    tokens: int
    tuning: Tuning
    phases: tuple[Phase, ...]
    eps: float
    offset: float
    interpreted: bool  # one phase, and nothing waits for others

    @property
    def warpgroups(self) -> int:
        """That compute."""
        return -(-self.tokens // TOKENS)

    @property
    def last(self) -> int:
        return self.phases[-1].number


@dataclasses.dataclass(frozen=True)
class Share:
    """What of a phase is a CTA's: steps of one split of one tile, or none."""

    tile: Any
    split: Any
    first: Any  # step
    steps: Any
    active: Any

    @classmethod
    def of(cls, phase: Phase, cta: Any) -> "Share":
        tile, split = lax.rem(cta, i32(phase.tiles)), lax.div(cta, i32(phase.tiles))
        first, end = (lax.div((split + n) * (phase.depth // STEP), i32(phase.splits)) for n in (0, 1))
        active = cta < phase.ctas
        return cls(tile, split, first, jnp.where(active, end - first, 0), active)


def phases_of(attended: int, width: int, inner: int, gate: Gate, tuning: Tuning) -> tuple[Phase, ...]:
    """From attention's result to the end of the layer."""
    of_out, of_down = (splits(depth, width, tuning.ctas) for depth in (attended, inner))
    return (
        Phase(0, "attended", "w_out", "parts_out", depth=attended, columns=width, splits=of_out),
        Phase(1, "h", "w_gate_up", "opened", depth=width, columns=inner, gate=gate),
        Phase(2, "opened", "w_down", "parts_down", depth=inner, columns=width, splits=of_down),
    )
