"""Thoughts in front of the real engine: a form that comes after them, and an answer that never gets to it."""

from tests.serve.test_end_to_end import serve
from tests.serve.thought_templates import TAGS, thought_tokenizer
from tests.serve.tiny_engine import tiny_engine


def test_a_form_after_thoughts_with_the_tiny_engine():
    messages = [{"role": "user", "content": "Hi"}]
    given = {"model": "tiny", "messages": messages, "extra_body": {"guided_choice": ["yes", "no"]}}
    end = str(TAGS["</think>"])
    with tiny_engine() as tiny:
        with serve(tiny.engine, thought_tokenizer("r1 special")) as server:
            create = server.openai.chat.completions.create
            for bias in (5, 100):  # thoughts of some length, and none
                answer = create(**given, max_tokens=200, logit_bias={end: bias}, seed=1)
                (choice,), usage = answer.choices, answer.usage
                assert (choice.message.content in ("yes", "no"), choice.finish_reason) == (True, "stop")
                thoughts = usage.completion_tokens_details.reasoning_tokens
                assert 0 < thoughts < usage.completion_tokens
                assert (thoughts == 1) == (bias == 100)
                assert bool(choice.message.model_extra["reasoning_content"]) == (bias == 5)
            cut = create(**given, max_tokens=9, logit_bias={end: -100})
            assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (None, "length")
            assert cut.usage.completion_tokens_details.reasoning_tokens == 9
            assert server.metric("tangram:compilations_after_warmup") == 0
        tiny.settle()
