"""Structured output over HTTP: every field, streamed and not, both endpoints, and what is refused."""

import contextlib
import json
import re
import socket
import threading

import httpx
import openai
import pytest

from serve.structured import GrammarSpec
from tests.serve.fake_engine import Script
from tests.serve.http_server import TOKENIZER, wait_until
from tests.serve.test_http_bad_input import CHAT, HELLO, TEXT, check_error, no_status

CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"'
SCHEMA = {"type": "object"}
FORMS = [
    (
        {"response_format": {"type": "xml"}},
        "response_format.type",
        "unsupported_parameter",
        "'structured_outputs' for",
    ),
    (
        {"response_format": {"type": "structural_tag", "structures": []}},
        "response_format.type",
        "unsupported_parameter",
        "'structural_tag'",
    ),
    ({"response_format": "json"}, "response_format", "invalid_value", "an object with a 'type'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value", "must be there"),
    (
        {"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}},
        "response_format",
        "invalid_value",
        "belongs to",
    ),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        "response_format.schema",
        "unknown_parameter",
        "",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "invalid_value",
        "JSON schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}},
        "response_format.json_schema.shema",
        "unknown_parameter",
        "",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "obect"}}}},
        "response_format.json_schema.schema",
        "invalid_value",
        "Invalid type: obect",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": dict.fromkeys(map(str, range(17)))}},
        "response_format.json_schema",
        "invalid_value",
        "at most 16 entries",
    ),
    (
        {"guided_json": {"properties": {"a": {"items": {"uniqueItems": True}}}}},
        "guided_json",
        "invalid_value",
        "(at '#/properties/a/items')",
    ),
    ({"guided_json": "{"}, "guided_json", "invalid_value", "not valid JSON"),
    ({"guided_json": "[1]"}, "guided_json", "invalid_value", "as an object or as a string"),
    ({"guided_json": '{"const": 1e999}'}, "guided_json", "invalid_value", "larger than a double can be"),
    ({"guided_json": 7}, "guided_json", "invalid_value", "as an object or as a string"),
    ({"guided_json": {"enum": ["x" * 131072]}}, "guided_json", "invalid_value", "at most 131072 characters"),
    ({"guided_json": '"' + "x" * 131072}, "guided_json", "invalid_value", "at most 131072 characters"),
    ({"guided_regex": "a(b"}, "guided_regex", "invalid_value", "unclosed group"),
    ({"guided_regex": "a(?!b)"}, "guided_regex", "invalid_value", "look-around"),
    ({"guided_regex": ""}, "guided_regex", "invalid_value", "empty"),
    ({"guided_regex": "a*" * 3000}, "guided_regex", "invalid_value", "at most 4096 characters"),
    ({"guided_regex": ["a"]}, "guided_regex", "invalid_value", "string"),
    ({"guided_choice": []}, "guided_choice", "invalid_value", "at least one choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "invalid_value", "must not be empty"),
    ({"guided_choice": "a"}, "guided_choice", "invalid_value", "list"),
    ({"guided_choice": ["a", 1]}, "guided_choice.1", "invalid_value", "string"),
    ({"guided_choice": ["x" * 1000] * 200}, "guided_choice", "invalid_value", "at most 131072 characters"),
    (
        {"guided_grammar": 'start: "a" b\nb: foo'},
        "guided_grammar",
        "invalid_value",
        "line 2, column 4: unknown name",
    ),
    ({"guided_grammar": CHAIN}, "guided_grammar", "invalid_value", "nested too deep"),
    ({"guided_grammar": 'start: ""'}, "guided_grammar", "invalid_value", "only the empty one"),
    (
        {"guided_json": SCHEMA, "guided_regex": "a"},
        "guided_regex",
        "invalid_value",
        "'guided_json' and 'guided_regex' cannot be used together",
    ),
    (
        {"guided_json": SCHEMA, "response_format": {"type": "json_object"}},
        "response_format",
        "invalid_value",
        "together",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]},
        "structured_outputs.regex",
        "invalid_value",
        "together",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value", "exactly one of"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "invalid_value", "exactly one of"),
    (
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        "structured_outputs",
        "invalid_value",
        "exactly one of",
    ),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "unsupported_parameter",
        "not supported",
    ),
    (
        {"structured_outputs": {"regexp": "a"}},
        "structured_outputs.regexp",
        "unknown_parameter",
        "Did you mean 'structured_outputs.regex'?",
    ),
    ({"structured_outputs": {"json": {"type": 5}}}, "structured_outputs.json", "invalid_value", ""),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "invalid_value", "no text can follow it"),
    (
        {"guided_json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
        "guided_json",
        "invalid_value",
        "oneOf constraints are not supported. Write anyOf.",
    ),
    ({"structured_outputs": "json"}, "structured_outputs", "invalid_value", "give an object"),
    ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "unsupported_parameter", ""),
]

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip
NAMED = {"name": "person", "description": "A person", "schema": PERSON, "strict": True}


def person(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"name", "age"} and 0 <= value["age"] <= 99 and len(value["name"]) <= 5


