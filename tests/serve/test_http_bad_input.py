"""Bad input: a 4xx in OpenAI's shape, in under a second, while another stream goes on; never a 500."""

import json
import threading
import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.errors import APIError
from serve.protocol import ChatRequest, CompletionRequest
from tangram_jax.sampling import MAX_BIASES
from tests.serve.http_server import TOKENIZER, serving

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]
JSON = {"Content-Type": "application/json"}


def check_error(response: httpx.Response, status: int, param=None, code=None, message: str = "") -> None:
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert response.json().keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert message in error["message"]
    assert len(response.content) < 2000
    assert (param, code) in ((error["param"], error["code"]), (None, None))


def user(content) -> dict:
    return {"messages": [{"role": "user", "content": content}]}


CHAT_FAULTS = [
    ({}, "messages", "missing_required_parameter", "Missing required parameter: 'messages'"),
    ({"messages": None}, "messages", "missing_required_parameter", ""),
    ({"messages": []}, "messages", "invalid_value", "at least 1 item"),
    ({"messages": HELLO * 4097}, "messages", "invalid_value", "at most 4096 messages"),
    ({"messages": "hi"}, "messages", "invalid_value", "valid list"),
    ({"messages": [{}]}, "messages.0.role", "missing_required_parameter", ""),
    ({"messages": ["hi"]}, "messages.0", "invalid_value", "'role' and 'content'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_required_parameter", ""),
    (user(None), "messages.0.content", "missing_required_parameter", ""),
    ({"messages": [{"role": "assistant"}]}, "messages.0.content", "missing_required_parameter", ""),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "invalid_value", "'assistant'"),
    (
        {"messages": [{"role": "function", "content": "x"}]},
        "messages.0.role",
        "invalid_value",
        "not supported",
    ),
    (user(5), "messages.0.content", "invalid_value", "string"),
    (
        user([{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages.0.content",
        "invalid_value",
        "image_url",
    ),
    (user([{"type": "text"}]), "messages.0.content", "invalid_value", "needs a string"),
    (user(["x"]), "messages.0.content", "invalid_value", ""),
    (
        {"messages": [{"role": "user", "content": "x", "colour": 1}]},
        "messages[].colour",
        "unknown_parameter",
        "",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "function_call": {}}]},
        "messages[].function_call",
        "unsupported_parameter",
        "not supported",
    ),
    (user("x" * 5000), "messages", "context_length_exceeded", "maximum context length is 512 tokens"),
    (user("x" * 5000), "messages", "context_length_exceeded", "the prompt is too long: more than "),
]

