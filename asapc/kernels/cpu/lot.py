"""CPU twin of operators/lot.py: both loops in the linear domain, N x R numbers of one head at a time.

K = exp(S) [N, R] is formed once per side of a head; a sweep over its blocks, which stay in cache, does a
half-step of the tokens, the half-step of the pivots after it and, the last time, the product with the
values. Padded tokens are left out. Heads too small to fill the cache are stacked into one tile, those of
several examples with their padded tokens, as zeros; torch's own threads share each operation.

What a loop runs in is decided by its scores before they are exponentiated: float32 as they are, float32
less each token's largest, the same in float64, and beyond that the log domain of the reference; pivots
of little mass, by which the scalings are divided, leave less room for the scores. Extra memory is one K
and one row of scalings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from asapc.kernels.cpu.workers import SAFE_ROW_RANGE, each_worker
from asapc.kernels.thresholds import thresholds
from asapc.operators import lot as reference

SHORT = 1 << 16  # entries of all plans times half-steps: up to here few calls take less than tiles
FEW = 6  # half-steps, too, up to which they do
LEAST_MASS = 1e-30  # of a pivot, by which float32 can be divided
SPARE_RANGE = 8.0  # a mass of exp(-8) fits beside scores of the whole SAFE_ROW_RANGE

# The tokens of an example that take part: all (None), the first so many, or those at these places.
Chosen = int | Tensor | None


@dataclass(frozen=True)
class Side:
    """One of the two loops, of all heads.  x: [B, H, N, D] tokens; keep: [B, N]; bias: [B, H, N, 1|R].

    z: [H, D, R], the pivots times the score multiplier; sigma: [H, 1, R].
    """

    x: Tensor
    keep: Tensor | None
    bias: Tensor | None
    z: Tensor
    sigma: Tensor
    half_steps: int
    tokens_first: bool


@dataclass(frozen=True)
class Tile:
    """The same of G heads.  x: [G, N, D]; absent: [G, 1, N], 1 on padded tokens; bias: [G, N, 1|R].

    z: [G, D, R]; sigma: [G, 1, R]; count: [G, 1, 1] or [1, 1, 1], the tokens that take part.
    """

    x: Tensor
    absent: Tensor | None
    bias: Tensor | None
    z: Tensor
    sigma: Tensor
    count: Tensor
    half_steps: int
    tokens_first: bool


@dataclass(frozen=True)
class Block:
    """Some tokens of a tile, views made once: each takes the interpreter as long as an operator does.

    x: [G, n, D]; bias: [G, n, 1|R]; absent, a: [G, 1, n]; kernel: [G, n, R]; values, out: [G, n, E].
    """

    x: Tensor
    bias: Tensor | None
    absent: Tensor | None
    kernel: Tensor
    a: Tensor
    values: Tensor | None
    out: Tensor | None

    def form_scores(self, z: Tensor) -> None:
        torch.bmm(self.x, z, out=self.kernel)
        if self.bias is not None:
            self.kernel.add_(self.bias)

    def exponentiate(self) -> None:
        """exp of what the kernel holds, 0 on padded tokens."""
        self.kernel.exp_()
        if self.absent is not None:
            self.kernel.mul_(1.0 - self.absent.transpose(1, 2))


@dataclass
class Workspace:
    """block: tokens at a time; kept: memory for K. Fresh pages for every tile would cost as much as the
    exponentials."""

    block: int
    kept: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def kernel(self, heads: int, tokens: int, pivots: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised [heads, tokens, pivots]."""
        size = heads * tokens * pivots
        if dtype not in self.kept or self.kept[dtype].numel() < size:
            self.kept[dtype] = torch.empty(size, dtype=dtype)
        return self.kept[dtype][:size].view(heads, tokens, pivots)


