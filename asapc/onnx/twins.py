"""Twins of the operators, built from what ONNX has and in the order that ONNX Runtime runs fastest.

Traced by torch.export, they become the bodies of the functions in a file (asapc.onnx.functions). They
also run in PyTorch, where tests compare them with operators/. Operators without a twin (pivots, bands and
soft sliced plans) are traced from their references.

A loop takes its first two half-steps in the log domain, like the reference. After that the plan is
closed on one side, so that no later factor is further from 1 than the number of rows or columns: what is
left are products with a kernel, where the log domain needs an exponential of every entry at every step.
Factors of many steps multiply, and an entry too small for the kernel may become the whole row, so the
kernel is formed anew every KERNEL_STEPS.

Sizes are read from shapes, and only exact sorting branches on a value (whether tokens tie), so one body
serves every batch and length.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from asapc.features import coarse, gaussian
from asapc.features.clouds import Budget, Clouds
from asapc.ir import Ending, Side
from asapc.kernels.dual import Backend
from asapc.operators import asap as asap_meaning
from asapc.operators import matching, ranks
from asapc.operators import plan as plan_meaning
from asapc.operators.c_transforms import log_marginals
from asapc.operators.catalogue import reference_named
from asapc.operators.esp import with_lengths
from asapc.operators.fitted_sinkhorn import scaled
from asapc.operators.hybrid import hybrid
from asapc.operators.masks import is_one, kept_keys, keys_of_empty, rows_kept, some_keys  # noqa: F401
from asapc.operators.sinkhorn import (
    alternate,
    clean_values,
    factor_value,
    initial_duals,
    open_empty,
    opened_keys,
    score_matrix,
    widen,
)

LOG_STEPS = 2
KERNEL_STEPS = 9  # half-steps from one kernel: N to that power stays in float32's range to N = 2048


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


def run_loop(
    scores: Tensor, f: Tensor, g: Tensor, log_mu: Tensor, log_nu: Tensor, half_steps: int,
    first_side: Side,
) -> Loop:  # fmt: skip
    """operators.sinkhorn.alternate, with products after LOG_STEPS."""
    f, g = alternate(scores, f, g, min(LOG_STEPS, half_steps), first_side, log_mu, log_nu)
    u, v = torch.ones_like(f)[..., None], torch.ones_like(g)[..., None]
    mu, nu = log_mu.exp()[..., None], log_nu.exp()[..., None]
    kernel = _kernel(scores, f, g)
    for step in range(half_steps - LOG_STEPS):
        if step % KERNEL_STEPS == 0:
            if step > 0:
                f, g = f + u[..., 0].log(), g + v[..., 0].log()
                u, v = torch.ones_like(u), torch.ones_like(v)
                kernel = _kernel(scores, f, g)
            transposed = kernel.transpose(-1, -2).contiguous()  # matrix times column is the fast order
        if ((step + LOG_STEPS) % 2 == 0) == (first_side == "row"):
            u = _scaling(mu, kernel @ v)
        else:
            v = _scaling(nu, transposed @ u)
    return Loop(kernel, u, v, f, g)


def _kernel(scores: Tensor, f: Tensor, g: Tensor) -> Tensor:
    return torch.exp(scores + f[..., :, None] + g[..., None, :])


def _scaling(mass: Tensor, total: Tensor) -> Tensor:
    """mass / total; finite where the total is 0, where there is nothing to scale."""
    return mass / total.clamp(min=torch.finfo(total.dtype).tiny)


Twin = Callable[[SimpleNamespace], Tensor]


def _called_as(name: str, compute: Twin) -> Callable[..., Tensor]:
    """A function with the arguments of the reference of that name, passed to `compute` by name."""
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


def _from_duals(
    a: SimpleNamespace, duals: Sequence[Tensor | None], half_steps: int, first_side: Side
) -> Tensor:
    """The result of a loop from these duals, or from 0. One key is opened where none was active."""
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
    log_mu, log_nu = log_marginals(scores.shape[-2], scores.shape[-1], opened, scores)
    return _applied(a, run_loop(scores, f, g, log_mu, log_nu, half_steps, first_side), opened)


def _sinkhorn(a: SimpleNamespace) -> Tensor:
    return _from_duals(a, (None, None), a.half_steps, "row" if a.rows_first else "column")


def _fitted_sinkhorn(a: SimpleNamespace) -> Tensor:
    a.q, a.bias = scaled(a.q, a.bias, a.head_multiplier)
    return _sinkhorn(a)


sinkhorn, sinkhorn_attention = _both("sinkhorn", _sinkhorn)
fitted_sinkhorn, fitted_sinkhorn_attention = _both("fitted_sinkhorn", _fitted_sinkhorn)


def _plan(a: SimpleNamespace) -> Tensor:
    """Loops with given masses, which may be tiny, stay in the log domain, as in the reference."""
    settings = (a.constant, a.damping, a.log_mu, a.log_nu)
    ending = Ending.of(vars(a))
    if ending is None and (a.form != "plan" or a.log or any(x is not None for x in settings)):
        return plan_meaning.plan(**vars(a))
    scores = plan_meaning.logs_of(widen(a.scores)) if a.is_kernel else widen(a.scores)
    s = plan_meaning.scaled(scores, a.score_multiplier, a.by_head)
    factor = s.new_ones(()) * factor_value(a.output_factor, s.shape[-2], s.shape[-1], None)
    if ending is not None:
        return _ended_plan(a, s, ending, factor)
    top = s.amax(-1 if a.rows_first else -2, keepdim=True)
    s = s - torch.where(top == -math.inf, 0.0, top)
    marginals = log_marginals(s.shape[-2], s.shape[-1], None, s)
    side: Side = "row" if a.rows_first else "column"
    loop = run_loop(s, *initial_duals(s, None), *marginals, a.half_steps, side)
    return (loop.plan() * factor).to(a.scores.dtype)


def _ended_plan(a: SimpleNamespace, s: Tensor, ending: Ending, factor: Tensor) -> Tensor:
    """The plan of a loop over scores s that ends by the data: one of those after every half-step."""
    masses = widen(a.log_mu), widen(a.log_nu)
    loop = a.half_steps, a.rows_first, a.damping
    done, of_rows = torch.full((1,), a.half_steps), range(1 if a.rows_first else 2, a.half_steps + 1, 2)
    moved = plan_meaning.changes(ending, s, *masses, *loop, a.form)
    for step, change in zip(of_rows, moved, strict=True):
        due = change <= ending.threshold
        done = torch.where(due, done.clamp(max=step + a.after), done)
    if a.form == "plan":
        both = zip(*plan_meaning.duals(s, *masses, *loop), strict=True)
        f, g = (torch.stack(x).index_select(0, done)[0] for x in both)
        logs = s + f[..., None] + g[..., None, :]
    else:
        written = a.rows_first, a.form, a.shares, a.damping
        steps, logs = plan_meaning.written_steps(s, *masses, *written), s
        for step, (log_plan, _) in enumerate(itertools.islice(steps, a.half_steps + 1)):
            logs = torch.where(done == step, log_plan(), logs)
    return (logs + factor.log() if a.log else logs.exp() * factor).to(a.scores.dtype)


plan = _called_as("plan", _plan)


def _asap(a: SimpleNamespace) -> Tensor:
    """One c-transform of the keys' dual is softmax attention, in the one pattern that runtimes have a
    kernel for. The dual is one more head dimension, (q, 1) . (k, g) = q . k + g: no N x M mask is made.
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
    of_queries = bias is not None and bias.shape[-1] == 1  # as in kernels.library.loops
    mask = None if bias is None or of_queries else bias.to(wide).expand(*q.shape[:3], a.k.shape[2])
    out = functional.scaled_dot_product_attention(
        queries, keys, clean_values(a.v, opened).to(wide), attn_mask=mask, scale=1.0
    )
    if bias is not None and of_queries:
        out = torch.where(bias == -math.inf, 0.0, out)
    factor = factor_value(a.output_factor, q.shape[2], a.k.shape[2], opened)
    factor = factor.to(wide) if isinstance(factor, Tensor) else factor
    return out * (factor / q.shape[2])


