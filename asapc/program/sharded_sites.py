"""asapc's operators on shards: every process has some of the queries, and the loop is that of all.

    row half-step       local: a query sees all keys
    column half-step    logsumexp over the own queries, then one exchange of M numbers a head
    keys and values     gathered once, H / P heads at a time, so that memory falls as 1 / P

Plain PyTorch in the log domain, a block of scores at a time, without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asapc.features import feature_list
from asapc.operators.asap import dual, dual_and_row_mass, first_c_transform, open_dual
from asapc.operators.c_transforms import log_marginals
from asapc.operators.sinkhorn import clean_values, factor_value, open_empty, opened_keys, widen
from asapc.program.shards import Group, Shard, whole

BLOCK_BYTES = 1 << 22  # of scores formed at once: they pass through a cache several times
QUERIES = 2  # the axis of queries, and of keys, in what an operator is given


def sinkhorn(
    q: Shard, k: Any, v: Any, keep: Any, bias: Any, *, f: Any = None, g: Any = None, **settings: Any
) -> Shard:
    """operators.sinkhorn.sinkhorn of the own queries, from the duals f and g if given, a few heads at a
    time: a shard of [B, H, N, E], or of the map [B, H, N, M] if v is None; forward only."""
    keep, typed = whole(keep), q if v is None else v
    dtype = typed.local.dtype if isinstance(typed, Shard) else typed.dtype
    bias = _own_rows(bias, q)
    local_f = None if f is None else Shard.of(whole(f), QUERIES, q.group).local
    whole_g = whole(g)
    width = k.shape[2] if v is None else v.shape[3]
    out = q.local.new_empty((*q.local.shape[:3], width), dtype=torch.promote_types(dtype, torch.float32))
    factor = factor_value(settings["output_factor"], q.shape[2], k.shape[2], opened_keys(keep))
    for some in _head_groups(q.shape[1], q.group):
        queries, keys = q.local[:, some], _heads(k, some)
        queries, opened, own_bias = open_empty(queries, keep, _heads(bias, some))
        keys = clean_values(keys, opened)
        scaled = widen(queries) * settings["score_multiplier"]
        loop = _Loop(scaled, widen(keys), widen(own_bias), q.shape[2], q.group, opened)
        loop.start(
            None if local_f is None else open_dual(local_f[:, some], keep),
            None if whole_g is None else open_dual(whole_g[:, some], keep),
        )
        loop.run(settings["half_steps"], settings["rows_first"])
        values = None if v is None else widen(clean_values(_heads(v, some), opened))
        loop.write(values, out[:, some])
    out *= factor.to(out.dtype) if isinstance(factor, Tensor) else factor
    return q.like(out.to(dtype))


def asap(*, source_dual: Any, target_dual: Any, c_transforms: int, **rest: Any) -> Shard:
    """operators.asap.asap of the own queries, as sinkhorn does it."""
    rows_first = first_c_transform(source_dual, target_dual, c_transforms) == "row"
    return sinkhorn(half_steps=c_transforms, rows_first=rows_first, f=source_dual, g=target_dual, **rest)


def _predicted(
    predict: Callable[..., Any], q: Shard, k: Any, keep: Any, bias: Any,
    parameters: Sequence[Tensor], coefficients: Tensor, features: str, **settings: Any,
) -> Any:  # fmt: skip
    """operators.asap.dual, or dual_and_row_mass, of all queries and keys, then cut: predicting takes
    linear time, so every process does it."""
    heads, keep, bias = q.shape[1], whole(keep), _four_axes(whole(bias))
    parsed, _ = feature_list(features, parameters)
    by_head = [feature.by_head for feature in parsed if feature.has_parameter]
    groups = []
    for some in _head_groups(heads, q.group):
        result = predict(
            _heads(q, some), _heads(k, some), keep, _heads(bias, some),
            parameters=[p[some] if split else p for p, split in zip(parameters, by_head, strict=True)],
            coefficients=coefficients[some] if len(coefficients) > 1 else coefficients,
            features=features, **settings,
        )  # fmt: skip
        parts = result if isinstance(result, tuple) else (result,)
        groups.append([Shard.of(part, QUERIES, q.group).local.clone() for part in parts])
    sizes = (k.shape[2] if settings.get("side") == "target" else q.shape[2], q.shape[2])
    joined = [
        Shard(torch.cat(parts, 1), QUERIES, size, q.group)
        for parts, size in zip(zip(*groups, strict=True), sizes, strict=False)
    ]
    return tuple(joined) if len(joined) > 1 else joined[0]


def _own_rows(bias: Any, q: Shard) -> Tensor | None:
    """A score bias [B|1, H|1, N|1, M|1] of the own queries, and of all keys."""
    if isinstance(bias, Shard) and bias.from_end == -2:
        return bias.local
    bias = _four_axes(whole(bias))
    if bias is None or bias.shape[-2] == 1:
        return bias
    return Shard.of(bias, -2, q.group).local


def _four_axes(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.view((1,) * (4 - bias.dim()) + bias.shape)


def _head_groups(heads: int, group: Group) -> Iterator[slice]:
    """The heads in as many parts as there are processes, or fewer."""
    each = -(-heads // group.processes)
    return (slice(start, min(start + each, heads)) for start in range(0, heads, max(1, each)))


def _heads(x: Any, some: slice) -> Any:
    """Some heads [B, h, ..] of all tokens."""
    if isinstance(x, Shard):
        return x.whole()[:, some] if x.axis == 1 else x.like(x.local[:, some]).whole()
    return x if x is None or x.shape[1] == 1 else x[:, some]


class _Loop:
    """The duals of some heads: f of the own queries, g of all keys, the same in every process.

    S [B, H, n, M] is formed in blocks of rows; masked keys have a dual of -inf.
    """

    def __init__(
        self, q: Tensor, k: Tensor, bias: Tensor | None, queries: int, group: Group, keep: Tensor | None
    ) -> None:
        self.q, self.k, self.bias, self.group = q, k, bias, group
        of_one = max(1, q.shape[0] * q.shape[1] * k.shape[2] * q.element_size())
        step = max(1, BLOCK_BYTES // of_one)
        self.rows = [slice(start, min(start + step, q.shape[2])) for start in range(0, q.shape[2], step)]
        log_mu, self.log_nu = log_marginals(queries, k.shape[2], keep, q)
        self.log_mu = log_mu[:1] if queries else q.new_zeros(1)
        self.f = q.new_zeros(q.shape[:3])
        g = torch.where(torch.isneginf(self.log_nu), self.log_nu, 0.0)
        self.g = g.expand(*q.shape[:2], k.shape[2])

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        for rows in self.rows:
            scores = self.q[:, :, rows] @ self.k.transpose(-1, -2)
            if self.bias is not None:
                scores += self.bias if self.bias.shape[-2] == 1 else self.bias[..., rows, :]
            yield rows, scores

    def start(self, f: Tensor | None, g: Tensor | None) -> None:
        """Start from these duals instead of 0."""
        self.f = self.f if f is None else f.to(self.f.dtype).clone()
        if g is not None:
            self.g = torch.where(torch.isneginf(self.log_nu), self.log_nu, g.to(self.g.dtype))

    def run(self, half_steps: int, rows_first: bool) -> None:
        """Run half-steps; a row half-step and the column half-step after it form the scores once."""
        left, rows_turn = half_steps, rows_first
        while left:
            columns = left > 1 or not rows_turn
            self._sweep(rows_turn, columns)
            left -= 1 + (rows_turn and columns)
            rows_turn = True

    def _sweep(self, closes_rows: bool, closes_columns: bool) -> None:
        total = torch.full_like(self.g, -math.inf) if closes_columns else None
        for rows, scores in self.blocks():
            if closes_rows:
                sums = torch.logsumexp(scores + self.g[..., None, :], -1)
                self.f[..., rows] = torch.where(torch.isneginf(sums), 0.0, self.log_mu - sums)
            if total is not None:
                scores += self.f[..., rows, None]
                total = torch.logaddexp(total, torch.logsumexp(scores, -2))
        if total is not None:
            total = torch.logsumexp(self.group.all_of(total), 0)
            g = torch.where(torch.isneginf(total), 0.0, self.log_nu - total)
            self.g = torch.where(torch.isneginf(self.log_nu), self.log_nu, g)

    def write(self, values: Tensor | None, out: Tensor) -> None:
        """Write exp(S + f + g) v to out [B, h, n, E], or exp(S + f + g).  values: [B, h, M, E]."""
        for rows, scores in self.blocks():
            scores += self.f[..., rows, None]
            scores += self.g[..., None, :]
            out[:, :, rows] = scores.exp_() if values is None else scores.exp_() @ values


SITES: dict[str, Callable[..., Any]] = {
    "sinkhorn": sinkhorn,
    "sinkhorn_attention": partial(sinkhorn, v=None),
    "asap": asap,
    "asap_attention": partial(asap, v=None),
    "dual": partial(_predicted, dual),
    "dual_and_row_mass": partial(_predicted, dual_and_row_mass),
}
