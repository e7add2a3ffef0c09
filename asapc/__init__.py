"""asapc: a post-training compiler for doubly-stochastic (Sinkhorn) attention."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asapc.api import compile as compile
    from asapc.artifact import load as load
    from asapc.artifact.pretrained import from_pretrained as from_pretrained
    from asapc.artifact.pretrained import save_pretrained as save_pretrained
    from asapc.measure.own_metric import OwnMetric as OwnMetric
    from asapc.program.graphed import graphed as graphed
    from asapc.report.explained import explain as explain
    from asapc.training.tails import tail_gradients as tail_gradients

__all__ = [
    "OwnMetric", "compile", "explain", "from_pretrained", "graphed", "load", "save_pretrained",
    "tail_gradients",
]  # fmt: skip


_HOMES = {
    "OwnMetric": "asapc.measure.own_metric", "compile": "asapc.api", "explain": "asapc.report.explained",
    "graphed": "asapc.program.graphed", "from_pretrained": "asapc.artifact.pretrained",
    "load": "asapc.artifact", "save_pretrained": "asapc.artifact.pretrained",
    "tail_gradients": "asapc.training.tails",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; `asapc --help` must not.
    if name not in _HOMES:
        raise AttributeError(f"module 'asapc' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
