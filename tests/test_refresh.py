"""`asapc refresh`: training after the replacement, on small compiled models with crude coefficients; and
gradients through the end of the loops alone, `--tail`."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import esp_net
import numpy as np
import pytest
import torch
from junk import resigned
from safetensors.torch import load_file, save_file
from steps import compiled, expect, files, run, run_json
from torch import Tensor, nn

import asapc
import asapc.kernels.library
from asapc.artifact import read_artifact
from asapc.errors import EXIT_BAD_INPUT, InputError
from asapc.inputs.data import open_data, split_of
from asapc.inputs.load import build_factory
from asapc.kernels.library.gradients import depths
from asapc.measure.differences import log_probabilities
from asapc.program.calls import operator_calls
from asapc.program.runner import Runner
from asapc.session import EXIT_INTERRUPTED
from asapc.training import refresh
from asapc.training.settings import checked_tail

ATTENTION = """
import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, sharpness=6, half_steps=4):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.sharpness, self.half_steps = sharpness, half_steps

    def forward(self, x):
        log_a = self.sharpness * self.q(x) @ self.k(x).transpose(1, 2)
        for step in range(self.half_steps):
            log_a = log_a - log_a.logsumexp(-1 if step % 2 == 0 else -2, keepdim=True)
        a = log_a.exp()
        return self.out(a @ self.v(x)), a
"""
NET = """


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.norm = Attention(), nn.LayerNorm(8)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        y, a = self.mix(x)
        x = self.norm(x + y)
        x = x + self.inner(x).relu()
        return (9 * self.head(x.mean(1))).softmax(-1), [a]


