from pathlib import Path
from typing import Any

import pytest
import torch

from asapc.errors import InputError
from asapc.measure.bootstrap import share
from asapc.report import gates as judge
from asapc.report.document import GateReport, Report
from asapc.report.gates import (
    FOR_CONFIDENCE,
    Gate,
    examples_needed,
    load_gates,
    parse_gates,
)


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


def check(found: dict[str, Any], gates: list[Gate]) -> list[dict[str, Any]]:
    return [own.to_json() for own in judge.limit_checks(typed(found), gates)]


def implausible(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [own.to_json() for own in judge.implausible(typed(found))]


def gate_result(found: dict[str, Any], gates: list[Gate]) -> dict[str, Any]:
    return judge.gate_result(typed(found), gates).to_json()


def failure_text(gate: dict[str, Any], most: int = 20) -> str:
    return judge.failure_text(GateReport.from_json(gate, "gate"), most)


def test_model_metrics_are_looked_up_on_the_model() -> None:
    gates = parse_gates({"prediction_agreement": {"min": 0.99}, "output_rel_l2": {"max": 0.1}})
    limit = {"kind": "limit", "scope": "model"}
    assert check(report(), gates) == [
        {**limit, "metric": "prediction_agreement", "value": 0.995, "min": 0.99, "class": "ACCEPT",
         "passed": True,
         "message": "prediction_agreement of model is 0.995, within its limit (min 0.99)"},
        {**limit, "metric": "output_rel_l2", "value": 0.25, "max": 0.1, "class": "REGRESSION",
         "passed": False, "message": "output_rel_l2 of model is 0.25, beyond its limit (max 0.1)"},
    ]  # fmt: skip


def test_site_metrics_take_the_worst_site_for_either_bound() -> None:
    largest, smallest = check(
        report(), [Gate("attention_rel_l2", "max", 0.05), Gate("r2", "min", 0.85)]
    )
    assert (largest["scope"], largest["value"], largest["passed"]) == ("layers.1", 0.04, True)
    assert (smallest["scope"], smallest["value"], smallest["passed"]) == ("layers.1", 0.8, False)


def test_the_limit_itself_passes_and_both_bounds_are_two_checks() -> None:
    gates = [Gate("attention_rel_l2", "max", 0.04), Gate("prediction_agreement", "min", 0.995)]
    assert gate_result(report(), gates)["passed"]
    gates = parse_gates({"speedup": {"min": 2, "max": 2.5}})
    assert [entry["passed"] for entry in check(report(), gates)] == [True, False]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("bound", ["min", "max"])
def test_what_is_not_a_finite_number_fails(value: object, bound: Any) -> None:
    limit = -1e9 if bound == "min" else 1e9
    model = check(report(logit_kl=value), [Gate("logit_kl", bound, limit)])[0]
    assert (model["value"], model["class"], model["passed"]) == (None, "ANOMALOUS", False)
    site = report()
    site["sites"][0]["metrics"]["attention_rel_l2"] = value
    entry = check(site, [Gate("attention_rel_l2", bound, limit)])[0]
    assert (entry["scope"], entry["value"], entry["passed"]) == ("layers.0", None, False)
    assert entry["class"] == "ANOMALOUS"


def test_what_is_missing_fails() -> None:
    incomplete = report()
    del incomplete["sites"][2]["metrics"]["attention_rel_l2"]
    for found, gate in (
        (incomplete, Gate("attention_rel_l2", "max", 1.0)), (report(), Gate("accuracy_drop", "max", 1.0)),
        ({"model": {}, "sites": []}, Gate("plan_kl", "max", 1.0)),
        (report(examples=None), Gate("examples", "min", 1.0)),
    ):
        result = gate_result(found, [gate])
        assert (result["verdict"], result["passed"]) == ("ANOMALOUS", False)
        assert "was not measured" in result["checks"][0]["message"]


def test_a_fit_metric_does_not_apply_to_an_exact_loop_but_must_exist_elsewhere() -> None:
    assert gate_result(report(), [Gate("r2", "min", 0.5)])["passed"]
    unfitted = report()
    del unfitted["sites"][1]["metrics"]["r2"]
    assert not gate_result(unfitted, [Gate("r2", "min", 0.5)])["passed"]


def test_without_limits_nothing_is_accepted_and_nothing_fails() -> None:
    nothing = {"verdict": None, "passed": True, "checks": [], "baseline": None}
    assert gate_result(report(), []) == nothing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one limit"),
        ("attention_rel_12: {max: 1}", r"unknown metric(.|\n)*did you mean 'attention_rel_l2'"),
        ("speedup: 2", "speedup must be limited by min and/or max"),
        ("speedup: {least: 2}", "speedup must be limited"),
        ("speedup: {min: .nan}", "line 1: speedup: min must be a finite number"),
        ("speedup: {min: fast}", "min must be a finite number, got 'fast'"),
        ("speedup: {min: 1}\nspeedup: {min: 2}", "'speedup' appears twice"),
        ("[speedup]", "must be a mapping"), ("speedup: {confidence: true}", "speedup must be limited"),
        ("speedup: {min: 1, confidence: 0.95}", "confidence must be true or false, got 0.95"),
        ("speedup: {min: 3, max: 2}", "speedup: min must not be above max"),
        ("prediction_agreement: {min: 99}", r"a share is at most 1, got 99(.|\n)*write 99 % as 0.99"),
        ("accuracy_compiled: {min: -0.1}", "a share is at most 1"),
        ("speedup: {min: 1, mox: 2}", r"unknown key 'mox'(.|\n)*did you mean 'max'"),
        ("speedup: {min: 1}\nrow_er: {max: 1}", r"gates\.yaml, line 2: unknown metric 'row_er'"),
        ("sites:\n  a:\n    row_err: {max: x}", r"line 3: sites: a: row_err: max must be"),
        ("sites: {}", "sites must map patterns"),
        ("sites: {layers.0: {}}", "sites: layers.0: at least one limit"),
        ("sites: {0: {row_err: {max: 1}}}", "a pattern must be text"),
        ("sites: {a: {row_er: {max: 1}}}", "unknown metric 'row_er'"),
        ("sites: {a: {logit_kl: {max: 1}}}", "only a metric of a site can be limited per site"),
        ("sites: {a: {sites: {b: {row_err: {max: 1}}}}}", "unknown metric 'sites'"),
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


# Limits per site


def classes(found: dict[str, Any], **data: Any) -> dict[str, str]:
    """Scope to class of the checks of a gate file."""
    return {entry["scope"]: entry["class"] for entry in check(found, parse_gates(data))}


LIMITS = {"attention_rel_l2": {"max": 0.02}}
LOOSER = {"*.1": {"attention_rel_l2": {"max": 0.05}}}
STRICTER = {**LOOSER, "layers.*": {"attention_rel_l2": {"max": 0.001}}}
OUTPUT = {"output_rel_l2": {"max": 0.3}}


@pytest.mark.parametrize(("limits", "expected"), [
    ({"sites": {"layers.[01]": LIMITS}}, {"layers.0": "ACCEPT", "layers.1": "REGRESSION"}),
    (LIMITS, {"layers.1": "REGRESSION"}),
    # A pattern takes its sites out of the general limit, and the last one wins.
    ({**LIMITS, "sites": LOOSER}, {"layers.0": "ACCEPT", "layers.1": "ACCEPT"}),
    ({**LIMITS, "sites": STRICTER},
     {"layers.0": "REGRESSION", "layers.1": "REGRESSION", "layers.2": "ACCEPT"}),
    (OUTPUT, {"model": "ACCEPT"}), ({"sites": {"layers.0": OUTPUT}}, {"layers.0": "REGRESSION"}),
    ({"examples": {"min": 400}}, {"model": "ACCEPT"}),
])  # fmt: skip
def test_what_a_limit_is_held_against(limits: dict[str, Any], expected: dict[str, str]) -> None:
    assert classes(report(), **limits) == expected


def test_a_pattern_leaves_the_other_bound_and_other_metrics_alone() -> None:
    gates = parse_gates({"r2": {"min": 0.85}, "sites": {"*": {"r2": {"max": 1}}}})
    found = check(report(), gates)
    assert [(e["scope"], e["class"]) for e in found if "min" in e] == [("layers.1", "REGRESSION")]
    assert [(e["scope"], e["class"]) for e in found if "max" in e] == [
        ("layers.0", "ACCEPT"), ("layers.1", "ACCEPT"),
    ]  # fmt: skip


def test_a_pattern_that_matches_no_site_is_an_error() -> None:
    gates = parse_gates({"sites": {"layers.3": {"row_err": {"max": 1}}}})
    with pytest.raises(InputError, match=r"'layers.3' must match a site(.|\n)*layers.0, layers.1"):
        check(report(), gates)
    with pytest.raises(InputError, match="sites: none"):
        gate_result({"model": {}, "sites": []}, gates)


def test_what_selection_left_as_it_was_has_no_error_and_no_fit() -> None:
    found = report()
    found["sites"].append({"name": "layers.3", "operator": "teacher", "metrics": {}})
    limits = {"attention_rel_l2": {"max": 0, "confidence": True}, "r2": {"min": 1}}
    assert classes(found, sites={"layers.3": limits}) == {"layers.3": "ACCEPT"}
    assert classes(found, attention_rel_l2={"max": 0.05}) == {"layers.1": "ACCEPT"}
    found["sites"][3]["metrics"] = {"row_err": None}
    assert classes(found, sites={"layers.3": {"row_err": {"max": 1}}}) == {"layers.3": "ANOMALOUS"}


# Limits on the confidence interval


@pytest.mark.parametrize(
    ("limit", "verdict", "text"),
    [
        ({"min": 0.99}, "ACCEPT", "is 0.995; its 95 % lower bound 0.99 is within the limit 0.99"),
        ({"min": 0.991}, "REGRESSION", "its 95 % lower bound 0.99 is below the limit 0.991"),
        ({"max": 1.0}, "ACCEPT", "is 0.995; its 95 % upper bound 0.999 is within the limit 1"),
        ({"max": 0.998}, "REGRESSION", "its 95 % upper bound 0.999 is above the limit 0.998"),
    ],
)
def test_the_pessimistic_end_is_compared(limit: Any, verdict: str, text: str) -> None:
    confidence = {"prediction_agreement": [0.99, 0.999]}
    gates = parse_gates({"prediction_agreement": {**limit, "confidence": True}})
    entry = check(report(confidence=confidence, examples=1000), gates)[0]
    assert (entry["value"], entry["class"]) == (0.995, verdict)
    assert text in entry["message"]
    assert entry["bound_value"] == (0.99 if "min" in limit else 0.999)


@pytest.mark.parametrize("ends", [[0.1, None], [0.2, 0.1], [0.1, float("nan")]])
def test_a_missing_or_broken_interval_fails(ends: object) -> None:
    gates = parse_gates({"logit_kl": {"max": 1, "confidence": True}})
    entry = check(report(logit_kl=0.1, confidence={"logit_kl": ends}), gates)[0]
    assert (entry["class"], entry["bound_value"]) == ("ANOMALOUS", None)
    assert "has no confidence interval" in entry["message"]
    assert classes(report(logit_kl=0.1), logit_kl={"max": 1, "confidence": True}) == {
        "model": "ANOMALOUS"
    }


def test_the_worst_site_is_that_of_the_worst_bound() -> None:
    found = report()
    for site, high in zip(found["sites"], (0.06, 0.05, 1e-6), strict=True):
        site["confidence"] = {"attention_rel_l2": [0, high]}
    limit = {"max": 0.055, "confidence": True}
    assert classes(found, attention_rel_l2=limit) == {"layers.0": "REGRESSION"}
    del found["sites"][2]["confidence"]
    assert classes(found, attention_rel_l2=limit) == {"layers.2": "ANOMALOUS"}


# Precision


@pytest.mark.parametrize(
    ("metric", "limit", "needed"),
    [
        ("prediction_agreement", {"min": 0.99}, 100),
        ("prediction_agreement", {"min": 0.99, "confidence": True}, 369),
        ("accuracy_drop", {"max": 0.005}, 200), ("accuracy_drop", {"max": -0.01}, 100),
    ],
)
def test_a_limit_on_a_share_needs_its_examples(metric: str, limit: Any, needed: int) -> None:
    good = {"prediction_agreement": 1.0, "accuracy_compiled": 1.0, "accuracy_drop": -0.02}
    found = report(**good, confidence={name: [own, own] for name, own in good.items()})
    gates = parse_gates({metric: limit})
    for examples, verdict in ((needed, "ACCEPT"), (needed - 1, "ANOMALOUS"), (None, "ANOMALOUS")):
        found["model"]["examples"] = examples
        entry = check(found, gates)[0]
        assert entry["class"] == verdict
        assert entry["passed"] or f"at least {needed} are needed" in entry["message"]


@pytest.mark.parametrize("limit", [0.9, 0.99])
def test_enough_examples_for_confidence_are_enough_for_a_perfect_result(limit: float) -> None:
    needed = examples_needed(limit, 1.0, FOR_CONFIDENCE)
    for examples, kept in ((needed, True), (round(needed * 0.9), False)):
        found = share(torch.ones(examples, dtype=torch.bool))
        assert found is not None and (found[0] >= limit) == kept


def test_limits_that_need_no_precision() -> None:
    limits = {
        "prediction_agreement": {"min": 1, "max": 1}, "accuracy_drop": {"max": 0},
        "accuracy_compiled": {"min": 0, "max": 0.999}, "output_rel_l2": {"max": 1e-9},
    }
    good = report(
        examples=3, prediction_agreement=1.0, accuracy_drop=0.0, accuracy_compiled=0.5, output_rel_l2=0.0
    )
    assert {entry["class"] for entry in check(good, parse_gates(limits))} == {"ACCEPT"}
    assert examples_needed(1.0, 1.0) == 0


def test_a_number_of_examples_is_a_metric() -> None:
    entry = check(report(), parse_gates({"examples": {"min": 500}}))[0]
    assert entry["class"] == "ANOMALOUS"
    assert entry["message"] == "the report rests on 400 examples, too few (min 500)"


# Results that are too good


def plausible(**model: Any) -> dict[str, Any]:
    return report(max_abs_error=0.1, accuracy_teacher=0.8, accuracy_compiled=0.8, **model)


def test_a_sound_report_is_plausible() -> None:
    """Also with bounds that overflow, and a nearly perfect teacher's perfect student."""
    assert implausible(plausible()) == implausible({"model": {}, "sites": []}) == []
    found = plausible(examples=50, confidence={"accuracy_compiled": [1.0, 1.0]})
    found["model"] |= {"accuracy_teacher": 0.98, "accuracy_compiled": 1.0}
    found["sites"][0]["metrics"] |= {"dual_stability": float("inf"), "condition_number": float("inf")}
    assert implausible(found) == []


def test_equal_outputs_of_an_approximated_model_are_anomalous() -> None:
    for errors in ({"max_abs_error": 0.0}, {"output_rel_l2": 0.0}):
        found = report(prediction_agreement=1.0, **errors)
        result = gate_result(found, parse_gates({"prediction_agreement": {"min": 0.99}}))
        assert result["verdict"] == "ANOMALOUS"
        assert "exactly the teacher's" in result["checks"][-1]["message"]
        assert "2 sites were approximated" in result["checks"][-1]["message"]
        assert "2 sites" in failure_text(result)
        for site in found["sites"]:
            site["operator"] = "sinkhorn"
        assert implausible(found) == []


@pytest.mark.parametrize(
    ("operator", "own", "expected"),
    [("asap", "sinkhorn", 1), ("lot", "sinkhorn", 1), ("lot", "lot", 0), ("teacher", "sinkhorn", 0),
     ("esp_hard", "esp_soft", 0)],  # a cold SoftSort sorts exactly
)  # fmt: skip
def test_equal_attention_of_an_approximated_site(operator: str, own: str, expected: int) -> None:
    found = report()
    found["sites"] = [
        {
            "name": "a", "operator": operator, "convention": {"operator": own},
            "metrics": {"attention_rel_l2_worst": 0.0},
        }
    ]  # fmt: skip
    assert len(implausible(found)) == expected


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 10**400])
def test_what_is_not_finite_is_anomalous_even_without_a_limit_on_it(value: Any) -> None:
    for found in (plausible(logit_kl=value), plausible()):
        if "logit_kl" not in found["model"]:
            found["sites"][1]["metrics"]["plan_kl"] = value
        result = gate_result(found, parse_gates({"speedup": {"min": 2}}))
        assert result["verdict"] == "ANOMALOUS" and "not finite" in failure_text(result)


