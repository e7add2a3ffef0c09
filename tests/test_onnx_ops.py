"""Every ONNX operator of the table against onnxruntime, or onnx's own reference where it has none."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor
from torch.fx import GraphModule

from asapc.errors import InputError
from asapc.inputs.onnx.graph import Reader, read_inputs
from asapc.inputs.onnx.module import OnnxModule, onnx_module
from asapc.inputs.onnx.ops import OPERATORS
from asapc.inputs.onnx.session import open_session, run
from asapc.passes.capture import capture

pytest.importorskip("onnxruntime")

INF, NAN = float("inf"), float("nan")


@dataclass
class Const:
    """An input that the file holds."""

    value: Any
    dtype: Any = np.int64

    @property
    def array(self) -> np.ndarray[Any, Any]:
        return np.asarray(self.value, dtype=self.dtype)


@dataclass
class Case:
    op: str
    inputs: tuple[Any, ...]
    opset: int = 18
    outputs: int = 1
    attributes: dict[str, Any] = field(default_factory=dict)
    reference: bool = False  # onnx's own evaluator instead of onnxruntime

    def __str__(self) -> str:
        said = "-".join(f"{k}={v}" for k, v in self.attributes.items() if not hasattr(v, "dims"))
        return f"{self.op}-{self.opset}-{said}"[:60].replace(" ", "")


def c(
    op: str, *inputs: Any, opset: int = 18, outputs: int = 1, reference: bool = False, **attributes: Any
) -> Case:
    return Case(op, inputs, opset, outputs, attributes, reference)


def f(*shape: int, seed: int = 0, low: float | None = None) -> np.ndarray[Any, Any]:
    """Normal numbers, or from `low` up."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return (values if low is None else np.abs(values) + low).astype(np.float32)


def i(*values: Any, dtype: Any = np.int64) -> np.ndarray[Any, Any]:
    return np.array(values[0] if len(values) == 1 else values, dtype=dtype)


def value_of(number: Any, dtype: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array([number], dtype=dtype), "value")


BOOLS = np.array([[True, False, True], [False, False, True]])
WEIRD = np.array([1.0, -1.0, 0.0, INF, -INF, NAN, 2.5, -2.5], dtype=np.float32)
X, Y = f(2, 3, 4), f(2, 3, 4, seed=1)
IMAGE = f(2, 4, 7, 6)
REDUCTIONS = [
    f"Reduce{name}"
    for name in ("Sum", "Mean", "Max", "Min", "Prod", "L2", "LogSumExp")
]

