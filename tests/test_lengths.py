"""Lengths that a trace does not hold for are refused: a model may branch on its length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asapc.errors import InputError
from asapc.inputs.onnx.verify import run_program
from asapc.ir import Program
from asapc.passes.capture import capture, export_graph, program_of


class Branching(nn.Module):
    """Ten times as much for up to five tokens, no more than twelve."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(12, 4))

    def forward(self, x: Tensor, keep: Tensor) -> dict[str, Tensor]:
        own = (x + self.positions[: x.shape[1]]) * keep[..., None]
        return {"y": own if x.shape[1] > 5 else 10 * own}


def inputs(length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(3, length, 4), torch.ones(3, length)


CALLS: dict[str, Any] = {
    "positional": lambda x, keep: ((x, keep), {}),
    "mixed": lambda x, keep: ((x,), {"keep": keep}),
    "by name": lambda x, keep: ((), {"keep": keep, "x": x}),
}


def rewritten(program: Program) -> Any:
    """As an artefact holds it."""
    exported = export_graph(program.graph, program.args, program.kwargs, program.dynamic_shapes)
    return exported.module(check_guards=False)


@pytest.mark.parametrize("name", CALLS)
def test_a_branch_on_a_length(name: str) -> None:
    model, call = Branching().eval(), CALLS[name]
    args, kwargs = call(*inputs(8))
    program = rewritten(capture(model, args, kwargs).programs[0])
    for length in (6, 12):
        args, kwargs = call(*inputs(length))
        torch.testing.assert_close(program(*args, **kwargs), model(*args, **kwargs))
    for length, words in ((4, ">= 6"), (13, "<= 12")):
        args, kwargs = call(*inputs(length))
        with pytest.raises(RuntimeError, match=f"shape.1. to be {words}, but got {length}"):
            program(*args, **kwargs)


def test_of_an_exported_program() -> None:
    shapes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},) * 2
    exported = torch.export.export(Branching().eval(), inputs(8), dynamic_shapes=shapes)
    program = rewritten(program_of(exported, inputs(8), {}))
    program(*inputs(7))
    with pytest.raises(RuntimeError, match=">= 6, but got 4"):
        program(*inputs(4))


def test_onnx_files_are_not_compared_there() -> None:
    program = rewritten(capture(Branching().eval(), inputs(8), {}).programs[0])
    feeds = dict(zip(("x", "keep"), inputs(4), strict=True))
    with pytest.raises(InputError, match="x: 4, traced for 6 to 12"):
        run_program(program, feeds)
    assert run_program(program, dict(zip(feeds, inputs(9), strict=True)))[0].shape == (3, 9, 4)
