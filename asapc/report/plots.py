"""Pictures: for the page inline SVG that follows its colours, and maps as PNG data URIs; the same, and
some more, as figures on their own (asapc.report.figures).

One SVG serves both themes: plots are drawn in marker colours that become CSS variables of the page, and
their text takes the page's font. One unit is one CSS pixel. No text from a model or recipe is drawn on
the page; what a point is called goes into its <title>, escaped.

matplotlib is in the extra `report`: only what needs it imports this module.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import matplotlib
import numpy as np
import torch
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from PIL import Image  # which matplotlib needs, too

from asapc.report.pictures import MapPair
from asapc.report.tables import number
from asapc.terminal.printed import one_line

EXACT = 1e-5  # an error below this is rounding
WIDTH, HEIGHT = 330, 250  # a phone's width, a third of a screen's
MASS_POINTS = 120


@dataclass(frozen=True)
class Colors:
    """What is drawn in which colour.  paper: behind it.  over: a limit, and what is beyond all bounds."""

    ink: str
    muted: str
    line: str
    teacher: str
    lossless: str
    compiled: str
    paper: str
    over: str


# What matplotlib is told for the page, and what the page makes of it.
PAGE = Colors("#010101", "#020202", "#030303", "#040404", "#050505", "#060606", "#070707", "#080808")
VARIABLES = {
    color: f"var(--{'card' if name == 'paper' else name})" for name, color in vars(PAGE).items()
}
# Of a figure on its own: the page's light theme.
ALONE = Colors(
    "#1c1d20", "#5b6068", "#d4d1cc", "#767b84", "#0b7a6b", "#2459c7", "#ffffff", "#b0411e"
)


def _options(colors: Colors) -> dict[str, Any]:
    return {
        "svg.fonttype": "none", "text.parse_math": False, "font.size": 11,
        "axes.edgecolor": colors.line, "axes.facecolor": "none",
        "figure.facecolor": "none" if colors is PAGE else colors.paper,
        "axes.labelcolor": colors.muted, "text.color": colors.ink, "axes.spines.top": False,
        "axes.spines.right": False, "axes.linewidth": 1, "axes.axisbelow": True,
        "xtick.color": colors.line, "ytick.color": colors.line, "xtick.labelcolor": colors.muted,
        "ytick.labelcolor": colors.muted, "grid.color": colors.line, "grid.linewidth": 0.8,
        "xtick.major.size": 3, "ytick.major.size": 0, "axes.labelsize": 11, "xtick.labelsize": 10.5,
        "ytick.labelsize": 10.5, "lines.linewidth": 1.5, "path.simplify": True,
        "path.simplify_threshold": 0.1, "axes.unicode_minus": True,
    }  # fmt: skip


Kind = Literal["teacher", "lossless", "candidate"]
Drawing = tuple[Figure, Mapping[str, str]]  # and by the gid of an artist, what pointing at it shows


@dataclass(frozen=True)
class Point:
    """One candidate of a site. time: ms, or MiB where memory is the objective."""

    label: str
    kind: Kind
    error: float
    time: float
    chosen: bool


def inline(alt: str, draw: Callable[..., Drawing], *arguments: Any, **options: Any) -> Markup:
    """What draw_pareto, draw_bars or draw_masses makes of its arguments, as an element of the page."""
    with style():
        return _svg(*draw(*arguments, **options), alt)


def draw_pareto(
    points: Sequence[Point], unit: str, limit: float | None, colors: Colors = PAGE
) -> Drawing:
    """Error against time; everything left of and below a point beats it. limit: of the error.

    All of these are to be called inside `style`.
    """
    figure, axes = _figure(WIDTH, HEIGHT, left=50, bottom=40)
    errors = [p.error for p in points if p.error > EXACT]
    low = math.floor(math.log10(min(errors, default=1e-3)))
    high = math.log10(max([*errors, 10.0 ** (low + 1)]))
    if limit is not None and limit > 0:
        high = max(high, math.log10(limit))
    exact = low - 0.55

    def height(error: float) -> float:
        return math.log10(error) if error > EXACT else exact

    decades = list(range(low, math.floor(high) + 1))
    axes.set_yticks([exact, *decades], ["exact", *(f"{10.0**d:g}" for d in decades)])
    axes.set_ylim(exact - 0.35, high + 0.3)
    axes.grid(axis="y")
    axes.axhline(low - 0.2, color=colors.paper, linewidth=3)  # the axis is broken here
    axes.spines["left"].set_visible(False)
    _log_time(axes, [p.time for p in points])
    axes.set_xlabel(unit)
    axes.set_ylabel("attention error")
    if limit is not None and limit > EXACT:
        axes.axhline(math.log10(limit), color=colors.over, linewidth=1, dashes=(4, 3))
        axes.annotate(
            "budget", (1, math.log10(limit)), xycoords=("axes fraction", "data"), xytext=(-2, 3),
            textcoords="offset points", ha="right", color=colors.over, fontsize=10.5,
        )  # fmt: skip
    front = _front(points)
    if len(front) > 1:
        xs, ys = [p.time for p in front], [height(p.error) for p in front]
        axes.step(xs, ys, where="post", color=colors.line, linewidth=1.5, zorder=1.5)
    titles = {}
    for index, point in enumerate(points):
        gid = f"point{index}"
        titles[gid] = (
            f"{point.label}: error {number(point.error)}, {number(point.time)} {unit.split()[0]}"
            + (", chosen" if point.chosen else "")
        )
        own = {"teacher": colors.teacher, "lossless": colors.lossless, "candidate": colors.muted}
        color = own[point.kind]
        if point.chosen:
            axes.plot(point.time, height(point.error), "o", ms=17, mfc="none", mec=colors.compiled,
                      mew=1.2, zorder=3)  # fmt: skip
            color = colors.compiled if point.kind == "candidate" else color
        hollow = point.kind == "candidate" and not point.chosen and point not in front
        axes.plot(
            point.time, height(point.error),
            {"teacher": "D", "lossless": "s", "candidate": "o"}[point.kind],
            ms=9 if point.chosen else 7, mfc=colors.paper if hollow else color, mec=color, mew=1.3,
            zorder=4 if point.chosen else 2, gid=gid,
        )  # fmt: skip
    _name_points(axes, points, height, colors)
    return figure, titles


def draw_bars(
    values: Sequence[float | None], names: Sequence[str], axis: str, unit: str, colors: Colors = PAGE,
    *, mean: bool = False, percent: bool = False,
) -> Drawing:  # fmt: skip
    """A bar for each value; None and infinity are a mark at the top. Names are text that asapc writes."""
    shown = [v if v is not None and math.isfinite(v) else None for v in values]
    # A divergence of equal outputs rounds to a little below zero.
    largest = max((v for v in shown if v is not None and v > 0), default=0.01 if percent else 1.0)
    figure, axes = _figure(WIDTH, HEIGHT, left=50, bottom=40 if max(map(_lines, names)) < 2 else 54)
    for index, value in enumerate(shown):
        if value is None:
            axes.text(index, largest, "∞", ha="center", va="center", color=colors.over, fontsize=14)
        else:
            axes.bar(index, value, width=0.62, color=colors.compiled, linewidth=0, gid=f"bar{index}")
    axes.set_ylim(0, largest * 1.12)
    aside = max(0.0, (4 - len(values)) / 2)  # two bars are no walls
    axes.set_xlim(-0.6 - aside, len(values) - 0.4 + aside)
    step = max(1, math.ceil(len(names) / 12))
    axes.set_xticks(range(0, len(names), step), names[::step])
    axes.tick_params(axis="x", length=0)
    ticks = _linear_ticks(largest)
    axes.set_yticks(ticks, [f"{t * 100:g}%" if percent else f"{t:g}" for t in ticks])
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(axis)
    axes.set_ylabel(unit)
    known = [v for v in shown if v is not None]
    if mean and len(known) > 1:
        axes.axhline(sum(known) / len(known), color=colors.ink, linewidth=1, dashes=(2, 2))
        axes.annotate(
            "mean", (1, sum(known) / len(known)), xycoords=("axes fraction", "data"),
            xytext=(-2, 3), textcoords="offset points", ha="right", fontsize=10.5,
        )  # fmt: skip
    titles = {
        f"bar{i}": f"{one_line(name, ', ')}: {number(v)}"
        for i, (name, v) in enumerate(zip(names, shown, strict=True))
    }
    return figure, titles


def draw_masses(pair: MapPair) -> Drawing:
    """Row and column sums by token, teacher broad and compiled thin; 1 is balanced."""
    figure = Figure(figsize=(WIDTH / 72, 270 / 72), dpi=72)
    panels = figure.subplots(2, 1)
    figure.subplots_adjust(left=50 / WIDTH, right=1 - 8 / WIDTH, top=1 - 20 / 270,
                           bottom=40 / 270, hspace=0.5)  # fmt: skip
    for axes, sums, what in (
        (panels[0], pair.row_sums, "row mass, by query"),
        (panels[1], pair.column_sums, "column mass, by key"),
    ):
        teacher, compiled = (_furthest(s.double()) for s in sums)
        finite = torch.cat([teacher[1], compiled[1]])
        finite = finite[finite.isfinite()]
        # Deviations below a hundredth are drawn as the flat lines they are.
        spread = max(0.02, 1.15 * float((finite - 1).abs().max()) if len(finite) else 0.0)
        axes.axhline(1, color=PAGE.line, linewidth=0.8)
        axes.plot(*_lists(teacher), color=PAGE.teacher, linewidth=4, alpha=0.6,
                  solid_joinstyle="round")  # fmt: skip
        axes.plot(*_lists(compiled), color=PAGE.compiled, linewidth=1.3)
        axes.set_ylim(1 - spread, 1 + spread)
        step = _linear_ticks(spread)[-1]
        axes.set_yticks([1 - step, 1, 1 + step], [f"{1 - step:.3g}", "1", f"{1 + step:.3g}"])
        axes.set_xlim(0, max(1, len(sums[0]) - 1))
        axes.grid(axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_title(what, loc="left", fontsize=10.5, color=PAGE.muted, pad=5)
        ticks = [t for t in _linear_ticks(max(1, len(sums[0]) - 1)) if t == int(t)]
        axes.set_xticks(ticks, [f"{int(t)}" for t in ticks])
    panels[1].set_xlabel("token")
    return figure, {}


def draw_lines(
    values: Sequence[float | None], names: Sequence[str], axis: str, limit: float | None,
    fills: Sequence[str],
) -> Figure:  # fmt: skip
    """A horizontal bar for each value, the first on top; what is not finite is a mark at the end.

    names: cleaned; they are drawn as plain text.  limit: a line across, if any.  fills: colours.
    """
    shown = [v if v is not None and math.isfinite(v) else None for v in values]
    largest = max([v for v in (*shown, limit) if v is not None and v > 0], default=1.0)
    left = min(240, 24 + 6.2 * max((len(name) for name in names), default=0))
    height = 56 + 20 * len(names)
    size = (left + WIDTH, height)
    figure = Figure(figsize=(size[0] / 72, height / 72), dpi=72)
    axes = figure.add_axes((left / size[0], 40 / height, (WIDTH - 60) / size[0], 1 - 50 / height))
    for index, (value, fill) in enumerate(zip(shown, fills, strict=True)):
        if value is not None:
            axes.barh(index, value, height=0.62, color=fill, linewidth=0)
        text = "∞" if value is None else number(value)
        axes.annotate(
            text, (largest if value is None else max(value, 0.0), index), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=10.5,
            color=ALONE.over if value is None else ALONE.ink,
        )  # fmt: skip
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, largest * 1.04)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelcolor=ALONE.ink)
    ticks = _linear_ticks(largest)
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(axis if limit is None else f"{axis} (dashed: limit {limit:g})")
    if limit is not None:
        axes.axvline(limit, color=ALONE.over, linewidth=1, dashes=(4, 3))
    return figure


def draw_maps(pair: MapPair) -> Figure:
    """Teacher, compiled and their difference, on the scales that the page has."""
    ends = map_images(pair)
    teacher, compiled = pair.teacher.double(), pair.compiled.double()
    figure = Figure(figsize=(9.2, 3.4), dpi=72)
    panels = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.03, right=0.92, top=0.88, bottom=0.06, wspace=0.3)
    for axes, title, values, low, high, stops in (
        (panels[0], "teacher", teacher, 0.0, ends.largest, SEQUENTIAL),
        (panels[1], "compiled", compiled, 0.0, ends.largest, SEQUENTIAL),
        (panels[2], "difference", compiled - teacher, -ends.largest_difference,
         ends.largest_difference, DIVERGING),
    ):  # fmt: skip
        shades = LinearSegmentedColormap.from_list(title, [tuple(c / 255 for c in s) for s in stops])
        shown = axes.imshow(values.tolist(), cmap=shades, vmin=low, vmax=high, interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(title, loc="left", fontsize=11, color=ALONE.ink)
        figure.colorbar(shown, ax=axes, fraction=0.046)
    return figure


# Maps


@dataclass(frozen=True)
class MapImages:
    """Three data URIs of one pair and the ends of their colour scales, in attention units."""

    teacher: str
    compiled: str
    difference: str
    largest: float
    largest_difference: float


SEQUENTIAL = ((255, 255, 255), (190, 214, 240), (96, 150, 214), (33, 87, 166), (10, 28, 66))
DIVERGING = (
    (13, 66, 140), (66, 133, 200), (172, 205, 232), (255, 255, 255), (250, 203, 160), (222, 119, 38),
    (138, 60, 6),
)  # fmt: skip


def map_images(pair: MapPair) -> MapImages:
    """Both maps on one colour scale; the difference compiled - teacher on its own, around 0.

    Drawn for a white page; the dark theme inverts them and turns the hue back.
    """
    both = torch.cat([pair.teacher.flatten(), pair.compiled.flatten()]).double()
    finite = both[both.isfinite()]
    # A few sharp cells would leave the rest blank: the scale ends at the 99.5 % quantile.
    largest = float(torch.quantile(finite, 0.995)) if len(finite) else 0.0
    difference = pair.compiled.double() - pair.teacher.double()
    spread = difference[difference.isfinite()].abs()
    furthest = float(torch.quantile(spread, 0.995)) if len(spread) else 0.0
    top, end = largest or 1.0, furthest or 1.0  # of nothing but zeros
    return MapImages(
        _png(pair.teacher.double(), 0.0, top, SEQUENTIAL),
        _png(pair.compiled.double(), 0.0, top, SEQUENTIAL),
        _png(difference, -end, end, DIVERGING),
        largest,
        furthest,
    )


def _png(
    values: torch.Tensor, low: float, high: float, stops: Sequence[tuple[int, int, int]]
) -> str:
    """[n, m] as a palette PNG, one pixel a cell; what is not finite is magenta."""
    share = ((values - low) / (high - low)).clamp(0, 1)
    index = torch.where(values.isfinite(), (share * 254).round(), 255)
    places, ends = np.linspace(0, 1, 255), np.linspace(0, 1, len(stops))
    palette = np.stack([np.interp(places, ends, channel) for channel in zip(*stops, strict=True)], 1)
    image = Image.fromarray(index.to(torch.uint8).numpy(), "L")
    image.putpalette([*palette.round().astype(int).flatten().tolist(), 255, 0, 200])
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


# Drawing


def style(colors: Colors = PAGE) -> Any:
    """A context for drawing: matplotlib as it ships, whatever the user's matplotlibrc says, and ours on
    top."""
    # Choosing a backend would import one; we never need one. Any: releases type the keys differently.
    shipped: Any = matplotlib.rcParamsDefault
    options: Any = {k: v for k, v in shipped.items() if not k.startswith("backend")}
    options |= _options(colors)
    return matplotlib.rc_context(options)


def _figure(width: int, height: int, *, left: int, bottom: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)  # so that a pixel is a unit of the SVG
    box = (left / width, bottom / height, 1 - (left + 8) / width, 1 - (bottom + 10) / height)
    return figure, figure.add_axes(box)


def _log_time(axes: Axes, times: Sequence[float]) -> None:
    low, high = min(times) / 1.25, max(times) * 1.25
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        ticks = [
            m * 10.0**e
            for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for m in mantissas
            if low <= m * 10.0**e <= high
        ]
        if len(ticks) <= 6:
            break
    if len(ticks) < 2:
        ticks = [float(f"{low * 1.15:.2g}"), float(f"{high / 1.15:.2g}")]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])


def _linear_ticks(largest: float) -> list[float]:
    """0 and two to four round steps up to `largest`, which is positive."""
    power = 10.0 ** math.floor(math.log10(largest))
    step = next(s * power for s in (0.25, 0.5, 1.0, 2.0, 2.5) if largest / (s * power) <= 4.01)
    return [float(f"{i * step:.6g}") for i in range(int(largest / step + 1e-9) + 1)]


def _front(points: Sequence[Point]) -> list[Point]:
    """The points no other beats in both, fastest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.time, p.error)):
        best = front[-1].error if front else math.inf
        if point.error < best and best > EXACT:
            front.append(point)
    return front


