"""One model and its cache over the devices of a mesh: each has a part of the heads, of the MLPs and of every page.

The columns of a page are dealt to the devices. A head group's heads share lengths and tables, so devices that hold the
same number of its columns hold equal loads, whatever the budgets: groups need no balancing, and the tables are the same on
all devices. Which heads a device has follows from that: those of its columns, so the weights' heads are put in that order.
Each device then runs the step of a smaller model over a smaller cache (`share`, `share_plan`), kernels and all; what
attention and MLPs give is added up over the devices, twice a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from models.config import ModelConfig
from models.params import Params
from models.sharding import AxisRules, param_shardings, rules_for, share, tensor_mesh
from tangram_jax.cache import POOL_AXES, Cache, init_cache
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

        Raises ValueError where heads, MLPs or the columns of a page cannot be dealt evenly.
        """
        mesh = tensor_mesh(devices) if mesh is None else mesh
        rules = rules_for(config, devices)
        param_shardings(config, mesh, rules)  # checks
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

    def place(self, params: Params) -> Params:
        """The parameters on the mesh, heads in the order of the pages' columns. Those on the mesh already are used up."""
        placed = jax.device_put(params, param_shardings(self.config, self.mesh, self.rules))
        order = head_order(self.plan, self.size)
        layers = list(placed["layers"])
        first = layers[self.config.full_layers[0]]
        shardings = {name: first[name].sharding for name in _HEAD_AXIS if name in first}
        reorder = jax.jit(_reorder, out_shardings=shardings, donate_argnums=0)
        for heads, layer in zip(order, self.config.full_layers, strict=True):
            layers[layer] = layers[layer] | reorder({name: layers[layer][name] for name in shardings}, heads)
        return placed | {"layers": tuple(layers)}

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
        """As `tangram_jax.step`, of parameters and a cache on the mesh; the logits are on every device."""

        def on_one(params: Params, cache: Cache, chunk: Any, decode: Any) -> tuple[jax.Array, Cache]:
            return step(
                params, self.share, self.share_plan, scorer, cache, chunk, decode, all_logits=all_logits
            )

        weights = jax.tree.map(lambda s: s.spec, param_shardings(self.config, self.mesh, self.rules))
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
        return dataclasses.replace(specs, pool=self.rules.spec(POOL_AXES))


# Which axis of a layer's parameters goes by KV heads.
_HEAD_AXIS: Mapping[str, int] = {"qkv": 1, "qkv_bias": 0, "sinks": 0, "attn_out": 0}


def _reorder(layer: dict[str, jax.Array], heads: jax.Array) -> dict[str, jax.Array]:
    """A layer's parameters with their KV heads in the order `heads` i32[K]."""
    out = {}
    for name, x in layer.items():
        # The output projection goes by query heads, those of one KV head side by side.
        by_head = x.reshape(len(heads), -1, *x.shape[1:]) if name == "attn_out" else x
        out[name] = by_head.take(heads, axis=_HEAD_AXIS[name]).reshape(x.shape)
    return out


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
