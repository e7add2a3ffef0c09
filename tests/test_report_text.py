import json
from pathlib import Path
from typing import Any

import pytest

from asapc.errors import InputError
from asapc.report import json_text, markdown, write_report
from asapc.report.tables import convention_text, number

REPORT: dict[str, Any] = {
    "format_version": 1,
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
            "closures": 3,
            "metrics": {"attention_rel_l2": 0.0123456, "r2": None},
            "latency_teacher_ms": 12.0,
        }
    ],
    "refused": [{"name": "layers.1.fn", "status": "refused", "reason": "not Sinkhorn: rows only"}],
    "environment": {"torch": "2.13.0", "threads": 2},
    "gate": {
        "passed": False,
        "checks": [
            {
                "metric": "attention_rel_l2",
                "scope": "layers.0.fn",
                "value": 0.0123456,
                "max": 0.01,
                "passed": False,
            }
        ],
    },
}


def test_markdown_golden() -> None:
    lines = markdown(REPORT).splitlines()
    assert lines[:3] == ["# asapc fidelity report", "", "**Gate: FAILED**"]
    for expected in (
        r"| model | teacher\|x |",
        "| prediction agreement | 98.96% |",
        "| speedup, compiled | 4.00x |",
        "| site | operator | attention l2 | R2 |",
        "|---|---|---:|---:|",
        "| layers.0.fn | asap | 0.0123 | - |",
        "| layers.0.fn | asap | 12.0 |",
        "| layers.0.fn | asap | source, 3 closures, coarse:32 | T=20, row first, column last, "
        "scale 0.250, factor M, key mask, early stop | fastest inside the budget |",
        "| layers.1.fn | refused | not Sinkhorn: rows only |",
        "| attention_rel_l2 | layers.0.fn | 0.0123 | <= 0.0100 | FAILED |",
        "| torch | 2.13.0 |",
    ):
        assert expected in lines


def test_markdown_of_an_empty_report_does_not_fail() -> None:
    assert markdown({"model": {}, "sites": []}).startswith("# asapc")


def test_json_is_strict() -> None:
    text = json_text({"a": float("nan"), "b": [float("inf"), 1.5], "c": ("é", True, None)})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": ["é", True, None]}
    with pytest.raises(TypeError):
        json_text({"a": object()})


def test_written_files_replace_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("old")
    written = write_report(tmp_path, REPORT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md"]
    assert json.loads(written[0].read_text()) == REPORT
    assert write_report(tmp_path, REPORT) == written


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="cannot be written"):
            write_report(folder, REPORT)


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
