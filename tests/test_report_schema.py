"""The published schema of the report: what it takes, what it refuses, and that real reports keep it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from asapc.calibration.enough import Shortage
from asapc.metrics import METRICS as METRICS_OF_REPORTS
from asapc.report import Report, json_text, report_schema
from asapc.report.baseline import Allowance, Baseline, compare
from asapc.report.document import CLASSES, REPORT_FORMAT
from asapc.report.gates import gate_result, parse_gates

METRICS = {
    "attention_rel_l2": 0.02, "attention_rel_l2_worst": 0.1, "row_err": 0.01, "plan_kl": 1e-3, "r2": 0.9,
    "condition_number": None,
}  # fmt: skip


def full() -> dict[str, Any]:
    """Every key of the contract, by hand."""
    lengths = {"low": 1, "high": 63, "examples": 40}
    candidate = {
        "label": "asap target 1 coarse:32", "operator": "asap", "attention_rel_l2": 0.02,
        "output_rel_l2": 0.01, "alone": {"prediction_agreement": 0.999}, "latency_ms": {"32x512": 1.2},
        "teacher_ms": {"32x512": 9.1}, "memory_mib": 12.0, "chosen": True, "verdict": "chosen",
    }  # fmt: skip
    report: dict[str, Any] = {
        "format_version": 3,
        "fingerprints": {"teacher": "a", "data": "b"},
        "model": {
            "source": "teacher", "capture": "whole", "data": "data.npz", "examples": 500, "batch": 32,
            "output_rmse": 0.1, "prediction_agreement": 0.99, "accuracy_drop": -0.01, "speedup": 4.0,
            "calibration_order": "parallel", "break_even_batches": None,
            "confidence": {"prediction_agreement": [0.98, 1.0]}, "confidence_level": 0.95,
        },
        "sites": [
            {
                "name": "layers.0", "operator": "asap", "reason": "", "convention": {"half_steps": 20},
                "side": "target", "c_transforms": 1, "rescaled": True, "features": ["coarse:32"],
                "coefficients": "per_head", "pivots": None, "slices": None, "fit": "ls",
                "fit_converged": None, "replay_error": 1e-7, "metrics": METRICS,
                "confidence": {"attention_rel_l2": [0.01, 0.03]},
                "by_head": {"attention_rel_l2": [0.01, 0.03]},
                "by_length": [{**lengths, "attention_rel_l2": 0.01}],
                "certificates": [
                    {
                        "name": "row_bound", "source": "ASAP, Proposition B.7", "bound": 0.5,
                        "measured": 0.01, "holds": True, "cases": 96, "vacuous": False,
                    }
                ],
                "range": {"score_low": -3.0, "score_high": 4.0, "r2": 0.9, "condition_number": 10.0},
            },
            {"name": "layers.1", "operator": "teacher", "range": None},
        ],
        "refused": [{"name": "layers.2", "status": "refused", "reason": "rows only"}],
        "warnings": [Shortage(("layers.0",), "examples", 3, 32).to_dict()],
        "by_length": [{**lengths, "prediction_agreement": 0.99, "logit_kl": 1e-4}],
        "splits": {"calibration": 350, "selection": 75, "gate": 75},
        "selection": {
            "objective": "latency", "budget": {"prediction_agreement": 0.99}, "examples": 75,
            "seconds": 3.5, "shapes": [[32, 512]],
            "sites": [{"name": "layers.0", "candidates": [candidate]}],
            "rounds": [
                {
                    "budget": {}, "choice": {"layers.0": "asap target 1 coarse:32"}, "predicted_ms": 1.0,
                    "measured": {"prediction_agreement": 0.999}, "verdict": "inside the budget",
                }
            ],
        },
        "environment": {"asapc": "0.1.0", "cores": 2, "threads": 2, "device": "cpu"},
        "gate": {"verdict": None, "passed": True, "checks": [], "baseline": None},
    }  # fmt: skip
    return report


def typed(report: dict[str, Any]) -> Report:
    return Report.from_json(report, "report")


def problems(report: Any) -> list[str]:
    return [error.json_path for error in Draft202012Validator(report_schema()).iter_errors(report)]


def test_the_schema_is_one_and_names_every_metric() -> None:
    Draft202012Validator.check_schema(report_schema())
    assert report_schema()["properties"]["format_version"]["const"] == REPORT_FORMAT
    assert report_schema()["$id"].endswith(f":{REPORT_FORMAT}")
    definitions = report_schema()["$defs"]
    assert tuple(definitions["check"]["properties"]["class"]["enum"]) == CLASSES
    site = definitions["site"]["properties"]["metrics"]["properties"]
    for metric in METRICS_OF_REPORTS:
        holder = site if metric.scope == "site" else definitions["model"]["properties"]
        assert (metric.key in holder) == metric.gate, metric.key


def test_the_whole_contract_is_valid() -> None:
    assert problems(full()) == problems(typed(full()).to_json()) == []
    assert problems({**full(), "selection": None}) == []


def test_what_gates_and_baselines_write_is_valid() -> None:
    report, earlier = full(), full()
    earlier["model"]["output_rmse"] = 0.01
    earlier["sites"][0]["metrics"] = {**METRICS, "attention_rel_l2": 0.001}
    gates = parse_gates(
        {
            "prediction_agreement": {"min": 0.97, "confidence": True},
            "accuracy_drop": {"max": 0.001},
            "speedup": {"min": 5},
            "logit_kl": {"max": 1},
            "sites": {"*": {"attention_rel_l2": {"max": 0.03, "min": 0, "confidence": True}}},
        }
    )
    allowance = Allowance(0.0, {"speedup": 0.1})
    comparison = compare(typed(report), Baseline("b.json", typed(earlier), allowance))
    report["model"]["speedup_lossless"] = 5000.0
    report["gate"] = gate_result(typed(report), gates, comparison).to_json()
    kinds = {(own["kind"], own["class"]) for own in report["gate"]["checks"]}
    assert kinds >= {
        ("limit", "ACCEPT"), ("limit", "REGRESSION"), ("limit", "ANOMALOUS"), ("baseline", "ACCEPT"),
        ("baseline", "REGRESSION"), ("plausibility", "ANOMALOUS"),
    }  # fmt: skip
    assert problems(report) == []
    assert report["gate"]["baseline"]["max_regression_of"] == {"speedup": 0.1}


def test_infinities_are_null_in_the_file() -> None:
    import json

    report = full()
    report["sites"][0]["metrics"] = {**METRICS, "condition_number": float("inf")}
    report["model"]["logit_kl"] = float("nan")
    assert problems(json.loads(json_text(report))) == []


@pytest.mark.parametrize(
    ("place", "value", "found"),
    [
        ("format_version", 1, "$.format_version"),
        ("model.prediction_agreement", 1.5, "$.model.prediction_agreement"),
        ("model.speedup", "fast", "$.model.speedup"),
        ("model.examples", 1.5, "$.model.examples"),
        ("model.confidence.x", [0.1], "$.model.confidence.x"),
        ("model.confidence.x", [0.1, 0.2, 0.3], "$.model.confidence.x"),
        ("sites.0.operator", "magic", "$.sites[0].operator"),
        ("sites.0.metrics.r2", "0.9", "$.sites[0].metrics.r2"),
        ("sites.0.certificates.0.holds", 3, "$.sites[0].certificates[0].holds"),
        ("gate.verdict", "PASSED", "$.gate.verdict"),
        ("gate.checks", [{}], "$.gate.checks[0]"),
        ("gate.checks", None, "$.gate.checks"),
        ("selection.objective", "beauty", "$.selection"),
        ("selection.sites.0.candidates.0.verdict", ..., "$.selection"),
        ("fingerprints.data", ..., "$.fingerprints"),
        ("gate", ..., "$"),
        ("sites.1.name", ..., "$.sites[1]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_where_it_is(place: str, value: Any, found: str) -> None:
    report = deepcopy(full())
    *parents, key = place.split(".")
    holder: Any = report
    for parent in parents:
        holder = holder[int(parent) if parent.isdigit() else parent]
    if value is ...:
        del holder[key]
    else:
        holder[key] = value
    assert found in problems(report)


def test_a_limit_has_exactly_one_bound() -> None:
    report = full()
    report["gate"] = gate_result(typed(report), parse_gates({"speedup": {"min": 1}})).to_json()
    validator = Draft202012Validator(report_schema())
    validator.validate(report)
    report["gate"]["checks"][0]["max"] = 2.0
    with pytest.raises(ValidationError):
        validator.validate(report)
