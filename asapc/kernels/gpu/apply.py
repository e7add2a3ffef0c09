"""The plan times the values without storing the plan: one pass over the tiles, O(N E) memory.

    out_i = factor / N * sum_j softmax_j(S_ij + g_j) v_j      after a last row c-transform
    out_i = factor * sum_j exp(S_ij + f_i + g_j) v_j          with f given

The weights of the first are accumulated relative to exp(-f_i) where there is an older dual f, since it is
near the one that the transform gives. Where there is none, where the row's total leaves float32's
range, and in float16, whose range is small, they are relative to a running row maximum m_i, the pattern
of FlashAttention: every weight is at most 1, and exp(m_i) or the total comes in once at the end.
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
    LN_2,
    LOG2_E,
    Scores,
    Tile,
    block_of,
    finite_or_zero,
    in_range,
    is_half,
    load_dual,
    load_rows,
    logit_tile,
    product,
    split_factor,
    spread_bias,
    strides_of,
)


def tile_for(q: Tensor, k: Tensor, v: Tensor, has_bias: bool, has_keep: bool) -> Tile:
    """Sizes that spill few registers or none for sm_90 (benchmarks/sm90.py), the fastest of an H100.

    What is masked, tokens or features that are no power of two, takes registers.
    """
    dim = max(q.shape[3], v.shape[3])
    plain = dim in (16, 32, 64) and not (has_bias or has_keep)
    wide = dim > (64 if has_bias else 128)
    if is_half(q, k) and is_half(v):
        limit_x, limit_y, limit_d = (64 if has_bias or wide else 128), (32 if wide else 64), 256
        warps, stages = (4, 3) if plain else (8, 2)
    else:
        limit_x, limit_y, limit_d = 64, (32 if dim > 64 else 64), (64 if plain else 32)
        warps, stages = 4, 2
    blocks = block_of(q.shape[2], limit_x), block_of(k.shape[2], limit_y), block_of(q.shape[3], limit_d)
    return Tile(*blocks, num_warps=warps, num_stages=stages)


def attend(
    scores: Scores, v: Tensor, f: Tensor | None, g: Tensor | None, output_factor: Sequence[float],
    closes: bool, natural: bool = True, with_dual: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """factor * exp(S + f + g) v: [B, H, N, E] in v's dtype; and None.

    v: [B, H, M, E]; f: [B, H, N]; g: [B, H, M], None for 0; output_factor as in operators.sinkhorn.
    closes: by a row c-transform first, of which f, if given, is an older result; natural: as in
    half_step.close_rows.  with_dual: the product in float32, and f [B, H, N] of this transform.
    """
    q, k, keep, bias, score_multiplier = scores
    batch, heads, queries, dim = q.shape
    out_dtype = torch.float32 if with_dual else v.dtype
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=out_dtype, device=q.device)
    new_f = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if with_dual else None
    if queries * batch * heads == 0:
        return out, new_f
    bias = spread_bias(bias, q, k)
    factor, factors = split_factor(output_factor, queries, k.shape[2], keep)

    # In float16 a weight of 1 / M, or of the square of that, is among the smallest numbers.
    shifted = f is not None and v.dtype != torch.float16
    tile = tile_for(q, k, v, bias is not None, keep is not None)
    block_e = block_of(v.shape[3], 256)
    _attend[(batch * heads * triton.cdiv(queries, tile.x),)](
        q, k, v, keep, bias, f, g, factors, out, new_f,
        heads, queries, k.shape[2], dim, v.shape[3],
        *q.stride(), *k.stride(), *v.stride(), *strides_of(keep, 2), *strides_of(bias, 4),
        *strides_of(f, 3), *strides_of(g, 3),
        score_multiplier * LOG2_E.value,
        -math.log2(queries),
        factor,
        HAS_KEEP=keep is not None,
        HAS_BIAS=bias is not None,
        HAS_F=f is not None,
        HAS_G=g is not None,
        CLOSES=closes,
        SHIFTED=shifted,
        NATURAL=natural,
        HAS_FACTORS=factors is not None,
        STORE_F=new_f is not None,
        AS_FLOAT32=not is_half(q, k),
        PRECISION=FLOAT32_PRECISION,
        BLOCK_X=tile.x,
        BLOCK_Y=tile.y,
        BLOCK_D=tile.d,
        BLOCK_E=block_e,
        CHUNKED=dim > tile.d,
        ALL_D=dim == tile.d,
        ALL_E=v.shape[3] == block_e,
        STAGES=tile.num_stages if bias is None else None,
        FIRST_PART=int(k.shape[2] < tile.y),
        LAST_PART=1 + (k.shape[2] % tile.y > 0),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out, new_f


@triton.jit
def _attend(
    p_q, p_k, p_v, p_keep, p_bias, p_f, p_g, p_factors, p_out, p_new_f,
    heads, queries, keys, dim, value_dim,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd, stride_vb,
    stride_vh, stride_vn, stride_vd, stride_keep_b, stride_keep_n, stride_bias_b, stride_bias_h,
    stride_bias_x, stride_bias_y, stride_fb, stride_fh, stride_fn, stride_gb, stride_gh, stride_gn,
    scale, log_mass, factor,
    HAS_KEEP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_F: tl.constexpr, HAS_G: tl.constexpr,
    CLOSES: tl.constexpr, SHIFTED: tl.constexpr, NATURAL: tl.constexpr, HAS_FACTORS: tl.constexpr,
    STORE_F: tl.constexpr, AS_FLOAT32: tl.constexpr, PRECISION: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNKED: tl.constexpr,
    ALL_D: tl.constexpr, ALL_E: tl.constexpr, STAGES: tl.constexpr, FIRST_PART: tl.constexpr,
    LAST_PART: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(queries, BLOCK_X)
    i_bh = (tl.program_id(0) // blocks).to(tl.int64)
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_x = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    m_x = o_x < queries
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
    b_q = load_rows(p_q, o_x, m_x, tl.arange(0, BLOCK_D), dim, stride_qn, stride_qd, AS_FLOAT32)
    if HAS_F:
        b_f = load_dual(p_f + i_b * stride_fb + i_h * stride_fh, o_x, m_x, stride_fn)
        if NATURAL:
            b_f *= LOG2_E
    whole = keys // BLOCK_Y * BLOCK_Y  # tiles of which all keys exist
    maximum = tl.zeros([BLOCK_X], tl.float32)
    total = tl.zeros([BLOCK_X], tl.float32)
    sums = tl.zeros([BLOCK_X, BLOCK_E], tl.float32)
    again = True
    for attempt in tl.static_range(0 if SHIFTED else 1, 2):  # shifted by the older dual, by a maximum
        if again:
            maximum = tl.full([BLOCK_X], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_X], tl.float32)
            sums = tl.zeros([BLOCK_X, BLOCK_E], tl.float32)
            for part in tl.static_range(FIRST_PART, LAST_PART):
                # Else, for a loop that might not run, ptxas lets no two products overlap.
                tl.assume((whole if part == 0 else keys - whole) > 0)
                for start in tl.range(
                    0 if part == 0 else whole, whole if part == 0 else keys, BLOCK_Y, num_stages=STAGES
                ):
                    logits, o_y, m_y = logit_tile(
                        b_q, p_q, p_k, p_keep, p_bias, p_g, o_x, m_x, start, keys, dim, stride_qn,
                        stride_qd, stride_kn, stride_kd, stride_keep_n, stride_bias_x, stride_bias_y,
                        stride_gn, scale, HAS_KEEP, HAS_BIAS, HAS_G, NATURAL, AS_FLOAT32, PRECISION,
                        BLOCK_X, BLOCK_Y, BLOCK_D, CHUNKED, part == 0, ALL_D,
                    )  # fmt: skip
                    if HAS_F and (attempt == 0 or not CLOSES):
                        logits += b_f[:, None]
                    if attempt == 0:
                        weights = tl.exp2(logits)
                        if CLOSES:
                            total += tl.sum(weights, 1)
                    else:
                        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
                        shift = finite_or_zero(new_maximum)
                        shrink = tl.exp2(maximum - shift)
                        weights = tl.exp2(logits - shift[:, None])
                        total = total * shrink + tl.sum(weights, 1)
                        sums *= shrink[:, None]
                        maximum = new_maximum
                    b_v = load_rows(
                        p_v, o_y, m_y, o_e, value_dim, stride_vn, stride_vd, False,
                        part == 0 and not HAS_KEEP, ALL_E,
                    )  # fmt: skip
                    sums = product(weights.to(b_v.dtype), b_v, sums, PRECISION)
            if attempt == 0:
                maximum = -b_f
                again = False
                if CLOSES:
                    again = tl.max((m_x & ~in_range(total)).to(tl.int32), 0) > 0
    if CLOSES:
        mass = tl.where(total == 0.0, 0.0, tl.exp2(log_mass) / total)
    elif SHIFTED:
        mass = tl.full([BLOCK_X], 1.0, tl.float32)
    else:
        mass = tl.exp2(finite_or_zero(maximum))
    if HAS_FACTORS:
        factor = tl.load(p_factors + i_b)
    out = sums * (mass * factor)[:, None]
    places = p_out + (i_bh * queries + o_x)[:, None] * value_dim + o_e[None, :]
    tl.store(places, out.to(p_out.dtype.element_ty), mask=m_x[:, None] & (o_e < value_dim)[None, :])
    if STORE_F:
        f = tl.where(total == 0.0, 0.0, log_mass - maximum - tl.log2(total))
        if NATURAL:
            f *= LN_2
        tl.store(p_new_f + i_bh * queries + o_x, f, mask=m_x)
