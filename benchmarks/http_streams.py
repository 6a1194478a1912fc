"""What it costs to send tokens to many clients: the real HTTP server before an engine that makes them at a steady pace.

  python -m benchmarks.http_streams                          128 chats at once, a token each every 17.6 ms
  python -m benchmarks.http_streams --streams 32 --step-ms 3.9
  python -m benchmarks.http_streams --step-ms 3 --processes 0 1 2            by so many processes of HTTP
  python -m benchmarks.http_streams --step-ms 3 --stream-interval 1 4        so many tokens together

The engine sleeps where a real one waits for the device, is busy for a while where that one plans its steps (`--busy-ms`),
and holds the interpreter then, as that one does. A row for each number of processes; of 0 the engine's own speaks HTTP.
"made_per_s" are the engine's tokens a second, "late_ms" the 99th percentile of the time between two of its steps over what
was asked; "sent_per_s" the tokens that the clients got. "engine_us" is the processor's time of the engine's process for a
token, its steps left out, "http_us" that of the others together. "tokens_an_event": more than asked for where the server
does not keep up. The clients are a process of their own. Lines after the rows compare. A CPU suffices.
"""

import argparse
import asyncio
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models.testing import tiny_tokenizer
from serve import wire
from serve.api import create_app
from serve.listener import bind
from serve.processes import HttpProcesses
from serve.request import (
    EngineProtocol,
    EngineStats,
    GenerationRequest,
    OutputCallback,
    TokenCallback,
    TokenOutput,
    as_outputs,
)
from serve.server import make_server

LETTERS = range(105, 131)  # tokens
WARM_UP = 10  # steps that are not counted: prompts are still being read


class Paced:
    """An engine of `EngineProtocol` that starts when `streams` requests have come, and makes a token of each every step."""

    max_model_len, vocab_size, eos_token_ids, ready = 1 << 20, 264, (0, 2), True

    def __init__(self, streams: int, step: float, busy: float) -> None:
        self.starts: list[float] = []  # of the steps
        self.busy_seconds = 0.0  # of the processor, since the warm-up
        self._streams, self._step, self._busy = streams, step, busy
        self._running: dict[str, tuple[GenerationRequest, OutputCallback, TokenCallback]] = {}
        self._all_here = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(
        self, request: GenerationRequest, on_output: OutputCallback, on_token: TokenCallback | None = None
    ) -> None:
        self._running[request.request_id] = request, on_output, on_token or as_outputs(on_output)
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
            token = LETTERS[count % 26]
            for request, on_output, on_token in list(self._running.values()):
                if count < request.sampling.max_tokens:
                    on_token(0, token)
                    continue
                on_output(TokenOutput(choice=0, token_id=token, finish_reason="length"))
                self.abort(request.request_id)


class InOneProcess:
    """What HttpProcesses are, in the engine's process."""

    pids: tuple[int, ...] = ()

    def __init__(self, setup: wire.Setup, engine: EngineProtocol, listener: Any) -> None:
        app = create_app(engine, setup.tokenizer, setup.model_names, **setup.app)
        self._server, self._listener = make_server(app, log_level=setup.log_level, **setup.server), listener

    def run(self, engine: EngineProtocol, on_ready: Callable[[], None]) -> None:
        gc.collect()
        gc.freeze()  # as `python -m serve` does
        on_ready()
        self._server.run([self._listener])

    def stop_soon(self) -> None:
        self._server.should_exit = True


