"""Products of tokens with the weights of the experts that they are routed to (mixture of experts)."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import support
from pallas_kernels.expert_products.plan import DirectPlan, ExpertPlan, num_rows, plan_directly, plan_experts
from pallas_kernels.expert_products.reference import expert_products_reference
from pallas_kernels.expert_products.tuning import (
    BOX,
    DEPTH,
    LEAST_NARROW,
    MANY_TOKENS,
    MOST_CHOSEN,
    MOST_EXPERTS,
    MOST_TOKENS,
    PACKED_TUNING,
    TUNING,
    PackedTuning,
    Tuning,
    goes_directly,
    packed_tuning_for,
    tuning_for,
)
from pallas_kernels.fp8_products import Fp8Tokens, Fp8Weights

__all__ = [
    "LEAST_NARROW",
    "MANY_TOKENS",
    "DirectPlan",
    "ExpertPlan",
    "PackedTuning",
    "Tuning",
    "check_dispatch",
    "check_supported",
    "choose",
    "dispatch",
    "expert_products",
    "expert_products_reference",
    "gather_rows",
    "goes_directly",
    "num_rows",
    "packed_tuning_for",
    "plan_directly",
    "plan_experts",
    "tuning_for",
]


def check_supported(
    dtype: jax.typing.DTypeLike,
    weights_dtype: jax.typing.DTypeLike,
    weights_shape: tuple[int, ...],
    *,
    device: jax.Device | None = None,
) -> None:
    """Raises NotImplementedError, naming the feature, for weights that have no kernel: see `expert_products`.

    Packed weights are of dtype int32 and any shape.
    """
    dtype, weights_dtype = jnp.dtype(dtype), jnp.dtype(weights_dtype)
    if weights_dtype == "int32":
        if dtype != "bfloat16":
            raise NotImplementedError(f"rows of {dtype} for packed experts: the kernel takes bfloat16")
        support.check_device(device, PACKED_TUNING)
        return
    _, depth, _, columns = weights_shape
    if dtype not in ("bfloat16", "float16"):
        raise NotImplementedError(f"experts of {dtype}: the kernel takes bfloat16 and float16")
    if weights_dtype != dtype:
        raise NotImplementedError(
            f"experts of {weights_dtype} for rows of {dtype}: the kernel takes equal dtypes"
        )
    if depth % DEPTH or columns % BOX:
        raise NotImplementedError(
            f"experts of {depth} x {columns}: the kernel takes multiples of {DEPTH} and {BOX}"
        )
    support.check_device(device, TUNING)


def gather_rows(x: jax.Array, rows: jax.Array, *, interpret: Any = None) -> jax.Array:
    """x[rows]: the rows i32[M] of [T, E], of a multiple of 16 bytes each. On the GPUs that `check_supported` names."""
    from pallas_kernels.expert_products.rows_gpu import gather_rows_mosaic_gpu

    return gather_rows_mosaic_gpu(x, rows, interpret=interpret)


def check_dispatch(x: jax.Array, num_experts: int, count: int, *, device: jax.Device | None = None) -> None:
    """Raises NotImplementedError, naming the feature, for tokens [T, E] that `dispatch` does not take."""
    if x.shape[1] * x.dtype.itemsize % 16:
        raise NotImplementedError(f"rows of {x.shape[1]} {x.dtype}: the kernel takes multiples of 16 bytes")
    _check_choice(x.shape[0], num_experts, count, device)


def _check_choice(tokens: int, num_experts: int, count: int, device: jax.Device | None = None) -> None:
    if tokens > MOST_TOKENS or num_experts > MOST_EXPERTS:
        raise NotImplementedError(
            f"{tokens} tokens, {num_experts} experts: the kernel takes {MOST_TOKENS} and {MOST_EXPERTS} at most"
        )
    if not 1 <= count <= min(num_experts, MOST_CHOSEN):
        raise NotImplementedError(f"{count} experts of a token: the kernel takes 1 to {MOST_CHOSEN}")
    support.check_device(device, TUNING)


def choose(
    logits: jax.Array, bias: jax.Array | None, *, count: int, normalize: bool, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """(experts i32[T, count] of each token, their weights f32[T, count]), for a direct plan. See `dispatch`."""
    from pallas_kernels.expert_products.dispatch_gpu import choose_mosaic_gpu

    if interpret is None:
        _check_choice(logits.shape[1], logits.shape[2], count)
    return choose_mosaic_gpu(logits, bias, count=count, normalize=normalize, interpret=interpret)


def dispatch(
    x: jax.Array,
    logits: jax.Array,
    bias: jax.Array | None = None,
    there: jax.Array | None = None,
    *,
    count: int,
    block: int,
    normalize: bool,
    ctas: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, ExpertPlan]:
    """(rows [M, E] of tokens x [T, E] sorted by expert, the experts' weights f32[T, count], the plan without `token`).

    Each token goes to the `count` experts with its largest logits, the largest first, ties to the lower number; tokens that
    are not `there` (bool[T]) go to none. `logits` f32[S, T, X] are parts of a router's product, which are added up with its
    `bias` [X]. Weights are the chosen experts' probabilities, among the chosen if `normalize`, else among all. Rows of gaps
    are anything. `block`, M: see `plan_experts`.

    Raises NotImplementedError for what `check_dispatch` says.
    """
    from pallas_kernels.expert_products.dispatch_gpu import dispatch_mosaic_gpu

    if interpret is None:
        check_dispatch(x, logits.shape[2], count)
    rows, weights, position, blocks = dispatch_mosaic_gpu(
        x, logits, there, bias, count=count, block=block, normalize=normalize, ctas=ctas, interpret=interpret
    )
    return rows, weights, ExpertPlan(position, None, blocks, block)


def expert_products(
    x: jax.Array | Fp8Tokens,
    weights: jax.Array | Fp8Weights,
    plan: ExpertPlan | DirectPlan,
    *,
    tuning: Tuning | PackedTuning,
    bias: jax.Array | None = None,
    limit: float | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Rows x [M, depth], sorted as `plan` says, times the weights [X, depth, parts, columns] of their experts: [M, columns].

    Of a direct plan x are the tokens [T, depth], or the products of a call before, and M is T * k * 8.
    Weights in MXFP4 are i32[X, parts, columns / 64, depth / 64, 17, 32] as from `mxfp4.pack`, those in FP8 codes
    i32[X, parts, columns / 64, depth / 64, 32, 32] and scales f32[X, parts, columns]; the tuning of both is a PackedTuning.
    The rows of a sorted plan may be in FP8 too if such weights are: the result is bfloat16.
    `bias` [X, parts, columns] is added to the products. With two parts, gate and up, the result is SiLU(gate) * up, and with
    a `limit` that of GPT-OSS (`reference.activation`). Sums are float32, the result has the dtype of x. Rows of no block
    hold anything. `plan` was made for blocks of `tuning.rows`, or is a direct one; weights in MXFP4 take that with 8 rows.

    Raises NotImplementedError for what `check_supported` says.
    """
    from pallas_kernels.expert_products.mosaic_gpu import expert_products_mosaic_gpu
    from pallas_kernels.expert_products.packed_gpu import packed_products_mosaic_gpu

    if interpret is None:
        held = weights.codes if isinstance(weights, Fp8Weights) else weights
        check_supported("bfloat16" if isinstance(x, Fp8Tokens) else x.dtype, held.dtype, held.shape)
    options: dict[str, Any] = {"bias": bias, "limit": limit, "interpret": interpret}
    if isinstance(tuning, PackedTuning):
        return packed_products_mosaic_gpu(x, weights, plan, tuning=tuning, **options)
    assert not isinstance(weights, Fp8Weights) and not isinstance(x, Fp8Tokens)
    return expert_products_mosaic_gpu(x, weights, plan, tuning=tuning, **options)
