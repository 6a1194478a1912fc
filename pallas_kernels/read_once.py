"""Loads of what a kernel reads once: the L2 gives up these lines first, and keeps what is read or written again.

A step takes weights and pages through the L2 that are many times as large. By ordinary loads they drive out what is small
and of use, tokens and what CTAs leave there for each other, which then goes to the memory and comes back beside them. Pallas
has no such hint for its copies, so these are marked by a scope's name, which is found again where they become instructions:
an operation up to JAX 0.11, text from 0.12 on. There JAX's names are its own: if a version has others, loads are ordinary
ones.
"""

import threading
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import dialect, dialect_lowering
from jax.experimental.mosaic.gpu.utils import c
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

SCOPE = "L2::evict_first"  # unlike any name of a file, which locations have, too
# What `createpolicy.fractional` gives for all of a load.
EVICT_FIRST = 0x12F0000000000000
EVICT_NORMAL = 0x1000000000000000  # that of loads without a hint
LOAD = "cp_async_bulk_tensor_shared_cluster_global"
ASSEMBLY = "inline_asm"
LOAD_TEXT, COMPLETES = "cp.async.bulk.tensor.", ".mbarrier::complete_tx::bytes "
_thread = threading.local()  # several may lower


def load_once(src: Any, dst: Any, barrier: Any) -> None:
    """`plgpu.copy_gmem_to_smem` of what no other CTA reads, or only at about the same time."""
    with jax.named_scope(SCOPE):
        plgpu.copy_gmem_to_smem(src, dst, barrier)


def policy() -> Any:
    """Of the load that is being lowered: the constant, or None of an ordinary one."""
    if not getattr(_thread, "once", False):
        return None
    return c(EVICT_FIRST, ir.IntegerType.get_signless(64))


def install() -> None:
    """For all that is lowered from now on."""
    rules = getattr(dialect_lowering, "_lowerings", {})
    name = getattr(getattr(dialect, "AsyncLoadOp", None), "OPERATION_NAME", None)
    lower = rules.get(name)
    if lower is None:
        return

    def lower_load(context: Any, operation: Any) -> Any:
        _thread.once = SCOPE in str(operation.location)
        try:
            return lower(context, operation)
        finally:
            _thread.once = False

    rules[name] = lower_load
    _hint_operations()
    _hint_text()


def _hint_operations() -> None:
    load = getattr(nvvm, LOAD, None)
    if load is None:
        return

    def hinted(*args: Any, **options: Any) -> Any:
        if (hint := policy()) is not None:
            options["l2_cache_hint"] = hint
        return load(*args, **options)

    setattr(nvvm, LOAD, hinted)


def _hint_text() -> None:
    inline_asm = llvm.inline_asm

    def hinted(result: Any, operands: Any, text: str, constraints: str, *args: Any, **options: Any) -> Any:
        if LOAD_TEXT in text and COMPLETES in text and (hint := policy()) is not None:
            text = text.replace(COMPLETES, f"{COMPLETES.strip()}.L2::cache_hint ")
            text = f"{text.rstrip().removesuffix(';')}, ${len(operands)};"
            operands, constraints = [*operands, hint], f"{constraints},l"
        return inline_asm(result, operands, text, constraints, *args, **options)

    setattr(llvm, ASSEMBLY, hinted)
