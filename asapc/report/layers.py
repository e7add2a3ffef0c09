"""The page's layers, the worst first: a line of figures each, and what unfolds below it.

Pictures are drawn for the PICTURED layers with the largest errors, so that a page of any depth stays
small enough to open; every layer has its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from asapc.metrics import METRIC
from asapc.operators.catalogue import TEACHER
from asapc.report import plots
from asapc.report.advice import error_shares, worst_first
from asapc.report.baseline import ROUNDING
from asapc.report.document import (
    Check,
    LengthBin,
    Numbers,
    Report,
    SiteReport,
    Trail,
    Tried,
    TriedSite,
    finite,
)
from asapc.report.pictures import MapPair
from asapc.report.shown import (
    LONGEST,
    change_text,
    cleaned,
    ends_text,
    label,
    positive,
    short,
    times_text,
)
from asapc.report.tables import Cell, Table, amortised_text, convention_text, fit_text, number

PICTURED = 12  # layers with pictures, about 80 kB each
NOT_PICTURED = {
    "figures": [], "examples": [],
    "note": f"Without pictures: they are drawn for the {PICTURED} layers with the largest errors.",
}  # fmt: skip
ERRORS = {"attention_rel_l2": "attention error", "output_rel_l2": "output error"}


Picture = tuple[str, Markup]  # with its caption


def layers_of(report: Report) -> dict[str, Any] | None:
    """All layers, the worst first; None where nothing was compiled.

    columns: what the cells of each are.  orders: what else they can be sorted by, (key, words) each; the
    first is the one that they are in.  layers: see `_layer`.  note: which of them have no pictures.
    """
    sites = worst_first(report.sites)
    if not sites:
        return None
    trail = report.selection or Trail()
    speeds = {site.name: _speed(site, trail.of(site.name)) for site in sites}
    changes = _changes(report)
    present = [metric for metric in ERRORS if any(metric in site.metrics for site in sites)]
    columns = [ERRORS[metric] for metric in present]
    columns += ["error against the baseline"] if changes else []
    columns += ["speed of the layer"] if any(speeds.values()) else []
    orders = _orders(report, sites, speeds, changes)
    index = {id(site): place for place, site in enumerate(report.sites)}  # names may be alike
    largest = max((positive(site.metric("attention_rel_l2")) or 0.0 for site in sites), default=0.0)
    shares = error_shares(report)
    layers = []
    for place, site in enumerate(sites):
        cells = [_error(site, metric) for metric in present]
        cells += [_change(changes.get(site.name, {}))] if changes else []
        cells += [_speed_cell(speeds[site.name])] if any(speeds.values()) else []
        layers.append({
            "anchor": f"layer-{index[id(site)]}",
            "cells": cells,
            "share": _share(site, largest),  # its error, of the largest, in per cent
            "places": [order.index(id(site)) for _, _, order in orders],  # in each of the orders
            "facts": _facts(site, shares.get(site.name)),
            **_layer(site),
            **(_pictures(report, site, trail) if place < PICTURED else NOT_PICTURED),
        })  # fmt: skip
    left = len(sites) - PICTURED
    note = "" if left <= 0 else (
        f"Pictures are drawn for the {PICTURED} layers with the largest attention errors; the other "
        f"{left} have their numbers."
    )  # fmt: skip
    orders_named = [(key, words) for key, words, _ in orders]
    return {"columns": columns, "orders": orders_named, "layers": layers, "note": note}


def _layer(site: SiteReport) -> dict[str, Any]:
    """What a layer is and what was measured of it."""
    return {
        "name": site.name,
        "operator": site.operator,
        "tone": "amortised" if site.approximate else "exact",
        "summary": amortised_text(site.to_json()),
        "certificates": _certificates(site),
        "violated": any(not certificate.holds for certificate in site.certificates),
        "metrics": _metrics(site.metrics),
    }


def _pictures(report: Report, site: SiteReport, trail: Trail) -> dict[str, Any]:
    tried = _tried(site.name, trail.of(site.name), trail)
    lengths = by_length(site.name, site.by_length, "attention_rel_l2", "attention error")
    drawn = {picture.name: picture.pairs for picture in report.pictures}
    return {
        "figures": [*tried, *_by_head(site), *(("By length", picture) for picture in lengths)],
        "note": _note(trail, site.name) if tried else "",
        "examples": [_example(site.name, pair) for pair in drawn.get(site.name, ())],
    }


def _orders(
    report: Report,
    sites: Sequence[SiteReport],
    speeds: Mapping[str, tuple[float, str] | None],
    changes: Mapping[str, Mapping[str, Check]],
) -> list[tuple[str, str, list[int]]]:
    """(key, words, ids of the sites in this order); one order where there is one layer."""
    orders = [("worst", "largest error", [id(site) for site in sites])]
    if len(sites) < 2:
        return orders
    orders.append(("model", "order in the model", [id(site) for site in report.sites]))
    if any(speeds.values()):
        gains = {name: speed[0] if speed else math.inf for name, speed in speeds.items()}
        slowest = sorted(sites, key=lambda site: gains[site.name])
        orders.append(("slow", "least gain in speed", [id(site) for site in slowest]))
    if changes:
        worse = sorted(sites, key=lambda site: -_worse(changes.get(site.name, {})))
        orders.append(("change", "worst against the baseline", [id(site) for site in worse]))
    return orders


def _error(site: SiteReport, metric: str) -> Cell:
    value = site.metric(metric)
    if value is None and site.operator == TEACHER:
        return Cell("0", "its own code")
    note = ends_text(site, metric)
    worst = site.metric(f"{metric}_worst")
    if not note and worst is not None:
        note = f"worst {number(worst)}"
    return Cell(number(value), note)


def _share(site: SiteReport, largest: float) -> float:
    error = site.metric("attention_rel_l2")
    if error is not None and finite(error) is None:
        return 100.0
    return 100 * (positive(error) or 0.0) / largest if largest else 0.0


def _changes(report: Report) -> dict[str, dict[str, Check]]:
    """By site and metric, how it compares with the baseline."""
    found: dict[str, dict[str, Check]] = {}
    names = {site.name for site in report.sites}
    for check in report.gate.checks:
        if check.kind == "baseline" and check.scope in names and check.metric in ERRORS:
            found.setdefault(check.scope, {})[check.metric] = check
    return found


def _worse(checks: Mapping[str, Check]) -> float:
    worse = next((checks[metric].worse_by for metric in ERRORS if metric in checks), None)
    return -math.inf if worse is None else worse


def _change(checks: Mapping[str, Check]) -> Cell:
    """The first metric's difference; below it the second's."""
    told = []
    for metric in ERRORS:
        check = checks.get(metric)
        if check is not None and check.value is not None and check.baseline is not None:
            change = check.value - check.baseline
            shown = change_text(metric, change if abs(change) > ROUNDING else 0.0)
            told.append((shown, ERRORS[metric]))
    if not told:
        return Cell("-", "not compared")
    tone = "bad" if any(not check.passed for check in checks.values()) else ""
    note = f"{told[1][1]} {told[1][0]}" if len(told) > 1 else ""
    return Cell(told[0][0], note, tone)


def _speed(site: SiteReport, trail: TriedSite) -> tuple[float, str] | None:
    """Times as fast as the teacher, and the two times; measured at the site, else by selection."""
    teacher = positive(site.metric("latency_teacher_ms"))
    compiled = positive(site.metric("latency_compiled_ms"))
    where = ""
    if teacher is None or compiled is None:
        chosen = next((candidate for candidate in trail.candidates if candidate.chosen), Tried())
        shape = largest_shape(trail)
        teacher = positive(chosen.teacher_ms.get(shape))
        compiled = positive(chosen.latency_ms.get(shape))
        where = f" at {shape_text(shape)}"
    if teacher is None or compiled is None:
        return None
    return teacher / compiled, f"{number(teacher)} → {number(compiled)} ms{where}"


def _speed_cell(speed: tuple[float, str] | None) -> Cell:
    return Cell("-") if speed is None else Cell(times_text(speed[0]), speed[1])


# What unfolds


def _facts(site: SiteReport, share: float | None) -> list[tuple[str, str]]:
    convention = None if site.convention is None else site.convention.to_json()
    low, high = ((site.range or {}).get(end) for end in ("score_low", "score_high"))
    facts = [
        ("why", site.reason or ""),
        ("share of the error", "" if share is None else f"{share:.0%}"),
        ("teacher's convention", convention_text(convention)),
        ("fitted", fit_text(site.to_json())),
        ("replay of the teacher, difference", number(site.replay_error)),
        ("scores seen in calibration",
         "" if low is None or high is None else f"{number(low)} to {number(high)}"),
    ]  # fmt: skip
    return known(facts)


def known(facts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, text) for name, text in facts if text and text != "-"]


def _metrics(metrics: Numbers) -> Table | None:
    rows = tuple(
        (label(key), number(value), METRIC[key].doc if key in METRIC else "")
        for key, value in metrics.items()
    )
    return Table("All metrics of this layer", ("metric", "value|", "what it is"), rows) if rows else None


def _certificates(site: SiteReport) -> Table | None:
    rows = []
    counts: dict[str, int] = {}
    for certificate in site.certificates:
        holds = "violated" if not certificate.holds else "vacuous" if certificate.vacuous else "holds"
        counts[holds] = counts.get(holds, 0) + 1
        name = certificate.name.replace("_", " ").replace("kl ", "KL ")
        loose = f"{number(certificate.vacuous_cases)} vacuous" if certificate.vacuous_cases else ""
        rows.append((
            Cell(name, certificate.source or ""), number(certificate.measured),
            number(certificate.bound), holds, Cell(number(certificate.cases), loose),
        ))  # fmt: skip
    columns = ("certificate", "measured|", "bound|", "", "cases|")
    words = {"holds": "hold", "vacuous": "true but vacuous", "violated": "VIOLATED"}
    summary = ", ".join(f"{counts[key]} {text}" for key, text in words.items() if key in counts)
    note = "Vacuous: true, but the bound is too loose to say anything." if "vacuous" in counts else ""
    return Table(f"Certificates: {summary}", columns, tuple(rows), note=note) if rows else None


# Pictures


def _note(selection: Trail, name: str) -> str:
    note = "What was tried, filled: no other candidate is both closer and cheaper."
    if len(shapes_of(selection.of(name))) > 1 and selection.objective != "memory":
        note += " All shapes are listed under “How it was chosen”."
    return note


def _tried(name: str, trail: TriedSite, selection: Trail) -> list[Picture]:
    points, unit, limit = candidate_points(trail, selection)
    if len(points) < 2:
        return []
    chosen = next((p for p in points if p.chosen), None)
    alt = f"{name}: attention error against {unit} of {len(points)} candidates."
    if chosen is not None:
        alt += f" Chosen: {chosen.label}, error {number(chosen.error)}, {number(chosen.time)}."
    return [("What was tried", plots.inline(safe(alt), plots.draw_pareto, points, unit, limit))]


def candidate_points(
    trail: TriedSite, selection: Trail
) -> tuple[list[plots.Point], str, float | None]:
    """What was tried at a site, the unit of its cost, and the budget of its error."""
    shape = largest_shape(trail)
    memory = selection.objective == "memory"
    points: list[plots.Point] = []
    for candidate in trail.candidates:
        time = positive(candidate.memory_mib if memory else candidate.latency_ms.get(shape))
        error = finite(candidate.attention_rel_l2)
        if error is None and candidate.label == candidate.operator:
            error = 0.0  # the exact operator, the one that is called by its name alone
        kind: plots.Kind = "candidate"
        if candidate.operator == TEACHER:
            kind, error = "teacher", error or 0.0
        elif error is not None and error <= plots.EXACT:
            kind = "lossless"
        if time is None or error is None or error < 0 or not 1e-9 < time < 1e12:
            continue
        name = safe(candidate.label, 80)
        points.append(plots.Point(name, kind, min(error, 1e6), time, candidate.chosen))
    teachers = (positive(candidate.teacher_ms.get(shape)) for candidate in trail.candidates)
    teacher = next((time for time in teachers if time is not None), None)
    if teacher is not None and not memory and not any(p.kind == "teacher" for p in points):
        points.append(plots.Point("teacher", "teacher", 0.0, teacher, False))
    unit = "MiB of extra memory" if memory else f"ms at {shape_text(shape)}"
    return points, unit, finite(selection.budget.get("attention_rel_l2"))


def _by_head(site: SiteReport) -> list[Picture]:
    errors = [finite(error) for error in site.by_head.get("attention_rel_l2", ())]
    if not errors:
        return []
    said = ", ".join(number(e) for e in errors[:16])
    alt = f"{site.name}: attention error of {len(errors)} heads: {said}"
    heads = [str(i) for i in range(len(errors))]
    drawn = plots.inline(
        safe(alt), plots.draw_bars, errors, heads, "head", "attention error", mean=True
    )
    return [("By head", drawn)]


def by_length(
    name: str, bins: Sequence[LengthBin], metric: str, axis: str, *, share: bool = False
) -> list[Markup]:
    """A picture; none where there is one length, which says what the mean says.  share: of what is
    lost."""
    values, names = length_values(bins, metric, share=share)
    if len(bins) < 2 or all(v is None for v in values):
        return []
    said = [f"{n.partition(chr(10))[0]}: {number(v)}" for n, v in zip(names, values, strict=True)]
    alt = f"{name}: {axis} by number of active tokens; {', '.join(said)}"
    return [
        plots.inline(safe(alt), plots.draw_bars, values, names, "active tokens", axis, percent=share)
    ]


def length_values(
    bins: Sequence[LengthBin], metric: str, *, share: bool = False
) -> tuple[list[float | None], list[str]]:
    """A metric by length, and the lengths with their numbers of examples."""
    values = [finite(length_bin.metrics.get(metric)) for length_bin in bins]
    if share:
        values = [None if v is None else 1 - v for v in values]
    spans = [
        str(length_bin.low)
        if length_bin.low == length_bin.high
        else f"{length_bin.low}–{length_bin.high}"
        for length_bin in bins
    ]
    return values, [f"{s}\nn = {number(b.examples)}" for s, b in zip(spans, bins, strict=True)]


def _example(name: str, pair: MapPair) -> dict[str, Any]:
    """A pair of maps, (name, data URI, what it shows) each, and the masses of rows and columns."""
    images = plots.map_images(pair)
    what = f"{name}, example {pair.example}, head {pair.head}"
    alt = f"{what}: row and column sums by token, teacher and compiled"
    return {
        "caption": f"Example {pair.example}, head {pair.head}, {pair.active} active keys: error "
        + number(pair.error),
        "maps": [
            ("teacher", Markup(images.teacher), f"Attention of the teacher: {what}"),
            ("compiled", Markup(images.compiled), f"Attention of the compiled layer: {what}"),
            ("difference", Markup(images.difference), f"Compiled minus teacher: {what}"),
        ],
        "scale": number(images.largest),
        "difference_scale": number(images.largest_difference),
        "masses": plots.inline(safe(alt), plots.draw_masses, pair),
    }


# Shapes


def shapes_of(trail: TriedSite) -> list[str]:
    """Keys of latency_ms, smallest first."""
    keys = dict.fromkeys(key for candidate in trail.candidates for key in candidate.latency_ms)
    return sorted(keys, key=lambda key: (_area(key), key))


def largest_shape(trail: TriedSite) -> str:
    return (shapes_of(trail) or [""])[-1]


def _area(shape: str) -> float:
    parts = [int(p) for p in shape.split("x") if p.isascii() and p.isdigit() and len(p) < 12]
    return math.prod(parts) if parts else 0


def shape_text(shape: str) -> str:
    """"32x512" as "32 × 512"; nothing else comes through, it is drawn in a plot."""
    parts = shape.split("x")
    fine = all(p.isascii() and p.isdigit() and len(p) < 12 for p in parts)
    return " × ".join(parts) if fine else "one shape"


def safe(text: str, longest: int = 4 * LONGEST) -> str:
    """What goes into a picture past the template: it is escaped there, and cleaned here."""
    return cleaned(short(text, longest))
