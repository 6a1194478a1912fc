"""Sums over the devices of a mesh, of which each has computed a share: by our kernels between linked GPUs, else by XLA."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from models.config import ModelConfig
from pallas_kernels import all_reduce


class Share(NamedTuple):
    """What one device has of a sum; what takes it adds it up, with whatever else comes to it."""

    part: Float[Array, "T depth"]
    links: Int[Array, "_ 2"] | None  # between the devices, see `all_reduce.links_of`


def over_devices(share: Share, config: ModelConfig) -> Float[Array, "T depth"]:
    """What all devices' shares give together."""
    with jax.named_scope("all_reduce"):
        if share.links is not None:
            return all_reduce.all_reduce(share.part, share.links)
        return jax.lax.psum(share.part, config.tensor_axis)
