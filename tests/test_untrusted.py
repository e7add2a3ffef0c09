"""What files of others may make asapc do: run listed operators, work out small sizes, print text; and the
known attacks on everything that it reads, with some of those of benchmarks/fuzz.py."""

from __future__ import annotations

import importlib
import io
import json
import os
import runpy
import struct
import sys
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_zoo
import numpy as np
import onnx
import pytest
import test_onnx_in as by_hand
import torch
from safetensors.torch import save_file
from small_text import write_teacher
from steps import run

from asapc import cli
from asapc.calibration.stored import load_calibration
from asapc.errors import InputError
from asapc.formats.json_text import parse_json, read_json
from asapc.formats.sizes import is_size_expression
from asapc.inputs.data import open_data
from asapc.inputs.load import load_teacher
from asapc.inputs.onnx import growth
from asapc.inputs.onnx.host import MOST_NUMBERS
from asapc.inputs.onnx.ops import OPERATORS
from asapc.inputs.program_calls import UnlistedCallError, UnsafeError, check_calls
from asapc.inputs.program_operators import (
    GROUPS,
    OWN,
    REPLACED,
    allowed_operators,
    refused_call,
    unlisted,
)
from asapc.inputs.pt2 import load_program
from asapc.inputs.recipe import load_recipe
from asapc.inputs.weights import read_state_dict
from asapc.memory import current, give_back, peak
from asapc.models import SinkformerText, SinkformerViT
from asapc.program.call import Call
from asapc.report.gates import load_gates
from asapc.study import load_grid
from asapc.terminal.printed import escaped
from asapc.terminal.progress import PlainProgress

# --- operators ------------------------------------------------------------------------------------

ATTACK = {
    "indices that leave the tensor": "torch.ops.aten.max_pool2d_with_indices_backward.default",
    "no check of a size": "torch.ops.aten.adaptive_max_pool2d_backward.default",
    "unsafe by name": "torch.ops.aten.segment_reduce.default",
    "storage": "torch.ops.aten.set_.source_Tensor", "resized storage": "torch.ops.aten.resize_.default",
    "results in an argument": "torch.ops.aten.add.out",
    "counts in a tensor": "torch.ops.aten.repeat_interleave.Tensor", "types": "torch.ops.aten.view.dtype",
    "gradients": "torch.ops.asapc.loop_gradients.default",
}


def node(target: str, **arguments: Any) -> dict[str, Any]:
    inputs = [{"name": name, "arg": value, "kind": 1} for name, value in arguments.items()]
    return {"target": target, "inputs": inputs, "outputs": [], "metadata": {}}


def model(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"graph_module": {"graph": {"nodes": list(nodes)}}}


@pytest.mark.parametrize("target", ATTACK.values(), ids=ATTACK.keys())
def test_an_operator_that_is_not_listed_is_named(target):
    with pytest.raises(UnlistedCallError, match=target.removeprefix("torch.ops.").replace(".", r"\.")):
        check_calls(model(node(target)))
    check_calls(model(node(target)), trust=True)


@pytest.mark.parametrize("target", ["torch.ops.aten.from_file.default", "torch.ops.aten._print.default",
                                    "torch.ops.aten.save.default", "torch.os.system"])  # fmt: skip
def test_trust_is_not_for_files_and_code(target):
    with pytest.raises(UnsafeError):
        check_calls(model(node(target)), trust=True)


def test_what_is_listed_is_forward_and_writes_where_its_name_says():
    for full in allowed_operators():
        library, name, overload = full.split(".")
        schema = torch._C._get_schema(f"{library}::{name}", "" if overload == "default" else overload)
        assert not any(part in full for part in ("backward", "from_file", "print")) and overload != "out"
        assert "unsafe" not in full or full == "aten._unsafe_view.default"
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        assert len(written) <= name.endswith("_")


def test_every_name_of_the_list_is_an_operator():
    known = {full.split(".")[1] for full in allowed_operators()}
    assert {name for names in GROUPS.values() for name in names.split()} | OWN <= known


