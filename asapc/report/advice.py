"""Advice: what to do with a compiled model, from its report alone.  Data in, data out.

    judgement(report)          the report's own gate, or default limits where it sets none
    decide(report)             ship, look at a site, take the lossless model, keep the teacher, or measure
    advise(report)             what would help, ranked by how much of the error it removes

Advice changes nothing: the report's own verdict, its JSON and the exit code of `asapc report` stay what
the gate file makes them. Everything here comes with a sentence to print, so that the page, the terminal
and a notebook say the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asapc.inputs.recipe import DEFAULT_BUDGET
from asapc.metrics import BUDGET_BOUNDS, METRIC, is_share
from asapc.operators.catalogue import TEACHER
from asapc.report.document import (
    ERROR,
    Check,
    GateReport,
    Report,
    SiteReport,
    Tried,
    finite,
    positive,
    sizes_of,
)
from asapc.report.gates import Gate, examples_asked, gate_result
from asapc.report.tables import counted, metric_text, number
from asapc.terminal.printed import clipped

NEARLY = 0.10  # the lossless model is worth its exactness where it takes at most this much longer
LEAST_SPEEDUP = 1.0
ALONE = "output_rel_l2"  # of the whole model with one site replaced: what that site adds to the error
LOSSLESS_RECIPE = "operator: lossless"
LOSSLESS_PYTHON = 'asapc.load("OUT", stage="lossless")'


@dataclass(frozen=True)
class Judgement:
    """gate: the checks and their verdict, None where there was nothing to check.

    defaults: the limits, where these are default ones.
    """

    gate: GateReport
    defaults: tuple[Gate, ...] | None = None

    @property
    def basis(self) -> str:
        """Which limits a decision rests on, and how many of them are kept."""
        checks = self.gate.checks
        if self.defaults is not None:
            kept = f"{sum(check.passed for check in checks)} of {len(checks)} kept"
            return f"no gates file, so default limits apply: {kept}"
        return f"{len(self.gate.failures) or 'None'} of {counted(len(checks), 'check')} failed"


class Lossless(NamedTuple):
    """The lossless model in place of the compiled one.

    near: it takes at most NEARLY longer, at every timed shape.
    """

    near: bool
    sentence: str


@dataclass(frozen=True)
class Decision:
    """sentence: what to do.  because: why, with the numbers."""

    action: Literal["ship", "look", "lossless", "teacher", "measure"]
    sentence: str
    because: str
    judgement: Judgement
    lossless: Lossless | None = None


# The limits


def judgement(report: Report) -> Judgement:
    """The report's own gate. If it has no limits, default ones join its comparison with a baseline: being
    no worse than before is not yet being good."""
    gate = report.gate
    compared = tuple(check for check in gate.checks if check.kind == "baseline")
    if gate.verdict is not None and (not compared or any(c.kind == "limit" for c in gate.checks)):
        return Judgement(gate)
    limits = default_limits(report)
    comparison = GateReport(gate.verdict, compared, gate.baseline) if compared else None
    return Judgement(gate_result(report, limits, comparison), limits)


def default_limits(report: Report) -> tuple[Gate, ...]:
    """Limits for a model without a gate file, on the metrics that were measured.

    Errors are limited by the budget that the artefact was compiled with, and speed by the teacher's. A
    model that was refreshed on labels no longer imitates its teacher: only its accuracy and its speed are
    judged.  A null in a file was measured, and was not finite.
    """
    budget = _budget(report)
    if report.trained_on_labels:
        if "prediction_agreement" in budget:
            budget.setdefault("accuracy_drop", 1 - budget["prediction_agreement"])
        budget = {key: limit for key, limit in budget.items() if key == "accuracy_drop"}
    elif not report.approximated and report.refresh is None:
        budget = {key: limit for key, limit in budget.items() if METRIC[key].scope == "site"}
    measured = {*report.model.values}.union(*(site.metrics for site in report.sites))
    limits = [Gate(key, BUDGET_BOUNDS[key], limit) for key, limit in budget.items() if key in measured]
    if report.model.metric("speedup") is not None:
        limits.append(Gate("speedup", "min", LEAST_SPEEDUP))
    return tuple(limits)


def _budget(report: Report) -> dict[str, float]:
    """The budget that the artefact was compiled with, or the default one."""
    recorded = {  # nobody has checked a trail
        key: min(value, METRIC[key].high or value)
        for key, limit in report.trail.budget.items()
        if key in BUDGET_BOUNDS and (value := finite(limit)) is not None and value >= 0
    }
    return recorded or dict(DEFAULT_BUDGET)


# The decision


def decide(report: Report) -> Decision:
    """What to do with the compiled model.

    A measurement that cannot be trusted comes before everything else; then torch.compile, if it was timed
    and gains more; then the lossless model, if it is about as fast and mends whatever failed; then what
    failed, speed first: a model that is slower than its teacher is useless, however close it is.
    """
    judged, sites, lossless = judgement(report), report.sites, _lossless(report)
    gate = judged.gate
    if gate.verdict is None:
        return Decision("measure", "There is nothing to decide yet.", "Nothing was measured.", judged)
    if gate.verdict == "ANOMALOUS":
        check = gate.failures[0]
        # A share that was measured, and still cannot be judged, rests on too few examples.
        counts = check.metric == "examples" or is_share(check.metric)
        few = counts and check.value is not None and check.kind != "plausibility"
        again = "on more examples (--data)" if few else "again"
        return Decision("measure", f"Measure {again} before you decide.", _message(check), judged)
    if sites and all(site.operator == TEACHER for site in sites):
        why = f": {clipped(sites[0].reason, 160)}" if sites[0].reason else ""
        because = f"Every layer still runs its own code{why}."
        return Decision("teacher", "Keep the teacher.", because, judged)
    faster = _under_torch_compile(report)
    if faster:
        return Decision("teacher", "Run the teacher under torch.compile.", faster, judged)
    near = lossless if lossless is not None and lossless.near else None
    mends = lossless is not None and all(_kept(check, report) for check in gate.checks)
    instead = "Take the lossless model instead."
    if near is not None and mends:
        return Decision("lossless", instead, near.sentence, judged, lossless=near)
    if not gate.failures:
        passed = "checks passed" if judged.defaults is None else "default limits are kept"
        because = f"All {len(gate.checks)} {passed}." if len(gate.checks) > 1 else "The check passed."
        if sites and not report.approximated:
            because = "Every layer computes the teacher's own attention."
        because += _unproven(report, judged)
        return Decision("ship", "Ship it.", because, judged, lossless=near)
    speedup = finite(report.model.metric("speedup"))
    slow = any((check.metric, check.scope) == ("speedup", "model") for check in gate.failures)
    if slow and speedup is not None and speedup < LEAST_SPEEDUP:
        because = f"The compiled model is slower: it runs at {number(speedup)}x the teacher's speed."
        exact = finite(report.model.metric("speedup_lossless"))
        if mends and exact is not None and exact >= LEAST_SPEEDUP:
            because += f" The lossless model runs at {number(exact)}x."
            return Decision("lossless", instead, because, judged, lossless=lossless)
        return Decision("teacher", "Keep the teacher.", because, judged)
    names = {site.name for site in sites}
    check = next((check for check in gate.failures if check.scope in names), gate.failures[0])
    site = check.scope if check.scope in names else _worst_contributor(report, check)
    what = "Do not ship it yet." if site is None else f"Look at {clipped(site, 80)} first."
    return Decision("look", what, _message(check), judged)


def _unproven(report: Report, judged: Judgement) -> str:
    """A sentence if the examples are too few to prove an agreement that is within the budget."""
    metric = "prediction_agreement"
    limit, ends = _budget(report).get(metric), report.model.interval(metric)
    of_teacher = judged.defaults is not None and not report.trained_on_labels
    if not of_teacher or limit is None or ends is None or ends[0] >= limit:
        return ""
    examples = finite(report.model.metric("examples")) or 0
    needed = examples_asked([Gate(metric, "min", limit, confidence=True)])
    more = f"; {metric_text(metric, limit)} takes {needed}" if examples < needed else ""
    return (
        f" But agreement on {counted(int(examples), 'example')} proves only that at least "
        f"{metric_text(metric, ends[0])} of predictions are equal{more}."
    )


def _under_torch_compile(report: Report) -> str:
    """A sentence if the teacher under torch.compile was timed and is faster than what asapc has made."""
    keys = ("speedup", "speedup_lossless", "speedup_compiled_torch_compile")
    gained = max(positive(report.model.metric(key)) or 0.0 for key in keys)
    under = positive(report.model.metric("speedup_teacher_torch_compile"))
    if under is None or under <= (1 + NEARLY) * gained:
        return ""
    return f"It is {number(under)}x as fast there; asapc gains {number(gained)}x."


def _worst_contributor(report: Report, check: Check) -> str | None:
    """The site that causes most of the error, if a limit on the model's error failed."""
    if check.kind != "limit" or check.metric not in BUDGET_BOUNDS:
        return None
    shares = error_shares(report)
    names = [site.name for site in report.worst_first if site.approximate]
    return max(names, key=lambda name: shares.get(name, 0.0), default=None)


