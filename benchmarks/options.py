"""Options that several benchmarks have."""

import argparse


def add_fp8(parser: argparse.ArgumentParser) -> None:
    """The option of benchmarks whose steps may have many tokens."""
    parser.add_argument(
        "--fp8",
        nargs="?",
        const="weights",
        choices=("weights", "dynamic"),
        help="the products' weights in FP8; dynamic: many tokens too",
    )


def add_heads_per_page(parser: argparse.ArgumentParser) -> None:
    """The option of benchmarks of a cache with budgets."""
    parser.add_argument("--heads-per-page", type=int, help="default: as servers choose by the budgets")
