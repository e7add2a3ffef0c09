"""A report as one self-contained page: no network, no script, light and dark, phone and paper.

`page` turns the report into what the template lays out: every value already formatted, every name
cleaned; the template escapes. Every part of a report is optional here, and what a manifest carried
along (the decision trail) is read as if anyone had written it.

jinja2 and matplotlib are in the extra `report`.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from asapc.fidelity import METRICS
from asapc.report import plots
from asapc.report.pictures import MapPair, SitePictures
from asapc.report.tables import (
    MODEL_LABELS,
    SHARES,
    SITE_LABELS,
    Table,
    amortised_text,
    convention_text,
    fit_text,
    number,
    onnx_tables,
    refresh_tables,
    refused_table,
    soft_to_hard_tables,
)

LONGEST = 240  # characters of a value that are shown
FAILURES = 6  # named in the headline; all of them are under Gate
OPEN_SITES = 3  # sites that are shown unfolded
EXACT_OPERATORS = ("teacher", "sinkhorn", "esp_soft")
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

    marked: the row to stand out.
    """

    name: str
    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[Cell]]
    marked: int | None = None
    note: str = ""


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
class SiteView:
    name: str
    anchor: str
    operator: str
    tone: str
    summary: str
    facts: Sequence[tuple[str, str]]
    figures: Sequence[Plot]
    note: str
    examples: Sequence[Example]
    certificates: Grid | None
    violated: bool
    metrics: Grid | None
    unfolded: bool


@dataclass
class Page:
    """Everything on the page, in its order."""

    source: str
    verdict: str
    tone: str
    sentence: str
    failures: list[tuple[str, str]] = field(default_factory=list)
    more_failures: int = 0
    warnings: list[str] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    times: list[Bar] = field(default_factory=list)
    basis: str = ""
    layers: Grid | None = None
    lengths: list[Plot] = field(default_factory=list)
    sites: list[SiteView] = field(default_factory=list)
    trail: list[tuple[str, str]] = field(default_factory=list)
    rounds: Grid | None = None
    candidates: list[tuple[str, str, Grid]] = field(default_factory=list)  # site, summary, table
    audit: list[Grid] = field(default_factory=list)
    refresh: list[Grid] = field(default_factory=list)
    onnx: list[Grid] = field(default_factory=list)
    gate: Grid | None = None
    baseline: list[tuple[str, str]] = field(default_factory=list)
    left_alone: list[Grid] = field(default_factory=list)
    numbers: Grid | None = None
    provenance: list[tuple[str, str]] = field(default_factory=list)
    environment: list[tuple[str, str]] = field(default_factory=list)


