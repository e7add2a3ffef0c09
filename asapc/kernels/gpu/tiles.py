"""What the attention kernels share: how a tile of scores is formed, and how large a tile may be.

Logarithms are of base 2 inside a kernel: the loops are bound by the instructions an entry takes, and the
hardware's exponential is exp2. The duals that one half-step leaves for the next stay in that unit.
Clouds are [B, H, count, dim], any strides.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asapc.operators.sinkhorn import factor_value

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIM = 256
MIN_BLOCK = 16  # of tl.dot, on every axis
FEWEST = 5  # half-steps, for which a matrix is formed and kept; a row c-transform must be among them
FLOAT32_PRECISION = "tf32x3"  # of tl.dot on float32 operands: three products for the 24 bits
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
# A sum of exponentials that were shifted by an older dual is right in between: what float32 flushes to
# zero is then less than a rounding of it.
LEAST, MOST = tl.constexpr(2.0**-80), tl.constexpr(2.0**100)
# Triton's interpreter multiplies bfloat16 as if its bits were integers; in float32 it is exact.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


class Tile(NamedTuple):
    """x points of one program, y points of one step, the features of one product; the launch."""

    x: int
    y: int
    d: int
    num_warps: int
    num_stages: int


class Scores(NamedTuple):
    """What scores are made of.

    q: [B, H, N, D]; k: [B, H, M, D]; keep: [B, M] bool; bias: broadcastable to [B, H, N, M].
    """

    q: Tensor
    k: Tensor
    keep: Tensor | None
    bias: Tensor | None
    multiplier: float

    def spread(self) -> Scores:
        """With all axes of the bias."""
        return self._replace(bias=spread_bias(self.bias, self.q, self.k))

    def turned(self) -> Scores:
        """Of the keys and the queries, once they are spread."""
        bias = None if self.bias is None else self.bias.mT
        return self._replace(q=self.k, k=self.q, bias=bias)


def block_of(count: int, limit: int) -> int:
    """The power of two that holds `count`, from MIN_BLOCK to `limit`."""
    return max(MIN_BLOCK, min(limit, triton.next_power_of_2(max(count, 1))))


def is_half(*tensors: Tensor) -> bool:
    """Whether a product of these runs in their own half precision: one dtype, and that not float32."""
    return tensors[0].dtype != torch.float32 and all(t.dtype == tensors[0].dtype for t in tensors)


def pitch_of(k: Tensor) -> int:
    """Entries between two rows of a kept matrix, a multiple of 16, which the compiler counts on."""
    return triton.cdiv(k.shape[2], 16) * 16


def strides_of(tensor: Tensor | None, axes: int) -> tuple[int, ...]:
    return (0,) * axes if tensor is None else tensor.stride()


def spread_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A view [B, H, N, M] of the bias: axes it does not have get stride 0."""
    return None if bias is None else bias.broadcast_to((*q.shape[:3], k.shape[2]))


def split_factor(
    output_factor: Sequence[float], queries: int, keys: int, keep: Tensor | None
) -> tuple[float, Tensor | None]:
    """The output factor as one number, or as float32 [B] where it counts active keys."""
    factor = factor_value(output_factor, queries, keys, keep)
    if isinstance(factor, Tensor):
        return 1.0, factor.reshape(-1).float()
    return factor, None


def supported(q: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None) -> str | None:
    """None where the attention kernels can run these inputs, else why not, in one sentence."""
    given = {"q": q, "k": k, "v": v, "bias": bias}
    for name, tensor in given.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"the GPU kernels compute in float32, and {name} is {tensor.dtype}"
    for name, tensor in given.items():
        if tensor is not None and name != "bias" and tensor.ndim != 4:
            return f"the GPU kernels take a {name} of 4 axes, got {tensor.ndim}"
        if tensor is not None and tensor.device != q.device:
            return f"the GPU kernels take inputs of one device, and {name} is on {tensor.device}"
    if q.shape[3] > MAX_DIM:
        return f"the GPU kernels hold up to {MAX_DIM} features of a token, and D is {q.shape[3]}"
    if v is not None and v.shape[3] > MAX_DIM:
        return f"the GPU kernels hold up to {MAX_DIM} features of a token, and E is {v.shape[3]}"
    return None


@triton.jit
def load_rows(
    p_x, o_x, m_x, o_d,
    dim,
    stride_n, stride_d,
    AS_FLOAT32: tl.constexpr,
    ALL_ROWS: tl.constexpr = False,
    ALL_D: tl.constexpr = False,
):  # fmt: skip
    """Points o_x, features o_d: [BLOCK_X, BLOCK_D], 0 where masked, so that a NaN there is not read.

    ALL_ROWS, ALL_D: none of them is masked.
    """
    places = p_x + o_x[:, None] * stride_n + o_d[None, :].to(tl.int64) * stride_d
    if ALL_ROWS and ALL_D:
        tile = tl.load(places)
    elif ALL_ROWS:
        tile = tl.load(places, mask=(o_d < dim)[None, :], other=0.0)
    elif ALL_D:
        tile = tl.load(places, mask=m_x[:, None], other=0.0)
    else:
        tile = tl.load(places, mask=m_x[:, None] & (o_d < dim)[None, :], other=0.0)
    if AS_FLOAT32:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a b in float32; a and b have one dtype."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def products(
    b_x, p_x, p_y, o_x, o_y, m_x, m_y,
    dim,
    stride_xn, stride_xd, stride_yn, stride_yd,
    AS_FLOAT32: tl.constexpr, PRECISION: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNKED: tl.constexpr, ALL_ROWS: tl.constexpr = False,
    ALL_D: tl.constexpr = False,
):  # fmt: skip
    """x.y: [BLOCK_X, BLOCK_Y] float32, nothing masked yet.

    b_x: the features of o_x [BLOCK_X, BLOCK_D]; where they are CHUNKED, BLOCK_D at a time are read.
    """
    o_d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_X, BLOCK_Y], tl.float32)
    if CHUNKED:
        for start in range(0, dim, BLOCK_D):
            x = load_rows(p_x, o_x, m_x, start + o_d, dim, stride_xn, stride_xd, AS_FLOAT32)
            y = load_rows(p_y, o_y, m_y, start + o_d, dim, stride_yn, stride_yd, AS_FLOAT32)
            total = product(x, tl.trans(y), total, PRECISION)
    else:
        y = load_rows(p_y, o_y, m_y, o_d, dim, stride_yn, stride_yd, AS_FLOAT32, ALL_ROWS, ALL_D)
        total = product(b_x, tl.trans(y), total, PRECISION)
    return total


