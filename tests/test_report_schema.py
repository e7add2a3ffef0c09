"""The published schema of the report: what it takes, what it refuses, and that real reports keep it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from junk import changed_at
from page_report import small_report, typed

from asapc.metrics import METRICS as METRICS_OF_REPORTS
from asapc.report import json_text, report_schema
from asapc.report.baseline import Allowance, Baseline, compare
from asapc.report.document import CLASSES, REPORT_FORMAT
from asapc.report.gates import gate_result, parse_gates


def written() -> dict[str, Any]:
    """A report as its file has it."""
    return typed(small_report()).to_json()


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
    assert problems(written()) == []
    assert problems({**written(), "selection": None}) == []


def test_what_gates_and_baselines_write_is_valid() -> None:
    report, earlier = written(), written()
    earlier["sites"][0] |= {"metrics": {"attention_rel_l2": 0.001}, "confidence": {}}
    gates = parse_gates({
        "prediction_agreement": {"min": 0.97, "confidence": True},
        "speedup": {"min": 50}, "examples": {"min": 5000},
        "sites": {"*": {"attention_rel_l2": {"max": 0.03, "min": 0, "confidence": True}}},
    })  # fmt: skip
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
    report = written()
    report["sites"][0]["metrics"]["condition_number"] = float("inf")
    report["model"]["logit_kl"] = float("nan")
    assert problems(json.loads(json_text(report))) == []


@pytest.mark.parametrize(
    ("place", "value", "found"),
    [
        ("format_version", 1, "$.format_version"),
        ("model.prediction_agreement", 1.5, "$.model.prediction_agreement"),
        ("model.confidence.x", [0.1, 0.2, 0.3], "$.model.confidence.x"),
        ("sites.0.operator", "magic", "$.sites[0].operator"),
        ("sites.0.certificates.0.holds", 3, "$.sites[0].certificates[0].holds"),
        ("gate.verdict", "PASSED", "$.gate.verdict"), ("gate.checks", [{}], "$.gate.checks[0]"),
        ("selection.sites.0.candidates.0.verdict", ..., "$.selection"),
        ("sites.1.name", ..., "$.sites[1]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_where_it_is(place: str, value: Any, found: str) -> None:
    assert found in problems(changed_at(written(), (place, value)))


def test_a_limit_has_exactly_one_bound() -> None:
    report = written()
    report["gate"] = gate_result(typed(report), parse_gates({"speedup": {"min": 1}})).to_json()
    assert problems(report) == []
    report["gate"]["checks"][0]["max"] = 2.0
    assert problems(report) == ["$.gate.checks[0]"]
