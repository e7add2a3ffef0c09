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
from typing import Any, Literal

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


def load_gates(path: str | Path) -> list[Gate]:
    """The gates in a YAML or JSON file.  Raises InputError: unknown name, no limit, empty file."""
    return parse_gates(read_yaml_mapping(path, "gates"), where=f"gates {path}")


def parse_gates(data: Mapping[str, Any], *, where: str = "gates") -> list[Gate]:
    """Checks `{"metric": {"min"|"max": number, "confidence": bool}}`, and the same for every pattern
    under "sites".  Raises InputError, with the line where the data was read from a file."""
    return _of_metrics(data, Place(where), None)


def check_patterns(gates: Sequence[Gate], names: Sequence[str]) -> None:
    """Raises InputError for a pattern that matches no site."""
    for pattern in dict.fromkeys(gate.pattern for gate in gates if gate.pattern is not None):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"gates: the site pattern {pattern!r} must match a site",
                help=f"sites: {', '.join(names[:10]) or 'none'}{' ...' if len(names) > 10 else ''}",
            )


def limit_checks(report: Report, gates: Sequence[Gate]) -> list[Check]:
    """One check per limit of the model and per limit and site of a pattern; a limit on a per-site metric
    without a pattern is one check, of the worst site."""
    checks = []
    for gate in gates:
        if gate.pattern is None and METRIC[gate.metric].scope != "site":
            checks.append(_judge(report, gate, report.model, "model"))
            continue
        governed = [site for site in report.sites if _governing(gates, gate, site.name)]
        if report.sites and not governed:
            continue  # patterns took every site over
        having = [site for site in governed if not _without(site, gate.metric)]
        judged = [_judge(report, gate, site, site.name) for site in having]
        if gate.pattern is None:
            judged = [_worst(judged) if judged else _judge(report, gate, None, "sites")]
        checks += judged
    return checks


def implausible(report: Report) -> list[Check]:
    """One ANOMALOUS check per measurement that no sound compilation and measurement would give."""
    checks = _not_finite(report.model, "model", [metric for metric in METRICS if metric.scope != "site"])
    for site in report.sites:
        checks += _not_finite(site, site.name, [metric for metric in METRICS if metric.every_site])
        if _cannot_be_equal(site) and finite(site.metric("attention_rel_l2_worst")) == 0:
            text = f"the attention of {site.name} is exactly the teacher's, although it was approximated"
            checks.append(_anomaly("attention_rel_l2_worst", site.name, text, 0.0))
    checks += _too_equal(report)
    for metric in METRICS:
        value = finite(report.model.metric(metric.key)) if metric.speed else None
        if value is not None and not 0 < value <= IMPLAUSIBLE_SPEEDUP:
            text = f"{metric.key} of model is {value:.6g}: no kernel is that fast; a timing must be wrong"
            checks.append(_anomaly(metric.key, "model", text, value))
    return checks + _too_accurate(report)


def gate_result(
    report: Report, gates: Sequence[Gate], comparison: GateReport | None = None
) -> GateReport:
    """The report's gate: its limits, its plausibility, and its comparison with a baseline.

    The verdict is None if neither a limit nor a baseline was set: nothing was promised, and nothing is
    accepted. Otherwise an implausible result fails, whatever the limits are.
    """
    if not gates and comparison is None:
        return GateReport()
    compared = comparison or GateReport()
    checks = (*limit_checks(report, gates), *implausible(report), *compared.checks)
    return GateReport(worst_class(check.verdict for check in checks), checks, compared.baseline)


def failure_text(gate: GateReport, most: int = 20) -> str:
    """One line for the verdict and one for each check that failed, the worst class first; a class other
    than the verdict's is named."""
    lines = [f"gate failed: {gate.verdict}"]
    for check in gate.failures[:most]:
        other = "" if check.verdict == gate.verdict else f"{check.verdict}: "
        lines.append(f"  {other}{check.message}")
    left = len(gate.failures) - most
    return "\n".join(lines + ([f"  and {left} more"] if left > 0 else []))


