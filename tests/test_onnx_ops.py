"""Every ONNX operator of the table by onnx's own tests, and against onnxruntime what these leave out."""

from __future__ import annotations

import copy
import importlib
import pkgutil
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case import node as node_tests
from torch import Tensor
from torch.fx import GraphModule

from asapc.errors import InputError
from asapc.formats.limits import limits
from asapc.inputs.onnx.graph import Reader, read_inputs
from asapc.inputs.onnx.module import OnnxModule, onnx_module
from asapc.inputs.onnx.ops import OPERATORS
from asapc.inputs.onnx.session import open_session, run
from asapc.inputs.onnx.tensors import read_tensor
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

    def __str__(self) -> str:
        said = "-".join(f"{k}={v}" for k, v in self.attributes.items() if not hasattr(v, "dims"))
        return f"{self.op}-{self.opset}-{said}"[:60].replace(" ", "")


def c(op: str, *inputs: Any, opset: int = 18, outputs: int = 1, **attributes: Any) -> Case:
    return Case(op, inputs, opset, outputs, attributes)


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
REDUCTIONS = [f"Reduce{name}" for name in ("Mean", "Max", "Min", "Prod", "L2", "LogSumExp")]
TWO, HALF = Const(2.0, np.float32), Const(0.5, np.float32)

