"""Scorers: which candidates of a chunk each KV head should keep. Higher scores are kept; -inf is never kept.

A scorer sees one layer of one request: the chunk's queries and the candidates (the previous uncompressed tail, then the
chunk). It only ranks. Sinks and the trailing window are protected by the caller, budgets belong to the plan, and uniform
budgets are a profile (`BudgetProfile.uniform`), not a scorer. All scorers are pure, deterministic, summed in float32, and
frozen (hashable): static arguments of jit. Padding rows and candidates may hold anything finite: they are masked first.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, ClassVar, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from models.logits import AttentionLogits
from models.rope import rotate

NEG_INF = float("-inf")


@flax.struct.dataclass
class ScoreInputs:
    """What one layer of one request shows to a scorer. Padding rows and candidates hold finite values.

    `q` may be the whole chunk or only its last `scorer.query_rows` rows.
    """

    q: Float[Array, "T N D"]  # queries after RoPE; rows from num_valid on are padding
    q_positions: Int[Array, " T"]  # true positions
    num_valid: Int[Array, ""]  # valid rows of q
    # Natural log-sum-exp of logits over ALL entries visible to each query, sinks included.
    lse: Float[Array, "T N"]
    k: Float[Array, "K C D"]  # candidate keys after RoPE: previous tail, then the chunk
    v: Float[Array, "K C D"]
    positions: Int[Array, " C"]  # true positions, contiguous and increasing
    valid: Bool[Array, "K C"]  # candidate exists
    inv_freq: Float[Array | np.ndarray, " half_D"]  # RoPE inverse frequencies
    scale: float = flax.struct.field(pytree_node=False)  # softmax scale c
    soft_cap: float | None = flax.struct.field(pytree_node=False, default=None)  # see `models.logits`


class Scorer(Protocol):
    """A ranking of candidates. Implementations are frozen dataclasses; `name` is what `get_scorer` takes."""

    name: ClassVar[str]

    @property
    def query_rows(self) -> int | None:
        """How many of the chunk's last valid query rows are read: a number, or None for all of them."""
        ...

    def score(self, x: ScoreInputs) -> Float[Array, "K C"]:
        """f32[K, C], higher = keep; -inf exactly where the candidate is not valid."""
        ...


@runtime_checkable
class WindowScorer(Scorer, Protocol):
    """A scorer that ranks by window attention alone, whose sums a kernel can take: f32[H, C] over any heads H.

    `sums`: over a KV head's query heads and the last `window` valid queries, exp(power * (s - lse)).
    """

    power: ClassVar[int]
    window: int

    def from_sums(
        self, sums: Float[Array, "H C"], queries: Int[Array, ""], valid: Bool[Array, "H C"]
    ) -> Float[Array, "H C"]:
        """The scores; `queries` is the number of summands, query heads included. Only their order matters."""
        ...


@runtime_checkable
class GaussianScorer(Scorer, Protocol):
    """A scorer that ranks by a Gaussian model of future queries, whose moments and logits kernels can take."""

    def turns(
        self,
        positions: Int[Array, " T"],
        num_valid: Int[Array, ""],
        inv_freq: Float[Array | np.ndarray, " half_D"],
    ) -> tuple[Float[Array, "T D"], Float[Array, ""]]:
        """What turns the chunk's queries, as after RoPE, into a sample of future ones, and the size of the sample.

        f16: row t holds D/2 real parts, then D/2 imaginary parts of complex factors of the pairs (q[i], q[i + D/2]);
        zeros where query t is left out.
        """
        ...

    def from_logits(
        self,
        z: Float[Array, "H G C"],
        value_norm: Float[Array, "H C"],
        valid: Bool[Array, "H C"],
        positions: Int[Array, " C"],
    ) -> Float[Array, "H C"]:
        """The scores of any heads H from logits under the model, capped, norms of the values, and true positions."""
        ...


@dataclasses.dataclass(frozen=True)
class _PooledWindow:
    """What SnapKV and KV-Compress have in common: a window of queries, and neighbours that are pooled.

    The window's own positions too, where SnapKV's code pools those before it alone: the last `pool // 2` of these differ.
    """

    window: int = 32
    pool: int = 7
    name: ClassVar[str]

    def __post_init__(self) -> None:
        _check(self.window >= 1, f"{self.name}: window must be at least 1, found {self.window}")
        _check(
            self.pool >= 1 and self.pool % 2 == 1,
            f"{self.name}: pool must be odd and positive, found {self.pool}",
        )

    @property
    def query_rows(self) -> int | None:
        return self.window


