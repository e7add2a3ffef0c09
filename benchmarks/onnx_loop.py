"""A matrix-scaling loop under ONNX Runtime, in three forms: what asapc's files could hold.

    python benchmarks/onnx_loop.py                    # B8 H8, N = 16 .. 512, T = 20 and 100, two threads
    python benchmarks/onnx_loop.py --tokens 256 --half-steps 20 -o FOLDER

    log        every half-step is a ReduceLogSumExp over the scores
    products   two half-steps of that kind, the others as matrix-vector products, unrolled: asapc's form,
               but for the kernel that it forms anew every nine half-steps
    Loop       the same with the products inside an ONNX `Loop`

All start at the rows and read the scores [B, H, N, N] once more to form the plan.  Speed is printed
only after parity with the log domain in float64.  Candidates take turns; figures are medians.
With -o, onnx_loop.json and onnx_loop.md are written there.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import numpy as np
import onnx
import torch
from attention import environment
from onnx import NodeProto, TensorProto, helper, numpy_helper
from written import parser_of, write_results

from asapc.inputs.onnx.session import open_session
from asapc.measure.timing import interleaved_medians

FORMS = ("log", "products", "Loop")
ALLOWED = 1e-4  # of the plan, whose entries are of order 1
OPSET = 18


def model(form: str, half_steps: int, heads: int) -> onnx.ModelProto:
    """scores [B, H, N, N] -> N times the plan after an even number of half-steps, rows first."""
    nodes = [
        *_text("n = Shape<start=3>(scores)", "length = CastLike(n, scores)", "log_n = Log(length)"),
        *_log_steps(half_steps if form == "log" else 2),
        *_text(
            "with_rows = Add(scores, f)", "with_both = Add(with_rows, g)", "kernel = Exp(with_both)"
        ),
    ]
    pairs = half_steps // 2 - 1
    if form == "log":
        nodes += _text("plan = Mul(kernel, length)")
    else:
        nodes += _text(
            "turned = Transpose<perm=[0,1,3,2]>(kernel)", "zero = Sub(f, f)",
            "one = Exp(zero)", "mass = Reciprocal(length)",
        )  # fmt: skip
        nodes += _loop(pairs) if form == "Loop" else _unrolled(pairs)
        nodes += _text(
            "v_row = Transpose<perm=[0,1,3,2]>(v)", "scaled = Mul(u, kernel)",
            "both = Mul(scaled, v_row)", "plan = Mul(both, length)",
        )  # fmt: skip
    constants = {"last": np.array([-1]), "rows": np.array([-2]), "pairs": np.array(pairs),
                 "tiny": np.array(np.finfo(np.float32).tiny)}  # fmt: skip
    inner = [own for node in nodes for part in node.attribute for own in part.g.node]
    used = {name for node in [*nodes, *inner] for name in node.input}
    graph = helper.make_graph(
        nodes, form,
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", heads, "n", "n"])],
        [helper.make_tensor_value_info("plan", TensorProto.FLOAT, ["batch", heads, "n", "n"])],
        [numpy_helper.from_array(own, name) for name, own in constants.items() if name in used],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    onnx.checker.check_model(made)
    return made


def _text(*lines: str) -> list[NodeProto]:
    """Nodes of lines like "y = Op<a=1>(x)"."""
    body = "\n".join(lines)
    graph = onnx.parser.parse_graph(f"g () => () {{ {body} }}")
    return list(graph.node)


def _log_steps(half_steps: int) -> list[NodeProto]:
    """Duals f [B, H, N, 1] and g [B, H, 1, N] after so many c-transforms in the log domain."""
    nodes, g = [], None
    for step in range(half_steps // 2):
        ends = step == half_steps // 2 - 1
        f, new = ("f", "g") if ends else (f"f_{step}", f"g_{step}")
        given = "scores" if g is None else f"r_{step}"
        nodes += _text(
            *([] if g is None else [f"r_{step} = Add(scores, {g})"]),
            f"a_{step} = ReduceLogSumExp({given}, last)", f"b_{step} = Neg(a_{step})",
            f"{f} = Sub(b_{step}, log_n)", f"c_{step} = Add(scores, {f})",
            f"d_{step} = ReduceLogSumExp(c_{step}, rows)", f"e_{step} = Neg(d_{step})",
            f"{new} = Sub(e_{step}, log_n)",
        )  # fmt: skip
        g = new
    return nodes


def _pair(v: str, new_u: str, new_v: str, prefix: str) -> list[NodeProto]:
    return _text(
        f"{prefix}a = MatMul(kernel, {v})", f"{prefix}b = Max({prefix}a, tiny)",
        f"{new_u} = Div(mass, {prefix}b)", f"{prefix}c = MatMul(turned, {new_u})",
        f"{prefix}d = Max({prefix}c, tiny)", f"{new_v} = Div(mass, {prefix}d)",
    )  # fmt: skip


def _unrolled(pairs: int) -> list[NodeProto]:
    nodes, v = [], "one"
    for pair in range(pairs):
        ends = pair == pairs - 1
        u, new = ("u", "v") if ends else (f"u_{pair}", f"v_{pair}")
        nodes += _pair(v, u, new, f"p{pair}_")
        v = new
    return nodes


def _loop(pairs: int) -> list[NodeProto]:
    column = functools.partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT,
                               shape=[None, None, None, 1])  # fmt: skip
    flag = functools.partial(helper.make_tensor_value_info, elem_type=TensorProto.BOOL, shape=[])
    body = helper.make_graph(
        [*_text("more = Identity(was_more)"), *_pair("old_v", "new_u", "new_v", "")], "pair",
        [helper.make_tensor_value_info("number", TensorProto.INT64, []), flag("was_more"),
         column("old_u"), column("old_v")],
        [flag("more"), column("new_u"), column("new_v")],
    )  # fmt: skip
    return [helper.make_node("Loop", ["pairs", "", "one", "one"], ["u", "v"], body=body)]


def exact(scores: np.ndarray, half_steps: int) -> np.ndarray:
    """The plan in float64, in the log domain."""
    own = torch.from_numpy(scores).double()
    log_n = float(np.log(own.shape[-1]))
    f, g = torch.zeros_like(own[..., :1]), torch.zeros_like(own[..., :1, :])
    for _ in range(half_steps // 2):
        f = -log_n - (own + g).logsumexp(-1, keepdim=True)
        g = -log_n - (own + f).logsumexp(-2, keepdim=True)
    return ((own + f + g).exp() * own.shape[-1]).numpy()


def measure(tokens: int, half_steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """Errors and times of the three forms.  Raises SystemExit if one is wrong."""
    random = np.random.default_rng(options.seed)
    shape = (options.batch, options.heads, tokens, tokens)
    scores = random.standard_normal(shape).astype(np.float32)
    expected = exact(scores, half_steps)
    calls, errors, sizes = {}, {}, {}
    for form in FORMS:
        made = model(form, half_steps, options.heads)
        sizes[form] = len(made.SerializeToString())
        session = open_session(made, options.threads)
        calls[form] = functools.partial(session.run, None, {"scores": scores})
        errors[form] = float(np.abs(calls[form]()[0] - expected).max())
        if not errors[form] <= ALLOWED * max(1.0, float(expected.max())):
            place = f"{form}, N {tokens}, T {half_steps}"
            raise SystemExit(f"onnx_loop.py: {place}: off by {errors[form]:.2e}")
    times = interleaved_medians(calls, repeats=options.repeats, min_time=options.min_time)
    return {"tokens": tokens, "half_steps": half_steps, "max_abs_error": errors, "bytes": sizes,
            "rows": times}  # fmt: skip


def table(document: dict[str, Any]) -> str:
    """Markdown of all sizes."""
    shape, threads = document["shape"], document["threads"]
    lines = [
        f"### The loop under ONNX Runtime {document['onnxruntime']}, {shape}, float32, {threads} threads",
        "",
        "| N | T | " + " | ".join(f"{form} ms (kB)" for form in FORMS)
        + " | log / products | Loop / products |",
        "|---:|---:|" + "---:|" * (len(FORMS) + 2),
    ]  # fmt: skip
    for result in document["results"]:
        own = {form: result["rows"][form]["median_ms"] for form in FORMS}
        cells = [f"{own[form]:.2f} ({result['bytes'][form] / 1000:.1f})" for form in FORMS]
        cells += [f"{own[form] / own['products']:.2f}x" for form in ("log", "Loop")]
        lines.append(f"| {result['tokens']} | {result['half_steps']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__, batch=8, heads=8, tokens=[16, 64, 256, 512], threads=2, repeats=7, seed=0)
    parser.add_argument("--half-steps", type=int, nargs="+", default=[20, 100], help="even, from 4")
    parser.add_argument("--min-time", type=float, default=3.0, help="seconds a size")
    options = parser.parse_args()
    if any(count < 4 or count % 2 for count in options.half_steps):
        parser.error("--half-steps must be even and at least 4")

    import onnxruntime

    document = {
        "environment": environment(cpu=True),
        "onnxruntime": onnxruntime.__version__,
        "threads": options.threads,
        "shape": f"B{options.batch} H{options.heads}",
        "results": [measure(n, t, options) for n in options.tokens for t in options.half_steps],
    }
    print(table(document))
    write_results(options.out, "onnx_loop", document, table(document))


if __name__ == "__main__":
    main()
