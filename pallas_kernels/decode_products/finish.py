"""What becomes of a tile's sums, f32[64, T] (columns of weights by tokens): norm, rotation, activation, residual stream."""

import dataclasses
import functools
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.decode_products.kernel import BLOCK, WGMMA, View
from pallas_kernels.ragged_decode import device_ops

f32, i32 = jnp.float32, jnp.int32
BY_COLUMN = plgpu.Layout.WGMMA.reduce(1)


def _read(view: View, ref: Any) -> Any:
    """[T, 64] in global memory as [64, T]."""
    if view.interpreted:
        return plgpu.layout_cast(ref[...].T, WGMMA)
    return device_ops.load_transposed(ref, view.tokens)


def _write(view: View, value: Any, ref: Any) -> None:
    """[64, T] to [T, 64] in global memory."""
    if view.interpreted:
        ref[...] = value.T.astype(ref.dtype)
    else:
        device_ops.store_transposed(value, ref)


def nothing(view: View) -> None:
    del view


@dataclasses.dataclass(frozen=True)
class InverseRms:
    """1 / rms of every token, f32[T], from the sums of squares that `AddToStream` left in `squares` f32[E / 64, T]."""

    squares: str
    width: int
    eps: float

    def __call__(self, view: View) -> Any:
        squares = view[self.squares]
        parts = [
            plgpu.load(squares.at[pl.ds(start, BLOCK)], layout=WGMMA, optimized=False).sum(axis=0)
            for start in range(0, squares.shape[0], BLOCK)
        ]
        return lax.rsqrt(functools.reduce(jnp.add, parts) * (1 / self.width) + self.eps)


def _scaled(inverse: Any, value: Any) -> Any:
    return value * lax.broadcast_in_dim(inverse, value.shape, [1])


@dataclasses.dataclass(frozen=True)
class AddToStream:
    """x + sums to `new`; times the next norm's weight to `weighted`; its squares, summed over 64 columns, to `squares`."""

    x: str
    norm: str
    new: str
    weighted: str
    squares: str

    def __call__(self, view: View, _: Any, tile: Any, sums: Any) -> None:
        for i, value in enumerate(sums):
            number = tile * len(sums) + i
            columns = pl.ds(number * BLOCK, BLOCK)
            x = view[self.x]
            rounded = (_read(view, x.at[:, columns]).astype(f32) + value).astype(x.dtype)
            _write(view, rounded, view[self.new].at[:, columns])
            exact = rounded.astype(f32)
            weight = plgpu.load(view[self.norm].at[columns], layout=BY_COLUMN, optimized=False).astype(f32)
            _write(
                view,
                exact * lax.broadcast_in_dim(weight, exact.shape, [0]),
                view[self.weighted].at[:, columns],
            )
            view[self.squares].at[number][...] = (exact * exact).sum(axis=0)


@dataclasses.dataclass(frozen=True)
class Gate:
    """silu(gate) * up to `out`; the two sums are of the same columns."""

    out: str

    def __call__(self, view: View, inverse: Any, tile: Any, sums: Any) -> None:
        opened, up = (_scaled(inverse, value) for value in sums)
        _write(view, opened / (1.0 + jnp.exp(-opened)) * up, view[self.out].at[:, pl.ds(tile * BLOCK, BLOCK)])


@dataclasses.dataclass(frozen=True)
class Rotate:
    """Rotary embedding of a head of 128: the two sums are its halves. Columns: of every KV head G queries, key, value."""

    group: int

    def __call__(self, view: View, inverse: Any, tile: Any, sums: Any) -> None:
        kv_head, member = lax.div(tile, i32(self.group + 2)), lax.rem(tile, i32(self.group + 2))
        turns = jnp.where(member <= self.group, f32(1), f32(0))  # values are not rotated
        cos = _read(view, view["cos"]) * turns + (1 - turns)
        sin = _read(view, view["sin"]) * turns
        first, second = (_scaled(inverse, value) for value in sums)
        rotated = first * cos - second * sin, second * cos + first * sin

        def write(out: Any, head: Any) -> None:
            for i, value in enumerate(rotated):
                _write(view, value, out.at[:, head, pl.ds(i * BLOCK, BLOCK)])

        pl.when(member < self.group)(lambda: write(view["q"], kv_head * self.group + member))
        pl.when(member == self.group)(lambda: write(view["k"], kv_head))
        pl.when(member == self.group + 1)(lambda: write(view["v"], kv_head))
