"""Request bodies: the fields of OpenAI's API and of vLLM's extensions that this server knows.

Every field is one of three kinds: declared on the model (it works), in `NO_EFFECT` (accepted, changes nothing), or in
`UNSUPPORTED` (refused with a 400 that says so, unless it has the value that means "off"). Any other field that is not null
is a 400 that names it, because a misspelt `max_token` would otherwise be lost in silence.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from serve.errors import APIError, bad_request
from serve.fields import RequestModel, at_most, sort_fields
from serve.messages import Messages
from serve.structured import GrammarSpec, ResponseFormat, StructuredOutputs, only_spec
from serve.tools import ToolFields

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16  # OpenAI takes 4; evaluation harnesses send more
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 100.0
MAX_BIASES = 300  # what the sampler takes
MAX_VARIABLES = 64  # of a chat template
INT64 = 2**63

# Sent by clients of OpenAI's platform; nothing about a generation depends on them here.
PLATFORM_FIELDS = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
    ]
)
_CHAT_NO_EFFECT = PLATFORM_FIELDS | frozenset(["prediction", "verbosity", "moderation"])

# Field -> the values that mean "off" and are therefore fine.
_EXTENSIONS_OFF: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "prompt_logprobs": (),
    "spaces_between_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "guided_decoding_backend": ("auto", "guidance"),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "priority": (0,),
    "cache_salt": (),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "prompt_embeds": (),
}
_CHAT_OFF = _EXTENSIONS_OFF | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}
_COMPLETION_OFF = _EXTENSIONS_OFF | {"suffix": ("",)}
_CHAT_INSTEAD = {"functions": "use 'tools'", "function_call": "use 'tool_choice'"}


def _refused(param: str, fault: str) -> APIError:
    """Of a rule about several fields, which pydantic gives no name: that of the one to be changed."""
    return bad_request(f"{fault}.", param, "invalid_value")


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # OpenAI's padding against traffic analysis: no effect here

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: object) -> object:
        return sort_fields(cls, given, "stream_options.") if isinstance(given, dict) else given


class SamplingRequest(RequestModel):
    """What chat and text completions share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=128)
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    stop: list[str] = Field(default_factory=list)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, ge=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, ge=1e-6, le=10.0)  # less overflows
    logit_bias: dict[int, float] = Field(default_factory=dict)
    min_tokens: int = Field(default=0, ge=0, lt=2**31)
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default_factory=list, max_length=16)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, lt=2**31)
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, fail_fast=True)
    guided_grammar: str | None = None
    kv_retention: float | None = Field(default=None, gt=0.0, le=1.0)  # of this server alone: its KV budgets

    _grammar_spec: GrammarSpec | None = PrivateAttr(None)

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, stop: object) -> object:
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops[: MAX_STOPS + 1]):
            raise PydanticCustomError("stop", "give a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise PydanticCustomError("stop", f"at most {MAX_STOPS} stop strings are possible")
        if not all(0 < len(text) <= MAX_STOP_LENGTH for text in stops):
            raise PydanticCustomError("stop", f"a stop string must have 1 to {MAX_STOP_LENGTH} characters")
        return stops

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_by_token(cls, given: object) -> dict[int, float]:
        if not isinstance(given, dict):
            raise PydanticCustomError("logit_bias", "give an object of token ids and their biases")
        if len(given) > MAX_BIASES:
            raise PydanticCustomError("logit_bias", f"at most {MAX_BIASES} tokens are possible")
        biases = {}
        for token, bias in given.items():
            if not isinstance(token, str) or not re.fullmatch("[0-9]{1,9}", token):
                raise PydanticCustomError("logit_bias", 'the keys must be token ids, like "50256"')
            if type(bias) not in (int, float) or not abs(bias) <= MAX_LOGIT_BIAS:
                raise PydanticCustomError("logit_bias", "a bias must be a number from -100 to 100")
            biases[int(token)] = float(bias)
        return biases

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _refused("stream_options", "'stream_options' is only allowed with 'stream': true")
        if self.truncate_prompt_tokens == 0:
            raise _refused(
                "truncate_prompt_tokens", "'truncate_prompt_tokens' must be positive, or -1 for the maximum"
            )
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        self._grammar_spec = only_spec(self.response_format, self.structured_outputs, guided)
        return self

    @property
    def grammar_spec(self) -> GrammarSpec | None:
        """The form that the answer must have; None: any."""
        return self._grammar_spec


class ChatFields(ToolFields):
    """How a conversation becomes a prompt."""

    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # the chat template writes them itself
    chat_template_kwargs: Annotated[dict[str, Any], at_most(MAX_VARIABLES)] = Field(default_factory=dict)
    # A variable of the template; most have none of that name.
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="after")
    def _check_ending(self) -> Self:
        if self.continue_final_message:
            if self.messages[-1].role != "assistant":
                raise _refused(
                    "continue_final_message", "'continue_final_message' needs a last message of the assistant"
                )
            if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
                raise _refused(
                    "add_generation_prompt",
                    "set 'add_generation_prompt' to false with 'continue_final_message'",
                )
            if self.messages[-1].tool_calls:  # they come after its text
                raise _refused("continue_final_message", "a message with 'tool_calls' cannot be continued")
            self.add_generation_prompt = False
        return self


class ChatRequest(SamplingRequest, ChatFields):
    """Body of POST /v1/chat/completions."""

    NO_EFFECT = _CHAT_NO_EFFECT
    UNSUPPORTED = _CHAT_OFF
    INSTEAD = _CHAT_INSTEAD

    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    include_reasoning: bool = True  # thoughts are a part of the response

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise _refused("top_logprobs", "'top_logprobs' needs 'logprobs': true")
        return self

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        spec = self.grammar_spec
        if spec is None or not self.may_call:
            return self
        if self.demanded:  # calls alone: there is no text that could have a form
            self._grammar_spec = None
        elif spec.kind == "grammar":
            # Where calls may come, the answer is one thing or the other: nobody knows which when its grammar is made. A
            # grammar of the client's own cannot be put into another one, as their rules may have the same names.
            raise bad_request(
                f"'{spec.param}' cannot be used together with 'tools'.", spec.param, "invalid_value"
            )
        return self

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens`, or its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(SamplingRequest):
    """Body of POST /v1/completions. `prompt` is checked by `serve.prompts`, which stops early on huge lists."""

    NO_EFFECT = PLATFORM_FIELDS
    UNSUPPORTED = _COMPLETION_OFF

    prompt: Any
    max_tokens: int = Field(default=16, ge=0, lt=2**31)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, le=128)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise _refused("best_of", "'best_of' is not supported: leave it out, or set it to 'n'")
        if self.max_tokens == 0 and not self.echo:
            raise _refused("max_tokens", "'max_tokens' must be at least 1, except with 'echo': true")
        return self


class TokenizePromptRequest(RequestModel):
    """Body of POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatFields):
    """Body of POST /tokenize with a conversation."""

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(RequestModel):
    """Body of POST /detokenize. `tokens` is checked by `serve.prompts`."""

    model: str | None = None
    tokens: Any
