"""The products between two attentions for Hopper GPUs: phases, operands, the call. The kernel itself is in `kernel.py`."""

import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.decode_products import finish
from pallas_kernels.decode_products.kernel import (
    COUNTERS,
    ROWS,
    STRIDE,
    Config,
    Phase,
    finish_body,
    kernel_body,
)
from pallas_kernels.decode_products.reference import start_stream
from pallas_kernels.decode_products.tuning import BLOCK, Tuning

f32 = jnp.float32
PARAMS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=6144)


@functools.partial(jax.jit, static_argnames=("eps", "tuning", "interpret"))
def project_qkv(x, norm, w_qkv, cos, sin, *, eps, tuning, interpret=None):
    h, squares = start_stream(x, norm)
    operands = {"h_new": h, "squares_new": squares, "w_qkv": w_qkv, "cos": cos, "sin": sin}
    results = run(operands, [phase_before(w_qkv, eps, tuning)], tuning=tuning, interpret=interpret)
    return [results[name] for name in "qkv"]


# One jitted function for all layers: it is traced once, and the runtime compiles a kernel once per distinct text.
@functools.partial(jax.jit, static_argnames=("eps", "tuning", "interpret"))
def layer_products(
    y, x, w_out, mlp_norm, w_gate_up, w_down, next_norm, w_qkv, cos, sin, *, eps, tuning, interpret=None
):
    operands = {
        "y": y, "x": x, "w_out": w_out, "mlp_norm": mlp_norm, "w_gate_up": w_gate_up, "w_down": w_down,
        "next_norm": next_norm,
    }  # fmt: skip
    phases = phases_after(w_out, w_gate_up, w_down, eps, tuning)
    if w_qkv is not None:
        operands |= {"w_qkv": w_qkv, "cos": cos, "sin": sin}
        phases.append(phase_before(w_qkv, eps, tuning))
    results = run(operands, phases, tuning=tuning, interpret=interpret)
    return [results[name] for name in ("x_new", "q", "k", "v") if name in results]


