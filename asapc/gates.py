"""Gates: limits a report must keep, `{"attention_rel_l2": {"max": 0.05}}`, and the check of them.

Every check, and the whole, is of one class:

    ACCEPT      the limit is kept
    REGRESSION  a limit, or the baseline (asapc.baseline), is not kept
    ANOMALOUS   the measurement cannot be trusted: missing, NaN or infinite, too few examples, or too good

The worst class wins, and ANOMALOUS is the worst: as long as a measurement cannot be trusted, nothing it
says about limits can be.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from asapc.errors import InputError
from asapc.yaml_file import read_yaml_mapping

Class = Literal["ACCEPT", "REGRESSION", "ANOMALOUS"]
CLASSES: tuple[Class, ...] = ("ACCEPT", "REGRESSION", "ANOMALOUS")  # the worst last

# These describe a predicted dual, so only a site that predicts one has them.
FIT_METRICS = ("row_bound", "dual_stability", "r2", "condition_number")
# Zero by construction where selection left the teacher's own code in place.
ZERO_FOR_TEACHER = (
    "attention_rel_l2", "attention_rel_l2_worst", "plan_kl", "output_rmse", "output_rel_l2",
    "max_abs_error",
)  # fmt: skip
# Measured at every site; proven bounds and condition numbers may overflow and say so honestly.
MEASURED_AT_SITES = (
    "attention_rel_l2", "attention_rel_l2_worst", "row_err", "col_err", "plan_kl", "output_rel_l2",
)  # fmt: skip
SHARES = ("prediction_agreement", "accuracy_teacher", "accuracy_compiled", "accuracy_drop")

IMPLAUSIBLE_SPEEDUP = 1000.0
IMPLAUSIBLE_GAIN = 3.0  # half-widths of the confidence interval of an accuracy
# The 95 % interval (Clopper and Pearson) of a share of n in n starts at 0.025^(1/n) > 1 - 3.69 / n.
FOR_CONFIDENCE = -math.log(0.025)

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 80


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


@dataclass(frozen=True)
class Comparison:
    """What the comparison with a baseline found: its checks, and its entry in the report."""

    checks: Sequence[dict[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)


def known_metrics() -> tuple[str, ...]:
    """Every name a gate may use."""
    from asapc.fidelity import METRICS

    return (*sorted(METRICS), "examples")


def load_gates(path: str | Path) -> list[Gate]:
    """The gates in a YAML or JSON file.  Raises InputError: unknown name, no limit, empty file."""
    return parse_gates(read_yaml_mapping(path, "gates"), where=f"gates {path}")


def parse_gates(data: Mapping[str, Any], *, where: str = "gates") -> list[Gate]:
    """Checks `{"metric": {"min"|"max": number, "confidence": bool}}`, and the same for every pattern
    under "sites".  Raises InputError."""
    if not data:
        raise InputError(
            f"{where}: at least one limit must be set",
            help="write for example  attention_rel_l2: {max: 0.05}",
        )
    gates: list[Gate] = []
    for metric, limits in data.items():
        if metric != "sites":
            gates += _parse_metric(metric, limits, None, where)
            continue
        if not isinstance(limits, Mapping) or not limits:
            raise InputError(
                f"{where}: sites must map patterns of site names to limits",
                got=short(limits),
                help='write for example  sites: {"layers.0.*": {attention_rel_l2: {max: 0.01}}}',
            )
        for pattern, own in limits.items():
            place = f"{where}: sites: {pattern}"
            if not isinstance(pattern, str):
                raise InputError(f"{place}: a pattern must be text", got=short(pattern))
            if not isinstance(own, Mapping) or not own:
                raise InputError(f"{place}: at least one limit must be set", got=short(own))
            for name, its in own.items():
                gates += _parse_metric(name, its, pattern, place)
    return gates


def check(report: Mapping[str, Any], gates: Sequence[Gate]) -> list[dict[str, Any]]:
    """One entry per limit of the model and per limit and site of a pattern; a limit on a per-site metric
    without a pattern is one entry, for the worst site.

    Raises InputError for a pattern that matches no site.
    """
    sites = [site for site in report.get("sites", ()) if isinstance(site, Mapping)]
    names = [site_name(site) for site in sites]
    for pattern in dict.fromkeys(gate.pattern for gate in gates if gate.pattern is not None):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"gates: the site pattern {pattern!r} must match a site",
                help=f"sites: {', '.join(names[:10]) or 'none'}{' ...' if len(names) > 10 else ''}",
            )
    checks = []
    for gate in gates:
        if gate.pattern is None and _scope(gate.metric) != "site":
            checks.append(_judge(report, gate, _Reading.of_model(report, gate)))
            continue
        own = [s for s, name in zip(sites, names, strict=True) if _governing(gates, gate, name)]
        if sites and not own:
            continue  # patterns took every site over
        readings = [_Reading.of_site(s, gate) for s in own if not _without(s, gate.metric)]
        if gate.pattern is None:
            readings = [_worst(readings, gate)] if readings else [_Reading("sites", None)]
        checks += [_judge(report, gate, reading) for reading in readings]
    return checks


def implausible(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One ANOMALOUS entry per measurement that no sound compilation and measurement would give."""
    model = _mapping(report, "model")
    found = []
    for name, info in _metrics().items():
        if info.scope != "site" and not_finite(model.get(name)):
            found.append(_anomaly(name, "model", f"{name} of model is {short(model[name])}: not finite"))
    for site in report.get("sites", ()):
        metrics, scope = _mapping(site, "metrics"), site_name(site)
        for name in MEASURED_AT_SITES:
            if not_finite(metrics.get(name)):
                text = f"{name} of {scope} is {short(metrics[name])}: not finite"
                found.append(_anomaly(name, scope, text))
        if approximated(site) and finite(metrics.get("attention_rel_l2_worst")) == 0:
            text = f"the attention of {scope} is exactly the teacher's, although it was approximated"
            found.append(_anomaly("attention_rel_l2_worst", scope, text, 0.0))
    found += _too_equal(report, model)
    for name in ("speedup", "speedup_lossless"):
        value = finite(model.get(name))
        if value is not None and not 0 < value <= IMPLAUSIBLE_SPEEDUP:
            text = f"{name} of model is {value:.6g}: no kernel does that, a timing is wrong"
            found.append(_anomaly(name, "model", text, value))
    return found + _too_accurate(report, model)


