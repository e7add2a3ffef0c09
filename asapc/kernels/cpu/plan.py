"""CPU twin of operators/plan.py: the loop in the linear domain, small matrices side by side.

K = exp(S - top) is formed once, with the largest score of every row, or of every column where columns are
closed first; every half-step is then a matrix-vector product,

    a = mu / (K b),    b = nu / (K' a),    P = diag(a) K diag(b),    log P = S - top + log a + log b.

Damped scalings are powers of these quotients. They do not take up what is subtracted, so nothing is.

Matrices of at most SMALL entries lie with the matrix as the last axis, [N, M, G]: sums over a handful of
entries are then additions of long rows. Larger ones are multiplied as they are, several to a tile where
they fit. What the linear domain cannot hold is found after the loop, matrix by matrix, and computed by
the reference instead: a column (or row) whose largest entry of K is near 0, or scalings that spread too
far for what has left K at the lower end of the format to be without effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asapc.ir import Side
from asapc.kernels import native
from asapc.kernels.cpu.workers import SAFE_ROW_RANGE, TILE_BYTES, each_worker
from asapc.kernels.loop import Loop
from asapc.kernels.plan import Task, is_small
from asapc.operators import plan as reference

NEAR, FAR = -2e3, -1e7  # scores of masks that are low, but not so low that nothing is left of them
ROUNDED = 500.0  # size of duals from which on what float32 rounds off may show
SPREAD = 0.6  # of the safe range: how far scalings may spread where entries of K are lost


def described(scores: Tensor, task: Task) -> tuple[str, str]:
    """What runs, and why."""
    queries, keys = scores.shape[-2:]
    if is_small(scores):
        return "CPU, matrices side by side", f"{queries} x {keys} entries a matrix"
    if task.stabiliser is not None:
        why = "the constant in its divisions is kept; in float64 where scores spread"
        return "CPU, linear domain", why
    return "CPU, linear domain", "what it cannot hold is computed in the log domain"


def plan(scores: Tensor, task: Task) -> Tensor:
    """[B, H, N, M] in the dtype of the scores, see operators.plan."""
    batch, heads, queries, keys = scores.shape
    small = is_small(scores)
    if scores.numel() == 0 or task.settings["half_steps"] < 1:
        return task.plain(scores)
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    given = scores.to(dtype)
    if task.settings["by_head"] is not None:
        given = reference.scaled(given, 1.0, task.settings["by_head"])
    if not small and (whole := _unmasked(given, task)) is not None:
        return whole.to(scores.dtype)
    given = given.reshape(-1, queries, keys)
    balanced = task.settings["damping"] is None
    mu = Masses.of(task.log_mu, (batch, heads, queries), given, balanced)
    nu = Masses.of(task.log_nu, (batch, heads, keys), given, balanced)
    share = _share(scores, task).to(dtype)
    out = torch.empty_like(given, memory_format=torch.contiguous_format)
    size = queries * keys * given.element_size()
    per_tile = max(1, TILE_BYTES // (2 * size if small else size))
    offset = None
    if task.stabiliser is not None and task.stabiliser.start == "tensor":
        offset = _largest(given, task.settings["score_multiplier"]) * task.settings["score_multiplier"]
    run = _side_by_side if small else _products if task.stabiliser is None else _stabilised_products

    def work(starts: Iterator[int]) -> None:
        for start in starts:
            part = slice(start, start + per_tile)
            own_share = share if len(share) == 1 else share[part]
            sides = mu.part(part), nu.part(part)
            held = run(given[part], *sides, own_share, task, offset, out[part])
            if task.as_written:
                held = held & _near(given[part], task.settings["score_multiplier"])
            if task.settings["log"]:  # of a share that is 0 or infinite, nothing is left to add
                held = held & own_share.isfinite() & (own_share != 0)
                for lost in (side.lost() for side in sides if small or not balanced):
                    held = held if lost is None else held & ~lost.any(-1)
            if not bool(held.all()):
                which = start + (~held).nonzero().squeeze(1)
                _in_log_domain(given, scores.shape[:2], task, out, which, scores.dtype)

    each_worker(work, range(0, len(given), per_tile))
    return out.view(scores.shape).to(scores.dtype)


def _unmasked(given: Tensor, task: Task) -> Tensor | None:
    """The plan of scores [B, H, N, M] that are all near each other, by one call of the engine: they are a
    bias to queries and keys without features. None where they are not, or marginals are given."""
    loop, stabiliser = task.settings, task.stabiliser
    started = stabiliser is None or native.runs(stabiliser)
    uniform = task.log_mu is None and task.log_nu is None and loop["damping"] is None
    if loop["log"] or not uniform or not started:
        return None
    s = given * loop["score_multiplier"]
    low, high = map(float, s.aminmax())
    if not (high - low <= SAFE_ROW_RANGE[s.dtype] and max(-low, high) <= ROUNDED):
        return None
    side: Side = "row" if task.rows_first else "column"
    run = Loop(1.0, loop["half_steps"], side, loop["output_factor"])
    nothing = s[..., :0], s.mT[..., :0]
    return native.sinkhorn_loop(*nothing, None, None, s, None, run, stabiliser)[0]


@dataclass(frozen=True)
class Masses:
    """One side's marginals [G, X] of every matrix, or [1, X] where all have the same.

    logs: as they were given, None where they are uniform.
    """

    mass: Tensor
    logs: Tensor | None = None

    @classmethod
    def of(cls, logs: Tensor | None, shape: Sequence[int], like: Tensor, balanced: bool) -> Masses:
        """Of total 1 where balanced: the other side's total is gauge, the last side's is put back."""
        tokens = shape[-1]
        if logs is None:
            return cls(like.new_full((1, tokens), 1.0 / tokens))
        logs = logs.to(like.dtype)
        shared = logs.numel() == tokens
        rows = logs.reshape(1, tokens) if shared else logs.broadcast_to(shape).reshape(-1, tokens)
        return cls(torch.softmax(rows, -1) if balanced else rows.exp(), rows)

    def part(self, which: slice) -> Masses:
        if len(self.mass) == 1:
            return self
        return Masses(self.mass[which], None if self.logs is None else self.logs[which])

    def lost(self) -> Tensor | None:
        """Tokens whose mass is too small for its digits, but has a logarithm, as padding's -1e12; None if
        there are none."""
        if self.logs is None:
            return None
        tiny = torch.finfo(self.mass.dtype).tiny
        lost = (self.mass < tiny) & (self.logs > -torch.inf)
        return lost if bool(lost.any()) else None


def _share(scores: Tensor, task: Task) -> Tensor:
    """What a plan whose last side has total 1, or a damped one, is multiplied by: [1], or [G] for every
    matrix."""
    queries, keys = scores.shape[-2:]
    factor = task.factor(queries, keys)
    logs, tokens = (task.log_mu, queries) if task.ends_on_rows else (task.log_nu, keys)
    if logs is None or task.settings["damping"] is not None:
        return scores.new_full((1,), factor, dtype=torch.float64)
    totals = torch.logsumexp(logs.double(), -1).exp() * factor
    shared = logs.numel() == tokens
    return totals.reshape(1) if shared else totals.broadcast_to(scores.shape[:2]).reshape(-1)


def _largest(scores: Tensor, multiplier: float) -> Tensor:
    """Of all scores, the one that is largest once it is multiplied."""
    return scores.amax() if multiplier > 0 else scores.amin()


def _near(given: Tensor, multiplier: float) -> Tensor:
    """Whether no row and no column of scores [G, N, M] is so low, or high, as a whole that its dual loses
    digits that count: [G] bool."""
    low, high = given.aminmax()
    if max(-float(low), float(high)) * abs(multiplier) <= ROUNDED:
        return torch.ones(len(given), dtype=torch.bool)
    s = given * multiplier
    return (s.amax(-1).abs().amax(-1) <= ROUNDED) & (s.amax(-2).abs().amax(-1) <= ROUNDED)


def _in_log_domain(
    given: Tensor, leads: Sequence[int], task: Task, out: Tensor, which: Tensor, dtype: torch.dtype
) -> None:
    """The reference's result of some matrices [g] of `given` [G, N, M], into `out`.  leads: B and H;
    dtype: of the scores, in which a known order of the sums is followed."""
    chosen = given[which][:, None]
    if task.as_written:
        chosen = chosen.to(dtype)
    elif FAR < -float(chosen.masked_fill(chosen.isinf(), 0.0).abs().amax()) < NEAR:
        chosen = chosen.double()  # duals as large as a mask of -1e4 leave no digits to float32

    def own(logs: Tensor | None) -> Tensor | None:
        if logs is None or logs.numel() == logs.shape[-1]:
            return logs
        return logs.broadcast_to(*leads, logs.shape[-1]).reshape(-1, 1, logs.shape[-1])[which]

    settings = task.settings | {"by_head": None}
    if task.stabiliser is not None and task.stabiliser.start == "tensor":
        top = _largest(given, settings["score_multiplier"])
        chosen, settings = chosen - top, settings | {"start": "plain"}
    found = reference.plan(chosen, own(task.log_mu), own(task.log_nu), **settings)
    out[which] = found[:, 0].to(out.dtype)


def _side_by_side(
    given: Tensor, mu: Masses, nu: Masses, share: Tensor, task: Task, offset: Tensor | None, out: Tensor
) -> Tensor:
    """Small matrices [G, N, M] at once, into `out`; which of them the linear domain holds, [G] bool."""
    settings, stabiliser = task.settings, task.stabiliser
    s = (given * settings["score_multiplier"]).permute(1, 2, 0).contiguous()  # [N, M, G]
    if stabiliser is None:
        start = "plain" if settings["damping"] else "row" if task.rows_first else "column"
    else:
        start = stabiliser.start
    if start == "tensor":
        s -= offset
    elif start == "matrix":
        s -= s.amax((0, 1))
    elif start != "plain":  # "softmax" is safe after any offset
        s -= _finite(s.amax(0 if start == "column" else 1, keepdim=True))
    kernel = s.exp()
    a, b = torch.ones_like(kernel[:, 0]), torch.ones_like(kernel[0])
    row_mass, column_mass = mu.mass.t(), nu.mass.t()  # [N, 1 or G], [M, 1 or G]
    if stabiliser is not None:
        if not stabiliser.shares:
            row_mass, column_mass = torch.ones_like(row_mass), torch.ones_like(column_mass)
        if stabiliser.form == "scaling" and stabiliser.start_share:
            a, b = a / len(a), b / len(b)
    native.scale(
        kernel, a, b, row_mass, column_mass, settings["half_steps"], task.rows_first, task.damping,
        native.least(kernel.dtype), stabiliser, beside=True,
    )  # fmt: skip
    if settings["log"]:
        out.copy_((s + a.log()[:, None] + b.log() + torch.log(share)).permute(2, 0, 1))
    else:
        out.copy_((kernel.mul_((a * share)[:, None]).mul_(b)).permute(2, 0, 1))
    low = s.amin((0, 1))
    if stabiliser is not None:
        safe = SAFE_ROW_RANGE[given.dtype]
        return (low >= -safe) & (s.amax((0, 1)) <= safe) & _are_finite(a.t()) & _are_finite(b.t())
    if settings["damping"]:
        return _held_damped(low, s.amax((0, 1)), a.t(), b.t())
    sides = ((a.t(), mu.mass, s.amax(1).t()), (b.t(), nu.mass, s.amax(0).t()))
    return _held(low, *(sides if settings["rows_first"] else sides[::-1]))


def _finite(top: Tensor) -> Tensor:
    """What is subtracted from scores: 0 where all are -inf."""
    return top.masked_fill_(top == -torch.inf, 0.0)


def _lowest(s: Tensor) -> Tensor:
    """The smallest score [G] of matrices [G, N, M] that is not -inf: those are hidden."""
    low = s.amin((-1, -2))
    return s.masked_fill(s == -torch.inf, 0.0).amin((-1, -2)) if bool(low.isneginf().any()) else low


def _are_finite(scaling: Tensor) -> Tensor:
    return scaling.isfinite().all(-1)


def _products(
    given: Tensor, mu: Masses, nu: Masses, share: Tensor, task: Task, _offset: Tensor | None, out: Tensor
) -> Tensor:
    """Matrices [G, N, M] one after the other, into `out`; which of them the linear domain holds, [G]."""
    settings = task.settings
    s = given * settings["score_multiplier"]
    rows_first, half_steps = bool(settings["rows_first"]), settings["half_steps"]
    if not settings["damping"]:
        s -= _finite(s.amax(-1 if rows_first else -2, keepdim=True))
    kernel = torch.exp(s, out=out)
    a, b = torch.ones_like(kernel[:, :, 0]), torch.ones_like(kernel[:, 0])
    native.scale(
        kernel, a, b, mu.mass, nu.mass, half_steps, rows_first, task.damping, native.least(kernel.dtype),
        None, beside=False,
    )  # fmt: skip
    low = s.amin((-1, -2))
    if settings["damping"]:
        held = _held_damped(low, s.amax((-1, -2)), a, b)
    else:
        deep = not bool((low >= -SAFE_ROW_RANGE[low.dtype]).all())  # the largest tell what is lost
        tops = (s.amax(-1), s.amax(-2)) if deep else (None, None)
        sides = ((a, mu.mass, tops[0]), (b, nu.mass, tops[1]))
        held = _held(low, *(sides if rows_first else sides[::-1]))
    share = share[:, None]
    if settings["log"]:
        log_a, log_b = a.log(), b.log()
        if not settings["damping"]:
            closed = half_steps > 1 or rows_first, half_steps > 1 or not rows_first
            log_a, log_b, known = _with_lost(s, log_a, log_b, mu, nu, closed)
            held = held & known
        torch.add(s, (log_a + torch.log(share))[:, :, None], out=out)
        out += log_b[:, None]
    else:
        kernel.mul_((a * share)[:, :, None]).mul_(b[:, None])
    return held


def _with_lost(
    s: Tensor, log_a: Tensor, log_b: Tensor, mu: Masses, nu: Masses, closed: tuple[bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms of the scalings [G, N] and [G, M] with those of tokens whose mass is lost, by a
    half-step in the log domain; and of which matrices they are known, [G or 1] bool.

    A token of -1e12 takes no part in the sums of others. Its own dual is what the last half-step of its
    side gives, up to what the other duals have moved since: nothing, beside 1e12. A side that was not
    closed, of rows and of columns, has none.
    """
    known = torch.ones(1, dtype=torch.bool, device=s.device)
    rows, columns = (side.lost() if done else None for side, done in zip((mu, nu), closed, strict=True))
    if columns is not None:
        assert nu.logs is not None
        log_b = torch.where(columns, nu.logs - (s + log_a[:, :, None]).logsumexp(1), log_b)
        known = known & ~(columns & ((nu.logs > FAR) | ~log_b.isfinite())).any(-1)
    if rows is not None:
        assert mu.logs is not None
        log_a = torch.where(rows, mu.logs - (s + log_b[:, None]).logsumexp(2), log_a)
        known = known & ~(rows & ((mu.logs > FAR) | ~log_a.isfinite())).any(-1)
    return log_a, log_b, known


