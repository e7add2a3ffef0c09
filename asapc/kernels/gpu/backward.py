"""Gradients of the c-transforms, the apply and the loop, from tiles computed again: O(T (N + M)) memory.

Every gradient is a sum over a matrix of slopes dL/dS_ij that is never stored. Where f and g are the
duals around one half-step and P = exp(S + f + g) is the plan it closed,

    rows closed     dL/dS_ij = -N df_i P_ij        columns closed     dL/dS_ij = -M dg_j P_ij
    applied         dL/dS_ij = factor <dout_i, v_j> P_ij

and the sums of these over i or j are the gradient of the other dual, which the half-step before it
takes on. The duals' gradients alone run through the chain; with all of them known, one pass over the
tiles sums every half-step's slopes at once into dq, and one into dk and dv.

The plans of all half-steps are one plan with its rows and columns scaled,

    P_t = P exp(f_t - f) exp(g_t - g)       the transport orbit: block-wise paper, Proposition 6

so that such a pass takes one exponential an entry and a product of rank 2 T. Where duals move too far for
float32, it takes an exponential a half-step. Duals are in log2, their gradients are not.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asapc.ir import Side
from asapc.kernels.gpu.half_step import attend, close_columns, close_rows
from asapc.kernels.gpu.tiles import (
    FLOAT32_PRECISION,
    LN_2,
    LOG2_E,
    Scores,
    block_of,
    is_half,
    load_bias,
    load_dual,
    load_keep,
    load_rows,
    product,
    products,
    split_factor,
    strides_of,
)
from asapc.kernels.loop import Gradients, Loop, Tail
from asapc.operators.sinkhorn import factor_value, score_matrix

SIZE_ENTRIES = 1 << 24  # of a block of scores in plain PyTorch
RANK_STEP = tl.constexpr(16)  # of an orbit's rank: what a product takes at once
REACH = 57.0  # of the duals' moves: a plan's entry of 1e-8 stays far from the end of float32's range


class Output(NamedTuple):
    """The apply.  grad: [B, H, N, E], of its result; v: [B, H, M, E]."""

    grad: Tensor
    v: Tensor
    factor: Sequence[float]


class Terms(NamedTuple):
    """Half-steps whose slopes are (row_i + column_j) exp(S + f_i + g_j), stacked: [T, B, H, N or M].

    The first one's duals are also those of the apply.
    """

    f: Tensor
    g: Tensor
    row: Tensor
    column: Tensor


class Orbit(NamedTuple):
    """The terms' slopes over the first one's plan, x y': x [B, H, X, R], y [B, H, Y, R], float32, the
    rank padded with zeros; safe: [B, H] int8, whether float32 holds them."""

    x: Tensor
    y: Tensor
    safe: Tensor


def sinkhorn_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    dual: Tensor | None,
    loop: Loop,
    tail: Tail,
) -> Gradients:
    """Of `sinkhorn_loop`.  grad_out: [B, H, N, E], of its result.

    A tolerance of the tail waits for the GPU after every half-step.
    """
    inputs = Scores(q, k, keep, bias, loop.score_multiplier)
    output = Output(grad_out, v, loop.output_factor)
    rows_first = loop.first_side == "row"
    sides: list[Side] = [
        "row" if (step % 2 == 0) == rows_first else "column" for step in range(loop.half_steps)
    ]
    f, g = (torch.zeros(x.shape[:3], dtype=torch.float32, device=x.device) for x in (q, k))
    if dual is not None:
        start = dual.float() * LOG2_E.value
        f, g = (f, start) if rows_first else (start, g)
    pairs, out = [], None
    for step, side in enumerate(sides):
        if side == "column":
            g = close_columns(inputs, f)
        elif step + 1 < len(sides):
            f = close_rows(inputs, g)
        else:
            out, last = attend(inputs, v, None, g, output.factor, True, with_dual=True)
            f = _given(last)
        pairs.append((f, g))
    grad = None  # of the dual that the step at hand has made; then of the other, which it was made from
    terms: list[Terms] = []
    most = min(tail.most, len(sides))
    allowed = _allowed(tail, inputs, output, *pairs[-1]) if tail.tolerance > 0 and most else None
    for step in reversed(range(len(sides) - most, len(sides))):
        side, pair = sides[step], pairs[step]
        applied = output if step + 1 == len(sides) else None
        if out is not None and applied is not None:
            grad = (grad_out.float() * out).sum(-1)  # sum_j factor <dout_i, v_j> P_ij
        elif applied is not None:
            grad = _slopes(inputs, one_term(*pair, side, None), output, side, sums=True)[2]
        terms.append(one_term(*pair, side, grad))
        ends = step == len(sides) - most
        if not ends or (step == 0 and dual is not None):
            other: Side = "column" if side == "row" else "row"
            grad = _slopes(inputs, terms[-1], applied, other, sums=True)[2]
        if allowed is not None and not ends:
            assert grad is not None
            if bool((step * grad.abs().sum(-1) <= allowed).all()):
                break
    passed = len(terms)
    if not terms:
        terms.append(one_term(f, g, "row", None))
        started: Side = "column" if rows_first else "row"
        grad = None
        if dual is not None and not sides:
            grad = _slopes(inputs, terms[0], output, started, sums=True)[2]
    stacked = Terms(*(torch.cat(parts) for parts in zip(*terms, strict=True)))
    dq, _, _ = _slopes(inputs, stacked, output, "row", points=True)
    dk, dv, _ = _slopes(inputs, stacked, output, "column", points=True, values=True)
    grad_dual = None
    if dual is not None:
        all_passed = passed == len(sides)
        grad_dual = _given(grad).to(dual.dtype) if all_passed else torch.zeros_like(dual)
    depth = torch.full(q.shape[:2], passed, device=q.device)
    return Gradients(_given(dq), _given(dk), _given(dv), grad_dual, depth)


def _allowed(tail: Tail, inputs: Scores, output: Output, f: Tensor, g: Tensor) -> Tensor:
    """What a tail may leave out [B, H], in plain PyTorch, by blocks of rows."""
    q, k, keep, bias, score_multiplier = inputs
    batch, heads, queries, _ = q.shape
    bias = None if bias is None else bias.expand(batch, heads, queries, k.shape[2])
    v = output.v.float().transpose(2, 3)
    allowed = q.new_zeros((batch, heads), dtype=torch.float32)
    rows = max(1, SIZE_ENTRIES // max(1, batch * heads * k.shape[2]))
    for start in range(0, queries, rows):
        part = slice(start, start + rows)
        some = None if bias is None else bias[:, :, part].float()
        scores = score_matrix(q[:, :, part].float(), k.float(), keep, some, score_multiplier)
        plan = torch.exp(scores + LN_2.value * (f[:, :, part, None] + g[:, :, None]))
        products = output.grad[:, :, part].float() @ v
        allowed += tail.allowed(plan.flatten(0, 1), products.flatten(0, 1)).view_as(allowed)
    factor = factor_value(output.factor, queries, k.shape[2], keep)
    scale = abs(factor) if isinstance(factor, float) else factor.abs().to(allowed)[:, :, 0, 0]
    return allowed * scale


def orbit_of(dual_x: Tensor, dual_y: Tensor, coef_x: Tensor, coef_y: Tensor) -> Orbit:
    """sum_t (a_i + b_j) exp(f_i - f0_i + g_j - g0_j) of the terms [T, B, H, X or Y], factored.
    Where tokens are masked, -inf - (-inf) counts as 0."""
    moved_x, moved_y = ((dual - dual[:1]).nan_to_num(0.0, 0.0, 0.0) for dual in (dual_x, dual_y))
    middle = (moved_x.amax(-1, keepdim=True) + moved_x.amin(-1, keepdim=True)) / 2  # a gauge of its own
    moved_x, moved_y = moved_x - middle, moved_y + middle
    reach = (moved_x.abs().amax(-1) + moved_y.abs().amax(-1)).amax(0)  # [B, H]
    x, y = (moved.clamp(-REACH, REACH).exp2() for moved in (moved_x, moved_y))
    sides = [torch.cat([coef_x * x, x]), torch.cat([y, coef_y * y])]
    more = -2 * len(dual_x) % RANK_STEP.value
    laid = [torch.nn.functional.pad(side.permute(1, 2, 3, 0), (0, more)) for side in sides]
    return Orbit(laid[0].contiguous(), laid[1].contiguous(), (reach <= REACH).to(torch.int8))


def one_term(f: Tensor, g: Tensor, closed: Side, grad: Tensor | None) -> Terms:
    """The half-step that closed a side with the plan exp(S + f + g); grad: of its new dual, None 0."""
    row, column = torch.zeros_like(f), torch.zeros_like(g)
    if grad is not None and closed == "row":
        row = grad * -f.shape[2]
    elif grad is not None:
        column = grad * -g.shape[2]
    return Terms(f[None], g[None], row[None], column[None])


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _slopes(
    inputs: Scores,
    terms: Terms,
    output: Output | None,
    side: Side,
    points: bool = False,
    values: bool = False,
    sums: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """One pass over the tiles of the slopes, for each row or each column: dq or dk, dv, their sums.

    points: dq [B, H, N, D] or dk [B, H, M, D]; values: dv [B, H, M, E], of columns alone; sums:
    [B, H, N] or [B, H, M] float32, the gradient of the dual of that side.
    """
    rows, spread = side == "row", inputs.spread()
    x, y, keep, bias, score_multiplier = spread if rows else spread.turned()
    u_x, u_y, factor, factors = None, None, 1.0, None
    if output is not None:
        u_x, u_y = (output.grad, output.v) if rows else (output.v, output.grad)
        factor, factors = split_factor(output.factor, inputs.q.shape[2], inputs.k.shape[2], keep)
    dual_x, dual_y = (terms.f, terms.g) if rows else (terms.g, terms.f)
    coef_x, coef_y = (terms.row, terms.column) if rows else (terms.column, terms.row)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if points else None
    du = None
    if values and u_x is not None:
        du = torch.empty(u_x.shape, dtype=u_x.dtype, device=x.device)
    total = torch.empty(x.shape[:3], dtype=torch.float32, device=x.device) if sums else None
    batch, heads, count_x, dim = x.shape
    if batch * heads * count_x == 0:
        return dx, du, total
    value_dim = 0 if u_x is None else u_x.shape[3]
    half = is_half(x, y)
    half_values = u_x is not None and u_y is not None and is_half(u_x, u_y)
    wide = max(dim, value_dim) > (128 if half else 64)
    block_x = block_of(count_x, 32 if wide else 64)
    block_y = block_of(y.shape[2], 32)
    x_dual, y_dual, x_coef, y_coef = (t.contiguous() for t in (dual_x, dual_y, coef_x, coef_y))
    several = len(terms.f) > 1 and y.shape[2] > 0
    orbit = orbit_of(x_dual, y_dual, x_coef, y_coef) if several else None
    block_d, block_e = block_of(dim, 128 if half else 32), block_of(value_dim, 128 if half_values else 32)
    _slope_sums[(batch * heads * triton.cdiv(count_x, block_x),)](
        x, y, u_x, u_y, keep, bias,
        x_dual, y_dual, x_coef, y_coef, *(orbit or (None, None, None)),
        factors, dx, du, total,
        heads, count_x, y.shape[2], dim, value_dim, len(terms.f), dual_x[0].numel(), dual_y[0].numel(),
        0 if orbit is None else orbit.x.shape[3],
        *x.stride(), *y.stride(), *strides_of(u_x, 4), *strides_of(u_y, 4), *strides_of(keep, 2),
        *strides_of(bias, 4),
        score_multiplier * LOG2_E.value,
        factor,
        HAS_KEEP=keep is not None,
        KEEP_ON_X=not rows,
        HAS_BIAS=bias is not None,
        HAS_OUTPUT=output is not None,
        HAS_FACTORS=factors is not None,
        SEVERAL=several,
        WANT_POINTS=points,
        WANT_VALUES=du is not None,
        WANT_SUMS=sums,
        AS_FLOAT32=not half,
        VALUES_AS_FLOAT32=not half_values,
        # A plan of N M entries and its slopes leave the range of float16, not that of tf32.
        WIDEN_POINTS=y.dtype != torch.bfloat16,
        WIDEN_VALUES=u_y is None or u_y.dtype != torch.bfloat16,
        PRECISION=FLOAT32_PRECISION,
        POINTS_PRECISION="tf32" if y.dtype == torch.float16 else FLOAT32_PRECISION,
        VALUES_PRECISION="tf32" if half_values else FLOAT32_PRECISION,
        BLOCK_X=block_x,
        BLOCK_Y=block_y,
        BLOCK_D=block_d,
        BLOCK_E=block_e,
        ALL_D=block_of(dim, 256),
        ALL_E=block_of(value_dim, 256),
        CHUNKED=dim > block_d,
        CHUNKED_VALUES=value_dim > block_e,
        num_warps=8 if max(dim, value_dim) > (64 if half else 32) else 4,
        num_stages=2,
    )  # fmt: skip
    return dx, du, total


@triton.jit
def _slope_sums(
    p_x, p_y, p_ux, p_uy, p_keep, p_bias, p_dual_x, p_dual_y, p_coef_x, p_coef_y, p_orbit_x,
    p_orbit_y, p_safe, p_factors, p_dx, p_du, p_sums,
    heads, count_x, count_y, dim, value_dim, terms, step_x, step_y, rank,
    stride_xb, stride_xh, stride_xn, stride_xd, stride_yb, stride_yh, stride_yn, stride_yd,
    stride_uxb, stride_uxh, stride_uxn, stride_uxd, stride_uyb, stride_uyh, stride_uyn, stride_uyd,
    stride_keep_b, stride_keep_n, stride_bias_b, stride_bias_h, stride_bias_x, stride_bias_y,
    scale, factor,
    HAS_KEEP: tl.constexpr, KEEP_ON_X: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_OUTPUT: tl.constexpr,
    HAS_FACTORS: tl.constexpr, SEVERAL: tl.constexpr, WANT_POINTS: tl.constexpr,
    WANT_VALUES: tl.constexpr, WANT_SUMS: tl.constexpr, AS_FLOAT32: tl.constexpr,
    VALUES_AS_FLOAT32: tl.constexpr, WIDEN_POINTS: tl.constexpr, WIDEN_VALUES: tl.constexpr,
    PRECISION: tl.constexpr, POINTS_PRECISION: tl.constexpr, VALUES_PRECISION: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ALL_D: tl.constexpr, ALL_E: tl.constexpr, CHUNKED: tl.constexpr, CHUNKED_VALUES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(count_x, BLOCK_X)
    i_bh = (tl.program_id(0) // blocks).to(tl.int64)
    i_b = i_bh // heads
    i_h = i_bh % heads
    o_x = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    m_inside = o_x < count_x
    p_x += i_b * stride_xb + i_h * stride_xh
    p_y += i_b * stride_yb + i_h * stride_yh
    p_dual_x += i_bh * count_x
    p_coef_x += i_bh * count_x
    p_dual_y += i_bh * count_y
    p_coef_y += i_bh * count_y
    if HAS_BIAS:
        p_bias += i_b * stride_bias_b + i_h * stride_bias_h
    m_x = m_inside
    if HAS_KEEP:
        p_keep += i_b * stride_keep_b
        if KEEP_ON_X:
            m_x = load_keep(p_keep, o_x, m_inside, stride_keep_n)
    if HAS_FACTORS:
        factor = tl.load(p_factors + i_b)
    o_d = tl.arange(0, BLOCK_D)
    o_all_d = tl.arange(0, ALL_D)
    o_all_e = tl.arange(0, ALL_E)
    b_x = load_rows(p_x, o_x, m_x, o_d, dim, stride_xn, stride_xd, AS_FLOAT32)
    on_orbit = False
    if SEVERAL:
        p_orbit_x += i_bh * count_x * rank
        p_orbit_y += i_bh * count_y * rank
        on_orbit = tl.load(p_safe + i_bh) != 0
        o_r = tl.arange(0, RANK_STEP)
    if HAS_OUTPUT:
        p_ux += i_b * stride_uxb + i_h * stride_uxh
        p_uy += i_b * stride_uyb + i_h * stride_uyh
        o_e = tl.arange(0, BLOCK_E)
        b_u = load_rows(p_ux, o_x, m_x, o_e, value_dim, stride_uxn, stride_uxd, VALUES_AS_FLOAT32)
        b_applied_x = load_dual(p_dual_x, o_x, m_x, 1)
    if WANT_POINTS:
        b_dx = tl.zeros([BLOCK_X, ALL_D], tl.float32)
    if WANT_VALUES:
        b_du = tl.zeros([BLOCK_X, ALL_E], tl.float32)
    b_sums = tl.zeros([BLOCK_X], tl.float32)
    for start in range(0, count_y, BLOCK_Y):
        o_y = start + tl.arange(0, BLOCK_Y).to(tl.int64)
        m_y = o_y < count_y
        if HAS_KEEP and not KEEP_ON_X:
            m_y = load_keep(p_keep, o_y, m_y, stride_keep_n)
        m_tile = m_x[:, None] & m_y[None, :]
        scores = scale * products(
            b_x, p_x, p_y, o_x, o_y, m_x, m_y, dim, stride_xn, stride_xd, stride_yn, stride_yd,
            AS_FLOAT32, PRECISION, BLOCK_X, BLOCK_Y, BLOCK_D, CHUNKED,
        )  # fmt: skip
        if HAS_BIAS:
            scores += LOG2_E * load_bias(p_bias, o_x, o_y, m_x, m_y, stride_bias_x, stride_bias_y)
        scores = tl.where(m_tile, scores, float("-inf"))
        slopes = tl.zeros([BLOCK_X, BLOCK_Y], tl.float32)
        if HAS_OUTPUT:
            plan = tl.exp2(scores + b_applied_x[:, None] + load_dual(p_dual_y, o_y, m_y, 1)[None, :])
            gains = factor * products(
                b_u, p_ux, p_uy, o_x, o_y, m_x, m_y, value_dim, stride_uxn, stride_uxd, stride_uyn,
                stride_uyd, VALUES_AS_FLOAT32, PRECISION, BLOCK_X, BLOCK_Y, BLOCK_E, CHUNKED_VALUES,
            )  # fmt: skip
            slopes = plan * gains
            if WANT_VALUES:
                b_uy = load_rows(p_uy, o_y, m_y, o_all_e, value_dim, stride_uyn, stride_uyd, WIDEN_VALUES)
                b_du = product(plan.to(b_uy.dtype), b_uy, b_du, VALUES_PRECISION)
        if SEVERAL and on_orbit:
            ratios = tl.zeros([BLOCK_X, BLOCK_Y], tl.float32)
            for first in range(0, rank, RANK_STEP):
                b_orbit_x = load_rows(p_orbit_x, o_x, m_x, first + o_r, rank, rank, 1, True)
                b_orbit_y = load_rows(p_orbit_y, o_y, m_y, first + o_r, rank, rank, 1, True)
                ratios = product(b_orbit_x, tl.trans(b_orbit_y), ratios, PRECISION)
            if not HAS_OUTPUT:
                b_first_x = load_dual(p_dual_x, o_x, m_x, 1)
                plan = tl.exp2(scores + b_first_x[:, None] + load_dual(p_dual_y, o_y, m_y, 1)[None, :])
            slopes += plan * ratios
        else:
            p_term_x, p_term_y = p_dual_x, p_dual_y
            p_slope_x, p_slope_y = p_coef_x, p_coef_y
            for _ in range(terms):
                b_dual_x = load_dual(p_term_x, o_x, m_x, 1)
                b_dual_y = load_dual(p_term_y, o_y, m_y, 1)
                b_coef_x = load_dual(p_slope_x, o_x, m_x, 1)
                b_coef_y = load_dual(p_slope_y, o_y, m_y, 1)
                weights = tl.exp2(scores + b_dual_x[:, None] + b_dual_y[None, :])
                slopes += weights * (b_coef_x[:, None] + b_coef_y[None, :])
                p_term_x += step_x
                p_term_y += step_y
                p_slope_x += step_x
                p_slope_y += step_y
        b_sums += tl.sum(slopes, 1)
        if WANT_POINTS:
            b_y = load_rows(p_y, o_y, m_y, o_all_d, dim, stride_yn, stride_yd, WIDEN_POINTS)
            b_dx = product(slopes.to(b_y.dtype), b_y, b_dx, POINTS_PRECISION)
    if WANT_SUMS:
        tl.store(p_sums + i_bh * count_x + o_x, b_sums, mask=m_inside)
    if WANT_POINTS:
        places = p_dx + (i_bh * count_x + o_x)[:, None] * dim + o_all_d[None, :]
        mask = m_inside[:, None] & (o_all_d < dim)[None, :]
        tl.store(places, (b_dx * (scale * LN_2)).to(p_dx.dtype.element_ty), mask=mask)
    if WANT_VALUES:
        places = p_du + (i_bh * count_x + o_x)[:, None] * value_dim + o_all_e[None, :]
        mask = m_inside[:, None] & (o_all_e < value_dim)[None, :]
        tl.store(places, (b_du * factor).to(p_du.dtype.element_ty), mask=mask)
