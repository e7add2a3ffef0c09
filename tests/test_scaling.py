"""benchmarks/scaling.py: its table and picture, from figures that were not measured here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("scaling", BENCHMARKS / "scaling.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def document(scaling: ModuleType) -> dict[str, Any]:
    def row(median: float) -> dict[str, float]:
        return {"median_ms": median, "q1": 0.9 * median, "q3": 1.1 * median}

    lengths = {tokens: {name: row(tokens / (1 + place)) for place, name in enumerate(scaling.LINES)}
               for tokens in (128, 256)}  # fmt: skip
    results = [{"shape": {"tokens": tokens}, "rows": rows} for tokens, rows in lengths.items()]
    return {"environment": {}, "results": results}


def test_the_table_says_how_often_the_usual_loop_would_fit(scaling: ModuleType) -> None:
    lines = scaling.table(document(scaling)["results"]).splitlines()
    assert lines[0].startswith("| N | usual PyTorch loop, ms |") and len(lines) == 4
    assert lines[2] == "| 128 | 128.00 | 64.00 (2.0x) | 42.67 (3.0x) | 32.00 (4.0x) | 25.60 (5.0x) |"


def test_the_picture_is_the_same_every_time_on_any_ground(scaling: ModuleType, tmp_path: Path) -> None:
    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    for path in (first, second):
        scaling.draw(document(scaling), path)
    text = first.read_text(encoding="utf-8")
    assert first.read_bytes() == second.read_bytes()
    for label, colour in scaling.LINES.values():
        assert f">{label}</text>" in text and colour in text
    for dark_or_light in ("#000000", "#ffffff", "fill: black", "fill: white"):
        assert dark_or_light not in text, "it has to read on white and on black"


def test_its_lines_are_rows_of_the_benchmark_that_it_reuses(scaling: ModuleType) -> None:
    import torch

    shape = scaling.Shape(1, 2, 8, 4, 4)
    with torch.no_grad():
        problem = scaling.make_problem(shape, torch.float32, "cpu", 1.0, 0, False).to(torch.float32)
    assert set(scaling.LINES) <= set(scaling.candidates_of(problem, True))
