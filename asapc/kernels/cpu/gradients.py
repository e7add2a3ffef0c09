"""Gradients of the finite loop on a CPU: O(T (N + M)) memory, one exponential an entry where K fits.

The plans of all half-steps are one matrix K with its rows and columns scaled, the transport orbit of the
block-wise paper (Proposition 6). With a and b the scalings around a half-step and x the gradient of the
dual that it makes,

    rows closed     dL/dS_ij = -x_i a_i K_ij b_j         columns closed    dL/dS_ij = -y_j a_i K_ij b_j
    applied         dL/dS_ij = <dout_i, v_j> a_i K_ij b_j

so that the slopes of all of them are K times one product of rank T + E, formed in the last visit of K's
blocks. The chain of the duals' gradients before it (Proposition 1) takes two products with K a pair of
half-steps, in one visit. Nothing of size N M is kept but K, and that only up to `resident_bytes`.

The chain may stop early, see kernels.loop.Tail.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asapc.kernels.cpu.workers import each_worker
from asapc.kernels.loop import Gradients, Loop, Tail, precision
from asapc.kernels.thresholds import Thresholds, thresholds
from asapc.operators.asap import asap
from asapc.operators.sinkhorn import factor_value, sinkhorn


@dataclass(frozen=True)
class _Heads:
    """Some heads' inputs.  q: [G, N, D], times the score multiplier; k: [G, M, D]; v: [G, M, E];
    grad: [G, N, E]; factor: [G, 1, 1]; start: [G, N] or [G, M]; keep: [G, M]; bias: [G, N, M]."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    factor: Tensor
    start: Tensor | None
    keep: Tensor | None
    bias: Tensor | None = None

    def part(self, heads: slice) -> _Heads:
        return replace(self, **{name: x[heads] for name, x in vars(self).items() if x is not None})

    def double(self) -> _Heads:
        wide = {name: x.double() for name, x in vars(self).items() if x is not None and name != "keep"}
        return replace(self, **wide)


