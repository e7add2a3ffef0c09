"""The finite loop of heads that are too large for `resident`: the matrix is formed once and read again.

After a row c-transform f of the start, a launch forms K of some heads at a time, and every pair of
half-steps is one pass over it: a block of rows finds its sums and at once adds itself, scaled, to those
of the columns, which a second launch joins in a fixed order.

    K_ij = N exp(S_ij + f_i)    a_i = 1 / sum_j K_ij b_j    b_j = (N / M) / sum_i a_i K_ij

The output is formed from S and the duals, so that a K in bfloat16 rounds the duals alone, a little of
each of many terms. All entries of K lie between 2^-60 and 2^20, and so all ratios of scalings below 2^80;
where some do not, the head keeps log K in float32, and the same passes are in the log domain.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from asapc.kernels.gpu.half_step import attend, close_columns, close_rows, tile_for
from asapc.kernels.gpu.launch import Launches
from asapc.kernels.gpu.tiles import (
    FEWEST,
    FLOAT32_PRECISION,
    LOG2_E,
    Scores,
    add_exponentials,
    is_half,
    load_dual,
    load_rows,
    log_sum,
    logit_tile,
    pitch_of,
    strides_of,
)
from asapc.kernels.loop import Loop

MOST_KEYS = {torch.float32: 4096, torch.float16: 512, torch.bfloat16: 512}  # more are faster formed again
MOST_BYTES = 1 << 26  # of a head's matrix in float32
TOGETHER = 1 << 27  # bytes of the matrices that are kept at once
ROWS, CHUNK = 16, 512  # of K that a program of `_sweep` reads at once
LEAST, MOST = tl.constexpr(-60.0), tl.constexpr(20.0)  # log2 of the entries of a K that is kept


def fits(q: Tensor, k: Tensor, loop: Loop) -> bool:
    """Whether `stored_loop` is the faster way, and its matrix is small enough."""
    return (
        loop.half_steps >= FEWEST
        and k.shape[2] <= MOST_KEYS[q.dtype]
        and 4 * q.shape[2] * pitch_of(k) <= MOST_BYTES
    )


def stored_loop(scores: Scores, v: Tensor, dual: Tensor | None, loop: Loop) -> Tensor:
    """A v [B, H, N, E] in v's dtype, for loops with a row and a later column c-transform.

    Arguments as in `streaming_loop`.
    """
    scores = scores.spread()
    dual = None if dual is None else (dual.float() * LOG2_E.value).contiguous()
    rows_first = loop.first_side == "row"
    if not rows_first:
        dual = close_columns(scores, dual)
    f_first = close_rows(scores, dual)
    pairs = (loop.half_steps - loop.ends_on_rows - (1 if rows_first else 2) - 1) // 2
    f, g = _run(scores, f_first, dual is not None, pairs)
    closes = loop.ends_on_rows
    return attend(scores, v, f, g, loop.output_factor, closes)[0]


def _run(scores: Scores, f_first: Tensor, has_dual: bool, pairs: int) -> tuple[Tensor, Tensor]:
    """f [B, H, N], g [B, H, M] after a column half-step from f_first and `pairs` of row and column."""
    q, k, keep, bias, scale = scores
    batch, heads, queries, dim = q.shape
    keys, pitch = k.shape[2], pitch_of(k)
    f, g = torch.empty_like(f_first), torch.empty(k.shape[:3], dtype=torch.float32, device=q.device)
    if f.numel() == 0 or keys == 0:
        return f_first, g
    narrow = q.dtype == torch.bfloat16 and is_half(q, k)
    group = max(1, min(batch * heads, TOGETHER // (4 * queries * pitch)))
    tile = tile_for(q, k, bias is not None)
    blocks, parts = triton.cdiv(queries, tile.x), triton.cdiv(queries, ROWS)

    def scratch(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=q.device)

    kernel, b = scratch(group, queries, pitch), scratch(group, pitch)
    sums = scratch(group, max(parts, blocks), pitch)
    wide = torch.zeros(batch * heads, dtype=torch.int32, device=q.device)
    launches = Launches()
    for first in range(0, batch * heads, group):
        count = min(group, batch * heads - first)
        for linear in (True, False):
            launches(
                ("form", linear), _form, (count * blocks,),
                (
                    q, k, keep, bias, f_first, wide, kernel, sums, first, heads, queries, keys, dim,
                    pitch, *q.stride(), *k.stride(), *strides_of(keep, 2), *strides_of(bias, 4),
                    scale * LOG2_E.value, math.log2(queries),
                ),
                {
                    "LINEAR": linear, "NARROW": narrow, "HAS_KEEP": keep is not None,
                    "HAS_BIAS": bias is not None, "HAS_DUAL": has_dual, "AS_FLOAT32": not is_half(q, k),
                    "PRECISION": FLOAT32_PRECISION, "BLOCK_X": tile.x, "BLOCK_Y": tile.y,
                    "BLOCK_D": tile.d, "CHUNKED": dim > tile.d, "ALL_D": dim == tile.d,
                },
                num_warps=tile.num_warps, num_stages=tile.num_stages,
            )  # fmt: skip
        for step in range(pairs + 1):
            if step > 0:
                launches(
                    "sweep", _sweep, (count * parts,),
                    (kernel, wide, b, f_first, f, sums, first, queries, pitch),
                    {"NARROW": narrow, "ROWS": ROWS, "CHUNK": CHUNK}, num_warps=4, num_stages=1,
                )  # fmt: skip
            joined = blocks if step == 0 else parts
            block_j = max(16, min(64, 4096 // triton.next_power_of_2(joined)))
            launches(
                ("join", joined), _join, (count * triton.cdiv(pitch, block_j),),
                (sums, wide, b, g, first, keys, pitch, joined, math.log2(queries / keys)),
                {"PARTS": triton.next_power_of_2(joined), "BLOCK_Y": block_j}, num_warps=4,
            )  # fmt: skip
    return (f if pairs else f_first), g


@triton.jit(do_not_specialize=["first"])
def _form(
    p_q, p_k, p_keep, p_bias, p_f, p_wide, p_kernel, p_sums, first, heads, queries, keys, dim, pitch,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_keep_b, stride_keep_n, stride_bias_b, stride_bias_h, stride_bias_x, stride_bias_y,
    scale, log_queries,
    LINEAR: tl.constexpr, NARROW: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DUAL: tl.constexpr, AS_FLOAT32: tl.constexpr, PRECISION: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_Y: tl.constexpr, BLOCK_D: tl.constexpr, CHUNKED: tl.constexpr, ALL_D: tl.constexpr,
):  # fmt: skip
    """Rows of K, or of log2 K in heads of which K is too wide; and their sums for a = 1, as `_sweep`.

    p_wide [B H]: set where K is too wide, and read if not LINEAR.
    """
    blocks = tl.cdiv(queries, BLOCK_X)
    local = (tl.program_id(0) // blocks).to(tl.int64)
    block = (tl.program_id(0) % blocks).to(tl.int64)
    i_bh = first + local
    if not LINEAR:  # noqa: SIM102 -- a constant
        if tl.load(p_wide + i_bh) == 0:
            return
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_x = block * BLOCK_X + tl.arange(0, BLOCK_X)
    m_x = o_x < queries
    p_q += i_b * stride_qb + i_h * stride_qh
    p_k += i_b * stride_kb + i_h * stride_kh
    if HAS_KEEP:
        p_keep += i_b * stride_keep_b
    if HAS_BIAS:
        p_bias += i_b * stride_bias_b + i_h * stride_bias_h
    p_kernel += local * queries * pitch
    p_sums += (local * blocks + block) * pitch
    b_q = load_rows(p_q, o_x, m_x, tl.arange(0, BLOCK_D), dim, stride_qn, stride_qd, AS_FLOAT32)
    b_f = load_dual(p_f + i_bh * queries, o_x, m_x, 1) + log_queries
    b_f = tl.where(m_x, b_f, float("-inf"))
    whole = keys // BLOCK_Y * BLOCK_Y  # tiles of which all keys exist
    least = tl.zeros([BLOCK_X], tl.float32)
    most = tl.zeros([BLOCK_X], tl.float32)
    for part in tl.static_range(2):
        for start in range(0 if part == 0 else whole, whole if part == 0 else keys, BLOCK_Y):
            logits, o_y, m_y = logit_tile(
                b_q, p_q, p_k, p_keep, p_bias, p_f, o_x, m_x, start, keys, dim, stride_qn, stride_qd,
                stride_kn, stride_kd, stride_keep_n, stride_bias_x, stride_bias_y, 1, scale, HAS_KEEP,
                HAS_BIAS, False, AS_FLOAT32, PRECISION, BLOCK_X, BLOCK_Y, BLOCK_D, CHUNKED,
                part == 0, ALL_D,
            )  # fmt: skip
            logits += b_f[:, None]
            places = o_x[:, None] * pitch + o_y[None, :]
            m_place = m_x[:, None] & (o_y < pitch)[None, :]
            if LINEAR:
                seen = logits
                if HAS_KEEP or part == 1:
                    seen = tl.where(m_y[None, :], logits, 0.0)
                least = tl.minimum(least, tl.min(seen, 1))
                if HAS_DUAL:  # else a row of K adds up to 1
                    most = tl.maximum(most, tl.max(seen, 1))
                entries = tl.exp2(logits)
                if NARROW:
                    p_entries = p_kernel.to(tl.pointer_type(tl.bfloat16))
                    tl.store(p_entries + places, entries.to(tl.bfloat16), mask=m_place)
                else:
                    tl.store(p_kernel + places, entries, mask=m_place)
                total = tl.sum(entries, 0)
            else:
                tl.store(p_kernel + places, logits, mask=m_place)
                total = log_sum(logits, 0)
            tl.store(p_sums + o_y, total, mask=o_y < pitch)
    if LINEAR:
        least = tl.where(m_x, least, 0.0)
        if (tl.min(least, 0) < LEAST) | (tl.max(most, 0) > MOST):
            tl.store(p_wide + i_bh, 1)


@triton.jit
def _entries(p_kernel, o_x, o_y, m_x, pitch, NARROW: tl.constexpr, other: tl.constexpr):
    """Of K, or of log2 K, in float32 [ROWS, CHUNK]."""
    places = o_x * pitch + o_y
    mask = m_x & (o_y < pitch)
    if NARROW:
        p_narrow = p_kernel.to(tl.pointer_type(tl.bfloat16))
        return tl.load(p_narrow + places, mask=mask, other=0.0).to(tl.float32)
    return tl.load(p_kernel + places, mask=mask, other=other)


@triton.jit(do_not_specialize=["first"])
def _sweep(
    p_kernel, p_wide, p_b, p_f_first, p_f, p_sums, first, queries, pitch,
    NARROW: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A row half-step, f [B H, N], of ROWS rows from b [heads, M]; and their sum_i a_i K_ij.

    p_sums: [heads, parts, M]. b and sums are log2 in wide heads. The rows are read again for the second,
    from the cache.
    """
    parts = tl.cdiv(queries, ROWS)
    local = (tl.program_id(0) // parts).to(tl.int64)
    part = (tl.program_id(0) % parts).to(tl.int64)
    i_bh = first + local
    p_kernel += local * queries * pitch
    p_b += local * pitch
    p_sums += (local * parts + part) * pitch
    o_x = part * ROWS + tl.arange(0, ROWS)[:, None]
    o_c = tl.arange(0, CHUNK)[None, :]
    m_x = o_x < queries
    b_f = tl.load(p_f_first + i_bh * queries + o_x, mask=m_x, other=0.0)
    if tl.load(p_wide + i_bh) == 0:
        terms = tl.zeros([ROWS, CHUNK], tl.float32)
        for start in range(0, pitch, CHUNK):
            o_y = start + o_c
            b = tl.load(p_b + o_y, mask=o_y < pitch, other=0.0)
            terms += b * _entries(p_kernel, o_x, o_y, m_x, pitch, NARROW, 0.0)
        total = tl.sum(terms, 1, keep_dims=True)
        a = tl.where(total == 0.0, 0.0, 1.0 / total)
        for start in range(0, pitch, CHUNK):
            o_y = start + o_c
            sums = tl.sum(a * _entries(p_kernel, o_x, o_y, m_x, pitch, NARROW, 0.0), 0, keep_dims=True)
            tl.store(p_sums + o_y, sums, mask=o_y < pitch)
        log_total = tl.log2(total)
    else:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        added = tl.zeros([ROWS], tl.float32)
        for start in range(0, pitch, CHUNK):
            o_y = start + o_c
            b = tl.load(p_b + o_y, mask=o_y < pitch, other=0.0)
            logs = b + _entries(p_kernel, o_x, o_y, m_x, pitch, False, float("-inf"))
            top, added = add_exponentials(top, added, logs, 1)
        total = added[:, None]
        log_total = tl.where(total == 0.0, 0.0, top[:, None] + tl.log2(total))
        for start in range(0, pitch, CHUNK):
            o_y = start + o_c
            logs = _entries(p_kernel, o_x, o_y, m_x, pitch, False, float("-inf")) - log_total
            tl.store(p_sums + o_y, log_sum(logs, 0)[None, :], mask=o_y < pitch)
    f = tl.where(total == 0.0, 0.0, b_f - log_total)
    tl.store(p_f + i_bh * queries + o_x, f, mask=m_x)


@triton.jit(do_not_specialize=["first"])
def _join(
    p_sums, p_wide, p_b, p_g, first, keys, pitch, parts, log_ratio, PARTS: tl.constexpr,
    BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """b [heads, M] and g = log2 b [B H, M] of a column half-step, from the sums of all parts of the rows.

    What no query sees has b = 1.
    """
    blocks = tl.cdiv(pitch, BLOCK_Y)
    local = (tl.program_id(0) // blocks).to(tl.int64)
    i_bh = first + local
    o_y = tl.program_id(0) % blocks * BLOCK_Y + tl.arange(0, BLOCK_Y)
    o_p = tl.arange(0, PARTS)
    places = p_sums + (local * parts + o_p)[:, None] * pitch + o_y[None, :]
    mask = (o_p < parts)[:, None] & (o_y < pitch)[None, :]
    if tl.load(p_wide + i_bh) == 0:
        total = tl.sum(tl.load(places, mask=mask, other=0.0), 0)
        b = tl.where(total == 0.0, 1.0, tl.exp2(log_ratio + tl.zeros_like(total)) / total)
        g = tl.log2(b)
    else:
        logs = log_sum(tl.load(places, mask=mask, other=float("-inf")), 0)
        g = tl.where(logs == float("-inf"), 0.0, log_ratio - logs)
        b = g
    tl.store(p_b + local * pitch + o_y, b, mask=o_y < pitch)
    tl.store(p_g + i_bh * keys + o_y, g, mask=o_y < keys)
