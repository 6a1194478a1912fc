"""What it costs to send tokens to many clients: the real HTTP server before an engine that makes them at a steady pace.

  python -m benchmarks.http_streams                          128 chats at once, a token each every 17.6 ms
  python -m benchmarks.http_streams --streams 32 --step-ms 3.9
  python -m benchmarks.http_streams --step-ms 3 --stream-interval 4      and with so many tokens together

The engine sleeps where a real one waits for the device, is busy for a while where that one plans its steps (`--busy-ms`),
and holds the interpreter then, as that one does. "cpu" is the server's time for a token, the engine's left out; "step" the
time between two steps, "late" its 99th percentile over what was asked. "tokens_an_event": more than asked for where the
server does not keep up. The clients are a process of their own. The rows are those of uvicorn's HTTP implementations; lines
after them compare. A CPU suffices.
"""

import argparse
import asyncio
import gc
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from typing import Any, Literal

import numpy as np

from models.testing import tiny_tokenizer
from serve.api import create_app
from serve.request import EngineStats, GenerationRequest, OutputCallback, TokenOutput
from serve.server import bind, make_server

IMPLEMENTATIONS: tuple[Literal["h11", "httptools"], ...] = ("h11", "httptools")
WARM_UP = 10  # steps that are not counted: prompts are still being read


class Paced:
    """An engine of `EngineProtocol` that starts when `streams` requests have come, and makes a token of each every step."""

    max_model_len, vocab_size, eos_token_ids, ready = 1 << 20, 264, (0, 2), True

    def __init__(self, streams: int, step: float, busy: float) -> None:
        self.starts: list[float] = []  # of the steps
        self.busy_seconds = 0.0  # of the processor, since the warm-up
        self._streams, self._step, self._busy = streams, step, busy
        self._running: dict[str, tuple[GenerationRequest, OutputCallback]] = {}
        self._all_here = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: GenerationRequest, on_output: OutputCallback) -> None:
        self._running[request.request_id] = request, on_output
        if len(self._running) == self._streams:
            self._all_here.set()

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self._running.pop(request_id, None)

    def stats(self) -> EngineStats:
        return EngineStats()

    def _run(self) -> None:
        self._all_here.wait()
        while self._running:
            self.starts.append(time.perf_counter())
            time.sleep(self._step - self._busy)
            begun = time.thread_time()
            while time.thread_time() < begun + self._busy:
                pass
            count = len(self.starts)
            if count > WARM_UP:
                self.busy_seconds += time.thread_time() - begun
            for request, on_output in list(self._running.values()):
                ends = count >= request.sampling.max_tokens
                on_output(
                    TokenOutput(choice=0, token_id=105 + count % 26, finish_reason="length" if ends else None)
                )
                if ends:
                    self.abort(request.request_id)


def serve(args: argparse.Namespace, http: Literal["h11", "httptools"], interval: int = 1) -> dict[str, Any]:
    """All streams by one implementation of HTTP, so many of their tokens together."""
    engine = Paced(args.streams, args.step_ms / 1e3, args.busy_ms / 1e3)
    server = make_server(
        create_app(engine, tiny_tokenizer(), ["paced"], stream_interval=interval),
        host="127.0.0.1",
        port=0,
        log_level="warning",
    )
    server.config.http = http
    sockets = [bind("127.0.0.1", 0)]
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    gc.collect()
    gc.freeze()  # as `python -m serve` does
    command = [sys.executable, "-m", "benchmarks.http_streams", "--client", str(sockets[0].getsockname()[1])]
    command += ["--streams", str(args.streams), "--tokens", str(args.tokens)]
    tokens = args.streams * args.tokens
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as clients:
        while len(engine.starts) <= WARM_UP:
            time.sleep(0.01)
        before, first = time.process_time(), len(engine.starts)
        assert clients.stdout
        events, letters = map(int, clients.stdout.read().split())
        seconds = time.process_time() - before - engine.busy_seconds
    server.should_exit = True
    thread.join()
    assert letters == tokens, f"{letters} tokens of {tokens} came"  # each is a letter
    steps = 1e3 * np.diff(engine.starts[WARM_UP:])
    return {
        "http": http,
        "interval": interval,
        "tokens_per_s": args.streams * 1e3 / float(steps.mean()),
        "step_ms": float(np.median(steps)),
        "late_ms": float(np.percentile(steps, 99)) - args.step_ms,
        "cpu_us": seconds / (args.streams * (args.tokens - first)) * 1e6,
        # A stream's first event has its role, the last one is [DONE].
        "tokens_an_event": tokens / (events - 2 * args.streams),
    }


async def ask(port: int, tokens: int) -> tuple[int, int]:
    """A streamed chat; the number of its events, and of letters of their texts."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "stream": True}
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.read()
    return answer.count(b"data: "), sum(map(len, re.findall(rb'"content":"(\w*)"', answer)))


async def ask_all(port: int, streams: int, tokens: int) -> tuple[int, int]:
    """The same of all together."""
    asked = await asyncio.gather(*[ask(port, tokens) for _ in range(streams)])
    events, letters = map(sum, zip(*asked, strict=True))
    return events, letters


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=17.6)
    parser.add_argument(
        "--busy-ms", type=float, default=1.0, help="of a step, in which the engine's thread works"
    )
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens of a stream sent together")
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stream_interval < 1:
        parser.error("--stream-interval: 1 at least")
    if args.tokens <= WARM_UP:
        parser.error(f"--tokens must be more than the {WARM_UP} steps that are not measured")
    if args.client:
        print(*asyncio.run(ask_all(args.client, args.streams, args.tokens)))
        return
    ways = [(http, 1) for http in IMPLEMENTATIONS]
    if args.stream_interval > 1:
        ways.append((IMPLEMENTATIONS[-1], args.stream_interval))
    rows = [serve(args, *way) for way in ways]
    for row in rows:
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    for before, after in itertools.pairwise(rows):
        names = [f"{row['http']}, {row['interval']} together" for row in (before, after)]
        spent = before["cpu_us"] / after["cpu_us"]
        rate = after["tokens_per_s"] / before["tokens_per_s"]
        print(
            f"{' / '.join(names)}: {spent:.2f} of the processor's time; tokens a second the other way {rate:.2f}"
        )


if __name__ == "__main__":
    main()
