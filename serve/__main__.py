"""`python -m serve`: load a model, compile, and serve it over HTTP."""

import contextlib
import logging
import os
import sys
import time
from functools import partial

import jax
from rich.console import Console
from rich.logging import RichHandler

from models.conversion_cache import cache_dir
from serve.api import create_app
from serve.args import ConfigError, parse_args
from serve.build import build
from serve.server import make_server


def main() -> int:
    """Exit status: 0 after a clean shutdown, 1 if the device was lost, 2 for a configuration that cannot work."""
    began = time.perf_counter()
    config = parse_args()
    console = Console(stderr=True)
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False)],
    )
    for noisy in ("jax", "absl", "orbax", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    try:
        built = build(config)
    except (ConfigError, ValueError, OSError) as error:
        console.print(f"Cannot serve: {error}", style="bold red", markup=False, highlight=False)
        return 2
    log = logging.getLogger("tangram")
    log.info("%s", built.summary)
    with console.status("Compiling") as status:
        built.engine.start(lambda name: status.update(f"Compiling: {name}"))
    log.info("Ready after %.1f s", time.perf_counter() - began)
    app = create_app(
        built.engine,
        built.model.tokenizer,
        config.served_model_names or (built.model.name,),
        api_keys=config.api_keys,
        max_choices=config.max_choices,
        max_body_bytes=config.max_body_bytes,
        on_shutdown=built.engine.stop,
    )
    server = make_server(
        app,
        host=config.host,
        port=config.port,
        log_level=config.log_level,
        shutdown_timeout=config.shutdown_timeout,
    )
    built.engine.on_failure = partial(setattr, server, "should_exit", True)
    if built.engine.failed:  # before there was a server to tell
        server.should_exit = True
    with contextlib.suppress(KeyboardInterrupt):  # raised again by uvicorn once it has shut down
        server.run()
    return int(built.engine.failed)


if __name__ == "__main__":
    status = main()
    if status == 1:  # without JAX's own cleaning up, which cannot work on a lost device
        logging.shutdown()
        os._exit(status)
    sys.exit(status)