def examples_needed(limit: float, ideal: float, per_example: float = 1) -> int:
    """The fewest examples n with per_example / n <= |ideal - limit|; 0 if the limit is the ideal."""
    distance = abs(ideal - limit)
    return math.ceil(per_example / distance - 1e-6) if distance else 0


def _judge(report: Report, gate: Gate, holder: ModelReport | SiteReport | None, scope: str) -> Check:
    """holder: of the metric; None where there is none."""
    raw = ends = None
    if holder is not None:
        raw, ends = holder.metric(gate.metric), holder.interval(gate.metric)
        untouched = METRIC[gate.metric].untouched
        left = isinstance(holder, SiteReport) and holder.operator == TEACHER
        if raw is None and left and untouched is not None:
            raw, ends = untouched, (untouched, untouched)
    value = compared = finite(raw)
    if gate.confidence:
        compared = None if value is None or ends is None else ends[0 if gate.bound == "min" else 1]
    few = too_few(_needed(gate), report) if holder is report.model else ""
    level = report.model.confidence_level
    verdict, message = _verdict(gate, f"{gate.metric} of {scope}", raw, compared, few, level)
    more: dict[str, Any] = {gate.bound: gate.limit}
    if gate.confidence:
        more |= {"confidence": True, "bound_value": compared}
    return Check("limit", gate.metric, scope, value, verdict=verdict, message=message, **more)


def _verdict(
    gate: Gate, subject: str, raw: float | None, compared: float | None, few: str, level: float
) -> tuple[Class, str]:
    """compared: what is held against the limit, of the value as it stands in the report.  few: why there
    are too few examples.  level: of confidence."""
    limit = f"{gate.bound} {gate.limit:g}{' with confidence' if gate.confidence else ''}"
    unusable = unmeasured(subject, raw, limit)
    if unusable or few:
        return "ANOMALOUS", unusable or f"{subject} {few} for {limit}"
    if compared is None:
        return "ANOMALOUS", f"{subject} has no confidence interval ({limit})"
    kept = compared <= gate.limit if gate.bound == "max" else compared >= gate.limit
    if gate.metric == "examples" and gate.bound == "min" and not kept:
        return "ANOMALOUS", f"the report has {compared:.6g} examples, too few ({limit})"
    shown = f"{raw:.6g}"
    if gate.confidence:
        end = "lower" if gate.bound == "min" else "upper"
        shown += f" ({100 * level:.4g} % {end} bound {compared:.6g})"
    where = "within" if kept else "beyond"
    return "ACCEPT" if kept else "REGRESSION", f"{subject} is {shown}, {where} its limit ({limit})"


def unmeasured(subject: str, raw: float | None, against: str) -> str:
    """Why a value cannot be compared with anything; empty if it can."""
    if raw is None:
        return f"{subject} was not measured ({against})"
    broken = finite(raw) is None
    return f"{subject} is not a finite number: {short(raw)} ({against})" if broken else ""


def too_few(needed: int, *reports: Report) -> str:
    """Why reports have too few examples for a limit on a share; empty if they have enough.

    A share of n examples moves in steps of 1 / n. A limit nearer to the ideal than one step says no more
    than the ideal itself, and the fewer the examples, the easier it is to keep: 20 of 20 is no proof of
    0.99. A limit on a confidence bound needs so many examples that a perfect result keeps it.
    """
    examples = min((finite(report.model.metric("examples")) or 0.0) for report in reports)
    return "" if examples >= needed else f"rests on {examples:g} examples; at least {needed} are needed"


def _needed(gate: Gate) -> int:
    """The examples needed to judge a limit on a share; 0 if any number will do."""
    metric = METRIC[gate.metric]
    if not metric.share or gate.bound != metric.bound:
        return 0
    ideal = 1.0 if gate.bound == "min" else 0.0
    return examples_needed(gate.limit, ideal, FOR_CONFIDENCE if gate.confidence else 1)


