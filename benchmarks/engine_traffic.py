"""Requests a second of the whole engine: many prompts at once, answers of a fixed length, random weights.

  python -m benchmarks.engine_traffic                                    256 prompts of 2,048 tokens, 128 back
  python -m benchmarks.engine_traffic --prompt 220 --spread 1.1 --generate 200 --requests 512 --half-empty
                                                                         lengths as in chats; and chunks never split
  python -m benchmarks.engine_traffic --prompt 120 --spread 0.8 --generate 32 --requests 64 --retention 1 --apart --times 5
                                                                         a burst of short prompts; and one prompt a step
  python -m benchmarks.engine_traffic --requests 24 --prompt 6000 --generate 64 --max-model-len 8192 --all-slots
                                                                         few streams; and all decode slots beside each chunk
  python -m benchmarks.engine_traffic --devices 2 --unlinked             over two GPUs; and with NCCL's all-reduces

Every retention gets an engine of its own with the same memory for keys and values, by default what vLLM has beside the
weights of Llama-3.1-8B on a card of 80 GB. Greedy, nothing is shared and nothing stored. "first" is the time to a
request's first token, "gap" the time between two tokens of a request. `--half-empty` serves all once more with chunks that
are not split to fill the programs that run them (`serve.limits`). `--apart`: with up to four chunks a step, then with one.
`--all-slots`: large chunks have few decode slots where that is enough, then all (`serve.buckets`).
A burst is soon over: of several times a row has the median one's figures, and requests a second of all.
"""

import argparse
import functools
import gc
import itertools
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks import decode_step
from benchmarks.engine_decode import SHAPES, answer_all, start_engine
from benchmarks.options import add_fp8, add_heads_per_page
from models.fp8_weights import with_fp8_weights
from pallas_kernels import all_reduce
from serve.buckets import Buckets
from serve.engine import Engine
from serve.limits import Limits
from serve.program_store import keep_compiled

_chunk_size = Limits.chunk_size


def _never_split(limits: Limits, ahead: int, beside_decode: bool) -> int:
    with mock.patch("serve.limits.WORTH_A_STEP", 1 << 30):  # which counts where prompts are packed, too
        return _chunk_size(limits, ahead, beside_decode)


HOW: dict[str, Callable[[], Any]] = {
    "as served": nullcontext,
    "not split": lambda: mock.patch.object(Limits, "chunk_size", _never_split),
    "all decode slots": lambda: mock.patch.object(Buckets, "logits", lambda b, _: (b.batches[-1] + 1,)),
    "one prompt a step": lambda: mock.patch.object(Limits, "worth_packing", return_value=False),
}
UNLINKED = functools.partial(mock.patch.object, all_reduce, "links_of", return_value=None)


def lengths(requests: int, mean: int, spread: float, most: int) -> np.ndarray:
    """Prompt lengths i64[requests]: all `mean`, or lognormal around it, their logarithms with a deviation of `spread`."""
    if not spread:
        return np.full(requests, mean)
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - spread**2 / 2, spread, requests)
    return drawn.astype(int).clip(4, most)


