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
from dataclasses import replace
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup, escape

from asapc.metrics import METRIC
from asapc.report.advice import (
    DEFAULT_LIMITS,
    LOSSLESS_COMMAND,
    LOSSLESS_PYTHON,
    LOSSLESS_RECIPE,
    Decision,
    Judgement,
    advise,
    decide,
    figures,
    lossless_instead,
    recipe_of,
)
from asapc.report.document import (
    Check,
    GateReport,
    ModelReport,
    Numbers,
    Report,
    Trail,
    TriedSite,
    finite,
)
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
    TONES,
    Cell,
    Row,
    Table,
    audit_tables,
    exported_tables,
    metric_text,
    number,
    refreshed_tables,
    refused_table,
)

FAILURES = 6  # named in the headline; all of them are under Gate
ADVICE = 5  # on layers, of the most
CHECKS = 12  # of comparisons that passed: more are folded
OUTCOMES = {
    "ship": "good", "lossless": "good", "teacher": "odd", "look": "odd", "measure": "odd",
}  # fmt: skip


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


def page(report: Report) -> dict[str, Any]:
    """What the template lays out, part by part in order; a part that is empty is left out there."""
    model, gate = report.model, report.gate
    trail = report.selection or Trail()
    decision = decide(report)
    judged = decision.judgement
    advice = advise(report)
    of_layers = [each for each in advice if each.site is not None]
    others = [each for each in advice if each.site is None]
    checks, kept = _gate(judged)
    return {
        "source": model.source or "a model",
        "headline": _headline(report, decision),
        "warnings": [w for w in (*(w.text for w in report.warnings), report.chosen_elsewhere) if w],
        "tiles": _tiles(report),
        "times": _times(model),
        "basis": _basis(report),
        "advice": [each.sentence for each in (*of_layers[:ADVICE], *others)],
        "more_advice": max(0, len(of_layers) - ADVICE),
        "advice_recipe": recipe_of(of_layers[:ADVICE]),
        "layers": layers_of(report),
        "lengths": _model_lengths(report),
        "trail": _trail_facts(trail),
        "rounds": _rounds(trail),
        # (site, summary, table)
        "candidates": [_candidates(site, trail) for site in trail.sites if site.candidates],
        "audit": audit_tables(report),
        "refresh": refreshed_tables(report),
        "onnx": exported_tables(report),
        "gate": checks,
        "kept": kept,
        "defaults": _default_checks(judged),
        "default_limits": _gate_file(judged),
        "baseline": _facts(gate.baseline.to_json(), ("skipped",)) if gate.baseline is not None else [],
        "left_alone": refused_table(report.refused),
        "numbers": _numbers(report),
        "provenance": _provenance(report),
        "environment": _facts(report.environment),
    }


# The headline


def _headline(report: Report, decision: Decision) -> dict[str, Any]:
    """What to do, and what that rests on.

    word: the verdict.  basis: which limits, in one sentence.  how: (what it is, text to copy) each.
    failures: (class, message) each.
    """
    judged = decision.judgement
    gate = judged.gate
    lossless = decision.lossless or lossless_instead(report)
    own = report.gate.verdict
    tone = OUTCOMES[decision.action] if gate.verdict is not None else ""
    if own is not None and (own != "ACCEPT" or not judged.default):
        tone = TONES[own]
    # What the reason says already is not said again.
    failed = [] if len(gate.failures) == 1 else gate.failures
    return {
        "word": own or "NO GATE",
        "tone": tone,
        "sentence": decision.sentence,
        "because": decision.because,
        "basis": _limits_sentence(judged),
        "lossless": lossless.sentence if lossless is not None else "",
        "how": [] if lossless is None else [
            ("from the same artefact, at once", LOSSLESS_PYTHON),
            ("in a recipe, lossless.yaml", LOSSLESS_RECIPE),
            ("compiled with it", LOSSLESS_COMMAND),
        ],
        "failures": [(_outcome(check, judged), _check_text(check)) for check in failed[:FAILURES]],
        "more_failures": max(0, len(failed) - FAILURES),
    }  # fmt: skip


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


