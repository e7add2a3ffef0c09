"""Twins of the operators, made of what ONNX has and in the order that ONNX Runtime is fast at.

Traced by torch.export they become the bodies of the functions in a file (asapc.onnx.functions), and
they run in PyTorch, where tests hold them against operators/. A reference that translates well, such as
products of one kernel, has no twin. A loop takes its first two half-steps in the log domain, as the
meaning does. The plan is closed on one side then, so that no later factor is further from 1 than the
number of rows or columns: what is left are products with a kernel, where the log domain takes an
exponential of every entry at every step. Factors of many steps multiply, and an entry too small for
the kernel may become the whole row, so every KERNEL_STEPS it is formed anew.

Sizes are read from shapes and nothing branches on a value, so that one body serves every batch and
length.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from asapc.features import gaussian
from asapc.features.clouds import Budget, Clouds
from asapc.features.coarse import coarse_problem
from asapc.ir import Coupling, Side
from asapc.kernels.dual import Backend
from asapc.operators import asap as asap_meaning
from asapc.operators import esp as esp_meaning
from asapc.operators import lot as lot_meaning
from asapc.operators import plan as plan_meaning
from asapc.operators import ranks as esp_ranks
from asapc.operators.banded import in_band, seen_keys
from asapc.operators.catalogue import reference_named
from asapc.operators.fitted_sinkhorn import scaled
from asapc.operators.hybrid import hybrid
from asapc.operators.masks import FINE
from asapc.operators.matching import rank_partners
from asapc.operators.ranks import Clouds as Ranks
from asapc.operators.sinkhorn import (
    clean_values,
    factor_value,
    initial_duals,
    open_empty,
    score_matrix,
    widen,
)

LOG_STEPS = 2
KERNEL_STEPS = 9  # half-steps from one kernel: N to that power stays in float32's range to N = 2048
ROOT_STEPS = 16  # of the scaled Newton-Schulz iteration, enough for condition numbers of 1e6


@dataclass(frozen=True)
class Loop:
    """A finite loop's end: the plan is diag(u) K diag(v), its duals are f + log u and g + log v.

    kernel K: [B, H, N, M]; u: [B, H, N, 1]; v: [B, H, M, 1]; f: [B, H, N]; g: [B, H, M].
    """

    kernel: Tensor
    u: Tensor
    v: Tensor
    f: Tensor
    g: Tensor

    def apply(self, values: Tensor) -> Tensor:
        """Plan times values [B, H, M, E]: [B, H, N, E]; the plan is not formed."""
        return self.u * (self.kernel @ (self.v * values))

    def plan(self) -> Tensor:
        """[B, H, N, M]."""
        return self.u * self.kernel * self.v.transpose(-1, -2)


def log_sum_exp(x: Tensor, dim: int) -> Tensor:
    """Along `dim`; -inf where all is. In ONNX Runtime three times as fast as ReduceLogSumExp."""
    top = x.amax(dim, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    return (torch.exp(x - top).sum(dim, keepdim=True).log() + top).squeeze(dim)


def run_loop(
    scores: Tensor,
    f: Tensor,
    g: Tensor,
    log_mu: Tensor,
    log_nu: Tensor,
    half_steps: int,
    first_side: Side,
    row_keep: Tensor | None = None,
    log_steps: int = LOG_STEPS,
) -> Loop:
    """`half_steps` alternating c-transforms from the duals f [B, H, N] and g [B, H, M].

    scores: [B, H, N, M]; log_mu, log_nu: broadcastable to f and g, -inf without mass; row_keep:
    [B, 1, N] bool, the rows that columns sum over, where the others are closed all the same;
    log_steps: taken in the log domain, all of them where masses may be tiny.
    Meaning: operators.sinkhorn.run_half_steps, features.coarse.coarse_duals, operators.lot.pivot_plan.
    """

    def of_rows(x: Tensor, fill: float) -> Tensor:
        return x if row_keep is None else torch.where(row_keep[..., None], x, fill)

    on_rows = first_side == "row"
    for _ in range(min(log_steps, half_steps)):
        if on_rows:
            f = _closed(log_mu, log_sum_exp(scores + g[..., None, :], -1))
        else:
            g = _closed(log_nu, log_sum_exp(of_rows(scores + f[..., :, None], -math.inf), -2))
        on_rows = not on_rows
    u, v = torch.ones_like(f)[..., None], torch.ones_like(g)[..., None]
    mu, nu = log_mu.exp()[..., None], log_nu.exp()[..., None]
    kernel = _kernel(scores, f, g)
    for step in range(half_steps - log_steps):
        if step % KERNEL_STEPS == 0:
            if step > 0:
                f, g = f + u[..., 0].log(), g + v[..., 0].log()
                u, v = torch.ones_like(u), torch.ones_like(v)
                kernel = _kernel(scores, f, g)
            kernel = of_rows(kernel, 0.0)
            transposed = kernel.transpose(-1, -2).contiguous()  # matrix times column is the fast order
        if on_rows:
            u = _scaling(mu, kernel @ v)
        else:
            v = _scaling(nu, transposed @ u)
        on_rows = not on_rows
    return Loop(kernel, u, v, f, g)


def _kernel(scores: Tensor, f: Tensor, g: Tensor) -> Tensor:
    return torch.exp(scores + f[..., :, None] + g[..., None, :])


def _log_uniform(dual: Tensor) -> Tensor:
    """log 1/n for the n points of a dual [B, H, n]: [n]. Counted: math.log of a size would fix it."""
    return -_count(dual).log().expand(dual.shape[-1])


def _count(points: Tensor) -> Tensor:
    """n of [B, H, n], as a number of its dtype: [1]."""
    return points.new_ones(points.shape[-1]).sum(0, keepdim=True)


def _closed(log_mass: Tensor, total: Tensor) -> Tensor:
    """log mass - total; where there is nothing to close 0, or -inf without mass."""
    empty = torch.where(log_mass == -math.inf, log_mass, 0.0)
    return torch.where((total == -math.inf) | (log_mass == -math.inf), empty, log_mass - total)


def _scaling(mass: Tensor, total: Tensor) -> Tensor:
    """mass / total; finite where there is no total, for there is nothing to scale."""
    return mass / total.clamp(min=torch.finfo(total.dtype).tiny)


Twin = Callable[[SimpleNamespace], Tensor]


def _called_as(name: str, compute: Twin) -> Callable[..., Tensor]:
    """A function with the arguments of the reference of that name, which `compute` has by their names."""
    signature = inspect.signature(reference_named(name))

    def call(*given: Any, **by_name: Any) -> Tensor:
        bound = signature.bind(*given, **by_name)
        bound.apply_defaults()
        return compute(SimpleNamespace(**bound.arguments))

    return call


def _both(name: str, compute: Twin) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """(<name>, <name>_attention), with the results of their references.

    compute: A v or, where v is None, A.
    """

    def rounded(a: SimpleNamespace) -> Tensor:
        a.v = vars(a).get("v")
        dtype = a.q.dtype if a.v is None else a.v.dtype
        return compute(a).to(dtype)

    return _called_as(name, rounded), _called_as(f"{name}_attention", rounded)


def _applied(a: SimpleNamespace, loop: Loop, keep: Tensor | None) -> Tensor:
    """The plan of a loop times the factor and the values, if there are any."""
    result = loop.plan() if a.v is None else loop.apply(widen(clean_values(a.v, keep)))
    factor = factor_value(a.output_factor, a.q.shape[2], a.k.shape[2], keep)
    return result * (factor.to(result.dtype) if isinstance(factor, Tensor) else factor)


def _side(rows_first: bool) -> Side:
    return "row" if rows_first else "column"


def _from_duals(
    a: SimpleNamespace, duals: Sequence[Tensor | None], half_steps: int, first_side: Side
) -> Tensor:
    """What a loop from these duals gives, 0 where there is none. The mask has one key opened where none
    was active."""
    duals = [None if dual is None else asap_meaning.open_dual(dual, a.keep) for dual in duals]
    q, opened, bias = open_empty(a.q, a.keep, a.bias)
    scores = score_matrix(widen(q), widen(a.k), opened, widen(bias), a.score_multiplier)
    f, g = initial_duals(scores, opened)
    if duals[0] is not None:
        f = duals[0].to(scores.dtype)
    if duals[1] is not None:
        g = duals[1].to(scores.dtype)
        if opened is not None:
            g = g.masked_fill(~opened[:, None, :], -math.inf)
    log_mu, log_nu = _log_uniform(f), _log_uniform(g)
    if opened is not None:
        log_nu = torch.where(opened[:, None, :], log_nu, -math.inf)
    return _applied(a, run_loop(scores, f, g, log_mu, log_nu, half_steps, first_side), opened)


def _sinkhorn(a: SimpleNamespace) -> Tensor:
    return _from_duals(a, (None, None), a.half_steps, _side(a.rows_first))


def _fitted_sinkhorn(a: SimpleNamespace) -> Tensor:
    a.q, a.bias = scaled(a.q, a.bias, a.head_multiplier)
    return _sinkhorn(a)


def _banded_sinkhorn(a: SimpleNamespace) -> Tensor:
    """The loop on all N x M scores. In a band scalings may spread without end: every half-step is taken
    in the log domain."""
    scores = score_matrix(widen(a.q), widen(clean_values(a.k, a.keep)), None, None, a.score_multiplier)
    band = (*scores.shape[-2:], a.low, a.high, scores)
    shown, seen = in_band(*band), seen_keys(*band)
    if a.keep is not None:
        shown, seen = shown & a.keep[:, None, None, :], seen & a.keep[:, None, :]
    f, g = initial_duals(scores, None)
    g = torch.where(seen, g, -math.inf)
    log_nu = torch.where(seen, _log_uniform(g), -math.inf)
    scores, side = torch.where(shown, scores, -math.inf), _side(a.rows_first)
    loop = run_loop(scores, f, g, _log_uniform(f), log_nu, a.half_steps, side, log_steps=a.half_steps)
    return _applied(a, loop, a.keep)


sinkhorn, sinkhorn_attention = _both("sinkhorn", _sinkhorn)
fitted_sinkhorn, fitted_sinkhorn_attention = _both("fitted_sinkhorn", _fitted_sinkhorn)
banded_sinkhorn, banded_sinkhorn_attention = _both("banded_sinkhorn", _banded_sinkhorn)


def _plan(a: SimpleNamespace) -> Tensor:
    """Loops whose masses are given, which may be tiny, stay in the log domain: the reference has them."""
    if a.constant is not None:
        return plan_meaning.plan(**vars(a))
    given = a.log_mu is not None or a.log_nu is not None
    factor, scores = a.output_factor, a.scores
    if a.form != "plan" or a.log or a.damping is not None or given:
        if a.form == "plan":
            a.scores = widen(scores)
            a.log_mu = _log_uniform(a.scores[..., 0]) if a.log_mu is None else a.log_mu
            a.log_nu = _log_uniform(a.scores[..., 0, :]) if a.log_nu is None else a.log_nu
        log, a.log, a.output_factor = a.log, True, [1.0, 0.0, 0.0, 0.0]
        return _with_factor(plan_meaning.plan(**vars(a)), factor, log).to(scores.dtype)
    s = plan_meaning.scaled(widen(scores), a.score_multiplier, a.by_head)
    top = s.amax(-1 if a.rows_first else -2, keepdim=True)
    s = s - torch.where(top == -math.inf, 0.0, top)
    f, g = initial_duals(s, None)
    loop = run_loop(s, f, g, _log_uniform(f), _log_uniform(g), a.half_steps, _side(a.rows_first))
    return (loop.plan() * factor_value(factor, s.shape[-2], s.shape[-1], None)).to(scores.dtype)


plan = _called_as("plan", _plan)


def _with_factor(log_plan: Tensor, output_factor: Sequence[float], log: bool) -> Tensor:
    """factor * P, or its logarithm, of log P [B, H, N, M]."""
    queries, keys = _count(log_plan[..., 0]), _count(log_plan[..., 0, :])
    factor = queries ** output_factor[1] * keys ** (output_factor[2] + output_factor[3])
    factor = factor * output_factor[0]
    return log_plan + factor.log() if log else log_plan.exp() * factor


def _asap(a: SimpleNamespace) -> Tensor:
    """One c-transform of the keys' dual is softmax attention, in the one pattern that runtimes have a
    kernel for. The dual rides as one more head dimension, (q, 1) . (k, g) = q . k + g: no N x M mask is
    made.
    """
    if a.v is None or a.c_transforms != 1 or a.target_dual is None:
        duals = (a.source_dual, a.target_dual)
        return _from_duals(
            a, duals, a.c_transforms, asap_meaning.first_c_transform(*duals, a.c_transforms)
        )
    dual = asap_meaning.open_dual(a.target_dual, a.keep)
    q, opened, bias = open_empty(a.q, a.keep, a.bias)
    wide = torch.promote_types(widen(q).dtype, widen(a.v).dtype)
    dual = dual.to(wide)[..., None]
    if opened is not None:
        dual = dual.masked_fill(~opened[:, None, :, None], -math.inf)
    queries = q.to(wide) * a.score_multiplier
    queries = torch.cat([queries, torch.ones_like(queries[..., :1])], -1)
    keys = torch.cat([clean_values(a.k, opened).to(wide), dual], -1)
    mask = None if bias is None else bias.to(wide).expand(*q.shape[:3], a.k.shape[2])
    out = functional.scaled_dot_product_attention(
        queries, keys, clean_values(a.v, opened).to(wide), attn_mask=mask, scale=1.0
    )
    factor = factor_value(a.output_factor, q.shape[2], a.k.shape[2], opened)
    factor = factor.to(wide) if isinstance(factor, Tensor) else factor
    return out * (factor / q.shape[2])


asap, asap_attention = _both("asap", _asap)


# Predicted duals: each family's contribution, where its meaning does not translate well


def _coarse(
    clouds: Clouds, pivots: Tensor, budget: Budget, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """The coarse column [B, H, N] up to a constant, and features.coarse.row_mass [B, H, M].

    Cluster masses are scaled to the mass of x, as in kernels/cpu/coarse.py, which shifts the dual.
    """
    problem = coarse_problem(clouds, pivots)
    scores, counts = problem.scores, problem.counts
    rows = esp_ranks.opened(clouds.x_keep)
    if rows is not None:
        rows = rows[:, None, :]  # [B, 1, N]
        mass = rows.sum(-1, keepdim=True).to(scores.dtype)
    else:
        mass = torch.full_like(counts[..., :1], scores.shape[2])
    active = counts.sum(-1, keepdim=True)
    nobody = active == 0  # [B, H, 1]
    log_nu = torch.where(nobody, 0.0, (counts * (mass / active.clamp(min=1.0))).log())
    side: Side = "row" if budget.starts_on_x else "column"
    zero = torch.zeros_like(scores[..., 0])
    loop = run_loop(scores, zero, log_nu, zero, log_nu, budget.half_steps, side, rows)
    f = torch.where(nobody, 0.0, loop.f + loop.u[..., 0].log())
    column = f + clouds.cost_offset()
    if not want_mass:
        return column, None
    # r_c = exp(v_c) sum_i exp(S_ic + u_i), 1 where one more half-step would change nothing
    spread = scores + f[..., :, None]
    if rows is not None:
        spread = torch.where(rows[..., None], spread, -math.inf)
    used = counts > 0
    log_mass = loop.g + loop.v[..., 0].log() - log_nu + log_sum_exp(spread, -2)
    log_mass = torch.where(used, log_mass, -math.inf)
    top = log_mass.amax(-1, keepdim=True)
    masses = torch.exp(log_mass - torch.where(top == -math.inf, 0.0, top))
    total = (counts * masses).sum(-1, keepdim=True)
    masses = masses * active / torch.where(total > 0, total, 1.0)
    if clouds.x_keep is not None:
        masses = masses * clouds.x_keep.to(masses.dtype).mean(-1)[:, None, None]
    return column, (problem.member @ masses[..., None])[..., 0]


def _coarse_contribution(clouds: Clouds, pivots: Tensor, weights: Tensor, budget: Budget) -> Tensor:
    return _coarse(clouds, pivots, budget, False)[0] * weights


def _gaussian(clouds: Clouds, parameter: None, weights: Tensor, budget: Budget) -> Tensor:
    """features.gaussian.columns times weights [1|H, 3]."""
    beta = gaussian.brenier_potential(clouds, brenier_matrix)
    return gaussian.weighted(clouds, beta, weights)


def brenier_matrix(spread_x: Tensor, spread_y: Tensor) -> Tensor:
    """features.gaussian.brenier_matrix by products alone, in which ONNX has all it takes.

    A = R (W + I/2)^-1 R with R = Sy^(1/2) in place of the Cholesky factor, W = (R Sx R + I/4)^(1/2).
    """
    eye = torch.eye(spread_y.shape[-1], dtype=spread_y.dtype, device=spread_y.device)
    tiny = torch.finfo(spread_y.dtype).tiny ** 0.5
    trace = (spread_y * eye).sum((-2, -1), keepdim=True)
    floor = gaussian.JITTER * trace + tiny
    root_y, _ = square_roots(spread_y + floor * eye, floor)
    root, inverse = square_roots(root_y @ spread_x @ root_y + eye / 4, torch.full_like(trace, 0.25))
    # (W + I/2)^-1 by Newton's iteration from a good start: W^-1 bounds it from above by at most 2.
    middle = root + eye / 2
    solved = inverse / 1.5
    for _ in range(SOLVE_STEPS):
        solved = solved @ (2 * eye - middle @ solved)
    return root_y @ solved @ root_y


def square_roots(matrix: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Square root of positive definite [B, H, D, D] and its inverse.  floor: of eigenvalues [B, H, 1, 1].

    Source: Higham, Functions of Matrices (2008), Eq. 6.35, scaled as in features.gaussian.
    """
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    norm = matrix.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=torch.finfo(matrix.dtype).tiny)
    y, z = matrix / norm, eye.expand_as(matrix)
    low = floor / norm
    for _ in range(ROOT_STEPS):
        scale, low = gaussian.newton_schulz_scale(low)
        step = (3 * eye - scale * (z @ y)) / 2 * scale.sqrt()
        y, z = y @ step, step @ z
    return y * norm.sqrt(), z / norm.sqrt()


