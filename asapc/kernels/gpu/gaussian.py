"""Triton twin of features/gaussian.py: two launches.

`_brenier_matrix` runs one program per (b, h) with every D x D matrix in registers: the moments of
both clouds, the Cholesky factor of Sy, STEPS scaled Newton-Schulz steps, and the inverse of
W + I/2 by symmetric sweeps. `_potential` evaluates the three columns at every x.

STEPS is fixed: nobody looks at the error. A step raises the smallest eigenvalue at most 6.75
times, so that 13 steps converge in float32 where the eigenvalues of L' Sx L + I/4, at least 1/4, are
at least 1e-7 of their norm, all that float32 resolves: for score covariances |Sx Sy| up to 2.5e6, and
beyond in the directions above that share. In the others W comes out too small: features.gaussian
turns to eigenvectors there. D > 64 runs the reference itself.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asapc.features import gaussian
from asapc.features.clouds import Budget, Clouds
from asapc.kernels.gpu.launch import keep_arguments, padded

MAX_DIM = 64
STEPS = 13


def contribution(clouds: Clouds, parameter: None, weights: Tensor, budget: Budget) -> Tensor:
    """Columns |x|^2 / 2, beta and active times their coefficients [1|H, 3]: [B, H, N], uncentred.

    Without gradients. Clouds in float32, N >= 1.
    """
    x, y = clouds.x, clouds.y
    batch, heads, num_x, dim = x.shape
    if dim > MAX_DIM:
        columns = gaussian.columns(clouds, parameter, budget)
        return (columns @ weights[:, :, None])[..., 0]
    out = x.new_empty(batch, heads, num_x)
    if out.numel() == 0:
        return out
    deep = padded(dim)
    matrices = x.new_empty(batch * heads, deep + 2, deep)  # A, then both means
    masks = {"X_KEEP": clouds.x_keep is not None, "Y_KEEP": clouds.y_keep is not None}
    warps = 8 if deep == 64 else 4
    _brenier_matrix[(batch * heads,)](
        x, *x.stride(), *keep_arguments(clouds.x_keep, x),
        y, *y.stride(), *keep_arguments(clouds.y_keep, x),
        matrices, num_x, y.shape[2], dim, heads, gaussian.JITTER, torch.finfo(x.dtype).tiny ** 0.5,
        **masks, STEPS=STEPS, DEEP=deep, BLOCK=16, PRECISION="ieee", num_warps=warps,
    )  # fmt: skip
    block = min(64, padded(num_x))
    _potential[(batch * heads, triton.cdiv(num_x, block))](
        x, *x.stride(), *keep_arguments(clouds.x_real, x), matrices,
        weights, weights.stride(0) if weights.shape[0] > 1 else 0, weights.stride(1),
        out, num_x, dim, heads,
        REAL=clouds.x_real is not None, DEEP=deep, BLOCK=block, BLOCK_D=16, PRECISION="ieee",
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _load(
    p_a, stride_n, stride_d, p_keep, stride_keep, o_n, o_d, length, dim, KEEP: tl.constexpr
):
    """Points [BLOCK, DEEP] and which of them carry mass; 0 where they do not."""
    m_n = o_n < length
    if KEEP:
        m_n = m_n & (tl.load(p_keep + o_n * stride_keep, mask=m_n, other=0) != 0)
    b_a = tl.load(
        p_a + o_n[:, None] * stride_n + o_d[None, :].to(tl.int64) * stride_d,
        mask=m_n[:, None] & (o_d < dim)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    return b_a, m_n


@triton.jit
def _moments(
    p_a, stride_n, stride_d, p_keep, stride_keep, length, dim,
    KEEP: tl.constexpr, DEEP: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Mean [DEEP] and covariance [DEEP, DEEP] of the points with mass, 0 beyond dim."""
    o_d = tl.arange(0, DEEP)
    o_i = tl.arange(0, BLOCK).to(tl.int64)
    b_sum = tl.zeros([DEEP], tl.float32)
    b_count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        b_a, m_n = _load(
            p_a, stride_n, stride_d, p_keep, stride_keep, start + o_i, o_d, length, dim, KEEP
        )
        b_sum += tl.sum(b_a, 0)
        b_count += m_n.to(tl.float32)
    count = tl.maximum(tl.sum(b_count, 0), 1.0)
    b_mean = b_sum / count
    b_square = tl.zeros([DEEP, DEEP], tl.float32)
    for start in range(0, length, BLOCK):
        b_a, m_n = _load(
            p_a, stride_n, stride_d, p_keep, stride_keep, start + o_i, o_d, length, dim, KEEP
        )
        b_a = tl.where(m_n[:, None], b_a - b_mean[None, :], 0.0)
        b_square = tl.dot(tl.trans(b_a), b_a, b_square, input_precision=PRECISION)
    return b_mean, b_square / count


