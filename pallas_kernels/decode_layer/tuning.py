"""Where one kernel for a whole layer is faster than two, one frozen record for each generation of GPUs."""

import dataclasses

import jax

from pallas_kernels.support import measured_on, record_for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Slots are those of `layer_products`."""

    # Heads of 256 have too many registers: 6 to 8% of a step of Gemma 3 12B's shape are lost with them.
    most_head_dim: int = 128
    kinds: tuple[str, ...] = ("H100", "H200")  # parts of the names of devices on which it was measured


TUNING = {"9.0": Tuning()}


def tuning_for(head_dim: int, device: jax.Device | None = None) -> Tuning | None:
    """None where attention and products by themselves may be faster."""
    device = jax.devices()[0] if device is None else device
    tuning = record_for(TUNING, device)
    return tuning if head_dim <= tuning.most_head_dim and measured_on(tuning.kinds, device) else None
