"""The one place that reads JSON, from files that others may have written."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asapc.formats.records import Record

_HALF_PAIRS = re.compile("[\ud800-\udfff]")
MAX_DEPTH = 100  # of brackets; what asapc and torch write has a tenth of it
MAX_BYTES = 1 << 26  # of a file; as Python's lists and numbers they may take 20 times as much


def read_json(path: str | Path, most: int = MAX_BYTES, *, strict: bool = False) -> Any:
    """The document in a file of at most `most` bytes.

    Raises OSError if it cannot be read, ValueError if it is larger, otherwise as parse_json.
    """
    content = read_file(path, most + 1)
    if len(content) > most:
        raise ValueError(f"more than {most} bytes")
    return parse_json(content, strict=strict)


def read_file(path: str | Path, most: int = -1) -> bytes:
    """The first bytes of a file, or all.  Raises OSError, and ValueError for what is no file."""
    # not blocking: a named pipe would wait for its writer for ever
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("a pipe or a device, not a file")
        return file.read(most)


def parse_json(text: str | bytes, *, strict: bool = False) -> Any:
    """The document.  Raises ValueError, and nothing else, if the text is no JSON, nested too deep or has
    half of a surrogate pair, which no file or terminal takes.

    strict: NaN and infinities, which Python reads and writes, are not JSON.
    """
    try:
        if isinstance(text, bytes):  # json.loads itself lets half a pair pass
            text = text.decode(json.detect_encoding(text))
        document = json.loads(text, parse_constant=_refused if strict else None)
        text.encode()
        if "\\ud" in text.lower():
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            item for value in level if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]  # fmt: skip
        if not level:
            return document
    raise ValueError("brackets are nested too deep")


def plain(value: Any) -> Any:
    """The value in strict JSON, with null for NaN and infinities, U+FFFD for half a surrogate pair."""
    if isinstance(value, Record):
        return plain(value.to_json())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return _HALF_PAIRS.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