def test_models_of_attention_need_nothing_else():
    """Some of the zoo, as torch.export takes them, functional and decomposed."""
    torch.manual_seed(0)
    glued = attention_zoo.Glued()
    glued.half_steps = 2
    zoo = [attention_zoo.Fused(), attention_zoo.SlicedHard(), attention_zoo.Alternating(2), glued]
    vit = SinkformerViT(
        image_size=4, patch_size=2, num_classes=3, dim=8, depth=1, heads=2, mlp_dim=8, max_iter=2
    )
    inputs = [*map(attention_zoo.inputs_for, zoo), tuple(vit.example_inputs(3).values())]
    side_by_side = attention_zoo.module(
        lambda self, *inputs: [own(*given) for own, given in zip(self.models, inputs, strict=True)],
        models=torch.nn.ModuleList([*zoo, vit]),
    )
    with warnings.catch_warnings(action="ignore"):
        program = torch.export.export(side_by_side.eval(), tuple(inputs))
        for form in (program, program.run_decompositions({}), program.run_decompositions()):
            assert unlisted(form.graph_module) == set()
            assert len(form.graph.nodes) > 200


def test_statistics_of_fewer_channels_are_not_read_beyond_their_end(tmp_path):
    """The operator that decompositions write reads on; the file's program runs the one that checks."""
    normed = attention_zoo.module(lambda self, x: self.norm(x).relu_(), norm=torch.nn.BatchNorm1d(4))
    program = torch.export.export(normed.eval(), (torch.ones(2, 4),)).run_decompositions({})
    assert unlisted(program.graph_module) == set()
    assert {str(own.target) for own in program.graph.nodes} & REPLACED
    torch.export.save(program, tmp_path / "x.pt2")
    x = torch.randn(2, 4)
    loaded = load_program(tmp_path / "x.pt2").module(check_guards=False)
    assert torch.equal(loaded(x), program.module(check_guards=False)(x))
    called = {str(own.target) for own in loaded.graph.nodes}
    assert "aten.batch_norm.default" in called and not called & REPLACED


