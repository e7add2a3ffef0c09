"""Regression mode: is this report worse than an earlier one of the same model on the same data?

Every metric with a direction (asapc.fidelity.METRICS) that both reports have is compared. Shares
(agreement, accuracies) may be worse by so many points, everything else by such a part of the
baseline's value. Not compared: absolute times, which say more about the machine than about the model.
The file is someone else's: its size, its shape and every number in it are checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asapc.errors import InputError
from asapc.formats.json_text import parse_json, read_file
from asapc.gates import (
    FIT_METRICS,
    SHARES,
    Class,
    Comparison,
    entry,
    examples_needed,
    finite,
    interval,
    not_finite,
    short,
    site_name,
    worst_class,
)
from asapc.printed import reason
from asapc.report.schema import report_schema

MAX_BYTES = 16 << 20  # a report of a hundred sites is below one MiB
MAX_REGRESSION = 0.02
# Ratios of interleaved times still moved by a third between runs on a shared machine (README).
SPEED_NOISE = 1 / 3
SPEEDS = ("speedup", "speedup_lossless")
ABSOLUTE_TIMES = (
    "latency_teacher_ms", "latency_lossless_ms", "latency_compiled_ms", "fit_seconds",
    "break_even_batches",
)  # fmt: skip
# Smaller differences are how float32 rounds in another order of summation.
ROUNDING = 1e-5
# What ratios of times depend on besides the model.
MACHINE = ("processor", "cores", "threads", "device")
# Fits that differ in one of these have duals, and bounds on them, of different meaning.
FITTED_AS = ("operator", "side", "closures", "features", "fit", "coefficients")


@dataclass(frozen=True)
class Allowance:
    """How much worse a metric may be: the general limit, unless the metric has one of its own."""

    general: float = MAX_REGRESSION
    by_metric: Mapping[str, float] = field(default_factory=dict)

    def of(self, metric: str) -> float:
        if metric in self.by_metric:
            return self.by_metric[metric]
        return max(self.general, SPEED_NOISE) if metric in SPEEDS else self.general


@dataclass(frozen=True)
class Baseline:
    """A checked earlier report, and how much worse than it is still accepted."""

    path: str
    report: Mapping[str, Any]
    allowance: Allowance


def parse_allowance(texts: Sequence[str]) -> Allowance:
    """["2%", "speedup=10%"]: one general limit at most, and limits of single metrics.

    Raises InputError.
    """
    general: float | None = None
    by_metric: dict[str, float] = {}
    for text in texts:
        name, equals, amount = text.rpartition("=")
        if equals:
            if name not in compared_metrics():
                raise InputError(
                    f"--max-regression: {name!r} is not compared with a baseline",
                    help=f"compared are: {', '.join(compared_metrics())}",
                )
            if name in by_metric:
                raise InputError(f"--max-regression: {name} is given twice")
            by_metric[name] = _fraction(amount)
        elif general is not None:
            raise InputError("--max-regression: only one limit can be for all metrics",
                             got=" and ".join(texts),
                             help="name the metric of the others: speedup=10%")  # fmt: skip
        else:
            general = _fraction(amount)
    return Allowance(MAX_REGRESSION if general is None else general, by_metric)


def compared_metrics() -> tuple[str, ...]:
    from asapc.fidelity import METRICS

    return tuple(name for name in METRICS if name not in ABSOLUTE_TIMES)


def load_baseline(path: str | Path, allowance: Allowance | None = None) -> Baseline:
    """Read and check a report.json.  Raises InputError."""
    where = f"baseline {path}"
    document = _read(path, where)
    expected = report_schema()["properties"]["format_version"]["const"]
    version = document.get("format_version")
    if isinstance(version, bool) or version != expected:
        raise InputError(
            f"{where}: the baseline must be a report of format {expected}",
            got=short(version),
            help="measure it again with this version of asapc",
        )
    _check_fingerprints(document, where)
    _check_values(_mapping_of(document, "model", where), f"{where}: model")
    if "environment" in document:
        _mapping_of(document, "environment", where)
    sites = document.get("sites")
    if not isinstance(sites, list):
        raise InputError(f"{where}: sites must be a list", got=short(sites))
    names = set()
    for number, site in enumerate(sites):
        place = f"{where}: sites[{number}]"
        if not isinstance(site, dict) or not isinstance(site.get("name"), str):
            raise InputError(f"{place}: a site must be a mapping with a name", got=short(site))
        if site["name"] in names:
            raise InputError(f"{place}: a site must be named once", got=short(site["name"]))
        names.add(site["name"])
        if site.get("metrics") is not None:
            _check_values(_mapping_of(site, "metrics", place), f"{place}: metrics")
        _check_intervals(site, place)
    return Baseline(str(path), document, allowance or Allowance())


def compare(report: Mapping[str, Any], baseline: Baseline) -> Comparison:
    """Hold a report against its baseline.  Raises InputError if they are not of the same thing."""
    earlier = baseline.report
    _require_same(report, baseline)
    skipped: list[dict[str, str]] = []
    checks = list(_compare_model(report, baseline, skipped))
    old_sites = {site["name"]: site for site in earlier["sites"]}
    now = {site_name(site): site for site in report.get("sites", ())}
    for name, old in old_sites.items():
        if name not in now:
            shown = _clip(name) if name.isprintable() else short(name)
            text = f"the site {shown} of the baseline is no longer compiled"
            checks.append(entry("baseline", "sites", shown, None, "REGRESSION", text))
            continue
        checks += _compare_site(now[name], old, baseline.allowance, skipped)
    skipped += [_skip("sites", name, "not in the baseline") for name in now if name not in old_sites]
    summary = {
        "path": baseline.path,
        "max_regression": baseline.allowance.general,
        "max_regression_of": dict(baseline.allowance.by_metric),
        "verdict": worst_class(check["class"] for check in checks),
        "compared": len(checks),
        "skipped": skipped,
    }
    return Comparison(checks, summary)


def _compare_model(
    report: Mapping[str, Any], baseline: Baseline, skipped: list[dict[str, str]]
) -> Iterator[dict[str, Any]]:
    earlier = baseline.report
    now, old = report["model"], earlier["model"]
    other_machine = _other_machine(report, earlier)
    for metric in compared_metrics():
        if finite(old.get(metric)) is None:
            continue
        if metric in SPEEDS and other_machine:
            skipped.append(_skip(metric, "model", other_machine))
            continue
        allowed = baseline.allowance.of(metric)
        if metric in SHARES and allowed:
            needed = examples_needed(allowed, 0.0)
            examples = min(finite(side.get("examples")) or 0.0 for side in (now, old))
            if examples < needed:
                text = (
                    f"{metric} of model rests on {examples:g} examples, too few to see a regression "
                    f"of {allowed:.4g}: at least {needed} are needed"
                )
                value = finite(now.get(metric))
                yield entry("baseline", metric, "model", value, "ANOMALOUS", text,
                            baseline=finite(old[metric]), allowed=allowed)  # fmt: skip
                continue
        yield _compared(metric, "model", now.get(metric), old[metric], allowed,
                        interval(now, metric), interval(old, metric))  # fmt: skip


def _compare_site(
    now: Mapping[str, Any],
    old: Mapping[str, Any],
    allowance: Allowance,
    skipped: list[dict[str, str]],
) -> Iterator[dict[str, Any]]:
    metrics, earlier, scope = now.get("metrics") or {}, old.get("metrics") or {}, site_name(now)
    refitted = [key for key in FITTED_AS if now.get(key) != old.get(key)]
    for metric in compared_metrics():
        value = metrics.get(metric)
        if value is None or finite(earlier.get(metric)) is None:
            continue  # the site became another operator, which has other metrics
        if metric in FIT_METRICS and (refitted or not_finite(value)):
            why = f"another {' and '.join(refitted)}" if refitted else "not finite: proves nothing"
            skipped.append(_skip(metric, scope, why))
            continue
        yield _compared(metric, scope, value, earlier[metric], allowance.of(metric),
                        interval(now, metric), interval(old, metric))  # fmt: skip


def _compared(
    metric: str,
    scope: str,
    raw: Any,
    raw_earlier: Any,
    allowed: float,
    own: tuple[float, float] | None,
    its: tuple[float, float] | None,
) -> dict[str, Any]:
    """One check: worse by more than is allowed, and by more than chance and rounding explain?"""
    from asapc.fidelity import METRICS

    value, earlier = finite(raw), finite(raw_earlier)
    assert earlier is not None
    subject = f"{metric} of {scope}"
    if value is None:
        what = "was not measured" if raw is None else f"is not a finite number: {short(raw)}"
        text = f"{subject} {what} (the baseline has {earlier:.6g})"
        return entry("baseline", metric, scope, None, "ANOMALOUS", text,
                     baseline=earlier, allowed=allowed)  # fmt: skip
    worse = value - earlier if METRICS[metric].direction == "min" else earlier - value
    if metric in SHARES:
        part, amount, most = worse, f"{worse * 100:.4g} points", f"{allowed * 100:.4g} points"
    else:
        part = worse / abs(earlier) if earlier else math.inf if worse > 0 else 0.0
        amount, most = f"{part * 100:.4g} %", f"{allowed * 100:.4g} %"
    start, old = f"{subject} is {value:.6g}", f"the baseline's {earlier:.6g}"
    verdict: Class = "ACCEPT"
    if part <= allowed + 1e-9 or worse <= ROUNDING:  # 0.99 - 0.97 is not 0.02
        text = f"{start}, within {most} of {old}" if worse > 0 else f"{start}, no worse than {old}"
    elif _inside(value, its) or _inside(earlier, own):
        text = f"{start}, {amount} worse than {old} but inside the confidence interval"
    else:
        verdict, text = "REGRESSION", f"{start}, {amount} worse than {old} ({most} allowed)"
    return entry("baseline", metric, scope, value, verdict, text,
                 baseline=earlier, allowed=allowed, worse_by=worse)  # fmt: skip


def _require_same(report: Mapping[str, Any], baseline: Baseline) -> None:
    own, its = report.get("fingerprints") or {}, baseline.report["fingerprints"]
    for key, what in (("teacher", "of the same teacher"), ("data", "on the same data")):
        if own.get(key) != its[key]:
            raise InputError(
                f"baseline {baseline.path}: the baseline must be a report {what}",
                got=f"{key} {short(its[key][:12])}, this one is {short(str(own.get(key))[:12])}",
                help="measure a baseline again whenever the teacher or the data change",
            )


def _other_machine(report: Mapping[str, Any], earlier: Mapping[str, Any]) -> str | None:
    """Why ratios of times cannot be compared, None where they can."""
    own, its = report.get("environment") or {}, earlier.get("environment") or {}
    different = [key for key in MACHINE if own.get(key) != its.get(key)]
    if report["model"].get("batch") != earlier["model"].get("batch"):
        different.append("batch size")
    return f"measured with another {' and '.join(different)}" if different else None


def _skip(metric: str, scope: str, why: str) -> dict[str, str]:
    return {"metric": metric, "scope": scope, "why": why}


def _inside(value: float, ends: tuple[float, float] | None) -> bool:
    return ends is not None and ends[0] <= value <= ends[1]


def _read(path: str | Path, where: str) -> dict[str, Any]:
    try:
        content = read_file(path, MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(
            f"{where}: no such file", help="`asapc report OUT` writes OUT/report.json"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: cannot be read", got=reason(error)) from error
    if len(content) > MAX_BYTES:
        raise InputError(f"{where}: a report has at most {MAX_BYTES >> 20} MiB", got="more")
    try:
        document = parse_json(content, strict=True)
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON", got=reason(error)) from error
    if not isinstance(document, dict):
        raise InputError(f"{where}: the file must hold a report", got=type(document).__name__)
    return document


def _check_fingerprints(document: Mapping[str, Any], where: str) -> None:
    prints = _mapping_of(document, "fingerprints", where)
    for key in ("teacher", "data"):
        if not isinstance(prints.get(key), str):
            raise InputError(f"{where}: fingerprints must name the {key}", got=short(prints.get(key)))


def _check_values(values: Mapping[str, Any], where: str) -> None:
    """Every metric is null (not measured) or a finite number; so are the ends of its interval."""
    for name in _numbers():
        value = values.get(name)
        if value is not None and finite(value) is None:
            raise InputError(f"{where}: {name} must be a finite number", got=short(value))
    _check_intervals(values, where)


def _check_intervals(holder: Mapping[str, Any], where: str) -> None:
    intervals = holder.get("confidence")
    if intervals is None:
        return
    if not isinstance(intervals, dict):
        raise InputError(f"{where}: confidence must be a mapping", got=short(intervals))
    for name in intervals:
        if interval(holder, name) is None:
            raise InputError(
                f"{where}: confidence of {short(name)} must be two numbers, the lower one first",
                got=short(intervals[name]),
            )


def _numbers() -> Iterable[str]:
    from asapc.fidelity import METRICS

    return (*METRICS, "examples", "batch")


def _mapping_of(data: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise InputError(f"{where}: {key} must be a mapping", got=short(value))
    return value


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


def _clip(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."
