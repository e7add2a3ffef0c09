"""Regression mode: what counts as worse than an earlier report, and whose report is taken."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from junk import changed_at, with_junk

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
from asapc.report.document import GateReport
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


with_ = partial(changed_at, REPORT)


def changed(**model: Any) -> dict[str, Any]:
    return {**REPORT, "model": REPORT["model"] | model}


def against(report: dict[str, Any], earlier: dict[str, Any] | None = None, *allowed: str) -> GateReport:
    baseline = Baseline("b.json", typed(earlier or REPORT), parse_allowance(allowed))
    return compare(typed(report), baseline)


def worse(comparison: GateReport) -> dict[tuple[str, str], str]:
    """(scope, metric) to the class of what is not accepted."""
    return {(own.scope, own.metric): own.verdict for own in comparison.checks if not own.passed}


def test_a_report_is_no_worse_than_itself_and_absolute_times_are_not_compared() -> None:
    found = against(REPORT, None, "0%").checks
    assert {own.verdict for own in found} == {"ACCEPT"}
    assert {(own.scope, own.metric) for own in found} == {
        ("model", "prediction_agreement"), ("model", "accuracy_drop"), ("model", "output_rel_l2"),
        ("model", "max_abs_error"), ("model", "speedup"), ("layers.0", "attention_rel_l2"),
        ("layers.0", "r2"),
    }  # fmt: skip


DOUBLED, SLOW = changed(output_rel_l2=0.2), ("model.speedup", 0.1)
ERROR, R2 = ("layers.0", "attention_rel_l2"), ("layers.0", "r2")
SITE = "sites.0.metrics.attention_rel_l2"
UNPROVEN = [("model", name) for name in ("prediction_agreement", "accuracy_drop")]


def sure(low: float, high: float) -> tuple[str, Any]:
    return "model.confidence", {"output_rel_l2": [low, high]}


# A report, an earlier one, what is allowed, and what is not accepted, a REGRESSION unless told.
CASES: list[tuple[dict[str, Any], dict[str, Any] | None, tuple[str, ...], list[Any]]] = [
    *((changed(**{metric: value}), None, (), [("model", metric)] if fails else [])
      for metric, value, fails in (
        ("prediction_agreement", 0.97, False),  # exactly two points
        ("prediction_agreement", 0.969, True),
        ("accuracy_drop", 0.021, False),  # points, not 20 times the baseline's
        ("accuracy_drop", 0.022, True), ("accuracy_drop", -0.3, False), ("output_rel_l2", 0.102, False),
        ("output_rel_l2", 0.1021, True),
        ("max_abs_error", 9e-6, False),  # rounding
        ("max_abs_error", 2e-5, True),  # any part of nothing is too much
        ("speedup", 2.7, False), ("speedup", 2.6, True), ("latency_compiled_ms", 1e9, False))),
    # The limit is the user's.
    *((changed(output_rel_l2=0.105, speedup=3.5), None, allowed, fails) for allowed, fails in (
        (("5%",), []), (("0.04",), [("model", "output_rel_l2")]),
        (("output_rel_l2=5%", "speedup=10%"), [("model", "speedup")]))),
    (changed(speedup=2.1), None, ("50%",), []),
    # What chance explains is no regression, by the interval of either report.
    *((with_(("model.output_rel_l2", 0.2), own), with_(its), (), fails) for own, its, fails in (
        (sure(0.1, 0.2), sure(0.1, 0.1), []), (sure(0.2, 0.2), sure(0.1, 0.2), []),
        (sure(0.1001, 0.2), sure(0.1, 0.1999), [("model", "output_rel_l2")]))),
    # Sites are compared by name.
    (with_((SITE, 0.05), ("sites", REPORT["sites"][::-1])), None, (), []),
    (with_((SITE, 0.05)), with_(("sites", REPORT["sites"][::-1])), (), [ERROR]),
    (with_((SITE, 0.05), ("sites.0.confidence", {"attention_rel_l2": [0.03, 0.06]})), None, (), []),
    (with_(("sites.0.name", "layers.2")), None, (), [("layers.0", "sites")]),
    # A dual that is fitted another way is another quantity; so are speeds of other machines.
    (with_(("sites.0.metrics.r2", 0.1)), None, (), [R2]),
    (with_(("sites.0.metrics.r2", 0.1), ("sites.0.features", ["norm"])), None, (), []),
    (with_(SLOW), None, (), [("model", "speedup")]),
    *((with_(SLOW, other), None, (), []) for other in (("environment.threads", 16), ("model.batch", 1))),
    # What the baseline has must be measured again.
    *((changed(output_rel_l2=value), None, (), [("model", "output_rel_l2", "ANOMALOUS")])
      for value in (None, float("nan"), float("inf"))),
    (with_((SITE, float("nan"))), None, (), [(*ERROR, "ANOMALOUS")]),
    # Too few examples to see a regression; without an allowance any difference is seen.
    *((report, earlier, allowed, [(*own, "ANOMALOUS") for own in fails])
      for report, earlier in ((changed(examples=49), REPORT), (REPORT, changed(examples=49)))
      for allowed, fails in (((), UNPROVEN), (("3%",), []), (("0",), []))),
]  # fmt: skip


@pytest.mark.parametrize(("report", "earlier", "allowed", "fails"), CASES)
def test_what_counts_as_worse(
    report: dict[str, Any], earlier: dict[str, Any] | None, allowed: tuple[str, ...], fails: list[Any]
) -> None:
    expected = {own[:2]: (*own, "REGRESSION")[2] for own in fails}
    assert worse(against(report, earlier, *allowed)) == expected


@pytest.mark.parametrize(("report", "metric", "scope", "why"), [
    (with_(("sites.0.name", "layers.2")), "sites", "layers.2", "not in the baseline"),
    (with_(("sites.0.features", ["norm"])), "r2", "layers.0", "another features"),
    (with_(SLOW, ("environment.threads", 16)), "speedup", "model", "measured with another threads"),
    (with_(SLOW, ("model.batch", 1)), "speedup", "model", "measured with another batch size"),
])  # fmt: skip
def test_what_is_not_compared_says_why(report: dict[str, Any], metric: str, scope: str, why: str) -> None:
    comparison = against(report).baseline
    assert comparison is not None
    assert [*comparison.skipped] == [{"metric": metric, "scope": scope, "why": why}]


@pytest.mark.parametrize(("report", "told"), [
    (with_(("sites.0.name", "layers.2")), "no longer compiled"),
    (changed(examples=49), "at least 50 are needed"),
    (with_(("model.output_rel_l2", 0.2), sure(0.1, 0.2)), "inside the confidence interval"),
    (DOUBLED, "output_rel_l2 of model is 0.2, 100 % worse than the baseline's 0.1 (2 % allowed)"),
])  # fmt: skip
def test_checks_say_why(report: dict[str, Any], told: str) -> None:
    assert any(told in own.message for own in against(report).checks)


def test_the_verdict_goes_into_the_gate_without_any_limit() -> None:
    found = typed(changed(output_rel_l2=0.2, max_abs_error=1e-6))
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
    other = with_((f"fingerprints.{key}", "c" * 64))
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
