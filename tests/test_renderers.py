"""One table model, rendered: Markdown, JSON, JUnit XML, the page, a terminal of any width, and in brief.

Every cell of every table is in each of them; names from outside end no cell, row or fold; whatever a
report.json that was written by hand holds is shown, or refused by one message.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import unescape

import pytest
from junk import JUNK, places, survives, with_junk
from page_report import full_report, pictures, shown, small_report, typed

from asapc.report import Report, brief, json_text, junit_text, markdown
from asapc.report.advice import advise, decide
from asapc.report.console import print_result
from asapc.report.gates import gate_result, parse_gates
from asapc.report.html import html, page
from asapc.report.tables import (
    Table,
    convention_text,
    headline,
    inspect_tables,
    number,
    report_sections,
    report_tables,
)
from asapc.report.text import MAX_CHARACTERS


def judged() -> dict[str, Any]:
    """A small report with a gate, and names that Markdown would take for its own."""
    report = small_report()
    report["gate"] = full_report()["gate"]
    report["model"] |= {"source": "teacher|x"}
    return report


def test_markdown_begins_with_the_verdict_and_what_failed_comes_first() -> None:
    lines = markdown(typed(judged())).splitlines()
    assert lines[0].startswith("# asapc: REGRESSION, 19.8x as fast as the teacher, 99.90% of predictions")
    assert lines[2].startswith("- **REGRESSION** attention_rel_l2 of layers.2.mha is 0.0221")
    for expected in (
        r"| model | teacher\|x | - |", "| prediction agreement | 99.90% | 99.70% to 100.00% |",
        # A baseline is one row, and a row for what is worse.
        "| baseline | baseline/report.json | 1 compared | 2% worse, at most | ACCEPT |",
    ):
        assert expected in lines, expected
    accepted = lines.index("| speedup | model | 19.8 | min 10.0 | ACCEPT |")
    failed = next(i for i, line in enumerate(lines) if line.endswith("| REGRESSION |"))
    assert failed < accepted and not any("baseline 19.6" in line for line in lines)
    report = judged()
    report["gate"]["checks"][-1]["class"] = "REGRESSION"
    assert "| speedup | model | 19.8 | baseline 19.6, 2% | REGRESSION |" in markdown(typed(report))


def test_every_cell_of_every_table_is_on_the_page_and_in_markdown() -> None:
    """The page has the advice and its headings, too."""
    report = typed(full_report(), pictures()[:1])
    on_page, in_markdown = shown(html(report)), unescape(markdown(report)).replace("\\|", "|")
    for table in report_tables(report):
        assert table.rows and table.title in in_markdown, table.title
        for cell in (cell for row in table.rows for cell in row):
            assert " ".join(cell.split()) in on_page, (table.title, cell)
            assert cell in in_markdown, (table.title, cell)
    advice = [decide(report).sentence, *advise(report)]
    headings = [heading for heading, tables in report_sections(report).items() if tables]
    assert len(headings) > 5 and all(words in on_page for words in (*advice, *headings))


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


@pytest.mark.parametrize(("sites", "length"), [(1000, 40), (30, 20_000)])
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


# In brief, and on a terminal

LONG = "vision_tower.encoder.stages.3.blocks.17.attention.inner_attention.sinkhorn_attention_module"
WHY = "a loop no convention reproduces to 1e-6 in float64; the best fit is off by 0.0361, " * 4


def name(index: int) -> str:
    return f"{LONG}.{index}.fn"


def inspection(layers: int, kinds: int) -> dict[str, Any]:
    matched = [
        {"name": name(i), "status": "matched", "heads": 12, "head_dim": 64,
         "replay_error": 1.14e-6 / (i + 1),
         "convention": {"half_steps": 20 + i % kinds, "first_side": "row", "last_side": "column",
                        "score_multiplier": 0.125, "output_factor": "N"}}
        for i in range(layers)
    ]  # fmt: skip
    refused = [{"name": f"{name(i)}.r", "status": "refused", "reason": f"{i % kinds}: {WHY}"}
               for i in range(layers)]  # fmt: skip
    return {"model": "teacher", "capture": "whole", "sites": [*matched, *refused]}


def measured(layers: int) -> Report:
    document = full_report()
    site = document["sites"][0]
    errors = [{"attention_rel_l2": 0.0361 / (i + 1)} for i in range(layers)]
    refused = {"status": "refused", "reason": WHY}
    document |= {"gate": {}, "selection": None} | {
        "sites": [{**site, "name": name(i), "reason": WHY, "metrics": of} for i, of in enumerate(errors)],
        "refused": [{"name": f"left.{i}", **refused} for i in range(layers)],
    }
    document["model"] |= {"latency_lossless_ms": 70.0, "speedup_lossless": 21.0}
    return typed(document)


def fits(layers: int) -> dict[str, Any]:
    found = [
        {"name": name(i), "side": "target", "c_transforms": 1 + i % 5, "fit": "kl",
         "features": ["coarse:32", "gaussian"], "coefficients": "per_head",
         "r2": 0.9 + i / 1000, "fit_converged": False}
        for i in range(layers)
    ]  # fmt: skip
    few = {"sites": [name(0), name(1)], "of": "regression rows", "given": 8, "needed": 32}
    return {"model": "teacher", "order": "parallel", "sites": found, "warnings": [few]}


def manifest(layers: int) -> dict[str, Any]:
    sites = [
        {"name": name(i), "operator": ("asap", "sinkhorn")[i % 2], "reason": f"{i % 7} {WHY}",
         "side": "target", "c_transforms": 1, "features": ["coarse:32"]}
        for i in range(layers)
    ]  # fmt: skip
    left = [{"name": f"left.{i}", "status": "kept", "reason": f"{i % 7} {WHY}"} for i in range(layers)]
    onnx = {"opset": 18, "bytes": 498_000, "largest": 3.3e-7, "tolerance": 1e-4, "shapes": [{}] * 20}
    return {"sites": sites, "refused": left, "sizes": "inputs [any, 1 to 256]; " * 20,
            "warnings": fits(2)["warnings"], "onnx_file": onnx}  # fmt: skip


def timings(layers: int) -> dict[str, Any]:
    kernel = {"operator": "sinkhorn", "shape": "4x8x512x64", "kernel": "resident", "reason": WHY}
    sites = [
        {"name": name(i), "operator": "asap", "speedup": 2.5 + i,
         "kernels": [{**kernel, "kernel": f"resident {i % 7}"}]}
        for i in range(layers)
    ]  # fmt: skip
    model = {"latency_teacher_ms": 3425.0, "latency_lossless_ms": 538.0, "latency_compiled_ms": 330.0,
             "speedup_lossless": 6.37, "speedup": 10.4,
             "confidence": {"speedup_lossless": (0.99, 7.0), "speedup": (10.1, 10.9)}}  # fmt: skip
    return {"model": {"source": "teacher", "batch": 32, **model}, "onnx": model, "sites": sites}


def grid(rows: int) -> dict[str, Any]:
    return {
        "sites": [], "baseline": {},
        "rows": [
            {"features": "coarse:32 gaussian", "side": "target", "c_transforms": 1, "pareto": True,
             "attention_rel_l2": 0.0361 / (i + 1), "site_ms": 1.25 * (i + 1)}
            for i in range(rows)
        ],
    }  # fmt: skip


BRIEFS = {
    "inspect": lambda n: brief.inspect_brief(inspection(n, 7)),
    "calibrate": lambda n: brief.calibration_brief(fits(n)),
    "compile": lambda n: brief.compile_brief(manifest(n)),
    "report": lambda n: brief.report_brief(measured(n)), "bench": lambda n: brief.bench_brief(timings(n)),
    "study": lambda n: brief.study_brief(grid(n)),
    "refresh": lambda n: brief.refresh_brief(
        {"best_epoch": 3, "examples": 900, "before": {f"m{i}": 0.5 for i in range(n)}, "after": {}}
    ),
    "export": lambda n: brief.onnx_brief(manifest(n)["onnx_file"]),
}


@pytest.mark.parametrize("layers", [1, 48])
@pytest.mark.parametrize("command", BRIEFS)
def test_few_lines_that_fit_a_terminal(command: str, layers: int) -> None:
    lines = BRIEFS[command](layers)
    assert 0 < len(lines) <= brief.LINES
    assert [line for line in lines if len(line) > brief.WIDTH] == []


def test_what_is_left_alone_is_never_crowded_out() -> None:
    lines = "\n".join(brief.inspect_brief(inspection(48, 7)))
    assert lines.count("refused: ") == 2 and "and 68 of 10 other kinds: --verbose" in lines
    assert "48 of 96 layers can be compiled, replayed within 1.14e-06" in lines


def test_a_layer_that_keeps_its_own_code_is_not_compiled() -> None:
    sites = [{"name": operator, "operator": operator} for operator in ("teacher", "asap")]
    assert brief.compile_brief({"sites": sites})[0] == "1 layer compiled, 1 left unchanged"


@pytest.mark.parametrize(("status", "hinted"), [("matched", False), ("refused", True), ("kept", True)])
def test_what_is_left_alone_points_to_what_to_write(status: str, hinted: bool) -> None:
    site = {"name": "layers.0", "status": status, "reason": "does not replay"}
    lines = brief.inspect_brief({"model": "teacher", "capture": "whole", "sites": [site]})
    assert (brief.WRITE_INSTEAD in lines) == hinted


def test_a_report_says_what_to_do_and_where_it_is_worst() -> None:
    lines = "\n".join(brief.report_brief(measured(3)))
    assert lines.startswith("no gates file, default limits: Take the lossless model instead.")
    words = " ".join(lines.split())
    assert "19.8x (1468 ms -> 74.2 ms per batch of 32; too few rounds for an interval; 21.0x" in words
    assert "agreement 99.90% (95% interval 99.70% to 100.00%)" in words
    assert "worst layer 0.0361 (attention error of vision_tower" in words
    assert "left alone 3 layers" in words


def test_no_figure_is_cut_or_empty() -> None:
    report = measured(1)
    times = {"speedup_teacher_torch_compile": 3.08, "speedup_compiled_torch_compile": 36.2,
             "torch_compile_seconds": 167.0}  # fmt: skip
    values, ends = {**report.model.values, **times}, {"speedup": (19.1, 20.2)}
    model = replace(report.model, values=values, confidence=ends)
    words = " ".join(" ".join(brief.report_brief(replace(report, model=model))).split())
    assert "interval 19.1 to 20.2; 21.0x with every loop kept exactly (lossless); under" in words
    assert "the compiled model is 36.2x as fast as the plain teacher)" in words
    lines = brief.bench_brief(timings(1))
    assert f"least gain: {brief.shortened(name(0))}, asap, 2.50x" in lines
    assert "  lossless 538 ms (equal, 95% interval 0.990 to 7.00)" in lines
    assert "  compiled 330 ms (10.4x, 95% interval 10.1 to 10.9)" in lines


@pytest.mark.parametrize("text", ["", "short", "x" * 200, "é" * 61, "\u202e" * 9])
def test_a_name_keeps_both_ends(text: str) -> None:
    assert len(brief.shortened(text, 60)) <= 60
    assert brief.shortened(LONG)[:10] == LONG[:10] and brief.shortened(LONG)[-10:] == LONG[-10:]
    assert len(brief.shortened(LONG)) == 40


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("tables", [report_tables(measured(3)), inspect_tables(inspection(3, 2))])
def test_no_number_is_cut_at_any_width(tables: list[Table], width: int) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setenv("NO_COLOR", "1")
        print_result(tables, stream)
    words = stream.getvalue().split()
    for table in tables:
        for index, (_, right) in enumerate(table.headings()):
            for row in table.rows if right else ():
                assert set(row[index].split()) <= set(words), (table.title, row[index])


# Junk in a report.json

CONVENTIONS: list[dict[str, Any]] = [
    {"operator": "sinkhorn", "half_steps": 20, "first_side": "row", "score_multiplier": 0.25,
     "output_factor": "N", "mask": "key", "stabiliser": {"kind": "add", "constant": 1e-8}},
    {"operator": "esp_soft", "softsort_temperature": 0.1, "inverse_temperature": 1.0, "slices": 4,
     "coupling": "monotone", "ties": "shared", "output_factor": 1.0},
    {"operator": "lot", "pivots": 8, "queries": {"half_steps": 5, "tokens_first": True},
     "keys": {"half_steps": 5, "score_multiplier": 1.0}},
]  # fmt: skip


def whole() -> dict[str, Any]:
    """A report with everything that a report may tell."""
    shares = {"accuracy": 0.9, "prediction_change": 0.01}
    report = small_report() | {
        "soft_to_hard": {
            "sites": 1, "examples": 9, "variants": [{"name": "soft", **shares, "row_err": 0.1}],
        },
        "refresh": {
            "mode": "labels", "best_epoch": 3, "parameters": ["a"], "before": {"accuracy": 0.8},
            "after": {"accuracy": 0.9}, "earlier": [{"mode": "distil"}],
            "soft_to_hard": {"soft": shares, "before": shares, "after": shares},
        },
        "onnx": {
            "opset": 18, "bytes": 1000, "sha256": "0", "float16": False, "functions": ["Asap"],
            "largest": 1e-6, "tolerance": 1e-4, "shapes": [{"batch": 3, "tokens": 12}],
        },
    }  # fmt: skip
    site = report["sites"][1]
    report["sites"] += [{**site, "name": f"s{i}", "convention": c} for i, c in enumerate(CONVENTIONS)]
    gates = parse_gates({"prediction_agreement": {"min": 0.97}, "speedup": {"min": 5}})
    report["gate"] = gate_result(Report.from_json(report, "report"), gates).to_json()
    return report


def rendered(document: Any, with_page: bool = False) -> None:
    """As Markdown, JUnit and JSON, in brief with advice, judged again, and laid out for the page."""
    report = Report.from_json(document, "report")
    markdown(report)
    junit_text(report)
    json_text(report)
    brief.report_brief(report)
    gate_result(report, parse_gates({"accuracy_drop": {"max": 0.1}}))
    if with_page:
        page(report)


def test_it_is_shown_whole() -> None:
    rendered(whole(), True)
    report = Report.from_json(whole(), "report")
    for part in ("soft_to_hard", "refresh", "onnx", "environment", "warnings"):
        assert report.to_json()[part] == whole()[part]
    assert [own.to_json()["convention"] for own in report.sites[2:]] == CONVENTIONS


def test_junk_is_shown_or_refused() -> None:
    """One kind of junk after the other, in every place."""
    document, refused = whole(), 0
    ways = list(places(document))
    for index, way in enumerate(ways):
        junk = JUNK[index % len(JUNK)]
        often = 5 if way[0] == "selection" else 20  # of what pictures are drawn
        changed, with_page = with_junk(document, way, junk), index % often == 0
        refused += not survives(lambda: rendered(changed, with_page), (way, junk))  # noqa: B023
    assert len(ways) / 4 < refused < len(ways)
