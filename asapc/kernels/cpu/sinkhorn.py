"""CPU twin of operators/sinkhorn.py and operators/asap.py: the loop in the linear domain.

K = exp(S - rowmax) is formed once per head; every half-step is then one matrix-vector product while
K is in cache, and the output is diag(a) K (diag(b) v). Heads too small to fill the cache are stacked
into one tile. A head too large to be kept at all is streamed (streaming.py). Nothing larger than one
tile or `resident_bytes` (thresholds.py) per thread is allocated, unless the dense map is wanted.

Tiles run on worker threads that each compute serially: an intra-operator thread team would meet at
a barrier after every half-step, which on a busy machine costs far more than the half-step itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from asapc.kernels.cpu.streaming import stream_head
from asapc.kernels.cpu.workers import SAFE_ROW_RANGE, each_worker
from asapc.kernels.loop import Loop
from asapc.kernels.thresholds import Thresholds, thresholds
from asapc.operators.plan import log_plan_of
from asapc.operators.sinkhorn import factor_value, widen

SHORT = 1 << 17  # entries of all heads' maps times half-steps: up to here few calls take less than tiles
FEW = 5  # half-steps, too, up to which they do


def is_short(q: Tensor, k: Tensor, half_steps: int) -> bool:
    """Whether few_half_steps is the fastest: on a CPU, where a map is not empty."""
    entries = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    few = 0 < half_steps <= FEW and 0 < half_steps * entries <= SHORT
    return few and q.device.type == "cpu"


def few_half_steps(
    q: Tensor, k: Tensor, v: Tensor | None, loop: Loop, hidden: Tensor | None = None
) -> Tensor:
    """A v, or the map A, of the loop from zero on scores without mask or bias, in the log domain.

    hidden: [N, M] bool, True for scores that count as -inf, not all of a row or column.

    Uniform marginals are numbers, which the last half-step, a softmax over its side, leaves out:
        S <- S - logsumexp_j(S),  S <- S - logsumexp_i(S),  ..,  A = factor / N softmax_j(S)
    The largest entries of S go to 0 and keep all their digits; a dual of the size of S would not.
    """
    scores = (widen(q) * loop.score_multiplier) @ widen(k).transpose(-1, -2)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    over_keys = loop.first_side == "row"
    for _ in range(loop.half_steps - 1):
        scores -= torch.logsumexp(scores, -1 if over_keys else -2, keepdim=True)
        over_keys = not over_keys
    tokens = q.shape[2] if over_keys else k.shape[2]
    plan = torch.softmax(scores, -1 if over_keys else -2)
    factor = factor_value(loop.output_factor, q.shape[2], k.shape[2], None)
    plan *= factor / tokens
    return plan.to(q.dtype) if v is None else (plan @ widen(v)).to(v.dtype)


def sinkhorn_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    bias: Tensor | None,
    dual: Tensor | None,
    loop: Loop,
) -> Tensor:
    """A v [B, H, N, E], or the map A [B, H, N, M] where v is None.  Shapes as in operators/.

    dual: where the loop starts, None for zero: the source dual [B, H, N] where columns are closed
    first, the target dual [B, H, M] where rows are.
    """
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    limits = thresholds(q, k)
    out_dtype = q.dtype if v is None else v.dtype
    work_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    width = keys if v is None else v.shape[3]
    out = torch.empty((batch, heads, queries, width), dtype=work_dtype)
    if out.numel() == 0 or keys == 0:
        return out.zero_().to(out_dtype)

    def rows(tensor: Tensor) -> Tensor:  # [B, H, X, Y] -> [B*H, X, Y]
        return tensor.to(work_dtype).reshape(batch * heads, tensor.shape[2], tensor.shape[3])

    scaled_q = rows(q) * loop.score_multiplier
    flat_k = rows(k)
    flat_v = None if v is None else rows(v)
    rows_first = loop.first_side == "row"
    source_dual = None if dual is None or rows_first else dual.to(work_dtype).flatten(0, 1)
    key_bias, bound = None, _row_range_bound(scaled_q, flat_k, bias)
    if dual is not None and rows_first:  # the loop from g on S is the loop from 0 on S + g
        key_bias, dual_range = _centred(dual.to(work_dtype), keep)
        bound += dual_range
    full_bias = (
        None
        if bias is None
        else bias.to(work_dtype).broadcast_to(batch, heads, queries, keys)
    )
    factor = factor_value(loop.output_factor, queries, keys, keep)
    flat_out = out.view(batch * heads, queries, width)
    bounded = bound <= SAFE_ROW_RANGE[work_dtype]

    def tile(start: int, stop: int) -> None:
        part = slice(start, stop)
        batch_of = torch.arange(start, stop) // heads
        tile_bias = None
        if full_bias is not None:
            biases = [full_bias[i // heads, i % heads] for i in range(start, stop)]
            tile_bias = biases[0][None] if len(biases) == 1 else torch.stack(biases)
        tile_factor = factor
        if isinstance(factor, Tensor):
            tile_factor = factor.to(work_dtype).reshape(batch)[batch_of, None, None]
        flat_out[part] = _tile(
            scaled_q[part],
            flat_k[part],
            None if flat_v is None else flat_v[part],
            None if keep is None else keep[batch_of],
            tile_bias,
            None if source_dual is None else source_dual[part],
            None if key_bias is None else key_bias[part],
            loop,
            bounded,
            limits,
        ).mul_(tile_factor)

    per_tile = max(1, limits.tile_bytes // (queries * keys * out.element_size()))
    # On less than a quarter of a tile each, threads would mostly wait for the interpreter.
    most_workers = 4 * batch * heads // per_tile
    rounds = math.ceil(batch * heads / (per_tile * torch.get_num_threads()))
    per_tile = math.ceil(batch * heads / (rounds * torch.get_num_threads()))  # equal shares
    plain = bounded and keep is None and bias is None and not isinstance(factor, Tensor)
    plain = plain and queries * keys * out.element_size() <= limits.resident_bytes

    def work(starts: Iterator[int]) -> None:
        if not (plain and per_tile == 1 and flat_v is not None):
            for start in starts:
                tile(start, min(start + per_tile, batch * heads))
            return
        mass = float(factor) / (queries if loop.ends_on_rows else keys)
        # One buffer for all heads: fresh pages for each would cost as much as the exponentials.
        kernel = torch.empty((queries, keys), dtype=work_dtype)
        block = _block_rows(kernel, limits)
        for head in starts:
            flat_out[head] = _bounded_head(
                scaled_q[head], flat_k[head], flat_v[head],
                None if source_dual is None else source_dual[head],
                None if key_bias is None else key_bias[head],
                kernel, loop.half_steps, rows_first, mass, block,
            )  # fmt: skip

    each_worker(work, range(0, batch * heads, per_tile), most_workers)
    return out.to(out_dtype)


def _block_rows(kernel: Tensor, limits: Thresholds) -> int:
    """How many rows of K [N, M] stay in cache from one product to the next."""
    return max(1, limits.tile_bytes // (kernel.shape[1] * kernel.element_size()))


def _centred(dual: Tensor, keep: Tensor | None) -> tuple[Tensor, float]:
    """A target dual [B, H, M] as [B H, M], each head's middle at 0, 0 on masked keys; its range."""
    low, high = dual, dual
    if keep is not None:
        masked = ~keep[:, None, :]
        low, high = dual.masked_fill(masked, math.inf), dual.masked_fill(masked, -math.inf)
    low, high = low.amin(-1, keepdim=True), high.amax(-1, keepdim=True)
    centred = dual - (low + high) / 2
    if keep is not None:
        centred = centred.masked_fill(masked, 0.0)  # also where no key is active: inf - inf
    reach = float((high - low).max())
    return centred.flatten(0, 1), max(reach, 0.0)


