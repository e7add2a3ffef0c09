"""Several processes of one command, started by torchrun: who does what, and how results are joined.

Each has the model and reads all of the data; batches are dealt out in turn. They exchange tensors and
JSON, never pickles, in the order of their ranks, so that no result depends on who was first. Exchanges
are in CPU memory and by gloo, even if the model runs on GPUs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from asapc.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Part = tuple[dict[str, "Tensor"], Any]  # tensors, and what JSON can hold

LONGEST = timedelta(days=7)  # one process waits for another: the first may distil for hours


@dataclass(frozen=True)
class Processes:
    """One of `size` processes, by its rank; the first one writes and speaks for all.

    group: of torch.distributed, None for the default one.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    def share(self, items: Iterable[T]) -> Iterator[T]:
        """Every size-th item, from the rank-th on."""
        return itertools.islice(items, self.rank, None, self.size)

    def gathered(self, part: Part) -> Iterator[Part]:
        """In the first process, the parts of all in the order of ranks, one at a time; nothing in the
        others."""
        if not self.first:
            _send(part, 0, self.group)
            return
        yield part
        for rank in range(1, self.size):
            yield _received(rank, self.group)

    def from_first(self, part: Part | None) -> Part:
        """The part of the first process, in all of them."""
        if not self.first:
            return _received(0, self.group)
        assert part is not None
        for rank in range(1, self.size):
            _send(part, rank, self.group)
        return part

    def exchanged(self, part: Part) -> list[Part]:
        """The parts of all processes in the order of ranks, in all of them."""
        parts = list(self.gathered(part))
        return [self.from_first(parts[rank] if parts else None) for rank in range(self.size)]

    def dealt(self, items: Iterable[T], make: Callable[[T], Part]) -> Iterator[tuple[T, Part]]:
        """In all processes, every item in order with its part; each process makes every size-th part."""
        if self.alone:
            yield from ((item, make(item)) for item in items)
            return
        left = iter(items)
        while group := list(itertools.islice(left, self.size)):
            mine = make(group[self.rank]) if self.rank < len(group) else ({}, None)
            yield from zip(group, self.exchanged(mine), strict=False)

    def summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums of the tensors over all processes, in float64, the same in every process."""
        if self.alone:
            return list(tensors)
        import torch
        import torch.distributed as dist

        if not tensors:
            return []
        flat = torch.cat([tensor.detach().cpu().double().flatten() for tensor in tensors])
        with _still_there(None):
            dist.all_reduce(flat, group=self.group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.reshape(x.shape).to(x) for part, x in zip(parts, tensors, strict=True)]

    def least(self, number: int) -> int:
        """The smallest number that any process passes."""
        return number if self.alone else min(int(other) for _, other in self.exchanged(({}, number)))


ALONE = Processes()


def rank_and_size() -> tuple[int, int]:
    """The rank of this process, and how many there are, from torchrun's environment variables."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(os.environ.get(name) for name in names):
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def local_rank() -> int:
    """The rank among the processes of this machine, from torchrun; 0 without it."""
    return int(os.environ.get("LOCAL_RANK") or 0)


@contextlib.contextmanager
def joined() -> Iterator[Processes]:
    """This process among those that torchrun started with it, connected while this is open.

    Where the model's own code has connected them already, they get a group of their own.
    """
    rank, size = rank_and_size()
    if size == 1:
        yield ALONE
        return
    import torch.distributed as dist

    group = None
    if dist.is_initialized():
        group = dist.new_group(backend="gloo", timeout=LONGEST)
    else:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=LONGEST)
    try:
        yield Processes(rank, size, group)
        dist.barrier(group)  # nobody leaves while another still sends
    finally:
        dist.destroy_process_group(group)


@contextlib.contextmanager
def _still_there(rank: int | None) -> Iterator[None]:
    """Raises InputError if the connection to that process, or to any of them, is lost."""
    try:
        yield
    except RuntimeError as error:  # of gloo, which has no class of its own
        raise InputError(
            "every process must finish",
            got="one has ended" if rank is None else f"rank {rank} has ended",
            help="see its own message, if any; the same command resumes",
        ) from error  # fmt: skip


def _send(part: Part, rank: int, group: Any) -> None:
    import torch
    import torch.distributed as dist

    content = torch.frombuffer(bytearray(_packed(part)), dtype=torch.uint8)
    with _still_there(rank):
        dist.send(torch.tensor([content.numel()]), rank, group)
        dist.send(content, rank, group)


def _received(rank: int, group: Any) -> Part:
    import torch
    import torch.distributed as dist

    size = torch.zeros(1, dtype=torch.int64)
    with _still_there(rank):
        dist.recv(size, rank, group)
        content = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(content, rank, group)
    return _unpacked(content.numpy().tobytes())


def _packed(part: Part) -> bytes:
    from safetensors.torch import save

    tensors, facts = part
    text = json.dumps(facts).encode()
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return len(text).to_bytes(8, "little") + text + save(whole)


def _unpacked(content: bytes) -> Part:
    from safetensors.torch import load

    end = 8 + int.from_bytes(content[:8], "little")
    return load(content[end:]), json.loads(content[8:end])


def together(parts: Iterable[tuple[str, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """The tensors of several things in one mapping, as THING/NAME; see apart."""
    return {f"{thing}/{name}": tensor for thing, tensors in parts for name, tensor in tensors.items()}


def apart(tensors: Mapping[str, Tensor], thing: str) -> dict[str, Tensor]:
    """The tensors of one thing, by their own names."""
    start = f"{thing}/"
    return {name[len(start) :]: x for name, x in tensors.items() if name.startswith(start)}
