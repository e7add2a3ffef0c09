"""ONNX operators that are layers, and those that run subgraphs (see ops.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asapc.inputs.onnx.host import ints, known, tensor_of

Body = Callable[..., list[Any]]

MAX_TRIPS = 1000  # of a Loop: it is unrolled

# Layers


def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *,
    axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, outputs: int,
) -> Tensor:  # fmt: skip
    if outputs > 1:
        raise ValueError("LayerNormalization with its mean or deviation as output is not supported")
    shape = list(x.shape[axis % x.dim() :])
    return F.layer_norm(x, shape, scale, bias, epsilon)


def rms_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return F.rms_norm(x, list(x.shape[axis % x.dim() :]), scale, epsilon)


def batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *,
    epsilon: float = 1e-5, momentum: float = 0.9, training_mode: int = 0,
) -> Tensor:  # fmt: skip
    if training_mode:
        raise ValueError("BatchNormalization in training mode is not supported")
    return F.batch_norm(x, mean, variance, scale, bias, eps=epsilon)


def dropout(
    x: Any, ratio: Any = None, training: Any = None, *, seed: int = 0, outputs: int
) -> tuple[Any, ...]:
    if training is not None and known(training, "the mode of Dropout"):
        raise ValueError("Dropout in training mode is not supported")
    return (x,) if outputs == 1 else (x, torch.ones_like(x, dtype=torch.bool))


CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None, group: int = 1, kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None, strides: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    if auto_pad not in ("NOTSET", "VALID"):
        raise ValueError(f"Conv with auto_pad {auto_pad!r} is not supported")
    axes = weight.dim() - 2
    pads = pads or [0] * 2 * axes
    before, after = pads[:axes], pads[axes:]
    if before != after:
        x = F.pad(x, [amount for axis in reversed(range(axes)) for amount in (before[axis], after[axis])])
        before = [0] * axes
    return CONV[axes](x, weight, bias, strides or 1, before, dilations or 1, group)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *,
    is_causal: int = 0, kv_num_heads: int = 0, q_num_heads: int = 0, scale: float | None = None,
    softcap: float = 0.0, softmax_precision: int = 0, qk_matmul_output_mode: int = 0, outputs: int,
) -> Tensor:  # fmt: skip
    """Rows only, so never compiled: enough of it to carry the layers around it."""
    if softcap or outputs > 1:
        raise ValueError("Attention with a soft cap, a cache or its scores as output is not supported")
    flat = q.dim() == 3
    if flat:
        q, k, v = (
            x.unflatten(-1, (heads, -1)).transpose(1, 2)
            for x, heads in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
        )
    if is_causal and mask is not None:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        mask = mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -math.inf)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=bool(is_causal) and mask is None, scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2).flatten(2) if flat else out


# Control flow


def loop(trips: Any, condition: Any, *carried: Any, body: Body) -> tuple[Any, ...]:
    """Unrolled. A condition that depends on data stops a run early, and a trace not at all: under
    torch.export the comparison below is answered as every comparison with NaN (passes/capture.py)."""
    count = MAX_TRIPS + 1 if trips is None else ints(trips, "the trip count of Loop")[0]
    values, scanned, trip = list(carried), [], 0
    go_on = True if condition is None else condition
    while trip < count and _is_true(go_on):
        if trip == MAX_TRIPS or (count > MAX_TRIPS and isinstance(go_on, Tensor)):
            raise ValueError(f"a Loop must have a trip count of at most {MAX_TRIPS}")
        go_on, *results = body(trip, go_on, *values)
        values = results[: len(carried)]
        scanned.append(results[len(carried) :])
        trip += 1
    stacked = (torch.stack([tensor_of(x) for x in found]) for found in zip(*scanned, strict=True))
    return (*values, *stacked)


def _is_true(condition: Any) -> bool:
    if not isinstance(condition, Tensor):
        return known(condition, "the condition of Loop")
    return not bool(torch.lt(condition.reshape(()).to(torch.float32), 0.5))


def branch(condition: Any, *, then_branch: Body, else_branch: Body) -> tuple[Any, ...]:
    return tuple(then_branch() if known(condition, "the condition of If") else else_branch())
