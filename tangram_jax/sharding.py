"""One model and its cache over the devices of a mesh: each has a part of the heads, of the MLPs and of every page.

The columns of a page are dealt to the devices. A head group's heads share lengths and tables, so devices that hold the
same number of its columns hold equal loads, whatever the budgets: groups need no balancing, and the tables are the same on
all devices. Which heads a device has follows from that: those of its columns, so the weights' heads are put in that order.
Each device then runs the step of a smaller model over a smaller cache (`share`, `share_plan`), kernels and all; what
attention and MLPs give is added up over the devices, twice a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from models.config import ModelConfig
from models.params import Params
from models.sharding import AxisRules, param_shardings, rules_for, share, tensor_mesh
from pallas_kernels import all_reduce
from pallas_kernels.fp8_products import TILE, Fp8Weights
from tangram_jax.cache import POOL_AXES, Cache, check_model, init_cache
from tangram_jax.packed import Packed
from tangram_jax.plan import CachePlan
from tangram_jax.scorers import Scorer
from tangram_jax.step import Chunk, Decode, step

EVERYWHERE = PartitionSpec()


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorParallel:
    """How a model and its cache lie on a mesh. Build it with `TensorParallel.of`, once: it is hashed by identity.

    `place` and `init_cache` give what `step` takes. The functions on rows (`tangram_jax.reserve` and so on) take such a
    cache, and the whole `plan`, as they take any other.
    """

    config: ModelConfig
    plan: CachePlan
    mesh: Mesh | AbstractMesh
    rules: AxisRules
    share: ModelConfig  # one device's
    share_plan: CachePlan

    @classmethod
    def of(
        cls, config: ModelConfig, plan: CachePlan, devices: int, *, mesh: Mesh | AbstractMesh | None = None
    ) -> TensorParallel:
        """Over the first `devices` devices, or a `mesh` with the axis "tensor".

        Raises ValueError where heads, MLPs or the columns of a page cannot be dealt evenly, and on a plan for another model.
        """
        check_model(plan, config)
        mesh = tensor_mesh(devices) if mesh is None else mesh
        rules = rules_for(config, devices)
        param_shardings(config, mesh, rules)  # checks
        of_head = config.group_size * config.head_dim, (config.group_size + 2) * config.head_dim
        if config.weights_fp8 and any(size % TILE for size in of_head):
            raise ValueError(
                f"KV heads of {of_head[0]} and {of_head[1]} columns in FP8 cannot be put in order: expected multiples of "
                f"{TILE}, so load {config.name} without quantization"
            )
        return cls(
            config=config,
            plan=plan,
            mesh=mesh,
            rules=rules,
            share=share(config, devices),
            share_plan=_share_plan(plan, config.num_kv_heads, devices),
        )

    @property
    def size(self) -> int:
        return self.mesh.size

    @property
    def everywhere(self) -> NamedSharding:
        """Of an array that every device has whole."""
        return NamedSharding(self.mesh, EVERYWHERE)

    @property
    def of_pool(self) -> NamedSharding:
        """Of the pool, and of any array of pages: every device has some columns of each."""
        return NamedSharding(self.mesh, self.rules.spec(POOL_AXES))

    def place(self, params: Params) -> Params:
        """The parameters on the mesh, heads in the order of the pages' columns. Those on the mesh already are used up.

        Of a dense MLP in FP8 each device gets its gates, then the columns that they gate. GPUs that reach each other's
        memory get "links" to it as well.
        """
        placed = jax.device_put(params, param_shardings(self.config, self.mesh, self.rules))
        layers = list(placed["layers"])
        parts = np.arange(2 * self.size).reshape(2, -1).T.ravel()
        for layer, params_of_layer in enumerate(layers):
            if isinstance(params_of_layer.get("gate_up"), Fp8Weights):
                layers[layer] = _in_order(params_of_layer, {"gate_up": _Axes(codes=0, scales=0)}, parts)
        for heads, layer in zip(head_order(self.plan, self.size), self.config.full_layers, strict=True):
            layers[layer] = _in_order(layers[layer], _BY_HEADS, heads)
        return self.linked(placed | {"layers": tuple(layers)})

    def linked(self, params: Params) -> Params:
        """The parameters, with "links" between the devices where these are two or four GPUs that reach each other's memory.

        Through them kernels of ours add up what the devices have of each token, see `pallas_kernels.all_reduce`. Other
        numbers have not been tried.
        """
        if not isinstance(self.mesh, Mesh) or self.size not in all_reduce.TRIED:
            return params
        if self.size != self.mesh.shape["tensor"]:  # more axes: all of the mesh is not what adds up
            return params
        try:
            all_reduce.check_supported(jax.typeof(params["embed"]))
        except NotImplementedError:
            return params
        links = all_reduce.links_of(tuple(self.mesh.devices.flat))
        return params if links is None else params | {"links": links}

    def in_passing(self, params: Params) -> Params:
        """For the first run of a program: parameters with which no GPU waits for another, so that what it gives is nothing.

        All that ran before must have ended. See `all_reduce.in_passing`.
        """
        return params | {"links": all_reduce.in_passing(params["links"])} if "links" in params else params

    def init_cache(self, **sizes: Any) -> Cache:
        """As `tangram_jax.init_cache`, on the mesh."""
        make = partial(init_cache, self.plan, self.config, **sizes)
        specs = self._cache_specs(jax.eval_shape(make))
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
        return jax.jit(make, out_shardings=shardings)()

    def step(
        self,
        params: Params,
        scorer: Scorer,
        cache: Cache,
        chunk: Chunk | Packed | list[Chunk] | None,
        decode: Decode | None,
        *,
        all_logits: bool = False,
    ) -> tuple[jax.Array, Cache]:
        """As `tangram_jax.step`, of parameters and a cache on the mesh; the logits are on every device.

        Jit it with `tangram_jax.compiler_options(devices, linked="links" in params)`. Run each program once with
        parameters `in_passing` and a cache without requests, and wait for it, before you run it in earnest.
        """

        def on_one(params: Params, cache: Cache, chunk: Any, decode: Any) -> tuple[jax.Array, Cache]:
            return step(
                params, self.share, self.share_plan, scorer, cache, chunk, decode, all_logits=all_logits
            )

        weights = jax.tree.map(lambda s: s.spec, param_shardings(self.config, self.mesh, self.rules))
        if "links" in params:
            weights["links"] = PartitionSpec(self.mesh.axis_names)
        pages = self._cache_specs(cache)
        return jax.shard_map(
            on_one,
            mesh=self.mesh,
            in_specs=(weights, pages, EVERYWHERE, EVERYWHERE),
            out_specs=(EVERYWHERE, pages),
            check_vma=False,  # the kernels say nothing of it
        )(params, cache, chunk, decode)

    def _cache_specs(self, cache: Any) -> Any:
        """The tree of PartitionSpec of a cache: the pool by its logical axes, everything else on every device."""
        specs = jax.tree.map(lambda _: EVERYWHERE, cache)
        return dataclasses.replace(specs, pool=self.of_pool.spec)


class _Axes(NamedTuple):
    """The axis of a parameter that is put in order, or if it is in FP8 those of its codes and scales; None: all stay."""

    floats: int | None = None
    codes: int | None = None
    scales: int | None = None


# By KV heads: what belongs to one of them lies side by side, also the query heads of the output projection.
_BY_HEADS: Mapping[str, _Axes] = {
    "qkv": _Axes(1, codes=0, scales=0),
    "qkv_bias": _Axes(0),
    "sinks": _Axes(0),
    "attn_out": _Axes(0, codes=1),
}


def _in_order(layer: Params, axes: Mapping[str, _Axes], order: np.ndarray) -> Params:
    """A layer with those parameters' axes, cut in as many pieces as `order` i[n] has, in that order. Uses them up."""
    given = {name: layer[name] for name in axes if name in layer}
    shardings = jax.tree.leaves(jax.tree.map(lambda x: x.sharding, given))
    return layer | _reorder(tuple(axes.items()), tuple(shardings))(given, order)