CASES = [
    # lists and numbers that are shapes in the making
    *(c(op, Const([7, -7]), Const([-2, -2])) for op in ("Add", "Sub", "Mul", "Div")),
    *(c(op, Const([700, -800, 5]), Const([0])) for op in ("ReduceSum", "ReduceProd", "ReduceMax")),
    c("Where", Const([True], np.bool_), Const([4]), Const([5])),
    c("Squeeze", Const([3])), c("Unsqueeze", Const(3), Const([0])), c("Reshape", Const([3]), Const([])),
    c("Concat", Const([1, 2]), Const([3]), axis=0), c("Concat", i(1, 2), Const([3]), axis=0),
    c("Split", Const([1, 2, 3]), Const([1, 2]), outputs=2), c("Gather", Const([4, 5, 6]), Const([-1, 0])),
    c("Slice", Const([1, 2, 3]), Const([1]), Const([3])), c("Tile", Const([1, 2]), Const([2])),
    c("Expand", Const([1, 2]), Const([2])), c("Expand", Const([1]), Const([3])),
    c("ConstantOfShape", Const([2]), value=value_of(7, np.int64)),
    c("ConstantOfShape", Const([20, 2]), value=value_of(True, np.bool_)),
    c("Range", Const(10), Const(1), Const(-4)), c("Range", Const(0), Const(40), Const(1)),
    # numbers beside tensors
    *(c(op, X, TWO) for op in ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Greater")),
    c("Clip", X, None, HALF), c("Clip", X), c("Clip", X, np.float32(0.4), np.float32(-0.4)),
    c("Where", BOOLS, f(2, 3), Const(-1e9, np.float32)),
    c("Where", BOOLS, Const(0.0, np.float32), Const(-INF, np.float32)),
    c("Cast", WEIRD, to=TensorProto.BOOL), c("Cast", np.array([1.7, -1.7]), to=TensorProto.INT64),
    c("Pad", X, Const([0, 1, 0, 0, 0, 2]), np.float32(-2.5)), c("Pad", i(1, 2), Const([1, 1]), Const(9)),
    # earlier opsets
    c("Clip", X, opset=11), c("ReduceSum", X, opset=11, axes=[1], keepdims=0),
    *(c(op, X, opset=11, **a) for op in ("Softmax", "LogSoftmax")
      for a in ({}, {"axis": 0}, {"axis": 1}, {"axis": -1})),
    *(c(op, X, opset=17, axes=[-1]) for op in REDUCTIONS),
    c("Unsqueeze", X, opset=11, axes=[0, 4]), c("Squeeze", f(1, 2, 1), opset=11, axes=[0]),
    c("Split", X, opset=11, outputs=2, axis=2, split=[1, 3]), c("Split", X, opset=13, outputs=3, axis=1),
    # empty ones
    *(c(op, f(0, 3), f(3)) for op in ("Add", "Div", "Less")), c("MatMul", f(0, 3), f(3, 4)),
    c("Reshape", f(0, 3), Const([3, 0]), opset=14, allowzero=1), c("Flatten", f(2, 0, 3), axis=2),
    c("Concat", f(0, 2), f(1, 2), axis=0), c("Gather", f(5, 3), np.zeros((0,), dtype=np.int64)),
    # what onnx does not test
    c("Div", i(7, -7, 7, -7), i(2, 2, -2, -2)), c("Div", i(7, -7, dtype=np.int32), i(3, dtype=np.int32)),
    c("Einsum", f(2, 3, 4), f(2, 5, 4), equation="b i d, b j d -> b i j"),
    c("ReduceMean", i([1, 2, 4], [0, 0, -7], dtype=np.int32), Const([1])),
    c("ReduceLogSumExp", np.array([[-1e4, -1e4], [500.0, 1.0]], dtype=np.float32), Const([1])),
    c("Transpose", X, perm=[0, 1, 2]), c("Squeeze", f(1, 2, 1)), c("Gather", f(5, 3), i([0, -1], [4, 2])),
    c("Slice", X, Const([-1]), Const([-(2**63)]), Const([-1]), Const([-1])),
    c("Slice", X, Const([0, 0]), Const([9, 9]), Const([1, -1]), Const([2, 3])),
    *(c("TopK", (np.arange(400).reshape(2, 200) % 3).astype(np.float32), Const([k]), outputs=2, largest=v)
      for k in (2, 50, 200) for v in (0, 1)),
    c("Range", Const(0.0, np.float32), Const(5.0, np.float32), Const(2.0, np.float32)),
    c("LayerNormalization", X, f(4, low=0.5), f(4)), c("LayerNormalization", X, f(3, 4, low=0.5), axis=1),
    c("Conv", f(2, 4, 7, 6), f(3, 4, 2, 3), f(3), pads=[1, 0, 2, 1], strides=[2, 1]),
    c("Conv", f(2, 4, 7, 6), f(4, 2, 3, 3), group=2, dilations=[2, 1], pads=[1, 1, 1, 1]),
    c("Conv", f(2, 4, 7, 6), f(3, 4, 2, 2), auto_pad="VALID"),
]  # fmt: skip


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


def check(model: onnx.ModelProto, inputs: dict[str, Any]) -> list[Tensor]:
    tensors = {name: torch.tensor(np.asarray(value)) for name, value in inputs.items()}
    expected = run(open_session(model, threads=1, optimise=False), tensors)
    results = ours(model, tensors)
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype and result.shape == wanted.shape
        torch.testing.assert_close(result, wanted, rtol=2e-5, atol=2e-6, equal_nan=True)
    return results


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operator(case: Case) -> None:
    given = {f"x{n}": x for n, x in enumerate(case.inputs) if x is not None and not isinstance(x, Const)}
    check(model_of(case), given)


REFUSED = re.compile(
    r"is not supported|must be a tensor of numbers|must hold floats, integers or bools"
    r"|must have the inputs and attributes|cannot be read|Expected reduction dim . to have non-zero size"
)


HELD = (TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL)


def proto_of(value: Any) -> onnx.TensorProto:
    return value if isinstance(value, TensorProto) else numpy_helper.from_array(np.asarray(value))


def with_constants(
    model: onnx.ModelProto, values: list[onnx.TensorProto]
) -> tuple[onnx.ModelProto, list[onnx.TensorProto]]:
    """The model with what may be a shape, axes or a plain number inside it, and its other inputs."""
    changed, left = copy.deepcopy(model), []
    del changed.graph.input[:]
    for declared, value in zip(model.graph.input, values, strict=True):
        if len(value.dims) <= (value.data_type == TensorProto.INT64) and value.data_type in HELD:
            constant = copy.deepcopy(value)
            constant.name = declared.name
            changed.graph.initializer.append(constant)
        else:
            changed.graph.input.append(declared)
            left.append(value)
    return changed, left


def test_operators_by_the_tests_of_onnx() -> None:
    """Each is right, as it is and with its small inputs inside the file, or refused by name."""
    wrong, right = [], set()
    wanted = {op.lower() for op in OPERATORS} | {"batchnorm"}
    with warnings.catch_warnings(action="ignore"):  # to collect all takes many times as long
        for module in pkgutil.iter_modules(node_tests.__path__):
            name = module.name.replace("_", "")
            if {name, name.removesuffix("op")} & wanted:
                importlib.import_module(f"{node_tests.__name__}.{module.name}")
    for case in node_tests._NodeTestCases:
        graph, op = case.model.graph, case.model.graph.node[0].op_type
        plain = all(value.type.HasField("tensor_type") for value in graph.input)
        if not plain or len(graph.node) > 1 or op not in OPERATORS:
            continue
        case.model.opset_import[0].version = min(case.model.opset_import[0].version, 23)
        for given, expected in case.data_sets:
            values = [proto_of(value) for value in given]
            for model, inputs in ((case.model, values), with_constants(case.model, values)):
                try:
                    module = module_of(model)
                    results = module.values(
                        [read_tensor(value, Path("x")) for value in inputs], module.graph.outputs
                    )
                    exact = [read_tensor(proto_of(value), Path("y")) for value in expected]
                    half = any(value.dtype in (torch.float16, torch.bfloat16) for value in exact)
                    torch.testing.assert_close(
                        results, exact, rtol=0.02 if half else case.rtol, atol=case.atol, equal_nan=True
                    )
                    right.add(op)
                except Exception as error:
                    if not REFUSED.search(str(error)):
                        wrong.append((case.name, len(inputs), error))
    assert not wrong and right | {case.op for case in CASES} == {*OPERATORS}


# Subgraphs


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}')


