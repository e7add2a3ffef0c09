"""Teachers from ONNX files: the conventions of the PyTorch model, the values behind them, every error."""

from __future__ import annotations

import contextlib
import copy
import inspect as inspection
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxscript import FLOAT, script
from onnxscript import opset18 as op
from torch import Tensor, nn
from torch.fx import Interpreter

from asapc.errors import InputError, VerificationError
from asapc.inputs.data import Batch
from asapc.inputs.load import load_teacher
from asapc.inputs.onnx import ops
from asapc.inputs.onnx.graph import MAX_DEPTH
from asapc.inputs.onnx.load import MAX_CALLS
from asapc.inputs.onnx.module import OnnxModule, value_nodes
from asapc.inputs.onnx.session import open_session
from asapc.inputs.onnx.verify import check_import
from asapc.inputs.teacher import Teacher
from asapc.models import SinkformerText
from asapc.models.esp import ESPFormerViT
from asapc.models.lot import LOTFormerText
from asapc.passes.analyse import Analysis, analyse
from asapc.passes.capture import capture

pytest.importorskip("onnxruntime")

TEXT = {
    "vocab_size": 30, "seq_len": 9, "d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8,
    "num_classes": 3,
}  # fmt: skip


def export(model: nn.Module, args: tuple[Any, ...], path: Path, axes: int = 2) -> Path:
    """By torch's older exporter (test_onnx_edit.py has a file of the new one).  axes: 2 where the length
    is dynamic, too, and not only the batch."""
    names = list(inspection.signature(model.forward).parameters)
    dims = {0: "batch", 1: "length"} if axes == 2 else {0: "batch"}
    settings: dict[str, Any] = {"dynamic_axes": dict.fromkeys(names, dims), "opset_version": 17}
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(model, args, path, dynamo=False, input_names=names, **settings)
    return path


def of(teacher: Teacher, args: tuple[Any, ...]) -> Analysis:
    return analyse(teacher, Batch(args, {}, None, [0] * len(args[0])))


def in_torch(model: nn.Module) -> Teacher:
    return Teacher(model, None, "module", "", False, None)


