"""The study: a grid becomes rows, every row is fitted and measured, interrupted work is kept."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from small_text import write_data, write_teacher

from asapc.calibration import distill
from asapc.cli import main
from asapc.errors import EXIT_BAD_INPUT, InputError
from asapc.inputs.data import open_data
from asapc.models import ARCHITECTURES
from asapc.stages.calibrate import selection_batches
from asapc.study import load_grid

GRID = """
blocks:
  - {half_steps: [2, 8]}
  - features: [["coarse:12"], [gaussian, norm]]
    side: [target]
    max_examples: [16, 64]
  - {features: ["sliced:8"], side: source, c_transforms: 3, fit: [ls, kl], coefficients: [pooled, shared]}
  - {features: ["sliced:8"], side: source, aim: last, points: [all, active], c_transforms: [1, 3]}
  - {operator: [lot, esp_hard], pivots: 3, slices: 4, max_examples: 16}
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_block_is_the_product_of_its_lists(tmp_path):
    blocks = load_grid(write(tmp_path / "grid.yaml", GRID))
    assert [len(block) for block in blocks] == [2, 4, 4, 4, 2]
    assert [(row.operator, row.half_steps) for row in blocks[0]] == [("sinkhorn", 2), ("sinkhorn", 8)]
    assert {(row.features, row.max_examples) for row in blocks[1]} == {
        (features, count) for features in (("coarse:12",), ("gaussian", "norm")) for count in (16, 64)
    }
    assert all(row.operator == "asap" for row in blocks[1])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("blocks: []", "blocks"),
        ("blocks: [{}]", "block 1"),
        ("blocks: [{c_transforms: [1, no]}]", "c_transforms"),
        ("blocks: [{c_transforms: []}]", "c_transforms must have a value"),
        ("blocks: [{half_steps: 3, c_transforms: 1}]", "half_steps"),
        ("blocks: [{operator: [asap, sinkhorn]}]", "operator must be asap or lot or .*got 'sinkhorn'"),
        ("blocks: [{features: [nonsense]}]", "nonsense"),
        ("blocks: [{side: both, c_transforms: 2}]", "block 1: `side: both`"),
        ("blocks: [{c_transform: 1}]", r"line 1: blocks: block 1: unknown key(.|\n)*mean 'c_transforms'"),
        ("blocks:\n  - side: target\n    ridge: x", r"line 3: blocks: block 1: ridge must be a"),
        ("blocks:\n  - half_steps: [3, x]", r"line 2: .*half_steps must be an integer from 1 to 1024"),
        ("blocks: [{c_transforms: 1}]\nblocks: [{c_transforms: 1}]", "'blocks' appears twice"),
        ("seed: 3\nblocks: [{half_steps: 3}]", "unknown key 'seed'"),
    ],
)
def test_a_bad_grid_names_the_place(tmp_path, text, named):
    with pytest.raises(InputError, match=named):
        load_grid(write(tmp_path / "grid.yaml", text))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    write_teacher(folder / "teacher", n_layers=2, max_iter=8, sharpness=3.0)
    write_data(folder / "data.npz", 160)
    write(folder / "grid.yaml", GRID)
    return folder


def run(work: Path, grid: Path, out: Path, *options: str) -> int:
    return main(["study", str(work / "teacher"), "--data", str(work / "data.npz"), "--grid", str(grid),
                 "-o", str(out), "--quiet", *options])  # fmt: skip


@pytest.fixture(scope="module")
def result(work):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "STEPS", 20)
        patch.setattr(distill, "CANDIDATES", 32)
        assert run(work, work / "grid.yaml", work / "out", "--batch-size", "16") == 0
    return json.loads((work / "out" / "study.json").read_text())


def test_every_row_is_measured(result):
    rows = result["rows"]
    assert len(rows) == 16
    short, whole = rows[:2]
    assert short["attention_rel_l2"] > 0.05  # a loop cut short is another operator
    assert whole["attention_rel_l2"] < 1e-5 and whole["prediction_agreement"] == 1.0
    for row in rows[2:10]:
        assert 0 < row["attention_rel_l2"] < short["attention_rel_l2"]
        assert row["site_ms"] > 0 and row["predict_ms"] > 0 and row["fit_seconds"] > 0
        assert row["prediction_agreement"] is not None and row["accuracy_compiled"] is not None
    assert any(row["pareto"] for row in rows)
    assert [row["features"] for row in rows[14:]] == ["lot, 3 pivots", "esp_hard, 4 slices"]
    for row in rows[14:]:
        assert row["fit"] == "distilled" and row["examples"] == 16
        assert 0 < row["output_rel_l2"] < 3 and row["site_ms"] > 0


def test_calibration_sizes_and_sharing_are_kept_apart(result):
    assert {row["examples"] for row in result["rows"][2:6]} == {16, 64}
    fitted = {(row["fit"], row["coefficients"]): row for row in result["rows"][6:10]}
    assert len(fitted) == 4
    errors = {row["attention_rel_l2"] for row in fitted.values()}
    assert len(errors) == 4  # four different fits


def test_the_last_dual_is_fitted_alike_for_any_number_of_c_transforms(result):
    rows = {(row["points"], row["c_transforms"]): row for row in result["rows"][10:14]}
    assert result["output_values"] == "own" and len(rows) == 4
    for points in ("all", "active"):
        one, three = rows[points, 1], rows[points, 3]
        assert (one["aim"], three["aim"]) == ("aligned", "last")
        assert one["r2"] == three["r2"]
        assert three["attention_rel_l2"] < one["attention_rel_l2"]
    assert rows["all", 1]["r2"] != rows["active", 1]["r2"]


def test_measuring_on_other_data(work, tmp_path, monkeypatch):
    """None of the examples that a fit uses, or stops by, is measured on, where the files are the same."""
    monkeypatch.setattr(distill, "STEPS", 2)
    data = str(work / "data.npz")
    source = open_data(data, inspect.signature(ARCHITECTURES["sinkformer-text"].forward))
    held_out = sum(len(batch) for batch in selection_batches(source, 32, 999))
    blocks = ("{features: [norm], max_examples: 64}", "{operator: lot, pivots: 2, max_examples: 16}")
    for chosen, others in ((blocks[:1], 64), (blocks, 64 + held_out)):
        grid = write(tmp_path / "grid.yaml", f"blocks: [{', '.join(chosen)}]")
        assert run(work, grid, tmp_path / "out", "--test", data, "--examples", "999") == 0
        measured = json.loads((tmp_path / "out" / "study.json").read_text())["examples"]
        assert others > 0 and measured == 160 - others


@pytest.mark.parametrize(
    ("block", "named"),
    [("{half_steps: [3, 9]}", "loop of 8 half-steps"), ("{side: source, c_transforms: 0}", "both")],
)
def test_an_impossible_row_is_refused_before_any_work(work, tmp_path, capsys, block, named):
    grid = write(tmp_path / "grid.yaml", f"blocks: [{block}]")
    assert run(work, grid, tmp_path / "out") == EXIT_BAD_INPUT
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_finished_blocks_survive_a_failure(work, tmp_path, monkeypatch):
    from asapc import study as module

    grid = write(tmp_path / "grid.yaml", "blocks: [{half_steps: 2}, {features: [norm]}]")

    def interrupted(*arguments: Any) -> Any:  # the first block fits nothing
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "stream", interrupted)
    assert run(work, grid, tmp_path / "out") == 130
    rows = json.loads((tmp_path / "out" / "study.json").read_text())["rows"]
    assert [row["features"] for row in rows] == ["Sinkhorn, 2 half-steps"]