def _tiles(report: Report) -> list[tuple[str, str, list[str]]]:
    """The three figures that a decision rests on: (label, value, notes) each."""
    model, figure = report.model, figures(report)
    earlier = _baseline_of(report.gate)
    tiles = []
    if figure.speedup is not None:
        notes = earlier("speedup")
        if figure.speedup_lossless is not None:
            notes = [f"{times_text(figure.speedup_lossless)} by lossless kernels alone", *notes]
        tiles.append(("Speed-up, whole model", times_text(figure.speedup), notes))
    before, after = (finite(model.metric(f"accuracy_{who}")) for who in ("teacher", "compiled"))
    accuracy = "" if before is None or after is None else f"{before:.2%} → {after:.2%}"
    drop = _interval(model, "accuracy_drop", " of the drop")
    if figure.agreement is not None:
        notes = [*_interval(model, "prediction_agreement"), *earlier("prediction_agreement")]
        notes += [f"accuracy {accuracy}", *drop] if accuracy else []
        tiles.append(("Predictions kept", f"{figure.agreement:.2%}", notes))
    elif accuracy:
        notes = drop or _interval(model, "accuracy_compiled")
        tiles.append(("Accuracy, teacher → compiled", accuracy, notes))
    if figure.worst_error is not None and figure.worst_site is not None:
        where = "in every layer" if figure.worst_error == 0 else f"in {short(figure.worst_site, 40)}"
        notes = [where, *earlier("attention_rel_l2", figure.worst_site)]
        tiles.append(("Attention error, worst layer", number(figure.worst_error), notes))
    elif (output := finite(model.metric("output_rel_l2"))) is not None:
        notes = [*_interval(model, "output_rel_l2"), *earlier("output_rel_l2")]
        tiles.append(("Output error, relative", number(output), notes))
    return tiles


def _baseline_of(gate: GateReport) -> Callable[..., list[str]]:
    """What tells the difference to the baseline of a metric, in a line; in none where it has none."""
    checks = {(c.metric, c.scope): c for c in gate.checks if c.kind == "baseline"}

    def change(metric: str, scope: str = "model") -> list[str]:
        check = checks.get((metric, scope))
        if check is None or check.value is None or check.baseline is None:
            return []
        before = metric_text(metric, check.baseline)
        difference = change_text(metric, check.value - check.baseline)
        return [f"{difference} against the baseline, {before}"]

    return change


def _interval(model: ModelReport, metric: str, of: str = "") -> list[str]:
    ends = ends_text(model, metric)
    return [f"{model.confidence_level:.0%} interval{of} {ends}"] if ends else []


def _times(model: ModelReport) -> list[tuple[str, str, float, str]]:
    """(kind, time, its share of the longest in per cent, speed-up) each."""
    kinds = ("teacher", "lossless", "compiled")
    times = {k: t for k in kinds if (t := positive(model.metric(f"latency_{k}_ms"))) is not None}
    teacher = times.get("teacher")
    return [
        (kind, f"{number(time)} ms", 100 * time / max(times.values()),
         "" if teacher is None or kind == "teacher" else times_text(teacher / time))
        for kind, time in times.items()
    ] if len(times) > 1 else []  # fmt: skip


def _basis(report: Report) -> str:
    """What the headline rests on, in one line."""
    examples, batch = (report.model.values.get(key) for key in ("examples", "batch"))
    device = report.environment.get("device")
    parts = [
        "" if examples is None else f"{number(examples)} examples neither fitted nor selected on",
        "" if batch is None else f"times for batches of {number(batch)}",
        f"on {device}" if device else "",
    ]
    return ", ".join(filter(None, parts))


