"""Results on a terminal: tables where they fit, stacked rows where they do not. Numbers are never cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from asapc.report.tables import TONES, Row, Table
from asapc.terminal.printed import one_line

PIPE_WIDTH = 160  # a pipe or a log file has no width of its own
NARROWEST = 16  # characters to which a column of words is folded; narrower, rows are stacked
PADDING = 2  # around the cells of a column
STYLES = {"good": "green", "bad": "bold red", "odd": "bold yellow"}


def print_result(parts: Iterable[Table | str], stream: TextIO) -> None:
    """Print tables, and lines as they are; plain text when `stream` is not a terminal.

    A line's first word, up to a colon, has the style of its tone, if it has one.
    """
    console = _console(stream)
    for part in parts:
        if isinstance(part, str):
            text = Text(one_line(part))
            first = part.partition(":")[0]
            text.stylize(_style(first), 0, len(first))
            console.print(text, soft_wrap=True)
        elif _fits(part, console.width):
            console.print(_rich(part))
        else:
            console.print(_stacked(part), soft_wrap=True)


def _style(word: str) -> str:
    return STYLES.get(TONES.get(word, ""), "")


def _console(stream: TextIO) -> Console:
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, emoji=False)


def _fits(table: Table, width: int) -> bool:
    """Whether numbers stand whole beside columns of words that are folded no narrower than NARROWEST."""
    needed = PADDING
    for index, (name, right) in enumerate(table.headings()):
        cells = [one_line(row[index]) for row in table.rows]
        whole = max((cell_len(cell) for cell in (name, *cells)), default=0)
        needed += PADDING + (whole if right else min(whole, NARROWEST))
    return needed <= width


def _rich(table: Table) -> RichTable:
    headings = table.headings()
    rich = RichTable(
        title=Text(one_line(table.title), style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=any(name for name, _ in headings),
    )
    for index, (name, right) in enumerate(headings):
        justify: Literal["left", "right"] = "right" if right else "left"
        cells = [one_line(row[index]) for row in table.rows]
        whole = max((cell_len(cell) for cell in (name, *cells)), default=0)
        rich.add_column(
            Text(one_line(name)), justify=justify, overflow="fold", no_wrap=right,
            min_width=whole if right else min(whole, NARROWEST),
        )  # fmt: skip
    for row in table.rows:
        rich.add_row(*(Text(one_line(cell), style=_style(cell)) for cell in row))
    return rich


def _stacked(table: Table) -> Text:
    """A row a paragraph: its first cell, and below it a line for each of the others."""
    names = [name for name, _ in table.headings()]
    text = Text()
    text.append(f" {one_line(table.title)}\n", style="bold")
    for row in table.rows:
        text.append_text(_paragraph(row, names))
    return text


def _paragraph(row: Row, names: list[str]) -> Text:
    text = Text(f"  {one_line(row[0])}\n")
    for name, cell in zip(names[1:], row[1:], strict=True):
        label = f"{one_line(name)}  " if name else ""
        text.append(f"    {label}")
        text.append(f"{one_line(cell)}\n", style=_style(cell))
    return text
