"""How much a server runs and stores."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    max_running: int
    max_stored: int
    max_model_len: int
    max_tail: int  # tail tokens after which a generation is compressed
    max_chunk: int  # tokens of a chunk
    max_chunk_beside_decode: int  # the same while others decode, so that their streams go on
    prompt_logprob_chunk: int
    least_shared: int = 128  # tokens that several prompts must begin with to be prefilled once
    host_bytes: int = 0  # of host memory, for stored rows that must leave the pool