SOLVE_STEPS = 6  # from an error of at most 1/3 in W^-1 (W + I/2) / 1.5 - I, squared each time


def _c_transforms(clouds: Clouds, parameter: None, weights: Tensor, budget: Budget) -> Tensor:
    """features.lse.columns times weights [1|H, 1], every example at once."""
    scores = clouds.x @ clouds.y.transpose(-1, -2)
    if clouds.bias is not None:
        scores = scores + clouds.bias.to(scores.dtype)
    if clouds.y_keep is not None:
        scores = scores.masked_fill(~clouds.y_keep[:, None, None, :], -math.inf)
    total = log_sum_exp(scores, -1)
    return torch.where(total == -math.inf, 0.0, clouds.cost_offset() - total) * weights


def _token_bias(clouds: Clouds, parameter: None, weights: Tensor, budget: Budget) -> Tensor:
    """features.token_bias.columns, the identity, times weights [1|H, N]."""
    return weights.expand(clouds.x.shape[:3])


_DUALS = Backend(
    {
        "coarse": _coarse_contribution,
        "farthest": _coarse_contribution,
        "gaussian": _gaussian,
        "lse": _c_transforms,
        "token_bias": _token_bias,
    },
    _coarse,
)
dual = _DUALS.dual
dual_and_row_mass = _DUALS.dual_and_row_mass


