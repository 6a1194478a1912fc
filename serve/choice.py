"""One choice of one generation: its tokens become text, stop strings are found, log-probabilities are kept in step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from serve.parts import Content, Part
from serve.reader import Reader
from serve.request import FinishReason, PromptLogprob, SamplingParams, TokenOutput
from serve.text import StopScanner, TextTokenizer, special_texts


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of one token; `offset` is where its text starts in the text of the choice."""

    token_id: int
    offset: int
    logprob: float | None  # None: the first token of a prompt
    top: list[tuple[int, float]]


def finite_logprob(logprob: float) -> float:
    """JSON has no infinity: -9999.0 stands for an impossible token, as in vLLM."""
    return logprob if logprob > -9999.0 else -9999.0


def chosen_logprob(entry: TokenLogprob) -> float:
    """Log-probability of a generated token."""
    return -9999.0 if entry.logprob is None else finite_logprob(entry.logprob)


@dataclass(slots=True)
class Delta:
    """What is new about a choice since it was last asked."""

    text: str = ""
    parts: list[Part] = field(default_factory=list)  # where there is a reader: what the text says
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # Where there is a reader: those of content alone, each with the length of the choice's content up to its text's end.
    content_logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id
    called: bool = False  # the choice has ended with whole calls
    thought: bool = False  # it has ended, and had thoughts


