"""Products with the weights of experts: bytes of weights read per second, against JAX's two ways of doing it.

  python -m benchmarks.expert_products                     Qwen3-30B-A3B's experts, 1 to 8192 tokens, on one Hopper GPU
  python -m benchmarks.expert_products --shape mixtral-8x7b
  python -m benchmarks.expert_products --shape gpt-oss-20b --mxfp4     weights in MXFP4, against the kernel for bfloat16
  python -m benchmarks.expert_products --fp8               weights in FP8, against it
  python -m benchmarks.expert_products --fp8 dynamic       and the rows of many tokens too
  python -m benchmarks.expert_products --rows              bringing tokens' rows to experts and adding them up

Both products of an MLP (gate and up with SiLU, down), kernel times by the profiler, in one scan, cold L2 (an array larger
than it is read in between). Tokens are routed evenly at random; a single one has an empty slot beside it, as in a decode
step. The floor is what is larger: the bytes of the experts that are reached at the roof, a large reduction measured in the
same run, or the products at 800 TFLOP/s, twice that in FP8. `ragged_dot` is `jax.lax.ragged_dot`, `pallas` the kernel in
`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` at the better of two tiles; they compute gate and up alone, without SiLU,
in one call whose L2 is as the call before left it, and are compared with our first product. With `--mxfp4` and `--fp8`
both products are compared with those of our kernel for bfloat16, with what makes FP8 of the tokens and of the first
product's results (`quantise`). GPT-OSS's have its biases and activation.
"""

import argparse
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_timing import cold_kernel_us, kernels_of, read_roof, trace_kernels
from models.experts import add_experts
from models.routing import Routed, expert_weights
from pallas_kernels import expert_products as ep
from pallas_kernels import fp8_products as fp8
from pallas_kernels.expert_products import mxfp4

SHAPES = {  # experts, chosen of them, hidden size, width of an expert
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14_336),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "gpt-oss-120b": (128, 4, 2880, 2880),
}
TOKENS = (1, 2, 4, 32, 128, 512, 2048, 8192)
TENSOR_CORES = 800.0  # TFLOP/s
Weight = jax.Array | fp8.Fp8Weights
Weights = tuple[Weight, Weight]  # of gate and up, and of down


def library_us(call: Any, *args: jax.Array) -> float:
    """Kernel time of one call, its L2 as warm as the call before left it (the arrays are larger)."""
    run = jax.jit(call)
    jax.block_until_ready(run(*args))
    return sum(sum(times) for times in trace_kernels(lambda: run(*args)).values())


def both_us(
    x: jax.Array, experts: np.ndarray, weights: Weights, like_gpt_oss: bool, in_order: bool, dynamic: bool
) -> tuple[float, float, float]:
    """Times of the first and the second product of tokens x with the experts [T, k] that they go to, and of quantising.

    `in_order`: rows are sorted, however few they are. `dynamic`: many are in FP8.
    """
    held = jax.tree.leaves(weights[0])[0]
    num_experts, packed = len(held), held.ndim == 6
    there = np.arange(max(len(x), 2)) < len(x)
    x, experts = jnp.resize(x, (len(there), x.shape[1])), np.resize(experts, (len(there), experts.shape[1]))
    directly = not in_order and ep.goes_directly(len(x), experts.shape[1], num_experts)
    rows = 1 if directly else experts.size
    tuning: ep.Tuning | ep.PackedTuning = ep.tuning_for(rows, num_experts)
    narrow = dynamic and rows >= ep.LEAST_NARROW * num_experts
    if packed:
        in_fp8 = isinstance(weights[0], fp8.Fp8Weights)
        tuning = ep.packed_tuning_for(rows, num_experts, fp8=in_fp8, narrow=narrow)
    plan: Any
    if directly:
        plan = ep.plan_directly(jnp.asarray(experts), jnp.asarray(there))
    else:
        routed = np.where(there[:, None], experts, num_experts)
        plan = ep.plan_experts(jnp.asarray(routed), num_experts, tuning.rows)
    hidden = x.shape[1]
    width = held.shape[2] * mxfp4.TILE if packed else held.shape[3]
    biases = (jnp.ones((num_experts, 2, width), x.dtype), jnp.ones((num_experts, 1, hidden), x.dtype))

    def products(
        x: jax.Array, codes: jax.Array | None, w: Weight, bias: jax.Array | None, *blocks: jax.Array
    ) -> jax.Array:
        """Of rows x, or of those that codes and scales x are."""
        rows = x if codes is None else fp8.Fp8Tokens(codes, x, len(codes))
        given = plan._replace(blocks=type(plan.blocks)(*blocks))
        limit = 7.0 if bias is not None and bias.shape[1] == 2 else None
        return ep.expert_products(rows, w, given, tuning=tuning, bias=bias, limit=limit)

    times: list[float] = []
    quantise, h = 0.0, x if narrow else plan.given(x)
    for w, bias in zip(weights, biases if like_gpt_oss else (None, None), strict=True):
        args = (h, None, w, bias, *plan.blocks)
        if narrow:  # tokens before they are brought to their experts
            quantise += cold_kernel_us(fp8.quantise_tokens, (h,), "fp8_tokens")[0]
            codes = fp8.quantise_tokens(h)
            rows_in_fp8 = codes if times else plan.given(codes)
            args = (rows_in_fp8.scales, rows_in_fp8.codes, *args[2:])
        times.append(cold_kernel_us(products, args, "expert_products")[0])
        h = jax.jit(products)(*args)
    return times[0], times[1], quantise


