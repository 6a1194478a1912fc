"""What one model makes of thoughts: whether its template knows them, where a prompt leaves off, what a grammar allows."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from serve import harmony_prompt
from serve.harmony import MARKERS
from serve.protocol import ChatFields
from serve.structured import GrammarSpec
from serve.text import TextTokenizer, ids_of
from serve.thoughts import END, START, Beginning

PARSERS = ("auto", "harmony", "none", "think")
_ENDING = 256  # characters of a prompt's end, of which all but a tag are white space
_ESCAPED = END.replace("/", r"\/")
_LARGEST_SPACE = 16  # between thoughts and the answer: a model must not go on with it for ever


@dataclass(frozen=True)
class ThoughtSupport:
    """Of one model."""

    on: bool  # thoughts are looked for
    special: Mapping[str, int]  # ids of the tags, or of the markers of harmony, that are special tokens
    harmony: bool = False  # answers come in that format, not between tags

    @classmethod
    def of(cls, tokenizer: TextTokenizer, parser: str = "auto", *, harmony: bool = False) -> "ThoughtSupport":
        """From one of PARSERS, and for "auto" the chat template: a model that thinks has one that speaks of it.

        Tags in the vocabulary say nothing: models that never think share theirs with others. `harmony`: calls are written
        in that format. Raises ValueError where they are and thoughts are not, or the other way round.
        """
        if harmony != (parser == "harmony") and parser not in ("auto", "none"):
            raise ValueError(
                f"--reasoning-parser is '{parser}', but calls are {'' if harmony else 'not '}read as 'harmony', which is a "
                "format of thoughts too: write harmony or auto for it and for --tool-call-parser"
            )
        if harmony:
            return cls(parser != "none", ids_of(tokenizer, MARKERS), harmony=True)
        templates = (tokenizer.chat_template(with_tools) or "" for with_tools in (False, True))
        known = any(tag in template for template in templates for tag in (START, END))
        return cls(parser == "think" or (parser == "auto" and known), ids_of(tokenizer, (START, END)))

    def beginning(self, fields: ChatFields, text: str) -> Beginning:
        """Where the answer to a conversation begins whose prompt is `text`."""
        if self.harmony:
            return harmony_prompt.beginning_of(text)
        if not self.on:
            return "none"
        if fields.continue_final_message and (said := fields.messages[-1].content.strip()):
            if said == START:
                return "open"
            return "within" if said.startswith(START) and END not in said else "none"
        ending = text[-_ENDING:].rstrip()
        if ending.endswith(START):
            return "open"
        return "none" if ending.endswith(END) else "possible"

    def grammar(self, spec: GrammarSpec | None, beginning: Beginning) -> GrammarSpec | None:
        """The form of an answer, with room for the thoughts before it."""
        if spec is not None and self.harmony:
            return harmony_prompt.around(spec, beginning, self.special, thinks=self.on)
        if spec is None or beginning == "none":
            return spec
        optional = beginning == "possible"
        lines = [
            f"start: ({self._tag(START)} thoughts SPACE?)? form"
            if optional
            else "start: thoughts SPACE? form",
            f"SPACE: /[ \\t\\r\\n]{{1,{_LARGEST_SPACE}}}/",
        ]
        if END in self.special:  # and written out it would be the end as well
            lines += [f"thoughts: TEXT {self._tag(END)}", f"TEXT: /(?s:.*)/ & ~/(?s:.*){_ESCAPED}(?s:.*)/"]
        else:
            lines.append(f"thoughts[lazy]: /(?s:.)*{_ESCAPED}/")
        return spec._replace(thoughts="\n".join(lines))

    def _tag(self, tag: str) -> str:
        return f"<[{self.special[tag]}]>" if tag in self.special else json.dumps(tag)


NO_THOUGHTS = ThoughtSupport(False, {})
