from pathlib import Path
from typing import Any

import pytest
import torch

from asapc.errors import InputError
from asapc.measure.bootstrap import share
from asapc.report import gates as judge
from asapc.report.document import GateReport, Report
from asapc.report.gates import FOR_CONFIDENCE, Gate, examples_needed, load_gates, parse_gates


def report(**model: Any) -> dict[str, Any]:
    shares = {"examples": 400, "prediction_agreement": 0.995, "output_rel_l2": 0.25, "speedup": 3.0}
    metrics = [{"attention_rel_l2": 0.01, "r2": 0.9, "output_rel_l2": 0.5},
               {"attention_rel_l2": 0.04, "r2": 0.8}, {"attention_rel_l2": 1e-7}]  # fmt: skip
    return {
        "model": {**shares, **model},
        "sites": [
            {"name": f"layers.{i}", "operator": operator, "metrics": metrics[i]}
            for i, operator in enumerate(("asap", "asap", "sinkhorn"))
        ],
    }


def typed(document: dict[str, Any]) -> Report:
    return Report.from_json(document, "report")


def implausible(found: dict[str, Any]) -> list[str]:
    """What is said of measurements that are too good."""
    checks = judge.implausible(typed(found))
    assert {(own.kind, own.verdict) for own in checks} <= {("plausibility", "ANOMALOUS")}
    return [own.message for own in checks]


def gate_result(found: dict[str, Any], gates: dict[str, Any]) -> GateReport:
    return judge.gate_result(typed(found), parse_gates(gates))


def test_without_limits_nothing_is_accepted_and_nothing_fails() -> None:
    nothing = {"verdict": None, "passed": True, "checks": [], "baseline": None}
    assert judge.gate_result(typed(report()), []).to_json() == nothing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one limit"),
        ("attention_rel_12: {max: 1}", r"unknown metric(.|\n)*did you mean 'attention_rel_l2'"),
        ("speedup: {least: 2}", "speedup must be limited"),
        ("speedup: {min: .nan}", "line 1: speedup: min must be a finite number"),
        ("speedup: {min: 1}\nspeedup: {min: 2}", "'speedup' appears twice"),
        ("metric: a.py:f", r"a file never names code that runs(.|\n)*help: .*--metric FILE.py:FUNCTION"),
        ("[speedup]", "must be a mapping"), ("speedup: {confidence: true}", "speedup must be limited"),
        ("speedup: {min: 1, confidence: 0.95}", "confidence must be true or false, got 0.95"),
        ("speedup: {min: 3, max: 2}", "speedup: min must not be above max"),
        ("prediction_agreement: {min: 99}", r"a share is at most 1, got 99(.|\n)*write 99 % as 0.99"),
        ("speedup: {min: 1, mox: 2}", r"unknown key 'mox'(.|\n)*did you mean 'max'"),
        ("speedup: {min: 1}\nrow_er: {max: 1}", r"gates\.yaml, line 2: unknown metric 'row_er'"),
        ("sites:\n  a:\n    row_err: {max: x}", r"line 3: sites: a: row_err: max must be"),
        ("sites: {}", "sites must map patterns"),
        ("sites: {0: {row_err: {max: 1}}}", "a pattern must be text"),
        ("sites: {a: {logit_kl: {max: 1}}}", "only a metric of a site can be limited per site"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "gates.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_gates(path)


def test_what_is_no_float_is_no_limit_and_what_yaml_reads_as_text_is_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="min must be a finite number"):
        parse_gates({"speedup": {"min": 10**400}})
    path = tmp_path / "gates.yaml"
    path.write_text("attention_rel_l2: {max: 1e-2}", encoding="utf-8")
    assert load_gates(path) == [Gate("attention_rel_l2", "max", 0.01)]


# What a limit is held against


def site(index: int, **metrics: Any) -> dict[str, Any]:
    """The report with other metrics of a site, None where it lacks one."""
    found = report()
    known = found["sites"][index]["metrics"] | metrics
    found["sites"][index]["metrics"] = {key: value for key, value in known.items() if value != "none"}
    return found


def surely(*highs: float | None) -> dict[str, Any]:
    """The report with an interval of the attention error of each site."""
    found = report()
    for own, high in zip(found["sites"], highs, strict=True):
        own["confidence"] = {} if high is None else {"attention_rel_l2": [0, high]}
    return found