def _into_stream(
    source: str, weights: str, w: jax.Array, stream: finish.AddToStream, tuning: Tuning
) -> Phase:
    depth, width = w.shape
    blocks = 1 if width // BLOCK <= tuning.num_clusters else 2
    return Phase(
        source=source, weights=weights, depth=depth, columns=width, halves=1, blocks=blocks,
        splits=_splits(width // BLOCK // blocks, depth, tuning),
        prepare=finish.nothing, finish=stream,
    )  # fmt: skip


def _splits(tiles: int, depth: int, tuning: Tuning) -> int:
    """A tile's rows are halved if every cluster has one tile at most: its two CTAs exchange sums once a phase."""
    return 2 if tiles <= tuning.num_clusters and depth >= 2 * ROWS else 1


def phases_after(
    w_out: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, eps: float, tuning: Tuning
) -> list[Phase]:
    """From attention's result to the stream at the layer's end."""
    width, _, inner = w_gate_up.shape
    middle = finish.AddToStream("x", "mlp_norm", "x_mid", "h_mid", "squares_mid")
    end = finish.AddToStream("x_mid", "next_norm", "x_new", "h_new", "squares_new")
    gate_up = Phase(
        source="h_mid", weights="w_gate_up", depth=width, columns=inner, halves=2, blocks=2, splits=1,
        prepare=finish.InverseRms("squares_mid", width, eps), finish=finish.Gate("act"),
    )  # fmt: skip
    return [
        _into_stream("y", "w_out", w_out, middle, tuning),
        gate_up,
        _into_stream("act", "w_down", w_down, end, tuning),
    ]


def phase_before(w_qkv: jax.Array, eps: float, tuning: Tuning) -> Phase:
    """From the stream to a layer's queries, keys and values."""
    width, kv_heads, members, head_dim = w_qkv.shape
    return Phase(
        source="h_new", weights="w_qkv", depth=width, columns=kv_heads * members * head_dim, halves=1, blocks=2,
        splits=_splits(kv_heads * members, width, tuning),
        prepare=finish.InverseRms("squares_new", width, eps), finish=finish.Rotate(members - 2),
    )  # fmt: skip


def _results(operands: dict[str, jax.Array], phases: list[Phase], tokens: int, dtype: Any) -> dict[str, Any]:
    shapes: dict[str, Any] = {}
    for phase in phases:
        if isinstance(phase.finish, finish.AddToStream):
            width = phase.columns
            shapes[phase.finish.new] = jax.ShapeDtypeStruct((tokens, width), dtype)
            shapes[phase.finish.weighted] = jax.ShapeDtypeStruct((tokens, width), dtype)
            shapes[phase.finish.squares] = jax.ShapeDtypeStruct((width // BLOCK, tokens), f32)
        elif isinstance(phase.finish, finish.Gate):
            shapes[phase.finish.out] = jax.ShapeDtypeStruct((tokens, phase.columns), dtype)
        else:
            _, kv_heads, members, head_dim = operands["w_qkv"].shape
            shapes["q"] = jax.ShapeDtypeStruct((tokens, kv_heads * (members - 2), head_dim), dtype)
            shapes["k"] = shapes["v"] = jax.ShapeDtypeStruct((tokens, kv_heads, head_dim), dtype)
    return shapes


def run(
    operands: dict[str, jax.Array], phases: list[Phase], *, tuning: Tuning, interpret: Any = None
) -> dict[str, jax.Array]:
    """All results of the phases by name. `operands` are everything that they read and do not compute themselves."""
    tokens, dtype = operands[phases[0].source].shape[0], operands[phases[0].source].dtype
    shapes = _results(operands, phases, tokens, dtype)
    flat = dict(operands)
    for phase in phases:
        flat[phase.weights] = operands[phase.weights].reshape(phase.depth, phase.halves, phase.columns)
    if interpret is not None:
        return _interpreted(flat, phases, shapes, tuning, interpret)
    if len(phases) > 1:
        # Not a constant: the kernel writes it (and leaves zeros).
        flat["counters"] = jnp.zeros(COUNTERS * STRIDE, jnp.int32) + jax.lax.optimization_barrier(
            jnp.int32(0)
        )
    config = Config(tokens=tokens, phases=tuple(phases), num_clusters=tuning.num_clusters, tuning=tuning)

    def decode_products(*refs: Any) -> None:  # the name that profiles show
        kernel_body(config, (*flat, *shapes), dtype, *refs)

    kernel = plgpu.kernel(
        decode_products,
        out_type=list(shapes.values()),
        grid=(tuning.num_clusters,),
        grid_names=("cluster",),
        cluster=(2,),
        cluster_names=("rank",),
        num_threads=3,
        thread_name="wg",
        compiler_params=PARAMS,
    )
    return dict(zip(shapes, kernel(*flat.values()), strict=True))


def _interpreted(
    flat: dict[str, jax.Array], phases: list[Phase], shapes: dict[str, Any], tuning: Tuning, interpret: Any
) -> dict[str, jax.Array]:
    """A call per phase and one that finishes its sums: the interpreter has neither clusters' memory nor a grid's barrier."""
    done: dict[str, jax.Array] = {}
    for phase in phases:
        reads = {**flat, **done}
        tokens, dtype = reads[phase.source].shape[0], reads[phase.source].dtype
        config = Config(
            tokens=tokens, phases=(phase,), num_clusters=tuning.num_clusters, tuning=tuning, interpreted=True
        )
        used = {name: reads[name] for name in (phase.source, phase.weights)}
        part = jax.ShapeDtypeStruct((phase.tiles, phase.splits, phase.blocks, BLOCK, tokens), f32)
        products = plgpu.kernel(
            functools.partial(kernel_body, config, (*used, "part"), dtype),
            out_type=[part], grid=(tuning.num_clusters, 2), grid_names=("cluster", "rank"),
            num_threads=3, thread_name="wg", compiler_params=PARAMS, interpret=interpret,
        )  # fmt: skip
        (sums,) = products(*used.values())
        out = {name: shape for name, shape in shapes.items() if name not in done and name in _written(phase)}
        small = {name: value for name, value in reads.items() if not name.startswith("w_")}
        finishing = plgpu.kernel(
            functools.partial(finish_body, config, ("part", *small, *out)),
            out_type=list(out.values()), grid=(phase.tiles,), grid_names=("tile",),
            compiler_params=PARAMS, interpret=interpret,
        )  # fmt: skip
        done.update(zip(out, finishing(sums, *small.values()), strict=True))
    return done


def _written(phase: Phase) -> tuple[str, ...]:
    if isinstance(phase.finish, finish.AddToStream):
        return phase.finish.new, phase.finish.weighted, phase.finish.squares
    return (phase.finish.out,) if isinstance(phase.finish, finish.Gate) else ("q", "k", "v")
