"""What XLA makes of a step on an H200, without one: compiled here, its kernels listed in order.

  python -m benchmarks.gpu_program                       a decode step of 32 requests, Llama-3.1-8B's shape, three layers
  python -m benchmarks.gpu_program --decode 1            of one
  python -m benchmarks.gpu_program --chunk 512           with a chunk of 512 beside them
  python -m benchmarks.gpu_program --chunk 512 --packed 4        or with four of 128
  python -m benchmarks.gpu_program --decode 0 --chunk 2048 --scorer snapkv --least-mb 1
  python -m benchmarks.gpu_program --sampling full       the sampling of 32 rows, or `greedy`

Needs the CUDA plugin of JAX (`pip install jax-cuda13-plugin`), no GPU and no driver. The compiler chooses tiles and
splits by its cost model instead of trying them out, so products may be split otherwise than on a device; which
operations become one kernel, what is copied and how much temporary memory a step needs is what the device gets.
`mpmd_map` is a kernel of ours; so is `dynamic_slice_fusion`, which reads a part of an array where it lies. For the
condition of a loop of unknown length the host waits, unless loops are recorded in CUDA graphs (`sampling.compiler_options`).
"""

import argparse
import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tangram_jax as tj
from benchmarks.decode_step import first_layers, ragged
from benchmarks.gpu_timing import temporary_bytes
from benchmarks.options import add_fp8
from benchmarks.shapes import LLAMA_8B, SHAPES
from models.config import ModelConfig
from models.fp8_weights import with_fp8_weights
from models.params import abstract_params
from pallas_kernels import byte_pages, support
from tangram_jax.sampling import FULL, GREEDY, Variant, init_sampler, sample
from tangram_jax.step import Chunk, Decode, step

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 132  fpus_per_core: 128  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  clock_rate_ghz: 1.98  device_memory_size: 150000000000
  cuda_compute_capability { major: 9 }
}
runtime_version { major: 13 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
device_description_str: "NVIDIA H200"
"""
NO_KERNEL = ("parameter", "constant", "get-tuple-element", "bitcast", "tuple")
BYTES = {"bf16": 2, "f16": 2, "u16": 2, "pred": 1, "s8": 1, "u8": 1, "s64": 8, "u64": 8}


@contextlib.contextmanager
def as_on_hopper() -> Iterator[None]:
    """What asks for the device is told that it is a Hopper GPU."""
    with (
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        mock.patch.object(support, "check_device", lambda *_: None),
    ):
        yield


def h200() -> NamedSharding:
    """Where the arrays of a program for one H200 lie. Exits where JAX's CUDA plugin is not installed."""
    jax.devices()  # finds the plugin
    try:
        topology = topologies.get_topology_desc("one", "cuda", target_config=H200, topology="1x1x1")
    except NotImplementedError as error:
        version = jax.__version__
        raise SystemExit(
            f"This needs JAX's CUDA plugin: pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
        ) from error
    return NamedSharding(Mesh(np.array(topology.devices), ("gpu",)), PartitionSpec())


def compiled(traced: Any) -> Any:
    return traced.lower(lowering_platforms=("cuda",)).compile(compiler_options={"xla_gpu_autotune_level": 0})


def compiled_sampling(rows: int, variant: Variant) -> Any:
    """The compiled program that samples a token for each of so many rows of Llama-3.1-8B's vocabulary."""
    where, vocab = h200(), LLAMA_8B.vocab_size
    given = jax.eval_shape(
        lambda: (jnp.zeros((rows, vocab)), init_sampler(rows + 1, vocab), jnp.zeros(rows, jnp.int32))
    )
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), given)
    return compiled(
        jax.jit(sample, static_argnames="variant", donate_argnums=1).trace(*given, variant=variant)
    )


