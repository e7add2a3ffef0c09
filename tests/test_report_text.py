import io
import json
from copy import deepcopy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from asapc.errors import InputError
from asapc.report import Report, json_text, junit_text, markdown, write_report
from asapc.report.console import print_result
from asapc.report.document import CLASSES
from asapc.report.tables import convention_text, headline, number, report_tables
from asapc.report.text import MAX_CHARACTERS

REPORT: dict[str, Any] = {
    "format_version": 3,
    "model": {
        "source": "teacher|x",
        "examples": 96,
        "prediction_agreement": 0.9896,
        "speedup": 4.0,
    },
    "sites": [
        {
            "name": "layers.0.fn",
            "operator": "asap",
            "side": "source",
            "features": ["coarse:32"],
            "reason": "fastest inside the budget",
            "convention": {
                "half_steps": 20,
                "first_side": "row",
                "last_side": "column",
                "score_multiplier": 0.25,
                "output_factor": "M",
                "mask": "key",
                "bias": False,
                "early_stop": True,
            },
            "c_transforms": 3,
            "metrics": {"attention_rel_l2": 0.0123456, "r2": None},
            "latency_teacher_ms": 12.0,
        }
    ],
    "refused": [{"name": "layers.1.fn", "status": "refused", "reason": "not Sinkhorn: rows only"}],
    "environment": {"torch": "2.13.0", "threads": 2},
    "gate": {
        "verdict": "REGRESSION",
        "passed": False,
        "checks": [
            {
                "kind": "limit",
                "metric": "speedup",
                "scope": "model",
                "value": 4.0,
                "min": 2.0,
                "class": "ACCEPT",
                "passed": True,
                "message": "speedup of model is 4, within its limit (min 2)",
            },
            {
                "kind": "limit",
                "metric": "attention_rel_l2",
                "scope": "layers.0.fn",
                "value": 0.0123456,
                "max": 0.01,
                "class": "REGRESSION",
                "passed": False,
                "message": "attention_rel_l2 of layers.0.fn is 0.0123456, beyond its limit (max 0.01)",
            },
        ],
        "baseline": None,
    },
}


def typed(report: dict[str, Any]) -> Report:
    return Report.from_json(report, "report")


def test_markdown_golden() -> None:
    lines = markdown(typed(REPORT)).splitlines()
    assert lines[:3] == [
        "# asapc: REGRESSION, 4.00x as fast as the teacher, 98.96% of predictions kept",
        "",
        "- **REGRESSION** attention_rel_l2 of layers.0.fn is 0.0123456, beyond its limit (max 0.01)",
    ]
    for expected in (
        r"| model | teacher\|x |",
        "| prediction agreement | 98.96% |",
        "| speedup, compiled | 4.00x |",
        "| site | operator | attention l2 | R2 in-sample |",
        "|---|---|---:|---:|",
        "| layers.0.fn | asap | 0.0123 | - |",
        "| layers.0.fn | asap | 12.0 |",
        "| layers.0.fn | asap | source, 3 c-transforms, coarse:32 | T=20, row first, column last, "
        "scale 0.250, factor M, key mask, early stop | fastest inside the budget |",
        "| layers.1.fn | refused | not Sinkhorn: rows only |",
        "| attention_rel_l2 | layers.0.fn | 0.0123 | max 0.0100 | REGRESSION |",
        "| torch | 2.13.0 |",
    ):
        assert expected in lines
    # what failed comes first
    accepted = lines.index("| speedup | model | 4.00 | min 2.00 | ACCEPT |")
    assert lines[accepted - 1].endswith("| REGRESSION |")


def test_markdown_of_an_empty_report_does_not_fail() -> None:
    assert markdown(typed({"model": {}, "sites": []})).startswith("# asapc")


def test_json_is_strict() -> None:
    text = json_text({"a": float("nan"), "b": [float("inf"), 1.5], "c": ("é", True, None)})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": ["é", True, None]}
    with pytest.raises(TypeError):
        json_text({"a": object()})


