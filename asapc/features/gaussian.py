"""Gaussian: the entropic potential between the two clouds' Gaussian approximations, sort-free.

With means m_x, m_y and covariances Sx, Sy over the points with mass, in units of epsilon,

    beta(x) = m_y . x + (x - m_x)' A (x - m_x) / 2,    A = Sy (X + I/2)^-1,  X = (Sx Sy + I/4)^(1/2),

is the entropic Brenier potential, exact for Gaussian clouds; the dual is |x|^2 / 2 - beta(x). With
Sy = L L' the matrix is symmetric, A = L (W + I/2)^-1 L', W = (L' Sx L + I/4)^(1/2), so that one
square root of a symmetric matrix is all it takes. Columns: |x|^2 / 2, beta(x), and 1 on real
tokens (see points.py). Cost O(N D^2 + D^3) a head.

Source: Janati et al. 2020, Entropic optimal transport between unbalanced Gaussian measures, Theorem 1
(balanced case).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asapc.features import points
from asapc.features.clouds import Budget, Clouds

MatrixOf = Callable[[Tensor, Tensor], Tensor]  # two covariances to A

JITTER = 1e-6  # share of the trace added to Sy, which may be singular
PARTS = 16  # of a cloud on a GPU
STEPS = 30  # Newton-Schulz steps at most; scaled ones take 7 to 12
BLIND_STEPS = {torch.float32: 16, torch.float64: 18}  # always taken where values are not looked at
CONVERGED = {torch.float32: 1e-4, torch.float64: 1e-10}  # largest entry of Z Y - I


def columns(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    """|x|^2 / 2, beta(x), active: [B, H, N, 3]."""
    beta = brenier_potential(clouds)[..., None]
    arguments = clouds, parameter, budget
    return torch.cat([points.norm(*arguments), beta, points.active(*arguments)], -1)


def weighted(clouds: Clouds, beta: Tensor, weights: Tensor) -> Tensor:
    """The columns, beta given, times their coefficients [1|H, 3]: [B, H, N], uncentred."""
    total = clouds.cost_offset() * weights[:, :1] + beta * weights[:, 1:2]
    if clouds.x_real is not None:
        total = total + clouds.x_real[:, None, :].to(total.dtype) * weights[:, 2:]
    return total


def brenier_potential(clouds: Clouds, matrix_of: MatrixOf | None = None) -> Tensor:
    """beta(x): [B, H, N].  matrix_of: another way to brenier_matrix."""
    mean_x, spread_x = moments(clouds.x, clouds.x_keep)
    mean_y, spread_y = moments(clouds.y, clouds.y_keep)
    matrix = (matrix_of or brenier_matrix)(spread_x, spread_y)
    shifted = clouds.x - mean_x
    linear = (clouds.x @ mean_y.transpose(-1, -2))[..., 0]
    return linear + ((shifted @ matrix) * shifted).sum(-1) / 2


def moments(points: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean [B, H, 1, D] and covariance [B, H, D, D] of points [B, H, N, D] over keep [B, N]."""
    if keep is None:
        mean = points.mean(2, keepdim=True)
        shifted = points - mean
        return mean, _gram(shifted) / max(1, points.shape[2])
    weights = keep[:, None, :, None]
    count = weights.sum(2, keepdim=True).clamp(min=1).to(points.dtype)
    mean = points.masked_fill(~weights, 0.0).sum(2, keepdim=True) / count
    shifted = (points - mean).masked_fill(~weights, 0.0)
    return mean, _gram(shifted) / count


def _gram(shifted: Tensor) -> Tensor:
    """x' x [B, H, D, D] of points [B, H, N, D]; on a GPU, where one product would use one processor per
    head, as the sum of PARTS products."""
    if not shifted.is_cuda:
        return shifted.transpose(-1, -2) @ shifted
    padded = torch.nn.functional.pad(shifted, (0, 0, 0, -shifted.shape[2] % PARTS))
    parts = padded.unflatten(2, (PARTS, -1))
    return (parts.transpose(-1, -2) @ parts).sum(2)


