"""Progress on stderr: bars on a terminal, plain lines elsewhere, nothing when quiet.

Pipeline functions take a `Progress`; the base class is the silent one and the default.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TextIO, TypeVar

from asapc.terminal.printed import escaped

if TYPE_CHECKING:
    from rich.progress import Progress as RichBars

Item = TypeVar("Item")

LONG = 2.0  # seconds: a phase that took less is not worth a line afterwards
LONGER = 5.0  # and one that takes less is not worth a line while it runs


class Progress:
    """Silent: `track` passes items through, `note` drops its text."""

    def track(self, iterable: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
        """Yield the items of `iterable`, showing how many of `total` (default: its len) passed."""
        yield from iterable

    def phase(self, label: str) -> AbstractContextManager[None]:
        """Show that something of unknown length is going on."""
        return nullcontext()

    def note(self, text: str) -> None:
        """Say one line."""


SILENT = Progress()


class PlainProgress(Progress):
    """A line every `interval` seconds of a loop, and one at its end; a line at the end of a long phase,
    and another one while a longer phase runs."""

    def __init__(self, stream: TextIO | None = None, *, interval: float = 5.0) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.interval = interval

    def track(self, iterable: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
        total = _length(iterable, total)
        of_total = "" if total is None else f"/{total}"
        start = last = time.monotonic()
        done = 0
        for item in iterable:
            yield item
            done += 1
            now = time.monotonic()
            if now - last >= self.interval:
                last = now
                self.line(f"{label}: {done}{of_total}{_left(now - start, done, total)}")
        self.line(f"{label}: {done}{of_total}, {time.monotonic() - start:.1f} s")

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        start = time.monotonic()
        running = threading.Timer(LONGER, self.line, [f"{label} ..."])
        running.daemon = True
        running.start()
        try:
            yield
        finally:
            running.cancel()
        took = time.monotonic() - start
        if took >= LONG:
            self.line(f"{label}: {took:.1f} s")

    def line(self, text: str) -> None:
        """Show how far a loop or a phase is."""
        self.note(text)

    def note(self, text: str) -> None:
        self.stream.write(f"{escaped(text)}\n")  # in one piece: a phase's line comes from another thread
        self.stream.flush()


class RichProgress(Progress):
    """Bars on a terminal, gone when their loop or phase ends; notes are printed above them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        from rich.console import Console

        self.console = Console(file=sys.stderr if stream is None else stream, highlight=False)
        self._bars: RichBars | None = None

    def track(self, iterable: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
        with self._bar(label, _length(iterable, total)) as advance:
            for item in iterable:
                yield item
                advance()

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        with self._bar(label, None):
            yield

    def note(self, text: str) -> None:
        self.console.print(escaped(text), markup=False, soft_wrap=True)

    @contextmanager
    def _bar(self, label: str, total: int | None) -> Iterator[Callable[[], None]]:
        from rich.markup import escape

        bars = self._open()
        task = bars.add_task(escape(escaped(label)), total=total)
        try:
            yield lambda: bars.advance(task)
        finally:  # also when the consumer stops early or is interrupted: the cursor must come back
            bars.remove_task(task)
            if not bars.tasks:
                bars.stop()
                self._bars = None

    def _open(self) -> RichBars:
        from rich import progress
        from rich.text import Text

        class Count(progress.MofNCompleteColumn):
            """Nothing for a phase: what has no total has no count either."""

            def render(self, task: progress.Task) -> Text:
                return Text() if task.total is None and not task.completed else super().render(task)

        if self._bars is None:
            self._bars = progress.Progress(
                progress.TextColumn("{task.description}"), progress.BarColumn(), Count(),
                progress.TimeElapsedColumn(), progress.TimeRemainingColumn(),
                console=self.console, transient=True,
            )  # fmt: skip
            self._bars.start()
        return self._bars


def make_progress(*, quiet: bool = False, stream: TextIO | None = None) -> Progress:
    """Silent if quiet; bars if `stream` (default stderr) is a terminal, not in CI; else lines."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        return Progress()
    if stream.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb":
        return RichProgress(stream)
    return PlainProgress(stream)


def _length(iterable: Iterable[Item], total: int | None) -> int | None:
    if total is not None:
        return total
    return len(iterable) if isinstance(iterable, Sized) else None


def _left(passed: float, done: int, total: int | None) -> str:
    """", about 40 s left", if that is known and more than a moment."""
    seconds = passed / done * (total - done) if total is not None and done else 0.0
    return f", about {seconds:.0f} s left" if seconds >= LONG else ""
