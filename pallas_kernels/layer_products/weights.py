"""The weights that a layer's kernel takes."""

import dataclasses
from typing import NamedTuple

import jax

from pallas_kernels.fp8_products.packing import Fp8Weights

Matrix = jax.Array | Fp8Weights


class LayerWeights(NamedTuple):
    """Of a layer from attention's result [T, A] on, with a residual stream [T, E] and F numbers behind the gates.

    What a model does not have is None: norms of products (`out_post` and `down_post`), and the next layer. The matrices are
    all floats, or all in FP8.
    """

    out: Matrix  # [A, E]
    norm: jax.Array  # [E], of the RMS norm before the gates
    gate_up: Matrix  # [E, 2 F], gates first
    down: Matrix  # [F, E]
    out_post: jax.Array | None = None  # [E]
    down_post: jax.Array | None = None  # [E]
    next_norm: jax.Array | None = None  # [E]
    heads: Matrix | None = None  # [E, H], of the next layer's queries, keys and values

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """(A, E, F, H), H being 0 without heads."""
        depth, width = shape_of(self.out)
        return depth, width, shape_of(self.down)[0], 0 if self.heads is None else shape_of(self.heads)[1]

    @property
    def fp8(self) -> bool:
        """Whether the matrices are in FP8."""
        return isinstance(self.out, Fp8Weights)

    @property
    def given(self) -> dict[str, Matrix]:
        """What is there, by name."""
        return {name: each for name, each in self._asdict().items() if each is not None}

    @property
    def operands(self) -> dict[str, jax.Array]:
        """The same in arrays: of a matrix in FP8 the codes, and beside them the scales."""
        named: dict[str, jax.Array] = {}
        for name, each in self.given.items():
            if isinstance(each, Fp8Weights):
                named |= {name: each.codes, scales_of(name): each.scales}
            else:
                named[name] = each
        return named


class MixtureWeights(NamedTuple):
    """The same of a layer whose MLP is a mixture of X experts, of F numbers each; all are floats, and for one token."""

    out: jax.Array  # [A, E]
    norm: jax.Array  # [E]
    router: jax.Array  # [E, X]
    gate_up: jax.Array  # [X, E, 2 F], gates first
    down: jax.Array  # [X, F, E]
    next_norm: jax.Array | None = None  # [E]
    heads: jax.Array | None = None  # [E, H]

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """(A, E, F, H), H being 0 without heads."""
        depth, width = self.out.shape
        return depth, width, self.down.shape[1], 0 if self.heads is None else self.heads.shape[1]

    @property
    def fp8(self) -> bool:
        return False

    @property
    def given(self) -> dict[str, jax.Array]:
        """What is there, by name."""
        return {name: each for name, each in self._asdict().items() if each is not None}

    @property
    def operands(self) -> dict[str, jax.Array]:
        """The same."""
        return self.given


@dataclasses.dataclass(frozen=True)
class Routing:
    """How a router's numbers become experts and their weights."""

    experts: int  # that a token goes through, the likeliest
    normalize: bool  # their weights add up to one, otherwise they are what they are among all experts'


def shape_of(matrix: Matrix) -> tuple[int, ...]:
    """[depth, columns], however it is held."""
    return (matrix.depth, matrix.columns) if isinstance(matrix, Fp8Weights) else matrix.shape


def scales_of(name: str) -> str:
    """The name of the scales of a matrix in FP8."""
    return f"{name}_scales"