@triton.jit
def _cholesky(b_a, least, DEEP: tl.constexpr):
    """Lower L with L L' = A, column by column; a pivot that rounding took below `least` is that."""
    o_d = tl.arange(0, DEEP)
    b_l = tl.zeros([DEEP, DEEP], tl.float32)
    for j in range(DEEP):
        # Twice, along either axis: A stays symmetric, and a reduction is cheaper than a transpose.
        b_column = tl.sum(tl.where(o_d[None, :] == j, b_a, 0.0), 1)
        b_row = tl.sum(tl.where(o_d[:, None] == j, b_a, 0.0), 0)
        pivot = tl.sqrt(tl.maximum(tl.sum(tl.where(o_d == j, b_row, 0.0), 0), least))
        b_column = tl.where(o_d > j, b_column / pivot, 0.0)
        b_row = tl.where(o_d > j, b_row / pivot, 0.0)
        b_a -= b_column[:, None] * b_row[None, :]
        b_l += tl.where(
            o_d[None, :] == j, tl.where(o_d[:, None] == j, pivot, b_column[:, None]), 0.0
        )
    return b_l


@triton.jit
def _inverse(b_a, DEEP: tl.constexpr):
    """Inverse of a symmetric positive definite matrix by Gauss-Jordan sweeps, which keep symmetry."""
    o_d = tl.arange(0, DEEP)
    for j in range(DEEP):
        b_column = tl.sum(tl.where(o_d[None, :] == j, b_a, 0.0), 1)
        b_row = tl.sum(tl.where(o_d[:, None] == j, b_a, 0.0), 0)
        pivot = tl.sum(tl.where(o_d == j, b_row, 0.0), 0)
        b_swept = b_a - b_column[:, None] * b_row[None, :] / pivot
        b_swept = tl.where(o_d[:, None] == j, b_row[None, :] / pivot, b_swept)
        b_swept = tl.where(o_d[None, :] == j, b_column[:, None] / pivot, b_swept)
        b_a = tl.where((o_d[:, None] == j) & (o_d[None, :] == j), -1.0 / pivot, b_swept)
    return -b_a


@triton.jit
def _root(b_a, b_eye, norm, STEPS: tl.constexpr, PRECISION: tl.constexpr):
    """Square root of a matrix with eigenvalues in [1/4, norm]: see features.gaussian.square_root."""
    b_y = b_a / norm
    b_z = b_eye
    low = tl.maximum(0.25 / norm, 1e-7)
    for _ in range(STEPS):
        b_product = tl.dot(b_z, b_y, input_precision=PRECISION)
        scale = 3.0 / (1.0 + tl.sqrt(low) + low)
        low = tl.minimum(scale * (3.0 - scale) * (3.0 - scale) * 0.25, 1.0)
        b_step = (b_eye * 3.0 - b_product * scale) * (0.5 * tl.sqrt(scale))
        b_y = tl.dot(b_y, b_step, input_precision=PRECISION)
        b_z = tl.dot(b_step, b_z, input_precision=PRECISION)
    return b_y * tl.sqrt(norm)


