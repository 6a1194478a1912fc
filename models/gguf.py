"""GGUF files of the Llama family: configuration, tensors (dequantised) and tokenizer.

Not supported: SentencePiece vocabularies (`tokenizer.ggml.model` "llama"), mixtures of experts.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from models.config import ModelConfig, RopeScaling, UnsupportedModelError
from models.rope_scaling import yarn_attention_factor
from models.tokenizer import Tokenizer

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")  # names of its pre-tokenizer
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


class GGUFFile:
    """One GGUF file, memory-mapped; a `TensorSource` with GGUF names and Hugging Face layout."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._reader = GGUFReader(self.path)
        except (ValueError, IndexError) as error:
            raise UnsupportedModelError(f"{path} is not a readable GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
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

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32."""
        tensor = self._tensors[name]
        try:
            x = dequantize(tensor.data, tensor.tensor_type).reshape(self.shapes_of(name))
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} is stored as {tensor.tensor_type.name}, which cannot be dequantised"
            ) from error
        if self._architecture != "llama":
            return x
        if name.endswith("attn_q.weight"):
            return unpermute_rope(x, self.config.num_heads)
        if name.endswith("attn_k.weight"):
            return unpermute_rope(x, self.config.num_kv_heads)
        return x

    def shapes_of(self, name: str) -> tuple[int, ...]:
        """Shape [out, in] of one tensor."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def _config(self) -> ModelConfig:
        name = self.path.stem
        architecture = self._architecture
        problems = []
        if architecture not in _ARCHITECTURES:
            problems.append(f"architecture {architecture}")
        for key, text in (
            ("expert_count", "mixture of experts"),
            ("attention.sliding_window", "sliding window"),
        ):
            if self.field(f"{architecture}.{key}"):
                problems.append(text)
        if problems:
            raise UnsupportedModelError(
                f"cannot load {self.path}: {', '.join(problems)} not supported. Supported in GGUF files: "
                "the architectures llama (Llama, SmolLM2, Mistral without sliding window), qwen2 and qwen3"
            )
        get = functools.partial(self._required, architecture)
        hidden_size, num_heads = int(get("embedding_length")), int(get("attention.head_count"))
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
        return ModelConfig(
            name=name,
            vocab_size=self.shapes_of("token_embd.weight")[0],
            num_layers=int(get("block_count")),
            hidden_size=hidden_size,
            intermediate_size=int(get("feed_forward_length")),
            num_heads=num_heads,
            num_kv_heads=int(self.field(f"{architecture}.attention.head_count_kv", num_heads)),
            head_dim=head_dim,
            max_positions=max(positions, scaling.stretched) if scaling else positions,
            rope_theta=float(self.field(f"{architecture}.rope.freq_base", 10000.0)),
            rope_scaling=scaling,
            norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            tie_embeddings="output.weight" not in self._tensors,
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            bos_token_id=self.field("tokenizer.ggml.bos_token_id"),
            eos_token_ids=() if eos is None else (int(eos),),
        )

    def _required(self, architecture: str, key: str) -> Any:
        value = self.field(f"{architecture}.{key}")
        if value is None:
            raise UnsupportedModelError(f"cannot load {self.path}: metadata {architecture}.{key} is missing")
        return value

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
        return RopeScaling.yarn(factor, original, attention_factor=attention)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer and chat template in the file's metadata, as a fast tokenizer."""
        model = self.field("tokenizer.ggml.model")
        pre = self.field("tokenizer.ggml.pre", "default")
        if model != "gpt2":
            raise UnsupportedModelError(
                f"cannot load the tokenizer of {self.path}: model {model!r} not supported, only byte-level BPE "
                "('gpt2'). Use the Hugging Face directory of this model instead"
            )
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        types = self.field("tokenizer.ggml.token_type", [1] * len(tokens))
        merges = [tuple(merge.split(" ", 1)) for merge in self.field("tokenizer.ggml.merges")]
        vocab = {token: i for i, token in enumerate(tokens)}
        try:
            bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.startswith("llama"))
        except Exception as error:  # tokenizers raises plain Exception
            raise UnsupportedModelError(f"cannot load the tokenizer of {self.path}: {error}") from error
        backend = Backend(bpe)
        backend.normalizer = normalizers.NFC() if pre == "qwen2" else normalizers.Sequence([])
        backend.pre_tokenizer = _pre_tokenizer(pre, self.path)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(
            [
                AddedToken(t, special=True, normalized=False)
                for t, k in zip(tokens, types, strict=True)
                if k == _CONTROL
            ]
        )
        backend.add_tokens(
            [
                AddedToken(t, normalized=False)
                for t, k in zip(tokens, types, strict=True)
                if k == _USER_DEFINED
            ]
        )

        def token(kind: str) -> str | None:
            token_id = self.field(f"tokenizer.ggml.{kind}_token_id")
            return None if token_id is None else tokens[token_id]

        bos, bos_id = token("bos"), self.field("tokenizer.ggml.bos_token_id")
        # As llama.cpp: Llama 3's texts begin with BOS unless the file says otherwise, other byte-level ones do not.
        if self.field("tokenizer.ggml.add_bos_token", pre in _LLAMA3) and bos is not None:
            backend.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
            )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token=bos,
            eos_token=token("eos"),
            unk_token=token("unknown"),
            pad_token=token("padding"),
            clean_up_tokenization_spaces=False,
            model_max_length=self.config.max_positions,
        )
        fast.chat_template = self.field("tokenizer.chat_template")
        return Tokenizer(fast, self.config.eos_token_ids)


def _pre_tokenizer(pre: str, path: Path) -> pre_tokenizers.PreTokenizer:
    """How llama.cpp's named pre-tokenizers split text, in terms of `tokenizers`."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("default", "gpt-2"):
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in _LLAMA3 or pre == "qwen2":
        pattern = _QWEN2_PATTERN if pre == "qwen2" else _LLAMA3_PATTERN
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    raise UnsupportedModelError(
        f"cannot load the tokenizer of {path}: pre-tokenizer {pre!r} not supported, only smollm, llama-bpe, qwen2, gpt-2"
    )


def unpermute_rope(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key matrix [H * D, E] from GGUF's order to Hugging Face's.

    llama.cpp stores Llama weights for RoPE on neighbouring pairs: its rows 2i and 2i + 1 of a head are rows i and
    i + D/2 of the half-split layout.
    """
    rows = weight.shape[0]
    return weight.reshape(num_heads, rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(rows, -1)
