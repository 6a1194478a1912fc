"""Chat templates that say today's date say this one, so that samples are the same on every day."""

import datetime

DATE = datetime.datetime(2024, 7, 26)  # what Llama 3's say where they cannot ask for it
# What formats of dates are made of.
PARTS = tuple(
    f"%{part}"
    for part in ("a", "A", "b", "B", "d", "-d", "e", "H", "I", "j", "m", "-m", "M", "p", "S", "y", "Y")
)


def dated(template: str | None) -> dict[str, str]:
    """Options of `apply_chat_template` with which this template of the tokenizer says `DATE`; none where it says no date.

    Rendering takes plain data alone, no function in place of `strftime_now`: a macro of that name is put before the text.
    """
    if template is None or "strftime_now" not in template:
        return {}
    said = "".join(f"|replace('{part}', '{DATE.strftime(part)}')" for part in PARTS)
    # The newline is dropped after a block, and the template's own first line begins a line as before.
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{said} }}}}{{% endmacro %}}\n"
    return {"chat_template": macro + template}
