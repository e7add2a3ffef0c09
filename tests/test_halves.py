"""Teachers in half precision: compiled as they are, and held against their own code in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from analyses import analysed, batch
from attention_zoo import module
from safetensors.torch import save_file
from torch import Tensor, nn

import asapc
import asapc.errors
from asapc.inputs.data import data_of
from asapc.models import SinkformerText, SinkformerViT
from asapc.passes import analyse as analysing
from asapc.passes.analyse import own_rounding
from asapc.passes.replay import TOLERANCE

SMALL = {"operator": "asap", "features": ["coarse:4"], "max_examples": 32}


def text() -> tuple[nn.Module, dict[str, Tensor]]:
    """In bfloat16."""
    torch.manual_seed(0)
    model = SinkformerText(
        vocab_size=40, seq_len=12, d_model=16, n_layers=1, n_heads=2, d_ff=16, num_classes=3, max_iter=8
    )
    return model.eval().bfloat16(), {"inputs": torch.randint(1, 40, (100, 12))}


def test_the_whole_way() -> None:
    dtype = torch.float16
    torch.manual_seed(0)
    model = SinkformerViT(
        image_size=8, patch_size=4, channels=1, num_classes=3, dim=16, depth=1, heads=2, mlp_dim=16,
        max_iter=6,
    )  # fmt: skip
    model, data = model.eval().to(dtype), {"img": torch.randn(100, 1, 8, 8).to(dtype)}
    compiled, report = asapc.compile(model, data, recipe=SMALL, examples=20)
    assert {x.dtype for x in compiled.parameters()} == {dtype}
    assert {site["operator"] for site in report.facts["sites"]} == {"asap"}
    assert all(site["metrics"]["attention_rel_l2"] < 0.1 for site in report.facts["sites"])
    given, *_ = data.values()
    with torch.no_grad():
        own, exact = (model(given[:5])[0], compiled(given[:5])[0])
    assert own.dtype == exact.dtype == dtype
    assert float((own - exact).abs().max()) < 0.05


def test_replay_is_against_float64() -> None:
    """The teacher's own map is 3 % off in bfloat16, and the operator is not."""
    model, data = text()
    few = data["inputs"][:4]
    found = analysed(model, inputs=few)
    assert [site.loop.half_steps for site in found.sites] == [8]
    assert all(site.replay["the data"] < TOLERANCE / 10 for site in found.sites)
    assert 0 < own_rounding(model, batch(inputs=few)) < 0.5
    assert own_rounding(model.float(), batch(inputs=few)) == 0.0


def test_the_rounding_of_code_that_casts_to_half_precision() -> None:
    cast = module(lambda self, x: self.inner(x.bfloat16()).float() + x, inner=nn.Linear(8, 8).bfloat16())
    assert 0 < own_rounding(cast, batch(x=torch.randn(3, 8))) < 0.05


def test_another_model_is_still_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a half may be off is what it is off from itself, not whatever a rewrite does."""
    model, data = text()
    true = analysing.lift

    def broken(*given: object, **named: object) -> object:
        program = true(*given, **named)  # type: ignore[arg-type]
        for node in program.graph.graph.nodes:
            if "sinkhorn" in str(node.target):
                steps = node.args.index(8)
                node.args = (*node.args[:steps], 1, *node.args[steps + 1 :])
        program.graph.recompile()
        return replace(program)

    monkeypatch.setattr(analysing, "lift", broken)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "WQ" in name or "WK" in name:
                parameter.mul_(6.0)
    with pytest.raises(asapc.errors.VerificationError, match="reproduces the untouched model"):
        analysed(model, inputs=data["inputs"][:4])


def test_files_hold_bfloat16(tmp_path: Path) -> None:
    values = torch.randn(10, 3).bfloat16()
    save_file({"x": values}, tmp_path / "x.safetensors")
    source = data_of(str(tmp_path / "x.safetensors"), None)
    (batch,) = source.batches(10)
    assert torch.equal(batch.kwargs["x"], values)
    other = data_of({"x": values.view(torch.int16).clone().view(torch.bfloat16) * 2}, None)
    assert next(other.batches(10)).hashes != batch.hashes
    assert next(data_of({"x": values.float()}, None).batches(10)).hashes != batch.hashes
