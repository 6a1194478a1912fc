"""Many questions about one document: what the engine saves by prefilling once what prompts begin with.

  python -m benchmarks.engine_documents                  16 questions about 30K tokens, 8B shape, on one Hopper GPU
  python -m benchmarks.engine_documents --shape small --document 2000 --questions 4 --chunk 512 --kv-gib 1

Three rounds of as many requests at once, in one engine: each about a document of its own (the baseline), all about one, and
more about that one. Weights are random, budgets lognormal over the heads around the retention. "cached" is the share of the
prompts' tokens that were not prefilled for their request.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import decode_step
from benchmarks.engine_decode import SHAPES, answer_all, start_engine
from benchmarks.options import add_heads_per_page


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--document", type=int, default=30_000, help="tokens")
    parser.add_argument("--question", type=int, default=100, help="tokens")
    parser.add_argument("--generate", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--retention", type=float, default=0.25)
    parser.add_argument("--kv-gib", type=float, default=55.0, help="memory for keys and values")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a prefill step")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--scorer", default="expected_attention")
    add_heads_per_page(parser)
    parser.add_argument("--out", help="write the rows to this JSON file")
    args = parser.parse_args()
    config = SHAPES[args.shape]
    engine = start_engine(
        config, decode_step.random_weights(config), args.retention,
        max_num_seqs=args.questions, max_stored_sessions=2 * args.questions, max_num_batched_tokens=args.chunk,
        max_model_len=args.document + args.question + args.generate,
        kv_cache_bytes=int(args.kv_gib * 2**30), page_size=args.page_size, scorer=args.scorer,
        heads_per_page=args.heads_per_page,
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, config.vocab_size, count).tolist()

    answer_all(engine, [tokens(32)], 4)  # whatever a first time brings
    document = tokens(args.document)
    rows: list[dict[str, Any]] = []
    for name, whose in (("a document each", None), ("one document", document), ("the same again", document)):
        prompts = [(whose or tokens(args.document)) + tokens(args.question) for _ in range(args.questions)]
        seconds, outputs = answer_all(engine, prompts, args.generate)
        cached = outputs.cached / sum(map(len, prompts))
        ratio = rows[0]["seconds"] / seconds if rows else 1.0
        rows.append(
            {
                "round": name,
                "seconds": round(seconds, 2),
                "cached": round(cached, 3),
                "ratio": round(ratio, 2),
            }
        )
        print(rows[-1], flush=True)
    engine.stop()
    if args.out:
        results = {"device": jax.devices()[0].device_kind, "arguments": vars(args), "rows": rows}
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
