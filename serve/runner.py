"""The device side of the engine: weights, cache and sampler, and the few compiled programs that run on them.

Every shape comes from a small set of buckets and all programs are compiled at start-up. Nothing here reads a result:
`run` returns handles, so the engine can dispatch a step before it has seen the tokens of the one before.
"""

import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from models.config import ModelConfig
from serve.buckets import Buckets, Shape
from serve.compiling import Program, compile_all, threads_for
from serve.handles import Handles, PromptScores
from serve.inputs import Arguments, inputs_of
from serve.request import SamplingParams
from serve.row_changes import Kind, RowChanges
from serve.row_sampler import RowSampler
from serve.sequence import Sequence, Work
from serve.step_program import like_step, step_program
from serve.tracers import Steps, Task, most_processes, tracing
from serve.transfers import RowCopies, Transfers
from tangram_jax import cache as tables
from tangram_jax.cache import Cache, init_cache, row_layout
from tangram_jax.plan import CachePlan
from tangram_jax.scorers import Scorer
from tangram_jax.sharding import TensorParallel
from tangram_jax.step import compiler_options

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
KEPT_ROWS = 8  # lists of rows that stay on the device

log = logging.getLogger("tangram.engine")


def _on_duration(runner: "weakref.ref[Runner]", event: str, duration_secs: float, **_: Any) -> None:
    """A listener cannot be a method: JAX would keep the runner, and its pool, for good."""
    del duration_secs
    living = runner()
    if event == COMPILE_EVENT and living is not None:
        living.note_compilation()


