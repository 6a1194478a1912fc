"""`truncation: "auto"` of /v1/responses: a conversation that is too long loses its oldest turns."""

from starlette.requests import Request

from serve.chat import prepare
from serve.errors import TOO_LONG, APIError
from serve.generation import Serving
from serve.prompts import Prompt
from serve.protocol import ChatRequest
from serve.request import SamplingParams


async def prepare_truncated(
    serving: Serving, http_request: Request, chat: ChatRequest
) -> tuple[Prompt, list[SamplingParams]]:
    """`prepare` of the conversation without as many of its oldest turns as are too much; raises APIError.

    What it begins with of the system stays, and then it goes on with a message of the user: so no result comes without its
    call, and templates that want a user first take it. There is no shorter one than from the last such message on.
    """
    try:
        return await prepare(serving, http_request, chat)
    except APIError as error:
        if error.code != TOO_LONG:
            raise
        whole_is_too_long = error
    messages = chat.messages
    first = next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))
    starts = [n for n in range(first + 1, len(messages)) if messages[n].role == "user"]
    fitting = None
    while starts:  # halving them: the longest that fits
        middle = len(starts) // 2
        shorter = [*messages[:first], *messages[starts[middle] :]]
        try:
            fitting = await prepare(serving, http_request, chat.model_copy(update={"messages": shorter}))
            starts = starts[:middle]
        except APIError as error:
            if error.code != TOO_LONG:
                raise
            starts = starts[middle + 1 :]
    if fitting is None:
        raise whole_is_too_long
    return fitting