@cache  # compiled once for all layers
def _reorder(
    axes: tuple[tuple[str, _Axes], ...], shardings: tuple[NamedSharding, ...]
) -> Callable[..., Params]:
    def take(x: jax.Array, order: jax.Array, axis: int | None) -> jax.Array:
        if axis is None:
            return x
        pieces = x.reshape(*x.shape[:axis], len(order), -1, *x.shape[axis + 1 :])
        return pieces.take(order, axis=axis).reshape(x.shape)

    def reorder(given: Params, order: jax.Array) -> Params:
        out: Params = {}
        for name, of in axes:
            if name not in given:
                continue
            x = given[name]
            if isinstance(x, Fp8Weights):
                out[name] = Fp8Weights(take(x.codes, order, of.codes), take(x.scales, order, of.scales))
            else:
                out[name] = take(x, order, of.floats)
        leaves = map(jax.lax.with_sharding_constraint, jax.tree.leaves(out), shardings)
        return jax.tree.unflatten(jax.tree.structure(out), leaves)

    return jax.jit(reorder, donate_argnums=0)


def head_order(plan: CachePlan, devices: int) -> np.ndarray:
    """int32[L, K]: the KV heads of each compressed layer, device after device, as their columns are dealt."""
    layers, heads = plan.group_of.shape
    columns = plan.heads_per_page // devices
    table = plan.head_at.reshape(layers, -1, devices, columns)
    return table.transpose(0, 2, 1, 3).reshape(layers, heads) % heads


def _share_plan(plan: CachePlan, heads: int, devices: int) -> CachePlan:
    """The plan as one device sees it: the same groups, with its columns of them. Raises ValueError if it has none."""
    if plan.cluster == "model":
        raise ValueError(
            "groups of several layers' heads (cluster 'model') cannot be dealt to devices: build the plan with cluster "
            "'layer'"
        )
    if plan.heads_per_page % devices or heads % plan.heads_per_page:
        raise ValueError(
            f"pages of {plan.heads_per_page} of {heads} heads cannot be dealt to {devices} devices: build the plan with "
            f"heads_per_page a multiple of {devices} that divides {heads}"
        )
    columns, mine = plan.heads_per_page // devices, heads // devices
    head = np.arange(plan.group_of.shape[0] * mine, dtype=np.int32)
    rings = plan.rings and dataclasses.replace(plan.rings, kv_heads=mine, heads_per_page=columns)
    return dataclasses.replace(
        plan,
        heads_per_page=columns,
        group_of=(head // columns).reshape(-1, mine),
        column_of=(head % columns).reshape(-1, mine),
        rings=rings,
    )
