"""Shards: tensors whose tokens are dealt out in order to the processes of a group, and their exchanges.

    rank 0: x[:, 0:4]    rank 1: x[:, 4:7]    rank 2: x[:, 7:10]       Shard(local, axis=1, size=10)

They are exchanged as bytes, padded to the longest share, and joined in the order of the ranks, so that
every process computes the same from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """The processes that share a sequence, and this one's rank among them."""

    handle: Any
    rank: int
    processes: int

    @classmethod
    def of(cls, handle: Any) -> Group:
        return cls(handle, dist.get_rank(handle), dist.get_world_size(handle))

    def share(self, size: int, rank: int | None = None) -> slice:
        """The tokens of a process, this one by default: at most one more than any other has."""
        rank = self.rank if rank is None else rank
        each, more = divmod(size, self.processes)
        start = rank * each + min(rank, more)
        return slice(start, start + each + (rank < more))

    def all_of(self, x: Tensor) -> Tensor:
        """[P, ...], the tensors of all processes, which have the same shape and dtype."""
        sent = x.contiguous().view(-1).view(torch.uint8)
        received = sent.new_empty((self.processes, sent.numel()))
        if sent.numel():
            dist.all_gather(list(received.unbind()), sent, group=self.handle)
        return received.view(-1).view(x.dtype).view(self.processes, *x.shape)

    def summed(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.all_of(x).sum(0, dtype=x.dtype)


@dataclass(frozen=True)
class Shard:
    """This process's tokens of a tensor.  local: its part of `axis`; size: of the whole axis."""

    local: Tensor
    axis: int
    size: int
    group: Group

    @classmethod
    def of(cls, whole: Tensor, axis: int, group: Group) -> Shard:
        """This process's part of a tensor that every process has."""
        axis %= whole.dim()
        share = group.share(whole.shape[axis])
        local = whole.narrow(axis, share.start, share.stop - share.start)
        return cls(local, axis, whole.shape[axis], group)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        shape = list(self.local.shape)
        shape[self.axis] = self.size
        return tuple(shape)

    @property
    def from_end(self) -> int:
        """The axis, counted from the last one: negative."""
        return self.axis - self.local.dim()

    def like(self, local: Tensor, axis: int | None = None) -> Shard:
        """A shard of the same tokens, with what was computed from them."""
        return replace(self, local=local, axis=self.axis if axis is None else axis % local.dim())

    def whole(self) -> Tensor:
        """Gathered from all processes."""
        if self.group.processes == 1:
            return self.local
        longest = self.group.share(self.size, 0)
        sent = self.local.movedim(self.axis, 0)
        padding = sent.new_zeros((longest.stop - len(sent), *sent.shape[1:]))
        parts = self.group.all_of(torch.cat((sent, padding)))
        shares = [self.group.share(self.size, rank) for rank in range(self.group.processes)]
        cut = [part[: share.stop - share.start] for part, share in zip(parts, shares, strict=True)]
        return torch.cat(cut).movedim(0, self.axis)


def whole(value: Any) -> Any:
    """The whole tensor of a shard, anything else as it is."""
    return value.whole() if isinstance(value, Shard) else value
