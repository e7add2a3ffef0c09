"""ATen to ONNX by torch's exporter, without the metadata that it leaves in the file."""

from __future__ import annotations

import logging
import math
import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import onnx_ir
import torch
from onnx_ir.passes import common
from onnxscript import opset18, rewriter
from onnxscript.rewriter.rules.common._no_op import rules as no_ops
from torch.export import ExportedProgram

from asapc.errors import InputError
from asapc.terminal.printed import reason

op: Any = opset18  # its types speak of arrays, not of values in a graph
ATTENTION_OPSET = 23  # has an operator for it
_NOISY = ("torch.onnx", "onnxscript", "onnx_ir")
# To no_ops 1e-8 is 0 and 1.00001 is 1: they drop the constant of a division.
_EXACT = tuple(rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule not in list(no_ops))


def translate(exported: ExportedProgram, opset: int, plain_attention: bool = False) -> onnx_ir.Model:
    """The program in standard operators of `opset`; names of values are those of its nodes.

    plain_attention: its scaled_dot_product_attention has scale 1 and nothing but a mask added to it.
    Raises InputError for an operator the exporter does not know.
    """
    table: dict[Any, Any] = {
        torch.ops.aten.sort.stable: _stable_sort,
        torch.ops.aten.logsumexp.default: _log_sum_exp,
        torch.ops.aten.sym_stride.int: _stride,
        torch.ops.aten._cdist_forward.default: _distances,
        torch.ops.aten._euclidean_dist.default: _distances,
        torch.ops.aten.amax.default: partial(_extreme, op.ReduceMax),
        torch.ops.aten.amin.default: partial(_extreme, op.ReduceMin),
    }
    if plain_attention and opset < ATTENTION_OPSET:
        table[torch.ops.aten.scaled_dot_product_attention.default] = _attention
    levels = {name: logging.getLogger(name).level for name in _NOISY}
    try:
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        exact = patch.object(rewriter, "_DEFAULT_REWRITE_RULES", _EXACT)
        with warnings.catch_warnings(action="ignore"), torch.no_grad(), exact:
            program = torch.onnx.export(
                exported, dynamo=True, opset_version=opset, verbose=False, optimize=True,
                custom_translation_table=table,
            )  # fmt: skip
    except Exception as error:  # the exporter's errors share no public base class
        raise InputError("the compiled program can be written in ONNX", got=cause(error)) from error
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    assert program is not None
    model: onnx_ir.Model = program.model
    common.ClearMetadataAndDocStringPass()(model)  # stack traces and source paths of this machine
    graph = model.graph
    inner = [value for node in graph.all_nodes() for value in node.outputs]
    for value in [*graph.inputs, *graph.outputs, *graph.initializers.values(), *inner]:
        value.metadata_props.clear()
    return model


def _stable_sort(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """aten.sort.stable: of equal entries TopK takes the one with the lower index first."""
    length = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
    return op.TopK(x, length, axis=dim, largest=int(descending), sorted=1)


def _log_sum_exp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    """-inf where all is, inf where any is. In ONNX Runtime three times as fast as ReduceLogSumExp."""
    axes = op.Constant(value_ints=[*dim])
    top = op.ReduceMax(x, axes)
    zero, endless = (op.CastLike(op.Constant(value_float=value), top) for value in (0.0, math.inf))
    top = op.Where(op.Equal(op.Abs(top), endless), zero, top)  # IsInf knows no float16
    total = op.Add(op.Log(op.ReduceSum(op.Exp(op.Sub(x, top)), axes)), top)
    return total if keepdim else op.Squeeze(total, axes)


def _extreme(reduced: Any, x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    """Of all entries without axes, which torch's translation wants to be named."""
    axes = [op.Constant(value_ints=[*dim])] if dim else []
    return reduced(x, *axes, keepdims=int(keepdim))


def _stride(x: Any, dim: int) -> Any:
    """torch may name a size in the body of a loop by a stride; the inputs of a loop are contiguous."""
    return op.ReduceProd(op.Shape(x, start=dim + 1), keepdims=0)


def _distances(x: Any, y: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """|x_i - y_j|_p [.., N, M] by differences of coordinates, which keep small distances exact."""
    rows, columns = (op.Constant(value_ints=[axis]) for axis in (-2, -3))
    apart = op.Sub(op.Unsqueeze(x, rows), op.Unsqueeze(y, columns))
    last = op.Constant(value_ints=[-1])
    if p == 2.0:
        return op.ReduceL2(apart, last, keepdims=0)
    if p == 1.0:
        return op.ReduceL1(apart, last, keepdims=0)
    raise ValueError(f"distances of order {p:g} have no translation")


def _attention(q: Any, k: Any, v: Any, attn_mask: Any = None, *_: Any, **__: Any) -> Any:
    """As runtimes fuse it; torch's translation puts two reshapes around the transpose of the keys."""
    scores = op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2]))
    if attn_mask is not None:
        scores = op.Add(scores, attn_mask)
    return op.MatMul(op.Softmax(scores, axis=-1), v)


def cause(error: BaseException) -> str:
    """The innermost error on one line; the outer ones say how to report it to PyTorch."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {reason(error)}"