class PerModule(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head = Attention(), nn.Linear(8, 3)

    def forward(self, x):
        y, a = self.attention(x)
        return self.head(y.amax(1)), a.detach().numpy()
"""
COEFFICIENTS = "asapc_site_0_target_coefficients"
CRUDE = {
    "operator": "asap", "side": "target", "c_transforms": 2, "features": ["norm"], "batch_size": 16,
    "max_examples": 32,
}  # fmt: skip
TRAINED = {COEFFICIENTS} | {
    f"{layer}.{kind}" for layer in ("mix.out", "norm", "head") for kind in ("weight", "bias")
}


def refreshed(out: Path, data: Path, *arguments: object, mode: str = "--distil") -> dict[str, Any]:
    assert run("refresh", out, "--data", data, mode, "--quiet", *arguments) == 0
    return json.loads((out / "manifest.json").read_text())["refresh"]


def crude(folder: Path, model: str, name: str) -> Path:
    """The model compiled with one feature and coefficients of zero, which predict nothing."""
    out = compiled(folder, model, folder / "data.npz", CRUDE, name=name)
    tensors = load_file(out / "model.safetensors")
    for key in tensors:
        if key.endswith("_coefficients"):
            tensors[key] = torch.zeros_like(tensors[key])
    save_file(tensors, out / "model.safetensors")
    return resigned(out)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refresh")
    x = np.random.default_rng(0).standard_normal((120, 6, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, labels=(x[:, :, 0].mean(1) > 0).astype(int))
    np.savez(folder / "unlabelled.npz", x=x)
    (folder / "net.py").write_text(ATTENTION + NET)
    crude(folder, f"{folder / 'net.py'}:Whole", "out")
    return folder


@pytest.fixture
def out(work, tmp_path):
    """A copy of the compiled model."""
    return Path(shutil.copytree(work / "out", tmp_path / "out"))


def test_distilling_only_the_coefficients_lowers_the_divergence(work, out):
    entry = refreshed(out, work / "unlabelled.npz", "--parameters", "asapc_site_*_coefficients",
                      "--learning-rate", "0.1", "--epochs", 4)  # fmt: skip
    assert entry["parameters"] == [COEFFICIENTS]
    assert entry["outputs"] == "probabilities" and "accuracy" not in entry["after"]
    assert entry["after"]["loss"] < 0.9 * entry["before"]["loss"]


def test_report_shows_the_refresh_and_uses_no_example_it_saw(work, out, capsys):
    (out / "report.json").write_text("{}")
    (out / "report.md").write_text("of the old weights")
    entry = refreshed(out, work / "data.npz", "--epochs", 2)
    assert not (out / "report.json").exists() and not (out / "report.md").exists()
    assert set(entry["parameters"]) == TRAINED
    assert entry["best_epoch"] > 0 and entry["after"]["loss"] < entry["before"]["loss"]

    artifact = read_artifact(out)
    source = open_data(str(work / "data.npz"), artifact.signature())
    hashes = [hash for batch in source.batches(64) for hash in batch.hashes]
    gate = [hash for hash in hashes if split_of(hash) == "gate"]
    assert entry["examples"] == sum(split_of(hash) == "calibration" for hash in hashes)
    assert artifact.seen_hashes == set(hashes) - set(gate)

    report = run_json(capsys, "report", out)
    assert report["model"]["examples"] == len(gate) > 0
    assert report["refresh"] == entry and "soft_to_hard" not in report
    assert report["model"]["lossless_max_abs_error"] < 1e-5  # the teacher was not trained along
    site = report["sites"][0]
    assert site["metrics"]["r2"] is None and "trained since" in site["reason"]
    text = (out / "report.md").read_text()
    assert "Refresh" in text and COEFFICIENTS in text


def test_labels_train_what_is_selected_and_nothing_else(work, out):
    before = load_file(out / "model.safetensors")
    entry = refreshed(out, work / "data.npz", "--learning-rate", "5e-3", "--epochs", 2, mode="--labels")
    assert entry["mode"] == "labels" and entry["after"]["loss"] < entry["before"]["loss"]
    assert set(entry["before"]) == {"loss", "prediction_agreement", "accuracy"}
    after = load_file(out / "model.safetensors")
    shared = {f"graph.0.{name}" for name in TRAINED - {COEFFICIENTS}}
    assert set(after) - set(before) == shared
    for name, tensor in before.items():
        same = tensor.equal(after[name])
        own = name == f"0.{COEFFICIENTS}" or name == "asapc.seen_hashes"
        assert same != own, name
    for name in shared:
        assert not after[name].equal(before[name.removeprefix("graph.")]), name
    for stage in ("teacher.pt2", "lossless.pt2", "graph.pt2", "recipe.yaml"):
        assert (out / stage).read_bytes() == (work / "out" / stage).read_bytes(), stage

    inputs = torch.from_numpy(np.load(work / "data.npz")["x"][:9])
    with torch.no_grad():
        teacher, exact, own_out = (
            asapc.load(out, stage=stage)(inputs)[0] for stage in ("teacher", "lossless", "graph")
        )
        old = asapc.load(work / "out", stage="teacher")(inputs)[0]
    assert teacher.equal(old) and float((exact - old).abs().max()) < 1e-5
    assert float((own_out - old).abs().max()) > 1e-4


def test_the_same_seed_gives_the_same_bytes(work, tmp_path):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (3, 3, 4), strict=True):
        assert run("refresh", work / "out", "--data", work / "data.npz", "--distil", "--epochs", 1,
                   "--seed", seed, "-o", folder, "--quiet") == 0  # fmt: skip
    first, second, other = map(files, folders)
    assert first == second
    assert first["model.safetensors"] != other["model.safetensors"]
    again = refreshed(folders[0], work / "data.npz", "--epochs", 1)  # on top of a refresh
    assert [one["seed"] for one in again["earlier"]] == [3]
    assert again["before"]["loss"] == again["earlier"][0]["after"]["loss"]


def test_an_epoch_that_is_worse_is_not_kept(work, out, capsys):
    capsys.readouterr()
    assert run("refresh", out, "--data", work / "data.npz", "--distil", "--learning-rate", "3",
               "--epochs", 1) == 0  # fmt: skip
    captured = capsys.readouterr()
    assert "weights are unchanged" in captured.err and "weights are unchanged" in captured.out
    assert "probabilities" in captured.err
    entry = json.loads((out / "manifest.json").read_text())["refresh"]
    assert entry["best_epoch"] == 0 and entry["before"] == entry["after"]
    before, after = (load_file(f / "model.safetensors") for f in (work / "out", out))
    for name, tensor in after.items():
        if name != "asapc.seen_hashes":
            assert tensor.equal(before[name.removeprefix("graph.")]), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("exactly one of --labels and --distil", "none")),
        (("--labels", "--distil"), ("exactly one of --labels and --distil", "both")),
        (("--distil", "--learning-rate", "nan"), ("learning rate",)),
        (("--distil", "--parameters", "tail.*"), ("'tail.*'", "must match a parameter")),
        (("--distil", "--learning-rate", "1e30"), ("stay finite", "nothing was written")),
        (("--distil", "--model", "x.py:y"), ("holds the whole model",)),
        (("--distil", "--anneal"), ("sort softly", "asap", "leave out --anneal")),
    ],
)
def test_what_is_refused_leaves_the_artefact_alone(work, out, capsys, arguments, words):
    before = files(out.parent)
    expect(capsys, EXIT_BAD_INPUT, ("refresh", out, "--data", work / "data.npz", *arguments), *words)
    assert files(out.parent) == before


def test_labels_that_are_missing_or_no_classes(work, out, tmp_path, capsys):
    command = ("refresh", out, "--labels", "--data")
    expect(capsys, EXIT_BAD_INPUT, (*command, work / "unlabelled.npz"), "array named labels", "--distil")
    x = np.load(work / "data.npz")["x"]
    np.savez(tmp_path / "d.npz", x=x, labels=np.full(len(x), 3))
    expect(capsys, EXIT_BAD_INPUT, (*command, tmp_path / "d.npz"), "class numbers from 0 to 2", "got 3")
    np.savez(tmp_path / "d.npz", x=x[:1], labels=np.zeros(1, dtype=int))
    expect(capsys, EXIT_BAD_INPUT, (*command, tmp_path / "d.npz"), "split needs examples")
    assert files(out) == files(work / "out")


def test_an_interrupt_leaves_the_old_artefact(work, out, monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(refresh.Trainer, "_require_finite", interrupted)
    arguments = ("refresh", out, "--data", work / "data.npz", "--distil")
    expect(capsys, EXIT_INTERRUPTED, arguments, "untouched")
    assert files(out) == files(work / "out")
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]


# Class scores


def test_the_logarithm_of_no_probability_has_a_gradient():
    zero = torch.tensor([[0.0, 1.0]], requires_grad=True)
    loss = log_probabilities(zero, True)[0, 0]
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert zero.grad is not None and bool(zero.grad.isfinite().all())


def test_class_scores_are_the_first_matrix():
    assert refresh.scores_leaf((torch.randn(2, 3, 4), {"a": torch.randn(2, 3)})) == 1
    with pytest.raises(InputError, match=r"\[2, 3, 4\]"):
        refresh.scores_leaf([torch.randn(2, 3, 4)])


# Capture per module


def test_capture_per_module_trains_the_captured_modules(work, capsys):
    data, model = work / "data.npz", f"{work / 'net.py'}:PerModule"
    out = crude(work, model, "modules")
    before = load_file(out / "model.safetensors")
    command = ("refresh", out, "--data", data, "--distil", "--learning-rate", "1e-2")
    expect(capsys, EXIT_BAD_INPUT, command, "--model")
    assert run(*command, "--model", model) == 0
    assert "logits" in capsys.readouterr().err
    entry = json.loads((out / "manifest.json").read_text())["refresh"]
    own = ("out.weight", "out.bias", COEFFICIENTS)
    assert set(entry["parameters"]) == {f"attention.{name}" for name in own}
    assert entry["best_epoch"] > 0 and entry["after"]["loss"] < entry["before"]["loss"]
    after = load_file(out / "model.safetensors")
    assert set(after) - set(before) == {"graph.0.out.weight", "graph.0.out.bias"}
    changed = {n for n, t in before.items() if not t.equal(after[n])}
    assert changed == {f"0.{COEFFICIENTS}", "asapc.seen_hashes"}

    capsys.readouterr()
    assert run("report", out, "--fast", "--quiet") == EXIT_BAD_INPUT
    assert "--model" in capsys.readouterr().err
    (site,) = run_json(capsys, "report", out, "--fast", "--model", model)["sites"]
    assert (site["name"], site["operator"]) == ("attention", "asap")
    teacher, x = build_factory(model).eval(), torch.from_numpy(np.load(data)["x"][:6])
    with torch.no_grad():
        own, exact = asapc.load(out, model=lambda: build_factory(model), stage="lossless")(x), teacher(x)
    torch.testing.assert_close(own[0], exact[0], rtol=0, atol=1e-5)
    assert isinstance(own[1], np.ndarray)  # which a program of the whole model could not return


# Annealing


@pytest.fixture(scope="module")
def esp(tmp_path_factory):
    return esp_net.compiled(tmp_path_factory)


@pytest.fixture(scope="module")
def annealed(esp, tmp_path_factory):
    """The ESP model annealed on labels, and its refresh entry."""
    out = tmp_path_factory.mktemp("annealed") / "out"
    assert run("refresh", esp / "out", "--data", esp / "data.npz", "--labels", "--anneal", "-o", out,
               "--epochs", 6, "--learning-rate", "1e-2", "--quiet") == 0  # fmt: skip
    return out, json.loads((out / "manifest.json").read_text())["refresh"]


def test_annealing_writes_exact_sorts_that_beat_a_sudden_switch(esp, annealed):
    out, entry = annealed
    assert 1 <= entry["best_epoch"] <= entry["epochs"] == 6
    assert entry["anneal"] == {"gamma": 0.8, "from": [esp_net.TEMPERATURE] * 2, "to": 1e-6}
    assert entry["after"]["loss"] < entry["before"]["loss"]
    audit = entry["soft_to_hard"]
    assert audit["soft"]["prediction_change"] == 0
    for name in ("before", "after"):
        assert audit[name]["prediction_change"] == 1 - entry[name]["prediction_agreement"]
        assert audit[name]["accuracy"] == entry[name]["accuracy"]
    compile_time = json.loads((esp / "out" / "manifest.json").read_text())["soft_to_hard"]
    assert audit["before"]["prediction_change"] == pytest.approx(compile_time["prediction_change"])

    # The epoch that is kept, measured by hand with exact sorts.
    artifact = read_artifact(out)
    operators = {
        stage: [o.operator.name for p in programs for o in operator_calls(p.graph)]
        for stage, programs in artifact.programs.items()
    }
    assert operators == {"graph": ["esp_hard"] * 2, "lossless": ["esp_soft"] * 2, "teacher": []}
    source = open_data(str(esp / "data.npz"), artifact.signature())
    batch = next(source.batches(200, select=lambda content: split_of(content) == "selection"))
    loss = nn.functional.cross_entropy(Runner(None, artifact.programs["graph"])(batch), batch.labels)
    assert float(loss) == pytest.approx(entry["after"]["loss"], rel=1e-5)
    for site in artifact.manifest["sites"]:
        change = f"{audit['after']['prediction_change']:.2%}"
        assert site["operator"] == "esp_hard" and change in site["reason"]
        assert site["convention"]["operator"] == "esp_soft"
    assert artifact.manifest["soft_to_hard"]["switched"] is True


def test_annealing_trains_what_a_gradient_reaches_and_the_teacher_not(esp, annealed):
    out, entry = annealed
    expected = {name for name, _ in esp_net.Net().named_parameters()} - {"unused"}
    assert set(entry["parameters"]) == expected
    before, after = (load_file(folder / "model.safetensors") for folder in (esp / "out", out))
    assert set(after) - set(before) == {f"graph.0.{name}" for name in expected}
    for name in expected:
        assert not after[f"graph.0.{name}"].equal(before[f"0.{name}"]), name
    for name in set(before) - {"asapc.seen_hashes"}:
        assert after[name].equal(before[name]), name
    for stage in ("teacher.pt2", "lossless.pt2", "recipe.yaml"):
        assert (out / stage).read_bytes() == (esp / "out" / stage).read_bytes(), stage


def test_an_annealed_model_loads_runs_on_any_batch_and_is_reported(annealed, esp, capsys):
    out, entry = annealed
    x = torch.randn(3, 7, esp_net.SIZE)  # sizes stay dynamic when the program is written again
    with torch.no_grad():
        assert asapc.load(out)(x).shape == (3, esp_net.CLASSES)
    report = run_json(capsys, "report", out)
    assert report["refresh"] == entry
    variants = {own["name"]: own for own in report["soft_to_hard"]["variants"]}
    assert list(variants) == ["soft", "released hard", "exact hard", "refreshed"]
    assert variants["refreshed"]["row_err"] < 1e-6
    assert variants["refreshed"]["accuracy"] == report["model"]["accuracy_compiled"]
    agreement = report["model"]["prediction_agreement"]
    assert variants["refreshed"]["prediction_change"] == pytest.approx(1 - agreement)
    assert "| soft to hard | soft accuracy " in (out / "report.md").read_text()
    # Nothing is left to anneal, and another refresh starts from exact sorts.
    expect(capsys, EXIT_BAD_INPUT,
           ("refresh", out, "--data", esp / "data.npz", "--labels", "--anneal"),
           "sort softly", "esp_hard", "operator: lossless")  # fmt: skip


def test_parameters_narrow_what_is_annealed_and_distilling_needs_no_labels(esp, tmp_path):
    np.savez(tmp_path / "data.npz", x=np.load(esp / "data.npz")["x"])
    out = Path(shutil.copytree(esp / "out", tmp_path / "out"))
    entry = refreshed(out, tmp_path / "data.npz", "--anneal", "--epochs", 2, "--parameters",
                      "layers.*.to_q.weight", "--parameters", "asapc_site_1_*")  # fmt: skip
    tau = "asapc_site_1_inverse_temperature"
    assert set(entry["parameters"]) == {"layers.0.to_q.weight", "layers.1.to_q.weight", tau}
    assert entry["soft_to_hard"]["after"]["accuracy"] is None
    before, after = (load_file(folder / "model.safetensors") for folder in (esp / "out", out))
    assert after[f"0.{tau}"].equal(before[f"0.{tau}"])  # the lossless program keeps its own
    kept = after[f"graph.0.{tau}"].equal(before[f"0.{tau}"])
    assert kept == (entry["best_epoch"] == 0)
    assert read_artifact(out).manifest["sites"][0]["operator"] == "esp_hard"


# Tails


TWO_LAYERS = """


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = Attention(3, 8), Attention(3, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = x + self.first(x)[0]
        return 5 * self.head(self.norm(x + self.second(x)[0]).mean(1))
"""


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """A folder with a model of exact loops, one of amortised ones, and their data."""
    folder = tmp_path_factory.mktemp("tails")
    x = np.random.default_rng(0).standard_normal((96, 6, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, labels=(x[:, :, 0].mean(1) > 0).astype(int))
    (folder / "net.py").write_text(ATTENTION + TWO_LAYERS)
    amortised = {"operator": "asap", "side": "target", "c_transforms": 1, "features": ["norm"]}
    for name, recipe in {"exact": {"operator": "lossless"}, "amortised": amortised}.items():
        recipe |= {"batch_size": 16, "max_examples": 32}
        compiled(folder, f"{folder / 'net.py'}:Net", folder / "data.npz", recipe, name=name)
    return folder


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    model(leaf).square().sum().backward()
    return leaf.grad


def test_a_loaded_model_takes_a_tail_and_gives_it_back(loops: Path) -> None:
    model = asapc.load(loops / "exact")
    x = torch.from_numpy(np.load(loops / "data.npz")["x"][:4])
    outputs, full = model(x), gradient(model, x)
    with depths() as passed:
        assert asapc.tail_gradients(model, 2) is model
        short = gradient(model, x)
    assert [set(depth.flatten().tolist()) for depth in passed] == [{2}, {2}]
    torch.testing.assert_close(model(x), outputs, rtol=0, atol=0)
    error = float((short - full).norm() / full.norm())
    assert 1e-6 < error < 0.2
    with depths() as passed:
        certified = gradient(asapc.tail_gradients(model, "certified", tolerance=1e-4), x)
    assert float((certified - full).norm() / full.norm()) < 1e-3
    assert all(2 <= int(depth.min()) <= int(depth.max()) <= 8 for depth in passed)
    asapc.tail_gradients(model)
    torch.testing.assert_close(gradient(model, x), full, rtol=0, atol=0)


def test_a_tail_under_torch_compile(loops: Path) -> None:
    torch._dynamo.reset()  # what another test could not compile is left out from then on
    model = asapc.tail_gradients(asapc.load(loops / "exact"), 3)
    x = torch.from_numpy(np.load(loops / "data.npz")["x"][:4])
    traced = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradient(traced, x), gradient(model, x), rtol=1e-5, atol=1e-6)


def test_what_is_no_tail(loops: Path) -> None:
    model = asapc.load(loops / "exact")
    for tail in (-1, 1.5, True, "all"):
        with pytest.raises(InputError, match="a tail is a number of half-steps or 'certified'"):
            asapc.tail_gradients(model, tail)  # type: ignore[arg-type]
    for tolerance in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match="must be positive"):
            asapc.tail_gradients(model, "certified", tolerance)
    with pytest.raises(InputError, match="a model with Sinkhorn layers is needed"):
        asapc.tail_gradients(asapc.load(loops / "amortised"), 2)
    for text in ("-1", "1.5", "all", "", "9" * 12):
        with pytest.raises(InputError, match="a tail is a number"):
            checked_tail(text, 1e-3)


def trained(loops: Path, out: Path, *arguments: str) -> dict[str, Any]:
    shutil.copytree(loops / "exact", out)
    assert run("refresh", out, "--data", loops / "data.npz", "--labels", "--quiet", "--epochs", 2,
               "--learning-rate", "1e-2", *arguments) == 0  # fmt: skip
    return json.loads((out / "manifest.json").read_text())["refresh"]


def test_refresh_trains_through_tails(loops: Path, tmp_path: Path) -> None:
    full = trained(loops, tmp_path / "full")
    assert "tail" not in full
    short = trained(loops, tmp_path / "short", "--tail", "1")
    assert short["tail"] == {
        "half_steps": 1, "tolerance": None, "passed": {"min": 1, "median": 1, "max": 1}
    }  # fmt: skip
    own = trained(loops, tmp_path / "certified", "--tail", "certified", "--tolerance", "1e-2")
    assert own["tail"]["half_steps"] == "certified" and own["tail"]["tolerance"] == 1e-2
    assert 1 <= own["tail"]["passed"]["min"] <= own["tail"]["passed"]["max"] <= 8
    assert own["after"]["loss"] == pytest.approx(full["after"]["loss"], rel=1e-2)
    for name in ("short", "certified"):  # what is written has no tail of its own
        assert (tmp_path / name / "graph.pt2").read_bytes() == (loops / "exact/graph.pt2").read_bytes()