@pytest.fixture(scope="module")
def crashing(tmp_path_factory):
    """A program that writes where an entry of its buffer says."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        pooled = torch.nn.functional.max_pool2d(x, 2)
        return torch.ops.aten.max_pool2d_with_indices_backward(
            pooled, x, [2, 2], [2, 2], [0, 0], [1, 1], False, self.place
        )

    model = attention_zoo.module(forward)
    model.register_buffer("place", torch.full((1, 1, 2, 2), 1 << 40))
    path = tmp_path_factory.mktemp("crashing") / "x.pt2"
    torch.export.save(torch.export.export(model, (torch.ones(1, 1, 4, 4),)), path)
    return path


def test_a_program_that_would_write_outside_is_one_message(crashing, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", x=np.ones((1, 1, 4, 4), np.float32))
    assert cli.main(["inspect", str(crashing), "--data", str(tmp_path / "x.npz")]) == 2
    message = capsys.readouterr().err
    assert "aten.max_pool2d_with_indices_backward.default" in message and "--trust" in message
    assert load_program(crashing, trust=True) is not None
    assert load_teacher(str(crashing), trust=True).program is not None


GROWING_NUMBERS = {
    "squares": [node("_operator.mul", a={"as_sym_int": {"as_name": f"n{i}"}},
                     b={"as_sym_int": {"as_name": f"n{i}"}}) for i in range(40)],
    "power": [node("_operator.pow", a={"as_int": 10}, b={"as_int": 10**9})],
    "computed power": [node("_operator.pow", a={"as_int": 10}, b={"as_sym_int": {"as_name": "n"}})],
    "text": [node("_operator.mod", a={"as_string": "%99999999999d"}, b={"as_int": 5})],
    "a list many times": [node("_operator.mul", a={"as_ints": [1]}, b={"as_int": 10**10})],
    "many digits": [node("torch.ops.aten.add.Scalar", other={"as_int": 10**400})],
    "sparse": [node("torch.ops.aten.zeros.default", layout={"as_layout": 1})],
    "no memory": [node("torch.ops.aten.zeros.default", device={"as_device": {"type": "meta"}})],
    "a factor of nothing": [node("torch.ops.aten.upsample_nearest2d.vec",
                                 scale_factors={"as_floats": [1e-300, 1.0]})],
    "a computed factor": [node("torch.ops.aten.upsample_nearest2d.default",
                               scales_h={"as_sym_float": {"as_name": "f"}})],
    "an unseen graph": [node("torch.ops.aten.add.Tensor", self={"as_graph": {"graph": {"nodes": [
        node("torch.os.system")]}}})],
}  # fmt: skip


@pytest.mark.parametrize("nodes", GROWING_NUMBERS.values(), ids=GROWING_NUMBERS.keys())
def test_arguments_are_looked_at(nodes):
    for number, own in enumerate(nodes):
        own["outputs"] = [{"as_sym_int": {"as_name": f"n{number + 1}"}}]
    with pytest.raises(UnsafeError):
        check_calls(model(*nodes))


def test_the_sizes_that_torch_writes_stay_small_enough():
    numbers = [
        node("_operator.mul", a={"as_sym_int": {"as_name": "n"}}, b={"as_sym_int": {"as_name": "m"}}),
        node("_operator.pow", a={"as_sym_int": {"as_name": "n"}}, b={"as_int": 3}),
        node("_operator.pow", a={"as_sym_float": {"as_name": "f"}}, b={"as_float": 0.5}),
        node("torch.sym_max", a={"as_sym_int": {"as_name": "n"}}, b={"as_int": 3}),
    ]
    check_calls(model(*numbers))
    assert refused_call("aten.upsample_bilinear2d.vec", {"scale_factors": [2.0, 0.5]}) is None
    assert refused_call("aten.div.Tensor_mode", {"rounding_mode": "floor"}) is None


# --- sizes ----------------------------------------------------------------------------------------

S = [f"Symbol('s{i}', positive=True, integer=True)" for i in range(12)]
SUM = f"Add({', '.join(S[:10])})"
SLOW = {
    "powers of powers": "(" * 9 + "9" + ")**8" * 9,
    "digits": "Float('0.1', 4000000000)", "precision": "Float('0.1', precision=4000000000)",
    "a remainder": f"Mod(Pow({SUM}, Integer(8)), Pow({SUM}, Integer(7)))",
    "a comparison": f"Eq(Pow({SUM}, Integer(3)), Pow({SUM}, Integer(2)))",
    "many to compare": f"Max({', '.join(f'Add({a}, {b})' for a in S for b in S)})"[:4000],
    "a computed power": f"Pow({S[0]}, Mul({S[1]}, {S[2]}))", "no end": "Add(" * 1000,
    "unbalanced": "Add(s0, s1))", "a list": "s0, s1", "nothing": "",
    "an attribute": "Symbol('s0').__class__", "division by zero": "Rational(1, 0)",
    "attributes": "s0" + ".s0" * 1300, "a sum": "s0" + "+s0" * 1300, "words": "not " * 1000 + "s0",
    "choices": "s0 if s0 else " * 250 + "s0", "signs": "- " * 2000 + "1",
}


@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW.keys())
def test_a_size_that_takes_long_is_refused_at_once(text):
    start = time.process_time()
    assert not is_size_expression(text)
    assert time.process_time() - start < 0.05


@pytest.mark.parametrize("text", [
    f"Add(FloorDiv(Add({S[0]}, Integer(-3)), Integer(2)), Integer(1))",
    f"Add(Pow({S[0]}, Integer(2)), Mul(Integer(2), Min({S[1]}, {S[0]})))",
    f"Mod(Mul({S[0]}, {S[1]}), Integer(64))", f"Mul(Float('1.5', precision=53), ToFloat({S[0]}))",
    f"FloatPow(ToFloat({S[0]}), Float('0.5', precision=53))", f"Max(Integer(1), Add({S[0]}, Integer(1)))",
    f"BitwiseFn_bitwise_and({S[0]}, Integer(1))", "s77", "u0", "4", "Integer(4)", "true",
    f"GreaterThan({S[0]}, Integer(2))",
    "Max(Integer(1), Add(FloorDiv(Add(" * 12 + S[0] + ", Integer(-3)), Integer(2)), Integer(1)))" * 12,
])  # fmt: skip
def test_a_size_that_torch_writes_is_read(text):
    import sympy
    from torch.utils._sympy import functions

    assert is_size_expression(text)
    known = {name: own for name, own in vars(functions).items() if isinstance(own, type)}
    start = time.process_time()
    sympy.sympify(text, locals=known)
    assert time.process_time() - start < 5


# --- ONNX -----------------------------------------------------------------------------------------


def grown(
    path: Path, kind: str, count: int, start: str = "x", inputs: Callable[[str], list[str]] | None = None,
    **attributes: Any,
) -> Path:  # fmt: skip
    """A chain of one operator."""
    weights = {"w": np.ones((8, 4), np.float32), "ids": np.array([2, 2]), "two": np.array([2, 2]),
               "row": np.ones((1, 1 << 17), np.float32),
               "column": np.ones((1 << 17, 1), np.float32)}  # fmt: skip
    initial = [onnx.numpy_helper.from_array(own, name) for name, own in weights.items()]
    nodes, last = [], start
    for number in range(count):
        names = [last, last] if inputs is None else inputs(last)
        outputs = [f"n{number}", f"m{number}"] if kind == "Split" else [f"n{number}"]
        nodes.append(by_hand.node(kind, names, *outputs, **attributes))
        last = outputs[0]
    return by_hand.saved(
        by_hand.model_of(nodes, weights=initial, outputs=[by_hand.info(last, None)]), path.parent
    )


CHAINS: dict[str, Callable[[Path], Path]] = {
    "Concat of an input": lambda p: grown(p, "Concat", 34, axis=0),
    "Concat of a weight": lambda p: grown(p, "Concat", 34, "w", axis=0),
    "Concat of a shape": lambda p: grown(p, "Concat", 40, "ids", axis=0),
    "Split": lambda p: grown(p, "Split", 1, inputs=lambda x: [x], num_outputs=10**9, axis=0),
    "Tile": lambda p: grown(p, "Tile", 20, inputs=lambda x: [x, "two"]),
    "Pad": lambda p: grown(p, "Concat", 12, axis=1),
    "Add": lambda p: grown(p, "Add", 1, inputs=lambda x: ["row", "column"]),
    "MatMul": lambda p: grown(p, "MatMul", 1, inputs=lambda x: ["column", "row"]),
    "Max": lambda p: grown(p, "Max", 1, inputs=lambda x: ["column", "row"]),
    "Einsum": lambda p: grown(p, "Einsum", 1, inputs=lambda x: ["column", "row"], equation="ab,cd->ad"),
}


def memory_from_here() -> int:
    """What the process holds; from now on peak() is of what it takes from here on."""
    give_back()
    Path("/proc/self/clear_refs").write_text("5")
    return current()


@pytest.mark.parametrize("name", [name for name in CHAINS if name != "Pad"])
def test_growth_is_stopped_before_the_memory_is_taken(tmp_path, monkeypatch, name):
    limit = 1 << 27
    monkeypatch.setattr(growth, "LEAST", limit)  # to fill a GiB takes seconds
    own = load_teacher(str(CHAINS[name](tmp_path / "m.onnx"))).model
    before = memory_from_here()
    told = r"at once|are no shape|outputs"
    with pytest.raises((InputError, RuntimeError), match=told), torch.no_grad():
        own(torch.ones(2, 4))
    assert peak() - before < 1.3 * limit


def test_what_does_not_grow_much_is_run(tmp_path):
    own = load_teacher(str(CHAINS["Pad"](tmp_path / "m.onnx"))).model
    with torch.no_grad():
        assert own(torch.ones(2, 4)).shape == (2, 4 * 2**12)


def test_the_least_integer_divided_by_minus_one_ends_nothing():
    least, minus = torch.tensor([-(2**63), 7, -7]), torch.tensor([-1, -2, 2])
    assert OPERATORS["Div"](least, minus).tolist() == [-(2**63), -3, -3]
    exact = torch.tensor([7, -7, 6, 0]), torch.tensor([2, 2, -4, 3])
    expected = torch.div(*exact, rounding_mode="trunc")
    assert torch.equal(OPERATORS["Div"](*exact), expected)


def test_shapes_stay_short():
    with pytest.raises(ValueError, match="no shape"):
        OPERATORS["Concat"]([1] * MOST_NUMBERS, [1], axis=0)


def of_functions(body: list[onnx.NodeProto], calls: int) -> onnx.ModelProto:
    """A function of a and b, called so many times in turn."""
    opset = [onnx.helper.make_opsetid("", 18)]
    function = onnx.helper.make_function("own", "F", ["a"], ["b"], body, opset)
    nodes = [by_hand.node("F", [f"x{i}"], f"x{i + 1}", domain="own") for i in range(calls)]
    inputs, outputs = ([by_hand.info(name, [1])] for name in ("x0", f"x{calls}"))
    return by_hand.model_of(
        nodes, inputs=inputs, outputs=outputs, weights=[], functions=[function], extra=["own"]
    )


def test_functions_do_not_copy_a_weight_many_times(tmp_path):
    weight = onnx.numpy_helper.from_array(np.ones(1 << 18, np.float32), "w")
    body = [onnx.helper.make_node("Constant", [], ["w"], value=weight), by_hand.node("Neg", ["a"], "b")]
    with pytest.raises(InputError, match="much larger"):
        load_teacher(str(by_hand.saved(of_functions(body, 200), tmp_path)))


EXTRA = ("onnx_ir", "onnxscript", "onnxruntime")


def test_functions_are_read_without_the_extra(tmp_path):
    path = by_hand.saved(of_functions([by_hand.node("Add", ["a", "a"], "b")], 1), tmp_path)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for known in list(sys.modules):
                if known.startswith(("asapc.onnx", "asapc.inputs", "asapc.formats", *EXTRA)):
                    del sys.modules[known]
            for name in EXTRA:
                sys.modules[name] = None  # type: ignore[assignment]
            importlib.import_module("asapc.inputs.load").load_teacher(str(path))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


# --- what is printed ------------------------------------------------------------------------------

EVIL = "a\x1b]0;title\x07\x1b[2J\u202eb\x9b31m"


def test_tables_notes_json_and_errors_are_escaped(capsys):
    from asapc import session
    from asapc.report.tables import Table

    def table(result: Any) -> list[Table]:
        return [Table(EVIL, ("site",), ((EVIL,),))]

    def body(run: session.Session) -> None:
        run.show({"name": EVIL}, lambda _: [EVIL], table)
        run.note(EVIL)
        warnings.warn(EVIL, stacklevel=1)
        raise InputError(EVIL, got=EVIL + "\nasapc: all is well", help=EVIL)

    for json_output, verbose in ((False, False), (False, True), (True, False)):
        with warnings.catch_warnings(action="always"):
            assert session.run(
                body, json=json_output, quiet=False, debug=json_output, verbose=verbose
            ) == 2  # fmt: skip
        shown = capsys.readouterr()
        assert escaped(shown.out) == shown.out and escaped(shown.err) == shown.err
        assert "\nasapc: all is well" not in shown.err
        if json_output:
            assert json.loads(shown.out) == {"name": EVIL}
    stream = io.StringIO()
    PlainProgress(stream).note(EVIL)
    assert escaped(stream.getvalue()) == stream.getvalue()


def test_plain_text_stays():
    text = "layers.0\tééé 日本 → ✓\n"
    assert escaped(text) == text


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["device", "large"])
def test_json_of_others(tmp_path, kind):
    path = tmp_path / "some.json"
    if kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[" + "1, " * 10**6 + "1]")
    before, start = memory_from_here(), time.monotonic()
    with pytest.raises((OSError, ValueError)):
        read_json(path, 1 << 20)
    assert peak() - before < 200 << 20 and time.monotonic() - start < 20


def test_json_has_a_size(tmp_path):
    (tmp_path / "x.json").write_text("[1, 2, 3]")
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_json(tmp_path / "x.json", 4)
    (tmp_path / "x.json").write_text("NaN")
    with pytest.raises(ValueError, match="NaN is not JSON"):
        read_json(tmp_path / "x.json", strict=True)


@pytest.mark.parametrize("default", [{"tensor": 0}, {"size": "s0"}, {"kind": "list", "items": [{
    "tensor": 3}]}, {"kind": "list", "items": [{"default": "x"}]}], ids=str)  # fmt: skip
def test_a_default_in_a_manifest_is_plain_data(default):
    x = {"name": "x", "kind": "KEYWORD_ONLY", "default": default, "captured": {"tensor": 0}}
    call = {"parameters": [x], "output": {"tensor": 0}, "tensors": [{"kind": "float", "sizes": [2]}]}
    with pytest.raises(InputError, match="a default is plain data"):
        Call.from_json(call, "call")


# --- data -----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    write_teacher(folder / "teacher", n_layers=1, max_iter=2)
    (folder / "recipe.yaml").write_text("{operator: asap, features: [norm], batch_size: 8}")
    return folder


def tokens() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(1, 40, (120, 12))


def calibrate(work: Path, data: str, out: str = "calibration") -> int:
    where = ("--data", work / data, "-o", work / out, "--recipe", work / "recipe.yaml")
    return run("calibrate", work / "teacher", *where, "--quiet")


def test_an_id_that_no_table_has(work, capsys):
    for example, column, value in [(1, 5, 99), (100, 0, 2**62), (90, 7, -5)]:
        ids = tokens()
        ids[example, column] = value
        np.savez(work / "bad.npz", inputs=ids)
        assert calibrate(work, "bad.npz", f"refused {example}") == 2
        message = capsys.readouterr().err
        assert f"example {example} (counted from 0): inputs[{column}] = {value}" in message
    np.savez(work / "bad.npz", inputs=tokens() + 2**62)  # no example has right ones
    assert calibrate(work, "bad.npz", "refused") == 2
    assert "example 0 (counted from 0): inputs[" in capsys.readouterr().err


def test_all_files_of_a_calibration_can_be_read_by_the_same_people(work):
    np.savez(work / "good.npz", inputs=tokens())
    assert calibrate(work, "good.npz") == 0
    modes = {path.name: path.stat().st_mode & 0o777 for path in (work / "calibration").iterdir()}
    assert set(modes.values()) == {0o644}, modes


# --- known attacks ---------------------------------------------------------------------------------

FUZZ = Path(__file__).parents[1] / "benchmarks" / "fuzz.py"


def refused(action: Callable[[], Any], *parts: str) -> str:
    """The InputError's message; the memory it took is far below what the input asked for."""
    before = peak()
    with pytest.raises(InputError) as caught:
        action()
    assert peak() - before < 600 << 20
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert len(message) < 2500
    return message


