"""CPU twin of features/coarse.py: the coarse loop in the linear domain, a few heads at a time.

K = exp(S - rowmax) [N, R] is formed once per head; every half-step is then one product with a vector
while K is in cache. Heads whose scores are too wide for that run again in float64, and those too wide
for that run the formula in the log domain.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from asapc.features import coarse
from asapc.features.clouds import Budget, Clouds
from asapc.kernels.cpu.workers import SAFE_ROW_RANGE, each_group


def dual_and_mass(
    clouds: Clouds, pivots: Tensor, budget: Budget, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """The coarse column u + |x|^2 / 2 [B, H, N], and features.coarse.row_mass [B, H, M] if wanted.

    pivots: [H, R, D], or [B, H, R, D]. Without gradients.
    """
    batch, heads, queries, dim = clouds.x.shape
    others = clouds.y.shape[2]
    column = clouds.x.new_empty(batch * heads, queries)
    mass = clouds.x.new_empty(batch * heads, others) if want_mass else None
    x, y = clouds.x.flatten(0, 1), clouds.y.flatten(0, 1)
    count = pivots.shape[-2]
    z = pivots.to(x).repeat(batch, 1, 1) if pivots.dim() == 3 else pivots.to(x).flatten(0, 1)
    largest = max(queries, others) * max(count, dim) * x.element_size()

    def work(parts: Iterator[slice]) -> None:
        for part in parts:
            example = torch.arange(part.start, part.stop) // heads
            x_keep = None if clouds.x_keep is None else clouds.x_keep[example]
            y_keep = None if clouds.y_keep is None else clouds.y_keep[example]
            arguments = x[part], y[part], z[part], x_keep, y_keep
            tile_column, tile_mass = _group(*arguments, budget, want_mass)
            column[part] = tile_column
            if mass is not None and tile_mass is not None:
                mass[part] = tile_mass

    if column.numel():
        each_group(work, batch * heads, largest)
    shape = (batch, heads, queries)
    return column.view(shape), None if mass is None else mass.view(batch, heads, others)


def contribution(clouds: Clouds, pivots: Tensor, weights: Tensor, budget: Budget) -> Tensor:
    """Coarse column times its coefficient [1|H, 1]: [B, H, N], uncentred."""
    return dual_and_mass(clouds, pivots, budget, False)[0] * weights


def _group(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    x_keep: Tensor | None,
    y_keep: Tensor | None,
    budget: Budget,
    want_mass: bool,
) -> tuple[Tensor, Tensor | None]:
    """G heads: column [G, N], and mass [G, M] if it is wanted."""
    settings = budget.half_steps, budget.starts_on_x, want_mass, SAFE_ROW_RANGE[x.dtype]
    column, mass, fits = _coarse(x, y, z, x_keep, y_keep, *settings)
    if fits is None:
        return column, mass
    column = x.new_empty(x.shape[:2])
    mass = y.new_empty(y.shape[:2]) if want_mass else None
    for some, compute in ((fits, _group), (~fits, _wide)):
        if some.any():
            x_some, y_some = (None if keep is None else keep[some] for keep in (x_keep, y_keep))
            found = compute(x[some], y[some], z[some], x_some, y_some, budget, want_mass)
            column[some] = found[0].to(x.dtype)
            if mass is not None and found[1] is not None:
                mass[some] = found[1].to(x.dtype)
    return column, mass


def _wide(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    x_keep: Tensor | None,
    y_keep: Tensor | None,
    budget: Budget,
    want_mass: bool,
) -> tuple[Tensor, Tensor | None]:
    """_group of heads whose scores the linear domain does not hold at their dtype."""
    if x.dtype == torch.float32:  # float64 holds eight times the range
        return _group(x.double(), y.double(), z.double(), x_keep, y_keep, budget, want_mass)
    return _log_domain(x, y, z, x_keep, y_keep, budget)


def _log_domain(
    x: Tensor, y: Tensor, z: Tensor, x_keep: Tensor | None, y_keep: Tensor | None, budget: Budget
) -> tuple[Tensor, Tensor]:
    """One head at a time, since every head has its own pivots."""
    columns, masses = [], []
    for i in range(len(x)):
        head = Clouds(
            x[None, None, i], y[None, None, i],
            None if x_keep is None else x_keep[i : i + 1],
            None if y_keep is None else y_keep[i : i + 1],
        )  # fmt: skip
        columns.append(coarse.columns(head, z[i : i + 1], budget)[:, 0, :, 0])
        masses.append(coarse.row_mass(head, z[i : i + 1], budget)[:, 0])
    return torch.cat(columns), torch.cat(masses)


def _coarse(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    x_keep: Tensor | None,
    y_keep: Tensor | None,
    half_steps: int,
    starts_on_x: bool,
    want_mass: bool,
    safe_range: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """G heads: column [G, N], mass [G, M] if it is wanted, and None if the linear domain held their
    scores; otherwise which heads it would have held [G], and nothing else that could be used.

    x: [G, N, D]; y: [G, M, D]; z: [G, R, D]; x_keep: [G, N]; y_keep: [G, M].
    """
    groups, queries = x.size(0), x.size(1)
    norms = z.square().sum(-1).unsqueeze(1) * 0.5  # [G, 1, R]
    distance = torch.baddbmm(norms, y, z.transpose(1, 2), alpha=-1.0)
    # 1 where nearest and 0 elsewhere; written as numbers, for a mask and its conversion cost more.
    nearest = distance.amin(-1, keepdim=True)
    member = torch.eq(distance, nearest, out=torch.empty_like(distance))
    counts = member.sum(1, keepdim=True)  # [G, 1, R]
    if float(counts.sum().item()) > float(y.size(0) * y.size(1)):
        member.div_(member.sum(-1, keepdim=True))  # equally near pivots share a point
        counts = member.sum(1, keepdim=True)
    if y_keep is not None:
        member.mul_(y_keep.unsqueeze(-1))
        counts = member.sum(1, keepdim=True)
    active = counts.sum(-1, keepdim=True)
    if y_keep is None:
        centre = y.mean(1, keepdim=True)
    else:
        centre = torch.bmm(y_keep.unsqueeze(1).to(y.dtype), y) / active.clamp(min=1.0)
    local = y - centre
    each = member.transpose(1, 2)
    size = counts.clamp(min=1e-30)
    offset = torch.bmm(each, local).div_(size.transpose(1, 2))
    squares = torch.linalg.vector_norm(local, dim=-1).square_().unsqueeze(1)
    second = torch.bmm(squares, member) / size  # [G, 1, R]
    spread = (second - offset.square().sum(-1).unsqueeze(1)).clamp_(min=0.0) / float(y.size(2))
    half_norms = torch.linalg.vector_norm(x, dim=-1).square_() * 0.5  # half the time of square, sum
    means = centre + offset
    scores = torch.bmm(x, means.transpose(1, 2)).addcmul_(half_norms.unsqueeze(-1), spread)  # [G, N, R]
    # |S| <= |x| |m| + |x|^2 s / 2: where that is small enough, no row has to be looked at.
    largest = half_norms.max()
    reach = (2.0 * largest * means.square().sum(-1).max()).sqrt() + largest * spread.max()
    top = torch.zeros_like(half_norms).unsqueeze(-1)
    if not bool((2.0 * reach <= safe_range).item()):
        top = scores.amax(-1, keepdim=True)
        fits = (top - scores.amin(-1, keepdim=True)).amax((1, 2)) <= safe_range
        if not bool(fits.all()):
            return half_norms, None, fits
        scores.sub_(top)
    kernel = scores.exp_()
    # What has no mass takes part in no product, and its total must not be 0: it would divide.
    no_x = (active == 0).to(x.dtype).expand(groups, 1, queries)
    no_y = torch.zeros_like(counts)
    mass_x = torch.full((groups, 1, 1), float(queries), dtype=x.dtype)
    if x_keep is not None:
        kernel *= x_keep.unsqueeze(-1)
        no_x = torch.maximum(no_x, (~x_keep).unsqueeze(1).to(x.dtype))
        mass_x = x_keep.sum(-1)[:, None, None].to(x.dtype)
        no_y = (mass_x == 0).to(x.dtype).expand_as(counts)
    # Masses n_c, scaled to the mass of x so that the scalings do not drift over many half-steps.
    weights = counts * (mass_x / active.clamp(min=1.0))
    # A vector times a matrix is the fast order, and the loop needs it both ways.
    transposed = kernel.transpose(1, 2).contiguous()
    highest = top
    if x_keep is not None:  # only points with mass: the others' scores may lie far above theirs
        highest = top.masked_fill(~x_keep.unsqueeze(-1), -float("inf"))
    highest = highest.amax(1, keepdim=True)
    highest.masked_fill_(highest == -float("inf"), 0.0)
    a = (top - highest).exp_().transpose(1, 2)  # u = 0
    if x_keep is not None:
        a.masked_fill_(~x_keep.unsqueeze(1), 1.0)
    b = torch.ones_like(counts)
    on_x = starts_on_x
    for _ in range(half_steps):
        if on_x:
            a = torch.baddbmm(no_x, weights * b, transposed).reciprocal_()
        else:
            b = torch.baddbmm(no_y, a, kernel).reciprocal_()
        on_x = not on_x
    column = half_norms
    if half_steps > 0:
        column = column + a.squeeze(1).log() - top.squeeze(-1)
    if not want_mass:
        return column, None, None
    masses = b * torch.bmm(a, kernel)  # b (K' a): 1 where one more half-step would change nothing
    total = (masses * counts).sum(-1, keepdim=True)
    scale = active / torch.where(total > 0, total, torch.ones_like(total))
    masses = masses * scale * (mass_x / float(queries))
    return column, torch.bmm(member, masses.transpose(1, 2)).squeeze(-1), None
