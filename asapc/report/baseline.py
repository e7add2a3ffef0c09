"""Regression mode: is this report worse than an earlier one of the same model on the same data?

Every metric that both reports have is compared, but for absolute times (Metric.compared). A share
(agreement, accuracy) may be worse by so many points, anything else by a fraction of the baseline's
value.
The file is someone else's: its size, its shape and every number in it are checked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from asapc.errors import InputError
from asapc.formats.json_text import read_json
from asapc.metrics import METRIC, METRICS, Metric
from asapc.report.document import (
    REPORT_FORMAT,
    Check,
    Class,
    Comparison,
    GateReport,
    ModelReport,
    Report,
    SiteReport,
    finite,
    worst_class,
)
from asapc.report.gates import examples_needed, too_few, unmeasured
from asapc.terminal.printed import clipped, reason, short

MAX_BYTES = 16 << 20  # a report of a hundred sites is below one MiB
MAX_REGRESSION = 0.02
# Ratios of interleaved times still moved by a third between runs on a shared machine (README).
SPEED_NOISE = 1 / 3
# Smaller differences are how float32 rounds in another order of summation.
ROUNDING = 1e-5
# What ratios of times depend on besides the model.
MACHINE = ("processor", "cores", "threads", "device")
# Fits that differ in one of these have duals, and bounds on them, of different meaning.
FITTED_AS = ("operator", "side", "c_transforms", "aim", "points", "features", "fit", "coefficients")
Holder = ModelReport | SiteReport


@dataclass(frozen=True)
class Allowance:
    """How much worse a metric may be: the general limit, unless the metric has one of its own."""

    general: float = MAX_REGRESSION
    by_metric: Mapping[str, float] = field(default_factory=dict)

    def of(self, metric: str) -> float:
        if metric in self.by_metric:
            return self.by_metric[metric]
        return max(self.general, SPEED_NOISE) if METRIC[metric].speed else self.general


@dataclass(frozen=True)
class Baseline:
    """A checked earlier report, and how much worse a new one may be."""

    path: str
    report: Report
    allowance: Allowance


def parse_allowance(texts: Sequence[str]) -> Allowance:
    """["2%", "speedup=10%"]: at most one general limit, and limits of single metrics.

    Raises InputError.
    """
    limits: dict[str, float] = {}  # the general one under no name
    compared = [metric.key for metric in METRICS if metric.compared]
    for text in texts:
        name, equals, amount = text.rpartition("=")
        if equals and name not in compared:
            raise InputError(
                f"--max-regression: {name!r} is not compared with a baseline",
                help=f"compared are: {', '.join(compared)}",
            )
        if name in limits:
            rule = f"{name} is given twice" if name else "only one limit can be for all metrics"
            help = None if name else "name the metric of the others: speedup=10%"
            raise InputError(f"--max-regression: {rule}", got=" and ".join(texts), help=help)
        limits[name] = _fraction(amount)
    return Allowance(limits.pop("", MAX_REGRESSION), limits)


def read_report(path: str | Path) -> Report:
    """Read a report.json, checking its types alone.  Raises OSError, ValueError, InputError."""
    return Report.from_json(read_json(path, MAX_BYTES, strict=True), str(path))


def load_baseline(path: str | Path, allowance: Allowance | None = None) -> Baseline:
    """Read and check a report.json.  Raises InputError."""
    where = f"baseline {path}"
    try:
        document = read_json(path, MAX_BYTES, strict=True)
    except FileNotFoundError:
        help = "`asapc report OUT` writes OUT/report.json"
        raise InputError(f"{where}: no such file", help=help) from None
    except (OSError, ValueError) as error:
        rule = f"{where}: a report must be a JSON file of at most {MAX_BYTES >> 20} MiB"
        raise InputError(rule, got=reason(error)) from error
    if not isinstance(document, dict):
        raise InputError(f"{where}: the file must hold a report", got=type(document).__name__)
    version = document.get("format_version")
    if isinstance(version, bool) or version != REPORT_FORMAT:
        raise InputError(
            f"{where}: the baseline must be a report of format {REPORT_FORMAT}",
            got=short(version),
            help="measure it again with this version of asapc",
        )
    for part in ("fingerprints", "model", "sites"):
        if document.get(part) is None:
            raise InputError(f"{where}: {part} must be there", got="none")
    report = Report.from_json(document, where)
    for key in ("teacher", "data"):
        if key not in report.fingerprints:
            raise InputError(f"{where}: fingerprints must name the {key}", got="none")
    for name, count in Counter(site.name for site in report.sites).items():
        if count > 1:
            raise InputError(f"{where}: a site must be named once", got=short(name))
    _check_numbers(report.model, f"{where}: model")
    for site in report.sites:
        _check_numbers(site, f"{where}: {short(site.name)}")
    return Baseline(str(path), report, allowance or Allowance())


def compare(report: Report, baseline: Baseline) -> GateReport:
    """Compare a report with its baseline.  Raises InputError if their teacher or data differ."""
    _require_same(report, baseline)
    checks, skipped = list[Check](), list[dict[str, str]]()
    old_sites = {site.name: site for site in baseline.report.sites}
    now_sites = {site.name: site for site in report.sites}
    pairs: list[tuple[str, Holder, Holder]] = [("model", report.model, baseline.report.model)]
    pairs += [(name, now_sites[name], old) for name, old in old_sites.items() if name in now_sites]
    for scope, now, old in pairs:
        for metric in (metric for metric in METRICS if metric.compared):
            if finite(old.metric(metric.key)) is None:
                continue
            if isinstance(now, SiteReport) and now.metric(metric.key) is None:
                continue  # the site became another operator, which has other metrics
            why = _incomparable(metric, now, old) or _other_machine(metric, report, baseline.report)
            if why:
                skipped.append({"metric": metric.key, "scope": scope, "why": why})
            else:
                checks.append(_compared(metric, scope, now, old, report, baseline))
    for name in (name for name in old_sites if name not in now_sites):
        shown = clipped(name, 80) if name.isprintable() else short(name)
        text = f"the site {shown} of the baseline is no longer compiled"
        checks.append(Check("baseline", "sites", shown, verdict="REGRESSION", message=text))
    skipped += [
        {"metric": "sites", "scope": name, "why": "not in the baseline"}
        for name in now_sites if name not in old_sites
    ]  # fmt: skip
    allowance, verdict = baseline.allowance, worst_class(check.verdict for check in checks)
    summary = Comparison(baseline.path, allowance.general, dict(allowance.by_metric), verdict,
                         len(checks), tuple(skipped))  # fmt: skip
    return GateReport(verdict, tuple(checks), summary)


def _incomparable(metric: Metric, now: Holder, old: Holder) -> str:
    """Why the two are different quantities; empty if they are not."""
    if metric.key == "metric_drop" and isinstance(now, ModelReport) and isinstance(old, ModelReport):
        return "measured with a different --metric" if now.own_metric != old.own_metric else ""
    if not metric.of_fit:
        return ""
    refitted = [key for key in FITTED_AS if getattr(now, key) != getattr(old, key)]
    if refitted:
        return f"another {' and '.join(refitted)}"
    return "not finite: proves nothing" if finite(now.metric(metric.key)) is None else ""


def _other_machine(metric: Metric, report: Report, earlier: Report) -> str:
    """Why ratios of times cannot be compared; empty if they can."""
    if not metric.speed:
        return ""
    now, old = report.environment, earlier.environment
    different = [key for key in MACHINE if now.get(key) != old.get(key)]
    if report.model.values.get("batch") != earlier.model.values.get("batch"):
        different.append("batch size")
    return f"measured with another {' and '.join(different)}" if different else ""


def _compared(
    metric: Metric, scope: str, now: Holder, old: Holder, report: Report, baseline: Baseline
) -> Check:
    """One check: worse by more than is allowed, and by more than chance and rounding explain?"""
    raw, allowed = now.metric(metric.key), baseline.allowance.of(metric.key)
    value, earlier = finite(raw), finite(old.metric(metric.key))
    assert earlier is not None
    subject = f"{metric.key} of {scope}"
    check = partial(Check, "baseline", metric.key, scope, value, baseline=earlier, allowed=allowed)
    needed = examples_needed(allowed, 0.0) if metric.share else 0
    few = too_few(needed, report, baseline.report)
    if few:
        text = f"{subject} {few} to see a regression of {allowed:.4g}"
        return check(verdict="ANOMALOUS", message=text)
    if value is None:
        text = unmeasured(subject, raw, f"the baseline has {earlier:.6g}")
        return check(verdict="ANOMALOUS", message=text)
    worse = value - earlier if metric.direction == "min" else earlier - value
    if metric.share:
        part, amount, most = worse, f"{worse * 100:.4g} points", f"{allowed * 100:.4g} points"
    else:
        part = worse / abs(earlier) if earlier else math.inf if worse > 0 else 0.0
        amount, most = f"{part * 100:.4g} %", f"{allowed * 100:.4g} %"
    start, before = f"{subject} is {value:.6g}", f"the baseline's {earlier:.6g}"
    verdict: Class = "ACCEPT"
    if part <= allowed + 1e-9 or worse <= ROUNDING:  # 0.99 - 0.97 is not 0.02
        text = f"{start}, within {most} of {before}" if worse > 0 else f"{start}, no worse than {before}"
    elif _inside(value, old.interval(metric.key)) or _inside(earlier, now.interval(metric.key)):
        text = f"{start}, {amount} worse than {before} but inside the confidence interval"
    else:
        verdict, text = "REGRESSION", f"{start}, {amount} worse than {before} ({most} allowed)"
    return check(verdict=verdict, message=text, worse_by=worse)


def _require_same(report: Report, baseline: Baseline) -> None:
    now, old = report.fingerprints, baseline.report.fingerprints
    for key, what in (("teacher", "of the same teacher"), ("data", "on the same data")):
        if now.get(key) != old.get(key):
            raise InputError(
                f"baseline {baseline.path}: the baseline must be a report {what}",
                got=f"{key} {short(str(old.get(key))[:12])}, this one is {short(str(now.get(key))[:12])}",
                help="measure a new baseline whenever the teacher or the data changes",
            )


def _inside(value: float, ends: tuple[float, float] | None) -> bool:
    return ends is not None and ends[0] <= value <= ends[1]


def _check_numbers(holder: Holder, where: str) -> None:
    """Check that measured values are null or finite, and the ends of intervals in order."""
    for metric in METRICS:
        value = holder.metric(metric.key)
        if value is not None and finite(value) is None:
            raise InputError(f"{where}: {metric.key} must be a finite number", got=short(value))
    for name, ends in holder.confidence.items():
        if holder.interval(name) is None:
            rule = f"{where}: confidence of {short(name)} must be two numbers, the lower one first"
            raise InputError(rule, got=short(list(ends)))


def _fraction(text: str) -> float:
    rule = "--max-regression must be a share such as 2% or 0.02"
    number = text.strip()
    percent = number.endswith("%")
    try:
        value = float(number.removesuffix("%"))
    except ValueError:
        raise InputError(rule, got=short(text)) from None
    value = value / 100 if percent else value
    if not 0 <= value <= 1:  # also NaN
        raise InputError(rule, got=short(text), help="write two percent as 2%, not as 2")
    return value
