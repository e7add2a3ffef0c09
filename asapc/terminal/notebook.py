"""Progress in a notebook's cell: one line that is updated in place, and empty when its loop ends.

It needs what every notebook's kernel has (IPython), and no widgets.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from asapc.terminal.printed import escaped
from asapc.terminal.progress import Item, PlainProgress, Progress, make_progress

INTERVAL = 0.2  # seconds between updates


def progress_here(*, quiet: bool) -> Progress:
    """For a function called from Python: NotebookProgress in a notebook, else that of make_progress."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    in_notebook = type(shell).__name__ == "ZMQInteractiveShell"  # this process is the kernel of one
    return NotebookProgress() if in_notebook and not quiet else make_progress(quiet=quiet)


class NotebookProgress(PlainProgress):
    """Shows the loop that moved last, of several nested ones; notes are printed."""

    def __init__(self) -> None:
        super().__init__(interval=INTERVAL)
        self._display: Any = importlib.import_module("IPython.display").display
        self._handle: Any = None

    def track(self, iterable: Iterable[Item], label: str, total: int | None = None) -> Iterator[Item]:
        with self.phase(label):
            yield from super().track(iterable, label, total)

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        self.line(label)
        try:
            yield
        finally:  # also when the consumer stops early or is interrupted
            self.line("")

    def note(self, text: str) -> None:
        print(escaped(text), flush=True)

    def line(self, text: str) -> None:
        shown = {"text/plain": escaped(text)}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
