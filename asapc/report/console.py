"""Results on a terminal: tables where they fit, stacked rows where they do not. Numbers are never cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from asapc.report.tables import TONES, Table
from asapc.terminal.printed import one_line

PIPE_WIDTH = 160  # a pipe or a log file has no width of its own
NARROWEST = 16  # characters to which a column of words is folded; narrower, rows are stacked
PADDING = 2  # around the cells of a column
STYLES = {"good": "green", "bad": "bold red", "odd": "bold yellow"}


def print_result(parts: Iterable[Table | str], stream: TextIO) -> None:
    """Print tables, and lines as they are; plain text if `stream` is not a terminal.

    A verdict at the beginning of a line, up to a colon, has its colour.
    """
    width = None if stream.isatty() else PIPE_WIDTH
    console = Console(file=stream, width=width, highlight=False, emoji=False)
    for part in parts:
        if isinstance(part, str):
            text = Text(one_line(part))
            first = part.partition(":")[0]
            text.stylize(_style(first), 0, len(first))
            console.print(text, soft_wrap=True)
        elif sum(_widths(part)) + PADDING * (len(part.columns) + 1) <= console.width:
            with console.capture() as drawn:
                console.print(_rich(part))
            stream.writelines(f"{line.rstrip()}\n" for line in drawn.get().splitlines())
        else:
            console.print(_stacked(part), soft_wrap=True)


def _style(word: str) -> str:
    return STYLES.get(TONES.get(word, ""), "")


def _widths(table: Table) -> list[int]:
    """The width each column needs: numbers stay whole, words may be folded to NARROWEST."""
    widths = []
    for index, (name, right) in enumerate(table.headings()):
        whole = max(cell_len(one_line(cell)) for cell in (name, *(row[index] for row in table.rows)))
        widths.append(whole if right else min(whole, NARROWEST))
    return widths


def _rich(table: Table) -> RichTable:
    headings = table.headings()
    rich = RichTable(
        title=Text(one_line(table.title), style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=any(name for name, _ in headings),
    )
    for (name, right), width in zip(headings, _widths(table), strict=True):
        justify: Literal["left", "right"] = "right" if right else "left"
        rich.add_column(
            Text(one_line(name)), justify=justify, overflow="fold", no_wrap=right, min_width=width
        )
    for row in table.rows:
        rich.add_row(*(Text(one_line(cell), style=_style(cell)) for cell in row))
    return rich


def _stacked(table: Table) -> Text:
    """A paragraph for each row: its first cell, and below it a line for each of the others."""
    names = [name for name, _ in table.headings()]
    text = Text()
    text.append(f" {one_line(table.title)}\n", style="bold")
    for row in table.rows:
        text.append(f"  {one_line(row[0])}\n")
        for name, cell in zip(names[1:], row[1:], strict=True):
            text.append(f"    {one_line(name)}  " if name else "    ")
            text.append(f"{one_line(cell)}\n", style=_style(cell))
    return text
