"""From logical axes to a mesh: only a rules object changes between one device and many.

The axes of every parameter stand beside its shape in `models.params`; caches name theirs in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from models.config import ModelConfig
from models.params import Params, ParamSpec, map_specs, param_specs
from pallas_kernels.fp8_products import TILE, Fp8Weights

LOGICAL_AXES = ("embed", "heads", "kv_heads", "head_dim", "mlp", "experts", "vocab")


class ShardingError(ValueError):
    """A mesh does not divide what it should; the message says all of it."""


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Which mesh axis shards a logical axis; an axis that is not listed is replicated. Hashable.

    `AxisRules((("heads", "tensor"), ("mlp", "tensor")))`
    """

    rules: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, **rules: str) -> AxisRules:
        """`AxisRules.of(heads="tensor", mlp="tensor")`"""
        return cls(tuple(sorted(rules.items())))

    def mesh_axis(self, logical: str | None) -> str | None:
        """The mesh axis of one logical axis, or None."""
        return dict(self.rules).get(logical) if logical is not None else None

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The PartitionSpec of an array whose dimensions have these logical axes."""
        mesh_axes = [self.mesh_axis(axis) for axis in axes]
        used = [axis for axis in mesh_axes if axis is not None]
        if len(used) != len(set(used)):
            raise ValueError(f"axes {tuple(axes)} use one mesh axis twice: {tuple(mesh_axes)}")
        # As JAX writes those of results, which it tells from others.
        while mesh_axes and mesh_axes[-1] is None:
            mesh_axes.pop()
        return PartitionSpec(*mesh_axes)

    def sharding(self, mesh: Mesh | AbstractMesh, axes: Sequence[str | None]) -> NamedSharding:
        """The NamedSharding of an array whose dimensions have these logical axes."""
        return NamedSharding(mesh, self.spec(axes))


# Megatron's layout: heads and the MLP's hidden width are split, one all-reduce after each half of a layer. Experts are, too,
# but for packed ones, of which each device has some.
TENSOR_PARALLEL = AxisRules.of(
    heads="tensor", kv_heads="tensor", mlp="tensor", experts="tensor", vocab="tensor"
)


def tensor_mesh(size: int) -> Mesh:
    """A mesh of the first `size` devices with the one axis "tensor", whose shardings XLA propagates (type Auto)."""
    devices = jax.devices()
    if not 1 <= size <= len(devices):
        raise ValueError(f"a mesh of {size} devices was asked for, {len(devices)} are here")
    return jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=devices[:size])


def param_shardings(
    config: ModelConfig, mesh: Mesh | AbstractMesh, rules: AxisRules = TENSOR_PARALLEL
) -> Params:
    """The tree of NamedSharding for a model's parameters.

    Weights in FP8 have it of codes and scales, tile by tile in the order in which they lie (see
    `tangram_jax.TensorParallel.place`).

    Raises ShardingError listing every logical axis whose size the mesh does not divide, or whose mesh axis is missing.
    """
    specs = param_specs(config)
    problems: dict[str, None] = {}  # ordered set: layers repeat
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        problems["the mesh has axes of type Explicit or Manual, expected Auto (see `tensor_mesh`)"] = None
    missing = {axis for _, axis in rules.rules} - set(mesh.axis_names)
    problems |= {f"mesh axis {axis!r} not in mesh {mesh.axis_names}": None for axis in sorted(missing)}

    def check(what: str, size: int, axis: str | None, of: int = 1) -> None:
        mesh_axis = rules.mesh_axis(axis)
        if mesh_axis is not None and mesh_axis not in missing and size % (of * mesh.shape[mesh_axis]):
            times = f"{of} x " if of > 1 else ""
            problems[f"{what} = {size} is not a multiple of {times}{mesh.shape[mesh_axis]} ({mesh_axis})"] = (
                None
            )

    def shard(spec: ParamSpec) -> Any:
        for size, axis in zip(spec.shape, spec.axes, strict=True):
            check(str(axis), size, axis)
        if missing:
            return None
        if spec.fp8:
            codes, scales = spec.fp8_axes
            for size, axis in zip(spec.matrix[::-1], codes[-4:], strict=False):
                check(f"{axis} of FP8 weights", size, axis, TILE)
            places: Any = (rules.sharding(mesh, codes), rules.sharding(mesh, scales))
            return Fp8Weights(*places)
        return rules.sharding(mesh, spec.axes)

    shardings = map_specs(shard, specs)
    if problems:
        raise ShardingError(
            f"{config.name} cannot be sharded so: {'; '.join(problems)}. Take as many devices as divide these; in code of "
            "your own, heads can be padded with `pad_heads`, and an axis that the rules leave out is replicated"
        )
    return shardings


def rules_for(config: ModelConfig, size: int) -> AxisRules:
    """TENSOR_PARALLEL for `size` devices; a vocabulary that they do not divide is on each of them."""
    rules = dict(TENSOR_PARALLEL.rules)
    if config.vocab_size % size:
        del rules["vocab"]
    return AxisRules.of(**rules)


def share(config: ModelConfig, size: int) -> ModelConfig:
    """The configuration of one of `size` devices' share, for `forward` within a `jax.shard_map` over the axis "tensor".

    It has its part of the heads and of the MLPs' width, or some whole experts where these are packed; everything else is as
    in the whole model. The parameters are those of the whole model, placed by `rules_for(config, size)`, which
    `param_shardings` checks; a dense MLP's in FP8 are in order only as `tangram_jax.TensorParallel.place` leaves them.
    """
    return config.replace(
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
        expert_size=config.expert_size // (1 if config.experts_mxfp4 else size),
        tensor_axis=TENSOR_PARALLEL.mesh_axis("heads"),
    )


def pad_heads(
    params: Params, config: ModelConfig, num_heads: int, num_kv_heads: int
) -> tuple[Params, ModelConfig]:
    """Appends zero heads, so that a mesh divides them; the logits stay the same.

    9 query heads over 3 KV heads become, for example, 24 over 8: query head n = k * G + g of KV head k keeps its KV
    head and becomes head k * G' + g. A zero head adds nothing, because its rows of the output projection are zero.

    Args:
      params: in the structure of `param_specs(config)`.
      num_heads: N' >= N, query heads afterwards; a multiple of `num_kv_heads`, and N' / K' >= N / K.
      num_kv_heads: K' >= K, KV heads afterwards.

    Returns:
      (the padded parameters, their configuration)
    """
    if config.weights_fp8:
        raise ShardingError(
            f"{config.name} has FP8 weights, whose heads cannot be padded: load it without them"
        )
    padded = config.replace(num_heads=num_heads, num_kv_heads=num_kv_heads)  # checks N' % K'
    K, G, D, E = config.num_kv_heads, config.group_size, config.head_dim, config.hidden_size
    more_heads, more_queries = num_kv_heads - K, padded.group_size - G
    if more_heads < 0 or more_queries < 0:
        raise ValueError(
            f"padding cannot remove heads: from {config.num_heads}/{K} (G {G}) to {num_heads}/{num_kv_heads} "
            f"(G {padded.group_size})"
        )

    def pad_projection(qkv: Any) -> Any:
        """[..., K, G + 2, D] -> [..., K', G' + 2, D]"""
        before = ((0, 0),) * (qkv.ndim - 3)
        queries = jnp.pad(qkv[..., :G, :], (*before, (0, 0), (0, more_queries), (0, 0)))
        joined = jnp.concatenate([queries, qkv[..., G:, :]], axis=-2)
        return jnp.pad(joined, (*before, (0, more_heads), (0, 0), (0, 0)))

    def pad_layer(layer: Mapping[str, Any]) -> dict[str, Any]:
        attn_out = layer["attn_out"].reshape(K, G, D, E)
        attn_out = jnp.pad(attn_out, ((0, more_heads), (0, more_queries), (0, 0), (0, 0)))
        projections = {name: pad_projection(layer[name]) for name in ("qkv", "qkv_bias") if name in layer}
        if "sinks" in layer:
            projections["sinks"] = jnp.pad(layer["sinks"], ((0, more_heads), (0, more_queries)))
        return {
            **layer,
            **projections,
            "attn_out": attn_out.reshape(num_heads, D, E),
        }

    return {**params, "layers": tuple(pad_layer(layer) for layer in params["layers"])}, padded
