"""How far the outputs of two models are from each other, whatever they are made of, and what class scores
mean: logits, probabilities, or one binary column."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

SMALLEST = torch.finfo(torch.float32).tiny  # a probability, before its logarithm is taken
ROUNDING = 1e-4  # of a sum of probabilities


def tensor_outputs(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output structure, numpy arrays included, in order."""
    return [leaf for leaf in number_outputs(output) if leaf.is_floating_point()]


def number_outputs(output: Any) -> list[Tensor]:
    """Its integers and booleans, too."""
    leaves = []
    for leaf in _leaves(output):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            leaves.append(torch.as_tensor(leaf))
    return leaves


def _leaves(output: Any) -> Iterator[Any]:
    """Those inside classes that pytree does not know, too."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Mapping):
            yield from _leaves([*leaf.values()])
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, each.name) for each in fields(leaf)])
        else:
            yield leaf


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether all entries are equal; NaN equals NaN."""
    if one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def largest_difference(first: Any, second: Any) -> float:
    """Largest absolute difference over the float outputs, relative to max(1, largest value).

    NaN if either holds NaN where the other does not; infinite if the structures differ.
    """
    a, b = tensor_outputs(first), tensor_outputs(second)
    if len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return float("inf")
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if x.numel() == 0:
            continue
        x, y = x.detach().double(), y.detach().double()
        difference = torch.where(x == y, 0.0, (x - y).abs())  # -inf is -inf, as in a log plan with masks
        scale = max(1.0, float(x.abs().nan_to_num(posinf=0.0).max()))
        value = float(difference.max()) / scale
        if value != value:
            return float("nan")
        worst = max(worst, value)
    return worst


def comparable(output: Any) -> list[Tensor]:
    """What two models are compared by: the first [B, classes], else the first float output.

    Attention maps that were dropped are empty tensors, and have nothing to compare.
    """
    there = [tensor for tensor in tensor_outputs(output) if tensor.numel()]
    return ([tensor for tensor in there if tensor.dim() == 2] or there)[:1]


def log_probabilities(scores: Tensor, probabilities: bool) -> Tensor:
    """[B, classes] log-probabilities in float64; a single column becomes the two classes it decides."""
    wide = scores.double()
    if wide.shape[1] == 1:
        if not probabilities:
            return torch.nn.functional.logsigmoid(torch.cat([-wide, wide], dim=1))
        wide = torch.cat([1 - wide, wide], dim=1)
    return wide.clamp(min=SMALLEST).log() if probabilities else torch.log_softmax(wide, dim=-1)


def are_probabilities(scores: Tensor) -> bool:
    """Whether every row is a distribution, or a single column within [0, 1]."""
    if not bool(((scores >= 0) & (scores <= 1)).all()):
        return False
    return scores.shape[1] == 1 or bool(((scores.double().sum(-1) - 1).abs() < ROUNDING).all())