CHAT_FIELDS = [
    ({"model": "gpt-4"}, "model", "model_not_found", "The model 'gpt-4' does not exist here"),
    ({"model": 7}, "model", "invalid_value", "string"),
    ({"n": 10**6}, "n", "invalid_value", "less than or equal to 128"),
    ({"n": 0}, "n", "invalid_value", ""),
    ({"n": -1}, "n", "invalid_value", ""),
    ({"n": 1.5}, "n", "invalid_value", ""),
    ({"n": True}, "n", "invalid_value", ""),
    ({"n": 10**400}, "n", "invalid_value", ""),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", ""),
    ({"max_tokens": -5}, "max_tokens", "invalid_value", ""),
    ({"max_tokens": "5"}, "max_tokens", "invalid_value", ""),
    ({"max_tokens": 10**6}, "messages", "context_length_exceeded", "1000000 in the completion"),
    ({"temperature": -0.1}, "temperature", "invalid_value", ""),
    ({"temperature": "hot"}, "temperature", "invalid_value", ""),
    ({"top_p": 1.01}, "top_p", "invalid_value", ""),
    ({"top_k": -2}, "top_k", "invalid_value", ""),
    ({"min_p": 2}, "min_p", "invalid_value", ""),
    ({"kv_retention": 0}, "kv_retention", "invalid_value", "greater than 0"),
    ({"kv_retention": 50}, "kv_retention", "invalid_value", "less than or equal to 1"),
    ({"kv_retention": "all"}, "kv_retention", "invalid_value", ""),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value", ""),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value", ""),
    ({"repetition_penalty": 1e-38}, "repetition_penalty", "invalid_value", "0.000001"),
    ({"seed": 2**63}, "seed", "invalid_value", ""),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "invalid_value", ""),
    ({"stop": ""}, "stop", "invalid_value", "1 to 1024 characters"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value", "at most 16"),
    ({"stop": [1]}, "stop", "invalid_value", ""),
    ({"stop_token_ids": [264]}, "stop_token_ids", "invalid_value", "from 0 to 263"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value", "needs 'logprobs'"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "20"),
    ({"stream": "yes"}, "stream", "invalid_value", ""),
    (
        {"stream_options": {"include_usage": True}},
        "stream_options",
        "invalid_value",
        "only allowed with 'stream'",
    ),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter", ""),
    ({"max_token": 5}, "max_token", "unknown_parameter", "Did you mean 'max_tokens'?"),
    ({"retention": 0.5}, "retention", "unknown_parameter", "Unknown field 'retention'"),
    ({"😀" * 3: 1}, None, None, "Unknown field"),
    ({"x" * 100000: 1}, "x" * 200, "unknown_parameter", ""),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter", "use 'tools'"),
    ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter", "use 'tool_choice'"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_value", "an object of token ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value", "must be token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value", "must be token ids"),
    ({"logit_bias": {"264": 1}}, "logit_bias", "invalid_value", "from 0 to 263"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value", "from -100 to 100"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "invalid_value", "must be a number"),
    ({"logit_bias": {"5": True}}, "logit_bias", "invalid_value", "must be a number"),
    (
        {"logit_bias": {str(i): 1 for i in range(MAX_BIASES + 1)}},
        "logit_bias",
        "invalid_value",
        f"at most {MAX_BIASES}",
    ),
    ({"modalities": ["audio"]}, "modalities", "unsupported_parameter", ""),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter", ""),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", None, "cannot be set"),
    ({"chat_template_kwargs": {"conversations": []}}, "chat_template_kwargs", None, "cannot be set"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", None, "'self' cannot be set"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "invalid_value", ""),
    (
        {"chat_template_kwargs": dict.fromkeys(map(str, range(65)))},
        "chat_template_kwargs",
        "invalid_value",
        "at most 64",
    ),
    ({"continue_final_message": True}, "continue_final_message", "invalid_value", "needs a last message"),
    (
        {
            "messages": [{"role": "assistant", "content": "a"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "add_generation_prompt",
        "invalid_value",
        "to false with",
    ),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value", "must be positive"),
]

TEXT_FAULTS = [
    ({}, "prompt", "missing_required_parameter", ""),
    ({"prompt": ""}, "prompt", "invalid_value", "empty"),
    ({"prompt": []}, "prompt", "invalid_value", "empty"),
    ({"prompt": [[]]}, "prompt", "invalid_value", "empty"),
    ({"prompt": ["a", ""]}, "prompt", "invalid_value", "empty"),
    ({"prompt": 5}, "prompt", "invalid_value", "must be a string"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_value", ""),
    ({"prompt": [True]}, "prompt", "invalid_value", ""),
    ({"prompt": [1, "a"]}, "prompt", "invalid_value", "holds a, which is not a token id"),
    ({"prompt": ["a", 1]}, "prompt", "invalid_value", ""),
    ({"prompt": [[1], ["a"]]}, "prompt", "invalid_value", ""),
    ({"prompt": [-1]}, "prompt", "invalid_value", "holds -1"),
    ({"prompt": [264]}, "prompt", "invalid_value", "from 0 to 263"),
    ({"prompt": [10**300]}, "prompt", "invalid_value", ""),
    ({"prompt": ["a"] * 129}, "prompt", "invalid_value", "at most 128"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt", "invalid_value", "130 choices"),
    ({"prompt": "x" * 600}, "prompt", "context_length_exceeded", "resulted in 600 tokens"),
    ({"prompt": "x" * 512}, "prompt", "context_length_exceeded", "resulted in 512 tokens"),
    ({"prompt": "x" * 10**6}, "prompt", "context_length_exceeded", "resulted in more than"),
    ({"prompt": [9] * 10**6}, "prompt", "context_length_exceeded", "resulted in 1000000 tokens"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value", ""),
    ({"prompt": "a", "logprobs": True}, "logprobs", "invalid_value", ""),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "invalid_value", "except with 'echo'"),
    ({"prompt": "a", "best_of": 3}, "best_of", "invalid_value", "'best_of' is not supported"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter", ""),
    ({"prompt": "a", "messages": []}, "messages", "unknown_parameter", ""),
]

DEEP = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(9000)) + 'r9000: "a"'  # overflows a stack

RAW = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b'{"messages": [}', "not valid JSON"),
    (b"\xff\xfe", "not valid JSON"),
    (b'{"temperature": NaN}', "not valid JSON"),
    (b'{"temperature": -Infinity}', "not valid JSON"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not valid JSON"),
    (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"a":' * 100_000, "not valid JSON"),
    (b'{"n": 1' + b"0" * 100_000 + b"}", "not valid JSON"),
    (b"[]", "must be a JSON object"),
    (b"null", "must be a JSON object"),
    (b'"text"', "must be a JSON object"),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "temperature"),
]


def no_status(case) -> str:
    return json.dumps(case)[:60] if isinstance(case, dict) else ""


@pytest.mark.parametrize(("body", "param", "code", "message"), CHAT_FAULTS, ids=no_status)
def test_chat_faults(served, body, param, code, message):
    check_error(served.post(CHAT, body), 400, param, code, message)
    assert served.engine.requests == []


@pytest.mark.parametrize(("fields", "param", "code", "message"), CHAT_FIELDS, ids=no_status)
def test_chat_fields(served, fields, param, code, message):
    status = 404 if code == "model_not_found" else 400
    check_error(served.post(CHAT, {"messages": HELLO, **fields}), status, param, code, message)
    assert served.engine.requests == []


@pytest.mark.parametrize(("body", "param", "code", "message"), TEXT_FAULTS, ids=no_status)
def test_completion_faults(served, body, param, code, message):
    check_error(served.post(TEXT, body), 400, param, code, message)
    assert served.engine.requests == []


@pytest.mark.parametrize(("raw", "message"), RAW, ids=lambda case: str(case)[:30])
def test_raw_bodies(served, raw, message):
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        response = served.http.post(path, content=raw, headers=JSON)
        assert response.status_code == 400
        if path == CHAT:
            check_error(response, 400, message=message)


def test_content_type(served):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = served.http.post(CHAT, content=b"{}", headers={"Content-Type": kind})
        check_error(response, 415, None, "unsupported_media_type", "application/json")
    headers = {"Content-Type": "application/json; charset=utf-8"}
    served.http.post(CHAT, content=json.dumps(user("x")), headers=headers).raise_for_status()


def test_unknown_routes_and_methods(served):
    check_error(served.http.get("/v1/nothing"), 404, None, "not_found", "GET /v1/nothing")
    check_error(served.http.post("/v1/embeddings", json={}), 404, None, "not_found")
    check_error(served.http.get(CHAT), 405, None, "method_not_allowed")
    check_error(served.http.delete("/v1/models"), 405, None, "method_not_allowed")
    check_error(served.http.get("/v1/models/none"), 404, "model", "model_not_found")
    check_error(served.http.get("/" + "x" * 3000), 404, None, "not_found")


ANTHROPIC = {"anthropic-version": "2023-06-01"}


def test_routes_of_both_apis_answer_in_the_form_of_who_asks(served):
    """Anthropic's clients send a header that says so."""
    for method, path, status, kind, words in (
        ("GET", "/v1/models/none", 404, "not_found_error", "The model 'none' does not exist here"),
        ("GET", "/v1/nothing", 404, "not_found_error", "Unknown route: GET /v1/nothing"),
        ("DELETE", "/v1/models", 405, "invalid_request_error", "Method not allowed: DELETE /v1/models"),
    ):
        found = served.http.request(method, path, headers=ANTHROPIC)
        assert (found.status_code, found.json().keys()) == (status, {"type", "error"})
        assert found.json()["error"]["type"] == kind and words in found.json()["error"]["message"]
        assert served.http.request(method, path).json()["error"].keys() == {
            "message",
            "type",
            "param",
            "code",
        }
    with serving(api_keys=("secret",)) as closed:
        refused = closed.http.get("/v1/models", headers=ANTHROPIC)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_tokenizer_routes(served):
    check_error(served.post("/tokenize", {}), 400, "prompt", "missing_required_parameter")
    check_error(served.post("/tokenize", {"prompt": 1}), 400, "prompt", "invalid_value")
    both = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    check_error(
        served.post("/tokenize", both), 400, "prompt", "invalid_value", "either 'prompt' or 'messages'"
    )
    check_error(served.post("/tokenize", {"prompt": "x", "model": "y"}), 404, "model", "model_not_found")
    check_error(served.post("/tokenize", {"messages": []}), 400, "messages", "invalid_value")
    check_error(served.post("/detokenize", {}), 400, "tokens", "missing_required_parameter")
    check_error(served.post("/detokenize", {"tokens": "x"}), 400, "tokens", "invalid_value")
    check_error(served.post("/detokenize", {"tokens": [264]}), 400, "tokens", "invalid_value")


def test_template_errors_are_the_clients_fault(served, monkeypatch):
    monkeypatch.setattr(TOKENIZER._fast, "chat_template", "{{ raise_exception('roles must alternate') }}")
    check_error(served.post(CHAT, user("x")), 400, "messages", None, "roles must alternate")
    monkeypatch.setattr(TOKENIZER._fast, "chat_template", None)
    check_error(served.post(CHAT, user("x")), 400, "messages", None, "no chat template")


def test_huge_body_announced_or_not(served):
    limit = 8 * 2**20
    check_error(
        served.http.post(CHAT, content=b" " * (limit + 1), headers=JSON), 413, None, "request_too_large"
    )

    def endless():
        for _ in range(20 * 16):
            yield b" " * 2**16

    check_error(served.http.post(CHAT, content=endless(), headers=JSON), 413, None, "request_too_large")


def test_fast_while_a_stream_goes_on(served):
    """Each bad request is answered in under a second, and the stream never pauses for long."""
    served.script("tick ", cycle=True, delay=0.02)
    attacks = [
        (TEXT, json.dumps({"prompt": "word " * 1_600_000}).encode(), 400),
        (TEXT, json.dumps({"prompt": " " * 8_000_000}).encode(), 400),
        (TEXT, json.dumps({"prompt": "x" * 8_000_000}).encode(), 400),
        (TEXT, json.dumps({"prompt": [1] * 2_000_000}).encode(), 400),
        (TEXT, json.dumps({"prompt": ["a"] * 1_000_000}).encode(), 400),
        (CHAT, json.dumps(user("é" * 1_300_000)).encode(), 400),
        (CHAT, json.dumps({"messages": [{}] * 1_000_000}).encode(), 400),
        (CHAT, json.dumps({"messages": HELLO * 150_000}).encode(), 400),
        (CHAT, json.dumps({"messages": HELLO, "stop": ["ab"] * 1_000_000}).encode(), 400),
        (CHAT, json.dumps({"messages": HELLO, "n": 10**6}).encode(), 400),
        (CHAT, b"[" * 8_000_000, 400),
        (CHAT, b" " * 9_000_000, 413),
        ("/detokenize", json.dumps({"tokens": [-1] * 2_000_000}).encode(), 400),
        (CHAT, json.dumps({"messages": HELLO, "guided_regex": "a?" * 2000}).encode(), 400),
        (CHAT, json.dumps({"messages": HELLO, "guided_grammar": DEEP}).encode(), 400),
    ]
    gaps = []
    with httpx.Client(base_url=served.url, timeout=20, trust_env=False) as other:
        body = {"messages": HELLO, "stream": True, "max_tokens": 450}
        with other.stream("POST", CHAT, json=body) as response:
            stop = threading.Event()

            def read():
                last = time.monotonic()
                for _ in response.iter_bytes():
                    now = time.monotonic()
                    gaps.append(now - last)
                    last = now
                    if stop.is_set():
                        break

            reader = threading.Thread(target=read)
            reader.start()
            for path, content, status in attacks:
                for _ in range(3):  # a busy machine gets further tries
                    start = time.monotonic()
                    answer = served.http.post(path, content=content, headers=JSON)
                    seconds = time.monotonic() - start
                    if seconds < 1.0:
                        break
                assert seconds < 1.0, (path, content[:60], seconds)
                check_error(answer, status)
            assert reader.is_alive()  # the stream outlived all of them
            stop.set()
            reader.join(timeout=20)
    assert max(gaps) < 2.0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(st.data())
def test_any_json_is_accepted_or_refused_with_an_api_error(data):
    """No JSON value makes the parser fail in another way."""
    for model, start in ((ChatRequest, {"messages": HELLO}), (CompletionRequest, {"prompt": "x"})):
        known = sorted({*model.model_fields, *model.NO_EFFECT, *model.UNSUPPORTED})
        body = start | data.draw(st.dictionaries(st.sampled_from(known), json_values, max_size=3))
        try:
            assert isinstance(model.parse(body), model)
        except APIError as error:
            assert error.status == 400
            assert error.message