@pytest.mark.parametrize(("value", "count"), [(1000.0, 0), (1000.5, 1), (0.0, 1), (-1.0, 1), (0.5, 0)])
def test_no_kernel_is_a_thousand_times_as_fast(value: float, count: int) -> None:
    assert len(implausible(plausible(speedup=value))) == count
    assert len(implausible(plausible(speedup_lossless=value))) == count


def test_a_compiled_model_far_more_accurate_than_its_teacher() -> None:
    found = plausible(examples=100)  # chance: 1.96 * sqrt(0.8 * 0.2 / 100) = 0.078
    for own, count in ((0.9, 0), (1.0, 0), (0.2, 0)):
        found["model"]["accuracy_compiled"] = own
        assert len(implausible(found)) == count
    found["model"]["examples"] = 1000
    assert "chance explains 0.02" in implausible({**found, "model": {
        **found["model"], "accuracy_compiled": 0.9}})[0]["message"]  # fmt: skip
    found["model"]["accuracy_compiled"] = 0.9
    found["model"]["confidence"] = {"accuracy_compiled": [0.85, 0.95]}
    assert implausible(found) == []
    del found["model"]["confidence"]
    assert len(implausible(found)) == 1
    assert implausible({**found, "refresh": {"mode": "labels"}}) == []
    assert len(implausible({**found, "refresh": {"mode": "distil"}})) == 1


def test_the_worst_class_wins_and_messages_are_single_lines() -> None:
    gates = parse_gates({"output_rel_l2": {"max": 0.1}, "logit_kl": {"max": 1}, "speedup": {"min": 1}})
    found = report()
    found["sites"][0]["name"] = "a\nb"
    result = gate_result(found, [*gates, Gate("attention_rel_l2", "max", 0.001, "a*")])
    assert result["verdict"] == "ANOMALOUS" and not result["passed"]
    assert [e["class"] for e in result["checks"]] == ["REGRESSION", "ANOMALOUS", "ACCEPT", "REGRESSION"]
    lines = failure_text(result).splitlines()
    assert lines == [
        "gate failed: ANOMALOUS", "  ANOMALOUS: logit_kl of model was not measured (max 1)",
        "  REGRESSION: output_rel_l2 of model is 0.25, beyond its limit (max 0.1)",
        "  REGRESSION: attention_rel_l2 of a b is 0.01, beyond its limit (max 0.001)",
    ]
    assert failure_text(result, most=1).splitlines()[-1] == "  and 2 more"
    assert gate_result(found, gates[:1])["verdict"] == "REGRESSION"
    assert gate_result(found, gates[2:])["verdict"] == "ACCEPT"
