"""A report as one self-contained page: no network, no script, light and dark, phone and paper.

`page` turns the report into what the template lays out: every value already formatted, every name
cleaned; the template escapes. Every part of a report is optional here.

jinja2 and matplotlib are in the extra `report`.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from asapc.metrics import METRIC, is_share
from asapc.operators.catalogue import TEACHER
from asapc.report import plots
from asapc.report.document import (
    Check,
    GateReport,
    LengthBin,
    Measured,
    ModelReport,
    Numbers,
    Report,
    SiteReport,
    Trail,
    Tried,
    TriedSite,
    finite,
)
from asapc.report.pictures import MapPair
from asapc.report.tables import (
    MODEL_LABELS,
    Table,
    amortised_text,
    audit_tables,
    convention_text,
    exported_tables,
    fit_text,
    metric_text,
    number,
    refreshed_tables,
    refused_table,
)

LONGEST = 240  # characters of a value that are shown
FAILURES = 6  # named in the headline; all of them are under Gate
OPEN_SITES = 3  # sites that are shown unfolded
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
    """Everything on the page, in order."""

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


def html(report: Report) -> str:
    """The page, the same bytes for the same report."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_cleaned, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    template = files("asapc.report").joinpath("template", "report.html.j2").read_text("utf-8")
    return environment.from_string(template).render(page=page(report))


def page(report: Report) -> Page:
    """What the template lays out."""
    model, gate, sites = report.model, report.gate, report.sites
    trail = report.selection or Trail()
    verdict, tone, sentence = _verdict(gate)
    failed = gate.failures
    drawn = {picture.name: picture.pairs for picture in report.pictures}
    return Page(
        source=model.source or "a model",
        verdict=verdict,
        tone=tone,
        sentence=sentence,
        failures=[(check.verdict, _check_text(check)) for check in failed[:FAILURES]],
        more_failures=max(0, len(failed) - FAILURES),
        warnings=[text for text in (*(w.text for w in report.warnings), report.chosen_elsewhere) if text],
        tiles=_tiles(model, sites),
        times=_times(model),
        basis=_basis(report),
        layers=_layers(sites, trail),
        lengths=_model_lengths(report),
        sites=[
            _site(i, site, trail, drawn.get(site.name, ()), i < OPEN_SITES)
            for i, site in enumerate(sites)
        ],
        trail=_trail_facts(trail),
        rounds=_rounds(trail),
        candidates=_candidates(trail),
        audit=[_grid(t) for t in audit_tables(report)],
        refresh=[_grid(t) for t in refreshed_tables(report)],
        onnx=[_grid(t) for t in exported_tables(report)],
        gate=_gate(gate),
        baseline=_facts(gate.baseline.to_json(), ("skipped",)) if gate.baseline is not None else [],
        left_alone=[_grid(t) for t in refused_table(report.refused)],
        numbers=_numbers(model),
        provenance=_provenance(report),
        environment=_facts(report.environment),
    )


# The headline


def _verdict(gate: GateReport) -> tuple[str, str, str]:
    """Word, tone and one sentence."""
    limits = f"{len(gate.checks)} check{'' if len(gate.checks) == 1 else 's'}"
    if gate.verdict is None:
        return "MEASURED", "", "No gate was set: nothing was promised, and nothing is judged."
    sentences = {
        "ACCEPT": f"All {limits} passed." if len(gate.checks) != 1 else "The check passed.",
        "REGRESSION": f"{len(gate.failures)} of {limits} failed.",
        "ANOMALOUS": "A measurement cannot be trusted, so nothing is accepted.",
    }
    return gate.verdict, TONES[gate.verdict], sentences[gate.verdict]


def _check_text(check: Check) -> str:
    return check.message or f"{check.metric} of {check.scope}: {number(check.value)}"


