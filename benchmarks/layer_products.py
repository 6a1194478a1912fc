"""The products between two attentions as one kernel, beside XLA's: us a layer of Llama-3.1-8B's shape, by tokens.

  python -m benchmarks.layer_products                    1, 2 and 4 tokens: two minutes on one Hopper GPU
  python -m benchmarks.layer_products --tokens 1 --stamps        also when multiprocessors are done with each product

Eight layers with weights of their own, wall time, the best of four runs of 40; the floor is the weights at the read roof of
the same run. An experiment: the engine leaves these products to XLA, because this kernel is 3% ahead at one token on an
H200, level on an H100, and behind from two tokens on (`results/2026-11-21-between-attentions.md`, 12). What loses is that
multiprocessors with equal work are done 15% before or after each other. `--stamps` says whether they are the same ones in
every layer: their ends in two layers are compared, and the slowest listed by number.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.gpu_timing import read_roof
from benchmarks.layer_kernel import layer_products

LAYERS, HIDDEN, INNER, HEADS = 8, 4096, 14336, 6144
SHAPES = ((HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN), (HIDDEN, HEADS))
PRODUCTS = ("output", "gate and up", "down", "heads")
Layer = Callable[..., tuple[jax.Array, jax.Array, Any]]


def normed(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype) * weight


def by_xla(attended: Any, x: Any, norms: Any, weights: Any, _: Any) -> tuple[jax.Array, jax.Array, None]:
    """What `layer_products` computes, without stamps."""
    between = x + attended @ weights[0]
    gates, through = jnp.split((normed(between, norms[0]) @ weights[1]).astype(jnp.float32), 2, axis=1)
    after = between + (jax.nn.silu(gates) * through).astype(x.dtype) @ weights[2]
    return after, normed(after, norms[1]) @ weights[3], None


def layers(
    layer: Layer, attended: Any, x: Any, norms: Any, weights: Any, sync: Any
) -> tuple[jax.Array, list[Any]]:
    """Layer after layer, with a small kernel of XLA's where attention would be."""
    stamps = []
    for of_layer in weights:
        x, heads, stamp = layer(attended, x, norms, of_layer, sync)
        attended = heads[:, :HIDDEN] * 0.5
        stamps.append(stamp)
    return x, stamps


def make_weights() -> list[tuple[jax.Array, ...]]:
    keys = iter(jax.random.split(jax.random.PRNGKey(0), LAYERS * len(SHAPES)))

    @jax.jit
    def one(key: jax.Array, like: jax.Array) -> jax.Array:
        return (jax.random.normal(key, like.shape) * like.shape[0] ** -0.5).astype(like.dtype)

    return [tuple(one(next(keys), jnp.empty(shape, jnp.bfloat16)) for shape in SHAPES) for _ in range(LAYERS)]


def wall_us(run: Callable[..., Any], *args: Any) -> float:
    """Of a layer."""
    for _ in range(2):
        jax.block_until_ready(run(*args))
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        for _ in range(40):
            found = run(*args)
        jax.block_until_ready(found)
        times.append(time.perf_counter() - begin)
    return min(times) / 40 / LAYERS * 1e6


def show_stamps(stamps: list[Any]) -> None:
    """When the multiprocessors were done with each product's rows, us after the kernel's first stamp."""
    found = np.stack(
        [np.asarray(s).astype(np.int64) & 0xFFFFFFFF for s in stamps[1:]]
    )  # [layers, CTAs, stamps]
    first = found[:, :, 1].min(axis=1)[:, None]
    for phase, name in enumerate(PRODUCTS):
        begin, done = ((found[:, :, 4 * phase + n] - first) / 1e3 for n in (2, 3))
        worked = (done - begin > 1).all(axis=0)
        ends = done[:, worked]
        low, middle, high = np.median(np.percentile(ends, (10, 50, 100), axis=1), axis=1)
        same = np.corrcoef(ends)[np.triu_indices(len(ends), 1)].mean()
        order = np.argsort(ends.mean(axis=0))
        which = found[-1, worked, 0][order]
        print(
            f"  {name}: from {np.median(begin[:, worked]):.1f}, done {low:.1f} (a tenth), {middle:.1f} (half), "
            f"{high:.1f} (all); correlation between layers {same:.2f}; multiprocessors first done "
            f"{which[:10].tolist()}, last {which[-10:].tolist()}",
            flush=True,
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--stamps", action="store_true")
    options = parser.parse_args(argv)
    roof, weights = read_roof(), make_weights()
    norms, sync = (jnp.ones(HIDDEN, jnp.bfloat16),) * 2, jnp.zeros((4, 32), jnp.int32)
    floor = sum(w.nbytes for w in weights[0]) / roof / 1e3
    print(f"{jax.devices()[0].device_kind}, read roof {roof:.0f} GB/s, floor {floor:.1f} us", flush=True)
    for tokens in options.tokens:
        attended, x = (
            jax.random.normal(jax.random.PRNGKey(n), (tokens, HIDDEN), jnp.bfloat16) for n in (1, 2)
        )
        args = attended, x, norms, weights, sync
        xla, ours = (
            jax.jit(lambda *args, layer=layer: layers(layer, *args)) for layer in (by_xla, layer_products)
        )
        error = jnp.max(jnp.abs(xla(*args)[0].astype(jnp.float32) - ours(*args)[0].astype(jnp.float32)))
        theirs_us, ours_us = wall_us(xla, *args), wall_us(ours, *args)
        print(
            f"{tokens} tokens: XLA {theirs_us:.1f} us, one kernel {ours_us:.1f} us "
            f"({theirs_us / ours_us:.3f} times as fast), largest difference {error:.3f}",
            flush=True,
        )
        if options.stamps:
            show_stamps(ours(*args)[1])


if __name__ == "__main__":
    main()