def _stabilised_products(
    given: Tensor, mu: Masses, nu: Masses, share: Tensor, task: Task, offset: Tensor | None, out: Tensor
) -> Tensor:
    """The same with a constant in the divisions."""
    settings, stabiliser = task.settings, task.stabiliser
    assert stabiliser is not None
    s = given * settings["score_multiplier"]
    if stabiliser.start == "tensor":
        s -= offset
    elif stabiliser.start == "matrix":
        s -= s.amax((-1, -2), keepdim=True)
    elif stabiliser.start != "plain":
        s -= _finite(s.amax(-1, keepdim=True))
    kernel = torch.exp(s, out=out)
    a, b = torch.ones_like(kernel[:, :, 0]), torch.ones_like(kernel[:, 0])
    rows, columns = (x if stabiliser.shares else torch.ones_like(x) for x in (mu.mass, nu.mass))
    if stabiliser.form == "scaling" and stabiliser.start_share:
        a, b = a / a.shape[-1], b / b.shape[-1]
    native.scale(
        kernel, a, b, rows, columns, settings["half_steps"], task.rows_first, task.damping, 0.0,
        stabiliser, beside=False,
    )  # fmt: skip
    safe = SAFE_ROW_RANGE[given.dtype]
    held = (_lowest(s) >= -safe) & (s.amax((-1, -2)) <= safe)
    held &= _are_finite(a) & _are_finite(b)
    scaled = (a * share[:, None])[:, :, None]
    if settings["log"]:
        torch.add(s, scaled.log(), out=out)
        out += b.log()[:, None]
    else:
        kernel.mul_(scaled).mul_(b[:, None])
    return held


