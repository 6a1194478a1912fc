"""The products of one token in a layer with experts, for the interpreter and a GPU."""

import dataclasses
from typing import Any

import jax

from pallas_kernels import layer_products as lp
from pallas_kernels.gates import Gate
from tests.kernels.layer_cases import check_layer


@dataclasses.dataclass(frozen=True)
class Case:
    """Numbers from attention, of the residual stream and of an expert, how many are chosen, and the next layer's heads."""

    attended: int
    width: int
    inner: int
    chosen: int
    heads: int = 0
    experts: int = 128
    normalize: bool = True
    gate: Gate = "silu"
    offset: float = 0.0
    dtype: str = "bfloat16"
    tokens: int = 1
    seed: int = 0

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """As `MixtureWeights.columns`."""
        return self.attended, self.width, self.inner, self.heads

    def arrays(self) -> tuple[jax.Array, jax.Array, lp.MixtureWeights]:
        """Attention's result, the residual stream and weights."""
        keys = iter(jax.random.split(jax.random.key(self.width + self.seed), 9))

        def draw(*shape: int, scale: float = 1.0) -> jax.Array:
            return (jax.random.normal(next(keys), shape) * scale).astype(self.dtype)

        width, inner, experts = self.width, self.inner, self.experts
        weights = lp.MixtureWeights(
            out=draw(self.attended, width, scale=self.attended**-0.5),
            norm=draw(width) + 1,
            router=draw(width, experts, scale=width**-0.5),
            gate_up=draw(experts, width, 2 * inner, scale=width**-0.5),
            down=draw(experts, inner, width, scale=inner**-0.5),
        )
        if self.heads:
            weights = weights._replace(
                next_norm=draw(width) + 1, heads=draw(width, self.heads, scale=width**-0.5)
            )
        return draw(1, self.attended), draw(1, width), weights


QWEN3 = Case(4096, 2048, 768, 8, heads=5120)  # 30B-A3B


def check_mixture(case: Case, tuning: lp.Tuning, interpret: Any = None, repeats: int = 0) -> None:
    """See `check_layer`."""
    check_layer(case, tuning, interpret, repeats, routing=lp.Routing(case.chosen, case.normalize))
