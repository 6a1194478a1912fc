"""Where one kernel for a whole layer is taken, one frozen record for each generation of GPUs."""

import dataclasses

import jax

from pallas_kernels.support import measured_on, record_for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Slots are those of `layer_products`."""

    # Parts of the names of devices on which an engine takes it. None yet: it saves 0.5 to 1.5% of a step on an H100, and a
    # step's program takes twice as long to compile.
    kinds: tuple[str, ...] = ()


TUNING = {"9.0": Tuning()}


def tuning_for(device: jax.Device | None = None) -> Tuning | None:
    """None where attention and products by themselves are taken."""
    device = jax.devices()[0] if device is None else device
    tuning = record_for(TUNING, device)
    return tuning if tuning.kinds and measured_on(tuning.kinds, device) else None