def assert_same(got: Any, wanted: Any) -> None:
    """Conventions, to the rounding of constants that ONNX holds in float32."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            assert_same(got[key], wanted[key])
    elif isinstance(wanted, float):
        assert got == pytest.approx(wanted, rel=1e-6)
    elif not (isinstance(wanted, str) and "*" in wanted):  # a factor, whose terms are compared
        assert got == wanted


def built_in(kind: Any, axes: int, **sizes: int) -> Callable[[], tuple[nn.Module, tuple[Any, ...], int]]:
    def make() -> tuple[nn.Module, tuple[Any, ...], int]:
        model = kind(**sizes)
        return model, tuple(model.example_inputs(3).values()), axes

    return make


VIT = {"image_size": 6, "patch_size": 2, "num_classes": 3, "dim": 8, "depth": 1, "heads": 2, "mlp_dim": 8,
       "channels": 1, "dim_head": 4}  # fmt: skip
TEACHERS = {
    "lot_text": built_in(LOTFormerText, 2, **TEXT, n_pivots=3),
    "esp_vit": built_in(ESPFormerViT, 1, **VIT),
}  # fmt: skip


@pytest.mark.parametrize("name", TEACHERS)
def test_conventions_are_those_of_the_pytorch_model(name, tmp_path):
    torch.manual_seed(1)
    model, args, axes = TEACHERS[name]()
    expected = of(in_torch(model.eval()), args)
    teacher = load_teacher(str(export(model, args, tmp_path / "m.onnx", axes)))
    found = of(teacher, args)
    assert found.capture.kind == "whole" and found.sites
    assert [site.name for site in found.sites] == [site.name for site in expected.sites]
    assert [left.reason for left in found.left_alone] == [left.reason for left in expected.left_alone]
    for own, wanted in zip(found.sites, expected.sites, strict=True):
        assert_same(own.convention.to_json(), wanted.convention.to_json())
        assert own.heads == wanted.heads and own.head_dim == wanted.head_dim


def loop_model() -> onnx.ModelProto:
    """Softmax, then columns and rows in turn, in a Loop of its own with an early stop."""
    generator = torch.Generator().manual_seed(0)
    wq, wk, wv = (
        numpy_helper.from_array(torch.randn(8, 8, generator=generator).numpy() * 0.5, name)
        for name in ("wq", "wk", "wv")
    )

    @script()
    def stopping(x: FLOAT[None, None, 8]) -> FLOAT[None, None, 8]:  # type: ignore[valid-type]
        heads = op.Constant(value_ints=[0, 0, 2, 4])
        q = op.Transpose(op.Reshape(op.MatMul(x, op.Constant(value=wq)), heads), perm=[0, 2, 1, 3])
        k = op.Transpose(op.Reshape(op.MatMul(x, op.Constant(value=wk)), heads), perm=[0, 2, 3, 1])
        v = op.Transpose(op.Reshape(op.MatMul(x, op.Constant(value=wv)), heads), perm=[0, 2, 1, 3])
        weights = op.Softmax(op.MatMul(q, k) * 0.5, axis=-1)
        for _ in range(3):
            before = weights
            weights = weights / op.ReduceSum(weights, op.Constant(value_ints=[-2]))
            weights = weights / op.ReduceSum(weights, op.Constant(value_ints=[-1]))
            small = op.ReduceMax(op.Abs(weights - before), keepdims=0) < 1e-12
            if small:
                break
        out = op.Transpose(op.MatMul(weights, v), perm=[0, 2, 1, 3])
        return op.Reshape(out, op.Constant(value_ints=[0, 0, -1]))

    return stopping.to_model_proto()


def test_a_loop_of_onnx_is_unrolled_and_identified(tmp_path):
    path = tmp_path / "loop.onnx"
    onnx.save(loop_model(), path)
    found = of(load_teacher(str(path)), (torch.randn(3, 6, 8),))
    convention = found.sites[0].loop
    assert (convention.half_steps, convention.first_side, convention.last_side) == (7, "row", "row")
    assert convention.score_multiplier == pytest.approx(0.5) and convention.early_stop


def test_every_value_is_found_in_the_captured_graph(tmp_path):
    torch.manual_seed(1)
    model, args, axes = built_in(SinkformerText, 2, **TEXT, max_iter=4)()
    path = export(model.eval(), args, tmp_path / "m.onnx", axes)
    teacher = load_teacher(str(path))
    module = teacher.model
    graph = capture(module, args, {}).programs[0].graph
    found = value_nodes(graph, module)
    assert {value.name for value in module.inputs} <= found.keys()
    assert {*module.graph.outputs} <= found.keys()
    assert {name for key, name in module.weights.items()} & found.keys()
    held: dict[Any, Any] = {}

    class Recorder(Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            held[n] = super().run_node(n)
            return held[n]

    names = [name for node in module.graph.nodes for name in node.outputs if name in found]
    assert len(names) > 30
    with torch.no_grad():
        Recorder(graph).run(*args, enable_io_processing=False)
        for name, value in zip(names, module.values(args, names), strict=True):
            assert held[found[name]].shape == value.shape and torch.equal(held[found[name]], value), name


# Small models by hand


def info(name: str, shape: Any, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def node(op: str, inputs: list[str], *outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [*outputs], name=f"the_{outputs[0]}", **attributes)


WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)


def model_of(
    nodes: list[onnx.NodeProto] | None = None, *, inputs: Any = None, outputs: Any = None,
    weights: Any = None, opset: int = 18, functions: Any = (), extra: Any = (),
) -> onnx.ModelProto:  # fmt: skip
    """y = exp(x @ w) unless told otherwise."""
    if nodes is None:
        nodes = [node("MatMul", ["x", "w"], "product"), node("Exp", ["product"], "y")]
    weights = [numpy_helper.from_array(WEIGHT, "w")] if weights is None else weights
    inputs = [info("x", ["batch", 4])] if inputs is None else inputs
    graph = helper.make_graph(nodes, "g", inputs, outputs or [info("y", None)], weights)
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in extra)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


def parsed(nodes: str, *functions: str, outputs: str = "y", weights: str = "") -> onnx.ModelProto:
    """In ONNX's text form, of an input x [batch, 4]. Functions are of the domain `mine`."""
    bodies = [f'<domain: "mine", opset_import: ["" : 18, "mine" : 1]> {own}' for own in functions]
    graph = f"g (float[batch, 4] x) => ({outputs}) <{weights}> {{ {nodes} }}"
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 18, "mine" : 1]> {graph} {" ".join(bodies)}'
    )


