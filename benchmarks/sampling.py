"""Time of sampling alone: one token for each of several rows of a vocabulary, by what the rows ask for.

  python -m benchmarks.sampling                 1, 32 and 128 rows of 128,256 tokens
  python -m benchmarks.sampling --rows 8 --vocab 49152

`ms` is wall time of twenty calls in a row, `dispatch_ms` the time until the host is back from them: where the two are close
although a call is long, the host waits within calls, and nothing is dispatched ahead. `--plain` leaves out the compiler
options that keep the searches behind top-k and top-p on the device.
"""

import argparse
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tangram_jax.sampling import (
    Variant,
    compiler_options,
    init_sampler,
    needed_variant,
    row_params,
    sample,
    set_row,
)

CALLS = 20
KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-k 20, top-p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top-p 0.9, few tokens": {"temperature": 0.05, "top_p": 0.9},
    "top-p 0.9, many tokens": {"temperature": 1.0, "top_p": 0.9},
    "top-k 5000": {"temperature": 1.0, "top_k": 5000},
}


def measure(
    rows: int, vocab: int, kind: dict[str, float], variant: Variant | None, options: dict[str, str] | None
) -> tuple[float, float]:
    """Seconds of a call, and of its dispatch, medians of five times CALLS; `variant` None: the least that serves."""
    state = init_sampler(rows, vocab)
    params = row_params(seed=0, **kind)  # type: ignore[arg-type]
    for row in range(rows):
        state = set_row(state, np.int32(row), params)
    chosen = partial(sample, variant=variant or needed_variant(params))
    run = jax.jit(chosen, donate_argnums=1, compiler_options=options)
    logits = jax.random.normal(jax.random.key(0), (rows, vocab)) * 1.28
    numbers = jnp.arange(rows)
    whole, dispatched = [], []
    for _ in range(6):
        began = time.perf_counter()
        for _ in range(CALLS):
            tokens, *_, state = run(logits, state, numbers)
        dispatched.append((time.perf_counter() - began) / CALLS)
        tokens.block_until_ready()
        whole.append((time.perf_counter() - began) / CALLS)
    return float(np.median(whole[1:])), float(np.median(dispatched[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--plain", action="store_true", help="without sampling.compiler_options()")
    args = parser.parse_args()
    options = None if args.plain else compiler_options()
    print(f"{jax.devices()[0].device_kind}, vocabulary of {args.vocab}")
    for rows in args.rows:
        for name, kind in KINDS.items():
            least, full = (measure(rows, args.vocab, kind, variant, options) for variant in (None, Variant()))
            print(
                f"{rows:4} rows  {name:24} least variant: ms {least[0] * 1e3:7.3f} dispatch_ms {least[1] * 1e3:7.3f}   "
                f"full: ms {full[0] * 1e3:7.3f} dispatch_ms {full[1] * 1e3:7.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
