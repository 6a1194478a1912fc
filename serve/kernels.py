"""Mosaic's kernels, compiled in other processes than the one that runs them.

A step has three to seven, which take 0.2 to 4 s each. XLA compiles those of a program one after another, and while it does
no other program of the process has LLVM: what compiles kernels and what compiles the rest want other options of it, of
which a process has one set at a time. So the processes that trace steps (`serve.tracers`) compile their kernels, too, each
as a program of its own. JAX's cache of compiled programs takes that in, kernel and all; whoever loads it from there has the
kernel for every program that contains it, since Mosaic finds compiled kernels by the hash of their text.
"""

import functools
import logging
import os
from typing import Any, NamedTuple

import jax
import numpy as np

_TARGET = "mosaic_gpu_v2"
_FILE_NAME = "mosaic_gpu.dump_basename"  # an attribute of a kernel's text

log = logging.getLogger("tangram.engine")


class Kernel(NamedTuple):
    """One, as a program's text has it."""

    hash: bytes
    text: bytes

    def compile(self) -> None:
        """As a program that does nothing else, and never runs. Or load it, where that has been done.

        Where that cannot be, whoever compiles a step with this kernel finds out, if it matters.
        """

        def kernel() -> jax.Array:
            call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((1,), np.int32))
            return call(
                kernel_hash=self.hash, module=self.text, use_custom_barrier=False, skip_device_barrier=False,
                uses_xla_collective_metadata=False,
            )  # fmt: skip

        try:
            jax.jit(kernel).lower().compile()
        except Exception as error:  # another JAX, or no memory
            log.debug("Kernel %s is left to its step: %r", self.hash.hex(), error)


def lowered() -> list[Kernel]:
    """Those that this process has lowered. None of them where this JAX does not say."""
    try:
        from jax.experimental.mosaic.gpu.core import KNOWN_KERNELS  # no part of what JAX promises
    except ImportError:
        return []
    return [Kernel(*item) for item in KNOWN_KERNELS.items()]


@functools.cache
def give_equal_names() -> None:
    """From now on equal kernels have equal texts, in every process that has called this.

    Otherwise each has a number in it, for files that are written where someone looks for faults. There it keeps that.
    """
    if any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ):
        return
    try:
        from jax._src.lib.mlir import ir
        from jax.experimental.mosaic.gpu import dialect

        options_of = dialect.get_or_set_dump_options
    except (ImportError, AttributeError):
        return

    @functools.wraps(options_of)
    def with_its_name(module: Any) -> Any:
        attributes = module.operation.attributes
        if _FILE_NAME not in attributes and "sym_name" in attributes:
            attributes[_FILE_NAME] = ir.StringAttr.get(attributes["sym_name"].value, module.context)
        return options_of(module)

    dialect.get_or_set_dump_options = with_its_name