def year(text: str) -> bool:
    return re.fullmatch("(19|20)[0-9]{2}", text) is not None


def nested(text: str) -> bool:
    return re.fullmatch(r"\(*x\)*", text) is not None and text.count("(") == text.count(")")


NESTED = 'start: "(" start ")" | "x"'
WORKING = [
    ({"response_format": {"type": "json_object"}}, lambda t: isinstance(json.loads(t), dict)),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, person),
    ({"guided_json": PERSON}, person),
    ({"guided_json": json.dumps(PERSON)}, person),
    ({"guided_regex": "(19|20)\\d{2}"}, year),
    ({"guided_choice": ["yes", 'n"o\n', "\u00e9"]}, lambda t: t in ("yes", 'n"o\n', "\u00e9")),
    ({"guided_grammar": NESTED}, nested),
    ({"structured_outputs": {"json": PERSON}}, person),
    ({"structured_outputs": {"json": json.dumps(PERSON), "disable_fallback": True}}, person),
    ({"structured_outputs": {"regex": "(19|20)[0-9]{2}", "choice": None}}, year),
    ({"structured_outputs": {"choice": ["a", "b"]}}, lambda t: t in ("a", "b")),
    ({"structured_outputs": {"grammar": NESTED}}, nested),
    ({"structured_outputs": {"json_object": True}}, lambda t: isinstance(json.loads(t), dict)),
]


@pytest.fixture
def following(served):
    """The server with an engine that follows grammars at random."""
    served.engine.script = Script([], follow=True)
    return served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "check"), WORKING, ids=no_status)
def test_every_field_in_both_endpoints(following, fields, check, stream):
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x", "max_tokens": 400})):
        response = following.post(path, {**body, **fields, "n": 2, "stream": stream})
        assert response.status_code == 200, response.text
        if stream:
            chunks = [
                json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")
            ]
            parts = [choice for chunk in chunks for choice in chunk["choices"]]
        else:
            parts = response.json()["choices"]
        for index in range(2):
            mine = [part for part in parts if part["index"] == index]
            texts = [
                (p.get("message") or p.get("delta") or {}).get("content") or p.get("text") or "" for p in mine
            ]
            assert check("".join(texts)), texts
            assert [p["finish_reason"] for p in mine if p["finish_reason"]] == ["stop"]
            assert mine[-1]["stop_reason"] is None


def test_formats_that_nobody_knows_are_notes(following):
    """A form's own ones are followed, and what is only called "format" stays."""
    own = {"type": "string", "format": "date"}
    schema = {
        "type": "object",
        "properties": {"file": {"type": "string", "format": "path", "maxLength": 3}, "format": {"const": "wav"}, "day": own},
        "required": ["file", "format", "day"],
        "additionalProperties": False,
    }  # fmt: skip
    text = following.post(TEXT, {"prompt": "x", "max_tokens": 400, "guided_json": schema}).json()["choices"][
        0
    ]["text"]
    found = json.loads(text)
    assert len(found["file"]) <= 3 and found["format"] == "wav"
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", found["day"])


def test_the_openai_client(following):
    """Its own helper makes the schema from a class."""
    completion = following.openai.chat.completions.create(
        model="tiny", messages=HELLO, response_format={"type": "json_schema", "json_schema": NAMED}
    )
    assert person(completion.choices[0].message.content)