def _name_points(axes: Axes, points: Sequence[Point], height: Any, colors: Colors) -> None:
    for point in points:
        if point.kind == "candidate" and not point.chosen:
            continue
        word: str = "chosen" if point.kind == "candidate" else point.kind
        if point.kind != "candidate" and point.chosen:
            word += ", chosen"
        place = axes.transData.transform((point.time, height(point.error)))
        others = [
            axes.transData.transform((p.time, height(p.error))) for p in points if p is not point
        ]
        x, y, side = max(_PLACES, key=lambda to: _room(place, to, others, axes, len(word)))
        axes.annotate(
            word, (point.time, height(point.error)), xytext=(x, y), textcoords="offset points",
            ha=side, fontsize=11, color=colors.ink if point.chosen else colors.muted, zorder=6,
            fontweight="bold" if point.chosen else "normal",
        )  # fmt: skip


# Where a word may stand beside its point: offset of its base line, and how it is aligned.
_PLACES: tuple[tuple[float, float, Literal["left", "center", "right"]], ...] = (
    (0, 12, "center"), (0, -20, "center"), (13, -4, "left"), (-13, -4, "right"),
)  # fmt: skip


def _room(
    place: Any, to: tuple[float, float, str], others: Sequence[Any], axes: Axes, size: int
) -> float:
    """The distance of the word's middle to the nearest other point, less where it leaves the plot."""
    half = 3.2 * size
    x = place[0] + to[0] + {"left": half, "center": 0.0, "right": -half}[to[2]]
    y = place[1] + to[1] + 4
    nearest = min((max(abs(x - o[0]) - half, abs(y - o[1])) for o in others), default=99.0)
    box = axes.get_window_extent()
    outside = max(box.x0 - (x - half), x + half - box.x1 - 4, box.y0 - (y - 6), 0.0)
    return min(nearest, 12.0) - 5 * outside


