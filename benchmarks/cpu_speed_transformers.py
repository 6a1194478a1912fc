"""The transformers side of `benchmarks.cpu_speed`, in its own process: torch is no dependency of the engine.

Speaks JSON lines: reads {"batch": B} from standard input, writes {"prefill": s, "decode": s, "tokens": [B][steps + 1]}.
As fast as transformers goes without `generate`: SDPA attention, one batch, logits of the last position alone, inference
mode, and whichever of DynamicCache and StaticCache turns out faster for the batch size.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

CACHES = ("dynamic", "static")


class Transformers:
    """Greedy decoding of the first B prompts, which is to be run in inference mode."""

    def __init__(self, directory: Path, steps: int, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.prompts = torch.from_numpy(np.load(directory / "prompts.npy").astype(np.int64))
        self.steps = steps
        self.faster: dict[int, str] = {}

    def choose_cache(self, batch: int) -> str:
        """Time both kinds, twice each; the first time warms up."""
        if batch not in self.faster:
            seconds = {}
            for _ in range(2):
                for kind in CACHES:
                    prefill, decode, _ = self.run(batch, kind)
                    seconds[kind] = prefill + decode
            self.faster[batch] = min(CACHES, key=lambda kind: seconds[kind])
        return self.faster[batch]

    def run(self, batch: int, kind: str) -> tuple[float, float, list[list[int]]]:
        """(seconds of prefill, seconds of decode, tokens)."""
        import torch
        from transformers import DynamicCache, StaticCache

        config = self.model.config
        length = self.prompts.shape[1] + self.steps
        cache = (
            DynamicCache(config=config)
            if kind == "dynamic"
            else StaticCache(config=config, max_cache_len=length)
        )
        began = time.perf_counter()
        logits = self.model(
            self.prompts[:batch], past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        prefilled = time.perf_counter()
        tokens = [token]
        for _ in range(self.steps):
            logits = self.model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(token)
        done = time.perf_counter()
        return prefilled - began, done - prefilled, torch.cat(tokens, dim=1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    import torch  # after the options are known to be good
    import transformers

    transformers.utils.logging.set_verbosity_error()
    system = Transformers(arguments.directory, arguments.steps, arguments.threads)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            batch = json.loads(line)["batch"]
            kind = system.choose_cache(batch)
            prefill, decode, tokens = system.run(batch, kind)
            answer = {"prefill": prefill, "decode": decode, "tokens": tokens, "cache": kind}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
