"""child: marks what a layer of a module computes, so that it can be called where the module is live.

    child([x], [linear(x, weight, bias)], "0")  ->  [a copy of linear(x, weight, bias)]

A program on disk holds operators alone. Between the marks of a layer's inputs and outputs it computes
what the layer computed when it was traced; asapc.program.live replaces that by a call of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def child(inputs: Sequence[Tensor], outputs: Sequence[Tensor], number: str) -> list[Tensor]:
    """The outputs.  number: of the layer's call among those of the program."""
    return [output.clone() for output in outputs]