def gate_result(
    report: Mapping[str, Any], gates: Sequence[Gate], comparison: Comparison | None = None
) -> dict[str, Any]:
    """The `gate` entry of a report: {"verdict", "passed", "checks", "baseline"}.

    The verdict is None where neither a limit nor a baseline was set: nothing was promised, and
    nothing is accepted. Otherwise a result that is implausible fails whatever the limits are.
    """
    if not gates and comparison is None:
        return {"verdict": None, "passed": True, "checks": [], "baseline": None}
    checks = [*check(report, gates), *implausible(report)]
    if comparison is not None:
        checks += comparison.checks
    verdict = worst_class(entry["class"] for entry in checks)
    return {
        "verdict": verdict,
        "passed": verdict == "ACCEPT",
        "checks": checks,
        "baseline": None if comparison is None else dict(comparison.summary),
    }


def worst_class(classes: Any) -> Class:
    """ACCEPT if there is none."""
    return max(classes, key=CLASSES.index, default="ACCEPT")


def failure_text(gate: Mapping[str, Any], most: int = 20) -> str:
    """One line for the verdict and one per check that is not accepted, the worst class first."""
    failed = failures(gate)
    lines = [f"gate failed: {gate['verdict']}"]
    lines += [f"  {entry['class']}: {entry['message']}" for entry in failed[:most]]
    if len(failed) > most:
        lines.append(f"  and {len(failed) - most} more")
    return "\n".join(lines)


