from pathlib import Path
from typing import Any

import pytest

from asapc.errors import InputError
from asapc.gates import Gate, check, gate_result, known_metrics, load_gates, parse_gates

SHIPPED = Path(__file__).parents[1] / "examples" / "gates.yaml"


def report(**model: Any) -> dict[str, Any]:
    return {
        "model": {"prediction_agreement": 0.995, "output_rel_l2": 0.25, "speedup": 3.0, **model},
        "sites": [
            {
                "name": "layers.0",
                "operator": "asap",
                "metrics": {"attention_rel_l2": 0.01, "r2": 0.9, "output_rel_l2": 0.5},
            },
            {
                "name": "layers.1",
                "operator": "asap",
                "metrics": {"attention_rel_l2": 0.04, "r2": 0.8},
            },
            {"name": "layers.2", "operator": "sinkhorn", "metrics": {"attention_rel_l2": 1e-7}},
        ],
    }


def test_shipped_gates_load() -> None:
    assert load_gates(SHIPPED)


def test_model_metrics_are_looked_up_on_the_model() -> None:
    gates = parse_gates({"prediction_agreement": {"min": 0.99}, "output_rel_l2": {"max": 0.1}})
    assert check(report(), gates) == [
        {
            "metric": "prediction_agreement",
            "scope": "model",
            "value": 0.995,
            "min": 0.99,
            "passed": True,
        },
        {"metric": "output_rel_l2", "scope": "model", "value": 0.25, "max": 0.1, "passed": False},
    ]


def test_site_metrics_take_the_worst_site_for_either_bound() -> None:
    largest, smallest = check(
        report(), [Gate("attention_rel_l2", "max", 0.05), Gate("r2", "min", 0.85)]
    )
    assert (largest["scope"], largest["value"], largest["passed"]) == ("layers.1", 0.04, True)
    assert (smallest["scope"], smallest["value"], smallest["passed"]) == ("layers.1", 0.8, False)


def test_the_limit_itself_passes() -> None:
    gates = [Gate("attention_rel_l2", "max", 0.04), Gate("prediction_agreement", "min", 0.995)]
    assert gate_result(report(), gates)["passed"]


def test_both_bounds_are_two_checks() -> None:
    gates = parse_gates({"speedup": {"min": 2, "max": 2.5}})
    assert [entry["passed"] for entry in check(report(), gates)] == [True, False]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.01", True])
@pytest.mark.parametrize("bound", ["min", "max"])
def test_what_is_not_a_finite_number_fails(value: object, bound: Any) -> None:
    limit = -1e9 if bound == "min" else 1e9
    model = report(prediction_agreement=value)
    assert not gate_result(model, [Gate("prediction_agreement", bound, limit)])["passed"]
    site = report()
    site["sites"][0]["metrics"]["attention_rel_l2"] = value
    entry = check(site, [Gate("attention_rel_l2", bound, limit)])[0]
    assert (entry["scope"], entry["value"], entry["passed"]) == ("layers.0", None, False)


def test_what_is_missing_fails() -> None:
    incomplete = report()
    del incomplete["sites"][2]["metrics"]["attention_rel_l2"]
    assert not gate_result(incomplete, [Gate("attention_rel_l2", "max", 1.0)])["passed"]
    assert not gate_result(report(), [Gate("accuracy_drop", "max", 1.0)])["passed"]
    assert not gate_result({"model": {}, "sites": []}, [Gate("plan_kl", "max", 1.0)])["passed"]


def test_a_fit_metric_does_not_apply_to_an_exact_loop_but_must_exist_elsewhere() -> None:
    assert gate_result(report(), [Gate("r2", "min", 0.5)])["passed"]
    unfitted = report()
    del unfitted["sites"][1]["metrics"]["r2"]
    assert not gate_result(unfitted, [Gate("r2", "min", 0.5)])["passed"]


def test_no_gates_pass_with_no_checks() -> None:
    assert gate_result(report(), []) == {"passed": True, "checks": []}


def test_design_metrics_are_known() -> None:
    assert {
        "attention_rel_l2",
        "attention_rel_l2_worst",
        "row_err",
        "col_err",
        "plan_kl",
        "logit_kl",
        "output_rmse",
        "output_rel_l2",
        "prediction_agreement",
        "accuracy_drop",
        "speedup",
        "break_even_batches",
    } <= set(known_metrics())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one limit"),
        ("attention_rel_12: {max: 1}", r"unknown metric(.|\n)*did you mean 'attention_rel_l2'"),
        ("speedup: 2", "speedup must be limited by min and/or max"),
        ("speedup: {}", "speedup must be limited"),
        ("speedup: {least: 2}", "speedup must be limited"),
        ("speedup: {min: .nan}", "limit must be a finite number"),
        ("speedup: {min: fast}", "limit must be a finite number, got 'fast'"),
        ("speedup: {min: true}", "limit must be a finite number, got True"),
        ("speedup: {min: 1}\nspeedup: {min: 2}", "'speedup' appears twice"),
        ("[speedup]", "must be a mapping"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "gates.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_gates(path)


def test_a_limit_that_yaml_reads_as_text_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "gates.yaml"
    path.write_text("attention_rel_l2: {max: 1e-2}", encoding="utf-8")
    assert load_gates(path) == [Gate("attention_rel_l2", "max", 0.01)]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_gates(tmp_path / "gates.yaml")
