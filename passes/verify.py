"""Verify: invariants of a graph between passes. One that is broken fails where it was broken."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule

from asapc.errors import VerificationError
from asapc.terminal.printed import reason


def check_graph(graph: GraphModule, pass_name: str, subjects: Sequence[str] = ()) -> None:
    """The graph is well formed: operands precede their users, attributes exist."""
    try:
        graph.graph.lint()
    except RuntimeError as error:
        raise VerificationError(
            f"the graph is well formed after {pass_name} of {', '.join(subjects) or 'nothing'}",
            got=reason(error),
            help="this is a defect of asapc: please report the model",
        ) from error
