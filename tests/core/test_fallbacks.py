"""What a GPU has no kernel for XLA operations or cuDNN do, and every place where that is decided says why."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import tangram_jax as tj
from benchmarks.gpu_program import as_on_hopper
from models import products
from models.testing import random_params, tiny_gpt_oss_config
from tangram_jax import gpu_attention

SLOWER = "runs as XLA operations, several times slower: "
PLACES = {  # what the message of each begins with
    "decode": "Decode attention " + SLOWER,
    "chunk": "Chunk attention " + SLOWER,
    "history": "Chunk attention gathers its history for cuDNN: ",
    "window": "Chunk attention in a sliding window is left to cuDNN: ",
    "scores": "Scores are taken by XLA operations, several times slower: ",
    "keep": "Writing kept entries " + SLOWER,
    "rings": "Writing rings " + SLOWER,
    "append": "Appending " + SLOWER,
    "experts": "Experts are multiplied one after another, many times slower: ",
    "products": "FP8 weights are unpacked for every product, many times slower: ",
}
NAMES = (f"traced {number}" for number in itertools.count())
ATTENTION = ("decode", "history", "window")
ALL = (
    *ATTENTION,
    "scores",
    "keep",
    "rings",
    "append",
    "experts",
    "products",
)  # but "chunk": what cuDNN does it does


def cudnn(q, k, v, **_):
    """What cuDNN's attention returns, by its shapes."""
    del k, v
    return q, jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)


def said(caplog, monkeypatch, *, dtype=jnp.bfloat16, page_size=16, mesh=None, **shape) -> dict[str, set[str]]:
    """What each place says while a step is traced: a chunk, and tokens, of a model with windows, sinks and experts."""
    fields = {"num_layers": 2, "sliding_layers": (0,), "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    # Another name each time, so that the layers are traced anew.
    config = tiny_gpt_oss_config(name=next(NAMES), expert_size=128, **(fields | shape))
    profile = tj.BudgetProfile.uniform(1, config.num_kv_heads, 0.5)
    plan = tj.CachePlan.build(profile, 2, page_size, sliding=tj.SlidingLayers.of(config, 32))
    params = random_params(config, 0, dtype=dtype)
    cache = tj.init_cache(
        plan, config, num_pages=64, max_requests=4, max_tokens=256, max_tail=32, dtype=dtype
    )
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), (params, cache))
    chunk = tj.Chunk(np.int32(1), np.zeros(128, np.int32), np.int32(100))
    decode = tj.Decode(np.zeros(2, np.int32), np.zeros(2, np.int32))
    step = functools.partial(tj.step, config=config, plan=plan, scorer=tj.get_scorer("snapkv"))
    monkeypatch.setattr(gpu_attention, "cudnn_attention", cudnn)
    products._warn.cache_clear()
    caplog.clear()
    jax.eval_shape(lambda params, cache: step(params, cache=cache, chunk=chunk, decode=decode), *given)
    found: dict[str, set[str]] = {}
    for record in caplog.records:
        assert (record.name, record.levelname) == ("tangram", "WARNING")
        (place,) = (name for name, start in PLACES.items() if record.getMessage().startswith(start))
        found.setdefault(place, set()).add(record.getMessage().removeprefix(PLACES[place]))
    return found


FEATURES = {
    "float32": (
        {"dtype": jnp.float32, "weights_fp8": True},
        {"decode": "queries of float32 with a pool of float32", "chunk": "queries of float32 over a pool of float32"}
        | {"scores": "queries, candidates and tail of float32"}
        | dict.fromkeys(("keep", "rings", "append"), "entries of float32")
        | {"experts": "rows of float32 for packed experts", "products": "tokens of float32 for FP8 weights"},
    ),
    "pages of 8": ({"page_size": 8}, dict.fromkeys(ATTENTION, "page size 8: the kernel has (16,")),
    "heads of 80": (
        {"head_dim": 80},
        {"decode": "head dimension 80: the kernel has", "chunk": "head dimension 80: this GPU's cuDNN takes"}
        | dict.fromkeys(("scores", "keep", "rings", "append"), "head dimension 80: the kernels have"),
    ),
    "17 queries": (
        {"num_heads": 34},
        dict.fromkeys(("history", "window"), "17 query heads per KV head: the kernel takes 1 to 16"),
    ),
    "33 queries": (
        {"num_heads": 66},
        dict.fromkeys(("history", "window"), "33 query heads per KV head: the kernel takes 1 to 16")
        | {"decode": "33 query heads per KV head: the kernel takes 1 to 32"},
    ),
}  # fmt: skip


def check(found: dict[str, set[str]], wanted: dict[str, str]) -> None:
    assert found.keys() == wanted.keys()
    for place, reasons in found.items():
        (reason,) = reasons
        assert reason.startswith(wanted[place])


@pytest.mark.parametrize("feature", FEATURES)
def test_features_that_kernels_lack_are_named(feature, caplog, monkeypatch):
    how, wanted = FEATURES[feature]
    with as_on_hopper():
        check(said(caplog, monkeypatch, **how), wanted)


@pytest.mark.parametrize("capability", ["8.0", "10.0"])
def test_generations_without_kernels_are_named(capability, caplog, monkeypatch):
    gpu = SimpleNamespace(platform="gpu", compute_capability=capability, core_count=100)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    reason = f"compute capability {capability}: the kernels run on 9.0 (Hopper)"
    check(said(caplog, monkeypatch, weights_fp8=True), dict.fromkeys(ALL, reason))


def test_a_mesh_is_named(caplog, monkeypatch):
    mesh = AbstractMesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    with as_on_hopper():
        check(
            said(caplog, monkeypatch, mesh=mesh, weights_fp8=True),
            dict.fromkeys(ALL, "a cache on a mesh of 2 devices"),
        )


def test_a_cpu_says_nothing(caplog, monkeypatch):
    """There XLA operations are no surprise."""
    assert said(caplog, monkeypatch, weights_fp8=True) == {}