def _tiles(model: ModelReport, sites: Sequence[SiteReport]) -> list[Tile]:
    tiles = []
    if (speedup := finite(model.metric("speedup"))) is not None:
        notes = []
        if (lossless := finite(model.metric("speedup_lossless"))) is not None:
            notes.append(f"{_times_text(lossless)} by lossless kernels alone")
        tiles.append(Tile("Speed-up, whole model", _times_text(speedup), notes))
    if (agreement := finite(model.metric("prediction_agreement"))) is not None:
        notes = _interval(model, "prediction_agreement")
        tiles.append(Tile("Predictions kept", f"{agreement:.2%}", notes))
    before, after = (finite(model.metric(f"accuracy_{who}")) for who in ("teacher", "compiled"))
    if before is not None and after is not None:
        notes = _interval(model, "accuracy_drop", " of the drop")
        notes = notes or _interval(model, "accuracy_compiled")
        tiles.append(Tile("Accuracy, teacher → compiled", f"{before:.2%} → {after:.2%}", notes))
    errors = [
        (error, site.name)
        for site in sites
        if (error := finite(site.metric("attention_rel_l2"))) is not None
    ]
    if errors:
        error, name = max(errors)
        where = "in every layer" if error == 0 else f"in {_short(name, 40)}"
        tiles.append(Tile("Attention error, worst layer", number(error), [where]))
    elif (output := finite(model.metric("output_rel_l2"))) is not None:
        notes = _interval(model, "output_rel_l2")
        tiles.append(Tile("Output error, relative", number(output), notes))
    return tiles


def _interval(model: ModelReport, metric: str, of: str = "") -> list[str]:
    ends = _ends(model, metric)
    return [f"{model.confidence_level:.0%} interval{of} {ends}"] if ends else []


def _ends(holder: Measured, metric: str) -> str:
    """"0.1 to 0.2", or nothing."""
    return " to ".join(metric_text(metric, end) for end in holder.interval(metric) or ())


def _times(model: ModelReport) -> list[Bar]:
    kinds = ("teacher", "lossless", "compiled")
    times = {k: t for k in kinds if (t := _positive(model.metric(f"latency_{k}_ms"))) is not None}
    longest = max(times.values(), default=1.0)
    teacher = times.get("teacher")
    return [
        Bar(kind, f"{number(time)} ms", 100 * time / longest,
            "" if teacher is None or kind == "teacher" else _times_text(teacher / time))
        for kind, time in times.items()
    ] if len(times) > 1 else []  # fmt: skip


def _basis(report: Report) -> str:
    """What the headline rests on, in one line."""
    examples, batch = (report.model.values.get(key) for key in ("examples", "batch"))
    device = report.environment.get("device")
    parts = [] if examples is None else [f"{number(examples)} examples neither fitted nor selected on"]
    parts += [] if batch is None else [f"times for batches of {number(batch)}"]
    parts += [f"on {device}"] if device else []
    return ", ".join(parts)


# Layers and sites


def _layers(sites: Sequence[SiteReport], trail: Trail) -> Grid | None:
    if not sites:
        return None
    speeds = [_speed(site, trail.of(site.name)) for site in sites]
    names = {"attention_rel_l2": "attention error", "output_rel_l2": "output error"}
    present = [m for m in names if any(m in site.metrics for site in sites)]
    columns = [("layer", False), ("operator", False)]
    columns += [(names[m], True) for m in present]
    columns += [("speed", True)] if any(speeds) else []
    columns.append(("why", False))
    rows = []
    for site, speed in zip(sites, speeds, strict=True):
        cells = [Cell(site.name), Cell(site.operator, amortised_text(site.to_json()))]
        for metric in present:
            note = _ends(site, metric)
            worst = site.metric(f"{metric}_worst")
            if not note and worst is not None:
                note = f"worst {number(worst)}"
            cells.append(Cell(number(site.metric(metric)), note))
        if any(speeds):
            cells.append(Cell(*speed) if speed else Cell("-"))
        cells.append(Cell(site.reason or ""))
        rows.append(cells)
    return Grid("Layers", columns, rows)


def _speed(site: SiteReport, trail: TriedSite) -> tuple[str, str] | None:
    """Times as fast as the teacher, and the two times; measured at the site, else by selection."""
    teacher = _positive(site.metric("latency_teacher_ms"))
    compiled = _positive(site.metric("latency_compiled_ms"))
    where = ""
    if teacher is None or compiled is None:
        chosen = next((candidate for candidate in trail.candidates if candidate.chosen), Tried())
        shape = _largest_shape(trail)
        teacher = _positive(chosen.teacher_ms.get(shape))
        compiled = _positive(chosen.latency_ms.get(shape))
        where = f" at {_shape_text(shape)}"
    if teacher is None or compiled is None:
        return None
    return _times_text(teacher / compiled), f"{number(teacher)} → {number(compiled)} ms{where}"


