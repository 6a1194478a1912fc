"""Time of a whole decode step against the bytes it must read: a model's shape, random weights, one large pool.

  python -m benchmarks.decode_step                 four cases at retention 1.0 and 0.25 on one Hopper GPU
  python -m benchmarks.decode_step --layers 4      a quick look
  python -m benchmarks.decode_step --shape qwen3-4b | gemma-3-12b | qwen3-30b-a3b
  python -m benchmarks.decode_step --devices 2     over two GPUs, against the time of reading at twice the roof
  python -m benchmarks.decode_step --shape llama-3.1-70b --fp8 --devices 2 --pool-gib 16
  python -m benchmarks.decode_step --bytes         with pages of bytes too: `times as fast` as in bfloat16
  python -m benchmarks.decode_step --fp8           with FP8 weights, whose bytes are what the floor counts then
  python -m benchmarks.decode_step --fp8 dynamic --wide-tokens --layers 8 --cases 4 1
                                                   and tokens where they are many: `times as long` in bfloat16
  python -m benchmarks.decode_step --drafts 3      with three drafts of each request verified too: `times as long` as without
  python -m benchmarks.decode_step --xla-products --cases 1 4 --pool-gib 36
                                                   with XLA's products alone, too: `times as long` as with our kernels
  python -m benchmarks.decode_step --apart --heads-apart --norms-apart --in-a-row --ordinary-loads
                                                   and what else a step is compared with: see --help
  python -m benchmarks.decode_step --any-gpu       with those of our kernels, too, that no engine takes on this GPU

The bytes are the weights that a token passes (the embedding table as the head once) and the entries of every head, half of
those that the timed steps append among them; the roof is a large reduction measured in the same run. Of a mixture of experts
those count that as many tokens reach on average, were all experts alike. The pool is donated and never copied: its temporary
memory is printed. Each row has tokens of its own in every step. Budgets are lognormal (sigma 0.8) around the retention;
`kept` is what groups of heads hold of the entries, each as many as the head with the largest budget.
"""

import argparse
import contextlib
import itertools
import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tangram_jax as tj
from benchmarks.decode_ways import PRODUCTS, WAYS, on_any_gpu
from benchmarks.gpu_timing import read_roof, temporary_bytes, trace_kernels
from benchmarks.options import add_fp8, add_heads_per_page
from benchmarks.shapes import LLAMA_8B, SHAPES
from models.config import ModelConfig
from models.fp8_weights import quantised, with_fp8_weights
from models.params import ParamSpec, param_specs
from models.sharding import param_shardings, rules_for, tensor_mesh
from pallas_kernels import byte_pages, decode_layer, ragged_decode
from pallas_kernels.expert_products import mxfp4
from tangram_jax.grouping import CLUSTERS, heads_per_page_for
from tangram_jax.sampling_filters import argmax
from tangram_jax.sharding import TensorParallel
from tangram_jax.step import compiler_options

NO_SCORER: Any = None  # decode tokens need none
TAIL = 64  # tokens that each row has pages for beside those that it begins with
# Steps in a row: what more of them take is timed, without the millisecond or so before the first one's kernels start.
FEW, MANY = 10, 60
ROUNDS = 5
STRIDE = 4801  # a prime that divides no vocabulary: tokens that follow different ones differ
BY_DEFAULT = ((32, 8192), (128, 8192), (4, 100_000), (1, 8192))
CASES = (*BY_DEFAULT, (128, 320))


def first_layers(config: ModelConfig, count: int | None) -> ModelConfig:
    """The shape with fewer layers, for a quick look; all of them if None. At least one is not a sliding-window layer."""
    count = max(count or config.num_layers, config.full_layers[0] + 1)
    sliding = tuple(layer for layer in config.sliding_layers if layer < count)
    return config.replace(num_layers=count, sliding_layers=sliding)