def saved(model: onnx.ModelProto, folder: Path, name: str = "m.onnx") -> Path:
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return path


def loaded(model: onnx.ModelProto, folder: Path) -> OnnxModule:
    return load_teacher(str(saved(model, folder))).model


def refused(model: onnx.ModelProto | Path, folder: Path) -> str:
    path = model if isinstance(model, Path) else saved(model, folder)
    with pytest.raises(InputError) as caught:
        load_teacher(str(path))
    message = str(caught.value)
    assert message.startswith(str(path))
    return message


def external(model: onnx.ModelProto, location: str, length: int | None = None, offset: str = "0") -> None:
    """The weight moves into a file of its own; length of what is declared, None to declare none."""
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            weight.external_data.add(key=key, value=str(value))


def test_arguments_are_named_after_the_inputs(tmp_path):
    nodes = [node("Max", ["class", "in.1", "in_1", "2x"], "y")]
    inputs = [info(name, ["n"]) for name in ("class", "in.1", "in_1", "2x")]
    module = loaded(model_of(nodes, inputs=inputs, weights=[]), tmp_path)
    assert list(inspection.signature(module.forward).parameters) == ["class_", "in_1", "in_1_", "_2x"]
    x = torch.ones(3)
    assert torch.equal(module(x, 2 * x, _2x=4 * x, in_1_=3 * x), 4 * x)
    assert torch.equal(copy.deepcopy(module)(x, x, x, x), x)


def test_weights_that_are_inputs_too_are_weights(tmp_path):
    inputs = [info("x", ["batch", 4]), info("w", [4, 3])]
    module = loaded(model_of(inputs=inputs), tmp_path)
    assert list(inspection.signature(module.forward).parameters) == ["x"]
    assert [name for name, p in module.named_parameters() if not p.requires_grad] == ["w_w"]


def test_scopes(tmp_path):
    """Of both exporters, and of a model that says nothing."""
    from asapc.inputs.onnx.graph import scope_of

    for name, scope in (
        ("/encoder/layers.0/attn/MatMul", "encoder.layers.0.attn"), ("/MatMul", ""),
        ("/layers/layers.0/layers.0.1/fn/MatMul", "layers.0.1.fn"), ("attention", "attention"), ("", "y"),
    ):  # fmt: skip
        assert scope_of(helper.make_node("MatMul", [], ["y"], name=name)) == scope
    new = helper.make_node("MatMul", [], ["y"], name="node_7")
    scopes = "['', 'layers', 'layers.0.attn', 'matmul']"
    new.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    assert scope_of(new) == "layers.0.attn"
    new.metadata_props[0].value = "__import__('os')"
    assert scope_of(new) == "node_7"


def test_scopes_named_like_attributes_of_a_module(tmp_path):
    names = ["training", "forward", "state_dict", "graph", "_blocks", "w_w", "_modules", "a.training"]
    nodes = [
        helper.make_node("Neg", [f"v{i}"], [f"v{i + 1}"], name=f"/{name.replace('.', '/')}/Neg")
        for i, name in enumerate([*names, "training"])
    ]
    nodes = [node("MatMul", ["x", "w"], "v0"), *nodes, node("Identity", [f"v{len(nodes)}"], "y")]
    module = loaded(model_of(nodes), tmp_path)
    x = torch.randn(2, 4)
    assert torch.equal(module.train().eval()(x), -(x @ torch.as_tensor(WEIGHT)))
    found = {name for name, _ in module.named_modules()}
    assert {"training_", "forward_", "graph_", "_blocks_", "w_w_", "a.training_"} <= found
    assert capture(module, (x,), {}).kind == "whole"


