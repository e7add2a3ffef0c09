"""CPU twin of operators/sinkhorn.py and operators/asap.py: the loop in the linear domain.

K = exp(S - rowmax) is formed once per head; every half-step is then one matrix-vector product while
K is in cache, and the output is diag(a) K (diag(b) v). Heads too small to fill the cache are stacked
into one tile. Nothing larger than a tile per thread is allocated, unless the dense map is wanted.

Tiles run on worker threads that each compute serially: an intra-operator thread team would meet at
a barrier after every half-step, which on a busy machine costs far more than the half-step itself.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Optional

import torch
from torch import Tensor

from asapc.ir import Side
from asapc.operators.sinkhorn import factor_value, initial_duals, run_half_steps

# Entries of K lie in [exp(-range), 1] and the scalings in exp(+-2 range), so this range keeps every
# intermediate inside the format: exp(2 * 40) < 3.4e38 and exp(2 * 340) < 1.8e308.
SAFE_ROW_RANGE = {torch.float32: 40.0, torch.float64: 340.0}
TILE_BYTES = 1 << 19  # heads are stacked up to this size: half of a 1 MiB private cache


@dataclass(frozen=True)
class Loop:
    """What runs on a tile: `half_steps` closures, the first on `first_side`."""

    score_multiplier: float
    half_steps: int
    first_side: Side
    output_factor: Sequence[float]


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

    dual: [B, H, N] source dual to start from, or None for zero.
    """
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
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
    flat_dual = None if dual is None else dual.to(work_dtype).reshape(batch * heads, queries)
    full_bias = (
        None
        if bias is None
        else bias.to(work_dtype).broadcast_to(batch, heads, queries, keys)
    )
    factor = factor_value(loop.output_factor, queries, keys, keep)
    flat_out = out.view(batch * heads, queries, width)
    bounded = _row_range_bound(scaled_q, flat_k, bias) <= SAFE_ROW_RANGE[work_dtype]

    def tile(start: int, stop: int) -> None:
        heads_of_tile = slice(start, stop)
        tile_bias = None
        if full_bias is not None:
            tile_bias = torch.stack(
                [full_bias[i // heads, i % heads] for i in range(start, stop)]
            )
        tile_keep = None
        if keep is not None:
            tile_keep = keep[torch.arange(start, stop) // heads]
        tile_factor: float | Tensor = factor if isinstance(factor, float | int) else (
            factor.to(work_dtype).reshape(batch)[torch.arange(start, stop) // heads, None, None]
        )
        flat_out[heads_of_tile] = _tile(
            scaled_q[heads_of_tile],
            flat_k[heads_of_tile],
            None if flat_v is None else flat_v[heads_of_tile],
            tile_keep,
            tile_bias,
            None if flat_dual is None else flat_dual[heads_of_tile],
            loop,
            bounded,
        ).mul_(tile_factor)

    per_tile = max(1, TILE_BYTES // (queries * keys * out.element_size()))
    per_tile = min(per_tile, math.ceil(batch * heads / torch.get_num_threads()))
    starts = range(0, batch * heads, per_tile)
    plain = bounded and keep is None and bias is None and isinstance(factor, float | int)
    if plain and per_tile == 1 and flat_v is not None:
        rows_first = loop.first_side == "row"
        mass = float(factor) / (keys if _ends_on_columns(loop) else queries)
        _each_worker(
            lambda worker, workers: _bounded_heads(
                scaled_q, flat_k, flat_v, flat_dual, flat_out, worker, workers, loop.half_steps,
                rows_first, mass,
            )
        )  # fmt: skip
        return out.to(out_dtype)
    _each(lambda start: tile(start, min(start + per_tile, batch * heads)), starts)
    return out.to(out_dtype)


def _ends_on_columns(loop: Loop) -> bool:
    return (loop.first_side == "column") == (loop.half_steps % 2 == 1)


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
    loop: Loop,
    bounded: bool,
) -> Tensor:
    """One tile, not yet multiplied by the output factor: [G, N, E], or [G, N, M] without v.

    scaled_q: [G, N, D]; k: [G, M, D]; v: [G, M, E]; keep: [G, M]; bias: [G, N, M]; dual: [G, N].
    """
    key_mass = 1.0 / k.shape[1]  # padded keys count: nu_j = 1/M on active keys
    if keep is None or len(keep) > 1:
        return _dense_tile(scaled_q, k, v, keep, bias, dual, loop, key_mass, bounded)
    # One head: drop its masked keys instead of multiplying them by zero.
    active = keep[0].nonzero().squeeze(1)
    if len(active) == 0:
        return scaled_q.new_zeros((1, scaled_q.shape[1], k.shape[1] if v is None else v.shape[2]))
    active_v = None if v is None else v[:, active]
    active_bias = None if bias is None else bias[:, :, active]
    result = _dense_tile(
        scaled_q, k[:, active], active_v, None, active_bias, dual, loop, key_mass, bounded
    )
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
    loop: Loop,
    key_mass: float,
    bounded: bool,
) -> Tensor:
    scores = torch.bmm(scaled_q, k.transpose(1, 2))
    if bias is not None:
        scores += bias
    masked = None if keep is None else ~keep[:, None, :]
    if not bounded:
        low = scores if masked is None else scores.masked_fill(masked, math.inf)
        high = scores if masked is None else scores.masked_fill(masked, -math.inf)
        row_range = float((high.amax(-1) - low.amin(-1)).max())
        if not row_range <= SAFE_ROW_RANGE[scores.dtype]:
            return _log_domain_tile(scores, v, keep, dual, loop, key_mass)
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
    if len(kernel) == 1:
        mass = key_mass if _ends_on_columns(loop) else 1.0 / kernel.shape[1]
        values = None if v is None else v[0]
        rows_first = loop.first_side == "row"
        return _scale_one(kernel[0], a[0], values, loop.half_steps, rows_first, mass)[None]
    return _scale_group(kernel, a, v, keep, loop, key_mass)


def _without_gil(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """TorchScript runs a function without the interpreter lock; other Pythons run it as it is.

    The loop is dozens of calls of some ten microseconds each. Two workers that fight for the lock
    between them run slower than one worker alone; without the lock they run twice as fast.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            scripted: Callable[..., Tensor] = torch.jit.script(function)
    except (RuntimeError, NotImplementedError, OSError):  # no TorchScript, or no source, here
        return function
    return scripted


@_without_gil
def _scale_one(
    kernel: Tensor,
    a: Tensor,
    v: Optional[Tensor],  # noqa: UP045  TorchScript
    half_steps: int,
    rows_first: bool,
    mass: float,
) -> Tensor:
    """Alternate a = 1 / K b and b = 1 / K'a, then return mass diag(a) K diag(b) (v).

    kernel: [N, M], without masked keys; a: [N]; mass: that of each row or column of the last side,
    the other side's is gauge.  No allocation inside the loop.
    """
    transposed = kernel.t()
    b = torch.ones_like(kernel[0])
    rows_turn = rows_first
    for _ in range(half_steps):
        if rows_turn:
            torch.mv(kernel, b, out=a)
            a.reciprocal_()
        else:
            torch.mv(transposed, a, out=b)
            b.reciprocal_()
        rows_turn = not rows_turn
    a = a * mass
    if v is None:
        return kernel.mul_(a.unsqueeze(1)).mul_(b)
    return torch.mm(kernel, b.unsqueeze(1) * v).mul_(a.unsqueeze(1))


@_without_gil
def _bounded_heads(
    scaled_q: Tensor,
    k: Tensor,
    v: Tensor,
    dual: Optional[Tensor],  # noqa: UP045  TorchScript
    out: Tensor,
    worker: int,
    workers: int,
    half_steps: int,
    rows_first: bool,
    mass: float,
) -> Tensor:
    """Every `workers`-th head of a problem without masks or bias whose exp(S) is safe, into `out`.

    scaled_q: [G, N, D]; k: [G, M, D]; v: [G, M, E]; dual: [G, N]; out: [G, N, E].  The tile is one
    buffer for all heads: fresh pages for every tile would cost as much as the exponentials.
    """
    kernel = torch.empty([scaled_q.size(1), k.size(1)], dtype=scaled_q.dtype)
    for head in range(worker, scaled_q.size(0), workers):
        torch.mm(scaled_q[head], k[head].t(), out=kernel)
        kernel.exp_()
        if dual is not None:
            a = torch.exp(dual[head] - dual[head].max())
        else:
            a = torch.ones_like(scaled_q[head].select(1, 0))
        out[head].copy_(_scale_one(kernel, a, v[head], half_steps, rows_first, mass))
    return out


def _scale_group(
    kernel: Tensor,
    a: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    loop: Loop,
    key_mass: float,
) -> Tensor:
    """The same for several heads at once, kernel: [G, N, M], a: [G, N], masked keys in place.

    K is 0 on masked keys, so that the plan is 0 there whatever b is; totals of 0 must not divide.
    """
    row_mass = 1.0 / kernel.shape[1]
    transposed = kernel.transpose(1, 2)
    a = a[..., None]
    b = kernel.new_ones((len(kernel), kernel.shape[2], 1))
    rows_turn = loop.first_side == "row"
    if keep is not None:
        empty_rows = ~keep.any(-1)[:, None, None]
        masked = ~keep[..., None]
    for _ in range(loop.half_steps):
        if rows_turn:
            a = torch.bmm(kernel, b)
            if keep is not None:
                a.masked_fill_(empty_rows, 1.0)
            a.reciprocal_().mul_(row_mass)
        else:
            b = torch.bmm(transposed, a)
            if keep is not None:
                b.masked_fill_(masked, 1.0)
            b.reciprocal_().mul_(key_mass)
        rows_turn = not rows_turn
    if v is None:
        return kernel.mul_(a).mul_(b.transpose(1, 2))
    return torch.bmm(kernel, b * v).mul_(a)


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
    scores = scores[:, None]
    f, g = initial_duals(scores, keep)
    if dual is not None:
        f = dual[:, None]
    f, g = run_half_steps(scores, f, g, loop.half_steps, loop.first_side, keep)
    plan = torch.exp(scores + f[..., None] + g[..., None, :])[:, 0]
    if _ends_on_columns(loop):
        plan *= key_mass * scores.shape[-1]  # masked keys may have been dropped: nu_j is 1/M still
    return plan if v is None else torch.bmm(plan, v)


@cache
def _workers(process: int, count: int) -> ThreadPoolExecutor:
    """`count` threads whose torch operators run serially; one pool per process, fork or not.

    Torch keeps the thread count per thread, but setting it also moves the default that later
    threads start from: the caller's own count is set again once every worker has its own.
    """
    ready = threading.Barrier(count + 1)

    def start() -> None:
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="asapc", initializer=start)
    for _ in range(count):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(count)
    return pool


def _each(work: Callable[[int], None], starts: Sequence[int]) -> None:
    """Call work(start) for every start, on as many threads as torch would use here."""
    if len(starts) == 1:
        work(starts[0])
        return

    def share(worker: int, workers: int) -> None:
        for start in starts[worker::workers]:
            work(start)

    _each_worker(share)


def _each_worker(share: Callable[[int, int], object]) -> None:
    """Call share(worker, workers) once per thread that torch would use here."""
    count = torch.get_num_threads()

    def run(worker: int) -> None:
        with torch.no_grad():  # grad mode is per thread
            share(worker, count)

    if count == 1:
        run(0)
        return
    for _ in _workers(os.getpid(), count).map(run, range(count)):
        pass
