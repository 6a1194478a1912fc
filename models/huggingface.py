"""Hugging Face directories and hub names: config.json, safetensors (one file or sharded), tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerFast

from models.config import (
    ModelConfig,
    UnsupportedModelError,
    config_from_huggingface,
    end_token_ids,
)
from models.overrides import overridden
from models.quantisation import Quantisation, read_quantisation
from models.safetensors_bytes import EIGHT_BIT_FLOATS, FLOATS, INTEGERS, Bytes
from models.tokenizer import Tokenizer

_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OF_SAMPLING = ("top_p", "top_k", "min_p")  # which mean nothing where the likeliest token is taken
_IGNORED = ["original/*", "consolidated*", "onnx/*", "*.index.json.lock"]


_TEKKEN = 131_072  # tokens of Mistral's tokenizer since Nemo


class ModelNotFoundError(ValueError):
    """No such model, or it could not be fetched; the message says what to do."""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise UnsupportedModelError(f"cannot read {path}: expected a JSON object")
    return found


class _Stored(NamedTuple):
    """Where a tensor is."""

    file: Any  # opened by safetensors
    raw: Bytes  # the same one
    dtype: str  # by safetensors' name


class HuggingFaceDirectory:
    """A model directory; a `TensorSource` with Hugging Face names. `overrides` replace fields of its config.json."""

    def __init__(
        self, path: str | Path, name: str | None = None, overrides: Mapping[str, Any] | None = None
    ) -> None:
        self.path, self._overrides = Path(path), overrides or {}
        if not (self.path / "config.json").is_file():
            raise ModelNotFoundError(f"{path} has no config.json: not a Hugging Face model directory")
        self.config = self._config(name or self.path.resolve().name)
        self._stored: dict[str, _Stored] = {}  # by tensor name
        self.shapes: dict[str, tuple[int, ...]] = {}

    def _generation_config(self) -> dict[str, Any]:
        path = self.path / "generation_config.json"
        return _read_json(path) if path.is_file() else {}

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """What generation_config.json says of SAMPLING_DEFAULTS, unchecked; its `do_sample` false is a temperature of 0."""
        given = self._generation_config()
        if given.get("do_sample") is False:  # whatever stands beside it, as transformers has it
            given |= {"temperature": 0.0} | dict.fromkeys(_OF_SAMPLING)
        return {key: given[key] for key in SAMPLING_DEFAULTS if given.get(key) is not None}

    def _config(self, name: str) -> ModelConfig:
        contents = overridden(_read_json(self.path / "config.json"), self._overrides)
        config = config_from_huggingface(contents, name)
        self._model_type = contents.get("model_type")
        self.quantisation: Quantisation | None = read_quantisation(contents.get("quantization_config"))[0]
        said = end_token_ids(self._generation_config(), f"generation_config.json of {name}")
        ids = {*config.eos_token_ids, *said}
        return config.replace(eos_token_ids=tuple(sorted(ids)))

    def open(self) -> None:
        """Opens all safetensors files and lists their tensors; no weights are read yet."""
        index = self.path / "model.safetensors.index.json"
        whole = self.path / "model.safetensors"
        if whole.is_file():  # alone, whatever else lies there: as transformers does
            files = [whole.name]
        elif index.is_file():
            try:
                files = sorted({str(name) for name in _read_json(index)["weight_map"].values()})
            except (KeyError, AttributeError, TypeError) as error:
                raise UnsupportedModelError(
                    f"{index} does not say in which file each tensor is ('weight_map'): fetch it again"
                ) from error
        else:
            files = sorted(
                p.name for p in self.path.glob("*.safetensors") if not p.name.startswith("consolidated")
            )
        if not files:
            raise ModelNotFoundError(
                f"{self.path} has no .safetensors files (PyTorch .bin files are not read: convert them)"
            )
        missing = [name for name in files if not (self.path / name).is_file()]
        if missing:
            raise ModelNotFoundError(
                f"{self.path} lacks weight files that its index lists: {', '.join(missing)}. Fetch them"
            )
        for name in files:
            try:
                file = safe_open(self.path / name, framework="np")
            except SafetensorError as error:
                raise UnsupportedModelError(
                    f"cannot read {self.path / name} ({error}): fetch it again (in a clone by git, with `git lfs pull`)"
                ) from error
            raw = Bytes(self.path / name)
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                if key in self._stored:
                    raise UnsupportedModelError(
                        f"{self.path} has {key} in two files, {name} is one of them: leave only the model's own there"
                    )
                found = file.get_slice(key)
                self.shapes[key] = tuple(found.get_shape())
                self._stored[key] = _Stored(file, raw, found.get_dtype())

    def read(self, name: str) -> np.ndarray:
        """One tensor in the dtype in which it is stored (bfloat16 and 8-bit floats as those of ml_dtypes).

        Raises UnsupportedModelError for a dtype that stands for no numbers of a weight.
        """
        stored = self._stored[name]
        expected = ("U8",) if name.endswith(("_blocks", "_scales")) else FLOATS
        if self.quantisation is not None:
            expected = (*FLOATS, *INTEGERS)
        if stored.dtype not in expected:
            raise UnsupportedModelError(
                f"cannot read {stored.raw.path}: tensor {name} is stored as {stored.dtype}, expected {', '.join(expected)}"
            )
        return stored.raw.read(name) if stored.dtype in EIGHT_BIT_FLOATS else stored.file.get_tensor(name)

    def in_mxfp4(self, name: str) -> bool:
        """Never of one tensor: blocks and scales are two here."""
        return False

    def in_fp8(self, name: str) -> None:
        """Never: `models.quantised` reads these."""

    def tokenizer(self) -> Tokenizer:
        """The fast tokenizer of the directory, exactly as its tokenizer.json says.

        Raises UnsupportedModelError for none, a damaged one, or one of another kind than `Tokenizer` reads.
        """
        if not (self.path / "tokenizer.json").is_file():
            raise UnsupportedModelError(
                f"{self.path} has no tokenizer.json: only fast tokenizers are supported"
            )
        # Mistral's files with this vocabulary were converted with the pattern of Llama 3; transformers mends them if asked.
        tekken = self._model_type == "mistral" and self.config.vocab_size == _TEKKEN
        try:
            fast = PreTrainedTokenizerFast.from_pretrained(
                self.path, clean_up_tokenization_spaces=False, fix_mistral_regex=tekken
            )
        except Exception as error:  # whatever a damaged file makes of the library's code, which names none
            raise UnsupportedModelError(
                f"the tokenizer in {self.path} cannot be read ({type(error).__name__}: {error}): fetch tokenizer.json, "
                "tokenizer_config.json and special_tokens_map.json again"
            ) from error
        try:
            return Tokenizer(fast, self.config.eos_token_ids)
        except ValueError as error:
            raise UnsupportedModelError(f"cannot load {self.path / 'tokenizer.json'}: {error}") from error


def download(repo: str, *, progress: bool = True, overrides: Mapping[str, Any] | None = None) -> Path:
    """Fetches a hub repository (progress bars by huggingface_hub) into its cache and returns the directory.

    config.json comes first, so that an unsupported model fails before its weights are downloaded.
    Raises ModelNotFoundError, UnsupportedModelError.
    """
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError
    from huggingface_hub.utils import disable_progress_bars

    if not progress:
        disable_progress_bars()
    try:
        config = huggingface_hub.hf_hub_download(repo, "config.json")
        config_from_huggingface(overridden(_read_json(Path(config)), overrides or {}), repo)
        return Path(
            huggingface_hub.snapshot_download(repo, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED)
        )
    except UnsupportedModelError:
        raise
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"cannot fetch {repo!r} from the Hugging Face hub: its makers give access to those who accept their terms. "
            f"Accept them on https://huggingface.co/{repo}, then `hf auth login` (or set HF_TOKEN); or give a directory or "
            ".gguf file that you have"
        ) from error
    except Exception as error:  # hub errors share no base class, and offline ones come from several libraries
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ModelNotFoundError(
            f"cannot fetch {repo!r} from the Hugging Face hub: {reason}. Check the name and the network; a gated "
            "model needs `hf auth login`; a downloaded one can be given as a directory"
        ) from error
