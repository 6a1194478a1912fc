"""Tries a grammar out in a process of its own, run as a script by `serve.grammar`: it may overflow its stack or the memory.

What compiles a grammar bounds most of its work, but not how deep it calls itself: a chain of a few thousand rules ends the
process, and no exception tells. So every new grammar is compiled here first, over single bytes, with less stack, memory and
time than the server has, and followed for a few steps.

Reads {"grammar", "vocab", "special": {id: text}} as JSON from standard input and writes what is wrong with the grammar, or
nothing. Imports neither JAX nor NumPy, so that it starts in a tenth of a second.
"""

import contextlib
import json
import os
import random
import resource
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# What a grammar may cost, here and in the server. Fuel: 14,000 units are about a millisecond.
LIMITS = {
    "max_items_in_row": 5_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,  # up to 2 KB each
    "max_grammar_size": 200_000,
}
STACK = 1 << 20  # bytes; the server's threads have 2 MiB at least
MEMORY = 1 << 30  # bytes of address space
SECONDS = 2  # of a processor; schemas of hundreds of properties take a tenth of that
NICENESS = 5  # so that a trial leaves the processors to the engine, and ends beside it all the same
STEPS = 24


def parser_limits() -> LLParserLimits:
    """LIMITS as the library takes them."""
    return LLParserLimits(**LIMITS, verbose_errors=False)  # type: ignore[arg-type]


class Bytes:
    """A vocabulary of the 256 bytes and the special tokens that a grammar may name by their text or id."""

    bos_token_id = None

    def __init__(self, vocab: int, special: dict[int, str]) -> None:
        self.tokens = [b""] * max(vocab, len(special) + 257)
        self.special_token_ids = sorted(special)
        for token_id, text in special.items():
            self.tokens[token_id] = text.encode()
        free = (i for i in range(len(self.tokens)) if i not in special)
        self.eos_token_id = next(free)
        self.tokens[self.eos_token_id] = b"\xff<end>"
        self.special_token_ids.append(self.eos_token_id)
        self.of_byte = [next(free) for _ in range(256)]
        for byte, token_id in enumerate(self.of_byte):
            self.tokens[token_id] = bytes([byte])

    def __call__(self, text: bytes) -> list[int]:
        return [self.of_byte[byte] for byte in text]


def fault(grammar: str, vocab: int, special: dict[int, str]) -> str:
    """What is wrong with a grammar; empty if nothing is."""
    alphabet = Bytes(vocab, special)
    tokenizer = LLTokenizer(TokenizerWrapper(alphabet))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    choose = random.Random(0)
    for _ in range(STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        allowed = [i for i in alphabet.of_byte if mask[i >> 3] >> (i & 7) & 1]
        if not allowed:
            break
        matcher.consume_token(choose.choice(allowed))
    return matcher.get_error()


def main() -> None:
    os.nice(NICENESS)
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # not every system has all of them
            resource.setrlimit(kind, (most, most))
    given = json.load(sys.stdin)
    special = {int(i): text for i, text in given["special"].items()}
    found: list[str] = []

    def run() -> None:
        try:
            found.append(fault(given["grammar"], given["vocab"], special))
        except BaseException as error:  # the library's panics are no Exception
            found.append(f"it cannot be compiled: {error}")

    threading.stack_size(STACK)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    sys.stdout.write(found[0])


if __name__ == "__main__":
    main()