def test_some_cases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(FUZZ), "--count", "6", "--seed", "11"])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # of other tests too
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FUZZ), run_name="__main__")
    told = capsys.readouterr()
    assert ended.value.code == 0 and "6 cases, 0 failures" in told.out, told.err[-3000:]


# --- recipes, gates and grids ---------------------------------------------------------------------

YAML = {
    "aliases": ("a: &a [1, 1]\n" + "".join(f"x{i}: &x{i} [{'*' + ('a' if i == 0 else f'x{i - 1}')}, "
                f"{'*' + ('a' if i == 0 else f'x{i - 1}')}]\n" for i in range(60)), "aliases counted"),
    "cycle": ("seed: &a [*a]", "not valid YAML"),
    "code": ("!!python/object/apply:os.system ['exit 1']", "not valid YAML"),
    "deep": ("seed: " + "[" * 3000, "not valid YAML"),
    "wrong tag": ("seed: !!int x", "not valid YAML"),
    "many digits": ("seed: " + "9" * 5000, "not valid YAML"),
    "sexagesimal": ("seed: " + "1:" * 50000 + "1", "64 bits"),
    "long": ("# " + "x" * 2**18, "bytes are read"),
    "latin": ("seed: é".encode("latin-1"), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "part"), YAML.values(), ids=YAML.keys())
