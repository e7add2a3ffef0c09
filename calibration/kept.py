"""The activations a fit keeps: pieces of batches, in order, up to a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from asapc.processes import Part, apart, together


class Piece(Protocol):
    """A few examples of one batch."""

    def __len__(self) -> int: ...

    def all_tensors(self) -> dict[str, Tensor]:
        """All it consists of, by name."""
        ...


P = TypeVar("P", bound=Piece)


@dataclass
class Kept(Generic[P]):
    """limit: bytes; the first piece is kept however large it is.  full: some piece was not kept.

    ends: how many pieces there were after each batch.
    """

    limit: int
    pieces: list[P] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    bytes: int = 0
    full: bool = False

    @property
    def examples(self) -> int:
        return sum(map(len, self.pieces))

    def add(self, piece: P) -> None:
        size = sum(x.nbytes for x in piece.all_tensors().values())
        self.full = self.full or bool(self.pieces and self.bytes + size > self.limit)
        if not self.full:
            self.pieces.append(piece)
            self.bytes += size

    def end_batch(self) -> None:
        self.ends.append(len(self.pieces))

    def part(self) -> Part:
        """For another process; see take_turns."""
        tensors = together((str(i), piece.all_tensors()) for i, piece in enumerate(self.pieces))
        return tensors, {"ends": self.ends, "full": self.full}

    def take_turns(self, parts: Sequence[Part], made: Callable[[Mapping[str, Tensor]], P]) -> None:
        """Hold what one process would have kept, had the batches not been shared out.

        parts: one for each process, in the order of ranks.  made: makes a piece of its tensors.
        """
        batches: list[list[list[Mapping[str, Tensor]]]] = []  # of each process
        for tensors, facts in parts:
            ends: list[Any] = [0, *facts["ends"]]
            batches.append([[apart(tensors, str(i)) for i in range(*both)] for both in pairwise(ends)])
        self.pieces, self.ends, self.bytes = [], [], 0
        self.full = False
        for turn in zip_longest(*batches, fillvalue=()):
            for pieces in turn:
                for piece in pieces:
                    self.add(made(piece))
                self.end_batch()
        self.full = self.full or any(facts["full"] for _, facts in parts)