def test_written_files_replace_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("old")
    written = write_report(tmp_path, typed(REPORT))
    names = ["junit.xml", "report.html", "report.json", "report.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert json.loads(written[0].read_text()) == typed(REPORT).to_json()
    assert write_report(tmp_path, typed(REPORT)) == written


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="cannot be written"):
            write_report(folder, typed(REPORT))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (float("inf"), "inf"),
        (0.0, "0"),
        (3, "3"),
        (True, "yes"),
        (0.0123456, "0.0123"),
        (1234.5678, "1235"),
        (1.23456e-7, "1.23e-07"),
        (12.0, "12.0"),
    ],
)
def test_number(value: object, text: str) -> None:
    assert number(value) == text


def test_no_convention_is_a_dash() -> None:
    assert convention_text(None) == "-"


def with_everything() -> dict[str, Any]:
    """REPORT with the keys that not every report has."""
    report = deepcopy(REPORT)
    report["model"].update(
        confidence={"prediction_agreement": [0.96, 1.0], "speedup": [3.5, None]}, confidence_level=0.9
    )
    report["sites"][0]["certificates"] = [
        {
            "name": "row_bound", "source": "ASAP, Proposition B.7", "bound": 0.5, "measured": 0.01,
            "holds": True, "cases": 96, "vacuous": False,
        },
        {"name": "contraction_bound", "bound": 1.0, "measured": 0.4, "holds": True, "vacuous": True},
    ]  # fmt: skip
    report["sites"][0]["by_length"] = [
        {"low": 1, "high": 63, "examples": 40, "attention_rel_l2": 0.01}
    ]
    report["by_length"] = [
        {"low": 1, "high": 63, "examples": 40, "prediction_agreement": 0.975, "logit_kl": 0.001}
    ]
    report["splits"] = {"calibration": 350, "selection": 75, "gate": 75}
    report["selection"] = {
        "objective": "latency",
        "budget": {"attention_rel_l2": 0.05},
        "sites": [
            {
                "name": "layers.0.fn",
                "candidates": [
                    {
                        "label": "asap target 1 coarse:32",
                        "attention_rel_l2": 0.02, "output_rel_l2": 0.01,
                        "latency_ms": {"32x512": 1.2}, "teacher_ms": {"32x512": 9.1},
                        "memory_mib": 12.0, "chosen": True, "verdict": "chosen",
                    }
                ],
            }
        ],
        "rounds": [
            {
                "budget": {"attention_rel_l2": 0.05},
                "choice": {"layers.0.fn": "asap target 1 coarse:32"},
                "predicted_ms": 1.5, "measured": {"prediction_agreement": 0.991},
                "verdict": "inside the budget",
            }
        ],
    }  # fmt: skip
    return report


def test_markdown_shows_intervals_certificates_lengths_and_the_decisions() -> None:
    text = markdown(typed(with_everything()))
    assert text.startswith(
        "# asapc: REGRESSION, 4.00x as fast as the teacher, 98.96% of predictions kept "
        "(96.00% to 100.00%)\n"
    )
    lines = text.splitlines()
    for expected in (
        "|  |  | 90% interval |",
        "| prediction agreement | 98.96% | 96.00% to 100.00% |",
        "| speedup, compiled | 4.00x | 3.50 to - |",
        "| examples, unseen in the fit | 96 | - |",
        "| layers.0.fn | row_bound | 0.500 | 0.0100 | holds | 96 | - | ASAP, Proposition B.7 |",
        "| layers.0.fn | contraction_bound | 1.00 | 0.400 | vacuous | - | - |  |",
        "| 1 to 63 | 40 | 97.50% | 0.00100 |",
        "| layers.0.fn | 1 to 63 | 40 | 0.0100 |",
        "| examples, gate | 75 |",
        "| objective | latency |",
        "| layers.0.fn | asap target 1 coarse:32 | chosen | 0.0200 | 0.0100 | 32x512 1.20 | 32x512 9.10 "
        "| 12.0 |  |",
        "| 1 | attention_rel_l2 0.0500 | 1 x asap target 1 coarse:32 | prediction_agreement 0.991 | 1.50 "
        "| inside the budget |",
    ):
        assert expected in lines, expected
    assert "| budget | attention_rel_l2 0.0500 |" in lines