def processor_seconds(pid: int) -> float:
    """Of another process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(args: argparse.Namespace, processes: int, interval: int) -> dict[str, Any]:
    """All streams by so many processes, so many of their tokens together."""
    engine = Paced(args.streams, args.step_ms / 1e3, args.busy_ms / 1e3)
    measure = partial(measured, args, engine)
    return {"processes": processes, "interval": interval} | before(engine, processes, interval, measure)


def before(
    engine: EngineProtocol,
    processes: int,
    interval: int,
    measure: Callable[[tuple[int, ...], int], dict[str, float]],
) -> dict[str, float]:
    """What `measure` says of a server before that engine, given the processes of HTTP and the port."""
    setup = wire.Setup(
        facts=wire.Facts.of(engine),
        tokenizer=tiny_tokenizer(),
        model_names=("random",),
        app={"stream_interval": interval},
        server={"host": "127.0.0.1", "port": 0, "shutdown_timeout": 1},
        log_level="warning",
    )
    listener = bind("127.0.0.1", 0)
    http: HttpProcesses | InOneProcess
    if processes:
        http = HttpProcesses(listener, processes)
        http.set_up(setup)
        listener.listen()
    else:
        http = InOneProcess(setup, engine, listener)
    found: dict[str, float] = {}

    def work() -> None:
        try:
            found.update(measure(http.pids, listener.getsockname()[1]))
        finally:
            http.stop_soon()

    thread = threading.Thread(target=work)
    http.run(engine, thread.start)
    thread.join()
    if not found:
        raise SystemExit("It could not be measured: the reason is above")
    return found


def clients(port: int, streams: int, tokens: int, context: int = 0) -> "subprocess.Popen[str]":
    """All clients in a process, which says how many events and tokens came; with a context that long, or that of a chat."""
    command = [sys.executable, "-m", "benchmarks.http_streams", "--client", str(port)]
    command += ["--streams", str(streams), "--tokens", str(tokens), "--context", str(context)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measured(args: argparse.Namespace, engine: Paced, pids: tuple[int, ...], port: int) -> dict[str, float]:
    """Of one row."""
    tokens = args.streams * args.tokens
    with clients(port, args.streams, args.tokens) as asking:
        while len(engine.starts) <= WARM_UP:
            time.sleep(0.01)
        began, first = time.perf_counter(), len(engine.starts)
        before, others = time.process_time(), sum(map(processor_seconds, pids))
        assert asking.stdout
        events, letters = map(int, asking.stdout.read().split())
        seconds = time.perf_counter() - began
        spent = time.process_time() - before - engine.busy_seconds
        others = sum(map(processor_seconds, pids)) - others
    assert letters == tokens, f"{letters} tokens of {tokens} came"  # each is a letter
    counted = args.streams * (args.tokens - first)
    steps = 1e3 * np.diff(engine.starts[WARM_UP:])
    return {
        "made_per_s": args.streams * 1e3 / float(steps.mean()),
        "late_ms": float(np.percentile(steps, 99)) - args.step_ms,
        "sent_per_s": counted / seconds,
        "engine_us": spent / counted * 1e6,
        "http_us": others / counted * 1e6,
        # A stream's first event has its role, the last one is [DONE].
        "tokens_an_event": tokens / (events - 2 * args.streams),
    }


async def ask(port: int, tokens: int, prompt: list[int]) -> tuple[int, int]:
    """A streamed completion, or chat without a prompt; the number of its events, and of letters of their texts."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked: dict[str, Any] = {"max_tokens": tokens, "stream": True}
    if prompt:
        asked |= {
            "prompt": prompt,
            "temperature": 0,
            "ignore_eos": True,
            "logit_bias": dict.fromkeys(LETTERS, 100),
        }
    else:
        asked["messages"] = [{"role": "user", "content": "hello"}]
    body = json.dumps(asked).encode()
    head = (
        f"POST /v1/{'' if prompt else 'chat/'}completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.read()
    return answer.count(b"data: "), sum(map(len, re.findall(rb'"(?:content|text)":"(\w*)"', answer)))


async def ask_all(port: int, streams: int, tokens: int, context: int) -> tuple[int, int]:
    """The same of all together, each with a prompt of its own."""
    prompts = np.random.default_rng(0).integers(8, 264, (streams, context)).tolist()
    asked = await asyncio.gather(*[ask(port, tokens, prompt) for prompt in prompts])
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
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[0, 1], metavar="N", help="of HTTP; 0: none"
    )
    parser.add_argument(
        "--stream-interval",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="tokens of a stream sent together",
    )
    for name in ("client", "context"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.processes) < 0:
        parser.error("--processes: 0 at least")
    if min(args.stream_interval) < 1:
        parser.error("--stream-interval: 1 at least")
    if args.tokens <= WARM_UP:
        parser.error(f"--tokens must be more than the {WARM_UP} steps that are not measured")
    if args.client:
        print(*asyncio.run(ask_all(args.client, args.streams, args.tokens, args.context)))
        return
    rows = [serve(args, *way) for way in itertools.product(args.processes, args.stream_interval)]
    for row in rows:
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    for row in rows[1:]:
        ratio = {name: row[name] / rows[0][name] for name in ("made_per_s", "sent_per_s", "engine_us")}
        print(
            f"{row['processes']} processes, {row['interval']} together, over the first row: "
            + ", ".join(f"{name} {value:.2f}" for name, value in ratio.items())
        )


if __name__ == "__main__":
    main()
