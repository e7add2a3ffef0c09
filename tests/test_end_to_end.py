"""The whole way on the command line, with small teachers made on the spot."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attention_zoo as zoo
import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from junk import resigned
from small_text import write_data, write_teacher
from steps import compiled as compiled_model
from steps import expect, files, run, run_json

import asapc
from asapc.errors import EXIT_BAD_INPUT, EXIT_NO_SITE, InputError
from asapc.inputs.load import load_teacher
from asapc.kernels import native
from asapc.report import report_schema

ASAP = (
    "operator: asap\nside: source\nc_transforms: 3\nfeatures: ['sliced:8']\n"
    "batch_size: 16\nmax_examples: 64\n"
)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    write_teacher(folder / "teacher", n_layers=2, max_iter=4, sharpness=3.0)
    write_data(folder / "data.npz", 160)
    (folder / "asap.yaml").write_text(ASAP)
    (folder / "lossless.yaml").write_text("operator: sinkhorn\nbatch_size: 16\n")
    return folder


@pytest.fixture(scope="module")
def compiled(work):
    teacher, data = work / "teacher", work / "data.npz"
    assert run("calibrate", teacher, "--data", data, "-o", work / "calib", "--recipe",
               work / "asap.yaml", "--quiet") == 0  # fmt: skip
    assert run("compile", teacher, "--calibration", work / "calib", "-o", work / "out", "--quiet") == 0
    return work / "out"


@pytest.fixture(scope="module")
def lossless(work, compiled):
    assert run("compile", work / "teacher", "--calibration", work / "calib", "-o", work / "exact",
               "--recipe", work / "lossless.yaml", "--quiet") == 0  # fmt: skip
    return work / "exact"


@pytest.mark.parametrize("why", [None, "the C++ engine was not built: no compiler was found"])
def test_compile_warns_where_the_engine_is_missing(work, compiled, tmp_path, capsys, monkeypatch, why):
    if why is not None:
        monkeypatch.setattr(native, "missing", lambda: why)
    assert run("compile", work / "teacher", "--calibration", work / "calib", "-o", tmp_path / "out",
               "--recipe", work / "lossless.yaml") == 0  # fmt: skip
    warning = f"warning: exact loops run in plain PyTorch, several times slower: {why}\n"
    assert (warning in capsys.readouterr().err) == (why is not None)


def teacher_of(folder: Path) -> torch.nn.Module:
    return load_teacher(str(folder)).model


def batch(path: Path, count: int = 20) -> torch.Tensor:
    return torch.from_numpy(np.load(path)["inputs"][:count])


def test_inspect_json_names_every_field(work, capsys):
    found = run_json(capsys, "inspect", work / "teacher")
    assert found["capture"] == "whole"
    assert [site["name"] for site in found["sites"]] == ["layers.0.mha", "layers.1.mha"]
    site = found["sites"][0]
    assert (site["status"], site["heads"], site["head_dim"]) == ("matched", 2, 8)
    assert site["replay_error"] < 1e-5
    convention = site["convention"]
    assert convention["half_steps"] == 4
    assert (convention["first_side"], convention["last_side"]) == ("row", "column")
    assert convention["score_multiplier"] == pytest.approx(8**-0.5)
    assert (convention["output_factor"], convention["mask"]) == ("N", "key")
    assert convention["bias"] is False and convention["early_stop"] is False


def test_a_lossless_model_is_timed_once(lossless, capsys):
    """It is its own exact model."""
    model = run_json(capsys, "report", lossless, "--fast", "--examples", 8)["model"]
    assert model["speedup"] == model["speedup_lossless"]
    assert model["confidence"]["speedup"] == model["confidence"]["speedup_lossless"]


def test_report_measures_and_gates(work, compiled, capsys):
    report = run_json(capsys, "report", compiled)
    Draft202012Validator(report_schema()).validate(report)
    assert report["gate"] == {"verdict": None, "passed": True, "checks": [], "baseline": None}
    model = report["model"]
    assert model["examples"] > 10 and 0 <= model["accuracy_teacher"] <= 1
    assert model["lossless_max_abs_error"] < 1e-5 < model["max_abs_error"]
    site = report["sites"][0]
    assert (site["operator"], site["c_transforms"]) == ("asap", 3)
    metrics = site["metrics"]
    assert 0 < metrics["attention_rel_l2"] <= metrics["attention_rel_l2_worst"] < 1
    assert metrics["col_err"] < 1e-5  # the last c-transform makes the columns exact
    assert {"row_err", "plan_kl", "row_bound", "contraction_bound", "r2"} <= set(metrics)
    written = json.loads((compiled / "report.json").read_text())
    assert written["sites"][0]["name"] == site["name"]
    assert "layers.0.mha" in (compiled / "report.md").read_text()

    (compiled.parent / "gates.yaml").write_text("prediction_agreement: {min: 0.99}")
    few = ("report", compiled, "--examples", 5, "--fast", "--gate", compiled.parent / "gates.yaml")
    assert run(*few) == 1
    before = capsys.readouterr().err.split("measuring fidelity")[0]
    assert "the limits need 100 examples, the report will have 5: pass --examples 100" in before
    assert json.loads((compiled / "report.json").read_text())["model"]["examples"] == 5


FAST = ("--no-torch-compile",)  # whose compiler takes half a minute: tests/test_timing.py


def test_bench_times_model_and_sites(compiled, capsys):
    result = run_json(capsys, "bench", compiled, "--repeats", 2, *FAST)
    for entry in (result["model"], *result["sites"]):
        for key in ("latency_teacher_ms", "latency_lossless_ms", "latency_compiled_ms"):
            assert entry[key] > 0
        ratio = entry["latency_teacher_ms"] / entry["latency_compiled_ms"]
        assert entry["speedup"] == pytest.approx(ratio)
        assert "kernels" not in entry
    result = run_json(capsys, "bench", compiled, "--repeats", 1, "--explain", *FAST)
    kernels = result["sites"][0]["kernels"]
    assert [kernel["operator"] for kernel in kernels] == ["dual", "asap"]
    engine = f"CPU, {native.described()}" if native.missing() is None else "plain PyTorch"
    assert kernels[1]["kernel"].startswith(engine)
    assert kernels[1]["shape"] == "B16 H2 N12 M12 D8"


def test_a_model_without_sinkhorn_exits_3(tmp_path, capsys):
    (tmp_path / "net.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from attention_zoo import Softmax\n"
    )
    np.savez(tmp_path / "x.npz", x=np.ones((80, 6, 16), np.float32))
    model, data = f"{tmp_path / 'net.py'}:Softmax", tmp_path / "x.npz"
    assert run("calibrate", model, "--data", data, "-o", tmp_path / "c", "--quiet") == EXIT_NO_SITE
    assert "rows only" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_exported_program_as_teacher(work, tmp_path):
    teacher = teacher_of(write_teacher(tmp_path / "teacher", n_layers=1, max_iter=4))
    dim = torch.export.Dim.AUTO
    program = torch.export.export(
        teacher, (batch(work / "data.npz", 4),), dynamic_shapes=({0: dim, 1: dim},)
    )
    path = tmp_path / "teacher.pt2"
    torch.export.save(program, path)
    calib, out = tmp_path / "calib", tmp_path / "out"
    data = work / "data.npz"
    assert run("calibrate", path, "--data", data, "-o", calib, "--recipe",
               work / "lossless.yaml", "--quiet") == 0  # fmt: skip
    assert run("compile", path, "--calibration", calib, "-o", out, "--quiet") == 0
    inputs = batch(data, 9)
    with torch.no_grad():
        assert float((asapc.load(out)(inputs)[0] - teacher(inputs)[0]).abs().max()) < 1e-5


# Forms of amortised attention that the fixture has not, from fit to a loaded model: a layer each

KL: dict[str, Any] = {"features": ["coarse:4", "norm"], "fit": "kl"}
BOTH: dict[str, Any] = {"c_transforms": 0, "side": "both", "features": ["gaussian"]}
FORMS = ((KL, 1, True), (BOTH, 0, False))


def test_other_forms_go_the_whole_way_fitted_layer_by_layer(work, tmp_path, capsys):
    teacher = work / "teacher"
    sites = {f"layers.{layer}.*": {"operator": "asap", **keys} for layer, (keys, *_) in enumerate(FORMS)}
    recipe = {"sites": sites, "batch_size": 16, "max_examples": 64}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    calib, out = tmp_path / "calib", tmp_path / "out"
    arguments = ("--data", work / "data.npz", "-o", calib, "--recipe", tmp_path / "r.yaml")
    assert run("calibrate", teacher, *arguments, "--quiet", "--sequential") == 0
    assert run("compile", teacher, "--calibration", calib, "-o", out, "--quiet") == 0
    report = run_json(capsys, "report", out, "--fast")
    assert report["model"]["calibration_order"] == "sequential"
    fitted = json.loads((calib / "calibration.json").read_text())["sites"]
    for site, (_, c_transforms, rescaled) in zip(report["sites"], FORMS, strict=True):
        assert (site["operator"], site["c_transforms"]) == ("asap", c_transforms)
        metrics = site["metrics"]
        if c_transforms:  # far off without a c-transform, the reason for c-transforms
            assert 0 < metrics["attention_rel_l2"] < 0.7
        assert metrics["col_err"] > 1e-5  # the fixture's are exact
        assert fitted[site["name"]][0]["plan"]["rescaled"] == rescaled
    inputs = batch(work / "data.npz", 6)
    model = asapc.load(out)
    with torch.no_grad():
        (together, maps), (alone, _) = model(inputs), model(inputs[2:3])
    torch.testing.assert_close(together[2:3], alone, rtol=0, atol=1e-5)
    assert [m.numel() > 0 for m in maps] == [True] * 2


# A layer of each kind


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    random = np.random.default_rng(0)
    keep = np.arange(10) < random.integers(4, 11, (200, 1))
    np.savez(folder / "data.npz", x=random.standard_normal((200, 10, 4)).astype("float32"), keep=keep)
    sites = {"scaled": {"operator": "asap", "features": ["norm"]}, "glued": {"operator": "lossless"}}
    recipe = {"budget": {"prediction_agreement": 0}, "sites": sites}
    compiled_model(folder, f"{zoo.__file__}:mixed", folder / "data.npz", recipe)
    return folder


def test_every_kind_becomes_its_own_operator(mixed):
    manifest = json.loads((mixed / "out" / "manifest.json").read_text())
    kinds = {s["name"]: (s["convention"]["operator"], s["operator"]) for s in manifest["sites"]}
    assert kinds == {
        "scaled": ("sinkhorn", "asap"), "sliced": ("esp_soft", "esp_hard"), "glued": ("lot", "lot"),
    }  # fmt: skip
    assert not manifest["refused"] and manifest["soft_to_hard"]["switched"]
    x, keep = torch.randn(5, 17, 4), torch.arange(17) < torch.tensor([[17], [9], [4], [1], [12]])
    with torch.no_grad():  # at other sizes
        out, teacher = asapc.load(mixed / "out")(x, keep), zoo.mixed()(x, keep)
    assert out.shape == teacher.shape and bool(out.isfinite().all())
    # A layer is approximated and another replaced: near, and not the same.
    assert 1e-6 < float((out - teacher).abs().max()) < 0.5


def test_report_and_bench_cover_every_kind(mixed, capsys):
    report = run_json(capsys, "report", mixed / "out", "--data", mixed / "data.npz")
    Draft202012Validator(report_schema()).validate(report)
    sites = {s["name"]: s for s in report["sites"]}
    assert sites["glued"]["metrics"]["attention_rel_l2"] < 1e-6
    assert sites["sliced"]["metrics"]["row_err"] < 1e-6 < sites["sliced"]["metrics"]["attention_rel_l2"]
    assert "contraction_bound" in sites["scaled"]["metrics"]
    assert "contraction_bound" not in sites["glued"]["metrics"]
    assert report["soft_to_hard"]
    bench = run_json(capsys, "bench", mixed / "out", "--data", mixed / "data.npz", "--explain", *FAST)
    kernels = {s["name"]: [k["operator"] for k in s["kernels"]] for s in bench["sites"]}
    assert kernels["sliced"] == ["esp_hard"] and kernels["glued"] == ["lot"]


def test_an_operator_of_another_kind_is_refused(mixed, capsys):
    (mixed / "wrong.yaml").write_text("sites: {glued: {operator: asap}, scaled: {operator: lossless}}\n")
    arguments = ("compile", f"{zoo.__file__}:mixed", "--calibration", mixed / "out-calib", "-o",
                 mixed / "other", "--recipe", mixed / "wrong.yaml")  # fmt: skip
    expect(capsys, EXIT_BAD_INPUT, arguments, "a site of the kind lot can become lot")


# Bad input: one clear message, the right exit code, earlier output untouched


def test_what_calibrate_refuses(work, tmp_path, capsys):
    few, named, wild = (tmp_path / f"{name}.npz" for name in ("few", "named", "wild"))
    write_data(few, 3)
    np.savez(named, tokens=np.ones((20, 12), dtype=np.int64))
    np.savez(wild, inputs=np.full((20, 12), 99, dtype=np.int64))
    nowhere = "sites: {'nowhere.*': {operator: sinkhorn}}"
    for data, recipe, *words in (
        (work / "data.npz", nowhere, "nowhere.*", "must match a site"),
        (few, "operator: asap\nfeatures: ['sliced:512']", "help:"),
        (named, "{}", "tokens", "inputs"),
        (wild, "{}", "the model must run on the given data", "IndexError"),
    ):
        (tmp_path / "r.yaml").write_text(recipe)
        arguments = ("calibrate", work / "teacher", "--data", data, "-o", tmp_path / "c", "--recipe",
                     tmp_path / "r.yaml")  # fmt: skip
        expect(capsys, EXIT_BAD_INPUT, arguments, *words)
        assert not (tmp_path / "c").exists()


def test_what_compile_refuses(work, compiled, tmp_path, capsys):
    """Earlier output, and folders that asapc has not written, stay as they are."""
    other = write_teacher(tmp_path / "other", n_layers=2, max_iter=4)
    np.savez(tmp_path / "named.npz", tokens=np.ones((20, 12), dtype=np.int64))
    (tmp_path / "features.yaml").write_text("operator: asap\nfeatures: ['sliced:16']\n")
    (tmp_path / "ridge.yaml").write_text(ASAP + "ridge: 1.0e+6\n")
    earlier, precious = shutil.copytree(compiled, tmp_path / "earlier"), tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    before = files(tmp_path)
    teacher, fresh = work / "teacher", tmp_path / "fresh"
    for given, out, *words in (
        ((other,), fresh, "must belong to the model being compiled", "help:"),
        ((teacher, "--recipe", tmp_path / "features.yaml"), fresh, "was fitted for", "asapc calibrate"),
        ((teacher, "--recipe", tmp_path / "ridge.yaml"), fresh, "was fitted with `ridge: 1e-05`"),
        ((teacher, "--data", tmp_path / "named.npz"), earlier, "tokens"),
        ((teacher,), precious, "replaces only folders that it wrote", "help:"),
    ):
        arguments = ("compile", *given, "--calibration", work / "calib", "-o", out)
        expect(capsys, EXIT_BAD_INPUT, arguments, *words)
    assert files(tmp_path) == before


def test_a_folder_that_cannot_be_replaced_is_refused_before_the_work(work, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "grid.yaml").write_text("blocks: [{half_steps: 3}]\n")
    data = tmp_path / "empty.npz"  # would be the error if it were read
    data.touch()
    for command, extra in (("calibrate", ()), ("study", ("--grid", tmp_path / "grid.yaml"))):
        arguments = (command, work / "teacher", "--data", data, "-o", tmp_path / "mine", *extra)
        expect(capsys, EXIT_BAD_INPUT, arguments, "replaces only folders that it wrote")


def test_a_file_that_is_not_the_one_that_was_written_is_named(work, compiled, lossless, tmp_path, capsys):
    """One bit of it is another, it is gone, or it is that of another compilation of the same model."""
    written = json.loads((compiled / "manifest.json").read_text())["files"]
    assert {"graph.pt2", "model.safetensors", "recipe.yaml", "live/0.pt2"} < {*written}
    alike = 0
    for name in (*written, "manifest.json", "selection.json"):
        out = tmp_path / name.replace("/", ".")
        shutil.copytree(compiled, out)
        content = bytearray((out / name).read_bytes())
        content[len(content) // 2] ^= 1
        for other in (bytes(content), None, (lossless / name).read_bytes()):
            (out / name).unlink() if other is None else (out / name).write_bytes(other)
            if other == (compiled / name).read_bytes():
                alike += 1
                continue
            with pytest.raises(InputError, match=re.escape(name)) as error:
                asapc.load(out)
            assert error.value.help and (other is None or error.value.got)
    assert alike == 2  # teacher.pt2 and lossless.pt2
    for command in (("report", out), ("bench", out), ("export", out),
                    ("refresh", out, "--data", work / "data.npz", "--distil")):  # fmt: skip
        expect(capsys, EXIT_BAD_INPUT, command, "selection.json: must be the file that was written")


TAMPERED: list[dict[str, Any]] = [
    {"programs": []}, {"programs": None}, {"call": None}, {"call": {"args": 3, "kwargs": []}},
    {"call": {"args": ["a b"], "kwargs": []}}, {"sites": []}, {"sites": ["layers.0.mha"]},
    {"teacher": None}, {"capture": "half"}, {"refresh": "yes"}, {"refused": ["a"]},
]  # fmt: skip


def test_a_tampered_manifest_is_one_clear_message(work, compiled, tmp_path, capsys):
    """It points nowhere outside of its folder, and code that it names is not run."""
    out, evil, trace = tmp_path / "out", tmp_path / "evil.py", tmp_path / "ran"
    shutil.copytree(compiled, out)
    evil.write_text(f"open({str(trace)!r}, 'w')\n")
    true = (out / "manifest.json").read_text()

    def refused(command: Sequence[object], changes: dict[str, Any], *words: str) -> None:
        (out / "manifest.json").write_text(json.dumps({**json.loads(true), **changes}))
        if "data" in changes:
            resigned(out)
        expect(capsys, EXIT_BAD_INPUT, command, *words)

    for changes in TAMPERED:
        refused(("report", out), changes, "manifest.json", "compile again")
    first, *others = json.loads(true)["sites"]
    for key in ("convention", "features", "c_transforms"):
        lacking = {name: value for name, value in first.items() if name != key}
        refused(("report", out), {"sites": [lacking, *others]}, f"must have {key!r}", "compile again")
    refused(("report", out), {"data": f"{evil}:batches"}, "--data")
    (program,) = json.loads(true)["programs"]
    refused(("report", out), {"programs": [{**program, "graph": "../x.pt2"}]}, "inside the folder")
    refresh = ("refresh", out, "--data", work / "data.npz", "--distil")
    for place in (str(tmp_path / "evil" / "x.pt2"), "manifest.json"):
        refused(refresh, {"programs": [{**program, "lossless": place}]}, "manifest")
    assert not trace.exists() and not (tmp_path / "evil").exists()
