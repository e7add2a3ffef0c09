"""A model that is analysed on one batch, and what its compiled programs give."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from asapc.inputs.data import Batch
from asapc.inputs.teacher import Teacher
from asapc.passes.analyse import Analysis, analyse
from asapc.program.runner import Runner


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(*inputs: Any, **named: Any) -> Batch:
    first, *_ = (*inputs, *named.values())
    return Batch(inputs, named, None, [*range(len(first))])


def analysed(net: nn.Module, *inputs: Any, **named: Any) -> Analysis:
    return analyse(Teacher(net.eval(), None, "net", "", False, None), batch(*inputs, **named))


def ran(analysis: Analysis, *inputs: Any, **how: Any) -> Any:
    """By the operators alone, without the model's own code."""
    return Runner(None, analysis.lifted, **how)(batch(*inputs))
