"""Pictures of a report as matplotlib figures: `report.figure("errors")`, and the same on its page.

    times        the whole model: teacher, lossless, compiled, in ms
    errors       attention error by layer, the worst first, and the limit
    candidates   what was tried at a site, error against cost
    heads        attention error by head of a site
    lengths      attention error by number of active tokens of a site
    maps         attention of teacher and compiled layer, and their difference; only of a report that was
                 measured in this process: report.json has no maps

A figure is drawn on white, knows no pyplot and opens no window. `figure.savefig("errors.png")` writes it;
a notebook shows it after `%matplotlib inline`. Names are drawn as plain text.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.style
import torch
from markupsafe import Markup
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from asapc.errors import InputError
from asapc.operators.catalogue import TEACHER
from asapc.report.advice import judgement
from asapc.report.document import ERROR, Report, SiteReport, Trail, TriedSite, finite, positive
from asapc.report.pictures import MapPair
from asapc.report.tables import number
from asapc.terminal.printed import clipped, one_line
from asapc.terminal.printed import short as repr_of

MOST = 48  # layers or heads in one figure
LONGEST_NAME = 36
EXACT = 1e-5  # an error below this is rounding
FAR = 1e6  # what is further away is drawn there
COLORS = {"teacher": "#767b84", "lossless": "#0b7a6b", "compiled": "#2459c7"}
LIMIT = "#b0411e"
WRONG = "#ff00c8"  # a cell that is not finite
SHADES = LinearSegmentedColormap.from_list(
    "attention", ["#ffffff", "#bed6f0", "#6096d6", "#2157a6", "#0a1c42"]
).with_extremes(bad=WRONG)
DIFFERENCES = LinearSegmentedColormap.from_list(
    "difference", ["#0d428c", "#4285c8", "#accde8", "#ffffff", "#facba0", "#de7726", "#8a3c06"]
).with_extremes(bad=WRONG)
STYLE: dict[str, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "asapc", "text.parse_math": False, "font.size": 11,
    "font.sans-serif": ["DejaVu Sans", "sans-serif"], "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "grid.color": "#d4d1cc",
    "legend.frameon": False, "figure.constrained_layout.use": True,
}  # fmt: skip


class Bar(NamedTuple):
    name: str
    value: float | None
    kind: str = "compiled"  # see COLORS


class Point(NamedTuple):
    """One candidate of a site.  cost: ms, or MiB where memory is the objective."""

    kind: str
    error: float
    cost: float
    chosen: bool


class Picture(NamedTuple):
    """What the page shows: a figure as an image, and what it is in words."""

    caption: str
    source: str
    broad: bool = False


class Kind(NamedTuple):
    """of_site: whether it is drawn of one layer.  why: there may be nothing to draw."""

    caption: str
    draw: Callable[..., Figure | None]
    of_site: bool
    why: str


def figure(report: Report, what: str = "errors", site: str | None = None) -> Figure:
    """See asapc.report.document.Report.figure."""
    if what not in FIGURES:
        raise InputError(f"figure: there is no {repr_of(what)}", help=f"one of {', '.join(FIGURES)}")
    kind = FIGURES[what]
    with style():
        drawn = kind.draw(report, _site(report, site)) if kind.of_site else kind.draw(report)
    if drawn is None:
        raise InputError(f"figure: nothing to draw for {what}", got=kind.why)
    return drawn


def style() -> Any:
    """A context for drawing: matplotlib as it ships, whatever the user's matplotlibrc says, and STYLE."""
    return matplotlib.style.context(["default", STYLE])