def test_transposes_that_an_exporter_has_fused_are_taken_apart(tmp_path):
    """A sort of t and a distance of q would else have no q in common."""
    orders = {"t": [0, 2, 3, 1], "q": [0, 2, 1, 3]}
    fused = [node("Transpose", ["x"], name, perm=order) for name, order in orders.items()]
    fused.append(node("MatMul", ["q", "t"], "y"))
    module = loaded(model_of(fused, inputs=[info("x", ["batch", 5, 2, 4])], weights=[]), tmp_path)
    assert [own.inputs for own in module.graph.nodes] == [("x",), ("q",), ("q", "t")]
    x = torch.randn(3, 5, 2, 4)
    assert torch.equal(module(x), x.transpose(1, 2) @ x.transpose(1, 2).transpose(2, 3))


def test_fingerprints(tmp_path):
    plain = model_of()

    def print_of(model: onnx.ModelProto, name: str = "m.onnx") -> str:
        return load_teacher(str(saved(model, tmp_path, name))).fingerprint

    own = print_of(plain)
    assert print_of(plain, "other.onnx") == own
    outside = copy.deepcopy(plain)
    (tmp_path / "w.bin").write_bytes(b"\0" * 8 + WEIGHT.tobytes())
    external(outside, "w.bin", WEIGHT.nbytes, "8")
    assert print_of(outside) == own
    commented = copy.deepcopy(plain)
    commented.doc_string, commented.graph.node[0].doc_string = "a", "b"
    assert print_of(commented) == own
    others = [
        model_of(opset=17), model_of(weights=[numpy_helper.from_array(WEIGHT + 1, "w")]),
        model_of([node("MatMul", ["x", "w"], "product"), node("Tanh", ["product"], "y")]),
        model_of([node("MatMul", ["x", "w"], "z"), node("Exp", ["z"], "y")]),
        model_of(inputs=[info("x", [2, 4])]),
    ]  # fmt: skip
    assert len({own, *(print_of(model) for model in others)}) == len(others) + 1


def test_functions_of_the_model_are_written_out(tmp_path):
    """One of them of another opset."""
    model = parsed(
        "z = mine.Twice (x) w = mine.Twice (z) y = mine.Mean (w)",
        "Twice (a) => (b) { b = Add (a, a) }", "Mean (a) => (b) { b = ReduceMean <axes = [-1]> (a) }",
    )  # fmt: skip
    model.functions[1].opset_import[0].version = 17
    assert torch.equal(loaded(model, tmp_path)(torch.ones(2, 4)), torch.full((2, 1), 4.0))


@pytest.mark.parametrize("met_first", ["outermost", "innermost"])
def test_functions_that_are_nested_too_deeply(met_first, tmp_path):
    """Called in either order: one is known already when what calls it is met."""
    for count in (MAX_CALLS - 1, 2000):
        calls = [0] if met_first == "outermost" else [*reversed(range(count + 1))]
        inner = [f"mine.F{number + 1}" for number in range(count)]
        functions = [
            f"F{number} (a) => (b) {{ b = {name} (a) }}" for number, name in enumerate([*inner, "Neg"])
        ]
        nodes = " ".join(f"y{call} = mine.F{call} (x)" for call in calls)
        model = parsed(nodes, *functions, outputs="y0")
        if count < MAX_CALLS:
            assert torch.equal(loaded(model, tmp_path)(torch.ones(2, 4)), -torch.ones(2, 4))
        else:
            assert f"functions may be nested {MAX_CALLS} deep" in refused(model, tmp_path)