# Sliced plans and pivots


def gather_rows(points: Tensor, rows: Tensor) -> Tensor:
    """points [B, H, M, E] at rows [B, H, N]: [B, H, N, E]."""
    batch, heads, count = points.shape[:3]
    first = torch.arange(batch * heads, device=points.device).view(batch, heads, 1) * count
    return points.flatten(0, 2)[(rows + first).flatten()].view(*rows.shape, points.shape[3])


SliceOf = Callable[[int], tuple[Tensor, Tensor]]  # of a slice, what it costs, and P v or P


def _mixture(
    count: int, slice_of: SliceOf, inverse_temperature: Tensor, slice_weight: Tensor | None
) -> Tensor:
    """sum_l w_l P_l v by an online softmax over the slices, whose costs are [B, H, 1, 1]."""
    result: Any = 0.0
    total: Any = 0.0
    lowest: Any = None
    for index in range(count):
        cost, moved = slice_of(index)
        tau = inverse_temperature.to(cost.dtype).view(-1, 1, 1)
        before = cost if lowest is None else lowest
        lowest = torch.minimum(before, cost)
        kept, weight = torch.exp(-tau * (before - lowest)), torch.exp(-tau * (cost - lowest))
        if slice_weight is not None:
            weight = weight * slice_weight[..., index].to(weight.dtype).view(-1, 1, 1)
        kept, weight = kept.to(moved.dtype), weight.to(moved.dtype)
        result, total = result * kept + weight * moved, total * kept + weight
    mixed: Tensor = result / total
    return mixed


