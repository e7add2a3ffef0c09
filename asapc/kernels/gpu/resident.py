"""The whole finite loop in one launch: one program per head holds its score tile in registers.

N and M are at most RESIDENT_LIMIT. The scores are formed once, every half-step is a reduction over
the tile in the log domain, and the last row c-transform comes out of the product with the values.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asapc.kernels.gpu.tiles import (
    FLOAT32_PRECISION,
    block_of,
    finite_or_zero,
    is_half,
    load_dual,
    load_keep,
    load_rows,
    product,
    score_tile,
    split_factor,
    spread_bias,
    strides_of,
)
from asapc.kernels.loop import Loop
from asapc.kernels.thresholds import thresholds

RESIDENT_LIMIT = 128  # what the tiles are written for; the thresholds may ask for less
BIAS_LIMIT = 64  # with a bias, the addresses of a larger tile spill for sm_90 (benchmarks/sm90.py)


def fits(q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    longest = max(q.shape[2], k.shape[2])
    limit = RESIDENT_LIMIT if bias is None else BIAS_LIMIT
    return longest <= min(limit, thresholds(q, k).resident_tokens)


def resident_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    dual: Tensor | None,
    loop: Loop,
) -> Tensor:
    """A v [B, H, N, E] in v's dtype, for N and M that fit.  Arguments as kernels.native's."""
    batch, heads, queries, dim = q.shape
    keys, value_dim = k.shape[2], v.shape[3]
    out = torch.empty((batch, heads, queries, value_dim), dtype=v.dtype, device=q.device)
    if batch * heads * queries == 0:
        return out
    bias = spread_bias(bias, q, k)
    rows_first = loop.first_side == "row"
    closes_rows = loop.half_steps > 0 and rows_first == (loop.half_steps % 2 == 1)
    # A row c-transform at the end is part of the product, so the loop proper is one half-step shorter.
    before = loop.half_steps - closes_rows
    factor, factors = split_factor(loop.output_factor, queries, keys, keep)
    block_x, block_y = block_of(queries, RESIDENT_LIMIT), block_of(keys, RESIDENT_LIMIT)
    points = block_x * block_y
    half = is_half(q, k)
    block_d = block_of(dim, 128 if half else 32)
    # For sm_90 these compile without spills. A float32 product loads all its rows into registers.
    block_e = block_of(value_dim, 64 if is_half(v) else (32 if block_y > 64 else 16))
    _resident[(batch * heads,)](
        q, k, v, keep, bias, dual, factors, out,
        heads, queries, keys, dim, value_dim,
        *q.stride(), *k.stride(), *v.stride(), *strides_of(keep, 2), *strides_of(bias, 4),
        *strides_of(dual, 3),
        loop.score_multiplier,
        factor,
        before // 2,
        ODD=before % 2 == 1,
        ROWS_FIRST=rows_first,
        CLOSES_ROWS=closes_rows,
        HAS_KEEP=keep is not None,
        HAS_BIAS=bias is not None,
        HAS_DUAL=dual is not None,
        HAS_FACTORS=factors is not None,
        AS_FLOAT32=not half,
        PRECISION=FLOAT32_PRECISION,
        BLOCK_X=block_x,
        BLOCK_Y=block_y,
        BLOCK_D=block_d,
        BLOCK_E=block_e,
        CHUNKED=dim > block_d,
        num_warps=max(1, min(8, points // 1024) if half else min(16, points // 512)),
        num_stages=1,
    )  # fmt: skip
    return out


@triton.jit
def _rows_closed(scores, g, log_mu):
    """T_Q: f [BLOCK_X] from g [BLOCK_Y]; 0 where a row sees no active key."""
    logits = scores + g[None, :]
    maximum = tl.max(logits, 1)
    total = tl.sum(tl.exp(logits - finite_or_zero(maximum)[:, None]), 1)
    return tl.where(total == 0.0, 0.0, log_mu - maximum - tl.log(total))


@triton.jit
def _columns_closed(scores, f, log_nu, m_y):
    """T_K: g [BLOCK_Y] from f [BLOCK_X]; -inf where there is no active key, 0 where no query sees it."""
    logits = scores + f[:, None]
    maximum = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - finite_or_zero(maximum)[None, :]), 0)
    g = tl.where(total == 0.0, 0.0, log_nu - maximum - tl.log(total))
    return tl.where(m_y, g, float("-inf"))


@triton.jit
def _resident(
    p_q, p_k, p_v, p_keep, p_bias, p_dual, p_factors, p_out,
    heads, queries, keys, dim, value_dim,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd, stride_vb,
    stride_vh, stride_vn, stride_vd, stride_keep_b, stride_keep_n, stride_bias_b, stride_bias_h,
    stride_bias_x, stride_bias_y, stride_dual_b, stride_dual_h, stride_dual_n,
    scale, factor, pairs,
    ODD: tl.constexpr, ROWS_FIRST: tl.constexpr, CLOSES_ROWS: tl.constexpr, HAS_KEEP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DUAL: tl.constexpr, HAS_FACTORS: tl.constexpr,
    AS_FLOAT32: tl.constexpr, PRECISION: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_x = tl.arange(0, BLOCK_X).to(tl.int64)
    o_y = tl.arange(0, BLOCK_Y).to(tl.int64)
    m_x = o_x < queries
    m_y = o_y < keys
    p_q += i_b * stride_qb + i_h * stride_qh
    p_k += i_b * stride_kb + i_h * stride_kh
    p_v += i_b * stride_vb + i_h * stride_vh
    if HAS_KEEP:
        m_y = load_keep(p_keep + i_b * stride_keep_b, o_y, m_y, stride_keep_n)
    if HAS_BIAS:
        p_bias += i_b * stride_bias_b + i_h * stride_bias_h
    o_d = tl.arange(0, BLOCK_D)
    b_q = load_rows(p_q, o_x, m_x, o_d, dim, stride_qn, stride_qd, AS_FLOAT32)
    scores = score_tile(
        b_q, p_q, p_k, p_bias, o_x, o_y, m_x, m_y, dim, stride_qn, stride_qd, stride_kn, stride_kd,
        stride_bias_x, stride_bias_y, scale, HAS_BIAS, AS_FLOAT32, PRECISION, BLOCK_X, BLOCK_Y,
        BLOCK_D, CHUNKED,
    )  # fmt: skip
    scores = tl.where(m_x[:, None] & m_y[None, :], scores, float("-inf"))
    log_mu = -tl.log(queries * tl.full([BLOCK_X], 1.0, tl.float32))
    log_nu = -tl.log(keys * tl.full([BLOCK_Y], 1.0, tl.float32))
    f = tl.zeros([BLOCK_X], tl.float32)
    g = tl.zeros([BLOCK_Y], tl.float32)
    if HAS_DUAL:
        p_dual += i_b * stride_dual_b + i_h * stride_dual_h
        if ROWS_FIRST:
            g = load_dual(p_dual, o_y, m_y, stride_dual_n)
        else:
            f = load_dual(p_dual, o_x, m_x, stride_dual_n)
    for _ in range(pairs):
        if ROWS_FIRST:
            f = _rows_closed(scores, g, log_mu)
            g = _columns_closed(scores, f, log_nu, m_y)
        else:
            g = _columns_closed(scores, f, log_nu, m_y)
            f = _rows_closed(scores, g, log_mu)
    if ODD:
        if ROWS_FIRST:
            f = _rows_closed(scores, g, log_mu)
        else:
            g = _columns_closed(scores, f, log_nu, m_y)
    if CLOSES_ROWS:
        logits = scores + g[None, :]
    else:
        logits = (scores + f[:, None]) + g[None, :]
    maximum = finite_or_zero(tl.max(logits, 1))
    weights = tl.exp(logits - maximum[:, None])
    if CLOSES_ROWS:
        total = tl.sum(weights, 1)
        mass = tl.where(total == 0.0, 0.0, 1.0 / (total * queries))
    else:
        mass = tl.exp(maximum)
    if HAS_FACTORS:
        factor = tl.load(p_factors + i_b)
    p_out += i_bh * queries * value_dim
    for start in range(0, value_dim, BLOCK_E):
        o_e = start + tl.arange(0, BLOCK_E)
        b_v = load_rows(p_v, o_y, m_y, o_e, value_dim, stride_vn, stride_vd, False)
        out = product(weights.to(b_v.dtype), b_v, tl.zeros([BLOCK_X, BLOCK_E], tl.float32), PRECISION)
        out *= (mass * factor)[:, None]
        places = p_out + o_x[:, None] * value_dim + o_e[None, :]
        tl.store(places, out.to(p_out.dtype.element_ty), mask=m_x[:, None] & (o_e < value_dim)[None, :])
