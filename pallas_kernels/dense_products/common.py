"""What the parts of the kernel share."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.dense_products.tuning import TOKENS
from pallas_kernels.gates import Gate

i32, f32 = jnp.int32, jnp.float32


class Scaled(NamedTuple):
    """Tokens times the weights of their RMS norm, whose factors come behind the products that are made of them.

    tokens: bfloat16 [T, depth]. squares: f32[W * n * 64], for each 64 tokens n sums of squares of what the norm is of, of a
    part of the depth each, one part after another.
    """

    tokens: jax.Array
    squares: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    warpgroups: int  # computing ones
    halves: int  # of the weights' columns: two where one is of gates
    columns: int  # of each half, a CTA's
    splits: int  # of the depth
    steps: int  # of a CTA
    stages: int  # steps under way
    depth: int  # of all splits
    gate: Gate | None
    adds: bool  # to a residual, and makes what products behind its norm are of
    offset: float  # of that norm's weights
    eps: float | None  # of the norm whose factors come behind this product, None without
    interpreted: bool

    @property
    def own(self) -> int:
        """Columns that a CTA finishes. The interpreter has no clusters: there each stores its sums, added up later."""
        return self.columns if self.interpreted else self.columns // self.splits

    @property
    def stored(self) -> int:
        """Columns that are stored at once, a swizzled line or a part of it."""
        return min(self.own, 64)

    @property
    def in_parts(self) -> bool:
        """Whether sums of splits are all that the kernel makes."""
        return self.interpreted and self.splits > 1


def tiled(width: int, itemsize: int) -> Any:
    """How rows of so many numbers lie in shared memory."""
    line = min(width * itemsize, 128)
    return plgpu.TilingTransform((8, line // itemsize)), plgpu.SwizzleTransform(line)  # type: ignore[abstract]


def squares_shape(tokens: int, columns: int, own: int) -> jax.ShapeDtypeStruct:
    """Of `Scaled.squares`, of CTAs that finish `own` columns each."""
    return jax.ShapeDtypeStruct((-(-tokens // TOKENS) * (columns // own) * TOKENS,), f32)