def _message(check: Check) -> str:
    """The check in a sentence."""
    text = check.message or f"{check.metric} of {check.scope} is {number(check.value)}"
    return text if text.endswith((".", "?")) else f"{text}."


# The lossless model


def _lossless(report: Report) -> Lossless | None:
    """The lossless model, whatever it costs. None if nothing is approximated, if it was not timed, and if
    the compiled model has been trained on labels: the lossless one has the old weights.

    The times are the whole model's. If the recipe named several shapes, the layers' times must agree at
    every one of them: what is as fast on short sequences may fall behind on long ones.
    """
    model = report.model
    compiled, exact = (positive(model.metric(f"latency_{x}_ms")) for x in ("compiled", "lossless"))
    if compiled is None or exact is None or not report.approximated or report.trained_on_labels:
        return None
    speed = f"It takes {exact / compiled - 1:.0%} longer than"
    if exact <= compiled:
        speed = f"It is {'as fast as' if compiled < 1.01 * exact else 'faster than'}"
    sentence = (
        f"{speed} the compiled model ({number(exact)} ms against {number(compiled)} ms) and computes the "
        "teacher's attention exactly, up to rounding."
    )
    near = exact <= (1 + NEARLY) * compiled and not _falls_behind(report)
    return Lossless(near, sentence)