def test_functions_that_call_themselves_or_explode(tmp_path):
    call = "y = mine.F0 (x)"
    circle = parsed(call, "F0 (a) => (b) { b = mine.F1 (a) }", "F1 (a) => (b) { b = mine.F0 (a) }")
    assert "must not call themselves" in refused(circle, tmp_path)
    laughs = [
        f"F{i} (t0) => (t10) {{ {' '.join(f't{j + 1} = mine.F{i + 1} (t{j})' for j in range(10))} }}"
        for i in range(12)
    ]
    bomb = parsed(call, *laughs, "F12 (a) => (b) { b = Neg (a) }")
    assert "nodes" in refused(bomb, tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello, world\n" * 20, b"PK\x03\x04" + b"\0" * 90, b"\x08\x0a"],
    ids=["empty", "text", "zip", "header"],
)
def test_what_is_no_onnx_file(content, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    assert "not an ONNX model, or a truncated one" in refused(path, tmp_path)


def with_weight(array: Any) -> onnx.ModelProto:
    return model_of(weights=[numpy_helper.from_array(np.asarray(array, dtype=np.float32), "w")])


NOT_OF_OPSET = "must have the inputs and attributes of opset 18"
NODES = {
    "y = com.microsoft.FusedGemm (x)":
        "must be a standard ONNX operator, got com.microsoft.FusedGemm\n  help: fused operators",
    "y = my.own.Magic (x)":
        "got my.own.Magic\n  help: write it with standard operators, or as a function inside the file",
    "y = StringSplit (x)": "StringSplit node y cannot be read",
    "y = NonZero (x)": "the shape of its result depends on values",
    "y = RandomNormalLike (x)": "its result is random",
    "y = DequantizeLinear (x, w)": "quantised models are not compiled",
    "y = Exp (x, w)": NOT_OF_OPSET, "y = Exp <extra = 3> (x)": NOT_OF_OPSET,
    "y = Exp (x) y = Neg (x)": "got 'y' twice", "w = Exp (x) y = Neg (w)": "got 'w' twice",
    "y = Exp (z)": "uses 'z', which nothing computes",
    "y = Exp (z) z = Neg (x)": "uses 'z', which comes later",
    "q = Neg (x)": "an output of the graph uses 'y', which nothing",
}  # fmt: skip


@pytest.mark.parametrize("nodes, told", NODES.items())
def test_nodes_that_cannot_be_read(nodes, told, tmp_path):
    assert told in refused(parsed(nodes, weights="float w = {2.0}"), tmp_path)


UNREADABLE: list[tuple[Callable[[], onnx.ModelProto], str]] = [
    (lambda: model_of(opset=10), "must be of opset 11 to 23, got opset 10\n  help: export it again"),
    (lambda: model_of(opset=24), "must be of opset 11 to 23, got opset 24"),
    (lambda: helper.make_model(model_of().graph, opset_imports=[helper.make_opsetid("own", 1)]),
     "got no opset"),
    (lambda: onnx.parser.parse_model('''
        <ir_version: 10, opset_import: ["" : 18]> g (float x) => (y) { y = ai.asapc.sinkhorn (x) }
        <domain: "ai.asapc", opset_import: ["" : 18]> sinkhorn (a) => (b) { b = Neg (a) }'''),
     "one that asapc has written already"),
    (lambda: model_of(inputs=[info("x", [2], TensorProto.STRING)]), "a tensor of numbers, got STRING"),
    (lambda: model_of(inputs=[helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)]),
     "a tensor of numbers, got sequence_type"),
    (lambda: model_of(weights=[helper.make_tensor("w", TensorProto.STRING, [1], [b"a"])]),
     "must hold floats, integers or bools, got STRING"),
    (lambda: model_of(weights=[helper.make_tensor("w", TensorProto.FLOAT8E4M3FN, [1], b"a", raw=True)]),
     "got FLOAT8E4M3FN"),
    (lambda: with_weight(np.where(WEIGHT == 5, np.nan, WEIGHT)), "got 1 NaN of 12 values in w"),
    (lambda: with_weight(np.where(WEIGHT == 5, np.inf, WEIGHT)), "got 1 infinite of 12 values in w"),
    (lambda: model_of([node("Neg", ["w"], "y")], inputs=[]), "must have inputs, got none"),
]  # fmt: skip


@pytest.mark.parametrize("make, told", UNREADABLE, ids=[told for _, told in UNREADABLE])
def test_a_model_that_cannot_be_read(make, told, tmp_path):
    assert told in refused(make(), tmp_path)


def test_a_mask_of_minus_infinity_is_no_diverged_weight(tmp_path):
    mask = np.triu(np.full((4, 4), -np.inf, dtype=np.float32), 1)
    model = model_of([node("Add", ["x", "m"], "y")], weights=[numpy_helper.from_array(mask, "m")])
    module = loaded(model, tmp_path)
    assert [*module.state_dict()] == ["w_m"] and not [*module.parameters()]