def untouched(**metrics: Any) -> dict[str, Any]:
    """The report with a site that selection left as it was."""
    found = report()
    found["sites"].append({"name": "layers.3", "operator": "teacher", "metrics": metrics})
    return found


def limit(metric: str, *, confidence: bool = False, **bounds: float) -> dict[str, Any]:
    return {metric: bounds | ({"confidence": True} if confidence else {})}


AGREEMENT = report(examples=1000, confidence={"prediction_agreement": [0.99, 0.999]})
ATTENTION = limit("attention_rel_l2", max=0.02)
LOOSER = {"*.1": limit("attention_rel_l2", max=0.05)}
GOOD = {"prediction_agreement": 1.0, "accuracy_compiled": 1.0, "accuracy_drop": -0.02}
SURE = {name: [value, value] for name, value in GOOD.items()}
Case = tuple[dict[str, Any], dict[str, Any], dict[str, str], str]
# A report, gates, the class of each scope that is judged, and what the first message says.
CASES: list[Case] = [
    (report(), limit("prediction_agreement", min=0.995), {"model": "ACCEPT"},
     "prediction_agreement of model is 0.995, within its limit (min 0.995)"),
    (report(), limit("output_rel_l2", max=0.1), {"model": "REGRESSION"},
     "output_rel_l2 of model is 0.25, beyond its limit (max 0.1)"),
    # Of sites the worst, for either bound; the limit itself is kept.
    (report(), limit("attention_rel_l2", max=0.04), {"layers.1": "ACCEPT"}, "is 0.04"),
    (report(), limit("r2", min=0.85), {"layers.1": "REGRESSION"}, "is 0.8"),
    # What is missing or no finite number; a fit's metric does not apply to an exact loop.
    *((report(logit_kl=value), limit("logit_kl", **{bound: edge}), {"model": "ANOMALOUS"}, "logit_kl")
      for value in (float("nan"), float("inf"), None) for bound, edge in (("min", -1e9), ("max", 1e9))),
    *((site(0, attention_rel_l2=value), limit("attention_rel_l2", max=1e9), {"layers.0": "ANOMALOUS"},
       "layers.0") for value in (float("nan"), None)),
    (site(2, attention_rel_l2="none"), limit("attention_rel_l2", max=1), {"layers.2": "ANOMALOUS"},
     "was not measured"),
    (report(), limit("accuracy_drop", max=1), {"model": "ANOMALOUS"}, "was not measured"),
    ({"model": {}, "sites": []}, limit("plan_kl", max=1), {"sites": "ANOMALOUS"}, "was not measured"),
    (report(), limit("r2", min=0.5), {"layers.1": "ACCEPT"}, ""),
    (site(1, r2="none"), limit("r2", min=0.5), {"layers.1": "ANOMALOUS"}, "was not measured"),
    # A pattern takes its sites out of the general limit of that bound, and the last one wins.
    (report(), {"sites": {"layers.[01]": ATTENTION}},
     {"layers.0": "ACCEPT", "layers.1": "REGRESSION"}, ""),
    (report(), {**ATTENTION, "sites": LOOSER}, {"layers.0": "ACCEPT", "layers.1": "ACCEPT"}, ""),
    (report(), {**ATTENTION, "sites": {**LOOSER, "layers.*": limit("attention_rel_l2", max=0.001)}},
     {"layers.0": "REGRESSION", "layers.1": "REGRESSION", "layers.2": "ACCEPT"}, ""),
    (report(), {"sites": {"layers.0": limit("output_rel_l2", max=0.3)}}, {"layers.0": "REGRESSION"}, ""),
    (report(), {**limit("r2", min=0.85), "sites": {"layers.0": limit("r2", max=1)}},
     {"layers.1": "REGRESSION", "layers.0": "ACCEPT"}, ""),
    # What selection left as it was has no error and no fit.
    (untouched(), {"sites": {"layers.3": limit("attention_rel_l2", max=0, confidence=True) | limit(
        "r2", min=1)}}, {"layers.3": "ACCEPT"}, ""),
    (untouched(), limit("attention_rel_l2", max=0.05), {"layers.1": "ACCEPT"}, ""),
    (untouched(row_err=None), {"sites": {"layers.3": limit("row_err", max=1)}}, {"layers.3": "ANOMALOUS"},
     ""),
    # The pessimistic end of an interval.
    *((AGREEMENT, limit("prediction_agreement", confidence=True, **bounds), {"model": verdict},
       f"is 0.995 (95 % {text} with confidence)")
      for bounds, verdict, text in (
        ({"min": 0.99}, "ACCEPT", "lower bound 0.99), within its limit (min 0.99"),
        ({"min": 0.991}, "REGRESSION", "lower bound 0.99), beyond its limit (min 0.991"),
        ({"max": 1.0}, "ACCEPT", "upper bound 0.999), within its limit (max 1"),
        ({"max": 0.998}, "REGRESSION", "upper bound 0.999), beyond its limit (max 0.998"))),
    *((report(logit_kl=0.1, confidence=confidence), limit("logit_kl", max=1, confidence=True),
       {"model": "ANOMALOUS"}, "has no confidence interval") for confidence in (
        {"logit_kl": [0.1, None]}, {"logit_kl": [0.2, 0.1]}, {"logit_kl": [0.1, float("nan")]}, {})),
    (surely(0.06, 0.05, 1e-6), limit("attention_rel_l2", max=0.055, confidence=True),
     {"layers.0": "REGRESSION"}, ""),
    (surely(0.06, 0.05, None), limit("attention_rel_l2", max=0.055, confidence=True),
     {"layers.2": "ANOMALOUS"}, ""),
    # A limit on a share needs its examples.
    *((report(**GOOD, confidence=SURE, examples=examples), limits, {"model": verdict},
       "" if verdict == "ACCEPT" else f"at least {needed} are needed")
      for limits, needed in (
        (limit("prediction_agreement", min=0.99), 100),
        (limit("prediction_agreement", min=0.99, confidence=True), 369),
        (limit("accuracy_drop", max=0.005), 200), (limit("accuracy_drop", max=-0.01), 100))
      for examples, verdict in ((needed, "ACCEPT"), (needed - 1, "ANOMALOUS"), (None, "ANOMALOUS"))),
    *((report(**GOOD | {"accuracy_drop": 0.0}, examples=3), limits, {"model": "ACCEPT"}, "")
      for limits in (limit("prediction_agreement", min=1), limit("prediction_agreement", max=1),
                     limit("accuracy_drop", max=0), limit("accuracy_compiled", min=0),
                     limit("output_rel_l2", max=0.3))),
    (report(), limit("examples", min=500), {"model": "ANOMALOUS"},
     "the report has 400 examples, too few (min 500)"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "limits", "expected", "message"), CASES)
