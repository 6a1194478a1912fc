"""/v1/chat/completions through the openai client, and its server-sent events byte by byte."""

import json

import openai
import pytest

from serve.request import SamplingParams
from tests.serve.fake_engine import Script
from tests.serve.http_server import EOS, TOKENIZER, ids

HELLO = [{"role": "user", "content": "Hi"}]
PROMPT_IDS = TOKENIZER.apply_chat_template(HELLO)


def chat(served, **options):
    return served.openai.chat.completions.create(model="tiny", messages=HELLO, **options)


def events(response) -> list[str]:
    """Payloads of the events; checks the framing."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    text = response.text
    assert text.endswith("\n\n")
    blocks = text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def test_answer_usage_and_what_the_engine_got(served):
    served.script([*ids("Hello ☕"), EOS], finish="stop", cached_tokens=9)
    completion = chat(served, max_tokens=50, temperature=0.25, top_p=0.5, seed=-7, user="me", store=False)
    choice = completion.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello ☕")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (completion.object, completion.model) == ("chat.completion", "tiny")
    assert completion.id.startswith("chatcmpl-")
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT_IDS), 10)
    assert usage.total_tokens == len(PROMPT_IDS) + 10
    assert usage.prompt_tokens_details.cached_tokens == 9
    (request,) = served.engine.requests
    assert request.prompt_ids == PROMPT_IDS
    assert request.sampling == SamplingParams(max_tokens=50, temperature=0.25, top_p=0.5, seed=-7)


def test_defaults_fill_the_context(served):
    chat(served)
    sampling = served.engine.requests[0].sampling
    assert sampling == SamplingParams(max_tokens=512 - len(PROMPT_IDS))
    chat(served, max_completion_tokens=3, max_tokens=5)
    assert served.engine.requests[1].sampling.max_tokens == 3


def test_extensions_reach_the_engine(served):
    extra = dict(
        top_k=-1, min_p=0.1, repetition_penalty=1.5, min_tokens=2, ignore_eos=True, stop_token_ids=[9, 9, 8]
    )
    platform = dict(
        presence_penalty=-2, frequency_penalty=2, temperature=1e-9, logit_bias={"5": 100, "263": -0.5}
    )
    chat(served, max_tokens=7, **platform, extra_body=extra)
    assert served.engine.requests[0].sampling == SamplingParams(
        max_tokens=7, temperature=0.0, top_k=0, min_p=0.1, repetition_penalty=1.5, min_tokens=2, ignore_eos=True,
        stop_token_ids=(9, 8), presence_penalty=-2.0, frequency_penalty=2.0, logit_bias={5: 100.0, 263: -0.5},
    )  # fmt: skip
    assert served.engine.requests[0].retention is None
    chat(served, max_tokens=7, top_p=0, extra_body={"kv_retention": 0.25})
    assert served.engine.requests[1].retention == 0.25
    assert (served.engine.requests[1].sampling.top_k, served.engine.requests[1].sampling.top_p) == (1, 1.0)


def test_content_parts_and_roles(served):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "ok", "refusal": None, "annotations": []},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None},
    ]
    served.openai.chat.completions.create(model="tiny", messages=messages)
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert TOKENIZER.decode(served.engine.requests[0].prompt_ids, skip_special_tokens=False) == expected


def test_an_answer_can_be_sent_back_as_it_came(served):
    answer = chat(served, max_tokens=5).choices[0].message
    messages = [*HELLO, answer, {"role": "user", "content": "more"}]
    assert (
        served.openai.chat.completions.create(model="tiny", messages=messages).choices[0].message.content
        == "hello"
    )


def test_stream_framing(served):
    served.script(ids("hé"), finish="stop")
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    response = served.post("/v1/chat/completions", body)
    *payloads, done = events(response)
    assert done == "[DONE]"
    chunks = [json.loads(payload) for payload in payloads]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in chunks} == {response.headers["x-request-id"]}
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    # The scripted stop token is the last byte: counted, hidden, and its character never completes.
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "h\ufffd"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_null_among_stream_options(served):
    chunks = list(chat(served, stream=True, stream_options={"include_usage": None}))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_stream_without_usage_and_with_running_usage(served):
    served.script("abc", delay=0.01)
    chunks = list(chat(served, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abc"
    assert all(chunk.usage is None for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(served, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 3 and counts[0] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"), [("END", "one two "), (["zzz", "wo"], "one t"), ([], "one two END three")]
)
def test_stop_strings(served, stream, stop, text):
    served.script("one two END three", finish="length", delay=0.001)
    if stream:
        chunks = list(chat(served, stop=stop, stream=True))
        got = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = chat(served, stop=stop).choices[0]
        got, reason = choice.message.content, choice.finish_reason
    assert (got, reason) == (text, "stop" if stop else "length")
    request_id = served.engine.requests[0].request_id
    assert served.engine.aborted == ([(request_id, 0)] if stop else [])


def test_stop_string_in_output_and_usage(served):
    served.script("one two END three", finish="none")
    completion = chat(served, stop="END", extra_body={"include_stop_str_in_output": True})
    assert completion.choices[0].message.content == "one two END"
    assert completion.choices[0].stop_reason == "END"
    assert completion.usage.completion_tokens == 11


def test_choices_with_their_own_ends(served):
    served.engine.scripts = {
        0: Script([*ids("first"), EOS], finish="stop"),
        1: Script(ids("second."), finish="none"),
        2: Script(ids("third"), finish="length"),
    }
    completion = chat(served, n=3, stop=".")
    found = [(c.index, c.message.content, c.finish_reason) for c in completion.choices]
    assert found == [(0, "first", "stop"), (1, "second", "stop"), (2, "third", "length")]
    assert completion.usage.prompt_tokens == len(PROMPT_IDS)
    assert completion.usage.completion_tokens == 6 + 7 + 5
    assert served.engine.aborted == [(served.engine.requests[0].request_id, 1)]


def test_streamed_choices_are_told_apart(served):
    served.engine.scripts = {0: Script(ids("aaaa")), 1: Script(ids("bb"))}
    texts, reasons, roles = ["", ""], [None, None], [0, 0]
    for chunk in chat(served, n=2, stream=True):
        (choice,) = chunk.choices
        assert reasons[choice.index] is None
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
        reasons[choice.index] = choice.finish_reason
    assert (texts, reasons, roles) == (["aaaa", "bb"], ["length", "length"], [1, 1])


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(served, stream):
    served.script(ids("é!"))
    if stream:
        chunks = [c.choices[0] for c in chat(served, logprobs=True, top_logprobs=2, stream=True)]
        content = [token for choice in chunks if choice.logprobs for token in choice.logprobs.content]
    else:
        content = chat(served, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [token.bytes for token in content] == [[0xC3], [0xA9], [0x21]]
    assert [token.token for token in content] == ["\ufffd", "\ufffd", "!"]
    assert [token.logprob for token in content] == [-0.5] * 3
    assert [(t.token, t.logprob) for t in content[2].top_logprobs] == [("!", -0.5), ('"', -1.5)]


def test_logprobs_without_top(served):
    content = chat(served, logprobs=True).choices[0].logprobs.content
    assert served.engine.requests[0].sampling.logprobs == 0
    assert [token.top_logprobs for token in content] == [[]] * 5


def test_no_top_logprobs_need_no_logprobs(served):
    """Clients send 0 for "off", as vLLM takes it."""
    assert chat(served, top_logprobs=0).choices[0].logprobs is None
    assert served.engine.requests[0].sampling.logprobs is None


def test_impossible_tokens_have_a_finite_logprob(served):
    original = served.engine.submit

    def submit(request, on_output):
        def patched(output):
            output.logprob = float("-inf")
            on_output(output)

        original(request, patched)

    served.engine.submit = submit
    try:
        response = served.post("/v1/chat/completions", {"messages": HELLO, "logprobs": True})
    finally:
        del served.engine.submit
    assert response.json()["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_token_ids_in_the_answer(served):
    body = {"messages": HELLO, "return_token_ids": True, "logprobs": True, "return_tokens_as_token_ids": True}
    answer = served.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["token_ids"] == ids("hello")
    assert answer["prompt_token_ids"] == PROMPT_IDS
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{ids('h')[0]}"
    streamed = served.post("/v1/chat/completions", body | {"n": 2, "stream": True})
    chunks = [json.loads(event) for event in events(streamed)[:-1]]
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == 2 * [PROMPT_IDS]
    assert all("role" in chunk["choices"][0]["delta"] for chunk in chunks if "prompt_token_ids" in chunk)


def test_continue_final_message(served):
    messages = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    served.post(
        "/v1/chat/completions", {"messages": messages, "continue_final_message": True}
    ).raise_for_status()
    text = TOKENIZER.decode(served.engine.requests[0].prompt_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nOnce upon")


def test_a_continued_message_keeps_its_space(served, monkeypatch):
    """Tokenizers like Llama 2's drop the first space of a text: here it is in the middle of one."""
    monkeypatch.setattr(TOKENIZER, "_strip_leading_space", True)
    served.script(" a time")
    body = {"messages": [*HELLO, {"role": "assistant", "content": "Once upon"}]}
    for given, text in (({}, "a time"), ({"continue_final_message": True}, " a time")):
        answer = served.post("/v1/chat/completions", body | given).json()
        assert answer["choices"][0]["message"]["content"] == text


def test_engine_errors(served):
    served.script([], error="the page pool is broken")
    with pytest.raises(openai.InternalServerError, match="the page pool is broken"):
        chat(served)
    with pytest.raises(openai.APIError, match="the page pool is broken"):
        list(chat(served, stream=True))
    response = served.post("/v1/chat/completions", {"messages": HELLO, "stream": True})
    assert events(response)[-1] == "[DONE]"
    assert response.status_code == 200
    served.script("ab", finish="abort")
    with pytest.raises(openai.InternalServerError) as caught:
        chat(served)
    assert caught.value.status_code == 503
