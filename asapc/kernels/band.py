"""The finite loop on a band in plain PyTorch, on any device, and its gradients: what operators.banded
means, in O(T N W) time and O(N (W + T)) memory.

Queries go by blocks of half a window; a block's scores are those of the keys that any of its queries
sees. Gradients run back along the half-steps. With x or y the gradient of the dual that a half-step
makes, and P its plan, of which the closed side sums to 1,

    rows closed     dL/dS_ij = -x_i P_ij, whose columns' sums are added to the gradient of g
    columns closed  dL/dS_ij = -y_j P_ij, whose rows' sums are added to the gradient of f
    applied         dL/dS_ij = A_ij Z_ij,    Z = dout v'

Duals are kept for every half-step and plans formed again from them, in logarithms, which no scores leave.
Source: block-wise paper, Propositions 1 and 5.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from asapc.kernels import native
from asapc.kernels.loop import Gradients, Loop, Tail
from asapc.operators.banded import seen_keys, within
from asapc.operators.sinkhorn import clean_values, factor_value

FEWEST = 16  # queries of a block


def banded(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, loop: Loop, low: int, high: int
) -> Tensor:
    """As operators.banded.banded_sinkhorn."""
    band = _of_heads(q, k, v, keep, loop, low, high)
    if band is None:
        return v.new_zeros(*q.shape[:3], v.shape[3])
    return band.applied().unflatten(0, q.shape[:2]).to(v.dtype)


def banded_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, loop: Loop, low: int,
    high: int, tail: Tail,
) -> Gradients:  # fmt: skip
    """Gradients for `banded`, whose arguments these are besides grad_out [B, H, N, E] and tail: by the
    engine, where it is and holds all heads."""
    given, heads = (q, k, v), q.shape[:2]
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    slopes = [torch.zeros_like(x, dtype=work, memory_format=torch.contiguous_format) for x in given]
    depth = torch.full(heads, -1, device=q.device)
    by_engine = q.is_cpu and native.missing() is None
    if by_engine:
        seen = (grad_out, q, k, v, keep, None, None)
        native.sinkhorn_gradients(*seen, loop, tail, slopes, depth, band=(low, high))
    lost = (depth < 0) & (keep is None or keep.any(-1)[:, None])
    if (not by_engine or bool(lost.any())) and (
        band := _of_heads(q, k, v, keep, loop, low, high)
    ):
        *flat, steps = band.gradients(grad_out.flatten(0, 1), tail)
        slopes, depth = [x.unflatten(0, heads) for x in flat], torch.full_like(depth, steps)
    dq, dk, dv = (x.to(like.dtype) for x, like in zip(slopes, given, strict=True))
    return Gradients(dq, dk, dv, None, depth.clamp(min=0))


def _of_heads(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, loop: Loop, low: int, high: int
) -> _Band | None:
    """Of all heads; None where no query sees a key."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    low, high = within(queries, keys, low, high)
    if low > high or 0 in (batch * heads, queries, keys):
        return None
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    active = seen_keys(q, k, keep, low, high)[:, None].expand(batch, heads, keys)
    ones = q.new_ones((batch, heads, 1, 1), dtype=torch.float64)
    factor = ones * factor_value(loop.output_factor, queries, keys, keep)
    every = (q, clean_values(k, keep), clean_values(v, keep), factor)
    tensors = [x.flatten(0, 1).to(dtype) for x in every]
    return _Band(tensors, active.flatten(0, 1), loop, low, high)