@triton.jit
def _brenier_matrix(
    p_x, stride_xb, stride_xh, stride_xn, stride_xd, p_xkeep, stride_xkb, stride_xkn,
    p_y, stride_yb, stride_yh, stride_ym, stride_yd, p_ykeep, stride_ykb, stride_ykm,
    p_out, num_x, num_y, dim, heads, jitter, tiny,
    X_KEEP: tl.constexpr, Y_KEEP: tl.constexpr, STEPS: tl.constexpr, DEEP: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A = L (W + I/2)^-1 L' and both means: p_out [B H, DEEP + 2, DEEP], 0 beyond dim."""
    i_bh = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    b_mean_x, b_sx = _moments(
        p_x + i_b * stride_xb + i_h * stride_xh, stride_xn, stride_xd,
        p_xkeep + i_b * stride_xkb, stride_xkn, num_x, dim, X_KEEP, DEEP, BLOCK, PRECISION,
    )  # fmt: skip
    b_mean_y, b_sy = _moments(
        p_y + i_b * stride_yb + i_h * stride_yh, stride_ym, stride_yd,
        p_ykeep + i_b * stride_ykb, stride_ykm, num_y, dim, Y_KEEP, DEEP, BLOCK, PRECISION,
    )  # fmt: skip
    o_d = tl.arange(0, DEEP)
    m_diagonal = o_d[:, None] == o_d[None, :]
    m_real = (o_d < dim)[:, None] & (o_d < dim)[None, :]
    b_eye = tl.where(m_diagonal, 1.0, 0.0)
    trace = tl.sum(tl.sum(tl.where(m_diagonal, b_sy, 0.0), 1), 0)
    lift = jitter * trace + tiny
    b_l = _cholesky(b_sy + b_eye * lift, 0.01 * lift, DEEP)
    b_l = tl.where(m_real, b_l, 0.0)
    b_turned = tl.trans(b_l)
    b_inner = tl.dot(b_turned, b_sx, input_precision=PRECISION)
    b_w = tl.dot(b_inner, b_l, input_precision=PRECISION) + b_eye * 0.25
    # Beyond dim the matrix is I/4, which is in range of every step and multiplies zeros in the end.
    norm = tl.sqrt(tl.sum(tl.sum(tl.where(m_real, b_w * b_w, 0.0), 1), 0))
    b_w = _root(b_w, b_eye, norm, STEPS, PRECISION) + b_eye * 0.5
    b_w = (b_w + tl.trans(b_w)) * 0.5  # symmetric up to rounding, and the sweeps rely on it
    b_inner = tl.dot(b_l, _inverse(b_w, DEEP), input_precision=PRECISION)
    b_a = tl.dot(b_inner, b_turned, input_precision=PRECISION)
    p_out += i_bh * ((DEEP + 2) * DEEP)
    tl.store(p_out + o_d[:, None] * DEEP + o_d[None, :], b_a)
    tl.store(p_out + DEEP * DEEP + o_d, b_mean_x)
    tl.store(p_out + DEEP * DEEP + DEEP + o_d, b_mean_y)


@triton.jit
def _potential(
    p_x, stride_xb, stride_xh, stride_xn, stride_xd, p_real, stride_rb, stride_rn,
    p_matrix, p_weights, stride_wh, stride_wf, p_out, num_x, dim, heads,
    REAL: tl.constexpr, DEEP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """w_0 |x|^2 / 2 + w_1 beta(x) + w_2 active for a block of rows; grid (B H, blocks)."""
    i_bh = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    o_n = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, DEEP)
    p_matrix += i_bh * ((DEEP + 2) * DEEP)
    p_x += i_b * stride_xb + i_h * stride_xh
    p_weights += i_h * stride_wh
    b_moved = tl.zeros([BLOCK, DEEP], tl.float32)
    for d in range(0, DEEP, BLOCK_D):  # whole rows of both factors do not fit the registers
        o_k = d + tl.arange(0, BLOCK_D)
        b_x, m_n = _load(p_x, stride_xn, stride_xd, p_x, 0, o_n, o_k, num_x, dim, False)
        b_x -= tl.load(p_matrix + DEEP * DEEP + o_k)[None, :]
        b_a = tl.load(p_matrix + o_k[:, None] * DEEP + o_d[None, :])
        b_moved = tl.dot(b_x, b_a, b_moved, input_precision=PRECISION)
    b_x, m_n = _load(p_x, stride_xn, stride_xd, p_x, 0, o_n, o_d, num_x, dim, False)
    b_mean_x = tl.load(p_matrix + DEEP * DEEP + o_d)
    b_mean_y = tl.load(p_matrix + DEEP * DEEP + DEEP + o_d)
    b_shifted = b_x - b_mean_x[None, :]
    b_beta = tl.sum(b_x * b_mean_y[None, :], 1) + tl.sum(b_moved * b_shifted, 1) * 0.5
    b_half = tl.sum(b_x * b_x, 1) * 0.5
    b_out = b_half * tl.load(p_weights) + b_beta * tl.load(p_weights + stride_wf)
    if REAL:
        m_real = tl.load(p_real + i_b * stride_rb + o_n * stride_rn, mask=m_n, other=0) != 0
        b_out += tl.where(m_real, tl.load(p_weights + 2 * stride_wf), 0.0)
    tl.store(p_out + i_bh * num_x + o_n, b_out, mask=m_n)