def _cost_matrix(clouds: Ranks, squared: bool) -> Tensor:
    """operators.matching.cost_matrix by one coordinate at a time."""
    cost: Any = 0.0
    for axis in range(clouds.q.shape[3]):  # by differences, which lose no digits near 0
        cost = cost + (clouds.q[..., axis, None] - clouds.k[..., None, :, axis]).square()
    found: Tensor = cost if squared else cost.sqrt()
    return found


def _of_plans(
    clouds: Ranks,
    values: Tensor | None,
    squared: bool,
    mean: bool,
    plan_of: Callable[[Tensor, Tensor], Tensor],
) -> SliceOf:
    """Of slices whose plans [B, H, N, M] are formed, of their lines x [B, H, N] and y [B, H, M]."""
    cost = _cost_matrix(clouds, squared)

    def slice_of(index: int) -> tuple[Tensor, Tensor]:
        plan = plan_of(clouds.x[:, :, index], clouds.y[:, :, index]).to(cost.dtype)
        moved = plan if values is None else plan @ values
        return _cost_of_slice(clouds, cost * plan, mean), moved

    return slice_of


def _cost_of_slice(clouds: Ranks, costs: Tensor, mean: bool) -> Tensor:
    """[B, H, 1, 1] float64, the sum over a slice's pairs, or its mean over the active queries."""
    total = costs.double().flatten(2).sum(-1)[..., None, None]
    count = esp_ranks.active(clouds.query_keep, clouds.q).view(-1, 1, 1, 1)
    return total / count if mean else total


