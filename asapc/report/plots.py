"""Drawings: matplotlib figures, in a report's colours, and as images of the page.

They are drawn in colours of a white page; the page's dark theme inverts them and turns the hue back. One
unit is one CSS pixel. Names are drawn as plain text.

matplotlib is in the extra `report`: only what needs it imports this module.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter

from asapc.report.pictures import MapPair
from asapc.report.tables import number

EXACT = 1e-5  # an error below this is rounding
WIDTH, HEIGHT = 330, 250  # a phone's width, a third of a screen's
MASS_POINTS = 90
INK, MUTED, LINE, PAPER = "#1c1d20", "#5b6068", "#d4d1cc", "#ffffff"
TEACHER, LOSSLESS, COMPILED = "#767b84", "#0b7a6b", "#2459c7"
OVER = "#b0411e"  # a limit, and what is beyond all bounds

WRONG = "#ff00c8"  # a cell that is not finite
SHADES = LinearSegmentedColormap.from_list(
    "attention", ["#ffffff", "#bed6f0", "#6096d6", "#2157a6", "#0a1c42"]
).with_extremes(bad=WRONG)
DIFFERENCES = LinearSegmentedColormap.from_list(
    "difference", ["#0d428c", "#4285c8", "#accde8", "#ffffff", "#facba0", "#de7726", "#8a3c06"]
).with_extremes(bad=WRONG)

STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "asapc", "text.parse_math": False, "font.size": 11,
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "axes.edgecolor": LINE, "axes.facecolor": "none", "figure.facecolor": PAPER,
    "axes.labelcolor": MUTED, "text.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.linewidth": 1, "axes.axisbelow": True,
    "xtick.color": LINE, "ytick.color": LINE, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "grid.color": LINE, "grid.linewidth": 0.8, "xtick.major.size": 3, "ytick.major.size": 0,
    "axes.labelsize": 11, "xtick.labelsize": 10.5, "ytick.labelsize": 10.5, "lines.linewidth": 1.5,
    "path.simplify": True, "path.simplify_threshold": 0.1, "legend.frameon": False,
    "legend.fontsize": 10, "axes.titlelocation": "left", "axes.titlesize": 10.5,
}  # fmt: skip

Kind = Literal["teacher", "lossless", "candidate"]
MARKS = {"teacher": ("D", TEACHER), "lossless": ("s", LOSSLESS), "candidate": ("o", MUTED)}


@dataclass(frozen=True)
class Point:
    """One candidate of a site. time: ms, or MiB where memory is the objective."""

    kind: Kind
    error: float
    time: float
    chosen: bool


def style() -> Any:
    """A context for drawing: matplotlib as it ships, whatever the user's matplotlibrc says, and STYLE.

    All functions below are to be called inside it.
    """
    # Choosing a backend would import one; none is needed. Any: releases type the keys differently.
    shipped: Any = matplotlib.rcParamsDefault
    options: Any = {k: v for k, v in shipped.items() if not k.startswith("backend")}
    return matplotlib.rc_context(options | STYLE)


def data_uri(figure: Figure) -> str:
    """The figure as an SVG image, the same bytes for the same figure."""
    buffer = io.BytesIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", facecolor="none", metadata=metadata)
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def draw_pareto(points: Sequence[Point], unit: str, limit: float | None) -> Figure:
    """Error against time; everything left of and below a point beats it.  limit: of the error."""
    figure, axes = _figure(WIDTH, HEIGHT, left=50, bottom=40, top=24)
    errors = [p.error for p in points if p.error > EXACT]
    low = math.floor(math.log10(min(errors, default=1e-3)))
    high = math.log10(max([*errors, 10.0 ** (low + 1), limit or 0.0]))
    exact = low - 0.55

    def height(error: float) -> float:
        return math.log10(error) if error > EXACT else exact

    decades = list(range(low, math.floor(high) + 1))
    axes.set_yticks([exact, *decades], ["exact", *(f"{10.0**d:g}" for d in decades)])
    axes.set_ylim(exact - 0.35, high + 0.3)
    axes.grid(axis="y")
    axes.axhline(low - 0.2, color=PAPER, linewidth=3)  # the axis is broken here
    _log_time(axes, [p.time for p in points])
    axes.set_xlabel(unit)
    axes.set_ylabel("attention error")
    if limit is not None and limit > EXACT:
        axes.axhline(math.log10(limit), color=OVER, linewidth=1, dashes=(4, 3))
        axes.annotate(
            "budget", (1, math.log10(limit)), xycoords=("axes fraction", "data"), xytext=(-2, 3),
            textcoords="offset points", ha="right", color=OVER, fontsize=10.5,
        )  # fmt: skip
    front = _front(points)
    if len(front) > 1:
        xs, ys = [p.time for p in front], [height(p.error) for p in front]
        axes.step(xs, ys, where="post", color=LINE, zorder=1.5)
    named: dict[str, Any] = {}
    for point in points:
        place = point.time, height(point.error)
        mark, color = MARKS[point.kind]
        if point.chosen:
            named["chosen"] = axes.plot(*place, "o", ms=17, mfc="none", mec=COMPILED, zorder=3)[0]
        hollow = point.kind == "candidate" and not point.chosen and point not in front
        named[point.kind] = axes.plot(
            *place, mark, ms=7, mfc=PAPER if hollow else color, mec=color, mew=1.3, zorder=4
        )[0]
    figure.legend(
        [*named.values()], [*named], loc="upper right", ncols=4, markerscale=0.7, handletextpad=0.1,
        columnspacing=0.8, borderaxespad=0.0,
    )  # fmt: skip
    return figure


def draw_bars(
    values: Sequence[float | None], names: Sequence[str], axis: str, fills: Sequence[str], *,
    line: tuple[str, float] | None = None, percent: bool = False,
) -> Figure:  # fmt: skip
    """A bar for each value, the first on top; what is not finite is a mark at the end.

    fills: colours.  line: across, with what it is; a "limit" is dashed in the colour of one.
    """
    shown = [v if v is not None and math.isfinite(v) else None for v in values]
    # A divergence of equal outputs rounds to a little below zero.
    known = [v for v in (*shown, line and line[1]) if v is not None and v > 0]
    largest = max(known, default=0.01 if percent else 1.0)
    left = int(min(240, 24 + 6.2 * max(map(len, names), default=0)))
    width = max(WIDTH, left + WIDTH - 100)
    figure, axes = _figure(width, 56 + 20 * len(names), left=left, bottom=40, right=60)
    for index, (value, fill) in enumerate(zip(shown, fills, strict=True)):
        text, place = "∞", largest
        if value is not None:
            axes.barh(index, value, height=0.62, color=fill, linewidth=0)
            text, place = f"{value:.2%}" if percent else number(value), max(value, 0.0)
        axes.annotate(
            text, (place, index), xytext=(4, 0), textcoords="offset points", va="center",
            color=OVER if value is None else INK,
        )  # fmt: skip
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, largest * 1.04)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0) if percent else "{x:g}")
    axes.grid(axis="x")
    axes.set_xlabel(axis if line is None else f"{axis} (dashed: {line[0]} {number(line[1])})")
    if line is not None:
        axes.axvline(line[1], color=OVER if line[0] == "limit" else INK, linewidth=1, dashes=(4, 3))
    return figure


def draw_masses(pair: MapPair) -> Figure:
    """Row and column sums by token, teacher broad and compiled thin; 1 is balanced."""
    figure = Figure(figsize=(WIDTH / 72, 270 / 72), dpi=72)
    panels = figure.subplots(2, 1)
    figure.subplots_adjust(left=50 / WIDTH, right=1 - 8 / WIDTH, top=1 - 20 / 270,
                           bottom=40 / 270, hspace=0.5)  # fmt: skip
    for axes, sums, what in (
        (panels[0], pair.row_sums, "row mass, by query"),
        (panels[1], pair.column_sums, "column mass, by key"),
    ):
        axes.axhline(1, color=LINE, linewidth=0.8)
        spread = 0.02  # deviations below a hundredth are drawn as the flat lines they are
        for values, color, width, alpha in ((sums[0], TEACHER, 4.0, 0.6), (sums[1], COMPILED, 1.3, 1.0)):
            places, furthest = _furthest(values.double())
            axes.plot(places, furthest, color=color, linewidth=width, alpha=alpha)
            finite = [abs(value - 1) for value in furthest if math.isfinite(value)]
            spread = max([spread, *(1.15 * off for off in finite)])
        axes.set_ylim(1 - spread, 1 + spread)
        axes.set_yticks([1 - spread / 2, 1, 1 + spread / 2])
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.set_xlim(0, max(1, len(sums[0]) - 1))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.grid(axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_title(what, color=MUTED, pad=5)
    panels[1].set_xlabel("token")
    return figure


def draw_maps(pair: MapPair) -> Figure:
    """Teacher and compiled on one colour scale; compiled - teacher on its own, around 0."""
    teacher, compiled = pair.teacher.double(), pair.compiled.double()
    top = _scale(torch.stack([teacher, compiled]))
    difference = compiled - teacher
    end = _scale(difference.abs())
    figure = Figure(figsize=(9.2, 3.2), dpi=72, layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, title, values, low, high, colors in zip(
        panels, ("teacher", "compiled", "compiled - teacher"), (teacher, compiled, difference),
        (0.0, 0.0, -end), (top, top, end), (SHADES, SHADES, DIFFERENCES), strict=True,
    ):  # fmt: skip
        shown = axes.imshow(values.tolist(), cmap=colors, vmin=low, vmax=high, interpolation="none")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(title)
        if axes is not panels[0]:  # which has the scale of the second
            bar = figure.colorbar(shown, ax=axes, fraction=0.046, format="{x:.3g}")
            bar.locator = MaxNLocator(4)
            if bar.solids is not None:
                bar.solids.set_rasterized(True)  # else a shape for each of its shades
    return figure


def _scale(values: torch.Tensor) -> float:
    """The 99.5 % quantile, at which a colour scale ends: a few sharp cells would leave the rest blank."""
    finite = values[values.isfinite()]
    return (float(torch.quantile(finite, 0.995)) if len(finite) else 0.0) or 1.0


def _figure(
    width: int, height: int, *, left: int, bottom: int, right: int = 8, top: int = 10
) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)  # so that a pixel is a unit of the SVG
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    axes = figure.add_axes(box)
    axes.spines["left"].set_visible(False)
    return figure, axes


def _log_time(axes: Axes, times: Sequence[float]) -> None:
    low, high = min(times) / 1.25, max(times) * 1.25
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")


def _front(points: Sequence[Point]) -> list[Point]:
    """The points no other beats in both, fastest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.time, p.error)):
        best = front[-1].error if front else math.inf
        if point.error < best and best > EXACT:
            front.append(point)
    return front


def _furthest(sums: torch.Tensor) -> tuple[list[int], list[float]]:
    """(tokens, sums) of at most MASS_POINTS tokens: of each run of neighbours the furthest from 1."""
    off = torch.nan_to_num((sums - 1).abs(), nan=torch.inf)
    runs = torch.arange(len(sums)).tensor_split(min(MASS_POINTS, len(sums)))
    places = [int(run[off[run].argmax()]) for run in runs]
    return places, sums[places].tolist()