def _row_range_bound(scaled_q: Tensor, k: Tensor, bias: Tensor | None) -> float:
    """Upper bound of max_i (max_j S_ij - min_j S_ij) by Cauchy-Schwarz, O(N D) work."""
    if bias is not None:
        return math.inf  # a dense bias is bounded tile by tile, where its row is read anyway
    reach = scaled_q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1)
    return 2.0 * float(reach.max())


def _tile(
    scaled_q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    bias: Tensor | None,
    dual: Tensor | None,
    key_bias: Tensor | None,
    loop: Loop,
    bounded: bool,
    limits: Thresholds,
) -> Tensor:
    """One tile, not yet multiplied by the output factor: [G, N, E], or [G, N, M] without v.

    scaled_q: [G, N, D]; k: [G, M, D]; v: [G, M, E]; keep: [G, M]; bias: [G, N, M]; dual: [G, N];
    key_bias: [G, M].
    """
    key_mass = 1.0 / k.shape[1]  # padded keys count: nu_j = 1/M on active keys
    if keep is None or len(keep) > 1:
        return _dense_tile(
            scaled_q, k, v, keep, bias, dual, key_bias, loop, key_mass, bounded, limits
        )
    # One head: drop its masked keys instead of multiplying them by zero.
    active = keep[0].nonzero().squeeze(1)
    active_v = None if v is None else v[:, active]
    active_bias = None if bias is None else bias[:, :, active]
    active_key_bias = None if key_bias is None else key_bias[:, active]
    result = _dense_tile(
        scaled_q, k[:, active], active_v, None, active_bias, dual, active_key_bias, loop,
        key_mass, bounded, limits,
    )  # fmt: skip
    if v is not None:
        return result
    full = result.new_zeros((1, scaled_q.shape[1], k.shape[1]))
    return full.index_copy_(2, active, result)


