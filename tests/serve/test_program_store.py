"""Programs that are kept on disk: the same results and donation, found again, and never one that is not the right one."""

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np

import tangram_jax as tj
from models.testing import random_params, tiny_config
from serve import program_store
from serve.program_store import ProgramStore
from tests.simulated import on_simulated_devices

CONFIG = tiny_config(num_layers=1)
SCORER = tj.get_scorer("snapkv")


@cache
def plan_of(sinks=4):
    return tj.CachePlan.build(tj.BudgetProfile.uniform(1, 4, 0.5), 2, 8, window=8, sinks=sinks)


def new_store(directory):
    return ProgramStore(directory, CONFIG, plan_of(), SCORER)


def step_of(store, calls=None):
    """A jitted step; `calls` notes each time that it is traced in earnest."""

    def run(params, cache, chunk, *, all_logits=False):
        if calls is not None:
            calls.append(all_logits)
        return tj.step(params, CONFIG, plan_of(), SCORER, cache, chunk, None, all_logits=all_logits)

    def like(params, cache, chunk, *, all_logits=False):
        return 0, cache

    kept = store.keep("step", run, like) if store else run
    return jax.jit(kept, static_argnames="all_logits", donate_argnums=1)


def run_chunk(step, size=16, **static):
    cache = tj.init_cache(plan_of(), CONFIG, num_pages=40, max_requests=2, max_tokens=64, max_tail=8)
    cache = tj.reserve(plan_of(), cache, np.int32(0), np.int32(size), np.int32(0))
    chunk = tj.Chunk(np.int32(0), np.arange(8, 8 + size, dtype=np.int32), np.int32(size))
    logits, after = step(random_params(CONFIG, 0), cache, chunk, **static)
    assert cache.pool.is_deleted()
    assert isinstance(after, tj.Cache) and after.layout == cache.layout
    return np.asarray(logits), np.asarray(after.pool), int(after.tokens[0])


def test_programs_are_found_again_and_do_the_same(tmp_path):
    calls: list[bool] = []
    store = new_store(tmp_path)
    for static in ({}, {"all_logits": True}):
        want = run_chunk(step_of(None), **static)
        got = run_chunk(step_of(store, calls), **static)
        again = run_chunk(step_of(new_store(tmp_path), calls), **static)
        for a, b, c in zip(want, got, again, strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c)
    assert calls == [False, True]  # traced once each
    assert (store.made, store.found) == (2, 0)
    run_chunk(step_of(store, calls), size=24)  # another shape is another program
    assert len(calls) == 3 and store.made == 3


def test_whatever_could_change_a_program_is_in_its_name(tmp_path, monkeypatch):
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)

    def name_of(config=CONFIG, plan=None, scorer=SCORER, name="step", tree="tree", shape=shape, **static):
        return ProgramStore(tmp_path, config, plan or plan_of(), scorer).path(name, tree, [shape], static)

    names = [
        name_of(),
        name_of(config=CONFIG.replace(norm_eps=1e-3)),
        name_of(plan=plan_of(sinks=5)),
        name_of(scorer=tj.get_scorer("keydiff")),
        name_of(name="sample"),
        name_of(tree="other"),
        name_of(shape=jax.ShapeDtypeStruct((3,), jnp.float32)),
        name_of(shape=jax.ShapeDtypeStruct((2,), jnp.bfloat16)),
        name_of(all_logits=True),
    ]
    with jax.default_matmul_precision("highest"):
        names.append(name_of())
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version__", "0.0")
        names.append(name_of())
    with monkeypatch.context() as patch:
        patch.setattr(program_store, "_sources", lambda: "other code")
        names.append(name_of())
    assert len(set(names)) == len(names)
    same = tj.CachePlan.build(tj.BudgetProfile.uniform(1, 4, 0.5), 2, 8, window=8)
    assert name_of(plan=same, config=CONFIG.replace()) == names[0]


def scaled(store, size=4):
    """(what a small kept program gives, the store)"""
    kept = store.keep("scale", lambda x, *, by=2.0: {"y": x * by}, lambda x, *, by=2.0: {"y": 0})
    return np.asarray(jax.jit(kept, static_argnames="by")(jnp.arange(float(size)), by=3.0)["y"]), store


def test_a_damaged_file_is_made_anew(tmp_path):
    scaled(new_store(tmp_path))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", b"nonsense" * 9, whole[: len(whole) // 2], whole[:-99] + b"x" + whole[-98:]):
        path.write_bytes(damaged)
        got, store = scaled(new_store(tmp_path))
        np.testing.assert_array_equal(got, [0, 3, 6, 9])
        assert (store.made, store.found) == (1, 0)
        got, store = scaled(new_store(tmp_path))
        assert (store.made, store.found) == (0, 1)


COMPILES = """
import pathlib, sys
import jax
from serve.program_store import keep_compiled
keep_compiled(pathlib.Path(sys.argv[1]))
jax.jit(lambda x: x * 3 + 1)(jax.numpy.arange(5))
"""


