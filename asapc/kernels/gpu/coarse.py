"""Triton twin of features/coarse.py: two launches, one program per (b, h) each.

`_moments` joins the points y to their nearest pivots and leaves each cluster's mean, variance and
log count; `_loop` runs the whole finite loop on the N x R problem. A half-step on x and the one on
the clusters after it are one pass over S: every block of rows finds its u and at once adds
exp(S + u) to the clusters' running sums, so that u itself is only ever stored at the end. S is
kept in registers where N R <= RESIDENT, else in a scratch buffer [B H, N, R], and is in units of
log 2 throughout. It is always in the log domain: no host decision, no range it fails on.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from asapc.features.clouds import Budget, Clouds
from asapc.kernels.gpu.launch import keep_arguments, padded

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
MAX_PIVOTS = 128
RESIDENT = 16384  # entries of S that a program holds in registers: 64 a thread
STREAMED = 8192  # entries of S that it reads at once where it does not


def dual_and_mass(
    clouds: Clouds, pivots: Tensor, budget: Budget, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """The coarse column u + |x|^2 / 2 [B, H, N], and features.coarse.row_mass [B, H, M] if wanted.

    Without gradients. Clouds in float32; pivots [H, R, D], or [B, H, R, D], with R <= 128; D <= 256;
    N, M >= 1.
    """
    x, y = clouds.x, clouds.y
    batch, heads, num_x, dim = x.shape
    num_y, count = y.shape[2], pivots.shape[-2]
    if pivots.dim() == 3:
        pivots = pivots[None].expand(batch, -1, -1, -1)
    column = x.new_empty(batch, heads, num_x)
    mass = x.new_empty(batch, heads, num_y) if want_mass else None
    if batch * heads == 0:
        return column, mass
    width, deep = padded(count), padded(dim)
    clusters = x.new_empty(batch * heads, width, deep + 3)  # mean, variance, log count, count
    # A float32 product holds whole rows of both factors in registers: few dimensions at a time.
    block_y = 32 if width <= 64 and deep <= 128 else 16
    y_side = (
        y, *y.stride(), *keep_arguments(clouds.y_keep, y), pivots, *pivots.stride(), clusters,
    )  # fmt: skip
    sizes = {
        "count": count, "dim": dim, "heads": heads, "Y_KEEP": clouds.y_keep is not None,
        "WIDTH": width, "DEEP": deep, "BLOCK_Y": block_y, "BLOCK_D": 16, "PRECISION": "ieee",
    }  # fmt: skip
    grid = (batch * heads,)
    _moments[grid](*y_side, num_y=num_y, **sizes, num_warps=8 if width * deep <= 16384 else 16)

    resident = padded(num_x) * width <= RESIDENT
    block_x = padded(num_x) if resident else max(16, STREAMED // width)
    scratch = column if resident else x.new_empty(batch * heads * num_x * (width + 1))
    steps = budget.half_steps
    x_steps = (steps + 1) // 2 if budget.starts_on_x else steps // 2
    _loop[grid](
        *y_side, x, *x.stride(), *keep_arguments(clouds.x_keep, x), scratch, column,
        column if mass is None else mass, num_x, num_y, x_steps - 1, **sizes,
        X_KEEP=clouds.x_keep is not None,
        HAS_X=x_steps > 0,
        FIRST_Y=steps > 0 and not budget.starts_on_x and x_steps > 0,
        LAST_Y=steps > 0 and (steps % 2 == 0) == budget.starts_on_x,
        MASS=want_mass, RESIDENT=resident, BLOCK_X=block_x,
        num_warps=4 if block_x * width <= 2048 else 8,
    )  # fmt: skip
    return column, mass


def contribution(clouds: Clouds, pivots: Tensor, weights: Tensor, budget: Budget) -> Tensor:
    """Coarse column times its coefficient [1|H, 1]: [B, H, N], uncentred."""
    return dual_and_mass(clouds, pivots, budget, False)[0] * weights


def farthest_points(clouds: Clouds, count: int) -> Tensor:
    """As features.farthest.farthest_points, in one launch, one program per (b, h)."""
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
        m_y = _kept(p_ykeep, stride_ykm, o_m, num_y, Y_KEEP)
        b_y = tl.load(
            p_y + o_m[:, None] * stride_ym + o_d[None, :].to(tl.int64) * stride_yd,
            mask=m_y[:, None] & m_d[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        b_sum += tl.sum(b_y, 0)
        b_active += m_y.to(tl.float32)
    b_pivot = b_sum / tl.maximum(tl.sum(b_active, 0), 1.0)

    for step in range(count):
        most = tl.full([], -2.0, tl.float32)
        place = tl.full([], 0, tl.int64)
        for start in range(0, num_y, BLOCK_Y):
            o_m = start + o_y
            m_m = o_m < num_y
            m_y = _kept(p_ykeep, stride_ykm, o_m, num_y, Y_KEEP)
            b_y = tl.load(
                p_y + o_m[:, None] * stride_ym + o_d[None, :].to(tl.int64) * stride_yd,
                mask=m_m[:, None] & m_d[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
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
def _products(
    p_a, stride_a, stride_ad, o_a, m_a, p_b, stride_b, stride_bd, o_b, m_b, dim,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a_i . b_j [BLOCK_A, BLOCK_B] and |a_i|^2 / 2 [BLOCK_A], a few dimensions at a time."""
    b_dot = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
    b_norm = tl.zeros([BLOCK_A], tl.float32)
    for d in range(0, dim, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        m_d = o_d < dim
        b_a = tl.load(
            p_a + o_a[:, None] * stride_a + o_d[None, :].to(tl.int64) * stride_ad,
            mask=m_a[:, None] & m_d[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        b_b = tl.load(
            p_b + o_b[None, :] * stride_b + o_d[:, None].to(tl.int64) * stride_bd,
            mask=m_b[None, :] & m_d[:, None], other=0.0,
        ).to(tl.float32)  # fmt: skip
        b_dot = tl.dot(b_a, b_b, b_dot, input_precision=PRECISION)
        b_norm += tl.sum(b_a * b_a, 1)
    return b_dot, b_norm * 0.5


@triton.jit
def _pivot_norms(
    p_z, stride_zr, stride_zd, o_r, m_r, dim, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr
):
    """|z|^2 / 2 [WIDTH]; infinite on padding, which is then nearest to nothing."""
    b_norm = tl.zeros([WIDTH], tl.float32)
    for d in range(0, dim, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        b_z = tl.load(
            p_z + o_r[:, None] * stride_zr + o_d[None, :].to(tl.int64) * stride_zd,
            mask=m_r[:, None] & (o_d < dim)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        b_norm += tl.sum(b_z * b_z, 1)
    return tl.where(m_r, b_norm * 0.5, float("inf"))


@triton.jit
def _kept(p_keep, stride_keep, o_n, length, KEEP: tl.constexpr):
    """The points that exist and carry mass."""
    m_n = o_n < length
    if KEEP:
        m_n = m_n & (tl.load(p_keep + o_n * stride_keep, mask=m_n, other=0) != 0)
    return m_n


@triton.jit
def _members(
    p_y, stride_ym, stride_yd, o_m, m_y, p_z, stride_zr, stride_zd, o_r, m_r, b_norm, dim,
    BLOCK_Y: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Share of each y in each cluster [BLOCK_Y, WIDTH]; equally near pivots share it."""
    b_dot, _ = _products(
        p_y, stride_ym, stride_yd, o_m, m_y, p_z, stride_zr, stride_zd, o_r, m_r, dim,
        BLOCK_Y, WIDTH, BLOCK_D, PRECISION,
    )  # fmt: skip
    b_far = b_norm[None, :] - b_dot
    b_nearest = (b_far == tl.min(b_far, 1)[:, None]) & m_y[:, None]
    b_member = b_nearest.to(tl.float32)
    return b_member / tl.maximum(tl.sum(b_member, 1), 1.0)[:, None]


@triton.jit
def _moments(
    p_y, stride_yb, stride_yh, stride_ym, stride_yd, p_ykeep, stride_ykb, stride_ykm,
    p_z, stride_zb, stride_zh, stride_zr, stride_zd, p_clusters, num_y, count, dim, heads,
    Y_KEEP: tl.constexpr, WIDTH: tl.constexpr, DEEP: tl.constexpr, BLOCK_Y: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Means, variances and counts of the clusters: see features.coarse.coarse_problem.

    p_clusters: [B H, WIDTH (DEEP + 3)], means [WIDTH, DEEP] and variances scaled by log2(e), log2 of
    the counts, the counts.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    p_y += i_b * stride_yb + i_h * stride_yh
    p_ykeep += i_b * stride_ykb
    p_z += i_b * stride_zb + i_h * stride_zh
    p_clusters += i_bh * (WIDTH * (DEEP + 3))
    o_r = tl.arange(0, WIDTH).to(tl.int64)
    m_r = o_r < count
    o_d = tl.arange(0, DEEP)
    m_d = o_d < dim
    o_y = tl.arange(0, BLOCK_Y).to(tl.int64)

    b_sum = tl.zeros([DEEP], tl.float32)
    b_active = tl.zeros([BLOCK_Y], tl.float32)
    for start in range(0, num_y, BLOCK_Y):
        o_m = start + o_y
        m_y = _kept(p_ykeep, stride_ykm, o_m, num_y, Y_KEEP)
        b_y = tl.load(
            p_y + o_m[:, None] * stride_ym + o_d[None, :].to(tl.int64) * stride_yd,
            mask=m_y[:, None] & m_d[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        b_sum += tl.sum(b_y, 0)
        b_active += m_y.to(tl.float32)
    b_centre = b_sum / tl.maximum(tl.sum(b_active, 0), 1.0)

    b_norm = _pivot_norms(p_z, stride_zr, stride_zd, o_r, m_r, dim, WIDTH, BLOCK_D)
    b_offset = tl.zeros([WIDTH, DEEP], tl.float32)
    b_second = tl.zeros([WIDTH], tl.float32)
    b_count = tl.zeros([WIDTH], tl.float32)
    for start in range(0, num_y, BLOCK_Y):
        o_m = start + o_y
        m_y = _kept(p_ykeep, stride_ykm, o_m, num_y, Y_KEEP)
        b_member = _members(
            p_y, stride_ym, stride_yd, o_m, m_y, p_z, stride_zr, stride_zd, o_r, m_r, b_norm, dim,
            BLOCK_Y, WIDTH, BLOCK_D, PRECISION,
        )  # fmt: skip
        m_local = m_y[:, None] & m_d[None, :]
        b_y = tl.load(
            p_y + o_m[:, None] * stride_ym + o_d[None, :].to(tl.int64) * stride_yd,
            mask=m_local, other=0.0,
        ).to(tl.float32)
        b_local = tl.where(m_local, b_y - b_centre[None, :], 0.0)
        b_offset = tl.dot(tl.trans(b_member), b_local, b_offset, input_precision=PRECISION)
        b_second += tl.sum(b_member * tl.sum(b_local * b_local, 1)[:, None], 0)
        b_count += tl.sum(b_member, 0)

    b_size = tl.maximum(b_count, 1e-30)
    b_offset = b_offset / b_size[:, None]
    b_spread = tl.maximum(b_second / b_size - tl.sum(b_offset * b_offset, 1), 0.0) / dim
    b_mean = (b_centre[None, :] + b_offset) * LOG2_E
    tl.store(p_clusters + o_r[:, None] * DEEP + o_d[None, :], b_mean)
    p_clusters += WIDTH * DEEP
    tl.store(p_clusters + o_r, b_spread * LOG2_E)
    b_log = tl.where(b_count > 0, tl.log2(b_size), float("-inf"))
    tl.store(p_clusters + WIDTH + o_r, b_log)
    tl.store(p_clusters + 2 * WIDTH + o_r, b_count)


@triton.jit
def _close_x(b_scores, b_weight):
    """u = -LSE_c(S + log n_c + v_c) [BLOCK_X], 0 where no y carries mass."""
    b_logit = b_scores + b_weight[None, :]
    b_top = tl.max(b_logit, 1)
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)  # no y carries mass
    b_sum = tl.sum(tl.exp2(b_logit - b_top[:, None]), 1)
    return -(b_top + tl.log2(tl.where(b_sum > 0, b_sum, 1.0)))


@triton.jit
def _add_rows(b_logit, m_x, b_top, b_sum):
    """Running maximum and sum [WIDTH] of the log sum over x, with one more block of rows."""
    b_logit = tl.where(m_x[:, None], b_logit, float("-inf"))
    b_new = tl.maximum(b_top, tl.max(b_logit, 0))
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_sum = b_sum * tl.exp2(b_top - b_safe) + tl.sum(tl.exp2(b_logit - b_safe[None, :]), 0)
    return b_new, b_sum


@triton.jit(do_not_specialize=["pairs"])
def _loop(
    p_y, stride_yb, stride_yh, stride_ym, stride_yd, p_ykeep, stride_ykb, stride_ykm,
    p_z, stride_zb, stride_zh, stride_zr, stride_zd, p_clusters,
    p_x, stride_xb, stride_xh, stride_xn, stride_xd, p_xkeep, stride_xkb, stride_xkn,
    p_scratch, p_column, p_mass, num_x, num_y, pairs, count, dim, heads,
    Y_KEEP: tl.constexpr, X_KEEP: tl.constexpr, HAS_X: tl.constexpr, FIRST_Y: tl.constexpr,
    LAST_Y: tl.constexpr, MASS: tl.constexpr, RESIDENT: tl.constexpr, WIDTH: tl.constexpr,
    DEEP: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The budget's half-steps: an optional one on y, `pairs` of x and y, then the last one on x.

    Whether one on y follows (LAST_Y) only shows in the masses, which it balances. HAS_X: there is
    one on x at all. p_scratch: [B H, N, WIDTH] S then [B H, N] |x|^2 / 2, unused where RESIDENT.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    p_x += i_b * stride_xb + i_h * stride_xh
    p_xkeep += i_b * stride_xkb
    p_clusters += i_bh * (WIDTH * (DEEP + 3))
    p_column += i_bh * num_x
    p_half = p_scratch + tl.num_programs(0).to(tl.int64) * num_x * WIDTH + i_bh * num_x
    p_scores = p_scratch + i_bh * num_x * WIDTH
    o_r = tl.arange(0, WIDTH).to(tl.int64)
    o_x = tl.arange(0, BLOCK_X).to(tl.int64)
    p_rows = p_clusters + WIDTH * DEEP
    b_spread = tl.load(p_rows + o_r)
    b_log = tl.load(p_rows + WIDTH + o_r)
    b_count = tl.load(p_rows + 2 * WIDTH + o_r)
    total = tl.sum(b_count, 0)
    m_all = o_r < WIDTH  # padded clusters lie at the mean: in range, and of weight 0

    b_kept = tl.zeros([BLOCK_X], tl.float32)
    for start in range(0, num_x, BLOCK_X):
        o_n = start + o_x
        m_n = o_n < num_x
        b_kept += _kept(p_xkeep, stride_xkn, o_n, num_x, X_KEEP).to(tl.float32)
        if not RESIDENT:
            b_dot, b_half = _products(
                p_x, stride_xn, stride_xd, o_n, m_n, p_clusters, DEEP, 1, o_r, m_all, dim,
                BLOCK_X, WIDTH, BLOCK_D, PRECISION,
            )  # fmt: skip
            b_scores = b_dot + b_half[:, None] * b_spread[None, :]
            tl.store(p_scores + o_n[:, None] * WIDTH + o_r[None, :], b_scores, mask=m_n[:, None])
            tl.store(p_half + o_n, b_half, mask=m_n)
    kept = tl.sum(b_kept, 0)
    if RESIDENT:
        b_dot, b_half = _products(
            p_x, stride_xn, stride_xd, o_x, o_x < num_x, p_clusters, DEEP, 1, o_r, m_all, dim,
            BLOCK_X, WIDTH, BLOCK_D, PRECISION,
        )  # fmt: skip
        b_scores = b_dot + b_half[:, None] * b_spread[None, :]
    else:
        tl.debug_barrier()  # the scratch is read in another layout than it was written in

    b_v = tl.zeros([WIDTH], tl.float32)
    if FIRST_Y:
        b_top = tl.full([WIDTH], float("-inf"), tl.float32)
        b_sum = tl.zeros([WIDTH], tl.float32)
        for start in range(0, num_x, BLOCK_X):
            o_n = start + o_x
            m_n = o_n < num_x
            m_x = tl.where(kept > 0, _kept(p_xkeep, stride_xkn, o_n, num_x, X_KEEP), m_n)
            if not RESIDENT:
                b_scores = tl.load(
                    p_scores + o_n[:, None] * WIDTH + o_r[None, :], mask=m_n[:, None], other=0.0
                )
            b_top, b_sum = _add_rows(b_scores, m_x, b_top, b_sum)
        b_v = -(b_top + tl.log2(b_sum))

    for _ in range(pairs):
        b_top = tl.full([WIDTH], float("-inf"), tl.float32)
        b_sum = tl.zeros([WIDTH], tl.float32)
        b_weight = b_log + b_v
        for start in range(0, num_x, BLOCK_X):
            o_n = start + o_x
            m_n = o_n < num_x
            m_x = tl.where(kept > 0, _kept(p_xkeep, stride_xkn, o_n, num_x, X_KEEP), m_n)
            if not RESIDENT:
                b_scores = tl.load(
                    p_scores + o_n[:, None] * WIDTH + o_r[None, :], mask=m_n[:, None], other=0.0
                )
            b_u = _close_x(b_scores, b_weight)
            b_top, b_sum = _add_rows(b_scores + b_u[:, None], m_x, b_top, b_sum)
        b_v = -(b_top + tl.log2(b_sum))

    b_top = tl.full([WIDTH], float("-inf"), tl.float32)
    b_sum = tl.zeros([WIDTH], tl.float32)
    b_weight = b_log + b_v
    for start in range(0, num_x, BLOCK_X):
        o_n = start + o_x
        m_n = o_n < num_x
        m_x = tl.where(kept > 0, _kept(p_xkeep, stride_xkn, o_n, num_x, X_KEEP), m_n)
        if not RESIDENT:
            b_scores = tl.load(
                p_scores + o_n[:, None] * WIDTH + o_r[None, :], mask=m_n[:, None], other=0.0
            )
            b_half = tl.load(p_half + o_n, mask=m_n, other=0.0)
        b_u = tl.zeros([BLOCK_X], tl.float32)
        if HAS_X:
            b_u = _close_x(b_scores, b_weight)
        tl.store(p_column + o_n, b_u * LN_2 + b_half, mask=m_n)
        if MASS:
            b_top, b_sum = _add_rows(b_scores + b_u[:, None], m_x, b_top, b_sum)

    if MASS:
        p_y += i_b * stride_yb + i_h * stride_yh
        p_ykeep += i_b * stride_ykb
        p_z += i_b * stride_zb + i_h * stride_zh
        p_mass += i_bh * num_y
        b_change = tl.zeros([WIDTH], tl.float32)
        if not LAST_Y:
            b_change = b_v + b_top + tl.log2(b_sum)
        b_change = tl.where(b_count > 0, b_change, float("-inf"))
        top = tl.max(b_change, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        b_mass = tl.exp2(b_change - top)
        sum_mass = tl.sum(b_mass * b_count, 0)
        b_mass = b_mass * (total / tl.where(sum_mass > 0, sum_mass, 1.0)) * (kept / num_x)
        m_r = o_r < count
        b_norm = _pivot_norms(p_z, stride_zr, stride_zd, o_r, m_r, dim, WIDTH, BLOCK_D)
        o_y = tl.arange(0, BLOCK_Y).to(tl.int64)
        for start in range(0, num_y, BLOCK_Y):
            o_m = start + o_y
            m_y = _kept(p_ykeep, stride_ykm, o_m, num_y, Y_KEEP)
            b_member = _members(
                p_y, stride_ym, stride_yd, o_m, m_y, p_z, stride_zr, stride_zd, o_r, m_r, b_norm,
                dim, BLOCK_Y, WIDTH, BLOCK_D, PRECISION,
            )  # fmt: skip
            tl.store(p_mass + o_m, tl.sum(b_member * b_mass[None, :], 1), mask=o_m < num_y)