Closed = tuple[Tensor, Tensor, Tensor | None]
"""Scaling [G, X], masses [G or 1, X], the largest log K of every token [G, X]; None where no log K of any
matrix is below the safe range."""


def _held(low: Tensor, first: Closed, second: Closed) -> Tensor:
    """Which matrices the linear domain holds, [G] bool. Tokens without mass, or all of whose scores are
    -inf, are absent.

    low: [G], the smallest log K; first: of the side that is closed first, whose largest log K are 0.

    What has left the format is below 1e-38. Of a token of the first side, whose sum has a term K = 1,
    that is nothing while the other side's scalings spread less than the range; of the second side, whose
    largest K are at least exp(-safe), while those of the first spread less than what is left of it.
    """
    safe = SAFE_ROW_RANGE[low.dtype]
    (a, mass, first_tops), (b, other_mass, tops) = first, second
    if first_tops is None or tops is None:
        return _divided(a, mass, mass == 0) & _divided(b, other_mass, other_mass == 0)
    absent = (mass == 0) | (first_tops == -torch.inf)
    other_absent = (other_mass == 0) | (tops == -torch.inf)
    finite = _divided(a, mass, absent) & _divided(b, other_mass, other_absent)
    top = tops.masked_fill(other_absent, 0.0).amin(-1)
    spread = (_spread(a, absent) <= SPREAD * safe) & (_spread(b, other_absent) <= safe)
    return finite & ((low >= -safe) | ((top >= -safe) & spread))


def _held_damped(low: Tensor, high: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Which matrices with scores between low and high [G] the linear domain holds with these scalings
    [G, N] and [G, M]: no product of three numbers may leave the format."""
    bound = 2 * SAFE_ROW_RANGE[low.dtype] / 3
    held = (low >= -bound) & (high <= bound)
    for scaling in (a, b):
        logs = scaling.log()
        held &= ((logs.abs() <= bound) | (scaling == 0)).all(-1)
    return held


def _divided(scaling: Tensor, mass: Tensor, absent: Tensor) -> Tensor:
    """Whether all tokens that are not absent were divided by what they sum to: [G]."""
    return (absent | (scaling < mass / (2 * native.least(scaling.dtype)))).all(-1)


def _spread(scaling: Tensor, absent: Tensor) -> Tensor:
    """log of the largest over the smallest scaling of tokens that are not absent: [G]."""
    logs = scaling.log()
    absent = absent.expand_as(logs)
    return logs.masked_fill(absent, -torch.inf).amax(-1) - logs.masked_fill(absent, torch.inf).amin(-1)
