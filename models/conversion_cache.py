"""Converted models on disk: an Orbax checkpoint of the parameters, the tokenizer and the configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, SingleDeviceSharding
from jax.typing import DTypeLike
from transformers import PreTrainedTokenizerFast

from models.config import ModelConfig, RopeScaling
from models.params import Params, abstract_params
from models.sharding import ShardingError, param_shardings, rules_for
from models.tokenizer import Tokenizer

FORMAT_VERSION = 5  # increase when the parameter tree or the conversion changes

try:
    import fcntl
except ImportError:  # there are systems without
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`$TANGRAM_CACHE`, or ~/.cache/tangram-jax. Raises ValueError where a home directory is meant that nobody knows."""
    given = os.environ.get("TANGRAM_CACHE") or "~/.cache/tangram-jax"
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"the cache {given} is nowhere: {error} Set TANGRAM_CACHE to a directory, without ~"
        ) from error


def entry_path(identity: str, name: str, dtype: DTypeLike) -> Path:
    """Where a conversion lives. `identity` says which file was converted (hash, or path, size and time)."""
    dtype_name = jax.numpy.dtype(dtype).name
    digest = hashlib.sha256(f"{identity}|{dtype_name}|{FORMAT_VERSION}".encode()).hexdigest()[:16]
    return cache_dir() / "converted" / f"{name}-{dtype_name}-{digest}"


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    # Weights do not compress; without compression restoring runs at the speed of the disk.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False, use_zarr3=True))


@contextlib.contextmanager
def _quiet_absl() -> Any:
    """Orbax warns through absl about details of its own; errors still come as exceptions."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def staging(path: Path) -> Iterator[Path]:
    """A directory beside `path`, locked and gone at the end. Those of processes that were killed go first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(".*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # some file systems have no locks
                stack.enter_context(_locked(folder))
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the lock of a directory, which the end of the process lets go. Raises OSError if another has it, or none can."""
    if fcntl is None:
        raise OSError("this system has no locks of files")
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def save(path: Path, config: ModelConfig, params: Params, tokenizer: Tokenizer) -> None:
    """Writes an entry; it appears at once under its name or, when interrupted, not at all.

    Raises OSError where there is no room, and whatever Orbax makes of a disk that fills up meanwhile.
    """
    with staging(path) as folder:
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        if (free := shutil.disk_usage(folder).free) < size:
            raise OSError(errno.ENOSPC, f"it takes {size / 2**20:,.0f} MiB, {free / 2**20:,.0f} are free")
        with _quiet_absl(), contextlib.closing(_checkpointer()) as checkpointer:
            checkpointer.save(folder / "params", params)
        tokenizer.save(str(folder / "tokenizer"))
        (folder / "tokenizer_files.json").write_text(json.dumps(_sizes(folder / "tokenizer")))
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1))
        try:
            folder.rename(path)
        except OSError:  # another process was first
            if not path.is_dir():
                raise


def _sizes(directory: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(directory.iterdir())}


def load(
    path: Path, dtype: DTypeLike, mesh: Mesh | None = None
) -> tuple[ModelConfig, Params, Tokenizer] | None:
    """Reads an entry, onto a mesh or the first device.

    None when there is none, or it is unreadable: then it is deleted, with a warning in the log.
    Raises ShardingError, and MemoryError or JaxRuntimeError where there is no room for it.
    """
    if not path.is_dir():
        return None
    try:
        return _load(path, dtype, mesh)
    except (ShardingError, MemoryError, JaxRuntimeError):
        raise
    except Exception as error:  # whatever a half-deleted or foreign entry raises, converting again repairs it
        _log.warning("converting again: the cached model %s is unreadable (%s)", path, error)
        shutil.rmtree(path, ignore_errors=True)
        return None


def _load(path: Path, dtype: DTypeLike, mesh: Mesh | None) -> tuple[ModelConfig, Params, Tokenizer]:
    import orbax.checkpoint as ocp

    # Without its template, say, a tokenizer is read all the same, and is another one.
    if _sizes(path / "tokenizer") != json.loads((path / "tokenizer_files.json").read_text()):
        raise ValueError("the files of its tokenizer are not those that were written")
    fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if fields["rope_scaling"] is not None:
        factors = tuple(fields["rope_scaling"].pop("factors"))
        fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"], factors=factors)
    tuples = {key: tuple(fields.get(key, ())) for key in ("eos_token_ids", "sliding_layers", "dense_layers")}
    config = ModelConfig(**{**fields, **tuples})
    abstract = abstract_params(config, dtype)
    if mesh is None:
        places = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), abstract)
    else:
        places = param_shardings(config, mesh, rules_for(config, mesh.size))
    target = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), abstract, places
    )
    restore_args = ocp.checkpoint_utils.construct_restore_args(target)
    with _quiet_absl(), contextlib.closing(_checkpointer()) as checkpointer:
        params = checkpointer.restore(
            path / "params", args=ocp.args.PyTreeRestore(item=target, restore_args=restore_args)
        )
    fast = PreTrainedTokenizerFast.from_pretrained(path / "tokenizer", clean_up_tokenization_spaces=False)
    return config, params, Tokenizer(fast, config.eos_token_ids)
