"""An ONNX graph as data: nodes that are ready to run, constants and inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Node:
    """One node.  function(*values of inputs, **attributes) gives its outputs; subgraphs come besides.

    scope: dotted name of the module that it was exported from, or its own name.
    drops: values that nothing after it needs.  Its repr is what it computes, whatever it is called.
    """

    name: str = field(repr=False)
    kind: str
    scope: str = field(repr=False)
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    function: Callable[..., Any] = field(repr=False)
    attributes: dict[str, Any]
    subgraphs: dict[str, Graph]
    drops: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"{self.kind} node {self.name}"


@dataclass(frozen=True)
class Graph:
    """constants: host values, Held or Filled, by value name.

    outer: values of the graphs around it that it uses.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, Any]
    nodes: tuple[Node, ...]
    outer: frozenset[str] = field(repr=False)


@dataclass(frozen=True)
class Held:
    """A constant that is a tensor: its key."""

    key: int


@dataclass(frozen=True)
class Filled:
    """A constant of one number everywhere: no weight, but something an exporter has worked out."""

    shape: tuple[int, ...]
    number: Any
    dtype: torch.dtype


@dataclass(frozen=True)
class Input:
    """What the model is given.  shape: sizes, None where any will do, or None for any rank."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | None, ...] | None