def sinkhorn_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None,
    dual: Tensor | None, loop: Loop, tail: Tail,
) -> Gradients:  # fmt: skip
    """Gradients for `sinkhorn_loop`, whose arguments these are besides grad_out [B, H, N, E] and tail.

    At least one half-step; every example has an active key.
    """
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    count, depth = batch * heads, torch.zeros((batch, heads), dtype=torch.int64)
    given = [x for x in (q, k, v, dual) if x is not None]
    if count * queries * keys == 0:
        dq, dk, dv, *rest = (x.new_zeros(x.shape) for x in given)
        return Gradients(dq, dk, dv, rest[0] if rest else None, depth)
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    limits = thresholds()
    factor = torch.as_tensor(factor_value(loop.output_factor, queries, keys, keep), dtype=work)

    def flat(x: Tensor) -> Tensor:
        return x.to(work).flatten(0, 1)

    whole = _Heads(
        flat(q) * loop.score_multiplier, flat(k), flat(v), flat(grad_out),
        flat(factor.expand(batch, heads, 1, 1)), None if dual is None else flat(dual),
        None if keep is None else keep.repeat_interleave(heads, 0),
    )  # fmt: skip
    full_bias = None if bias is None else bias.expand(batch, heads, queries, keys)
    bound = _range_bound(whole, loop, bias)
    outs = [torch.zeros(x.shape, dtype=work) for x in given]
    per_group = max(1, limits.tile_bytes // (queries * keys * work.itemsize))
    rounds = math.ceil(count / (per_group * torch.get_num_threads()))
    per_group = math.ceil(count / (rounds * torch.get_num_threads()))

    def work_on(starts: Iterator[int]) -> None:
        for first in starts:
            part = slice(first, min(first + per_group, count))
            inputs, numbers = whole.part(part), torch.arange(part.start, part.stop)
            if full_bias is not None:  # which is not copied for all heads that share it
                inputs = replace(inputs, bias=full_bias[numbers // heads, numbers % heads].to(work))
            found = _group(inputs, loop, tail, limits, bound)
            gradients = [x for x in found[:4] if x is not None]
            for out, gradient in zip(outs, gradients, strict=True):
                out.flatten(0, 1)[part] = gradient
            outs[0].flatten(0, 1)[part] *= loop.score_multiplier
            depth.view(-1)[part] = found.depth

    each_worker(work_on, range(0, count, per_group))
    dq, dk, dv, *rest = (out.to(x.dtype) for out, x in zip(outs, given, strict=True))
    return Gradients(dq, dk, dv, rest[0] if rest else None, depth)


def _range_bound(inputs: _Heads, loop: Loop, bias: Tensor | None) -> float:
    """Upper bound of a row's range of scores, by Cauchy-Schwarz; infinite where only scores tell."""
    if bias is not None or (inputs.start is not None and loop.first_side == "row"):
        return math.inf
    return 2.0 * float((inputs.q.norm(dim=-1).amax(-1) * inputs.k.norm(dim=-1).amax(-1)).max())


def _group(inputs: _Heads, loop: Loop, tail: Tail, limits: Thresholds, bound: float) -> Gradients:
    kernel = _Kernel(inputs, loop.first_side == "row", limits)
    if precision(bound, inputs.q.dtype) is not inputs.q.dtype:
        needed = precision(kernel.shift(), inputs.q.dtype)
        if needed is None:
            return _by_autograd(inputs.double(), loop, tail)
        if needed is not inputs.q.dtype:
            inputs = inputs.double()
            kernel = _Kernel(inputs, loop.first_side == "row", limits)
            kernel.shift()
    return _Chain(inputs, kernel, loop).gradients(tail)


class _Kernel:
    """K = exp(S - row maximum) [G, N, M], 0 on masked keys, by blocks of rows: kept where it fits, formed
    again at every visit where it does not."""

    def __init__(self, inputs: _Heads, keys_from_start: bool, limits: Thresholds) -> None:
        q, k = inputs.q, inputs.k
        groups, queries, keys = len(q), q.shape[1], k.shape[1]
        size = groups * keys * k.element_size()
        self.block = max(1, limits.tile_bytes // size)
        self.inputs = inputs
        self.transposed = k.transpose(1, 2)
        self.added = inputs.start[:, None] if keys_from_start and inputs.start is not None else None
        self.masked = None if inputs.keep is None else ~inputs.keep[:, None]
        self.top: Tensor | None = None
        self.fits = queries * size <= max(limits.resident_bytes, limits.tile_bytes)
        self.kept: list[Tensor] = []
        self.buffer = q.new_empty(0)

    def _scores(self, rows: slice) -> Tensor:
        q = self.inputs.q[:, rows]
        size = len(q) * q.shape[1] * self.transposed.shape[2]
        if self.fits:
            out = q.new_empty((len(q), q.shape[1], self.transposed.shape[2]))
        else:
            if self.buffer.numel() < size:
                self.buffer = q.new_empty(size)
            out = self.buffer[:size].view(len(q), q.shape[1], -1)
        torch.bmm(q, self.transposed, out=out)
        if self.added is not None:
            out += self.added
        if self.inputs.bias is not None:
            out += self.inputs.bias[:, rows]
        return out

    def shift(self) -> float:
        """Take the maximum from every row; the widest range of a row's scores."""
        tops, widest = [], 0.0
        for rows in self._parts():
            scores = self._scores(rows)
            low = scores
            if self.masked is not None:
                low = scores.masked_fill(self.masked, math.inf)
                scores.masked_fill_(self.masked, -math.inf)
            top = scores.amax(-1, keepdim=True)
            reach = top - low.amin(-1, keepdim=True)
            widest = max(widest, float(reach.masked_fill(top.isneginf(), 0.0).max()))
            tops.append(top.clamp_(min=torch.finfo(top.dtype).min))  # of a row that sees no key
        self.top = torch.cat(tops, 1)
        return widest

    def _parts(self) -> Iterator[slice]:
        queries = self.inputs.q.shape[1]
        return (slice(i, min(i + self.block, queries)) for i in range(0, queries, self.block))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows and K there [G, rows, M]; where K is not kept, valid until the next."""
        for number, rows in enumerate(self._parts()):
            if number < len(self.kept):
                yield rows, self.kept[number]
                continue
            scores = self._scores(rows)
            if self.top is not None:
                scores -= self.top[:, rows]
            if self.masked is not None:
                scores.masked_fill_(self.masked, -math.inf)
            scores.exp_()
            if self.fits:
                self.kept.append(scores)
            yield rows, scores


class _Chain:
    """The half-steps of some heads, forward with all their scalings kept, and back again.

    a: [G, N, 1] and b: [G, 1, M] are kept for every half-step. Rows are closed to 1 and columns to
    N / n, the rows' total shared out, so that the scalings do not drift; N counts the rows that a bias
    leaves a key, and a is 0 on the others.
    """

    def __init__(self, inputs: _Heads, kernel: _Kernel, loop: Loop) -> None:
        self.inputs, self.kernel, self.loop = inputs, kernel, loop
        q, k = inputs.q, inputs.k
        rows_first = loop.first_side == "row"
        self.row_steps = [(step % 2 == 0) == rows_first for step in range(loop.half_steps)]
        active = k.new_full((len(k), 1, 1), k.shape[1])
        self.absent: Tensor | None = None
        if inputs.keep is not None:
            active = inputs.keep.sum(-1, dtype=k.dtype)[:, None, None]
            self.absent = ~inputs.keep[:, None]
        self.blank: Tensor | None = None
        seen: Tensor | float = q.shape[1]
        if kernel.top is not None:
            self.blank = kernel.top == torch.finfo(q.dtype).min
            seen = (q.shape[1] - self.blank.sum(1, keepdim=True)).clamp_(min=1)
        self.active, self.share = active, seen / active
        mass = 1 / q.shape[1] if loop.ends_on_rows else 1 / (k.shape[1] * self.share)
        self.scale = inputs.factor * mass  # of a K b, to make the map
        log_a = q.new_zeros((len(q), q.shape[1], 1)) if kernel.top is None else kernel.top
        if inputs.start is not None and not rows_first:
            log_a = log_a + inputs.start[..., None]
        self.a = [(log_a - log_a.amax(1, keepdim=True)).exp_()]  # f, in K's units and up to a gauge
        self.b = [k.new_ones((len(k), 1, k.shape[1]))]

    def gradients(self, tail: Tail) -> Gradients:
        last = len(self.row_steps) - 1
        step = 0
        while step < last or (step == last and not self.row_steps[step]):
            step = self._visit_forward(step)
        eta_a, eta_b, dv, allowed = self._apply(tail)
        left: list[Tensor] = []  # the slopes of the half-steps are K times sum_t left_t right_t
        right: list[Tensor] = []
        a, b = list(self.a), list(self.b)
        half_steps = len(self.row_steps)
        depth, most = 0, min(tail.most, half_steps)
        while depth < most:
            if self.row_steps[last - depth]:
                left.append(-eta_a * a.pop())
                right.append(b[-1])
                eta_b = self._without_gauge(eta_b + b[-1] * self._columns(left[-1]))
                eta_a = torch.zeros_like(eta_a)
                depth += 1
            else:
                left.append(a[-1])
                right.append(-eta_b * b.pop() / self.share)
                pair = depth + 1 < min(most, half_steps)
                eta_a, total = self._visit_back(eta_a, a[-1], right[-1], pair)
                eta_b = torch.zeros_like(eta_b)
                depth += 1
                if pair:
                    left.append(-eta_a * a.pop())
                    right.append(b[-1])
                    eta_a, eta_b = torch.zeros_like(eta_a), self._without_gauge(b[-1] * total)
                    depth += 1
                else:
                    eta_a = eta_a - eta_a.sum(1, keepdim=True) / (self.active * self.share)
                    eta_a = eta_a if self.blank is None else eta_a.masked_fill(self.blank, 0.0)
            if tail.tolerance > 0 and depth < most:
                pending = eta_a.abs().sum((1, 2)) + eta_b.abs().sum((1, 2))
                if bool(((half_steps - depth) * pending <= allowed).all()):
                    break
        dq, dk = self._slopes(left, right)
        start = None
        if self.inputs.start is not None:
            start = eta_b[:, 0] if self.loop.first_side == "row" else eta_a[..., 0]
        return Gradients(dq, dk, dv, start, torch.full((len(dq),), depth))

    def _without_gauge(self, eta_b: Tensor) -> Tensor:
        """The keys' gradient without what rounding made of its sum, which is 0, as a constant that is
        added to a dual is taken from the next one: it would not fade along the chain as the rest does."""
        off = eta_b.sum(2, keepdim=True) / self.active
        return eta_b - (off if self.absent is None else off.masked_fill(self.absent, 0.0))

    def _closing(self, kernel: Tensor, rows: slice) -> Tensor:
        """a of some rows."""
        total = torch.bmm(kernel, self.b[-1].transpose(1, 2))
        if self.blank is not None:
            total.masked_fill_(self.blank[:, rows], math.inf)
        return total.reciprocal_()

    def _visit_forward(self, step: int) -> int:
        """The half-step, and the one after it if that closes columns; the next one's number."""
        closes_rows = self.row_steps[step]
        a = torch.empty_like(self.a[-1]) if closes_rows else self.a[-1]
        total = torch.zeros_like(self.b[-1])
        for rows, kernel in self.kernel.blocks():
            if closes_rows:
                a[:, rows] = self._closing(kernel, rows)
            total.baddbmm_(a[:, rows].transpose(1, 2), kernel)
        if closes_rows:
            self.a.append(a)
        if self.absent is not None:
            total.masked_fill_(self.absent, 1.0)
        if self.blank is not None:
            total.masked_fill_(total == 0, 1.0)  # of a key that no query sees
        self.b.append(total.reciprocal_().mul_(self.share))
        return step + (2 if closes_rows else 1)

    def _apply(self, tail: Tail) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The map's own part: gradients of log a and log b, dv, and what a tail may leave out [G]. Closes
        the rows, where the loop ends on them."""
        grad, v = self.inputs.grad, self.inputs.v
        ends_on_rows = self.row_steps[-1]
        a = torch.empty_like(self.a[-1]) if ends_on_rows else self.a[-1]
        b = self.b[-1]
        column, weighted = b.transpose(1, 2), b.transpose(1, 2) * v
        eta_a = torch.empty_like(a)
        found = torch.zeros_like(v)
        allowed = torch.zeros_like(self.scale[:, 0, 0])
        for rows, kernel in self.kernel.blocks():
            if ends_on_rows:
                a[:, rows] = self._closing(kernel, rows)
            scaled = self.scale * a[:, rows]
            scaled_grad = scaled * grad[:, rows]
            eta_a[:, rows] = (torch.bmm(kernel, weighted) * scaled_grad).sum(-1, keepdim=True)
            found.baddbmm_(kernel.transpose(1, 2), scaled_grad)
            if tail.tolerance > 0:
                products = torch.bmm(grad[:, rows], v.transpose(1, 2))
                allowed += tail.allowed(kernel * scaled * b, products)
        if ends_on_rows:
            self.a.append(a)
        dv = found.mul_(column)
        return eta_a, (dv * v).sum(-1)[:, None], dv, allowed

    def _columns(self, x: Tensor) -> Tensor:
        """K' x [G, 1, M], x: [G, N, 1]."""
        total = torch.zeros_like(self.b[0])
        for rows, kernel in self.kernel.blocks():
            total.baddbmm_(x[:, rows].transpose(1, 2), kernel)
        return total

    def _visit_back(self, eta_a: Tensor, a: Tensor, y: Tensor, pair: bool) -> tuple[Tensor, Tensor]:
        """eta_a + a K y, the gradient that a column half-step adds; and, of the row half-step before it,
        -K' (a eta_a) [G, 1, M], where the `pair` is wanted."""
        eta_a = eta_a.clone()
        total = torch.zeros_like(self.b[0])
        column = y.transpose(1, 2)
        for rows, kernel in self.kernel.blocks():
            eta_a[:, rows] += a[:, rows] * torch.bmm(kernel, column)
            if pair:
                total.baddbmm_((eta_a[:, rows] * a[:, rows]).transpose(1, 2), kernel, alpha=-1)
        return eta_a, total

    def _slopes(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """dq and dk, from the slopes of all half-steps and of the apply."""
        q, k = self.inputs.q, self.inputs.k
        x = torch.cat([*left, self.scale * self.a[-1] * self.inputs.grad], 2)  # [G, N, T + E]
        y = torch.cat([*right, self.b[-1] * self.inputs.v.transpose(1, 2)], 1)  # [G, T + E, M]
        dq, dk = torch.empty_like(q), torch.zeros_like(k)
        for rows, kernel in self.kernel.blocks():
            slopes = torch.bmm(x[:, rows], y).mul_(kernel)
            dq[:, rows] = torch.bmm(slopes, k)
            dk.baddbmm_(slopes.transpose(1, 2), q[:, rows])
        return dq, dk


def _by_autograd(inputs: _Heads, loop: Loop, tail: Tail) -> Gradients:
    """Through the reference, in the log domain: for scores whose exponentials no format holds."""
    bias = None if inputs.bias is None else inputs.bias[:, None]
    given = [inputs.q, inputs.k, inputs.v] + ([] if inputs.start is None else [inputs.start])
    leaves = [x[:, None].detach().requires_grad_() for x in given]
    with torch.enable_grad():
        seen, rows_first = (*leaves[:3], inputs.keep, bias), loop.first_side == "row"
        if inputs.start is None:
            out = sinkhorn(*seen, 1.0, loop.half_steps, rows_first, loop.output_factor, tail.most)
        else:  # whose gradient passes through all half-steps
            duals = (None, leaves[3]) if rows_first else (leaves[3], None)
            out = asap(*seen, *duals, 1.0, loop.half_steps, loop.output_factor)
        found = torch.autograd.grad(
            out, leaves, inputs.grad[:, None], allow_unused=True, materialize_grads=True
        )
    dq, dk, dv, *rest = (x[:, 0] for x in found)
    depth = torch.full((len(dq),), min(tail.most, loop.half_steps))
    return Gradients(dq, dk, dv, rest[0] if rest else None, depth)
