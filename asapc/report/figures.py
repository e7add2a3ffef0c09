"""Pictures of a report as matplotlib figures: `report.figure("errors")`, and the same on its page.

    errors       attention error by layer, the worst first, and the budget
    times        the whole model: teacher, lossless, compiled, in ms
    heads        attention error by head of a site
    lengths      attention error by number of active tokens of a site
    candidates   what was tried at a site, error against cost
    maps         attention of teacher and compiled layer, and their difference; only of a report that was
                 measured in this process: report.json has no maps

A figure is drawn on white, knows no pyplot and opens no window. `figure.savefig("errors.png")` writes it;
a notebook shows it after `%matplotlib inline`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup
from matplotlib.figure import Figure

from asapc.errors import InputError
from asapc.operators.catalogue import TEACHER
from asapc.report import plots
from asapc.report.advice import ERROR, judgement, worst_first
from asapc.report.document import LengthBin, Report, SiteReport, Trail, TriedSite, finite
from asapc.report.pictures import MapPair
from asapc.report.shown import cleaned, largest_shape, positive, shape_text, short
from asapc.report.tables import number
from asapc.terminal.printed import short as repr_of

MOST = 48  # layers or heads in one figure
LONGEST_NAME = 36


class Picture(NamedTuple):
    """An image of the page, and what it shows in words."""

    caption: str
    uri: Markup
    alt: str
    broad: bool = False


def figure(report: Report, what: str = "errors", site: str | None = None) -> Figure:
    """See asapc.report.document.Report.figure."""
    if what not in FIGURES:
        raise InputError(f"figure: there is no {repr_of(what)}", help=f"one of {', '.join(FIGURES)}")
    draw, of_site, why = FIGURES[what]
    with plots.style():
        drawn = draw(report, _site(report, site)) if of_site else draw(report)
        if drawn is None:
            raise InputError(f"figure: nothing to draw for {what}", got=why)
        drawn.set_dpi(100)
    return drawn


def _errors(report: Report) -> Figure | None:
    sites = [s for s in worst_first(report.sites) if s.metric(ERROR) is not None][:MOST]
    if not sites:
        return None
    checks = judgement(report).gate.checks
    limits = [c.max for c in checks if c.metric == ERROR and c.kind == "limit" and c.max is not None]
    return plots.draw_bars(
        [s.metric(ERROR) for s in sites], [_name(s.name) for s in sites], "attention error",
        [plots.COMPILED if s.approximate else plots.LOSSLESS for s in sites],
        line=("limit", limits[0]) if limits else None,
    )  # fmt: skip


def _times(report: Report) -> Figure | None:
    fills = {"teacher": plots.TEACHER, "lossless": plots.LOSSLESS, "compiled": plots.COMPILED}
    times = {k: t for k in fills if (t := positive(report.model.metric(f"latency_{k}_ms"))) is not None}
    if not times:
        return None
    colors = [fills[kind] for kind in times]
    return plots.draw_bars([*times.values()], [*times], "ms, whole model", colors)


def _heads(report: Report, site: SiteReport) -> Figure | None:
    errors = [finite(error) for error in site.by_head.get(ERROR, ())][:MOST]
    if not errors:
        return None
    known = [error for error in errors if error is not None]
    return plots.draw_bars(
        errors, [f"head {head}" for head in range(len(errors))], "attention error",
        [plots.COMPILED] * len(errors),
        line=("mean", sum(known) / len(known)) if len(known) > 1 else None,
    )  # fmt: skip


def _lengths(report: Report, site: SiteReport) -> Figure | None:
    return _by_length(site.by_length, ERROR, "attention error, by active tokens")


def _by_length(bins: Sequence[LengthBin], metric: str, unit: str, lost: bool = False) -> Figure | None:
    """A metric by length.  lost: what a share lacks of 1."""
    values = [finite(length_bin.metrics.get(metric)) for length_bin in bins]
    if all(value is None for value in values):
        return None
    if lost:
        values = [None if value is None else 1 - value for value in values]
    names = [f"{_span(length_bin)}, n = {number(length_bin.examples)}" for length_bin in bins]
    return plots.draw_bars(values, names, unit, [plots.COMPILED] * len(values), percent=lost)


def _span(length_bin: LengthBin) -> str:
    low, high = length_bin.low, length_bin.high
    return str(low) if low == high else f"{low}–{high}"


def _candidates(report: Report, site: SiteReport) -> Figure | None:
    trail = report.selection or Trail()
    tried = trail.of(site.name)
    points = _points(tried, trail)
    if len(points) < 2:
        return None
    unit = f"ms at {shape_text(largest_shape(tried))}"
    if trail.objective == "memory":
        unit = "MiB of extra memory"
    return plots.draw_pareto(points, unit, finite(trail.budget.get(ERROR)))


def _points(tried: TriedSite, trail: Trail) -> list[plots.Point]:
    """What was tried at a site, by its error and its cost."""
    shape, memory = largest_shape(tried), trail.objective == "memory"
    points: list[plots.Point] = []
    for candidate in tried.candidates:
        time = positive(candidate.memory_mib if memory else candidate.latency_ms.get(shape))
        error = finite(candidate.attention_rel_l2)
        if error is None and candidate.label == candidate.operator:
            error = 0.0  # the exact operator, the one that is called by its name alone
        kind: plots.Kind = "candidate"
        if candidate.operator == TEACHER:
            kind, error = "teacher", error or 0.0
        elif error is not None and error <= plots.EXACT:
            kind = "lossless"
        if time is not None and error is not None and error >= 0 and 1e-9 < time < 1e12:
            points.append(plots.Point(kind, min(error, 1e6), time, candidate.chosen))
    teachers = (positive(candidate.teacher_ms.get(shape)) for candidate in tried.candidates)
    teacher = next((time for time in teachers if time is not None), None)
    if teacher is not None and not memory and not any(p.kind == "teacher" for p in points):
        points.append(plots.Point("teacher", 0.0, teacher, False))
    return points


def _maps(report: Report, site: SiteReport) -> Figure | None:
    pairs = _pairs(report, site)
    return plots.draw_maps(pairs[0]) if pairs else None


def _pairs(report: Report, site: SiteReport) -> Sequence[MapPair]:
    return next((p.pairs for p in report.pictures if p.name == site.name), ())


# What draws each, whether of one site, and why there may be nothing to draw.
FIGURES: Mapping[str, tuple[Callable[..., Figure | None], bool, str]] = {
    "errors": (_errors, False, "no layer's attention was compared"),
    "times": (_times, False, "the model was not timed"),
    "heads": (_heads, True, "the layer has no errors by head"),
    "lengths": (_lengths, True, "the layer has no errors by length"),
    "candidates": (_candidates, True, "nothing was timed beside what was chosen"),
    "maps": (_maps, True, "report.json has none: they are in a report that was just measured"),
}


def _site(report: Report, name: str | None) -> SiteReport:
    """The one of this name, or the worst."""
    sites = worst_first(report.sites)
    for site in sites:
        if name in (None, site.name):
            return site
    known = ", ".join(_name(site.name) for site in sites[:10]) or "none"
    raise InputError(f"figure: there is no site {repr_of(name)}", help=f"sites: {known}")


def _name(name: str) -> str:
    return short(cleaned(name), LONGEST_NAME)


# The page


def layer_pictures(report: Report, site: SiteReport) -> list[Picture]:
    """Candidates, errors by head and by length, and each of its maps with token masses."""
    errors = ", ".join(number(finite(error)) for error in site.by_head.get(ERROR, ())[:16])
    pictures = [
        *_picture("What was tried", f"{site.name}: attention error against cost of what was tried",
                  _candidates(report, site)),
        *_picture("By head", f"{site.name}: attention error by head: {errors}", _heads(report, site)),
    ]  # fmt: skip
    if len(site.by_length) > 1:  # one length says what the mean says
        alt = _lengths_alt(site.name, site.by_length, ERROR)
        pictures += _picture("By length", alt, _lengths(report, site))
    for pair in _pairs(report, site):
        example = f"Example {pair.example}, head {pair.head}"
        pictures += _picture(
            f"{example}, {pair.active} active keys: error {number(pair.error)}",
            f"{site.name}, {example}: attention of the teacher and the compiled layer, difference",
            plots.draw_maps(pair), broad=True,
        )  # fmt: skip
        pictures += _picture(
            f"{example}: token masses, teacher broad, compiled thin",
            f"{site.name}, {example}: row and column sums by token, teacher and compiled",
            plots.draw_masses(pair),
        )
    return pictures


def model_pictures(report: Report) -> list[Picture]:
    """What the model loses by the length of an example."""
    bins = report.by_length if len(report.by_length) > 1 else ()
    return [
        picture
        for metric, what, lost in (
            ("prediction_agreement", "Predictions changed", True), ("logit_kl", "Logit KL", False),
        )
        for picture in _picture(
            f"{what}, by length", _lengths_alt("Model", bins, metric),
            _by_length(bins, metric, f"{what}, by active tokens".lower(), lost),
        )
    ]  # fmt: skip


def _picture(
    caption: str, alt: str, drawn: Figure | None, broad: bool = False
) -> list[Picture]:
    """No picture where nothing was drawn."""
    return [] if drawn is None else [Picture(caption, Markup(plots.data_uri(drawn)), alt, broad)]


def _lengths_alt(name: str, bins: Sequence[LengthBin], metric: str) -> str:
    values = ", ".join(f"{_span(b)}: {number(finite(b.metrics.get(metric)))}" for b in bins)
    return f"{name}: {metric} by number of active tokens: {values}"
