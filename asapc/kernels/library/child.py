"""asapc::child, asapc::seen and asapc::holds: marks in a graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asapc.errors import BranchError
from asapc.operators import child as child_reference


@torch.library.custom_op("asapc::child", mutates_args=())
def child(inputs: Sequence[Tensor], outputs: Sequence[Tensor], number: str) -> list[Tensor]:
    return child_reference.child(inputs, outputs, number)


@child.register_fake
def _(inputs: Sequence[Tensor], outputs: Sequence[Tensor], number: str) -> list[Tensor]:
    return [output.new_empty(output.shape) for output in outputs]


@torch.library.custom_op("asapc::seen", mutates_args=())
def seen(tensors: Sequence[Tensor], label: str) -> None:
    """Names tensors in a trace, see asapc.passes.observe; it computes nothing."""


@seen.register_fake
def _(tensors: Sequence[Tensor], label: str) -> None:
    return None


torch.fx.node.has_side_effect(torch.ops.asapc.seen.default)  # nothing uses it, and it has to stay


@torch.library.custom_op("asapc::holds", mutates_args=())
def holds(condition: Tensor, answer: bool, asked: str) -> None:
    """A branch of the code that was traced goes the way it was traced, see asapc.passes.branches."""
    if bool(condition) != answer:
        raise BranchError(asked, answer)


@holds.register_fake
def _(condition: Tensor, answer: bool, asked: str) -> None:
    return None


torch.fx.node.has_side_effect(torch.ops.asapc.holds.default)