def compiled_step(
    config: ModelConfig,
    chunk: int,
    decode: int,
    scorer: str,
    dtype: Any = jnp.bfloat16,
    packed: int = 0,
    drafts: int = 0,
) -> Any:
    """The compiled program of one `tj.step` of a model's shape at retention 0.25, nothing of it allocated.

    `packed`: chunks of so many rows in the `chunk` tokens; `drafts`: of each request that decodes.
    """
    where = h200()

    def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    plan = tj.CachePlan.build(ragged(config, 0.25), page_size=64, sliding=tj.SlidingLayers.of(config))
    params = jax.tree.map(lambda x: abstract(x.shape, x.dtype), abstract_params(config, jnp.bfloat16))
    make = jax.eval_shape(
        lambda: tj.init_cache(
            plan,
            config,
            num_pages=4000,
            max_requests=decode + max(packed, 1),
            max_tokens=12_000,
            max_tail=256,
            dtype=dtype,
        )
    )
    cache = jax.tree.map(lambda x: abstract(x.shape, x.dtype), make)

    def run(params: Any, cache: tj.Cache, prompt: jax.Array, tokens: jax.Array) -> Any:
        part: Any = Chunk(jnp.int32(decode), prompt, jnp.int32(chunk)) if chunk else None
        if packed:
            counts = jnp.full(packed, chunk // packed)
            part = tj.Packed(decode + jnp.arange(packed), prompt, counts)
        rest = Decode(jnp.arange(decode), tokens) if decode else None
        return step(params, config, plan, tj.get_scorer(scorer), cache, part, rest)

    new = (decode, 1 + drafts) if drafts else (decode,)
    with as_on_hopper():
        traced = jax.jit(run, donate_argnums=1).trace(
            params, cache, abstract((chunk,), jnp.int32), abstract(new, jnp.int32)
        )
    return compiled(traced)


def kernels(text: str) -> list[tuple[str, str, int, str]]:
    """(name, shape of the result, its bytes, where it comes from) of every kernel and copy of a program, in order."""
    found = []
    for line in text[text.index("\nENTRY ") :].splitlines():
        match = re.match(r"\s+(?:ROOT )?%?(\S+) = (.*?) ([a-z-]+)\(", line)
        if not match or match[3] in NO_KERNEL:
            continue
        shape = re.sub(r"\{[^}]*\}", "", match[2])
        size = 0
        for dtype, dims in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shape):
            size += BYTES.get(dtype, 4) * int(np.prod([int(n) for n in dims.split(",") if n]))
        origin = re.search(r'op_name="([^"]*)"', line)
        found.append((match[1], shape, size, origin[1] if origin else ""))
    return found


def open_loops(text: str) -> list[str]:
    """Where the loops of a program come from whose number of rounds only the device knows."""
    loops = [line for line in text.splitlines() if " while(" in line and "known_trip_count" not in line]
    names = [re.search(r'op_name="([^"]*)"', line) for line in loops]
    return [name[1] if name else "unnamed" for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default=LLAMA_8B.name)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--decode", type=int, default=32, help="requests that decode")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a chunk of one more request")
    parser.add_argument(
        "--sampling", choices=("greedy", "full"), help="instead, the sampling of their tokens"
    )
    parser.add_argument("--scorer", default="expected_attention")
    parser.add_argument(
        "--packed", type=int, default=0, help="chunks of so many rows in the tokens of --chunk"
    )
    parser.add_argument("--drafts", type=int, default=0, help="of each request that decodes")
    parser.add_argument("--bytes", action="store_true", help="pages of bytes")
    add_fp8(parser)
    parser.add_argument("--least-mb", type=float, default=0.0, help="list only what writes so much")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # for everything but the program, also where there is a GPU
    if args.sampling:
        program = compiled_sampling(args.decode, GREEDY if args.sampling == "greedy" else FULL)
    else:
        config = first_layers(SHAPES[args.shape], args.layers)
        if args.fp8:
            config = with_fp8_weights(config, dynamic=args.fp8 == "dynamic")
        dtype = byte_pages.DTYPE if args.bytes else jnp.bfloat16
        program = compiled_step(config, args.chunk, args.decode, args.scorer, dtype, args.packed, args.drafts)
    listed = kernels(program.as_text())
    for name, shape, size, origin in listed:
        if size >= args.least_mb * 1e6:
            print(f"{size / 1e6:9.2f} MB  {name[:34]:34} {shape[:44]:44} {origin[-60:]}")
    for origin in open_loops(program.as_text()):
        print(
            f"a loop of unknown length{' (the server has it in a CUDA graph)' * bool(args.sampling)}: {origin}"
        )
    temporary = temporary_bytes(program)
    print(f"{len(listed)} kernels and copies, temporary memory {temporary / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
