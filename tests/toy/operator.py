"""Softmax attention: A = softmax(score_multiplier q k' + bias), 0 on masked keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asapc.ir import Kind, Mask
from asapc.operators.sinkhorn import clean_values, score_matrix, widen


@dataclass(frozen=True)
class SoftmaxConvention(Kind):
    """score_multiplier: of q k'."""

    operator: ClassVar[str] = "softmax"

    score_multiplier: float
    mask: Mask = "none"


def softmax_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
) -> Tensor:
    scores = score_matrix(widen(q), widen(k), keep, widen(bias), score_multiplier)
    return torch.softmax(scores, -1).nan_to_num(0.0, math.inf).to(q.dtype)


def softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
) -> Tensor:
    attention = softmax_attention(widen(q), widen(k), keep, bias, score_multiplier)
    return (attention @ widen(clean_values(v, keep))).to(v.dtype)
