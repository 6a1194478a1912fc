"""The MLP of a mixture of experts: every token goes through the few experts that a router chooses for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import expert_products as ep
from pallas_kernels.fp8_products import (
    Fp8Tokens,
    Fp8Weights,
    quantise_tokens,
    quantise_tokens_reference,
)
from pallas_kernels.support import check_one_device

if TYPE_CHECKING:
    from models.config import ModelConfig

# Tokens whose experts are found by comparisons. Of more XLA unrolls them so far that LLVM takes seconds, of 8192 minutes.
COMPARED = 512

log = logging.getLogger("tangram")


def likeliest(logits: Float[Array, "T X"], count: int) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    """The `count` largest logits of each token and their experts, the largest first, ties to the lower number."""
    if len(logits) > COMPARED:
        largest, experts = lax.top_k(logits, count)
        return largest, experts
    # By comparisons instead of sorting: two small kernels on a GPU.
    number = lax.iota(jnp.int32, logits.shape[1])
    mine, others = logits[:, :, None], logits[:, None, :]
    ahead = (others > mine) | ((others == mine) & (number < number[:, None]))
    rank = jnp.sum(ahead, axis=2, dtype=jnp.int32)
    chosen = rank[:, None] == lax.iota(jnp.int32, count)[:, None]  # [T, k, X]
    largest = jnp.sum(jnp.where(chosen, logits[:, None], 0), axis=2)
    # The maximum is the one that is chosen, and an expert's number also where logits are none.
    return largest, jnp.max(jnp.where(chosen, number, 0), axis=2)


def expert_weights(
    logits: Float[Array, "T X"], largest: Float[Array, "T k"], normalize: bool
) -> tuple[list[Float[Array, "T 1"]], Float[Array, "T 1"]]:
    """(Weights of each token's j-th expert, the largest logits being as from `likeliest`; what to divide them by).

    That is their probability among all, or with `normalize` among the chosen.
    """
    chosen = [largest[:, j : j + 1] for j in range(largest.shape[1])]
    if not normalize:
        total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
        return [jnp.exp(x - total) for x in chosen], jnp.ones((1, 1), logits.dtype)
    weights = [jnp.exp(x - chosen[0]) for x in chosen]
    return weights, sum(weights[1:], weights[0])


def router_logits(
    x: Float[Array, "T E"], router: Float[Array, "E X"], bias: Float[Array, " X"] | None
) -> Float[Array, "T X"]:
    """The product of tokens with the router, and its bias, in float32.

    On a GPU one of few tokens is split along the depth, as XLA does by itself for depths that powers of two divide:
    GPT-OSS's 2880 x 32 would be one tile, which takes one multiprocessor 15 us.
    """
    depth, added = x.shape[1], jnp.float32(0) if bias is None else bias.astype(jnp.float32)
    if jax.default_backend() != "gpu" or len(x) > COMPARED or depth % 64 or depth % 512 == 0:
        return jnp.matmul(x, router, preferred_element_type=jnp.float32) + added
    parts = depth // 64
    split = jnp.einsum(
        "tsd,sdx->stx",
        x.reshape(-1, parts, 64),
        router.reshape(parts, 64, -1),
        preferred_element_type=jnp.float32,
    )
    first = (jnp.arange(parts) == 0)[:, None, None]  # added within the sum it needs no kernel
    return (split + jnp.where(first, added, 0.0)).sum(axis=0)


class Routed(NamedTuple):
    """Where tokens go, and how what comes from there is added up."""

    plan: ep.ExpertPlan | ep.DirectPlan
    weights: list[Float[Array, "T 1"]]  # of each token's j-th expert, to be divided by
    whole: Float[Array, "T 1"]
    mine: Bool[Array, "T k"] | None = None  # which of them the plan has; None: all


def _dealt(
    x: Float[Array, "T E"],
    logits: Float[Array, "T X"],
    there: Bool[Array, " T"] | None,
    config: ModelConfig,
    block: int,
) -> tuple[Float[Array, "M E"], Routed]:
    """(rows of experts, where they go), all by one kernel."""
    count = config.experts_per_token
    with jax.named_scope("dispatch"):
        rows, weights, plan = ep.dispatch(
            x, logits, there, count=count, block=block, normalize=config.normalize_experts
        )
    return rows, Routed(plan, [weights[:, j : j + 1] for j in range(count)], jnp.ones((1, 1), weights.dtype))


def _routed(
    logits: Float[Array, "T X"],
    there: Bool[Array, " T"] | None,
    config: ModelConfig,
    block: int,
    here: int,
    directly: bool,
) -> Routed:
    """By XLA's operations, to the `here` experts of this device."""
    with jax.named_scope("route"):
        largest, routed = likeliest(logits, config.experts_per_token)
        weights, whole = expert_weights(logits, largest, config.normalize_experts)
    with jax.named_scope("plan_experts"):
        if directly:
            return Routed(ep.plan_directly(routed, there), weights, whole)
        mine = None
        if here < logits.shape[1]:  # by their numbers on this device
            routed -= lax.axis_index(config.tensor_axis) * here
            mine = (routed >= 0) & (routed < here)
        for wanted in (mine, None if there is None else there[:, None]):
            routed = routed if wanted is None else jnp.where(wanted, routed, here)
        return Routed(ep.plan_experts(routed, here, block), weights, whole, mine)


def expert_mlp(
    layer_params: Mapping[str, Any],
    x: Float[Array, "T E"],
    config: ModelConfig,
    there: Bool[Array, " T"] | None = None,
) -> Float[Array, "T E"]:
    """What the chosen experts make of each token, weighted and added up; in the dtype of x.

    Tokens that are not `there` go through no expert, so that none is read for them alone: zeros come out. On a Hopper GPU a
    kernel multiplies, elsewhere XLA operations, expert by expert.
    """
    num_experts, count = config.num_experts, config.experts_per_token
    with jax.named_scope("route"):
        logits = router_logits(x, layer_params["router"], layer_params.get("router_bias"))
    gate_up, down = layer_params["expert_gate_up"], layer_params["expert_down"]
    fp8 = isinstance(gate_up, Fp8Weights)
    if not (config.experts_mxfp4 or fp8):
        down = down[:, :, None]
    gate_up_bias, down_bias = None, None
    if config.expert_bias:
        gate_up_bias, down_bias = (
            layer_params["expert_gate_up_bias"],
            layer_params["expert_down_bias"][:, None],
        )
        if config.tensor_axis is not None and not config.experts_mxfp4:  # added once, not by every device
            first = lax.axis_index(config.tensor_axis) == 0
            down_bias = jnp.where(first, down_bias, jnp.zeros_like(down_bias))
    here = num_experts  # of this device
    if config.tensor_axis is not None and config.experts_mxfp4:
        here = gate_up.shape[0]
    directly = here == num_experts and ep.goes_directly(x.shape[0], count, num_experts)
    rows = x.shape[0] * count
    narrow = fp8 and config.activations_fp8 and not directly and rows >= ep.LEAST_NARROW * num_experts
    tuning: ep.Tuning | ep.PackedTuning = ep.tuning_for(1 if directly else rows, num_experts)
    if config.experts_mxfp4 or fp8:
        tuning = ep.packed_tuning_for(1 if directly else rows, num_experts, fp8=fp8, narrow=narrow)
    kernel = _has_kernel(x, gate_up, down)
    quantise = quantise_tokens if kernel else quantise_tokens_reference
    # On a CPU the rows of a block are all multiplied, those beyond the expert's own for nothing.
    block = tuning.rows if kernel else 8 if rows <= 32 * num_experts else 64
    many = False  # tokens, whose rows and weights are worth kernels of their own
    h: Any
    if kernel and here == num_experts and not directly and not narrow and _is_dealt(x, num_experts, count):
        h, routed = _dealt(x, logits, there, config, block)
    else:
        routed = _routed(logits, there, config, block, here, directly)
        many = kernel and not directly and len(x) >= ep.MANY_TOKENS
        with jax.named_scope("plan_experts"):
            h = routed.plan.given(quantise(x) if narrow else x, ep.gather_rows if many else None)
    with jax.named_scope("experts"):
        steps = ((gate_up, gate_up_bias, config.swiglu_limit), (down, down_bias, None))
        for matrices, bias, limit in steps:
            if narrow and not isinstance(h, Fp8Tokens):  # products of before
                h = quantise(h)
            if kernel:
                h = ep.expert_products(h, matrices, routed.plan, tuning=tuning, bias=bias, limit=limit)
            else:
                h = ep.expert_products_reference(h, matrices, routed.plan, bias=bias, limit=limit)
    with jax.named_scope("add_experts"):
        total = add_experts(h, routed, hold=many).astype(x.dtype)
        return total if there is None else jnp.where(there[:, None], total, jnp.zeros_like(total))


def add_experts(h: Float[Array, "M E"], routed: Routed, hold: bool) -> Float[Array, "T E"]:
    """The sum over experts of products h times weights / whole (as from `expert_weights`), in float32.

    Expert by expert and not as a sum over an axis: all of it is one kernel on a GPU. Of few tokens what comes out is
    divided: then the sum of weights needs no kernel either. Of many, XLA would make a token's weights anew for every
    element of it, which takes many times as long as adding up: `hold` makes them a kernel of their own.
    """
    plan, weights, whole, mine = routed
    directly = isinstance(plan, ep.DirectPlan)
    if not directly:
        weights = [weight / whole for weight in weights]
    if hold:
        held = lax.optimization_barrier(jnp.concatenate(weights, axis=1))
        weights = [held[:, j : j + 1] for j in range(held.shape[1])]
    parts = [plan.chosen(h, j).astype(jnp.float32) * weight for j, weight in enumerate(weights)]
    if mine is not None:
        parts = [jnp.where(mine[:, j : j + 1], part, 0.0) for j, part in enumerate(parts)]
    total = sum(parts[1:], parts[0])
    return total / whole if directly else total


def _is_dealt(x: Array, num_experts: int, count: int) -> bool:
    """Whether one kernel chooses experts, plans and brings the rows."""
    try:
        ep.check_dispatch(x, num_experts, count)
    except NotImplementedError:
        return False
    return True


def _has_kernel(x: Array, *matrices: Array | Fp8Weights) -> bool:
    try:
        for weights in matrices:
            held = weights.codes if isinstance(weights, Fp8Weights) else weights
            check_one_device(held)
            ep.check_supported(x.dtype, held.dtype, held.shape)
    except NotImplementedError as reason:
        if jax.default_backend() == "gpu":
            log.warning("Experts are multiplied one after another, many times slower: %s", reason)
        return False
    return True
