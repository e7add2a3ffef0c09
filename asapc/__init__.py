"""asapc: a post-training compiler for doubly-stochastic (Sinkhorn) attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asapc.api import compile as compile
    from asapc.artifact import load as load
    from asapc.program.graphed import graphed as graphed
    from asapc.training.tails import tail_gradients as tail_gradients

__all__ = ["compile", "graphed", "load", "tail_gradients"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; `asapc --help` must not.
    if name == "load":
        from asapc.artifact import load

        return load
    if name == "compile":
        from asapc.api import compile

        return compile
    if name == "graphed":
        from asapc.program.graphed import graphed

        return graphed
    if name == "tail_gradients":
        from asapc.training.tails import tail_gradients

        return tail_gradients
    raise AttributeError(f"module 'asapc' has no attribute {name!r}")
