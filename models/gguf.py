"""GGUF files of the Llama family: configuration and tensors (dequantised).

Not supported: sliding windows but Gemma's and GPT-OSS's, images.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from models.config import ModelConfig, RopeScaling, UnsupportedModelError
from models.gemma import gemma2_fields, gemma3_fields
from models.gguf_parts import name_of, parts_of
from models.gguf_tokenizer import read_tokenizer
from models.gpt_oss import gpt_oss_fields
from models.layer_types import is_whole
from models.mxfp4 import Mxfp4
from models.rope_scaling import yarn_attention_factor
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
        count = max(int(self.field("split.count", 1)), 1)
        if count != len(parts):
            raise UnsupportedModelError(
                f"{path} is one of {count} parts: give them the names that llama.cpp does, NAME-00001-of-{count:05d}.gguf"
            )
        self._architecture = self.field("general.architecture")
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
        get = functools.partial(self._required, architecture)
        hidden_size, num_heads = (
            self._number(get(key), key) for key in ("embedding_length", "attention.head_count")
        )
        rotated = self.field(f"{architecture}.rope.dimension_count")
        head_dim = int(
            self.field(f"{architecture}.attention.key_length") or rotated or hidden_size // num_heads
        )
        if rotated and int(rotated) != head_dim:
            raise UnsupportedModelError(
                f"cannot load {self.path}: RoPE on {rotated} of {head_dim} dimensions of a head not supported"
            )
        eos = self.field("tokenizer.ggml.eos_token_id")
        if "token_embd.weight" not in self._tensors:
            raise UnsupportedModelError(f"cannot load {self.path}: tensor token_embd.weight is missing")
        scaling = self._rope_scaling()
        positions = int(get("context_length"))
        num_layers = int(get("block_count"))
        special: dict[str, Any] = {
            "qk_norm": architecture in ("qwen3", "qwen3moe"),
            "qkv_bias": architecture == "qwen2",
            **self._experts(),
            **self._windows(num_layers),
        }
        if architecture in _GEMMA_27B:
            # As llama.cpp, which knows the largest model by its layers.
            largest = num_layers == _GEMMA_27B[architecture]
            scale = float((hidden_size // num_heads if largest else head_dim) ** -0.5)
            if architecture == "gemma2":
                attention_cap = self.field("gemma2.attn_logit_softcapping", 50.0)
                logits_cap = self.field("gemma2.final_logit_softcapping", 30.0)
                special |= gemma2_fields(hidden_size, scale, attention_cap, logits_cap)
            else:
                special |= gemma3_fields(hidden_size, scale)
        if architecture == "gpt-oss":
            special |= gpt_oss_fields()
        return ModelConfig(
            name=name,
            vocab_size=self.shapes_of("token_embd.weight")[0],
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=self._number(get("feed_forward_length"), "feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=self._number(
                self.field(f"{architecture}.attention.head_count_kv", num_heads), "attention.head_count_kv"
            ),
            head_dim=head_dim,
            max_positions=max(positions, scaling.stretched) if scaling else positions,
            rope_theta=float(self.field(f"{architecture}.rope.freq_base", 10000.0)),
            rope_scaling=scaling,
            norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            tie_embeddings="output.weight" not in self._tensors,
            bos_token_id=self.field("tokenizer.ggml.bos_token_id"),
            eos_token_ids=() if eos is None else (int(eos),),
            **special,
        )

    def _experts(self) -> dict[str, Any]:
        """Fields of a mixture of experts: in every layer, the weights of the chosen ones add up to one, as in llama.cpp."""
        architecture = self._architecture
        count = self.field(f"{architecture}.expert_count", 0)
        if not count or architecture not in ("llama", "qwen3moe", "gpt-oss"):
            return {}
        # Mixtral's files call it the size of the MLP, as its configuration does.
        size = self.field(f"{architecture}.expert_feed_forward_length") or self._required(
            architecture, "feed_forward_length"
        )
        per_token = self._required(architecture, "expert_used_count")
        return {"num_experts": int(count), "experts_per_token": int(per_token), "expert_size": int(size)}

    def _windows(self, num_layers: int) -> dict[str, Any]:
        """Fields of the sliding layers. Gemma 3's have a base of RoPE of their own, 10000 unless the file says otherwise."""
        architecture = self._architecture
        usual = 4096 if architecture == "gemma2" else 0  # as llama.cpp
        window = self.field(f"{architecture}.attention.sliding_window", usual)
        if architecture not in _PATTERNS or not window:
            return {}
        pattern = self.field(f"{architecture}.attention.sliding_window_pattern", _PATTERNS[architecture])
        theta = self.field(f"{architecture}.rope.freq_base_swa")
        if architecture == "gemma3":
            theta = 10000.0 if theta is None else theta
        elif theta not in (None, self.field(f"{architecture}.rope.freq_base", 10000.0)):
            raise UnsupportedModelError(
                f"cannot load {self.path}: rope.freq_base_swa {theta} other than rope.freq_base not supported"
            )
        else:
            theta = None
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
            "sliding_window": int(window),
            "sliding_layers": layers,
            "sliding_rope_theta": None if theta is None else float(theta),
        }

    def _required(self, architecture: str, key: str) -> Any:
        value = self.field(f"{architecture}.{key}")
        if value is None:
            raise UnsupportedModelError(f"cannot load {self.path}: metadata {architecture}.{key} is missing")
        return value

    def _number(self, value: Any, key: str) -> int:
        """A whole number, or the one of all layers where the file has a list of them."""
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1 or not all(isinstance(each, int) for each in values):
            raise UnsupportedModelError(
                f"cannot load {self.path}: {key} is {str(value)[:80]}, expected a whole number, the same for all layers"
            )
        return int(values.pop())

    def _rope_scaling(self) -> RopeScaling | None:
        """As llama.cpp reads it: linear unless the file says otherwise, its factor under one of two names."""
        architecture = self._architecture
        kind = self.field(f"{architecture}.rope.scaling.type", "linear")
        if kind not in ("none", "linear", "yarn"):
            raise UnsupportedModelError(
                f"cannot load {self.path}: rope scaling {kind!r} not supported, only none, linear, yarn and rope_freqs"
            )
        if kind == "yarn":
            return self._yarn()
        factor = 1.0
        if kind == "linear":
            given = self.field(
                f"{architecture}.rope.scaling.factor", self.field(f"{architecture}.rope.scale_linear", 0.0)
            )
            factor = float(given) or 1.0
        if "rope_freqs.weight" in self._tensors:  # Llama 3.1 and later: the divisor of every frequency
            factors = np.asarray(self._tensors["rope_freqs.weight"].data, np.float64) * factor
            return RopeScaling(kind="factors", factors=tuple(float(f) for f in factors))
        return None if factor == 1.0 else RopeScaling(kind="linear", factor=factor)

    def _yarn(self) -> RopeScaling:
        """As llama.cpp reads it for these architectures; what only its converter knows of is refused."""
        scaling = f"{self._architecture}.rope.scaling"
        usual = {
            "yarn_ext_factor": 1.0,
            "yarn_attn_factor": 1.0,
            "yarn_beta_fast": 32.0,
            "yarn_beta_slow": 1.0,
        }
        other = [key for key, value in usual.items() if float(self.field(f"{scaling}.{key}", value)) != value]
        if "rope_freqs.weight" in self._tensors:
            other.append("rope_freqs.weight")
        if other:
            raise UnsupportedModelError(
                f"cannot load {self.path}: yarn with {', '.join(other)} not supported"
            )
        factor = float(self._required(self._architecture, "rope.scaling.factor")) or 1.0
        context = int(self._required(self._architecture, "context_length"))
        original = int(self.field(f"{scaling}.original_context_length", 0)) or context
        attention = yarn_attention_factor(factor) * float(self.field(f"{scaling}.attn_factor", 1.0))
        # The files do not say it, and llama.cpp begins and ends every blend at whole dimensions; the model was trained so.
        truncate = self._architecture != "gpt-oss"
        return RopeScaling.yarn(factor, original, attention_factor=attention, truncate=truncate)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer and chat template in the file's metadata, as a fast tokenizer."""
        return read_tokenizer(self.field, self.path, self.config)


def unpermute_rope(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key matrix [H * D, E] from GGUF's order to Hugging Face's.

    llama.cpp stores Llama weights for RoPE on neighbouring pairs: its rows 2i and 2i + 1 of a head are rows i and
    i + D/2 of the half-split layout.
    """
    rows = weight.shape[0]
    return weight.reshape(num_heads, rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(rows, -1)