def _furthest(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, sum) of at most MASS_POINTS tokens: of each run of neighbours the furthest from 1."""
    if len(sums) <= MASS_POINTS:
        return torch.arange(len(sums)), sums
    kept = torch.stack(
        [
            run[0] + torch.nan_to_num((sums[run] - 1).abs(), nan=torch.inf).argmax()
            for run in torch.arange(len(sums)).tensor_split(MASS_POINTS)
        ]
    )
    return kept, sums[kept]


def _lists(line: tuple[torch.Tensor, torch.Tensor]) -> tuple[list[float], list[float]]:
    return line[0].tolist(), line[1].tolist()


def _lines(name: str) -> int:
    return name.count("\n") + 1


# SVG


def _svg(figure: Figure, titles: Mapping[str, str], alt: str) -> Markup:
    """The figure as an <svg> element: named for screen readers, in the page's colours and font.

    titles: by the gid of an artist, what pointing at it shows.
    """
    buffer = io.StringIO()
    # The salt names clip paths and markers; the text that tells figures apart keeps them apart.
    with matplotlib.rc_context({"svg.hashsalt": alt}):
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = buffer.getvalue()
    view = re.search(r'viewBox="([^"]*)"', text)
    assert view is not None
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    body = re.sub(r" ?font-family: [^;\"]*;", "", body)  # the page's own
    body = re.sub(r' transform="rotate\(-?0 [^"]*"', "", body)
    body = re.sub(r'(?<= )(?:d|x|y|transform)="[^"]*"', _rounded, body)  # never the text
    body = re.sub("|".join(VARIABLES), lambda m: VARIABLES[m[0]], body)
    for gid, title in titles.items():
        body = body.replace(f'<g id="{gid}">', f"<g><title>{escape(title)}</title>")
    # Groups are numbered alike in every figure, and an id may be on a page only once.
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r">\s+<", "><", body.strip()).replace(" \n", " ")
    return Markup(
        f'<svg class="plot" viewBox="{view[1]}" role="img" aria-label="{escape(alt)}">{body}</svg>'
    )


def _rounded(attribute: re.Match[str]) -> str:
    return re.sub(
        r"\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), attribute[0]
    )
