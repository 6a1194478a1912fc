"""The harmony format in front of the real engine: a form, thoughts before it, a call, and the way back of its result."""

import json

from tests.serve.harmony_template import harmony_tokenizer
from tests.serve.test_end_to_end import serve
from tests.serve.test_end_to_end_tools import SWITCH, TOOLS, converse
from tests.serve.tiny_engine import tiny_engine

# Tokens that decide: the end of a message, and the first letters of the channels.
END, ANALYSIS, COMMENTARY, FINAL = (
    str(harmony_tokenizer().encode(text, add_special_tokens=False)[0]) for text in ("<|end|>", "a", "c", "f")
)
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_harmony_with_the_tiny_engine():
    form = {"guided_choice": ["yes", "no"]}
    thoughts = {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    going_on = form | {"continue_final_message": True, "add_generation_prompt": False}
    with tiny_engine() as tiny:
        with serve(tiny.engine, harmony_tokenizer()) as server:
            create = server.openai.chat.completions.create
            bias = {END: 100, FINAL: 50}
            for messages, body, thinking in (
                (MESSAGES, form, 0),
                ([*MESSAGES, thoughts], going_on, 1),
            ):
                answer = create(model="tiny", messages=messages, extra_body=body, logit_bias=bias, seed=1)
                (choice,), usage = answer.choices, answer.usage
                assert (choice.message.content in ("yes", "no"), choice.finish_reason) == (True, "stop")
                assert usage.completion_tokens_details.reasoning_tokens == thinking
            bias = {END: -100, ANALYSIS: 100}
            cut = create(model="tiny", messages=MESSAGES, extra_body=form, logit_bias=bias, max_tokens=30)
            assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (None, "length")
            assert cut.usage.completion_tokens_details.reasoning_tokens == 30
            options = {"tool_choice": "required", "temperature": 0, "logit_bias": {COMMENTARY: 100}}
            function, _ = converse(server, MESSAGES, TOOLS, "ok", **options)
            assert function.name == "f"
            assert json.loads(function.arguments) in SWITCH["enum"]
            assert server.metric("tangram:compilations_after_warmup") == 0
        tiny.settle()
