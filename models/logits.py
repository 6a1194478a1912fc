"""From products q . k to what the softmax of attention takes."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float

from models.config import ModelConfig
from models.transformer import soft_cap


class AttentionLogits(NamedTuple):
    """A model's way from products to logits: times `scale`, then none beyond `soft_cap` (`models.transformer.soft_cap`).

    Masks, sinks and the softmax come after it. Its fields have the names of the kernels' arguments.
    """

    scale: float
    soft_cap: float | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> AttentionLogits:
        """In every layer of a model."""
        return cls(config.attention_scale, config.attention_soft_cap)

    def __call__(self, products: Float[Array, "*S"]) -> Float[Array, "*S"]:
        logits = products * self.scale
        return logits if self.soft_cap is None else soft_cap(logits, self.soft_cap)
