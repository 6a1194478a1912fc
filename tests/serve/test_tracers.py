"""Steps that other processes trace: found by the engine's own, which does without those that fail."""

import dataclasses
import logging
import signal
import subprocess
import time
from concurrent.futures import wait
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import tangram_jax as tj
from models.testing import random_params, tiny_config
from serve import tracers
from serve.buckets import Buckets
from serve.runner import Runner
from tangram_jax.scorers import StreamingLLM
from tests.serve.http_server import wait_until

CONFIG = tiny_config(num_layers=1)


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """An engine's, as on a machine where two processes trace."""
    monkeypatch.setattr("serve.runner.most_processes", lambda platform: 2)
    plan = tj.CachePlan.build(tj.BudgetProfile.uniform(1, 4, 0.5), 2, 8, window=8)
    buckets = Buckets(mixed_chunks=(8,), largest_chunk=16, batches=(2,), prompt_logprobs=8)
    return Runner(
        random_params(CONFIG, 0), CONFIG, plan, tj.get_scorer("expected_attention"), buckets, num_pages=40,
        num_rows=2, max_model_len=64, max_tail=8, programs=tmp_path / "programs",
    )  # fmt: skip


def task_of(steps, runner, shape):
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), runner._step_arguments(shape))
    return tracers.Task(arguments, shape, steps.store().path_for("step", arguments, {"shape": shape}))


@pytest.fixture
def started(monkeypatch):
    """The processes that were."""
    found = []

    def popen(*args, **kwargs):
        found.append(inner(*args, **kwargs))
        return found[-1]

    inner = subprocess.Popen
    monkeypatch.setattr(tracers.subprocess, "Popen", popen)
    return found


def test_the_engine_finds_what_they_trace(runner, started):
    with runner._tracing() as elsewhere:
        assert elsewhere.keys() == {shape.name for shape in runner.buckets.shapes} and len(elsewhere) == 4
        wait(elsewhere.values(), timeout=120)
        assert len(started) == 2
        wait_until(lambda: all(process.poll() is not None for process in started))  # they hold a GPU's memory
    for shape in runner.buckets.shapes:
        runner._steps[0].trace(*runner._step_arguments(shape), shape=shape)
    assert (runner._store.found, runner._store.made) == (4, 0)
    with runner._tracing() as elsewhere:
        assert not elsewhere
    assert len(started) == 2


def test_they_are_none_where_the_engine_does_without(runner, monkeypatch):
    monkeypatch.setattr("serve.runner.most_processes", lambda platform: 1)
    with runner._tracing() as elsewhere:
        assert not elsewhere
    runner._kept = runner._store = None  # nothing is kept
    with runner._tracing() as elsewhere:
        assert not elsewhere


@pytest.mark.parametrize("module", ["serve.no_such_module", "json.tool"])
def test_processes_that_end_leave_it_to_the_engine(module, runner, monkeypatch):
    monkeypatch.setattr(tracers, "MODULE", module)
    with runner._tracing() as elsewhere:
        assert not wait(elsewhere.values(), timeout=60).not_done
    assert not list(runner._kept.directory.glob("*"))


def test_so_do_those_that_cannot_be_started(runner, monkeypatch):
    monkeypatch.setattr(
        tracers.subprocess, "Popen", lambda *_, **__: (_ for _ in ()).throw(OSError("too many"))
    )
    with runner._tracing() as elsewhere:
        assert len(elsewhere) == 4 and not wait(elsewhere.values(), timeout=60).not_done


def test_so_do_those_that_cannot_be_told(runner):
    steps = runner._kept._replace(scorer=lambda: None)  # no pickle
    task = tracers.Task((), runner.buckets.shapes[0], runner._kept.directory / "nowhere")
    with tracers.tracing(steps, {"a": task, "b": task}, 2) as elsewhere:
        assert not wait(elsewhere.values(), timeout=60).not_done


