"""Models that a copy, or compiled code, would leave something of behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_zoo import module
from torch import Tensor, nn
from torch.nn.utils import parametrize

import asapc
from asapc.errors import AsapcError, InputError, NoSiteError


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.gain = nn.Linear(8, 8), nn.Linear(8, 8), 2.0

    def forward(self, x: Tensor) -> Tensor:
        plan = (self.to_q(x) @ self.to_k(x).mT).softmax(-1)
        for _ in range(3):
            plan = plan / plan.sum(-2, keepdim=True)
            plan = plan / plan.sum(-1, keepdim=True)
        return plan @ x

    def scaled(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        return output * self.gain


class Tags(Attention):
    def forward(self, x: Tensor) -> Tensor:
        x.length = x.shape[1]  # type: ignore[attr-defined]
        return super().forward(x)


class TagsOutput(Attention):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        output.length = x.shape[1]  # type: ignore[attr-defined]
        return output


class Around(nn.Module):
    """Reads what a hook keeps, as feature extractors do."""

    def __init__(self, kept: dict[str, Tensor]) -> None:
        super().__init__()
        self.attention, self.kept = Attention(), kept

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x) + self.kept["first"]


def keeping_in_a_closure() -> nn.Module:
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, given: Any, output: Tensor) -> None:
        kept["first"] = output

    around = Around(kept)
    around.attention.register_forward_hook(keep)
    return around


def with_a_closure_as_forward() -> nn.Module:
    attention = Attention()
    forward = attention.forward
    attention.forward = lambda x: forward(x) * 2  # type: ignore[method-assign]
    return attention


CASES = {
    "hook of a closure": (keeping_in_a_closure, InputError, r"keeping_in_a_closure.*keep holds kept"),
    "forward of a closure": (with_a_closure_as_forward, InputError, r"<lambda> holds forward"),
    "attribute of an input": (Tags, NoSiteError, "sets an attribute of a tensor, length"),
    "attribute of the output": (TagsOutput, NoSiteError, "sets an attribute of a tensor, length"),
}


@pytest.mark.parametrize(("make", "kind", "text"), CASES.values(), ids=CASES)
def test_what_a_copy_would_not_have_is_refused(
    make: Callable[[], nn.Module], kind: type[AsapcError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        asapc.compile(make().eval(), {"x": torch.randn(48, 5, 8)}, quiet=True)


def test_hooks_of_the_layers_of_a_rebuilt_model_would_never_run(tmp_path: Path) -> None:
    model, x = Attention().eval(), torch.randn(48, 5, 8)
    asapc.compile(model, {"x": x}, recipe={"operator": "lossless"}, out=tmp_path / "out", quiet=True)
    rebuilt, seen = asapc.load(tmp_path / "out"), list[Tensor]()
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        with pytest.raises(InputError, match="its layers are not called one by one"):
            getattr(rebuilt.to_q, f"register_{register}")(print)
    for name in ("scale", "forward"):
        with pytest.raises(InputError, match=f"weights alone.*{name} is set"):
            setattr(rebuilt.to_q, name, print)
    loud = module(lambda self, x: 2 * self.inner(x), inner=rebuilt.to_q, weight=rebuilt.to_q.weight)
    for put in (setattr, nn.Module.register_module, nn.Module.set_submodule):
        with pytest.raises(InputError, match=r"weights alone.*to_q is set"):
            put(rebuilt, "to_q", loud)  # which would never be called
    with pytest.raises(InputError, match=r"weights alone.*__class__ is set"):
        rebuilt.to_q.__class__ = nn.Linear
    parametrize.register_parametrization(rebuilt.to_q, "weight", nn.Identity())
    rebuilt.to_q.bias = nn.Parameter(model.to_q.bias.detach().clone())
    rebuilt.register_forward_hook(lambda _, __, output: seen.append(output))
    torch.testing.assert_close(copy.deepcopy(rebuilt)(x), model(x))
    assert len(seen) == 1
    patched = asapc.load(tmp_path / "out", model=copy.deepcopy(model))
    for one in (patched, model):
        one.to_q.register_forward_hook(lambda _, __, output: 2 * output)
    torch.testing.assert_close(patched(x), model(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Linear(8, 8)
        self.tokens, self.attention, self.head = nn.Embedding(20, 8), Attention(), nn.Linear(8, 20)
        self.head.weight = self.tokens.weight
        self.register_buffer("positions", torch.randn(9, 8), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.attention(self.tokens(ids) + self.positions[: ids.shape[1]]))


def test_a_rebuilt_model_names_its_weights_as_the_teacher_does(tmp_path: Path) -> None:
    """By which state dicts and the state of optimisers go."""
    model, ids = Tied().eval(), torch.randint(20, (48, 5))
    asapc.compile(model, {"ids": ids}, recipe={"operator": "lossless"}, out=tmp_path / "out", quiet=True)
    rebuilt = asapc.load(tmp_path / "out")
    names = [name for name, _ in model.named_parameters() if not name.startswith("unread")]
    assert [name for name, _ in rebuilt.named_parameters()] == names
    assert [*rebuilt.state_dict()] == [x for x in model.state_dict() if not x.startswith("unread")]
    state = {name: 2 * x for name, x in model.state_dict().items() if not name.startswith("unread")}
    rebuilt.load_state_dict(state)
    model.load_state_dict({**model.state_dict(), **state})
    moved = copy.deepcopy(rebuilt).double()
    assert moved.head.weight is moved.tokens.weight
    torch.testing.assert_close(moved(ids), model.double()(ids))


def test_a_hook_may_read_what_the_model_has_as_well() -> None:
    settings = {"gain": 2.0}
    model = Attention().eval()
    model.settings = settings  # type: ignore[assignment]
    model.register_forward_hook(lambda _, __, output: output * settings["gain"])
    model.register_forward_hook(model.scaled)
    x = torch.randn(48, 5, 8)
    compiled = asapc.compile(model, {"x": x}, quiet=True).model
    torch.testing.assert_close(compiled(x), model(x))
