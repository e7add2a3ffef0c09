"""Programs for files, assembled without a trace, against what a trace of the same graph gives."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import attention_zoo as zoo
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.inputs.pt2 import load_program, save_program
from asapc.ir import Program
from asapc.passes.capture import capture, export_graph
from asapc.passes.identify import matched_program
from asapc.passes.lift import lift
from asapc.passes.regions import Refusal
from asapc.program.exported import exported_program


class Held(nn.Module):
    """Whatever a graph may hold and return: tied and unused parameters, buffers of both kinds, constants,
    an input that is returned, one that is None, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.unused = (nn.Linear(4, 4) for _ in range(3))
        self.other.weight = self.one.weight
        self.register_buffer("kept", torch.randn(4))
        self.register_buffer("passing", torch.randn(4), persistent=False)
        self.plain = torch.randn(4)

    def forward(self, x: Tensor, *, y: Tensor | None = None, count: int = 3) -> dict[str, Any]:
        z = self.one(x) + self.other(x) + self.kept + self.passing + self.plain + torch.tensor([2.0])
        return {"z": z * count, "x": x, "y": y, "pair": (z.sum(-1), count), "tokens": x.shape[1]}


MODELS = ("Alternating", "whatever")


@functools.cache
def programs(name: str) -> list[Program]:
    """As it was matched, and lifted."""
    torch.manual_seed(0)
    if name == "whatever":
        x = torch.randn(2, 5, 4)
        return capture(Held().eval(), (x,), {"y": None, "count": 3}).programs
    model = getattr(zoo, name)().eval()
    (program,) = capture(model, zoo.inputs_for(model), {}).programs
    program, sites = matched_program(program)
    return [program, lift(program, [s for s in sites if not isinstance(s, Refusal)], False)]


NAMED = [(name, stage) for name in MODELS for stage in (0, 1) if (name, stage) != ("whatever", 1)]


@pytest.fixture(params=NAMED, ids=str)
def program(request: pytest.FixtureRequest) -> Program:
    name, stage = request.param
    return programs(name)[stage]


def spec(exported: ExportedProgram) -> list[Any]:
    """What a signature says of inputs that are used, and of outputs, names of values left aside."""
    unused = {node.name for node in exported.graph.nodes if node.op == "placeholder" and not node.users}
    signature = exported.graph_signature
    given = [
        (s.kind, s.target, s.persistent, type(s.arg)) for s in signature.input_specs
        if s.target is None or s.arg.name not in unused
    ]  # fmt: skip
    return [given, [(s.kind, s.target, type(s.arg)) for s in signature.output_specs]]


def test_it_is_what_a_trace_gives_written_and_read(program: Program, tmp_path: Path) -> None:
    """Sizes of every value are known, too, those of a rewrite's calls among them, which nobody traced."""
    traced = export_graph(program.graph, program.args, program.kwargs, program.dynamic_shapes)
    made = exported_program(program)
    assert all("val" in node.meta or node.op == "output" for node in made.graph.nodes)
    assert made.range_constraints == traced.range_constraints
    assert made.call_spec == traced.call_spec
    assert [node.target for node in made.graph.nodes if node.op == "call_function"] == [
        node.target for node in program.graph.graph.nodes if node.op == "call_function"
    ]
    (given, returned), (traced_given, traced_returned) = spec(made), spec(traced)
    assert returned == traced_returned
    # A trace makes buffers of constants that a graph holds: what they are is known from the capture.
    assert [(target, kind) for _, target, _, kind in given] == [
        (target, kind) for _, target, _, kind in traced_given
    ]
    save_program(made, tmp_path / "program.pt2")
    read = load_program(tmp_path / "program.pt2", made.state_dict)
    assert read.range_constraints == made.range_constraints
    for module in (made, read):
        found = module.module(check_guards=False)(*program.args, **program.kwargs)
        expected = program.graph(*program.args, **program.kwargs)
        torch.testing.assert_close(
            pytree.tree_leaves(found), pytree.tree_leaves(expected), rtol=0, atol=0
        )
        assert pytree.tree_structure(found) == pytree.tree_structure(expected)


def test_sizes_of_what_a_rewrite_puts_in_are_numbers() -> None:
    (program,) = capture(Held().eval(), (torch.randn(2, 5, 4),), {"y": None, "count": 3}).programs
    program.graph.register_parameter("fitted", nn.Parameter(torch.randn(3, 4)))
    graph = program.graph.graph
    (output,) = (node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(output):
        fitted = graph.get_attr("fitted")
        total = graph.call_function(torch.ops.aten.sum.default, (fitted,))
        output.args = ((*output.args[0][:-1], total),)  # type: ignore[index]
    made = exported_program(program)
    (held,) = (node for node in made.graph.nodes if node.target == "p_fitted")
    assert all(isinstance(size, int) for size in held.meta["val"].shape)
    assert made.state_dict["fitted"] is program.graph.fitted