def test_the_headline_says_when_no_gate_was_set() -> None:
    report = {**REPORT, "gate": {"verdict": None, "passed": True, "checks": [], "baseline": None}}
    assert headline(typed(report)).startswith("no gate set, 4.00x as fast")
    assert headline(typed({"model": {}})) == "no gate set"


def test_a_baseline_is_one_row_and_what_is_worse() -> None:
    report = deepcopy(REPORT)
    check = {
        "kind": "baseline", "metric": "plan_kl", "scope": "layers.0.fn", "value": 0.2, "baseline": 0.1,
        "allowed": 0.02, "class": "REGRESSION", "passed": False, "message": "worse",
    }  # fmt: skip
    kept = {**check, "metric": "r2", "class": "ACCEPT", "passed": True}
    report["gate"]["checks"] += [check, kept]
    report["gate"]["baseline"] = {
        "path": "b.json", "max_regression": 0.02, "verdict": "REGRESSION", "compared": 2, "skipped": [],
    }  # fmt: skip
    text = markdown(typed(report))
    assert "| plan_kl | layers.0.fn | 0.200 | baseline 0.100, 2% | REGRESSION |" in text
    assert "| baseline | b.json | 2 compared | 2% worse, at most | REGRESSION |" in text
    assert "| r2 |" not in text


def test_wide_tables_are_folded_and_narrow_ones_are_not() -> None:
    text = markdown(typed(with_everything()))
    opened = text.index("<details><summary>Why</summary>\n\n| site")
    assert text.index("</details>", opened) > text.index("fastest inside the budget", opened)
    assert text.count("<details>") == text.count("</details>") >= 1
    for narrow in ("## Model", "## Gate", "## Certificates", "## By length of the example"):
        assert narrow in text


def large(sites: int, length: int = 40) -> dict[str, Any]:
    report = with_everything()
    site, check = report["sites"][0], report["gate"]["checks"][1]
    candidates = report["selection"]["sites"][0]["candidates"]
    names = [f"layers.{i}.{'x' * length}" for i in range(sites)]
    report["sites"] = [{**site, "name": name} for name in names]
    report["gate"]["checks"] += [{**check, "scope": name} for name in names]
    report["refused"] = [{"name": name, "status": "refused", "reason": "r" * length} for name in names]
    report["selection"]["sites"] = [{"name": name, "candidates": candidates} for name in names]
    return report


@pytest.mark.parametrize(("sites", "length"), [(100, 40), (5000, 40), (30, 20_000), (3, 10**6)])
def test_any_report_fits_a_comment_and_says_what_is_left_out(sites: int, length: int) -> None:
    text = markdown(typed(large(sites, length)))
    assert 2000 < len(text) <= MAX_CHARACTERS < 65536
    assert text.startswith("# asapc: REGRESSION, 4.00x") and "\n## Model" in text
    assert text.count("<details>") == text.count("</details>")
    assert text.rstrip().endswith("the dual.")
    if sites > 500:
        assert f"of {sites} rows are left out; all are in report.json." in text
        assert "- and " in text


def test_a_report_with_too_many_tables_still_fits() -> None:
    report = deepcopy(REPORT)
    report["model"].update({f"key{'|' * 200}{i}": "<" * 300 for i in range(2000)})
    report["environment"] = {f"{'<' * 299}{i}": "<" * 300 for i in range(2000)}
    report["gate"]["checks"] = [
        {**REPORT["gate"]["checks"][1], "message": "<" * 9999, "scope": "<" * 9999}
    ] * 2000
    assert len(markdown(typed(report))) <= MAX_CHARACTERS


