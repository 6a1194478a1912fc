"""Outputs on their way from the engine's process to one of HTTP: all of them, in their order, few messages."""

import asyncio
from functools import partial
from unittest import mock

import pytest

from serve import wire
from serve.request import (
    GenerationRequest,
    OutputCallback,
    PromptLogprob,
    TokenCallback,
    TokenOutput,
)
from tests.serve.http_server import ids
from tests.serve.remote_pair import Pair, request, with_pair


def test_outputs_are_those_of_the_engine() -> None:
    async def test(both: Pair) -> None:
        asked = request(n=2, logit_bias={5: 1.0})
        came = await both.generate(asked)
        assert both.engine.requests == [asked]
        for choice in range(2):
            ours = [output for output in came if output.choice == choice]
            assert [output.token_id for output in ours] == ids("hello")
            assert [output.finish_reason for output in ours] == [None] * 4 + ["length"]
        assert came[0].cached_tokens == 3

    with_pair(test)


def test_what_an_output_holds_arrives() -> None:
    """Each choice's in their order, be it a token alone or more."""
    several = [
        TokenOutput(choice=1, token_id=7),
        TokenOutput(token_id=0),
        TokenOutput(token_id=7, logprob=-0.0, top_logprobs=[]),
        TokenOutput(token_id=7, cached_tokens=2, prompt_logprobs=[None, PromptLogprob(-1.0, [(3, -1.0)])]),
        TokenOutput(token_id=7, prompt_logprobs=[]),
        TokenOutput(choice=1, token_id=2**31 - 1),
        TokenOutput(token_id=8),
        TokenOutput(choice=1, token_id=7, finish_reason="stop"),
        TokenOutput(finish_reason="error", error="it failed", bad_grammar=True),
    ]

    async def test(both: Pair) -> None:
        def submit(request: GenerationRequest, on_output: OutputCallback, on_token: TokenCallback) -> None:
            for output in several:
                if output == TokenOutput(choice=output.choice, token_id=output.token_id):
                    assert output.token_id is not None
                    on_token(output.choice, output.token_id)
                else:
                    on_output(output)

        both.engine.submit = submit  # type: ignore[method-assign, assignment]
        with mock.patch.object(wire, "pack", wraps=wire.pack) as pack:
            came = await both.generate(request(n=2))
        for choice in range(2):
            assert [o for o in came if o.choice == choice] == [o for o in several if o.choice == choice]
        sent = [type(call.args[0]) for call in pack.call_args_list]
        tokens, outputs = wire.Tokens, wire.Outputs
        assert [kind for kind in sent if kind in (tokens, outputs)] == [tokens, outputs, tokens, outputs]

    with_pair(test)


def test_a_step_of_many_kinds_of_outputs_takes_two_messages() -> None:
    """Tokens of some and more of others in turn, as where grammars are followed or log-probabilities wanted."""

    async def test(both: Pair) -> None:
        receivers: list[tuple[OutputCallback, TokenCallback]] = []
        submit = lambda _, on_output, on_token: receivers.append((on_output, on_token))  # noqa: E731
        both.engine.submit = submit  # type: ignore[method-assign, assignment]
        came: list[TokenOutput] = []
        for name in "abcdef":
            await both.remote.submit(request(name), came.append)
        with mock.patch.object(wire, "pack", wraps=wire.pack) as pack:
            for i, (on_output, on_token) in enumerate(receivers):
                if i % 2:
                    on_token(0, i)
                else:
                    on_output(TokenOutput(token_id=i, logprob=-1.0))
            await both.until(lambda: len(came) == 6)
        assert [type(call.args[0]) for call in pack.call_args_list] == [wire.Tokens, wire.Outputs]
        assert [output.token_id for output in came] == [1, 3, 5, 0, 2, 4]
        for name in "abcdef":
            both.remote.abort(name)

    with_pair(test)


def test_tokens_go_where_they_are_wanted() -> None:
    """Of several requests at once, each with a receiver of its own for tokens, one of them aborted."""

    async def test(both: Pair) -> None:
        receivers: list[TokenCallback] = []
        submit = lambda _, __, on_token: receivers.append(on_token)  # noqa: E731
        both.engine.submit = submit  # type: ignore[method-assign, assignment]
        came: list[tuple[str, int, int]] = []
        for name in "abc":
            note = partial(lambda name, choice, token: came.append((name, choice, token)), name)
            await both.remote.submit(request(name, n=2), lambda _: None, note)
        both.remote.abort("b")
        for i, on_token in enumerate(receivers):
            on_token(1, i)
            on_token(0, 10 + i)
        await both.until(lambda: len(came) == 4)
        assert came == [("a", 1, 0), ("a", 0, 10), ("c", 1, 2), ("c", 0, 12)]
        both.remote.abort("a")
        both.remote.abort("c")
        assert not both.remote._token_receivers and not both.remote._numbers

    with_pair(test)


def test_a_receiver_that_fails_costs_no_other_its_outputs(caplog: pytest.LogCaptureFixture) -> None:
    async def test(both: Pair) -> None:
        def bad(_: TokenOutput) -> None:
            both.remote.abort("bad")  # so that nobody knows it any more
            raise IndexError

        await both.remote.submit(request("worse"), lambda output: [][output.choice])
        await both.remote.submit(request("bad"), bad)
        assert len(await both.generate(request())) == 5
        await both.until(lambda: both.engine.live == 0)

    with_pair(test)
    assert "The receiver of request bad failed" in caplog.text


def test_scores_of_long_prompts_come_in_parts_between_which_others_have_their_turn() -> None:
    scores = [None, *(PromptLogprob(-float(i), [(i, -1.0)]) for i in range(10 * wire.PROMPT_PART))]

    async def test(both: Pair) -> None:
        emitted = iter(range(2))

        def submit(request: GenerationRequest, on_output: OutputCallback, on_token: TokenCallback) -> None:
            if request.request_id == "long":  # what is behind it has to wait
                on_output(TokenOutput(token_id=7, prompt_logprobs=scores))
                on_token(0, 8)
                on_output(TokenOutput(token_id=9, finish_reason="length"))
            else:
                on_output(TokenOutput(token_id=next(emitted), finish_reason="length"))

        both.engine.submit = submit  # type: ignore[method-assign, assignment]
        order: list[str] = []

        async def ask(name: str) -> list[TokenOutput]:
            came = await both.generate(request(name))
            order.append(name)
            return came

        came, _ = await asyncio.gather(ask("long"), ask("short"))
        assert order == ["short", "long"]
        assert [output.token_id for output in came] == [7, 8, 9]
        assert [output.prompt_logprobs for output in came] == [scores, None, None]
        # One that is aborted on its way leaves nothing behind.
        await both.remote.submit(request("long"), lambda _: None)
        both.remote.abort("long")
        await both.generate(request("short"))
        await both.remote.stats()
        assert not both.remote._parts and not both.remote._receivers

    with_pair(test)