def _either(
    condition: Tensor,
    one: Callable[..., Tensor],
    other: Callable[..., Tensor],
    given: Sequence[Tensor | None],
) -> Tensor:
    """one(*given) or other(*given), flat: in a file both, of which one runs.

    Not torch.cond, which compiles first and then takes its sizes for constants. Flat, since it compares
    strides, and of a length that may be 0 they are no products of sizes.
    """
    tensors = tuple(tensor for tensor in given if tensor is not None)

    def filled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*tensors: Tensor) -> Tensor:
            found = iter(tensors)
            return function(*(None if tensor is None else next(found) for tensor in given)).flatten()

        return call

    if torch.compiler.is_exporting():
        cond: Any = torch.ops.higher_order.cond
        chosen: Tensor = cond(condition, filled(one), filled(other), tensors)
        return chosen
    return filled(one if bool(condition) else other)(*tensors)


def _esp_hard(a: SimpleNamespace) -> Tensor:
    """operators.esp.esp_hard one slice at a time: rows are gathered, plans formed where tokens tie."""
    clouds = esp_ranks.clouds_of(a.q, a.k, a.keep, a.query_keep, a.slices)
    values = None if a.v is None else clean_values(widen(a.v), a.keep)
    orders = [
        esp_ranks.order_of(esp_ranks.padded_last(x, kept), a.ties)
        for x, kept in ((clouds.x, clouds.query_keep), (clouds.y, clouds.keep))
    ]

    def formed(*given: Any) -> Tensor:
        *parts, values, tau, omega, _, _ = given
        clouds = Ranks(*parts)

        def plan_of(x: Tensor, y: Tensor) -> Tensor:
            return esp_meaning.lifted_plan(x, y, clouds.keep, clouds.query_keep, a.coupling, a.ties)

        slice_of = _of_plans(clouds, values, a.squared_cost, a.mean_cost, plan_of)
        return _mixture(clouds.num_slices, slice_of, tau, omega)

    def gathered(*given: Any) -> Tensor:
        *parts, values, tau, omega, order_x, order_y = given
        clouds = Ranks(*parts)
        pairs_of = _gathered(clouds, (order_x, order_y), values, a.coupling, a.squared_cost)

        def slice_of(index: int) -> tuple[Tensor, Tensor]:
            distances, moved = pairs_of(index)
            return _cost_of_slice(clouds, distances, a.mean_cost), moved

        return _mixture(clouds.num_slices, slice_of, tau, omega)

    lines = clouds.x.contiguous(), clouds.y.contiguous()  # a choice takes no two views of one tensor
    parts = (clouds.q, clouds.k, *lines, clouds.keep, clouds.query_keep)
    given = (*parts, values, a.inverse_temperature, a.slice_weight, *orders)
    if values is None:
        result = formed(*given)
    elif a.ties != "shared":
        result = gathered(*given)
    else:
        chosen = _either(_any_tied(clouds, orders), formed, gathered, given)
        result = chosen.view(*a.q.shape[:3], values.shape[3])  # a choice has no shape in a file
    return _closed_slices(a, result)


