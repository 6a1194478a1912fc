"""What the plans of the attention kernels share: arrays of all layers, and the number of one."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class LayeredPlan:
    """A plan made once per step for all layers; `index` says which one a call is for.

    A call gets the arrays of all layers and the layer's number as an operand: slices would be a kernel each, per layer and
    array, and a static number a kernel of its own to compile, per layer.
    """

    index: jax.Array | None  # i32[1]: the layer

    def layer(self, index: int | jax.Array) -> Self:
        """The plan of one layer, as the kernels take it."""
        return dataclasses.replace(self, index=jnp.asarray(index, jnp.int32).reshape(1))

    def of_layer(self, name: str) -> jax.Array:
        """One of the arrays, of this plan's layer alone."""
        return getattr(self, name)[self.layer_number]

    @property
    def layer_number(self) -> jax.Array:
        if self.index is None:
            raise ValueError("a plan of all layers: take plan.layer(index)")
        return self.index[0]