def test_what_a_limit_is_held_against(
    found: dict[str, Any], limits: dict[str, Any], expected: dict[str, str], message: str
) -> None:
    checks = judge.limit_checks(typed(found), parse_gates(limits))
    assert [(own.scope, own.verdict) for own in checks] == [*expected.items()]
    assert message in checks[0].message
    for own in checks:
        assert own.kind == "limit" and own.passed == (own.verdict == "ACCEPT")
        if own.confidence and own.verdict != "ANOMALOUS":
            assert f"bound {own.bound_value:.6g})" in own.message


def test_a_pattern_that_matches_no_site_is_an_error() -> None:
    gates = parse_gates({"sites": {"layers.3": {"row_err": {"max": 1}}}})
    with pytest.raises(InputError, match=r"'layers.3' must match a site(.|\n)*layers.0, layers.1"):
        judge.check_patterns(gates, ["layers.0", "layers.1"])
    with pytest.raises(InputError, match="sites: none"):
        judge.check_patterns(gates, [])


@pytest.mark.parametrize("limit", [0.9, 0.99])
def test_enough_examples_for_confidence_are_enough_for_a_perfect_result(limit: float) -> None:
    needed = examples_needed(limit, 1.0, FOR_CONFIDENCE)
    for examples, kept in ((needed, True), (round(needed * 0.9), False)):
        found = share(torch.ones(examples, dtype=torch.bool))
        assert found is not None and (found[0] >= limit) == kept


# Results that are too good


def plausible(**model: Any) -> dict[str, Any]:
    return report(max_abs_error=0.1, **{"accuracy_teacher": 0.8, "accuracy_compiled": 0.8, **model})


