"""Advice: what to do with a compiled model, from its report alone.  Data in, data out.

    judgement(report)          the report's own gate, or default limits where it sets none
    decide(report)             ship, look at a site, take the lossless model, keep the teacher, or measure
    lossless_instead(report)   the lossless model, where it is about as fast as the compiled one
    advise(report)             what would help, ranked by how much of the error it removes
    worst_first(sites)         the sites, the largest attention error first

Advice changes nothing: the report's own verdict, its JSON and the exit code of `asapc report` stay what
the gate file makes them, and without one there is no verdict. Everything here is structured, with a
sentence to print beside it, so that the page, the terminal and a notebook say the same.
"""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asapc.inputs.recipe import DEFAULT_BUDGET
from asapc.metrics import BUDGET_BOUNDS, METRIC
from asapc.operators.catalogue import TEACHER
from asapc.report.document import (
    Check,
    GateReport,
    ModelReport,
    Report,
    SiteReport,
    Trail,
    Tried,
    finite,
)
from asapc.report.gates import FOR_CONFIDENCE, Gate, examples_needed, gate_result
from asapc.report.shown import limit_text, positive, short
from asapc.report.tables import metric_text, number

NEARLY = 0.10  # the lossless model is worth its exactness where it takes at most this much longer
LEAST_SPEEDUP = 1.0
ERROR = "attention_rel_l2"  # what sites are ranked by
ALONE = "output_rel_l2"  # of the whole model with one site replaced: what that site adds to the error
DEFAULT_LIMITS = "default limits, no gate file was given"
NAMES = {ERROR: "attention error", "speedup": "speed-up"}  # in a sentence
LOSSLESS_RECIPE = "operator: lossless"
LOSSLESS_COMMAND = "asapc compile MODEL --calibration CALIB --recipe lossless.yaml -o OUT"
LOSSLESS_PYTHON = 'asapc.load("OUT", stage="lossless")'

Action = Literal["ship", "look", "lossless", "teacher", "measure"]


@dataclass(frozen=True)
class Limit:
    """A default limit, and in words where it is from."""

    gate: Gate
    source: str


@dataclass(frozen=True)
class Judgement:
    """gate: the checks and their verdict, None where there was nothing to check.

    default: whether its limits are default ones.  limits: these.
    """

    gate: GateReport
    limits: tuple[Limit, ...] = ()
    default: bool = False


@dataclass(frozen=True)
class Figures:
    """The figures that a decision rests on; None where one was not measured.

    speedup_lossless: where a site is approximated; else it is the same model timed twice.
    worst_site, worst_error: the site with the largest attention error, which may not be finite.
    """

    speedup: float | None
    speedup_lossless: float | None
    agreement: float | None
    worst_site: str | None
    worst_error: float | None


@dataclass(frozen=True)
class Lossless:
    """The lossless model in place of the compiled one.

    cost: the part of the compiled model's speed that it gives up, below 0 where it is the faster one.
    compiled_ms, lossless_ms: the whole model.
    """

    cost: float
    speedup: float | None
    compiled_ms: float
    lossless_ms: float
    sentence: str


@dataclass(frozen=True)
class Advice:
    """One thing that would help.

    kind:   "lossless": keep the exact operator at `site`.  "examples": measure on more examples.
    gain:   the part of the error that this would remove, 0 to 1; None where it removes none.
    cost:   the part of the compiled model's speed that it would cost, below 0 where it is faster; None
            where nothing was timed.
    timed:  whether the site's own times say so; otherwise the whole model's difference is shared evenly
            among the approximated sites.
    recipe: lines for the recipe, if any.
    """

    kind: Literal["lossless", "examples"]
    sentence: str
    site: str | None = None
    gain: float | None = None
    cost: float | None = None
    timed: bool = False
    recipe: str | None = None


@dataclass(frozen=True)
class Decision:
    """sentence: what to do.  because: why, with the numbers.  site: the one to look at."""

    action: Action
    sentence: str
    because: str
    judgement: Judgement
    site: str | None = None
    lossless: Lossless | None = None


