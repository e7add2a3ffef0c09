"""--device: the whole way with the models on another device, and what is written is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attention_zoo as zoo
import pytest
import torch
from analyses import analysed, batch
from safetensors.torch import load_file, save_file
from second_device import OnGpu, one_gpu
from small_text import write_data, write_teacher
from steps import calibrated, compiled, run
from torch import nn

import asapc
from asapc.calibration import distill
from asapc.device import CPU, chosen_device, moved, running_on
from asapc.errors import EXIT_BAD_INPUT, InputError
from asapc.models import ARCHITECTURES, SinkformerText
from asapc.passes import analyse as analysing
from asapc.passes import gradients
from asapc.passes import replay as replaying
from asapc.program.runner import Runner

TINY = {"n_layers": 1, "max_iter": 6}
SMALL = {
    "batch_size": 32, "max_examples": 32, "selection_examples": 16,
    "features": ["coarse:4", "sliced:2", "lse"],
}  # fmt: skip
ASAP: dict[str, Any] = {"operator": "asap"}
# A student of each kind, and a choice among them.
CANDIDATES: dict[str, Any] = {
    "candidates": [
        {"operator": "lot", "pivots": 4}, {"operator": "esp_hard", "slices": 4},
        {"features": ["gaussian", "lse"], "fit": "kl"},
    ],
    "budget": {"attention_rel_l2": 9.0},
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    one_gpu(monkeypatch)
    monkeypatch.setattr(distill, "STEPS", 2)  # what runs there runs slowly
    monkeypatch.setattr(distill, "CANDIDATES", 4)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A teacher and its data, which no test changes: analysed once on either device."""
    folder = tmp_path_factory.mktemp("device")
    return write_teacher(folder / "teacher", **TINY), write_data(folder / "data.npz", 80)