def _model_lengths(report: Report) -> list[tuple[str, Markup]]:
    """(caption, picture) each."""
    bins = report.by_length
    changed = by_length("Model", bins, "prediction_agreement", "predictions changed", share=True)
    divergence = by_length("Model", bins, "logit_kl", "logit KL")
    return [
        *(("Predictions changed, by length", picture) for picture in changed),
        *(("Logit KL, by length", picture) for picture in divergence),
    ]


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


def _rounds(selection: Trail) -> Table | None:
    memory = selection.objective == "memory"
    rows = []
    for index, entry in enumerate(selection.rounds, 1):
        choice = Counter(entry.choice.values())
        measured = [f"{key} {plain(v)}" for key, v in entry.measured.items() if v is not None]
        rows.append((
            str(index),
            _budget_text(entry.budget, "\n"),
            "\n".join(f"{n} × {label}" for label, n in choice.items()),
            number(entry.predicted_mib if memory else entry.predicted_ms),
            "\n".join(measured),
            Cell(entry.verdict, tone=TONES.get(entry.verdict, "bad" if entry.verdict else "")),
        ))  # fmt: skip
    predicted = f"predicted {'MiB' if memory else 'ms'}|"
    columns = ("round", "budget", "choice", predicted, "whole model measured", "verdict")
    return Table("Rounds", columns, tuple(rows), marked=len(rows) - 1) if rows else None


def _candidates(site: TriedSite, selection: Trail) -> tuple[str, str, Table]:
    """Name of the site, what was chosen in a line, and everything that was tried there."""
    tried, shapes = site.candidates, shapes_of(site)
    alone = list(dict.fromkeys(key for candidate in tried for key in candidate.alone))
    memory = selection.objective == "memory" or any(c.memory_mib is not None for c in tried)
    rows: list[Row] = []
    for candidate in tried:
        named = candidate.label.startswith(candidate.operator)
        times = []
        for shape in shapes:
            time, its = (positive(ms.get(shape)) for ms in (candidate.latency_ms, candidate.teacher_ms))
            ratio = "" if time is None or its is None else times_text(its / time)
            times.append(Cell(number(time), ratio))
        rows.append((
            Cell(candidate.label, "" if named else candidate.operator),
            Cell(candidate.verdict, tone="good" if candidate.chosen else ""),
            number(candidate.attention_rel_l2),
            number(candidate.output_rel_l2),
            *(metric_text(key, candidate.alone.get(key)) for key in alone),
            *times,
            *([number(candidate.memory_mib)] if memory else []),
        ))  # fmt: skip
    columns = (
        "candidate", "verdict", "attention error|", "output error|",
        *(f"{label(key)}, alone|" for key in alone),
        *(f"ms at {shape_text(shape)}|" for shape in shapes),
        *(["MiB|"] if memory else []),
    )  # fmt: skip
    marked = max((i for i, candidate in enumerate(tried) if candidate.chosen), default=None)
    chosen = "nothing" if marked is None else tried[marked].label
    summary = f"{len(tried)} candidate{'' if len(tried) == 1 else 's'}, chosen: {chosen}"
    note = "Below each time: how many times as fast as the teacher." if shapes else ""
    return site.name, summary, Table(f"Candidates of {site.name}", columns, tuple(rows), marked, note)


# Gate, numbers, provenance


def _gate(judged: Judgement) -> tuple[Table | None, Table | None]:
    """The checks, and those that passed against a baseline where they are many: it has every metric of
    every layer."""
    checks = [c for c in judged.gate.checks if not judged.default or c.kind == "baseline"]
    passed = [check for check in checks if check.kind == "baseline" and check.passed]
    folded = passed if len(passed) > CHECKS else []
    shown = [check for check in checks if check not in folded]
    kept = _checks(f"{len(folded)} comparisons with the baseline passed", folded)
    return _checks("Gate checks", shown), kept


