"""What a report measures and on which examples, on small artefacts compiled on the spot."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from junk import resigned
from safetensors.torch import load_file, save_file
from small_text import write_data, write_teacher
from steps import compiled, run

from asapc import pipeline
from asapc.artifact import read_artifact
from asapc.errors import InputError
from asapc.inputs.data import open_data, split_of
from asapc.measure.own_metric import OwnMetric
from asapc.operators.catalogue import TEACHER
from asapc.passes import select
from asapc.passes.candidates import Candidate
from asapc.report import Report, evaluate, markdown, report_schema
from asapc.report.baseline import Allowance, Baseline, compare
from asapc.report.brief import report_brief
from asapc.report.gates import parse_gates
from asapc.report.html import html
from asapc.terminal.progress import Progress

RECIPE = {
    "operator": "asap", "side": "source", "c_transforms": 3, "features": ["coarse:4"],
    "batch_size": 16, "max_examples": 64,
}  # fmt: skip

BUDGET = {"attention_rel_l2": 1.0, "prediction_agreement": 0.1}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    teacher = write_teacher(folder / "teacher", n_layers=2, sharpness=3.0)
    compiled(folder, teacher, write_data(folder / "data.npz", 160), RECIPE)
    return folder


def report(
    folder: Path, data: str | None = None, **options: Any
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    found = evaluate.report(folder, data, measuring=evaluate.Measuring(**options), progress=Progress())
    return found.to_json(), found.pictures


def hashes(path: Path) -> list[int]:
    return [h for batch in open_data(str(path), None).batches(64) for h in batch.hashes]


def with_seen(work: Path, folder: Path, seen: list[int]) -> Path:
    shutil.copytree(work / "out", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["asapc.seen_hashes"] = torch.tensor(
        [h - (1 << 64) if h >= 1 << 63 else h for h in seen], dtype=torch.int64
    )
    save_file(tensors, folder / "model.safetensors")
    return resigned(folder)


@pytest.fixture(scope="module")
def whole(work):
    return report(work / "out")


# Three disjoint splits


def test_the_own_data_is_measured_on_its_gate_split_alone(work, whole, tmp_path):
    own = hashes(work / "data.npz")
    splits = [split_of(h) for h in own]
    counts = {name: splits.count(name) for name in ("calibration", "selection", "gate")}
    found, _ = whole
    assert counts["calibration"] > RECIPE["max_examples"]  # type: ignore[operator]
    assert found["splits"] == {
        "calibration": 64, "selection": counts["selection"], "gate": counts["gate"],
        "excluded": 64 + counts["selection"],
    }  # fmt: skip
    assert found["model"]["examples"] == counts["gate"]
    (tmp_path / "again.npz").symlink_to(work / "data.npz")  # the same file by another path
    again, _ = report(work / "out", data=str(tmp_path / "again.npz"), fast=True)
    assert again["splits"] == found["splits"]


def test_other_data_is_measured_without_what_was_seen(work, tmp_path):
    own = np.load(work / "data.npz")["inputs"]
    seen = read_artifact(work / "out").seen_hashes
    known = own[[h in seen for h in hashes(work / "data.npz")]][:10]
    fresh = np.load(write_data(tmp_path / "fresh.npz", 30, seed=1))["inputs"]
    np.savez(tmp_path / "other.npz", inputs=np.concatenate([known, fresh]))
    found, _ = report(work / "out", data=str(tmp_path / "other.npz"))
    splits = found["splits"]
    assert (splits["gate"], splits["excluded"]) == (30, 10) == (found["model"]["examples"], 10)
    np.savez(tmp_path / "seen.npz", inputs=known)
    with pytest.raises(InputError, match="calibration and selection have not seen") as raised:
        report(work / "out", data=str(tmp_path / "seen.npz"))
    assert "all 10 were seen" in str(raised.value.got)


def test_an_artefact_that_has_seen_the_gate_split_is_refused(work, tmp_path):
    own = hashes(work / "data.npz")
    gate = next(h for h in own if split_of(h) == "gate")
    seen = sorted(read_artifact(work / "out").seen_hashes)
    with pytest.raises(InputError, match="must not have seen the gate split") as raised:
        report(with_seen(work, tmp_path / "tampered", [*seen, gate]))
    assert raised.value.got == f"1 of the {len(seen) + 1} examples they have seen belong to it"


def test_data_without_a_gate_split(work, tmp_path):
    inputs = np.load(work / "data.npz")["inputs"]
    kept = [split_of(h) != "gate" for h in hashes(work / "data.npz")]
    folder = tmp_path / "out"
    shutil.copytree(work / "out", folder)
    np.savez(tmp_path / "small.npz", inputs=inputs[kept])
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "data": str(tmp_path / "small.npz")}))
    resigned(folder)
    with pytest.raises(InputError, match="the gate split needs examples"):
        report(folder)


def test_the_data_of_a_refresh_is_measured_on_its_gate_split(work, tmp_path):
    write_data(tmp_path / "more.npz", 120, seed=2)
    assert run("refresh", work / "out", "--data", tmp_path / "more.npz", "--distil", "--epochs", 1,
               "--examples", 20, "-o", tmp_path / "refreshed", "--quiet") == 0  # fmt: skip
    gate = sum(split_of(h) == "gate" for h in hashes(tmp_path / "more.npz"))
    found, _ = report(tmp_path / "refreshed", data=str(tmp_path / "more.npz"), fast=True)
    assert found["splits"]["gate"] == gate  # not the examples the refresh left over
    assert found["splits"]["calibration"] == 64 + 20
    back, _ = report(tmp_path / "refreshed", fast=True)
    assert back["splits"]["gate"] == sum(split_of(h) == "gate" for h in hashes(work / "data.npz"))


# What is in it


def test_intervals_lengths_heads_and_certificates(work, whole):
    found, pictures = whole
    model = found["model"]
    assert model["confidence_level"] == 0.95
    assert set(model["confidence"]) == {
        "prediction_agreement", "accuracy_teacher", "accuracy_compiled", "accuracy_drop", "logit_kl",
        "output_rel_l2", "speedup", "speedup_lossless",
    }  # fmt: skip
    for name, (low, high) in model["confidence"].items():
        assert low <= model[name] <= high and low < high, name
    for site, drawn in zip(found["sites"], pictures, strict=True):
        error = site["metrics"]["attention_rel_l2"]
        low, high = site["confidence"]["attention_rel_l2"]
        assert low < error < high
        heads = site["by_head"]["attention_rel_l2"]
        assert len(heads) == 2 and sum(heads) / 2 == pytest.approx(error)
        assert len(site["by_length"]) == 5
        assert site["by_length"][0]["low"] >= 4 and site["by_length"][-1]["high"] <= 12
        total = sum(e["examples"] * e["attention_rel_l2"] for e in site["by_length"])
        assert total / model["examples"] == pytest.approx(error)
        entries = {entry["name"]: entry for entry in site["certificates"]}
        assert {"row_bound", "dual_stability", "kl_variance_bound", "contraction_bound"} <= set(entries)
        for entry in entries.values():
            assert entry["holds"] and entry["cases"] == 2 * model["examples"], entry
        assert entries["row_bound"]["bound"] == pytest.approx(site["metrics"]["row_bound"])
        # measured in float64 from the predicted dual, and in float32 by the operator
        assert entries["row_bound"]["measured"] >= site["metrics"]["row_err"]
        assert drawn.name == site["name"] and len(drawn.pairs) == 3
    again, _ = report(work / "out")
    for name in model["confidence"].keys() - {"speedup", "speedup_lossless"}:
        assert again["model"]["confidence"][name] == model["confidence"][name]
    assert again["sites"] == found["sites"]
    fast, pictures = report(work / "out", fast=True)
    for site, whole in zip(fast["sites"], found["sites"], strict=True):
        proven = {
            "row_bound", "dual_stability", "contraction_bound", "truncation_bound", "output_bound",
            "divergence_bound", "r2", "condition_number",
        }  # fmt: skip
        assert site["certificates"] == [] and not pictures
        assert whole["metrics"].keys() - site["metrics"].keys() <= proven
        assert site["metrics"].items() <= whole["metrics"].items()


def test_a_pattern_without_a_site_is_an_error_before_anything_is_measured(work, monkeypatch):
    monkeypatch.setattr(evaluate, "_measured", lambda *_: pytest.fail("measured"))
    limits = parse_gates({"sites": {"layers.9*": {"row_err": {"max": 1}}}})
    with pytest.raises(InputError, match=r"'layers.9\*' must match a site"):
        pipeline.report(work / "out", None, limits, progress=Progress())


@pytest.mark.parametrize("limit", ["MAP_EXAMPLES", "MAP_ENTRIES"])
def test_maps_are_compared_on_the_first_examples_and_outputs_on_all(work, whole, monkeypatch, limit):
    everywhere, _ = whole
    assert "map_examples" not in everywhere["model"]
    monkeypatch.setattr(evaluate, limit, 1)  # the first batch
    found, _ = report(work / "out", fast=True)
    model, batch = found["model"], found["model"]["batch"]
    assert model["map_examples"] == batch < model["examples"] == everywhere["model"]["examples"]
    assert model["output_rmse"] == pytest.approx(everywhere["model"]["output_rmse"], rel=1e-6)
    counted = [sum(b["examples"] for b in site["by_length"]) for site in found["sites"]]
    assert counted == [batch] * len(counted)


def test_a_site_left_to_the_teacher_has_no_error(work, whole, tmp_path, monkeypatch):
    """The compiled graph holds one call for two sites: the second's must not be taken for the first's."""

    def left(self: select.Search, *_: Any) -> list[select.Tried]:
        first, second = self.sites
        first.tried.insert(0, select.Tried(Candidate(TEACHER, TEACHER), price=first.teacher))
        return [first.tried[0], next(tried for tried in second.tried if tried.approximate)]

    monkeypatch.setattr(select.Search, "not_slower", left)
    named = {key: RECIPE[key] for key in ("side", "c_transforms", "features")}
    shared = {key: RECIPE[key] for key in ("batch_size", "max_examples")}
    recipe = {**shared, "candidates": [named], "budget": BUDGET}
    out = compiled(tmp_path, work / "teacher", work / "data.npz", recipe)
    found, pictures = report(out)
    first, second = found["sites"]
    assert (first["operator"], second["operator"]) == ("teacher", "asap")
    assert first["metrics"] == {
        "attention_rel_l2": 0.0, "attention_rel_l2_worst": 0.0, "output_rel_l2": 0.0, "plan_kl": 0.0
    }
    assert first["certificates"] == [] and pictures[0].pairs == []
    expected = whole[0]["sites"][1]["metrics"]["attention_rel_l2"]
    assert second["metrics"]["attention_rel_l2"] == pytest.approx(expected, rel=1e-3)
    assert [site["name"] for site in found["selection"]["sites"]] == [first["name"], second["name"]]
    timed = evaluate.bench(out, repeats=1, explain=True, progress=Progress())["sites"]
    assert timed[0]["latency_compiled_ms"] == timed[0]["latency_teacher_ms"]
    assert timed[0]["kernels"] == [] and timed[1]["kernels"]


def test_labels_that_no_class_has(work, tmp_path, capsys):
    with np.load(work / "data.npz") as data:
        inputs, labels = data["inputs"], data["labels"]
    labels[50] = 3
    np.savez(tmp_path / "labels.npz", inputs=inputs, labels=labels)
    assert run("report", work / "out", "--data", tmp_path / "labels.npz", "--quiet") == 2
    assert "from 0 to 2, got 3 in example 50" in capsys.readouterr().err


# The user's own metric

METRICS = '''
import torch
def first(output):
    return output[0] if isinstance(output, (tuple, list)) else output
def hits(output, batch):
    assert batch["inputs"].shape[0] == len(batch["numbers"])
    return first(output).argmax(-1) == batch["labels"]
def score(output, batch):
    return first(output).float().softmax(-1)[:, 0].numpy()
def doubled_when_called_again(output, batch, calls=[0]):
    calls[0] += 1
    return (1 + calls[0] % 2) * torch.ones(len(batch["labels"]))
def mean(output, batch):
    return 0.5
def words(output, batch):
    return "good"
def nan(output, batch):
    return [float("nan")] * len(batch["labels"])
def fails(output, batch):
    return 1 / 0
'''


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    file = tmp_path_factory.mktemp("metrics") / "own.py"
    file.write_text(METRICS)
    return str(file)


def own(work: Path, metric: str, **options: Any) -> Any:
    return report(work / "out", fast=True, metric=OwnMetric(metric, **options))[0]["model"]


def test_an_own_metric_is_measured_of_both_models_with_intervals(work, metrics):
    model = own(work, f"{metrics}:hits")
    for mine, known in (("metric_teacher", "accuracy_teacher"), ("metric_compiled", "accuracy_compiled"),
                        ("metric_drop", "accuracy_drop")):  # fmt: skip
        assert model[mine] == pytest.approx(model[known], abs=1e-12)
        assert model["confidence"][mine] == model["confidence"][known]  # hits: the interval of a share
    assert model["own_metric"] == f"{metrics}:hits, larger is better"
    scored = own(work, f"{metrics}:score")
    low, high = scored["confidence"]["metric_drop"]
    assert low <= scored["metric_drop"] <= high
    turned = own(work, f"{metrics}:score", lower_is_better=True)
    assert turned["metric_drop"] == -scored["metric_drop"]
    assert "smaller is better" in turned["own_metric"]


def test_an_own_metric_is_gated_shown_and_compared(work, metrics, tmp_path):
    metric = f"{metrics}:doubled_when_called_again"  # the teacher 2, the compiled model 1
    gates = tmp_path / "gates.yaml"
    gates.write_text("metric_drop: {max: 0.5, confidence: true}\nmetric_compiled: {min: 0.9}\n")
    assert run("report", work / "out", "--fast", "-q", "--gate", gates, "--metric", metric) == 1
    measured = json.loads((work / "out/report.json").read_text())
    jsonschema.validate(measured, report_schema())
    verdicts = {check["metric"]: check["class"] for check in measured["gate"]["checks"]}
    assert (verdicts["metric_drop"], verdicts["metric_compiled"]) == ("REGRESSION", "ACCEPT")
    shown = Report.from_json(measured, "report")
    words = " ".join(" ".join(report_brief(shown)).split())
    assert "larger is better; 95% interval 1.00 to 1.00; the teacher's 2.00)" in words
    for text in (markdown(shown), html(shown)):
        assert "own metric, drop" in text and "doubled_when_called_again, larger is better" in text
    other = replace(shown, model=replace(shown.model, own_metric="another"))
    baseline = Baseline("b.json", shown, Allowance())
    compared = {check.metric for check in compare(shown, baseline).checks}
    assert "metric_drop" in compared and "metric_teacher" not in compared
    assert "metric_drop" not in {check.metric for check in compare(other, baseline).checks}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", "must return one number for each of the batch's examples, got a float of shape []"),
        ("words", "must return one number for each of the batch's examples, got a str"),
        ("nan", "must be finite for the teacher's outputs, got nan, example"),
        ("fails", "must measure a batch without an error, got ZeroDivisionError"),
        ("absent", "must define a callable 'absent', got no such name"),
    ],
)
def test_what_an_own_metric_may_do_wrong(work, metrics, name, message):
    with pytest.raises(InputError, match=re.escape(message)) as raised:
        own(work, f"{metrics}:{name}")
    assert raised.value.help


def test_a_gates_file_runs_no_code(work, tmp_path, capsys):
    gates = tmp_path / "gates.yaml"
    gates.write_text("metric_drop: {max: 0.5}\n")
    assert run("report", work / "out", "--gate", gates) == 2
    assert "metric_drop needs your own metric, got no --metric" in capsys.readouterr().err
