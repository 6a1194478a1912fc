"""The server around the completions: models, tokens, health, metrics, API key, disconnects, shutdown."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import httpx
import openai
import pytest
from pydantic_core import to_json

from serve.args import ConfigError
from serve.listener import bind
from serve.request import EngineUnavailable, RequestRejected
from tests.serve.http_server import TOKENIZER, ids, serving, wait_until

HELLO = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": HELLO}


def metric(served, name: str, **labels: str) -> float | None:
    """A sample of /metrics, or None."""
    for line in served.http.get("/metrics").text.splitlines():
        key, _, value = line.rpartition(" ")
        base, _, rest = key.partition("{")
        if base == name and all(f'{label}="{given}"' in rest for label, given in labels.items()):
            return float(value)
    return None


def test_models(served):
    models = served.openai.models.list().data
    assert [model.id for model in models] == ["tiny", "org/tiny-alias"]
    model = served.openai.models.retrieve("org/tiny-alias")
    assert (model.object, model.owned_by, model.max_model_len) == ("model", "tangram-jax", 512)


def test_models_as_anthropics_clients_read_them(served):
    found = served.http.get("/v1/models").json()
    assert (found["first_id"], found["last_id"], found["has_more"]) == ("tiny", "org/tiny-alias", False)
    for name, model in zip(("tiny", "org/tiny-alias"), found["data"], strict=True):
        assert model == served.http.get(f"/v1/models/{name}").json()
        assert (model["type"], model["id"], model["display_name"]) == ("model", name, name)
        assert (model["lifecycle"], model["max_input_tokens"]) == ("active", 512)
        assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]


def test_model_name_of_the_answer(served):
    for name, expected in ((None, "tiny"), ("org/tiny-alias", "org/tiny-alias")):
        body = CHAT | ({"model": name} if name else {})
        assert served.post("/v1/chat/completions", body).json()["model"] == expected


def test_tokenize_and_back(served):
    answer = served.post("/tokenize", {"prompt": "né", "model": "tiny", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 512,
        "tokens": ids("né"),
        "token_strs": ["n", "\ufffd", "\ufffd"],
    }
    assert served.post("/detokenize", {"tokens": ids("né")}).json() == {"prompt": "né"}
    answer = served.post("/tokenize", {"messages": HELLO}).json()
    assert (answer["tokens"], answer["token_strs"]) == (TOKENIZER.apply_chat_template(HELLO), None)
    plain = served.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()
    assert plain["tokens"] == TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=False)
    text = served.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"]
    assert text.startswith("<|im_start|>user\nHi<|im_end|>")
    assert served.post("/tokenize", {"prompt": ""}).json()["count"] == 0


def test_tokens_of_a_long_text_are_written_part_by_part(served, monkeypatch):
    """As one piece of JSON those of 8 MB held up all streams for a second."""
    parts = []
    monkeypatch.setattr("serve.api.to_json", lambda part: parts.append(len(part)) or to_json(part))
    text = 'né"\\' * 3000
    answer = served.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == ids(text)
    assert answer["token_strs"] == [bytes([i - 8]).decode("utf-8", "replace") for i in ids(text)]
    assert len(parts) == 9 and max(parts) == 4096


def test_health_and_version(served):
    for path in ("/health", "/ping"):
        assert served.http.get(path).json() == {"status": "ok"}
        head = served.http.head(path)
        assert head.status_code == 200 and not head.content
    assert served.http.get("/version").json().keys() == {"version"}
    served.engine.ready = False
    for response in (served.http.get("/health"), served.post("/v1/chat/completions", CHAT)):
        assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")
        assert response.headers["retry-after"] == "1"


def test_chat_page_loads_nothing_from_elsewhere(served):
    response = served.http.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "http://" not in response.text and "https://" not in response.text and " src=" not in response.text


def test_documentation_shows_the_bodies(served):
    schema = served.http.get("/openapi.json").json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "max_tokens", "echo", "min_p"} <= body["properties"].keys()
    assert "$ref" not in json.dumps(schema["paths"]["/v1/chat/completions"]["post"]["requestBody"])


def test_engine_refusals(served):
    served.engine.reject = RequestRejected("needs 40 pages, the pool has 12")
    with pytest.raises(openai.BadRequestError, match="needs 40 pages") as refused:
        served.openai.completions.create(model="tiny", prompt="x")
    assert refused.value.param == "prompt"
    served.engine.reject = RequestRejected("keeps too much", "kv_retention")
    with pytest.raises(openai.BadRequestError, match="keeps too much") as refused:
        served.openai.completions.create(model="tiny", prompt="x")
    assert refused.value.param == "kv_retention"
    served.engine.reject = EngineUnavailable("the queue is full")
    with pytest.raises(openai.InternalServerError, match="the queue is full") as caught:
        served.openai.completions.create(model="tiny", prompt="x", stream=True)
    assert caught.value.status_code == 503


def test_refusal_of_one_prompt_aborts_the_others(served, monkeypatch):
    served.script("x", cycle=True)
    original = served.engine.submit

    def submit(request, on_output):
        if request.prompt_ids == ids("b"):
            raise RequestRejected("no b")
        original(request, on_output)

    monkeypatch.setattr(served.engine, "submit", submit)
    response = served.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 400})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "no b")
    assert served.engine.aborted == [(served.engine.requests[0].request_id, None)]


def test_a_bug_is_a_500_in_the_same_shape(served, monkeypatch, caplog):
    def submit(request, on_output):
        raise KeyError("secret detail")

    def counted() -> float:
        return metric(served, "tangram:http_responses_total", route="/v1/chat/completions", status="500") or 0

    before = counted()
    monkeypatch.setattr(served.engine, "submit", submit)
    response = served.post("/v1/chat/completions", CHAT)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in response.text
    assert "secret detail" in caplog.text  # with a traceback, for who runs it
    assert counted() == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(served, stream):
    served.script("x", finish="none")
    body = {"messages": HELLO, "stream": stream, "n": 2}
    with httpx.Client(base_url=served.url, trust_env=False) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body, timeout=0.2)
    wait_until(lambda: served.engine.live == 0)
    assert served.engine.aborted == [(served.engine.requests[0].request_id, None)]


def test_disconnect_before_the_first_token_of_a_stream(served):
    served.script("", finish="none")
    with httpx.Client(base_url=served.url, trust_env=False) as client:
        with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
            assert response.status_code == 200
            wait_until(lambda: served.engine.live == 1)
        wait_until(lambda: served.engine.live == 0)


def test_metrics(served):
    def samples():
        return [
            metric(served, "tangram:time_to_first_token_seconds_count") or 0,
            metric(served, "tangram:inter_token_latency_seconds_count") or 0,
            metric(served, "tangram:e2e_request_latency_seconds_count") or 0,
            metric(served, "tangram:request_success_total", finished_reason="length") or 0,
            metric(served, "tangram:request_success_total", finished_reason="stop") or 0,
            metric(served, "tangram:http_responses_total", route="/v1/completions", status="200") or 0,
            metric(served, "tangram:http_responses_total", route="/v1/completions", status="400") or 0,
        ]

    before = samples()
    served.post("/v1/completions", {"prompt": "a", "n": 2}).raise_for_status()
    served.post("/v1/completions", {"prompt": "a", "stop": "e"}).raise_for_status()
    served.post("/v1/completions", {})
    # Tokens: 5 + 5, then "h", "e".
    assert [b - a for a, b in zip(before, samples(), strict=True)] == [3, 4 + 4 + 1, 2, 2, 1, 2, 1]
    assert metric(served, "tangram:kv_pages_used", model_name="tiny") == 5
    assert metric(served, "tangram:kv_pages_total") == 12
    assert metric(served, "tangram:kv_cache_usage_perc") == 0.25
    assert metric(served, "tangram:prefix_cache_hits_total") == 7
    assert metric(served, "tangram:offload_bytes") == 5
    assert metric(served, "tangram:kv_restored_tokens_total") == 6
    assert metric(served, "tangram:generation_tokens_total") == served.engine.generated
    assert metric(served, "tangram:compilations_after_warmup") == 0
    assert metric(served, "tangram:retention_reached") == 0.5
    assert metric(served, "tangram:retention_target") is None
    assert metric(served, "tangram:engine_ready") == 1
    served.http.get("/" + "y" * 50)
    assert metric(served, "tangram:http_responses_total", route="other", status="404") >= 1
    assert "y" * 50 not in served.http.get("/metrics").text


def test_many_streams_at_once(served):
    """Outputs of 16 requests cross from the engine's thread without mixing or loss."""
    served.script([*ids("the quick brown fox "), *ids("é☕🙂")], cycle=True)
    results: dict[int, str] = {}

    def read(i: int) -> None:
        stream = served.openai.completions.create(model="tiny", prompt="p", max_tokens=300 + i, stream=True)
        results[i] = "".join(chunk.choices[0].text for chunk in stream)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    data = "the quick brown fox é☕🙂".encode() * 20
    assert results == {i: data[: 300 + i].decode("utf-8", "replace") for i in range(16)}


