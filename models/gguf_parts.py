"""GGUF files that llama.cpp has cut into parts: NAME-00001-of-00003.gguf and so on, what is no tensor in the first one."""

import re
from pathlib import Path

from models.huggingface import ModelNotFoundError

_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)


def parts_of(path: Path) -> list[Path]:
    """All parts of the model of which `path` is one, in order; itself if it is whole, or one of none.

    Raises ModelNotFoundError that names those that are missing.
    """
    found = _PART.fullmatch(path.name)
    name, count = (found[1], int(found[2])) if found else ("", 0)
    if not count:
        return [path]
    parts = [path.with_name(f"{name}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelNotFoundError(
            f"{path} is one of {count} parts, of which {path.parent} lacks {', '.join(missing)}"
        )
    return parts


def name_of(path: Path) -> str:
    """The model's, without which part it is."""
    found = _PART.fullmatch(path.name)
    return found[1] if found else path.stem
