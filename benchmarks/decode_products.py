"""The products between two attentions of a decode step: one kernel a layer against XLA's, Llama-3.1-8B's shape.

  python -m benchmarks.decode_products         under a minute on one Hopper GPU

Attention is left out of both (a layer's queries stand for its result), so a layer is 436 MB of weights read once. Wall time
of 40 calls in a row, eight layers each, best of four.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.decode_step import LLAMA_8B, random_weights
from benchmarks.gpu_timing import read_roof
from models.rope import rope_tables
from models.transformer import forward
from pallas_kernels import decode_products as dp


def queries_as_result(
    state: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, Any]:
    del layer, k, v
    return q, state


def wall_us(run: Callable[..., jax.Array], *args: Any) -> float:
    """Time of one call."""
    run(*args).block_until_ready()
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        for _ in range(40):
            out = run(*args)
        out.block_until_ready()
        best = min(best, (time.perf_counter() - began) / 40 * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="*", default=[8, 32, 64])
    args = parser.parse_args()
    config = LLAMA_8B.replace(num_layers=args.layers, vocab_size=1024)  # the head is no part of it
    params = random_weights(config)
    floor = sum(x.nbytes for x in jax.tree.leaves(params["layers"])) / args.layers / read_roof() / 1e3

    @jax.jit
    def xla(params: Any, tokens: jax.Array) -> jax.Array:
        return forward(params, config, tokens, tokens, queries_as_result, ())[0]

    @jax.jit
    def ours(params: Any, tokens: jax.Array) -> jax.Array:
        layers, eps = params["layers"], config.norm_eps
        cos, sin = rope_tables(tokens, config)
        x = params["embed"][tokens]
        heads: Any = dp.project_qkv(x, layers[0]["attn_norm"], layers[0]["qkv"], cos, sin, eps=eps)
        for here, after in zip(layers, [*layers[1:], None], strict=True):
            x, heads = dp.layer_products(
                heads.q.reshape(len(x), -1), x, here["attn_out"].reshape(-1, x.shape[1]), here["mlp_norm"], here["gate_up"],
                here["down"], params["final_norm"] if after is None else after["attn_norm"],
                None if after is None else after["qkv"], cos, sin, eps=eps,
            )  # fmt: skip
        return x

    print(f"{jax.devices()[0].device_kind}: {floor:.1f} us to read a layer's weights at the roof")
    for count in args.tokens:
        tokens = jnp.arange(count)
        times = [wall_us(run, params, tokens) / args.layers for run in (xla, ours)]
        print(
            f"{count:4d} tokens: XLA {times[0]:.1f} us a layer, one kernel {times[1]:.1f} ({times[0] / times[1]:.2f} x)"
        )


if __name__ == "__main__":
    main()