def test_large_texts_hold_up_no_small_ones(served, monkeypatch):
    """Four large texts once took all threads for seconds."""
    encode = TOKENIZER.encode
    started, release = threading.Event(), threading.Event()

    def slow_if_large(text, add_special_tokens=True):
        if len(text) > 1000:
            started.set()
            assert release.wait(20)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TOKENIZER, "encode", slow_if_large)
    large = "x" * 300_000
    attacks = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": large}]}, 400),
        ("/v1/completions", {"prompt": large}, 400),
        ("/tokenize", {"prompt": large}, 200),
    ] * 2
    small = [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
    ]
    with ThreadPoolExecutor(len(attacks)) as clients:
        answers = [clients.submit(served.post, path, body) for path, body, _ in attacks]
        try:
            assert started.wait(10)
            for path, body in small:
                assert served.post(path, body, timeout=5).status_code == 200
            assert not any(answer.done() for answer in answers)
        finally:
            release.set()
        assert [answer.result().status_code for answer in answers] == [status for _, _, status in attacks]


def test_api_key():
    with serving(api_keys=("sesame", "clé")) as served:
        assert served.openai.models.list().data[0].id == "tiny"  # sends the key
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
            for path in ("/v1/models", "/v1/chat/completions", "/tokenize", "/nothing", "/docs"):
                response = served.http.get(path, headers=headers)
                assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
                assert response.json()["error"]["code"] == "invalid_api_key"
        second = {"Authorization": "bearer clé".encode()}
        assert served.http.get("/v1/models", headers=second).status_code == 200
        for path in ("/health", "/version", "/metrics", "/ping"):
            assert served.http.get(path).status_code == 200