asap, asap_attention = _both("asap", _asap)


def _esp_hard(a: SimpleNamespace) -> Tensor:
    """Keys are gathered; only where tokens tie are plans formed, which takes twenty times as long."""
    clouds = ranks.clouds_of(a.q, a.k, a.keep, a.query_keep, a.slices)
    if a.coupling == "monotone" and not clouds.one_to_one():
        return reference_named("esp_hard")(**vars(a))
    tied: list[Tensor] = []
    orders: list[Tensor] = []
    for x, keep in ((clouds.x, clouds.query_keep), (clouds.y, clouds.keep)):
        x = ranks.padded_last(x, keep)
        orders.append(ranks.order_of(x, a.ties))
        ordered = x.gather(-1, orders[-1])
        same = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] > -math.inf)
        tied.append(same.sum() > 0)
    named = {name: value for name, value in vars(a).items() if isinstance(value, Tensor)}
    tensors = (*named.values(), *orders)

    def gathered(*tensors: Tensor) -> Tensor:
        parts = vars(a) | dict(zip(named, tensors, strict=False))
        return _gathered(SimpleNamespace(**parts), *tensors[-2:]).flatten()

    def formed(*tensors: Tensor) -> Tensor:
        return reference_named("esp_hard")(**vars(a) | dict(zip(named, tensors, strict=False))).flatten()

    if a.ties == "shared" and torch.compiler.is_exporting():
        cond: Any = torch.ops.higher_order.cond  # torch.cond compiles first, and fixes its sizes
        result: Tensor = cond(tied[0] | tied[1], formed, gathered, tensors)
    else:
        result = (formed if a.ties == "shared" and any(tied) else gathered)(*tensors)
    return result.view(*a.q.shape[:3], a.v.shape[3])  # flat: in a file a choice has no shape


