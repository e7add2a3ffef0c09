"""Gates: limits a report must keep, `{"attention_rel_l2": {"max": 0.05}}`, and the check of them.

Every check, and the whole, is of one class:

    ACCEPT      the limit is kept
    REGRESSION  a limit, or the baseline (asapc.report.baseline), is not kept
    ANOMALOUS   the measurement cannot be trusted: missing, NaN or infinite, too few examples, or too good

The worst class wins, and ANOMALOUS is the worst: as long as a measurement cannot be trusted, nothing it
says about limits can be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from asapc.errors import InputError
from asapc.formats.yaml_file import read_yaml_mapping
from asapc.inputs.settings import Compound, Finite, Place, Switch, parse
from asapc.metrics import METRIC, METRICS, Metric
from asapc.operators.catalogue import TEACHER
from asapc.report.document import (
    Check,
    Class,
    GateReport,
    ModelReport,
    Report,
    SiteReport,
    finite,
    worst_class,
)
from asapc.terminal.printed import short

IMPLAUSIBLE_SPEEDUP = 1000.0
IMPLAUSIBLE_GAIN = 3.0  # half-widths of the confidence interval of an accuracy
# The 95 % interval (Clopper and Pearson) of a share of n in n starts at 0.025^(1/n) > 1 - 3.69 / n.
FOR_CONFIDENCE = -math.log(0.025)


@dataclass(frozen=True)
class Gate:
    """One limit: value <= limit for "max", value >= limit for "min".

    pattern: the sites it is for; None for the model, or for every site that no pattern with a limit on
    the same metric and bound matches. confidence: the pessimistic end of the confidence interval is
    compared, the low end with a "min".
    """

    metric: str
    bound: Literal["min", "max"]
    limit: float
    pattern: str | None = None
    confidence: bool = False


def known_metrics() -> tuple[str, ...]:
    """Every name a gate may use."""
    return tuple(sorted(metric.key for metric in METRICS if metric.gate))


def load_gates(path: str | Path) -> list[Gate]:
    """The gates in a YAML or JSON file.  Raises InputError: unknown name, no limit, empty file."""
    return parse_gates(read_yaml_mapping(path, "gates"), where=f"gates {path}")


def parse_gates(data: Mapping[str, Any], *, where: str = "gates") -> list[Gate]:
    """Checks `{"metric": {"min"|"max": number, "confidence": bool}}`, and the same for every pattern
    under "sites".  Raises InputError, with the line where the data was read from a file."""
    return _parsed(data, Place(where), {**_metrics(None), "sites": _sites})


def limit_checks(report: Report, gates: Sequence[Gate]) -> list[Check]:
    """One check per limit of the model and per limit and site of a pattern; a limit on a per-site metric
    without a pattern is one check, of the worst site.

    Raises InputError for a pattern that matches no site.
    """
    names = [site.name for site in report.sites]
    for pattern in dict.fromkeys(gate.pattern for gate in gates if gate.pattern is not None):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"gates: the site pattern {pattern!r} must match a site",
                help=f"sites: {', '.join(names[:10]) or 'none'}{' ...' if len(names) > 10 else ''}",
            )
    checks = []
    for gate in gates:
        if gate.pattern is None and METRIC[gate.metric].scope != "site":
            checks.append(_judge(report, gate, _read(report.model, "model", gate)))
            continue
        governed = [site for site in report.sites if _governing(gates, gate, site.name)]
        if report.sites and not governed:
            continue  # patterns took every site over
        having = [site for site in governed if not _without(site, gate.metric)]
        readings = [_read(site, site.name, gate) for site in having]
        if gate.pattern is None:
            readings = [_worst(readings, gate)] if readings else [_Reading("sites")]
        checks += [_judge(report, gate, reading) for reading in readings]
    return checks


def implausible(report: Report) -> list[Check]:
    """One ANOMALOUS check per measurement that no sound compilation and measurement would give."""
    found = _not_finite(report.model, "model", [metric for metric in METRICS if metric.scope != "site"])
    for site in report.sites:
        found += _not_finite(site, site.name, [metric for metric in METRICS if metric.every_site])
        if _cannot_be_equal(site) and finite(site.metric("attention_rel_l2_worst")) == 0:
            text = f"the attention of {site.name} is exactly the teacher's, although it was approximated"
            found.append(_anomaly("attention_rel_l2_worst", site.name, text, 0.0))
    found += _too_equal(report)
    for metric in METRICS:
        value = finite(report.model.metric(metric.key)) if metric.speed else None
        if value is not None and not 0 < value <= IMPLAUSIBLE_SPEEDUP:
            text = f"{metric.key} of model is {value:.6g}: no kernel is that fast; a timing must be wrong"
            found.append(_anomaly(metric.key, "model", text, value))
    return found + _too_accurate(report)


def gate_result(
    report: Report, gates: Sequence[Gate], comparison: GateReport | None = None
) -> GateReport:
    """The report's gate: its limits, its plausibility, and its comparison with a baseline.

    The verdict is None where neither a limit nor a baseline was set: nothing was promised, and
    nothing is accepted. Otherwise a result that is implausible fails whatever the limits are.
    """
    if not gates and comparison is None:
        return GateReport()
    compared = comparison or GateReport()
    checks = (*limit_checks(report, gates), *implausible(report), *compared.checks)
    return GateReport(worst_class(check.verdict for check in checks), checks, compared.baseline)


def failure_text(gate: GateReport, most: int = 20) -> str:
    """One line for the verdict and one per check that is not accepted, the worst class first."""
    failed = gate.failures
    lines = [f"gate failed: {gate.verdict}"]
    lines += [f"  {failure.verdict}: {failure.message}" for failure in failed[:most]]
    if len(failed) > most:
        lines.append(f"  and {len(failed) - most} more")
    return "\n".join(lines)


def examples_needed(limit: float, ideal: float, per_example: float = 1) -> int:
    """Examples n with per_example / n <= |ideal - limit|; 0 where the limit is the ideal itself."""
    distance = abs(ideal - limit)
    return math.ceil(per_example / distance - 1e-6) if distance else 0


class _Reading(NamedTuple):
    """One value to judge. raw: as it stands in the report.  compared: what is held against the limit."""

    scope: str
    raw: float | None = None
    compared: float | None = None


def _read(holder: ModelReport | SiteReport, scope: str, gate: Gate) -> _Reading:
    raw, ends, untouched = (
        holder.metric(gate.metric), holder.interval(gate.metric), METRIC[gate.metric].untouched,
    )  # fmt: skip
    left = isinstance(holder, SiteReport) and holder.operator == TEACHER
    if left and raw is None and untouched is not None:
        raw, ends = untouched, (untouched, untouched)
    compared = finite(raw)
    if gate.confidence and compared is not None:
        compared = None if ends is None else ends[0 if gate.bound == "min" else 1]
    return _Reading(scope, raw, compared)


def _judge(report: Report, gate: Gate, reading: _Reading) -> Check:
    value, compared = finite(reading.raw), reading.compared
    limit = f"{gate.bound} {gate.limit:g}{' with confidence' if gate.confidence else ''}"
    subject = f"{gate.metric} of {reading.scope}"
    few = _too_few(report, gate) if reading.scope == "model" else None
    verdict: Class = "ANOMALOUS"
    if reading.raw is None:
        message = f"{subject} was not measured ({limit})"
    elif value is None:
        message = f"{subject} is not a finite number: {short(reading.raw)} ({limit})"
    elif few is not None:
        message = f"{subject} {few} for {limit}"
    elif compared is None:
        message = f"{subject} has no confidence interval ({limit})"
    else:
        kept = compared <= gate.limit if gate.bound == "max" else compared >= gate.limit
        shown = f"{value:.6g}"
        if gate.metric == "examples" and gate.bound == "min" and not kept:
            message = f"the report has {shown} examples, too few ({limit})"
        else:
            verdict = "ACCEPT" if kept else "REGRESSION"
            message = f"{subject} is {shown}, {'within' if kept else 'beyond'} its limit ({limit})"
        if gate.confidence:
            end, beyond = ("lower", "below") if gate.bound == "min" else ("upper", "above")
            told = f"{100 * report.model.confidence_level:.4g} % {end} bound {compared:.6g}"
            where = "within" if kept else beyond
            message = f"{subject} is {shown}; its {told} is {where} the limit {gate.limit:g}"
    more: dict[str, Any] = {gate.bound: gate.limit}
    if gate.confidence:
        more |= {"confidence": True, "bound_value": compared}
    return Check(
        "limit", gate.metric, reading.scope, value, verdict=verdict, message=message, **more
    )


def _too_few(report: Report, gate: Gate) -> str | None:
    """Why the number of examples does not carry a limit on a share, None where it does.

    A share of n examples moves in steps of 1 / n. A limit nearer to the ideal than one step says no
    more than the ideal does, and fewer examples keep it as easily: 20 of 20 is no proof of 0.99. A limit
    on a confidence bound needs so many examples that a perfect result keeps it.
    """
    needed = _needed(gate)
    if not needed:
        return None
    examples = finite(report.model.metric("examples"))
    if examples is None:
        return f"rests on an unknown number of examples; at least {needed} are needed"
    if examples >= needed:
        return None
    return f"rests on only {examples:g} examples; at least {needed} are needed"


def _needed(gate: Gate) -> int:
    """The examples without which a limit on a share cannot be judged; 0 where any number will do."""
    metric = METRIC[gate.metric]
    if not metric.share or gate.bound != metric.bound:
        return 0
    ideal = 1.0 if gate.bound == "min" else 0.0
    return examples_needed(gate.limit, ideal, FOR_CONFIDENCE if gate.confidence else 1)


def examples_asked(gates: Sequence[Gate]) -> int:
    """The examples that a report must have so that none of these limits fails for want of them."""
    least = [gate.limit for gate in gates if gate.metric == "examples" and gate.bound == "min"]
    return math.ceil(max([0, *least, *map(_needed, gates)]))


def _worst(readings: Sequence[_Reading], gate: Gate) -> _Reading:
    """The reading nearest to failing: one without a value before all others."""
    sign = 1 if gate.bound == "max" else -1
    return max(readings, key=lambda r: math.inf if r.compared is None else sign * r.compared)


def _governing(gates: Sequence[Gate], gate: Gate, name: str) -> bool:
    """Whether this is the limit for the site: the last pattern that matches wins, as in a recipe."""
    same = [
        other for other in gates
        if (other.metric, other.bound) == (gate.metric, gate.bound)
        and (METRIC[other.metric].scope == "site" if other.pattern is None
             else fnmatchcase(name, other.pattern))
    ]  # fmt: skip
    return sorted(same, key=lambda other: other.pattern is not None)[-1:] == [gate]


def _without(site: SiteReport, metric: str) -> bool:
    """Whether the metric does not exist for what the site became."""
    if metric in site.metrics:
        return False
    if METRIC[metric].of_fit:
        return site.operator != "asap"
    return site.operator == TEACHER and METRIC[metric].untouched is None


def _cannot_be_equal(site: SiteReport) -> bool:
    """An approximation whose results, were they bit-equal, would be a wonder: sorting softly at a
    temperature near zero and sorting exactly may really be the same."""
    sorts = site.operator.startswith("esp_") and site.teacher_operator.startswith("esp_")
    return site.approximate and not sorts


def _not_finite(
    holder: ModelReport | SiteReport, scope: str, metrics: Sequence[Metric]
) -> list[Check]:
    values = {metric.key: holder.metric(metric.key) for metric in metrics}
    return [
        _anomaly(key, scope, f"{key} of {scope} is {short(value)}: not finite")
        for key, value in values.items() if value is not None and finite(value) is None
    ]  # fmt: skip


def _too_equal(report: Report) -> list[Check]:
    count = sum(map(_cannot_be_equal, report.sites))
    for metric in ("max_abs_error", "output_rel_l2"):
        if count and finite(report.model.metric(metric)) == 0:
            text = (
                f"the outputs are exactly the teacher's ({metric} 0), although {count} "
                f"site{'s were' if count > 1 else ' was'} approximated: was the teacher compared "
                "with itself?"
            )
            return [_anomaly(metric, "model", text, 0.0)]
    return []


def _too_accurate(report: Report) -> list[Check]:
    """A compiled model imitates its teacher, unless it was trained on labels since."""
    if report.refresh is not None and report.refresh.mode == "labels":
        return []
    model, sides = report.model, ("accuracy_teacher", "accuracy_compiled")
    teacher, compiled = (finite(model.metric(side)) for side in sides)
    examples = finite(model.metric("examples"))
    if teacher is None or compiled is None or not examples or examples < 1:
        return []
    # Bootstrap intervals shrink to nothing where every example is right, hence the binomial one, with
    # two successes and two failures added (Agresti and Coull).
    share = (teacher * examples + 2) / (examples + 4)
    widths = [1.96 * math.sqrt(max(share * (1 - share), 0.0) / (examples + 4))]
    widths += [(ends[1] - ends[0]) / 2 for side in sides if (ends := model.interval(side)) is not None]
    gain, width = compiled - teacher, max(widths)
    if gain <= IMPLAUSIBLE_GAIN * width:
        return []
    text = (
        f"accuracy_compiled of model is {compiled:.6g}, the teacher's {teacher:.6g}: "
        f"a gain of {gain:.4g}, where chance explains {width:.4g}"
    )
    return [_anomaly("accuracy_compiled", "model", text, compiled)]


def _anomaly(metric: str, scope: str, message: str, value: float | None = None) -> Check:
    return Check("plausibility", metric, scope, value, verdict="ANOMALOUS", message=message)


_LIMITS: Mapping[str, Any] = {"min": Finite, "max": Finite, "confidence": Switch}


def _metrics(pattern: str | None) -> dict[str, Compound]:
    """What reads the limits of each metric."""
    return {name: partial(_limits, name, pattern) for name in known_metrics()}


def _parsed(data: Any, place: Place, readers: Mapping[str, Compound]) -> list[Gate]:
    if not isinstance(data, Mapping) or not data:
        raise InputError(
            f"{place}: at least one limit must be set",
            got=short(data),
            help="write for example  attention_rel_l2: {max: 0.05}",
        )
    found = parse(data, dict.fromkeys(readers), place, readers, what="metric")
    return [gate for gates in found.values() for gate in gates]


def _sites(patterns: Any, place: Place) -> list[Gate]:
    if not isinstance(patterns, Mapping) or not patterns:
        raise InputError(
            f"{place} must map patterns of site names to limits",
            got=short(patterns),
            help='write for example  sites: {"layers.0.*": {attention_rel_l2: {max: 0.01}}}',
        )
    gates: list[Gate] = []
    for pattern, limits in patterns.items():
        where = place.at(pattern, patterns, label=str(pattern))
        if not isinstance(pattern, str):
            raise InputError(f"{where}: a pattern must be text", got=short(pattern))
        gates += _parsed(limits, where, _metrics(pattern))
    return gates


def _limits(key: str, pattern: str | None, limits: Any, place: Place) -> list[Gate]:
    """The limits of one metric, of the model or of the sites of a pattern."""
    metric = METRIC[key]
    if pattern is not None and metric.scope == "model":
        raise InputError(
            f"{place}: only a metric of a site can be limited per site",
            help="limit a metric of the whole model at the top of the file",
        )
    if not isinstance(limits, Mapping) or not {"min", "max"} & set(limits):
        raise InputError(
            f"{place} must be limited by min and/or max, as in {{max: 0.05}}", got=short(limits)
        )
    found = parse(limits, _LIMITS, place)
    bounds: tuple[Literal["min", "max"], ...] = ("min", "max")
    for bound in bounds:
        if bound in found and metric.share and not (metric.low or 0) <= found[bound] <= 1:
            where = place.at(bound, limits)
            raise InputError(f"{where}: a share is at most 1", got=f"{found[bound]:g}",
                             help="write 99 % as 0.99")  # fmt: skip
    if found.get("min", -math.inf) > found.get("max", math.inf):
        raise InputError(f"{place}: min must not be above max", got=short(limits))
    confidence = found.get("confidence", False)
    return [Gate(key, bound, found[bound], pattern, confidence) for bound in bounds if bound in found]
