"""The tokenizer in the metadata of a GGUF file, rebuilt for the `tokenizers` library: byte-level or SentencePiece BPE."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from models.config import ModelConfig, UnsupportedModelError
from models.tokenizer import Tokenizer

log = logging.getLogger("tangram")

Field = Callable[..., Any]  # (key, default) -> a metadata value

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")  # names of its pre-tokenizer
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
# A word begins anew at a capital letter after small ones, and has its contraction.
_CAPITALS, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_GPT4O_PATTERN = "|".join(
    (
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{letters}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            for letters in (rf"[{_CAPITALS}]*[{_SMALL}]+", rf"[{_CAPITALS}]+[{_SMALL}]*")
        ),
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_PATTERNS = {**dict.fromkeys(_LLAMA3, _LLAMA3_PATTERN), "qwen2": _QWEN2_PATTERN, "gpt-4o": _GPT4O_PATTERN}
_SPACE = "\u2581"  # SentencePiece's sign for a space
END_NAMES = ("eos", "eot", "eom")  # of the end of a text, of a turn and of a message


def special_ids(field: Field, path: Path, count: int) -> dict[str, int]:
    """Ids of special tokens of a vocabulary of `count`, by their names in the metadata.

    What is no id of the vocabulary is left out with a warning: -1 stands for none in old files, without its sign in some.
    """
    found = {}
    for name in (*END_NAMES, "bos", "unknown", "padding"):
        token_id = field(key := f"tokenizer.ggml.{name}_token_id")
        if type(token_id) is int and 0 <= token_id < count:
            found[name] = token_id
        elif token_id is not None:
            log.warning("%s: %s is %r, no token of %d: taken for none", path, key, token_id, count)
    return found


def read_tokenizer(field: Field, path: Path, config: ModelConfig, ids: Mapping[str, int]) -> Tokenizer:
    """The tokenizer and chat template of the file at `path`, whose metadata `field` looks up; `ids`: its `special_ids`.

    Raises UnsupportedModelError for another kind of tokenizer, or one that is incomplete.
    """
    kinds = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = field("tokenizer.ggml.model")
    if kind not in kinds:
        raise UnsupportedModelError(
            f"cannot load the tokenizer of {path}: model {kind!r} not supported, only byte-level BPE ('gpt2') and "
            "SentencePiece BPE ('llama'). Use the Hugging Face directory of this model instead"
        )
    tokens: list[str] = field("tokenizer.ggml.tokens")
    if not tokens:
        raise UnsupportedModelError(
            f"cannot load the tokenizer of {path}: metadata tokenizer.ggml.tokens is missing"
        )
    types: list[int] = field("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    try:
        backend = kinds[kind](field, path, tokens, types)
    except UnsupportedModelError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise UnsupportedModelError(f"cannot load the tokenizer of {path}: {error}") from error
    control = (_CONTROL, _UNKNOWN) if kind == "llama" else (_CONTROL,)
    typed = list(zip(tokens, types, strict=True))
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in typed if k in control]
    )
    # Runs of spaces among them: SentencePiece finds them once spaces have its sign, as U+2581 in a text has.
    normalized = kind == "llama" and not field("tokenizer.ggml.add_space_prefix", True)
    backend.add_tokens([AddedToken(t, normalized=normalized) for t, k in typed if k == _USER_DEFINED])

    special = {name: tokens[token_id] for name, token_id in ids.items()}
    bos = special.get("bos")
    # As llama.cpp: unless the file says otherwise SentencePiece's texts and Llama 3's begin with BOS, no others.
    begins = kind == "llama" or field("tokenizer.ggml.pre", "default") in _LLAMA3
    if field("tokenizer.ggml.add_bos_token", begins) and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids["bos"])]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=special.get("eos"),
        unk_token=special.get("unknown"),
        pad_token=special.get("padding"),
        clean_up_tokenization_spaces=False,
        model_max_length=config.max_positions,
    )
    template = field("tokenizer.chat_template")
    if isinstance(template, str):
        fast.chat_template = template
    elif template is not None:
        log.warning("%s: tokenizer.chat_template is %.80r, no text: taken for none", path, template)
    return Tokenizer(fast, config.eos_token_ids)


def _byte_level(field: Field, path: Path, tokens: Sequence[str], types: Sequence[int]) -> Backend:
    del types
    pre = field("tokenizer.ggml.pre")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=str(pre).startswith("llama")))
    backend.normalizer = normalizers.NFC() if pre == "qwen2" else normalizers.Sequence([])
    backend.pre_tokenizer = _pre_tokenizer(pre, path)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(field: Field, path: Path, tokens: Sequence[str], types: Sequence[int]) -> Backend:
    """SentencePiece's BPE: whatever pair makes the piece of the highest score is merged first; unknown bytes are pieces."""
    scores = field("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise UnsupportedModelError(
            f"cannot load the tokenizer of {path}: tokenizer.ggml.scores do not fit its tokens"
        )
    unknown = next((t for t, k in zip(tokens, types, strict=True) if k == _UNKNOWN), None)
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges_of_scores(tokens, scores, types),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(bpe)
    space = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if field("tokenizer.ggml.add_space_prefix", True):  # of Llama 2, not of Gemma
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = space
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_of_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, first the one that is done first.

    Only normal pieces are merged to, and from: the others are found in a text before anything is merged, or never.
    """
    score_of = {
        token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL
    }
    merges = [
        (-score, len(piece), piece[:cut], piece[cut:])
        for piece, score in score_of.items()
        for cut in range(1, len(piece))
        if piece[:cut] in score_of and piece[cut:] in score_of
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _pre_tokenizer(pre: str | None, path: Path) -> pre_tokenizers.PreTokenizer:
    """How llama.cpp's named pre-tokenizers split text, in terms of `tokenizers`."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in (None, "default"):
        raise UnsupportedModelError(
            f"cannot load the tokenizer of {path}: it does not say how text is split (tokenizer.ggml.pre), as early files "
            "of Llama 3 and others: take a newer file, or the model's directory from the hub"
        )
    if pre == "gpt-2":
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    raise UnsupportedModelError(
        f"cannot load the tokenizer of {path}: pre-tokenizer {pre!r} not supported, only smollm, llama-bpe, qwen2, "
        "gpt-4o, gpt-2"
    )
