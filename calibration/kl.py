"""ASAP-KL: the convex fit of a dual through the c-transform that follows it.

    J(omega) = sum_maps [ sum_j nu_j LSE_i(S_ij + u_i) - sum_i r_i (X omega)_i ] + lambda/2 |omega|^2
    u = X omega - |x|^2 / 2
    gradient   X'(P 1 - r) + lambda omega,                P_ij = nu_j softmax_i(S_ij + u_i)

A map is one head of one example.  Up to a constant, J is KL(teacher's plan | P) summed over the maps,
in nats, if the teacher's plan comes from the same c-transform.  Source: ASAP, Proposition B.11, at
epsilon = 1 and with the finite teacher's own row mass r.

Everything is float64, exponentials included: on a CPU float32 ones cost no less once the casts to and
from the float64 sums are counted (10 against 13 to 20 ms per 2^20), and their noise would stop the
optimiser, which compares objectives, at gradients far above the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its packages load where they are used first, not with every command
import torch
from torch import Tensor

from asapc.features.clouds import Clouds

# Directions in which X varies this little (relative variance, columns scaled alike) are rounding of X.
_RANK = 1e-12
# Gradient per map in the metric: its square is about twice the nats per map still to be gained.
_GRADIENT = 1e-8

_Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class KlPiece:
    """Examples to fit on, at one site: in each, points x and points y carry mass; no more of them than
    collect.pieces takes at once, so that their scores stay in cache.

    columns X: [B, H, N, F], centred over the points x with mass, 0 on the others.
    clouds: where the scores come from; x is the predicted side.
    mass r: [B, H, N], the teacher's own mass of each x after the first c-transform that follows the
    predicted dual; 0 where x carries none.
    """

    columns: Tensor
    clouds: Clouds
    mass: Tensor

    def __len__(self) -> int:
        return len(self.columns)

    def all_tensors(self) -> dict[str, Tensor]:
        clouds = {name: x for name, x in vars(self.clouds).items() if x is not None}
        return {"columns": self.columns, "mass": self.mass, **clouds}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> KlPiece:
        """Inverse of all_tensors."""
        clouds = {name: x for name, x in tensors.items() if name not in ("columns", "mass")}
        return cls(tensors["columns"], Clouds(**clouds), tensors["mass"])


@dataclass(frozen=True)
class KlFit:
    """Coefficients [1|H, F] float64 and how each group's optimisation ended.

    gradient_norm: |gradient of J| at the coefficients, in their own coordinates, over the regression rows
    of the group, which are the points with mass of the examples used.
    converged: what is left to gain is below about 1e-16 nats per map, or below the rounding of J.
    """

    coefficients: Tensor
    iterations: tuple[int, ...]
    gradient_norm: tuple[float, ...]
    converged: tuple[bool, ...]


def fit_kl(
    pieces: Sequence[KlPiece], *, groups: int, penalty: float, start: Tensor, max_iterations: int = 500
) -> KlFit:
    """Minimise J for each group of heads: 1 pools them, H fits each head on its own.

    penalty: lambda, as J states it. Each map weighs its mass, at most 1, where in a sum of squares it
    weighs its number of rows: the lambda of a least-squares fit, divided by that number, shrinks alike.
    start: [groups, F], for instance the least-squares fit.
    Coefficients are moved only where X varies, so that at lambda = 0 linearly dependent columns stay
    finite and, from a least-norm start, least-norm.  At lambda = 0 the infimum may lie at infinity (a
    point of no mass in the teacher); the result is then the last finite iterate.  Never NaN, never worse
    than `start`.
    """
    with torch.no_grad():
        ends = [
            _minimise(
                KlObjective(pieces, penalty, None if groups == 1 else group),
                start[group].detach().to("cpu", torch.float64),
                max_iterations,
            )
            for group in range(groups)
        ]
    coefficients, *facts = zip(*ends, strict=True)
    return KlFit(torch.stack(coefficients), *facts)


@dataclass(frozen=True)
class Evaluation:
    """J and its gradient [F].

    magnitude: the sum of the absolute terms of J, whose rounding is the noise of `value`.
    """

    value: float
    gradient: Tensor
    magnitude: float


@dataclass(frozen=True)
class _Tile:
    """A piece in float64, the massless parts taken out.

    columns: [b, h, N, F]; mass: [b, h, N]; offset: [b, h, N], what u adds to X omega (-inf on massless
    x); transposed scores S': [b, h, M, N]; nu: [b, 1|h, M].
    """

    columns: Tensor
    mass: Tensor
    offset: Tensor
    scores: Tensor
    nu: Tensor

    def softmax(self, omega: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """X omega [b, h, N], LSE_i [b, h, M], E [b, h, M, N] and its sums over i: softmax_i = E / sum."""
        dual = self.columns @ omega
        logits = self.scores + (dual + self.offset)[..., None, :]
        top = logits.amax(-1, keepdim=True)
        top = top.masked_fill(top.isneginf(), 0.0)  # a y that no x can reach; its nu is 0 already
        exponentials = logits.sub_(top).exp_()
        total = exponentials.sum(-1)
        total = torch.where(total > 0, total, 1.0)
        return dual, top[..., 0] + total.log(), exponentials, total


class KlObjective:
    """J over some pieces, all heads pooled or one `head`; sums over data, nothing is normalised.

    rows, maps: the points with mass, and the attention maps, that enter.
    """

    def __init__(self, pieces: Sequence[KlPiece], penalty: float, head: int | None = None) -> None:
        self.pieces = pieces
        self.penalty = penalty
        self.head = head
        self.rows = self.maps = 0
        for piece in pieces:
            examples, heads, points, _ = piece.columns.shape
            heads = heads if head is None else 1
            keep = piece.clouds.x_keep
            self.rows += heads * (examples * points if keep is None else int(keep.sum()))
            self.maps += heads * examples

    def evaluate(self, omega: Tensor) -> Evaluation:
        """J and its gradient at omega [F]."""
        value = self.penalty / 2 * float(omega.square().sum())
        magnitude = value
        gradient = self.penalty * omega
        for tile in self._tiles():
            dual, lse, exponentials, total = tile.softmax(omega)
            closed, taught = (tile.nu * lse).sum(), (tile.mass * dual).sum()
            value += float(closed - taught)
            magnitude += float((tile.nu * lse).abs().sum() + (tile.mass * dual).abs().sum())
            weight = tile.nu / total
            row_mass = (weight[..., None, :] @ exponentials)[..., 0, :]  # P 1
            features = tile.columns.shape[-1]
            surplus = (row_mass - tile.mass).reshape(1, -1)
            gradient = gradient + (surplus @ tile.columns.reshape(-1, features))[0]
        return Evaluation(value, gradient, magnitude)

    def metric(self, features: int) -> Tensor:
        """The Hessian as if every column of P were uniform over the points with mass: [F, F].

        Independent of omega and cheap, and of the size of the true one,
        sum_j nu_j Cov_{i ~ P(.|j)}(x_i) + lambda I.
        """
        gram = self.penalty * torch.eye(features, dtype=torch.float64)
        for tile in self._tiles():
            kept = tile.offset.isfinite()
            per_point = tile.nu.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True)
            weighted = tile.columns * per_point[..., None]
            gram = gram + weighted.flatten(0, -2).T @ tile.columns.flatten(0, -2)
        return gram

    def _tiles(self) -> Iterator[_Tile]:
        heads = slice(None) if self.head is None else slice(self.head, self.head + 1)
        return (_tile(piece, heads) for piece in self.pieces)


def _tile(piece: KlPiece, heads: slice) -> _Tile:
    clouds = piece.clouds
    x_keep, y_keep = (
        None if keep is None else keep[:, None].cpu() for keep in (clouds.x_keep, clouds.y_keep)
    )

    def take(tensor: Tensor, keep: Tensor | None) -> Tensor:
        part = tensor[:, heads].detach().to("cpu", torch.float64)
        if keep is None:
            return part
        return part.masked_fill(~(keep[..., None] if part.dim() == 4 else keep), 0.0)

    x, y = take(clouds.x, x_keep), take(clouds.y, y_keep)
    offset = -x.square().sum(-1) / 2
    if x_keep is not None:
        offset = offset.masked_fill(~x_keep, -math.inf)
    # M counts padding, as in asapc.operators.c_transforms.log_marginals.
    nu = torch.full((len(y), 1, y.shape[2]), 1 / y.shape[2], dtype=torch.float64)
    if y_keep is not None:
        nu = nu.masked_fill(~y_keep, 0.0)
    scores = y @ x.transpose(-1, -2)
    if clouds.bias is not None:
        full = clouds.bias.expand(*piece.columns.shape[:3], y.shape[2])
        scores = scores + take(full, None).transpose(-1, -2)
        # A bias of -inf can keep every x with mass from some y, which then takes no mass.
        reached = (scores + offset[..., None, :]).amax(-1).isneginf().logical_not()
        nu = torch.where(reached, nu, 0.0)
    return _Tile(take(piece.columns, x_keep), take(piece.mass, x_keep), offset, scores, nu)


def _metric_basis(metric: Tensor) -> Tensor:
    """W [F, K] with W' metric W = I on the directions above rounding."""
    diagonal = metric.diagonal()
    scale = torch.where(diagonal > 0, diagonal.rsqrt(), 0.0)
    scale = torch.where(scale.isfinite(), scale, 0.0)
    values, vectors = torch.linalg.eigh(scale[:, None] * metric * scale)
    kept = values > _RANK * values[-1:].clamp(min=0.0)
    return scale[:, None] * vectors[:, kept] * values[kept].rsqrt()


