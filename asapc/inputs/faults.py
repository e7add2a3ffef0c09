"""Which example is wrong, and where in it, instead of what a kernel says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asapc.errors import InputError
from asapc.inputs.data import Batch, Signature, rows
from asapc.terminal.printed import first_line

RULE = "the model must run on the given data"
HELP = "check the names, shapes and dtypes of the data against the model's forward"


def data_fault(
    error: Exception, batch: Batch, run: Callable[[Batch], Any], names: Sequence[str] = ()
) -> InputError | None:
    """The error as a fault of the data, or None if no single example is to blame.

    An example is to blame if a batch of it alone fails and a batch of some other does not. An index
    beyond its table is the data's fault even if every example has one.  names: of positional arguments.
    """
    size = len(batch)
    failing = [i for i in range(size) if not _runs(run, rows(batch, [i] * size))]
    working = [i for i in range(size) if i not in failing]
    if not failing or not (working or isinstance(error, IndexError)):
        return None
    bad = failing[0]
    number = batch.numbers[bad] if batch.numbers else None
    place = "an example" if number is None else f"example {number} (counted from 0)"
    others = rows(batch, working) if working else None
    entry = _entry(rows(batch, [bad] * size), others, run, names)
    place += "" if entry is None else f": {entry}"
    return InputError(
        RULE, got=f"{type(error).__name__} in {place} ({first_line(error)})",
        help="fix or remove that example",
    )


def batch_fault(error: Exception, size: int) -> InputError:
    """The error of a batch of which no single example is to blame."""
    got = f"{type(error).__name__} in a batch of {size} ({first_line(error)})"
    return InputError(RULE, got=got, help=HELP)


def device_fault(error: Exception) -> InputError | None:
    """Faults of a GPU: its memory is full, or a kernel met an index beyond its table. After that no
    kernel runs in this process, so the example cannot be searched for."""
    if isinstance(error, torch.OutOfMemoryError):
        return InputError(
            "a batch must fit into the GPU's memory", got=first_line(error, 200),
            help="set a smaller batch_size in the recipe, or use --device cpu",
        )  # fmt: skip
    if "device-side assert" in str(error):
        return InputError(
            RULE, got="a device-side assert, such as from an index out of range",
            help="run it again with --device cpu, which names the example",
        )  # fmt: skip
    return None


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of forward's positional arguments, as far as it declares them."""
    return Signature(inspect.signature(module.forward)).positional


def check_labels(labels: Tensor, classes: int, numbers: Sequence[int] = (), place: str = "data") -> None:
    """labels: [B].  numbers: of the examples.  Raises InputError for one that is no class."""
    wrong = ((labels < 0) | (labels >= classes)).nonzero().flatten().tolist()
    if wrong:
        first = wrong[0]
        where = f" in example {numbers[first]} (counted from 0)" if numbers else ""
        raise InputError(
            f"{place}: labels must be class numbers from 0 to {classes - 1}",
            got=f"{int(labels[first])}{where}",
            help="every output column is a class; leave out labels to skip accuracy",
        )


def _runs(run: Callable[[Batch], Any], batch: Batch) -> bool:
    try:
        run(batch)
    except Exception:  # of the model
        return False
    return True


def _entry(
    bad: Batch, working: Batch | None, run: Callable[[Batch], Any], names: Sequence[str]
) -> str | None:
    """"input_ids[5] = 99999": the integer that is out of range, if the batch runs with it in range.

    bad: one example, repeated.  The range is that of the working examples, or just 0 if there are none.
    """
    arguments: list[tuple[str | int, Any]] = [*enumerate(bad.args), *bad.kwargs.items()]
    for key, value in arguments:
        if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool:
            continue
        low, high = 0, 0
        if working is not None:
            others = working.args[key] if isinstance(key, int) else working.kwargs[key]
            low, high = int(others.min()), int(others.max())
        mended = value.clamp(low, high)
        in_range = bad.mapped(lambda x, old=value, new=mended: new if x is old else x)  # type: ignore[misc]
        if torch.equal(mended, value) or not _runs(run, in_range):
            continue
        excess = torch.maximum(low - value[0].double(), value[0].double() - high).flatten()
        place = [int(i) for i in torch.unravel_index(excess.argmax(), value.shape[1:])]
        name = key if isinstance(key, str) else names[key] if key < len(names) else f"argument {key}"
        return f"{name}{place if place else ''} = {int(value[(0, *place)])}"
    return None
