"""What the documents name is there: files, headings, commands and their flags."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Where the flags of a command are; those of the benchmarks in any of them, which share some.
SOURCES = {"serve": "serve/flags.py", "calibrate": "calibrate/*.py", "benchmarks": "benchmarks/*.py"}


def headings(document: Path) -> set[str]:
    """As GitHub links to them."""
    found = re.findall(r"^#+ (.*)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)", document.read_text())
    assert links
    for path, heading in links:
        there = (document.parent / path).resolve() if path else document
        assert there.exists(), path
        assert not heading or heading in headings(there), heading


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_their_flags_exist(document):
    commands = re.findall(r"-m ((\w+)[\w.]*)([^`\n]*(?:\n[^`\n]*(?=`))?)", document.read_text())
    assert commands
    declared = {
        package: "".join(path.read_text() for path in ROOT.glob(pattern))
        for package, pattern in SOURCES.items()
    }
    for module, package, rest in commands:
        if package not in declared:
            continue
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest):
            assert flag == "--help" or re.search(rf"{flag}(?![\w-])", declared[package]), f"{module} {flag}"
