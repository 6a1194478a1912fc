"""A GPU for benchmarks on a machine without one: programs are traced and lowered for CUDA instead of run."""

import contextlib
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo

from benchmarks import chunk_prefill, gpu_timing, ragged_divisions, ragged_inputs, ragged_peers
from benchmarks.gpu_program import as_on_hopper
from pallas_kernels import ragged_decode
from pallas_kernels.ragged_decode import plan as decode_plan

US = {"ragged_decode": 10.0, "chunk_prefill": 20.0, "cudnn_attention": 40.0, "loop_fusion": 5.0}


class Programs:
    """What was lowered; every kernel that `US` names is said to have run once."""

    def __init__(self, lower: bool) -> None:
        self._lower = lower
        self.traced = 0
        self.kernels: list[int] = []  # of ours, by program
        self.cudnn: list[int] = []  # calls

    def kernels_of(self, run: Any, args: tuple[Any, ...], calls: int = 1) -> dict[str, list[float]]:
        self.traced += 1
        if not self._lower:
            jax.eval_shape(run, *args)
            return {name: [us] * calls for name, us in US.items()}
        text = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        self.kernels.append(len(set(re.findall(r'kernel_hash = "([^"]*)"', text))))
        self.cudnn.append(text.count("__cudnn$fmha"))
        return {name: [us] * calls for name, us in US.items()}


def abstract_pool(self: Any, shape: tuple[int, ...]) -> Any:
    """No pool is allocated, whatever its size."""
    return jax.ShapeDtypeStruct(shape, jnp.uint8 if self._packed else jnp.bfloat16)


def abstract_plan(*args: Any, page_size: int, splits: Any = None, num_layers: int = 1) -> Any:
    """No plan is made."""
    how = {"page_size": page_size, "splits": splits, "num_layers": num_layers}
    first, column = args[2:]
    return jax.eval_shape(lambda *args: ragged_decode.plan_decode(*args, first, column, **how), *args[:2])


def zeros(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    return jnp.zeros(shape, dtype)


@contextlib.contextmanager
def as_measured(lower: bool = False) -> Iterator[Programs]:
    """Whether programs are lowered, which takes seconds each, or traced alone."""
    programs = Programs(lower)
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_on_hopper())
        versions = SimpleNamespace(cudnn_get_version=lambda: 91900)
        stack.enter_context(mock.patch.object(fused_attention_stablehlo, "cuda_versions", versions))
        stack.enter_context(mock.patch.object(ragged_inputs.Pools, "_make", abstract_pool))
        stack.enter_context(mock.patch.object(ragged_inputs, "make_plan", abstract_plan))
        # Plans of the others are made here, without a GPU.
        stack.enter_context(mock.patch.object(decode_plan, "_has_kernel", lambda _: False))
        stack.enter_context(mock.patch.object(jax.random, "normal", zeros))
        for module in (gpu_timing, ragged_peers):
            flush = jax.ShapeDtypeStruct((2**20,), jnp.bfloat16)
            stack.enter_context(mock.patch.object(module, "flush_buffer", lambda flush=flush: flush))
        for module in (gpu_timing, ragged_peers, ragged_divisions, chunk_prefill):
            stack.enter_context(mock.patch.object(module, "kernels_of", programs.kernels_of))
        yield programs
