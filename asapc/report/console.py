"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from asapc.report.tables import Table
from asapc.terminal.printed import one_line

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
        title=Text(one_line(table.title), style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=any(name for name, _ in headings),
    )
    for name, right in headings:
        justify: Literal["left", "right"] = "right" if right else "left"
        rich.add_column(Text(one_line(name)), justify=justify, overflow="fold", no_wrap=right)
    for row in table.rows:
        rich.add_row(*(Text(one_line(cell), style=STYLES.get(cell, "")) for cell in row))
    return rich
