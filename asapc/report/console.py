"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from asapc.report.tables import Table

PIPE_WIDTH = 160  # a pipe or a log file has no width of its own
STYLES = {
    "passed": "green", "matched": "green", "refused": "yellow", "ACCEPT": "green",
    "REGRESSION": "bold red", "ANOMALOUS": "bold yellow",
}  # fmt: skip


def print_tables(tables: Iterable[Table], stream: TextIO) -> None:
    """Print to `stream`; plain text when it is not a terminal."""
    console = Console(
        file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False, emoji=False
    )
    for table in tables:
        console.print(_rich(table))


def _rich(table: Table) -> RichTable:
    headings = table.headings()
    rich = RichTable(
        title=Text(table.title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=any(name for name, _ in headings),
    )
    for name, right in headings:
        rich.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right)
    for row in table.rows:
        rich.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return rich
