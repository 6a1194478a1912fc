"""Kernel times on an NVIDIA GPU, read from the profiler (CUPTI): wall time of tiny kernels measures their launches."""

import glob
import tempfile
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def check_gpu() -> None:
    """Raises SystemExit where there is no GPU, on whose kernels all times here depend."""
    if (backend := jax.default_backend()) != "gpu":
        raise SystemExit(
            f"This measures kernels of an NVIDIA GPU, and JAX finds only {backend}: run it where there is one."
        )


def trace_kernels(run: Callable[[], Any]) -> dict[str, list[float]]:
    """Durations in us of every kernel that `run` starts, by name."""
    check_gpu()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
    times: dict[str, list[float]] = defaultdict(list)
    for plane in data.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if "Stream" in line.name:
                for event in line.events:
                    times[event.name].append(event.duration_ns / 1e3)
    return dict(times)


def temporary_bytes(program: Any) -> int:
    """Memory that a compiled program takes beside its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def flush_buffer(megabytes: int = 256) -> jax.Array:
    """Something larger than any L2, to be read between two timed kernels."""
    return jax.random.normal(jax.random.PRNGKey(0), (megabytes * 2**19,), jnp.bfloat16)


def cold_calls(call: Callable[..., Any], calls: int = 12) -> Callable[..., Any]:
    """A compiled run(flush, *args) that calls `call(*args)` so often in one scan, each time with a cold L2.

    In between a buffer larger than the L2 is read. The first argument is made to depend on that read, so that neither is
    moved nor merged.
    """

    @jax.jit  # the arguments come in as operands: captured, gigabytes of them would be constants of the program
    def run(flush: jax.Array, *args: Any) -> Any:
        def step(carry: jax.Array, _: Any) -> tuple[jax.Array, Any]:
            swept = jnp.sum(flush.astype(jnp.float32) * carry)
            out = call(args[0] + (swept * 0).astype(args[0].dtype), *args[1:])
            return swept * 1e-30 + 1.0, jax.tree.map(lambda x: x.reshape(-1)[:1], out)

        return lax.scan(step, jnp.float32(1.0), None, length=calls)

    return run


def cold_times(run: Callable[..., Any], args: tuple[Any, ...], name: str) -> tuple[float, float]:
    """Median and least time of the kernel whose name contains `name`, in a run of `cold_calls`."""
    kernels = kernels_of(run, (flush_buffer(), *args))
    times = [t for key, values in kernels.items() if name in key for t in values]
    if not times:
        raise RuntimeError(f"no kernel named {name!r} among {sorted(kernels)}")
    return float(np.median(times)), float(np.min(times))


def cold_kernel_us(call: Callable[..., Any], args: tuple[Any, ...], name: str) -> tuple[float, float]:
    """Median and least time of the kernel whose name contains `name`, with a cold L2; see `cold_calls`."""
    return cold_times(cold_calls(call), args, name)


def kernels_of(run: Callable[..., Any], args: tuple[Any, ...], calls: int = 1) -> dict[str, list[float]]:
    """Durations in us of every kernel of so many runs of a compiled function, by name; it ran once before."""
    check_gpu()
    jax.block_until_ready(run(*args))
    return trace_kernels(lambda: [run(*args) for _ in range(calls)][-1])


def read_roof(gigabytes: int = 4) -> float:
    """GB/s of a plain read: the best of several reductions over a large array."""
    check_gpu()
    x = jax.random.bits(jax.random.PRNGKey(0), (gigabytes * 2**28,), jnp.uint32)
    run = jax.jit(lambda x: jnp.max(x))
    jax.block_until_ready(run(x))
    best = 0.0
    for _ in range(6):
        kernels = trace_kernels(lambda: run(x))
        best = max(best, x.nbytes / 1e3 / sum(max(v) for v in kernels.values()))
    return best