def judgement(report: Report) -> Judgement:
    """The report's own gate; where that has no limits, default ones beside its comparison with a
    baseline: to be no worse than before is not yet to be good."""
    own = report.gate
    compared = tuple(check for check in own.checks if check.kind == "baseline")
    if own.verdict is not None and (not compared or any(c.kind == "limit" for c in own.checks)):
        return Judgement(own)
    limits = default_limits(report)
    comparison = GateReport(own.verdict, compared, own.baseline) if compared else None
    gate = gate_result(report, [limit.gate for limit in limits], comparison)
    return Judgement(gate, limits, default=True)


def default_limits(report: Report) -> tuple[Limit, ...]:
    """What can be asked of a model without a gate file, as far as it was measured.

    Closeness is held against the budget that the artefact was compiled with, and speed against the
    teacher's. A model that was refreshed on labels no longer imitates its teacher: only its accuracy and
    its speed are judged.
    """
    approximated = any(site.approximate for site in report.sites)
    trained = _trained_on_labels(report)
    budget, source = _budget(report.selection)
    if trained and "accuracy_drop" not in budget and "prediction_agreement" in budget:
        budget = {**budget, "accuracy_drop": 1 - budget["prediction_agreement"]}
    limits = []
    for key, bound in BUDGET_BOUNDS.items():
        of_sites = METRIC[key].scope == "site"
        holders = report.sites if of_sites else (report.model,)
        judged = key == "accuracy_drop" if trained else of_sites or approximated or bool(report.refresh)
        if key in budget and judged and any(_measured(holder, key) for holder in holders):
            limits.append(Limit(Gate(key, bound, budget[key]), source))
    if report.model.metric("speedup") is not None:
        limits.append(Limit(Gate("speedup", "min", LEAST_SPEEDUP), "no slower than the teacher"))
    return tuple(limits)


def _measured(holder: ModelReport | SiteReport, key: str) -> bool:
    """Also where the value is null: in a file that is a number that was not finite."""
    return key in (holder.values if isinstance(holder, ModelReport) else holder.metrics)


def _trained_on_labels(report: Report) -> bool:
    return report.refresh is not None and report.refresh.mode == "labels"


def _budget(trail: Trail | None) -> tuple[Mapping[str, float], str]:
    """The recorded budget, as far as it makes sense: a trail is told and never checked."""
    recorded: dict[str, float] = {}
    for key, limit in () if trail is None else trail.budget.items():
        value = finite(limit)
        if key in BUDGET_BOUNDS and value is not None and value >= 0:
            recorded[key] = min(value, METRIC[key].high or value)
    if recorded:
        return recorded, "the budget it was compiled with"
    return DEFAULT_BUDGET, "a recipe's default budget"


def figures(report: Report) -> Figures:
    model = report.model
    worst = next((s for s in worst_first(report.sites) if s.metric(ERROR) is not None), None)
    approximated = any(site.approximate for site in report.sites)
    return Figures(
        finite(model.metric("speedup")),
        finite(model.metric("speedup_lossless")) if approximated else None,
        finite(model.metric("prediction_agreement")),
        None if worst is None else worst.name,
        None if worst is None else worst.metric(ERROR),
    )


def worst_first(sites: Iterable[SiteReport]) -> list[SiteReport]:
    """By attention error: what is not finite first, what was not measured last, ties as they were."""

    def error(site: SiteReport) -> float:
        value = site.metric(ERROR)
        return -1.0 if value is None else math.inf if finite(value) is None else value

    return sorted(sites, key=lambda site: -error(site))


# The decision


def decide(report: Report) -> Decision:
    """What to do with the compiled model.

    A measurement that cannot be trusted comes before everything else; then the lossless model, where it
    is about as fast and mends whatever failed; then what failed, speed first.
    """
    judged = judgement(report)
    gate, sites = judged.gate, report.sites
    if gate.verdict is None:
        return Decision("measure", "There is nothing to decide on yet.", "Nothing was measured.", judged)
    if gate.verdict == "ANOMALOUS":
        again = "on more examples" if _few_examples(gate.failures[0]) else "again"
        because = _message(gate.failures[0])
        return Decision("measure", f"Measure {again} before you decide.", because, judged)
    if sites and all(site.operator == TEACHER for site in sites):
        return Decision("teacher", "Keep the teacher.", "Every layer still runs its own code.", judged)
    lossless = lossless_instead(report)
    if lossless is not None and _mends(lossless, gate):
        return _take_lossless(lossless, lossless.sentence, judged)
    if gate.failures:
        return _failed(report, judged)
    exact = sites and not any(site.approximate for site in sites)
    because = "Every layer computes the teacher's own attention." if exact else _all_kept(judged)
    return Decision("ship", "Ship it.", because, judged, lossless=lossless)


