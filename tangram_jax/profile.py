"""BudgetProfile: how much of its KV cache each attention head keeps, measured once per model, offline.

A profile is host data (NumPy): it decides array shapes through `CachePlan`, so it never becomes a traced
value. It does not know how positions are scored or how heads are grouped into pages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BudgetProfile:
    """Calibrated kept fraction of every (layer, KV head). Arrays are read-only; profiles compare by content.

    Attributes:
      budgets: f32[L, K] in [0, 1], the kept fraction of each head.
      retention: the kept fraction asked for over the whole model; `mean_budget` says what the budgets ask.
      alpha: how many standard deviations of margin the budgets include (0 when there is no margin).
      mean, std: f32[L, K] over calibration samples, std with ddof=0 (budgets and zeros if unknown).
      ratios: f32[samples, L, K], the per-sample kept shares that mean and std came from, if known.
      provenance: JSON-able description of where the numbers come from (model, method, samples, versions ...).
    """

    budgets: np.ndarray
    retention: float
    alpha: float = 0.0
    mean: np.ndarray = None  # type: ignore[assignment]  # filled in by __post_init__
    std: np.ndarray = None  # type: ignore[assignment]
    ratios: np.ndarray | None = None
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        budgets = _unit_array("budgets", self.budgets, ndim=2)
        mean = budgets if self.mean is None else _unit_array("mean", self.mean, ndim=2)
        std = np.zeros_like(budgets) if self.std is None else _unit_array("std", self.std, ndim=2)
        for name, array in (("mean", mean), ("std", std)):
            if array.shape != budgets.shape:
                raise ValueError(
                    f"{name} must have the shape of budgets {budgets.shape}, found {array.shape}"
                )
        ratios = None if self.ratios is None else _unit_array("ratios", self.ratios, ndim=3)
        if ratios is not None and ratios.shape[1:] != budgets.shape:
            raise ValueError(f"ratios must be [samples, {budgets.shape}], found {ratios.shape}")
        for name, value in (("budgets", budgets), ("mean", mean), ("std", std), ("ratios", ratios)):
            object.__setattr__(self, name, _frozen(value))
        object.__setattr__(self, "retention", _retention(self.retention))
        object.__setattr__(self, "alpha", _alpha(self.alpha))
        object.__setattr__(self, "provenance", _plain_json(self.provenance))

    # -- construction

    @classmethod
    def from_ratios(
        cls,
        ratios: ArrayLike,
        retention: float,
        alpha: float = 2.0,
        provenance: Mapping[str, Any] | None = None,
    ) -> BudgetProfile:
        """Budgets from measured kept shares: B = min(1, mean + alpha * std) (paper, Eq. 5; std with ddof=0).

        Args:
          ratios: f32[samples, L, K], the share of its entries that each head kept on each sample, in [0, 1].
          retention: the kept fraction that the shares were measured at, in (0, 1].
          alpha: margin in standard deviations, >= 0.
          provenance: stored with the profile, with the number of these as `samples`.

        Raises:
          ValueError: for shapes, values or numbers outside of these ranges.
        """
        shares = _unit_array("ratios", ratios, ndim=3)
        margin = _alpha(alpha)
        wide = shares.astype(np.float64)
        mean, std = wide.mean(axis=0), wide.std(axis=0, ddof=0)
        return cls(
            budgets=np.minimum(1.0, mean + margin * std),
            retention=retention,
            alpha=margin,
            mean=mean,
            std=std,
            ratios=shares,
            provenance={**(provenance or {}), "samples": shares.shape[0]},
        )

    @classmethod
    def uniform(cls, num_layers: int, num_kv_heads: int, retention: float) -> BudgetProfile:
        """The baseline without calibration: every head keeps `retention` (1.0 is full KV)."""
        if num_layers < 1 or num_kv_heads < 1:
            raise ValueError(
                f"need at least one layer and one KV head, found {num_layers} and {num_kv_heads}"
            )
        budgets = np.full((num_layers, num_kv_heads), _retention(retention), np.float64)
        return cls(budgets=budgets, retention=retention, provenance={"method": "uniform"})

    def normalized(self) -> BudgetProfile:
        """Same ranking of heads, with the mean budget of each layer scaled to `retention`, capped at 1.

        What the cap cuts off goes to the other heads of the layer in proportion to their budgets, so that
        each layer's mean is `retention` whatever the skew. A layer of zeros becomes uniform.
        """
        rows = [_scale_to_mean(row, self.retention) for row in self.budgets.astype(np.float64)]
        provenance = {**self.provenance, "normalized": True}
        return dataclasses.replace(self, budgets=np.stack(rows), provenance=provenance)

    # -- what it holds

    @property
    def num_layers(self) -> int:
        return self.budgets.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.budgets.shape[1]

    @property
    def mean_budget(self) -> float:
        """Kept fraction that the budgets ask for over all heads, in entries, before heads are grouped."""
        return float(self.budgets.mean(dtype=np.float64))

    @property
    def digest(self) -> str:
        """Hex digest of the budgets alone (for the keys of stored prefixes): equal digests, equal plans."""
        data = np.ascontiguousarray(self.budgets).astype("<f4").tobytes()
        return hashlib.sha256(repr(self.budgets.shape).encode() + data).hexdigest()[:16]

    def _content(self) -> tuple[Any, ...]:
        arrays = tuple(None if a is None else a.tobytes() for a in (self.mean, self.std, self.ratios))
        return (self.digest, self.retention, self.alpha, *arrays, json.dumps(self.provenance, sort_keys=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BudgetProfile) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash((self.digest, self.retention, self.alpha))

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():  # neither a pickle nor a copy knows that an array was read-only
            object.__setattr__(self, name, _frozen(value) if isinstance(value, np.ndarray) else value)

    # -- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one .npz with budgets, statistics and provenance. The suffix is not added for you.

        Raises OSError where that cannot be done, or what is at the path is no file.
        """
        arrays = {"budgets": self.budgets, "mean": self.mean, "std": self.std}
        if self.ratios is not None:
            arrays["ratios"] = self.ratios
        header = {
            "format": FORMAT_VERSION,
            "retention": self.retention,
            "alpha": self.alpha,
            "provenance": dict(self.provenance),
        }
        header["digest"] = _file_digest(header, arrays)
        with contextlib.suppress(FileNotFoundError):
            os.stat(path)  # a link to itself is an error here, and no two versions of Python resolve it alike
        target = Path(path).resolve()  # of a link the file that it leads to
        if target.exists() and not target.is_file():
            raise OSError(f"{path} is no file, and would be replaced: give another path")
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside it first: whatever happens while it is written, an earlier profile stays whole.
        # Its name must not be too long where that of the profile is not.
        beside = target.with_name(f"{target.name[:32]}.{secrets.token_hex(4)}.tmp")
        try:
            with open(beside, "wb") as file:  # a file object, because np.savez renames paths without .npz
                np.savez_compressed(file, header=np.array(json.dumps(header, sort_keys=True)), **arrays)  # type: ignore[arg-type]
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BudgetProfile:
        """Reads what `save` wrote.

        Raises:
          FileNotFoundError: if there is no such file.
          ValueError: if the file is not a budget profile, its contents do not fit together, or they are not what was
            saved. Files from before there was a digest are read without that check.
        """
        try:
            with np.load(path, allow_pickle=False) as archive:
                data = {name: archive[name] for name in archive.files}
            header = json.loads(str(data["header"])) if "header" in data else {}
        except FileNotFoundError:
            raise
        # A damaged archive fails in many ways: BadZipFile, zlib.error, TokenError, ...
        except Exception as error:
            # NumPy takes a file that is no archive for a pickle, and says how to load that.
            what = "it is no .npz archive" if "pickle" in str(error) else error
            raise ValueError(
                f"{path} is not a budget profile ({what}): make one with `python -m calibrate`, or by BudgetProfile.save"
            ) from error
        missing = {"header", "budgets", "mean", "std"} - data.keys()
        if missing:
            raise ValueError(f"{path} is not a budget profile: it has no {', '.join(sorted(missing))}")
        found = header.get("format") if isinstance(header, dict) else None
        if found != FORMAT_VERSION:
            raise ValueError(f"{path} has profile format {found}, expected {FORMAT_VERSION}: calibrate again")
        missing = {"retention", "alpha", "provenance"} - header.keys()
        if missing:
            raise ValueError(
                f"{path} is not a budget profile: its header has no {', '.join(sorted(missing))}"
            )
        written = header.pop("digest", None)
        if written is not None and written != _file_digest(header, data):
            raise ValueError(
                f"{path} was damaged or edited after it was saved: calibrate again, or change budgets with "
                "dataclasses.replace(profile, budgets=...).save(...), and say so in its provenance"
            )
        try:
            return cls(
                budgets=data["budgets"],
                retention=header["retention"],
                alpha=header["alpha"],
                mean=data["mean"],
                std=data["std"],
                ratios=data.get("ratios"),
                provenance=header["provenance"],
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} is not a budget profile: {error}") from error


