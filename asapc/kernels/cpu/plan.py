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
    def work(starts: Iterator[int]) -> None:
        for start in starts:
            part = slice(start, start + per_tile)
            own_share = share if len(share) == 1 else share[part]
            sides = mu.part(part), nu.part(part)
            held = _scaled(given[part], *sides, own_share, task, offset, out[part])
            if task.as_written:
                held = held & _near(given[part], task.settings["score_multiplier"])
            if task.settings["log"]:  # of a share that is 0 or infinite, nothing is left to add
                held = held & own_share.isfinite() & (own_share != 0)
                for lost in (side.lost() for side in sides if not balanced):
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


def _scaled(
    given: Tensor, mu: Masses, nu: Masses, share: Tensor, task: Task, offset: Tensor | None, out: Tensor
) -> Tensor:
    """Matrices [G, N, M] at once, into `out`; which of them the linear domain holds, [G] bool."""
    settings, stabiliser, (groups, *sizes) = task.settings, task.stabiliser, given.shape
    rows_first, half_steps = task.rows_first, settings["half_steps"]
    beside = is_small(given)
    s = given * settings["score_multiplier"]
    if beside:  # as before, and in memory with the matrix as the last axis
        s = s.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    s -= _top(s, task, offset)
    kernel = s.exp() if beside else torch.exp(s, out=out)
    a, b = (given.new_ones(groups, n) if not beside else given.new_ones(n, groups).t() for n in sizes)
    masses = mu.mass, nu.mass
    if stabiliser is not None and not stabiliser.shares:
        masses = torch.ones_like(mu.mass), torch.ones_like(nu.mass)
    if stabiliser is not None and stabiliser.form == "scaling" and stabiliser.start_share:
        a, b = a.div_(sizes[0]), b.div_(sizes[1])
    native.scale(
        kernel, a, b, *masses, half_steps, rows_first, task.damping, native.least(kernel.dtype),
        stabiliser, beside,
    )  # fmt: skip
    held = _held(s, (a, mu.mass), (b, nu.mass), task)
    if settings["log"]:
        log_a, log_b = a.log(), b.log()
        if settings["damping"] is None:
            closed = half_steps > 1 or rows_first, half_steps > 1 or not rows_first
            log_a, log_b, known = _with_lost(s, log_a, log_b, mu, nu, closed)
            held = held & known
        torch.add(s, (log_a + torch.log(share)[:, None])[:, :, None], out=out)
        out += log_b[:, None]
    else:
        torch.mul(kernel, (a * share[:, None])[:, :, None], out=out).mul_(b[:, None])
    return held


def _top(s: Tensor, task: Task, offset: Tensor | None) -> Tensor | float:
    """What is subtracted from scores [G, N, M]; 0 from those that are all -inf."""
    if task.stabiliser is not None:
        start: str = task.stabiliser.start
    else:
        start = "plain" if task.settings["damping"] else "row" if task.rows_first else "column"
    if start == "tensor":
        assert offset is not None
        return offset
    if start == "plain":
        return 0.0
    # "softmax" is safe after any offset.
    top = s.amax((1, 2) if start == "matrix" else 1 if start == "column" else 2, keepdim=True)
    return top.masked_fill_(top == -torch.inf, 0.0)


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


Scaled = tuple[Tensor, Tensor]
"""A side's scalings [G, X] and masses [G or 1, X]."""


def _held(s: Tensor, rows: Scaled, columns: Scaled, task: Task) -> Tensor:
    """Which matrices with log K = s [G, N, M] the linear domain holds with these scalings, [G] bool."""
    low, safe = s.amin((1, 2)), SAFE_ROW_RANGE[s.dtype]
    if task.stabiliser is not None:
        hidden = bool(low.isneginf().any())
        low = s.masked_fill(s == -torch.inf, 0.0).amin((1, 2)) if hidden else low
        finite = rows[0].isfinite().all(-1) & columns[0].isfinite().all(-1)
        return finite & (low >= -safe) & (s.amax((1, 2)) <= safe)
    if task.settings["damping"]:
        return _held_damped(low, s.amax((1, 2)), rows[0], columns[0])
    tops: tuple[Tensor | None, Tensor | None] = (None, None)
    if not bool((low >= -safe).all()):  # the largest tell what is lost
        tops = s.amax(2), s.amax(1)
    sides = (*rows, tops[0]), (*columns, tops[1])
    return _held_balanced(low, *(sides if task.rows_first else sides[::-1]))


Closed = tuple[Tensor, Tensor, Tensor | None]
"""Scaling [G, X], masses [G or 1, X], the largest log K of every token [G, X]; None where no log K of any
matrix is below the safe range."""


def _held_balanced(low: Tensor, first: Closed, second: Closed) -> Tensor:
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