def _site(
    index: int, site: SiteReport, selection: Trail, pairs: Sequence[MapPair], unfolded: bool
) -> SiteView:
    trail, error = selection.of(site.name), finite(site.metric("attention_rel_l2"))
    summary = [
        amortised_text(site.to_json()), "" if error is None else f"attention error {number(error)}",
    ]  # fmt: skip
    tried = _pareto(site.name, trail, selection)
    note = "What was tried, filled: no other candidate is both closer and cheaper." if tried else ""
    if tried and len(_shapes(trail)) > 1 and selection.objective != "memory":
        note += " All shapes are listed under “How it was chosen”."
    return SiteView(
        name=site.name,
        anchor=f"layer-{index}",
        operator=site.operator,
        tone="amortised" if site.approximate else "exact",
        summary=" · ".join(part for part in summary if part),
        facts=_site_facts(site),
        figures=[
            *tried,
            *_by_head(site),
            *_by_length(site.name, site.by_length, "attention_rel_l2", "attention error"),
        ],
        note=note,
        examples=[_example(site.name, pair) for pair in pairs],
        certificates=_certificates(site),
        violated=any(not certificate.holds for certificate in site.certificates),
        metrics=_metrics(site.metrics),
        unfolded=unfolded,
    )


def _site_facts(site: SiteReport) -> list[tuple[str, str]]:
    convention = None if site.convention is None else site.convention.to_json()
    low, high = ((site.range or {}).get(end) for end in ("score_low", "score_high"))
    facts = [
        ("teacher's convention", convention_text(convention)),
        ("fitted", fit_text(site.to_json())),
        ("why", site.reason or ""),
        ("replay of the teacher, difference", number(site.replay_error)),
        ("scores seen in calibration",
         "" if low is None or high is None else f"{number(low)} to {number(high)}"),
    ]  # fmt: skip
    return _known(facts)


def _known(facts: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(label, text) for label, text in facts if text and text != "-"]


def _metrics(metrics: Numbers) -> Grid | None:
    rows = [
        [Cell(_label(key)), Cell(number(value)), Cell(METRIC[key].doc if key in METRIC else "")]
        for key, value in metrics.items()
    ]
    columns = [("metric", False), ("value", True), ("what it is", False)]
    return Grid("All metrics of this layer", columns, rows) if rows else None


