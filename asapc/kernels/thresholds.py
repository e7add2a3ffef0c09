"""Sizes at which the CPU's kernels change path; results differ in the last bits between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Thresholds(NamedTuple):
    """tile_bytes: of what is worked on at once, such as stacked heads or some rows of one; half of a
    private cache of 1 MiB.  resident_bytes: the largest K of a head that a worker keeps.
    """

    tile_bytes: int = 1 << 19
    resident_bytes: int = 1 << 26


_used: ContextVar[Thresholds] = ContextVar("asapc_thresholds", default=Thresholds())  # noqa: B039 -- a tuple
thresholds = _used.get


@contextmanager
def using(others: Thresholds) -> Iterator[None]:
    """These for every lookup of this thread inside."""
    token = _used.set(others)
    try:
        yield
    finally:
        _used.reset(token)
