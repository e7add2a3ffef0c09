"""How much memory a run may take, what it has taken, and how large its pieces may be.

    asapc calibrate --max-memory 2GiB    (and compile, and report)

The interpreter, torch and the model are there before the first batch: what is left of the limit is
shared between what a batch needs at once and what is kept for a fit.
"""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from asapc.errors import InputError

UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
SLACK = 64 << 20  # buffers of the allocator and of the kernels, which no piece accounts for


def parse_size(text: str) -> int:
    """"2GiB", "1.5 GB", "800M" (MiB) or bytes.  Raises InputError."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{0,9})?)\s*([A-Za-z]{0,3})\s*", text)
    unit = None if match is None else UNITS.get(match[2].upper())
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise InputError("--max-memory must be a size such as 2GiB or 800MB", got=repr(text))
    return int(float(match[1]) * unit)


def format_size(size: int) -> str:
    """The size in the largest unit that leaves a digit before the point."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[unit.upper()]:
            return f"{size / UNITS[unit.upper()]:.4g} {unit}"
    return f"{size} bytes"


def current() -> int:
    """Resident memory of this process now, in bytes."""
    return int(psutil.Process().memory_info().rss)


def peak() -> int:
    """The most it has been, in bytes, since it began or since forget_peak; psutil does not know it."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says of a process counts the one that it was forked from
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) << 10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def give_back() -> None:
    """Hand what the C allocator keeps of freed memory back to the system, where it can (glibc).

    Batches of many shapes leave holes that no later one fits into: without this a run of small batches
    comes to hold more than one of large ones.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class MemoryLimit:
    """What a run may take in all: the process as it stands, a batch at a time, and what is kept for fits.

    limit: resident bytes.  Raises InputError if more than that is in use to begin with.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.base = current()
        self._highest = peak()
        if self.left <= 0:
            raise InputError(
                "--max-memory must hold the model and its libraries",
                got=f"{format_size(limit)}; {format_size(self.base + SLACK)} are in use before the data",
                help=f"allow at least {format_size(self.base + 4 * SLACK)}",
            )

    @property
    def left(self) -> int:
        """Bytes beyond what was in use to begin with."""
        return self.limit - self.base - SLACK

    def peak(self) -> int:
        """The most this process has taken since it began."""
        self._highest = max(self._highest, peak())
        return self._highest

    def told(self, size: int) -> str:
        """How much of the limit was used, in words.  size: of the batches."""
        most = self.peak()
        kept = "" if most <= self.limit else " (more than allowed: later batches were larger)"
        return (
            f"{format_size(most)} of {format_size(self.limit)} memory used at most, "
            f"in batches of {size}{kept}"
        )

    def batch_size(self, run: Callable[[int], object], most: int, share: float = 0.5) -> int:
        """The largest batch, at most `most`, that takes no more than a share of what is left.

        run: does what a step does, on so many examples. It is tried with 1, 2, 4, ... as long as the
        next one can be expected to fit, so that the limit is not passed by finding out where it is.
        Raises InputError where not even one example fits.
        """
        room = self.left * share
        size = 1
        run(size)  # what is loaded on a first call is not a batch's
        while True:
            taken = self._growth(run, size)
            if taken > room and size == 1:
                raise InputError(
                    "--max-memory must hold a batch of one example",
                    got=f"{format_size(int(room))} for {format_size(taken)}",
                    help="allow more, or use shorter examples",
                )
            # partly buffers that are made once, so this errs to the safe side
            fitting = size if taken > room else min(most, int(room * size / max(1, taken)))
            if fitting < 2 * size:
                return max(1, size // 2 if taken > room else fitting)
            if size >= most:
                return most
            size = min(2 * size, most)

    def kept(self, collectors: int, most: int, share: float = 0.25) -> int:
        """Bytes of activations that each of so many collectors may keep: its part of a share of what is
        left, and at most `most`."""
        return min(most, int(self.left * share) // max(1, collectors))

    def _growth(self, run: Callable[[int], object], size: int) -> int:
        self.peak()
        give_back()  # what fits into memory that was freed before would not be seen
        before = current()
        forget_peak()
        run(size)
        return max(0, peak() - before)


def forget_peak() -> bool:
    """Let peak() begin anew; False if the system cannot, and then it stays what it was."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