class _Band:
    """Some heads' scores [G, C, S, W], C blocks of S queries that see W keys together, -inf where hidden.

    tensors: q [G, N, D], k [G, M, D], v [G, M, E] and the output factor [G, 1, 1].  active: [G, M], keys
    that some query sees.
    """

    def __init__(self, tensors: list[Tensor], active: Tensor, loop: Loop, low: int, high: int) -> None:
        q, self.k, self.v, self.factor = tensors
        self.queries, self.keys, self.active, self.loop = q.shape[1], self.k.shape[1], active, loop
        self.size = min(self.queries, max(FEWEST, (high - low + 1) // 2))
        blocks, wide = -(-self.queries // self.size), self.size + high - low
        at = torch.arange(blocks, device=q.device)[:, None] * self.size + low
        at = at + torch.arange(wide, device=q.device)
        self.key = at.clamp(0, self.keys - 1).flatten()
        # Where a key is: in the last block whose window begins before it, and in some before that.
        from_low = torch.arange(self.keys, device=q.device)[:, None] - low
        block = from_low // self.size - torch.arange(-(-wide // self.size), device=q.device)
        along = from_low - block * self.size
        self.placed = (block >= 0) & (block < blocks) & (along < wide)
        self.place = torch.where(self.placed, block * wide + along, 0)
        self.shape = (blocks, wide)

        self.q = q * loop.score_multiplier
        apart = torch.arange(wide, device=q.device) - torch.arange(self.size, device=q.device)[:, None]
        within_window = (apart >= 0) & (apart <= high - low)
        keys_here = (at >= 0) & (at < self.keys) & self.windows(active)
        queries_here = self.rows(torch.ones_like(q[:1, :, 0], dtype=torch.bool))
        shown = within_window & queries_here[..., None] & keys_here[:, :, None]
        scores = self.rows(self.q) @ self.windows(self.k).transpose(-1, -2)
        self.scores = scores.masked_fill_(~shown, -math.inf)
        self.seen = shown.any(-1)
        self.log_mass = (-math.log(self.queries), -math.log(self.keys))  # of a query, of a key

    def rows(self, x: Tensor) -> Tensor:
        """[G, N, ..] by blocks of queries, [G, C, S, ..]."""
        padding = self.shape[0] * self.size - self.queries
        return pad(x, (0, 0) * (x.dim() - 2) + (0, padding)).unflatten(1, (self.shape[0], self.size))

    def flat(self, x: Tensor) -> Tensor:
        """The inverse of rows."""
        return x.flatten(1, 2)[:, : self.queries]

    def windows(self, x: Tensor) -> Tensor:
        """[G, M, ..], what blocks see of it, [G, C, W, ..]."""
        return x.index_select(1, self.key).unflatten(1, self.shape)

    def _parts(self, x: Tensor, absent: float) -> Tensor:
        """Every key's entries of the windows [G, C, W, ..], [G, M, the windows that see it, ..]."""
        parts = x.flatten(1, 2)[:, self.place]
        return parts.masked_fill_(~self.placed.view(*self.place.shape, *(1,) * (x.dim() - 3)), absent)

    def sums(self, x: Tensor) -> Tensor:
        """[G, C, W, ..], added up over the blocks that see a key, [G, M, ..]."""
        return self._parts(x, 0.0).sum(2)

    def half_step(self, closes_rows: bool, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """The duals f [G, C, S] and g [G, M] after it, absolute."""
        if closes_rows:
            logs = (self.scores + self.windows(g)[:, :, None]).logsumexp(-1)
            return torch.where(self.seen, self.log_mass[0] - logs, 0.0), g
        logs = self._parts((self.scores + f[..., None]).logsumexp(-2), -math.inf).logsumexp(-1)
        return f, torch.where(self.active, self.log_mass[1] - logs, -math.inf)

    def duals(self) -> list[tuple[bool, Tensor, Tensor]]:
        """Of every half-step: whether it closes rows, and the duals after it. The start comes first."""
        g = torch.zeros_like(self.k[..., 0]).masked_fill_(~self.active, -math.inf)
        every = [(False, self.scores.new_zeros(self.seen.shape), g)]
        for step in range(self.loop.half_steps):
            closes_rows = (step % 2 == 0) == (self.loop.first_side == "row")
            every.append((closes_rows, *self.half_step(closes_rows, *every[-1][1:])))
        return every

    def plan(self, f: Tensor, g: Tensor, log_scale: float = 0.0) -> Tensor:
        return (self.scores + f[..., None]).add_(self.windows(g - log_scale)[:, :, None]).exp_()

    def attention(self, f: Tensor, g: Tensor) -> Tensor:
        return self.plan(f, g).mul_(self.factor[..., None])

    def applied(self) -> Tensor:
        """A v [G, N, E]."""
        _, f, g = self.duals()[-1]
        return self.flat(self.attention(f, g) @ self.windows(self.v))

    def gradients(self, grad: Tensor, tail: Tail) -> tuple[Tensor, Tensor, Tensor, int]:
        """dq, dk, dv, and the half-steps that they passed through.  grad: [G, N, E]."""
        every = self.duals()
        attention = self.attention(*every[-1][1:])
        grads = self.rows(grad.to(attention.dtype))
        products = grads @ self.windows(self.v).transpose(-1, -2)
        dv = self.sums(attention.transpose(-1, -2) @ grads)
        slopes = attention * products
        of_f, of_g = slopes.sum(-1), self.sums(slopes.sum(-2))
        allowed = None if tail.tolerance <= 0 else tail.allowed(attention, products)
        depth, half_steps = 0, self.loop.half_steps
        while depth < min(tail.most, half_steps):
            closes_rows, f, g = every.pop()
            plan = self.plan(f, g, self.log_mass[0 if closes_rows else 1])
            plan.mul_(of_f[..., None] if closes_rows else self.windows(of_g)[:, :, None])
            slopes -= plan
            if closes_rows:
                # Without what rounding made of its sum, which is 0: as a constant that is added to a dual
                # is taken from the next one, it would not fade along the chain as the rest does.
                of_g = of_g - self.sums(plan.sum(-2))
                gauge = of_g.sum(1, keepdim=True) / self.active.sum(1, keepdim=True).clamp(min=1)
                of_g = of_g - gauge.masked_fill(~self.active, 0.0)
                of_f = torch.zeros_like(of_f)
            else:
                of_f, of_g = of_f - plan.sum(-1), torch.zeros_like(of_g)
            depth += 1
            if allowed is not None:
                pending = of_f.abs().sum((1, 2)) + of_g.abs().sum(1)
                if bool(((half_steps - depth) * pending <= allowed).all()):
                    break
        dq = self.flat(slopes @ self.windows(self.k)) * self.loop.score_multiplier
        return dq, self.sums(slopes.transpose(-1, -2) @ self.rows(self.q)), dv, depth
