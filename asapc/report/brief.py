"""A result in a few lines; --verbose shows the tables behind it (asapc.report.tables).

Each function gives at most LINES lines of at most WIDTH characters, unless a name or a reason of a few
words is longer: what would not fit is counted and left to --verbose. Numbers are never cut.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from asapc.measure.bootstrap import LEVEL
from asapc.operators.catalogue import TEACHER
from asapc.report.advice import advise, decide
from asapc.report.document import ERROR, ModelReport, Report, equally_fast, finite
from asapc.report.tables import (
    amortised_text,
    changed,
    convention_text,
    counted,
    fit_text,
    interval_text,
    label,
    metric_text,
    number,
)
from asapc.terminal.printed import one_line

LINES = 25
WIDTH = 80
KINDS = 4  # of layers that are told apart, and of these LEFT of layers that are left alone
LEFT = 2
NAMES = 3  # names that are listed of each
NAME = 40  # characters of one
ADVICE = 2  # of what would help, the most useful
WRAPPED = 2  # lines that a reason may take
REFUSED = 4  # and why `inspect` leaves a layer alone
FEW_ROUNDS = "too few rounds for an interval"
WRITE_INSTEAD = "docs/recognition.md shows how to rewrite layers that are left alone"


def shortened(name: str, most: int = NAME) -> str:
    """A long name without its middle: both ends of a dotted name tell layers apart."""
    name = one_line(name)
    if len(name) <= most:
        return name
    kept = most - 3
    return f"{name[: kept // 2]}...{name[len(name) - (kept - kept // 2) :]}"


def inspect_brief(inspection: Mapping[str, Any]) -> list[str]:
    """How many layers can be compiled; what they compute; why others are left alone."""
    sites = inspection["sites"]
    matched = [site for site in sites if site.get("status") == "matched"]
    captured = "whole" if inspection.get("capture") == "whole" else "module by module"
    lines = [f"{inspection.get('model')}, captured {captured}"]
    lines.append(f"{len(matched)} of {counted(len(sites), 'layer')} can be compiled")
    errors = [site["replay_error"] for site in matched if site.get("replay_error") is not None]
    if errors:
        lines[-1] += f", replayed within {number(max(errors))} of the teacher's code"
    kinds = _grouped(matched, lambda site: convention_text(site.get("convention")))
    lines += _listed(kinds, _left(site for site in sites if site.get("status") != "matched"), REFUSED)
    return lines + ([WRITE_INSTEAD] if len(matched) < len(sites) else [])


def calibration_brief(summary: Mapping[str, Any]) -> list[str]:
    """What was fitted, how well, and on how little."""
    fits = summary["sites"]
    if not fits:
        return []  # `asapc calibrate` says so
    names = {fit.get("name") for fit in fits}
    lines = [f"{counted(len(fits), 'fit')} of {counted(len(names), 'layer')}, {summary.get('order')}"]
    kinds = _grouped(fits, lambda fit: ", ".join(filter(None, (amortised_text(fit), fit_text(fit)))))
    known = [fit for fit in fits if isinstance(fit.get("r2"), float)]
    lines += _listed(kinds)
    if known:
        worst, best = (f(known, key=lambda fit: fit["r2"]) for f in (min, max))
        where = shortened(str(worst["name"]))
        lines.append(f"R2 in-sample {number(worst['r2'])} ({where}) to {number(best['r2'])}")
    return lines + _warned(summary.get("warnings", ()))


def compile_brief(manifest: Mapping[str, Any]) -> list[str]:
    """What the layers became, and why."""
    sites, left = manifest["sites"], manifest.get("refused", ())
    kept = sum(site.get("operator") == TEACHER for site in sites)
    lines = [f"{counted(len(sites) - kept, 'layer')} compiled, {len(left) + kept} left unchanged"]

    def became(site: Mapping[str, Any]) -> str:
        predicted = amortised_text(site)
        how = f" ({predicted})" if predicted else ""
        return f"{site.get('operator')}{how}: {site.get('reason') or '-'}"

    lines += _listed(_grouped(sites, became), _left(left))
    if manifest.get("sizes"):
        lines += _wrapped(f"supported sizes: {manifest['sizes']}")
    lines += _warned(manifest.get("warnings", ()))
    record = manifest.get("onnx_file")
    return lines + ([] if record is None else onnx_brief(record))


def onnx_brief(record: Mapping[str, Any]) -> list[str]:
    """What was written, and how far it is from the compiled model."""
    size, half = number(record.get("bytes", 0) / 1e6), ", float16" if record.get("float16") else ""
    off, allowed = (number(record.get(key)) for key in ("largest", "tolerance"))
    return [
        f"ONNX opset {record.get('opset')}, {size} MB{half}: within {off} of the compiled model",
        f"at {counted(len(record.get('shapes', ())), 'shape')}, {allowed} allowed",
    ]


class KeyFigure(NamedTuple):
    """A figure that a decision rests on, and what belongs beside it."""

    label: str
    value: str
    notes: list[str]


def key_figures(report: Report) -> list[KeyFigure]:
    """Speed, agreement, accuracy, the worst layer, and how many examples they rest on."""
    model, figures, worst = report.model, list[KeyFigure](), report.worst_site
    timed = model.to_json()

    def add(name: str, metric: str, value: str, *notes: str, scope: str = "model") -> None:
        change = changed(report, metric, scope)
        against = f"{change} against the baseline" if change else ""
        figures.append(KeyFigure(name, value, [note for note in (*notes, against) if note]))

    speedup, lossless = (finite(model.metric(key)) for key in ("speedup", "speedup_lossless"))
    if speedup is not None:
        exactly = lossless is not None and report.approximated
        ratio = f"{number(speedup)}x"
        shown = ("equal", ratio) if equally_fast(model.confidence.get("speedup")) else (ratio,)
        add("speed", "speedup", *shown, _whole_times(model), _interval(timed, "speedup") or FEW_ROUNDS,
            f"{number(lossless)}x with every loop kept exactly (lossless)" if exactly else "",
            *_under_torch_compile(timed))  # fmt: skip
    for words, key in (("agreement", "prediction_agreement"), ("accuracy", "accuracy_compiled"),
                       ("own metric", "metric_compiled"), ("drop", "metric_drop")):  # fmt: skip
        if model.metric(key) is not None:
            teachers = model.metric(key.replace("_compiled", "_teacher"))
            of_teacher = f"the teacher's {metric_text(key, teachers)}" if "_compiled" in key else ""
            name = shortened(model.own_metric or "", 50) if key == "metric_compiled" else ""
            add(words, key, metric_text(key, model.metric(key)), name, _interval(timed, key), of_teacher)
    if worst is not None:
        where = f"attention error of {shortened(worst.name)}, {worst.operator}"
        add("worst layer", ERROR, number(worst.metric(ERROR)), where, scope=worst.name)
    device = report.environment.get("device")
    rest = ("unseen in fitting and selection", f"on {device}" if device else "")
    add("examples", "examples", number(model.metric("examples")), *rest)
    return figures


def _whole_times(model: ModelReport) -> str:
    """"1468 ms -> 74.2 ms per batch of 32"."""
    times = [model.metric(f"latency_{kind}_ms") for kind in ("teacher", "compiled")]
    batch = f" per batch of {model.values['batch']}" if model.values.get("batch") else ""
    return "" if None in times else " -> ".join(f"{number(time)} ms" for time in times) + batch


def _interval(timed: Mapping[str, Any], key: str) -> str:
    ends = interval_text(key, timed.get("confidence", {}))
    return f"{timed.get('confidence_level', LEVEL):.0%} interval {ends}" if ends else ""


def report_brief(report: Report) -> list[str]:
    """Verdict, what to do, the figures behind it, and what would help."""
    gate, decided = report.gate, decide(report)
    verdict = gate.verdict if gate.verdict is not None else "no gates file, default limits"
    lines = _wrapped(f"{verdict}: {decided.sentence} {decided.because}", most=5)
    for figure in key_figures(report):
        beside = f" ({'; '.join(figure.notes)})" if figure.notes else ""
        lines += _wrapped(f"{figure.label:<12}{figure.value}{beside}", indent=" " * 12, most=6)
    if str(report.model.source).endswith("(no --weights)"):
        lines.append("weights     as returned by the factory (no --weights)")
    if report.refused:
        lines.append(f"left alone  {counted(len(report.refused), 'layer')}")
    lines += _warned([warning.to_json() for warning in report.warnings])
    for sentence in advise(report)[:ADVICE]:
        lines += _wrapped(f"advice: {sentence}")
    return lines


def _under_torch_compile(model: Mapping[str, Any]) -> list[str]:
    """The teacher and the compiled model under torch.compile, if they were timed."""
    lines = []
    for key, what, base in (("teacher", "the teacher", "as without it"),
                            ("compiled", "the compiled model", "as the plain teacher")):  # fmt: skip
        ratio = model.get(f"speedup_{key}_torch_compile")
        if ratio is not None:
            took = model.get("torch_compile_seconds") if key == "teacher" else None
            beside = "" if took is None else f" ({number(took)} s to compile)"
            lines.append(f"under torch.compile, {what} is {number(ratio)}x as fast {base}{beside}")
    failed = model.get("torch_compile_failed")
    return lines + (_wrapped(f"torch.compile failed on {failed}") if failed else [])


def bench_brief(bench: Mapping[str, Any]) -> list[str]:
    """Times of the whole model, and of the layer that gains least."""
    model = bench["model"]
    lines = [f"{model.get('source')}, batches of {model.get('batch')}"]
    lines += [f"  {line}" for line in (*_times(model), *_under_torch_compile(model))]
    if "onnx" in bench:
        lines += _wrapped(f"ONNX Runtime: {', '.join(_times(bench['onnx']))}", most=4)
    timed = [site for site in bench["sites"] if site.get("speedup") is not None]
    if timed:
        least = min(timed, key=lambda site: site["speedup"])
        gain = f"{least.get('operator')}, {_ratio(least, 'speedup')}"
        lines.append(f"least gain: {shortened(least['name'])}, {gain}")
    kernels = [
        {"name": site["name"], **kernel} for site in bench["sites"] for kernel in site.get("kernels", ())
    ]
    ran = "{operator} {shape}: {kernel}, {reason}"
    return lines + _listed(_grouped(kernels, ran.format_map))


def _times(model: Mapping[str, Any]) -> list[str]:
    times = []
    for stage in ("teacher", "lossless", "compiled"):
        time = model.get(f"latency_{stage}_ms")
        ratio = _ratio(model, "speedup" if stage == "compiled" else f"speedup_{stage}")
        if time is not None:
            times.append(f"{stage} {number(time)} ms" + ("" if ratio is None else f" ({ratio})"))
    return times


def _ratio(timed: Mapping[str, Any], key: str) -> str | None:
    """"8.2x, 95% interval 8.0 to 8.4", or "equal" of two that are; None of what was not timed."""
    if timed.get(key) is None:
        return None
    equal = equally_fast(timed.get("confidence", {}).get(key))
    ratio = "equal" if equal else f"{number(timed[key])}x"
    return ", ".join(filter(None, (ratio, _interval(timed, key))))


def refresh_brief(entry: Mapping[str, Any]) -> list[str]:
    """What training changed on the selection split."""
    kept = entry.get("best_epoch")
    lines = [
        "no epoch lowered the loss: the weights are unchanged" if kept == 0
        else f"trained on {number(entry.get('examples'))} examples, epoch {number(kept)} kept"
    ]  # fmt: skip
    before, after = entry.get("before", {}), entry.get("after", {})
    lines += [
        f"{label(key)}: {metric_text(key, before[key])} -> {metric_text(key, after.get(key))}"
        for key in before
    ]
    return _first(lines, LINES - 5)


def study_brief(result: Mapping[str, Any]) -> list[str]:
    """The rows that no other beats in both error and time, the closest to the teacher first."""
    rows = sorted(result["rows"], key=lambda row: float(row["attention_rel_l2"]))
    front = [row for row in rows if row.get("pareto")]
    lines = []
    for row in front:
        how = [str(row.get("features")), *([str(row["side"])] if row.get("side") else [])]
        if row.get("c_transforms") is not None:
            how.append(counted(row["c_transforms"], "c-transform"))
        error, time = (number(row.get(key)) for key in ("attention_rel_l2", "site_ms"))
        lines.append(f"  attention {error}, {time} ms/layer: {', '.join(how)}")
    return [f"{counted(len(rows), 'row')}; Pareto front of error and time:", *_first(lines, 12)]


# Words


Kind = tuple[str, list[str]]  # what layers have in common, and their names


def _grouped(items: Iterable[Mapping[str, Any]], what: Callable[[Mapping[str, Any]], str]) -> list[Kind]:
    """The most frequent kind first."""
    kinds: dict[str, list[str]] = {}
    for item in items:
        kinds.setdefault(what(item), []).append(str(item.get("name")))
    return sorted(kinds.items(), key=lambda kind: -len(kind[1]))


def _left(items: Iterable[Mapping[str, Any]]) -> list[Kind]:
    return _grouped(items, lambda item: f"{item.get('status')}: {item.get('reason')}")


def _listed(kinds: Sequence[Kind], left: Sequence[Kind] = (), most: int = WRAPPED) -> list[str]:
    """Each kind with its names; layers left alone are never crowded out.  most: lines of a reason."""
    first = kinds[: KINDS - min(LEFT, len(left))]
    shown = [*first, *left[: KINDS - len(first)]]
    lines: list[str] = []
    for what, names in shown:
        room = most if (what, names) in left else WRAPPED
        lines += _wrapped(f"  {len(names)} x {what}", indent="      ", most=room)
        listed = ", ".join(shortened(name) for name in names[:NAMES])
        more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
        lines += _wrapped(f"      {listed}{more}", indent="      ")
    rest = [kind for kind in (*kinds, *left) if kind not in shown]
    if rest:
        count = sum(len(names) for _, names in rest)
        lines.append(f"  and {count} of {counted(len(rest), 'other kind')}: --verbose lists them")
    return lines


def _warned(warnings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The number of fits on too little data, and the figures of the first."""
    if not warnings:
        return []
    first = warnings[0]
    sites = sum(len(warning.get("sites", ())) for warning in warnings)
    return _wrapped(
        f"warning: {counted(sites, 'fit')} on too little data: {number(first.get('given'))} "
        f"{first.get('of')}, {number(first.get('needed'))} are needed"
    )


def _first(lines: Sequence[str], most: int) -> list[str]:
    left = len(lines) - most
    return [*lines] if left <= 0 else [*lines[:most], f"  and {left} more: --verbose lists them"]


def _wrapped(text: str, indent: str = "  ", most: int = WRAPPED) -> list[str]:
    """At most so many lines; a longer text ends in "…" after a whole word, and never inside `code`."""
    wrapper = textwrap.TextWrapper(
        WIDTH, subsequent_indent=indent, break_on_hyphens=False, max_lines=most, placeholder=" …"
    )
    lines = wrapper.wrap(one_line(text))
    shown = " ".join(line.strip() for line in lines)
    if shown.count("`") % 2 and shown.endswith(" …"):
        lines = wrapper.wrap(f"{shown[: shown.rindex('`')].rstrip()} …")
    return lines