def test_yaml(tmp_path: Path, text: str | bytes, part: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(lambda: load_recipe(path), part)
    if len(text) < 2000:  # others take seconds
        refused(lambda: load_gates(path), part)
        refused(lambda: load_grid(path), part)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.yaml")
    (tmp_path / "calibration").mkdir()
    os.mkfifo(tmp_path / "calibration" / "calibration.json")
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "config.json")
    refused(lambda: load_recipe(tmp_path / "x.yaml"), "not a file")
    refused(lambda: load_calibration(tmp_path / "calibration"), "not a file")
    refused(lambda: load_teacher(str(tmp_path / "model")), "config.json")
    os.mkfifo(tmp_path / "x.npz")
    refused(lambda: open_data(str(tmp_path / "x.npz"), None))


def test_combinations_are_counted_before_they_are_made(tmp_path: Path) -> None:
    many = "[" + ", ".join(map(str, range(1, 51))) + "]"
    block = f"{{ridge: {many}, c_transforms: {many}, seed: {many}, ridge_mode: [risk, direct]}}"
    (tmp_path / "grid.yaml").write_text(f"blocks: [{block}]")
    refused(lambda: load_grid(tmp_path / "grid.yaml"))
    (tmp_path / "recipe.yaml").write_text(f"candidates: [{{ridge: {many}, c_transforms: {many}}}]")
    refused(lambda: load_recipe(tmp_path / "recipe.yaml"), "at most")
    for text in ("pivots: 1000000000000", "slices: 99999999", "features: ['sliced:99999999999']",
                 f"features: ['sliced:{'9' * 5000}']"):  # fmt: skip
        (tmp_path / "recipe.yaml").write_text(text)
        refused(lambda: load_recipe(tmp_path / "recipe.yaml"))


