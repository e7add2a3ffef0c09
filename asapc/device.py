"""Which device a model runs on, and the model there for a while.

    asapc calibrate MODEL --data DATA --device cuda

A model is captured, matched and written on the CPU: what is found and written does not depend on the
device. It is replayed, calibrated, priced and measured on the device, where its weights lie meanwhile.
Data is brought there batch by batch (`DataSource.device`), and what is computed is where the data is.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from asapc.errors import InputError
from asapc.processes import local_rank

T = TypeVar("T")
CPU = torch.device("cpu")
GRAMMAR = "auto, cpu, cuda, or cuda:1 for the second GPU"
_NAME = re.compile(r"(cpu|cuda)(?::(\d{1,4}))?")


def chosen_device(text: str) -> torch.device:
    """The device of that name; "auto" takes a GPU if there is one.

    Without a number, each process that torchrun has started takes the next GPU.  Raises InputError for
    another name, and for a device that is not there.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto":
        text = "cuda" if there else "cpu"
    name = _NAME.fullmatch(text)
    if name is None or (name[1] == "cpu" and name[2] is not None):
        raise InputError(f"--device must be {GRAMMAR}", got=repr(text))
    if name[1] == "cpu":
        return CPU
    if not there:
        raise InputError(
            f"--device {text} must be a device of this machine",
            got="no GPU that torch can use",
            help="check torch.cuda.is_available(), or leave out --device to run on the CPU",
        )
    index = local_rank() % there if name[2] is None else int(name[2])
    if index >= there:
        raise InputError(
            f"--device {text} must be a device of this machine",
            got=f"{there} GPU{'s' * (there > 1)}, counted from 0",
        )
    return torch.device("cuda", index)


def described(device: torch.device) -> str:
    """The device's name for reports: "cpu", or what the GPU is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def moved(value: T, device: torch.device) -> T:
    """A tensor, or nested data classes, tuples, lists and mappings, with the tensors on the device."""
    there: Any = value
    if isinstance(value, Tensor):
        there = value.to(device)
    elif isinstance(value, Mapping):
        there = {name: moved(item, device) for name, item in value.items()}
    elif isinstance(value, tuple | list):
        items = [moved(item, device) for item in value]
        there = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        there = replace(value, **{name: moved(part, device) for name, part in parts.items()})
    return cast(T, there)


@contextlib.contextmanager
def running_on(device: torch.device, modules: Iterable[nn.Module | None]) -> Iterator[None]:
    """Have the modules' weights on the device for a while; afterwards they are the very same tensors.

    What modules share, they share there too. The devices that a captured graph names follow.
    """
    visit = _Visit(device)
    with contextlib.ExitStack() as stack:
        stack.callback(visit.undo)
        if device.type == "cuda" and torch.cuda.is_available():
            stack.enter_context(torch.cuda.device(device))  # where Triton launches
        for module in modules:
            if module is not None:
                visit.move(module)
        yield


def settle(graph: nn.Module, device: torch.device) -> None:
    """Bring what a rewrite has put into a graph, such as a fit's coefficients, to the device."""
    _Visit(device).move(graph)


class _Visit:
    """Moves modules, and remembers how they were."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._there: dict[int, tuple[Tensor, Tensor]] = {}  # by the original's id: it, and its copy
        self._undo: list[Any] = []

    def move(self, module: nn.Module) -> None:
        for part in module.modules():
            for name, value in (*part._parameters.items(), *part._buffers.items(), *vars(part).items()):
                if isinstance(value, Tensor) and value.device != self.device:
                    self._put(part, name, value, self._copy(value))
            if isinstance(part, GraphModule):
                self._rename(part)

    def undo(self) -> None:
        """Put everything back as it was, the last change first."""
        while self._undo:
            self._undo.pop()()

    def _put(self, part: nn.Module, name: str, before: Tensor, after: Tensor) -> None:
        setattr(part, name, after)

        def back() -> None:
            if name in part._parameters and not isinstance(before, nn.Parameter):
                part._buffers[name] = before  # training has made it a parameter
                del part._parameters[name]
            else:
                setattr(part, name, before)

        self._undo.append(back)

    def _copy(self, tensor: Tensor) -> Tensor:
        known = self._there.get(id(tensor))
        if known is None:
            copy = tensor.detach().to(self.device)
            if isinstance(tensor, nn.Parameter):
                copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
            known = self._there[id(tensor)] = (tensor, copy)
            self._there[id(copy)] = known  # a module that two others share
        return known[1]

    def _rename(self, graph: GraphModule) -> None:
        """Replace the devices in the arguments of a graph's calls."""

        def other(value: Any) -> Any:
            return self.device if isinstance(value, torch.device) else value

        changed = []
        for node in graph.graph.nodes:
            if node.op == "call_function":
                args, kwargs = map_aggregate(node.args, other), map_aggregate(node.kwargs, other)
                if args != node.args or kwargs != node.kwargs:
                    changed.append((node, node.args, node.kwargs))
                    node.args, node.kwargs = args, kwargs
        if not changed:
            return
        graph.recompile()

        def back() -> None:
            for node, args, kwargs in changed:
                node.args, node.kwargs = args, kwargs
            graph.recompile()

        self._undo.append(back)
