"""The whole finite loop of a head whose matrix fits shared memory, in two launches.

`block` keeps it there, in the linear domain, and tells which heads stayed in float32's
range. The others, whose scores spread too far or whose scalings grow without end, go through the launch
below: a program keeps S of one head after another in a scratch of its own, and works with logarithms.

    f_i = -LSE_j(S_ij + g_j) - log N        g_j = -LSE_i(S_ij + f_i) - log M
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asapc.kernels.gpu import block
from asapc.kernels.gpu.tiles import (
    FEWEST,
    FLOAT32_PRECISION,
    LOG2_E,
    Scores,
    add_exponentials,
    block_of,
    is_half,
    load_bias,
    load_dual,
    load_keep,
    load_rows,
    log_sum,
    pitch_of,
    product,
    products,
    split_factor,
    spread_bias,
    strides_of,
)
from asapc.kernels.loop import Loop

SCRATCH = {1024: 1 << 27, 512: 1 << 27}  # bytes of all matrices that are kept; 32 MiB for fewer keys
TILE = {1024: 16384, 512: 8192, 256: 8192, 128: 8192}  # entries of a block of rows; 4096 for fewer keys
MOST_KEYS = 1024


def fits(q: Tensor, k: Tensor, v: Tensor, loop: Loop) -> bool:
    """Whether `block` can hold it, and is the faster way: it forms a matrix before it begins."""
    return loop.half_steps >= FEWEST and block.shape_for(q, k, v) is not None


def resident_loop(scores: Scores, v: Tensor, dual: Tensor | None, loop: Loop) -> Tensor:
    """A v [B, H, N, E] in v's dtype, for N and M that fit.  Arguments as in `streaming_loop`."""
    q, k, keep, bias, scale = scores
    if q.shape[:3].numel() == 0:
        return torch.empty((*q.shape[:3], v.shape[3]), dtype=v.dtype, device=q.device)
    # In float32 before it is spread, and the dual: both launches read them.
    bias = spread_bias(None if bias is None else bias.float(), q, k)
    given = (Scores(q, k, keep, bias, scale), v, None if dual is None else dual.float(), loop)
    shape = block.shape_for(q, k, v)
    out = _launched(shape, *given)
    if shape is not None and block.is_new(shape, q.device):
        by_triton = _launched(None, *given)
        if not block.agrees(shape, out, by_triton):
            return by_triton
    return out


