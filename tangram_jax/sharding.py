"""The cache on a mesh: the columns of every page are dealt to the devices, the tables are the same on all.

A head group's heads share lengths and tables, so devices that hold the same number of its columns hold equal loads,
whatever the budgets: groups need no balancing. The columns of a page, Hp, must divide by the number of devices.
"""

import dataclasses

import jax
from jax.sharding import Mesh

from models.sharding import TENSOR_PARALLEL, AxisRules
from tangram_jax.cache import POOL_AXES, Cache


def cache_shardings(cache: Cache, mesh: Mesh, rules: AxisRules = TENSOR_PARALLEL) -> Cache:
    """The tree of NamedSharding for a cache: the pool by its logical axes, everything else replicated.

    Raises ValueError when the mesh does not divide the columns of a page.
    """
    axis = rules.mesh_axis("kv_heads")
    columns = cache.pool.shape[2]
    if axis is not None and columns % mesh.shape[axis]:
        raise ValueError(
            f"pages of {columns} heads cannot be dealt to {mesh.shape[axis]} devices: build the plan with "
            f"heads_per_page a multiple of {mesh.shape[axis]}"
        )
    replicated = jax.tree.map(lambda x: rules.sharding(mesh, (None,) * x.ndim), cache)
    return dataclasses.replace(replicated, pool=rules.sharding(mesh, POOL_AXES))


def shard_cache(cache: Cache, mesh: Mesh, rules: AxisRules = TENSOR_PARALLEL) -> Cache:
    """The cache, placed on the mesh as the rules say."""
    return jax.device_put(cache, cache_shardings(cache, mesh, rules))