def fitted(calibration: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(calibration / "calibration.safetensors").items()
    return {name: x for name, x in tensors if x.is_floating_point()}


def test_the_whole_way(work, tmp_path, gpu, capsys):
    """The fits are those of the CPU, and what was compiled is measured."""
    teacher, data = work
    recipe, on_gpu = {**SMALL, **CANDIDATES}, ("--device", "cuda")
    expected = fitted(calibrated(tmp_path, teacher, data, recipe, "--device", "cpu", name="cpu"))
    out = compiled(tmp_path, teacher, data, recipe, *on_gpu)
    assert json.loads((out / "selection.json").read_text())["device"] == "one GPU"
    found = fitted(tmp_path / "out-calib")
    assert found.keys() == expected.keys() and len(found) > 4
    for key, own in expected.items():
        assert torch.allclose(own, found[key], rtol=1e-3, atol=1e-5), key
    assert run("report", out, "--fast", *on_gpu, "--quiet") == 0, capsys.readouterr().err
    assert json.loads((out / "report.json").read_text())["environment"]["device"] == "one GPU"
    timed = run("bench", out, "--repeats", 1, "--no-torch-compile", *on_gpu, "--quiet")
    assert timed == 0, capsys.readouterr().err


def files_of(folder: Path) -> dict[str, bytes]:
    timed = ("selection.json", "report.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name not in timed}  # fmt: skip


def test_what_is_written_tells_of_no_device(work, tmp_path, gpu):
    """The lossless model, which has no fit that could round otherwise: byte for byte."""
    teacher, data = work
    written = [
        files_of(compiled(tmp_path, teacher, data, {"operator": "lossless"}, "--device", device))
        for device in ("cpu", "cuda")
    ]
    assert written[0].keys() == written[1].keys()
    different = [name for name, content in written[0].items() if content != written[1][name]]
    assert different in ([], ["manifest.json"])  # which tells the largest error of the replay
    first, second = (json.loads(files["manifest.json"]) for files in written)
    for manifest in (first, second):
        for site in manifest["sites"]:
            del site["replay"], site["replay_error"]
    assert first == second


def test_refresh(work, tmp_path, gpu):
    teacher, data = work
    out = compiled(tmp_path, teacher, data, {**SMALL, **ASAP})
    for extra in ("--distil", "--labels"):
        entries = []
        for device in ("cpu", "cuda"):
            again = tmp_path / f"{device}{extra}"
            assert run("refresh", out, "--data", data, extra, "--epochs", 1, "--examples", 24,
                       "--learning-rate", 1e-3, "-o", again, "--device", device,
                       "--quiet") == 0  # fmt: skip
            entries.append(json.loads((again / "manifest.json").read_text())["refresh"])
        assert entries[0]["best_epoch"] == entries[1]["best_epoch"]
        for name, value in entries[0]["after"].items():
            assert value == pytest.approx(entries[1]["after"][name], rel=1e-3, abs=1e-4)


def test_a_study(work, tmp_path, gpu):
    teacher, data = work
    (tmp_path / "grid.yaml").write_text(
        "blocks:\n  - {operator: lot, pivots: 4, max_examples: 32}\n  - {half_steps: 2}\n"
    )
    rows = {}
    for device in ("cpu", "cuda"):
        assert run("study", teacher, "--data", data, "--grid", tmp_path / "grid.yaml", "-o",
                   tmp_path / device, "--device", device, "--quiet") == 0  # fmt: skip
        study = json.loads((tmp_path / device / "study.json").read_text())
        rows[device] = sorted(row["attention_rel_l2"] for row in study["rows"])
    assert rows["cpu"] == pytest.approx(rows["cuda"], rel=1e-2)


IMAGES = {
    "image_size": 8, "patch_size": 4, "channels": 1, "num_classes": 3, "dim": 16, "heads": 2, "depth": 1,
    "mlp_dim": 16,
}  # fmt: skip
WORDS = {
    "vocab_size": 40, "seq_len": 12, "d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 16,
    "num_classes": 3, "n_pivots": 4,
}  # fmt: skip
BUILT_IN = {  # whose plans are other ones
    "espformer-vit": {**IMAGES, "dim_head": 4}, "lotformer-text": WORDS,
}


@pytest.mark.parametrize("architecture", BUILT_IN)
def test_other_teachers(tmp_path, gpu, architecture, capsys):
    keywords: dict[str, Any] = BUILT_IN[architecture]
    torch.manual_seed(0)
    model = ARCHITECTURES[architecture](**keywords)
    (tmp_path / "teacher").mkdir()
    save_file(model.state_dict(), tmp_path / "teacher" / "model.safetensors")
    config = {"architecture": architecture, **keywords}
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(config))
    assert run("inspect", tmp_path / "teacher", "--device", "cuda", "--json") == 0
    (site,) = json.loads(capsys.readouterr().out)["sites"]
    assert site["status"] == "matched" and site["replay_error"] < 1e-5


def test_a_model_on_the_gpu_stays_there(gpu):
    torch.manual_seed(0)
    model = SinkformerText(
        vocab_size=40, seq_len=12, d_model=16, n_layers=1, n_heads=2, d_ff=16, num_classes=3, max_iter=4
    ).eval()
    tokens = torch.randint(1, 40, (80, 12))
    with running_on(chosen_device("cuda"), [model]):
        there = list(model.parameters())
        compiled, report = asapc.compile(
            model, {"inputs": tokens}, recipe={**SMALL, **ASAP, "features": ["lse"]}, examples=8
        )
        assert all(isinstance(x, OnGpu) for x in there)
        assert all(x is y for x, y in zip(there, model.parameters(), strict=True))
        assert all(isinstance(x, OnGpu) for x in compiled.state_dict().values())
        few = moved(tokens[:4], there[0].device)
        exact, own = model(few), compiled(few)
        assert exact[0].shape == own[0].shape
    assert report.facts["environment"]["device"] == "one GPU"
    assert not any(isinstance(x, OnGpu) for x in model.state_dict().values())


class Shared(nn.Module):
    """Two layers of one weight, and a mask that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.mask = torch.eye(3)
        self.rnn = nn.GRU(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) @ self.mask)  # type: ignore[no-any-return]


def test_weights_come_back_as_they_were(gpu):
    model = Shared()
    before = {name: id(x) for name, x in model.named_parameters(remove_duplicate=False)}
    with pytest.raises(KeyError), running_on(chosen_device("cuda:0"), [model, None, model.first]):
        assert model.second.weight is model.first.weight
        assert all(x is y for x, y in zip(model.rnn._flat_weights, model.rnn.parameters(), strict=True))
        x = moved(torch.ones(2, 3), torch.device("cuda", 0))
        assert isinstance(model(x), OnGpu)
        raise KeyError
    assert {name: id(x) for name, x in model.named_parameters(remove_duplicate=False)} == before
    assert model(torch.ones(2, 3)).device == CPU and not isinstance(model.mask, OnGpu)
    assert all(x is y for x, y in zip(model.rnn._flat_weights, model.rnn.parameters(), strict=True))


@pytest.mark.parametrize(("error", "told"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "set a smaller batch_size"),
    (RuntimeError("CUDA error: device-side assert triggered\nmore"), "--device cpu, which names"),
])  # fmt: skip
def test_what_a_gpu_says_is_one_clear_message(error, told):
    class Failing(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            raise error

    model = Failing()
    with pytest.raises(InputError, match=told):
        Runner(model)(batch(torch.ones(4, 2)))
    assert model.calls == 1  # nothing runs after an assert


@pytest.mark.parametrize(("text", "told"), [
    ("gpu", "--device must be auto, cpu, cuda"), ("cuda:x", "--device must be"), ("cpu:1", "must be"),
    ("", "must be"), ("cuda", "no GPU that torch can use"), ("cuda:1", "no GPU that torch can use"),
])  # fmt: skip
def test_a_device_that_is_not_there(monkeypatch, capsys, tmp_path, text, told):
    """Before the model is read."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "config.json").write_text("no JSON")
    assert run("inspect", tmp_path, "--device", text) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert told in error and "JSON" not in error


def test_which_gpu(gpu, monkeypatch):
    assert chosen_device("auto") == chosen_device("cuda") == torch.device("cuda", 0)
    with pytest.raises(InputError, match="1 GPU, counted from 0"):
        chosen_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "3")  # of four processes on two GPUs
    assert chosen_device("auto") == torch.device("cuda", 1)
    assert chosen_device("cpu") == CPU