class Runner(RowCopies):
    """Implements RowOperations for the scheduler and runs its work."""

    def __init__(
        self,
        params: Any,
        config: ModelConfig,
        plan: CachePlan,
        scorer: Scorer,
        buckets: Buckets,
        *,
        num_pages: int,
        num_rows: int,
        max_model_len: int,
        max_tail: int,
        cache_dtype: Any = jnp.float32,
        programs: Path | None = None,
        host_bytes: int = 0,
        parallel: TensorParallel | None = None,
    ) -> None:
        """`programs`: directory in which traced programs are kept for the next start; None: nowhere.

        `host_bytes`: of host memory that copies of rows may take; 0: there are none. `parallel`: over several devices;
        parameters that lie on them already are used up.
        """
        self._device = jax.local_devices()[0]
        self._parallel = parallel
        self._everywhere = parallel.everywhere if parallel else self._device
        self.params = parallel.place(params) if parallel else jax.device_put(params, self._device)
        self.config, self.plan, self.buckets = config, plan, buckets
        self._new_cache = partial(
            parallel.init_cache if parallel else partial(init_cache, plan, config),
            num_pages=num_pages,
            max_requests=num_rows,
            max_tokens=max_model_len,
            max_tail=max_tail,
            dtype=cache_dtype,
        )
        self.num_rows = num_rows
        # Of the last step, and the row of them that is of each last chunk.
        self._last_logits: tuple[jax.Array, dict[Sequence, int]] | None = None
        # Of the last step: the inputs, and those as its program takes them.
        self._given: tuple[Work | None, Any, Any] = None, None, None
        self._take = jax.jit(lambda logits, row: jax.lax.dynamic_slice_in_dim(logits, row, 1))
        self._cache: Cache
        self._changes = RowChanges(plan, num_rows)
        # Most steps have the rows of the step before, and the sampler has them, too.
        self._sent = lru_cache(KEPT_ROWS)(partial(_send, self._everywhere))
        self.transfers: Transfers | None = None
        if host_bytes:
            page_bytes = plan.page_bytes(config.head_dim, cache_dtype)
            widest = row_layout(plan, max_model_len, max_tail).width
            of_pool = parallel.of_pool if parallel else SingleDeviceSharding(self._device)
            self.transfers = Transfers(of_pool, page_bytes, widest, host_bytes)
        self.compilations = 0  # since warm-up, of the thread that claimed this runner
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(partial(_on_duration, weakref.ref(self)))
        devices = parallel.size if parallel else 1
        self._kept = (
            Steps(programs, config, plan, scorer, devices, dict(jax.config.values)) if programs else None
        )
        self._store = store = self._kept.store() if self._kept else None
        run_step = step_program(config, plan, scorer, parallel)
        if store:
            run_step = store.keep("step", run_step, like_step)
        linked = "links" in self.params
        options, others = (compiler_options(devices, linked=linked, alone=alone) for alone in (False, True))
        here = self._everywhere if parallel else SingleDeviceSharding(self._device)
        program = partial(
            jax.jit,
            run_step,
            donate_argnums=1,
            static_argnames="shape",
            out_shardings=(None, None, None, here),
        )
        with_chunk = program(compiler_options=options)
        # With a chunk, beside decode tokens or not, and of decode tokens alone.
        self._steps = with_chunk, with_chunk if others == options else program(compiler_options=others)
        self.sampler = RowSampler(config, num_rows, self._everywhere, part=buckets.largest_chunk, store=store)
        self.reset()

    @property
    def cache(self) -> Cache:
        """Whoever reads it finds rows as they are to be, for which programs may run: only one thread may.

        All that changes the cache reads this. But pages that rows are to give back they may still have.
        """
        if self._changes.pressing:
            self._make_changes()
        return self._cache

    @cache.setter
    def cache(self, cache: Cache) -> None:
        self._cache = cache

    def claim(self) -> None:
        """From now on the calling thread runs this: others may compile what they like, it is not counted."""
        self._thread = threading.get_ident()

    def note_compilation(self) -> None:
        """The calling thread compiled something; threads that run something else do not count."""
        self.compilations += threading.get_ident() == self._thread

    def reset(self) -> None:
        """Forget every row: an empty cache and sampler. Waits for them, so that what fails on the device is raised here."""
        self._sent.cache_clear()
        self._given = None, None, None
        # The old ones go first: the memory may not hold two pools.
        self.__dict__.pop("_cache", None)
        self._changes.clear()
        if self.transfers:
            self.transfers.reset()
        # Committed to the device like the weights: arrays that are not would make a second set of programs.
        cache = self._new_cache() if self._parallel else jax.device_put(self._new_cache(), self._device)
        self.cache, _ = jax.block_until_ready((cache, self.sampler.reset()))

    # Programs

    def _step(self, *given: Any, shape: Shape) -> Any:
        return self._steps[not shape.chunk](*given, shape=shape)

    def run(self, work: Work, read_all: Callable[[], None]) -> Handles:
        """Dispatch one step and the sampling of its tokens.

        What a grammar allows is known only when its choice's last token has been read: `read_all` reads what is under way,
        while the device runs the step.
        """
        if self._given[0] is not work:  # many steps in a row may be the same
            given = inputs_of(work, self.buckets, self.num_rows)
            flat = given.arguments.flat()
            self._given = work, given, self._on_device(flat) if given.shape.rows_alone else flat
        _, given, flat = self._given
        logits, self.cache, scores, rest = self._step(
            self.params, self.cache, self.sampler.state.ints, flat, shape=given.shape
        )
        rows, drafts = rest or (flat, None)
        self._last_logits = logits, {c.sequence: i for i, c in enumerate(work.chunks) if c.last}
        sequences = given.sequences
        prompt = PromptScores(*scores) if scores else None
        if not any(sequences):
            return Handles([], None, prompt=prompt)
        if given.follows_grammar:
            read_all()
        if drafts is None:
            return self.sampler.sample(logits, sequences, rows, prompt)
        counts = given.arguments.drafts.counts
        handles, tail = self.sampler.sample_drafts(logits, self.cache.tail, sequences, rows, drafts, counts)
        self.cache = dataclasses.replace(self.cache, tail=tail)
        return handles

    def sample_again(self, sequences: list[Sequence]) -> list[Handles]:
        """Sample the first token of other choices from the logits that end their parents' chunks in the last step."""
        last, self._last_logits = self._last_logits, None
        out = []
        for sequence in sequences:
            assert last and sequence.parent and sequence.state is not None
            logits, row_of = last
            if logits.shape[0] > 1:
                logits = self._take(logits, np.int32(row_of[sequence.parent]))
            out.append(self.sampler.sample(logits, [sequence], self._on_device([sequence.state.row])))
        return out

    def _on_device(self, rows: np.ndarray | list[int]) -> jax.Array:
        return self._sent(np.asarray(rows, np.int32).tobytes())

    # RowOperations

    def set_budgets(self, row: int, budgets: np.ndarray) -> None:
        self._change("budgets", row, budgets)

    def reserve(self, row: int, tokens: int, tail: int) -> None:
        self._change("pages", row, (tokens, tail))

    def trim(self, row: int, tokens: int, tail: int) -> None:
        self._change("trims", row, (tokens, tail))

    def rollback(self, row: int, count: int) -> None:
        self._change("rollbacks", row, count)

    def settle(self, row: int, tokens: int) -> None:
        self._change("counts", row, (tokens, 0))

    def _change(self, kind: Kind, row: int, what: Any) -> None:
        if not self._changes.wait(kind, row, what):
            self._make_changes()
            self._changes.wait(kind, row, what)

    def _make_changes(self) -> None:
        self._cache = self._changes.make(self._cache)

    def fork(self, src: int, dst: int) -> None:
        self._make_changes()  # it takes pages
        self.cache = tables.fork(self.plan, self.cache, np.int32(src), np.int32(dst))

    def release(self, row: int) -> None:
        self._changes.release(row)

    def start(self, sequence: Sequence) -> None:
        self.sampler.start(sequence)

    def check_sampling(self, params: SamplingParams) -> None:
        """Raises ValueError on what the sampler has no room for."""
        self.sampler.params(params)

    # Warm-up

    def warm_up(self) -> Iterator[str]:
        """Compile everything that can run and run it once, yielding what comes next; the cache is empty again at the end."""
        programs = list(self._programs())
        with self._tracing() as elsewhere:
            yield "page tables"
            jax.block_until_ready(self._warm_tables())
            yield from compile_all(programs, self._threads(), elsewhere)
        for name, function, arguments, static in programs:
            yield name
            result = function(*arguments(), **static)
            if function in self._steps:
                _, self.cache, *_ = result
            elif function is self.sampler.run:
                *_, self.sampler.state = result
            else:
                *_, self.sampler.state, _ = result
            jax.block_until_ready(result)
        if self.transfers:
            yield "host memory"
            self.transfers.pin(self.cache)
        yield "reset"
        self.reset()
        self.compilations = 0

    def _threads(self) -> dict[tuple[Any, ...], int]:
        """How many compile the steps, and how many the samplers, which are small."""
        # Two at least: what is found in the cache is loaded by one core, on a CPU 3.5 s for a step with a chunk.
        steps, few = max(2, threads_for(1 / 2)), threads_for(1 / 4)
        return {self._steps: steps, (self.sampler.run,): few, (self.sampler.run_drafts,): few}

    def _tracing(self) -> AbstractContextManager[Mapping[str, Future[None]]]:
        """What other processes trace of the steps that are not in the store, by name."""
        processes, tasks = most_processes(self._device.platform), {}
        if self._kept and self._store and self._store.writable and processes > 1:
            for shape in self.buckets.shapes:
                arguments = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._step_arguments(shape)
                )
                path = self._store.path_for("step", arguments, {"shape": shape})
                if not path.exists():
                    tasks[shape.name] = Task(arguments, shape, path)
        return tracing(self._kept, tasks, processes) if self._kept and len(tasks) > 1 else nullcontext({})

    def _programs(self) -> Iterator[Program]:
        b = self.buckets
        for shape in b.shapes:
            arguments = partial(self._step_arguments, shape)
            yield Program(shape.name, self._steps[not shape.chunk], arguments, {"shape": shape})
        yield from self.sampler.programs(b)

    def _warm_tables(self) -> Any:
        self.cache = self._changes.warm_up(self.cache)
        self.reserve(0, 1, 0)
        self.fork(0, 1 % self.num_rows)
        self.release(0)
        self.release(1 % self.num_rows)
        self._make_changes()
        if self.transfers:
            self.cache = self.transfers.warm_up(self.cache)
        self.sampler.warm_marks()
        rows = self.buckets.logits(self.buckets.largest_chunk)
        first = [self._take(self.sampler.arguments(count)[0], np.int32(0)) for count in rows]
        return self.cache.table, self.sampler.state.seen, first

    def _step_arguments(self, shape: Shape) -> tuple[Any, ...]:
        flat: Any = Arguments.none(shape, self.num_rows).flat()
        if shape.rows_alone:
            flat = self._on_device(flat)
        params = self._parallel.in_passing(self.params) if self._parallel else self.params
        return params, self.cache, self.sampler.state.ints, flat


def _send(place: Any, rows: bytes) -> jax.Array:
    return jax.device_put(np.frombuffer(rows, np.int32), place)