def looped(
    trips: int | None, more: str = "", keep: str = "go", limit: float = 0.0, scanned: bool = False
) -> onnx.ModelProto:
    """x -> x * w + i up to so many times, or as often as `keep` says, which `more` computes; w is a value
    of the graph around the loop. scanned: every x is an output, too."""
    outputs = "y, all" if scanned else "y"
    return parsed(f"""
        g (float[3] x, float[3] w) => ({outputs})
        <int64 trips = {{{trips or 0}}}, bool yes = {{1}}, float limit = {{{limit}}}, int64 last = {{3}}>
        {{
            {outputs} = Loop ({'""' if trips is None else "trips"}, yes, x) <body = b
                (int64 i, bool go, float[3] x_in)
                => (bool go_out, float[3] x_out {", float[3] seen" if scanned else ""})
                {{
                    scaled = Mul (x_in, w)
                    i_float = Cast <to = 1> (i)
                    x_out = Add (scaled, i_float)
                    {more}
                    go_out = Identity ({keep})
                    seen = Identity (x_out)
                }}>
        }}""")


def below(reduction: str) -> str:
    """small: whether the reduction of x is below the limit."""
    return f"total = {reduction} <keepdims = 0> (x_out) small = Less (total, limit)"


LOOPS = {
    "no trip": looped(0), "one trip": looped(1, scanned=True), "trips": looped(4, scanned=True),
    "a counter": looped(None, "go_on = Less (i, last)", "go_on"),
    **{f"data, {x:g}": looped(6, below("ReduceSum"), "small", x) for x in (0.0, 3.0, 1e9)},
}  # fmt: skip


@pytest.mark.parametrize("model", LOOPS.values(), ids=LOOPS.keys())
def test_loops(model: onnx.ModelProto) -> None:
    check(model, {"x": f(3, low=0.1), "w": f(3, low=1.0)})


@pytest.mark.parametrize("n", [5, 3])
def test_if(n: int) -> None:
    """On a shape, with a branch that uses what is around it."""
    model = parsed("""
        g (float[n] x, float[n] w) => (y) <int64 three = {3}>
        {
            size = Size (x)
            wide = Greater (size, three)
            y = If (wide) <then_branch = t () => (float[n] p) { p = Mul (x, w) },
                           else_branch = e () => (float[n] q) { q = Neg (x) }>
        }""")
    check(model, {"x": f(n), "w": f(n)})


# Shapes that stay symbols


def exported(model: onnx.ModelProto, *inputs: Tensor) -> tuple[OnnxModule, GraphModule]:
    module = module_of(model)
    captured = capture(module, inputs, {})
    assert captured.kind == "whole"
    return module, captured.programs[0].graph


def test_shape_arithmetic_keeps_sizes_dynamic() -> None:
    """[B, N, 4] -> [B, N * 2, 2] plus positions and a mask, the way exporters write it."""
    model = parsed("""
        g (float[b, n, 4] x) => (y, ends)
        <int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] axis = {0}, int64[1] starts = {1},
         int64[1] minus = {-1}, int64[1] twos = {2}>
        {
            shape = Shape (x)
            b = Gather (shape, zero)
            n = Gather (shape, one)
            longer = Mul (n, two)
            b1 = Unsqueeze (b, axis)
            n1 = Unsqueeze (longer, axis)
            to = Concat <axis = 0> (b1, n1, twos)
            unknown = Equal (to, minus)
            rank = Shape (to)
            ones = ConstantOfShape <value = int64[1] {1}> (rank)
            sizes = Where (unknown, ones, to)
            y0 = Reshape (x, sizes)
            n_float = Cast <to = 1> (n)
            root = Sqrt (n_float)
            y1 = Div (y0, root)
            positions = Range (zero, longer, one)
            places = Cast <to = 1> (positions)
            column = Unsqueeze (places, starts)
            y = Add (y1, column)
            first = Slice (shape, axis, starts)
            examples = ReduceProd <keepdims = 0> (first)
            again = Div (longer, two)
            last = Sub (again, one)
            end = Gather <axis = 1> (x, last)
            end_shape = Shape (end)
            ends = Expand (end, end_shape)
        }""")
    _, graph = exported(model, torch.randn(3, 5, 4))
    for size in ((3, 5), (2, 7), (6, 2)):
        x = torch.randn(*size, 4)
        for own, expected in zip(graph(x), run(open_session(model, threads=1), {"x": x}), strict=True):
            torch.testing.assert_close(own, expected)
        check(model, {"x": x.numpy()})


