"""Architectures as pure functions that take attention as an argument; configurations; weight loading.

Knows nothing of caches, and of ours imports `pallas_kernels` alone: a mixture's experts and weights in FP8 are multiplied by
kernels, and packed weights lie as these read them.
"""

import os

# Only the tokenizers of transformers are used: its advice to install PyTorch would be the first thing a user reads.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