def _file_digest(header: Mapping[str, Any], data: Mapping[str, np.ndarray]) -> str:
    """Hex digest of all that a file holds: the header without this digest, and the arrays."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in ("budgets", "mean", "std", "ratios"):
        if name in data:
            array = np.ascontiguousarray(data[name])
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def _unit_array(name: str, value: ArrayLike, *, ndim: int) -> np.ndarray:
    """f32 copy of `value`, checked: `ndim` axes, none empty, finite, in [0, 1] (1e-6 of slack is clipped)."""
    array = np.asarray(value)
    if array.ndim != ndim or 0 in array.shape:
        axes = {2: "[L, K]", 3: "[samples, L, K]"}[ndim]
        raise ValueError(f"{name} must be a non-empty array {axes}, found shape {array.shape}")
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise ValueError(f"{name} must be numbers, found dtype {array.dtype}")
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has {int((~np.isfinite(array)).sum())} values that are not finite")
    if array.min() < -1e-6 or array.max() > 1 + 1e-6:
        raise ValueError(f"{name} must lie in [0, 1], found {array.min():.6g} to {array.max():.6g}")
    return np.clip(array, 0.0, 1.0)


def _frozen(array: np.ndarray | None) -> np.ndarray | None:
    if array is not None:
        array.setflags(write=False)
    return array


def _retention(value: float) -> float:
    if not 0.0 < float(value) <= 1.0:
        raise ValueError(f"retention is the kept fraction and must lie in (0, 1], found {value}")
    return float(value)


def _alpha(value: float) -> float:
    if not 0.0 <= float(value) < np.inf:
        raise ValueError(f"alpha must be a finite number >= 0, found {value}")
    return float(value)


def _plain_json(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that survives a round trip through JSON, so that saved and loaded profiles are equal."""
    try:
        return json.loads(json.dumps(dict(provenance)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"provenance must be plain JSON: {error}") from error


def _scale_to_mean(row: np.ndarray, target: float) -> np.ndarray:
    """`row` f64[K] scaled so that its mean is `target`; entries that pass 1 stop there."""
    if not row.any():
        return np.full_like(row, target)
    out = np.minimum(row, 1.0)
    capped = np.zeros(row.shape, bool)
    while True:
        rest = target * row.size - capped.sum()
        free = ~capped & (row > 0)
        if not free.any():
            # Only zeros are left and proportion says nothing about them: share the rest evenly.
            zeros = row == 0
            if zeros.any():
                out[zeros] = min(1.0, max(0.0, rest / zeros.sum()))
            return out
        out[free] = row[free] * (rest / row[free].sum())
        over = free & (out >= 1.0)
        if not over.any():
            return out
        out[over] = 1.0
        capped |= over
