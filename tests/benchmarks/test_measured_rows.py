"""Rows are measured one by one: what is cut short, skipped or failed leaves the others in the file."""

import argparse
import csv
import dataclasses

import jax
import pytest

from benchmarks import measured


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    size: int
    kept: float = 0.25


ROWS = [Row("a", 1), Row("a", 2), Row("b", 1, 1.0)]


def options(*words):
    parser = argparse.ArgumentParser()
    measured.add_options(parser)
    return parser.parse_args(list(map(str, words)))


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_row_is_in_the_file_before_the_next_begins(tmp_path):
    path, seen = tmp_path / "rows.csv", []

    def measure(row):
        seen.append(len(read(path)) if path.exists() else 0)
        return {"us": row.size / 3, "other": None} | ({"late": "x"} if row.model == "b" else {})

    lines = measured.measure_rows(ROWS, measure, options("--csv", path))
    assert seen == [0, 1, 2]
    assert read(path) == [
        {"model": "a", "size": "1", "kept": "0.25", "us": "0.3333", "other": "", "late": ""},
        {"model": "a", "size": "2", "kept": "0.25", "us": "0.6667", "other": "", "late": ""},
        {"model": "b", "size": "1", "kept": "1.0", "us": "0.3333", "other": "", "late": "x"},
    ]
    assert [line["size"] for line in lines] == [1, 2, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.csv"]


def test_the_same_command_goes_on(tmp_path, capsys):
    path, measure = tmp_path / "rows.csv", lambda row: {"us": 1.0}
    measured.measure_rows(ROWS[1:2], measure, options("--csv", path))
    again = []
    measured.measure_rows(ROWS, lambda row: again.append(row) or measure(row), options("--csv", path))
    assert again == [ROWS[0], ROWS[2]]
    assert "1 of 3 rows are in" in capsys.readouterr().out
    assert [(line["model"], line["size"]) for line in read(path)] == [("a", "2"), ("a", "1"), ("b", "1")]


def test_no_row_begins_too_late(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    measured.measure_rows(ROWS, lambda row: pytest.fail("late"), options("--minutes", "-1", "--csv", path))
    assert "3 rows left after -1 minutes" in capsys.readouterr().out
    assert not path.exists()


def test_what_does_not_fit_is_skipped_with_a_line(capsys, monkeypatch):
    def measure(row):
        if row.model == "b":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
        measured.check_memory(row.size * 50)
        return {"us": 1.0}

    device = argparse.Namespace(memory_stats=lambda: {"bytes_limit": 80e9})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    lines = measured.measure_rows(ROWS, measure, options())
    assert [line["size"] for line in lines] == [1]
    out = capsys.readouterr().out
    assert "skipped: Row(model='a', size=2, kept=0.25): takes about 100 GB, the device has 80" in out
    assert "skipped: Row(model='b', size=1, kept=1.0): out of memory" in out


def test_a_row_that_fails_leaves_the_others(tmp_path, capsys):
    path = tmp_path / "rows.csv"

    def measure(row):
        if row.size == 2:
            raise ValueError("no such kernel")
        return {"us": 1.0}

    with pytest.raises(SystemExit, match="1 rows failed"):
        measured.measure_rows(ROWS, measure, options("--csv", path))
    assert len(read(path)) == 2
    assert "ValueError: no such kernel" in capsys.readouterr().out


def test_listed_rows_are_not_measured(capsys):
    measured.measure_rows(ROWS, lambda row: pytest.fail("measured"), options("--list", "--model", "a"))
    assert capsys.readouterr().out.splitlines() == [str(row) for row in ROWS[:2]]


def test_wrong_arguments_say_what_there_is(tmp_path):
    with pytest.raises(SystemExit, match="no rows of --model c: there are a, b"):
        measured.measure_rows(ROWS, lambda row: {}, options("--model", "c"))
    path = tmp_path / "other.csv"
    path.write_text("model,chunk\na,1\n")
    with pytest.raises(SystemExit, match=r"other.csv has no kept, size: give --csv another file"):
        measured.measure_rows(ROWS, lambda row: {}, options("--csv", path))