def test_names_cannot_end_a_cell_a_row_or_a_fold() -> None:
    report = deepcopy(REPORT)
    report["sites"][0]["name"] = "a|b</details>\r\n# c\u2028<img src=x>"
    text = markdown(typed(report))
    assert "<img" not in text and "\n# c" not in text
    assert r"| a\|b&lt;/details> # c &lt;img src=x> | asap |" in text


def test_tables_on_a_terminal_take_the_new_keys() -> None:
    stream = io.StringIO()
    print_result(report_tables(typed(with_everything())), stream)
    for expected in ("REGRESSION", "Certificates", "90% interval", "96.00% to 100.00%"):
        assert expected in stream.getvalue()


# JUnit


def test_junit_has_a_case_a_check() -> None:
    report = deepcopy(REPORT)
    anomalous = {
        "kind": "plausibility", "metric": "speedup", "scope": "model", "value": 1e6,
        "class": "ANOMALOUS", "passed": False, "message": "no kernel does that",
    }  # fmt: skip
    report["gate"]["checks"].append(anomalous)
    root = ElementTree.fromstring(junit_text(typed(report)))
    counts = {"tests": "3", "failures": "1", "errors": "1"}
    assert root.tag == "testsuites" and counts.items() <= root.attrib.items()
    (suite,) = root.findall("testsuite")
    assert {**counts, "skipped": "0"}.items() <= suite.attrib.items()
    cases = suite.findall("testcase")
    assert [(case.get("classname"), case.get("name")) for case in cases] == [
        ("asapc.model", "speedup: min 2.00"),
        ("asapc.layers.0.fn", "attention_rel_l2: max 0.0100"),
        ("asapc.model", "speedup: plausible"),
    ]
    assert [[child.tag for child in case] for case in cases] == [[], ["failure"], ["error"]]
    assert [case[0].get("type") for case in cases[1:]] == ["REGRESSION", "ANOMALOUS"]
    assert cases[2][0].get("message") == cases[2][0].text == "no kernel does that"
    assert "REGRESSION, 4.00x" in (suite.findtext("system-out") or "")


def test_junit_without_a_gate_holds_no_case() -> None:
    for report in ({"model": {}}, {**REPORT, "gate": {"verdict": None, "checks": []}}):
        root = ElementTree.fromstring(junit_text(typed(report)))
        assert root.get("tests") == "0" and root.find("testsuite") is not None
        assert not root.findall(".//testcase")


def test_junit_takes_any_name() -> None:
    report = deepcopy(REPORT)
    check = report["gate"]["checks"][1]
    check["scope"] = check["message"] = "<a b='c'>&]]>\"\x00\x1b\ufffe\ud800é😀"
    root = ElementTree.fromstring(junit_text(typed(report)).encode())
    problem = root.findall(".//failure")[0]
    assert problem.text == problem.get("message") == "<a b='c'>&]]>\"\ufffd\ufffd\ufffd\ufffdé😀"
    assert {own["class"] for own in report["gate"]["checks"]} <= set(CLASSES)


def test_json_takes_any_name() -> None:
    text = json_text({"a\udcff": ["\ud800é", "😀"]})
    assert json.loads(text.encode()) == {"a\ufffd": ["\ufffdé", "😀"]}
    assert json.loads(json_text({"é": "😀"}, ascii=True).encode("ascii")) == {"é": "😀"}


def test_memory_that_was_predicted_is_told_as_memory() -> None:
    report = with_everything()
    report["selection"] |= {"objective": "memory"}
    report["selection"]["rounds"][0] |= {"predicted_mib": 7.25}
    text = markdown(typed(report))
    assert "| predicted MiB |" in text and "| 7.25 |" in text
    assert "predicted ms" not in text