def _certificates(site: SiteReport) -> Grid | None:
    rows = []
    counts: dict[str, int] = {}
    for certificate in site.certificates:
        holds = "violated" if not certificate.holds else "vacuous" if certificate.vacuous else "holds"
        counts[holds] = counts.get(holds, 0) + 1
        name = certificate.name.replace("_", " ").replace("kl ", "KL ")
        equal = "" if certificate.residual is None else f"equal within {number(certificate.residual)}"
        loose = f"{number(certificate.vacuous_cases)} vacuous" if certificate.vacuous_cases else ""
        rows.append(
            [
                Cell(name, certificate.source or ""),
                Cell(number(certificate.measured)),
                Cell(number(certificate.bound), equal),
                Cell(holds, tone=TONES[holds]),
                Cell(number(certificate.cases), loose),
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


def _pareto(name: str, trail: TriedSite, selection: Trail) -> list[Plot]:
    shape = _largest_shape(trail)
    memory = selection.objective == "memory"
    points: list[plots.Point] = []
    for candidate in trail.candidates:
        time = _positive(candidate.memory_mib if memory else candidate.latency_ms.get(shape))
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
        label = _safe(_short(candidate.label))
        points.append(plots.Point(label, kind, min(error, 1e6), time, candidate.chosen))
    teachers = (_positive(candidate.teacher_ms.get(shape)) for candidate in trail.candidates)
    teacher = next((time for time in teachers if time is not None), None)
    if teacher is not None and not memory and not any(p.kind == "teacher" for p in points):
        points.append(plots.Point("teacher", "teacher", 0.0, teacher, False))
    if len(points) < 2:
        return []
    unit = "MiB of extra memory" if memory else f"ms at {_shape_text(shape)}"
    chosen = next((p for p in points if p.chosen), None)
    alt = f"{name}: attention error against {unit} of {len(points)} candidates."
    if chosen is not None:
        alt += f" Chosen: {chosen.label}, error {number(chosen.error)}, {number(chosen.time)}."
    limit = finite(selection.budget.get("attention_rel_l2"))
    picture = plots.pareto(points, unit, limit, _safe(alt))
    return [Plot("What was tried", picture)]


def _by_head(site: SiteReport) -> list[Plot]:
    errors = [finite(error) for error in site.by_head.get("attention_rel_l2", ())]
    if not errors:
        return []
    said = ", ".join(number(e) for e in errors[:16])
    alt = f"{site.name}: attention error of {len(errors)} heads: {said}"
    heads = [str(i) for i in range(len(errors))]
    return [Plot("By head", plots.bars(errors, heads, "head", "attention error", _safe(alt), mean=True))]


def _by_length(
    name: str, bins: Sequence[LengthBin], metric: str, axis: str, *, share: bool = False
) -> list[Plot]:
    values = [finite(length_bin.metrics.get(metric)) for length_bin in bins]
    if share:
        values = [None if v is None else 1 - v for v in values]
    if len(bins) < 2 or all(v is None for v in values):
        return []  # one length says what the mean says
    spans = [
        str(length_bin.low)
        if length_bin.low == length_bin.high
        else f"{length_bin.low}–{length_bin.high}"
        for length_bin in bins
    ]
    names = [f"{s}\nn = {number(length_bin.examples)}" for s, length_bin in zip(spans, bins, strict=True)]
    said = [f"{s}: {number(v)}" for s, v in zip(spans, values, strict=True)]
    alt = f"{name}: {axis} by number of active tokens; {', '.join(said)}"
    picture = plots.bars(values, names, "active tokens", axis, _safe(alt), percent=share)
    return [Plot("By length", picture)]


def _model_lengths(report: Report) -> list[Plot]:
    bins = report.by_length
    changed = _by_length("Model", bins, "prediction_agreement", "predictions changed", share=True)
    divergence = _by_length("Model", bins, "logit_kl", "logit KL")
    captions = ("Predictions changed, by length", "Logit KL, by length")
    found = ((captions[0], changed), (captions[1], divergence))
    return [Plot(caption, plot.picture) for caption, drawn in found for plot in drawn]


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


def _trail_facts(selection: Trail) -> list[tuple[str, str]]:
    shapes = [_shape_text("x".join(map(str, shape))) for shape in selection.shapes]
    seconds = finite(selection.seconds)
    return _known(
        [
            ("objective", selection.objective or ""),
            ("budget", _budget_text(selection.budget)),
            ("examples", number(selection.examples)),
            ("shapes, batch × tokens", ", ".join(shapes)),
            ("took", "" if seconds is None else f"{number(seconds)} s"),
        ]
    )


def _budget_text(budget: Numbers, between: str = ", ") -> str:
    return between.join(
        f"{key} {'≥' if key in METRIC and METRIC[key].bound == 'min' else '≤'} {_plain(limit)}"
        for key, limit in budget.items() if limit is not None
    )  # fmt: skip


def _rounds(selection: Trail) -> Grid | None:
    memory = selection.objective == "memory"
    rows = []
    for index, entry in enumerate(selection.rounds, 1):
        choice = Counter(entry.choice.values())
        measured = [f"{key} {_plain(v)}" for key, v in entry.measured.items() if v is not None]
        rows.append(
            [
                Cell(str(index)),
                Cell(_budget_text(entry.budget, "\n")),
                Cell("\n".join(f"{n} × {label}" for label, n in choice.items())),
                Cell(number(entry.predicted_mib if memory else entry.predicted_ms)),
                Cell("\n".join(measured)),
                Cell(entry.verdict, tone=TONES.get(entry.verdict, "bad" if entry.verdict else "")),
            ]
        )
    unit = "MiB" if memory else "ms"
    columns = [("round", False), ("budget", False), ("choice", False), (f"predicted {unit}", True),
               ("whole model measured", False), ("verdict", False)]  # fmt: skip
    return Grid("Rounds", columns, rows, marked=len(rows) - 1) if rows else None


def _candidates(selection: Trail) -> list[tuple[str, str, Grid]]:
    found = []
    for site in selection.sites:
        items = site.candidates
        if not items:
            continue
        shapes = _shapes(site)
        alone = list(dict.fromkeys(key for candidate in items for key in candidate.alone))
        memory = selection.objective == "memory" or any(
            candidate.memory_mib is not None for candidate in items
        )
        columns = [("candidate", False), ("verdict", False), ("attention error", True),
                   ("output error", True)]  # fmt: skip
        columns += [(f"{_label(key)}, alone", True) for key in alone]
        columns += [(f"ms at {_shape_text(shape)}", True) for shape in shapes]
        columns += [("MiB", True)] if memory else []
        rows: list[list[Cell]] = []
        for candidate in items:
            cells = [
                Cell(
                    candidate.label,
                    "" if candidate.label.startswith(candidate.operator) else candidate.operator,
                ),
                Cell(candidate.verdict, tone="good" if candidate.chosen else ""),
                Cell(number(candidate.attention_rel_l2)),
                Cell(number(candidate.output_rel_l2)),
            ]
            cells += [Cell(metric_text(key, candidate.alone.get(key))) for key in alone]
            for shape in shapes:
                time, its = (
                    _positive(ms.get(shape)) for ms in (candidate.latency_ms, candidate.teacher_ms)
                )
                ratio = "" if time is None or its is None else _times_text(its / time)
                cells.append(Cell(number(time), ratio))
            cells += [Cell(number(candidate.memory_mib))] if memory else []
            rows.append(cells)
        marked = max((i for i, candidate in enumerate(items) if candidate.chosen), default=None)
        chosen = "nothing" if marked is None else items[marked].label
        summary = f"{len(items)} candidate{'' if len(items) == 1 else 's'}, chosen: {chosen}"
        note = "Below each time: how many times as fast as the teacher." if shapes else ""
        grid = Grid(f"Candidates of {site.name}", columns, rows, marked, note)
        found.append((site.name, summary, grid))
    return found


def _shapes(trail: TriedSite) -> list[str]:
    """Keys of latency_ms, smallest first."""
    keys = dict.fromkeys(key for candidate in trail.candidates for key in candidate.latency_ms)
    return sorted(keys, key=lambda key: (_area(key), key))


def _largest_shape(trail: TriedSite) -> str:
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


def _gate(gate: GateReport) -> Grid | None:
    rows = [
        [
            Cell(check.metric, check.scope),
            Cell("not measured" if check.value is None else metric_text(check.metric, check.value)),
            Cell(_limit_text(check)),
            Cell(check.verdict, tone=TONES[check.verdict]),
            Cell(check.message),
        ]
        for check in gate.checks
    ]
    columns = [("metric", False), ("value", True), ("limit", False), ("verdict", False), ("", False)]
    return _without_empty_last(Grid("Gate checks", columns, rows))


def _without_empty_last(grid: Grid) -> Grid | None:
    """Without its last column where that says nothing; None without rows."""
    if not any(row[-1].text for row in grid.rows):
        grid = replace(grid, columns=grid.columns[:-1], rows=[row[:-1] for row in grid.rows])
    return grid if grid.rows else None


def _limit_text(check: Check) -> str:
    if check.bound is not None:
        shown = _plain(check.limit)
        if is_share(check.metric) and check.limit is not None:
            shown = f"{_plain(100 * check.limit)}%"
        confident = ", with confidence" if check.confidence else ""
        return f"{'≤' if check.bound == 'max' else '≥'} {shown}{confident}"
    if check.baseline is not None:
        most = "" if check.allowed is None else f", {_plain(check.allowed * 100)}% worse allowed"
        return f"baseline {metric_text(check.metric, check.baseline)}{most}"
    return "plausible" if check.kind == "plausibility" else "-"


def _numbers(model: ModelReport) -> Grid | None:
    rows = [
        [
            Cell(_label(key)),
            Cell(metric_text(key, value) + ("×" if key.startswith("speedup") else "")),
            Cell(_ends(model, key)),
        ]
        for key, value in model.values.items()
        if key != "fingerprint" and not isinstance(value, Mapping | list | tuple)
    ]
    level = f"{model.confidence_level:.0%} interval"
    columns = [("whole model", False), ("value", True), (level, True)]
    return _without_empty_last(Grid("Everything measured on the whole model", columns, rows))


def _provenance(report: Report) -> list[tuple[str, str]]:
    model, prints = report.model, report.fingerprints
    splits = [f"{key} {number(value)}" for key, value in report.splits.items()]
    return _known(
        [
            ("model", model.source or ""),
            ("model fingerprint", _text(prints.get("teacher") or model.values.get("fingerprint"))),
            ("data", model.data or ""),
            ("data fingerprint", _text(prints.get("data"))),
            ("splits, examples", ", ".join(splits)),
            ("capture", model.capture or ""),
            ("report format", number(report.format_version)),
        ]
    )


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


def _positive(value: float | None) -> float | None:
    result = finite(value)
    return result if result is not None and result > 0 else None


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


def _label(key: str) -> str:
    return METRIC[key].name if key in METRIC else MODEL_LABELS.get(key) or key.replace("_", " ")


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
