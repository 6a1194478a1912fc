"""`python -m serve`: load a model, compile, and serve it over HTTP."""

import gc
import logging
import os
import signal
import socket
import sys
import time
from typing import NoReturn

from jax.errors import JaxRuntimeError
from rich.console import Console

from models.conversion_cache import cache_dir
from serve import wire
from serve.args import ConfigError, ServeConfig
from serve.build import Built, build
from serve.engine import Engine
from serve.flags import parse_args
from serve.listener import allow_files, bind, url_of
from serve.logs import begin_logging
from serve.processes import HttpProcesses
from serve.program_store import keep_compiled

OUT_OF_MEMORY = (
    "The model, its KV pool and the sampler's state (for every row, stored ones too) do not fit in memory: write a smaller "
    "--num-pages, --kv-cache-memory, --gpu-memory-utilization, --max-stored-sessions or --max-num-seqs, or serve a smaller "
    "--model"
)

log = logging.getLogger("tangram")


def start(config: ServeConfig, console: Console) -> tuple[Engine, HttpProcesses, socket.socket]:
    """The running engine, what will serve it, and where. Raises ConfigError and OSError, with what to do."""
    listener = bind(config.host, config.port)  # first: loading and compiling take minutes
    http = HttpProcesses(listener, config.api_server_count)
    try:
        engine = start_engine(config, console, http)
        listener.listen()  # only now; it fails if another server bound the same port and was ready sooner
    except BaseException:
        http.close()
        raise
    return engine, http, listener


def start_engine(config: ServeConfig, console: Console, http: HttpProcesses) -> Engine:
    """What serves it is set up before all is compiled, for that may fail, too."""
    try:
        cache = cache_dir()
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache {cache} cannot be made ({error.strerror}): set TANGRAM_CACHE to a directory that can be"
        ) from error
    except ValueError as error:
        raise ConfigError(error) from error
    keep_compiled(cache / "xla")
    try:
        built = build(config, programs=cache / "programs")
    except ValueError as error:  # the loader's; while compiling it would be a bug
        raise ConfigError(error) from error
    engine = built.engine
    log.info("%s", built.summary)
    try:
        http.set_up(setup(config, built))
    except ValueError as error:  # what the model's tokenizer lacks
        raise ConfigError(error) from error
    with console.status("Compiling") as status:

        def leave(number: int, _: object) -> None:
            status.stop()
            http.close()
            os._exit(128 + number)

        # An exception would wait for what still compiles, or get lost in JAX's callback for the garbage collector.
        before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
        engine.start(lambda name: status.update(f"Compiling: {name}"))
        for number, handler in before.items():
            signal.signal(number, handler)
    # All that is there now stays: a collection that looks at it again holds up every stream for a fifth of a second.
    gc.collect()
    gc.freeze()
    return engine


def setup(config: ServeConfig, built: Built) -> wire.Setup:
    """What the processes of HTTP need to know."""
    return wire.Setup(
        facts=wire.Facts.of(built.engine),
        tokenizer=built.model.tokenizer,
        model_names=config.served_model_names or (built.model.name,),
        app={
            "api_keys": config.api_keys,
            "allowed_origins": config.allowed_origins,
            "sampling_defaults": built.sampling_defaults,
            "max_choices": config.max_choices,
            "max_body_bytes": config.max_body_bytes,
            "stream_interval": config.stream_interval,
            "tool_call_parser": config.tool_call_parser,
            "reasoning_parser": config.reasoning_parser,
        },
        server={
            "host": config.host,
            "port": config.port,
            "shutdown_timeout": config.shutdown_timeout,
        },
        log_level=config.log_level,
    )


def main() -> int:
    """Exit status: 0 after a clean shutdown, 1 if the device was lost, 2 for a configuration that cannot work.

    130 after Ctrl-C while it loads or compiles.
    """
    began = time.perf_counter()
    config = parse_args()
    console = Console(stderr=True)
    begin_logging(console, config.log_level)
    allow_files()
    try:
        engine, http, listener = start(config, console)
    except KeyboardInterrupt:
        return 130
    except (ConfigError, OSError, JaxRuntimeError) as error:
        fault = str(error)
        if isinstance(error, JaxRuntimeError):
            if "RESOURCE_EXHAUSTED" not in fault:
                raise
            fault += f"\n{OUT_OF_MEMORY}"
        console.print(
            f"Cannot serve: {fault}", style="bold red", markup=False, highlight=False, soft_wrap=True
        )
        return 2

    def ready() -> None:
        engine.on_failure = http.fail
        if engine.failed:  # before there was anyone to tell
            http.fail()
        log.info("Ready after %.1f s: %s", time.perf_counter() - began, url_of(listener))

    http.run(engine, ready, on_end=engine.stop)
    return int(engine.failed or http.failed)


def leave(status: int) -> NoReturn:
    """End the process at once: what JAX cleans up before takes seconds, and cannot be on a lost device."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
