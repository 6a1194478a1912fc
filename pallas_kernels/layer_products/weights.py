"""The weights that a layer's kernel takes."""

from typing import NamedTuple

import jax


class LayerWeights(NamedTuple):
    """Of a layer from attention's result [T, A] on, with a residual stream [T, E] and F numbers behind the gates.

    What a model does not have is None: norms of products (`out_post` and `down_post`), and the next layer.
    """

    out: jax.Array  # [A, E]
    norm: jax.Array  # [E], of the RMS norm before the gates
    gate_up: jax.Array  # [E, 2 F], gates first
    down: jax.Array  # [F, E]
    out_post: jax.Array | None = None  # [E]
    down_post: jax.Array | None = None  # [E]
    next_norm: jax.Array | None = None  # [E]
    heads: jax.Array | None = None  # [E, H], of the next layer's queries, keys and values

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """(A, E, F, H), H being 0 without heads."""
        depth, width = self.out.shape
        return depth, width, self.down.shape[0], 0 if self.heads is None else self.heads.shape[1]
