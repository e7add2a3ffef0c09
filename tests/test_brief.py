"""Results in brief, and on a terminal of any width: few lines, and every number whole."""

from __future__ import annotations

import io
from typing import Any

import page_report
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asapc.report import Report, brief
from asapc.report.console import print_result
from asapc.report.tables import Table, inspect_tables, report_tables

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
    document = page_report.full_report()
    site = document["sites"][0]
    errors = [{"attention_rel_l2": 0.0361 / (i + 1)} for i in range(layers)]
    refused = {"status": "refused", "reason": WHY}
    document |= {"gate": {}, "selection": None} | {
        "sites": [{**site, "name": name(i), "reason": WHY, "metrics": of}
                  for i, of in enumerate(errors)],
        "refused": [{"name": f"left.{i}", **refused} for i in range(layers)],
    }
    document["model"] |= {"latency_lossless_ms": 70.0, "speedup_lossless": 21.0}
    return page_report.typed(document)


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
             "speedup_lossless": 6.37, "speedup": 10.4}  # fmt: skip
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


@pytest.mark.parametrize("layers", [1, 2, 48])
@pytest.mark.parametrize("command", BRIEFS)
def test_few_lines_that_fit_a_terminal(command: str, layers: int) -> None:
    lines = BRIEFS[command](layers)
    assert 0 < len(lines) <= brief.LINES
    assert [line for line in lines if len(line) > brief.WIDTH] == []


def test_what_is_left_alone_is_never_crowded_out() -> None:
    lines = "\n".join(brief.inspect_brief(inspection(48, 7)))
    assert lines.count("refused: ") == 2 and "and 68 of 10 other kinds: --verbose" in lines
    assert "48 of 96 layers can be compiled, replayed within 1.14e-06" in lines


def test_a_report_says_what_to_do_and_where_it_is_worst() -> None:
    lines = "\n".join(brief.report_brief(measured(3)))
    assert lines.startswith("no gate file; by the default limits: Take the lossless model instead.")
    assert 'asapc.load("OUT", stage="lossless")' in lines
    words = " ".join(lines.split())
    assert "speed 19.8x (1468 ms -> 74.2 ms a batch of 32; 21.0x with every loop kept exactly" in words
    assert "agreement 99.90% (95% interval 99.70% to 100.00%)" in words
    assert "worst layer 0.0361 (attention error of vision_tower" in words
    assert "left alone 3 layers" in words


@given(st.text(max_size=200), st.integers(5, 60))
def test_a_name_keeps_both_ends(text: str, most: int) -> None:
    found = brief.shortened(text, most)
    if found != text and "\\u" not in found:
        assert len(found) <= max(most, len(text))
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