def _take_lossless(lossless: Lossless, because: str, judged: Judgement) -> Decision:
    what = "Take the lossless model instead."
    return Decision("lossless", what, because, judged, lossless=lossless)


def _failed(report: Report, judged: Judgement) -> Decision:
    """Speed first: a model that is slower than its teacher is of no use however close it is."""
    failures = judged.gate.failures
    speed = figures(report)
    slow = any(check.metric == "speedup" and check.scope == "model" for check in failures)
    if slow and speed.speedup is not None and speed.speedup < LEAST_SPEEDUP:
        compiled, exact, lossless = f"{number(speed.speedup)}x", speed.speedup_lossless, _lossless(report)
        fast = exact is not None and exact >= LEAST_SPEEDUP
        if lossless is not None and fast and _mends(lossless, judged.gate):
            because = f"The compiled model is slower than the teacher ({compiled}), the lossless one is "
            because += f"{number(exact)}x as fast as the teacher."
            return _take_lossless(lossless, because, judged)
        because = f"The compiled model is slower: {compiled} the teacher's speed."
        return Decision("teacher", "Keep the teacher.", because, judged)
    names = {site.name for site in report.sites}
    at_site = next((check for check in failures if check.scope in names), None)
    check = at_site or failures[0]
    site = check.scope if at_site else _worst_contributor(report, check)
    what = "Do not ship it yet." if site is None else f"Look at {short(site)} first."
    return Decision("look", what, _message(check), judged, site)


def _worst_contributor(report: Report, check: Check) -> str | None:
    """The site that makes most of the error, where a limit on the model's closeness failed."""
    approximated = [site.name for site in worst_first(report.sites) if site.approximate]
    if check.kind != "limit" or check.metric not in METRIC or not METRIC[check.metric].budget:
        return None
    shares = error_shares(report)
    return max(approximated, key=lambda name: shares.get(name, 0.0), default=None)


def _few_examples(check: Check) -> bool:
    """A share that was measured, and still cannot be judged, rests on too few examples."""
    metric = METRIC.get(check.metric)
    counts = check.metric == "examples" or (metric is not None and metric.share)
    return check.kind != "plausibility" and check.value is not None and counts


def _message(check: Check) -> str:
    """The check in a sentence."""
    limited = check.verdict == "REGRESSION" and check.kind == "limit" and check.metric in METRIC
    if limited and check.value is not None and check.limit is not None:
        name = NAMES.get(check.metric) or METRIC[check.metric].name
        where = "" if check.scope == "model" else f" of {short(check.scope)}"
        shown, limit = metric_text(check.metric, check.value), limit_text(check.metric, check.limit)
        least = "at least" if check.bound == "min" else "at most"
        sure = " with confidence" if check.confidence else ""
        return f"The {name}{where} is {shown}; it should be {least} {limit}{sure}."
    text = check.message or f"{check.metric} of {check.scope} is {number(check.value)}"
    return text if text.endswith(".") else f"{text}."


def _all_kept(judged: Judgement) -> str:
    count = len(judged.gate.checks)
    kind = "default limit" if judged.default else "check"
    if count == 1:
        return f"The {kind} is kept." if judged.default else "The check passed."
    return f"All {count} {kind}s {'are kept' if judged.default else 'passed'}."


def _mends(lossless: Lossless, gate: GateReport) -> bool:
    """Whether every failure is gone with the lossless model, which is the teacher up to rounding, and
    what was asked of the compiled model's speed is kept."""
    return _keeps_speed(lossless, gate.checks) and all(
        check.metric in METRIC and check.kind != "plausibility"
        and (METRIC[check.metric].budget or METRIC[check.metric].untouched is not None
             or (check.metric == "speedup" and check.kind == "limit"))
        for check in gate.failures
    )  # fmt: skip


