"""A report as one self-contained page: no network, no script, light and dark, phone and paper.

`page` turns the report into what the template lays out: every value already formatted; the template
cleans and escapes it. Every part of a report is optional here. What to do comes first
(asapc.report.advice), then the layers, the worst one first (asapc.report.layers), then the tables that
the terminal and Markdown have, too (asapc.report.tables).

jinja2 comes with torch; matplotlib, which the page's pictures need, is in the extra `report`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup, escape

from asapc.report.advice import (
    DEFAULT_LIMITS,
    LOSSLESS_COMMAND,
    LOSSLESS_PYTHON,
    LOSSLESS_RECIPE,
    Decision,
    Judgement,
    advise,
    approximated,
    decide,
    lossless_instead,
    recipe_of,
    worst_site,
)
from asapc.report.document import ModelReport, Report, finite
from asapc.report.shown import change_text, cleaned, ends_text, positive, short, times_text
from asapc.report.tables import (
    TONES,
    Table,
    counted,
    limit_text,
    listed,
    metric_text,
    number,
    report_sections,
)

FAILURES = 6  # named in the headline; all of them are under Gate
ADVICE = 5  # on layers, of the most
ROWS = 15  # of a table: longer ones are folded
GOOD = ("ship", "lossless")  # decisions; the others are odd


class Tile(NamedTuple):
    """A figure that a decision rests on, and smaller lines below it."""

    label: str
    value: str
    notes: list[str]


def rendered(template: str, **parts: Any) -> str:
    """A template of ours: whatever is shown in it is cleaned and escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_cleaned, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
        loader=jinja2.PackageLoader("asapc.report", "template"),
    )  # fmt: skip
    environment.filters |= {"breakable": _breakable, "whole": _whole, "tone": TONES.get}
    environment.tests |= {"failing": _failing}
    return environment.get_template(template).render(**parts)


def html(report: Report) -> str:
    """The page, the same bytes for the same report.  Raises ModuleNotFoundError without matplotlib."""
    from asapc.report.plots import style

    with style():
        return rendered("report.html.j2", page=page(report), most=ROWS)


def page(report: Report) -> dict[str, Any]:
    """What the template lays out, part by part in order; a part that is empty is left out there."""
    from asapc.report.figures import model_pictures
    from asapc.report.layers import layers_of

    decision = decide(report)
    advice = advise(report)
    of_layers = [each for each in advice if each.site is not None]
    others = [each for each in advice if each.site is None]
    sections = report_sections(report)
    del sections["Layers"], sections["Warnings"]  # shown above
    return {
        "source": report.model.source or "a model",
        "headline": _headline(report, decision),
        "warnings": [w for w in (*(w.text for w in report.warnings), report.chosen_elsewhere) if w],
        "tiles": tiles(report),
        "times": _times(report.model),
        "basis": _basis(report),
        "advice": [each.sentence for each in (*of_layers[:ADVICE], *others)],
        "more_advice": max(0, len(of_layers) - ADVICE),
        "advice_recipe": recipe_of(of_layers[:ADVICE]),
        "layers": layers_of(report),
        "lengths": model_pictures(report),
        "defaults": _default_limits(decision.judgement),
        "sections": [
            (heading.partition(" ")[0].lower(), heading, tables)
            for heading, tables in sections.items() if tables
        ],
    }  # fmt: skip


def _headline(report: Report, decision: Decision) -> dict[str, Any]:
    """What to do, and what that rests on.

    word: the verdict.  basis: which limits, in one sentence.  how: (what it is, text to copy) each.
    failures: (class, message) each.
    """
    judged, own = decision.judgement, report.gate.verdict
    gate = judged.gate
    lossless = decision.lossless or lossless_instead(report)
    tone = "" if gate.verdict is None else "good" if decision.action in GOOD else "odd"
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
        "failures": [
            ("default limit" if judged.default and check.kind != "baseline" else check.verdict,
             check.message or f"{check.metric} of {check.scope}: {number(check.value)}")
            for check in failed[:FAILURES]
        ],
        "more_failures": max(0, len(failed) - FAILURES),
    }  # fmt: skip


def _limits_sentence(judged: Judgement) -> str:
    """Which limits the decision rests on, and how many of them are kept."""
    gate = judged.gate
    if not judged.default:
        if gate.verdict == "ANOMALOUS":
            return "A measurement cannot be trusted, so nothing is accepted."
        return f"{len(gate.failures) or 'None'} of {counted(len(gate.checks), 'check')} failed."
    default = f"D{DEFAULT_LIMITS[1:]}"
    if gate.verdict is None:
        return f"{default}, and nothing was measured to hold against them."
    compared = [check.passed for check in gate.checks if check.kind == "baseline"]
    asked = [check.passed for check in gate.checks if check.kind != "baseline"]
    kept = f"{default}: {sum(asked)} of {len(asked)} kept. This is advice and changes no exit code."
    if not compared:
        return kept
    worse = compared.count(False) or "None"
    return f"{worse} of {len(compared)} comparisons with the baseline failed. {kept}"