def examples_asked(gates: Sequence[Gate]) -> int:
    """The examples a report needs so that none of these limits fails for lack of them."""
    least = [gate.limit for gate in gates if gate.metric == "examples" and gate.bound == "min"]
    return math.ceil(max([0, *least, *map(_needed, gates)]))


def _worst(checks: Sequence[Check]) -> Check:
    """The check nearest to failing; one without a value comes first."""

    def badness(check: Check) -> float:
        compared = check.bound_value if check.confidence else check.value
        if compared is None:
            return math.inf
        return compared if check.bound == "max" else -compared

    return max(checks, key=badness)


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
    """Whether bit-equal results would be a miracle: of an approximation, unless it sorts. A soft sort at
    a temperature near zero may really equal an exact one."""
    sorts = site.operator.startswith("esp_") and site.teacher_operator.startswith("esp_")
    return site.approximate and not sorts


def _not_finite(holder: ModelReport | SiteReport, scope: str, metrics: Sequence[Metric]) -> list[Check]:
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
    if report.trained_on_labels:
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


def _of_metrics(data: Any, place: Place, pattern: str | None) -> list[Gate]:
    """The limits of the sites of a pattern; without one, those of the whole file."""
    if not isinstance(data, Mapping) or not data:
        raise InputError(
            f"{place}: at least one limit must be set", got=short(data),
            help="write for example  attention_rel_l2: {max: 0.05}",
        )  # fmt: skip
    readers: dict[str, Compound] = {m.key: partial(_limits, m, pattern) for m in METRICS if m.gate}
    if pattern is None:
        readers["sites"] = _of_sites
    parsed = parse(data, dict.fromkeys(readers), place, readers, what="metric")
    return [gate for gates in parsed.values() for gate in gates]


def _of_sites(patterns: Any, place: Place) -> list[Gate]:
    if not isinstance(patterns, Mapping) or not patterns:
        raise InputError(
            f"{place} must map patterns of site names to limits", got=short(patterns),
            help='write for example  sites: {"layers.0.*": {attention_rel_l2: {max: 0.01}}}',
        )  # fmt: skip
    gates: list[Gate] = []
    for pattern, limits in patterns.items():
        where = place.at(pattern, patterns, label=str(pattern))
        if not isinstance(pattern, str):
            raise InputError(f"{where}: a pattern must be text", got=short(pattern))
        gates += _of_metrics(limits, where, pattern)
    return gates


def _limits(metric: Metric, pattern: str | None, limits: Any, place: Place) -> list[Gate]:
    """The limits of one metric, of the model or of the sites of a pattern."""
    if pattern is not None and metric.scope == "model":
        raise InputError(
            f"{place}: only a metric of a site can be limited per site",
            help="limit a metric of the whole model at the top of the file",
        )
    if not isinstance(limits, Mapping) or not {"min", "max"} & set(limits):
        rule = f"{place} must be limited by min and/or max, as in {{max: 0.05}}"
        raise InputError(rule, got=short(limits))
    ends = parse(limits, {"min": Finite, "max": Finite, "confidence": Switch}, place)
    confidence = ends.pop("confidence", False)
    for bound, limit in ends.items():
        if metric.share and not (metric.low or 0) <= limit <= 1:
            rule = f"{place.at(bound, limits)}: a share is at most 1"
            raise InputError(rule, got=f"{limit:g}", help="write 99 % as 0.99")
    if ends.get("min", -math.inf) > ends.get("max", math.inf):
        raise InputError(f"{place}: min must not be above max", got=short(limits))
    bounds: tuple[Literal["min", "max"], ...] = ("min", "max")
    return [Gate(metric.key, b, ends[b], pattern, confidence) for b in bounds if b in ends]
