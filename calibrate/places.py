"""Where a profile and its pictures go: what is wrong there is told before the work, and no profile is lost after it."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from tangram_jax.profile import BudgetProfile

WRITTEN_BYTES = 2**20  # what must fit where files go: more than most profiles, and than the pictures


def conflicts(out: Path, plots: Path | None) -> list[str]:
    """Why the profile's file cannot be `out`, or not that with pictures in `plots`."""
    try:
        flag, path = "--out", out
        target = _resolved(out)
        if plots is not None:
            flag, path = "--plots", plots
            folder = _resolved(plots)
    except OSError as error:
        return [f"{flag}: {path} cannot be written to: {error.strerror}"]
    if target.is_dir():
        return [f"--out must be a file, {out} is a directory"]
    if target.exists() and not target.is_file():
        return [f"--out must be a file, {out} is none and would be replaced"]
    if plots is None:
        return []
    from calibrate.plots import PICTURES  # and with it matplotlib

    if target == folder or target in folder.parents:
        return [f"--plots: {plots} is the file of --out or below it, give another directory"]
    if target.parent == folder and target.name in PICTURES:
        return [f"--out: {out} would be replaced by the picture of that name, give another"]
    return []


def unwritable(out: Path, plots: Path | None) -> list[str]:
    """Why nothing can be written to these places, which have no `conflicts`. Makes their folders."""
    found: list[str] = []
    target = _resolved(out)  # of a link the file that it leads to, as for `BudgetProfile.save`
    for flag, folder in (("--out", target.parent), ("--plots", plots)):
        if folder is None or found:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            found.append(f"{flag}: {folder} cannot be made: {error.strerror}")
            continue
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(WRITTEN_BYTES))
            _resolved(target)  # now that its folder is there: its name may be too long
        except OSError as error:
            found.append(f"{flag}: {error.filename or folder} cannot be written to: {error.strerror}")
    return found


def save(profile: BudgetProfile, out: Path, console: Console) -> Path | None:
    """Where the profile is: in `out`, or else in the directory for temporary files; None where nothing can be written."""
    try:
        profile.save(out)
        return out
    except OSError as error:
        console.print(f"calibrate: {out} cannot be written: {error}", style="red", markup=False)
    try:
        spare = Path(tempfile.mkdtemp(prefix="calibrate-")) / "profile.npz"  # the name may be what is wrong
        profile.save(spare)
    except OSError as error:
        console.print(f"calibrate: the profile is lost: {error}", style="red", markup=False)
        return None
    console.print(
        f"calibrate: the profile is in {spare} instead: move it", style="red", markup=False, soft_wrap=True
    )
    return spare


def _resolved(path: Path) -> Path:
    """Where links lead. Raises OSError for one to itself and a name that is too long."""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.stat(path)
    return path.resolve()
