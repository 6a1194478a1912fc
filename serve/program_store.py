"""Traced and lowered programs on disk, so that a server that starts again does not trace them anew.

JAX's persistent cache keeps what XLA compiled, but asks for a program's text first, and to trace and lower a step takes
seconds: for a large model on a GPU most of a start. `ProgramStore.keep` wraps a function so that under `jax.jit` its body is
one call of an exported program (`jax.export`), read from a file where there is one. Everything that could change the
program is a part of the file's name.
"""

import contextlib
import hashlib
import importlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from models.config import ModelConfig
from serve.kernels import give_equal_names
from tangram_jax.plan import CachePlan

PACKAGES = ("models", "pallas_kernels", "serve", "tangram_jax")  # whose code the programs come from
MOST_FILES = 256  # those that were not used for longest go
# Targets of custom calls that JAX does not promise to keep from one version to the next: here the version is in the name.
CUSTOM_CALLS = (
    "mosaic_gpu_v2", "mosaic_gpu", "__gpu$xla.gpu.triton", "__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmax",
    "annotate_device_placement",
)  # fmt: skip

log = logging.getLogger("tangram.engine")


def keep_compiled(directory: Path) -> None:
    """Let JAX's persistent cache be there, and hold all that XLA compiles from now on, small programs too.

    Where there can be none, a line of the log says so, and programs are compiled at every start. What is in a directory that
    cannot be written is read all the same.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("Compiled programs cannot be kept, so that every start compiles them: %s", error)
        return
    if os.access(directory, os.W_OK):
        _drop_cut_short(directory)
    else:
        log.warning(
            "Compiled programs cannot be kept, so that every start compiles those that are not there: %s cannot be written",
            directory,
        )
        # JAX's, of each program.
        warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def compiled_are_kept() -> bool:
    """Whether the next process finds what this one compiles."""
    directory = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    return bool(directory) and os.access(directory, os.W_OK)


def _drop_cut_short(directory: Path) -> None:
    """Delete what a killed process or a full disk left half written: JAX would compile that at every start, and never
    write it again. Entries that were there the last time, when this Python looked, are whole."""
    try:
        from jax._src.compilation_cache import decompress_executable  # no part of what JAX promises
    except ImportError:
        return
    looked = directory / f".looked-through-by-{sys.version_info.major}.{sys.version_info.minor}"
    began = time.time()
    with contextlib.suppress(OSError):
        last = looked.stat().st_mtime if looked.exists() else 0.0
        for path in directory.glob("*-cache"):
            if path.stat().st_mtime < last:
                continue
            try:
                decompress_executable(path.read_bytes())
            except OSError:
                raise
            except Exception as error:  # of one library or another
                log.debug("Compiled program %s is dropped: %s", path, error)
                path.unlink(missing_ok=True)
        looked.touch()
        os.utime(looked, (began, began))


class ProgramStore:
    """Programs of one model, plan and scorer on one kind of device."""

    def __init__(self, directory: Path, config: ModelConfig, plan: CachePlan, *parts: Any) -> None:
        """`parts`: what else the functions to be kept depend on, told apart by `repr`."""
        self._directory = directory
        self._identity = _digest(_platform(), _sources(), repr(config), _contents(plan), *map(repr, parts))
        self.found = self.made = 0
        self._told = False  # that they cannot be written
        if jax.default_backend() == "gpu":
            # It says where the library is that compiled kernels call; otherwise only lowering would import it.
            importlib.import_module("jax.experimental.mosaic.gpu")
            give_equal_names()

    @property
    def writable(self) -> bool:
        """Whether files may be made there, as far as rights go."""
        there = next((p for p in (self._directory, *self._directory.parents) if p.exists()), None)
        return there is not None and there.is_dir() and os.access(there, os.W_OK)

    def keep(
        self, name: str, function: Callable[..., Any], out_like: Callable[..., Any]
    ) -> Callable[..., Any]:
        """A function for `jax.jit` that does what `function` does.

        `name` tells it from the store's others. Keyword arguments must be static. `out_like(*args, **static)` has the tree
        structure of the result.
        """

        def kept(*args: Any, **static: Any) -> Any:
            leaves, tree = jax.tree.flatten(args)
            shapes = _shapes(leaves)
            path = self.path(name, tree, shapes, static)
            exported = self._read(path)
            if exported is None:

                def flat(*leaves: Any) -> list[Any]:
                    return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves), **static))

                try:
                    checks = [export.DisabledSafetyCheck.custom_call(target) for target in CUSTOM_CALLS]
                    exported = export.export(jax.jit(flat), disabled_checks=checks)(*shapes)
                    text = exported.serialize()
                except Exception as error:  # a start without the store is only slower
                    log.debug("Program %s cannot be kept: %s", name, error)
                    return function(*args, **static)
                self._write(path, text)
            return jax.tree.unflatten(jax.tree.structure(out_like(*args, **static)), exported.call(*leaves))

        return kept

    def path_for(self, name: str, args: tuple[Any, ...], static: dict[str, Any]) -> Path:
        """The file of the program that these arguments, or any of their shapes, are for."""
        leaves, tree = jax.tree.flatten(args)
        return self.path(name, tree, _shapes(leaves), static)

    def path(self, name: str, tree: Any, shapes: list[jax.ShapeDtypeStruct], static: dict[str, Any]) -> Path:
        """The file of one program: of arguments of this tree structure and these shapes."""
        return self._directory / _digest(self._identity, name, tree, shapes, sorted(static.items()))

    def _read(self, path: Path) -> export.Exported | None:
        try:
            content = path.read_bytes()
            if hashlib.sha256(content[32:]).digest() != content[:32]:
                raise ValueError("its check sum is wrong")
            exported = export.deserialize(bytearray(content[32:]))
            os.utime(path)
        except FileNotFoundError:
            return None
        except Exception as error:  # cut short, or of a format that this version does not read
            log.debug("Program %s cannot be read and is made anew: %s", path, error)
            return None
        self.found += 1
        return exported

    def _write(self, path: Path, text: bytes | bytearray) -> None:
        """At once or not at all, for whoever reads at the same time. Where it cannot be written, the next start is slow."""
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            try:
                fresh.write_bytes(hashlib.sha256(text).digest() + text)
                fresh.replace(path)
            finally:
                fresh.unlink(missing_ok=True)
        except OSError as error:
            if not self._told:
                log.warning(
                    "Programs cannot be kept in %s, so that every start traces them: %s",
                    self._directory, error.strerror or error,
                )  # fmt: skip
            self._told = True
            return
        self.made += 1
        self._drop_old()

    def _drop_old(self) -> None:
        """With those that a killed process left under the names of fresh ones."""
        with contextlib.suppress(OSError):  # gone meanwhile: another process drops and renames, too
            old = sorted(self._directory.glob("*"), key=lambda p: p.stat().st_mtime, reverse=True)
            for path in old[MOST_FILES:]:
                path.unlink(missing_ok=True)


def _shapes(leaves: list[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]


def _digest(*parts: Any) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def _platform() -> str:
    device = jax.local_devices()[0]
    version = getattr(device.client, "platform_version", "")
    settings = sorted((key, repr(value)) for key, value in jax.config.values.items())
    return repr(
        (jax.__version__, jax.lib.__version__, device.platform, device.device_kind, version, settings)
    )


def _sources() -> str:
    """The text of all our code that the programs are traced from."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _contents(plan: CachePlan) -> str:
    """What of a plan a program can depend on: its layout, not how it was measured."""
    parts = []
    for name, value in vars(plan).items():
        if isinstance(value, np.ndarray):
            value = (value.dtype, value.shape, value.tobytes())
        parts.append((name, None if name in ("profile", "scaled") else value))
    return repr(parts)
