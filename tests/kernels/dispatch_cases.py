"""Tokens dealt to experts, and whether rows, weights and plan are what XLA operations make of the same."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.routing import expert_weights, likeliest
from pallas_kernels import expert_products as ep
from tests.one_program import in_one


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
        want = in_one(ep.plan_experts, jnp.asarray(experts), num_experts=self.experts, block=self.block)
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
