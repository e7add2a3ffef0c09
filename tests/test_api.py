"""asapc.compile from Python: the documented example, folders, gates, batches, capture per module."""

from __future__ import annotations

import doctest
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import attention_zoo as zoo
import pytest
import torch
from torch import nn

import asapc
from asapc import api
from asapc.errors import InputError
from asapc.models import SinkformerText
from asapc.program import live

FEW = {"batch_size": 16, "max_examples": 48, "selection_examples": 16}


def text_model() -> nn.Module:
    torch.manual_seed(0)
    return SinkformerText(
        vocab_size=40, seq_len=12, d_model=16, n_layers=1, n_heads=2, d_ff=16, num_classes=3, max_iter=4
    ).eval()


def test_the_documented_example_runs() -> None:
    found = doctest.testmod(api)
    assert found.attempted >= 8 and found.failed == 0


def test_gates_and_a_folder(tmp_path: Path) -> None:
    """A gate that fails is in the report, not an exception; the folder loads without the model."""
    model = text_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.randint(1, 40, (160, 12), generator=torch.Generator().manual_seed(1))
    batches = [{"inputs": part} for part in tokens.split(40)]
    recipe = {**FEW, "operator": "asap", "features": ["norm"]}
    out = tmp_path / "out"

    def confidence(output: Any, batch: dict[str, Any]) -> torch.Tensor:
        assert batch["labels"] is None and batch["inputs"].shape[1] == 12
        return output[0].softmax(-1).amax(-1)

    compiled, report = asapc.compile(
        model, batches, recipe=recipe, out=out, examples=16, metric=asapc.OwnMetric(confidence),
        gates={"attention_rel_l2": {"max": 1e-9}, "metric_drop": {"max": 1.0, "confidence": True}},
    )
    assert [check["passed"] for check in report.facts["gate"]["checks"]] == [False, True]
    assert report.facts["model"]["metric_compiled"] > 0.3
    assert not report.passed and report.facts["gate"]["verdict"] == "REGRESSION"
    assert "REGRESSION" in report.markdown().splitlines()[0]
    assert repr(report).startswith("MeasuredReport(REGRESSION, ") and len(repr(report)) < 200
    assert (out / "report.json").is_file() and (tmp_path / "out.calibration").is_dir()
    with torch.no_grad():
        own, loaded = compiled(tokens[:3])[0], asapc.load(out)(tokens[:3])[0]
        assert type(compiled) is type(model) and compiled is not model  # a patched copy
        assert torch.equal(own, loaded) and not torch.equal(own, model(tokens[:3])[0])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert report.facts["model"]["source"] == "SinkformerText"
    # A notebook shows what decides, of the result, of its model, and of the folder's.
    for shown in (compiled, asapc.load(out), asapc.load(out, model=text_model())):
        html = shown._repr_html_()
        assert "REGRESSION: 1 of" in html and "layers.0.mha" in html
    live.remove(compiled)
    assert not hasattr(compiled, "_repr_html_")


class ThroughNumpy(nn.Module):
    """Cannot be captured as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.text = text_model()

    def forward(self, inputs: torch.Tensor) -> Any:
        logits = self.text(inputs)[0]
        return torch.from_numpy(logits.detach().numpy() * 2)


def test_a_model_captured_per_module_comes_back_whole(capsys: pytest.CaptureFixture[str]) -> None:
    model = ThroughNumpy().eval()
    tokens = torch.randint(1, 40, (120, 12), generator=torch.Generator().manual_seed(1))
    compiled, report = asapc.compile(
        model, {"inputs": tokens}, recipe={**FEW, "operator": "lossless"}, examples=8
    )
    assert "measuring fidelity: " in capsys.readouterr().err  # progress, unless told to be quiet
    assert report.facts["model"]["capture"] == "module"
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens[:4]), model(tokens[:4]), rtol=1e-4, atol=1e-5)
    assert isinstance(compiled, ThroughNumpy) and compiled is not model
    seen: list[nn.Module] = []
    compiled.text.layers[0].mha.WQ.register_forward_hook(lambda own, *_: seen.append(own))
    compiled(tokens[:4])
    assert seen == [compiled.text.layers[0].mha.WQ]  # its layers are live


def with_a_lock() -> nn.Module:
    model: Any = text_model()
    model.layers[0].lock = threading.Lock()
    return model


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (lambda: text_model().train(), {"inputs": torch.ones(9, 12).long()}, "must be in eval mode"),
        (dict, {"inputs": torch.ones(9, 12).long()}, "must be a torch.nn.Module"),
        (text_model, {"tokens": torch.ones(9, 12).long()}, "tokens"),
        (text_model, [], "examples"),
        (text_model, [{"inputs": "text"}], "batch 0: a batch must hold at least one array"),
        (text_model, {}, "examples"),
        (with_a_lock, {"inputs": torch.ones(9, 12).long()}, "the model must be copyable.*got TypeError"),
    ],
)
def test_what_is_wrong_is_named(model: Any, data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        asapc.compile(model(), data)


def test_too_few_data_are_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(api.pipeline, "calibrate")
    with pytest.raises(InputError, match="split needs examples"):
        asapc.compile(text_model(), {"inputs": torch.ones(1, 12, dtype=torch.long)})


class Marked(zoo.ColumnsFirst):
    """Adds a number that it puts into zeros of torch's default dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        marks = torch.zeros(x.shape[1], 1)
        marks[torch.arange(x.shape[1])] = 2.0
        return super().forward(x + marks)


class Sized(nn.Module):
    """Returns constants, sizes and a weight before its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Marked(2)
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        n = x.shape[1]
        more = {"kind": 5, "length": n, "pair": (2 * n + 1, None), "weight": self.weight}
        return OrderedDict(**more, y=self.attention(x), x=x + 1)


def test_constants_and_sizes_among_the_outputs() -> None:
    torch.manual_seed(0)
    model = Sized().eval()
    compiled = asapc.compile(model, torch.randn(64, 6, 16), recipe={**FEW, "operator": "lossless"}).model
    x = torch.randn(3, 9, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        assert type(compiled(x)) is type(model(x))
        torch.testing.assert_close(compiled.double()(x.double()), model.double()(x.double()))