def test_loops_in_loops_do_not_run_forever(tmp_path):
    """A thousand times a thousand times a thousand."""

    def loop(depth: int) -> str:
        inner = loop(depth - 1) if depth else f"Identity (x{depth})"
        body = f"y{depth} = {inner} k{depth} = Identity (c{depth})"
        ends = f"(int64 i{depth}, bool c{depth}, float x{depth}) => (bool k{depth}, float y{depth})"
        return f"Loop (m, c, x{depth + 1 if depth < 2 else ''}) <body = b {ends} {{ {body} }}>"

    model = parsed(f"y = {loop(2)}", weights="int64 m = {1000}, bool c = {1}")
    with pytest.raises(RuntimeError, match="loops of more than 200000 nodes"):
        loaded(model, tmp_path)(torch.ones(1, 4))


def test_subgraphs_that_are_too_deep(tmp_path):
    def branch(depth: int) -> str:
        if depth < 0:
            return "Neg (x)"
        inner, other = (f"() => (float v{depth}) {{ v{depth} = {branch(d)} }}" for d in (depth - 1, -1))
        return f"If (c) <then_branch = t {inner}, else_branch = e {other}>"

    for depth, fits in ((MAX_DEPTH - 1, True), (MAX_DEPTH + 1, False)):
        model = parsed(f"y = {branch(depth)}", weights="bool c = {1}")
        if fits:
            assert torch.equal(loaded(model, tmp_path)(torch.ones(1, 4)), -torch.ones(1, 4))
        else:
            assert "nested 8 deep" in refused(model, tmp_path)


def test_tensors_of_another_size_than_declared(tmp_path):
    short = model_of()
    short.graph.initializer[0].raw_data = WEIGHT.tobytes()[:-4]
    assert "must hold the 48 bytes of torch.float32 [4, 3], got 44 bytes" in refused(short, tmp_path)
    huge = model_of()
    huge.graph.initializer[0].dims[0] = 1 << 30
    assert "got 48 bytes" in refused(huge, tmp_path)
    negative = model_of()
    negative.graph.initializer[0].dims[0] = -4
    assert "must be whole and have sizes" in refused(negative, tmp_path)
    empty = model_of(weights=[helper.make_tensor("w", TensorProto.FLOAT, [0, 2**31, 2**31, 2**31], [])])
    assert "must be whole and have sizes" in refused(empty, tmp_path)
    typed = model_of(weights=[helper.make_tensor("w", TensorProto.FLOAT, [4, 3], WEIGHT.flatten())])
    typed.graph.initializer[0].float_data.pop()
    assert "must hold 12 entries, got ValueError" in refused(typed, tmp_path)


@pytest.mark.parametrize("kind", [
    "FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "INT64", "INT32", "INT16", "INT8", "UINT8", "BOOL",
])  # fmt: skip
def test_element_types(kind, tmp_path):
    from asapc.inputs.onnx.tensors import read_tensor

    values = [0, 1, 1] if kind == "BOOL" else [3, 0, 7] if kind == "UINT8" else [3, 0, -7]
    number = TensorProto.DataType.Value(kind)
    typed = helper.make_tensor("t", number, [3], values)
    array = numpy_helper.to_array(typed)
    name = {"FLOAT": "float32", "DOUBLE": "float64"}.get(kind, kind.lower())
    for tensor in (typed, helper.make_tensor("t", number, [3], array.tobytes(), raw=True)):
        read = read_tensor(tensor, tmp_path / "m.onnx")
        assert str(read.dtype) == f"torch.{name}" and read.double().tolist() == values


OUTSIDE = ("", "/etc/passwd", "../w.bin", "sub/../../w.bin", "link.bin", "a\\w.bin")


