"""Junk in each place of a document of JSON types, where only a message may be the answer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from asapc.artifact.write import write_facts
from asapc.errors import AsapcError

JUNK: tuple[Any, ...] = (
    None, "x", -1, 10**9, 10**400, 1e300, True, [], {}, [None], [[1]], {"x": 1}, "\u202e" * 9,
)  # fmt: skip


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document, the root apart."""
    inside = value.items() if isinstance(value, dict) else ()
    inside = enumerate(value) if isinstance(value, list) else inside
    for key, own in inside:
        yield (*way, key)
        yield from places(own, (*way, key))


def with_junk(document: Any, way: tuple[Any, ...], junk: Any) -> Any:
    """A copy with another value in a place; `...` for nothing there."""
    changed = copy.deepcopy(document)
    inside = changed
    for key in way[:-1]:
        inside = inside[key]
    inside[way[-1]] = junk
    if junk is ...:
        del inside[way[-1]]
    return changed


def changed_at(document: Any, *changes: tuple[str, Any]) -> Any:
    """A copy with other values, by places such as "sites.0.operator"."""
    for place, value in changes:
        way = (int(key) if key.isdigit() else key for key in place.split("."))
        document = with_junk(document, tuple(way), value)
    return document


def survives(call: Callable[[], None], where: object) -> bool:
    """Whether it came back without a message; anything but a message fails."""
    try:
        call()
    except AsapcError:
        return False
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    return True


def resigned(folder: Path) -> Path:
    """A forged artefact whose forger has written its digests anew, as anybody may."""
    names = "manifest.json", "selection.json"
    manifest, selection = (json.loads((folder / name).read_text()) for name in names)
    del selection["sha256"]
    write_facts(folder, manifest, selection)
    return folder