def data_uri(figure: Figure) -> Markup:
    """The figure as an SVG image, the same bytes for the same figure."""
    buffer = io.BytesIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", facecolor="none", metadata=metadata)
    return Markup("data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode())


# What there is to draw


def _errors(report: Report) -> Figure | None:
    checks = judgement(report).gate.checks
    limits = [c.max for c in checks if c.metric == ERROR and c.kind == "limit" and c.max is not None]
    bars = [
        Bar(_name(site.name), site.metric(ERROR), "compiled" if site.approximate else "lossless")
        for site in report.worst_first if site.metric(ERROR) is not None
    ]  # fmt: skip
    return draw_bars(bars, "attention error", line=("limit", limits[0]) if limits else None)


def _times(report: Report) -> Figure | None:
    times = {kind: positive(report.model.metric(f"latency_{kind}_ms")) for kind in COLORS}
    bars = [Bar(kind, time, kind) for kind, time in times.items() if time is not None]
    return draw_bars(bars, "ms, whole model")


def _heads(report: Report, site: SiteReport) -> Figure | None:
    errors = [finite(error) for error in site.by_head.get(ERROR, ())]
    known = [error for error in errors if error is not None]
    line = ("mean", sum(known) / len(known)) if len(known) > 1 else None
    bars = [Bar(f"head {head}", error) for head, error in enumerate(errors)]
    return draw_bars(bars, "attention error", line=line)


def _lengths(report: Report, site: SiteReport) -> Figure | None:
    bars = []
    for each in site.by_length:
        span = str(each.low) if each.low == each.high else f"{each.low}\u2013{each.high}"
        bars.append(Bar(f"{span}, n = {number(each.examples)}", finite(each.attention_rel_l2)))
    if all(bar.value is None for bar in bars):
        return None
    return draw_bars(bars, "attention error, by active tokens")


def _candidates(report: Report, site: SiteReport) -> Figure | None:
    trail = report.trail
    tried = trail.of(site.name)
    points = _points(tried, trail)
    if len(points) < 2:
        return None
    unit = "MiB of extra memory" if trail.objective == "memory" else f"ms at {tried.largest_shape}"
    return draw_candidates(points, unit, finite(trail.budget.get(ERROR)))


def _points(tried: TriedSite, trail: Trail) -> list[Point]:
    """What was tried at a site, as error and cost."""
    shape, memory = tried.largest_shape, trail.objective == "memory"
    points: list[Point] = []
    for each in tried.candidates:
        cost = positive(each.memory_mib if memory else each.latency_ms.get(shape))
        error = finite(each.attention_rel_l2)
        if error is None and each.label == each.operator:
            error = 0.0  # the exact operator, the one that is called by its name alone
        kind = "candidate"
        if each.operator == TEACHER:
            kind, error = "teacher", error or 0.0
        elif error is not None and error <= EXACT:
            kind = "lossless"
        if cost is not None and error is not None and error >= 0 and 1e-9 < cost < 1e12:
            points.append(Point(kind, min(error, FAR), cost, each.chosen))
    teachers = (positive(each.teacher_ms.get(shape)) for each in tried.candidates)
    teacher = next((time for time in teachers if time is not None), None)
    if teacher is not None and not memory and not any(point.kind == "teacher" for point in points):
        points.append(Point("teacher", 0.0, teacher, False))
    return points


def _maps(report: Report, site: SiteReport) -> Figure | None:
    pairs = _pairs(report, site)
    return draw_maps(pairs[0]) if pairs else None


def _pairs(report: Report, site: SiteReport) -> Sequence[MapPair]:
    return next((p.pairs for p in report.pictures if p.name == site.name), ())


FIGURES: Mapping[str, Kind] = {
    "times": Kind("Times", _times, False, "the model was not timed"),
    "errors": Kind("Layers by their errors", _errors, False, "no layer's attention was compared"),
    "candidates": Kind("What was tried", _candidates, True, "nothing was timed beside what was chosen"),
    "heads": Kind("By head", _heads, True, "the layer has no errors by head"),
    "lengths": Kind("By length", _lengths, True, "the layer has no errors by length"),
    "maps": Kind("Maps", _maps, True, "report.json has none: only a report that was just measured has"),
}


def _site(report: Report, name: str | None) -> SiteReport:
    """The site of this name, or the worst."""
    sites = report.worst_first
    for site in sites:
        if name in (None, site.name):
            return site
    known = ", ".join(_name(site.name) for site in sites[:10]) or "none"
    raise InputError(f"figure: there is no site {repr_of(name)}", help=f"sites: {known}")


def _name(name: str) -> str:
    return clipped(one_line(name), LONGEST_NAME)


# The page


def model_pictures(report: Report) -> list[Picture]:
    """The times of the whole model, and its worst layers."""
    return _drawn((kind.caption, kind.draw(report)) for kind in FIGURES.values() if not kind.of_site)


def layer_pictures(report: Report, site: SiteReport) -> list[Picture]:
    """Candidates, errors by head and by length, and each of its maps."""
    kinds = [kind for what, kind in FIGURES.items() if kind.of_site and what != "maps"]
    if len(site.by_length) == 1:  # which says what the mean says
        kinds.remove(FIGURES["lengths"])
    maps = (
        (f"Example {pair.example}, head {pair.head}, {pair.active} active keys: error "
         f"{number(pair.error)}", draw_maps(pair))
        for pair in _pairs(report, site)
    )  # fmt: skip
    return [*_drawn((kind.caption, kind.draw(report, site)) for kind in kinds), *_drawn(maps, True)]


def _drawn(figures: Iterable[tuple[str, Figure | None]], broad: bool = False) -> list[Picture]:
    """The figures as pictures, without those that have nothing to draw."""
    return [Picture(caption, data_uri(figure), broad) for caption, figure in figures if figure]


# How it is drawn


def draw_bars(bars: Sequence[Bar], axis: str, line: tuple[str, float] | None = None) -> Figure | None:
    """A bar for each value, the first on top; what is not finite is a sign.  None without bars.

    line: its name and its value; a "limit" has a colour of its own.
    """
    if not bars:
        return None
    bars = bars[:MOST]
    figure = Figure(figsize=(5, 0.7 + 0.28 * len(bars)))
    axes = figure.subplots()
    # A divergence of equal outputs rounds to a little below zero.
    lengths = [max(finite(bar.value) or 0.0, 0.0) for bar in bars]
    texts = ["\u221e" if finite(bar.value) is None else number(bar.value) for bar in bars]
    drawn = axes.barh(range(len(bars)), lengths, color=[COLORS[bar.kind] for bar in bars])
    axes.bar_label(drawn, texts, padding=3)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * max(*lengths, line[1] if line is not None else 0.0) or 1.0)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(axis="x")
    axes.set_xlabel(axis if line is None else f"{axis} (dashed: {line[0]} {number(line[1])})")
    if line is not None:
        axes.axvline(line[1], color=LIMIT if line[0] == "limit" else "black", linestyle="--", linewidth=1)
    return figure


