"""Routing of few tokens in one kernel for Hopper GPUs: the likeliest experts, their weights, and the plan of the products.

XLA makes nine small kernels of it, each of which takes as long to start as to run. One CTA of one warpgroup has all tokens
in registers, 64 at a time, an expert in each column: the largest logit is taken out as often as a token has experts. Ranks
of tokens within an expert and sums over the experts before are products with triangles of ones on the tensor cores.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import support
from pallas_kernels.expert_products import routing_ops
from pallas_kernels.expert_products.plan import ExpertPlan, most_blocks, num_rows
from pallas_kernels.expert_products.tuning import ALIGN

ROWS = 64  # tokens of one matrix instruction
MOST_TOKENS, MOST_EXPERTS = 128, 128
WGMMA = plgpu.Layout.WGMMA
LOG2E = 1.4426950408889634
LOWEST = -3e38
i32, f16, f32 = jnp.int32, jnp.float16, jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    tokens: int
    num_experts: int
    per_token: int
    block: int
    normalize: bool
    interpreted: bool

    @property
    def tiles(self) -> int:
        """Of 64 tokens."""
        return -(-self.tokens // ROWS)

    @property
    def columns(self) -> int:
        """Experts and columns of none: a multiple of 64."""
        return -(-self.num_experts // 64) * 64


def check_supported(tokens: int, num_experts: int, *, device: jax.Device | None = None) -> None:
    """Raises NotImplementedError where there is no kernel for so many tokens and experts."""
    if tokens > MOST_TOKENS or num_experts > MOST_EXPERTS:
        raise NotImplementedError(
            f"routing {tokens} tokens to {num_experts} experts: the kernel takes {MOST_TOKENS} and {MOST_EXPERTS}"
        )
    support.check_device(device)


def route(
    logits: jax.Array,
    there: jax.Array,
    per_token: int,
    block: int,
    *,
    normalize: bool,
    interpret: Any = None,
) -> tuple[jax.Array, ExpertPlan]:
    """The `per_token` experts of each token with the largest of its logits f32[T, X], the largest first, ties to the lower.

    Tokens that are not `there` bool[T] go to no expert. `block`, a power of two, as for `plan_experts`.

    Returns (weights f32[per_token, T]: probabilities among all experts, or with `normalize` among the chosen; the plan,
    which may count more experts, to which nothing goes).
    Raises NotImplementedError for what `check_supported` says.
    """
    tokens, num_experts = logits.shape
    if interpret is None:
        check_supported(tokens, num_experts)
    cfg = _Config(
        tokens=tokens, num_experts=num_experts, per_token=per_token, block=block, normalize=normalize,
        interpreted=interpret is not None,
    )  # fmt: skip
    padding = cfg.tiles * ROWS - tokens
    if interpret is not None:
        logits = jnp.pad(logits, ((0, padding), (0, cfg.columns - num_experts)))
    there = jnp.pad(there.astype(f32), (0, padding))
    weights, position, token, expert, first, counts, ends = _call(cfg, logits, there, interpret)
    return weights, ExpertPlan(position, token, expert, first, counts, ends, block)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _call(cfg: _Config, logits: jax.Array, there: jax.Array, interpret: Any) -> tuple[jax.Array, ...]:
    rows = cfg.tokens * cfg.per_token
    by_choice = (cfg.per_token, cfg.tiles * ROWS)
    blocks = -(-most_blocks(rows, cfg.num_experts, cfg.block) // ROWS) * ROWS
    size = num_rows(cfg.tokens, cfg.per_token, cfg.num_experts)

    def expert_routing(*refs: Any) -> None:  # the name that profiles show
        _kernel(cfg, *refs)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    kernel = plgpu.kernel(
        expert_routing,
        out_type=[
            jax.ShapeDtypeStruct(by_choice, f32),
            jax.ShapeDtypeStruct(by_choice, i32),
            jax.ShapeDtypeStruct((size,), i32),
            jax.ShapeDtypeStruct((blocks,), i32),
            *[jax.ShapeDtypeStruct((cfg.columns,), i32)] * 3,
        ],
        grid=(1,),
        grid_names=("cta",),
        scratch_types=[
            plgpu.SMEM((cfg.tiles + 1, ROWS, cfg.columns), f16, transforms=tiled),
            plgpu.SMEM((ROWS, ROWS), f16, transforms=tiled),
            plgpu.SMEM((cfg.columns, cfg.columns), f16, transforms=tiled),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=8192),
        **({} if interpret is None else {"interpret": interpret}),
    )
    weights, position, token, expert, first, counts, ends = kernel(logits, there)
    # What lies in the gaps was not written.
    token = jnp.clip(token, 0, cfg.tokens - 1)
    return weights[:, : cfg.tokens], position[:, : cfg.tokens].T, token, expert, first, counts, ends


def _kernel(cfg: _Config, logits: Any, there: Any, *refs: Any) -> None:
    (
        weights_out,
        position_out,
        token_out,
        expert_out,
        first_out,
        counts_out,
        ends_out,
        taken_s,
        before_s,
        up_s,
    ) = refs
    shape = (ROWS, cfg.columns)
    column = plgpu.broadcasted_iota(f32, shape, 1, layout=WGMMA)
    _fill(before_s, lambda row, column: column < row)
    _fill(up_s, lambda row, column: row < column)

    def here(tile: int) -> jax.Array:
        return plgpu.load(there.at[pl.ds(tile * ROWS, ROWS)], layout=WGMMA.reduce(1), optimized=False)

    chosen: list[list[jax.Array]] = []  # of a tile, its tokens' experts f32[64], one array for each choice
    totals: list[jax.Array] = []  # of an expert, its tokens in the tiles so far
    for tile in range(cfg.tiles):
        left = routing_ops.load_rows(logits, tile * ROWS, shape, cfg.tokens, interpreted=cfg.interpreted)
        # Minus infinity would look like what is taken already, and a NaN like nothing.
        left = jnp.where(left > LOWEST, left, LOWEST)
        left = jnp.where(column < cfg.num_experts, left, -jnp.inf)
        experts, tops, scale = [], [], None
        for j in range(cfg.per_token):
            top = left.max(axis=1)
            if j == 0 and not cfg.normalize:
                scale = jnp.exp2((left - _spread(top, shape, 0)) * LOG2E).sum(axis=1)
            number = jnp.where(left == _spread(top, shape, 0), column, float(cfg.num_experts - 1)).min(axis=1)
            left = jnp.where(column == _spread(number, shape, 0), -jnp.inf, left)
            experts.append(number)
            tops.append(top)
        parts = [jnp.exp2((top - tops[0]) * LOG2E) for top in tops]
        scale = functools.reduce(jnp.add, parts) if scale is None else scale
        for j, part in enumerate(parts):
            weights_out.at[j, pl.ds(tile * ROWS, ROWS)][...] = part / scale
        taken = jnp.where((left == -jnp.inf) & (column < cfg.num_experts), _spread(here(tile), shape, 0), 0.0)
        taken_s.at[tile][...] = taken.astype(f16)
        count = taken.sum(axis=0)
        totals.append(count + totals[-1] if totals else count)
        chosen.append(experts)

    counts = totals[-1].astype(i32)
    held = lax.shift_right_logical(counts + (ALIGN - 1), i32(ALIGN.bit_length() - 1)).astype(f32)
    blocks = lax.shift_right_logical(counts + (cfg.block - 1), i32(cfg.block.bit_length() - 1)).astype(f32)
    spare = taken_s.at[cfg.tiles]
    ends = _before(spare, up_s, blocks, shape) + _spread(blocks, shape, 1)
    counts_out[...] = counts
    ends_out[...] = ends.max(axis=0).astype(i32)
    number = plgpu.broadcasted_iota(f32, shape, 0, layout=WGMMA)
    for start in range(0, expert_out.shape[0], ROWS):
        before = jnp.where((ends <= number + float(start)) & (column < cfg.num_experts), 1.0, 0.0)
        expert_out.at[pl.ds(start, ROWS)][...] = before.sum(axis=1).astype(i32)
    first = _before(spare, up_s, held, shape) * float(ALIGN)
    first_out[...] = first.max(axis=0).astype(i32)
    for tile in range(cfg.tiles):
        place = first + _product(before_s, taken_s.at[tile])
        if tile:
            place = place + _spread(totals[tile - 1], shape, 1)
        for j, expert in enumerate(chosen[tile]):
            mine = jnp.where(column == _spread(expert, shape, 0), place, 0.0).max(axis=1)
            position_out.at[j, pl.ds(tile * ROWS, ROWS)][...] = (mine * here(tile)).astype(i32)
            # Tokens that are not there write beyond the end: nothing.
            target = jnp.where(here(tile) > 0.0, mine, float(token_out.shape[0])).astype(i32)
            routing_ops.scatter_rows(target, token_out, tile * ROWS, interpreted=cfg.interpreted)


def _spread(x: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, (axis,))


def _fill(ref: Any, condition: Any) -> None:
    """Ones where the condition of row and column holds, 64 rows at a time."""
    rows, columns = ref.shape
    column = plgpu.broadcasted_iota(f32, (ROWS, columns), 1, layout=WGMMA)
    row = plgpu.broadcasted_iota(f32, (ROWS, columns), 0, layout=WGMMA)
    for start in range(0, rows, ROWS):
        ones = jnp.where(condition(row + float(start), column), 1.0, 0.0)
        ref.at[pl.ds(start, ROWS)][...] = ones.astype(f16)


def _before(spare: Any, up_s: Any, values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """f32[shape]: of each column the sum of `values`, whole numbers up to 2048, of the columns before; all rows alike."""
    spare[...] = _spread(values, shape, 1).astype(f16)
    return _product(spare, up_s)


def _product(a: Any, b: Any) -> jax.Array:
    """a @ b, f16 in shared memory that was just written."""
    plgpu.commit_smem()

    def run(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), f32))
