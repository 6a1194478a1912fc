"""An experiment: one kernel for all products between two attentions, against the engine's and XLA's, Llama-3.1-8B's shape.

  python -m benchmarks.layer_products                   8 to 128 tokens, two minutes on one Hopper GPU
  python -m benchmarks.layer_products --stamps          and when the CTAs get where

Wall time of a layer of eight in a row, attention left out (the queries stand for its result). "error": of one layer against
float32 products.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import layer_kernel
from benchmarks.decode_step import XLA_PRODUCTS
from benchmarks.dense_products import LAYERS, layer_us, model, wall_us
from benchmarks.gpu_timing import kernels_of, read_roof
from models.rope import rope_tables, rotate
from pallas_kernels.norms import rms_norm


def how(tokens: int) -> tuple[tuple[str, Any], ...]:
    """What was best: slots fill shared memory."""
    few = tokens <= layer_kernel.TOKENS
    return (
        ("weight_slots", 11 if few else 8),
        ("token_slots", 4 if few else 5),
        ("ahead", (3, 3, 3, 4)),
        ("early", 2 if few else 1),
    )


def weights(layer: dict[str, jax.Array], following: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    width = layer["mlp_norm"].shape[0]
    return (
        layer["attn_out"].reshape(-1, width), layer["mlp_norm"], layer["gate_up"].reshape(width, -1), layer["down"],
        following["attn_norm"], following["qkv"].reshape(width, -1),
    )  # fmt: skip


def reference(
    y: Any, x: Any, w_out: Any, norm: Any, w_gate_up: Any, w_down: Any, next_norm: Any, w_qkv: Any
) -> jax.Array:
    x = x + y @ w_out
    gates, values = jnp.split(rms_norm(x, norm, 1e-5) @ w_gate_up, 2, axis=1)
    x = x + (jax.nn.silu(gates) * values) @ w_down
    return rms_norm(x, next_norm, 1e-5) @ w_qkv


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[8, 32, 64, 96, 128])
    parser.add_argument("--stamps", action="store_true")
    args = parser.parse_args()
    config, params = model("llama-3.1-8b")
    group = config.group_size
    floor = (
        sum(params["layers"][0][n].nbytes for n in ("qkv", "attn_out", "gate_up", "down")) / read_roof() / 1e3
    )
    print(f"{jax.devices()[0].device_kind}: {floor:.1f} us to read a layer's weights at the roof")

    def chain(params: Any, tokens: jax.Array) -> jax.Array:
        x, layers = params["embed"][tokens], params["layers"]
        cos, sin = rope_tables(tokens, config)
        counters = layer_kernel.zeros()
        h = rms_norm(x, layers[0]["attn_norm"], config.norm_eps)
        qkv = jnp.concatenate([h, h[:, : layers[0]["qkv"].size // x.shape[1] - x.shape[1]]], 1)  # no product
        for here, after in zip(layers, [*layers[1:], layers[0]], strict=True):
            heads = qkv.reshape(len(x), config.num_kv_heads, group + 2, -1)[:, :, :group]
            q = rotate(heads.reshape(len(x), config.num_heads, -1), cos, sin).reshape(len(x), -1)
            made = layer_kernel.layer_products(q, x, *weights(here, after), counters, how=how(len(x)))
            x, qkv = made["x_new"], made["qkv"]
        return qkv

    for count in args.tokens:
        x, y = jax.random.normal(jax.random.key(3), (2, count, config.hidden_size), jnp.bfloat16)
        of_layer = weights(*params["layers"][:2])
        once = jax.jit(functools.partial(layer_kernel.layer_products, how=how(count), stamps=args.stamps))
        made = once(y, x, *of_layer, layer_kernel.zeros())
        exact = jax.jit(reference)(*(a.astype(jnp.float32) for a in (y, x, *of_layer)))
        error = jnp.linalg.norm(made["qkv"] - exact) / jnp.linalg.norm(exact)
        with XLA_PRODUCTS():
            xla, _ = layer_us(config.replace(name="XLA"), params, count)
        dense, _ = layer_us(config.replace(name="ours"), params, count)
        run, tokens = jax.jit(chain), jnp.arange(count)
        us = wall_us(functools.partial(run, params, tokens)) / LAYERS
        kernels = [
            t
            for name, ts in kernels_of(run, (params, tokens)).items()
            if "layer_products" in name
            for t in ts
        ]
        print(
            f"{count:4d} tokens: XLA {xla:.1f} us a layer, the engine's {dense:.1f}, one kernel {us:.1f} "
            f"({np.median(kernels):.1f} the kernel), error {error:.4f}"
        )
        if args.stamps:
            stamps = np.asarray(made["stamps"]).astype(np.int64) & 0xFFFFFFFF
            for place in range(layer_kernel.ROWS + 3):
                at = (stamps[:, place] - stamps[:, 0].min()) / 1e3
                print(f"       {place:2d}: {np.percentile(at, (0, 50, 100)).round(1)} us")


if __name__ == "__main__":
    main()