class _Scaled:
    """J / maps over z, omega = start + W z, where |z| is the root mean square move of the dual.

    In these coordinates the Hessian starts near I whatever the columns' units and correlations, so that
    L-BFGS-B needs few steps, and one tolerance, in nats, suits every feature family. Newton's method took
    half as many sweeps of the data, each with a Hessian, and no less time; at 129 columns, twice as much.
    Both ended at the same J, to nine digits, also on scores to 1e4.
    """

    def __init__(self, objective: KlObjective, start: Tensor) -> None:
        features = start.shape[0]
        self.objective, self.start, self.maps = objective, start, max(1, objective.maps)
        self.basis = _metric_basis(objective.metric(features) / self.maps)
        self._last: tuple[bytes, Evaluation] | None = None  # mostly where the search ends

    def omega(self, z: _Vector) -> Tensor:
        return self.start + self.basis @ torch.from_numpy(z)

    def at(self, z: _Vector) -> Evaluation:
        key = z.tobytes()
        if self._last is None or self._last[0] != key:
            self._last = key, self.objective.evaluate(self.omega(z))
        return self._last[1]

    def per_map(self, z: _Vector) -> tuple[float, _Vector]:
        """J and its gradient."""
        there = self.at(z)
        return there.value / self.maps, (self.basis.T @ there.gradient / self.maps).numpy()

    def tolerance(self, evaluation: Evaluation) -> float:
        # A gradient this small predicts a decrease below the rounding of J, which no step can verify.
        rounding = torch.finfo(torch.float64).eps * evaluation.magnitude / self.maps
        return max(_GRADIENT, math.sqrt(2 * rounding))

    def done(self, evaluation: Evaluation) -> bool:
        norm = torch.linalg.vector_norm(self.basis.T @ evaluation.gradient) / self.maps
        return float(norm) <= self.tolerance(evaluation)


def _minimise(
    objective: KlObjective, start: Tensor, max_iterations: int
) -> tuple[Tensor, int, float, bool]:
    """The fields of KlFit, for one group."""
    scaled = _Scaled(objective, start)
    z = np.zeros(scaled.basis.shape[1])
    best, iterations = scaled.at(z), 0
    # A second round only where the start was so far off that its rounding hid the end's gradient.
    while iterations < max_iterations and not scaled.done(best):
        gradient, left = scaled.tolerance(best), max_iterations - iterations
        # Its gtol bounds the largest entry; ftol = 0 leaves the gradient as the only verdict.
        result = scipy.optimize.minimize(
            scaled.per_map, z, method="L-BFGS-B", jac=True,
            options={"gtol": gradient / math.sqrt(len(z)), "ftol": 0.0, "maxiter": left},
        )  # fmt: skip
        end, iterations = scaled.at(result.x), iterations + int(result.nit)
        if not end.value < best.value or not bool(end.gradient.isfinite().all()):
            break
        z, best = result.x, end
    norm = float(torch.linalg.vector_norm(best.gradient)) / max(1, objective.rows)
    return scaled.omega(z), iterations, norm, scaled.done(best)
