"""Number masks: an input of zeros and ones that a loop reads as numbers and compares is a boolean mask.

before: (1 - mask) * -1e9 and mask == 0, of an input mask [B, M] of integers
after:  (1 - asapc::is_one(mask).to(int64)) * -1e9 and so on

All that enters the loop is then made of one boolean mask, and an experiment that hides keys hides them
as the code does. Other numbers than 0 and 1 are an error when they come, so the program is rewritten
only if that shows a site.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from asapc.ir import Program
from asapc.passes.cut import is_bool, is_tensor, recorded
from asapc.passes.lift import INERT
from asapc.passes.products import rank_of
from asapc.passes.regions import find_regions, made_only_of
from asapc.passes.written import moved, written
from asapc.program.calls import copied

aten = torch.ops.aten


def with_boolean_masks(program: Program) -> Program | None:
    """The program whose loops read booleans where they read zeros and ones; None where there are none."""
    masks = _masks(program)
    if not masks:
        return None
    graph, nodes = copied(program.graph)
    for mask in (nodes[mask] for mask in masks):
        users = [user for user in mask.users if user.target not in {*INERT, aten.sym_size.int}]
        with graph.graph.inserting_before(min(users)):
            is_one = written(graph, mask, torch.ops.asapc.is_one.default, mask)
            number = written(graph, mask, aten.to.dtype, is_one, mask.meta["val"].dtype)
        for user in users:
            user.replace_input_with(mask, number)
    return moved(program, graph, nodes, {}, "number masks")


def _masks(program: Program) -> list[Node]:
    """Inputs of zeros and ones that something is made of which enters a loop."""
    entering = {
        node for regions in find_regions(program.graph).values() for region in regions
        for node in region.inputs
    }  # fmt: skip
    inputs = [
        node for node in program.graph.graph.nodes
        if node.op == "placeholder" and is_tensor(node) and not is_bool(node) and rank_of(node) > 1
        and any(made_only_of(made, [node]) is not None for made in entering)
    ]  # fmt: skip
    if not inputs:
        return []
    held = recorded(program.graph, inputs, (program.args, program.kwargs))
    return [x for x in inputs if bool(held[x].any()) and bool(((held[x] == 0) | (held[x] == 1)).all())]