def test_a_stop_string_within_a_grammar(following):
    body = {"messages": HELLO, "guided_regex": "[a-c]{4}!!", "stop": "!"}
    choice = following.post(CHAT, body).json()["choices"][0]
    assert re.fullmatch("[a-c]{4}", choice["message"]["content"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "!")


@pytest.mark.parametrize(("fields", "param", "code", "message"), FORMS, ids=no_status)
def test_what_is_refused(served, fields, param, code, message):
    check_error(served.post(CHAT, {"messages": HELLO, **fields}), 400, param, code, message)
    assert served.engine.requests == []


def test_refusals_of_completions(served):
    for fields, param, code, message in FORMS[::6]:
        check_error(served.post(TEXT, {"prompt": "x", **fields}), 400, param, code, message)
    assert served.engine.requests == []


def test_any_text_is_no_grammar(served):
    for fields in ({"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}):
        served.script("hello")
        assert (
            served.post(CHAT, {"messages": HELLO, **fields}).json()["choices"][0]["message"]["content"]
            == "hello"
        )
    assert [r.sampling.grammar for r in served.engine.requests] == [None, None]
    client = served.openai.chat.completions
    with pytest.raises(openai.BadRequestError, match="unclosed group"):
        client.create(model="tiny", messages=HELLO, extra_body={"guided_regex": "a("})


def test_a_grammar_is_compiled_once(following, monkeypatch):
    """Also when many ask for it at the same time; the prompts of one request share it."""
    cache = following.app.state.serving.grammars
    made = []
    compile_now = cache._compile
    monkeypatch.setattr(cache, "_compile", lambda *of: made.append(of[0]) or compile_now(*of))
    body = {"prompt": ["a", "b", "c"], "guided_regex": "once[0-9]", "max_tokens": 9}
    for _ in range(3):
        texts = [c["text"] for c in following.post(TEXT, body).json()["choices"]]
        assert all(re.fullmatch("once[0-9]", text) for text in texts)
    assert made == [GrammarSpec("regex", "once[0-9]", "guided_regex")]
    assert len({id(r.sampling.grammar) for r in following.engine.requests}) == 1
    for _ in range(2):
        assert following.post(TEXT, body | {"guided_regex": "once("}).status_code == 400
    assert len(made) == 2


def test_the_last_grammars_are_kept(following, monkeypatch):
    monkeypatch.setattr("serve.grammar_cache.KEPT", 2)
    cache = following.app.state.serving.grammars
    for word in ("one", "two", "one", "six"):
        following.post(TEXT, {"prompt": "a", "guided_choice": [word], "max_tokens": 9}).raise_for_status()
    assert [json.loads(text) for _, text, _ in cache._jobs] == [["one"], ["six"]]


def test_a_panic_of_the_library_is_a_400(served, monkeypatch):
    class PanicException(BaseException):
        pass

    def panic(*_):
        raise PanicException("lost")

    monkeypatch.setattr("serve.grammar.Vocabulary.compile", panic)
    body = {"messages": HELLO, "guided_regex": "a panic"}
    check_error(
        served.post(CHAT, body), 400, "guided_regex", "invalid_value", "cannot be compiled (PanicException)"
    )


FORM = {"type": "json_schema", "schema": SCHEMA}
FAILING = [
    (CHAT, {"messages": HELLO, "guided_json": SCHEMA}, "guided_json"),
    (TEXT, {"prompt": "x", "guided_regex": "a"}, "guided_regex"),
    ("/v1/responses", {"input": "x", "text": {"format": {"name": "x", **FORM}}}, "text.format.schema"),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 9, "output_config": {"format": FORM}}, None),
]


@pytest.mark.parametrize(("path", "body", "param"), FAILING, ids=no_status)
def test_a_grammar_that_cannot_be_followed_is_the_requests_fault(served, path, body, param):
    """Whole it is a 400; in a stream, whose status is out, an error of the same type and code."""
    served.script([], error="the grammar takes too long: make it simpler", bad_grammar=True)
    response = served.post(path, body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["message"].endswith("make it simpler")
    assert error["type"] == "invalid_request_error"
    if param:
        check_error(response, 400, param, "invalid_value")
    answer = served.post(path, body | {"stream": True}).text
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    if path == "/v1/responses":
        fault = events[-1]["response"]["error"]
        assert fault == {"code": "invalid_value", "message": error["message"]}
    else:
        assert events[-1]["error"] == error


def test_too_many_grammars_at_once(served, monkeypatch):
    monkeypatch.setattr("serve.grammar_cache.MOST_WAITING", 0)
    body = {"messages": HELLO, "guided_regex": "nobody compiles this"}
    check_error(served.post(CHAT, body), 503, None, "unavailable", "Too many grammars")


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"})], ids=["chat", "text"]
)
def test_grammars_of_clients_that_left_are_not_compiled(served, monkeypatch, path, body):
    cache, go, begun = served.app.state.serving.grammars, threading.Event(), []
    monkeypatch.setattr(cache, "_compile", lambda *of: begun.append(of) or go.wait(10))
    with contextlib.ExitStack() as stack:
        stack.callback(go.set)
        address = "127.0.0.1", httpx.URL(served.url).port
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(5)]
        for i, client in enumerate(clients):
            data = json.dumps({**body, "guided_choice": [f"{path} {i}"]}).encode()
            kind = f"Content-Type: application/json\r\nContent-Length: {len(data)}"
            client.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{kind}\r\n\r\n".encode() + data)
        wait_until(lambda: sum(job.waiting for job in cache._jobs.values()) == 5 and len(begun) == 2)
        for client in clients:
            client.close()
        wait_until(lambda: not any(job.waiting for job in cache._jobs.values()))
        assert all(stop.is_set for _, stop in begun)
    assert len(begun) == 2


def test_the_first_space_of_a_text_is_shown(served, monkeypatch):
    """A grammar sees it, so it belongs to the text, also with tokenizers whose texts leave it out."""
    monkeypatch.setattr(TOKENIZER, "_strip_leading_space", True)
    served.script(" a")
    for fields, text in (({}, "a"), ({"guided_regex": " a"}, " a")):
        answer = served.post(CHAT, {"messages": HELLO, **fields}).json()
        assert answer["choices"][0]["message"]["content"] == text


def test_requests_are_counted(following):
    def counted():
        text = following.http.get("/metrics").text
        return re.findall(r'structured_requests_total\{kind="(\w+)",model_name="tiny"\} (\d+)', text)

    before = dict(counted())
    body = {"messages": HELLO, "guided_choice": ["a"]}
    following.post(CHAT, body).raise_for_status()
    assert dict(counted()) == before | {"choice": str(int(before.get("choice", 0)) + 1)}
    long = [{"role": "user", "content": "x" * 600}]
    assert following.post(CHAT, body | {"messages": long}).status_code == 400
    assert dict(counted())["choice"] == str(int(before.get("choice", 0)) + 1)