def measure(
    shape: str,
    tokens: int,
    roof: float,
    weights: tuple[jax.Array, jax.Array],
    packed: Weights | None,
    others: bool,
    in_order: bool,
    dynamic: bool,
) -> dict:
    num_experts, count, hidden, width = SHAPES[shape]
    rng = np.random.default_rng(tokens)
    experts = np.stack([rng.permutation(num_experts)[:count] for _ in range(tokens)]).astype(np.int32)
    given = jax.random.normal(jax.random.key(0), (tokens, hidden), jnp.bfloat16)
    gate_up, down = packed or weights
    like_gpt_oss = shape.startswith("gpt-oss")
    first, second, quantise = both_us(given, experts, (gate_up, down), like_gpt_oss, in_order, dynamic)
    reached = len(np.unique(experts)) / num_experts
    read = sum(leaf.nbytes for leaf in jax.tree.leaves((gate_up, down))) * reached / roof / 1e3
    computed = tokens * count * 6 * hidden * width / (TENSOR_CORES * (2 if dynamic else 1)) / 1e6
    row = {"tokens": tokens, "experts": round(reached * num_experts), "first_us": first, "second_us": second}
    row |= {"ratio": (first + second + quantise) / max(read, computed), "floor_us": max(read, computed)}
    if packed:
        row["quantise_us"] = quantise
        row["bfloat16_us"] = sum(both_us(given, experts, weights, like_gpt_oss, in_order, False))
        row["x_bfloat16"] = row["bfloat16_us"] / (first + second + quantise)
    elif others:
        sizes = jnp.asarray(np.bincount(experts.ravel(), minlength=num_experts).astype(np.int32))
        x = jax.random.normal(jax.random.key(1), (max(tokens * count, 64), hidden), jnp.bfloat16)
        # The kernel of Pallas wants a tile at least; no other expert is read for it.
        sizes = sizes.at[experts[0, 0]].add(len(x) - tokens * count)
        flat = weights[0].reshape(num_experts, hidden, 2 * width)
        row["ragged_dot_us"] = library_us(jax.lax.ragged_dot, x, flat, sizes)

        def pallas(x: jax.Array, w: jax.Array, sizes: jax.Array, rows: int) -> jax.Array:
            return ragged_dot_mgpu.ragged_dot(
                x, w, group_sizes=sizes, block_m=rows, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=1
            )  # fmt: skip

        tiles = [64, 128] if len(x) >= 128 else [64]
        row["pallas_us"] = min(library_us(partial(pallas, rows=rows), x, flat, sizes) for rows in tiles)
        row |= {f"x_{name}": row[f"{name}_us"] / first for name in ("ragged_dot", "pallas")}
    return row


