"""Match ESP: sliced plans between two sorted clouds, found by what they compute.

before: q, k -> projections, sorts, plans, slice weights -> A -> A v, in whatever code
after:  EspSite with the queries, the keys and everything the operator needs, or a reason
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import getitem

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.ir import EspConvention, Program
from asapc.operators.masks import HIDDEN_SCORE
from asapc.passes.branches import spoken
from asapc.passes.cut import (
    SHAPE_ONLY,
    ancestors,
    constants_entering,
    depends_on_data,
    descendants,
    holds_tensors,
    is_bool,
    is_tensor,
    separate,
    walked,
)
from asapc.passes.esp.probe import NO_ORDER, NO_TEMPERATURE, EspFit, drawn, identify_esp, tied_points
from asapc.passes.esp.site import EspSite
from asapc.passes.experiment import STABILISED, Experiment, Lengths, NoFit, normal, once, outcome
from asapc.passes.products import (
    SORTS,
    UNSTABLE,
    Canonical,
    KeyMask,
    Product,
    merged_heads,
    rank_of,
    same,
    site_name,
)
from asapc.passes.site import Found, Place, Unidentified

aten = torch.ops.aten

STABLY = "sort with stable=True"
LONGER = 9  # up to 16 numbers PyTorch's sort is stable, whether it is asked to be or not
# A layer's queries and keys are made by linear maps of what one of these gives.
LAYERS = {
    aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default,
    aten.batch_norm.default, aten.embedding.default, aten.conv1d.default, aten.conv2d.default,
}  # fmt: skip
FAR = (1e3, 1e5)  # of points, which are hidden ones to code that hides others by -1e4
FORMED = 4  # matrices of a slice that are formed on the way, as if they were half-steps
LARGEST_LENGTH = 512  # a fixed length beyond this would be probed with gigabytes of plans


def find_esp(program: Program, places: Sequence[Place]) -> Iterator[Found]:
    """The sliced plans that are multiplied by values, and what sorts without being one."""
    within: set[Node] = set()
    likely: list[EspConvention] = []  # conventions of other layers, tried first
    checked: dict[object, NoFit | None] = {}
    for place in places:
        value = place.value
        if not place.regions and value.node in within:
            continue
        clouds = _clouds(value) if rank_of(value.left) in (3, 4) else None
        if clouds is None:
            continue
        site = outcome(partial(_examine, program, value, *clouds, likely, checked))
        within |= clouds[1]
        if isinstance(site, NoFit):
            yield value.node, Unidentified(str(site), frozenset(clouds[1]))
        else:
            likely.append(site.convention)
            yield value.node, site


def _clouds(value: Product) -> tuple[tuple[Node, Node], set[Node], list[Node]] | None:
    """The latest two tensors of points that everything before the map depends on, both sorted."""
    attention = value.left
    queries, keys = value.map.shape[-2:]
    above = ancestors(attention, until=LAYERS)

    sorts = [  # of tokens: a router's top experts are none
        node for node in above if node.target in SORTS and any(
            same(size, queries) or same(size, keys) for size in node.all_input_nodes[0].meta["val"].shape
        )
    ]
    if not sorts:
        return None
    sorted_later = ancestors(*sorts, until=LAYERS)

    usable = [
        node for node in sorted(above & sorted_later, reverse=True)
        if is_tensor(node) and node.meta["val"].is_floating_point() and depends_on_data(node)
        and len(node.meta["val"].shape) in (3, 4) and isinstance(node.meta["val"].shape[-1], int)
    ]  # fmt: skip
    edge = {node for node in above if node.target in LAYERS or node.op == "placeholder"}
    edge = {node for node in edge if depends_on_data(node) and not is_bool(node)}

    def parts(*cut: Node) -> bool:
        """Whether no data gets past these nodes, but in masks: without it, they separate nothing."""
        def onward(node: Node) -> Iterable[Node]:
            stops = node in cut or is_bool(node) or node.target in SHAPE_ONLY or not holds_tensors(node)
            return () if stops else node.all_input_nodes

        return not any(node in edge and node not in cut for node in walked([attention], onward))

    usable = [node for node in usable if not (parts(node) and separate(attention, (node,)))]
    lengths = {node: node.meta["val"].shape[-2] for node in usable}
    of_queries, of_keys = (
        {node for node, length in lengths.items() if same(length, wanted)} for wanted in (queries, keys)
    )
    for later, earlier in itertools.combinations(usable, 2):
        for first, second in ((later, earlier), (earlier, later)):
            if not (first in of_queries and second in of_keys and parts(first, second)):
                continue
            result = separate(attention, (first, second))
            if result is None or not any(node in result[0] for node in sorts):
                continue
            if all(descendants([x]) & {*sorts} & result[0] for x in (first, second)):
                return (first, second), *result
    return None


def _examine(
    program: Program,
    value: Product,
    pair: tuple[Node, Node],
    between: set[Node],
    masks: Sequence[Node],
    likely: Sequence[EspConvention],
    checked: dict[object, NoFit | None],
) -> EspSite:
    """checked: what was wrong at larger sizes in layers that are alike.  Raises NoFit."""
    if len(masks) > 1:
        raise NoFit(f"two masks enter the sorts ({spoken(masks[0])} and {spoken(masks[1])})")
    fits: list[tuple[EspFit, Experiment]] = []
    reasons: list[str] = []
    for clouds in ([*map(Canonical, pair)], [*map(Canonical, reversed(pair))]):
        for hidden in (True, False) if masks else (True,):
            trial = Experiment(program.graph, clouds, value.map, between, masks)
            trial.hidden = hidden
            trial.leads, trial.tokens = ([cloud.shape[axis] for cloud in clouds] for axis in (0, -2))
            trial.sizes = trial.small(LONGER)
            if any(trial.shapes(at)[0][2] != trial.dims(value.map, at)[-2] for at in trial.sizes):
                continue
            few = [shape[2] for shape in trial.shapes(trial.few)]
            if max(few) > LARGEST_LENGTH:
                raise NoFit(f"a fixed length of {few[0]} is too long to be probed")
            unmasked = [replace(other, mask="none") for other in likely]
            slices = _slices(program.graph, pair, between)
            try:
                fits.append((identify_esp(trial, slices, unmasked), trial))
            except NoFit as no_fit:
                reasons.append(str(no_fit))
        if fits:
            break
    open_order = any(_leaves_order_open(node) for node in between)
    if not fits:
        # The reason of the attempt that came furthest: with the clouds the other way round, or the mask
        # the other way, not even the plans are there.
        further = [reason for reason in reasons if NO_TEMPERATURE not in reason]
        reason = (further + reasons or ["not a sliced plan: its rows are not the queries'"])[0]
        raise NoFit(f"{reason}: {STABLY}" if open_order and reason.startswith(NO_ORDER) else reason)
    fit, trial = min(fits, key=lambda entry: entry[0].error)
    if open_order and fit.convention.ties != "shared":
        raise NoFit(f"{NO_ORDER}: {STABLY}")
    alike = (trial.cut.fingerprint(), trial.hidden, fit.convention)
    once(checked, alike, partial(_check_larger_sizes, trial, fit))
    q, k = (cloud.node for cloud in trial.inputs)
    mask: KeyMask | None = None
    if masks:
        fit = _with_mask(trial, fit, masks[0])
        mask = KeyMask(masks[0], trial.hidden, rank_of(value.left) == 3 and rank_of(masks[0]) == 3)
    shape = value.map.shape
    heads = int(shape[1]) if len(shape) == 4 else merged_heads(q)
    return EspSite(
        site_name(program, value.node), fit.convention, heads, int(q.meta["val"].shape[-1]), fit.error,
        q, k, value, frozenset(between), mask, fit.slices, fit.weights,
    )  # fmt: skip


def _leaves_order_open(node: Node) -> bool:
    """Whether the order in which an unstable sort meets equal numbers is used.

    Each machine and size may have another, so no experiment tells which it is.
    """
    indices = [user for user in node.users if user.target is getitem and user.args[1] == 1 and user.users]
    return node.target in UNSTABLE and (bool(indices) or node.target is aten.argsort.default)


def _with_mask(trial: Experiment, fit: EspFit, mask: Node) -> EspFit:
    """The fit of a layer whose mask leaves tokens out of the sorts.  Raises NoFit."""
    fit = replace(fit, convention=replace(fit.convention, mask="key"))
    few = trial.few
    masked = fit.measured([drawn(trial, points, few, masked=True) for points in (normal, tied_points)])
    if not masked.error <= STABILISED:
        raise NoFit(
            f"with {spoken(mask)} as mask: padded tokens are not simply left out of the sorts",
            masked.error,
        )
    far = [drawn(trial, lambda *of: -normal(*of).abs(), few, low, masked=True) for low in FAR]
    if not fit.measured(far).error <= STABILISED:
        raise NoFit(
            f"with {spoken(mask)} as mask: points as large as {max(FAR):g} are taken for padded ones; "
            f"hide those by a lower number, such as {HIDDEN_SCORE:g}"
        )
    return replace(fit, error=max(fit.error, masked.error))


def _check_larger_sizes(trial: Experiment, fit: EspFit) -> None:
    """Hold a convention against what there is where tokens or examples are many.  Raises NoFit."""
    def error_at(at: Lengths) -> float:
        return fit.measured([drawn(trial, normal, at)]).error

    _, heads, _, dim = trial.shapes(trial.few)[0]
    count = dim if fit.slices is None else fit.slices.shape[-2]
    trial.check_larger(FORMED * heads * count, error_at, STABILISED, "sliced plan")


def _slices(graph: GraphModule, pair: tuple[Node, Node], between: set[Node]) -> list[Tensor | None]:
    """The coordinate axes, and every matrix of directions among the parameters that enter."""
    dim = int(pair[0].meta["val"].shape[-1])
    slices: list[Tensor | None] = [None]
    for constant in constants_entering(graph, between):
        while constant.dim() > 2 and constant.shape[0] == 1:
            constant = constant[0]
        if constant.dim() not in (2, 3):
            continue
        if constant.shape[-1] == dim:
            slices.append(constant)
        if constant.shape[-2] == dim:
            slices.append(constant.transpose(-1, -2).contiguous())
    return slices
