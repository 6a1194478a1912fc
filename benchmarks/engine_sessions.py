"""Conversations that come back: what a turn takes when the histories fit in the KV memory compressed, and full do not.

  python -m benchmarks.engine_sessions                   16 conversations of 30K tokens, 8B shape, on one Hopper GPU
  python -m benchmarks.engine_sessions --sessions 6 --history 100000
  python -m benchmarks.engine_sessions --sessions 48 --retention 0.25 --kv-gib 20 --offload-gib 64
                                                         more than fit compressed, without host memory and with it
  python -m benchmarks.engine_sessions --retention 1 --by-last-use
                                                         and with rows evicted by last use, whoever waits for them

All conversations send a turn at once: `--add` new tokens, `--generate` tokens back. They differ in retention alone and
have as much memory for keys and values, by default what vLLM has beside the weights of Llama-3.1-8B on a card of 80 GB.
Weights are random, budgets lognormal over the heads around the retention. "cached" is the share of the prompts' tokens that
the engine still held, in host memory included; "restored" the GiB that came back from there.
"""

import argparse
import gc
import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks import decode_step
from benchmarks.engine_decode import SHAPES, answer_all, start_engine
from benchmarks.options import add_heads_per_page
from serve.engine import Engine
from serve.transfers import allow_pinned


def converse(engine: Engine, vocab: int, args: argparse.Namespace, seed: int = 0) -> list[dict[str, float]]:
    """Seconds until all have answered and the share of prompt tokens found in the cache, of every turn."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, vocab, args.history).tolist() for _ in range(args.sessions)]
    answer_all(engine, [list(range(32))], 4)  # whatever a first time brings
    rows: list[dict[str, float]] = []
    for turn in range(args.turns):
        before = engine.stats().restored_bytes_total
        seconds, outputs = answer_all(engine, prompts, args.generate)
        cached = outputs.cached / sum(map(len, prompts))
        rows.append({"turn": turn + 1, "seconds": round(seconds, 2), "cached": round(cached, 3)})
        if args.offload_gib:
            rows[-1]["restored"] = round((engine.stats().restored_bytes_total - before) / 2**30, 2)
        print(rows[-1], flush=True)
        new = rng.integers(0, vocab, (args.sessions, args.add)).tolist()
        prompts = [p + a + n for p, a, n in zip(prompts, outputs.tokens, new, strict=True)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--history", type=int, default=30_000, help="tokens of the first turn's prompt")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--add", type=int, default=500, help="new tokens of a later turn")
    parser.add_argument("--generate", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--retention", type=float, nargs="*", default=[1.0, 0.25])
    parser.add_argument("--kv-gib", type=float, default=55.0, help="memory for keys and values")
    parser.add_argument(
        "--offload-gib",
        type=float,
        default=0.0,
        help="host memory for more: each retention without it and with it",
    )
    parser.add_argument(
        "--by-last-use",
        action="store_true",
        help="other conversations after that, with nothing spared for waiting turns",
    )
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a prefill step")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--scorer", default="snapkv")
    add_heads_per_page(parser)
    parser.add_argument("--out", help="write the rows to this JSON file")
    args = parser.parse_args()
    allow_pinned(int(args.offload_gib * 2**30))  # before JAX begins
    config = decode_step.first_layers(SHAPES[args.shape], args.layers)
    params = decode_step.random_weights(config)
    device = jax.devices()[0].device_kind
    print(device, flush=True)
    results: dict[str, Any] = {"device": device, "arguments": vars(args)}
    names: list[str] = []
    for retention, offload in itertools.product(
        args.retention, (0.0, args.offload_gib)[: 1 + bool(args.offload_gib)]
    ):
        engine = start_engine(
            config, params, retention,
            max_num_seqs=args.sessions, max_stored_sessions=args.sessions, max_num_batched_tokens=args.chunk,
            max_model_len=args.history + args.turns * (args.add + args.generate),
            kv_cache_bytes=int(args.kv_gib * 2**30), page_size=args.page_size, scorer=args.scorer,
            heads_per_page=args.heads_per_page,
            kv_offloading_size=offload,
        )  # fmt: skip
        names.append(f"retention {retention:g}" + (f", {offload:g} GiB of host memory" if offload else ""))
        rows = results[names[-1]] = converse(engine, config.vocab_size, args)
        if args.by_last_use:
            names.append(f"{names[-1]}, by last use")
            with mock.patch("serve.scheduler.NEXT", 0):
                rows = results[names[-1]] = converse(engine, config.vocab_size, args, seed=1)
        engine.stop()
        del engine
        gc.collect()  # its pool must go before the next one comes
        for other in dict.fromkeys([names[0], names[-2]]) if names[1:] else ():
            ratios = [
                round(a["seconds"] / b["seconds"], 2) for a, b in zip(results[other], rows, strict=True)
            ]
            print(f"({other}) / ({names[-1]}), turn by turn: {ratios}", flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
