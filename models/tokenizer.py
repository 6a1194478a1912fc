"""Text to token ids and back: a thin wrapper over a fast Hugging Face tokenizer, cheap per token, no torch."""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerFast

# Tokens that end a turn or a text. Those in the vocabulary stop generation besides the model's own list.
END_TOKENS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>", "<end_of_turn>",
    "<|return|>", "<|call|>",
)  # fmt: skip


def _byte_to_char() -> dict[int, str]:
    """GPT-2's bijection from bytes to printable characters: printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


BYTE_TO_CHAR = _byte_to_char()
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template rejects the messages."""


class Tokenizer:
    """Encoding, decoding and chat formatting of one model.

    Decoding works on the bytes of single tokens (`token_bytes`), so that streaming costs one table look-up per token
    and gives the same text as decoding at once.
    """

    def __init__(self, fast: PreTrainedTokenizerFast, eos_token_ids: Sequence[int] = ()) -> None:
        self._fast = fast
        self._backend = fast.backend_tokenizer
        # What a tokenizer.json says of these is how it was trained with, and transformers' calls leave it out, too.
        self._backend.no_truncation()
        self._backend.no_padding()
        decoder = self._backend.decoder
        kinds = _decoder_kinds(json.loads(decoder.__getstate__())) if decoder is not None else set()
        self._byte_level = "ByteLevel" in kinds
        self._strip_leading_space = "Strip" in kinds
        if not self._byte_level and "ByteFallback" not in kinds:
            raise ValueError(
                f"tokenizer with decoder {sorted(kinds)} is not supported: expected byte-level BPE "
                "(Llama 3, SmolLM2) or SentencePiece BPE with byte fallback (Llama 2, Mistral, Gemma)"
            )
        self.special_ids: frozenset[int] = frozenset(
            i for i, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        found = {token: self._backend.token_to_id(token) for token in END_TOKENS}
        if found["</s>"] not in self.special_ids:  # Gemma's is HTML: the end of what is struck out
            del found["</s>"]
        ends = [*eos_token_ids, fast.eos_token_id, *found.values()]
        self.eos_token_ids: tuple[int, ...] = tuple(sorted({int(i) for i in ends if i is not None}))
        self.bos_token_id: int | None = fast.bos_token_id
        # One table for all ids: built on first use of each token.
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included; the model's embedding may have more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works."""
        return bool(self.chat_template() or self.chat_template(with_tools=True))

    def chat_template(self, with_tools: bool = False) -> str | None:
        """The text of the template; of several the one that transformers takes for conversations with or without tools.

        None if there is none, or something that is no text.
        """
        given = self._fast.chat_template
        if isinstance(given, dict):
            given = given.get("tool_use" if with_tools and "tool_use" in given else "default")
        return given if isinstance(given, str) else None

    def use_chat_template(self, template: str) -> None:
        """From now on this one, in Jinja, with or without tools. Raises ChatTemplateError for what Jinja cannot read."""
        before, self._fast.chat_template = self._fast.chat_template, template
        if fault := self.chat_template_fault():
            self._fast.chat_template = before
            raise ChatTemplateError(fault)

    def chat_template_fault(self) -> str | None:
        """What Jinja cannot read in the template, and where, or why there is none to read; None if all is well."""
        given = self._fast.chat_template
        if given and self.chat_template() is None:
            several = isinstance(given, dict) and "default" not in given
            return (
                f"none of {', '.join(given)} is the 'default'" if several else f"no text: {str(given)[:80]}"
            )
        try:
            self.render_chat([{"role": "user", "content": "Hello"}])
        except ChatTemplateError as error:  # a template may well reject this conversation
            if isinstance(error.__cause__, TemplateSyntaxError):
                return f"line {error.__cause__.lineno}: {error.__cause__}"
        return None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised."""
        # As a batch of one: other threads run meanwhile, which `encode` keeps waiting for a second a megabyte. Fast: without
        # the place of each token in the text.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([detokenizer.add(i) for i in ids]) + detokenizer.flush()

    def detokenizer(self, skip_special_tokens: bool = True, keep: Collection[int] = ()) -> Detokenizer:
        """A fresh incremental decoder for one stream; the special tokens `keep` are never skipped."""
        return Detokenizer(self, skip_special_tokens, keep)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id outside the vocabulary."""
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = self._bytes[token_id] = self._token_bytes(token_id)
        return cached

    def _token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(CHAR_TO_BYTE[char] for char in token)
            except KeyError:  # an added token with characters outside the table stands for itself
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Token ids of a conversation in the model's own format (rendered by transformers in a jinja sandbox).

        Raises ChatTemplateError when the model has no template or its template fails on the messages.
        """
        return self.encode(
            self.render_chat(messages, add_generation_prompt, **options), add_special_tokens=False
        )

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """The text that `apply_chat_template` encodes."""
        if not self.has_chat_template:
            raise ChatTemplateError(
                "this model has no chat template: use /v1/completions instead, or start the server with --chat-template"
            )
        try:
            text = self._fast.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
        except Exception as error:  # jinja raises whatever the template's expressions raise
            raise ChatTemplateError(f"the model's chat template rejects these messages: {error}") from error
        return str(text)

    def save(self, directory: str) -> None:
        """Writes tokenizer.json, its configuration and the chat template."""
        self._fast.save_pretrained(directory)


def _decoder_kinds(state: Mapping[str, Any]) -> set[str]:
    """All decoder types in the JSON of a `tokenizers` decoder."""
    kinds = {str(state.get("type"))}
    for child in state.get("decoders", ()):
        kinds |= _decoder_kinds(child)
    return kinds


_new_utf8_decoder = functools.partial(codecs.getincrementaldecoder("utf-8"), errors="replace")


class Detokenizer:
    """Incremental decoding of one stream: text comes out as soon as its characters are complete.

    The concatenation of all results equals `Tokenizer.decode` of all ids. An incomplete character is held back until
    the bytes that complete it arrive, or `flush`.
    """

    __slots__ = ("_skip", "_strip", "_tokenizer", "_utf8")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, keep: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        if keep:
            self._skip = self._skip.difference(keep)
        self._strip = tokenizer._strip_leading_space
        self._utf8 = _new_utf8_decoder()

    def add(self, token_id: int) -> str:
        """The text that one more token completes; often empty."""
        if token_id in self._skip:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    @property
    def holds(self) -> bool:
        """Whether bytes of a character are held back."""
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """What is still held back, as U+FFFD; what comes then begins a character."""
        return self._utf8.decode(b"", final=True)
