"""Verify: invariants of a graph between passes, and a rewritten program against its teacher.

A broken invariant fails where it was broken; a program that does not replay is never emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from asapc.errors import VerificationError
from asapc.printed import reason


def check_graph(graph: GraphModule, pass_name: str, subjects: Sequence[str] = ()) -> None:
    """The graph is well formed: operands precede their users, attributes exist."""
    try:
        graph.graph.lint()
    except RuntimeError as error:
        raise VerificationError(
            f"the graph is well formed after {pass_name} of {', '.join(subjects) or 'nothing'}",
            got=reason(error),
            help="this is a defect of asapc: please report the model",
        ) from error


def tensor_outputs(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output structure, numpy arrays included, in order."""
    leaves = []
    for leaf in pytree.tree_leaves(output):
        if not isinstance(leaf, Tensor):
            try:
                leaf = torch.as_tensor(leaf)
            except (TypeError, ValueError, RuntimeError):
                continue
        if leaf.is_floating_point():
            leaves.append(leaf)
    return leaves


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
        difference = (x.double() - y.double()).abs()
        scale = max(1.0, float(x.double().abs().max()))
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
