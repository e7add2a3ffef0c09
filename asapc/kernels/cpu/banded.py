"""CPU twin of operators/banded.py: blocks of queries against the windows of keys that they see.

B queries in a row see B + W - 1 keys, which are a view of the padded keys: the scores of all blocks are
one batched product, [N / B, B, B + W - 1], with the corners outside the band hidden. In the linear domain

    a = 1 / K b        a batched product with b, taken window by window
    b = share / K' a   the transposed product, whose windows are added up where they overlap
    A v = diag(a) K diag(b) v

so that time is O(T N W) and memory O(N (W + B)) a worker. Queries far apart share no keys: scalings may
spread along a sequence as they cannot where everything is seen, and in a window that ends at the query
they do so with every half-step, whatever the scores. So all the sums that divide are recorded, and heads
for which they or K leave what the format holds are computed again with f = log a and g = log b, on the
same blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from asapc.kernels.cpu.workers import SAFE_ROW_RANGE, TILE_BYTES, each_worker
from asapc.kernels.loop import Loop
from asapc.operators.banded import seen_keys
from asapc.operators.sinkhorn import clean_values, factor_value

LEAST_ROWS, MOST_ROWS = 16, 64  # of a block
SUMS = 0.69  # of log of the largest number: how far sums that divide may be from 1
LOST = 0.98  # of it: entries of K above exp(-that) are there in full
EXACT = {torch.float32: 18.0, torch.float64: 38.0}  # exp(-that) is nothing beside 1


@dataclass(frozen=True)
class Layout:
    """Blocks of `rows` queries; that of block r sees the keys from first + r rows on, `width` of them.

    Keys are counted from `first`: those before 0 and after M - 1 are not there.
    """

    queries: int
    keys: int
    low: int
    high: int
    rows: int
    blocks: int
    first: int
    width: int

    @classmethod
    def of(cls, queries: int, keys: int, low: int, high: int) -> Layout:
        low, high = max(low, 1 - queries), min(high, keys - 1)
        reach = max(high - low, 0)
        least = max(1, math.ceil(reach / MOST_ROWS))
        rows = max(LEAST_ROWS, math.ceil(reach / least))
        width = (1 + math.ceil(reach / rows)) * rows
        blocks = math.ceil(queries / rows)
        if blocks * rows * width >= queries * keys:  # one block of everything takes less
            return cls(queries, keys, low, high, queries, 1, 0, keys)
        return cls(queries, keys, low, high, rows, blocks, low, width)

    @property
    def length(self) -> int:
        """Of padded keys."""
        return (self.blocks - 1) * self.rows + self.width

    @property
    def entries(self) -> int:
        """Of K, a head."""
        return self.blocks * self.rows * self.width

    def turned(self) -> Layout:
        """The same band from the side of the keys."""
        return Layout.of(self.keys, self.queries, -self.high, -self.low)

    def padded_queries(self, x: Tensor) -> Tensor:
        """[G, N, D] -> [G, blocks, rows, D]"""
        return pad(x, (0, 0, 0, self.blocks * self.rows - self.queries)).unflatten(1, (self.blocks, -1))

    def padded_keys(self, x: Tensor) -> Tensor:
        """[G, M, D] -> [G, length, D]; keys that no block sees are left out."""
        return pad(x, (0, 0, -self.first, self.first + self.length - self.keys))

    def padded_vector(self, x: Tensor, value: float) -> Tensor:
        """[G, M] -> [G, length]"""
        return pad(x, (-self.first, self.first + self.length - self.keys), value=value)

    def unpadded(self, x: Tensor) -> Tensor:
        """[G, length] -> [G, M], 0 where no block sees a key."""
        return pad(x, (self.first, self.keys - self.length - self.first))

    def windows(self, x: Tensor) -> Tensor:
        """[G, length] -> [G, blocks, width], a view."""
        return x.unfold(1, self.width, self.rows)

    def added_up(self, parts: Tensor, total: Tensor) -> None:
        """Adds windows [G, blocks, width] to total [G, length] where they lie."""
        if self.blocks == 1:
            total += parts[:, 0]
            return
        pieces = parts.unflatten(2, (-1, self.rows))
        by_block = total.unflatten(1, (-1, self.rows))
        for piece in range(self.width // self.rows):
            by_block[:, piece : piece + self.blocks] += pieces[:, :, piece]

    def corners(self, like: Tensor) -> Tensor:
        """[rows, width], -inf outside the band and 0 inside."""
        i = torch.arange(self.rows)[:, None]
        j = self.first + torch.arange(self.width)
        hidden = (j - i < self.low) | (j - i > self.high)
        return like.new_zeros(self.rows, self.width).masked_fill_(hidden, -math.inf)

    def scores(self, scaled_q: Tensor, k: Tensor, out: Tensor | None = None) -> Tensor:
        """[G, blocks, rows, width], not yet hidden anywhere.  scaled_q: [G, N, D]; k: [G, M, D].

        out: [G * blocks, rows, width], into which they are written.
        """
        queries = self.padded_queries(scaled_q).flatten(0, 1)
        windows = self.padded_keys(k).unfold(1, self.width, self.rows)  # [G, blocks, D, width]
        return torch.bmm(queries, _merged(windows), out=out).unflatten(0, (-1, self.blocks))

    def hide(self, scores: Tensor, present: Tensor) -> None:
        """-inf outside the band, and on keys that are not there.  present: [G or 1, length] bool."""
        scores += self.corners(scores)
        absent = self.windows(~present)  # [G or 1, blocks, width]
        some = absent.any(-1).any(0).nonzero().squeeze(1)  # blocks, most often those at the ends alone
        for block in some.tolist():
            scores[:, block].masked_fill_(absent[:, block, None, :], -math.inf)

    def seen(self, present: Tensor) -> Tensor:
        """[G or 1, blocks, rows] bool: queries with a key in their window.  present: [G or 1, length]."""
        counts = pad(present.cumsum(1), (1, 0))
        i = torch.arange(self.blocks * self.rows)
        begin = (i + self.low - self.first).clamp(0, self.length)
        end = (i + self.high + 1 - self.first).clamp(0, self.length)
        some = (counts[:, end] > counts[:, begin]) & (i < self.queries)
        return some.unflatten(1, (self.blocks, -1))


def _merged(x: Tensor) -> Tensor:
    """The first two axes as one; a view where there is one head."""
    return x[0] if len(x) == 1 else x.flatten(0, 1)


def banded_loop(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, loop: Loop, low: int, high: int
) -> Tensor:
    """A v [B, H, N, E].  Shapes as in operators.banded."""
    batch, heads, queries, _ = q.shape
    keys, width = v.shape[2:]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty((batch * heads, queries, width), dtype=dtype)
    layout = Layout.of(queries, keys, low, high)
    if out.numel() == 0 or keys == 0 or layout.low > layout.high:
        return out.zero_().view(batch, heads, queries, width).to(v.dtype)

    def rows(tensor: Tensor) -> Tensor:  # [B, H, X, Y] -> [B*H, X, Y]
        return tensor.to(dtype).reshape(batch * heads, tensor.shape[2], tensor.shape[3])

    scaled_q = rows(q) * loop.score_multiplier
    flat_k, flat_v = (rows(clean_values(x, keep)) for x in (k, v))
    # Of every example; [1, M] where nothing is masked.
    active = seen_keys(queries, keys, low, high, q).expand(1 if keep is None else batch, keys)
    active = active if keep is None else active & keep
    factor = factor_value(loop.output_factor, queries, keys, keep)
    mass = 1.0 / (queries if loop.ends_on_rows else keys)
    per_tile = max(1, TILE_BYTES // (layout.entries * out.element_size()))

    bounded = 2.0 * _reach(scaled_q, flat_k) <= SAFE_ROW_RANGE[dtype]

    def work(starts: Iterator[int]) -> None:
        # One buffer for all tiles: fresh pages for each would cost as much as the exponentials.
        buffer = out.new_empty(per_tile * layout.blocks, layout.rows, layout.width)
        for start in starts:
            part = slice(start, min(start + per_tile, batch * heads))
            example = torch.arange(part.start, part.stop) // heads
            here = active if keep is None else active[example]
            tensors = scaled_q[part], flat_k[part], flat_v[part]
            held = _linear(layout, *tensors, here, loop, bounded, buffer, out[part])
            for head in (~held).nonzero().flatten().tolist():
                one = slice(head, head + 1)
                head_q, head_k, head_v = (x[one] for x in tensors)
                head_active = here if keep is None else here[one]
                _in_log_domain(layout, head_q, head_k, head_v, head_active, loop, out[part][one])
            scale = mass * factor
            if isinstance(scale, Tensor):
                scale = scale.to(dtype).reshape(batch)[example, None, None]
            out[part] *= scale

    each_worker(work, range(0, batch * heads, per_tile))
    return out.view(batch, heads, queries, width).to(v.dtype)


def _reach(scaled_q: Tensor, k: Tensor) -> float:
    """Upper bound of |S| by Cauchy-Schwarz."""
    return float((scaled_q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1)).amax())


def _linear(
    layout: Layout,
    scaled_q: Tensor,
    k: Tensor,
    v: Tensor,
    active: Tensor,
    loop: Loop,
    bounded: bool,
    buffer: Tensor,
    out: Tensor,
) -> Tensor:
    """Heads [G, N, *] at once, into `out`, with mass 1 on each token of the last side; which of them the
    linear domain holds, [G] bool.

    active: [G or 1, M]; bounded: exp(S) is known to be safe; buffer: [>= G * blocks, rows, width].
    """
    groups = len(scaled_q)
    present = layout.padded_vector(active, False)
    seen = layout.seen(present)
    kernel = layout.scores(scaled_q, k, buffer[: groups * layout.blocks])
    if bounded:
        layout.hide(kernel, present)
        top = lowest = kernel.new_zeros(())
    else:
        lowest = kernel.amin(-1)
        layout.hide(kernel, present)
        top = kernel.amax(-1)
        top.masked_fill_(~top.isfinite(), 0.0)
        kernel.sub_(top[..., None])
        lowest = (lowest - top).amin((1, 2))  # also of what is hidden: no larger than the least of K
    kernel.exp_()
    merged = kernel.flatten(0, 1)
    # Rows are closed to 1, and columns so that both totals are the same, which keeps the gauge. What has
    # no partner is divided by 1 and has mass 0.
    row_mass, absent_rows = (x.to(kernel.dtype).flatten(1) for x in (seen, ~seen))
    share = row_mass.sum(1, keepdim=True).clamp(min=1) / present.sum(1, keepdim=True).clamp(min=1)
    column_mass, absent = present * share, (~present).to(kernel.dtype)
    a = row_mass.expand(groups, -1).clone()  # duals of zero; what fills the last block has no mass
    if not bounded:
        a *= (top - top.amax((1, 2), keepdim=True)).exp_().flatten(1)
    b = torch.ones(groups, layout.length, dtype=kernel.dtype)
    gathered = torch.empty(groups, layout.blocks, layout.width, dtype=kernel.dtype)
    column, row = gathered.flatten(0, 1)[:, :, None], a.view(-1, 1, layout.rows)
    sums = torch.empty(groups * layout.blocks, layout.rows, 1, dtype=kernel.dtype)
    parts = torch.empty(groups * layout.blocks, 1, layout.width, dtype=kernel.dtype)
    total = torch.empty_like(b)
    windows, flat_sums = layout.windows(b), sums.view(groups, -1)
    by_window = parts.view(groups, layout.blocks, layout.width)
    seen_sums = []
    rows_turn = loop.first_side == "row"
    for _ in range(loop.half_steps):
        if rows_turn:
            gathered.copy_(windows)
            torch.bmm(merged, column, out=sums)
            flat_sums += absent_rows
            torch.div(row_mass, flat_sums, out=a)
            seen_sums.append(torch.aminmax(flat_sums, dim=1))
        else:
            torch.bmm(row, merged, out=parts)
            total.copy_(absent.expand_as(total))
            layout.added_up(by_window, total)
            torch.div(column_mass, total, out=b)
            seen_sums.append(torch.aminmax(total, dim=1))
        rows_turn = not rows_turn
    scaled_a = (a if loop.ends_on_rows else a / share).reshape(-1, layout.rows, 1)
    _applied(layout, merged, v * layout.unpadded(b)[:, :, None], out)
    out *= scaled_a.view(groups, -1)[:, : layout.queries, None]
    least = torch.stack([x.min for x in seen_sums]).amin(0)
    most = torch.stack([x.max for x in seen_sums]).amax(0)
    return _held(lowest, least, most, layout)


def _held(lowest: Tensor, least: Tensor, most: Tensor, layout: Layout) -> Tensor:
    """Which heads the linear domain holds, [G] bool.

    lowest: of log K; least, most: of the sums that were divided by. A product K b below the format is
    nothing beside a sum within SUMS. An entry of K that has left the format counts where it meets a
    scaling, about 1 / least at most, that is larger than what it is lost by.
    """
    end = math.log(torch.finfo(lowest.dtype).max)
    within = (least.log() >= -SUMS * end) & (most.log() <= SUMS * end)  # false for NaN
    tokens = math.log(layout.rows * layout.width)
    beside = -least.log().clamp(max=0.0) + tokens - end <= least.log() - EXACT[lowest.dtype]
    return within & ((lowest >= -LOST * end) | beside)


def _in_log_domain(
    layout: Layout, scaled_q: Tensor, k: Tensor, v: Tensor, active: Tensor, loop: Loop, out: Tensor
) -> None:
    """One head [1, N, *] into `out`, as _linear: f and g on scores by blocks of queries and of keys."""
    turned = layout.turned()
    present = layout.padded_vector(active, False)
    scores = layout.scores(scaled_q, k)
    layout.hide(scores, present)
    of_keys = turned.scores(k, scaled_q)
    every_query = torch.ones(1, layout.queries, dtype=torch.bool)
    turned.hide(of_keys, turned.padded_vector(every_query, False))
    share = layout.seen(present).sum().clamp(min=1) / present.sum().clamp(min=1)
    log_share = share.log().to(scores.dtype)
    f = scores.new_zeros(1, layout.queries)
    g = scores.new_zeros(1, layout.keys).masked_fill_(~active, -math.inf)
    rows_turn = loop.first_side == "row"
    for _ in range(loop.half_steps):
        if rows_turn:
            total = _log_sums(layout, scores, g)
            f = torch.where(total.isneginf(), 0.0, -total)
        else:
            g = torch.where(active, log_share - _log_sums(turned, of_keys, f), -math.inf)
        rows_turn = not rows_turn
    if not loop.ends_on_rows:
        f = f - log_share
    plan = scores + layout.windows(layout.padded_vector(g, -math.inf))[:, :, None]
    plan += layout.padded_queries(f[:, :, None])
    _applied(layout, plan.exp_().flatten(0, 1), v, out)


def _log_sums(layout: Layout, scores: Tensor, dual: Tensor) -> Tensor:
    """logsumexp_j(S_ij + dual_j) [1, N] of scores by blocks and a dual [1, M]."""
    seen = layout.windows(layout.padded_vector(dual, 0.0))
    return torch.logsumexp(scores + seen[:, :, None], -1).flatten(1)[:, : layout.queries]


def _applied(layout: Layout, plan: Tensor, v: Tensor, out: Tensor) -> None:
    """Plans by blocks [G * blocks, rows, width] times values [G, M, E], into `out`."""
    windows = layout.padded_keys(v).unfold(1, layout.width, layout.rows)  # [G, blocks, E, width]
    made = torch.bmm(plan, _merged(windows).transpose(1, 2))
    out.copy_(made.unflatten(0, (len(out), -1)).flatten(1, 2)[:, : layout.queries])