def _falls_behind(report: Report) -> bool:
    """Whether layers with exact operators are slower at one of several shapes that were timed."""
    pairs = [_pair(report, site) for site in report.approximated]
    shapes = {shape for chosen, _ in pairs for shape in chosen.latency_ms}

    def behind(shape: str) -> bool:
        at_shape = [[positive(tried.latency_ms.get(shape)) for tried in pair] for pair in pairs]
        known = [(one or 0.0, other or 0.0) for one, other in at_shape if one and other]
        return sum(exact for _, exact in known) > (1 + NEARLY) * sum(chosen for chosen, _ in known)

    return len(shapes) > 1 and any(map(behind, shapes))


def _kept(check: Check, report: Report) -> bool:
    """Whether the lossless model, which is the teacher up to rounding, would pass a check.

    Its speed and its time are held against the compiled model's limits; what approximates nothing has no
    error that a budget may limit.
    """
    if check.kind == "plausibility":
        return check.passed
    speed = {"speedup": "speedup_lossless", "latency_compiled_ms": "latency_lossless_ms"}
    if check.scope == "model" and check.metric in speed:
        value, least = finite(report.model.metric(speed[check.metric])), check.min
        if check.baseline is not None:
            least = check.baseline * (1 - (check.allowed or 0.0))
        most = math.inf if check.max is None else check.max
        return value is not None and (least or 0.0) <= value <= most
    metric = METRIC.get(check.metric)
    return check.passed or (metric is not None and (metric.budget or metric.untouched is not None))


def _pair(report: Report, site: SiteReport) -> tuple[Tried, Tried]:
    """The candidate that a site became, and its exact operator; empty ones if the trail lacks them."""
    tried = report.trail.of(site.name)
    exact = (each for each in tried.candidates if each.operator == site.teacher_operator)
    return tried.chosen, next(exact, Tried())


# What would help


def advise(report: Report) -> list[str]:
    """What would help, beginning with the site whose exact operator removes most of the error; nothing if
    the whole model had better be lossless."""
    if decide(report).action == "lossless":
        return []
    shares = error_shares(report)
    sites = sorted(report.approximated, key=lambda site: -shares.get(site.name, 0.0))
    return [_exact_there(report, s, shares[s.name]) for s in sites if shares.get(s.name)]


def error_shares(report: Report) -> dict[str, float]:
    """The part of the error that each approximated site causes, 0 to 1; empty if unknown.

    It is that of the whole model with that site alone replaced (output_rel_l2), if selection measured it
    for all of them, else that of their attention errors.
    """
    sites = report.approximated
    if any(site.metric(ERROR) is not None and finite(site.metric(ERROR)) is None for site in sites):
        return {}  # infinity has no parts
    alone = {site.name: finite(_pair(report, site)[0].alone.get(ALONE)) for site in sites}
    known = {name: error for name, error in alone.items() if error is not None and error >= 0}
    if len(known) < len(sites):
        known = {site.name: positive(site.metric(ERROR)) or 0.0 for site in sites}
    total = sum(known.values())
    return {name: error / total for name, error in known.items()} if 0 < total < math.inf else {}


def _exact_there(report: Report, site: SiteReport, share: float) -> str:
    cost = _cost(report, site)
    price = "; the cost in speed was not timed"
    if cost is not None:
        price = " at no cost in speed"
        if cost < -0.005:
            price = f" and make the model {-cost / (1 - cost):.0%} faster"
        elif cost >= 0.005:
            price = f" and cost {cost:.0%} of the speed"
    return f"Keeping {clipped(site.name, 80)} exact would remove {share:.0%} of the error{price}."


def _cost(report: Report, site: SiteReport) -> float | None:
    """The part of the model's speed that an exact operator at this site costs, negative if it gains.

    None if it was not timed, on the longest sequences in batches of the model's size.
    """
    chosen, exact = _pair(report, site)
    shapes = [x for x in chosen.latency_ms if sizes_of(x)[:1] == [report.model.values.get("batch")]]
    shape = max(shapes, key=sizes_of, default="")
    before, after = (positive(tried.latency_ms.get(shape)) for tried in (chosen, exact))
    model = positive(report.model.metric("latency_compiled_ms"))
    if model is None or before is None or after is None or report.chosen_elsewhere:
        return None
    slower = model + after - before
    return (after - before) / slower if slower > 0 else None
