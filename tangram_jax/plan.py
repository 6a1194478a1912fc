"""From calibrated budgets to a static cache layout: head groups, lengths, pages, and the split map.

Everything here is decided before the first request and never changes: which group and column each head has, and how
many entries each group holds as a function of the token count alone.
"""

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import byte_pages
from tangram_jax.grouping import CLUSTERS, Cluster, clusters, heads_per_page_for, largest
from tangram_jax.profile import BudgetProfile
from tangram_jax.rings import Rings, SlidingLayers
from tangram_jax.row_numbers import at_least, check_whole

Division = Literal["equal", "split_map", "uniform"]
DIVISIONS: tuple[Division, ...] = ("equal", "split_map", "uniform")
PPM = 1_000_000
MAX_TOKENS = 1_000_000  # kept_entries() stays inside int32 up to here


def kept_entries(budget_ppm: Any, tokens: Any, min_entries: int = 0) -> Any:
    """Entries that a budget keeps of `tokens` tokens: min(n, max(ceil(budget * n), min_entries)).

    `budget_ppm` int32[...] in parts per million, `tokens` int32[...] up to MAX_TOKENS, broadcast against each other;
    NumPy in, NumPy out; JAX in, JAX out. Budgets are whole parts per million, so the ceiling is exact (0.07 of 100 is
    7), and JAX's product is taken in two digits of base 1000, so it fits in int32 on a device without 64-bit integers.
    """
    # On the host in 64 bits: the scheduler asks for each row in each step.
    if isinstance(tokens, np.ndarray) and not isinstance(budget_ppm, jax.Array):
        entries = tokens.astype(np.int64)
        kept = (budget_ppm * entries + (PPM - 1)) // PPM
        return np.minimum(np.maximum(kept, min_entries), entries).astype(np.int32)
    n1, n0 = tokens // 1000, tokens % 1000
    b1, b0 = budget_ppm // 1000, budget_ppm % 1000
    low = 1000 * (n1 * b0 + n0 * b1) + n0 * b0
    kept = n1 * b1 + (low + (PPM - 1)) // PPM
    floor = kept * 0 + min_entries
    kept = kept + (floor > kept) * (floor - kept)
    return kept + (tokens < kept) * (tokens - kept)


