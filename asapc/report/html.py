"""A report as one self-contained page: no network, no script, light and dark, phone and paper.

`page` turns the report into what the template lays out: every value already formatted, every name
cleaned; the template escapes. Every part of a report is optional here. What to do comes first
(asapc.report.advice), then the layers, the worst one first (asapc.report.layers).

jinja2 and matplotlib are in the extra `report`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup, escape

from asapc.metrics import METRIC
from asapc.report.advice import (
    DEFAULT_LIMITS,
    Decision,
    Judgement,
    advise,
    decide,
    figures,
    lossless_instead,
    recipe_of,
)
from asapc.report.document import Check, GateReport, ModelReport, Numbers, Report, Trail, finite
from asapc.report.layers import by_length, known, layers_of, shape_text, shapes_of
from asapc.report.shown import (
    change_text,
    cleaned,
    ends_text,
    label,
    limit_text,
    plain,
    positive,
    short,
    text_of,
    times_text,
)
from asapc.report.tables import (
    Table,
    audit_tables,
    exported_tables,
    metric_text,
    number,
    refreshed_tables,
    refused_table,
)
from asapc.report.views import TONES, Bar, Cell, Grid, Headline, Layers, Plot, Tile

FAILURES = 6  # named in the headline; all of them are under Gate
ADVICE = 5  # on layers, of the most
CHECKS = 12  # of comparisons that passed: more are folded
OUTCOMES = {
    "ship": "good", "lossless": "good", "teacher": "odd", "look": "odd", "measure": "odd",
}  # fmt: skip


@dataclass
class Page:
    """Everything on the page, in order."""

    source: str
    headline: Headline
    warnings: list[str] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    times: list[Bar] = field(default_factory=list)
    basis: str = ""
    advice: list[str] = field(default_factory=list)
    more_advice: int = 0
    advice_recipe: str = ""
    layers: Layers | None = None
    lengths: list[Plot] = field(default_factory=list)
    trail: list[tuple[str, str]] = field(default_factory=list)
    rounds: Grid | None = None
    candidates: list[tuple[str, str, Grid]] = field(default_factory=list)  # site, summary, table
    audit: list[Grid] = field(default_factory=list)
    refresh: list[Grid] = field(default_factory=list)
    onnx: list[Grid] = field(default_factory=list)
    gate: Grid | None = None
    kept: Grid | None = None  # comparisons with the baseline that passed, where they are many
    defaults: Grid | None = None
    default_limits: str = ""  # the same as a gate file
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
    environment.filters["breakable"] = _breakable
    environment.filters["whole"] = _whole
    template = files("asapc.report").joinpath("template", "report.html.j2").read_text("utf-8")
    return environment.from_string(template).render(page=page(report))


def page(report: Report) -> Page:
    """What the template lays out."""
    model, gate = report.model, report.gate
    trail = report.selection or Trail()
    decision = decide(report)
    judged = decision.judgement
    advice = advise(report)
    of_layers = [each for each in advice if each.site is not None]
    others = [each for each in advice if each.site is None]
    checks, kept = _gate(judged)
    return Page(
        source=model.source or "a model",
        headline=_headline(report, decision),
        warnings=[text for text in (*(w.text for w in report.warnings), report.chosen_elsewhere) if text],
        tiles=_tiles(report),
        times=_times(model),
        basis=_basis(report),
        advice=[each.sentence for each in (*of_layers[:ADVICE], *others)],
        more_advice=max(0, len(of_layers) - ADVICE),
        advice_recipe=recipe_of(of_layers[:ADVICE]),
        layers=layers_of(report),
        lengths=_model_lengths(report),
        trail=_trail_facts(trail),
        rounds=_rounds(trail),
        candidates=_candidates(trail),
        audit=[_grid(t) for t in audit_tables(report)],
        refresh=[_grid(t) for t in refreshed_tables(report)],
        onnx=[_grid(t) for t in exported_tables(report)],
        gate=checks,
        kept=kept,
        defaults=_default_checks(judged),
        default_limits=_gate_file(judged),
        baseline=_facts(gate.baseline.to_json(), ("skipped",)) if gate.baseline is not None else [],
        left_alone=[_grid(t) for t in refused_table(report.refused)],
        numbers=_numbers(report),
        provenance=_provenance(report),
        environment=_facts(report.environment),
    )


# The headline


def _headline(report: Report, decision: Decision) -> Headline:
    judged = decision.judgement
    gate = judged.gate
    lossless = decision.lossless or lossless_instead(report)
    own = report.gate.verdict
    tone = OUTCOMES[decision.action] if gate.verdict is not None else ""
    if own is not None and (own != "ACCEPT" or not judged.default):
        tone = TONES[own]
    failed = gate.failures
    # What the reason says already is not said again.
    shown = [] if len(failed) == 1 else failed
    return Headline(
        word=own or "NO GATE",
        tone=tone,
        sentence=decision.sentence,
        because=decision.because,
        basis=_limits_sentence(judged),
        lossless=lossless.sentence if lossless is not None else "",
        how=[] if lossless is None else [
            ("from the same artefact, at once", lossless.python),
            ("in a recipe, lossless.yaml", lossless.recipe),
            ("compiled with it", lossless.command),
        ],
        failures=[(_outcome(check, judged), _check_text(check)) for check in shown[:FAILURES]],
        more_failures=max(0, len(shown) - FAILURES),
    )  # fmt: skip


def _limits_sentence(judged: Judgement) -> str:
    """Which limits the decision rests on, and how many of them are kept."""
    gate, count = judged.gate, len(judged.gate.checks)
    limits = f"{count} check{'' if count == 1 else 's'}"
    if judged.default:
        if gate.verdict is None:
            return f"{_sentence(DEFAULT_LIMITS)}, and nothing was measured to hold against them."
        compared = [check for check in gate.checks if check.kind == "baseline"]
        worse = sum(not check.passed for check in compared)
        told = f"{worse or 'None'} of {len(compared)} comparisons with the baseline failed. "
        asked = [check for check in gate.checks if check.kind != "baseline"]
        kept = f"{sum(check.passed for check in asked)} of {len(asked)} kept"
        advice = f"{_sentence(DEFAULT_LIMITS)}: {kept}. This is advice and changes no exit code."
        return told + advice if compared else advice
    if gate.verdict == "ACCEPT":
        return f"All {limits} passed." if count != 1 else "The check passed."
    if gate.verdict == "ANOMALOUS":
        return "A measurement cannot be trusted, so nothing is accepted."
    return f"{len(gate.failures)} of {limits} failed."


def _outcome(check: Check, judged: Judgement) -> str:
    """Its class, which only a gate gives."""
    return "default limit" if judged.default and check.kind != "baseline" else check.verdict


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _check_text(check: Check) -> str:
    return check.message or f"{check.metric} of {check.scope}: {number(check.value)}"


def _tiles(report: Report) -> list[Tile]:
    """The three figures that a decision rests on."""
    model, seen, tiles = report.model, figures(report), list[Tile]()
    earlier = _baseline_of(report.gate)
    if seen.speedup is not None:
        notes = earlier("speedup")
        if seen.speedup_lossless is not None:
            notes = [f"{times_text(seen.speedup_lossless)} by lossless kernels alone", *notes]
        tiles.append(Tile("Speed-up, whole model", times_text(seen.speedup), notes))
    before, after = (finite(model.metric(f"accuracy_{who}")) for who in ("teacher", "compiled"))
    if seen.agreement is not None:
        notes = [*_interval(model, "prediction_agreement"), *earlier("prediction_agreement")]
        if before is not None and after is not None:
            notes.append(f"accuracy {before:.2%} → {after:.2%}")
            notes += _interval(model, "accuracy_drop", " of the drop")
        tiles.append(Tile("Predictions kept", f"{seen.agreement:.2%}", notes))
    elif before is not None and after is not None:
        notes = _interval(model, "accuracy_drop", " of the drop") or _interval(model, "accuracy_compiled")
        tiles.append(Tile("Accuracy, teacher → compiled", f"{before:.2%} → {after:.2%}", notes))
    if seen.worst_error is not None and seen.worst_site is not None:
        where = "in every layer" if seen.worst_error == 0 else f"in {short(seen.worst_site, 40)}"
        notes = [where, *earlier("attention_rel_l2", seen.worst_site)]
        tiles.append(Tile("Attention error, worst layer", number(seen.worst_error), notes))
    elif (output := finite(model.metric("output_rel_l2"))) is not None:
        notes = [*_interval(model, "output_rel_l2"), *earlier("output_rel_l2")]
        tiles.append(Tile("Output error, relative", number(output), notes))
    return tiles


def _baseline_of(gate: GateReport) -> Callable[..., list[str]]:
    """What tells the difference to the baseline of a metric, in a line; in none where it has none."""
    checks = {(c.metric, c.scope): c for c in gate.checks if c.kind == "baseline"}

    def told(metric: str, scope: str = "model") -> list[str]:
        check = checks.get((metric, scope))
        if check is None or check.value is None or check.baseline is None:
            return []
        before = metric_text(metric, check.baseline)
        change = change_text(metric, check.value - check.baseline)
        return [f"{change} against the baseline, {before}"]

    return told


def _interval(model: ModelReport, metric: str, of: str = "") -> list[str]:
    ends = ends_text(model, metric)
    return [f"{model.confidence_level:.0%} interval{of} {ends}"] if ends else []


def _times(model: ModelReport) -> list[Bar]:
    kinds = ("teacher", "lossless", "compiled")
    times = {k: t for k in kinds if (t := positive(model.metric(f"latency_{k}_ms"))) is not None}
    longest = max(times.values(), default=1.0)
    teacher = times.get("teacher")
    return [
        Bar(kind, f"{number(time)} ms", 100 * time / longest,
            "" if teacher is None or kind == "teacher" else times_text(teacher / time))
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


# Lengths


def _model_lengths(report: Report) -> list[Plot]:
    bins = report.by_length
    changed = by_length("Model", bins, "prediction_agreement", "predictions changed", share=True)
    divergence = by_length("Model", bins, "logit_kl", "logit KL")
    captions = ("Predictions changed, by length", "Logit KL, by length")
    found = ((captions[0], changed), (captions[1], divergence))
    return [Plot(caption, plot.picture) for caption, drawn in found for plot in drawn]


# The decision trail


def _trail_facts(selection: Trail) -> list[tuple[str, str]]:
    shapes = [shape_text("x".join(map(str, shape))) for shape in selection.shapes]
    seconds = finite(selection.seconds)
    return known(
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
        f"{key} {'≥' if key in METRIC and METRIC[key].bound == 'min' else '≤'} {plain(limit)}"
        for key, limit in budget.items() if limit is not None
    )  # fmt: skip


def _rounds(selection: Trail) -> Grid | None:
    memory = selection.objective == "memory"
    rows = []
    for index, entry in enumerate(selection.rounds, 1):
        choice = Counter(entry.choice.values())
        measured = [f"{key} {plain(v)}" for key, v in entry.measured.items() if v is not None]
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
        shapes = shapes_of(site)
        alone = list(dict.fromkeys(key for candidate in items for key in candidate.alone))
        memory = selection.objective == "memory" or any(
            candidate.memory_mib is not None for candidate in items
        )
        columns = [("candidate", False), ("verdict", False), ("attention error", True),
                   ("output error", True)]  # fmt: skip
        columns += [(f"{label(key)}, alone", True) for key in alone]
        columns += [(f"ms at {shape_text(shape)}", True) for shape in shapes]
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
                    positive(ms.get(shape)) for ms in (candidate.latency_ms, candidate.teacher_ms)
                )
                ratio = "" if time is None or its is None else times_text(its / time)
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


# Gate, numbers, provenance


def _gate(judged: Judgement) -> tuple[Grid | None, Grid | None]:
    """The checks, and those that passed against a baseline where they are many: it has every metric of
    every layer."""
    checks = [c for c in judged.gate.checks if not judged.default or c.kind == "baseline"]
    passed = [check for check in checks if check.kind == "baseline" and check.passed]
    folded = passed if len(passed) > CHECKS else []
    shown = [check for check in checks if check not in folded]
    kept = _checks(f"{len(folded)} comparisons with the baseline passed", folded)
    return _checks("Gate checks", shown), kept


def _checks(name: str, checks: Sequence[Check]) -> Grid | None:
    rows = [
        [
            Cell(check.metric, check.scope),
            Cell(_value_text(check)),
            Cell(_limit_text(check)),
            Cell(check.verdict, tone=TONES[check.verdict]),
            Cell(check.message),
        ]
        for check in checks
    ]
    columns = [("metric", False), ("value", True), ("limit", False), ("verdict", False), ("", False)]
    return _without_empty_last(Grid(name, columns, rows, stacked=True))


def _default_checks(judged: Judgement) -> Grid | None:
    """Not in the words of a verdict, which only a gate file gives."""
    sources = {limit.gate.metric: limit.source for limit in judged.limits}
    words = {"ACCEPT": "kept", "REGRESSION": "not kept", "ANOMALOUS": "cannot be judged"}
    rows = [
        [
            Cell(check.metric, check.scope),
            Cell(_value_text(check)),
            Cell(_limit_text(check), sources.get(check.metric, "") if check.kind == "limit" else ""),
            Cell(words[check.verdict], tone=TONES[check.verdict]),
            Cell("" if check.passed else check.message),
        ]
        for check in judged.gate.checks if judged.default and check.kind != "baseline"
    ]  # fmt: skip
    columns = [("metric", False), ("value", True), ("default limit", False), ("result", False),
               ("", False)]  # fmt: skip
    return _without_empty_last(Grid("Default limits", columns, rows, stacked=True))


def _value_text(check: Check) -> str:
    return "not measured" if check.value is None else metric_text(check.metric, check.value)


def _gate_file(judged: Judgement) -> str:
    """The default limits as a gate file; empty where there are none."""
    limits = (limit.gate for limit in judged.limits)
    return "\n".join(f"{gate.metric}: {{{gate.bound}: {gate.limit:g}}}" for gate in limits)


def _without_empty_last(grid: Grid) -> Grid | None:
    """Without its last column where that says nothing; None without rows."""
    if not any(row[-1].text for row in grid.rows):
        grid = replace(grid, columns=grid.columns[:-1], rows=[row[:-1] for row in grid.rows])
    return grid if grid.rows else None


def _limit_text(check: Check) -> str:
    if check.bound is not None:
        shown = "" if check.limit is None else limit_text(check.metric, check.limit)
        confident = ", with confidence" if check.confidence else ""
        return f"{'≤' if check.bound == 'max' else '≥'} {shown}{confident}"
    if check.baseline is not None:
        most = "" if check.allowed is None else f", {plain(check.allowed * 100)}% worse allowed"
        return f"baseline {metric_text(check.metric, check.baseline)}{most}"
    return "plausible" if check.kind == "plausibility" else "-"


def _numbers(report: Report) -> Grid | None:
    model = report.model
    checks = report.gate.checks
    earlier = {c.metric: c.baseline for c in checks if c.kind == "baseline" and c.scope == "model"}
    compared = any(value is not None for value in earlier.values())
    rows = []
    for key, value in model.values.items():
        if key == "fingerprint" or isinstance(value, Mapping | list | tuple):
            continue
        unit = "×" if key.startswith("speedup") else ""
        cells = [Cell(label(key)), Cell(metric_text(key, value) + unit)]
        if compared:
            before = earlier.get(key)
            cells.append(Cell("" if before is None else metric_text(key, before) + unit))
        rows.append([*cells, Cell(ends_text(model, key))])
    level = f"{model.confidence_level:.0%} interval"
    columns = [("whole model", False), ("value", True)]
    columns += [("baseline", True)] if compared else []
    columns.append((level, True))
    return _without_empty_last(Grid("Everything measured on the whole model", columns, rows))


def _provenance(report: Report) -> list[tuple[str, str]]:
    model, prints = report.model, report.fingerprints
    splits = [f"{key} {number(value)}" for key, value in report.splits.items()]
    return known(
        [
            ("model", model.source or ""),
            ("model fingerprint", text_of(prints.get("teacher") or model.values.get("fingerprint"))),
            ("data", model.data or ""),
            ("data fingerprint", text_of(prints.get("data"))),
            ("splits, examples", ", ".join(splits)),
            ("capture", model.capture or ""),
            ("report format", number(report.format_version)),
        ]
    )


def _facts(
    values: Mapping[str, Any], without: Sequence[str] = ()
) -> list[tuple[str, str]]:
    return [
        (label(str(key)), plain(value))
        for key, value in values.items()
        if key not in without and value not in (None, "", {}, [])
    ]


def _grid(table: Table) -> Grid:
    rows = [[Cell(text, tone=TONES.get(text, "")) for text in row] for row in table.rows]
    return Grid(table.title, table.headings(), rows)


def _whole(text: str) -> Markup:
    """Numbers stay in one line: a browser may break them behind the sign of their exponent."""
    return Markup(re.sub(r"[0-9.]+e-[0-9]+", r"<b>\g<0></b>", str(escape(cleaned(text)))))


def _breakable(text: str) -> Markup:
    """A long dotted name in large letters breaks after its dots."""
    return Markup(escape(cleaned(text)).replace(".", Markup(".<wbr>")))


def _cleaned(value: Any) -> Any:
    """Text as it is shown; what is markup is ours."""
    return cleaned(value) if isinstance(value, str) and not isinstance(value, Markup) else value
