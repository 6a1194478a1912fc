"""Scores of a chunk's candidates, layer by layer: the one place that decides what computes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.logits import AttentionLogits
from models.rope import rope_frequencies
from pallas_kernels import gaussian, keep
from tangram_jax.compress import Candidates, by_group
from tangram_jax.plan import CachePlan
from tangram_jax.scorers import GaussianScorer, ScoreInputs, Scorer, WindowScorer

log = logging.getLogger("tangram")


def check_scorer(scorer: Any) -> None:
    """Raises TypeError on what is no scorer: the name of one, or a class."""
    if isinstance(scorer, type) or not hasattr(scorer, "score"):
        raise TypeError(f"{scorer!r} is no scorer: write one as tangram_jax.get_scorer gives it")


def scores_of(scorer: Scorer, x: ScoreInputs) -> Float[Array, "K C"]:
    """The scores of the candidates of `x`. Raises ValueError where they are not one for each KV head and candidate."""
    scores = scorer.score(x)
    if getattr(scores, "shape", None) != x.valid.shape:
        found = [*scores.shape] if hasattr(scores, "shape") else repr(scores)
        raise ValueError(
            f"{scorer}.score gives {found}: expected scores of {x.valid.shape[0]} KV heads and {x.valid.shape[1]} "
            f"candidates, {[*x.valid.shape]}"
        )
    return scores


class ChunkScores:
    """Collects the scores of one chunk's candidates from all layers of one step."""

    def __init__(
        self,
        plan: CachePlan,
        config: ModelConfig,
        scorer: Scorer,
        what: Candidates,
        tail_kv: jax.Array,
        start: jax.Array | None = None,
    ) -> None:
        """`tail_kv` [2, M, Hp, W, D], the previous tail, right-aligned, of `compress.read_tail`.

        `start` i32[]: where the chunk's rows begin among those of several; None: it has all of them.
        """
        self._start = start
        self._plan, self._config, self.scorer, self._what, self._tail = plan, config, scorer, what, tail_kv
        self.to_logits = AttentionLogits.of(config)
        self.place = np.stack([plan.group_of, plan.column_of], axis=-1)
        self._layers: list[jax.Array] = []  # scores

        self._sums: list[jax.Array] = []
        self._queries: jax.Array | int = 0

        self.logits: list[list[jax.Array]] = []  # those of the candidates, and their values' squared norms
        self._gaussians = Gaussians([self])

    def add(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, lse: jax.Array) -> None:
        """The chunk's q [T, N, D], k and v [T, K, D], and f32[T, N] natural log-sum-exp over all that q saw."""
        try:
            if _by_logits(self.scorer):
                self._gaussians.add(layer, q, k, v)
                return
            if _by_sums(self.scorer):
                own_q, own_k, own_lse = map(self._own, (q, k, lse))
                self._sums.append(self._window_sums(self.scorer, layer, own_q, own_k, own_lse))
                return
        except NotImplementedError as reason:
            if jax.default_backend() == "gpu" and not layer:
                log.warning("Scores are taken by XLA operations, several times slower: %s", reason)
        q, k, v, lse = map(self._own, (q, k, v, lse))
        group, column = self._plan.group_of[layer], self._plan.column_of[layer]
        tail = self._tail[:, group, column]  # [2, K, W, D]
        keys, values = (
            jnp.concatenate([t.astype(x.dtype), x.swapaxes(0, 1)], axis=1)
            for t, x in zip(tail, (k, v), strict=True)
        )
        inputs = ScoreInputs(
            q=q,
            q_positions=self._what.positions[-q.shape[0] :],
            num_valid=self._what.valid_tokens,
            lse=lse,
            k=keys,
            v=values,
            positions=self._what.positions,
            valid=self._what.valid[group],
            inv_freq=rope_frequencies(self._config),
            **self.to_logits._asdict(),
        )
        self._layers.append(scores_of(self.scorer, inputs))

    def result(self) -> jax.Array:
        """f32[M, Hp, C]: the scores by group and column."""
        if not (self._sums or self.logits):
            return by_group(self._plan, jnp.stack(self._layers))
        valid = self._what.valid[self._plan.group_of]  # [L, K, C]
        shape, flat = valid.shape, (-1, valid.shape[-1])
        if _by_sums(self.scorer):
            sums = jnp.stack(self._sums).reshape(flat)
            scores = self.scorer.from_sums(sums, jnp.asarray(self._queries), valid.reshape(flat))
        elif _by_logits(self.scorer):
            logits, squares = (jnp.stack(x) for x in zip(*self.logits, strict=True))
            by_head = logits.reshape(-1, self._config.group_size, shape[-1])  # [L * K, G, C]
            norms = jnp.sqrt(squares).reshape(flat)
            scores = self.scorer.from_logits(by_head, norms, valid.reshape(flat), self._what.positions)
        return by_group(self._plan, scores.reshape(shape))

    def _own(self, rows: jax.Array) -> jax.Array:
        """[T, ...] -> the chunk's own first, then zeros: so that nothing of others gets into them."""
        if self._start is None:
            return rows
        at = np.arange(len(rows))
        mine = jnp.where(at < self._what.valid_tokens, self._start + at, len(rows))
        return rows.at[mine].get(mode="fill", fill_value=0)

    def gaussian(self) -> dict[str, jax.Array]:
        """What `gaussian.gaussian_logits` is to know of the chunk, the same in all layers."""
        assert _by_logits(self.scorer)
        what, slots = self._what, self._what.positions.shape[0] - self._tail.shape[3]
        turns, count = self.scorer.turns(
            what.positions[-slots:], what.valid_tokens, rope_frequencies(self._config)
        )
        return {
            "turns": turns,
            "count": count,
            "tail": self._tail,
            "unlocked": what.unlocked,
            "starts": jnp.int32(0) if self._start is None else self._start,
            "sizes": what.valid_tokens,
        }

    def _window_sums(
        self, scorer: WindowScorer, layer: int, q: jax.Array, k: jax.Array, lse: jax.Array
    ) -> jax.Array:
        """f32[K, C] by the kernel. Raises NotImplementedError."""
        self._queries = jnp.minimum(self._what.valid_tokens, scorer.window) * (q.shape[1] // k.shape[1])
        return keep.window_sums(
            q, k, self._tail, lse,
            place=self.place,
            layer=jnp.int32(layer),
            unlocked=self._what.unlocked,
            count=self._what.valid_tokens,
            window=scorer.window,
            power=scorer.power,
            **self.to_logits._asdict(),
        )  # fmt: skip


class Gaussians:
    """Logits under a Gaussian model of the queries of one chunk, or of several at once, for the scores of each."""

    def __init__(self, chunks: Sequence[ChunkScores]) -> None:
        """Of chunks whose rows are among the same ones."""
        self._chunks = chunks
        self._given: dict[str, jax.Array] | None = None  # the same in all layers

    @classmethod
    def of_several(cls, chunks: Sequence[ChunkScores]) -> Gaussians | None:
        """None where the scorer has no use for them."""
        return cls(chunks) if _by_logits(chunks[0].scorer) else None

    def add(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> None:
        """All rows there are, q [T, N, D], k and v [T, K, D]. Raises NotImplementedError, and nothing is added."""
        if self._given is None:
            each = [chunk.gaussian() for chunk in self._chunks]
            self._given = {name: jnp.stack([x[name] for x in each]) for name in each[0]}
        one = self._chunks[0]
        logits, squares = gaussian.gaussian_logits(
            q,
            keys=k,
            values=v,
            place=one.place,
            layer=jnp.int32(layer),
            scale=one.to_logits.scale,
            **self._given,
        )
        logits = one.to_logits._replace(scale=1.0)(logits)
        for chunk, *of_chunk in zip(self._chunks, logits, squares, strict=True):
            chunk.logits.append(of_chunk)


def _by_sums(scorer: Scorer) -> TypeGuard[WindowScorer]:
    """Whether `from_sums` says what `score` would: not where a class derived from its own has another `score`."""
    return isinstance(scorer, WindowScorer) and _agrees(scorer, "from_sums")


def _by_logits(scorer: Scorer) -> TypeGuard[GaussianScorer]:
    """The same of `from_logits`."""
    return isinstance(scorer, GaussianScorer) and _agrees(scorer, "from_logits")


def _agrees(scorer: Scorer, method: str) -> bool:
    kernels, own = (
        next((cls for cls in type(scorer).__mro__ if name in vars(cls)), None) for name in (method, "score")
    )
    return kernels is not None and own is not None and issubclass(kernels, own)