# Also for a user who may write everywhere.
READ_ONLY = """
import os, sys
from jax._src.lru_cache import LRUCache
def refuse(cache, key, value):
    print(key, file=sys.stderr)
    raise PermissionError(13, "Permission denied")
os.access, LRUCache.put = lambda *_: False, refuse
"""


def compiled(directory, first=""):
    """(what JAX keeps in a directory after a process that has compiled a little, what that process said)"""
    command = [sys.executable, "-c", first + COMPILES, str(directory)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=True)
    return {path: path.read_bytes() for path in directory.glob("*-cache")}, done.stderr


def test_a_compiled_program_that_was_cut_short_is_stored_again(tmp_path):
    """JAX warns of it at every start, compiles it, and writes it nevermore, since there is a file."""
    kept, _ = compiled(tmp_path)
    assert len(kept) > 1
    cut, *whole = kept
    for left in (kept[cut][:-40], b""):
        cut.write_bytes(left)
        times = {path: path.stat().st_mtime_ns for path in whole}
        again, said = compiled(tmp_path)
        assert again.keys() == kept.keys() and len(again[cut]) > len(left) + 20
        assert {path: path.stat().st_mtime_ns for path in whole} == times
        assert "Error reading" not in said


def test_where_compiled_programs_cannot_be_kept_one_line_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    assert compiled(tmp_path / "file" / "xla") == (
        {},
        "Compiled programs cannot be kept, so that every start compiles them: [Errno 20] Not a directory: "
        f"'{tmp_path / 'file' / 'xla'}'\n",
    )


def test_a_directory_that_cannot_be_written_is_read_and_one_line_says_so(tmp_path):
    """JAX had a warning of its own for each program."""
    kept, _ = compiled(tmp_path)
    gone = min(kept)
    gone.unlink()
    left, said = compiled(tmp_path, READ_ONLY)
    assert left.keys() == kept.keys() - {gone}
    assert (
        said
        == (
            "Compiled programs cannot be kept, so that every start compiles those that are not there: "
            f"{tmp_path} cannot be written\n{gone.name.removesuffix('-cache')}\n"  # the only one that was not read
        )
    )


def test_a_program_that_cannot_be_kept_runs_all_the_same(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("not this one")

    monkeypatch.setattr(program_store.export, "export", refuse)
    np.testing.assert_array_equal(scaled(new_store(tmp_path))[0], [0, 3, 6, 9])
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written(tmp_path, caplog):
    """A file is where it should be: true for every user, also for one who may write everywhere."""
    (tmp_path / "file").write_text("")
    store = new_store(tmp_path / "file" / "programs")
    for size in (4, 5):
        np.testing.assert_array_equal(scaled(store, size)[0], [0, 3, 6, 9, 12][:size])
    assert (store.made, store.found) == (0, 0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert (
        said
        == f"Programs cannot be kept in {tmp_path}/file/programs, so that every start traces them: Not a directory"
    )


def test_old_files_go(tmp_path, monkeypatch):
    monkeypatch.setattr(program_store, "MOST_FILES", 3)
    (tmp_path / ".left.by.a.killed.one").write_text("")
    for size in range(2, 7):
        scaled(new_store(tmp_path), size)
    assert len(list(tmp_path.iterdir())) == 3
    assert scaled(new_store(tmp_path), 6)[1].found == 1


def check_over_two_devices() -> None:
    """Found again, a step over two devices does the same, and its pool stays where it was."""
    with TemporaryDirectory() as directory:
        parallel = tj.TensorParallel.of(CONFIG, plan_of(), 2)
        params = parallel.place(random_params(CONFIG, 0))
        out = []
        for _ in range(2):
            store = ProgramStore(Path(directory), CONFIG, plan_of(), SCORER, parallel.size)
            run = store.keep(
                "step",
                lambda p, c, chunk: parallel.step(p, SCORER, c, chunk, None),
                lambda p, c, chunk: (0, c),
            )
            cache = parallel.init_cache(num_pages=40, max_requests=2, max_tokens=64, max_tail=8)
            cache = tj.reserve(plan_of(), cache, np.int32(0), np.int32(16), np.int32(0))
            chunk = tj.Chunk(np.int32(0), np.arange(8, 24, dtype=np.int32), np.int32(16))
            logits, after = jax.jit(run, donate_argnums=1)(params, cache, chunk)
            assert cache.pool.is_deleted() and after.pool.sharding == parallel.of_pool
            out.append((store.made, store.found, np.asarray(logits), np.asarray(after.pool)))
    (*first, logits, pool), (*second, logits_again, pool_again) = out
    assert (first, second) == ([1, 0], [0, 1])
    np.testing.assert_array_equal(logits, logits_again)
    np.testing.assert_array_equal(pool, pool_again)


def test_over_two_devices():
    on_simulated_devices(__file__, "check_over_two_devices", 2)
