"""What a run has read so far, as a digest: two runs have the same one only after the same batches.

What one run collected from its first batches can be used by another whose first batches, and whose sample
for slices and pivots, are the same. Later examples may differ: that is how a calibration continues after
the example that ended it was fixed.
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
    """What one pass reads; each part can be read any number of times.

    sample:   what slices and pivots are made from, whatever the batch size.
    batches:  to fit on.
    held_out: decide when distillation stops, if anything is distilled.
    count:    how many batches there are to fit on, None if unknown.
    behind:   a digest of what the layers in front of this pass were fitted on.
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
        """A reading that continues from here with batches of another kind; this one does not change."""
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