def _launched(
    shape: block.Shape | None, scores: Scores, v: Tensor, dual: Tensor | None, loop: Loop
) -> Tensor:
    q, k, keep, bias, _ = scores
    (batch, heads, queries, dim), (keys, value_dim) = q.shape, v.shape[2:]
    out = torch.empty((batch, heads, queries, value_dim), dtype=v.dtype, device=q.device)
    rows_first = loop.first_side == "row"
    factor, factors = split_factor(loop.output_factor, queries, keys, keep)
    scale, factor = loop.score_multiplier * LOG2_E.value, factor / queries
    done = torch.empty(batch * heads, dtype=torch.int32, device=q.device)
    tensors, numbers = block.arguments(q, k, v, keep, bias, dual, factors, out, done, loop, factor)
    if shape is not None and max(numbers) < 1 << 31:  # torch passes them as int
        block.launch(shape, tensors, numbers, batch * heads)
    else:
        done.zero_()  # all are left to the next launch
    half = is_half(q, k)
    width = block_of(keys, MOST_KEYS)
    block_x = block_of(queries, TILE.get(width, 4096) // width)
    block_d = block_of(dim, 128 if half else 32)
    block_e = block_of(value_dim, 64 if width < 256 else 32 if is_half(v) and width == 256 else 16)
    size = queries * pitch_of(k)
    programs = min(batch * heads, max(1, SCRATCH.get(width, 1 << 25) // max(1, 4 * size)))
    scratch = torch.empty((programs, size), dtype=torch.float32, device=q.device)
    pairs = (loop.half_steps - (not rows_first)) // 2
    _resident[(programs,)](
        q, k, v, keep, bias, dual, factors, out, scratch, done,
        batch * heads, heads, queries, keys, dim, value_dim, pitch_of(k),
        *q.stride(), *k.stride(), *v.stride(), *strides_of(keep, 2), *strides_of(bias, 4),
        *strides_of(dual, 3),
        scale, factor, pairs,
        ROWS_FIRST=rows_first,
        CLOSES_ROWS=loop.ends_on_rows,
        HAS_KEEP=keep is not None,
        HAS_BIAS=bias is not None,
        HAS_DUAL=dual is not None,
        HAS_FACTORS=factors is not None,
        AS_FLOAT32=not half,
        PRECISION=FLOAT32_PRECISION,
        BLOCK_X=block_x,
        WIDTH=width,
        BLOCK_D=block_d,
        BLOCK_E=block_e,
        CHUNKED=dim > block_d,
        num_warps=max(1, block_x * width // 1024),
        num_stages=1,
    )  # fmt: skip
    return out


@triton.jit
def _form(
    p_q, p_k, p_bias, p_scratch, p_f, queries, dim, pitch, o_y, m_pitch, m_y,
    stride_qn, stride_qd, stride_kn, stride_kd, stride_bias_x, stride_bias_y, stride_fn, scale,
    CLOSES_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_F: tl.constexpr,
    AS_FLOAT32: tl.constexpr, PRECISION: tl.constexpr, BLOCK_X: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Leaves S in the scratch; LSE_i(S + f) [WIDTH] if CLOSES_COLUMNS, where f is 0 without HAS_F."""
    b_top = tl.full([WIDTH], float("-inf"), tl.float32)
    b_sum = tl.zeros([WIDTH], tl.float32)
    for start in range(0, queries, BLOCK_X):
        o_x = start + tl.arange(0, BLOCK_X).to(tl.int64)
        m_x = o_x < queries
        b_q = load_rows(p_q, o_x, m_x, tl.arange(0, BLOCK_D), dim, stride_qn, stride_qd, AS_FLOAT32)
        scores = scale * products(
            b_q, p_q, p_k, o_x, o_y, m_x, m_y, dim, stride_qn, stride_qd, stride_kn, stride_kd,
            AS_FLOAT32, PRECISION, BLOCK_X, WIDTH, BLOCK_D, CHUNKED,
        )  # fmt: skip
        if HAS_BIAS:
            scores += LOG2_E * load_bias(p_bias, o_x, o_y, m_x, m_y, stride_bias_x, stride_bias_y)
        scores = tl.where(m_y[None, :], scores, float("-inf"))
        places = p_scratch + o_x[:, None] * pitch + o_y[None, :]
        mask = m_x[:, None] & m_pitch[None, :]
        tl.store(places, scores, mask=mask)
        if CLOSES_COLUMNS:
            if HAS_F:
                scores += LOG2_E * load_dual(p_f, o_x, m_x, stride_fn)[:, None]
            scores = tl.where(m_x[:, None], scores, float("-inf"))
            b_top, b_sum = add_exponentials(b_top, b_sum, scores, 0)
    return b_top + tl.log2(b_sum)


@triton.jit
def _start_dual(
    p_dual, b_columns, o_y, m_y, keys, stride_dual_n, ROWS_FIRST: tl.constexpr, HAS_DUAL: tl.constexpr
):
    """g [WIDTH] in log2 before the first half-step on rows; b_columns: `_form`'s."""
    if not ROWS_FIRST:
        g = tl.where(b_columns == float("-inf"), tl.log2(keys * 1.0), -b_columns)  # there g is 0
    elif HAS_DUAL:
        g = LOG2_E * load_dual(p_dual, o_y, m_y, stride_dual_n)
    else:
        g = tl.zeros_like(b_columns)
    return tl.where(m_y, g, float("-inf"))


@triton.jit
def _rows(p_scratch, start, queries, pitch, o_y, m_pitch, BLOCK_X: tl.constexpr):
    """A block of the scratch, -inf where there are no points."""
    o_x = start + tl.arange(0, BLOCK_X)
    places = p_scratch + o_x[:, None] * pitch + o_y[None, :]
    return tl.load(places, mask=(o_x < queries)[:, None] & m_pitch[None, :], other=float("-inf"))


@triton.jit
def _row_dual(logits, queries):
    """-LSE_j of logits [BLOCK_X, WIDTH] in log2: f + log2 N, where f is 0 on empty rows."""
    logs = log_sum(logits, 1)
    return tl.where(logs == float("-inf"), tl.log2(queries * 1.0), -logs)


@triton.jit
def _pair(p_scratch, queries, keys, pitch, o_y, m_pitch, b, BLOCK_X: tl.constexpr, WIDTH: tl.constexpr):
    """b after a half-step on rows and one on columns; -inf on what no query sees."""
    b_top = tl.full([WIDTH], float("-inf"), tl.float32)
    b_sum = tl.zeros([WIDTH], tl.float32)
    for start in range(0, queries, BLOCK_X):
        scores = _rows(p_scratch, start, queries, pitch, o_y, m_pitch, BLOCK_X)
        scores += _row_dual(scores + b[None, :], queries)[:, None]
        b_top, b_sum = add_exponentials(b_top, b_sum, scores, 0)
    b = tl.log2(queries * 1.0 / keys) - b_top - tl.log2(b_sum)
    return tl.where(b_sum == 0.0, float("-inf"), b)


@triton.jit
def _finish(
    p_v, p_scratch, p_out, queries, value_dim, pitch, o_y, m_pitch, m_y, stride_vn, stride_vd, factor,
    b, old, PRECISION: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """factor exp(S_ij + b_j - LSE_j(S_ij + old_j)) v."""
    for start in range(0, queries, BLOCK_X):
        o_x = start + tl.arange(0, BLOCK_X).to(tl.int64)
        scores = _rows(p_scratch, start, queries, pitch, o_y, m_pitch, BLOCK_X)
        weights = tl.exp2(scores + b[None, :] + _row_dual(scores + old[None, :], queries)[:, None])
        for first in range(0, value_dim, BLOCK_E):
            o_e = first + tl.arange(0, BLOCK_E)
            b_v = load_rows(p_v, o_y, m_y, o_e, value_dim, stride_vn, stride_vd, False)
            out = product(weights.to(b_v.dtype), b_v, tl.zeros([BLOCK_X, BLOCK_E], tl.float32), PRECISION)
            places = p_out + o_x[:, None] * value_dim + o_e[None, :]
            mask = (o_x < queries)[:, None] & (o_e < value_dim)[None, :]
            tl.store(places, (out * factor).to(p_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pairs"])
def _resident(
    p_q, p_k, p_v, p_keep, p_bias, p_dual, p_factors, p_out, p_scratch, p_done,
    problems, heads, queries, keys, dim, value_dim, pitch,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd, stride_vb,
    stride_vh, stride_vn, stride_vd, stride_keep_b, stride_keep_n, stride_bias_b, stride_bias_h,
    stride_bias_x, stride_bias_y, stride_dual_b, stride_dual_h, stride_dual_n,
    scale, factor, pairs,
    ROWS_FIRST: tl.constexpr, CLOSES_ROWS: tl.constexpr, HAS_KEEP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DUAL: tl.constexpr, HAS_FACTORS: tl.constexpr,
    AS_FLOAT32: tl.constexpr, PRECISION: tl.constexpr, BLOCK_X: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    o_y = tl.arange(0, WIDTH).to(tl.int64)
    m_inside = o_y < keys
    m_pitch = o_y < pitch  # all of a row of the scratch: loads of 16 bytes
    p_scratch += tl.program_id(0).to(tl.int64) * queries * pitch
    for index in range(tl.program_id(0), problems, tl.num_programs(0)):
        i_bh = tl.cast(index, tl.int64)
        i_b = i_bh // heads
        i_h = i_bh % heads
        p_head_q = p_q + i_b * stride_qb + i_h * stride_qh
        p_head_k = p_k + i_b * stride_kb + i_h * stride_kh
        p_head_v = p_v + i_b * stride_vb + i_h * stride_vh
        p_head_out = p_out + i_bh * queries * value_dim
        p_head_keep, p_head_bias, p_head_dual = p_keep, p_bias, p_dual
        m_y = m_inside
        if HAS_KEEP:
            p_head_keep += i_b * stride_keep_b
            m_y = load_keep(p_head_keep, o_y, m_inside, stride_keep_n)
        if HAS_BIAS:
            p_head_bias += i_b * stride_bias_b + i_h * stride_bias_h
        if HAS_DUAL:
            p_head_dual += i_b * stride_dual_b + i_h * stride_dual_h
        head_factor = factor
        if HAS_FACTORS:
            head_factor = factor * tl.load(p_factors + i_b)
        if tl.load(p_done + index) == 0:
            b_columns = _form(
                p_head_q, p_head_k, p_head_bias, p_scratch, p_head_dual, queries, dim, pitch, o_y,
                m_pitch, m_y, stride_qn, stride_qd, stride_kn, stride_kd, stride_bias_x, stride_bias_y,
                stride_dual_n, scale, not ROWS_FIRST, HAS_BIAS, HAS_DUAL, AS_FLOAT32, PRECISION, BLOCK_X,
                WIDTH, BLOCK_D, CHUNKED,
            )  # fmt: skip
            tl.debug_barrier()  # the scratch is read in another layout than it was written in
            b = _start_dual(p_head_dual, b_columns, o_y, m_y, keys, stride_dual_n, ROWS_FIRST, HAS_DUAL)
            old = tl.zeros([WIDTH], tl.float32)  # one more name for b is not carried on
            for _ in range(pairs):
                old = b
                b = _pair(p_scratch, queries, keys, pitch, o_y, m_pitch, b, BLOCK_X, WIDTH)
            _finish(
                p_head_v, p_scratch, p_head_out, queries, value_dim, pitch, o_y, m_pitch, m_y,
                stride_vn, stride_vd, head_factor, b, b if CLOSES_ROWS else old, PRECISION, BLOCK_X,
                BLOCK_E,
            )  # fmt: skip
            tl.debug_barrier()  # the scratch may be written again