@pytest.mark.parametrize("location, length, offset, told", [
    *((location, 48, "0", "must be there, got no") for location in ("gone.bin", "sub")),
    ("round.bin", 48, "0", "must"),
    *((location, 48, "0", "must lie in the folder") for location in OUTSIDE),
    ("own.bin", 48, "8", "must hold its 48 bytes from 8 on"),
    ("own.bin", 44, "0", "got 44 bytes declared"),
    *(("own.bin", 48, offset, "must be a number of bytes") for offset in ("-8", "1e3", "9" * 30)),
    ("own.bin", 1 << 50, "0", "bytes declared, in a file of 48"),
])  # fmt: skip
def test_external_data_that_is_not_there(location, length, offset, told, tmp_path):
    """Outside of the folder, or of another size."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path / "w.bin", folder / "own.bin"):
        path.write_bytes(WEIGHT.tobytes())
    (folder / "link.bin").symlink_to(tmp_path / "w.bin")
    (folder / "round.bin").symlink_to(folder / "round.bin")
    model = model_of()
    external(model, location, length, offset)
    assert told in refused(model, folder)


def test_tensors_that_share_their_bytes(tmp_path):
    """Twelve of one file would take twelve times its memory; links to it are the same file."""
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes() * 2)
    (tmp_path / "same.bin").hardlink_to(tmp_path / "w.bin")
    model = model_of()
    external(model, "w.bin", WEIGHT.nbytes)
    for count, fits in ((2, True), (3, False)):
        own = copy.deepcopy(model)
        for number in range(1, count):
            own.graph.initializer.append(model.graph.initializer[0])
            own.graph.initializer[-1].name = f"w{number}"
            own.graph.initializer[-1].external_data[0].value = "same.bin"
        if fits:
            loaded(own, tmp_path)
        else:
            assert "got 144 bytes in 1 files of 96" in refused(own, tmp_path)
    value = copy.deepcopy(own.graph.initializer[0])
    hidden = model_of([helper.make_node("Constant", [], [f"c{i}"], value=value) for i in range(3)])
    assert "must not share the bytes of their files" in refused(hidden, tmp_path)
    constant = helper.make_node("Constant", [], ["b"], value=value)
    opsets = [helper.make_opsetid("", 18)]
    functions = [helper.make_function("mine", "F", [], ["b"], [constant], opsets)]
    calls = [node("F", [], f"c{i}", domain="mine") for i in range(3)]
    calls.append(node("Neg", ["x"], "y"))
    repeated = model_of(calls, weights=[], functions=functions, extra=["mine"])
    assert "must not share the bytes of their files" in refused(repeated, tmp_path)


def test_a_declared_batch_is_kept(tmp_path):
    module = loaded(model_of(inputs=[info("x", [1, 4])]), tmp_path)
    assert module(torch.ones(1, 4)).shape == (1, 3)
    with pytest.raises(ValueError, match=r"x must be of shape \[1, 4\].*dynamic batch"):
        module(torch.ones(2, 4))


def test_the_import_is_held_against_onnxruntime(tmp_path, monkeypatch):
    path = saved(model_of(), tmp_path)
    batch = Batch((), {"x": 0.1 * torch.randn(3, 4)}, None, [0] * 3)
    module = load_teacher(str(path)).model
    assert isinstance(module, OnnxModule) and check_import(module, path, batch) < 1e-5
    monkeypatch.setitem(ops.OPERATORS, "Exp", lambda x: torch.exp(x) + 0.01)
    wrong = load_teacher(str(path)).model
    with pytest.raises(VerificationError, match="first in Exp node the_y"):
        check_import(wrong, path, batch)


def test_what_onnxruntime_does_not_run(tmp_path):
    """The batch is checked with a message; types that only one of both takes are, too."""
    path = saved(model_of(inputs=[info("x", [None, None])]), tmp_path)
    module = load_teacher(str(path)).model
    with pytest.raises(InputError, match="onnxruntime must be able to run it on the given data"):
        check_import(module, path, Batch((torch.ones(2, 5),), {}, None, [0, 0]))
    bad = saved(model_of([node("Neg", ["x"], "y")], inputs=[info("x", [2], TensorProto.BOOL)]), tmp_path)
    with pytest.raises(InputError, match="onnxruntime must be able to run it"):
        open_session(bad)


def test_inputs_arrive_in_the_declared_type(tmp_path):
    nodes = [node("Gather", ["w", "ids"], "y")]
    model = model_of(nodes, inputs=[info("ids", ["n"], TensorProto.INT32)])
    module = loaded(model, tmp_path)
    ids: Tensor = torch.tensor([3, 0])
    assert torch.equal(module(ids), torch.as_tensor(WEIGHT)[ids])
    assert check_import(module, saved(model, tmp_path), Batch((ids,), {}, None, [0, 0])) == 0.0