def became(operator: str, own: str) -> dict[str, Any]:
    """A site whose attention is the teacher's to the last bit."""
    metrics = {"attention_rel_l2_worst": 0.0}
    site = {"name": "a", "operator": operator, "convention": {"operator": own}, "metrics": metrics}
    return {**report(), "sites": [site]}


def site_metric(index: int, **metrics: Any) -> dict[str, Any]:
    found = plausible()
    found["sites"][index]["metrics"] |= metrics
    return found


EXACT = [{**own, "operator": "sinkhorn"} for own in report()["sites"]]
PERFECT = {"accuracy_compiled": [1.0, 1.0]}
GAIN = {"examples": 1000, "accuracy_compiled": 0.9}  # chance: 1.96 * sqrt(0.8 * 0.2 / 1000) = 0.025
# A report, and what is said of it; empty where it is plausible.
TOO_GOOD: list[tuple[dict[str, Any], str]] = [
    (plausible(), ""), ({"model": {}, "sites": []}, ""),
    # Bounds that overflow, and a nearly perfect teacher's perfect student.
    (site_metric(0, dual_stability=float("inf"), condition_number=float("inf")), ""),
    (plausible(examples=50, confidence=PERFECT, accuracy_teacher=0.98, accuracy_compiled=1.0), ""),
    *((report(**errors), "although 2 sites were approximated: was the teacher compared with itself?")
      for errors in ({"max_abs_error": 0.0}, {"output_rel_l2": 0.0})),
    ({**report(max_abs_error=0.0, output_rel_l2=0.0), "sites": EXACT}, ""),
    *((became(operator, "sinkhorn"), "the attention of a is exactly the teacher's")
      for operator in ("asap", "lot")),
    (became("lot", "lot"), ""), (became("teacher", "sinkhorn"), ""),
    (became("esp_hard", "esp_soft"), ""),  # a cold SoftSort sorts exactly
    *((found, "not finite") for value in (float("nan"), 10**400)
      for found in (plausible(logit_kl=value), site_metric(1, plan_kl=value))),
    *((plausible(**{key: value}), told) for key in ("speedup", "speedup_lossless")
      for value, told in ((1000.0, ""), (1000.5, "a timing must be wrong"), (0.0, f"{key} of model is 0"),
                          (-1.0, "a timing must be wrong"), (0.5, ""))),
    *((plausible(examples=100, accuracy_compiled=own), "") for own in (0.9, 1.0, 0.2)),
    (plausible(**GAIN), "chance explains 0.02"),
    (plausible(**GAIN, confidence={"accuracy_compiled": [0.85, 0.95]}), ""),
    ({**plausible(**GAIN), "refresh": {"mode": "labels"}}, ""),
    ({**plausible(**GAIN), "refresh": {"mode": "distil"}}, "chance explains 0.02"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "told"), TOO_GOOD)
def test_results_that_are_too_good(found: dict[str, Any], told: str) -> None:
    """They fail whatever the limits are."""
    messages = implausible(found)
    assert len(messages) == bool(told) and told in "".join(messages)
    if told:
        gate = gate_result(found, {"examples": {"min": 1}})
        assert gate.verdict == "ANOMALOUS" and told in judge.failure_text(gate)


def test_the_worst_class_wins_and_messages_are_single_lines() -> None:
    limits = {"output_rel_l2": {"max": 0.1}, "logit_kl": {"max": 1}, "speedup": {"min": 1}}
    found = report()
    found["sites"][0]["name"] = "a\nb"
    result = gate_result(found, {**limits, "sites": {"a*": {"attention_rel_l2": {"max": 0.001}}}})
    assert result.verdict == "ANOMALOUS" and not result.passed
    assert [e.verdict for e in result.checks] == ["REGRESSION", "ANOMALOUS", "ACCEPT", "REGRESSION"]
    lines = judge.failure_text(result).splitlines()
    assert lines == [
        "gate failed: ANOMALOUS", "  logit_kl of model was not measured (max 1)",
        "  REGRESSION: output_rel_l2 of model is 0.25, beyond its limit (max 0.1)",
        "  REGRESSION: attention_rel_l2 of a b is 0.01, beyond its limit (max 0.001)",
    ]
    assert judge.failure_text(result, most=1).splitlines()[-1] == "  and 2 more"
    for key, verdict in (("output_rel_l2", "REGRESSION"), ("speedup", "ACCEPT")):
        assert gate_result(found, {key: limits[key]}).verdict == verdict