@dataclasses.dataclass(frozen=True)
class SnapKV(_PooledWindow):
    """SnapKV: attention that the chunk's last queries pay to each candidate.

    Order of the reductions, which changes the kept set: probability of every (query, query head), mean over
    the window, mean over the G query heads of a KV head, then 1-D max-pool over positions. The probability is
    exp(s - lse), so the softmax runs over everything the query saw, retained history included.
    """

    name: ClassVar[str] = "snapkv"
    power: ClassVar[int] = 1

    @jax.named_scope("snapkv")
    def score(self, x: ScoreInputs) -> Float[Array, "K C"]:
        probability, rows = _window_attention(x, self.window)
        attention = probability.sum(axis=2) / jnp.maximum(rows, 1)  # [K, G, C]: mean over the window
        return _pooled(attention.mean(axis=1), x.valid, self.pool)

    def from_sums(
        self, sums: Float[Array, "H C"], queries: Int[Array, ""], valid: Bool[Array, "H C"]
    ) -> Float[Array, "H C"]:
        """See `WindowScorer`."""
        return _pooled(sums / jnp.maximum(queries, 1), valid, self.pool)


@dataclasses.dataclass(frozen=True)
class KVCompress(_PooledWindow):
    """KV-Compress: squared attention of the chunk's last queries, summed over them and over G, then max-pooled.

    The square tells a head that looks hard at few entries from one that glances at many, which the sum of
    probabilities cannot: so it compares heads far better than SnapKV, and is the default for calibration, where
    a wide window costs nothing at serving time (see benchmarks/quality.py).
    """

    name: ClassVar[str] = "kv_compress"
    power: ClassVar[int] = 2

    @jax.named_scope("kv_compress")
    def score(self, x: ScoreInputs) -> Float[Array, "K C"]:
        probability, _ = _window_attention(x, self.window)
        return _pooled(jnp.square(probability).sum(axis=(1, 2)), x.valid, self.pool)

    def from_sums(
        self, sums: Float[Array, "H C"], queries: Int[Array, ""], valid: Bool[Array, "H C"]
    ) -> Float[Array, "H C"]:
        """See `WindowScorer`."""
        del queries
        return _pooled(sums, valid, self.pool)