def _checks(name: str, checks: Sequence[Check]) -> Table | None:
    rows = tuple(
        (Cell(c.metric, c.scope), _value_text(c), _limit_text(c), c.verdict, c.message) for c in checks
    )
    columns = ("metric", "value|", "limit", "verdict", "")
    return _without_empty_last(Table(name, columns, rows, stacked=True))


def _default_checks(judged: Judgement) -> Table | None:
    """Not in the words of a verdict, which only a gate file gives."""
    sources = {limit.gate.metric: limit.source for limit in judged.limits}
    words = {"ACCEPT": "kept", "REGRESSION": "not kept", "ANOMALOUS": "cannot be judged"}
    rows = tuple(
        (
            Cell(check.metric, check.scope),
            _value_text(check),
            Cell(_limit_text(check), sources.get(check.metric, "") if check.kind == "limit" else ""),
            Cell(words[check.verdict], tone=TONES[check.verdict]),
            "" if check.passed else check.message,
        )
        for check in judged.gate.checks if judged.default and check.kind != "baseline"
    )  # fmt: skip
    columns = ("metric", "value|", "default limit", "result", "")
    return _without_empty_last(Table("Default limits", columns, rows, stacked=True))


def _value_text(check: Check) -> str:
    return "not measured" if check.value is None else metric_text(check.metric, check.value)


def _gate_file(judged: Judgement) -> str:
    """The default limits as a gate file; empty where there are none."""
    limits = (limit.gate for limit in judged.limits)
    return "\n".join(f"{gate.metric}: {{{gate.bound}: {gate.limit:g}}}" for gate in limits)


def _without_empty_last(table: Table) -> Table | None:
    """Without its last column where that says nothing; None without rows."""
    if not any(row[-1] for row in table.rows):
        rows = tuple(row[:-1] for row in table.rows)
        table = replace(table, columns=table.columns[:-1], rows=rows)
    return table if table.rows else None


def _limit_text(check: Check) -> str:
    if check.bound is not None:
        shown = "" if check.limit is None else limit_text(check.metric, check.limit)
        confident = ", with confidence" if check.confidence else ""
        return f"{'≤' if check.bound == 'max' else '≥'} {shown}{confident}"
    if check.baseline is not None:
        most = "" if check.allowed is None else f", {plain(check.allowed * 100)}% worse allowed"
        return f"baseline {metric_text(check.metric, check.baseline)}{most}"
    return "plausible" if check.kind == "plausibility" else "-"


def _numbers(report: Report) -> Table | None:
    model, checks = report.model, report.gate.checks
    earlier = {c.metric: c.baseline for c in checks if c.kind == "baseline" and c.scope == "model"}
    compared = any(value is not None for value in earlier.values())
    rows: list[Row] = []
    for key, value in model.values.items():
        if key == "fingerprint" or isinstance(value, Mapping | list | tuple):
            continue
        unit = "×" if key.startswith("speedup") else ""
        before = earlier.get(key)
        was = [] if not compared else ["" if before is None else metric_text(key, before) + unit]
        rows.append((label(key), metric_text(key, value) + unit, *was, ends_text(model, key)))
    baseline = ["baseline|"] if compared else []
    columns = ("whole model", "value|", *baseline, f"{model.confidence_level:.0%} interval|")
    return _without_empty_last(Table("Everything measured on the whole model", columns, tuple(rows)))


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


def _whole(text: str) -> Markup:
    """Numbers stay in one line: a browser may break them behind the sign of their exponent."""
    return Markup(re.sub(r"[0-9.]+e-[0-9]+", r"<b>\g<0></b>", str(escape(cleaned(text)))))


def _breakable(text: str) -> Markup:
    """A long dotted name in large letters breaks after its dots."""
    return Markup(escape(cleaned(text)).replace(".", Markup(".<wbr>")))


def _cleaned(value: Any) -> Any:
    """Text as it is shown; what is markup is ours."""
    return cleaned(value) if isinstance(value, str) and not isinstance(value, Markup) else value
