"""The engine with a tiny mixture of experts: full retention says what dense attention says, whoever shares the step."""

import pytest

from tests.serve.tiny_engine import EXPERTS, ask_all, greedy, tiny_engine, tokens_of


@pytest.mark.slow  # `test_engine_windows` asks a GPT-OSS, all of whose layers have experts
def test_requests_together():
    with tiny_engine("experts") as tiny:
        prompts = [tokens_of(n, seed=n) for n in (3, 40, 110)]
        for prompt, answer in zip(prompts, ask_all(tiny, prompts, max_tokens=25), strict=True):
            assert answer.tokens == greedy(prompt, 25, config=EXPERTS), len(prompt)
        tiny.forget()
