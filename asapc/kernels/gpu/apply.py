"""The plan times the values without storing the plan: one pass over the tiles, O(N E) memory.

    out_i = factor / N * sum_j softmax_j(S_ij + g_j) v_j      after a last row c-transform
    out_i = factor * sum_j exp(S_ij + f_i + g_j) v_j          with f given

Both accumulate the exponentials relative to a running row maximum m_i, the pattern of
FlashAttention: every weight is at most 1, which half precision holds, and exp(m_i) or the row's
total comes in once at the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from asapc.kernels.gpu.tiles import (
    FLOAT32_PRECISION,
    Tile,
    block_of,
    finite_or_zero,
    is_half,
    launched,
    load_dual,
    load_keep,
    load_rows,
    product,
    score_tile,
    split_factor,
    spread_bias,
    strides_of,
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    f: Tensor | None,
    g: Tensor | None,
    score_multiplier: float,
    output_factor: Sequence[float],
) -> Tensor:
    """factor * exp(S + f + g) v: [B, H, N, E] in v's dtype; f None closes the rows on the way.

    q: [B, H, N, D]; k: [B, H, M, D]; v: [B, H, M, E]; keep: [B, M] bool; bias: broadcastable to
    [B, H, N, M]; f: [B, H, N]; g: [B, H, M], None for 0; output_factor as in operators.sinkhorn.
    """
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=v.dtype, device=q.device)
    _launch(q, k, v, keep, bias, f, g, score_multiplier, output_factor, out, None)
    return out


def attend_and_dual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    g: Tensor | None,
    score_multiplier: float,
    output_factor: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """`attend` with the last row c-transform, in float32, and the dual f [B, H, N] it ends on."""
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=torch.float32, device=q.device)
    f = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    _launch(q, k, v, keep, bias, None, g, score_multiplier, output_factor, out, f)
    return out, f


def tile_for(q: Tensor, k: Tensor, v: Tensor, has_bias: bool) -> Tile:
    """Sizes that spill few registers or none for sm_90 (benchmarks/sm90.py)."""
    wide = max(q.shape[3], v.shape[3]) > (64 if has_bias else 128)
    if is_half(q, k) and is_half(v):
        limit_x, limit_y, limit_d = (64 if has_bias or wide else 128), (32 if wide else 64), 256
        warps, stages = 8, 2
    else:
        limit_x, limit_y, limit_d, warps, stages = 64, 32, 32, 8, 2
    blocks = block_of(q.shape[2], limit_x), block_of(k.shape[2], limit_y), block_of(q.shape[3], limit_d)
    return Tile(*blocks, num_warps=warps, num_stages=stages)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    f: Tensor | None,
    g: Tensor | None,
    score_multiplier: float,
    output_factor: Sequence[float],
    out: Tensor,
    new_f: Tensor | None,
) -> None:
    """out: [B, H, N, E]; new_f: [B, H, N] where the closed rows' dual is wanted; both contiguous."""
    batch, heads, queries, dim = q.shape
    if queries * batch * heads == 0:
        return
    bias = spread_bias(bias, q, k)
    factor, factors = split_factor(output_factor, queries, k.shape[2], keep)

    def launch(tile: Tile) -> None:
        _attend[(batch * heads * triton.cdiv(queries, tile.x),)](
            q, k, v, keep, bias, f, g, factors, out, new_f,
            heads, queries, k.shape[2], dim, v.shape[3],
            *q.stride(), *k.stride(), *v.stride(), *strides_of(keep, 2), *strides_of(bias, 4),
            *strides_of(f, 3), *strides_of(g, 3),
            score_multiplier,
            -math.log(queries),
            factor,
            HAS_KEEP=keep is not None,
            HAS_BIAS=bias is not None,
            HAS_F=f is not None,
            HAS_G=g is not None,
            HAS_FACTORS=factors is not None,
            STORE_F=new_f is not None,
            AS_FLOAT32=not is_half(q, k),
            PRECISION=FLOAT32_PRECISION,
            BLOCK_X=tile.x,
            BLOCK_Y=tile.y,
            BLOCK_D=tile.d,
            BLOCK_E=block_of(v.shape[3], 256),
            CHUNKED=dim > tile.d,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip

    launched(launch, tile_for(q, k, v, bias is not None), q, k)


@triton.jit
def _attend(
    p_q, p_k, p_v, p_keep, p_bias, p_f, p_g, p_factors, p_out, p_new_f,
    heads, queries, keys, dim, value_dim,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd, stride_vb,
    stride_vh, stride_vn, stride_vd, stride_keep_b, stride_keep_n, stride_bias_b, stride_bias_h,
    stride_bias_x, stride_bias_y, stride_fb, stride_fh, stride_fn, stride_gb, stride_gh, stride_gn,
    scale, log_mass, factor,
    HAS_KEEP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_F: tl.constexpr, HAS_G: tl.constexpr,
    HAS_FACTORS: tl.constexpr, STORE_F: tl.constexpr, AS_FLOAT32: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(queries, BLOCK_X)
    i_bh = (tl.program_id(0) // blocks).to(tl.int64)
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_x = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    m_x = o_x < queries
    o_d = tl.arange(0, BLOCK_D)
    o_e = tl.arange(0, BLOCK_E)
    p_q += i_b * stride_qb + i_h * stride_qh
    p_k += i_b * stride_kb + i_h * stride_kh
    p_v += i_b * stride_vb + i_h * stride_vh
    if HAS_KEEP:
        p_keep += i_b * stride_keep_b
    if HAS_BIAS:
        p_bias += i_b * stride_bias_b + i_h * stride_bias_h
    if HAS_G:
        p_g += i_b * stride_gb + i_h * stride_gh
    b_q = load_rows(p_q, o_x, m_x, o_d, dim, stride_qn, stride_qd, AS_FLOAT32)
    if HAS_F:
        b_f = load_dual(p_f + i_b * stride_fb + i_h * stride_fh, o_x, m_x, stride_fn)
    maximum = tl.full([BLOCK_X], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_X], tl.float32)
    sums = tl.zeros([BLOCK_X, BLOCK_E], tl.float32)
    for start in range(0, keys, BLOCK_Y):
        o_y = start + tl.arange(0, BLOCK_Y).to(tl.int64)
        m_y = o_y < keys
        if HAS_KEEP:
            m_y = load_keep(p_keep, o_y, m_y, stride_keep_n)
        logits = score_tile(
            b_q, p_q, p_k, p_bias, o_x, o_y, m_x, m_y, dim, stride_qn, stride_qd, stride_kn,
            stride_kd, stride_bias_x, stride_bias_y, scale, HAS_BIAS, AS_FLOAT32, PRECISION,
            BLOCK_X, BLOCK_Y, BLOCK_D, CHUNKED,
        )  # fmt: skip
        if HAS_F:  # first: S + f rounds here as it did in the c-transform that gave g
            logits += b_f[:, None]
        if HAS_G:
            logits += load_dual(p_g, o_y, m_y, stride_gn)[None, :]
        logits = tl.where(m_y[None, :], logits, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
        shift = finite_or_zero(new_maximum)
        shrink = tl.exp(maximum - shift)
        weights = tl.exp(logits - shift[:, None])
        total = total * shrink + tl.sum(weights, 1)
        b_v = load_rows(p_v, o_y, m_y, o_e, value_dim, stride_vn, stride_vd, False)
        sums = product(weights.to(b_v.dtype), b_v, sums * shrink[:, None], PRECISION)
        maximum = new_maximum
    if HAS_F:
        mass = tl.exp(finite_or_zero(maximum))
    else:
        mass = tl.where(total == 0.0, 0.0, tl.exp(log_mass) / total)
    if HAS_FACTORS:
        factor = tl.load(p_factors + i_b)
    out = sums * (mass * factor)[:, None]
    places = p_out + (i_bh * queries + o_x)[:, None] * value_dim + o_e[None, :]
    tl.store(places, out.to(p_out.dtype.element_ty), mask=m_x[:, None] & (o_e < value_dim)[None, :])
    if STORE_F:
        f = tl.where(total == 0.0, 0.0, (log_mass - maximum - tl.log(total)))
        tl.store(p_new_f + i_bh * queries + o_x, f, mask=m_x)