@pytest.mark.parametrize("text", [
    "[" * 10**6, '{"a":' * 10**5, "9" * 5000, '"\\ud800"', b"\xff", b"", '"\ud800"', '{"a": 1} x',
], ids=lambda text: ascii(text)[:12])  # fmt: skip
def test_json(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


# --- models ---------------------------------------------------------------------------------------

TEXT = {"vocab_size": 9, "seq_len": 4, "d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8}
VIT = {"image_size": 4, "patch_size": 2, "num_classes": 3, "dim": 8, "depth": 1, "heads": 2, "mlp_dim": 8}
SIZES = [
    *[("sinkformer-text", {key: 10**12}) for key in ("vocab_size", "seq_len", "n_layers", "max_iter")],
    *[("sinkformer-vit", {key: 10**12}) for key in ("image_size", "dim", "depth", "dim_head")],
    ("sinkformer-vit", {"image_size": 10**12, "patch_size": 10**12}),
    ("sinkformer-vit", {"patch_size": 0}), ("sinkformer-text", {"d_model": -8}),
    ("sinkformer-text", {"d_model": 2**70}), ("sinkformer-text", {"d_model": 40000, "d_ff": 40000}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), SIZES, ids=lambda value: str(value)[:40])
def test_sizes_of_a_model_that_its_weights_do_not_have(
    tmp_path: Path, name: str, change: dict[str, Any]
) -> None:
    base = TEXT if name == "sinkformer-text" else VIT
    model = SinkformerText(**TEXT) if base is TEXT else SinkformerViT(**VIT)  # type: ignore[arg-type]
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name, **base, **change}))
    refused(lambda: load_teacher(str(tmp_path)))


