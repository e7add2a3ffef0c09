"""Progress in a notebook's cell: one line of HTML that is updated in place, and gone when its loop ends.

It needs what every notebook's kernel has (IPython), and no widgets.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

from asapc.terminal.printed import escaped
from asapc.terminal.progress import Bars, Progress, left, make_progress

INTERVAL = 0.2  # seconds between updates


def progress_here(*, quiet: bool) -> Progress:
    """For a function that is called from Python: in a notebook's cell what follows, `make_progress`'s
    elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    in_notebook = type(shell).__name__ == "ZMQInteractiveShell"  # this process is the kernel of one
    return NotebookProgress() if in_notebook and not quiet else make_progress(quiet=quiet)


@dataclass
class _Bar:
    label: str
    total: int | None
    start: float
    done: int = 0

    def html(self) -> str:
        label = escape(escaped(self.label))
        if self.total is None:
            return f"<div><progress></progress> {label} {self.done or ''}</div>"
        rest = left(time.monotonic() - self.start, self.done, self.total)
        counted = f'value="{self.done}" max="{max(self.total, 1)}"'
        return f"<div><progress {counted}></progress> {label} {self.done}/{self.total}{rest}</div>"


class NotebookProgress(Bars):
    """Bars below each other where loops are nested; notes are printed."""

    def __init__(self) -> None:
        self._shown: Any = importlib.import_module("IPython.display")
        self._handle: Any = None
        self._bars: list[_Bar] = []
        self._last = 0.0

    def note(self, text: str) -> None:
        print(escaped(text), flush=True)

    @contextmanager
    def _bar(self, label: str, total: int | None) -> Iterator[Callable[[], None]]:
        bar = _Bar(label, total, time.monotonic())

        def advance() -> None:
            bar.done += 1
            if time.monotonic() - self._last >= INTERVAL:
                self._show()

        self._bars.append(bar)
        self._show()
        try:
            yield advance
        finally:  # also when the consumer stops early or is interrupted
            self._bars.remove(bar)
            self._show()

    def _show(self) -> None:
        self._last = time.monotonic()
        html = self._shown.HTML("".join(bar.html() for bar in self._bars))
        if self._handle is None:
            self._handle = self._shown.display(html, display_id=True)
        else:
            self._handle.update(html)