def draw_candidates(points: Sequence[Point], unit: str, limit: float | None) -> Figure:
    """Error against cost; everything left of and below a point beats it.  limit: of the error."""
    figure = Figure(figsize=(5, 3.8))
    axes = figure.subplots()
    errors = [point.error for point in points if point.error > EXACT]
    axes.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(min(errors, default=1e-3))))
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid()
    axes.set_xlabel(unit)
    axes.set_ylabel("attention error")
    if limit is not None and EXACT < limit < FAR:
        axes.axhline(limit, color=LIMIT, linestyle="--", linewidth=1, label="budget")
    for kind, mark in (("teacher", "D"), ("lossless", "s"), ("candidate", "o")):
        places = [(point.cost, point.error) for point in points if point.kind == kind]
        if places:
            axes.plot(*zip(*places, strict=True), mark, color=COLORS.get(kind, "#5b6068"), label=kind)
    for point in points:
        if point.chosen:
            axes.plot(point.cost, point.error, "o", ms=15, mfc="none", mec=COLORS["compiled"])
    figure.legend(loc="outside upper center", ncols=4, fontsize=9, handletextpad=0.2, columnspacing=1.0)
    return figure


def draw_maps(pair: MapPair) -> Figure:
    """Teacher and compiled on one colour scale; compiled - teacher on its own, around 0."""
    teacher, compiled = (torch.tensor(x, dtype=torch.float64) for x in (pair.teacher, pair.compiled))
    difference = compiled - teacher
    top, end = _scale(torch.stack([teacher, compiled])), _scale(difference.abs())
    figure = Figure(figsize=(9.2, 3.2))
    panels = figure.subplots(1, 3)
    for axes, title, values, low, high, colors in zip(
        panels, ("teacher", "compiled", "compiled - teacher"), (teacher, compiled, difference),
        (0.0, 0.0, -end), (top, top, end), (SHADES, SHADES, DIFFERENCES), strict=True,
    ):  # fmt: skip
        shown = axes.imshow(values.tolist(), cmap=colors, vmin=low, vmax=high, interpolation="none")
        axes.set_axis_off()
        axes.set_title(title)
        if axes is not panels[0]:  # which has the scale of the second
            bar = figure.colorbar(shown, ax=axes, fraction=0.046, format="{x:.3g}")
            if bar.solids is not None:
                bar.solids.set_rasterized(True)  # else a shape for each of its shades
    return figure


def _scale(values: torch.Tensor) -> float:
    """The 99.5 % quantile, at which a colour scale ends: a few sharp cells would leave the rest blank."""
    known = values[values.isfinite()]
    return (float(torch.quantile(known, 0.995)) if len(known) else 0.0) or 1.0