def _closed_slices(a: SimpleNamespace, result: Tensor) -> Tensor:
    result = esp_ranks.close(result, a.keep, a.query_keep, a.output_factor)
    return _with_lengths(result, a.q, a.k, a.query_power, a.key_power)


def _with_lengths(result: Tensor, q: Tensor, k: Tensor, query_power: int, key_power: int) -> Tensor:
    """result N^a M^b, the lengths counted."""
    for tokens, power in ((q, query_power), (k, key_power)):
        if power:
            result = result * torch.pow(_count(tokens[..., 0].to(result.dtype)), float(power))
    return result


def _any_tied(clouds: Ranks, orders: Sequence[Tensor]) -> Tensor:
    """Whether any tokens tie in any slice."""
    found = []
    for x, keep, order in zip(
        (clouds.x, clouds.y), (clouds.query_keep, clouds.keep), orders, strict=True
    ):
        ordered = esp_ranks.padded_last(x, keep).gather(-1, order)
        same = ordered[..., 1:] == ordered[..., :-1]
        if keep is not None:
            rank = torch.arange(x.shape[-1], device=x.device)[1:]
            same = same & (rank < keep.sum(-1)[:, None, None, None])
        found.append(same.sum() > 0)
    return found[0] | found[1]


def _gathered(
    clouds: Ranks,
    orders: Sequence[Tensor],
    values: Tensor,
    coupling: Coupling,
    squared: bool,
) -> SliceOf:
    """Distances, weighted, and P v of a slice in which nothing ties: every rank of queries meets one key
    or two, or stairs of them.
    """

    def away(queries: Tensor, keys: Tensor) -> Tensor:
        apart = (queries - gather_rows(clouds.k, keys)).square().sum(-1)
        return apart if squared else apart.sqrt()

    def by_token(order: Tensor, of_ranks: Tensor) -> Tensor:
        return of_ranks.new_empty(order.shape).scatter_(-1, order, of_ranks.expand(order.shape))

    if coupling == "monotone" and not clouds.one_to_one():
        first, second, mass = esp_ranks.monotone_pairs(clouds)
    else:
        ranks, shares = rank_partners(clouds, coupling)

    def few(index: int) -> tuple[Tensor, Tensor]:
        order_x, order_y = (order[:, :, index] for order in orders)
        total: Any = 0.0
        moved: Any = 0.0
        for number, met in enumerate(ranks):
            if shares is not None:
                met = order_y.gather(-1, met[:, None].expand(*order_x.shape[:2], -1))
            keys = by_token(order_x, order_y if shares is None else met)
            distance, found = away(clouds.q, keys), gather_rows(values, keys)
            if shares is not None:
                share = by_token(order_x, shares[number][:, None])
                distance, found = distance * share, found * share[..., None].to(found.dtype)
            total, moved = total + distance, moved + found
        if clouds.query_keep is not None:
            total = total.masked_fill(~clouds.query_keep[:, None, :], 0.0)
        return total, moved

    def stairs(index: int) -> tuple[Tensor, Tensor]:
        order_x, order_y = (order[:, :, index] for order in orders)
        shape = (*order_x.shape[:2], -1)
        queries, keys = (
            order.gather(-1, ranks[:, None].expand(shape))
            for order, ranks in ((order_x, first), (order_y, second))
        )
        total = away(gather_rows(clouds.q, queries), keys) * mass[:, None]
        found = gather_rows(values, keys) * mass[:, None, :, None].to(values.dtype)
        zero = values.new_zeros(1).expand(*clouds.q.shape[:3], values.shape[3])
        moved = zero.scatter_add(2, queries[..., None].expand(found.shape), found)
        return total, moved

    return stairs if coupling == "monotone" and not clouds.one_to_one() else few


