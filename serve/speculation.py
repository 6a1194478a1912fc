"""What `--speculative-config` can say: vLLM's names where it has them."""

import argparse
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from models.overrides import parse_overrides


class Speculation(BaseModel):
    """Speculative decoding by prompt lookup: what followed the last tokens where they came before is drafted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    method: Literal["ngram"] = "ngram"
    num_speculative_tokens: int = Field(default=3, ge=1, le=31)  # drafted for a sequence at a time
    prompt_lookup_min: int = Field(default=2, ge=1, le=64)  # tokens in a row that must be the same as before
    prompt_lookup_max: int = Field(default=4, ge=1, le=64)
    # Nothing is drafted while more sequences run.
    disable_by_batch_size: int = Field(default=16, ge=1, le=65536)

    @model_validator(mode="before")
    @classmethod
    def _bounds(cls, fields: Any) -> Any:
        """One of the two that is given alone is not held against the other's default."""
        low, high = fields.get("prompt_lookup_min"), fields.get("prompt_lookup_max")
        if high is None and isinstance(low, int):
            return fields | {"prompt_lookup_max": max(low, cls.model_fields["prompt_lookup_max"].default)}
        if low is None and isinstance(high, int):
            return fields | {"prompt_lookup_min": min(high, cls.model_fields["prompt_lookup_min"].default)}
        return fields

    @model_validator(mode="after")
    def _check(self) -> "Speculation":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is above prompt_lookup_max ({self.prompt_lookup_max})"
            )
        return self


def parse_speculation(text: str) -> Speculation:
    """A JSON object, for the command line."""
    fields = parse_overrides(text)
    if fields.get("method", "ngram") != "ngram":
        raise argparse.ArgumentTypeError(
            f"method '{fields['method']}' is not known: write ngram, which needs no other model"
        )
    try:
        return Speculation.model_validate(fields)
    except ValidationError as error:
        known = f"; known are {', '.join(Speculation.model_fields)}"
        faults = [
            ": ".join([*map(str, e["loc"]), e["msg"].removeprefix("Value error, ")]) for e in error.errors()
        ]
        raise argparse.ArgumentTypeError(
            "; ".join(faults) + (known if error.errors()[0]["loc"] else "")
        ) from error
