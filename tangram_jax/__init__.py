"""Tangram-JAX: a KV cache with a calibrated budget for every attention head, as pure functions."""

from tangram_jax.cache import Cache, fork, init_cache, release, reserve, rollback, set_budgets, trim
from tangram_jax.packed import Packed
from tangram_jax.plan import CachePlan, split_map
from tangram_jax.profile import BudgetProfile
from tangram_jax.rings import SlidingLayers
from tangram_jax.scorers import get_scorer
from tangram_jax.sharding import TensorParallel
from tangram_jax.step import Chunk, Decode, compiler_options, decode_step, prefill_chunk, step

__all__ = [
    "BudgetProfile",
    "Cache",
    "CachePlan",
    "Chunk",
    "Decode",
    "Packed",
    "SlidingLayers",
    "TensorParallel",
    "compiler_options",
    "decode_step",
    "fork",
    "get_scorer",
    "init_cache",
    "prefill_chunk",
    "release",
    "reserve",
    "rollback",
    "set_budgets",
    "split_map",
    "step",
    "trim",
]