def brenier_matrix(spread_x: Tensor, spread_y: Tensor) -> Tensor:
    """A = L (W + I/2)^-1 L' from two covariances [..., D, D]; symmetric, 0 <= A."""
    eye = torch.eye(spread_y.shape[-1], dtype=spread_y.dtype, device=spread_y.device)
    tiny = torch.finfo(spread_y.dtype).tiny ** 0.5
    trace = spread_y.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    factor, _ = torch.linalg.cholesky_ex(spread_y + (JITTER * trace + tiny) * eye)
    root, _ = square_roots(factor.transpose(-1, -2) @ spread_x @ factor + eye / 4, floor=0.25)
    inner, _ = torch.linalg.cholesky_ex(root + eye / 2)
    half = torch.linalg.solve_triangular(inner, factor.transpose(-1, -2), upper=False)
    return half.transpose(-1, -2) @ half


def square_roots(matrix: Tensor, floor: float | Tensor) -> tuple[Tensor, Tensor]:
    """Square root and its inverse of symmetric matrices [..., D, D] with eigenvalues >= floor > 0.

    Coupled Newton-Schulz steps, products only; where they have not converged, eigenvectors decide.
    With t the eigenvalues of Z Y in [low, 1], a step maps t to t (3 - t)^2 / 4; scaling t by mu
    first, so that both ends of [low, 1] map to the same value, triples the gain of the early steps.
    Source: Higham, Functions of Matrices (2008), Eq. 6.35; the scaling is ours.
    """
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    norm = matrix.square().sum((-2, -1), keepdim=True).sqrt()
    norm = norm.clamp(min=torch.finfo(matrix.dtype).tiny)
    y, z = matrix / norm, eye.expand_as(matrix)
    low = (floor / norm).detach()
    tolerance = CONVERGED[matrix.dtype]
    # A traced graph cannot look at its values, and nobody waits for a GPU: enough steps to converge.
    traced = torch.compiler.is_compiling()
    blind = traced or matrix.is_cuda
    error = torch.full_like(norm, torch.inf)
    for _ in range(BLIND_STEPS[matrix.dtype] if blind else STEPS):
        product = z @ y
        error = (product - eye).abs().amax((-2, -1), keepdim=True)
        done = error <= tolerance
        if not blind and bool(done.all()):
            break
        scale, low = newton_schulz_scale(low)
        step = (3 * eye - scale * product) / 2 * scale.sqrt()
        if not traced:  # each matrix takes the steps it needs, whatever else is in the batch
            step = torch.where(done, eye, step)
        y, z = y @ step, step @ z
    roots = y * norm.sqrt(), z / norm.sqrt()
    if blind or bool((error <= tolerance).all()):
        return roots
    first, second = zip(roots, _eigen_roots(matrix), strict=True)
    return torch.where(error <= tolerance, *first), torch.where(error <= tolerance, *second)


def newton_schulz_scale(low: Tensor) -> tuple[Tensor, Tensor]:
    """mu with h(mu low) = h(mu), h(t) = t (3 - t)^2 / 4, and that value: the next step's `low`.

    From low (3 - mu low)^2 = (3 - mu)^2:  mu = 3 / (1 + sqrt(low) + low), at most 3, 1 at low = 1.
    """
    scale = 3 / (1 + low.sqrt() + low)
    at_most_one = scale * (3 - scale).square() / 4
    return scale, at_most_one.clamp(max=1.0)


def _eigen_roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    broken = ~matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)  # eigh would raise
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    values, vectors = torch.linalg.eigh(torch.where(broken, eye, matrix))
    scale = values.clamp(min=torch.finfo(values.dtype).tiny).sqrt()[..., None, :]
    roots = ((vectors * x) @ vectors.transpose(-1, -2) for x in (scale, 1 / scale))
    root, inverse = (x.masked_fill(broken, torch.nan) for x in roots)
    return root, inverse