def _keeps_speed(lossless: Lossless, checks: Iterable[Check]) -> bool:
    """Limits on the model's speed and time, and what it may have lost since a baseline."""
    own = {"speedup": lossless.speedup, "latency_compiled_ms": lossless.lossless_ms}
    for check in checks:
        if check.scope != "model" or check.metric not in own:
            continue
        value, low, high = own[check.metric], check.min, check.max
        if check.kind == "baseline" and check.baseline is not None and check.metric == "speedup":
            low = check.baseline * (1 - (check.allowed or 0.0))
        if low is None and high is None:
            continue
        if value is None or not (low or -math.inf) <= value <= (math.inf if high is None else high):
            return False
    return True


# The lossless model


def lossless_instead(report: Report) -> Lossless | None:
    """The lossless model, where the compiled one approximates something and gains at most NEARLY by it.

    The times are the whole model's. Where the recipe named several shapes, the layers' times must agree
    at every one of them: what is as fast on short sequences may fall behind on long ones.
    """
    lossless = _lossless(report)
    near = lossless is not None and lossless.lossless_ms <= (1 + NEARLY) * lossless.compiled_ms
    return lossless if near and not _falls_behind(report) else None


def _lossless(report: Report) -> Lossless | None:
    """The lossless model, whatever it costs; None where there is nothing approximated, or no time, and
    where the compiled one was trained on labels since: the lossless one has the old weights."""
    model = report.model
    compiled = positive(model.metric("latency_compiled_ms"))
    exact = positive(model.metric("latency_lossless_ms"))
    approximated = any(site.approximate for site in report.sites)
    if compiled is None or exact is None or not approximated or _trained_on_labels(report):
        return None
    cost = 1 - compiled / exact
    times = f"{number(exact)} ms against {number(compiled)} ms"
    if exact <= compiled:
        faster = "as fast as" if abs(cost) < 0.01 else "faster than"
        speed = f"It is {faster} the compiled model ({times})"
    else:
        speed = f"It takes {exact / compiled - 1:.0%} longer than the compiled model ({times})"
    sentence = f"{speed} and computes the teacher's attention exactly, up to rounding."
    return Lossless(cost, finite(model.metric("speedup_lossless")), compiled, exact, sentence)


def _falls_behind(report: Report) -> bool:
    """Whether the layers take longer with exact operators at one of several shapes that were timed."""
    trail = report.selection or Trail()
    pairs = [_pair(trail, site) for site in report.sites if site.approximate]
    times = [(one.latency_ms, other.latency_ms) for one, other in pairs if one and other]
    shapes = dict.fromkeys(shape for chosen, _ in times for shape in chosen)

    def behind(shape: str) -> bool:
        at_shape = [(positive(one.get(shape)), positive(other.get(shape))) for one, other in times]
        known = [(one, other) for one, other in at_shape if one is not None and other is not None]
        return sum(exact for _, exact in known) > (1 + NEARLY) * sum(chosen for chosen, _ in known)

    return len(shapes) > 1 and any(map(behind, shapes))


def _pair(trail: Trail, site: SiteReport) -> tuple[Tried | None, Tried | None]:
    """The candidate that a site became, and its exact operator; None where the trail lacks it."""
    candidates = trail.of(site.name).candidates
    chosen = next((tried for tried in candidates if tried.chosen), None)
    exact = next((tried for tried in candidates if tried.operator == site.teacher_operator), None)
    return chosen, exact


# Advice


def advise(report: Report) -> list[Advice]:
    """What would help: sites whose exact operator removes most of the error first, then more examples.

    Nothing where the whole model had better be lossless.
    """
    if decide(report).action == "lossless":
        return []
    shares = error_shares(report)
    found = [
        _exact_there(site, shares[site.name], *_cost(report, site))
        for site in report.sites if shares.get(site.name)
    ]  # fmt: skip
    found.sort(key=lambda advice: -(advice.gain or 0.0))
    return [*found, *_more_examples(report)]