@dataclasses.dataclass(frozen=True)
class ExpectedAttention:
    """Expected Attention: what a Gaussian model of future queries would attend to, times the value's norm.

    Per query head, mean mu and covariance Sigma (divided by the number of positions) of the chunk's queries
    before RoPE, positions below `skip` left out; R is the rotation averaged over the `future` positions that
    follow the last query; z = c (R mu).k + c^2 k.(R Sigma R^T) k / 2; softmax over the valid candidates from
    position `skip` on; mean over the G query heads of a KV head; score (p + eps) * norm(v).

    The first positions are sinks, which a plan keeps anyway (4 of them by default), and would take half of a first chunk's
    softmax: what is left for the others would be small against eps, and their order little more than that of norm(v).
    Where logits have a soft cap, z is capped as they are: exact for queries that do not vary or logits small against the
    cap, else, by Jensen's inequality, above ln E exp(capped logit). Attention sinks do not count, as history does not.
    """

    future: int = 512
    eps: float = 1e-2
    skip: int = 4
    name: ClassVar[str] = "expected_attention"

    def __post_init__(self) -> None:
        _check(self.future >= 1, f"expected_attention: future must be at least 1, found {self.future}")
        _check(0 <= self.eps < np.inf, f"expected_attention: eps must be finite and not negative: {self.eps}")
        _check(self.skip >= 0, f"expected_attention: skip must not be negative, found {self.skip}")

    @property
    def query_rows(self) -> int | None:
        return None

    @jax.named_scope("expected_attention")
    def score(self, x: ScoreInputs) -> Float[Array, "K C"]:
        num_kv_heads = x.k.shape[0]
        next_position = x.q_positions[jnp.maximum(x.num_valid - 1, 0)] + 1
        turn = _mean_rotation(x.inv_freq, next_position, self.future)
        mean, covariance = self._query_statistics(x)  # f32[N, D], [N, D, D]
        (mean,) = rotate(mean[None], *turn)
        # Sigma is symmetric: R Sigma R^T turns its columns, then its rows.
        covariance = rotate(rotate(covariance, *turn).swapaxes(-1, -2), *turn)
        linear = _split_heads((x.scale * mean)[None], num_kv_heads)[0]  # [K, G, D]
        quadratic = _split_heads((x.scale**2 / 2 * covariance)[None], num_kv_heads)[0]  # [K, G, D, D]
        z = _product("kce,kgde->kcgd", x.k, quadratic.astype(x.k.dtype)) + linear[:, None]
        z = (z * x.k.astype(jnp.float32)[:, :, None]).sum(axis=-1).swapaxes(1, 2)  # [K, G, C]
        z = AttentionLogits(1.0, x.soft_cap)(z)
        return self.from_logits(z, jnp.linalg.norm(x.v.astype(jnp.float32), axis=-1), x.valid, x.positions)

    def from_logits(
        self,
        z: Float[Array, "H G C"],
        value_norm: Float[Array, "H C"],
        valid: Bool[Array, "H C"],
        positions: Int[Array, " C"],
    ) -> Float[Array, "H C"]:
        """See `GaussianScorer`."""
        counted = valid & (positions >= self.skip)
        probability = _masked_softmax(z, counted[:, None, :]).mean(axis=1)
        return jnp.where(valid, (probability + self.eps) * value_norm, NEG_INF)

    def turns(
        self,
        positions: Int[Array, " T"],
        num_valid: Int[Array, ""],
        inv_freq: Float[Array | np.ndarray, " half_D"],
    ) -> tuple[Float[Array, "T D"], Float[Array, ""]]:
        """See `GaussianScorer`. Takes RoPE off and R on in one: then mean and covariance are R mu and R Sigma R^T.

        11 bits of a factor: no more is left of a query that is rounded to 16 bits before and after.
        """
        used = self._used(positions, num_valid)
        angle = positions.astype(jnp.float32)[:, None] * inv_freq
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        mean_cos, mean_sin = _mean_rotation(
            inv_freq, positions[jnp.maximum(num_valid - 1, 0)] + 1, self.future
        )
        factors = [mean_cos * cos + mean_sin * sin, mean_sin * cos - mean_cos * sin]
        turns = jnp.where(used[:, None], jnp.concatenate(factors, axis=-1), 0.0)
        return turns.astype(jnp.float16), jnp.maximum(used.sum(), 1).astype(jnp.float32)

    def _used(self, positions: Int[Array, " T"], num_valid: Int[Array, ""]) -> Bool[Array, " T"]:
        return (jnp.arange(positions.shape[0]) < num_valid) & (positions >= self.skip)

    def _query_statistics(self, x: ScoreInputs) -> tuple[Float[Array, "N D"], Float[Array, "N D D"]]:
        used = self._used(x.q_positions, x.num_valid)
        angle = x.q_positions.astype(jnp.float32)[:, None] * x.inv_freq  # [T, D/2]
        q = rotate(x.q.astype(jnp.float32), jnp.cos(angle), -jnp.sin(angle))  # takes RoPE off again
        q = jnp.where(used[:, None, None], q, 0.0)
        count = jnp.maximum(used.sum(), 1).astype(jnp.float32)
        mean = q.sum(axis=0) / count
        centred = jnp.where(used[:, None, None], q - mean, 0.0).astype(x.q.dtype)
        return mean, _product("tnd,tne->nde", centred, centred) / count


@dataclasses.dataclass(frozen=True)
class KeyDiff:
    """KeyDiff: keys that differ from the others. Anchor a = mean of the unit keys; score = -cos(k, a)."""

    name: ClassVar[str] = "keydiff"

    @property
    def query_rows(self) -> int | None:
        return 0

    @jax.named_scope("keydiff")
    def score(self, x: ScoreInputs) -> Float[Array, "K C"]:
        unit = _unit(jnp.where(x.valid[..., None], x.k.astype(jnp.float32), 0.0))
        count = jnp.maximum(x.valid.sum(axis=1), 1).astype(jnp.float32)
        anchor = _unit(unit.sum(axis=1) / count[:, None])  # [K, D]
        # Sums, not a product: the same bits on every backend.
        cosine = (unit * anchor[:, None, :]).sum(axis=-1)
        return jnp.where(x.valid, -cosine, NEG_INF)


@dataclasses.dataclass(frozen=True)
class StreamingLLM:
    """StreamingLLM: the most recent candidates, the same for every head (sinks are kept by the caller).

    The paper's method where a prompt is one chunk: of several, each leaves its own last entries, which are locked then.
    """

    name: ClassVar[str] = "streaming_llm"

    @property
    def query_rows(self) -> int | None:
        return 0

    def score(self, x: ScoreInputs) -> Float[Array, "K C"]:
        recency = (x.positions - x.positions[-1]).astype(jnp.float32)  # exact: small whole numbers
        return jnp.where(x.valid, recency, NEG_INF)


SCORERS: dict[str, type[Any]] = {
    cls.name: cls for cls in (SnapKV, ExpectedAttention, KeyDiff, StreamingLLM, KVCompress)
}

_WHOLE: Any = ("whole number", int, (int, np.integer), 2**20)  # positions: more are beyond memory, or 32 bits
_NUMBER: Any = ("number", float, numbers.Real, float(np.finfo(np.float32).max))