@pytest.mark.parametrize("change", [
    {"shape": [10**12]}, {"shape": [2**40, 2**40]}, {"data_offsets": [0, 10**15]},
    {"data_offsets": [8, 0]}, {"dtype": "X"}, {"dtype": "F4"}, {"shape": [-1]}, {"length": 5},
    {"length": 2**63}, {"shape": [10**12, 0], "data_offsets": [0, 0]},
], ids=str)  # fmt: skip
def test_a_safetensors_header_that_lies(tmp_path: Path, change: dict[str, Any]) -> None:
    """The last one tells the truth: a million million examples without a number."""
    header = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **change}
    length, data = header.pop("length", None), bytes(header["data_offsets"] != [0, 0] and 8)
    text, path = json.dumps({"x": header}).encode(), tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length or len(text)) + text + data)
    refused(lambda: open_data(str(path), None), *["every example"][: not data])
    if data:
        refused(lambda: read_state_dict(path))


def test_checkpoints_that_are_larger_than_their_file(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"a": torch.ones(1).expand(2**40)}, path)
    refused(lambda: read_state_dict(path), "bytes of tensors")
    torch.save({"a": torch.eye(3).to_sparse()}, path)
    refused(lambda: read_state_dict(path), "dense")
    torch.save({"a": torch.ones(2, device="meta")}, path)
    refused(lambda: read_state_dict(path))
    torch.save({"a": torch.zeros(2**20)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w", 8) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    refused(lambda: read_state_dict(path), "unpack to")
    shared = torch.ones(10)
    torch.save({"a": shared, "b": shared}, path)
    assert len(read_state_dict(path)) == 2


# --- npz ------------------------------------------------------------------------------------------


def npz(path: Path, header: str, *, data: bytes = bytes(64), version: bytes = b"\1\0") -> str:
    length = struct.pack("<H" if version == b"\1\0" else "<I", len(header) + 1)
    content = b"\x93NUMPY" + version + length + header.encode() + b"\n" + data
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", content)
    return str(path)


HEADERS = {
    "huge": "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}",
    "empty items": "{'descr': '|S0', 'fortran_order': False, 'shape': (1000000000000,)}",
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    "code": "{'descr': __import__('os').system('exit 1'), 'fortran_order': False, 'shape': (1,)}",
    "deep": "{'descr': " + "(" * 500 + ")" * 500 + ", 'fortran_order': False, 'shape': (1,)}",
    "short": "{'descr': '<f4', 'fortran_order': False, 'shape': (15,)}",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_an_npy_header_that_lies(tmp_path: Path, header: str) -> None:
    for version in (b"\1\0", b"\7\0"):
        path = npz(tmp_path / "x.npz", header, version=version)
        refused(lambda: open_data(path, None))  # noqa: B023


# 256 MB, of which the size is refused; of the others any size is, since numpy does not write them.
@pytest.mark.parametrize(
    ("method", "count"),
    [(zipfile.ZIP_DEFLATED, 2**25), (zipfile.ZIP_BZIP2, 2**10), (zipfile.ZIP_LZMA, 2**10)],
)
def test_a_bomb(tmp_path: Path, method: int, count: int) -> None:
    path = tmp_path / "x.npz"
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(count, np.int64))
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x.npy", buffer.getvalue())
    del buffer
    refused(lambda: open_data(str(path), None))


def test_many_members_that_share_their_bytes(tmp_path: Path) -> None:
    """The directory lists one stored array a thousand times."""
    path = tmp_path / "x.npz"
    np.savez(path, x=np.zeros(2**17, np.int64))
    content = path.read_bytes()
    start = content.index(b"PK\1\2")
    end = content.index(b"PK\5\6")
    entry = content[start:end]
    tail = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1000, 1000, len(entry) * 1000, start, 0)
    path.write_bytes(content[:start] + entry * 1000 + tail)
    refused(lambda: open_data(str(path), None), "unpack to")


def test_data_that_compresses_well_is_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((1000, 512), np.int64))
    assert open_data(str(tmp_path / "x.npz"), None).examples == 1000
