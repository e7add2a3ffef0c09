"""Where the loop's kernels change path: sizes measured per device class.

Looked up in this order, key by key; a lookup never measures anything:

    ASAPC_THRESHOLDS=FILE     the user's own, of the form of thresholds.json
    the tuning cache          what `asapc bench --tune` measured on this machine, for such shapes
    thresholds.json           shipped with the package

The cache belongs to one device, dtype, range of shapes and state of the kernels' source. Results
differ in the last bits between sizes: ASAPC_NO_TUNE=1 (and `bench --no-tune`) leaves the cache aside.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.formats.json_text import parse_json, read_json

LARGEST = 1 << 40
MAX_BYTES = 1 << 20  # of a file of thresholds
MOST = {"tile_x": 1024, "tile_y": 1024, "warps": 32, "stages": 8}  # that Triton could take
POWERS = ("tile_x", "tile_y", "warps")  # of two, or 0


@dataclass(frozen=True)
class Thresholds:
    """tile_bytes: of a tile of stacked heads, or of the rows of one that are worked on together (CPU).

    resident_bytes: the largest K of a head that a worker keeps (CPU).  resident_tokens: the longest
    side of which one launch keeps all scores in registers (GPU); sweep_tokens: those of a stripe.
    tile_x, tile_y, warps, stages: of the kernels that stream tiles of scores (GPU); where 0, what each
    was written with, see kernels/gpu.
    """

    tile_bytes: int = 0
    resident_bytes: int = 0
    resident_tokens: int = 0
    sweep_tokens: int = 0
    tile_x: int = 0
    tile_y: int = 0
    warps: int = 0
    stages: int = 0


_forced: ContextVar[Thresholds | None] = ContextVar("asapc_thresholds", default=None)
_cache_used: ContextVar[bool] = ContextVar("asapc_tuning_cache", default=True)


def thresholds(q: Tensor, k: Tensor) -> Thresholds:
    """For queries [B, H, N, D] and keys [B, H, M, D].  Raises InputError for a bad ASAPC_THRESHOLDS."""
    forced = _forced.get()
    if forced is not None:
        return forced
    device = "cuda" if q.device.type == "cuda" else "cpu"
    found = _shipped(device)
    if _cache_used.get() and not os.environ.get("ASAPC_NO_TUNE"):
        found = _merged(found, _cached().get(key_of(q, k), {}))
    path = os.environ.get("ASAPC_THRESHOLDS")
    return found if path is None else _merged(found, _users(path).get(device, {}))


@contextmanager
def using(forced: Thresholds) -> Iterator[None]:
    """These for every lookup of this thread inside: for tuning and for tests."""
    token = _forced.set(forced)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def without_cache() -> Iterator[None]:
    """As if nothing had been tuned, for lookups of this thread inside."""
    token = _cache_used.set(False)
    try:
        yield
    finally:
        _cache_used.reset(token)


def key_of(q: Tensor, k: Tensor) -> str:
    """Device, dtype, shape bucket (powers of two, rounded up) and the kernels' source."""
    if q.device.type == "cuda":
        device = torch.cuda.get_device_name(q.device)
    else:
        device = f"{platform.processor() or platform.machine()} x{torch.get_num_threads()}"
    sizes = (q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3])
    bucket = "x".join(str(1 << max(0, size - 1).bit_length()) for size in sizes)
    return f"{device}|{str(q.dtype).removeprefix('torch.')}|{bucket}|{_source()}"


def remember(key: str, found: Thresholds) -> Path:
    """Write one entry of the tuning cache; returns its file."""
    path = cache_file()
    entries = {**_read_cache(path), key: {f.name: getattr(found, f.name) for f in fields(found)}}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    partial.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    _cached.cache_clear()
    return path


def cache_file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "asapc" / "thresholds.json"


@cache
def _shipped(device: str) -> Thresholds:
    text = files("asapc.kernels").joinpath("thresholds.json").read_text(encoding="utf-8")
    return _merged(Thresholds(), parse_json(text)[device])


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


@cache
def _cached() -> dict[str, dict[str, int]]:
    return _read_cache(cache_file())


def _read_cache(path: Path) -> dict[str, dict[str, int]]:
    try:
        document = read_json(path, MAX_BYTES)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"asapc: the tuning cache {path} is left aside: {error}", stacklevel=2)
        return {}
    if not isinstance(document, dict):
        document = {}
    return {key: entry for key, entry in document.items() if _is_entry(entry)}


def _is_entry(entry: Any) -> bool:
    names = {field.name for field in fields(Thresholds)}
    return (
        isinstance(entry, dict)
        and set(entry) <= names
        and all(type(x) is int and 0 <= x <= MOST.get(key, LARGEST) for key, x in entry.items())
        and all(entry.get(key, 0).bit_count() <= 1 for key in POWERS)
    )


def _merged(base: Thresholds, entry: Mapping[str, int]) -> Thresholds:
    return replace(base, **entry)


@cache
def _source() -> str:
    """Of the kernels that the thresholds steer: another version of them is tuned anew."""
    digest = hashlib.sha256()
    for folder in ("cpu", "gpu"):
        places = files("asapc.kernels").joinpath(folder).iterdir()
        for place in sorted(places, key=lambda item: item.name):
            if place.name.endswith(".py"):
                digest.update(place.read_bytes())
    return digest.hexdigest()[:12]
