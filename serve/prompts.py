"""From a request body to token ids and sampling parameters. Runs on worker threads: a text may be megabytes long."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve.errors import TOO_LONG, bad_request, too_long
from serve.grammar import Grammar
from serve.harmony_prompt import EFFORTS
from serve.protocol import ChatFields, ChatRequest, CompletionRequest, SamplingRequest
from serve.request import SamplingParams
from serve.spellings import Spellings
from serve.text import TextTokenizer
from serve.thought_prompt import NO_THOUGHTS, ThoughtSupport
from serve.thoughts import Beginning
from serve.tool_prompt import ToolSupport

_CHARS_PER_TOKEN = 4  # a text with more characters a token than this allows is counted in slices first
_SLICE = 32768  # characters
_SLICE_SLACK = 8  # tokens that cutting a text in two may add, generously
_LONGEST_WHOLE = 2**20  # characters of a text whose tokens may be more than a prompt's,
_LONGEST_PER_TOKEN = 8  # or so many for each token of the longest prompt
_LONGEST_SPECIAL = 256  # characters; more than any special token has
MAX_SCORED_ECHO = 65_536  # tokens of prompts times `n`: one is half a kilobyte of answer with 20 logprobs
_MIN_TEMPERATURE = 1e-5  # below this, logits / temperature overflows: greedy is the limit
_TEMPLATE_RESERVED = frozenset(  # arguments of the template renderer that are not variables of the template
    [
        "self",
        "messages",
        "conversation",
        "conversations",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
        "tools",
        "documents",
    ]
)


@dataclass(frozen=True)
class Prompt:
    """Token ids, and their text where the client gave text (of a chat, the whole conversation in the model's format)."""

    ids: list[int]
    text: str | None = None
    beginning: Beginning = "none"  # of a chat: where its answer begins


def encode_bounded(
    tokenizer: TextTokenizer,
    text: str,
    limit: int,
    param: str,
    *,
    add_special_tokens: bool,
    truncate: int | None = None,
) -> list[int]:
    """Token ids of a text that must leave room for one more token in `limit`; the last `truncate` ones if given.

    A text that is much too long is not encoded as a whole: slices are counted until it is certain.
    """
    if truncate is not None:
        check_length(text, limit, param)
    elif len(text) > _CHARS_PER_TOKEN * limit:
        count = 0
        for start in range(0, len(text), _SLICE):
            piece = text[start : start + _SLICE]
            count += max(0, len(tokenizer.encode(piece, add_special_tokens=False)) - _SLICE_SLACK)
            if count >= limit:
                raise too_long(limit, count, param, at_least=True)
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return fit_prompt(ids, limit, param, truncate)


def check_length(text: str, limit: int, param: str) -> None:
    """400 for a text that is far longer than a prompt of `limit` tokens, where all of its tokens are wanted all the same.

    Each takes 300 bytes, and when millions of them go all threads wait. A part of the text would not do: which tokens
    its end has may depend on how it begins.
    """
    most = max(_LONGEST_WHOLE, _LONGEST_PER_TOKEN * limit)
    if len(text) > most:
        raise bad_request(
            f"The {param} has {len(text)} characters, but at most {most} are turned into tokens here: send less of it, or "
            "its end alone if it is to be truncated.",
            param,
            "string_above_max_length",
        )


def fit_prompt(ids: list[int], limit: int, param: str, truncate: int | None) -> list[int]:
    """The prompt, or its last `truncate` tokens; 400 where it is empty or too long."""
    if truncate is not None:
        ids = ids[-truncate:]
    if not ids:
        raise bad_request(f"The {param} is empty: give at least one token.", param, "invalid_value")
    if len(ids) >= limit:
        raise too_long(limit, len(ids), param)
    return ids


def _known(ids: list[int], vocab_size: int, param: str) -> list[int]:
    """The tokens of a text; 400 where the tokenizer has one that the model lacks."""
    if (most := max(ids)) >= vocab_size:
        raise bad_request(
            f"The {param} holds token {most} of the tokenizer, but the model knows only those below {vocab_size}: leave "
            "that special token out, or give the model a tokenizer that fits it.",
            param,
            "invalid_value",
        )
    return ids


def _kept(truncate: int | None, limit: int, wanted: int | None) -> int | None:
    """Tokens that `truncate_prompt_tokens` leaves: -1 stands for as many as leave room for those to be generated."""
    return max(1, limit - max(1, wanted or 1)) if truncate == -1 else truncate


def chat_text(tools: ToolSupport, fields: ChatFields) -> str:
    """The conversation in the model's own format."""
    reserved = sorted(_TEMPLATE_RESERVED & fields.chat_template_kwargs.keys())
    if reserved:
        raise bad_request(f"'{reserved[0]}' cannot be set in 'chat_template_kwargs'.", "chat_template_kwargs")
    options = dict(fields.chat_template_kwargs)
    if fields.reasoning_effort is not None:
        options["reasoning_effort"] = fields.reasoning_effort
    if tools.harmony and options.get("reasoning_effort", EFFORTS[0]) not in EFFORTS:
        raise bad_request(
            f"Invalid value for 'reasoning_effort': this model knows {', '.join(EFFORTS)}.",
            "reasoning_effort",
            "invalid_value",
        )
    messages, described = tools.conversation(fields)
    if fields.continue_final_message:
        options["continue_final_message"] = True
        last = messages[-1]
        if tools.harmony and last.get("thinking") and not last["content"]:  # it was cut in its thoughts
            options["continue_final_message"] = "thinking"
    if described:
        options["tools"] = described
    try:
        return tools.tokenizer.render_chat(messages, fields.add_generation_prompt, **options)
    except ValueError as error:  # no template, or the template refuses this order of roles
        raise bad_request(str(error)[:500], "messages") from None


def chat_prompt(
    tools: ToolSupport,
    request: ChatRequest,
    limit: int,
    vocab_size: int,
    spellings: Spellings,
    thoughts: ThoughtSupport = NO_THOUGHTS,
) -> Prompt:
    """The prompt of a chat completion: its first turns in the tokens in which this server read and wrote them."""
    tokenizer, text = tools.tokenizer, chat_text(tools, request)
    beginning = thoughts.beginning(request, text)
    if request.truncate_prompt_tokens is None and not request.add_special_tokens:
        ids = _as_spelled(tokenizer, text, limit - (request.token_limit or 1), spellings)
        if ids:
            return Prompt(_known(ids, vocab_size, "messages"), text, beginning)
    ids = encode_bounded(
        tokenizer,
        text,
        limit,
        "messages",
        add_special_tokens=request.add_special_tokens,
        truncate=_kept(request.truncate_prompt_tokens, limit, request.token_limit),
    )
    whole = request.truncate_prompt_tokens is None
    return Prompt(_known(ids, vocab_size, "messages"), text if whole else None, beginning)


def _as_spelled(tokenizer: TextTokenizer, text: str, limit: int, spellings: Spellings) -> list[int] | None:
    """`text` in the tokens of the longest known beginning that can be cut off, and the tokenizer's; at most `limit`."""
    for characters, ids in spellings.beginnings(text):
        rest = text[characters:]
        if len(rest) > _CHARS_PER_TOKEN * limit:
            continue
        # Only before a special token: elsewhere the cut could fall into what belongs together.
        start = tokenizer.encode(rest[:_LONGEST_SPECIAL], add_special_tokens=False)
        if start and start[0] not in tokenizer.special_ids:
            continue
        ids += tokenizer.encode(rest, add_special_tokens=False)
        if len(ids) <= limit:
            return ids
    return None


def completion_prompts(
    tokenizer: TextTokenizer, request: CompletionRequest, limit: int, vocab_size: int, max_choices: int
) -> list[Prompt]:
    """The prompts of a text completion: a text, a list of texts, token ids, or a list of lists of token ids."""
    given = _as_list_of_prompts(request.prompt)
    truncate = _kept(request.truncate_prompt_tokens, limit, request.max_tokens)
    check_num_choices(len(given), request.n, max_choices)
    prompts = []
    for item in given:
        if isinstance(item, str):
            ids = encode_bounded(
                tokenizer,
                item,
                limit,
                "prompt",
                add_special_tokens=request.add_special_tokens,
                truncate=truncate,
            )
            prompts.append(Prompt(_known(ids, vocab_size, "prompt"), item if truncate is None else None))
        else:
            ids = fit_prompt(item, limit, "prompt", truncate)
            prompts.append(Prompt(check_token_ids(ids, vocab_size, "prompt")))
    return prompts


def check_num_choices(num_prompts: int, n: int, max_choices: int) -> None:
    """400 when one request asks for more choices than the server allows."""
    if num_prompts * n > max_choices:
        raise bad_request(
            f"{num_prompts} prompt(s) with 'n': {n} make {num_prompts * n} choices: this server takes at most "
            f"{max_choices} in one request.",
            "prompt" if num_prompts > 1 else "n",
            "invalid_value",
        )


def _as_list_of_prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise bad_request(
            "'prompt' must be a string, a list of strings, a list of token ids, or a list of such lists.",
            "prompt",
            "invalid_value",
        )
    if not prompt:
        raise bad_request("'prompt' is empty: give at least one token.", "prompt", "invalid_value")
    kind = type(prompt[0])
    if kind is int:
        return [prompt]
    if kind not in (str, list) or any(type(item) is not kind for item in prompt):
        raise bad_request(
            "'prompt' must hold strings only, token ids only, or lists of token ids only.",
            "prompt",
            "invalid_value",
        )
    return prompt


def _check_scored_echo(num_tokens: int, n: int) -> None:
    """400 when small prompts would make a huge answer: their log-probabilities are a part of every choice."""
    if n > 1 and num_tokens * n > MAX_SCORED_ECHO:
        raise bad_request(
            f"'echo' with 'logprobs' and 'n': {n} writes the {num_tokens} tokens of the prompt {n} times: at most "
            f"{MAX_SCORED_ECHO} in all are possible. Ask for the prompt's with 'n': 1, and for choices without 'echo'.",
            "n",
            "invalid_value",
        )


def check_token_ids(ids: Sequence[Any], vocab_size: int, param: str) -> list[int]:
    """Token ids that the model knows, or a 400 that names the first other one."""
    for i in ids:
        if type(i) is not int or not 0 <= i < vocab_size:
            raise bad_request(
                f"'{param}' holds {str(i)[:40]}, which is not a token id: expected an integer from 0 to "
                f"{vocab_size - 1}.",
                param,
                "invalid_value",
            )
    return list(ids)


def sampling_params(
    request: SamplingRequest,
    prompts: Sequence[Prompt],
    limit: int,
    vocab_size: int,
    where: str,
    grammar: Grammar | None = None,
) -> list[SamplingParams]:
    """One SamplingParams a prompt (they differ in `max_tokens` alone)."""
    check_token_ids(request.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids(list(request.logit_bias), vocab_size, "logit_bias")
    if isinstance(request, ChatRequest):
        wanted = request.token_limit
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        prompt_logprobs = None
    elif isinstance(request, CompletionRequest):
        # Echo alone still takes one decode step, whose token is dropped: the engine always generates.
        wanted = max(1, request.max_tokens)
        logprobs = request.logprobs
        prompt_logprobs = request.logprobs if request.echo else None
        if prompt_logprobs is not None:
            _check_scored_echo(sum(len(prompt.ids) for prompt in prompts), request.n)
    else:
        raise TypeError(f"expected a ChatRequest or CompletionRequest, found {type(request).__name__}")
    greedy = request.temperature < _MIN_TEMPERATURE
    params = []
    for prompt in prompts:
        room = limit - len(prompt.ids)
        if wanted is not None and wanted > room:
            raise bad_request(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{len(prompt.ids) + wanted} tokens ({len(prompt.ids)} in the {where}, {wanted} in the completion). "
                f"Please reduce the length of the {where} or the completion.",
                where,
                TOO_LONG,
            )
        max_tokens = room if wanted is None else wanted
        if request.min_tokens > max_tokens:
            raise bad_request(
                f"'min_tokens' ({request.min_tokens}) must not exceed the number of tokens that can be generated "
                f"({max_tokens}).",
                "min_tokens",
                "invalid_value",
            )
        params.append(
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0 if greedy else request.temperature,
                top_p=request.top_p or 1.0,
                # A nucleus of mass 0 holds one token, the likeliest.
                top_k=1 if request.top_p == 0.0 else max(0, request.top_k),
                min_p=request.min_p,
                seed=request.seed,
                presence_penalty=request.presence_penalty,
                frequency_penalty=request.frequency_penalty,
                repetition_penalty=request.repetition_penalty,
                logit_bias=request.logit_bias,
                min_tokens=request.min_tokens,
                ignore_eos=request.ignore_eos,
                stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids)),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                grammar=grammar,
            )
        )
    return params