def get_scorer(name: str, **options: Any) -> Scorer:
    """The scorer called `name` ("snapkv", "expected_attention", "keydiff", "streaming_llm", "kv_compress") with its options.

    Raises:
      ValueError: for an unknown name, option or value; the message lists what exists.
    """
    cls = SCORERS.get(name.lower().replace("-", "_")) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"unknown scorer {name!r}, expected one of: {', '.join(SCORERS)}")
    types = {field.name: field.type for field in dataclasses.fields(cls)}
    if unknown := sorted(options.keys() - types.keys()):
        what = f"its options are: {', '.join(types)}" if types else "it has no options"
        raise ValueError(f"scorer {name} does not know {', '.join(unknown)}; {what}")
    for option, value in options.items():
        what, kind, given, most = _WHOLE if types[option] in (int, "int") else _NUMBER
        if isinstance(value, bool) or not isinstance(value, given):
            raise ValueError(f"scorer {name}: {option} must be a {what}, found {value!r}")
        _check(value <= most, f"scorer {name}: {option} must be at most {most}, found {value:g}")
        options[option] = kind(value)
    return cls(**options)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _split_heads(x: Array, num_kv_heads: int) -> Array:
    """[T, N, ...] -> [T, K, G, ...]: query head n belongs to KV head n // G."""
    return x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])


def _window_attention(x: ScoreInputs, window: int) -> tuple[Float[Array, "K G W C"], Int[Array, ""]]:
    """Probability that each of the last `window` valid queries gives each candidate, and how many queries are real.

    exp(s - lse): the softmax runs over everything that the query saw. Zero for candidates that do not exist or
    come after the query, and for all of them in rows before the chunk's start (a chunk shorter than the window).
    """
    num_kv_heads = x.k.shape[0]
    size = min(window, x.q.shape[0])
    rows = x.num_valid - size + jnp.arange(size)
    real = rows >= 0
    rows = jnp.maximum(rows, 0)
    q_wkgd = _split_heads(x.q[rows], num_kv_heads)
    products = jnp.einsum("wkgd,kcd->kgwc", q_wkgd, x.k, preferred_element_type=jnp.float32)
    logits = AttentionLogits(x.scale, x.soft_cap)(products)
    lse_kgw = jnp.transpose(_split_heads(x.lse[rows], num_kv_heads), (1, 2, 0))
    visible = (x.positions <= x.q_positions[rows][:, None]) & real[:, None]  # [W, C]
    visible = visible & x.valid[:, None, None, :]
    return jnp.exp(jnp.where(visible, logits - lse_kgw[..., None], NEG_INF)), real.sum()


def _pooled(attention: Float[Array, "K C"], valid: Bool[Array, "K C"], width: int) -> Float[Array, "K C"]:
    """Largest of the `width` neighbours, of those that are valid, centred on each valid position; -inf elsewhere."""
    around = ((0, 0), (width // 2,) * 2)
    there = jnp.where(valid, attention, NEG_INF)
    largest = jax.lax.reduce_window(there, NEG_INF, jax.lax.max, (1, width), (1, 1), around)
    return jnp.where(valid, largest, NEG_INF)


def _masked_softmax(z: Float[Array, "K G C"], valid: Bool[Array, "K 1 C"]) -> Float[Array, "K G C"]:
    """Softmax over the valid candidates; 0 elsewhere, also where a head has no candidate at all."""
    top = jnp.max(jnp.where(valid, z, NEG_INF), axis=-1, keepdims=True)
    exp = jnp.exp(jnp.where(valid, z - jnp.where(jnp.isfinite(top), top, 0.0), NEG_INF))
    return exp / jnp.maximum(exp.sum(axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def _unit(x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    norm = jnp.sqrt((x * x).sum(axis=-1, keepdims=True))
    return x / jnp.maximum(norm, 1e-12)


def _mean_rotation(
    inv_freq: Float[Array | np.ndarray, " half_D"], start: Int[Array, ""], future: int
) -> tuple[Float[Array, "1 half_D"], Float[Array, "1 half_D"]]:
    """RoPE's cosines and sines averaged over the positions start .. start + future - 1."""
    angle = (start + jnp.arange(future)).astype(jnp.float32)[:, None] * inv_freq
    return jnp.cos(angle).mean(axis=0, keepdims=True), jnp.sin(angle).mean(axis=0, keepdims=True)


def _product(subscripts: str, a: Array, b: Array) -> Array:
    """An einsum summed in f32, its f32 inputs not rounded to TF32; 16-bit inputs are multiplied as they are."""
    return jnp.einsum(subscripts, a, b, precision="highest", preferred_element_type=jnp.float32)