def tiles(report: Report) -> list[Tile]:
    """The figures that a decision rests on."""
    model, shown = report.model, list[Tile]()

    def tile(label: str, value: str, metric: str, notes: list[str], scope: str = "model") -> None:
        shown.append(Tile(label, value, [*notes, *_against_baseline(report, metric, scope)]))

    speedup, agreement, output = (
        finite(model.metric(key)) for key in ("speedup", "prediction_agreement", "output_rel_l2")
    )
    if speedup is not None:
        ratio = "equal" if model.as_fast else times_text(speedup)
        tile("Speed-up, whole model", ratio, "speedup", _interval(model, "speedup"))
        lossless = finite(model.metric("speedup_lossless"))
        if lossless is not None and approximated(report):
            shown[-1].notes.append(f"{times_text(lossless)} by lossless kernels alone")
    before, after = (finite(model.metric(f"accuracy_{who}")) for who in ("teacher", "compiled"))
    accuracy = "" if before is None or after is None else f"{before:.2%} → {after:.2%}"
    drop = _interval(model, "accuracy_drop", " of the drop")
    if agreement is not None:
        key = "prediction_agreement"
        tile("Predictions kept", f"{agreement:.2%}", key, _interval(model, key))
        shown[-1].notes.extend([f"accuracy {accuracy}", *drop] if accuracy else [])
    elif accuracy:
        notes = drop or _interval(model, "accuracy_compiled")
        shown.append(Tile("Accuracy, teacher → compiled", accuracy, notes))
    if model.own_metric is not None and model.metric("metric_drop") is not None:
        both = " → ".join(number(model.metric(f"metric_{who}")) for who in ("teacher", "compiled"))
        notes = _interval(model, "metric_drop", " of the drop")
        tile(f"{model.own_metric}, teacher → compiled", both, "metric_drop", notes)
    worst, error = worst_site(report), "attention_rel_l2"
    if worst is not None:
        value = worst.metric(error)
        where = "in every layer" if value == 0 else f"in {short(worst.name, 40)}"
        tile("Attention error, worst layer", number(value), error, [where], worst.name)
    elif output is not None:
        key = "output_rel_l2"
        tile("Output error, relative", number(output), key, _interval(model, key))
    return shown


def _against_baseline(report: Report, metric: str, scope: str) -> list[str]:
    """The difference of a metric to the baseline, in a line; in none where it has none."""
    check = report.compared(metric, scope)
    if check is None or check.change is None:
        return []
    before = metric_text(metric, check.baseline)
    return [f"{change_text(metric, check.change)} against the baseline, {before}"]


def _interval(model: ModelReport, metric: str, of: str = "") -> list[str]:
    ends = ends_text(model, metric)
    return [f"{model.confidence_level:.0%} interval{of} {ends}"] if ends else []


def _times(model: ModelReport) -> list[tuple[str, str, float, str]]:
    """(kind, time, its share of the longest in per cent, speed-up with its interval) each."""
    kinds = ("teacher", "lossless", "compiled")
    times = {k: t for k in kinds if (t := positive(model.metric(f"latency_{k}_ms"))) is not None}
    teacher = times.get("teacher")

    def gain(kind: str, time: float) -> str:
        ends = ends_text(model, {"lossless": "speedup_lossless"}.get(kind, "speedup"))
        return times_text(teacher / time) + (f", {ends}" if ends else "") if teacher else ""

    return [
        (kind, f"{number(time)} ms", 100 * time / max(times.values()),
         "" if kind == "teacher" else gain(kind, time))
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


def _default_limits(judged: Judgement) -> dict[str, Any] | None:
    """A table of them, and the same as a gate file; None under a gate file.

    Not in the words of a verdict, which only a gate file gives.
    """
    checks = [check for check in judged.gate.checks if judged.default and check.kind != "baseline"]
    if not checks:
        return None
    words = {"ACCEPT": "kept", "REGRESSION": "not kept", "ANOMALOUS": "cannot be judged"}
    sources = {gate.metric: source for gate, source in judged.limits}
    tables = listed("Default limits", checks, {
        "metric": lambda check: check.metric,
        "scope": lambda check: check.scope,
        "value|": lambda check: metric_text(check.metric, check.value),
        "limit": limit_text,
        "from": lambda check: sources.get(check.metric, "") if check.kind == "limit" else "",
        "result": lambda check: words[check.verdict],
        "": lambda check: "" if check.passed else check.message,
    })  # fmt: skip
    gate_file = [f"{gate.metric}: {{{gate.bound}: {gate.limit:g}}}" for gate, _ in judged.limits]
    return {"tables": tables, "gate_file": "\n".join(gate_file)}


def _whole(text: str) -> Markup:
    """Numbers stay in one line: a browser may break them behind the sign of their exponent."""
    return Markup(re.sub(r"[0-9.]+e-[0-9]+", r"<b>\g<0></b>", str(escape(cleaned(text)))))


def _breakable(text: str) -> Markup:
    """A long dotted name in large letters breaks after its dots."""
    return Markup(escape(cleaned(text)).replace(".", Markup(".<wbr>")))


def _failing(table: Table) -> bool:
    """Whether there is a row that must not be folded away."""
    return any(TONES.get(cell) == "bad" for row in table.rows for cell in row)


def _cleaned(value: Any) -> Any:
    """Text as it is shown; what is markup is ours."""
    return cleaned(value) if isinstance(value, str) and not isinstance(value, Markup) else value
