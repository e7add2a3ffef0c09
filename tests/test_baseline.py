"""Regression mode: what counts as worse than an earlier report, and whose report is taken."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from junk import with_junk

from asapc.errors import InputError
from asapc.report import Report
from asapc.report.baseline import (
    MAX_BYTES,
    MAX_REGRESSION,
    SPEED_NOISE,
    Allowance,
    Baseline,
    compare,
    load_baseline,
    parse_allowance,
)
from asapc.report.document import Check, GateReport
from asapc.report.gates import gate_result

REPORT: dict[str, Any] = {
    "format_version": 3, "fingerprints": {"teacher": "a" * 64, "data": "b" * 64},
    "model": {
        "source": "teacher", "data": "data.npz", "examples": 1000, "batch": 32,
        "prediction_agreement": 0.99, "accuracy_drop": 0.001, "output_rel_l2": 0.1, "max_abs_error": 0.0,
        "latency_compiled_ms": 10.0, "speedup": 4.0, "break_even_batches": 50.0,
    },
    "sites": [
        {"name": "layers.0", "operator": "asap", "features": ["coarse:32"],
         "metrics": {"attention_rel_l2": 0.04, "r2": 0.9, "condition_number": None}},
        {"name": "layers.1", "operator": "teacher"},
    ],
    "environment": {"processor": "x86_64", "cores": 2, "threads": 2, "device": "cpu", "torch": "2"},
}  # fmt: skip


def typed(report: dict[str, Any]) -> Report:
    return Report.from_json(report, "report")


def skipped(comparison: GateReport) -> list[Any]:
    return list(comparison.baseline.skipped)


def changed(**model: Any) -> dict[str, Any]:
    report = deepcopy(REPORT)
    report["model"].update(model)
    return report


def against(
    report: dict[str, Any], earlier: dict[str, Any] | None = None, *allowed: str
) -> dict[tuple[str, str], Check]:
    """(scope, metric) to the check."""
    baseline = Baseline("b.json", typed(earlier or REPORT), parse_allowance(allowed))
    checks = compare(typed(report), baseline).checks
    return {(own.scope, own.metric): own for own in checks}


def worse(*arguments: Any) -> dict[tuple[str, str], str]:
    """(scope, metric) to the class of what is not accepted."""
    return {key: own.verdict for key, own in against(*arguments).items() if not own.passed}


def test_a_report_is_no_worse_than_itself_and_absolute_times_are_not_compared() -> None:
    found = against(REPORT, None, "0%")
    assert {own.verdict for own in found.values()} == {"ACCEPT"}
    assert set(found) == {
        ("model", "prediction_agreement"), ("model", "accuracy_drop"), ("model", "output_rel_l2"),
        ("model", "max_abs_error"), ("model", "speedup"), ("layers.0", "attention_rel_l2"),
        ("layers.0", "r2"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "value", "fails"),
    [
        ("prediction_agreement", 0.97, False),  # exactly two points
        ("prediction_agreement", 0.969, True),
        ("accuracy_drop", 0.021, False),  # points, not 20 times the baseline's
        ("accuracy_drop", 0.022, True), ("accuracy_drop", -0.3, False), ("output_rel_l2", 0.102, False),
        ("output_rel_l2", 0.1021, True),
        ("max_abs_error", 9e-6, False),  # rounding
        ("max_abs_error", 2e-5, True),  # any part of nothing is too much
        ("speedup", 2.7, False), ("speedup", 2.6, True), ("latency_compiled_ms", 1e9, False),
    ],
)
def test_what_counts_as_worse(metric: str, value: float, fails: bool) -> None:
    expected = {("model", metric): "REGRESSION"} if fails else {}
    assert worse(changed(**{metric: value})) == expected


def test_the_limit_is_the_users() -> None:
    report = changed(output_rel_l2=0.105, speedup=3.5)
    assert worse(report, None, "5%") == {}
    assert worse(report, None, "0.04") == {("model", "output_rel_l2"): "REGRESSION"}
    assert worse(report, None, "output_rel_l2=5%", "speedup=10%") == {("model", "speedup"): "REGRESSION"}
    assert worse(changed(speedup=2.1), None, "50%") == {}


@pytest.mark.parametrize("holder", ["own", "its"])
def test_what_chance_explains_is_no_regression(holder: str) -> None:
    report, earlier = changed(output_rel_l2=0.2), deepcopy(REPORT)
    narrow, wide = {"output_rel_l2": [0.1001, 0.1999]}, {"output_rel_l2": [0.1, 0.2]}
    side = report if holder == "own" else earlier
    side["model"]["confidence"] = narrow
    assert worse(report, earlier) == {("model", "output_rel_l2"): "REGRESSION"}
    side["model"]["confidence"] = wide
    entry = against(report, earlier)["model", "output_rel_l2"]
    assert entry.passed and "inside the confidence interval" in entry.message


def test_sites_are_compared_by_name() -> None:
    report = deepcopy(REPORT)
    report["sites"].reverse()
    report["sites"][1]["metrics"]["attention_rel_l2"] = 0.05
    assert worse(report) == {("layers.0", "attention_rel_l2"): "REGRESSION"}
    report["sites"][1]["confidence"] = {"attention_rel_l2": [0.03, 0.06]}
    assert worse(report) == {}


def test_a_site_that_is_gone_is_a_regression_and_a_new_one_is_not() -> None:
    report = deepcopy(REPORT)
    report["sites"][0]["name"] = "layers.2"
    comparison = compare(typed(report), Baseline("b", typed(REPORT), Allowance()))
    gone = [own for own in comparison.checks if not own.passed]
    assert [(own.scope, own.verdict) for own in gone] == [("layers.0", "REGRESSION")]
    assert "no longer compiled" in gone[0].message
    assert {"metric": "sites", "scope": "layers.2", "why": "not in the baseline"} in skipped(comparison)


def test_a_dual_fitted_another_way_is_another_quantity() -> None:
    report = deepcopy(REPORT)
    report["sites"][0]["metrics"]["r2"] = 0.1
    assert worse(report) == {("layers.0", "r2"): "REGRESSION"}
    report["sites"][0]["features"] = ["norm"]
    comparison = compare(typed(report), Baseline("b", typed(REPORT), Allowance()))
    assert all(own.passed for own in comparison.checks)
    why = {"metric": "r2", "scope": "layers.0", "why": "another features"}
    assert skipped(comparison) == [why]


@pytest.mark.parametrize("what", ["threads", "batch size"])
def test_speeds_of_other_machines_are_not_compared(what: str) -> None:
    report = changed(speedup=0.1)
    assert worse(report) == {("model", "speedup"): "REGRESSION"}
    if what == "threads":
        report["environment"]["threads"] = 16
    else:
        report["model"]["batch"] = 1
    comparison = compare(typed(report), Baseline("b", typed(REPORT), Allowance()))
    assert all(own.passed for own in comparison.checks)
    why = f"measured with another {what}"
    assert skipped(comparison) == [{"metric": "speedup", "scope": "model", "why": why}]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_the_baseline_has_must_be_measured_again(value: Any) -> None:
    report = changed(output_rel_l2=value)
    assert worse(report) == {("model", "output_rel_l2"): "ANOMALOUS"}
    del report["model"]["output_rel_l2"]
    assert worse(report) == {("model", "output_rel_l2"): "ANOMALOUS"}
    report = deepcopy(REPORT)
    report["sites"][0]["metrics"]["attention_rel_l2"] = float("nan")
    assert worse(report) == {("layers.0", "attention_rel_l2"): "ANOMALOUS"}


@pytest.mark.parametrize("few", ["now", "then"])
def test_too_few_examples_to_see_a_regression(few: str) -> None:
    report, earlier = deepcopy(REPORT), deepcopy(REPORT)
    (report if few == "now" else earlier)["model"]["examples"] = 49
    found = worse(report, earlier)
    assert found == {("model", name): "ANOMALOUS" for name in ("prediction_agreement", "accuracy_drop")}
    assert "at least 50 are needed" in against(report, earlier)["model", "accuracy_drop"].message
    assert worse(report, earlier, "3%") == {}
    assert worse(report, earlier, "0") == {}  # any difference is seen


def test_the_verdict_goes_into_the_gate_without_any_limit() -> None:
    report = changed(output_rel_l2=0.2, max_abs_error=1e-6)
    found = typed(report)
    comparison = compare(found, Baseline("b.json", typed(REPORT), Allowance()))
    result = gate_result(found, [], comparison).to_json()
    assert (result["verdict"], result["passed"]) == ("REGRESSION", False)
    assert result["baseline"] == {
        "path": "b.json", "max_regression": 0.02, "max_regression_of": {}, "verdict": "REGRESSION",
        "compared": 7, "skipped": [],
    }  # fmt: skip


# Another model, other data


@pytest.mark.parametrize(("key", "what"), [("teacher", "of the same teacher"), ("data", "same data")])
def test_a_baseline_of_something_else_is_an_error(key: str, what: str) -> None:
    other = deepcopy(REPORT)
    other["fingerprints"][key] = "c" * 64
    with pytest.raises(InputError, match=what):
        compare(typed(REPORT), Baseline("b.json", typed(other), Allowance()))
    del other["fingerprints"]
    with pytest.raises(InputError, match="of the same teacher"):
        compare(typed(other), Baseline("b.json", typed(REPORT), Allowance()))


# The file


def written(folder: Path, document: Any) -> Path:
    path = folder / "baseline.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_a_report_is_a_baseline(tmp_path: Path) -> None:
    path = written(tmp_path, REPORT)
    assert load_baseline(path) == Baseline(str(path), typed(REPORT), Allowance())
    minimal = {key: REPORT[key] for key in ("format_version", "fingerprints")}
    assert load_baseline(written(tmp_path, {**minimal, "model": {}, "sites": []}))


@pytest.mark.parametrize(("text", "message"), [
    ("[]", "must hold a report, got list"), ("[" * 100_000, "must be a JSON file"),
    ('{"format_version": NaN}', "NaN is not JSON"),
    ('{"format_version": ' + "1" * 5000 + "}", "must be a JSON file"),
    ('{"format_version": ' + "[" * 900 + "]" * 900 + "}", "nested too deep"),
    (json.dumps(REPORT).replace('"speedup": 4.0', '"speedup": 1e999'), "a finite number, got inf"),
    *((json.dumps(with_junk(REPORT, way, junk)), message) for way, junk, message in (
        (("format_version",), 1, "must be a report of format 3, got 1"),
        (("format_version",), True, "must be a report of format 3"),
        (("fingerprints",), {"teacher": "a"}, "fingerprints must name the data"),
        (("model",), [], r"model must be a mapping, got \[\]"),
        (("model", "speedup"), list(range(10**5)), "speedup must be a finite number"),
        (("model", "speedup"), 10**400, "speedup must be a finite number"),
        (("model", "confidence"), {"speedup": [2, 1]}, r"must be two numbers(.|\n)*\[2, 1\]"),
        (("sites",), ["a"], r"sites\[0\] must be a mapping, got 'a'"),
        (("sites", 1, "name"), "layers.0", "a site must be named once"),
    )),
])  # fmt: skip
def test_a_hostile_baseline_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_baseline(written(tmp_path, text))
    assert len(str(caught.value)) < 500


def test_files_that_are_no_reports(tmp_path: Path) -> None:
    lacking = {key: value for key, value in REPORT.items() if key != "model"}
    (tmp_path / "lacking.json").write_text(json.dumps(lacking))
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{}")
    os.mkfifo(tmp_path / "pipe.json")  # which does not hang
    with open(tmp_path / "big.json", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    for place, message in (
        ("missing.json", "no such file"), ("", "must be a JSON file"), ("a\0b", "must be a JSON file"),
        ("bytes.json", "must be a JSON file"), ("pipe.json", "not a file"),
        ("big.json", "at most 16 MiB"), ("lacking.json", "model must be there"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            load_baseline(f"{tmp_path}/{place}")


def test_names_of_a_baseline_cannot_break_a_line(tmp_path: Path) -> None:
    hostile = with_junk(REPORT, ("sites", 0, "name"), "x\n::error::\x1b[2J" + "y" * 10_000)
    baseline = load_baseline(written(tmp_path, hostile))
    gone = [own for own in compare(typed(REPORT), baseline).checks if not own.passed]
    assert len(gone) == 1 and gone[0].message.isprintable() and len(gone[0].message) < 200
    assert gone[0].scope.isprintable()


# --max-regression


@pytest.mark.parametrize(
    ("text", "share"), [("2%", 0.02), ("0.02", 0.02), (" 2.5 % ", 0.025), ("0", 0.0), ("100%", 1.0)]
)
def test_percent_and_fractions(text: str, share: float) -> None:
    assert parse_allowance(()).of("output_rel_l2") == MAX_REGRESSION == 0.02
    assert parse_allowance(()).of("speedup") == SPEED_NOISE
    assert parse_allowance([text]).general == pytest.approx(share)
    assert parse_allowance([f"speedup={text}"]).of("speedup") == pytest.approx(share)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["2"], r"write two percent as 2%"), (["-1%"], "must be a share"), (["inf%"], "must be a share"),
        (["much"], "got 'much'"), (["1%", "2%"], "only one limit"),
        (["speedup=1%", "speedup=2%"], "speedup is given twice"),
        (["latency_compiled_ms=1%"], "'latency_compiled_ms' is not compared"),
        (["speedup="], "must be a share"),
    ],
)
def test_a_limit_that_is_none_is_named(texts: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_allowance(texts)
