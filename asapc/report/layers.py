"""The page's layers, the worst first: a line of figures each, and what unfolds below it.

Pictures are drawn for the PICTURED layers with the largest errors, so that a page of any depth stays
small enough to open; every layer has its numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from asapc.metrics import METRIC
from asapc.operators.catalogue import TEACHER
from asapc.report.advice import error_shares, worst_first
from asapc.report.baseline import ROUNDING
from asapc.report.document import Check, Report, SiteReport, Trail, Tried, TriedSite, finite
from asapc.report.figures import layer_pictures
from asapc.report.shown import (
    change_text,
    ends_text,
    largest_shape,
    positive,
    shape_text,
    times_text,
)
from asapc.report.tables import (
    amortised_text,
    certificates_table,
    convention_text,
    fit_text,
    listed,
    number,
)

PICTURED = 12  # layers with pictures
ERRORS = {"attention_rel_l2": "attention error", "output_rel_l2": "output error"}


class Cell(NamedTuple):
    """A figure of a layer, a smaller line below it, and its tone, see asapc.report.tables.TONES."""

    text: str
    note: str = ""
    tone: str = ""


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
    changes = {
        site.name: [c for metric in ERRORS if (c := report.compared(metric, site.name)) is not None]
        for site in sites
    }
    compared = any(changes.values())
    columns: dict[str, Callable[[SiteReport], Cell]] = {
        words: partial(_error, metric)
        for metric, words in ERRORS.items() if any(metric in site.metrics for site in sites)
    }  # fmt: skip
    if compared:
        columns["error against the baseline"] = lambda site: _change(changes[site.name])
    timed = any(ratio < math.inf for ratio, _ in speeds.values())
    if timed:
        columns["speed of the layer"] = lambda site: speeds[site.name][1]
    orders = {"worst": ("largest error", sites)}
    if len(sites) > 1:
        orders["model"] = "order in the model", [*report.sites]
        if timed:
            slowest = sorted(sites, key=lambda site: speeds[site.name][0])
            orders["slow"] = "least gain in speed", slowest
        if compared:
            worse = sorted(sites, key=lambda site: -_worse(changes[site.name]))
            orders["change"] = "worst against the baseline", worse
    # By identity: names may be alike.
    places = {
        key: {id(site): place for place, site in enumerate(order)} for key, (_, order) in orders.items()
    }
    index = {id(site): place for place, site in enumerate(report.sites)}
    shares = error_shares(report)
    return {
        "columns": [*columns],
        "orders": [(key, words) for key, (words, _) in orders.items()],
        "layers": [
            {
                "anchor": f"layer-{index[id(site)]}",
                "places": [(key, place[id(site)]) for key, place in places.items()],
                "cells": [cell(site) for cell in columns.values()],
                "facts": _facts(site, shares.get(site.name)),
                "pictures": layer_pictures(report, site) if place < PICTURED else None,
                **_layer(site),
            }
            for place, site in enumerate(sites)
        ],
        "note": "" if len(sites) <= PICTURED else (
            f"Pictures are drawn for the {PICTURED} layers with the largest attention errors; the other "
            f"{len(sites) - PICTURED} have their numbers."
        ),
    }  # fmt: skip


def _layer(site: SiteReport) -> dict[str, Any]:
    """What a layer is and what was measured of it."""
    document = site.to_json()
    certificates = certificates_table([document])
    counts = Counter(row[table.columns.index("holds")] for table in certificates for row in table.rows)
    outcome = ", ".join(f"{count} {word}" for word, count in counts.items())
    metrics = {
        "metric": lambda item: METRIC[item[0]].name if item[0] in METRIC else item[0],
        "value|": lambda item: number(item[1]),
        "what it is": lambda item: METRIC[item[0]].doc if item[0] in METRIC else "",
    }
    return {
        "name": site.name,
        "operator": site.operator,
        "tone": "amortised" if site.approximate else "exact",
        "summary": amortised_text(document),
        "violated": any(not certificate.holds for certificate in site.certificates),
        "tables": [
            *(replace(table, title=f"Certificates: {outcome}") for table in certificates),
            *listed("All metrics of this layer", site.metrics.items(), metrics),
        ],
    }


def _error(metric: str, site: SiteReport) -> Cell:
    value = site.metric(metric)
    if value is None and site.operator == TEACHER:
        return Cell("0", "its own code")
    worst = site.metric(f"{metric}_worst")
    return Cell(
        number(value), ends_text(site, metric) or ("" if worst is None else f"worst {number(worst)}")
    )


def _worse(checks: Sequence[Check]) -> float:
    worse = checks[0].worse_by if checks else None
    return -math.inf if worse is None else worse


def _change(checks: Sequence[Check]) -> Cell:
    """The first metric's difference; below it the second's."""
    shown = [
        (ERRORS[check.metric], change_text(check.metric, change if abs(change) > ROUNDING else 0.0))
        for check in checks if (change := check.change) is not None
    ]  # fmt: skip
    if not shown:
        return Cell("-", "not compared")
    tone = "bad" if any(not check.passed for check in checks) else ""
    return Cell(shown[0][1], " ".join(shown[1]) if len(shown) > 1 else "", tone)


def _speed(site: SiteReport, trail: TriedSite) -> tuple[float, Cell]:
    """Times as fast as the teacher, infinite where not timed, as selection has measured it.  Where its
    interval holds 1, the two are equally fast."""
    if site.operator == TEACHER:
        return 1.0, Cell("equal", "its own code")
    chosen = next((candidate for candidate in trail.candidates if candidate.chosen), Tried())
    shape = largest_shape(trail)
    teacher, compiled = (positive(ms.get(shape)) for ms in (chosen.teacher_ms, chosen.latency_ms))
    if teacher is None or compiled is None:
        return math.inf, Cell("-")
    ratio, told = teacher / compiled, f"{number(teacher)} → {number(compiled)} ms at {shape_text(shape)}"
    low, high = (finite(end) for end in chosen.speedup.get(shape, (None, None)))
    if low is None or high is None:
        return ratio, Cell(times_text(ratio), told)
    shown = "equal" if low <= 1 <= high else times_text(ratio)
    return ratio, Cell(shown, f"{times_text(low)} to {times_text(high)}, {told}")


def _facts(site: SiteReport, share: float | None) -> list[tuple[str, str]]:
    document = site.to_json()
    low, high = (finite((site.range or {}).get(end)) for end in ("score_low", "score_high"))
    facts = [
        ("why", site.reason),
        ("share of the error", None if share is None else f"{share:.0%}"),
        ("teacher's convention", convention_text(document["convention"])),
        ("fitted", fit_text(document)),
        ("replay of the teacher, difference", number(site.replay_error)),
        ("scores seen in calibration",
         None if low is None or high is None else f"{number(low)} to {number(high)}"),
    ]  # fmt: skip
    return [(name, text) for name, text in facts if text and text != "-"]
