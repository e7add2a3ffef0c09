"""JSON from files that others may have written."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_DEPTH = 100  # of brackets; what asapc and torch write has a tenth of it


def read_json(path: str | Path) -> Any:
    """The document in a file.  Raises OSError where it cannot be read, otherwise as parse_json."""
    return parse_json(read_file(path))


def read_file(path: str | Path, most: int = -1) -> bytes:
    """The first bytes of a file, or all.  Raises OSError, and ValueError for what is no file."""
    # not blocking: a named pipe would wait for its writer for ever
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("a pipe or a device, and no file")
        return file.read(most)


def parse_json(text: str | bytes) -> Any:
    """The document.  Raises ValueError, and nothing else, for what is not JSON, nested too deep or has
    half a surrogate pair, which no file or terminal takes."""
    try:
        if isinstance(text, bytes):  # json.loads itself lets half a pair pass
            text = text.decode(json.detect_encoding(text))
        document = json.loads(text)
        text.encode()
        if "\\ud" in text.lower():
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [item for value in level for item in _children(value)]
        if not level:
            return document
    raise ValueError("brackets are nested too deep")


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
