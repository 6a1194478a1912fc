"""Rows of a benchmark, measured one by one: each is printed, and written to a CSV file, as soon as it is there."""

import argparse
import csv
import dataclasses
import functools
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from benchmarks.gpu_timing import read_roof


class Row(Protocol):
    """A frozen dataclass whose fields name what is measured."""

    __dataclass_fields__: Any
    model: str


class DoesNotFitError(Exception):
    """A row that asks for more memory than the device has."""


def check_memory(gigabytes: float) -> None:
    """Raises `DoesNotFitError` where JAX has less memory on the first device; one that does not say has enough."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None and gigabytes * 1e9 > limit:
        raise DoesNotFitError(f"takes about {gigabytes:.0f} GB, the device has {limit / 1e9:.0f}")


class Results:
    """What was measured; its file, if any, holds all of it at any time, what an earlier run wrote included."""

    def __init__(self, path: Path | None, row_type: Any) -> None:
        """Raises SystemExit for a file of other rows."""
        self._path = path
        self._fields = [field.name for field in dataclasses.fields(row_type)]
        self.lines: list[dict[str, Any]] = []
        if path is not None and path.exists():
            with path.open(newline="") as file:
                self.lines = list(csv.DictReader(file))
            missing = set(self._fields).difference(*self.lines)
            if self.lines and missing:
                raise SystemExit(f"{path} has no {', '.join(sorted(missing))}: give --csv another file")

    def __contains__(self, row: Any) -> bool:
        fields = {name: str(value) for name, value in dataclasses.asdict(row).items()}
        return any({name: str(line[name]) for name in self._fields} == fields for line in self.lines)

    def add(self, row: Any, result: dict[str, Any]) -> dict[str, Any]:
        """`row` and what was measured of it, as a line."""
        line = dataclasses.asdict(row) | {
            key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()
        }
        self.lines.append(line)
        if self._path is not None:  # whole at any time, whenever the run is cut short
            new = self._path.with_name(self._path.name + ".new")
            with new.open("w", newline="") as file:
                writer = csv.DictWriter(file, columns(self.lines))
                writer.writeheader()
                writer.writerows(self.lines)
            os.replace(new, self._path)
        return line


def columns(lines: list[dict[str, Any]]) -> list[str]:
    """All keys, those of the first line first."""
    return list(dict.fromkeys(key for line in lines for key in line))


def show(lines: list[dict[str, Any]]) -> None:
    """Prints lines as a table; what a line lacks stays empty."""

    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.3f}" if abs(value) < 2 else f"{value:.1f}"
        return "" if value is None else str(value)

    names = columns(lines)
    table = [names, *([text(line.get(name)) for name in names] for line in lines)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(names))]
    for cells in table:
        print("  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True)), flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What all benchmarks of rows take."""
    parser.add_argument("--model", help="only rows of this model")
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write every row there as soon as it is measured; rows that FILE has already are not measured again",
    )
    parser.add_argument(
        "--minutes", type=float, help="begin no row later than this; the same command goes on from its --csv"
    )
    parser.add_argument("--list", action="store_true", help="print the rows, and measure nothing")


def main_of_rows(
    description: str | None,
    rows: Sequence[Any],
    measure: Callable[..., dict[str, Any]],
    argv: list[str] | None,
) -> None:
    """A command that measures rows, each by `measure(row, roof=...)` of the GB/s of a large reduction in the same run."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    options = parser.parse_args(argv)
    of_model(rows, options.model)
    roof = 0.0 if options.list else read_roof()
    print(f"{jax.devices()[0].device_kind}, read roof {roof:.0f} GB/s", flush=True)
    measure_rows(rows, functools.partial(measure, roof=roof), options)


def measure_rows(
    rows: Sequence[Any], measure: Callable[[Any], dict[str, Any]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measures the rows that `options` (of `add_options`) leave, and prints a table of them.

    Skips, with a printed line, rows that do not fit in memory. Raises SystemExit at the end if other rows failed.
    """
    began, failed = time.monotonic(), 0
    rows = of_model(rows, options.model)
    results = Results(options.csv, type(rows[0]))
    left = [row for row in rows if row not in results]
    if len(left) < len(rows):
        print(f"{len(rows) - len(left)} of {len(rows)} rows are in {options.csv}", flush=True)
    for number, row in enumerate(left):
        if options.list:
            print(row, flush=True)
            continue
        if options.minutes is not None and time.monotonic() - began > options.minutes * 60:
            print(f"{len(left) - number} rows left after {options.minutes:g} minutes", flush=True)
            break
        try:
            print(results.add(row, measure(row)), flush=True)
        except DoesNotFitError as reason:
            print(f"skipped: {row}: {reason}", flush=True)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                print(f"skipped: {row}: out of memory: {str(error)[:200]}", flush=True)
                continue
            failed += 1  # the others are still worth their time
            print(f"failed: {row}\n{traceback.format_exc(limit=-8)[-4000:]}", flush=True)
    if results.lines and not options.list:
        show(results.lines)
    if failed:
        raise SystemExit(f"{failed} rows failed")
    return results.lines


def of_model(rows: Sequence[Any], model: str | None) -> list[Any]:
    """The rows of one model, or all. Raises SystemExit if there are none."""
    chosen = [row for row in rows if model in (None, row.model)]
    if not chosen:
        names = ", ".join(dict.fromkeys(row.model for row in rows))
        raise SystemExit(f"no rows of --model {model}: there are {names}")
    return chosen
