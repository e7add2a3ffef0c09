"""Twin of operators/c_transforms.py that never stores a score: O(N + M) memory, one pass over the tiles.

    f_i = -log N - logsumexp_j (S_ij + g_j)        g_j = -log M - logsumexp_i (S_ij + f_i)

Rows and columns are one kernel: points x get a new dual by a sum over points y, and q and k take
these two roles. Where x has an older dual, exponents are shifted by it, since it is near the new one; the
sum is then one addition an entry. Where there is none, or a sum leaves float32's range, it is kept as a
running maximum and a total relative to it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from asapc.kernels.gpu.launch import Launches
from asapc.kernels.gpu.tiles import (
    FLOAT32_PRECISION,
    LN_2,
    LOG2_E,
    Scores,
    Tile,
    add_exponentials,
    block_of,
    in_range,
    is_half,
    load_dual,
    load_keep,
    load_rows,
    logit_tile,
    spread_bias,
    strides_of,
)


def close_rows(
    scores: Scores, g: Tensor | None, old: Tensor | None = None, natural: bool = True,
    launches: Launches | None = None,
) -> Tensor:  # fmt: skip
    """T_Q: f [B, H, N] float32 from the target dual g [B, H, M], None for 0; 0 without active keys.

    old: an earlier f, if there is one; natural: the unit of all duals is that of ln, else that of log2.
    """
    bias = spread_bias(scores.bias, scores.q, scores.k)
    return _close(scores._replace(bias=bias), g, old, False, natural, launches or Launches())


def close_columns(
    scores: Scores, f: Tensor | None, old: Tensor | None = None, natural: bool = True,
    launches: Launches | None = None,
) -> Tensor:  # fmt: skip
    """T_K: g [B, H, M] float32 from the source dual f [B, H, N], None for 0; -inf on masked keys.

    old, natural, launches: as in `close_rows`.
    """
    bias = spread_bias(scores.bias, scores.q, scores.k)
    turned = scores._replace(q=scores.k, k=scores.q, bias=None if bias is None else bias.mT)
    return _close(turned, f, old, True, natural, launches or Launches())


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


def _close(
    scores: Scores, dual: Tensor | None, old: Tensor | None, keep_on_x: bool, natural: bool,
    launches: Launches,
) -> Tensor:  # fmt: skip
    """x: [B, H, X, D]; y: [B, H, Y, D]; bias: [B, H, X, Y]; dual: [B, H, Y]; old: [B, H, X]."""
    x, y, keep, bias, score_multiplier = scores
    batch, heads, count_x, dim = x.shape
    out = torch.empty(x.shape[:3], dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out

    arguments = (
        x, y, keep, bias, dual, old, out,
        heads, count_x, y.shape[2], dim,
        *x.stride(), *y.stride(), *strides_of(keep, 2), *strides_of(bias, 4), *strides_of(dual, 3),
        *strides_of(old, 3),
        score_multiplier * LOG2_E.value,
        -math.log2(count_x),
    )  # fmt: skip

    tile = tile_for(x, y, bias is not None)
    constants = {
        "HAS_KEEP": keep is not None,
        "KEEP_ON_X": keep_on_x,
        "HAS_BIAS": bias is not None,
        "HAS_DUAL": dual is not None,
        "HAS_OLD": old is not None,
        "NATURAL": natural,
        "AS_FLOAT32": not is_half(x, y),
        "PRECISION": FLOAT32_PRECISION,
        "BLOCK_X": tile.x,
        "BLOCK_Y": tile.y,
        "BLOCK_D": tile.d,
        "CHUNKED": dim > tile.d,
        "ALL_D": dim == tile.d,
        "STAGES": tile.num_stages if bias is None else None,
    }
    key = (keep_on_x, dual is None, old is None, tile)
    grid = (batch * heads * triton.cdiv(count_x, tile.x),)
    warps, stages = tile.num_warps, tile.num_stages
    fused = {"enable_fp_fusion": True}  # Triton means to do without
    launches(key, _half_step, grid, arguments, constants, num_warps=warps, num_stages=stages, **fused)
    return out


@triton.jit
def _half_step(
    p_x, p_y, p_keep, p_bias, p_dual, p_old, p_out,
    heads, count_x, count_y, dim,
    stride_xb, stride_xh, stride_xn, stride_xd, stride_yb, stride_yh, stride_yn, stride_yd,
    stride_keep_b, stride_keep_n, stride_bias_b, stride_bias_h, stride_bias_x, stride_bias_y,
    stride_dual_b, stride_dual_h, stride_dual_n, stride_old_b, stride_old_h, stride_old_n,
    scale, log_mass,
    HAS_KEEP: tl.constexpr, KEEP_ON_X: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DUAL: tl.constexpr,
    HAS_OLD: tl.constexpr, NATURAL: tl.constexpr, AS_FLOAT32: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_D: tl.constexpr, CHUNKED: tl.constexpr,
    ALL_D: tl.constexpr, STAGES: tl.constexpr,
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
    whole = count_y // BLOCK_Y * BLOCK_Y  # tiles of which all points exist
    result = tl.zeros([BLOCK_X], tl.float32)
    if HAS_OLD:
        b_old = load_dual(p_old + i_b * stride_old_b + i_h * stride_old_h, o_x, m_x, stride_old_n)
        if NATURAL:
            b_old *= LOG2_E
    again = True
    for attempt in tl.static_range(0 if HAS_OLD else 1, 2):  # shifted by the older dual, by a maximum
        if again:
            maximum = tl.full([BLOCK_X], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_X], tl.float32)
            for part in tl.static_range(2):
                for start in tl.range(
                    0 if part == 0 else whole, whole if part == 0 else count_y, BLOCK_Y, num_stages=STAGES
                ):
                    logits, _, _ = logit_tile(
                        b_x, p_x, p_y, p_keep, p_bias, p_dual, o_x, m_x, start, count_y, dim, stride_xn,
                        stride_xd, stride_yn, stride_yd, stride_keep_n, stride_bias_x, stride_bias_y,
                        stride_dual_n, scale, keep_on_y, HAS_BIAS, HAS_DUAL, NATURAL, AS_FLOAT32,
                        PRECISION, BLOCK_X, BLOCK_Y, BLOCK_D, CHUNKED, part == 0, ALL_D,
                    )  # fmt: skip
                    if attempt == 0:
                        total += tl.sum(tl.exp2(logits + b_old[:, None]), 1)
                    else:
                        maximum, total = add_exponentials(maximum, total, logits, 1)
            if attempt == 0:
                result = log_mass + b_old - tl.log2(total)
                again = tl.max((m_x & ~in_range(total)).to(tl.int32), 0) > 0
            else:  # what sees nothing on the other side has plan 0 whatever its dual is
                result = tl.where(total == 0.0, 0.0, log_mass - maximum - tl.log2(total))
    if NATURAL:
        result *= LN_2
    if KEEP_ON_X:
        result = tl.where(m_x, result, float("-inf"))
    tl.store(p_out + i_bh * count_x + o_x, result, mask=m_inside)
