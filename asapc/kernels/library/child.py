"""asapc::child and asapc::seen: marks in a graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