@dataclass(frozen=True, eq=False, kw_only=True)
class CachePlan:
    """The static layout of the compressed cache of one model under one profile. Hashed by identity: build it once.

    L counts the layers whose cache is compressed: all but sliding-window layers, which keep rings (`rings`).
    """

    profile: BudgetProfile
    heads_per_page: int  # Hp
    page_size: int  # P
    cluster: Cluster
    sinks: int  # first positions, kept for good by a group that holds more than the window from its first chunk on
    window: int  # last positions, kept as far as there is room, and decided on again when more tokens come
    min_entries: int  # no group keeps fewer than this many entries, as long as there are that many tokens
    group_of: np.ndarray  # int32[L, K]
    column_of: np.ndarray  # int32[L, K]
    group_budgets: np.ndarray  # f32[M], the largest budget in each group
    group_ppm: np.ndarray  # int32[M], group_budgets in parts per million
    scaled: BudgetProfile  # what `budgets_at` scales
    max_retention: float  # the largest retention that a row may have of its own; 0: none
    most_ppm: np.ndarray  # int32[M], the largest budgets that a row may have
    rings: Rings | None = None  # their groups follow the M compressed ones in a row of the cache's table
    division: Division = "equal"  # of a decode step's work among the CTAs of a GPU: see `splits`
    identity: str = ""  # of what lies where in a cache: of a plan that is built alike, and of one device's share, the same

    @classmethod
    def build(
        cls,
        profile: BudgetProfile,
        heads_per_page: int | None = None,
        page_size: int = 16,
        cluster: Cluster = "layer",
        *,
        sinks: int = 4,
        window: int = 32,
        min_entries: int | None = None,
        sliding: SlidingLayers | None = None,
        scaled: BudgetProfile | None = None,
        max_retention: float = 0.0,
        division: Division = "equal",
    ) -> "CachePlan":
        """Cluster the heads into groups of `heads_per_page` by budget (paper, section 4.2.2); None: `heads_per_page_for`.

        `cluster`: "layer" sorts the heads of each layer, "model" all heads of all layers together, "adjacent" takes
        them as they come. Where the heads do not divide evenly, the group of the smallest budgets (or the last one,
        for "adjacent") has empty columns. `min_entries` is `sinks + window` if None: with fewer, a group that is still
        as small as the window at the end of a chunk loses the first positions for good. `sliding`: the model's
        sliding-window layers (`SlidingLayers.of(config)`), for which the profile has no rows. `max_retention` > 0: rows
        may have budgets of their own up to there (`budgets_at`), made from `scaled`, by default the profile itself; heads
        with equal budgets are put together by that. `division`: of the decode kernel's work, into "equal" shares of all
        entries or parts of each head, by the paper's "split_map" or "uniform". Raises ValueError on values out of range.
        """
        for name, what in (("profile", profile), ("scaled", scaled or profile)):
            if not isinstance(what, BudgetProfile):
                raise TypeError(
                    f"{name} must be a BudgetProfile, got {type(what).__name__}: write BudgetProfile.load(file), or "
                    "BudgetProfile(budgets=array, retention=its mean)"
                )
        for name, choice, known in (("cluster", cluster, CLUSTERS), ("division", division, DIVISIONS)):
            if choice not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {choice!r}")
        heads_per_page = heads_per_page_for(profile, cluster) if heads_per_page is None else heads_per_page
        heads_per_page, page_size, window = at_least(
            1, heads_per_page=heads_per_page, page_size=page_size, window=window
        )
        (sinks,) = at_least(0, sinks=sinks)
        (min_entries,) = at_least(0, min_entries=sinks + window if min_entries is None else min_entries)
        if not isinstance(sliding, SlidingLayers | None):
            raise TypeError(
                f"sliding must be SlidingLayers, got {type(sliding).__name__}: write SlidingLayers.of(config)"
            )
        if not 0.0 <= max_retention <= 1.0:
            raise ValueError(f"max_retention is a kept fraction, 0 for none; got {max_retention}")
        budgets = np.asarray(profile.budgets, np.float32)
        scaled = scaled or profile
        if scaled.budgets.shape != budgets.shape:
            raise ValueError(
                f"the profile has budgets {budgets.shape}, the one to be scaled {scaled.budgets.shape}"
            )
        group_of, column_of = clusters(budgets, scaled.budgets, cluster, heads_per_page)
        group_budgets = largest(budgets, group_of)
        group_ppm = _parts_per_million(group_budgets)
        plan = cls(
            profile=profile,
            heads_per_page=heads_per_page,
            page_size=page_size,
            cluster=cluster,
            sinks=int(sinks),
            window=int(window),
            min_entries=int(min_entries),
            group_of=group_of,
            column_of=column_of,
            group_budgets=group_budgets,
            group_ppm=group_ppm,
            scaled=scaled,
            max_retention=float(max_retention),
            most_ppm=group_ppm,
            rings=Rings.build(sliding, budgets.shape[1], heads_per_page, page_size, int(window))
            if sliding
            else None,
            division=division,
        )
        if max_retention:
            plan = replace(plan, most_ppm=np.maximum(group_ppm, plan._budgets_at(plan.max_retention)))
        return replace(plan, identity=plan._identity())

    def _identity(self) -> str:
        law = self.heads_per_page, self.page_size, self.sinks, self.window, self.min_entries, self.rings
        arrays = self.group_of, self.column_of, self.group_ppm, self.most_ppm
        return hashlib.sha256(b"".join([repr(law).encode(), *(x.tobytes() for x in arrays)])).hexdigest()

    def budgets_at(self, retention: float | None) -> np.ndarray:
        """int32[M]: the groups' budgets of a row with a retention of its own, in parts per million; None: the plan's.

        The heads rank as in `scaled`, and each layer's mean is `retention` (`BudgetProfile.normalized`), before heads are
        grouped. Raises ValueError outside of (0, max_retention].
        """
        if retention is None:
            return self.group_ppm
        if not self.max_retention:
            raise ValueError("rows have no retention of their own: build the plan with max_retention=")
        if not 0.0 < retention <= self.max_retention:
            raise ValueError(f"a retention of {retention} is out of range: at most {self.max_retention}")
        budgets = np.minimum(self._budgets_at(retention), self.most_ppm)
        return self.group_ppm if np.array_equal(budgets, self.group_ppm) else budgets

    def _budgets_at(self, retention: float) -> np.ndarray:
        heads = replace(self.scaled, retention=retention).normalized().budgets
        return _parts_per_million(largest(heads, self.group_of))

    @property
    def num_groups(self) -> int:
        """M, over all compressed layers."""
        return len(self.group_ppm)

    @property
    def num_page_lists(self) -> int:
        """Groups with pages of their own: the M compressed ones, then those of the rings."""
        return self.num_groups + (self.rings.num_groups if self.rings else 0)

    @property
    def head_at(self) -> np.ndarray:
        """int32[M, Hp]: the head (layer * K + KV head) of each column, -1 where a column is empty."""
        table = np.full((self.num_groups, self.heads_per_page), -1, np.int32)
        table[self.group_of.reshape(-1), self.column_of.reshape(-1)] = np.arange(self.group_of.size)
        return table

    def lengths(self, tokens: Any, budgets: Any = None) -> Any:
        """Entries of each group after `tokens` prompt tokens: int32[..., M] for tokens int32[...].

        `budgets` int32[..., M]: those of the rows in question (`budgets_at`, `Cache.budgets`), by default the plan's.
        A pure function of the count: a JAX array (traced or not) gives JAX, an int, a list or NumPy array gives NumPy.
        Raises TypeError on counts that are no whole numbers, ValueError on those out of range that are not JAX's.
        """
        ppm = self.group_ppm if budgets is None else budgets
        n = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
        check_whole("tokens", n)
        if isinstance(n, jax.Array):
            return kept_entries(ppm, n[..., None], self.min_entries)
        if n.size and (n.min() < 0 or n.max() > MAX_TOKENS):
            raise ValueError(f"token count must lie between 0 and {MAX_TOKENS}; got {tokens}")
        return kept_entries(ppm, n[..., None].astype(np.int32), self.min_entries)

    def locked(self, tokens: Any, budgets: Any = None) -> Any:
        """Entries of each group that are never decided on again: int32[..., M]; the rest is the trailing window."""
        lengths = self.lengths(tokens, budgets)
        return (lengths - self.window) * (lengths > self.window)

    def group_pages(self, tokens: Any, tail: Any = 0, budgets: Any = None) -> Any:
        """Pages of each page list for `tokens` under the plan's law and `tail` more kept whole: int32[...].

        `tokens` and `tail` are scalars; a tail may be negative, after a rollback.
        """
        compressed = -(-(self.lengths(tokens, budgets) + tail) // self.page_size)
        if not self.rings:
            return compressed
        xp: Any = np if isinstance(compressed, np.ndarray) else jnp
        ring = xp.full(self.rings.num_groups, self.rings.group_pages(tokens + tail), compressed.dtype)
        return xp.concatenate([compressed, ring])

    def shared_group_pages(self, tokens: Any, budgets: Any = None) -> Any:
        """Of those, what a fork shares instead of copying: the full locked ones, int32[...]. Rings are copied."""
        full = self.locked(tokens, budgets) // self.page_size
        if not self.rings:
            return full
        xp: Any = np if isinstance(full, np.ndarray) else jnp
        return xp.concatenate([full, xp.zeros(self.rings.num_groups, full.dtype)])

    def pages(self, tokens: int, tail: int = 0, budgets: np.ndarray | None = None) -> int:
        """Pages that a request owns after `tokens` prompt tokens, with room for `tail` generated ones kept whole.

        `budgets` of `budgets_at`, here and below: of a row with a retention of its own.
        """
        return int(self.group_pages(tokens, tail, budgets).sum())

    def shared_pages(self, tokens: int, budgets: np.ndarray | None = None) -> int:
        """Pages of a request of `tokens` tokens that a fork shares instead of copying: the full locked ones."""
        return int(self.shared_group_pages(tokens, budgets).sum())

    def entries(self, tokens: int | np.ndarray, budgets: np.ndarray | None = None) -> int:
        """Head entries in use (over all heads of compressed layers) after `tokens` tokens, group effect included.

        Of several rows, of `tokens` int[...] each, all together.
        """
        heads = np.bincount(self.group_of.reshape(-1), minlength=self.num_groups)
        return int((self.lengths(tokens, budgets).astype(np.int64) * heads).sum())

    def retention(self, tokens: int = 1 << 16) -> float:
        """Kept fraction really reached at `tokens` tokens, in entries: after Eq. 5, grouping and rounding; of none all."""
        return self.entries(tokens) / (tokens * self.group_of.size) if tokens else 1.0

    def split_map(self, num_ctas: int) -> np.ndarray:
        """int32[L, K]: CTAs for each head of a request that has `num_ctas` in every layer (paper, Algorithm 1).

        Heads count with what they hold, their group's budget: those of a group get the same number, whichever layers and
        columns they are from.
        """
        return split_map(self.group_budgets[self.group_of], num_ctas, 1)

    def splits(self, num_ctas: int, *, rings: bool = False) -> np.ndarray | int | None:
        """Parts that a decode step makes of each head of a request that has `num_ctas` CTAs in every layer.

        int32[L, K], or one number for all heads, or None: no parts of heads but equal shares of all entries. `rings`: of
        sliding-window layers, whose heads hold equally many entries.
        """
        if self.division == "equal":
            return None
        if self.division == "uniform" or rings:
            return max(1, round(num_ctas / self.group_of.shape[1]))
        return self.split_map(num_ctas)

    def page_shape(self, head_dim: int, dtype: Any) -> tuple[int, ...]:
        """(2, Hp, P, D) of a page in a pool of `dtype`; with uint8 more rows, for the scales (`byte_pages`)."""
        return 2, self.heads_per_page, byte_pages.page_rows(dtype, self.page_size, head_dim), head_dim

    def page_bytes(self, head_dim: int, dtype: Any) -> int:
        """Bytes of one page in a pool of `dtype`."""
        return math.prod(self.page_shape(head_dim, dtype)) * np.dtype(dtype).itemsize


def _parts_per_million(budgets: np.ndarray) -> np.ndarray:
    return np.rint(budgets.astype(np.float64) * PPM).clip(0, PPM).astype(np.int32)


def split_map(budgets: Any, num_ctas: int, heads_per_page: int) -> np.ndarray:
    """CTAs for each head group of each layer, fixed ahead of time (paper, Algorithm 1).

    `budgets` f32[L, K] (or [K]), heads as given, in groups of `heads_per_page`; returns int32[L, K // Hp] (or
    [K // Hp]). Each layer's `num_ctas` are dealt in proportion to the groups' summed budgets, rounded to the nearest, at
    least one each; a layer whose budgets are all zero gets ones.
    """
    b = np.asarray(budgets, np.float64)
    if b.ndim not in (1, 2) or heads_per_page < 1 or b.shape[-1] % heads_per_page:
        raise ValueError(
            f"budgets must be [L, K] with K a multiple of heads_per_page={heads_per_page}; got {b.shape}"
        )
    if num_ctas < 1 or not np.isfinite(b).all() or (b < 0).any():
        raise ValueError("num_ctas must be positive, and budgets finite and not negative")
    load = b.reshape(*b.shape[:-1], -1, heads_per_page).sum(-1)
    total = load.sum(-1, keepdims=True)
    share = np.divide(load, total, out=np.zeros_like(load), where=total > 0)
    # The small addend makes exact halves round up whatever the scale of the budgets.
    return np.maximum(1, np.floor(share * num_ctas + 0.5 + 1e-9)).astype(np.int32)