def test_a_fault_leaves_the_rest_to_others(runner, caplog):
    caplog.set_level(logging.INFO, "tangram.engine")
    shape = runner.buckets.shapes[-1]
    right = task_of(runner._kept, runner, shape)
    arguments = (*right.arguments[:3], jax.ShapeDtypeStruct((1, 1), np.float32))
    wrong = tracers.Task(arguments, shape, runner._store.path_for("step", arguments, {"shape": shape}))
    with tracers.tracing(runner._kept, {"wrong": wrong, "right": right}, 1) as elsewhere:
        assert not wait(elsewhere.values(), timeout=120).not_done
        wait_until(lambda: "One process fewer traces steps" in caplog.text)
    assert not right.path.exists() and not wrong.path.exists()


def test_what_cannot_be_written_is_traced_by_the_engine_alone(runner, started, tmp_path):
    (tmp_path / "file").touch()
    runner._store._directory = tmp_path / "file" / "programs"
    assert not runner._store.writable
    with runner._tracing() as elsewhere:
        assert not elsewhere
    assert not started


def test_what_would_have_another_name_is_not_traced(runner, caplog):
    """As where JAX finds no room on the GPU, and takes the CPU."""
    caplog.set_level(logging.INFO, "tangram.engine")
    steps = runner._kept._replace(settings={"jax_default_matmul_precision": "highest"})
    shape = runner.buckets.shapes[-1]
    with tracers.tracing(steps, {"a": task_of(runner._kept, runner, shape)}, 1) as elsewhere:
        assert not wait(elsewhere.values(), timeout=120).not_done
        wait_until(lambda: "it would be another program" in caplog.text)  # just after
    assert not list(steps.directory.glob("*"))


@dataclasses.dataclass(frozen=True)
class Loud(StreamingLLM):
    """Warns when it is traced."""

    def score(self, x):
        logging.getLogger("tests.loud").warning("of %s", "this")
        return super().score(x)


@pytest.mark.parametrize("level", ["WARNING", pytest.param("ERROR", marks=pytest.mark.slow)])
def test_what_they_warn_of_is_logged_once(level, runner, caplog):
    caplog.set_level(level, "tests.loud")
    steps = runner._kept._replace(scorer=Loud())
    shapes = [shape for shape in runner.buckets.shapes if shape.chunk]
    tasks = {shape.name: task_of(steps, runner, shape) for shape in shapes}
    with tracers.tracing(steps, tasks, 2) as elsewhere:
        assert not wait(elsewhere.values(), timeout=120).not_done
    said = [(r.name, r.levelname, r.getMessage()) for r in caplog.records]
    assert said == ([("tests.loud", "WARNING", "of this")] if level == "WARNING" else [])
    assert all(task.path.exists() for task in tasks.values())


def test_one_that_hangs_is_not_waited_for_long(runner, started, monkeypatch):
    monkeypatch.setattr(tracers, "SECONDS", 0.5)
    with runner._tracing() as elsewhere:
        for process in started:
            process.send_signal(signal.SIGSTOP)
        assert not wait(elsewhere.values(), timeout=60).not_done
    assert all(process.returncode == -signal.SIGKILL for process in started)


def test_what_ends_the_start_ends_them(runner, started, caplog):
    caplog.set_level(logging.INFO, "tangram.engine")
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), runner._tracing() as elsewhere:
        raise KeyboardInterrupt
    wait(elsewhere.values(), timeout=60)
    assert not caplog.records  # it is no fault of theirs
    assert all(process.returncode == -signal.SIGKILL for process in started) and len(started) == 2
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("cores", "count"), [(2, 1), (8, 2), (16, 4), (96, 4)])
def test_how_many(cores, count, monkeypatch):
    monkeypatch.setattr("serve.compiling.os", SimpleNamespace(cpu_count=lambda: cores))
    assert tracers.most_processes("gpu") == count
    assert tracers.most_processes("cpu") == 0
