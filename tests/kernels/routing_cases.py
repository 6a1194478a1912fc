"""The routing kernel against the XLA operations that do the same."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from models.experts import expert_weights, likeliest
from pallas_kernels import expert_products as ep
from pallas_kernels.expert_products import routing


def check_routing(
    tokens: int,
    num_experts: int,
    per_token: int,
    block: int,
    *,
    normalize: bool = True,
    absent: int = 0,
    interpret: Any = None,
) -> None:
    """`absent`: so many tokens go to no expert."""
    rng = np.random.default_rng(tokens + num_experts)
    # Few different values, so that there are ties.
    logits = jnp.asarray(rng.integers(-20, 20, (tokens, num_experts)) / 4, jnp.float32)
    there = np.ones(tokens, bool)
    there[rng.permutation(tokens)[:absent]] = False
    weights, plan = routing.route(
        logits, jnp.asarray(there), per_token, block, normalize=normalize, interpret=interpret
    )
    experts = likeliest(logits, per_token)
    want = ep.plan_experts(jnp.where(there[:, None], experts, num_experts), num_experts, block)
    np.testing.assert_allclose(
        weights.T, jnp.concatenate(expert_weights(logits, experts, normalize), axis=1), rtol=2e-5
    )
    np.testing.assert_array_equal(plan.position, want.position)
    for name in ("first", "counts", "ends"):
        np.testing.assert_array_equal(getattr(plan, name)[:num_experts], getattr(want, name), err_msg=name)
    assert int(plan.ends[-1]) == int(want.ends[-1])
    blocks, rows = int(want.ends[-1]), np.asarray(want.position)[there]
    np.testing.assert_array_equal(plan.expert[:blocks], want.expert[:blocks])
    np.testing.assert_array_equal(np.asarray(plan.token)[rows], np.asarray(want.token)[rows])
    assert len(plan.token) == len(want.token) and (np.asarray(plan.token) < tokens).all()