def _gathered(a: SimpleNamespace, order_x: Tensor, order_y: Tensor) -> Tensor:
    """operators.esp.esp_hard without ties, all slices at once: memory O(L N (D + E))."""
    clouds = ranks.clouds_of(a.q, a.k, a.keep, a.query_keep, a.slices)
    pairs = matching.match(clouds, order_x, order_y, a.coupling)
    cost = matching.matched_costs(clouds, pairs, a.squared_cost)
    count = ranks.active(clouds.query_keep, clouds.q)[:, None, None]
    weights = matching.slice_weights(cost, a.inverse_temperature, count, a.mean_cost, a.slice_weight)
    table: Tensor = clean_values(widen(a.v), a.keep).flatten(0, 2)
    moved: Any = 0.0
    for index, rows in enumerate(pairs.keys):
        values = table.index_select(0, rows.flatten()).view(*rows.shape, a.v.shape[3])
        moved = moved + (values if pairs.shares is None else values * pairs.shares[index][..., None])
    mixed = (weights.to(moved.dtype)[..., None, :] @ moved.flatten(3)).view(*a.q.shape[:3], -1)
    factor = with_lengths(a.output_factor, a.q, a.k, a.query_power, a.key_power)
    return ranks.close(mixed, a.keep, a.query_keep, factor).to(a.v.dtype)


esp_hard = _called_as("esp_hard", _esp_hard)


# Predicted duals: the contribution of each family whose reference does not translate well


def _coarse(
    clouds: Clouds, pivots: Tensor | None, count: int, budget: Budget, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """As features.coarse.dual_and_mass, the dual up to a constant: clusters have the mass of x in all."""
    pivots = coarse.farthest_points(clouds, count) if pivots is None else pivots
    problem = coarse.coarse_problem(clouds, pivots)
    scores, counts = problem.scores, problem.counts
    mass = scores.new_full((), scores.shape[2])
    rows = opened_keys(clouds.x_keep)
    if rows is not None:  # nobody reads what a masked row of scores then gives
        mass = rows.sum(-1)[:, None, None].to(scores.dtype)
        scores = scores.masked_fill(~rows[:, None, :, None], -math.inf)
    active = counts.sum(-1, keepdim=True)
    nobody = active == 0  # [B, H, 1]
    log_nu = torch.where(nobody, 0.0, (counts * (mass / active.clamp(min=1.0))).log())
    side: Side = "row" if budget.starts_on_x else "column"
    zero = torch.zeros_like(scores[..., 0])
    loop = run_loop(scores, zero, log_nu, zero, log_nu, budget.half_steps, side)
    f = torch.where(nobody, 0.0, loop.f + loop.u[..., 0].log())
    column = f + clouds.cost_offset()
    if not want_mass:
        return column, None
    v = loop.g + loop.v[..., 0].log() - log_nu
    sums = coarse.over_x(problem.scores + f[..., None], clouds.x_keep)
    return column, coarse.masses_of(problem, v, sums)


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
    root_y, _ = gaussian.square_roots(spread_y + floor * eye, floor)
    root, inverse = gaussian.square_roots(root_y @ spread_x @ root_y + eye / 4, 0.25)
    # (W + I/2)^-1 by Newton's iteration from a good start: W^-1 bounds it from above by at most 2.
    middle = root + eye / 2
    solved = inverse / 1.5
    for _ in range(SOLVE_STEPS):
        solved = solved @ (2 * eye - middle @ solved)
    return root_y @ solved @ root_y


SOLVE_STEPS = 6  # from an error of at most 1/3 in W^-1 (W + I/2) / 1.5 - I, squared each time


def _c_transforms(clouds: Clouds, parameter: None, weights: Tensor, budget: Budget) -> Tensor:
    """features.points.lse times weights [1|H, 1], every example at once."""
    total = score_matrix(clouds.x, clouds.y, clouds.y_keep, clouds.bias, 1.0).logsumexp(-1)
    return torch.where(total == -math.inf, 0.0, clouds.cost_offset() - total) * weights


_DUALS = Backend({"gaussian": _gaussian, "lse": _c_transforms}, _coarse)
dual = _DUALS.dual
dual_and_row_mass = _DUALS.dual_and_row_mass


def _named(name: str) -> Callable[..., Tensor]:
    return globals()[name]


hybrid_esp_hard = hybrid("esp_hard", _named)
hybrid_fitted_sinkhorn = hybrid("fitted_sinkhorn", _named)
hybrid_fitted_sinkhorn_attention = hybrid("fitted_sinkhorn_attention", _named)
