"""How long short prompts wait beside a long one: chunks in turn (`serve.chunks`), and first come first served.

  python -m benchmarks.engine_turns               4 streams, a prompt of 39,000 tokens, then 8 short ones
  python -m benchmarks.engine_turns --layers 8    a quick look
  python -m benchmarks.engine_turns --shape small --layers 4 --long 3000 --chunk 512 --generate 100 --times 2
                                                  on a CPU

Llama-3.1-8B's shape, random weights; both ways with one engine, in turn, several times. Of each way the medians over the
times: the median and the longest time to a short prompt's first token, and to the long one's, in ms; then their ratios.
"""

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks import decode_step
from benchmarks.engine_decode import SHAPES, Outputs, start_engine
from serve.chunks import Chunks
from serve.engine import Engine
from serve.request import GenerationRequest, SamplingParams

STREAM = 500  # tokens of the prompt of each stream
SHORT = (50, 300)  # tokens of short prompts: from, up to
SETTLE = 0.3  # seconds until all streams decode
_next = Chunks.next


def _first_come(chunks: Chunks, *args: Any, **kwargs: Any) -> Any:
    chunks._by_length = False
    return _next(chunks, *args, **kwargs)


HOW: dict[str, Any] = {
    "first come": lambda: mock.patch.object(Chunks, "next", _first_come),
    "in turn": nullcontext,
}


def serve(engine: Engine, vocab_size: int, args: argparse.Namespace) -> dict[str, float]:
    """Once: the streams, the long prompt, the short ones, a `gap` apart."""
    random, began = np.random.default_rng(1), list[float]()
    outputs = Outputs(args.streams + 1 + args.short)

    def ask(tokens: int, generate: int) -> None:
        number, prompt = len(began), random.integers(0, vocab_size, tokens).tolist()
        how = SamplingParams(max_tokens=generate, ignore_eos=True, temperature=0.0)
        began.append(time.perf_counter())
        request = GenerationRequest(request_id=str(number), prompt_ids=prompt, sampling=how)
        engine.submit(request, outputs.receiver(number))

    for _ in range(args.streams):
        ask(STREAM, args.generate)
    time.sleep(SETTLE)
    ask(args.long, 4)
    for _ in range(args.short):
        time.sleep(args.gap / 1e3)
        ask(int(random.integers(*SHORT)), 20)
    outputs.done.wait()
    if outputs.errors:
        raise RuntimeError(outputs.errors[0])
    firsts = [(at[0] - asked) * 1e3 for at, asked in zip(outputs.at, began, strict=True)]
    long, *short = firsts[args.streams :]
    return {"short": float(np.median(short)), "short_longest": max(short), "long": long}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--long", type=int, default=39_000, help="tokens of the long prompt")
    parser.add_argument("--short", type=int, default=8, help="short prompts after it")
    parser.add_argument("--gap", type=float, default=30.0, help="ms between these")
    parser.add_argument("--streams", type=int, default=4, help="requests that decode beside them")
    parser.add_argument("--generate", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--retention", type=float, default=1.0)
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a prefill step")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--out", help="write the rows to this JSON file")
    args = parser.parse_args()
    if min(args.times, args.short) < 1:
        parser.error("--times and --short: one at least")
    config = decode_step.first_layers(SHAPES[args.shape], args.layers)
    longest = max(args.long, STREAM + args.generate) + 64
    if longest > config.max_positions:
        parser.error(f"{longest} tokens a request are more than {config.max_positions}: lower --long")
    engine = start_engine(
        config, decode_step.random_weights(config), args.retention, max_num_seqs=args.streams + args.short + 1,
        max_num_batched_tokens=args.chunk, max_model_len=longest, prefix_cache=False,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )  # fmt: skip
    each: dict[str, list[dict[str, float]]] = {how: [] for how in HOW}
    serve(engine, config.vocab_size, args)  # the first steps of a process take longer
    for _ in range(args.times):
        for how, context in HOW.items():
            with context():
                each[how].append(serve(engine, config.vocab_size, args))
    engine.stop()
    rows = {
        how: {name: round(float(np.median([run[name] for run in runs])), 1) for name in runs[0]}
        for how, runs in each.items()
    }
    device = jax.devices()[0].device_kind
    print(device)
    for how, row in rows.items():
        print(how, row, "each:", [{name: round(ms) for name, ms in run.items()} for run in each[how]])
    before, after = rows.values()
    print("ms in turn / first come:", {name: round(after[name] / before[name], 3) for name in before})
    if args.out:
        held = {"device": device, "arguments": vars(args), "rows": rows, "each": each}
        Path(args.out).write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    main()
