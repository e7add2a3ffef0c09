"""A report.json that was written by hand: whatever is in it, it is shown, or refused by one message."""

from __future__ import annotations

from typing import Any

from junk import JUNK, places, survives, with_junk
from page_report import small_report

from asapc.report import Report, json_text, junit_text, markdown
from asapc.report.brief import report_brief
from asapc.report.gates import gate_result, parse_gates
from asapc.report.html import page

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


def shown(document: Any, with_page: bool = False) -> None:
    """As Markdown, JUnit and JSON, in brief with advice, judged again, and laid out for the page."""
    report = Report.from_json(document, "report")
    markdown(report)
    junit_text(report)
    json_text(report)
    report_brief(report)
    gate_result(report, parse_gates({"accuracy_drop": {"max": 0.1}}))
    if with_page:
        page(report)


def test_it_is_shown_whole() -> None:
    shown(whole(), True)
    report = Report.from_json(whole(), "report")
    for part in ("soft_to_hard", "refresh", "onnx", "environment", "warnings"):
        assert report.to_json()[part] == whole()[part]
    assert [own.to_json()["convention"] for own in report.sites[2:]] == CONVENTIONS


def test_junk_is_shown_or_refused() -> None:
    """Three kinds of junk in one place after the other."""
    document, refused = whole(), 0
    ways = list(places(document))
    for index, way in enumerate(ways):
        for step in (0, 4, 9):
            junk = JUNK[(index + step) % len(JUNK)]
            often = 2 if way[0] == "selection" else 8  # of what pictures are drawn
            changed, with_page = with_junk(document, way, junk), step == 0 and index % often == 0
            refused += not survives(lambda: shown(changed, with_page), (way, junk))  # noqa: B023
    assert len(ways) < refused < 3 * len(ways)