def failures(gate: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The checks that are not accepted, the worst class first."""
    failed = [entry for entry in gate.get("checks", ()) if not entry.get("passed")]
    return sorted(failed, key=lambda entry: -CLASSES.index(entry.get("class", "REGRESSION")))


def entry(
    kind: Literal["limit", "plausibility", "baseline"],
    metric: str,
    scope: str,
    value: float | None,
    verdict: Class,
    message: str,
    **more: Any,
) -> dict[str, Any]:
    """One check as it stands in the report."""
    return {
        "kind": kind, "metric": metric, "scope": scope, "value": value, **more, "class": verdict,
        "passed": verdict == "ACCEPT", "message": " ".join(message.split()),
    }  # fmt: skip


def finite(value: Any) -> float | None:
    """The number, or None for anything that is not one or is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def not_finite(value: Any) -> bool:
    """A number that is NaN, infinite or beyond a float; False for what is not a number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and finite(value) is None


def interval(holder: Mapping[str, Any], metric: str) -> tuple[float, float] | None:
    """holder["confidence"][metric], where it is a proper interval."""
    ends = _mapping(holder, "confidence").get(metric)
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        return None
    low, high = finite(ends[0]), finite(ends[1])
    return None if low is None or high is None or low > high else (low, high)


def approximated(site: Mapping[str, Any]) -> bool:
    """A site whose operator is not the teacher's own maths: bit-equal results would be a wonder.

    Sorting softly at a temperature near zero and sorting exactly may really be the same.
    """
    operator = str(site.get("operator"))
    own = str(_mapping(site, "convention").get("operator", "sinkhorn"))
    sorts = operator.startswith("esp_") and own.startswith("esp_")
    return operator not in ("teacher", "sinkhorn", own) and not sorts


def short(value: Any) -> str:
    """A value for a message, however long or deep it is."""
    text = _BRIEF.repr(value)
    return text if len(text) <= 100 else f"{text[:96]} ..."


def site_name(site: Mapping[str, Any]) -> str:
    return str(site.get("name"))


def examples_needed(limit: float, ideal: float, per_example: float = 1) -> int:
    """Examples n with per_example / n <= |ideal - limit|; 0 where the limit is the ideal itself."""
    distance = abs(ideal - limit)
    return math.ceil(per_example / distance - 1e-6) if distance else 0


@dataclass(frozen=True)
class _Reading:
    """One value to judge. raw: as it stands in the report, for the message."""

    scope: str
    raw: Any
    interval: tuple[float, float] | None = None

    @classmethod
    def of_model(cls, report: Mapping[str, Any], gate: Gate) -> _Reading:
        model = _mapping(report, "model")
        return cls("model", model.get(gate.metric), interval(model, gate.metric))

    @classmethod
    def of_site(cls, site: Mapping[str, Any], gate: Gate) -> _Reading:
        metrics = _mapping(site, "metrics")
        raw = metrics.get(gate.metric, site.get(gate.metric))
        left = site.get("operator") == "teacher"
        if raw is None and left and gate.metric in ZERO_FOR_TEACHER:
            return cls(site_name(site), 0.0, (0.0, 0.0))
        return cls(site_name(site), raw, interval(site, gate.metric))

    def compared(self, gate: Gate) -> float | None:
        """The number that is held against the limit."""
        value = finite(self.raw)
        if value is None or not gate.confidence:
            return value
        if self.interval is None:
            return None
        return self.interval[0 if gate.bound == "min" else 1]


def _judge(report: Mapping[str, Any], gate: Gate, reading: _Reading) -> dict[str, Any]:
    value, compared = finite(reading.raw), reading.compared(gate)
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
        if gate.confidence:
            level = finite(_mapping(report, "model").get("confidence_level")) or 0.95
            end = "at least" if gate.bound == "min" else "at most"
            shown += f", {end} {compared:.6g} with {level:.4g} confidence"
        if gate.metric == "examples" and gate.bound == "min" and not kept:
            message = f"the report rests on {shown} examples, too few ({limit})"
        else:
            verdict = "ACCEPT" if kept else "REGRESSION"
            message = f"{subject} is {shown}, {'within' if kept else 'beyond'} its limit ({limit})"
    more: dict[str, Any] = {gate.bound: gate.limit}
    if gate.confidence:
        more.update(confidence=True, bound_value=compared)
    return entry("limit", gate.metric, reading.scope, value, verdict, message, **more)


def _too_few(report: Mapping[str, Any], gate: Gate) -> str | None:
    """Why the number of examples does not carry a limit on a share, None where it does.

    A share of n examples moves in steps of 1 / n. A limit nearer to the ideal than one step says no
    more than the ideal does, and fewer examples keep it as easily: 20 of 20 is no proof of 0.99. A limit
    on a confidence bound needs so many examples that a perfect result keeps it.
    """
    if gate.metric not in SHARES or gate.bound != _good_bound(gate.metric):
        return None
    ideal = 1.0 if gate.bound == "min" else 0.0
    needed = examples_needed(gate.limit, ideal, FOR_CONFIDENCE if gate.confidence else 1)
    if not needed:
        return None
    examples = finite(_mapping(report, "model").get("examples"))
    if examples is None:
        return f"rests on an unknown number of examples, at least {needed} are needed"
    if examples >= needed:
        return None
    return f"rests on {examples:g} examples, too few: at least {needed} are needed"


def _worst(readings: Sequence[_Reading], gate: Gate) -> _Reading:
    """The reading nearest to failing: one without a value before all others."""

    def badness(reading: _Reading) -> float:
        value = reading.compared(gate)
        return math.inf if value is None else value if gate.bound == "max" else -value

    return max(readings, key=badness)


def _governing(gates: Sequence[Gate], gate: Gate, name: str) -> bool:
    """Whether this is the limit for the site: the last one that matches wins, as in a recipe."""
    same = [
        other
        for other in gates
        if (other.metric, other.bound) == (gate.metric, gate.bound)
        and (fnmatchcase(name, other.pattern) if other.pattern is not None
             else _scope(other.metric) == "site")
    ]  # fmt: skip
    patterned = [other for other in same if other.pattern is not None]
    return bool(same) and (patterned or same)[-1] == gate


def _without(site: Mapping[str, Any], metric: str) -> bool:
    """Whether the metric does not exist for what the site became."""
    if metric in _mapping(site, "metrics"):
        return False
    operator = site.get("operator")
    if metric in FIT_METRICS:
        return operator != "asap"
    return operator == "teacher" and metric not in ZERO_FOR_TEACHER


def _too_equal(report: Mapping[str, Any], model: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = [site_name(site) for site in report.get("sites", ()) if approximated(site)]
    for metric in ("max_abs_error", "output_rel_l2"):
        if names and finite(model.get(metric)) == 0:
            text = (
                f"the outputs are exactly the teacher's ({metric} 0), although {len(names)} "
                f"site{'s were' if len(names) > 1 else ' was'} approximated: was the teacher compared "
                "with itself?"
            )
            return [_anomaly(metric, "model", text, 0.0)]
    return []


def _too_accurate(report: Mapping[str, Any], model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A compiled model imitates its teacher, unless it was trained on labels since."""
    if _mapping(report, "refresh").get("mode") == "labels":
        return []
    teacher, own = (finite(model.get(f"accuracy_{side}")) for side in ("teacher", "compiled"))
    examples = finite(model.get("examples"))
    if teacher is None or own is None or not examples or examples < 1:
        return []
    # Bootstrap intervals shrink to nothing where every example is right, hence the binomial one, with
    # two successes and two failures added (Agresti and Coull).
    share = (teacher * examples + 2) / (examples + 4)
    widths = [1.96 * math.sqrt(max(share * (1 - share), 0.0) / (examples + 4))]
    for side in ("teacher", "compiled"):
        ends = interval(model, f"accuracy_{side}")
        if ends is not None:
            widths.append((ends[1] - ends[0]) / 2)
    gain, width = own - teacher, max(widths)
    if gain <= IMPLAUSIBLE_GAIN * width:
        return []
    text = (
        f"accuracy_compiled of model is {own:.6g}, the teacher's {teacher:.6g}: a gain of {gain:.4g}, "
        f"where chance explains {width:.4g}"
    )
    return [_anomaly("accuracy_compiled", "model", text, own)]


def _anomaly(metric: str, scope: str, message: str, value: float | None = None) -> dict[str, Any]:
    return entry("plausibility", metric, scope, value, "ANOMALOUS", message)


def _parse_metric(metric: Any, limits: Any, pattern: str | None, where: str) -> list[Gate]:
    names = known_metrics()
    if metric not in names:
        close = difflib.get_close_matches(str(metric), (*names, "sites"), n=1)
        raise InputError(
            f"{where}: unknown metric {short(metric)}",
            help=(f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(names)}",
        )
    place = f"{where}: {metric}"
    if pattern is not None and _scope(metric) == "model":
        raise InputError(
            f"{place}: only a metric of a site can be limited per site",
            help="limit a metric of the whole model at the top of the file",
        )
    bounds: tuple[Literal["min", "max"], ...] = ("min", "max")
    valid = isinstance(limits, Mapping) and set(limits) <= {*bounds, "confidence"}
    if not valid or not set(limits) & set(bounds):
        raise InputError(
            f"{place} must be limited by min and/or max, as in {{max: 0.05}}", got=short(limits)
        )
    confidence = limits.get("confidence", False)
    if not isinstance(confidence, bool):
        raise InputError(f"{place}: confidence must be true or false", got=short(confidence))
    gates = []
    for bound in bounds:
        if bound in limits:
            limit = _limit(limits[bound], place)
            if metric in SHARES and not (-1 if metric == "accuracy_drop" else 0) <= limit <= 1:
                raise InputError(f"{place}: a share is at most 1", got=f"{limit:g}",
                                 help="write 99 % as 0.99")  # fmt: skip
            gates.append(Gate(metric, bound, limit, pattern, confidence))
    if len(gates) == 2 and gates[0].limit > gates[1].limit:
        raise InputError(f"{place}: min must not be above max", got=short(limits))
    return gates


def _limit(value: Any, where: str) -> float:
    rule = f"{where}: a limit must be a finite number"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InputError(rule, got=short(value))
    try:
        limit = float(value)  # YAML 1.1 reads 1e-3 as text
    except (ValueError, OverflowError):
        raise InputError(rule, got=short(value)) from None
    if not math.isfinite(limit):
        raise InputError(rule, got=short(value))
    return limit


def _scope(metric: str) -> str:
    return "model" if metric == "examples" else _metrics()[metric].scope


def _good_bound(metric: str) -> Literal["min", "max"]:
    """The bound that asks for a good value: more is better, so there is a least."""
    return "min" if _metrics()[metric].direction == "max" else "max"


def _metrics() -> Mapping[str, Any]:
    from asapc.fidelity import METRICS  # torch: not for every --help

    return METRICS


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}
