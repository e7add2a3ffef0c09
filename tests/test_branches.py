"""What a model's Python asks of its data: the program goes the way of the example, and holds to it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attention_zoo as zoo
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import asapc
from asapc import pipeline
from asapc.errors import BranchError, InputError
from asapc.inputs.data import Batch
from asapc.inputs.load import build_factory
from asapc.inputs.teacher import Teacher
from asapc.passes.analyse import analyse
from asapc.passes.branches import held_branches
from asapc.passes.capture import capture
from asapc.program.call import known_of
from asapc.program.compiled import OwnCodeWarning
from asapc.program.runner import Runner

X = torch.linspace(-1, 1, 4 * 9 * 5).reshape(4, 9, 5)
ASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda x: x / 1e6 if torch.any(x > 1e6) else x,
    "all": lambda x: x if bool((x.abs() < 10).all()) else x * 2,
    "float": lambda x: x / 2 if x.abs().max().item() > 1e6 else x,
    "count": lambda x: x / 2 if (x > 1e6).sum().item() > 0 else x,
    "int": lambda x: x / 2 if int((x > 1e6).sum()) == 3 else x,
    "equal": lambda x: x if torch.allclose(x, x.clamp(-10, 10)) else x * 2,
    "same": lambda x: x if torch.equal(x, x.clamp(-10, 10)) else x * 2,
    "type": lambda x: x if type(x) is Tensor else x[0, 0, 0, 0],
}
UNEXPORTED: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": lambda x: x * float(np.abs(x.detach().numpy()).max()),
    "scale": lambda x: x / x.abs().max().item(),
}
ASKED_NOTHING = {"type"}


class Attention(nn.Module):
    """Three half-steps; asks its own input, where it is told to."""

    def __init__(self, ask: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.ask, self.qkv = ask, nn.Linear(5, 15)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ask(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)
        for dim in (-1, -2, -1):
            scores = scores - scores.logsumexp(dim, keepdim=True)
        return x + scores.exp() @ v


def net(ask: Callable[[Tensor], Tensor] = lambda x: x, inner: Any = lambda x: x) -> Any:
    torch.manual_seed(0)
    return zoo.module(lambda self, x: self.layer(ask(x)).mean(1), layer=Attention(inner)).eval()


@dataclass
class Returned:
    y: Tensor


COMPILED: list[Any] = []
RETURNED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "text": (lambda y: {"y": y, "kind": "soft"}, "returns a string"),
    "number": (lambda y: (y, float(y.max())), "depends on a value from the data"),
    "length": (lambda y: y * torch.from_numpy(0.1 * np.arange(len(y[0])))[:, None], "goes into NumPy"),
    "root": (lambda y: y * torch.from_numpy(np.sqrt(np.arange(len(y[0]))))[:, None], "goes into NumPy"),
    "axis": (
        lambda y: torch.vmap(lambda t: t - t.logsumexp(-1, keepdim=True), in_dims=1, out_dims=1)(y),
        "a vmap takes or gives another axis than the first",
    ),
    "class": (Returned, "returns a Returned, which is not made of tensors"),
    "class of a function": (
        type("Local", (Returned,), {"__qualname__": "f.<locals>.Local"}),
        "returns a Local, which is not made of tensors",
    ),
}


@torch.compile(backend=lambda graph, _: COMPILED.append(graph) or graph.forward)
def compiled_by_its_user(x: Tensor) -> Tensor:
    return x * 0.5


@pytest.mark.parametrize("kind", RETURNED)
def test_what_no_file_holds_is_told(kind: str) -> None:
    class Returning(Attention):
        def forward(self, x: Tensor) -> Any:
            return RETURNED[kind][0](super().forward(x))

    ((_, reason),) = capture(Returning().eval(), (X,), {}).skipped
    assert RETURNED[kind][1] in reason


def test_what_a_user_compiles_is_captured_as_it_is_written() -> None:
    assert capture(Attention(compiled_by_its_user).eval(), (X,), {}).kind == "whole"
    assert not COMPILED


OF_SIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "of sizes, any": lambda x: x * 2 if (torch.arange(x.shape[1]) > 9).any() else x,
    "of sizes, sum": lambda x: x * 2 if torch.ones(x.shape[1]).sum() > 10 else x,
    "of sizes, float": lambda x: x * float(torch.ones(x.shape[1]).sum()),
    "of sizes, int": lambda x: x * int(torch.tensor(x.shape[1])),
    "of sizes, shape": lambda x: x * float(torch.tensor(x.shape)[1]),
}


@pytest.mark.parametrize("ask", [*ASKED, *OF_SIZES])
def test_what_is_asked_of_inputs_or_of_a_tensor_of_sizes_is_held_to(ask: str) -> None:
    model = net((ASKED | OF_SIZES)[ask])
    (program,) = capture(model, (X,), {}).programs
    assert program.name == ""
    fresh = X.flip(1) if ask in OF_SIZES else torch.cat([X, X.flip(1)]).cos()
    torch.testing.assert_close(program.graph(fresh), model(fresh))
    assert ask in OF_SIZES or len(held_branches(program.graph)) == (ask not in ASKED_NOTHING)
    if ask in ASKED_NOTHING:
        return
    other = torch.cat([X, X], 1) if ask in OF_SIZES else X.clone()
    if ask in ASKED:
        other[0, 0, :3] = 1e7
    with pytest.raises(BranchError, match=r"test_branches.py, line \d+\) is (true|false), got data"):
        program.graph(other)


TAU = torch.tensor(0.7)


def test_numbers_of_no_input_are_held_to() -> None:
    def ask(x: Tensor) -> Tensor:
        x = x / TAU.item()
        return x * float(TAU) * max(TAU.item(), 0.1) ** 2

    model = net(inner=ask, ask=ask)
    (program,) = capture(model, (X,), {}).programs
    _, limits = known_of([node.meta["val"] for node in program.graph.graph.find_nodes(op="placeholder")])
    assert program.name == "" and not limits
    for x in (X.flip(1).cos(), X[:1], X[:, :1]):
        torch.testing.assert_close(program.graph(x), model(x))


@pytest.mark.parametrize("ask", UNEXPORTED)
def test_the_smallest_module_is_captured_and_the_rest_stays_python(ask: str) -> None:
    found = capture(net(UNEXPORTED[ask]), (X,), {})
    assert [program.name for program in found.programs] == ["layer"] and not found.skipped
    words = "is read as a NumPy array" if ask == "numpy" else "depends on a value from the data"
    assert found.reason is not None and words in found.reason
    assert f'"{ask}": lambda x: x' in found.reason and "test_branches.py, line " in found.reason


def of_several_lengths(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """A layer of torch that is given sequences of several lengths."""
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return self.layer(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


def test_packed_sequences_stay_python() -> None:
    recurrent = zoo.module(
        of_several_lengths, layer=Attention(), lstm=nn.LSTM(5, 5, batch_first=True)
    ).eval()
    found = capture(recurrent, (X, torch.tensor([9, 4, 7, 1])), {})
    assert [program.name for program in found.programs] == ["layer"] and not found.skipped


def test_a_branch_that_other_data_takes_the_other_way_stays_python() -> None:
    model = net(lambda x: x * 2 if bool((x > 0).any()) else x)
    positive, negative = X.abs() + 0.1, -X.abs()
    batches = [Batch((x,), {}, None, [0] * 4) for x in (positive, negative)]
    teacher = Teacher(model, None, "net", "0", False, None)
    alone = analyse(teacher, batches[0])
    assert alone.capture.kind == "whole" and alone.names == ["layer"]
    both = analyse(teacher, batches[0], more=batches[1:])
    assert both.capture.kind == "module" and both.names == ["layer"]
    assert "goes both ways on the data" in str(both.capture.reason)
    run = Runner(model, both.lifted)
    for batch in batches:
        torch.testing.assert_close(run(batch), model(*batch.args))


def test_what_holds_for_one_of_the_datas_sizes_stays_python() -> None:
    model = net(lambda x: x * 2 if x.shape[1] % 5 == 4 else x)
    batches = [Batch((x,), {}, None, [0] * 4) for x in (X, torch.randn(4, 7, *X.shape[2:]))]
    found = analyse(Teacher(model, None, "net", "0", False, None), batches[0], more=batches[1:])
    assert found.capture.kind == "module" and found.names == ["layer"]
    assert "for one of the data's sizes alone" in str(found.capture.reason)
    run = Runner(model, found.lifted)
    for batch in batches:
        torch.testing.assert_close(run(batch), model(*batch.args))


def test_what_comes_out_of_a_loop_is_no_branch_to_hold_to() -> None:
    def sharp(self: nn.Module, x: Tensor) -> Tensor:
        x = x.softmax(-1)
        return 2 * x if (x > 0.5).any() else x

    found = capture(zoo.module(sharp), (X,), {})
    assert not found.programs and "comes out of a loop" in found.skipped[0][1]


def test_a_layer_that_is_cast_while_it_runs_is_no_error_of_torchs() -> None:
    model = net(inner=lambda x: (model.layer.qkv.float(), x)[1])
    found = capture(model, (X,), {})
    assert "a layer is cast or moved while the model runs" in found.skipped[0][1]


def test_one_module_that_cannot_be_captured_is_one_refused_row(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And no dump of a graph."""
    torch.manual_seed(0)
    np.savez(tmp_path / "x.npz", x=X.numpy())
    model = zoo.module(
        lambda self, x: self.asking(self.plain(x)).mean(1),
        plain=Attention(), asking=Attention(UNEXPORTED["numpy"]),
    )  # fmt: skip
    teacher = Teacher(model.eval(), None, "two", "0", False, None)
    rows = pipeline.inspect(teacher, str(tmp_path / "x.npz"))["sites"]
    assert {row["name"]: row["status"] for row in rows} == {"plain": "matched", "asking": "refused"}
    (reason,) = [row["reason"] for row in rows if row["status"] == "refused"]
    assert "cannot be captured: `\"numpy\": lambda" in reason and "is read as a NumPy array" in reason
    assert capfd.readouterr() == ("", "")
    nothing = Teacher(net(inner=UNEXPORTED["scale"]), None, "net", "0", False, None)
    (row,) = pipeline.inspect(nothing, str(tmp_path / "x.npz"))["sites"]
    assert row["status"] == "refused" and "test_branches.py, line " in row["reason"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A model whose layer asks whether its input is scaled, compiled on data that is not."""
    model = net(inner=lambda x: x / 1e6 if torch.any(x > 1e6) else x)
    out = tmp_path_factory.mktemp("branches") / "out"
    x = torch.randn(120, 9, 5, generator=torch.Generator().manual_seed(1))
    asapc.compile(model, {"x": x}, recipe={"operator": "sinkhorn"}, out=out, examples=16)
    return model, out


def test_a_compiled_model_says_where_it_would_be_another(compiled: tuple[nn.Module, Path]) -> None:
    model, out = compiled
    live, alone = asapc.load(out, model=net(inner=model.layer.ask)), asapc.load(out)  # type: ignore[union-attr]
    scaled = X * 2e7
    with warnings.catch_warnings(action="error"):
        torch.testing.assert_close(live(X), model(X), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone(X), model(X), atol=1e-5, rtol=1e-5)
    with pytest.warns(OwnCodeWarning, match=r"torch.any\(x > 1e6\)"):
        torch.testing.assert_close(live(scaled), model(scaled))
    with pytest.raises(BranchError, match="runs the model's own code"):
        alone(scaled)


def in_windows(self: Any, x: Tensor) -> Tensor:
    """Attention in windows of 3 x 3, put together as Swin does: the number of images is an int."""
    height, width, dim = x.shape[1:]
    parts = x.view(-1, height // 3, 3, width // 3, 3, dim).transpose(2, 3)
    windows = self.attention(parts.reshape(-1, 9, dim))
    count = int(windows.shape[0] / (height * width / 9))
    parts = windows.view(count, height // 3, width // 3, 3, 3, dim)
    return parts.transpose(2, 3).reshape(count, height, width, dim)


def test_code_that_makes_a_number_of_the_examples_is_compiled_for_any(tmp_path: Path) -> None:
    model = zoo.module(in_windows, attention=Attention()).eval()
    x = torch.randn(120, 6, 6, 5, generator=torch.Generator().manual_seed(1))
    compiled, report = asapc.compile(model, {"x": x}, recipe={"operator": "sinkhorn"}, examples=16)
    assert [site["operator"] for site in report.facts["sites"]] == ["sinkhorn"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (1, 7, 120):
            torch.testing.assert_close(compiled(x[:count]), model(x[:count]), atol=1e-5, rtol=1e-5)


def of_distances(longest: int = 1000) -> nn.Module:
    """`torch.cdist` takes another way above 25 points."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = x + self.places[: x.shape[1]]
        return (-torch.cdist(x, x.flip(1))).softmax(-1) @ x

    return zoo.module(forward, places=nn.Parameter(torch.linspace(0, 1, longest)[:, None]))


@pytest.mark.parametrize("traced", [9, 30])
def test_a_harmless_branch_on_a_size_is_left_out(traced: int) -> None:
    model = of_distances()
    (program,) = capture(model, (torch.randn(3, traced, 5),), {}).programs
    for count in (9, 25, 26, 60):
        x = torch.randn(2, count, 5)
        torch.testing.assert_close(program.graph(x), model(x), atol=2e-3, rtol=0)


def test_in_half_precision_there_is_one_way() -> None:
    model = of_distances().bfloat16()
    (program,) = capture(model, (torch.randn(3, 30, 5).bfloat16(),), {}).programs
    for count in (26, 60):
        x = torch.randn(2, count, 5).bfloat16()
        torch.testing.assert_close(program.graph(x), model(x))


def test_sizes_that_were_not_tried_are_none_of_the_programs() -> None:
    model = of_distances(longest=20)
    (program,) = capture(model, (torch.randn(3, 9, 5),), {}).programs
    (place,) = (node for node in program.graph.graph.nodes if node.op == "placeholder")
    (known,), limits = known_of([place.meta["val"]])
    assert limits[str(known.sizes[1])][1] <= 25
    rule = r"holds for x \[any, up to \d+, 5\], got x: size 1 is 31"
    with pytest.raises(InputError, match=rule) as error:
        Runner(None, [program])(Batch((torch.randn(2, 31, 5),), {}, None, [0, 0]))
    assert "branches on a size" in str(error.value)


def test_a_factory_may_import_when_it_is_called_and_when_it_runs(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "asapc_lazy_one.py").write_text("WIDTH = 3\n")
    (tmp_path / "lib" / "asapc_lazy_two.py").write_text("FACTOR = 2\n")
    (tmp_path / "model.py").write_text(
        "import sys, os\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), 'lib'))\n"
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        from asapc_lazy_two import FACTOR\n"
        "        return FACTOR * super().forward(x)\n"
        "def build():\n"
        "    from asapc_lazy_one import WIDTH\n"
        "    return Net(WIDTH, WIDTH)\n"
    )
    before = list(sys.path)
    model = build_factory(f"{tmp_path}/model.py:build")
    assert model(torch.ones(1, 3)).shape == (1, 3)
    assert sys.path == before and "asapc_lazy_one" not in sys.modules
    sys.modules.pop("asapc_lazy_two")
