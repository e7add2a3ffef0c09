"""The loop with rows and columns updated in one sweep over the scores, for heads of middling length.

A program holds the scores of a stripe of queries with all keys in registers. From them it closes its
rows, and with the new f says what they add to every column; a second, small kernel joins the stripes:

    f_i = -log N - logsumexp_j (S_ij + g_j)        L_cj = logsumexp_(i in c) (S_ij + f_i)
                                                   g_j = -log M - logsumexp_c L_cj

So two half-steps form the scores once, where half_step.py forms them twice. A stripe needs at least
MIN_BLOCK queries for the product: longer heads than SWEEP_LIMIT do not fit, and there a second forming
of a tile is cheaper than to write it to memory. Memory: N M / BLOCK_X numbers beside the inputs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from asapc.kernels.gpu.tiles import (
    FLOAT32_PRECISION,
    MIN_BLOCK,
    block_of,
    finite_or_zero,
    is_half,
    load_dual,
    load_keep,
    load_rows,
    score_tile,
    spread_bias,
    strides_of,
)
from asapc.kernels.thresholds import thresholds

SWEEP_LIMIT = 1024  # what the stripes are written for; the thresholds may ask for less
FLOAT32_LIMIT = 256  # a product in float32 takes registers besides: more would spill (benchmarks/sm90.py)
JOINED = 128  # columns of one program that joins the stripes


def fits(q: Tensor, k: Tensor) -> bool:
    longest = max(q.shape[2], k.shape[2])
    limit = SWEEP_LIMIT if is_half(q, k) else FLOAT32_LIMIT
    return longest <= min(limit, thresholds(q, k).sweep_tokens)


def swept(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    dual: Tensor | None,
    score_multiplier: float,
    rows: bool,
) -> tuple[Tensor | None, Tensor]:
    """(f, g) after a row half-step and a column half-step from g = dual [B, H, M]; without `rows`, (None,
    g) after a column half-step from f = dual [B, H, N]. None stands for 0.

    q: [B, H, N, D]; k: [B, H, M, D]; keep: [B, M] bool; bias: broadcastable to [B, H, N, M]. f: float32
    [B, H, N], 0 without active keys; g: float32 [B, H, M], 0 where no query sees a key, -inf on
    masked ones.
    """
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    f = torch.zeros((batch, heads, queries), dtype=torch.float32, device=q.device) if rows else None
    g = torch.zeros((batch, heads, keys), dtype=torch.float32, device=q.device)
    if batch * heads * queries * keys == 0:
        return f, g
    bias = spread_bias(bias, q, k)
    half = is_half(q, k)
    block_y = block_of(keys, SWEEP_LIMIT)
    points = (16384 if bias is None else 8192) if half else 4096  # scores of a program
    block_x = max(MIN_BLOCK, min(block_of(queries, 64), points // block_y))
    block_d = block_of(dim, min(128, (32768 if half else 4096) // block_y))
    stripes = triton.cdiv(queries, block_x)
    parts = torch.empty((batch * heads, stripes, keys), dtype=torch.float32, device=q.device)
    _stripe[(batch * heads * stripes,)](
        q, k, keep, bias, dual, f, parts,
        heads, queries, keys, dim,
        *q.stride(), *k.stride(), *strides_of(keep, 2), *strides_of(bias, 4), *strides_of(dual, 3),
        score_multiplier,
        -math.log(queries),
        ROWS=rows,
        HAS_KEEP=keep is not None,
        HAS_BIAS=bias is not None,
        HAS_DUAL=dual is not None,
        AS_FLOAT32=not half,
        PRECISION=FLOAT32_PRECISION,
        BLOCK_X=block_x,
        BLOCK_Y=block_y,
        BLOCK_D=block_d,
        CHUNKED=dim > block_d,
        num_warps=max(4, min(16, block_x * block_y // (1024 if half else 512))),
        num_stages=1,
    )  # fmt: skip
    _join[(batch * heads * triton.cdiv(keys, JOINED),)](
        parts, keep, g,
        heads, stripes, keys, *strides_of(keep, 2),
        -math.log(keys),
        HAS_KEEP=keep is not None,
        BLOCK=JOINED,
    )  # fmt: skip
    return f, g


@triton.jit
def _stripe(
    p_q, p_k, p_keep, p_bias, p_dual, p_f, p_parts,
    heads, queries, keys, dim,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_keep_b, stride_keep_n, stride_bias_b, stride_bias_h, stride_bias_x, stride_bias_y,
    stride_dual_b, stride_dual_h, stride_dual_n,
    scale, log_mass,
    ROWS: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DUAL: tl.constexpr,
    AS_FLOAT32: tl.constexpr, PRECISION: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    stripes = tl.cdiv(queries, BLOCK_X)
    i_bh = (tl.program_id(0) // stripes).to(tl.int64)
    i_stripe = tl.program_id(0) % stripes
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_x = i_stripe.to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    o_y = tl.arange(0, BLOCK_Y).to(tl.int64)
    m_x = o_x < queries
    m_inside = o_y < keys
    m_y = m_inside
    p_q += i_b * stride_qb + i_h * stride_qh
    p_k += i_b * stride_kb + i_h * stride_kh
    if HAS_KEEP:
        m_y = load_keep(p_keep + i_b * stride_keep_b, o_y, m_inside, stride_keep_n)
    if HAS_BIAS:
        p_bias += i_b * stride_bias_b + i_h * stride_bias_h
    if HAS_DUAL:
        p_dual += i_b * stride_dual_b + i_h * stride_dual_h
    o_d = tl.arange(0, BLOCK_D)
    b_q = load_rows(p_q, o_x, m_x, o_d, dim, stride_qn, stride_qd, AS_FLOAT32)
    scores = score_tile(
        b_q, p_q, p_k, p_bias, o_x, o_y, m_x, m_y, dim, stride_qn, stride_qd, stride_kn, stride_kd,
        stride_bias_x, stride_bias_y, scale, HAS_BIAS, AS_FLOAT32, PRECISION, BLOCK_X, BLOCK_Y,
        BLOCK_D, CHUNKED,
    )  # fmt: skip
    scores = tl.where(m_x[:, None] & m_y[None, :], scores, float("-inf"))
    if ROWS:
        logits = scores
        if HAS_DUAL:
            logits = scores + load_dual(p_dual, o_y, m_y, stride_dual_n)[None, :]
        maximum = tl.max(logits, 1)
        total = tl.sum(tl.exp(logits - finite_or_zero(maximum)[:, None]), 1)
        # A row that sees no active key has plan 0 whatever its dual is.
        f = tl.where(total == 0.0, 0.0, log_mass - maximum - tl.log(total))
        tl.store(p_f + i_bh * queries + o_x, f, mask=m_x)
        scores += f[:, None]
    elif HAS_DUAL:
        scores += load_dual(p_dual, o_x, m_x, stride_dual_n)[:, None]
    maximum = tl.max(scores, 0)
    total = tl.sum(tl.exp(scores - finite_or_zero(maximum)[None, :]), 0)
    part = tl.where(total == 0.0, float("-inf"), maximum + tl.log(total))
    tl.store(p_parts + (i_bh * stripes + i_stripe) * keys + o_y, part, mask=m_inside)


@triton.jit
def _join(
    p_parts, p_keep, p_g,
    heads, stripes, keys,
    stride_keep_b, stride_keep_n,
    log_mass,
    HAS_KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """g [BLOCK] of some columns from what the stripes say of them."""
    blocks = tl.cdiv(keys, BLOCK)
    i_bh = (tl.program_id(0) // blocks).to(tl.int64)
    o_y = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_inside = o_y < keys
    m_y = m_inside
    if HAS_KEEP:
        m_y = load_keep(p_keep + (i_bh // heads) * stride_keep_b, o_y, m_inside, stride_keep_n)
    p_parts += i_bh * stripes * keys
    maximum = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, stripes):
        part = tl.load(p_parts + i * keys + o_y, mask=m_y, other=float("-inf"))
        new_maximum = tl.maximum(maximum, part)
        shift = finite_or_zero(new_maximum)
        total = total * tl.exp(maximum - shift) + tl.exp(part - shift)
        maximum = new_maximum
    g = tl.where(total == 0.0, 0.0, log_mass - maximum - tl.log(total))  # 0 where no query sees it
    g = tl.where(m_y, g, float("-inf"))
    tl.store(p_g + i_bh * keys + o_y, g, mask=m_inside)
