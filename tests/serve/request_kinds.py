"""Requests of many kinds to a real server, many at once, and what must hold of their answers whatever the model says."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import httpx

TEXT = (
    "the sea was calm and the captain wrote in his book that nothing had been seen since the morning of the third day when "
    "a small boat had come near and asked for water and bread which were given to it gladly by all"
)
WORDS = TEXT.split()
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "known": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "known", "tags"],
    "additionalProperties": False,
}
AT_ONCE = 24


def words(count: int, seed: int) -> str:
    return " ".join(WORDS[(7 * i + 13 * seed + i // 11) % len(WORDS)] for i in range(count))


class Client:
    """Asks a server at `url` for its only model, greedily unless said otherwise."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(max_connections=AT_ONCE))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def post(self, path: str, body: dict[str, Any], status: int = 200) -> httpx.Response:
        answer = self._http.post(path, json={"temperature": 0, "max_tokens": 40} | body)
        assert answer.status_code == status, answer.text
        return answer

    def chat(self, said: str | list[dict[str, str]], status: int = 200, **how: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        answer = self.post("/v1/chat/completions", {"messages": messages} | how, status).json()
        assert status != 200 or all(
            choice["finish_reason"] in ("stop", "length") for choice in answer["choices"]
        )
        return answer

    def metric(self, name: str) -> float:
        lines = self._http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"tangram:{name}[{{ ]", line))

    # What is asked, each by a number.

    def prompts(self, i: int) -> None:
        assert self.chat(words(5 + 20 * i, i))["usage"]["completion_tokens"] <= 40

    def long_answers(self, i: int) -> None:
        answer = self.chat(words(300, i), max_tokens=300, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 300

    def choices(self, i: int) -> None:
        how = {"n": 3, "seed": i, "temperature": 0.9, "top_p": 0.9, "logprobs": True, "top_logprobs": 3}
        answer = self.chat("Tell me a story.", ignore_eos=True, **how)
        for choice in answer["choices"]:
            said = [token["logprob"] for token in choice["logprobs"]["content"]]
            assert len(said) == 40 and max(said) <= 0

    def sampled(self, i: int) -> None:
        how = {"temperature": 1.3, "top_k": 40, "min_p": 0.05, "seed": i, "logit_bias": {"100": -100}}
        self.chat(words(9, i), presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, **how)

    def echoes(self, i: int) -> None:
        body = {"prompt": words(40, i), "echo": True, "logprobs": 2, "max_tokens": 5}
        (choice,) = self.post("/v1/completions", body).json()["choices"]
        first, *others = choice["logprobs"]["token_logprobs"]
        assert first is None and min(others) > -60 and max(others) <= 0

    def objects(self, i: int) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
        answer = self.chat(f"Describe person {i}.", max_tokens=200, response_format=schema)
        (choice,) = answer["choices"]
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]).keys() == SCHEMA["properties"].keys()

    def stops(self, i: int) -> None:
        (choice,) = self.chat(words(50, i), stop=["e", "a"])["choices"]
        assert not {"e", "a"} & set(choice["message"]["content"] or "")

    def streams(self, i: int) -> None:
        body = {"stream": True, "messages": [{"role": "user", "content": words(60, i)}], "ignore_eos": True}
        lines = self.post("/v1/chat/completions", body).text.strip().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert lines[-1] == "data: [DONE]" and events[-1]["choices"][0]["finish_reason"] == "length"

    def clients_that_leave(self, i: int) -> None:
        body = {"prompt": words(30, i), "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())

    def turns(self, i: int) -> None:
        said: list[dict[str, str]] = []
        for turn in range(3):
            said.append({"role": "user", "content": words(60, 9 * i + turn)})
            answer = self.chat(said)
            content = answer["choices"][0]["message"]["content"] or "."
            said.append({"role": "assistant", "content": content})

    def retentions(self, i: int) -> None:
        self.chat(words(120, 200 + i), kv_retention=0.3)

    def mistakes(self, i: int) -> None:
        for wrong in ({"temperature": -1}, {"max_tokens": 10**9}, {"logit_bias": {"99999999": 1}}):
            self.chat("x", 400, **wrong)


KINDS: tuple[tuple[Callable[[Client, int], None], int], ...] = (
    (Client.prompts, 10),
    (Client.long_answers, 3),
    (Client.choices, 2),
    (Client.sampled, 3),
    (Client.echoes, 2),
    (Client.objects, 3),
    (Client.stops, 2),
    (Client.streams, 3),
    (Client.clients_that_leave, 3),
    (Client.turns, 3),
    (Client.retentions, 2),
    (Client.mistakes, 1),
)


def ask_all(client: Client) -> None:
    """Asks for everything twice, AT_ONCE at a time: the second time much of it is stored. Raises what did not hold."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in range(2):
            asked = [pool.submit(kind, client, i) for kind, count in KINDS for i in range(count)]
            wait(asked)
            for future in asked:
                future.result()
