"""A small classifier with what forwards have: optional arguments, a mask, an output class, layers."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from attention_zoo import module
from torch import Tensor, nn
from torch.utils import _pytree as pytree

TAU_OF_TEST = 1.0  # read on the way, see test_guards.py


@dataclasses.dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """As the outputs of transformers: a mapping of the fields that are there, and attributes."""

    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None
    loss: Tensor | None = None

    def __post_init__(self) -> None:
        for own in dataclasses.fields(self):
            if getattr(self, own.name) is not None:
                self[own.name] = getattr(self, own.name)


def _unflatten(kind: type, values: Any, names: Any) -> Any:
    return kind(**dict(zip(names, values, strict=True)))


pytree.register_pytree_node(
    Output, lambda own: (list(own.values()), list(own)), partial(_unflatten, Output),
    serialized_type_name="drop_in_nets.Output",
)  # fmt: skip


class Attention(nn.Module):
    """x: [B, N, C], keep: [B, N] bool or None -> [B, N, C]"""

    def __init__(self, width: int, heads: int, half_steps: int) -> None:
        super().__init__()
        self.heads, self.half_steps = heads, half_steps
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, keep: Tensor | None = None, *, sharp: bool = False) -> Tensor:
        q, k, v = (
            own(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for own in (self.to_q, self.to_k, self.to_v)
        )
        scores = q @ k.transpose(-1, -2) * (2.0 if sharp else 1.0)
        padded = None if keep is None else ~keep[:, None, None]
        if padded is not None:
            scores = scores.masked_fill(padded, -1e9)
        target = torch.zeros_like(scores[..., :1, :])
        source = torch.zeros_like(scores[..., :1])
        for step in range(self.half_steps):
            if step % 2 == 0:
                source = -torch.logsumexp(scores + target, -1, keepdim=True)
            else:
                target = -torch.logsumexp(scores + source, -2, keepdim=True)
                if padded is not None:
                    target = target.masked_fill(padded, 0.0)
        plan = torch.exp(scores + source + target)
        return self.out((plan @ v).transpose(1, 2).flatten(2) * self.temperature)


class Net(nn.Module):
    """x: [B, N, C], keep: [B, N] or None -> Output(logits [B, 3], hidden)"""

    def __init__(self, width: int = 8, half_steps: int = 7) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(width, 2, half_steps) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(
        self,
        x: Tensor,
        keep: Tensor | None = None,
        *,
        sharp: bool = False,
        labels: Tensor | None = None,
        **extra: Any,
    ) -> Output:
        hidden = []
        for block in self.blocks:
            x = self.norm(x + block(x, keep=keep, sharp=sharp))
            hidden.append(x)
        logits = self.head(x.mean(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Output(logits=logits, hidden=tuple(hidden), loss=loss)


class Pair(NamedTuple):
    out: Tensor
    norm: Tensor


class PairAttention(Attention):
    def forward(self, x: Tensor) -> Pair:  # type: ignore[override]
        out = super().forward(x)
        return Pair(out, out.norm(dim=-1))


class ThroughNumpy(nn.Module):
    """Cannot be captured as a whole; takes what its attention returns apart by name."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = PairAttention(8, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.attention(x)
        return found.out * torch.from_numpy(found.norm.detach().numpy()).mean()


def _norm(self: Any, x: Tensor) -> Tensor:
    """In float32 whatever it is given."""
    wide = x.float()
    return (wide * wide.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype)


def shared() -> nn.Module:
    """One attention called twice, with a norm between."""
    return module(
        lambda self, x: self.attention(self.norm(x) + self.attention(x)),
        attention=Attention(8, 2, 5), norm=module(_norm),
    )  # fmt: skip


def halved(self: Any, x: Tensor) -> Tensor:
    """A forward that is put on an instance, which counts its calls."""
    self.calls += 1
    return Attention.forward(self, x) * self.share


class Odd(nn.Module):
    """x: [B, N, 8] -> float32 [B, N, 3], in whatever dtype its weights are"""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.halved = shared(), Attention(8, 2, 4)
        self.halved.calls, self.halved.share = 0, 0.5
        self.halved.forward = MethodType(halved, self.halved)  # type: ignore[method-assign]
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.halved(self.shared(x))).float()


def odd() -> Odd:
    torch.manual_seed(0)
    return Odd().eval()


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()