def branching(condition: str) -> onnx.ModelProto:
    """10 x if c, which the `condition` computes, -x if not."""
    return parsed(f"""
        g (float[b, n] x) => (y) <float ten = {{10}}, int64 five = {{5}}, int64 one = {{1}}>
        {{
            shape = Shape (x)
            n = Gather (shape, one)
            {condition}
            [the_if] y = If (c) <then_branch = t () => (float[b, n] p) {{ p = Mul (x, ten) }},
                                 else_branch = e () => (float[b, n] q) {{ q = Neg (x) }}>
        }}""")


@pytest.mark.parametrize("condition, told", [
    ("top = ReduceMax <keepdims = 0> (x) c = Greater (top, ten)", "depends on its data"),
    ("c = Greater (n, five)", "depends on the sizes of its inputs"),
    ("c = Equal (n, five)", "depends on the sizes of its inputs"),
    ("long = Greater (n, five) c = Not (long)", "depends on the sizes"),
    ("long = Greater (n, five) k = Where (long, five, n) c = Greater (k, one)",
     "Where node k: the condition of Where must be known"),
])  # fmt: skip
def test_a_branch_or_a_size_that_one_trace_cannot_decide(condition: str, told: str) -> None:
    model = branching(condition)
    rule = told if "Where" in told else f"If node the_if: the condition of If must .*{told}"
    for n in (5, 7):
        check(model, {"x": f(3, n)})
        found = capture(module_of(model), (torch.ones(3, n),), {})
        assert not found.programs and re.search(rule, found.reason)


@pytest.mark.parametrize("condition", [
    "c = Constant <value = bool {1}> ()", "c = Constant <value = bool[1] {1}> ()", "c = Greater (n, one)",
    "alone = Equal (n, one) c = Not (alone)",
])  # fmt: skip
def test_a_branch_that_is_the_same_for_every_size(condition: str) -> None:
    _, graph = exported(branching(condition), torch.ones(3, 5))
    assert torch.equal(graph(torch.ones(2, 9)), torch.full((2, 9), 10.0))


@pytest.mark.parametrize("choose", [
    "k = Min (n1, six)", "k = Max (half, six)",
    "both = Concat <axis = 0> (half, six) k = ReduceMax <keepdims = 1> (both)",
    *(f"c = Less (n1, six) d = Less (half, two) e = {op} (c, d) e_int = Cast <to = 7> (e) "
      "k = Add (e_int, two)" for op in ("And", "Or")),
])  # fmt: skip
def test_a_choice_between_sizes_stays_one(choose: str) -> None:
    """The first k of n tokens: right at each n that the program is for, and each is some program's."""
    model = parsed(f"""
        g (float[b, n] x) => (y)
        <int64[1] six = {{6}}, int64[1] one = {{1}}, int64[1] zero = {{0}}, int64[1] two = {{2}}>
        {{
            n1 = Shape <start = 1, end = 2> (x)
            half = Div (n1, two)
            {choose}
            y = Slice (x, zero, k, one)
        }}""")
    served = set()
    for example in (4, 6, 9):
        _, graph = exported(model, torch.randn(3, example))
        (x,) = graph.graph.find_nodes(op="placeholder")
        least, most = limits(x.meta["val"].shape[1])
        for n in (n for n in (4, 6, 14) if least <= n <= most):
            x = torch.randn(2, n)
            assert torch.equal(graph(x), run(open_session(model, threads=1), {"x": x})[0])
            served.add(n)
    assert served == {4, 6, 14}


def test_early_stop_is_traced_at_its_full_budget() -> None:
    model = looped(4, below("ReduceLogSumExp"), "small", 1e-3)
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
], ids=str)  # fmt: skip
def test_a_wild_size_is_refused_before_memory_is_taken(case: Case) -> None:
    given = {f"x{n}": torch.as_tensor(x) for n, x in enumerate(case.inputs) if not isinstance(x, Const)}
    with pytest.raises(InputError, match=r"may take .* at once"):
        ours(model_of(case), given)


def test_a_shape_has_no_numbers_beyond_64_bits() -> None:
    with pytest.raises(RuntimeError, match="a shape of a number of 81 bits"):
        ours(model_of(c("Mul", Const([1 << 40]), Const(1 << 40))), {})
