"""What the whole server gives its clients: an engine of random weights behind HTTP, by so many processes of HTTP.

  python -m benchmarks.http_engine                                      128 streams of Llama-3.2-1B's shape on one Hopper GPU
  python -m benchmarks.http_engine --shape llama-3.1-8b --tokens 800 --processes 0 1

"made_per_s" are the engine's tokens a second while all streams decode, "behind_s" how long after its last token the clients
have theirs, "whole_s" the time from their start to that. Of 0 processes the engine's own speaks HTTP. The last lines
compare with the first row. Tokens are letters by a bias, for whose sake sampling is not the greedy program.
"""

import argparse
import time
from functools import partial
from typing import Any

from benchmarks import decode_step
from benchmarks.engine_decode import SHAPES, start_engine
from benchmarks.http_streams import before, clients
from serve.engine import Engine


def measured(args: argparse.Namespace, engine: Engine, pids: tuple[int, ...], port: int) -> dict[str, float]:
    """Of one row."""
    start = engine.stats()
    began = time.perf_counter()
    marks: list[tuple[float, int]] = []  # while all decode
    last, made = began, start.generation_tokens_total
    with clients(port, args.requests, args.tokens, args.context) as asking:
        while asking.poll() is None:
            stats, now = engine.stats(), time.perf_counter()
            prefilled = stats.prefilled_tokens_total - start.prefilled_tokens_total
            if stats.generation_tokens_total > made:
                last, made = now, stats.generation_tokens_total
            if stats.requests_running == args.requests and prefilled >= args.requests * (args.context - 1):
                marks.append((now, stats.generation_tokens_total))
            time.sleep(0.01)
        ended = time.perf_counter()
        assert asking.stdout
        events, letters = map(int, asking.stdout.read().split())
    assert letters == args.requests * args.tokens, f"{letters} tokens came"  # each is a letter
    if len(marks) < 2 or marks[0] == marks[-1]:
        raise RuntimeError("the first streams end before the last ones begin: give more --tokens")
    (t0, first), (t1, final) = marks[0], marks[-1]
    return {
        "made_per_s": (final - first) / (t1 - t0),
        "ms": 1e3 * (t1 - t0) * args.requests / (final - first),
        "over_s": t1 - t0,
        "behind_s": ended - last,
        "whole_s": ended - began,
        "tokens_an_event": letters / (events - args.requests),  # the last one of each is [DONE]
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1500, help="of each stream")
    parser.add_argument("--retention", type=float, default=0.25)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prefill step")
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="of HTTP")
    parser.add_argument("--scorer", default="snapkv")
    args = parser.parse_args()
    if min(args.processes) < 0:
        parser.error("--processes: 0 at least")
    config = decode_step.first_layers(SHAPES[args.shape], args.layers)
    params = decode_step.random_weights(config, 1)
    engine = start_engine(
        config, params, args.retention, max_num_seqs=args.requests, max_num_batched_tokens=args.chunk,
        max_model_len=args.context + args.tokens, prefix_cache=False, scorer=args.scorer,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for processes in args.processes:
        rows.append({"processes": processes} | before(engine, processes, 1, partial(measured, args, engine)))
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    for row in rows[1:]:
        rate, whole = row["made_per_s"] / rows[0]["made_per_s"], row["whole_s"] / rows[0]["whole_s"]
        print(f"{row['processes']} processes over the first row: made_per_s {rate:.2f}, whole_s {whole:.2f}")
    engine.stop()


if __name__ == "__main__":
    main()
