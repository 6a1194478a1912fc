"""What speculative decoding is worth: the time of a token by how many of the drafts are right, and how many are.

  python -m benchmarks.speculation                     Llama-3.1-8B's shape, random weights, on one Hopper GPU
  python -m benchmarks.speculation --requests 1 4 16   so many at once
  python -m benchmarks.speculation --texts --shape smollm2-135m-instruct     prompt lookup on texts, any machine

Random weights say nothing worth looking up, but these are made so that a token's successor is clear. Requests are answered
without drafts first, and then again with drafts from those answers of which a part is wrong on purpose. `times as fast`
compares with the first, in the same engine. With `--texts` a real model answers a few prompts with and without prompt
lookup: tokens a step, drafts that were right, time.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import decode_step
from benchmarks.engine_decode import SHAPES, answer_all, start_engine
from benchmarks.options import add_heads_per_page
from serve.engine import Engine
from serve.prompt_lookup import PromptLookup
from serve.speculation import Speculation

CODE = '''def total_price(items, tax_rate):
    """Sum of the prices of all items, tax included."""
    total = 0.0
    for item in items:
        price = item["price"] * item["quantity"]
        if item.get("discount"):
            price = price * (1.0 - item["discount"])
        total = total + price
    return total * (1.0 + tax_rate)
'''
REPORT = (
    "The harbour of Elmsworth was founded in 1643 by the merchant Anna Reed, who had lost two ships on the sandbanks "
    "further south. In 1711 a storm destroyed the eastern pier; it was rebuilt in stone within nine years. Today the "
    "harbour handles 4.2 million tonnes of grain and timber a year, employs 1,350 people and plans a railway terminal for "
    "2031."
)
TEXTS = {
    "edit code": f"Rename the variable total to amount and print the whole function again:\n\n{CODE}",
    "quote": f"Repeat the following text word for word:\n\n{REPORT}",
    "extract": f"List every year and every number in this text, with the sentence in which it stands:\n\n{REPORT}",
    "sum up": f"Sum up this text in three sentences:\n\n{REPORT}",
    "write freely": "Write a short story about a lighthouse keeper who finds a letter.",
}


@contextmanager
def drafts_from(answers: dict[tuple[int, ...], np.ndarray], right: float) -> Iterator[None]:
    """Drafts are what `answers` say, each token right with this probability; keys are the first tokens of prompts."""
    random = np.random.default_rng(0)
    length = len(next(iter(answers)))

    def following(lookup: PromptLookup, count: int) -> np.ndarray:
        known = lookup.tokens
        guess = answers[tuple(known[:length].tolist())][len(known) : len(known) + max(count, 0)]
        return np.where(random.random(len(guess)) < right, guess, guess ^ 1).astype(np.int32)

    with mock.patch.object(PromptLookup, "following", following):
        yield


def predictable(params: Any) -> Any:
    """The weights, so that the likeliest token after t is t + 1 by far, whatever came before."""
    layers = [
        layer | {name: layer[name] * 0.05 for name in ("attn_out", "down") if name in layer}
        for layer in params["layers"]
    ]
    head = {"lm_head": jnp.roll(params["embed"], -1, axis=0).T} if "lm_head" in params else {}
    return params | {"layers": tuple(layers)} | head


def answered(
    engine: Engine, prompts: list[list[int]], generate: int, ignore_eos: bool = True
) -> tuple[dict[str, Any], list[list[int]]]:
    """Milliseconds between two tokens of a request while all decode, what became of drafts, and the answers."""
    before = engine.stats()
    _, outputs = answer_all(engine, prompts, generate, ignore_eos)
    after = engine.stats()
    start, end = max(a[0] for a in outputs.at), min(a[-1] for a in outputs.at)
    made = sum(start < t <= end for times in outputs.at for t in times)
    row = {
        "ms": (end - start) / made * len(prompts) * 1e3,
        "drafted": after.draft_tokens_total - before.draft_tokens_total,
        "accepted": after.accepted_tokens_total - before.accepted_tokens_total,
    }
    if len(prompts) == 1:  # of several the steps that read prompts would count
        row["tokens a step"] = len(outputs.tokens[0]) / (after.steps_total - before.steps_total)
    return row, outputs.tokens


def of_random_weights(args: argparse.Namespace) -> list[dict[str, Any]]:
    config = decode_step.first_layers(SHAPES[args.shape], args.layers)
    params = predictable(decode_step.random_weights(config))
    engine = start_engine(
        config, params, args.retention, max_num_seqs=max(args.requests), prefix_cache=False,
        max_num_batched_tokens=8192, max_model_len=args.context + args.generate + 64, num_pages=args.num_pages,
        speculation=Speculation(num_speculative_tokens=args.drafts, disable_by_batch_size=max(args.requests)),
        programs=args.programs, scorer="snapkv", heads_per_page=args.heads_per_page,
    )  # fmt: skip
    rows = []
    answered(engine, [list(range(32))], 8)  # whatever a first time brings
    for requests in args.requests:
        prompts = np.random.default_rng(0).integers(0, config.vocab_size, (requests, args.context)).tolist()
        with mock.patch.object(PromptLookup, "following", lambda lookup, count: lookup.tokens[:0]):
            plain, answers = answered(engine, prompts, args.generate)
        known = {tuple(p[:32]): np.array(p + a) for p, a in zip(prompts, answers, strict=True)}
        rows.append({"requests": requests, "right": None} | plain)
        show(rows[-1])
        for right in args.right:
            with drafts_from(known, right):
                row, _ = answered(engine, prompts, args.generate)
            rows.append({"requests": requests, "right": right} | row)
            rows[-1]["times as fast"] = plain["ms"] / row["ms"]
            show(rows[-1])
    engine.stop()
    return rows


def of_texts(args: argparse.Namespace) -> list[dict[str, Any]]:
    from serve.args import ServeConfig
    from serve.build import build

    rows, built = [], {}
    for name, speculation in (("plain", None), ("drafts", Speculation(num_speculative_tokens=args.drafts))):
        config = ServeConfig(
            model=args.shape,
            max_num_seqs=1,
            speculation=speculation,
            prefix_cache=False,
            retention=args.retention,
        )
        built[name] = build(config)
        built[name].engine.start()
    tokenizer = built["plain"].model.tokenizer
    for task, text in TEXTS.items():
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        row: dict[str, Any] = {"task": task, "prompt": len(prompt)}
        answers = {}
        for name, one in built.items():
            answered(one.engine, [prompt], 4)
            found, answers[name] = answered(one.engine, [prompt], args.generate, ignore_eos=False)
            row |= found if name == "drafts" else {"plain ms": found["ms"]}
        row["answer"] = len(answers["drafts"][0])
        row["the same answer"] = answers["plain"] == answers["drafts"]
        row["times as fast"] = row["plain ms"] / row["ms"]
        rows.append(row)
        show(row)
    for one in built.values():
        one.engine.stop()
    return rows


def show(row: dict[str, Any]) -> None:
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b", help="of random weights; with --texts a model")
    parser.add_argument("--texts", action="store_true", help="prompt lookup on texts, by a real model")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--generate", type=int, default=200)
    parser.add_argument("--retention", type=float, default=0.25)
    parser.add_argument("--drafts", type=int, default=3, help="of a request at a time")
    parser.add_argument("--right", type=float, nargs="*", default=[1.0, 0.7, 0.0])
    parser.add_argument("--num-pages", type=int, help="of the pool")
    parser.add_argument("--programs", help="directory that keeps programs for the next start")
    add_heads_per_page(parser)
    parser.add_argument("--out", help="write the rows to this JSON file")
    args = parser.parse_args()
    if not args.texts and args.shape not in SHAPES:
        parser.error(f"--shape {args.shape}: write one of {', '.join(SHAPES)}, or --texts with a model")
    rows = of_texts(args) if args.texts else of_random_weights(args)
    if args.out:
        device = jax.devices()[0].device_kind
        what = {"device": device, "arguments": vars(args), "rows": rows}
        Path(args.out).write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    main()
