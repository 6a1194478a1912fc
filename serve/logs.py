"""What the processes of a server write on the terminal, or into a file."""

import logging

from rich.console import Console
from rich.logging import RichHandler


def log_handler(console: Console) -> logging.Handler:
    """For a terminal as wide as that is; for a file or a pipe each message on one line."""
    if console.is_terminal:
        return RichHandler(console=console, show_path=False)
    handler = logging.StreamHandler(console.file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    return handler


def begin_logging(console: Console, level: str) -> None:
    """For this process."""
    logging.basicConfig(level=level.upper(), format="%(message)s", handlers=[log_handler(console)])
    for noisy in ("jax", "absl", "orbax", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