def measure_rows(shape: str, tokens: int) -> dict:
    """All kernels of bringing tokens' rows to their experts, ours and XLA's, and of adding up what comes back.

    Where weights are not held, the fusion that adds up makes them anew for every element.
    """
    num_experts, count, hidden, _ = SHAPES[shape]
    rng = np.random.default_rng(tokens)
    experts = np.stack([rng.permutation(num_experts)[:count] for _ in range(tokens)]).astype(np.int32)
    plan = jax.jit(ep.plan_experts, static_argnums=(1, 2))(jnp.asarray(experts), num_experts, 64)
    x = jax.random.normal(jax.random.key(0), (tokens, hidden), jnp.bfloat16)
    logits = jax.random.normal(jax.random.key(1), (tokens, num_experts))
    largest = jax.lax.top_k(logits, count)[0]

    def add(h: jax.Array, plan: ep.ExpertPlan, hold: bool) -> jax.Array:
        weights, whole = expert_weights(logits, largest, normalize=True)
        return add_experts(h, Routed(plan, weights, whole), hold)

    def us(call: Any, *args: Any) -> float:
        times = kernels_of(jax.jit(call), args, calls=8)
        return sum(map(sum, times.values())) / 8

    h = x[plan.token]
    row = {
        "tokens": tokens,
        "gather_us": us(ep.gather_rows, x, plan.token),
        "add_us": us(lambda h, at: add(h, plan._replace(position=at), True), h, plan.position),
        "xla_gather_us": us(lambda x, rows: x[rows], x, plan.token),
        "not_held_add_us": us(lambda h, at: add(h, plan._replace(position=at), False), h, plan.position),
    }
    row["x_gather"] = row["xla_gather_us"] / row["gather_us"]
    row["x_add"] = row["not_held_add_us"] / row["add_us"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    packing = parser.add_mutually_exclusive_group()
    packing.add_argument("--mxfp4", action="store_true", help="weights in MXFP4")
    packing.add_argument(
        "--fp8", nargs="?", const="weights", choices=("weights", "dynamic"), help="weights in FP8"
    )
    parser.add_argument("--alone", action="store_true", help="without the two others")
    parser.add_argument("--sorted", action="store_true", help="rows sorted by expert, however few tokens")
    parser.add_argument("--rows", action="store_true", help="only what lies around the products")
    parser.add_argument("--out", help="write the rows to this JSON file")
    args = parser.parse_args()
    num_experts, _, hidden, width = SHAPES[args.shape]
    roof = read_roof()
    keys = jax.random.split(jax.random.key(2))
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * 0.02, static_argnums=1)
    weights = (
        draw(keys[0], (num_experts, hidden, 2, width)),
        draw(keys[1], (num_experts, width, 1, hidden)),
    )
    packed: Weights | None = None
    made, shapes = np.random.default_rng(0), ((2, width, hidden), (1, hidden, width))
    if args.mxfp4:
        gate_up, down = (
            jnp.asarray(mxfp4.random(made, mxfp4.packed_shape(num_experts, *shape), 0.02)) for shape in shapes
        )
        packed = (gate_up, down)
    if args.fp8:
        in_fp8 = (
            fp8.random(made, depth, columns, 0.02, (num_experts, parts)) for parts, columns, depth in shapes
        )
        packed = (next(in_fp8), next(in_fp8))
    rows = []
    for tokens in args.tokens:
        if args.rows:
            rows.append(measure_rows(args.shape, tokens))
        else:
            how = (not args.alone, args.sorted, args.fp8 == "dynamic")
            rows.append(measure(args.shape, tokens, roof, weights, packed, *how))
        print({key: round(value, 2) for key, value in rows[-1].items()}, flush=True)
    table = Table(title=f"{args.shape}, {jax.devices()[0].device_kind}, roof {roof / 1e3:.2f} TB/s")
    for key in rows[0]:
        table.add_column(key)
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(
                {"device": jax.devices()[0].device_kind, "roof_GBps": roof, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
