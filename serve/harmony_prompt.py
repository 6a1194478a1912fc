"""The harmony format around an answer: where a prompt leaves off, what a grammar allows, which messages a template takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from serve.errors import bad_request
from serve.harmony import CHANNEL, END, MARKERS, MESSAGE, START
from serve.structured import GrammarSpec
from serve.thoughts import Beginning
from serve.tool_formats import HARMONY, literal

EFFORTS = ("low", "medium", "high")
_ANALYSIS = f"{CHANNEL}analysis"
_NEXT = f"{END}{START}assistant"


def beginning_of(text: str) -> Beginning:
    """Where the answer begins whose prompt is `text`."""
    header, opened, said = text[text.rfind(START) + 1 :].partition(MESSAGE)
    if not opened or any(marker in said for marker in MARKERS):
        return "possible"
    return "within" if _ANALYSIS in header else "none"


def around(
    spec: GrammarSpec, beginning: Beginning, special: Mapping[str, int], *, thinks: bool = True
) -> GrammarSpec:
    """The form of an answer as that of its last message, with room for messages of thoughts before it if it `thinks`.

    Calls have a header of their own; they come after a message that the prompt has begun.
    """
    calls = spec.kind == "tools"
    if beginning == "none" and not calls:
        return spec
    begun = "" if beginning == "possible" else f"TEXT {literal(_NEXT, special)}"
    header = "" if calls else literal(HARMONY.answer, special)
    lines = [f"start: {begun} {'analysis*' if thinks else ''} {header} form", "TEXT: /(?s:.*)/"]
    if thinks:
        lines.append(f"analysis: {literal(_ANALYSIS + MESSAGE, special)} TEXT {literal(_NEXT, special)}")
    return spec._replace(thoughts="\n".join(lines))


def as_taken(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for templates like GPT-OSS's, which would leave out some of these or refuse them.

    They take system messages as the first alone, and one call in a message, its result behind it; of thoughts and text
    before a call they take one. Raises APIError for a system message later on.
    """
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if any(message["role"] == "system" for message in messages[first:]):
        raise bad_request(
            "This model takes messages of the roles 'system' and 'developer' at the beginning alone: put them first.",
            "messages",
            "invalid_value",
        )
    taken: list[dict[str, Any]] = []
    if first:
        instructions = "\n\n".join(message["content"] for message in messages[:first] if message["content"])
        taken.append({"role": "system", "content": instructions})
    at = first
    while at < len(messages):
        message, at = messages[at], at + 1
        if "tool_calls" not in message:
            taken.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        taken += _calls(message, results)
    return taken


def described(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools for such templates, which fail on one without a description."""
    return [tool | {"function": {"description": "", **tool["function"]}} for tool in tools]


def _calls(message: dict[str, Any], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One message for each call, each with its results."""
    thoughts = [text for text in (message.get("reasoning_content"), message["content"]) if text]
    said = {"reasoning_content": "\n\n".join(thoughts)} if thoughts else {}
    taken: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        taken.append({"role": "assistant", "content": "", "tool_calls": [call], **said})
        taken += [result for result in results if result["tool_call_id"] == call["id"]]
        said = {}
    known = {call["id"] for call in message["tool_calls"]}
    return taken + [result for result in results if result["tool_call_id"] not in known]