class Choice:
    """Feed with the engine's outputs; `take` gives what can be shown."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        sampling: SamplingParams,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        drop_generated: bool = False,
        reader: Reader | None = None,
    ) -> None:
        self._sampling = sampling
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens, reader.keep if reader else ())
        self._tokenizer = tokenizer
        self._shown: list[int] | None = []  # the tokens of the text; None: it has others than it shows
        self._pieces: list[str] = []  # the whole text
        self._scanner = StopScanner(stops, include_stop)
        self._include_stop = include_stop
        self._drop_generated = drop_generated
        self._reader = reader
        self._marks = reader.marks if reader else {}
        self._skips = skip_special_tokens
        self._delta = Delta()
        # Of tokens whose text is no part yet, with its length.
        self._unread: list[tuple[TokenLogprob, int]] = []
        self._content = 0  # characters of content
        self._told = 0  # characters of the text that are no part of a stop string
        self._begun = False  # the prompt has bytes of a character whose end has not come yet
        self._offset = 0  # characters that came out of the detokenizer, and the echo
        self.num_tokens = 0
        self._thinking_tokens = 0  # generated while there may be thoughts, or are
        self.finish_reason: FinishReason | None = None

    @property
    def finished(self) -> bool:
        """Nothing more will come; later outputs are ignored."""
        return self.finish_reason is not None

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens are thoughts, the tags around them included."""
        return self._thinking_tokens if self._reader is not None and self._reader.thought else 0

    @property
    def spelling(self) -> tuple[str, list[int]] | None:
        """The whole text and its tokens, once it has ended, if the text says all that the tokens do."""
        if self._shown is None or self._scanner.matched or self.finish_reason not in ("stop", "length"):
            return None
        text = "".join(self._pieces)
        # U+FFFD stands for bytes that are no character; special tokens that are written out are none.
        ambiguous = ("\ufffd", *special_texts(self._tokenizer))
        return None if not text or any(part in text for part in ambiguous) else (text, self._shown)

    def continue_text(self, prompt_ids: Sequence[int], *, whole: bool = False) -> None:
        """The generation continues this prompt in the middle of a text: a leading space is a part of it.

        A character that the prompt has begun is a part of it, too, if the generation completes it, and is not there if not.
        `whole`: the generation begins with a character of its own, as a grammar has it.
        """
        for token_id in prompt_ids[-4:]:  # a character may have begun that long ago
            self._detokenizer.add(token_id)
        if whole:
            self._detokenizer.flush()
        self._begun = self._detokenizer.holds

    def echo(
        self, text: str | None, prompt_ids: Sequence[int], logprobs: Sequence[PromptLogprob | None] | None
    ) -> None:
        """Put the prompt in front, as `text` or as its tokens say. Its log-probabilities come with the first output."""
        pieces = []
        for i, token_id in enumerate(prompt_ids):
            if logprobs is not None:
                given = logprobs[i]
                self._delta.logprobs.append(
                    TokenLogprob(
                        token_id,
                        self._offset,
                        None if given is None else given.logprob,
                        [] if given is None else given.top_logprobs,
                    )
                )
            if text is not None and token_id in self._tokenizer.special_ids:
                # Written out in the text, or put before it by the tokenizer: then the text begins behind it.
                written = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
                piece = written if text.startswith(written, self._offset) else ""
                if piece:
                    self._detokenizer.add(token_id)
            else:
                piece = self._detokenizer.add(token_id)
            pieces.append(piece)
            self._offset += len(piece)
        if self._drop_generated:  # nothing completes a character
            pieces.append(self._detokenizer.flush())
        if text is None:
            text = "".join(pieces)
        self._offset = len(text)
        self._delta.text += text

    def feed(self, output: TokenOutput) -> bool:
        """Take one output of the engine; True when the text ended the choice before the engine did."""
        if self.finished:
            return False
        if output.token_id is not None:
            self._add_token(output.token_id, output)
        if self._scanner.matched is not None:
            self._finish("stop", self._scanner.matched)
            return output.finish_reason is None
        # The only call that was wanted.
        if self._reader is not None and self._reader.done and output.finish_reason != "stop":
            self._finish("stop", None)
            return output.finish_reason is None
        if output.finish_reason is not None:
            self._add_text(self._flush())
            stop_reason: str | int | None = self._scanner.matched
            if stop_reason is not None:  # a stop string of replacement characters
                self._finish("stop", stop_reason)
                return False
            self._show(self._scanner.finish())
            if output.finish_reason == "stop" and output.token_id in self._sampling.stop_token_ids:
                stop_reason = output.token_id
            self._finish(output.finish_reason, stop_reason)
        return False

    def _add_token(self, token_id: int, output: TokenOutput) -> None:
        if self._drop_generated:
            return
        self.num_tokens += 1
        if self._reader is not None and self._reader.thinking:
            self._thinking_tokens += 1
        self._delta.token_ids.append(token_id)
        entry = None
        if self._sampling.logprobs is not None:
            logprob = math.nan if output.logprob is None else output.logprob
            entry = TokenLogprob(token_id, self._offset, logprob, output.top_logprobs or [])
            self._delta.logprobs.append(entry)
        if output.finish_reason == "stop" and not self._include_stop:
            # The token that ended the text is not a part of it; what it ends, the reader may have to know.
            if marker := self._marks.get(token_id):
                self._add_mark(self._flush(), marker)
            return
        if token_id in self._tokenizer.special_ids or not self._tokenizer.token_bytes(token_id):
            self._shown = None
        elif self._shown is not None:
            self._shown.append(token_id)
        if self._skips and self._reader is not None and self._reader.skips(token_id):
            return
        text = self._without_begun(self._detokenizer.add(token_id))
        said = self._reader is not None and token_id not in self._tokenizer.special_ids
        if entry is not None and said:
            self._unread.append((entry, len(text)))
        if (marker := self._marks.get(token_id)) is None:
            self._add_text(text)
        else:
            self._add_mark(text.removesuffix(marker), marker)

    def _flush(self) -> str:
        """What stands for the bytes of a character that has no end: text of the last token."""
        text = self._without_begun(self._detokenizer.flush())
        if text and self._unread:
            entry, length = self._unread[-1]
            self._unread[-1] = entry, length + len(text)
        return text

    def _without_begun(self, text: str) -> str:
        """Without what stands for bytes of the prompt's, if no generated ones complete their character."""
        if self._begun and text:
            self._begun = False
            return text.removeprefix("\ufffd")
        return text

    def _add_text(self, text: str) -> None:
        if self._drop_generated:
            return
        self._offset += len(text)
        # The first `min_tokens` tokens cannot end the choice, not even as the beginning of a stop string.
        match = self.num_tokens > self._sampling.min_tokens and not (self._reader and self._reader.framing)
        self._show(self._scanner.push(text, match=match))

    def _add_mark(self, text: str, marker: str) -> None:
        """A special token that the reader is told of, after what was held back of a character: no stop string spans it."""
        self._add_text(text)
        self._show(self._scanner.push("", match=False))
        if self._reader is not None and self._scanner.matched is None:
            self._add_parts(self._reader.mark(marker))

    def _show(self, text: str) -> None:
        self._delta.text += text
        self._pieces.append(text)
        self._told += len(text)
        if self._reader is not None:
            self._add_parts(self._reader.push(text))

    def _add_parts(self, parts: list[Part]) -> None:
        """What the reader made of the text; where that is content, it is of the last tokens but those held back."""
        self._delta.parts += parts
        if not parts or self._reader is None or self._sampling.logprobs is None:
            return
        end = len(self._unread)
        # Characters that may belong to a stop string, and before them those that may be of a call.
        hidden = self._offset - self._told + self._reader.held
        while end and 0 < self._unread[end - 1][1] <= hidden:
            end -= 1
            hidden -= self._unread[end][1]
        contents = [part for part in parts if isinstance(part, Content)]
        self._content += sum(len(part.text) for part in contents)
        start, left = end, sum(len(part.text) - part.gap for part in contents)
        while start and (left > 0 or (start < end and not self._unread[start - 1][1])):
            start -= 1  # also over the first bytes of a character
            left -= self._unread[start][1]
        self._delta.content_logprobs += [(self._content, entry) for entry, _ in self._unread[start:end]]
        del self._unread[:end]

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        if self._drop_generated:
            reason, stop_reason = "length", None
        if self._reader is not None:
            self._add_parts(self._reader.finish())
            self._delta.called = self._reader.called
            self._delta.thought = self._reader.thought
        self.finish_reason = self._delta.finish_reason = reason
        self._delta.stop_reason = stop_reason

    def take(self, *, everything: bool = False) -> Delta | None:
        """What is new, or None when there is nothing to show yet.

        Tokens and log-probabilities wait for the next text, so that a chunk never comes without text, except at the
        end (or with `everything`). So does text that may be the beginning of a call.
        """
        shown = self._delta.text if self._reader is None else self._delta.parts
        if not (everything or shown or self._delta.finish_reason):
            return None
        delta, self._delta = self._delta, Delta()
        return delta
