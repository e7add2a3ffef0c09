"""What the page's template lays out: tables, figures and layers, every value already formatted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

TONES = {
    "ACCEPT": "good", "passed": "good", "holds": "good", "inside the budget": "good", "chosen": "good",
    "REGRESSION": "bad", "FAILED": "bad", "violated": "bad", "ANOMALOUS": "odd", "vacuous": "odd",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """note: a second, smaller line. tone: "good", "bad", "odd" or none."""

    text: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Grid:
    """A table: (heading, right-aligned) per column; the first cell of a row is its heading.

    marked: the row to stand out.  stacked: on a narrow screen its rows become cards, nothing scrolls.
    """

    name: str
    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[Cell]]
    marked: int | None = None
    note: str = ""
    stacked: bool = False


@dataclass(frozen=True)
class Tile:
    """One figure of the headline."""

    label: str
    value: str
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Bar:
    """One of the headline's times. share: of the longest, in per cent."""

    kind: str
    text: str
    share: float
    speedup: str


@dataclass(frozen=True)
class Plot:
    caption: str
    picture: Markup


@dataclass(frozen=True)
class Example:
    """A pair of maps: (name, data URI, what it shows) each, and the masses of rows and columns."""

    caption: str
    maps: Sequence[tuple[str, Markup, str]]
    scale: str
    difference_scale: str
    masses: Plot


@dataclass(frozen=True)
class Layer:
    """One layer: a line of figures, and what unfolds below it.

    cells: one for each column of Layers.  share: its error, of the largest, in per cent.
    places: where it stands in each of Layers' orders.
    """

    name: str
    anchor: str
    operator: str
    tone: str
    summary: str
    cells: Sequence[Cell]
    share: float
    places: Sequence[int]
    facts: Sequence[tuple[str, str]]
    figures: Sequence[Plot]
    note: str
    examples: Sequence[Example]
    certificates: Grid | None
    violated: bool
    metrics: Grid | None


@dataclass(frozen=True)
class Layers:
    """All layers, the worst first.

    columns: what the cells of each are.  orders: what else they can be sorted by: (key, words); the first
    is the one that they are in.  note: which of them have no pictures.
    """

    columns: Sequence[str]
    orders: Sequence[tuple[str, str]]
    layers: Sequence[Layer]
    note: str = ""


@dataclass
class Headline:
    """What to do, and what that rests on.

    word: the verdict.  basis: which limits, in one sentence.  how: (what it is, text to copy) each.
    """

    word: str
    tone: str
    sentence: str
    because: str
    basis: str
    lossless: str = ""
    how: Sequence[tuple[str, str]] = ()
    failures: list[tuple[str, str]] = field(default_factory=list)
    more_failures: int = 0
