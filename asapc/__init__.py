"""asapc: a post-training compiler for doubly-stochastic (Sinkhorn) attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asapc.api import compile as compile
    from asapc.artifact import load as load

__all__ = ["compile", "load"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; `asapc --help` must not.
    if name == "load":
        from asapc.artifact import load

        return load
    if name == "compile":
        from asapc.api import compile

        return compile
    raise AttributeError(f"module 'asapc' has no attribute {name!r}")
