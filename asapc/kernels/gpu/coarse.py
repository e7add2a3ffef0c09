"""GPU twin of features/coarse.py: the clusters' moments and the loop on the N x R problem in Triton; and
farthest points.

A half-step on x and the one on the clusters after it are one pass over S: every block of rows finds its
u and at once adds exp(S + u) to the clusters' running sums. Where there are few heads their rows are
spread over programs, a launch a pass: each leaves the log of its sums, and the next joins them in a fixed
order. Else one launch runs all passes. Inside, logarithms are of base 2.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asapc.features import coarse as reference
from asapc.features.clouds import Budget, Clouds
from asapc.features.coarse import CoarseProblem
from asapc.kernels.gpu.launch import Launches, keep_arguments, padded
from asapc.kernels.gpu.tiles import (
    FLOAT32_PRECISION,
    LN_2,
    LOG2_E,
    add_exponentials,
    finite_or_zero,
    load_rows,
    log_sum,
    products,
    with_mass,
)

MAX_PIVOTS = 128
TILE = 4096  # entries of S that a program reads at once
ALONE = 2048  # entries of a head's S that one program runs through fast enough
PROGRAMS = 264  # two for each processor of the largest GPUs
MOST_PARTS = 64  # of a head: every program reads what all of them have left


def dual_and_mass(
    clouds: Clouds, pivots: Tensor | None, count: int, budget: Budget, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """As features.coarse.dual_and_mass, without gradients.

    Clouds in float32; pivots [H, R, D], or [B, H, R, D], with R <= 128; N, M >= 1.
    """
    pivots = farthest_points(clouds, count) if pivots is None else pivots
    ends_on_x = budget.half_steps % 2 == (1 if budget.starts_on_x else 0) and budget.half_steps > 0
    if not ends_on_x or clouds.x.shape[0] * clouds.x.shape[1] == 0:
        return reference.dual_and_mass(clouds, pivots, count, budget, want_mass)
    problem, half_norms = _problem(clouds, pivots)
    u, given, ends = _duals(problem, clouds.x_keep, budget)
    return u + half_norms, _masses_of(problem, given, ends) if want_mass else None


def _parts(heads: int, count: int, entries: int, block: int) -> tuple[int, int]:
    """How many programs share a head's `count` rows, and the rows of each, a multiple of `block`.

    entries: of all rows.
    """
    parts = min(MOST_PARTS, max(1, PROGRAMS // heads)) if entries > ALONE else 1
    rows = triton.cdiv(triton.cdiv(count, parts), block) * block
    return triton.cdiv(count, rows), rows


def _problem(clouds: Clouds, pivots: Tensor) -> tuple[CoarseProblem, Tensor]:
    """As features.coarse.coarse_problem; and |x|^2 / 2 [B, H, N]."""
    x, y = clouds.x, clouds.y
    batch, heads, num_y, dim = y.shape
    num_x, count = x.shape[2], pivots.shape[-2]
    if clouds.y_keep is None:  # as a product: a reduction takes three times as long
        centre = y.new_full((1, 1, 1, num_y), 1 / num_y) @ y
    else:
        keep = clouds.y_keep[:, None, :, None]
        centre = y.masked_fill(~keep, 0.0).sum(2, keepdim=True) / keep.sum(2, keepdim=True).clamp(min=1)
    if pivots.dim() == 3:
        pivots = pivots[None].expand(batch, -1, -1, -1)
    member = y.new_empty(batch, heads, num_y, count)
    width, deep = padded(count), padded(dim)
    # Products hold whole rows of both factors in registers: few dimensions at a time.
    block = 32 if width <= 64 and deep <= 128 else 16
    parts, rows = _parts(batch * heads, num_y, num_y * width, block)
    moments = y.new_empty(batch, heads, parts, count, dim + 2)
    _clusters[(batch * heads, parts)](
        y, *y.stride(), *keep_arguments(clouds.y_keep, y), pivots, *pivots.stride(), centre,
        member, moments, num_y, count, dim, heads, rows, parts,
        KEEP=clouds.y_keep is not None, WIDTH=width, DEEP=deep, BLOCK_Y=block, BLOCK_D=16,
        PRECISION=FLOAT32_PRECISION, num_warps=8 if width * deep <= 16384 else 16,
    )  # fmt: skip
    total = moments.sum(2)
    scores, half_norms = x.new_empty(batch, heads, num_x, count), x.new_empty(batch, heads, num_x)
    block = max(16, TILE // width // 2)
    _scores[(batch * heads, triton.cdiv(num_x, block))](
        x, *x.stride(), total, centre, scores, half_norms, num_x, count, dim, heads,
        torch.finfo(y.dtype).tiny, WIDTH=width, BLOCK_X=block, BLOCK_D=min(32, deep),
        PRECISION=FLOAT32_PRECISION, num_warps=4,
    )  # fmt: skip
    return CoarseProblem(scores, total[..., dim + 1].contiguous(), member), half_norms


def _duals(
    problem: CoarseProblem, x_keep: Tensor | None, budget: Budget
) -> tuple[Tensor, Tensor | None, Tensor]:
    """u [B, H, N]; and a part's LSE_i(S + u) [B H, parts, R] before the last half-step, which is on x,
    None for 0, and after it. At least one half-step."""
    scores = problem.scores
    batch, heads, num_x, count = scores.shape
    u = torch.empty_like(scores[..., 0])
    pairs = (budget.half_steps - 1) // 2
    if x_keep is not None:
        x_keep = x_keep | ~x_keep.any(1, keepdim=True)  # all of them where none has mass
    width = padded(count)
    block = max(16, TILE // width)
    parts, rows = _parts(batch * heads, num_x, num_x * width, block)
    on_y_first = not budget.starts_on_x
    passes = [(on_y_first, pairs, True)]
    if parts > 1:
        passes = [(True, 0, False)] * on_y_first + [(False, 1, False)] * pairs + [(False, 0, True)]
    given, ends = None, scores.new_empty(batch * heads, parts, count)
    launches = Launches()
    for first, within, last in passes:
        left, ends = torch.empty_like(ends), torch.empty_like(ends)
        arguments = (
            scores, problem.counts, *keep_arguments(x_keep, scores), given, left, ends, u,
            num_x, count, heads, rows, parts, within,
        )  # fmt: skip
        constants = {
            "KEEP": x_keep is not None, "GIVEN": given is not None, "FIRST_Y": first, "LAST_X": last,
            "WIDTH": width, "BLOCK_X": block, "PARTS": triton.next_power_of_2(parts),
        }  # fmt: skip
        key = (given is None, first, last)
        launches(key, _passes, (batch * heads, parts), arguments, constants, num_warps=4)
        given = given if last and parts > 1 else left
    return u, given if budget.half_steps > 1 else None, ends


def _masses_of(problem: CoarseProblem, given: Tensor | None, ends: Tensor) -> Tensor:
    """As features.coarse.masses_of, of what `_duals` returns."""
    batch, heads, num_y, count = problem.member.shape
    parts = ends.shape[1]
    mass = problem.member.new_empty(batch, heads, num_y)
    width = padded(count)
    block = max(16, TILE // width)
    _masses[(batch * heads, triton.cdiv(num_y, block))](
        given, ends, problem.counts, problem.member, mass, num_y, count, parts,
        GIVEN=given is not None, WIDTH=width, BLOCK_Y=block, PARTS=triton.next_power_of_2(parts),
        num_warps=4,
    )  # fmt: skip
    return mass


def farthest_points(clouds: Clouds, count: int) -> Tensor:
    """As features.coarse.farthest_points, in one launch, one program per (b, h)."""
    y = clouds.y
    batch, heads, num_y, dim = y.shape
    pivots = y.new_empty(batch, heads, count, dim)
    if pivots.numel() == 0:
        return pivots
    deep = padded(dim)
    _farthest[(batch * heads,)](
        y, *y.stride(), *keep_arguments(clouds.y_keep, y), y.new_empty(batch * heads, num_y), pivots,
        num_y, count, dim, heads, Y_KEEP=clouds.y_keep is not None, DEEP=deep,
        BLOCK_Y=min(max(16, 8192 // deep), padded(num_y)), num_warps=4,
    )  # fmt: skip
    return pivots


@triton.jit(do_not_specialize=["count"])
def _farthest(
    p_y, stride_yb, stride_yh, stride_ym, stride_yd, p_ykeep, stride_ykb, stride_ykm,
    p_least, p_pivots, num_y, count, dim, heads,
    Y_KEEP: tl.constexpr, DEEP: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """p_least: [B H, M] scratch, every point's distance to its nearest pivot; p_pivots: [B H, R, D].

    Every point is compared with the last pivot, the mean at first, and the farthest one so far found on
    the way: one pass over the points a pivot.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    p_y += i_b * stride_yb + i_h * stride_yh
    p_ykeep += i_b * stride_ykb
    p_least += i_bh * num_y
    p_pivots += i_bh * count * dim
    o_d = tl.arange(0, DEEP)
    m_d = o_d < dim
    o_y = tl.arange(0, BLOCK_Y).to(tl.int64)

    b_sum = tl.zeros([DEEP], tl.float32)
    b_active = tl.zeros([BLOCK_Y], tl.float32)
    for start in range(0, num_y, BLOCK_Y):
        o_m = start + o_y
        m_y = with_mass(p_ykeep, stride_ykm, o_m, num_y, Y_KEEP)
        b_sum += tl.sum(load_rows(p_y, o_m, m_y, o_d, dim, stride_ym, stride_yd, True), 0)
        b_active += m_y.to(tl.float32)
    b_pivot = b_sum / tl.maximum(tl.sum(b_active, 0), 1.0)

    for step in range(count):
        most = tl.full([], -2.0, tl.float32)
        place = tl.full([], 0, tl.int64)
        for start in range(0, num_y, BLOCK_Y):
            o_m = start + o_y
            m_m = o_m < num_y
            m_y = with_mass(p_ykeep, stride_ykm, o_m, num_y, Y_KEEP)
            b_y = load_rows(p_y, o_m, m_m, o_d, dim, stride_ym, stride_yd, True)
            b_away = tl.where(m_d[None, :], b_y - b_pivot[None, :], 0.0)
            b_least = tl.sum(b_away * b_away, 1)
            if step > 1:  # the mean, which the first was compared with, is no pivot
                b_least = tl.minimum(b_least, tl.load(p_least + o_m, mask=m_m, other=0.0))
            tl.store(p_least + o_m, b_least, mask=m_m)
            b_ranked = tl.where(m_y, b_least, tl.where(m_m, -1.0, -2.0))
            block_most = tl.max(b_ranked, 0)
            block_place = start + tl.argmax(b_ranked, 0).to(tl.int64)
            place = tl.where(block_most > most, block_place, place)
            most = tl.maximum(most, block_most)
        b_pivot = tl.load(
            p_y + place * stride_ym + o_d.to(tl.int64) * stride_yd, mask=m_d, other=0.0
        ).to(tl.float32)
        tl.store(p_pivots + step * dim + o_d, b_pivot, mask=m_d)
        tl.debug_barrier()  # the distances may be read in another layout than they were written in


