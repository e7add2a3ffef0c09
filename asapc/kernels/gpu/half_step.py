"""Half-steps on points, and the plan times the values: one pass over the tiles, none of which is stored.

    f_i = -log N - logsumexp_j (S_ij + g_j)        g_j = -log M - logsumexp_i (S_ij + f_i)
    out_i = factor / N * sum_j softmax_j(S_ij + g_j) v_j      after a last row c-transform
    out_i = factor * sum_j exp(S_ij + f_i + g_j) v_j          with f given

They are one kernel: points x get a new dual, or what their row of the plan makes of values, by a sum
over points y; q and k take these two roles. Where x has an older dual, exponents are shifted by it, since
it is near the new one; the sum is then one addition an entry. Where there is none, where a sum leaves
float32's range, and beside values in float16, whose range is small, weights are relative to a running
row maximum, the pattern of FlashAttention: every one is at most 1.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from asapc.kernels.gpu.launch import Launches
from asapc.kernels.gpu.tiles import (
    FLOAT32_PRECISION,
    LOG2_E,
    Scores,
    Tile,
    add_exponentials,
    block_of,
    finite_or_zero,
    in_range,
    is_half,
    load_dual,
    load_keep,
    load_rows,
    logit_tile,
    product,
    split_factor,
    strides_of,
)


def close_rows(
    scores: Scores, g: Tensor | None, old: Tensor | None = None, launches: Launches | None = None
) -> Tensor:
    """T_Q: f [B, H, N] float32 from the target dual g [B, H, M], None for 0; 0 without active keys.

    old: an earlier f, if there is one.  All duals are in log2.
    """
    f = torch.empty(scores.q.shape[:3], dtype=torch.float32, device=scores.q.device)
    _pass(scores.spread(), g, old, f, launches=launches)
    return f


def close_columns(
    scores: Scores, f: Tensor | None, old: Tensor | None = None, launches: Launches | None = None
) -> Tensor:
    """T_K: g [B, H, M] float32 from the source dual f [B, H, N], None for 0; -inf on masked keys."""
    g = torch.empty(scores.k.shape[:3], dtype=torch.float32, device=scores.k.device)
    _pass(scores.spread().turned(), f, old, g, keep_on_x=True, launches=launches)
    return g


def attend(
    scores: Scores, v: Tensor, f: Tensor | None, g: Tensor | None, output_factor: Sequence[float],
    closes: bool, with_dual: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """factor * exp(S + f + g) v: [B, H, N, E] in v's dtype; and None.

    v: [B, H, M, E]; f: [B, H, N]; g: [B, H, M], None for 0; output_factor as in operators.sinkhorn.
    closes: by a row c-transform first, of which f, if given, is an older result.  with_dual: the product
    in float32, and f [B, H, N] of this transform.
    """
    q, k, keep = scores[:3]
    out_dtype = torch.float32 if with_dual else v.dtype
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=out_dtype, device=q.device)
    new_f = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if with_dual else None
    factor = split_factor(output_factor, q.shape[2], k.shape[2], keep)
    _pass(scores.spread(), g, f, new_f, v, out, factor, closes=closes)
    return out, new_f


def tile_for(x: Tensor, y: Tensor, has_bias: bool) -> Tile:
    """Sizes that spill few registers or none for sm_90 (benchmarks/sm90.py); a bias costs some, too.

    At D = 64 others were no faster on an H100.
    """
    dim = x.shape[3]
    if is_half(x, y):
        limit_x, limit_y, limit_d, stages = (64 if has_bias else 128), (32 if has_bias else 64), 256, 3
    elif has_bias or dim > 64:
        limit_x, limit_y, limit_d, stages = 64, (32 if has_bias else 64), 32, 2
    else:
        limit_x, limit_y, limit_d, stages = 128, 64, 64, 2
    blocks = block_of(x.shape[2], limit_x), block_of(y.shape[2], limit_y), block_of(dim, limit_d)
    warps = 8 if blocks[0] == 128 and not is_half(x, y) else 4
    return Tile(*blocks, num_warps=warps, num_stages=stages)


def _tile_with_values(q: Tensor, k: Tensor, v: Tensor, has_bias: bool, has_keep: bool) -> Tile:
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


def _pass(
    scores: Scores, dual: Tensor | None, old: Tensor | None, new: Tensor | None, v: Tensor | None = None,
    out: Tensor | None = None, factor: tuple[float, Tensor | None] = (1.0, None), closes: bool = True,
    keep_on_x: bool = False, launches: Launches | None = None,
) -> None:  # fmt: skip
    """x: [B, H, X, D]; y: [B, H, Y, D]; bias: [B, H, X, Y]; dual: [B, H, Y]; old: [B, H, X].

    new: [B, H, X], where the dual of x is written; out: [B, H, X, E], where the product with v
    [B, H, Y, E] is; both contiguous.
    """
    x, y, keep, bias, score_multiplier = scores
    (batch, heads, count_x, dim), count_y = x.shape, y.shape[2]
    if batch * heads * count_x == 0:
        return
    if v is None:
        tile, width, block_e = tile_for(x, y, bias is not None), 0, 1
    else:
        tile, width = _tile_with_values(x, y, v, bias is not None, keep is not None), v.shape[3]
        block_e = block_of(width, 256)
    one, factors = factor
    arguments = (
        x, y, v, keep, bias, dual, old, factors, out, new,
        heads, count_x, count_y, dim, width,
        *x.stride(), *y.stride(), *strides_of(v, 4), *strides_of(keep, 2), *strides_of(bias, 4),
        *strides_of(dual, 3), *strides_of(old, 3),
        score_multiplier * LOG2_E.value, -math.log2(count_x), one,
    )  # fmt: skip
    constants = {
        "HAS_KEEP": keep is not None,
        "KEEP_ON_X": keep_on_x,
        "HAS_BIAS": bias is not None,
        "HAS_DUAL": dual is not None,
        "HAS_OLD": old is not None,
        "HAS_VALUES": v is not None,
        "CLOSES": closes,
        # In float16 a weight of 1 / M, or of the square of that, is among the smallest numbers.
        "SHIFTED": old is not None and (v is None or v.dtype != torch.float16),
        "HAS_FACTORS": factors is not None,
        "STORE_DUAL": new is not None,
        "AS_FLOAT32": not is_half(x, y),
        "PRECISION": FLOAT32_PRECISION,
        "BLOCK_X": tile.x,
        "BLOCK_Y": tile.y,
        "BLOCK_D": tile.d,
        "BLOCK_E": block_e,
        "CHUNKED": dim > tile.d,
        "ALL_D": dim == tile.d,
        "ALL_E": width == block_e,
        "STAGES": tile.num_stages if bias is None else None,
        "FIRST_PART": int(count_y < tile.y),
        "LAST_PART": 1 + (count_y % tile.y > 0),
    }
    key = (keep_on_x, dual is None, old is None, tile)
    grid = (batch * heads * triton.cdiv(count_x, tile.x),)
    warps, stages = tile.num_warps, tile.num_stages
    fused = {"enable_fp_fusion": True}  # Triton means to do without
    launch = launches or Launches()
    launch(key, _tiles, grid, arguments, constants, num_warps=warps, num_stages=stages, **fused)


@triton.jit
def _tiles(
    p_x, p_y, p_v, p_keep, p_bias, p_dual, p_old, p_factors, p_out, p_new,
    heads, count_x, count_y, dim, value_dim,
    stride_xb, stride_xh, stride_xn, stride_xd, stride_yb, stride_yh, stride_yn, stride_yd, stride_vb,
    stride_vh, stride_vn, stride_vd, stride_keep_b, stride_keep_n, stride_bias_b, stride_bias_h,
    stride_bias_x, stride_bias_y, stride_dual_b, stride_dual_h, stride_dual_n, stride_old_b,
    stride_old_h, stride_old_n,
    scale, log_mass, factor,
    HAS_KEEP: tl.constexpr, KEEP_ON_X: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DUAL: tl.constexpr,
    HAS_OLD: tl.constexpr, HAS_VALUES: tl.constexpr, CLOSES: tl.constexpr, SHIFTED: tl.constexpr,
    HAS_FACTORS: tl.constexpr, STORE_DUAL: tl.constexpr, AS_FLOAT32: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, CHUNKED: tl.constexpr, ALL_D: tl.constexpr, ALL_E: tl.constexpr,
    STAGES: tl.constexpr, FIRST_PART: tl.constexpr, LAST_PART: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(count_x, BLOCK_X)
    i_bh = (tl.program_id(0) // blocks).to(tl.int64)
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_x = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    m_inside = o_x < count_x
    p_x += i_b * stride_xb + i_h * stride_xh
    p_y += i_b * stride_yb + i_h * stride_yh
    if HAS_BIAS:
        p_bias += i_b * stride_bias_b + i_h * stride_bias_h
    if HAS_DUAL:
        p_dual += i_b * stride_dual_b + i_h * stride_dual_h
    m_x = m_inside
    if HAS_KEEP:
        p_keep += i_b * stride_keep_b
        if KEEP_ON_X:
            m_x = load_keep(p_keep, o_x, m_inside, stride_keep_n)
    keep_on_y: tl.constexpr = HAS_KEEP and not KEEP_ON_X
    b_x = load_rows(p_x, o_x, m_x, tl.arange(0, BLOCK_D), dim, stride_xn, stride_xd, AS_FLOAT32)
    if HAS_OLD:
        b_old = load_dual(p_old + i_b * stride_old_b + i_h * stride_old_h, o_x, m_x, stride_old_n)
    whole = count_y // BLOCK_Y * BLOCK_Y  # tiles of which all points exist
    maximum = tl.zeros([BLOCK_X], tl.float32)
    total = tl.zeros([BLOCK_X], tl.float32)
    if HAS_VALUES:
        p_v += i_b * stride_vb + i_h * stride_vh
        o_e = tl.arange(0, BLOCK_E)
        sums = tl.zeros([BLOCK_X, BLOCK_E], tl.float32)
    again = True
    for attempt in tl.static_range(0 if SHIFTED else 1, 2):  # shifted by the older dual, by a maximum
        if again:
            maximum = tl.full([BLOCK_X], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_X], tl.float32)
            if HAS_VALUES:
                sums = tl.zeros([BLOCK_X, BLOCK_E], tl.float32)
            for part in tl.static_range(FIRST_PART, LAST_PART):
                # Else, for a loop that might not run, ptxas lets no two products overlap.
                tl.assume((whole if part == 0 else count_y - whole) > 0)
                for start in tl.range(
                    0 if part == 0 else whole, whole if part == 0 else count_y, BLOCK_Y, num_stages=STAGES
                ):
                    logits, o_y, m_y = logit_tile(
                        b_x, p_x, p_y, p_keep, p_bias, p_dual, o_x, m_x, start, count_y, dim, stride_xn,
                        stride_xd, stride_yn, stride_yd, stride_keep_n, stride_bias_x, stride_bias_y,
                        stride_dual_n, scale, keep_on_y, HAS_BIAS, HAS_DUAL, AS_FLOAT32,
                        PRECISION, BLOCK_X, BLOCK_Y, BLOCK_D, CHUNKED, part == 0, ALL_D,
                    )  # fmt: skip
                    if HAS_OLD and (attempt == 0 or not CLOSES):
                        logits += b_old[:, None]
                    if attempt == 0:
                        weights = tl.exp2(logits)
                        if CLOSES:
                            total += tl.sum(weights, 1)
                    elif HAS_VALUES:
                        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
                        shift = finite_or_zero(new_maximum)
                        shrink = tl.exp2(maximum - shift)
                        weights = tl.exp2(logits - shift[:, None])
                        total = total * shrink + tl.sum(weights, 1)
                        sums *= shrink[:, None]
                        maximum = new_maximum
                    else:
                        maximum, total = add_exponentials(maximum, total, logits, 1)
                    if HAS_VALUES:
                        b_v = load_rows(
                            p_v, o_y, m_y, o_e, value_dim, stride_vn, stride_vd, False,
                            part == 0 and not HAS_KEEP, ALL_E,
                        )  # fmt: skip
                        sums = product(weights.to(b_v.dtype), b_v, sums, PRECISION)
            if attempt == 0:
                maximum = -b_old
                again = False
                if CLOSES:
                    again = tl.max((m_x & ~in_range(total)).to(tl.int32), 0) > 0
    if HAS_VALUES:
        if CLOSES:
            mass = tl.where(total == 0.0, 0.0, tl.exp2(log_mass) / total)
        elif SHIFTED:
            mass = tl.full([BLOCK_X], 1.0, tl.float32)
        else:
            mass = tl.exp2(finite_or_zero(maximum))
        if HAS_FACTORS:
            factor = tl.load(p_factors + i_b)
        out = sums * (mass * factor)[:, None]
        places = p_out + (i_bh * count_x + o_x)[:, None] * value_dim + o_e[None, :]
        mask = m_x[:, None] & (o_e < value_dim)[None, :]
        tl.store(places, out.to(p_out.dtype.element_ty), mask=mask)
    if STORE_DUAL:  # what sees nothing on the other side has plan 0 whatever its dual is
        new = tl.where(total == 0.0, 0.0, log_mass - maximum - tl.log2(total))
        if KEEP_ON_X:
            new = tl.where(m_x, new, float("-inf"))
        tl.store(p_new + i_bh * count_x + o_x, new, mask=m_inside)
