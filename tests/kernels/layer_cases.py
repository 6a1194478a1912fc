"""A layer's products, for the interpreter and a GPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import layer_products as lp
from pallas_kernels.gates import Gate
from tests.kernels.expert_cases import relative_error


@dataclasses.dataclass(frozen=True)
class Case:
    """Tokens, numbers from attention, of the residual stream, and behind the gates."""

    tokens: int
    attended: int
    width: int
    inner: int
    gate: Gate = "silu"
    offset: float = 0.0
    dtype: str = "bfloat16"

    def arrays(self, zeros: bool = False) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(self.tokens)

        def draw(*shape: int, scale: float = 1.0) -> jax.Array:
            if zeros:
                return jnp.zeros(shape, self.dtype)
            return jnp.asarray(rng.standard_normal(shape) * scale, self.dtype)

        return (
            draw(self.tokens, self.attended), draw(self.tokens, self.width),
            draw(self.attended, self.width, scale=self.attended**-0.5), draw(self.width) + 1,
            draw(self.width, 2 * self.inner, scale=self.width**-0.5), draw(self.inner, self.width, scale=self.inner**-0.5),
        )  # fmt: skip


def check_layer(case: Case, tuning: lp.Tuning | None = None, interpret: Any = None, repeats: int = 0) -> None:
    """The kernel against float32 products of the same numbers, and as often the same bits."""
    arrays = case.arrays()
    how: dict[str, Any] = {"gate": case.gate, "eps": 1e-5, "offset": case.offset}
    run = jax.jit(
        lambda *arrays: lp.layer_products(
            *arrays, lp.counters_of(jnp.arange(3)), **how, tuning=tuning, interpret=interpret
        )
    )
    out = run(*arrays)
    exact = lp.layer_products_reference(*(a.astype(jnp.float32) for a in arrays), **how)
    assert out.shape == arrays[1].shape and out.dtype == arrays[1].dtype
    assert relative_error(out, exact) < {"bfloat16": 2.0**-6, "float16": 2.0**-9}[case.dtype]
    for _ in range(repeats):
        np.testing.assert_array_equal(run(*arrays), out)