esp_hard, esp_hard_attention = _both("esp_hard", _esp_hard)


def _esp_soft(a: SimpleNamespace) -> Tensor:
    """operators.esp.expected_plan with distances by one coordinate at a time."""
    clouds = esp_ranks.clouds_of(a.q, a.k, a.keep, a.query_keep, a.slices)
    values = None if a.v is None else clean_values(widen(a.v), a.keep)
    ranks = esp_ranks.rank_matrix(clouds, a.coupling)

    def plan_of(x: Tensor, y: Tensor) -> Tensor:
        return esp_meaning.soft_plan(
            x, y, clouds.keep, clouds.query_keep, ranks,
            lambda points, kept: esp_meaning.soft_sort(points, kept, a.softsort_temperature),
        )  # fmt: skip

    slice_of = _of_plans(clouds, values, a.squared_cost, a.mean_cost, plan_of)
    mixed = _mixture(clouds.num_slices, slice_of, a.inverse_temperature, a.slice_weight)
    return _closed_slices(a, mixed)


esp_soft, esp_soft_attention = _both("esp_soft", _esp_soft)


def _lot(a: SimpleNamespace) -> Tensor:
    """operators.lot.lot, or lot_attention, with a mask on both sides: tokens are counted in masks."""
    dtype, mass, weight = lot_meaning.work_dtype(a.q), a.pivot_mass, a.pivot_weight
    if a.interleaved:
        mass = lot_meaning.by_example(mass, a.q.shape[0])
        weight = None if weight is None else lot_meaning.by_example(weight, a.q.shape[0])
    queries, keys = (
        torch.ones_like(x[:, 0, :, 0], dtype=torch.bool) if mask is None else mask
        for x, mask in ((a.q, a.query_keep), (a.k, a.keep))
    )
    scores = lot_meaning.pivot_scores(a.q, a.query_keep, None, a.pivots, a.query_multiplier, dtype)
    first = lot_meaning.pivot_plan(scores, queries, mass, a.query_half_steps, a.queries_first, False)
    scores = lot_meaning.pivot_scores(a.k, a.keep, a.key_bias, a.pivots, a.key_multiplier, dtype)
    second = lot_meaning.pivot_plan(scores, keys, mass, a.key_half_steps, a.keys_first, True)
    second = second if weight is None else second * weight.to(dtype)[..., None]
    if a.v is not None:
        second = second @ clean_values(a.v, a.keep).to(dtype)
    out = first.transpose(-1, -2) @ second * a.output_factor[0]
    counted = (queries, keys, torch.ones_like(queries))
    for mask, power in zip(counted, a.output_factor[1:], strict=True):
        if power:
            out = out * mask.sum(-1).clamp(min=1).to(dtype)[:, None, None, None] ** power
    return lot_meaning.masked(out, a.keep, a.query_keep)


