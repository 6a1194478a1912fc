"""The harmony format in front of the real engine: a form after thoughts, a call, and the way back of its result."""

import json

from tests.serve.harmony_template import harmony_tokenizer
from tests.serve.test_end_to_end import serve
from tests.serve.test_end_to_end_tools import SWITCH, TOOLS, converse
from tests.serve.tiny_engine import tiny_engine

END = str(harmony_tokenizer().encode("<|end|>", add_special_tokens=False)[0])
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_harmony_with_the_tiny_engine():
    with tiny_engine() as tiny:
        with serve(tiny.engine, harmony_tokenizer()) as server:
            create = server.openai.chat.completions.create
            given = {"model": "tiny", "messages": MESSAGES, "extra_body": {"guided_choice": ["yes", "no"]}}
            for seed in range(3):
                answer = create(**given, max_tokens=150, logit_bias={END: 100}, seed=seed)
                (choice,), usage = answer.choices, answer.usage
                assert (choice.message.content in ("yes", "no"), choice.finish_reason) == (True, "stop")
                assert usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens - 9
            cut = create(**given, max_tokens=30, logit_bias={END: -100, "105": 100})  # "a" of "analysis"
            assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (None, "length")
            assert cut.usage.completion_tokens_details.reasoning_tokens == 30
            options = {"tool_choice": "required", "temperature": 0, "logit_bias": {END: 100}}
            function, _ = converse(server, MESSAGES, TOOLS, "ok", **options)
            assert function.name == "f"
            assert json.loads(function.arguments) in SWITCH["enum"]
            assert server.metric("tangram:compilations_after_warmup") == 0
        tiny.settle()
