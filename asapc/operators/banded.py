"""The finite loop of operators.sinkhorn on a band of scores: every query sees a window of keys alone.

    S_ij = score_multiplier * q_i . k_j    where low <= j - i <= high,    -inf elsewhere
    f_i = log mu_i - logsumexp_j(S_ij + g_j),    g_j = log nu_j - logsumexp_i(S_ij + f_i)
    A_ij = factor * exp(S_ij + f_i + g_j)

A window of W = high - low + 1 keys takes O(T N W) in the C++ engine and in kernels.band, its gradients
too; this is the meaning, plain PyTorch of N x M scores, any dtype, differentiable.  Source: the
block-wise Sinkhorn paper, Eqs. 1 and 2, with a band as support.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from asapc.ir import FACTOR, Convention, FiniteLoop, Mask, OutputFactor
from asapc.operators.pair import pair
from asapc.operators.sinkhorn import (
    attention_map,
    clean_values,
    finite_duals,
    loop_settings,
    score_matrix,
    widen,
)


@dataclass(frozen=True)
class BandedConvention(FiniteLoop):
    """The finite loop of a teacher whose query i sees keys i + low .. i + high alone.

    The rest as in ir.Convention. With a key mask, a query whose window has no active key gets nothing.
    """

    operator: ClassVar[str] = "banded_sinkhorn"

    low: int
    high: int
    output_factor: OutputFactor = field(default_factory=OutputFactor, metadata=FACTOR)
    mask: Mask = "none"

    @property
    def loop(self) -> Convention:
        """What it does inside the band."""
        return Convention(
            self.half_steps, self.first_side, self.score_multiplier, self.output_factor, self.mask
        )


def settings_of(convention: BandedConvention) -> dict[str, Any]:
    """The operator's settings by name."""
    return {**loop_settings(convention), "low": convention.low, "high": convention.high}


def in_band(queries: int, keys: int, low: int, high: int, like: Tensor) -> Tensor:
    """[N, M] bool, True where low <= j - i <= high."""
    i = torch.arange(queries, device=like.device)[:, None]
    j = torch.arange(keys, device=like.device)[None, :]
    return (j - i >= low) & (j - i <= high)


def within(queries: int, keys: int, low: int, high: int) -> tuple[int, int]:
    """The same window without what lies beyond all keys; low > high where no query sees one."""
    return min(max(low, 1 - queries), keys), max(min(high, keys - 1), -queries)


def seen_keys(q: Tensor, k: Tensor, keep: Tensor | None, low: int, high: int) -> Tensor:
    """[B, M] bool, True for active keys in some query's window."""
    j = torch.arange(k.shape[2], device=k.device)
    seen = ((j >= low) & (j <= q.shape[2] - 1 + high) & (low <= high)).expand(len(k), -1)
    return seen if keep is None else seen & keep


def banded_map(
    scores: Tensor, keep: Tensor | None, half_steps: int, rows_first: bool,
    output_factor: Sequence[float], low: int, high: int, tail: int | None = None,
) -> Tensor:  # fmt: skip
    """The map [B, H, N, M] of scores in units of epsilon, of which those outside the band do not count.

    Every query has mass 1/N and every active key 1/M. Of a key that no query sees, and of a query with
    no active key in its window, the map is 0, whatever their duals are.
    """
    queries, keys = scores.shape[-2:]
    shown = in_band(queries, keys, low, high, scores)
    if keep is not None:
        shown = shown & keep[:, None, None, :]
    scores = scores.masked_fill(~shown, -math.inf)
    f, g = finite_duals(scores, half_steps, "row" if rows_first else "column", keep, tail)
    return attention_map(scores, f, g, output_factor, keep)


def _banded_sinkhorn(
    q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None, score_multiplier: float, half_steps: int,
    rows_first: bool, output_factor: Sequence[float], low: int, high: int, tail: int | None = None,
    tolerance: float = 0.0,
) -> Tensor:  # fmt: skip
    """A v [B, H, N, E] in v's dtype, or the dense map A [B, H, N, M] in q's.

    q: [B, H, N, D]; k: [B, H, M, D]; v: [B, H, M, E]; keep: [B, M] bool, True on active keys.
    tail, tolerance: see operators.sinkhorn.sinkhorn.
    """
    if 0 in (q.shape[2], k.shape[2]):
        return q.new_zeros(*q.shape[:3], k.shape[2] if v is None else v.shape[3])
    scores = score_matrix(widen(q), widen(clean_values(k, keep)), None, None, score_multiplier)
    attention = banded_map(scores, keep, half_steps, rows_first, output_factor, low, high, tail)
    return attention if v is None else attention @ widen(clean_values(v, keep))


banded_sinkhorn, banded_sinkhorn_attention = pair("banded_sinkhorn", _banded_sinkhorn)