lot, lot_attention = _both("lot", _lot)


def kept_keys(mask: Tensor, hides: float) -> Tensor:
    """True on the keys that an additive mask keeps; a graph cannot refuse what is neither."""
    return mask > hides


def rows_kept(bias: Tensor, small: bool) -> Tensor:
    """True on the rows that are not all -inf, nor, where `small`, hold numbers that scores are lost
    beside: a graph cannot refuse them, and gives NaN."""
    kept = bias.amax(-1, keepdim=True) > -math.inf
    if small:
        kept = kept & (bias.abs() < 2.0 * FINE / torch.finfo(torch.float32).eps).all(-1, keepdim=True)
    return kept


def keys_of_empty(
    keep: Tensor, mask: Tensor, q: Tensor, k: Tensor, reach: float, is_bias: bool
) -> Tensor:
    """keep with every key active where none is and scores stay what they are beside the mask."""
    fine = mask.amax(-1) > -2.0 * FINE / torch.finfo(q.dtype).eps
    return keep | (~keep.any(-1) & fine)[:, None]


def _named(name: str) -> Callable[..., Tensor]:
    twin: Callable[..., Tensor] = globals()[name]
    return twin


hybrid_lot, hybrid_lot_attention = hybrid("lot", _named), hybrid("lot_attention", _named)
hybrid_esp_hard = hybrid("esp_hard", _named)
hybrid_esp_hard_attention = hybrid("esp_hard_attention", _named)
hybrid_fitted_sinkhorn = hybrid("fitted_sinkhorn", _named)
hybrid_fitted_sinkhorn_attention = hybrid("fitted_sinkhorn_attention", _named)
