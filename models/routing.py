"""Which experts each token goes to, by the product with a router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import expert_products as ep

if TYPE_CHECKING:
    from models.config import ModelConfig

# Tokens whose experts are found by comparisons. Of more XLA unrolls them so far that LLVM takes seconds, of 8192 minutes.
COMPARED = 512
DEPTH = 64  # of a router's part
READ = 1 << 14  # numbers of a router's parts, at most, that each CTA adds up
LEAST_PARTS = 8  # fewer are too few CTAs for the product


class Routed(NamedTuple):
    """Where tokens go, and how what comes from there is added up."""

    plan: ep.ExpertPlan | ep.DirectPlan
    weights: list[Float[Array, "T 1"]]  # of each token's j-th expert, to be divided by
    whole: Float[Array, "T 1"]
    mine: Bool[Array, "T k"] | None = None  # which of them the plan has; None: all


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
    if jax.default_backend() != "gpu" or len(x) > COMPARED or depth % DEPTH or depth % 512 == 0:
        return jnp.matmul(x, router, preferred_element_type=jnp.float32) + added
    parts = depth // DEPTH
    first = (jnp.arange(parts) == 0)[:, None, None]  # added within the sum it needs no kernel
    return (router_parts(x, router, parts) + jnp.where(first, added, 0.0)).sum(axis=0)


def router_parts(x: Float[Array, "T E"], router: Float[Array, "E X"], parts: int) -> Float[Array, "S T X"]:
    """The product of tokens with the router in float32, split into parts of the depth that are still to be added up."""
    return jnp.einsum(
        "tsd,sdx->stx",
        x.reshape(len(x), parts, -1),
        router.reshape(parts, -1, router.shape[1]),
        preferred_element_type=jnp.float32,
    )


def parts_to_choose_from(tokens: int, depth: int, num_experts: int, directly: bool) -> int:
    """Into how many parts a router's product is split for a kernel that adds them up while it chooses.

    One, a sum by XLA, where no kernel would be saved or the parts are so many that reading them takes longer: of a sorted
    plan every CTA does.
    """
    most = depth // DEPTH if depth % DEPTH == 0 else 1
    if directly:
        return most
    held = max(
        n for n in range(1, most + 1) if most % n == 0 and (n == 1 or n * tokens * num_experts <= READ)
    )
    return held if held >= LEAST_PARTS else 1


def goes_at_once(x: Float[Array, "T E"], config: ModelConfig) -> bool:
    """Whether `routed_at_once` takes these tokens."""
    try:
        ep.check_dispatch(x, config.num_experts, config.experts_per_token)
    except NotImplementedError:
        return False
    return True


def routed_at_once(
    layer_params: Mapping[str, Any],
    x: Float[Array, "T E"],
    there: Bool[Array, " T"] | None,
    config: ModelConfig,
    block: int,
    directly: bool,
) -> tuple[Float[Array, "M E"], Routed]:
    """(what experts multiply, where tokens go), by one kernel behind the router's product."""
    router, bias, count = layer_params["router"], layer_params.get("router_bias"), config.experts_per_token
    with jax.named_scope("route"):
        parts = parts_to_choose_from(len(x), x.shape[1], config.num_experts, directly)
        if parts > 1:
            logits = router_parts(x, router, parts)
        else:
            logits, bias = router_logits(x, router, bias)[None], None
    how: dict[str, Any] = {"count": count, "normalize": config.normalize_experts}
    with jax.named_scope("dispatch"):
        plan: ep.ExpertPlan | ep.DirectPlan
        if directly:
            experts, weights = ep.choose(logits, bias, **how)
            rows, plan = x, ep.plan_directly(experts, there)
        else:
            rows, weights, plan = ep.dispatch(x, logits, bias, there, block=block, **how)
    return rows, Routed(plan, [weights[:, j : j + 1] for j in range(count)], jnp.ones((1, 1), weights.dtype))


def routed_by_xla(
    layer_params: Mapping[str, Any],
    x: Float[Array, "T E"],
    there: Bool[Array, " T"] | None,
    config: ModelConfig,
    block: int,
    here: int,
    directly: bool,
) -> Routed:
    """Where tokens go, of the `here` experts of this device."""
    with jax.named_scope("route"):
        logits = router_logits(x, layer_params["router"], layer_params.get("router_bias"))
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
