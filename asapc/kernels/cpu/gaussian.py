"""CPU twin of features/gaussian.py: a few heads at a time, each group on one worker."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from asapc.features import gaussian
from asapc.features.clouds import Budget, Clouds
from asapc.kernels.cpu.workers import each_group


def contribution(clouds: Clouds, parameter: None, weights: Tensor, budget: Budget) -> Tensor:
    """Columns |x|^2 / 2, beta and active times their coefficients [1|H, 3]: [B, H, N], uncentred."""
    return gaussian.weighted(clouds, beta(clouds), weights)


def beta(clouds: Clouds) -> Tensor:
    """features.gaussian.brenier_potential, [B, H, N]."""
    batch, heads, queries, dim = clouds.x.shape
    x, y = clouds.x.flatten(0, 1), clouds.y.flatten(0, 1)
    out = x.new_empty(batch * heads, queries)
    largest = max(queries, clouds.y.shape[2], dim) * dim * x.element_size()

    def work(parts: Iterator[slice]) -> None:
        for part in parts:
            example = torch.arange(part.start, part.stop) // heads
            x_keep = None if clouds.x_keep is None else clouds.x_keep[example]
            y_keep = None if clouds.y_keep is None else clouds.y_keep[example]
            potential, converged = _beta(
                x[part], y[part], x_keep, y_keep, gaussian.JITTER, torch.finfo(x.dtype).tiny ** 0.5,
                gaussian.STEPS, gaussian.CONVERGED[x.dtype],
            )  # fmt: skip
            if not converged:  # eigenvectors decide, see features.gaussian.square_root
                view = Clouds(x[part][:, None], y[part][:, None], x_keep, y_keep)
                potential = gaussian.brenier_potential(view)[:, 0]
            out[part] = potential

    if out.numel():
        each_group(work, batch * heads, largest, tiles=2)
    return out.view(batch, heads, queries)


def _beta(
    x: Tensor,
    y: Tensor,
    x_keep: Tensor | None,
    y_keep: Tensor | None,
    jitter: float,
    tiny: float,
    steps: int,
    tolerance: float,
) -> tuple[Tensor, bool]:
    """G heads: beta [G, N], and whether the square root converged.

    x: [G, N, D]; y: [G, M, D]; x_keep: [G, N]; y_keep: [G, M].
    """
    dim = x.size(2)
    means: list[Tensor] = []
    spreads: list[Tensor] = []
    for points, keep in ((x, x_keep), (y, y_keep)):
        if keep is None:
            count = torch.full((1, 1, 1), float(points.size(1)), dtype=x.dtype)
            mean = points.mean(1, keepdim=True)
            shifted = points - mean
        else:
            weights = keep.unsqueeze(-1).to(x.dtype)
            count = weights.sum(1, keepdim=True).clamp_(min=1.0)
            mean = torch.bmm(weights.transpose(1, 2), points) / count
            shifted = (points - mean).mul_(weights)
        means.append(mean)
        spreads.append(torch.bmm(shifted.transpose(1, 2), shifted).div_(count))
    eye = torch.eye(dim, dtype=x.dtype)
    trace = spreads[1].diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    factor = torch.linalg.cholesky_ex(spreads[1] + (jitter * trace + tiny) * eye)[0]
    turned = factor.transpose(1, 2)
    matrix = torch.bmm(torch.bmm(turned, spreads[0]), factor).add_(eye * 0.25)
    norm = matrix.square().sum((-2, -1), keepdim=True).sqrt()
    root, inverse = matrix / norm, eye.expand_as(matrix)
    low = 0.25 / norm
    converged = False
    for _ in range(steps):
        product = torch.bmm(inverse, root)
        if bool(((product - eye).abs().max() <= tolerance).item()):
            converged = True
            break
        scale = 3.0 / (1.0 + low.sqrt() + low)  # see newton_schulz_scale
        low = (scale * (3.0 - scale).square() * 0.25).clamp(max=1.0)
        step = product.mul_(-0.5 * scale).add_(eye * 1.5).mul_(scale.sqrt())
        root, inverse = torch.bmm(root, step), torch.bmm(step, inverse)
    middle = torch.linalg.cholesky_ex(root * norm.sqrt() + eye * 0.5)[0]
    matrix = torch.bmm(factor, torch.cholesky_solve(turned, middle))
    # (x - m_x)' A (x - m_x) / 2 up to a constant, which centring removes.
    linear = means[1] - torch.bmm(means[0], matrix)
    curved = torch.baddbmm(linear, x, matrix, alpha=0.5)
    return curved.mul_(x).sum(-1), converged