def error_shares(report: Report) -> dict[str, float]:
    """The part of the error that each approximated site makes, 0 to 1; empty where none is known.

    By what selection measured of the whole model with that site alone replaced (output_rel_l2), where it
    is known of all of them; by their attention errors otherwise.
    """
    trail = report.selection or Trail()
    sites = [site for site in report.sites if site.approximate]
    alone = {site.name: _alone(trail, site) for site in sites}
    if any(site.metric(ERROR) is not None and finite(site.metric(ERROR)) is None for site in sites):
        return {}  # nothing is a part of what is not finite
    own = {site.name: positive(site.metric(ERROR)) or 0.0 for site in sites}
    known = {name: value for name, value in alone.items() if value is not None}
    errors = known if sites and len(known) == len(alone) else own
    total = sum(errors.values())
    return {name: error / total for name, error in errors.items()} if 0 < total < math.inf else {}


def _alone(trail: Trail, site: SiteReport) -> float | None:
    chosen, _ = _pair(trail, site)
    value = None if chosen is None else finite(chosen.alone.get(ALONE))
    return value if value is not None and value >= 0 else None


def _cost(report: Report, site: SiteReport) -> tuple[float | None, bool]:
    """The part of the speed that an exact operator at this site costs, and whether it was timed there."""
    model, trail = report.model, report.selection or Trail()
    compiled = positive(model.metric("latency_compiled_ms"))
    if compiled is None:
        return None, False
    chosen, exact = _pair(trail, site)
    if chosen is not None and exact is not None and not report.chosen_elsewhere:
        shape = _shape_of(chosen, model.values.get("batch"))
        before, after = (positive(tried.latency_ms.get(shape)) for tried in (chosen, exact))
        if before is not None and after is not None:
            return _lost(after - before, compiled), True
    lossless = positive(model.metric("latency_lossless_ms"))
    if lossless is None:
        return None, False
    return _lost((lossless - compiled) / sum(s.approximate for s in report.sites), compiled), False


def _lost(extra: float, compiled: float) -> float | None:
    """The part of the speed that is lost where the model takes so many milliseconds longer."""
    return extra / (compiled + extra) if compiled + extra > 0 else None


def _shape_of(tried: Tried, batch: object) -> str:
    """The longest sequences that were timed in batches of this size; nothing where there are none."""
    sizes = {
        shape: int(tokens)
        for shape in tried.latency_ms
        for size, _, tokens in [shape.partition("x")]
        if size == str(batch) and tokens.isascii() and tokens.isdigit() and len(tokens) < 12
    }
    return max(sizes, key=lambda shape: sizes[shape], default="")


def _exact_there(site: SiteReport, share: float, cost: float | None, timed: bool) -> Advice:
    about = "" if timed else "about "
    if cost is None:
        price = "What the exact operator costs there was not timed."
    elif cost < -0.005:
        price = f"Lossless there is {about}{-cost / (1 - cost):.0%} faster, too."
    elif cost < 0.005:
        price = "Lossless there costs no speed."
    else:
        price = f"Lossless there costs {about}{cost:.0%} of the speed."
    pattern = json.dumps(glob.escape(site.name), ensure_ascii=True)
    sentence = f"{short(site.name)} makes {share:.0%} of the error. {price}"
    recipe = f"sites:\n  {pattern}: {{{LOSSLESS_RECIPE}}}"
    return Advice("lossless", sentence, site.name, share, cost, timed, recipe)


def _more_examples(report: Report) -> list[Advice]:
    """Where a limit on the agreement is kept, and its interval reaches beyond it."""
    key = "prediction_agreement"
    ends = report.model.interval(key)
    limits = [c.min for c in judgement(report).gate.checks if c.metric == key and c.passed and c.min]
    if ends is None or not limits or ends[0] >= max(limits) or max(limits) >= 1:
        return []
    limit, examples = max(limits), finite(report.model.metric("examples")) or 0.0
    needed = examples_needed(limit, 1.0, FOR_CONFIDENCE)
    how = f"at least {needed} are needed" if examples < needed else "more of them narrow it"
    sentence = (
        f"The {report.model.confidence_level:.0%} interval of the agreement begins at "
        f"{metric_text(key, ends[0])}, below {limit_text(key, limit)}: {examples:g} examples do not "
        f"prove it, {how}."
    )
    return [Advice("examples", sentence)]


def recipe_of(advice: Sequence[Advice]) -> str:
    """One `sites:` entry for all of these that have lines for a recipe; empty where none has."""
    lines = [line for each in advice if each.recipe for line in each.recipe.splitlines()[1:]]
    return "\n".join(["sites:", *lines]) if lines else ""
