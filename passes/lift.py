"""Lift: matched regions become operator calls that compute the same.

before: q k^T -> [masks, bias, the loop] -> A v
after:  torch.ops.asapc.sinkhorn(q, k, v, keep, bias, ...), esp_soft(...), lot(...)

If the model also returns the attention map, the map is computed densely by the operator's
`_attention` twin and the value product stays. Every family's site knows its own call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from asapc.ir import Program
from asapc.passes.lifting import Lifting
from asapc.passes.site import Site
from asapc.passes.verify import check_graph
from asapc.program.calls import copied

aten = torch.ops.aten
# Dead where nothing reads them, though torch keeps them: the loop of a plan with dropout, or with a cast,
# would stay beside the operator that replaces it.
INERT = (aten.dropout.default, aten._assert_tensor_metadata.default)


def lift(program: Program, sites: Sequence[Site], drop_maps: bool = False) -> Program:
    """Every matched region becomes one lossless operator call; what it replaces is removed.

    Without sites, the program as it was captured: what was rewritten for their sake is of no use.
    """
    program = program if sites else program.untouched
    graph, nodes = copied(program.graph)
    for index, site in enumerate(sites):
        lifting = Lifting(graph, index, site.name, site.heads, nodes, drop_maps)
        for old, new, users in site.lift(lifting):
            old.replace_all_uses_with(new, delete_user_cb=users)
    graph.graph.eliminate_dead_code(lambda node: node.target not in INERT and bool(node.is_impure()))
    graph.recompile()
    check_graph(graph, "lift", [site.name for site in sites])
    return replace(program, graph=graph, captured=None)


def beside(program: Program, sites: Sequence[Site]) -> tuple[Program, Mapping[Node, Node]]:
    """The same calls beside the teacher's own code, which still gives the outputs: what the sites see is
    then exactly what the teacher's code sees.  Also gives its nodes, by those of the program."""
    graph, nodes = copied(program.graph)
    for index, site in enumerate(sites):
        site.lift(Lifting(graph, index, site.name, site.heads, nodes))
    return replace(program, graph=graph), nodes
