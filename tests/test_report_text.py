"""A report as Markdown, JSON, JUnit XML and terminal tables."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from page_report import full_report, small_report, typed

from asapc.errors import InputError
from asapc.report import json_text, junit_text, markdown, write_report
from asapc.report.tables import convention_text, headline, number
from asapc.report.text import MAX_CHARACTERS


def judged() -> dict[str, Any]:
    """A small report with a gate, and names that Markdown would take for its own."""
    report = small_report()
    report["gate"] = full_report()["gate"]
    report["model"] |= {"source": "teacher|x"}
    report["model"]["confidence"] |= {"speedup": [3.5, None]}
    report["sites"][0]["latency_teacher_ms"] = 12.0
    return report


def test_markdown_shows_every_part() -> None:
    lines = markdown(typed(judged())).splitlines()
    assert lines[0].startswith("# asapc: REGRESSION, 19.8x as fast as the teacher, 99.90% of predictions")
    assert lines[2].startswith("- **REGRESSION** attention_rel_l2 of layers.2.mha is 0.0221")
    for expected in (
        r"| model | teacher\|x | - |", "| prediction agreement | 99.90% | 99.70% to 100.00% |",
        "| speedup, compiled | 19.8x | 3.50 to - |", "| layers.0.mha | asap | 12.0 |",
        "| layers.0.mha | asap | 0.0167 | 0.0718 | 0.00835 | 0.294 | 2.30e-07 | 1.90e-04 | 0.997 "
        "| 31000 | 0.999 |",
        "| layers.0.mha | dual_stability | 2.41 | 1.62 | holds | 8000 | - "
        "| ASAP, Propositions B.8 and B.9 |",
        "| 11 to 96 | 201 | 100.00% | 2.20e-05 |", "| layers.0.mha | 11 to 96 | 201 | 0.0100 |",
        "| pooler | left alone | softmax attention: rows only |", "| examples, gate | 1000 |",
        "| torch | 2.13.0 |", "| objective | latency |",
        "| layers.0.mha | asap target 1 coarse:32 | chosen | 0.0167 | 0.00840 | 32x128 4.90, 32x256 14.8 "
        "| 32x128 118, 32x256 482 | 32x256 0.970x to 1.31x | 12.0 | prediction_agreement 0.999 |",
        "| attention_rel_l2 | layers.2.mha | 0.0221 | max 0.0200 | REGRESSION |",
        # A baseline is one row, and a row for what is worse.
        "| baseline | baseline/report.json | 1 compared | 2% worse, at most | ACCEPT |",
    ):
        assert expected in lines, expected
    # What failed comes first.
    accepted = lines.index("| speedup | model | 19.8 | min 10.0 | ACCEPT |")
    failed = next(i for i, line in enumerate(lines) if line.endswith("| REGRESSION |"))
    assert failed < accepted and not any("baseline 19.6" in line for line in lines)
    report = judged()
    report["gate"]["checks"][-1]["class"] = "REGRESSION"
    assert "| speedup | model | 19.8 | baseline 19.6, 2% | REGRESSION |" in markdown(typed(report))


def test_memory_that_was_predicted_is_told_as_memory() -> None:
    report = small_report()
    report["selection"] |= {"objective": "memory"}
    report["selection"]["rounds"][0] |= {"predicted_mib": 7.25}
    text = markdown(typed(report))
    assert "| predicted MiB |" in text and "| 7.25 |" in text and "predicted ms" not in text


def test_an_empty_report_is_shown_and_the_headline_says_that_no_gate_was_set() -> None:
    assert markdown(typed({"model": {}, "sites": []})).startswith("# asapc: no gate set\n")
    assert headline(typed(small_report())).startswith("no gate set, 19.8x as fast")
    assert convention_text(None) == "-"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (float("nan"), "-"), (float("inf"), "inf"), (0.0, "0"), (3, "3"), (True, "yes"),
        (0.0123456, "0.0123"), (1234.5678, "1235"), (1.23456e-7, "1.23e-07"), (12.0, "12.0"),
    ],
)  # fmt: skip
def test_number(value: object, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("sites", "length"), [(100, 40), (1000, 40), (30, 20_000)])
def test_any_report_fits_a_comment_and_says_what_is_left_out(sites: int, length: int) -> None:
    report = judged()
    site, check = report["sites"][0], report["gate"]["checks"][2]
    names = [f"layers.{i}.{'x' * length}" for i in range(sites)]
    report["sites"] = [{**site, "name": name} for name in names]
    report["gate"]["checks"] += [{**check, "scope": name} for name in names]
    report["refused"] = [{"name": name, "status": "refused", "reason": "r" * length} for name in names]
    tried = report["selection"]["sites"][0]["candidates"]
    report["selection"]["sites"] = [{"name": name, "candidates": tried} for name in names]
    text = markdown(typed(report))
    assert 2000 < len(text) <= MAX_CHARACTERS < 65536
    assert text.startswith("# asapc: REGRESSION, 19.8x") and "\n## Model" in text
    assert text.count("<details>") == text.count("</details>")
    assert text.rstrip().endswith("the dual.")
    if sites > 500:
        assert f"of {sites} rows are left out; all are in report.json." in text
        assert "- and " in text


def test_a_report_with_too_many_tables_still_fits() -> None:
    report = judged()
    report["model"].update({f"key{'|' * 200}{i}": "<" * 300 for i in range(2000)})
    report["environment"] = {f"{'<' * 299}{i}": "<" * 300 for i in range(2000)}
    check = report["gate"]["checks"][2]
    report["gate"]["checks"] = [{**check, "message": "<" * 9999, "scope": "<" * 9999}] * 2000
    assert len(markdown(typed(report))) <= MAX_CHARACTERS


def test_names_cannot_end_a_cell_a_row_or_a_fold() -> None:
    report = judged()
    report["sites"][0]["name"] = "a|b</details>\r\n# c\u2028<img src=x>"
    text = markdown(typed(report))
    assert "<img" not in text and "\n# c" not in text
    assert r"| a\|b&lt;/details> # c &lt;img src=x> | asap |" in text


# Files


def test_json_is_strict_and_takes_any_name() -> None:
    text = json_text({"a": float("nan"), "b": [float("inf"), 1.5], "c": ("é", True, None)})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": ["é", True, None]}
    with pytest.raises(TypeError):
        json_text({"a": object()})
    text = json_text({"a\udcff": ["\ud800é", "😀"]})
    assert json.loads(text.encode()) == {"a\ufffd": ["\ufffdé", "😀"]}
    assert json.loads(json_text({"é": "😀"}, ascii=True).encode("ascii")) == {"é": "😀"}


def test_written_files_replace_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("old")
    report = typed({"model": {"source": "x"}})
    written = write_report(tmp_path, report)
    assert [path.name for path in written] == ["report.json", "report.md", "junit.xml", "report.html"]
    assert sorted(tmp_path.iterdir()) == sorted(written)
    assert json.loads(written[0].read_text()) == report.to_json()
    assert write_report(tmp_path, report) == written


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(InputError, match="cannot be written"):
            write_report(folder, typed({"model": {}}))


# JUnit


def test_junit_has_a_case_a_check() -> None:
    report = judged()
    report["gate"]["checks"][3:] = [{
        "kind": "plausibility", "metric": "speedup", "scope": "model", "value": 1e6,
        "class": "ANOMALOUS", "passed": False, "message": "no kernel does that",
    }]  # fmt: skip
    root = ElementTree.fromstring(junit_text(typed(report)))
    counts = {"tests": "4", "failures": "1", "errors": "1"}
    assert root.tag == "testsuites" and counts.items() <= root.attrib.items()
    (suite,) = root.findall("testsuite")
    assert {**counts, "skipped": "0"}.items() <= suite.attrib.items()
    cases = suite.findall("testcase")
    assert [(case.get("classname"), case.get("name")) for case in cases] == [
        ("asapc.model", "prediction_agreement: min 0.998"),
        ("asapc.model", "accuracy_drop: max 0.00500, confident"),
        ("asapc.layers.2.mha", "attention_rel_l2: max 0.0200"), ("asapc.model", "speedup: plausible"),
    ]
    assert [[child.tag for child in case] for case in cases] == [[], [], ["failure"], ["error"]]
    assert [case[0].get("type") for case in cases[2:]] == ["REGRESSION", "ANOMALOUS"]
    assert cases[3][0].get("message") == cases[3][0].text == "no kernel does that"
    assert "REGRESSION, 19.8x" in (suite.findtext("system-out") or "")


def test_junit_without_a_gate_holds_no_case() -> None:
    root = ElementTree.fromstring(junit_text(typed(small_report())))
    assert root.get("tests") == "0" and root.find("testsuite") is not None
    assert not root.findall(".//testcase")


def test_junit_takes_any_name() -> None:
    report = judged()
    check = report["gate"]["checks"][2]
    check["scope"] = check["message"] = "<a b='c'>&]]>\"\x00\x1b\ufffe\ud800é😀"
    root = ElementTree.fromstring(junit_text(typed(report)).encode())
    problem = root.findall(".//failure")[0]
    assert problem.text == problem.get("message") == "<a b='c'>&]]>\"\ufffd\ufffd\ufffd\ufffdé😀"