CASES = [
    *(c(op, X) for op in (
        "Neg", "Abs", "Exp", "Sign", "Floor", "Ceil", "Erf", "Relu", "Tanh", "Sigmoid", "Softplus",
        "Sin", "Cos", "Identity", "Reciprocal",
    )),
    c("Round", np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4], dtype=np.float32)),
    *(c(op, f(2, 3, low=1.1)) for op in ("Sqrt", "Log")),
    *(c(op, WEIRD) for op in ("Neg", "Abs", "Relu", "IsNaN", "IsInf", "Exp")),
    c("IsInf", WEIRD, detect_negative=0), c("IsInf", WEIRD, detect_positive=0),
    *(c(op, Const([7, -7]), Const([-2, -2])) for op in ("Add", "Sub", "Mul", "Div")),
    *(c(op, Const([700, -800, 5]), Const([0])) for op in ("ReduceSum", "ReduceProd", "ReduceMax")),
    c("Cast", Const([-1, 0]), to=TensorProto.INT64), c("Cast", Const([-1, 0]), to=TensorProto.BOOL),
    c("Max", Const([7]), Const([3, 9])),
    c("Neg", i(1, -2, 3)), c("Abs", i(1, -2, 3, dtype=np.int32)), c("Not", BOOLS),
    *(c(op, X, Y) for op in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Less", "Equal")),
    *(c(op, X, f(4, seed=2)) for op in ("Add", "Sub", "Mul", "Div")),
    *(c(op, f(0, 3), f(3)) for op in ("Add", "Div", "Less")),
    *(c(op, X, Const(2.0, np.float32)) for op in ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Greater")),
    *(c(op, Const(2.0, np.float32), f(3, low=0.5)) for op in ("Add", "Sub", "Mul", "Div", "Pow", "Less")),
    c("Div", i(7, -7, 7, -7), i(2, 2, -2, -2)), c("Div", i(7, -7, dtype=np.int32), i(3, dtype=np.int32)),
    c("Add", i(1, 2), Const([3, 4])), c("Mul", i(1, 2), Const(3)),
    c("Mod", i(7, -7, 7, -7), i(3, 3, -3, -3)), c("Mod", i(7, -7), i(3, -3), fmod=1),
    c("Mod", f(6), f(6, low=0.3, seed=1), fmod=1),
    c("Pow", f(2, 3, low=0.1), f(2, 3, seed=1)), c("Pow", X, Const(2)), c("Pow", i(2, -3), i(3, 2)),
    c("Pow", i(2, 3), Const([2.0, 2.0], np.float32)),
    c("Max", X, Y, f(4)), c("Min", i(1, 5), i(4, 2)),
    c("And", BOOLS, ~BOOLS), c("Or", BOOLS, BOOLS[:1]),
    c("Equal", BOOLS, BOOLS[:1]), c("Equal", i(1, 2), i(1, 3)), c("LessOrEqual", X, Y),
    c("GreaterOrEqual", X, Y), c("Greater", X, Y), c("Greater", WEIRD, f(8)),
    c("Clip", X, Const(-0.5, np.float32), Const(0.5, np.float32)),
    c("Clip", X, None, Const(0.5, np.float32)),
    c("Clip", X), c("Clip", i(-3, 0, 3), Const(-1), Const(1)),
    c("Clip", X, np.float32(0.4), np.float32(-0.4)), c("Clip", X, opset=11),
    c("Gelu", X, opset=20), c("Gelu", X, opset=20, approximate="tanh"),
    *(c(op, X, opset=v, **a) for op in ("Softmax", "LogSoftmax") for v in (11, 13)
      for a in ({}, {"axis": 0}, {"axis": 1}, {"axis": -1})),
    *(c("Cast", value, to=to) for value in (WEIRD[:3], i(0, 1, 2), BOOLS)
      for to in (TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL,
                 TensorProto.DOUBLE, TensorProto.FLOAT16)),
    c("Cast", np.array([1.7, -1.7], dtype=np.float32), to=TensorProto.INT64),
    c("Cast", WEIRD, to=TensorProto.BOOL), c("CastLike", X, i(1)),
    c("Where", BOOLS, f(2, 3), f(2, 1)), c("Where", BOOLS, f(2, 3), Const(-1e9, np.float32)),
    c("Where", BOOLS, Const(0.0, np.float32), Const(-INF, np.float32)),
    c("Where", BOOLS, i(1, 2, 3), i(4)),
    # products
    c("MatMul", X, f(2, 4, 5)), c("MatMul", X, f(4, 5)), c("MatMul", X, f(4)), c("MatMul", f(3), f(3)),
    c("MatMul", f(3), f(2, 3, 4)), c("MatMul", f(2, 3), f(3, 4)), c("MatMul", f(0, 3), f(3, 4)),
    c("MatMul", f(2, 1, 3, 4), f(5, 4, 2)),
    c("Gemm", f(2, 3), f(3, 4)), c("Gemm", f(2, 3), f(3, 4), f(4)),
    c("Gemm", f(3, 2), f(4, 3), f(2, 1), alpha=0.5, beta=2.0, transA=1, transB=1),
    c("Einsum", f(2, 3, 4), f(2, 5, 4), equation="b i d, b j d -> b i j"),
    c("Einsum", f(2, 3), equation="ij->ji"),
    c("Einsum", f(2, 3), f(3, 4), f(4, 2), equation="ij,jk,kl->il"),
    # reductions
    *(c(op, X, opset=17, axes=[-1]) for op in REDUCTIONS if op != "ReduceSum"),
    *(c(op, X, Const([0, -1]), keepdims=0) for op in REDUCTIONS),
    c("ReduceSum", X, opset=11, axes=[1], keepdims=0),
    c("ReduceSum", X), c("ReduceSum", X, keepdims=0), c("ReduceSum", X, noop_with_empty_axes=1),
    c("ReduceMax", X), c("ReduceSum", f(2, 0), Const([1])), c("ReduceSum", i(1, 2, 3, dtype=np.int32)),
    c("ReduceMean", i([1, 2, 4], [0, 0, -7], dtype=np.int32), Const([1])),
    c("ReduceProd", i([1, 2], [3, 4])),
    c("ReduceMax", i([1, 2], [3, 4]), Const([0])), c("ReduceMax", f(2, 0), Const([1]), opset=20),
    c("ReduceMin", f(2, 0), Const([1]), opset=20, keepdims=0),
    c("ReduceLogSumExp", np.array([[-1e4, -1e4], [500.0, 1.0]], dtype=np.float32), Const([1])),
    *(c(op, X, axis=axis, keepdims=k) for op in ("ArgMax",) for axis, k in ((0, 1), (-1, 0))),
    c("ArgMax", np.array([[1, 2, 2], [3, 3, 1]], dtype=np.float32), axis=1, select_last_index=1),
    # layout
    c("Transpose", X), c("Transpose", X, perm=[0, 2, 1]), c("Transpose", X, perm=[2, 0, 1]),
    c("Transpose", X, perm=[0, 1, 2]),
    c("Reshape", X, Const([0, -1])), c("Reshape", X, Const([4, 0, 2])), c("Reshape", X, Const([-1])),
    c("Reshape", f(0, 3), Const([3, 0]), opset=14, allowzero=1), c("Reshape", f(1), Const([])),
    c("Reshape", X, i(2, 12)), c("Flatten", X), c("Flatten", X, axis=0), c("Flatten", X, axis=-1),
    c("Flatten", X, axis=3), c("Flatten", f(2, 0, 3), axis=2),
    c("Unsqueeze", X, Const([0, -1])), c("Unsqueeze", X, Const([1])),
    c("Unsqueeze", X, opset=11, axes=[0, 4]),
    c("Squeeze", f(1, 2, 1)), c("Squeeze", f(1, 2, 1), Const([-1])),
    c("Squeeze", f(1, 2, 1), opset=11, axes=[0]),
    c("Concat", X, Y, axis=1), c("Concat", X, axis=-1), c("Concat", i(1, 2), Const([3]), axis=0),
    c("Concat", f(0, 2), f(1, 2), axis=0),
    c("Split", X, Const([1, 3]), axis=2, outputs=2), c("Split", X, axis=-1, outputs=2, num_outputs=2),
    c("Split", f(7), outputs=3, num_outputs=3), c("Split", X, opset=11, outputs=2, axis=2, split=[1, 3]),
    c("Split", X, opset=13, outputs=3, axis=1),
    c("Slice", X, Const([1]), Const([3]), Const([2])),
    c("Slice", X, Const([0, 1]), Const([2**63 - 1, -1])),
    c("Slice", X, Const([-1]), Const([-(2**63)]), Const([-1]), Const([-1])),
    c("Slice", X, Const([3]), Const([0]), Const([2]), Const([-2])),
    c("Slice", X, Const([5]), Const([9]), Const([1])), c("Slice", X, Const([-9]), Const([2]), Const([1])),
    c("Slice", X, Const([0, 0]), Const([9, 9]), Const([1, -1]), Const([2, 3])),
    c("Slice", i(1, 2, 3), Const([1]), Const([3])), c("Slice", f(0, 2), Const([0]), Const([1])),
    c("Tile", X, Const([1, 2, 3])), c("Tile", i(1, 2), Const([2])), c("Tile", f(2), Const([0])),
    c("Expand", f(3, 1), Const([2, 1, 4])), c("Expand", f(3, 1), Const([1, 1])),
    c("Expand", f(1), Const([0])),
    c("Expand", f(2, 3), Const([1])),
    c("Pad", X, Const([0, 1, 0, 0, 0, 2])),
    c("Pad", X, Const([0, 1, 0, 0, 0, 2]), Const(1.5, np.float32)),
    c("Pad", X, Const([0, 1, 0, 0, 0, 2]), np.float32(-2.5)), c("Pad", i(1, 2), Const([1, 1]), Const(9)),
    c("Pad", X, Const([0, -1, 0, 0, 0, 2])), c("Pad", X, Const([1, 2]), None, Const([-1])),
    # indices
    c("Gather", X, i([0, -1], [1, 0]), axis=1), c("Gather", f(5, 3), i([0, -1], [4, 2])),
    c("Gather", X, Const(1), axis=-1), c("Gather", X, Const([2, -3]), axis=1),
    c("Gather", i(4, 5, 6), i(1)),
    c("Gather", f(5, 3), i(0, 1, dtype=np.int32), axis=1),
    c("Gather", f(5, 3), np.zeros((0,), dtype=np.int64)),
    c("GatherElements", X[0], i([0, -1], [1, 0], [2, 2]), axis=1),
    c("GatherND", X, i([0, 1], [1, -1])), c("GatherND", X, i([[1], [0]], [[2], [-1]]), batch_dims=1),
    c("ScatterElements", f(3, 3), i([0, -1], [1, 0]), f(2, 2, seed=2), axis=1),
    c("ScatterElements", f(3, 3), i([0, 0], [1, -2]), f(2, 2, seed=2), axis=1, reduction="add"),
    c("ScatterND", X, i([0, 1], [1, -1]), f(2, 4, seed=2)),
    c("ScatterND", X, i([0, 1], [0, 1]), f(2, 4, seed=2), reduction="add"),
    c("TopK", f(3, 5), Const([2]), outputs=2), c("TopK", f(3, 5), Const([5]), outputs=2, largest=0),
    c("TopK", f(3, 5), Const([3]), outputs=2, axis=0, largest=0),
    c("TopK", f(3, 5), Const([5]), outputs=2),
    *(c("TopK", (np.arange(400).reshape(2, 200) % 3).astype(np.float32), Const([k]), outputs=2, largest=v)
      for k in (2, 50, 200) for v in (0, 1)),
    c("OneHot", i(0, 2, -1, 5), Const(3), f(2)), c("OneHot", i(0, 2), Const([3]), f(2), axis=0),
    c("Trilu", f(2, 3, 4)), c("Trilu", f(3, 3), Const(1), upper=0),
    c("Trilu", f(3, 3), Const(-1), upper=1),
    c("CumSum", X, Const(1)), c("CumSum", X, Const(-1), exclusive=1),
    c("CumSum", X, Const([0]), reverse=1),
    c("CumSum", X, Const(1), exclusive=1, reverse=1), c("CumSum", i(1, 2, 3, dtype=np.int32), Const(0)),
    # shapes
    c("Shape", X), c("Shape", X, start=1), c("Shape", X, start=-2, end=-1), c("Shape", np.float32(1)),
    c("Size", X), c("Size", f(0, 2)),
    c("ConstantOfShape", Const([2, 3])), c("ConstantOfShape", Const([2]), value=value_of(7, np.int64)),
    c("ConstantOfShape", Const([]), value=value_of(1.5, np.float32)),
    c("ConstantOfShape", Const([20, 2]), value=value_of(True, np.bool_)),
    c("ConstantOfShape", Const([0])),
    c("Range", Const(1), Const(10), Const(3)), c("Range", Const(10), Const(1), Const(-4)),
    c("Range", Const(0), Const(40), Const(1)), c("Range", Const(3), Const(3), Const(1)),
    c("Range", np.float32(0.5), np.float32(2.0), np.float32(0.5)),
    c("Range", Const(0.0, np.float32), Const(5.0, np.float32), Const(2.0, np.float32)),
    # layers
    c("LayerNormalization", X, f(4, low=0.5), f(4)), c("LayerNormalization", X, f(3, 4, low=0.5), axis=1),
    c("LayerNormalization", X, f(4, low=0.5), f(4), epsilon=0.1),
    c("RMSNormalization", X, f(4, low=0.5), opset=23, reference=True),
    c("BatchNormalization", IMAGE, f(4), f(4, seed=1), f(4, seed=2), f(4, low=0.5)),
    c("Dropout", X), c("Dropout", X, outputs=2), c("Dropout", X, Const(0.5, np.float32)),
    c("Conv", IMAGE, f(3, 4, 2, 3)),
    c("Conv", IMAGE, f(3, 4, 2, 3), f(3), pads=[1, 0, 2, 1], strides=[2, 1]),
    c("Conv", IMAGE, f(4, 2, 3, 3), group=2, dilations=[2, 1], pads=[1, 1, 1, 1]),
    c("Conv", f(2, 3, 8), f(5, 3, 3)),
    c("Conv", IMAGE, f(3, 4, 3, 3), auto_pad="SAME_UPPER", strides=[2, 2]),
    c("Conv", IMAGE, f(3, 4, 2, 2), auto_pad="SAME_LOWER"),
    c("Conv", IMAGE, f(3, 4, 2, 2), auto_pad="VALID"),
    c("MaxPool", IMAGE, kernel_shape=[2, 3]),
    c("MaxPool", IMAGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
    c("MaxPool", IMAGE, kernel_shape=[2, 2], pads=[0, 1, 1, 0], ceil_mode=0),
    c("GlobalAveragePool", IMAGE),
    c("Attention", f(2, 2, 3, 4), f(2, 2, 5, 4), f(2, 2, 5, 4), opset=23, reference=True),
    c("Attention", f(2, 3, 8), f(2, 5, 8), f(2, 5, 8), opset=23, reference=True, q_num_heads=2,
      kv_num_heads=2, is_causal=1, scale=0.3),
    c("Attention", f(2, 4, 3, 4), f(2, 2, 5, 4), f(2, 2, 5, 4), f(3, 5), opset=23, reference=True),
]  # fmt: skip
ELSEWHERE = {"Loop", "If"}  # tests of their own below


def model_of(case: Case) -> onnx.ModelProto:
    names, inputs, initializers = [], [], []
    for number, value in enumerate(case.inputs):
        name = "" if value is None else f"x{number}"
        names.append(name)
        if isinstance(value, Const):
            initializers.append(numpy_helper.from_array(value.array, name))
        elif value is not None:
            array = np.asarray(value)
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            inputs.append(helper.make_tensor_value_info(name, kind, array.shape))
    outputs = [f"y{number}" for number in range(case.outputs)]
    node = helper.make_node(case.op, names, outputs, **case.attributes)
    return graph_model([node], inputs, outputs, initializers, case.opset)


def graph_model(
    nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[str], initializers: Any = (),
    opset: int = 18,
) -> onnx.ModelProto:
    declared = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(nodes, "g", inputs, declared, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def module_of(model: onnx.ModelProto) -> OnnxModule:
    path = Path("model.onnx")
    reader = Reader(path, model.opset_import[0].version)
    graph = reader.graph(model.graph)
    return onnx_module(graph, read_inputs(model.graph, path), reader.tensors).eval()


def ours(model: onnx.ModelProto, inputs: dict[str, Tensor]) -> list[Tensor]:
    module = module_of(model)
    return module.values([inputs[value.name] for value in module.inputs], module.graph.outputs)


def check(model: onnx.ModelProto, inputs: dict[str, Any], reference: bool = False) -> list[Tensor]:
    tensors = {name: torch.tensor(np.asarray(value)) for name, value in inputs.items()}
    if reference:
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        expected = [torch.as_tensor(np.asarray(y)) for y in ReferenceEvaluator(model).run(None, arrays)]
    else:
        expected = run(open_session(model, threads=1, optimise=False), tensors)
    results = ours(model, tensors)
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype and result.shape == wanted.shape
        torch.testing.assert_close(result, wanted, rtol=2e-5, atol=2e-6, equal_nan=True)
    return results


UNSUPPORTED = [
    c("Pad", X, Const([0, 1, 2, 0, 1, 3]), mode="edge"),
    c("ScatterElements", f(3, 3), i([0, 0], [1, -2]), f(2, 2, seed=2), axis=1, reduction="max"),
    c("ScatterND", X, i([0, 1], [0, 1]), f(2, 4, seed=2), reduction="mul"),
]


@pytest.mark.parametrize("case", UNSUPPORTED, ids=str)
def test_a_variant_that_is_not_supported_is_named(case: Case) -> None:
    given = {f"x{n}": torch.tensor(x) for n, x in enumerate(case.inputs) if not isinstance(x, Const)}
    with pytest.raises(RuntimeError, match=f"{case.op} with .* is not supported"):
        ours(model_of(case), given)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operator(case: Case) -> None:
    given = {f"x{n}": x for n, x in enumerate(case.inputs) if x is not None and not isinstance(x, Const)}
    check(model_of(case), given, case.reference)


def test_every_operator_is_tested() -> None:
    assert {case.op for case in CASES} | ELSEWHERE == {*OPERATORS}


# Subgraphs


def info(name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def scalar(name: str, value: Any, dtype: Any = np.int64) -> onnx.NodeProto:
    return helper.make_node(
        "Constant", [], [name], value=numpy_helper.from_array(np.array(value, dtype=dtype), name)
    )


def body_of(nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any]) -> onnx.GraphProto:
    return helper.make_graph(nodes, "body", inputs, outputs)


def loop_body(*more: onnx.NodeProto, keep: str = "go", scanned: bool = False) -> onnx.GraphProto:
    """x -> x * w + i, where w is a value of the graph around it; scanned: every x is an output, too."""
    nodes = [
        helper.make_node("Mul", ["x_in", "w"], ["scaled"]),
        helper.make_node("Cast", ["i"], ["i_float"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["scaled", "i_float"], ["x_out"]),
        *more,
        helper.make_node("Identity", [keep], ["go_out"]),
        helper.make_node("Identity", ["x_out"], ["seen"]),
    ]
    seen = [info("seen", [3])] if scanned else []
    inputs = [info("i", [], TensorProto.INT64), info("go", [], TensorProto.BOOL), info("x_in", [3])]
    return body_of(nodes, inputs, [info("go_out", [], TensorProto.BOOL), info("x_out", [3]), *seen])


def looped(
    trips: int | None, *more: onnx.NodeProto, keep: str = "go", limit: float = 0.0, outputs: Any = ("y",)
) -> onnx.ModelProto:
    """The body up to so many times, or as often as `keep` says, which `more` computes."""
    body = loop_body(*more, keep=keep, scanned=len(outputs) > 1)
    nodes = [
        scalar("trips", trips or 0), scalar("true", True, np.bool_), scalar("limit", limit, np.float32),
        helper.make_node("Loop", ["" if trips is None else "trips", "true", "x"], outputs, body=body),
    ]  # fmt: skip
    return graph_model(nodes, [info("x", [3]), info("w", [3])], [*outputs])


def below(reduction: str) -> list[onnx.NodeProto]:
    """small: whether the reduction of x is below the limit."""
    return [
        helper.make_node(reduction, ["x_out"], ["total"], keepdims=0),
        helper.make_node("Less", ["total", "limit"], ["small"]),
    ]


COUNTED = [scalar("last", 3), helper.make_node("Less", ["i", "last"], ["go_on"])]
LOOPS = {
    "no trip": looped(0), "one trip": looped(1, outputs=["y", "all"]),
    "trips": looped(4, outputs=["y", "all"]), "a counter": looped(None, *COUNTED, keep="go_on"),
    **{f"data, {x:g}": looped(6, *below("ReduceSum"), keep="small", limit=x) for x in (0.0, 3.0, 1e9)},
}  # fmt: skip


@pytest.mark.parametrize("model", LOOPS.values(), ids=LOOPS.keys())
def test_loops(model: onnx.ModelProto) -> None:
    check(model, {"x": f(3, low=0.1), "w": f(3, low=1.0)})


@pytest.mark.parametrize("wide", [True, False])
def test_if(wide: bool) -> None:
    """On a shape, with a branch that uses what is around it."""
    then = body_of([helper.make_node("Mul", ["x", "w"], ["y_then"])], [], [info("y_then", [None])])
    other = body_of([helper.make_node("Neg", ["x"], ["y_else"])], [], [info("y_else", [None])])
    nodes = [
        helper.make_node("Size", ["x"], ["size"]), scalar("three", 3),
        helper.make_node("Greater", ["size", "three"], ["wide"]),
        helper.make_node("If", ["wide"], ["y"], then_branch=then, else_branch=other),
    ]  # fmt: skip
    n = 5 if wide else 3
    check(graph_model(nodes, [info("x", [None]), info("w", [None])], ["y"]), {"x": f(n), "w": f(n)})


# Shapes that stay symbols


def exported(model: onnx.ModelProto, *inputs: Tensor) -> tuple[OnnxModule, GraphModule]:
    module = module_of(model)
    captured = capture(module, inputs, {})
    assert captured.kind == "whole"
    return module, captured.programs[0].graph


def node(op: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], **attributes)


def test_shape_arithmetic_keeps_sizes_dynamic() -> None:
    """[B, N, 4] -> [B, N * 2, 2] plus positions and a mask, the way exporters write it."""
    nodes = [
        node("Shape", ["x"], "shape"), scalar("zero", 0), scalar("one", 1), scalar("axis", [0]),
        scalar("two", 2), scalar("minus", [-1]), scalar("twos", [2]), scalar("starts", [1]),
        node("Gather", ["shape", "zero"], "b"), node("Gather", ["shape", "one"], "n"),
        node("Mul", ["n", "two"], "longer"), node("Unsqueeze", ["b", "axis"], "b1"),
        node("Unsqueeze", ["longer", "axis"], "n1"), node("Concat", ["b1", "n1", "twos"], "to", axis=0),
        node("Equal", ["to", "minus"], "unknown"),
        node("Shape", ["to"], "rank"),
        node("ConstantOfShape", ["rank"], "ones", value=value_of(1, np.int64)),
        node("Where", ["unknown", "ones", "to"], "sizes"),
        node("Reshape", ["x", "sizes"], "y0"),
        node("Cast", ["n"], "n_float", to=TensorProto.FLOAT), node("Sqrt", ["n_float"], "root"),
        node("Div", ["y0", "root"], "y1"),
        node("Range", ["zero", "longer", "one"], "positions"),
        node("Cast", ["positions"], "places", to=TensorProto.FLOAT),
        node("Unsqueeze", ["places", "starts"], "column"), node("Add", ["y1", "column"], "y"),
        node("Slice", ["shape", "axis", "starts"], "first"),
        node("ReduceProd", ["first"], "examples", keepdims=0),
        node("Div", ["longer", "two"], "again"), node("Sub", ["again", "one"], "last"),
        node("Gather", ["x", "last"], "end", axis=1),
        node("Expand", ["end", "end_shape"], "ends"), node("Shape", ["end"], "end_shape"),
    ]  # fmt: skip
    nodes[-1], nodes[-2] = nodes[-2], nodes[-1]
    model = graph_model(nodes, [info("x", ["b", "n", 4])], ["y", "ends"])
    _, graph = exported(model, torch.randn(3, 5, 4))
    for size in ((3, 5), (2, 7), (6, 2)):
        x = torch.randn(*size, 4)
        for own, expected in zip(graph(x), run(open_session(model, threads=1), {"x": x}), strict=True):
            torch.testing.assert_close(own, expected)
        check(model, {"x": x.numpy()})


def branching(condition: list[onnx.NodeProto]) -> onnx.ModelProto:
    """10 x if the `condition`, -x if not; five and six are integers."""
    then = body_of([node("Mul", ["x", "ten"], "y_then")], [], [info("y_then", [])])
    other = body_of([node("Neg", ["x"], "y_else")], [], [info("y_else", [])])
    nodes = [
        scalar("ten", 10.0, np.float32), scalar("five", 5), scalar("one", 1), scalar("axis", 1),
        node("Shape", ["x"], "shape"), node("Gather", ["shape", "axis"], "n"), *condition,
        helper.make_node("If", ["c"], ["y"], "the_if", then_branch=then, else_branch=other),
    ]  # fmt: skip
    return graph_model(nodes, [info("x", ["b", "n"])], ["y"])


@pytest.mark.parametrize("condition, told", [
    ([node("ReduceMax", ["x"], "top", keepdims=0), node("Greater", ["top", "ten"], "c")],
     "depends on its data"),
    ([node("Greater", ["n", "five"], "c")], "depends on the sizes of its inputs"),
    ([node("Equal", ["n", "five"], "c")], "depends on the sizes of its inputs"),
    ([node("Greater", ["n", "five"], "long"), node("Not", ["long"], "c")], "depends on the sizes"),
], ids=["data", "longer", "equal", "not"])  # fmt: skip
def test_a_branch_that_one_trace_cannot_decide(condition: list[onnx.NodeProto], told: str) -> None:
    model = branching(condition)
    for n in (5, 7):
        check(model, {"x": f(3, n)})
        found = capture(module_of(model), (torch.ones(3, n),), {})
        assert not found.programs and found.reason is not None
        assert re.search(f"If node the_if: the condition of If must .*{told}", found.reason)


def test_a_size_that_one_trace_cannot_decide() -> None:
    nodes = [node("Greater", ["n", "five"], "long"), node("Where", ["long", "five", "n"], "k")]
    model = branching([*nodes, node("Greater", ["k", "one"], "c")])
    check(model, {"x": f(3, 7)})
    found = capture(module_of(model), (torch.ones(3, 7),), {})
    assert not found.programs and found.reason is not None
    assert "Where node k: the condition of Where must be known" in found.reason


@pytest.mark.parametrize("condition", [
    [scalar("c", True, np.bool_)], [scalar("c", [True], np.bool_)], [node("Greater", ["n", "one"], "c")],
    [node("Equal", ["n", "one"], "alone"), node("Not", ["alone"], "c")],
], ids=["constant", "list", "size", "squeeze"])  # fmt: skip
def test_a_branch_that_is_the_same_for_every_size(condition: list[onnx.NodeProto]) -> None:
    _, graph = exported(branching(condition), torch.ones(3, 5))
    assert torch.equal(graph(torch.ones(2, 9)), torch.full((2, 9), 10.0))


@pytest.mark.parametrize("choose", [
    [node("Min", ["n1", "six"], "k")], [node("Max", ["half", "six"], "k")],
    [node("Concat", ["n1", "six"], "both", axis=0), node("ReduceMin", ["both"], "k", keepdims=1)],
    [node("Concat", ["half", "six"], "both", axis=0), node("ReduceMax", ["both"], "k", keepdims=1)],
    *([node("Less", ["n1", "six"], "c"), node("Less", ["half", "two"], "d"), node(op, ["c", "d"], "e"),
       node("Cast", ["e"], "e_int", to=TensorProto.INT64), node("Add", ["e_int", "two"], "k")]
      for op in ("And", "Or")),
], ids=["min", "max", "reduce_min", "reduce_max", "and", "or"])  # fmt: skip
def test_a_choice_between_sizes_stays_one(choose: list[onnx.NodeProto]) -> None:
    """The first k of n tokens, for n on both sides of the six that the example has."""
    nodes = [
        scalar("six", [6]), scalar("one", [1]), scalar("zero", [0]), scalar("two", [2]),
        node("Shape", ["x"], "n1", start=1, end=2), node("Div", ["n1", "two"], "half"), *choose,
        node("Slice", ["x", "zero", "k", "one"], "y"),
    ]  # fmt: skip
    model = graph_model(nodes, [info("x", ["b", "n"])], ["y"])
    for example in (4, 6, 9):
        _, graph = exported(model, torch.randn(3, example))
        for n in (3, 6, 14):
            x = torch.randn(2, n)
            assert torch.equal(graph(x), run(open_session(model, threads=1), {"x": x})[0])


def test_early_stop_is_traced_at_its_full_budget() -> None:
    model = looped(4, *below("ReduceLogSumExp"), keep="small", limit=1e-3)
    x, w = torch.ones(3), torch.full((3,), 2.0)
    module, graph = exported(model, x, w)
    assert torch.equal(module(x, w), torch.full((3,), 2.0))  # one trip
    assert torch.equal(graph(x, w), torch.full((3,), 27.0))  # all four: ((2 * 2 + 1) * 2 + 2) * 2 + 3


def test_a_loop_without_an_end() -> None:
    with pytest.raises(RuntimeError, match="trip count of at most 1000"):
        ours(looped(2**62), {"x": torch.ones(3), "w": torch.zeros(3)})


@pytest.mark.parametrize("case", [
    c("ConstantOfShape", Const([1 << 20, 1 << 20])), c("Range", Const(0), Const(1 << 40), Const(1)),
    c("Tile", f(4), Const([1 << 40])), c("Pad", f(4), Const([0, 1 << 40])),
    c("OneHot", i(0), Const(1 << 40), f(2)),
], ids=str)  # fmt: skip
def test_a_wild_size_is_refused_before_memory_is_taken(case: Case) -> None:
    given = {f"x{n}": torch.as_tensor(x) for n, x in enumerate(case.inputs) if not isinstance(x, Const)}
    with pytest.raises(InputError, match=r"may take .* at once"):
        ours(model_of(case), given)


def test_a_shape_has_no_numbers_beyond_64_bits() -> None:
    with pytest.raises(RuntimeError, match="a shape of a number of 81 bits"):
        ours(model_of(c("Mul", Const([1 << 40]), Const(1 << 40))), {})
