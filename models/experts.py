"""The MLP of a mixture of experts: every token goes through the few experts that a router chooses for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from models.routing import Routed, goes_at_once, routed_at_once, routed_by_xla
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

log = logging.getLogger("tangram")


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
    if kernel and here == num_experts and not narrow and goes_at_once(x, config):
        h, routed = routed_at_once(layer_params, x, there, config, block, directly)
    else:
        routed = routed_by_xla(layer_params, x, there, config, block, here, directly)
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