def _dense_tile(
    scaled_q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    bias: Tensor | None,
    dual: Tensor | None,
    key_bias: Tensor | None,
    loop: Loop,
    key_mass: float,
    bounded: bool,
    limits: Thresholds,
) -> Tensor:
    groups, queries, keys = len(scaled_q), scaled_q.shape[1], k.shape[1]
    if v is not None and groups == 1 and queries * keys * k.element_size() > limits.resident_bytes:
        return stream_head(
            scaled_q[0],
            k[0],
            v[0],
            None if bias is None else bias[0],
            None if dual is None else dual[0],
            None if key_bias is None else key_bias[0],
            loop.half_steps,
            loop.first_side == "row",
            1.0 / queries if loop.ends_on_rows else key_mass,
            bounded,
            max(1, limits.tile_bytes // (keys * k.element_size())),
        )[None]
    if key_bias is None:
        scores = torch.bmm(scaled_q, k.transpose(1, 2))
    else:
        scores = torch.baddbmm(key_bias[:, None, :], scaled_q, k.transpose(1, 2))
    if bias is not None:
        scores += bias
    masked = None if keep is None else ~keep[:, None, :]
    if not bounded:
        low = scores if masked is None else scores.masked_fill(masked, math.inf)
        high = scores if masked is None else scores.masked_fill(masked, -math.inf)
        row_range = float((high.amax(-1) - low.amin(-1)).max())
        if not row_range <= SAFE_ROW_RANGE[torch.float64]:
            return _log_domain_tile(scores, v, keep, dual, loop, key_mass)
        if not row_range <= SAFE_ROW_RANGE[scores.dtype]:
            # What float32 cannot hold, float64 can: far fewer exponentials than logarithms of sums.
            scores, v = scores.double(), None if v is None else v.double()
            dual = None if dual is None else dual.double()
    if masked is not None:
        scores.masked_fill_(masked, -math.inf)
    log_a = scores.new_zeros(scores.shape[:2])
    if not bounded:  # a bounded |S| is at most half the safe range: exp(S) itself is safe
        log_a = scores.amax(-1)
        if masked is not None:
            log_a.masked_fill_(log_a == -math.inf, 0.0)  # a row without active keys stays all zero
        scores.sub_(log_a[..., None])
    kernel = scores.exp_()  # [G, N, M], 0 on masked keys
    if dual is not None:
        log_a = log_a + dual
    a = (log_a - log_a.amax(-1, keepdim=True)).exp_()  # exp(f) in the kernel's units, up to gauge
    rows_first = loop.first_side == "row"
    mass = 1.0 / kernel.shape[1] if loop.ends_on_rows else key_mass
    if len(kernel) == 1:
        values = None if v is None else v[0]
        block = _block_rows(kernel[0], limits)
        return _scale_one(kernel[0], a[0], values, loop.half_steps, rows_first, mass, block)[None]
    return _scale_group(kernel, a, v, keep, loop.half_steps, rows_first, mass)


def _scale_one(
    kernel: Tensor,
    a: Tensor,
    v: Tensor | None,
    half_steps: int,
    rows_first: bool,
    mass: float,
    block: int,
) -> Tensor:
    """Alternate a = 1 / K b and b = 1 / K'a, then return mass diag(a) K diag(b) (v).

    kernel: [N, M], without masked keys; a: [N], overwritten; mass: that of each row or column of the
    last side, the other side's is gauge.  A row half-step and the column half-step after it read K
    once, by blocks of `block` rows that stay in cache between the two.

    Rows are closed to 1 and columns to N/M: with equal totals the gauge stays, while 1 and 1 would
    let a grow by N/M with every pair of half-steps, out of range after some dozens.
    """
    share = float(kernel.size(0)) / float(kernel.size(1))
    b = torch.ones_like(kernel[0])
    total = torch.empty_like(b)
    # Views are made once: each takes the interpreter as long as an operator on the views does.
    parts = [
        (part, part.t(), a_part)
        for part, a_part in zip(kernel.split(block), a.split(block), strict=True)
    ]
    step = 0
    if not rows_first and half_steps > 0:
        torch.mv(kernel.t(), a, out=b)
        b.reciprocal_().mul_(share)
        step = 1
    while step + 1 < half_steps:
        total.zero_()
        for part, transposed, a_part in parts:
            torch.mv(part, b, out=a_part)
            a_part.reciprocal_()
            total.addmv_(transposed, a_part, alpha=1 / share)
        torch.reciprocal(total, out=b)
        step += 2
    if step < half_steps:
        torch.mv(kernel, b, out=a)
        a.reciprocal_()
        a *= mass
    else:
        a *= mass / share
    if v is None:
        return kernel.mul_(a.unsqueeze(1)).mul_(b)
    return torch.mm(kernel, b.unsqueeze(1) * v).mul_(a.unsqueeze(1))


def _bounded_head(
    scaled_q: Tensor,
    k: Tensor,
    v: Tensor,
    dual: Tensor | None,
    key_bias: Tensor | None,
    kernel: Tensor,
    half_steps: int,
    rows_first: bool,
    mass: float,
    block: int,
) -> Tensor:
    """One head without masks or bias whose exp(S) is safe: [N, E].  kernel: [N, M], overwritten.

    scaled_q: [N, D]; k: [M, D]; v: [M, E]; dual: [N]; key_bias: [M].
    """
    if key_bias is None:
        torch.mm(scaled_q, k.t(), out=kernel)
    else:
        torch.addmm(key_bias, scaled_q, k.t(), out=kernel)
    kernel.exp_()
    if dual is None:
        a = torch.ones_like(kernel[:, 0])
    else:
        a = torch.exp(dual - dual.max())
    return _scale_one(kernel, a, v, half_steps, rows_first, mass, block)


def _scale_group(
    kernel: Tensor,
    a: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    half_steps: int,
    rows_first: bool,
    mass: float,
) -> Tensor:
    """The same for several heads at once, kernel: [G, N, M], a: [G, N], overwritten, masked keys
    in place.

    K is 0 on masked keys, so that the plan is 0 there whatever b is; totals of 0 must not divide.
    keep: [G, M], with an active key in every head.
    Batched products run three times faster as vector x matrix than as matrix x vector, which pays
    for a transposed copy from the second row half-step on.
    """
    transposed = kernel.transpose(1, 2)
    if half_steps > 3:
        transposed = transposed.contiguous()
    a = a.unsqueeze(1)  # [G, 1, N]
    b = torch.ones_like(kernel[:, :1])  # [G, 1, M]
    share = torch.full_like(kernel[:, :1, :1], float(kernel.size(1)) / float(kernel.size(2)))
    absent = None
    if keep is not None:
        share = float(kernel.size(1)) / keep.sum(-1, dtype=kernel.dtype)[:, None, None]
        absent = (~keep).to(kernel.dtype).unsqueeze(1)
    # a half-step's totals, in place of the scaling that it closes
    close_rows = partial(torch.bmm, b, transposed, out=a)
    if absent is None:
        close_columns = partial(torch.bmm, a, kernel, out=b)
    else:
        close_columns = partial(torch.baddbmm, absent, a, kernel, out=b)
    rows_turn = rows_first
    for _ in range(half_steps):
        if rows_turn:
            close_rows().reciprocal_()
        else:
            torch.div(share, close_columns(), out=b)
        rows_turn = not rows_turn
    a = a.transpose(1, 2) * mass
    if rows_turn:  # the last half-step closed columns
        a = a / share
    if v is None:
        return kernel.mul_(a).mul_(b)
    return torch.bmm(kernel, b.transpose(1, 2) * v).mul_(a)


def _log_domain_tile(
    scores: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    dual: Tensor | None,
    loop: Loop,
    key_mass: float,
) -> Tensor:
    """The reference loop on one tile, for score ranges that the linear domain cannot hold."""
    if keep is not None:
        scores = scores.masked_fill(~keep[:, None, :], -math.inf)
    if dual is not None:
        scores = scores + dual[..., None]
    mass = scores.new_zeros(1)  # log 1 a token: what a row or column has in the end is put in below
    log_plan = log_plan_of(scores, mass, mass, loop.half_steps, loop.first_side == "row")
    plan = log_plan.exp_() * (1.0 / scores.shape[1] if loop.ends_on_rows else key_mass)
    return plan if v is None else torch.bmm(plan, v)
