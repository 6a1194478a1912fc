"""Calibration: text samples -> kept share of every head -> BudgetProfile. `python -m calibrate` does all of it."""

from __future__ import annotations

from pathlib import Path

from calibrate.measure import calibrate_ratios

__all__ = ["DEFAULT_METHOD", "calibrate_ratios", "shipped_profile"]

# The scorer that `python -m calibrate` compares heads with: what it finds is meant for any scorer in service.
DEFAULT_METHOD = "kv_compress"

PROFILES = Path(__file__).parent / "profiles"


def shipped_profile(model_name: str) -> Path | None:
    """The profile that comes with this package for a model, or None.

    `model_name` is a short name, a path or a hub name: only its last part counts, in lower case
    ("HuggingFaceTB/SmolLM2-135M-Instruct" finds smollm2-135m-instruct.npz).
    """
    name = model_name.rstrip("/").rsplit("/", 1)[-1].lower().removesuffix(".gguf")
    path = PROFILES / f"{name}.npz"
    return path if name and path.is_file() else None