def test_sampling_that_a_request_leaves_out():
    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    with serving(sampling_defaults=defaults) as served:
        said = {"temperature": 0.0, "top_k": None}
        for path, prompt in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            for body in (prompt, prompt | said):
                assert served.post(path, body).status_code == 200
        sampled = [request.sampling for request in served.engine.requests]
        assert [s.temperature for s in sampled] == [0.6, 0.0] * 2
        assert all((s.top_k, s.repetition_penalty, s.top_p) == (20, 1.1, 1.0) for s in sampled)


def test_a_text_with_tokens_that_the_model_lacks():
    with serving() as served:
        served.engine.vocab_size = 128
        chat = {"messages": [{"role": "user", "content": "z"}]}
        for path, body in (("/v1/completions", {"prompt": ["a", "z"]}), ("/v1/chat/completions", chat)):
            answer = served.post(path, body)
            assert answer.status_code == 400
            assert "the model knows only those below 128" in answer.json()["error"]["message"]
        assert served.post("/v1/completions", {"prompt": "a"}).status_code == 200
        assert len(served.engine.requests) == 1


def test_web_pages_of_other_origins():
    asked = {"Origin": "https://a.org", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    with serving(api_keys=("sesame",), allowed_origins=("https://a.org",)) as served:
        answer = served.http.options("/v1/chat/completions", headers=asked)  # a browser sends no key with it
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.org"
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        refused = served.http.get("/v1/models", headers={"Origin": "https://a.org"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.org")
        other = served.http.get("/v1/models", headers={"Origin": "https://b.org"})
        assert "access-control-allow-origin" not in other.headers
    with serving() as served:
        answer = served.http.get("/v1/models", headers={"Origin": "https://a.org"})
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (200, None)


@pytest.mark.parametrize("host", ["192.0.2.1", "name.invalid", "a" * 64])
def test_an_address_that_cannot_be_had(host):
    with pytest.raises(ConfigError, match=f"--host {host} --port 8000: .*: write another --host"):
        bind(host, 8000)