def test_the_second_device_refuses_what_a_gpu_refuses(gpu):
    there = torch.device("cuda", 0)
    with running_on(there, []):
        x = torch.ones(3).to(there)
        assert float((x + torch.arange(3, device=there)).sum()) == 6
        with pytest.raises(RuntimeError, match="one device"):
            x + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()


def test_so_many_threads_as_are_asked_for(work, capsys, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert run("inspect", work[0], "--threads", 3, "--quiet") == 0
    assert asked[0] == 3
    assert run("inspect", work[0], "--threads", 0) == EXIT_BAD_INPUT
    assert "--threads" in capsys.readouterr().err


class OfThreads(zoo.ColumnsFirst):
    def forward(self, x):
        return super().forward(x) * torch.get_num_threads()


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_tracing_and_experiments_take_one_thread(three_threads, monkeypatch):
    seen: dict[str, int] = {}
    for home, name in ((analysing, "capture"), (analysing, "matched_program"), (gradients, "_gradients"),
                       (replaying._Beyond, "errors")):  # fmt: skip
        own = getattr(home, name)

        def noted(*args, own=own, name=name, **kwargs):
            seen[name] = torch.get_num_threads()
            return own(*args, **kwargs)

        monkeypatch.setattr(home, name, noted)
    model = zoo.ColumnsFirst().eval()
    assert [site.name for site in analysed(model, *zoo.inputs_for(model)).sites] == ["model"]
    assert seen == dict.fromkeys(("capture", "matched_program", "_gradients", "errors"), 1)
    assert torch.get_num_threads() == 3
    with pytest.raises(InputError):
        analysed(model, torch.ones(2))
    assert torch.get_num_threads() == 3


def test_a_model_that_asks_for_the_number_of_threads_gets_the_users(three_threads):
    model = OfThreads().eval()
    inputs = zoo.inputs_for(model)
    analysis = analysed(model, *inputs)
    assert len(analysis.sites) == 1
    assert torch.equal(Runner(model, analysis.capture.programs)(batch(*inputs)), model(*inputs))