def random_weights(config: ModelConfig, devices: int = 1) -> Any:
    """bfloat16 weights, experts in MXFP4 and weights in FP8, made on the device, or spread over several.

    Biases are zeros: random ones, of GPT-OSS's router and attention, would send most tokens to the same few experts.
    """
    keys = iter(jax.random.split(jax.random.key(0), 24 * config.num_layers + 16))

    @partial(jax.jit, static_argnums=1)  # compiled once for each shape
    def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16) * 0.02

    @partial(jax.jit, static_argnums=1)
    def packed(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        scales = jnp.uint32((120 + 126) * 0x01010101)  # 2 ** -7: a deviation of 0.02
        words = jax.random.bits(key, shape, jnp.uint32).at[..., mxfp4.ROWS - 1, :].set(scales)
        return jax.lax.bitcast_convert_type(words, jnp.int32)

    def draw(path: Any, spec: ParamSpec) -> Any:
        if path[-1].key.endswith("bias"):
            return jnp.zeros(spec.shape, jnp.bfloat16)
        if spec.fp8:
            return quantised(normal(next(keys), spec.shape), spec)
        return (packed if spec.packed else normal)(next(keys), spec.shape)

    specs = param_specs(config)
    by_path = partial(jax.tree.map_with_path, is_leaf=lambda x: isinstance(x, ParamSpec))
    if devices == 1:
        return by_path(draw, specs)
    places = param_shardings(config, tensor_mesh(devices), rules_for(config, devices))
    return by_path(lambda path, spec, place: jax.device_put(draw(path, spec), place), specs, places)


def ragged(config: ModelConfig, retention: float) -> tj.BudgetProfile:
    if retention == 1.0:
        return tj.BudgetProfile.uniform(len(config.full_layers), config.num_kv_heads, 1.0)
    shape = (1, len(config.full_layers), config.num_kv_heads)
    ratios = np.random.default_rng(0).lognormal(np.log(retention), 0.8, shape).clip(0.01, 1)
    return tj.BudgetProfile.from_ratios(
        ratios.astype(np.float32), retention=retention, alpha=0.0
    ).normalized()


def measure(
    params: Any,
    config: ModelConfig,
    batch: int,
    tokens: int,
    retention: float,
    args: Any,
    roof: float,
    dtype: Any,
    drafts: int = 0,
) -> dict:
    tail = TAIL + drafts
    sliding = tj.SlidingLayers.of(config, max_tail=tail)
    profile = ragged(config, retention)
    heads = args.heads_per_page or heads_per_page_for(profile, args.cluster, args.devices)
    plan = tj.CachePlan.build(profile, heads, args.page_size, args.cluster, sliding=sliding)
    needed = batch * plan.pages(tokens, tail)
    page_bytes = plan.page_bytes(config.head_dim, dtype)
    num_pages = max(needed, int(args.pool_gib * 2**30) // page_bytes)
    sizes: dict[str, Any] = {"max_tokens": tokens + tail, "max_tail": tail, "dtype": dtype}
    sizes |= {"num_pages": num_pages, "max_requests": batch}
    parallel = TensorParallel.of(config, plan, args.devices) if args.devices > 1 else None
    if parallel and not args.unlinked:
        params = parallel.linked(params)
    cache = parallel.init_cache(**sizes) if parallel else tj.init_cache(plan, config, **sizes)
    for row in range(batch):
        cache = tj.reserve(plan, cache, np.int32(row), np.int32(tokens), np.int32(tail))
    cache = rewound(cache, tokens)
    rows = np.minimum(np.arange(batch + args.empty_slots, dtype=np.int32), batch)  # there is no row `batch`

    @partial(jax.jit, donate_argnums=1)
    def steps(params: Any, cache: tj.Cache, first: jax.Array) -> tuple[tj.Cache, jax.Array]:
        if parallel:  # `place` is left out: the order of random heads does not matter
            logits, cache = parallel.step(params, NO_SCORER, cache, None, tj.Decode(jnp.asarray(rows), first))
        elif drafts:
            tokens = jnp.broadcast_to(first[:, None], (len(rows), 1 + drafts))
            decode = tj.Decode(jnp.asarray(rows), tokens)
            logits, cache = tj.step(params, config, plan, NO_SCORER, cache, None, decode)
            logits = logits[:: 1 + drafts]
            cache = tj.rollback(plan, cache, jnp.asarray(rows), jnp.full(len(rows), drafts, jnp.int32))
        else:
            logits, cache = tj.decode_step(params, config, plan, cache, rows=jnp.asarray(rows), tokens=first)
        # The cache first: of tokens as many as rows XLA would make its counts' memory, and copy the counts. The likeliest
        # token is found, as by greedy engines, but tokens that differ follow: what a random model says ends up the same in
        # many rows, whose experts are the same then.
        return cache, (first * STRIDE + 1) % config.vocab_size + jnp.minimum(argmax(logits), 0)

    chosen = jax.device_put(rows + 10, parallel.everywhere if parallel else None)
    began = time.perf_counter()
    program = steps.lower(params, cache, chosen).compile(
        compiler_options(args.devices, linked="links" in params, alone=True)
    )
    compiled = time.perf_counter() - began
    for n in range(3):
        first = parallel.in_passing(params) if parallel and n == 0 else params
        cache, chosen = program(first, cache, chosen)
        chosen.block_until_ready()
    times: list[float] = []
    for _ in range(ROUNDS):
        of_count = {}
        for count in (FEW, MANY):
            cache = jax.block_until_ready(rewound(cache, tokens))
            began = time.perf_counter()
            for _ in range(count):
                cache, chosen = program(params, cache, chosen)
            chosen.block_until_ready()
            of_count[count] = time.perf_counter() - began
            if (np.asarray(cache.tail) != count).any():
                raise RuntimeError(f"steps left rows out: they decoded {cache.tail} tokens of {count}")
        times.append((of_count[MANY] - of_count[FEW]) / (MANY - FEW))
    if args.profile:
        print_profile(program, params, rewound(cache, tokens), chosen)
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    if not config.tie_embeddings:
        weights -= params["embed"].nbytes
    weights -= unreached_bytes(params, config, batch)
    generated = (FEW + MANY - 1) / 2  # tokens of the timed steps that one of them reads, on average
    entries = plan.entries(tokens) + generated * plan.group_of.size
    if sliding:
        entries += sliding.count * config.num_kv_heads * min(tokens + generated, sliding.window - 1)
    kv = batch * entries * 2 * (config.head_dim * jnp.dtype(dtype).itemsize + byte_pages.is_bytes(dtype))
    floor = (weights + kv) / roof / args.devices
    took = float(np.median(times))
    return {
        "batch": batch,
        "tokens": tokens,
        "retention": retention,
        "heads_per_page": heads,
        "kept": round(plan.retention(tokens), 3),
        "weights": "fp8" * config.weights_fp8 + "-dynamic" * config.activations_fp8 or "bfloat16",
        "drafts": drafts,
        "pages": "bytes" if byte_pages.is_bytes(dtype) else jnp.dtype(dtype).name,
        "ms": round(took * 1e3, 3),
        "floor_ms": round(floor * 1e3, 3),
        "ratio": round(took / floor, 3),
        "pool_gib": round(num_pages * page_bytes / 2**30, 1),
        "temp_gib": round(temporary_bytes(program) / 2**30, 2),
        "compile_s": round(compiled, 1),
    }


def rewound(cache: tj.Cache, tokens: int) -> tj.Cache:
    """With so many tokens in every row and none since: steps leave out rows that have outgrown their pages."""
    count, none = np.full(cache.tokens.shape, tokens, np.int32), np.zeros(cache.tail.shape, np.int32)
    put = jax.device_put
    return replace(cache, tokens=put(count, cache.tokens.sharding), tail=put(none, cache.tail.sharding))


def unreached_bytes(params: Any, config: ModelConfig, tokens: int) -> int:
    """Weights of the experts that none of `tokens` tokens goes through, on average over even routing."""
    if not config.num_experts:
        return 0
    unreached = (1 - config.experts_per_token / config.num_experts) ** tokens
    names = ("expert_gate_up", "expert_down")
    experts = [layer[name] for layer in params["layers"] for name in names if name in layer]
    return int(unreached * sum(leaf.nbytes for leaf in jax.tree.leaves(experts)))


def print_profile(program: Any, params: Any, cache: tj.Cache, chosen: jax.Array) -> None:
    """Where the GPU's time of one step goes: kernels of one name together, longest first."""
    state: list[Any] = [cache, chosen]

    def run() -> jax.Array:
        for _ in range(4):
            state[:] = program(params, *state)
        return state[1]

    kernels = {name: (sum(times) / 4, len(times) / 4) for name, times in trace_kernels(run).items()}
    total, count = (sum(x[i] for x in kernels.values()) for i in (0, 1))
    print(f"  {total / 1e3:.3f} ms in {count:.0f} kernels")
    for name, (us, times) in sorted(kernels.items(), key=lambda item: -item[1][0])[:40]:
        print(f"  {us:9.1f} us {times:6.0f} x {us / times:8.2f}  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default=LLAMA_8B.name)
    parser.add_argument("--layers", type=int, help="default: all of the shape")
    parser.add_argument("--page-size", type=int, default=64)
    add_heads_per_page(parser)
    parser.add_argument("--cluster", choices=CLUSTERS, default="layer", help="how heads are grouped")
    parser.add_argument("--pool-gib", type=float, default=60.0)
    cases = ", ".join(f"{n}: {batch} x {tokens}" for n, (batch, tokens) in enumerate(CASES))
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(BY_DEFAULT))), help=cases)
    parser.add_argument(
        "--empty-slots", type=int, default=0, help="decode slots without a request, beside the others"
    )
    parser.add_argument("--drafts", type=int, default=0, help="each case with so many drafts after it")
    parser.add_argument("--devices", type=int, default=1, help="GPUs over which model and cache are spread")
    parser.add_argument(
        "--unlinked",
        action="store_true",
        help="all-reduces by NCCL, as over other numbers of GPUs than two and four",
    )
    parser.add_argument("--bytes", action="store_true", help="each case with pages of bytes after it")
    add_fp8(parser)
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes, by kernel")
    parser.add_argument("--out", help="write the rows to this JSON file")
    for name, (_, text) in WAYS.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"each case once more {text}")
    parser.add_argument(
        "--any-gpu", action="store_true", help="kernels that were not measured on this GPU, too"
    )
    args = parser.parse_args()
    chosen = [name for name in WAYS if getattr(args, name.replace("-", "_"))]
    if chosen and (args.drafts or args.bytes):
        parser.error(f"--{chosen[0]} is compared with nothing else: leave out --drafts and --bytes")
    if args.wide_tokens and args.fp8 != "dynamic":
        parser.error("--wide-tokens: only --fp8 dynamic has tokens in FP8 to compare with")
    config = first_layers(SHAPES[args.shape], args.layers)
    if args.fp8:
        config = with_fp8_weights(config, dynamic=args.fp8 == "dynamic")
    roof = read_roof() * 1e9
    print(
        f"{jax.devices()[0].device_kind}: read roof {roof / 1e12:.2f} TB/s, {config.name}, {config.num_layers} layers",
        flush=True,
    )
    params = random_weights(config, args.devices)
    rows: list[dict[str, Any]] = []
    for index in args.cases:
        batch, tokens = CASES[index]
        for retention in (1.0, 0.25):
            dtypes = (jnp.bfloat16, byte_pages.DTYPE)[: 1 + args.bytes]
            ways = [("", contextlib.nullcontext), *((name, WAYS[name][0]) for name in chosen)]
            variants = itertools.product(dtypes, (0, args.drafts)[: 1 + bool(args.drafts)], enumerate(ways))
            for dtype, drafts, (number, (way, context)) in variants:
                case = {"batch": batch, "tokens": tokens, "retention": retention}
                try:
                    with contextlib.ExitStack() as stack:
                        for of in (*PRODUCTS, decode_layer, ragged_decode) * args.any_gpu:
                            stack.enter_context(on_any_gpu(of.TUNING))
                        stack.enter_context(context())
                        model = config.replace(name=f"{config.name}, {way}") if way else config
                        row = measure(params, model, batch, tokens, retention, args, roof, dtype, drafts)
                except Exception as error:  # e.g. out of memory at 128 x 8K: the other rows still count
                    row = case | {"error": str(error)[:300]}
                if way:
                    row["way"] = way
                before = rows[-number if way else -1] if drafts or way else {}
                if {"ms"} <= row.keys() & before.keys():
                    row["times as long"] = round(row["ms"] / before["ms"], 3)
                elif (
                    byte_pages.is_bytes(dtype)
                    and {"ms"} <= row.keys() & (plain := rows[-1 - bool(args.drafts)]).keys()
                ):
                    row["times as fast"] = round(plain["ms"] / row["ms"], 3)
                rows.append(row)
                print(row, flush=True)
    if args.out:
        held = {"device": jax.devices()[0].device_kind, "roof_TBps": roof / 1e12, "rows": rows}
        with open(args.out, "w") as file:
            json.dump(held, file, indent=1)


if __name__ == "__main__":
    main()
