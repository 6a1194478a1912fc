"""GGUF files of the Llama family: configuration and tensors (dequantised).

Not supported: sliding windows but Gemma's and GPT-OSS's, images.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from models.config import ModelConfig, RopeScaling, UnsupportedModelError
from models.gemma import gemma2_fields, gemma3_fields
from models.gguf_parts import name_of, parts_of
from models.gguf_tokenizer import END_NAMES, read_tokenizer, special_ids
from models.gpt_oss import gpt_oss_fields
from models.layer_types import is_whole
from models.mxfp4 import Mxfp4
from models.rope_scaling import is_positive, yarn_attention_factor
from models.tokenizer import Tokenizer

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "gpt-oss")
# Of those with sliding windows, every so-manieth layer sees every token unless the file says otherwise.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
# Numbers of layers of their models of 27B, whose scale of the scores the files do not have.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}


class GGUFFile:
    """A GGUF file, or all its parts, memory-mapped; a `TensorSource` with GGUF names and Hugging Face layout."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        parts = parts_of(self.path)
        readers = []
        for part in parts:
            try:
                readers.append(GGUFReader(part))
            except (ValueError, IndexError) as error:
                raise UnsupportedModelError(
                    f"{part} is not a readable GGUF file, or not a whole one ({error}): fetch it again"
                ) from error
        self._reader = readers[0]
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        with _named(self.path):
            self._check_parts(len(parts))
            self._architecture = self.field("general.architecture")
            tokens = self._reader.get_field("tokenizer.ggml.tokens")
            self._special_ids = special_ids(self.field, self.path, 0 if tokens is None else len(tokens.data))
            self.config = self._config()

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value, or `default`."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes [out, in] by name (GGUF itself lists dimensions in reverse)."""
        return {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def read(self, name: str) -> np.ndarray | Mxfp4:
        """One tensor, dequantised to float32 unless it has all experts' weights in MXFP4."""
        tensor = self._tensors[name]
        if self.in_mxfp4(name):
            return Mxfp4.from_gguf(tensor.data)
        try:
            x = dequantize(tensor.data, tensor.tensor_type).reshape(self.shapes_of(name))
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} is stored as {tensor.tensor_type.name}, which cannot be dequantised"
            ) from error
        if self._architecture in _GEMMA_27B and name.endswith("norm.weight"):
            return x - np.float32(1.0)  # llama.cpp's converter adds Gemma's offset to the weights
        if self._architecture != "llama":
            return x
        if name.endswith("attn_q.weight"):
            return unpermute_rope(x, self.config.num_heads)
        if name.endswith("attn_k.weight"):
            return unpermute_rope(x, self.config.num_kv_heads)
        return x

    def in_mxfp4(self, name: str) -> bool:
        """Whether it has all experts' weights in MXFP4."""
        mxfp4 = self._tensors[name].tensor_type == GGMLQuantizationType.MXFP4
        return mxfp4 and name.endswith("_exps.weight")

    def in_fp8(self, name: str) -> None:
        """Never: GGUF files have no such weights."""

    def shapes_of(self, name: str) -> tuple[int, ...]:
        """Shape [out, in] of one tensor."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def _check_parts(self, found: int) -> None:
        count = max(int(self.field("split.count", 1)), 1)
        if count != found:
            raise UnsupportedModelError(
                f"{self.path} is one of {count} parts: give them the names that llama.cpp does, "
                f"NAME-00001-of-{count:05d}.gguf"
            )

    def _check_supported(self) -> None:
        """Raises UnsupportedModelError, naming every feature that this package lacks."""
        architecture = self._architecture
        problems = []
        if architecture not in _ARCHITECTURES:
            problems.append(f"architecture {architecture}")
        features: dict[str, str] = {}
        if architecture != "gemma2":
            features |= {key: key for key in ("attn_logit_softcapping", "final_logit_softcapping")}
        if architecture not in _PATTERNS:
            features["attention.sliding_window"] = "sliding window"
        problems += [text for key, text in features.items() if self.field(f"{architecture}.{key}")]
        if self.field(f"{architecture}.attention.causal", True) is False:
            problems.append("attention.causal=false")
        if problems:
            raise UnsupportedModelError(
                f"cannot load {self.path}: {', '.join(problems)} not supported. Supported in GGUF files: "
                "the architectures llama (Llama, SmolLM2, Mistral without sliding window, Mixtral), qwen2, qwen3, "
                "qwen3moe, gemma2, gemma3 and gpt-oss"
            )

    def _config(self) -> ModelConfig:
        name = name_of(self.path)
        self._check_supported()
        architecture = self._architecture
        hidden_size, num_heads, num_layers, positions = (
            self._number(key)
            for key in ("embedding_length", "attention.head_count", "block_count", "context_length")
        )
        rotated = self._number("rope.dimension_count", hidden_size // num_heads)
        head_dim = self._number("attention.key_length", rotated)
        if rotated != head_dim and self._own("rope.dimension_count"):
            raise UnsupportedModelError(
                f"cannot load {self.path}: RoPE on {rotated} of {head_dim} dimensions of a head not supported"
            )
        if "token_embd.weight" not in self._tensors:
            raise UnsupportedModelError(f"cannot load {self.path}: tensor token_embd.weight is missing")
        scaling = self._rope_scaling(head_dim)
        special: dict[str, Any] = {
            "qk_norm": architecture in ("qwen3", "qwen3moe"),
            "qkv_bias": architecture == "qwen2",
            **self._experts(),
            **self._windows(num_layers),
        }
        if architecture in _GEMMA_27B:
            # As llama.cpp, which knows the largest model by its layers.
            largest = num_layers == _GEMMA_27B[architecture]
            special |= self._gemma(hidden_size, hidden_size // num_heads if largest else head_dim)
        if architecture == "gpt-oss":
            special |= gpt_oss_fields()
        return ModelConfig(
            name=name,
            vocab_size=self.shapes_of("token_embd.weight")[0],
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=self._number("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=self._number("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_positions=max(positions, scaling.stretched) if scaling else positions,
            rope_theta=self._rope_theta("rope.freq_base"),
            rope_scaling=scaling,
            norm_eps=self._positive("attention.layer_norm_rms_epsilon"),
            tie_embeddings="output.weight" not in self._tensors,
            bos_token_id=self._special_ids.get("bos"),
            eos_token_ids=tuple(sorted({i for end, i in self._special_ids.items() if end in END_NAMES})),
            **special,
        )

    def _gemma(self, hidden_size: int, scaled_by: int) -> dict[str, Any]:
        scale = float(scaled_by**-0.5)
        if self._architecture == "gemma3":
            return gemma3_fields(hidden_size, scale)
        attention_cap = self._positive("attn_logit_softcapping", 50.0)
        return gemma2_fields(
            hidden_size, scale, attention_cap, self._positive("final_logit_softcapping", 30.0)
        )

    def _experts(self) -> dict[str, Any]:
        """Fields of a mixture of experts: in every layer, the weights of the chosen ones add up to one, as in llama.cpp."""
        if not self._own("expert_count") or self._architecture not in ("llama", "qwen3moe", "gpt-oss"):
            return {}
        # Mixtral's files call it the size of the MLP, as its configuration does.
        size = (
            "expert_feed_forward_length" if self._own("expert_feed_forward_length") else "feed_forward_length"
        )
        names = {"num_experts": "expert_count", "experts_per_token": "expert_used_count", "expert_size": size}
        return {field: self._number(key) for field, key in names.items()}

    def _windows(self, num_layers: int) -> dict[str, Any]:
        """Fields of the sliding layers. Gemma 3's have a base of RoPE of their own, 10000 unless the file says otherwise."""
        architecture = self._architecture
        usual = 4096 if architecture == "gemma2" else 0  # as llama.cpp
        if architecture not in _PATTERNS or not self._own("attention.sliding_window", usual):
            return {}
        pattern = self._own("attention.sliding_window_pattern", _PATTERNS[architecture])
        theta = self._rope_theta("rope.freq_base_swa", None if architecture == "gemma3" else "rope.freq_base")
        if architecture != "gemma3" and theta != self._rope_theta("rope.freq_base"):
            raise UnsupportedModelError(
                f"cannot load {self.path}: rope.freq_base_swa {theta} other than rope.freq_base not supported"
            )
        if isinstance(pattern, list) and len(pattern) == num_layers:
            layers = tuple(i for i, slides in enumerate(pattern) if slides)
        elif is_whole(pattern):
            layers = tuple(i for i in range(num_layers) if (i + 1) % pattern)
        else:
            raise UnsupportedModelError(
                f"cannot load {self.path}: sliding_window_pattern {pattern!r} not supported, expected a number of layers "
                f"or {num_layers} booleans"
            )
        if len(layers) == num_layers:
            raise UnsupportedModelError(
                f"cannot load {self.path}: sliding window in every layer not supported (nothing of the cache would be "
                "compressed)"
            )
        return {
            "sliding_window": self._number("attention.sliding_window", usual),
            "sliding_layers": layers,
            "sliding_rope_theta": theta if architecture == "gemma3" else None,
        }

    def _own(self, key: str, default: Any = None) -> Any:
        """A metadata value under the name of the architecture, or `default`."""
        return self.field(f"{self._architecture}.{key}", default)

    def _required(self, key: str, default: Any = None) -> Any:
        value = self._own(key, default)
        if value is None:
            raise UnsupportedModelError(
                f"cannot load {self.path}: metadata {self._architecture}.{key} is missing"
            )
        return value

    def _odd(self, key: str, value: Any, expected: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"cannot load {self.path}: {self._architecture}.{key} is {repr(value)[:80]}, expected {expected}"
        )

    def _number(self, key: str, default: Any = None) -> int:
        """A whole number above 0, or the one of all layers where the file has a list of them."""
        value = self._required(key, default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1 or not all(map(is_whole, values)):
            raise self._odd(key, value, "a positive whole number, the same for all layers")
        return int(values.pop())

    def _positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._required(key, default)
        if not is_positive(value):
            raise self._odd(key, value, "a positive number")
        return float(value)

    def _rope_theta(self, key: str, default: str | None = None) -> float:
        """A base of RoPE; without it that under the key `default`, or 10000."""
        value = self._own(key, 10000.0 if default is None else self._rope_theta(default))
        if not is_positive(value) or value <= 1:
            raise self._odd(key, value, "a number above 1")
        return float(value)

    def _rope_factor(self, key: str, default: float | None = None) -> float:
        """By how much RoPE is scaled; 0 stands for not at all, as in llama.cpp."""
        return 1.0 if self._required(key, default) == 0 else self._positive(key, default)

    def _rope_scaling(self, head_dim: int) -> RopeScaling | None:
        """As llama.cpp reads it: linear unless the file says otherwise, its factor under one of two names."""
        kind = self._own("rope.scaling.type", "linear")
        if kind not in ("none", "linear", "yarn"):
            raise UnsupportedModelError(
                f"cannot load {self.path}: rope scaling {kind!r} not supported, only none, linear, yarn and rope_freqs"
            )
        if kind == "yarn":
            return self._yarn()
        named = "rope.scaling.factor" if self._own("rope.scaling.factor") is not None else "rope.scale_linear"
        factor = self._rope_factor(named, 0.0) if kind == "linear" else 1.0
        if "rope_freqs.weight" in self._tensors:  # Llama 3.1 and later: the divisor of every frequency
            return RopeScaling(kind="factors", factors=self._rope_factors(head_dim // 2, factor))
        return None if factor == 1.0 else RopeScaling(kind="linear", factor=factor)

    def _rope_factors(self, count: int, factor: float) -> tuple[float, ...]:
        """The file's divisors of the frequencies times one for all."""
        shape = self.shapes_of("rope_freqs.weight")
        found = np.asarray(self.read("rope_freqs.weight"), np.float64)
        if shape != (count,) or not (np.isfinite(found) & (found > 0)).all():
            raise UnsupportedModelError(
                f"cannot load {self.path}: tensor rope_freqs.weight of shape {list(shape)}, expected [{count}] and positive "
                "numbers"
            )
        return tuple((found * factor).tolist())

    def _yarn(self) -> RopeScaling:
        """As llama.cpp reads it for these architectures; what only its converter knows of is refused."""
        usual = {
            "yarn_ext_factor": 1.0,
            "yarn_attn_factor": 1.0,
            "yarn_beta_fast": 32.0,
            "yarn_beta_slow": 1.0,
        }
        other = [key for key, value in usual.items() if self._own(f"rope.scaling.{key}", value) != value]
        if "rope_freqs.weight" in self._tensors:
            other.append("rope_freqs.weight")
        if other:
            raise UnsupportedModelError(
                f"cannot load {self.path}: yarn with {', '.join(other)} not supported"
            )
        factor = self._rope_factor("rope.scaling.factor")
        trained = "rope.scaling.original_context_length"
        original = self._number(trained if self._own(trained) else "context_length")
        attention = yarn_attention_factor(factor) * self._positive("rope.scaling.attn_factor", 1.0)
        # The files do not say it, and llama.cpp begins and ends every blend at whole dimensions; the model was trained so.
        truncate = self._architecture != "gpt-oss"
        return RopeScaling.yarn(factor, original, attention_factor=attention, truncate=truncate)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer and chat template in the file's metadata, as a fast tokenizer."""
        with _named(self.path):
            return read_tokenizer(self.field, self.path, self.config, self._special_ids)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """What metadata of another type, size or range than expected makes of the code that reads it is said of the file."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise UnsupportedModelError(
            f"cannot load {path}: its metadata is odd or damaged ({error}): fetch it again"
        ) from error


def unpermute_rope(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key matrix [H * D, E] from GGUF's order to Hugging Face's.

    llama.cpp stores Llama weights for RoPE on neighbouring pairs: its rows 2i and 2i + 1 of a head are rows i and
    i + D/2 of the half-split layout.
    """
    rows = weight.shape[0]
    return weight.reshape(num_heads, rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(rows, -1)