def serve_often(engine: Engine, prompts: list[list[int]], generate: int, times: int) -> dict[str, Any]:
    """As `serve`, so many times: what the median one gives by requests a second, and "each" of these.

    Of an even number it is the slower one of the two in the middle.
    """
    runs = sorted(
        (serve(engine, prompts, generate) for _ in range(times)), key=lambda run: run["requests_per_s"]
    )
    each = [round(run["requests_per_s"], 2) for run in runs]
    return runs[(times - 1) // 2] | ({"each": each} if times > 1 else {})


def serve(engine: Engine, prompts: list[list[int]], generate: int) -> dict[str, float]:
    """All prompts at once, until all are answered."""
    before = engine.stats()
    seconds, outputs = answer_all(engine, prompts, generate)
    first = np.array([a[0] for a in outputs.at]) - outputs.made
    gaps = np.concatenate([np.diff(a) for a in outputs.at])
    tokens = sum(map(len, prompts))
    return {
        "requests_per_s": len(prompts) / seconds,
        "prompt_tokens_per_s": tokens / seconds,
        "generated_per_s": len(prompts) * generate / seconds,
        "first_mean_s": float(first.mean()),
        "first_p99_s": float(np.percentile(first, 99)),
        "gap_median_ms": float(np.median(gaps)) * 1e3,
        "gap_p99_ms": float(np.percentile(gaps, 99)) * 1e3,
        "steps": engine.stats().steps_total - before.steps_total,
        "preemptions": engine.stats().preemptions_total - before.preemptions_total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens, on average")
    parser.add_argument(
        "--spread", type=float, default=0.0, help="of the lengths, lognormal; 0: all the same"
    )
    parser.add_argument("--generate", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--times", type=int, default=1, help="everything so many times")
    parser.add_argument("--retention", type=float, nargs="*", default=[1.0, 0.25])
    parser.add_argument("--devices", type=int, default=1, help="GPUs over which model and cache are spread")
    parser.add_argument("--kv-gib", type=float, default=55.0, help="memory for keys and values on each GPU")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a prefill step")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--scorer", default="expected_attention")
    parser.add_argument("--half-empty", action="store_true", help="once more, chunks never split")
    parser.add_argument("--apart", action="store_true", help="once more, one prompt's chunk a step")
    parser.add_argument("--all-slots", action="store_true", help="once more, all decode slots beside chunks")
    parser.add_argument(
        "--unlinked", action="store_true", help="once more over several GPUs, all-reduces by NCCL"
    )
    parser.add_argument("--programs", help="directory that keeps programs for the next start")
    add_heads_per_page(parser)
    parser.add_argument("--out", help="write the rows to this JSON file")
    add_fp8(parser)
    args = parser.parse_args()
    if args.times < 1:
        parser.error(f"--times {args.times}: once at least")
    if args.programs:
        keep_compiled(Path(args.programs) / "xla")
    config = decode_step.first_layers(SHAPES[args.shape], args.layers)
    if args.fp8:
        config = with_fp8_weights(config, dynamic=args.fp8 == "dynamic")
    device = jax.devices()[0].device_kind
    print(device, flush=True)
    sizes = lengths(args.requests, args.prompt, args.spread, args.max_model_len - args.generate)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, config.vocab_size, size).tolist() for size in sizes]
    rows: list[dict[str, Any]] = []
    for retention, links in itertools.product(args.retention, ("if any", *["none"] * args.unlinked)):
        with UNLINKED() if links == "none" else nullcontext():
            engine = start_engine(
                config, decode_step.random_weights(config, args.devices), retention, tensor_parallel_size=args.devices,
                max_num_seqs=args.max_num_seqs, max_num_batched_tokens=args.chunk, max_model_len=args.max_model_len,
                kv_cache_bytes=int(args.kv_gib * 2**30), page_size=args.page_size, scorer=args.scorer,
                heads_per_page=args.heads_per_page,
                prefix_cache=False, programs=args.programs, max_num_partial_prefills=4 if args.apart else None,
            )  # fmt: skip
        serve(engine, prompts[:8], 8)  # the first steps of a process take longer
        others = {
            "not split": args.half_empty,
            "one prompt a step": args.apart,
            "all decode slots": args.all_slots,
        }
        for how in ("as served", *(how for how, wanted in others.items() if wanted)):
            with HOW[how]():
                served = serve_often(engine, prompts, args.generate, args.times)
            row = {"retention": retention, "chunks": how, "links": links} | served
            rows.append(row)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        engine.stop()
        del engine
        gc.collect()  # its pool must go before the next one comes
    for row in rows[1:]:
        print(f"requests a second, {row['retention']:g} {row['chunks']}, links {row['links']} / first row: "
              f"{row['requests_per_s'] / rows[0]['requests_per_s']:.2f}")  # fmt: skip
    if args.out:
        result = {"device": device, "arguments": vars(args), "prompt_tokens": int(sizes.sum()), "rows": rows}
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
