"""Where the loop's kernels change path: sizes measured per device class.

Shipped in thresholds.json; ASAPC_THRESHOLDS=FILE, of the same form, takes precedence key by key. Results
differ in the last bits between sizes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from torch import Tensor

from asapc.errors import InputError
from asapc.formats.json_text import parse_json, read_json

LARGEST = 1 << 40
MAX_BYTES = 1 << 20  # of a file of thresholds
MOST = {"tile_x": 1024, "tile_y": 1024, "warps": 32, "stages": 8}  # that Triton could take
POWERS = ("tile_x", "tile_y", "warps")  # of two, or 0


@dataclass(frozen=True)
class Thresholds:
    """tile_bytes: of a tile of stacked heads, or of one's rows, that a gradient works on together (CPU).

    resident_bytes: the largest K of a head that a worker keeps (CPU).  resident_tokens: the longest
    side of which one launch keeps all scores in registers (GPU).
    tile_x, tile_y, warps, stages: of the kernels that stream tiles of scores (GPU); where 0, what each
    was written with, see kernels/gpu.
    """

    tile_bytes: int = 0
    resident_bytes: int = 0
    resident_tokens: int = 0
    tile_x: int = 0
    tile_y: int = 0
    warps: int = 0
    stages: int = 0


_forced: ContextVar[Thresholds | None] = ContextVar("asapc_thresholds", default=None)


def thresholds(q: Tensor, k: Tensor) -> Thresholds:
    """For queries [B, H, N, D] and keys [B, H, M, D].  Raises InputError for a bad ASAPC_THRESHOLDS."""
    forced = _forced.get()
    if forced is not None:
        return forced
    shipped = _shipped(device := "cuda" if q.is_cuda else "cpu")
    if "ASAPC_THRESHOLDS" not in os.environ:
        return shipped
    return replace(shipped, **_users(os.environ["ASAPC_THRESHOLDS"]).get(device, {}))


@contextmanager
def using(forced: Thresholds) -> Iterator[None]:
    """These for every lookup of this thread inside: for measurements and for tests."""
    token = _forced.set(forced)
    try:
        yield
    finally:
        _forced.reset(token)


@cache
def _shipped(device: str) -> Thresholds:
    text = files("asapc.kernels").joinpath("thresholds.json").read_text(encoding="utf-8")
    return Thresholds(**parse_json(text)[device])


@cache
def _users(path: str) -> Mapping[str, Mapping[str, int]]:
    help = 'it is a JSON file such as {"cpu": {"tile_bytes": 524288}}'
    try:
        document = read_json(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"ASAPC_THRESHOLDS={path}: cannot be read", got=str(error), help=help) from None
    entries = document.values() if isinstance(document, dict) else [None]
    if not all(_is_entry(entry) for entry in entries) or not set(document) <= {"cpu", "cuda"}:
        raise InputError(f"ASAPC_THRESHOLDS={path}: not thresholds", got=document, help=help)
    by_device: Mapping[str, Mapping[str, int]] = document
    return by_device


def _is_entry(entry: Any) -> bool:
    names = {field.name for field in fields(Thresholds)}
    return (
        isinstance(entry, dict)
        and set(entry) <= names
        and all(type(x) is int and 0 <= x <= MOST.get(key, LARGEST) for key, x in entry.items())
        and all(entry.get(key, 0).bit_count() <= 1 for key in POWERS)
    )

