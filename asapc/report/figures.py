"""Pictures of a report as matplotlib figures: `report.figure("errors")`.

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

from collections.abc import Callable, Mapping

from matplotlib.figure import Figure

from asapc.errors import InputError
from asapc.report import layers, plots
from asapc.report.advice import ERROR, judgement, worst_first
from asapc.report.document import Report, SiteReport, Trail, finite
from asapc.report.shown import cleaned, positive, short
from asapc.terminal.printed import short as repr_of

MOST = 48  # layers in one figure
LONGEST_NAME = 36


def figure(report: Report, what: str = "errors", site: str | None = None) -> Figure:
    """See asapc.report.document.Report.figure."""
    if what not in FIGURES:
        raise InputError(f"figure: there is no {repr_of(what)}", help=f"one of {', '.join(FIGURES)}")
    with plots.style(plots.ALONE):
        drawn = FIGURES[what](report, site)
        drawn.set_dpi(100)
    return drawn


def _errors(report: Report, site: str | None) -> Figure:
    sites = [s for s in worst_first(report.sites) if s.metric(ERROR) is not None][:MOST]
    if not sites:
        raise _nothing("errors", "no layer's attention was compared")
    limits = [c.max for c in judgement(report).gate.checks if c.metric == ERROR and c.kind == "limit"]
    colors = plots.ALONE
    return plots.draw_lines(
        [s.metric(ERROR) for s in sites], [_name(s.name) for s in sites], "attention error",
        next((limit for limit in limits if limit is not None), None),
        [colors.compiled if s.approximate else colors.lossless for s in sites],
    )  # fmt: skip


def _times(report: Report, site: str | None) -> Figure:
    kinds = ("teacher", "lossless", "compiled")
    times = {k: t for k in kinds if (t := positive(report.model.metric(f"latency_{k}_ms"))) is not None}
    if not times:
        raise _nothing("times", "the model was not timed")
    fills = [str(getattr(plots.ALONE, kind)) for kind in times]
    return plots.draw_lines([*times.values()], [*times], "ms, whole model", None, fills)


def _heads(report: Report, site: str | None) -> Figure:
    shown = _site(report, site)
    errors = [finite(error) for error in shown.by_head.get(ERROR, ())]
    if not errors:
        raise _nothing("heads", f"{_name(shown.name)} has no errors by head")
    names = [str(head) for head in range(len(errors))]
    return plots.draw_bars(errors, names, "head", "attention error", plots.ALONE, mean=True)[0]


def _lengths(report: Report, site: str | None) -> Figure:
    shown = _site(report, site)
    values, names = layers.length_values(shown.by_length, ERROR)
    if all(value is None for value in values):
        raise _nothing("lengths", f"{_name(shown.name)} has no errors by length")
    return plots.draw_bars(values, names, "active tokens", "attention error", plots.ALONE)[0]


def _candidates(report: Report, site: str | None) -> Figure:
    shown, trail = _site(report, site), report.selection or Trail()
    points, unit, limit = layers.candidate_points(trail.of(shown.name), trail)
    if len(points) < 2:
        raise _nothing("candidates", f"at {_name(shown.name)} nothing was timed beside what was chosen")
    return plots.draw_pareto(points, unit, limit, plots.ALONE)[0]


def _maps(report: Report, site: str | None) -> Figure:
    shown = _site(report, site)
    pairs = next((p.pairs for p in report.pictures if p.name == shown.name), ())
    if not pairs:
        raise _nothing("maps", "report.json has none: they are in a report that was just measured")
    return plots.draw_maps(pairs[0])


FIGURES: Mapping[str, Callable[[Report, str | None], Figure]] = {
    "errors": _errors, "times": _times, "heads": _heads, "lengths": _lengths,
    "candidates": _candidates, "maps": _maps,
}  # fmt: skip


def _site(report: Report, name: str | None) -> SiteReport:
    """The one of this name, or the worst."""
    sites = worst_first(report.sites)
    if name is None and sites:
        return sites[0]
    found = next((site for site in sites if site.name == name), None)
    if found is None:
        known = ", ".join(_name(site.name) for site in sites[:10]) or "none"
        raise InputError(f"figure: there is no site {repr_of(name)}", help=f"sites: {known}")
    return found


def _name(name: str) -> str:
    return short(cleaned(name), LONGEST_NAME)


def _nothing(what: str, why: str) -> InputError:
    return InputError(f"figure: nothing to draw for {what}", got=why)
