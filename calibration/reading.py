"""What a run has read so far, as a digest: two runs have the same one only after the same batches.

What was collected from the first batches of a run is good for another run that would collect the same
from its own first batches: those examples in those batches, and the sample that slices and pivots are
made from. Later examples may differ. That is how a calibration goes on once the fault that ended it is
mended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from torch import Tensor
from torch.utils import _pytree as pytree

from asapc.inputs.data import Batch

Batches = Callable[[], Iterable[Batch]]


@dataclass(frozen=True)
class Examples:
    """What one pass reads, each part as often as it is called for.

    sample:   what slices and pivots are made from, whatever the size of a batch.
    batches:  to fit on.
    held_out: to stop distillation by, where anything is distilled.
    count:    how many batches there are to fit on; None where that is not known.
    behind:   what the layers that this pass runs behind were fitted on, as a digest.
    """

    sample: Batches
    batches: Batches
    held_out: Batches = tuple
    count: int | None = None
    behind: str = ""

    def read(self) -> Reading:
        """The reading after the sample, before the first batch."""
        return _after(Reading(self.behind), self.sample()).then()

    def digests(self, most: int) -> list[str]:
        """After the sample, and after each of the first `most` batches."""
        reading = self.read()
        return [reading.digest, *(_after(reading, [b]).digest for b in islice(self.batches(), most))]

    def whole(self) -> str:
        """After everything."""
        return _after(_after(self.read(), self.batches()).then(), self.held_out()).digest


class Reading:
    """A digest of batches in their order, by the hashes of their examples (asapc.inputs.data)."""

    def __init__(self, behind: str = "") -> None:
        self._sha256 = hashlib.sha256(f"{behind}\n".encode())

    def add(self, batch: Batch) -> None:
        leaves, structure = pytree.tree_flatten((batch.args, batch.kwargs))
        constants = [repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
        entry = json.dumps([batch.hashes, constants, str(structure)])
        self._sha256.update(f"{entry}\n".encode(errors="backslashreplace"))

    def then(self) -> Reading:
        """One that goes on from here with batches of another kind; this one stays where it is."""
        reading = Reading()
        reading._sha256 = self._sha256.copy()
        reading._sha256.update(b"\n")
        return reading

    @property
    def digest(self) -> str:
        return self._sha256.hexdigest()


def _after(reading: Reading, batches: Iterable[Batch]) -> Reading:
    for batch in batches:
        reading.add(batch)
    return reading