@triton.jit
def load_bias(p_bias, o_x, o_y, m_x, m_y, stride_x, stride_y):
    """Of points o_x and o_y: [BLOCK_X, BLOCK_Y] float32, 0 where masked."""
    places = p_bias + o_x[:, None] * stride_x + o_y[None, :] * stride_y
    return tl.load(places, mask=m_x[:, None] & m_y[None, :], other=0.0).to(tl.float32)


@triton.jit
def logit_tile(
    b_x, p_x, p_y, p_keep, p_bias, p_dual, o_x, m_x, start,
    count_y, dim,
    stride_xn, stride_xd, stride_yn, stride_yd, stride_keep_n, stride_bias_x, stride_bias_y,
    stride_dual_n,
    scale,
    HAS_KEEP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DUAL: tl.constexpr,
    AS_FLOAT32: tl.constexpr, PRECISION: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNKED: tl.constexpr, WHOLE: tl.constexpr, ALL_D: tl.constexpr,
):  # fmt: skip
    """log2 of exp(S + dual of y) for the BLOCK_Y points y from `start` on, -inf where they are masked.

    scale: of x.y, log2(e) included.  WHOLE: all these y exist.  Returns also
    which points y they are, and which of them are active.
    """
    o_y = start + tl.arange(0, BLOCK_Y).to(tl.int64)
    m_y = o_y < count_y
    if HAS_KEEP:
        m_y = load_keep(p_keep, o_y, m_y, stride_keep_n)
    masked: tl.constexpr = HAS_KEEP or not WHOLE
    logits = scale * products(
        b_x, p_x, p_y, o_x, o_y, m_x, m_y, dim, stride_xn, stride_xd, stride_yn, stride_yd, AS_FLOAT32,
        PRECISION, BLOCK_X, BLOCK_Y, BLOCK_D, CHUNKED, not masked, ALL_D,
    )  # fmt: skip
    if HAS_DUAL:
        if masked:
            b_dual = tl.load(p_dual + o_y * stride_dual_n, mask=m_y, other=0.0).to(tl.float32)
        else:
            b_dual = tl.load(p_dual + o_y * stride_dual_n).to(tl.float32)
        if masked:
            b_dual = tl.where(m_y, b_dual, float("-inf"))
        logits += b_dual[None, :]
    elif masked:
        logits += tl.where(m_y, 0.0, float("-inf"))[None, :]
    if HAS_BIAS:
        logits += LOG2_E * load_bias(p_bias, o_x, o_y, m_x, m_y, stride_bias_x, stride_bias_y)
    return logits, o_y, m_y


@triton.jit
def load_keep(p_keep, o_x, m_x, stride):
    """Which points o_x [BLOCK_X] are inside the tensor and active."""
    return m_x & (tl.load(p_keep + o_x * stride, mask=m_x, other=0) != 0)


@triton.jit
def with_mass(p_keep, stride, o_x, count, KEEP: tl.constexpr):
    """Which points o_x [BLOCK_X] exist and, if KEEP, are active."""
    m_x = o_x < count
    if KEEP:
        m_x = load_keep(p_keep, o_x, m_x, stride)
    return m_x


@triton.jit
def load_dual(p_dual, o_x, m_x, stride):
    """A dual of the points o_x [BLOCK_X], 0 where masked."""
    return tl.load(p_dual + o_x * stride, mask=m_x, other=0.0).to(tl.float32)


@triton.jit
def in_range(total):
    """Of sums of exponentials; a NaN is not."""
    return (total >= LEAST) & (total <= MOST)


@triton.jit
def finite_or_zero(maximum):
    """What exponents are shifted by: -inf - (-inf) would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def log_sum(logits, AXIS: tl.constexpr):
    """The logarithm of the sum of exponentials along an axis, in log2; -inf of nothing."""
    shift = finite_or_zero(tl.max(logits, AXIS))
    return shift + tl.log2(tl.sum(tl.exp2(logits - tl.expand_dims(shift, AXIS)), AXIS))


@triton.jit
def add_exponentials(maximum, total, logits, AXIS: tl.constexpr):
    """The running maximum of logits in log2, and the total of their exponentials relative to it, a tile
    further along an axis."""
    larger = tl.maximum(maximum, tl.max(logits, AXIS))
    shift = finite_or_zero(larger)
    added = tl.sum(tl.exp2(logits - tl.expand_dims(shift, AXIS)), AXIS)
    return larger, total * tl.exp2(maximum - shift) + added
