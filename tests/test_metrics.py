"""A metric is described once: everything else is derived, and one entry adds a gated metric."""

from __future__ import annotations

import subprocess
import sys

import pytest

from asapc.errors import InputError
from asapc.metrics import METRICS
from asapc.report import Report
from asapc.report.tables import study_tables

# Before anything else is imported, as an edit of asapc/metrics.py would be.
ADDED = """
from dataclasses import asdict
from asapc import metrics
new = metrics.Metric(
    "row_err_worst", "largest |sum_j A^_ij - 1|", "min", "site", column="row err, worst", high=2.0,
    every_site=True, study="table", budget=True,
)
metrics.METRICS += (new,)
metrics.METRIC = {own.key: own for own in metrics.METRICS}
metrics.BUDGET_BOUNDS = {own.key: own.bound for own in metrics.METRICS if own.budget}

from asapc.report.baseline import Allowance, Baseline, compare
from asapc.report.gates import gate_result, parse_gates
from asapc.inputs.recipe import Recipe
from asapc.report import Report, junit_text, markdown, report_schema
from asapc.study import COLUMNS

def report(value):
    site = {"name": "a", "operator": "asap", "metrics": {"row_err_worst": value}}
    prints = {"teacher": "t", "data": "d"}
    return Report.from_json({"fingerprints": prints, "model": {}, "sites": [site]}, "report")

now = report(0.25)
gates = parse_gates({"row_err_worst": {"max": 0.2}, "sites": {"a": {"row_err_worst": {"min": 0}}}})
comparison = compare(now, Baseline("b.json", report(0.1), Allowance()))
gate = gate_result(now, gates, comparison)
assert [(own.kind, own.verdict) for own in gate.checks] == [
    ("limit", "REGRESSION"), ("limit", "ACCEPT"), ("baseline", "REGRESSION"),
]
assert gate_result(report(float("inf")), gates).verdict == "ANOMALOUS"
now = Report(**{**vars(now), "gate": gate})
assert "row err, worst" in markdown(now) and "row_err_worst: max 0.200" in junit_text(now)
schema = report_schema()["$defs"]["site"]["properties"]["metrics"]["properties"]["row_err_worst"]
assert (schema["minimum"], schema["maximum"]) == (0.0, 2.0)
assert "row_err_worst" in COLUMNS
assert Recipe.from_dict({"budget": {"row_err_worst": 0.1}}).budget == {"row_err_worst": 0.1}
"""


def test_one_entry_adds_a_gated_metric() -> None:
    done = subprocess.run([sys.executable, "-c", ADDED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The typed report


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], r"report must be a mapping, got \[\]"),
        ({"model": {"speedup": "fast"}}, "report: model: speedup must be a finite number, got 'fast'"),
        ({"model": {"source": 3}}, "model: source must be text, got 3"),
        ({"model": {"confidence": {"r2": "ab"}}}, "confidence: r2 must be a list of 2"),
        ({"model": {"confidence": {"r2": [0.1, True]}}}, "r2 must be a finite number, got True"),
        ({"sites": [{"name": "a"}]}, r"sites\[0\]: operator must be text, got None"),
        ({"sites": [{"name": "a", "operator": "x", "c_transforms": 1.5}]}, "c_transforms must be an int"),
        ({"sites": [{"name": "a", "operator": "x", "metrics": {"b\n{}": "y"}}]}, r"'b\\n\{\}' must be"),
        ({"gate": {"checks": [{"metric": "a", "scope": "b", "kind": "limit", "class": "GOOD"}]}},
         "must be one of ACCEPT"),
    ],
)
def test_a_wrong_type_is_one_clear_message(document: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Report.from_json(document, "report")
    assert len(str(caught.value).splitlines()) == 1


def test_what_no_field_has_is_kept_and_what_is_missing_takes_its_default() -> None:
    site = {"name": "a", "operator": "teacher", "latency_teacher_ms": 3.5, "later": [1]}
    report = Report.from_json({"model": {"speedup": 10**400, "later": {"a": 1}}, "sites": [site]}, "r")
    assert report.model.metric("speedup") == float("inf")
    assert report.sites[0].metric("latency_teacher_ms") == 3.5 and not report.sites[0].approximate
    written = report.to_json()
    assert written["model"]["later"] == {"a": 1} and written["sites"][0]["later"] == [1]
    assert written["gate"] == {"verdict": None, "passed": True, "checks": [], "baseline": None}
    assert "refresh" not in written and written["selection"] is None
    assert Report.from_json(written, "again") == report


def test_the_table_of_a_study_is_made_of_the_metrics() -> None:
    shown = [own for own in METRICS if own.study == "table"]
    row = {own.key: 0.5 for own in METRICS} | {"site_ms": 0.5, "predict_ms": 0.5}
    _, table = study_tables({"sites": [], "baseline": {}, "rows": [row]})
    headings = [heading for heading, _ in table.headings()]
    assert headings[8:] == [own.column or own.label for own in shown] + ["site ms", "predict ms"]
    assert table.rows[0][8:-2] == tuple("50.00%" if own.share else "0.500" for own in shown)