@torch.no_grad()
def lot(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    key_bias: Tensor | None,
    pivots: Tensor,
    pivot_mass: Tensor,
    query_multiplier: float,
    key_multiplier: float,
    query_half_steps: int,
    queries_first: bool,
    key_half_steps: int,
    keys_first: bool,
    output_factor: Sequence[float],
    interleaved: bool = False,
    pivot_weight: Tensor | None = None,
) -> Tensor:
    """A v [B, H, N, E].  Arguments as operators.lot.lot."""
    batch, heads, queries, _ = q.shape
    if interleaved and batch > 1:
        return _of_each_example(
            q, k, v, keep, query_keep, key_bias, pivots, pivot_mass, pivot_weight,
            query_multiplier=query_multiplier, key_multiplier=key_multiplier,
            query_half_steps=query_half_steps, queries_first=queries_first,
            key_half_steps=key_half_steps, keys_first=keys_first, output_factor=output_factor,
        )  # fmt: skip
    keys, width = v.shape[2:]
    if keep is None and query_keep is None and key_bias is None and _is_short(
        q, k, pivot_mass, min(query_half_steps, key_half_steps), max(query_half_steps, key_half_steps)
    ):
        return _short(
            q, k, v, pivots, pivot_mass, query_multiplier, key_multiplier, query_half_steps,
            queries_first, key_half_steps, keys_first, output_factor, pivot_weight,
        )  # fmt: skip
    dtype, padded = reference.work_dtype(q), query_keep is not None
    out = q.new_empty((batch, heads, queries, width), dtype=dtype)
    if padded or out.numel() == 0 or keys == 0:
        out.zero_()
    if out.numel() == 0 or keys == 0:
        return out.to(v.dtype)
    z, sigma = pivots.to(dtype).transpose(-1, -2), pivot_mass.to(dtype).unsqueeze(1)
    query_z, key_z = ((z * by).contiguous() for by in (query_multiplier, key_multiplier))
    bias = None
    if key_bias is not None:
        bias = key_bias.expand(batch, heads, -1, -1).transpose(-1, -2)
    key_side = Side(k, keep, bias, key_z, sigma, key_half_steps, keys_first)
    query_side = Side(q, query_keep, None, query_z, sigma, query_half_steps, queries_first)
    # Sweeps work with plans of mass n, the tokens that take part: counts 1 / n_q n_k less here.
    coefficient, query_power, key_power, length_power = output_factor
    powers = (coefficient, query_power - 1.0, key_power - 1.0, length_power)
    factor = torch.as_tensor(reference.token_factor(powers, q, k, keep, query_keep), dtype=dtype)
    factor = factor.expand(batch, heads, 1, 1)
    if pivot_weight is not None:
        factor = factor * pivot_weight.to(dtype)[None, :, :, None]

    group = _layout(q, k, pivots, keep is not None or query_keep is not None)
    block = max(64, _tile_bytes(q, k) // (pivots.shape[1] * out.element_size()))
    some_keys = _chosen(None if group > heads else keep, batch)
    some_queries = _chosen(None if group > heads else query_keep, batch)

    def work(starts: Iterator[int]) -> None:
        space = Workspace(block)
        for start in starts:
            stop = min(start + group, batch * heads)
            span = Heads(
                range(start // heads, -(-stop // heads)),
                range(0, heads) if group > heads else range(start % heads, (stop - 1) % heads + 1),
            )
            chosen = some_keys[span.examples.start]
            tile = span.tile(key_side, chosen)
            values = span.of(v, chosen)
            if tile.absent is not None:
                values = _clean(values, tile.absent)
            mixed = _gather(tile, values, space)  # / sigma: near a format's end before the factor
            mixed = (mixed * span.of(factor, None)).to(dtype)
            chosen = some_queries[span.examples.start]
            tile = span.tile(query_side, chosen)
            target = out.view(batch * heads, queries, width)[start:stop]
            if isinstance(chosen, Tensor):
                rows = target.new_empty((len(span), len(chosen), width))
                _spread(tile, mixed, rows, space)
                target.index_copy_(1, chosen, rows)
            else:
                _spread(tile, mixed, target[:, :chosen], space)

    starts = range(0, batch * heads, group)
    if group == 1:  # long operations, one head a thread
        each_worker(work, starts)
    else:  # short ones, which torch's threads share: threads of our own would wait for the interpreter
        work(iter(starts))
    return out.to(v.dtype)


def _is_short(q: Tensor, k: Tensor, pivot_mass: Tensor, fewest: int, most: int) -> bool:
    """Whether a few calls on all heads take less than tiles do."""
    entries = q.shape[0] * pivot_mass.numel() * (q.shape[2] + k.shape[2])
    if not (fewest > 0 and most <= FEW and 0 < entries * most <= SHORT):
        return False
    return bool((pivot_mass > LEAST_MASS).all())


def _short(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pivots: Tensor,
    pivot_mass: Tensor,
    query_multiplier: float,
    key_multiplier: float,
    query_half_steps: int,
    queries_first: bool,
    key_half_steps: int,
    keys_first: bool,
    output_factor: Sequence[float],
    pivot_weight: Tensor | None,
) -> Tensor:
    """A v [B, H, N, E] without masks, both loops in the log domain on all heads at once."""
    dtype = reference.work_dtype(q)
    sigma = pivot_mass.to(dtype)[:, None]  # [H, 1, R]
    z = pivots.to(dtype).transpose(-1, -2)
    first = _short_plan(q, z * query_multiplier, sigma, query_half_steps, queries_first)
    second = _short_plan(k, z * key_multiplier, sigma, key_half_steps, keys_first)
    weight = 1.0 / sigma if pivot_weight is None else pivot_weight.to(dtype)[:, None] / sigma
    factor = reference.token_factor(output_factor, q, k, None, None)
    mixed = second.transpose(-1, -2) @ v.to(dtype)  # [B, H, R, E]
    return (first @ (mixed * (weight * factor).transpose(-1, -2))).to(v.dtype)


def _short_plan(x: Tensor, z: Tensor, sigma: Tensor, half_steps: int, tokens_first: bool) -> Tensor:
    """Gamma [B, H, N, R] from zero duals.  x: [B, H, N, D]; z: [H, D, R]; sigma: [H, 1, R].

    What all tokens weigh is a number, which the last half-step, a softmax over its side, leaves out.
    """
    scores = x.to(z.dtype) @ z
    shifted, tokens_turn = scores, tokens_first
    for _ in range(half_steps - 1):
        if tokens_turn:
            shifted = scores - torch.logsumexp(shifted, -1, keepdim=True)
        else:
            shifted = (scores + sigma.log()) - torch.logsumexp(shifted, -2, keepdim=True)
        tokens_turn = not tokens_turn
    if tokens_turn:
        return torch.softmax(shifted, -1).div_(x.shape[2])
    return torch.softmax(shifted, -2).mul_(sigma)


def _of_each_example(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    key_bias: Tensor | None,
    pivots: Tensor,
    pivot_mass: Tensor,
    pivot_weight: Tensor | None,
    **loops: Any,
) -> Tensor:
    """Where examples have masses of their own: as heads of one example, or masked one by one."""
    batch, heads = q.shape[:2]
    masses = reference.by_example(pivot_mass, batch)
    weights = None if pivot_weight is None else reference.by_example(pivot_weight, batch)
    if keep is None and query_keep is None and key_bias is None:
        folded_q, folded_k, folded_v = (x.flatten(0, 1)[None] for x in (q, k, v))
        glue = None if weights is None else weights.flatten(0, 1)
        out = lot(
            folded_q, folded_k, folded_v, None, None, None, pivots.repeat(batch, 1, 1),
            masses.flatten(0, 1), **loops, pivot_weight=glue,
        )  # fmt: skip
        return out[0].unflatten(0, (batch, heads))
    bias = None if key_bias is None else key_bias.expand(batch, -1, -1, -1)
    parts = []
    for e in range(batch):
        masks = [None if x is None else x[e, None] for x in (keep, query_keep, bias)]
        glue = None if weights is None else weights[e]
        parts.append(
            lot(
                q[e, None], k[e, None], v[e, None], masks[0], masks[1], masks[2], pivots, masses[e],
                **loops, pivot_weight=glue,
            )
        )
    return torch.cat(parts)


def describe(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    query_keep: Tensor | None,
    key_bias: Tensor | None,
    pivots: Tensor,
    pivot_mass: Tensor,
    query_multiplier: float,
    key_multiplier: float,
    half_steps: tuple[int, int],
) -> tuple[str, str]:
    """What the tile of the widest scores runs, and why.  half_steps: of both sides, the fewer first.

    Measures the scores, which the kernel itself does tile by tile: this is for people to read.
    """
    if q.numel() == 0 or k.numel() == 0:
        return "CPU", "there is nothing to compute"
    unmasked = keep is None and query_keep is None and key_bias is None
    if unmasked and _is_short(q, k, pivot_mass, *half_steps):
        return "CPU, all heads at once, log domain", "short: a few calls on all heads take least"
    group = _layout(q, k, pivots, keep is not None or query_keep is not None)
    dtype = reference.work_dtype(q)
    tokens, size = max(q.shape[2], k.shape[2]), dtype.itemsize
    kept = f"a head's K takes {tokens * pivots.shape[1] * size / 2**20:.2f} MiB"
    if group == 1:
        layout, why = "one head a tile", f"{kept}: two would leave no room in a private cache"
    else:
        layout, why = "heads stacked", f"{kept}, several fit a private cache"
    if half_steps[0] == 0:
        return f"CPU, {layout}, log domain", f"{why}; without a half-step nothing is scaled"
    largest = span = 0.0
    sides = ((q, query_keep, None, query_multiplier), (k, keep, key_bias, key_multiplier))
    for x, mask, bias, multiplier in sides:
        scores = reference.pivot_scores(x, mask, bias, pivots, multiplier, dtype)
        if scores.numel():
            largest = max(largest, float(scores.abs().max()))
            span = max(span, float((scores.amax(-2) - scores.amin(-2)).max()))
    found = f"scores reach {largest:.1f}, those of a token span {span:.1f}"
    safe = _safe_range(pivot_mass, dtype)
    if largest <= safe / 2:
        domain = "linear domain"
    elif span <= safe:
        domain = "linear domain, shifted"
    elif span <= _safe_range(pivot_mass, torch.float64):
        domain = "linear domain, shifted, float64"
    else:
        domain = "log domain"
    return f"CPU, {layout}, {domain}", f"{why}; {found}"


def _layout(q: Tensor, k: Tensor, pivots: Tensor, padded: bool) -> int:
    """Heads in a tile: whole examples, or equal parts of one."""
    batch, heads, queries, _ = q.shape
    tokens = max(queries, k.shape[2])
    # A tile's K stays in cache from sweep to sweep; its tokens pass by once.
    of_one = tokens * pivots.shape[1] * reference.work_dtype(q).itemsize
    tile_bytes = _tile_bytes(q, k)
    if of_one > tile_bytes:
        return 1
    most = min(torch.get_num_threads() * tile_bytes // of_one, batch * heads)
    if most < heads:
        group = max(count for count in range(1, max(1, most) + 1) if heads % count == 0)
    elif padded and 2 * heads * of_one >= tile_bytes:
        group = heads  # the padded tokens of one example can be left out, those of several cannot
    else:
        group = most // heads * heads
    return group


def _tile_bytes(q: Tensor, k: Tensor) -> int:
    """Twice that of the N x M loops: so few operations on so few numbers cost more than a cache miss."""
    return 2 * thresholds(q, k).tile_bytes


def _chosen(keep: Tensor | None, batch: int) -> Sequence[Chosen]:
    if keep is None:
        return [None] * batch
    counts = keep.sum(-1)
    at_start = (keep == (torch.arange(keep.shape[1]) < counts[:, None])).all(-1).tolist()
    return [
        count if first else mask.nonzero().squeeze(1)
        for mask, count, first in zip(keep, counts.tolist(), at_start, strict=True)
    ]


@dataclass(frozen=True)
class Heads:
    """Of one tile: all heads of some examples, or some heads of one."""

    examples: range
    heads: range

    def __len__(self) -> int:
        return len(self.examples) * len(self.heads)

    def of(self, x: Tensor, chosen: Chosen) -> Tensor:
        """[B, H, N, D] -> [G, N, D], copied only where it has to be."""
        if len(self.examples) > 1:
            return x[self.examples.start : self.examples.stop].flatten(0, 1)
        part = x[self.examples.start, self.heads.start : self.heads.stop]
        if isinstance(chosen, Tensor):
            return part.index_select(1, chosen)
        return part if chosen is None else part[:, :chosen]

    def tile(self, side: Side, chosen: Chosen) -> Tile:
        x = self.of(side.x, chosen)
        bias = None if side.bias is None else self.of(side.bias, chosen)
        z, sigma = (t[self.heads.start : self.heads.stop] for t in (side.z, side.sigma))
        if len(self.examples) > 1:
            z, sigma = (t.repeat(len(self.examples), 1, 1) for t in (z, sigma))
        absent = None
        count = x.new_full((1, 1, 1), float(x.shape[1]), dtype=z.dtype)
        if chosen is None and side.keep is not None:
            keep = side.keep[self.examples.start : self.examples.stop]
            keep = keep.repeat_interleave(len(self.heads), 0).unsqueeze(1)
            absent = (~keep).to(z.dtype)
            count = keep.sum(-1, keepdim=True).to(z.dtype)
            x = _clean(x, absent)
            bias = None if bias is None else _clean(bias, absent)
        return Tile(x, absent, bias, z, sigma, count, side.half_steps, side.tokens_first)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _clean(x: Tensor, absent: Tensor) -> Tensor:
    """0 at padded tokens, NaN included.  x: [G, N, D]; absent: [G, 1, N].

    On bits: masked_fill takes four times as long where the mask is broadcast.
    """
    bits = _BITS[x.element_size()]
    mask = absent.transpose(1, 2).to(bits).sub_(1)  # -1, all bits, on active tokens
    return x.view(bits).bitwise_and(mask).view(x.dtype)


def _gather(tile: Tile, values: Tensor, space: Workspace) -> Tensor:
    """diag(1 / sigma) P v [G, R, E], P [G, R, N] the plan of mass n.  values: [G, N, E]."""
    for dtype, shifted in _domains(tile):
        found = _linear(tile, dtype, shifted, values, None, None, space)
        if found is not None:
            return found
    plan = _log_domain(tile, True)
    return (plan @ values.to(plan.dtype)).double() * tile.count  # 0 where no token is active


def _spread(tile: Tile, mixed: Tensor, out: Tensor, space: Workspace) -> None:
    """P' mixed, written to out [G, N, E].  mixed: [G, R, E]."""
    for dtype, shifted in _domains(tile):
        if _linear(tile, dtype, shifted, None, mixed, out, space) is not None:
            return
    plan = _log_domain(tile, False) * tile.count
    out.copy_(plan.transpose(1, 2) @ mixed)


def _domains(tile: Tile) -> list[tuple[torch.dtype, bool]]:
    """In which the linear domain is tried: dtype, and whether each token's largest score is taken off.

    Without a half-step there is no gauge, which a shift needs.
    """
    if tile.half_steps == 0:
        return []
    if tile.z.dtype == torch.float64:
        return [(torch.float64, False), (torch.float64, True)]
    return [(torch.float32, False), (torch.float32, True), (torch.float64, True)]


def _log_domain(tile: Tile, over_mass: bool) -> Tensor:
    """P [G, R, N] of mass 1 as the reference has it, or diag(1 / sigma) P."""
    scores = (tile.x.to(tile.z.dtype) @ tile.z).transpose(1, 2)
    if tile.bias is not None:
        scores = scores + tile.bias.transpose(1, 2)
    if scores.shape[2] == 0:
        return scores
    keep = None if tile.absent is None else tile.absent[:, 0] == 0
    return reference.pivot_plan(
        scores[:, None], keep, tile.sigma, tile.half_steps, tile.tokens_first, over_mass
    )[:, 0]


def _safe_range(pivot_mass: Tensor, dtype: torch.dtype) -> float:
    """What the scores of a token may span, so that 1 / sigma fits beside them; negative where it does
    not fit at all."""
    least = float(pivot_mass.masked_fill(pivot_mass <= 0, 1.0).amin())
    room = SAFE_ROW_RANGE[dtype] - max(0.0, -math.log(least) - SPARE_RANGE) / 2
    return room if room >= SPARE_RANGE else -1.0


def _sweeps(half_steps: int, tokens_first: bool) -> list[tuple[bool, bool]]:
    """The half-steps as pairs (tokens, then pivots)."""
    pairs = [] if tokens_first else [(False, True)]
    left = half_steps - len(pairs)
    return pairs + [(True, index + 1 < left) for index in range(0, left, 2)]


def _linear(
    tile: Tile,
    dtype: torch.dtype,
    shifted: bool,
    values: Tensor | None,
    mixed: Tensor | None,
    out: Tensor | None,
    space: Workspace,
) -> Tensor | None:
    """P = diag(b) K' diag(a) of mass n in one domain; None where the scores do not fit it.

    With values: diag(1 / sigma) P v [G, R, E].  With mixed: P' mixed into out.
    Tokens are closed to mass 1, a = 1 / K b, and pivots to n sigma, b = n sigma / K'a: totals are equal,
    so that the scalings do not drift.
    """
    groups, tokens, _ = tile.x.shape
    safe = _safe_range(tile.sigma, dtype)
    if safe < 0:
        return None
    z, sigma, count = tile.z.to(dtype), tile.sigma.to(dtype), tile.count.to(dtype)
    kernel = space.kernel(groups, tokens, z.shape[2], dtype)
    sweeps = _sweeps(tile.half_steps, tile.tokens_first)
    if mixed is not None and sweeps[-1][1]:
        sweeps.append((False, False))  # the output needs the last b
    blocks = _blocks(tile, kernel, values, out, space.block)
    return _loop(blocks, z, sigma, count, values, mixed, sweeps, shifted, safe)


def _blocks(
    tile: Tile, kernel: Tensor, values: Tensor | None, out: Tensor | None, size: int
) -> list[Block]:
    """All tokens, `size` at a time."""
    groups, tokens, _ = kernel.shape
    if tokens == 0:
        return []
    a = kernel.new_ones((groups, 1, tokens))
    absent = None if tile.absent is None else tile.absent.to(kernel.dtype)

    def parts(x: Tensor | None, axis: int = 1) -> Sequence[Tensor | None]:
        return [None] * -(-tokens // size) if x is None else x.split(size, axis)

    return [
        Block(x.to(kernel.dtype), bias, mask, part, scaling, value, moved)
        for x, bias, mask, part, scaling, value, moved in zip(
            tile.x.split(size, 1), parts(tile.bias), parts(absent, 2), kernel.split(size, 1),
            a.split(size, 2), parts(values), parts(out), strict=True,
        )
    ]  # fmt: skip


def _top_to_scaling(blocks: Sequence[Block]) -> None:
    """a = exp(top) in place, up to gauge and 0 on padded tokens: zero duals on K = exp(S - top)."""
    for block in blocks:
        if block.absent is not None:
            block.a.masked_fill_(block.absent > 0, -float("inf"))
    if not blocks:
        return
    highest = torch.stack([block.a.amax(-1, keepdim=True) for block in blocks]).amax(0)
    highest.masked_fill_(highest == -float("inf"), 0.0)
    for block in blocks:
        block.a.sub_(highest).exp_()


def _close_pivots(total: Tensor, sigma: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """b and b / sigma from K'a [G, 1, R], which is 0 only without any token."""
    density = count / total.masked_fill_(count == 0, 1.0)
    return density * sigma, density


def _open_shifted(blocks: Sequence[Block], z: Tensor, safe: float) -> bool:
    """K = exp(S - top), 0 on padded tokens, and a = top, a token's largest score.

    False, early, where a token's scores span more than `safe`.
    """
    for block in blocks:
        block.form_scores(z)
        top = block.kernel.amax(-1, keepdim=True)
        if not bool((top - block.kernel.amin(-1, keepdim=True)).max() <= safe):
            return False
        block.kernel.sub_(top)
        block.exponentiate()
        block.a.copy_(top.transpose(1, 2))
    return True


def _sweep(
    blocks: Sequence[Block],
    z: Tensor,
    b: Tensor,
    total: Tensor,
    gathered: Tensor | None,
    weights: Tensor | None,
    opens: bool,
    closes_tokens: bool,
    closes_pivots: bool,
    safe: float,
) -> bool:
    """One pass over all tokens, a block at a time:

        K = exp(S)           if it `opens`; ends at once, with False, where |S| > safe / 2
        a = 1 / K b          if it closes tokens
        K'a                  added to total [G, 1, R] if it closes pivots
        K' diag(a) values    added to gathered [G, R, E], if it is given
        diag(a) K weights    to the blocks' out, if weights are given

    K is spent where it meets values or weights.  b: [G, 1, R].
    """
    for block in blocks:
        kernel, a = block.kernel, block.a
        if opens:
            block.form_scores(z)
            low, high = torch.aminmax(kernel)
            if not bool(torch.maximum(high, -low) <= safe * 0.5):
                return False
            block.exponentiate()
        if closes_tokens:
            torch.bmm(b, kernel.transpose(1, 2), out=a)
            if block.absent is not None:  # a padded token's total is 0, which would divide
                a.add_(block.absent)
            a.reciprocal_()
        if closes_pivots:
            total.baddbmm_(a, kernel)
        if gathered is not None or weights is not None:
            kernel.mul_(a.transpose(1, 2))
        if gathered is not None and block.values is not None:
            gathered.baddbmm_(kernel.transpose(1, 2), block.values.to(z.dtype))
        if weights is not None and block.out is not None:
            if block.out.dtype == kernel.dtype:
                torch.bmm(kernel, weights, out=block.out)
            else:
                block.out.copy_(torch.bmm(kernel, weights))
    return True


def _loop(
    blocks: Sequence[Block],
    z: Tensor,
    sigma: Tensor,
    count: Tensor,
    values: Tensor | None,
    mixed: Tensor | None,
    sweeps: Sequence[tuple[bool, bool]],
    shifted: bool,
    safe: float,
) -> Tensor | None:
    """All sweeps, and what the last one gathered; None where the scores do not fit."""
    b, density = count * (sigma > 0), count / sigma  # zero duals
    total = torch.empty_like(b)
    gathered = None
    if shifted:
        if not _open_shifted(blocks, z, safe):
            return None
        _top_to_scaling(blocks)
    for index, (closes_tokens, closes_pivots) in enumerate(sweeps):
        opens, last = index == 0 and not shifted, index == len(sweeps) - 1
        if last and values is not None:
            gathered = b.new_zeros((len(z), z.shape[2], values.shape[2]))
        weights = b.transpose(1, 2) * mixed if last and mixed is not None else None
        total.zero_()
        if not _sweep(
            blocks, z, b, total, gathered, weights, opens, closes_tokens, closes_pivots, safe
        ):
            return None
        if closes_pivots:
            b, density = _close_pivots(total, sigma, count)
    if gathered is None:
        return b
    # diag(b / sigma) K' diag(a) v, 0 for a pivot without mass
    return gathered * density.masked_fill(sigma <= 0, 0.0).transpose(1, 2)
