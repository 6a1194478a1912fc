"""Sums over the devices of a mesh, of which each has computed a share: by our kernel between linked GPUs, else by XLA."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from models.config import ModelConfig
from pallas_kernels import all_reduce


class Share(NamedTuple):
    """What one device has of a sum; what takes it adds it up, with whatever else comes to it."""

    part: Float[Array, "T depth"]


def over_devices(
    share: Share, config: ModelConfig, links: Int[Array, "_ 2"] | None
) -> Float[Array, "T depth"]:
    """What all devices' shares give together."""
    with jax.named_scope("all_reduce"):
        if links is not None and are_linked(share.part, links):
            return all_reduce.all_reduce(share.part, links)
        return jax.lax.psum(share.part, config.tensor_axis)


def are_linked(part: Array, links: Int[Array, "_ 2"]) -> bool:
    """Whether the kernel adds it up."""
    try:
        all_reduce.check_supported(part, links)
    except NotImplementedError:
        return False
    return True
