"""Tokens dealt to experts, and whether rows, weights and plan are what XLA operations make of the same."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.routing import Experts, expert_weights, likeliest
from pallas_kernels import expert_products as ep
from pallas_kernels.norms import rms_norm
from tests.kernels.expert_cases import relative_error


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int
    experts: int
    count: int
    block: int = 64
    size: int = 64
    normalize: bool = True
    absent: tuple[int, ...] | None = None  # tokens that are not there; None: not even said
    equal: bool = False  # logits of few different values, zeros of both signs among them
    dtype: str = "bfloat16"
    parts: int = 1  # of the logits
    bias: str | None = None  # its dtype

    def given(self) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
        """(x, parts of the logits, bias, there)"""
        rng = np.random.default_rng(self.tokens + self.experts)
        x = jnp.asarray(rng.standard_normal((self.tokens, self.size)), self.dtype)
        logits = rng.standard_normal((self.parts, self.tokens, self.experts)) * 3
        if self.equal:
            logits = np.round(logits / 3) * rng.choice([-1.0, 1.0], logits.shape)
        bias = self.bias and jnp.asarray(np.round(rng.standard_normal(self.experts)), self.bias)
        there = None
        if self.absent is not None:
            there = jnp.asarray(~np.isin(np.arange(self.tokens), self.absent))
        return x, jnp.asarray(logits, jnp.float32), bias, there

    def chosen(self) -> tuple[np.ndarray, np.ndarray]:
        """(experts, weights) by XLA operations, of logits that are added up in the kernel's order."""
        _, parts, bias, _ = self.given()
        logits = functools.reduce(jnp.add, list(parts))
        if bias is not None:
            logits = logits + bias.astype(jnp.float32)
        largest, experts = likeliest(logits, self.count)
        shares, whole = expert_weights(logits, largest, self.normalize)
        return np.asarray(experts), np.asarray(jnp.concatenate(shares, axis=1) / whole)

    def check_choice(self, **options: Any) -> None:
        """Of `choose`, which few tokens have."""
        _, logits, bias, _ = self.given()
        experts, weights = ep.choose(logits, bias, count=self.count, normalize=self.normalize, **options)
        wanted, shares = self.chosen()
        np.testing.assert_array_equal(experts, wanted)
        np.testing.assert_allclose(weights, shares, rtol=2e-6, atol=1e-9)

    def check(self, **options: Any) -> None:
        """Of `dispatch`."""
        x, logits, bias, there = self.given()
        rows, weights, plan = ep.dispatch(
            x, logits, bias, there, count=self.count, block=self.block, normalize=self.normalize, **options
        )
        experts, shares = self.chosen()
        np.testing.assert_allclose(weights, shares, rtol=2e-6, atol=1e-9)
        if there is not None:
            experts = np.where(np.asarray(there)[:, None], experts, self.experts)
        want = ep.plan_experts(jnp.asarray(experts), self.experts, self.block)
        np.testing.assert_array_equal(plan.position, want.position)
        for name in ("first", "counts", "ends"):
            np.testing.assert_array_equal(
                getattr(plan.blocks, name), getattr(want.blocks, name), err_msg=name
            )
        total = int(want.blocks.total())
        np.testing.assert_array_equal(plan.blocks.expert[:total], want.blocks.expert[:total])
        assert plan.blocks.expert.shape == want.blocks.expert.shape and rows.shape == want.given(x).shape
        taken = experts < self.experts
        found = np.asarray(rows[want.position], np.float32)[taken]
        tokens = np.broadcast_to(np.asarray(x, np.float32)[:, None], (*taken.shape, self.size))
        np.testing.assert_array_equal(found, tokens[taken])


def check_combined(
    tokens: int, count: int, size: int, dtype: str, *, offset: float = 0.0, **options: Any
) -> None:
    """A residual and what experts made, and its norm, as XLA operations have them; without what is not there."""
    rng = np.random.default_rng(tokens + size)
    rows = jnp.asarray(
        rng.permutation(8 * tokens * count)[: tokens * count].reshape(tokens, count), jnp.int32
    )
    there = np.arange(tokens) % 3 != 1
    products = rng.standard_normal((8 * tokens * count, size))
    products[np.asarray(rows)[~there]] = np.nan
    x, norm, made = (
        jnp.asarray(a, dtype)
        for a in (rng.standard_normal((tokens, size)), rng.standard_normal(size), products)
    )
    weights = jnp.asarray(rng.random((tokens, count)), jnp.float32)
    for given in (there, None) if there.all() else (there,):
        mask = None if given is None else jnp.asarray(given)
        total, normed = ep.combine(x, made, rows, weights, norm, mask, eps=1e-5, offset=offset, **options)
        want = x + Experts(made, rows, weights, mask).added_up()
        bound = {"bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
        assert relative_error(total, np.asarray(want, np.float64)) < bound
        exact = rms_norm(total.astype(jnp.float32), norm, 1e-5, offset)
        assert relative_error(normed, exact) < bound / 2 and total.dtype == normed.dtype == x.dtype
