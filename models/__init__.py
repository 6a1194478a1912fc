"""Architectures as pure functions that take attention as an argument; configurations; weight loading."""

import os

# Only the tokenizers of transformers are used: its advice to install PyTorch would be the first thing a user reads.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