def html(report: Mapping[str, Any], pictures: Sequence[SitePictures] = ()) -> str:
    """The page, the same bytes for the same report and pictures."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_cleaned, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    template = files("asapc.report").joinpath("template", "report.html.j2").read_text("utf-8")
    return environment.from_string(template).render(page=page(report, pictures))


def page(report: Mapping[str, Any], pictures: Sequence[SitePictures] = ()) -> Page:
    """What the template lays out."""
    model, gate = _mapping(report, "model"), _mapping(report, "gate")
    selection, sites = _mapping(report, "selection"), _mappings(report, "sites")
    shown = _verdict(gate)
    failed = [entry for entry in _mappings(gate, "checks") if not entry.get("passed")]
    failed.sort(key=lambda entry: entry.get("class") != "ANOMALOUS")
    drawn = {p.name: p for p in pictures}
    trail = {str(s.get("name")): s for s in _mappings(selection, "sites")}
    return Page(
        source=_text(model.get("source")) or "a model",
        verdict=shown[0],
        tone=shown[1],
        sentence=shown[2],
        failures=[
            (_text(entry.get("class")) or "REGRESSION", _check_text(entry))
            for entry in failed[:FAILURES]
        ],
        more_failures=max(0, len(failed) - FAILURES),
        warnings=[_text(own.get("text")) for own in _mappings(report, "warnings")],
        tiles=_tiles(model, sites),
        times=_times(model),
        basis=_basis(report, model),
        layers=_layers(sites, trail),
        lengths=_model_lengths(report),
        sites=[
            _site(i, site, trail.get(str(site.get("name")), {}), selection,
                  drawn.get(str(site.get("name"))), i < OPEN_SITES)
            for i, site in enumerate(sites)
        ],
        trail=_trail_facts(selection),
        rounds=_rounds(selection),
        candidates=_candidates(selection),
        audit=[_grid(t) for t in soft_to_hard_tables(_mapping(report, "soft_to_hard"))],
        refresh=[_grid(t) for t in refresh_tables(_mapping(report, "refresh"))]
        if _mapping(report, "refresh") else [],
        onnx=[_grid(t) for t in onnx_tables(_mapping(report, "onnx"))]
        if _mapping(report, "onnx") else [],
        gate=_gate(gate),
        baseline=_facts(_mapping(gate, "baseline"), without=("skipped",)),
        left_alone=[_grid(t) for t in refused_table(_mappings(report, "refused"))],
        numbers=_numbers(model),
        provenance=_provenance(report, model),
        environment=_facts(_mapping(report, "environment")),
    )  # fmt: skip


# The headline


def _verdict(gate: Mapping[str, Any]) -> tuple[str, str, str]:
    """Word, tone and one sentence."""
    checks = _mappings(gate, "checks")
    kept = sum(bool(entry.get("passed")) for entry in checks)
    word = gate.get("verdict")
    if word is None and checks:  # reports of format 1
        word = "ACCEPT" if gate.get("passed") else "REGRESSION"
    limits = f"{len(checks)} check{'' if len(checks) == 1 else 's'}"
    if word == "ACCEPT":
        return "ACCEPT", "good", f"All {limits} passed." if len(checks) != 1 else "The check passed."
    if word == "REGRESSION":
        return "REGRESSION", "bad", f"{len(checks) - kept} of {limits} failed."
    if word == "ANOMALOUS":
        return "ANOMALOUS", "odd", "A measurement cannot be trusted, so nothing is accepted."
    return "MEASURED", "", "No gate was set: nothing was promised, and nothing is judged."


def _check_text(entry: Mapping[str, Any]) -> str:
    if entry.get("message"):
        return _text(entry["message"])
    return f"{_text(entry.get('metric'))} of {_text(entry.get('scope'))}: {_number(entry.get('value'))}"


def _tiles(model: Mapping[str, Any], sites: Sequence[Mapping[str, Any]]) -> list[Tile]:
    level = _float(model.get("confidence_level")) or 0.95
    tiles = []
    if (speedup := _float(model.get("speedup"))) is not None:
        notes = []
        if (own := _float(model.get("speedup_lossless"))) is not None:
            notes.append(f"{_times_text(own)} by lossless kernels alone")
        tiles.append(Tile("Speed-up, whole model", _times_text(speedup), notes))
    if (agreement := _float(model.get("prediction_agreement"))) is not None:
        notes = _interval(model, "prediction_agreement", level)
        tiles.append(Tile("Predictions kept", f"{agreement:.2%}", notes))
    before, after = (_float(model.get(f"accuracy_{who}")) for who in ("teacher", "compiled"))
    if before is not None and after is not None:
        drop = _ends(model, "accuracy_drop")
        notes = _interval(model, "accuracy_compiled", level)
        if drop is not None:
            notes = [f"{level:.0%} interval of the drop {drop[0]:.2%} to {drop[1]:.2%}"]
        tiles.append(Tile("Accuracy, teacher → compiled", f"{before:.2%} → {after:.2%}", notes))
    errors = [
        (error, _text(site.get("name")))
        for site in sites
        if (error := _float(_mapping(site, "metrics").get("attention_rel_l2"))) is not None
    ]
    if errors:
        error, name = max(errors)
        where = "in every layer" if error == 0 else f"in {_short(name, 40)}"
        tiles.append(Tile("Attention error, worst layer", _number(error), [where]))
    elif (output := _float(model.get("output_rel_l2"))) is not None:
        notes = _interval(model, "output_rel_l2", level)
        tiles.append(Tile("Output error, relative", _number(output), notes))
    return tiles


def _interval(holder: Mapping[str, Any], metric: str, level: float) -> list[str]:
    ends = _ends(holder, metric)
    if ends is None:
        return []
    low, high = (f"{e:.2%}" if metric in SHARES else _number(e) for e in ends)
    return [f"{level:.0%} interval {low} to {high}"]


def _ends(holder: Mapping[str, Any], metric: str) -> tuple[float, float] | None:
    ends = _mapping(holder, "confidence").get(metric)
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        return None
    low, high = _float(ends[0]), _float(ends[1])
    return None if low is None or high is None else (low, high)


def _times(model: Mapping[str, Any]) -> list[Bar]:
    kinds = ("teacher", "lossless", "compiled")
    times = {k: t for k in kinds if (t := _positive(model.get(f"latency_{k}_ms"))) is not None}
    longest = max(times.values(), default=1.0)
    teacher = times.get("teacher")
    return [
        Bar(kind, f"{_number(time)} ms", 100 * time / longest,
            "" if teacher is None or kind == "teacher" else _times_text(teacher / time))
        for kind, time in times.items()
    ] if len(times) > 1 else []  # fmt: skip


def _basis(report: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """What the headline rests on, in one line."""
    environment = _mapping(report, "environment")
    examples, batch = model.get("examples"), model.get("batch")
    parts = [] if examples is None else [f"{_number(examples)} examples neither fitted nor selected on"]
    if batch is not None:
        parts.append(f"times for batches of {_number(batch)}")
    if environment.get("device"):
        parts.append(f"on {_text(environment['device'])}")
    return ", ".join(parts)


# Layers and sites


def _layers(
    sites: Sequence[Mapping[str, Any]], trail: Mapping[str, Mapping[str, Any]]
) -> Grid | None:
    if not sites:
        return None
    speeds = [_speed(site, trail.get(str(site.get("name")), {})) for site in sites]
    names = {"attention_rel_l2": "attention error", "output_rel_l2": "output error"}
    present = [m for m in names if any(m in _mapping(site, "metrics") for site in sites)]
    columns = [("layer", False), ("operator", False)]
    columns += [(names[m], True) for m in present]
    columns += [("speed", True)] if any(speeds) else []
    columns.append(("why", False))
    rows = []
    for site, speed in zip(sites, speeds, strict=True):
        own = _mapping(site, "metrics")
        cells = [
            Cell(_text(site.get("name"))),
            Cell(_text(site.get("operator")), amortised_text(site) or ""),
        ]
        for metric in present:
            ends = _ends(site, metric)
            note = "" if ends is None else f"{_number(ends[0])} to {_number(ends[1])}"
            if metric == "attention_rel_l2" and not note and own.get(f"{metric}_worst") is not None:
                note = f"worst {_number(own[f'{metric}_worst'])}"
            cells.append(Cell(_number(own.get(metric)), note))
        if any(speeds):
            cells.append(Cell(*speed) if speed else Cell("-"))
        cells.append(Cell(_text(site.get("reason"))))
        rows.append(cells)
    return Grid("Layers", columns, rows)


def _speed(site: Mapping[str, Any], trail: Mapping[str, Any]) -> tuple[str, str] | None:
    """Times as fast as the teacher, and the two times; measured at the site, else by selection."""
    teacher = _positive(site.get("latency_teacher_ms"))
    own = _positive(site.get("latency_compiled_ms"))
    where = ""
    if teacher is None or own is None:
        chosen = next((c for c in _mappings(trail, "candidates") if c.get("chosen")), {})
        shape = _largest_shape(trail)
        teacher = _positive(_mapping(chosen, "teacher_ms").get(shape))
        own = _positive(_mapping(chosen, "latency_ms").get(shape))
        where = f" at {_shape_text(shape)}"
    if teacher is None or own is None:
        return None
    return _times_text(teacher / own), f"{_number(teacher)} → {_number(own)} ms{where}"


def _site(
    index: int,
    site: Mapping[str, Any],
    trail: Mapping[str, Any],
    selection: Mapping[str, Any],
    pictures: SitePictures | None,
    unfolded: bool,
) -> SiteView:
    name, operator = _text(site.get("name")), _text(site.get("operator")) or "-"
    metrics = _mapping(site, "metrics")
    error = _float(metrics.get("attention_rel_l2"))
    summary = [amortised_text(site), "" if error is None else f"attention error {_number(error)}"]
    tried = _pareto(name, trail, selection)
    note = "What was tried, filled: no other candidate is both closer and cheaper." if tried else ""
    if tried and len(_shapes(trail)) > 1 and selection.get("objective") != "memory":
        note += " All shapes are listed under “How it was chosen”."
    figures = [
        *tried,
        *_by_head(name, site),
        *_by_length(name, _mappings(site, "by_length"), "attention_rel_l2", "attention error"),
    ]
    return SiteView(
        name=name,
        anchor=f"layer-{index}",
        operator=operator,
        tone="exact" if operator in EXACT_OPERATORS else "amortised",
        summary=" · ".join(part for part in summary if part),
        facts=_site_facts(site),
        figures=figures,
        note=note,
        examples=[_example(name, pair) for pair in (pictures.pairs if pictures else ())],
        certificates=_certificates(site),
        violated=any(not item.get("holds") for item in _mappings(site, "certificates")),
        metrics=_metrics(metrics),
        unfolded=unfolded,
    )


def _site_facts(site: Mapping[str, Any]) -> list[tuple[str, str]]:
    seen = _mapping(site, "range")
    low, high = seen.get("score_low"), seen.get("score_high")
    facts = [
        ("teacher's convention", convention_text(site.get("convention") or None)
         if isinstance(site.get("convention"), Mapping) else ""),
        ("fitted", fit_text(site)),
        ("why", _text(site.get("reason"))),
        ("replay of the teacher, difference", _number(site.get("replay_error"))),
        ("scores seen in calibration",
         "" if low is None or high is None else f"{_number(low)} to {_number(high)}"),
    ]  # fmt: skip
    return [(label, text) for label, text in facts if text and text != "-"]


def _metrics(metrics: Mapping[str, Any]) -> Grid | None:
    rows = [
        [
            Cell(_label(str(key))),
            Cell(_number(value)),
            Cell(METRICS[key].doc if key in METRICS else ""),
        ]
        for key, value in metrics.items()
    ]
    columns = [("metric", False), ("value", True), ("what it is", False)]
    return Grid("All metrics of this layer", columns, rows) if rows else None


def _certificates(site: Mapping[str, Any]) -> Grid | None:
    rows = []
    counts: dict[str, int] = {}
    for item in _mappings(site, "certificates"):
        holds = "holds" if item.get("holds") else "violated"
        if item.get("holds") and item.get("vacuous"):
            holds = "vacuous"
        counts[holds] = counts.get(holds, 0) + 1
        name = _text(item.get("name")).replace("_", " ").replace("kl ", "KL ")
        loose, residual = item.get("vacuous_cases"), item.get("residual")
        rows.append(
            [
                Cell(name, _text(item.get("source"))),
                Cell(_number(item.get("measured"))),
                Cell(_number(item.get("bound")),
                     "" if residual is None else f"equal within {_number(residual)}"),
                Cell(holds, tone=TONES[holds]),
                Cell(_number(item.get("cases")), f"{_number(loose)} vacuous" if loose else ""),
            ]
        )
    columns = [("certificate", False), ("measured", True), ("bound", True), ("", False), ("cases", True)]
    said = {"holds": "hold", "vacuous": "true but vacuous", "violated": "VIOLATED"}
    summary = ", ".join(f"{counts[key]} {text}" for key, text in said.items() if key in counts)
    note = "Vacuous: true, but the bound is too loose to say anything."
    return Grid(
        f"Certificates: {summary}", columns, rows, marked=None, note=note if "vacuous" in counts else ""
    ) if rows else None  # fmt: skip


# Plots


def _pareto(name: str, trail: Mapping[str, Any], selection: Mapping[str, Any]) -> list[Plot]:
    shape = _largest_shape(trail)
    memory = selection.get("objective") == "memory"
    points: list[plots.Point] = []
    for item in _mappings(trail, "candidates"):
        cost = item.get("memory_mib") if memory else _mapping(item, "latency_ms").get(shape)
        time, error = _positive(cost), _float(item.get("attention_rel_l2"))
        operator = item.get("operator")
        if error is None and item.get("label") == operator:
            error = 0.0  # the exact operator, the one that is called by its name alone
        kind: plots.Kind = "candidate"
        if operator == "teacher":
            kind, error = "teacher", error or 0.0
        elif error is not None and error <= plots.EXACT:
            kind = "lossless"
        if time is None or error is None or error < 0 or not 1e-9 < time < 1e12:
            continue
        points.append(plots.Point(
            _safe(_short(_text(item.get("label")))), kind, min(error, 1e6), time, bool(item.get("chosen"))
        ))  # fmt: skip
    teacher = next(
        (t for c in _mappings(trail, "candidates")
         if (t := _positive(_mapping(c, "teacher_ms").get(shape))) is not None), None,
    )  # fmt: skip
    if teacher is not None and not memory and not any(p.kind == "teacher" for p in points):
        points.append(plots.Point("teacher", "teacher", 0.0, teacher, False))
    if len(points) < 2:
        return []
    unit = "MiB of extra memory" if memory else f"ms at {_shape_text(shape)}"
    chosen = next((p for p in points if p.chosen), None)
    alt = f"{name}: attention error against {unit} of {len(points)} candidates."
    if chosen is not None:
        alt += f" Chosen: {chosen.label}, error {number(chosen.error)}, {number(chosen.time)}."
    limit = _float(_mapping(selection, "budget").get("attention_rel_l2"))
    picture = plots.pareto(points, unit, limit, _safe(alt))
    return [Plot("What was tried", picture)]


def _by_head(name: str, site: Mapping[str, Any]) -> list[Plot]:
    values = _mapping(site, "by_head").get("attention_rel_l2")
    if not isinstance(values, list | tuple) or not values:
        return []
    errors = [_float(v) for v in values]
    alt = f"{name}: attention error of {len(errors)} heads: {', '.join(number(e) for e in errors[:16])}"
    heads = [str(i) for i in range(len(errors))]
    return [Plot("By head", plots.bars(errors, heads, "head", "attention error", _safe(alt), mean=True))]


def _by_length(
    name: str, bins: Sequence[Mapping[str, Any]], metric: str, axis: str, *, share: bool = False
) -> list[Plot]:
    kept = [b for b in bins if isinstance(b.get("low"), int) and isinstance(b.get("high"), int)]
    values = [_float(b.get(metric)) for b in kept]
    if share:
        values = [None if v is None else 1 - v for v in values]
    if len(kept) < 2 or all(v is None for v in values):
        return []  # one length says what the mean says
    spans = [str(b["low"]) if b["low"] == b["high"] else f"{b['low']}–{b['high']}" for b in kept]
    names = [f"{s}\nn = {_number(b.get('examples'))}" for s, b in zip(spans, kept, strict=True)]
    said = [f"{s}: {number(v)}" for s, v in zip(spans, values, strict=True)]
    alt = f"{name}: {axis} by number of active tokens; {', '.join(said)}"
    picture = plots.bars(values, names, "active tokens", axis, _safe(alt), percent=share)
    return [Plot("By length", picture)]


def _model_lengths(report: Mapping[str, Any]) -> list[Plot]:
    bins = _mappings(report, "by_length")
    changed = _by_length("Model", bins, "prediction_agreement", "predictions changed", share=True)
    divergence = _by_length("Model", bins, "logit_kl", "logit KL")
    captions = ("Predictions changed, by length", "Logit KL, by length")
    found = ((captions[0], changed), (captions[1], divergence))
    return [Plot(caption, plot.picture) for caption, own in found for plot in own]


def _example(name: str, pair: MapPair) -> Example:
    images = plots.map_images(pair)
    what = f"{name}, example {pair.example}, head {pair.head}"
    alt = f"{what}: row and column sums by token, teacher and compiled"
    return Example(
        caption=f"Example {pair.example}, head {pair.head}, {pair.active} active keys: error "
        + number(pair.error),
        maps=[
            ("teacher", Markup(images.teacher), f"Attention of the teacher: {what}"),
            ("compiled", Markup(images.compiled), f"Attention of the compiled layer: {what}"),
            ("difference", Markup(images.difference), f"Compiled minus teacher: {what}"),
        ],
        scale=number(images.largest),
        difference_scale=number(images.largest_difference),
        masses=Plot("", plots.masses(pair, _safe(alt))),
    )


# The decision trail


def _trail_facts(selection: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not selection:
        return []
    budget = _budget_text(_mapping(selection, "budget"))
    shapes = [_shape_text("x".join(map(str, s))) for s in _lists(selection.get("shapes"))]
    seconds = _float(selection.get("seconds"))
    facts = [
        ("objective", _text(selection.get("objective"))),
        ("budget", budget),
        ("examples", _number(selection.get("examples"))),
        ("shapes, batch × tokens", ", ".join(shapes)),
        ("took", "" if seconds is None else f"{_number(seconds)} s"),
    ]
    return [(label, text) for label, text in facts if text and text != "-"]


def _budget_text(budget: Mapping[str, Any], between: str = ", ") -> str:
    parts = []
    for metric, limit in budget.items():
        if isinstance(limit, Mapping):
            parts.append(f"{metric}: {_budget_text(limit)}")
        elif limit is not None:
            sign = "≥" if metric in METRICS and METRICS[metric].direction == "max" else "≤"
            parts.append(f"{_text(metric)} {sign} {_plain(limit)}")
    return between.join(parts)


def _rounds(selection: Mapping[str, Any]) -> Grid | None:
    unit = "MiB" if selection.get("objective") == "memory" else "ms"
    rows = []
    for index, item in enumerate(_mappings(selection, "rounds"), 1):
        choice: dict[str, int] = {}
        for label in _mapping(item, "choice").values():
            choice[_text(label)] = choice.get(_text(label), 0) + 1
        measured = [
            f"{_text(k)} {_plain(v)}" for k, v in _mapping(item, "measured").items() if v is not None
        ]
        verdict = _text(item.get("verdict"))
        rows.append(
            [
                Cell(str(index)),
                Cell(_budget_text(_mapping(item, "budget"), "\n")),
                Cell("\n".join(f"{n} × {label}" for label, n in choice.items())),
                Cell(_number(item.get(f"predicted_{unit.lower()}"))),
                Cell("\n".join(measured)),
                Cell(verdict, tone=TONES.get(verdict, "bad" if verdict else "")),
            ]
        )
    columns = [("round", False), ("budget", False), ("choice", False), (f"predicted {unit}", True),
               ("whole model measured", False), ("verdict", False)]  # fmt: skip
    return Grid("Rounds", columns, rows, marked=len(rows) - 1) if rows else None


def _candidates(selection: Mapping[str, Any]) -> list[tuple[str, str, Grid]]:
    memory = selection.get("objective") == "memory"
    found = []
    for site in _mappings(selection, "sites"):
        items = _mappings(site, "candidates")
        if not items:
            continue
        shapes = _shapes(site)
        alone = list(dict.fromkeys(key for item in items for key in _mapping(item, "alone")))
        with_memory = memory or any(item.get("memory_mib") is not None for item in items)
        columns = [("candidate", False), ("verdict", False), ("attention error", True),
                   ("output error", True)]  # fmt: skip
        columns += [(f"{_label(key)}, alone", True) for key in alone]
        columns += [(f"ms at {_shape_text(shape)}", True) for shape in shapes]
        columns += [("MiB", True)] if with_memory else []
        rows: list[list[Cell]] = []
        marked = None
        for item in items:
            if item.get("chosen"):
                marked = len(rows)
            times, teacher = _mapping(item, "latency_ms"), _mapping(item, "teacher_ms")
            label, operator = _text(item.get("label")), _text(item.get("operator"))
            verdict = Cell(_text(item.get("verdict")), tone="good" if item.get("chosen") else "")
            cells = [Cell(label, "" if label.startswith(operator) else operator), verdict]
            cells += [Cell(_number(item.get(key))) for key in ("attention_rel_l2", "output_rel_l2")]
            cells += [Cell(_metric(key, _mapping(item, "alone").get(key))) for key in alone]
            for shape in shapes:
                own, its = _positive(times.get(shape)), _positive(teacher.get(shape))
                ratio = "" if own is None or its is None else _times_text(its / own)
                cells.append(Cell(_number(own), ratio))
            cells += [Cell(_number(item.get("memory_mib")))] if with_memory else []
            rows.append(cells)
        chosen = "nothing" if marked is None else rows[marked][0].text
        summary = f"{len(items)} candidate{'' if len(items) == 1 else 's'}, chosen: {chosen}"
        name = _text(site.get("name"))
        note = "Below each time: how many times as fast as the teacher." if shapes else ""
        found.append((name, summary, Grid(f"Candidates of {name}", columns, rows, marked, note)))
    return found


def _shapes(trail: Mapping[str, Any]) -> list[str]:
    """Keys of latency_ms, smallest first."""
    keys = dict.fromkeys(
        str(key) for item in _mappings(trail, "candidates") for key in _mapping(item, "latency_ms")
    )
    return sorted(keys, key=lambda key: (_area(key), key))


def _largest_shape(trail: Mapping[str, Any]) -> str:
    return (_shapes(trail) or [""])[-1]


def _area(shape: str) -> float:
    parts = [int(p) for p in shape.split("x") if p.isascii() and p.isdigit() and len(p) < 12]
    return math.prod(parts) if parts else 0


def _shape_text(shape: str) -> str:
    """"32x512" as "32 × 512"; nothing else comes through, it is drawn in a plot."""
    parts = shape.split("x")
    fine = all(p.isascii() and p.isdigit() and len(p) < 12 for p in parts)
    return " × ".join(parts) if fine else "one shape"


# Gate, numbers, provenance


def _gate(gate: Mapping[str, Any]) -> Grid | None:
    rows = []
    for item in _mappings(gate, "checks"):
        verdict = _text(item.get("class")) or ("ACCEPT" if item.get("passed") else "REGRESSION")
        metric = _text(item.get("metric"))
        rows.append(
            [
                Cell(metric, _text(item.get("scope"))),
                Cell("not measured" if item.get("value") is None else _metric(metric, item["value"])),
                Cell(_limit_text(item, metric)),
                Cell(verdict, tone=TONES.get(verdict, "")),
                Cell(_text(item.get("message"))),
            ]
        )
    columns = [("metric", False), ("value", True), ("limit", False), ("verdict", False), ("", False)]
    if not any(row[-1].text for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Grid("Gate checks", columns, rows) if rows else None


def _limit_text(item: Mapping[str, Any], metric: str) -> str:
    confident = ", with confidence" if item.get("confidence") else ""
    if "max" in item:
        return f"≤ {_limit(metric, item['max'])}{confident}"
    if "min" in item:
        return f"≥ {_limit(metric, item['min'])}{confident}"
    if item.get("baseline") is not None:
        allowed = _float(item.get("allowed"))
        most = "" if allowed is None else f", {_plain(allowed * 100)}% worse allowed"
        return f"baseline {_metric(metric, item['baseline'])}{most}"
    return "plausible" if item.get("kind") == "plausibility" else "-"


def _limit(metric: str, value: Any) -> str:
    share = _float(value) if metric in SHARES else None
    return _plain(value) if share is None else f"{_plain(100 * share)}%"


def _numbers(model: Mapping[str, Any]) -> Grid | None:
    apart = ("source", "data", "capture", "confidence", "confidence_level", "fingerprint")
    rows = []
    for key, value in model.items():
        if key in apart or isinstance(value, Mapping | list | tuple):
            continue
        ends = _ends(model, key)
        interval = "" if ends is None else " to ".join(_metric(key, e) for e in ends)
        own = _metric(key, value) + ("×" if key.startswith("speedup") else "")
        rows.append([Cell(_label(key)), Cell(own), Cell(interval)])
    level = _float(model.get("confidence_level")) or 0.95
    columns = [("whole model", False), ("value", True), (f"{level:.0%} interval", True)]
    if not any(row[2].text for row in rows):
        columns, rows = columns[:2], [row[:2] for row in rows]
    return Grid("Everything measured on the whole model", columns, rows) if rows else None


def _provenance(report: Mapping[str, Any], model: Mapping[str, Any]) -> list[tuple[str, str]]:
    prints = _mapping(report, "fingerprints")
    splits = [f"{_text(k)} {_number(v)}" for k, v in _mapping(report, "splits").items()]
    facts = [
        ("model", _text(model.get("source"))),
        ("model fingerprint", _text(prints.get("teacher") or model.get("fingerprint"))),
        ("data", _text(model.get("data"))),
        ("data fingerprint", _text(prints.get("data"))),
        ("splits, examples", ", ".join(splits)),
        ("capture", _text(model.get("capture"))),
        ("report format", _number(report.get("format_version"))),
    ]
    return [(label, text) for label, text in facts if text and text != "-"]


def _facts(
    values: Mapping[str, Any], without: Sequence[str] = ()
) -> list[tuple[str, str]]:
    return [
        (_label(str(key)), _plain(value))
        for key, value in values.items()
        if key not in without and value not in (None, "", {}, [])
    ]


def _grid(table: Table) -> Grid:
    rows = [[Cell(text, tone=TONES.get(text, "")) for text in row] for row in table.rows]
    return Grid(table.title, table.headings(), rows)


# Values


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}


def _mappings(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    return list(_lists(data.get(key), Mapping))


def _lists(value: Any, of: Any = (list, tuple)) -> Iterable[Any]:
    return (item for item in value if isinstance(item, of)) if isinstance(value, list | tuple) else ()


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def _positive(value: Any) -> float | None:
    result = _float(value)
    return result if result is not None and result > 0 else None


def _number(value: Any) -> str:
    return number(value) if value is None or isinstance(value, int | float) else _text(value)


def _plain(value: Any) -> str:
    """A limit as somebody wrote it, a value of any kind as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{_text(k)} {_plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(v) for v in value)
    return _text(value)


def _metric(name: str, value: Any) -> str:
    share = _float(value) if name in SHARES else None
    return _number(value) if share is None else f"{share:.2%}"


def _label(key: str) -> str:
    return MODEL_LABELS.get(key) or SITE_LABELS.get(key) or key.replace("_", " ")


def _times_text(ratio: float) -> str:
    return f"{number(float(ratio))}×"


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _short(text: str, longest: int = 80) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _safe(text: str) -> str:
    """What goes into a picture past the template: it is escaped there, and cleaned here."""
    return str(_cleaned(_short(text, 4 * LONGEST)))


def _cleaned(value: Any) -> Any:
    """Text as it is shown: no control or bidirectional character to disguise it, no endless name."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    shown = "".join("\ufffd" if _disguises(c) else c for c in value[: 4 * LONGEST + 1])
    return _short(shown, 4 * LONGEST) if " " in shown else _short(shown, LONGEST)


def _disguises(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn")
