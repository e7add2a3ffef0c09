"""GPU twin of features/gaussian.py: its matrix in one launch, which would be some hundred.

One program per (b, h) holds every D x D matrix in registers: the Cholesky factor of Sy, STEPS scaled
Newton-Schulz steps, and the inverse of W + I/2 by symmetric sweeps.

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
from asapc.kernels.gpu.launch import padded
from asapc.kernels.gpu.tiles import FLOAT32_PRECISION

MAX_DIM = 64
STEPS = 13


def contribution(clouds: Clouds, parameter: None, weights: Tensor, budget: Budget) -> Tensor:
    """Columns |x|^2 / 2, beta and active times their coefficients [1|H, 3]: [B, H, N], uncentred.

    Without gradients. Clouds in float32, N >= 1.
    """
    matrix_of = brenier_matrix if clouds.x.shape[3] <= MAX_DIM else gaussian.brenier_matrix
    return gaussian.weighted(clouds, gaussian.brenier_potential(clouds, matrix_of), weights)


def brenier_matrix(spread_x: Tensor, spread_y: Tensor) -> Tensor:
    """As features.gaussian.brenier_matrix, of float32 [B, H, D, D], D <= MAX_DIM: a program a head."""
    out = torch.empty_like(spread_y, memory_format=torch.contiguous_format)
    if out.numel():
        dim = out.shape[-1]
        deep = padded(dim)
        _brenier_matrix[(out[..., 0, 0].numel(),)](
            spread_x.contiguous(), spread_y.contiguous(), out, dim, gaussian.JITTER,
            torch.finfo(out.dtype).tiny ** 0.5, STEPS=STEPS, DEEP=deep, PRECISION=FLOAT32_PRECISION,
            num_warps=8 if deep == 64 else 4,
        )  # fmt: skip
    return out


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
        b_l += tl.where(o_d[None, :] == j, tl.where(o_d[:, None] == j, pivot, b_column[:, None]), 0.0)
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
    """Square root of a matrix with eigenvalues in [1/4, norm]: see features.gaussian.square_roots."""
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
    p_x, p_y, p_out, dim, jitter, tiny,
    STEPS: tl.constexpr, DEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A = L (W + I/2)^-1 L' of covariances p_x, p_y [B H, D, D]."""
    o_d = tl.arange(0, DEEP)
    places = tl.program_id(0).to(tl.int64) * dim * dim + o_d[:, None] * dim + o_d[None, :]
    m_real = (o_d < dim)[:, None] & (o_d < dim)[None, :]
    b_sx = tl.load(p_x + places, mask=m_real, other=0.0)
    b_sy = tl.load(p_y + places, mask=m_real, other=0.0)
    m_diagonal = o_d[:, None] == o_d[None, :]
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
    tl.store(p_out + places, tl.dot(b_inner, b_turned, input_precision=PRECISION), mask=m_real)