@triton.jit
def _pivot_norms(p_z, stride_zr, stride_zd, o_r, m_r, dim, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """|z|^2 / 2 [WIDTH]; infinite on padding, which is then nearest to nothing."""
    b_norm = tl.zeros([WIDTH], tl.float32)
    for d in range(0, dim, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        b_z = load_rows(p_z, o_r, m_r, o_d, dim, stride_zr, stride_zd, True)
        b_norm += tl.sum(b_z * b_z, 1)
    return tl.where(m_r, b_norm * 0.5, float("inf"))


@triton.jit(do_not_specialize=["parts"])
def _clusters(
    p_y, stride_yb, stride_yh, stride_ym, stride_yd, p_keep, stride_kb, stride_km,
    p_z, stride_zb, stride_zh, stride_zr, stride_zd, p_centre, p_member, p_moments,
    num_y, count, dim, heads, rows, parts,
    KEEP: tl.constexpr, WIDTH: tl.constexpr, DEEP: tl.constexpr, BLOCK_Y: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each y's share in each cluster, p_member [B H, M, R], and a part's sums over a cluster's members.

    p_moments: [B H, parts, R, D + 2], of y - centre, of its square, and of 1.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    p_y += i_b * stride_yb + i_h * stride_yh
    p_keep += i_b * stride_kb
    p_z += i_b * stride_zb + i_h * stride_zh
    o_r = tl.arange(0, WIDTH).to(tl.int64)
    m_r = o_r < count
    o_d = tl.arange(0, DEEP)
    m_d = o_d < dim
    b_centre = tl.load(p_centre + i_bh * dim + o_d, mask=m_d, other=0.0)
    b_norm = _pivot_norms(p_z, stride_zr, stride_zd, o_r, m_r, dim, WIDTH, BLOCK_D)
    b_offset = tl.zeros([WIDTH, DEEP], tl.float32)
    b_second = tl.zeros([WIDTH], tl.float32)
    b_count = tl.zeros([WIDTH], tl.float32)
    first = tl.program_id(1) * rows
    for start in range(first, tl.minimum(first + rows, num_y), BLOCK_Y):
        o_m = start + tl.arange(0, BLOCK_Y).to(tl.int64)
        m_y = with_mass(p_keep, stride_km, o_m, num_y, KEEP)
        b_dot = products(
            None, p_y, p_z, o_m, o_r, m_y, m_r, dim, stride_ym, stride_yd, stride_zr, stride_zd, True,
            PRECISION, BLOCK_Y, WIDTH, BLOCK_D, True,
        )  # fmt: skip
        b_far = b_norm[None, :] - b_dot
        b_nearest = (b_far == tl.min(b_far, 1)[:, None]) & m_y[:, None]
        b_member = b_nearest.to(tl.float32)  # equally near pivots share it
        b_member = b_member / tl.maximum(tl.sum(b_member, 1), 1.0)[:, None]
        places = p_member + (i_bh * num_y + o_m)[:, None] * count + o_r[None, :]
        tl.store(places, b_member, mask=(o_m < num_y)[:, None] & m_r[None, :])
        b_y = load_rows(p_y, o_m, m_y, o_d, dim, stride_ym, stride_yd, True)
        b_local = tl.where(m_y[:, None] & m_d[None, :], b_y - b_centre[None, :], 0.0)
        b_offset = tl.dot(tl.trans(b_member), b_local, b_offset, input_precision=PRECISION)
        b_second += tl.sum(b_member * tl.sum(b_local * b_local, 1)[:, None], 0)
        b_count += tl.sum(b_member, 0)
    p_rows = p_moments + ((i_bh * parts + tl.program_id(1)) * count + o_r) * (dim + 2)
    tl.store(p_rows[:, None] + o_d[None, :], b_offset, mask=m_r[:, None] & m_d[None, :])
    tl.store(p_rows + dim, b_second, mask=m_r)
    tl.store(p_rows + dim + 1, b_count, mask=m_r)


@triton.jit
def _scores(
    p_x, stride_xb, stride_xh, stride_xn, stride_xd, p_total, p_centre, p_scores, p_half_norms,
    num_x, count, dim, heads, tiny,
    WIDTH: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As features.coarse.scores_of, from clusters' sums p_total [B H, R, D + 2]; and |x|^2 / 2."""
    i_bh = tl.program_id(0).to(tl.int64)
    p_x += i_bh // heads * stride_xb + i_bh % heads * stride_xh
    o_n = tl.program_id(1).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    m_n = o_n < num_x
    o_r = tl.arange(0, WIDTH).to(tl.int64)
    m_r = o_r < count
    p_rows = p_total + (i_bh * count + o_r) * (dim + 2)
    b_count = tl.maximum(tl.load(p_rows + dim + 1, mask=m_r, other=1.0), tiny)
    b_norm = tl.zeros([BLOCK_X], tl.float32)
    b_square = tl.zeros([WIDTH], tl.float32)
    b_dot = tl.zeros([BLOCK_X, WIDTH], tl.float32)
    for d in range(0, dim, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        m_d = o_d < dim
        b_mean = tl.load(p_rows[None, :] + o_d[:, None], mask=m_d[:, None] & m_r[None, :], other=0.0)
        b_mean = b_mean / b_count[None, :]
        b_centre = tl.load(p_centre + i_bh * dim + o_d, mask=m_d, other=0.0)
        b_x = load_rows(p_x, o_n, m_n, o_d, dim, stride_xn, stride_xd, True)
        b_dot = tl.dot(b_x, b_mean + b_centre[:, None], b_dot, input_precision=PRECISION)
        b_norm += tl.sum(b_x * b_x, 1)
        b_square += tl.sum(b_mean * b_mean, 0)
    b_norm *= 0.5
    b_second = tl.load(p_rows + dim, mask=m_r, other=0.0) / b_count
    b_variance = tl.maximum(b_second - b_square, 0.0) / dim
    tl.store(
        p_scores + (i_bh * num_x + o_n)[:, None] * count + o_r[None, :],
        b_dot + b_norm[:, None] * b_variance[None, :], mask=m_n[:, None] & m_r[None, :],
    )  # fmt: skip
    tl.store(p_half_norms + i_bh * num_x + o_n, b_norm, mask=m_n)


@triton.jit
def _joined(p_parts, first, parts, count, o_r, PARTS: tl.constexpr):
    """LSE over the parts [WIDTH], in log2."""
    o_p = tl.arange(0, PARTS)
    b_parts = LOG2_E * tl.load(
        p_parts + (first + o_p)[:, None] * count + o_r[None, :],
        mask=(o_p < parts)[:, None] & (o_r < count)[None, :], other=float("-inf"),
    )  # fmt: skip
    return log_sum(b_parts, 0)


@triton.jit(do_not_specialize=["parts"])
def _masses(
    p_given, p_ends, p_counts, p_member, p_mass, num_y, count, parts,
    GIVEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Y: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Masses of a block of y: the clusters' that v = -LSE(given) and LSE(ends) leave, shared out."""
    i_bh = tl.program_id(0).to(tl.int64)
    o_r = tl.arange(0, WIDTH)
    b_counts = tl.load(p_counts + i_bh * count + o_r, mask=o_r < count, other=0.0)
    b_log = _joined(p_ends, i_bh * parts, parts, count, o_r, PARTS)
    if GIVEN:
        b_log -= _joined(p_given, i_bh * parts, parts, count, o_r, PARTS)
    b_log = tl.where(b_counts > 0, b_log, float("-inf"))
    b_mass = tl.exp2(b_log - finite_or_zero(tl.max(b_log, 0)))
    total = tl.sum(b_counts * b_mass, 0)
    b_mass *= tl.sum(b_counts, 0) / tl.where(total > 0, total, 1.0)
    o_m = tl.program_id(1).to(tl.int64) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    m_m = o_m < num_y
    b_member = tl.load(
        p_member + (i_bh * num_y + o_m)[:, None] * count + o_r[None, :],
        mask=m_m[:, None] & (o_r < count)[None, :], other=0.0,
    )  # fmt: skip
    tl.store(p_mass + i_bh * num_y + o_m, tl.sum(b_member * b_mass[None, :], 1), mask=m_m)


@triton.jit
def _sweep(
    p_scores, p_keep, stride_keep, p_u, b_weight, first, last, num_x, count,
    KEEP: tl.constexpr, ON_X: tl.constexpr, WIDTH: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """u_i = -LSE_c(S_ic + weight_c) of rows `first` to `last`, stored, if ON_X, else u = 0; then
    LSE_i(S_ic + u_i) [WIDTH] over those of them that carry mass. All but the u stored are in log2."""
    o_r = tl.arange(0, WIDTH).to(tl.int64)
    b_top = tl.full([WIDTH], float("-inf"), tl.float32)
    b_sum = tl.zeros([WIDTH], tl.float32)
    for start in range(first, last, BLOCK_X):
        o_n = start + tl.arange(0, BLOCK_X).to(tl.int64)
        m_n = o_n < num_x
        b_logit = LOG2_E * tl.load(
            p_scores + o_n[:, None] * count + o_r[None, :], mask=m_n[:, None] & (o_r < count)[None, :],
            other=float("-inf"),
        )  # fmt: skip
        if ON_X:
            b_row = log_sum(b_logit + b_weight[None, :], 1)
            b_u = tl.where(b_row == float("-inf"), 0.0, -b_row)  # where no y carries mass
            tl.store(p_u + o_n, b_u * LN_2, mask=m_n)
            b_logit += b_u[:, None]
        m_x = with_mass(p_keep, stride_keep, o_n, num_x, KEEP)
        b_logit = tl.where(m_x[:, None], b_logit, float("-inf"))
        b_top, b_sum = add_exponentials(b_top, b_sum, b_logit, 0)
    return b_top + tl.log2(b_sum)


@triton.jit(do_not_specialize=["pairs", "parts"])
def _passes(
    p_scores, p_counts, p_keep, stride_keep_b, stride_keep_n, p_given, p_left, p_ends, p_u,
    num_x, count, heads, rows, parts, pairs,
    KEEP: tl.constexpr, GIVEN: tl.constexpr, FIRST_Y: tl.constexpr, LAST_X: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_X: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A half-step on y, `pairs` of x and y, one on x: those of them that are asked for.

    p_scores: [B H, N, R]; p_given, p_left, p_ends: [B H, parts, R], a part's LSE_i(S + u) before the
    launch, at its last half-step on y, and after one on x that follows that.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    p_scores += i_bh * num_x * count
    p_keep += i_bh // heads * stride_keep_b
    p_u += i_bh * num_x
    first = tl.program_id(1) * rows
    last = tl.minimum(first + rows, num_x)
    o_r = tl.arange(0, WIDTH)
    m_r = o_r < count
    b_log = tl.log2(tl.load(p_counts + i_bh * count + o_r, mask=m_r, other=0.0))
    b_sums = tl.zeros([WIDTH], tl.float32)
    if GIVEN:
        b_sums = _joined(p_given, i_bh * parts, parts, count, o_r, PARTS)
    if FIRST_Y:
        b_sums = _sweep(
            p_scores, p_keep, stride_keep_n, p_u, b_log, first, last, num_x, count, KEEP, False, WIDTH,
            BLOCK_X,
        )  # fmt: skip
    for _ in range(pairs):
        b_sums = _sweep(
            p_scores, p_keep, stride_keep_n, p_u, tl.where(m_r, b_log - b_sums, float("-inf")), first,
            last, num_x, count, KEEP, True, WIDTH, BLOCK_X,
        )  # fmt: skip
        tl.debug_barrier()  # u is stored again, perhaps by other threads
    tl.store(p_left + (i_bh * parts + tl.program_id(1)) * count + o_r, b_sums * LN_2, mask=m_r)
    if LAST_X:
        b_ends = _sweep(
            p_scores, p_keep, stride_keep_n, p_u, tl.where(m_r, b_log - b_sums, float("-inf")), first,
            last, num_x, count, KEEP, True, WIDTH, BLOCK_X,
        )  # fmt: skip
        tl.store(p_ends + (i_bh * parts + tl.program_id(1)) * count + o_r, b_ends * LN_2, mask=m_r)
