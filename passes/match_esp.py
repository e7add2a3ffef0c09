"""Match ESP: sliced plans between two sorted clouds, found by what they compute.

before: q, k -> projections, sorts, plans, slice weights -> A -> A v, in whatever code
after:  EspSite with the queries, the keys and everything the operator needs, or a reason
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.ir import EspConvention, Program
from asapc.passes.cut import (
    PROBE_BATCH,
    PROBE_LENGTHS,
    Cut,
    Part,
    ancestors,
    constant_value,
    depends_on_data,
    descendants,
    is_tensor,
    separate,
)
from asapc.passes.probe import STABILISED, NoFit
from asapc.passes.probe_esp import (
    NO_TEMPERATURE,
    EspSample,
    error_of,
    identify_esp,
    tied_points,
)
from asapc.passes.products import (
    KeyMask,
    Product,
    Unidentified,
    canonical_shape,
    merged_heads,
    rank_of,
    same,
    site_name,
)

aten = torch.ops.aten

LONGER = 9  # up to 16 numbers PyTorch's sort is stable, whether it is asked to be or not
SORTS = {
    aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable, aten.topk.default,
}  # fmt: skip
# A layer's queries and keys are made by linear maps of what one of these gives.
LAYERS = {
    aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default,
    aten.batch_norm.default, aten.embedding.default, aten.conv1d.default, aten.conv2d.default,
}  # fmt: skip
LARGEST_LENGTH = 512  # a fixed length beyond this would be probed with gigabytes of plans


@dataclass(frozen=True)
class EspSite:
    """A sliced-plan region, with everything a rewrite needs.

    q, k: [B, H, N, D] or [B*H, N, D] nodes.  slices: float64 directions [L, D] or [H, L, D].
    """

    name: str
    convention: EspConvention
    q: Node
    k: Node
    value: Product
    attention: Node
    inside: frozenset[Node]
    heads: int
    head_dim: int
    mask: KeyMask | None
    slices: Tensor | None
    probe_error: float

    def part(self) -> Part:
        """From the queries and keys to the map."""
        q, k = (node.meta["val"].shape for node in (self.q, self.k))
        mask = self.mask
        own = () if mask is None else ((mask.node, mask.true_means_masked),)
        return Part(
            (self.q, self.k, *(node for node, _ in own)), self.attention, self.inside,
            self.value.left_order, q[0], q[-2], k[-2], own,
        )  # fmt: skip


def match_esp(
    program: Program, value: Product, likely: Sequence[EspConvention] = ()
) -> EspSite | Unidentified | None:
    """The sliced plan that is multiplied by the values here, or None where nothing is sorted.

    likely: conventions of other layers, tried first.
    """
    graph = program.graph
    attention = value.left
    if rank_of(attention) not in (3, 4):
        return None
    found = _clouds(value)
    if found is None:
        return None
    pair, between, masks = found
    try:
        outcome = _examine(graph, program, value, pair, between, masks, likely)
    except Exception as error:  # the region is the user's code: whatever it raises is a reason
        line = str(error).splitlines()[0][:200] if str(error) else ""
        outcome = f"the region cannot be run on its own: {type(error).__name__}: {line}"
    return Unidentified(outcome, frozenset(between)) if isinstance(outcome, str) else outcome


def _clouds(value: Product) -> tuple[tuple[Node, Node], set[Node], list[Node]] | None:
    """The latest two tensors of points that everything before the map depends on, both sorted."""
    attention = value.left
    queries, keys = canonical_shape(attention, value.left_order)[-2:]
    above = ancestors(attention, until=LAYERS)
    sorts = [node for node in above if node.target in SORTS]
    if not sorts:
        return None
    order = {node: index for index, node in enumerate(attention.graph.nodes)}
    sorted_later = ancestors(*sorts, until=LAYERS)

    def points(node: Node, length: Any) -> bool:
        shape = node.meta["val"].shape
        return len(shape) in (3, 4) and same(shape[-2], length) and isinstance(shape[-1], int)

    usable = [
        node for node in sorted(above & sorted_later, key=order.__getitem__, reverse=True)
        if is_tensor(node) and node.meta["val"].is_floating_point() and depends_on_data(node)
    ]  # fmt: skip
    for i, later in enumerate(usable):
        for earlier in usable[i + 1 :]:
            for first, second in ((later, earlier), (earlier, later)):
                if not (points(first, queries) and points(second, keys)):
                    continue
                result = separate(attention, (first, second))
                if result is None or not any(node in result[0] for node in sorts):
                    continue
                if separate(attention, (first,)) or separate(attention, (second,)):
                    continue
                if all(descendants([x]) & {*sorts} & result[0] for x in (first, second)):
                    return (first, second), *result
    return None


def _examine(
    graph: GraphModule,
    program: Program,
    value: Product,
    pair: tuple[Node, Node],
    between: set[Node],
    masks: Sequence[Node],
    likely: Sequence[EspConvention],
) -> EspSite | str:
    if len(masks) > 1:
        return f"two masks enter the sorts ({masks[0].name} and {masks[1].name})"
    cut = Cut(graph, pair, value.left, between, masks)
    sizes = [_lengths(cut, pair, shift) for shift in (0, LONGER)]
    if sizes[0] == sizes[1]:
        sizes = sizes[:1]
    fits: list[tuple[float, Any, bool, bool]] = []
    reasons: list[str] = []
    for swapped in (False, True):
        first, second = (pair[1], pair[0]) if swapped else pair
        for hidden in (True, False) if masks else (True,):
            experiment = _Experiment(cut, value, swapped, hidden)
            shapes = [(experiment.points(first, own), experiment.points(second, own)) for own in sizes]
            maps = [experiment.map_shape(own) for own in sizes]
            if any(own[0][2] != m[-2] for own, m in zip(shapes, maps, strict=True)):
                continue
            if max(shapes[0][0][2], shapes[0][1][2]) > LARGEST_LENGTH:
                return f"a fixed length of {shapes[0][0][2]} is too long to be probed"
            observe, slices = experiment.observer(sizes, shapes), _slices(graph, pair, between)
            unmasked = [replace(own, mask="none") for own in likely]
            fit = identify_esp(observe, shapes, slices, unmasked)
            if isinstance(fit, NoFit):
                error = "" if fit.error is None else f"; relative error {fit.error:.2g}"
                reasons.append(fit.reason + error)
            else:
                fits.append((fit.error, fit, swapped, hidden))
        if fits:
            break
    if not fits:
        # The reason of the attempt that came furthest: with the clouds the other way round, or the mask
        # the other way, not even the plans are there.
        further = [reason for reason in reasons if NO_TEMPERATURE not in reason]
        return (further + reasons or ["not a sliced plan: its rows are not the queries'"])[0]
    _, fit, swapped, hidden = min(fits, key=lambda own: own[0])
    q, k = (pair[1], pair[0]) if swapped else pair
    mask: KeyMask | None = None
    error = fit.error
    convention = fit.convention
    if masks:
        experiment = _Experiment(cut, value, swapped, hidden)
        own = (experiment.points(q, sizes[0]), experiment.points(k, sizes[0]))
        kinds = (False,) if convention.ties == "open" else (False, True)
        seen = [experiment.masked(sizes[0], *own, tied) for tied in kinds]
        convention = replace(convention, mask="key")
        error = max(error, error_of(convention, fit.slices, seen))
        if not error <= STABILISED:
            return (
                f"with {masks[0].name} as mask: padded tokens are not simply left out of the sorts; "
                f"relative error {error:.2g}"
            )
        mask = KeyMask(masks[0], hidden, rank_of(value.left) == 3 and rank_of(masks[0]) == 3)
    shape = canonical_shape(value.left, value.left_order)
    heads = int(shape[1]) if len(shape) == 4 else merged_heads(q)
    return EspSite(
        site_name(program, value.node), convention, q, k, value, value.left,
        frozenset(between), heads, int(q.meta["val"].shape[-1]), mask, fit.slices, error,
    )  # fmt: skip


def _lengths(cut: Cut, pair: tuple[Node, Node], shift: int) -> dict[Any, int]:
    """Small lengths for every dynamic size, those of the tokens moved by `shift`."""
    assigned: dict[Any, int] = {}
    for index, node in enumerate(pair):
        shape = node.meta["val"].shape
        for axis, size in enumerate(shape):
            if isinstance(size, torch.SymInt):
                length = axis == len(shape) - 2
                for symbol in sorted(size.node.expr.free_symbols, key=str):
                    assigned.setdefault(symbol, PROBE_LENGTHS[index] + shift if length else PROBE_BATCH)
    return cut.lengths(assigned)


class _Experiment:
    """The region as q [B, H, N, D], k [B, H, M, D] -> A [B, H, N, M] under one polarity of the mask.

    swapped: the cut's inputs are (k, q).  hidden: True in the mask means masked.
    """

    def __init__(self, cut: Cut, value: Product, swapped: bool, hidden: bool) -> None:
        self.cut, self.value, self.swapped, self.hidden = cut, value, swapped, hidden

    def points(self, node: Node, lengths: dict[Any, int]) -> tuple[int, ...]:
        shape = self.cut.shape_of(node, lengths)
        return shape if len(shape) == 4 else (shape[0], 1, *shape[1:])

    def map_shape(self, lengths: dict[Any, int]) -> tuple[int, ...]:
        shape = self.cut.shape_of(self.value.left, lengths)
        return tuple(shape[i] for i in self.value.left_order) if self.value.left_order else shape

    def observer(self, sizes: Sequence[dict[Any, int]], shapes: Sequence[Any]) -> Any:
        """(q, k) -> map with nothing masked, None where it is not finite."""
        by_shape = {(*q, *k): own for own, (q, k) in zip(sizes, shapes, strict=True)}

        def observe(q: Tensor, k: Tensor) -> Tensor | None:
            lengths = by_shape[(*q.shape, *k.shape)]
            masks = [
                torch.full(self.cut.shape_of(m, lengths), not self.hidden) for m in self.cut.masks
            ]
            return self._run(q, k, masks, lengths)

        return observe

    def masked(
        self, lengths: dict[Any, int], q_shape: tuple[int, ...], k_shape: tuple[int, ...], tied: bool
    ) -> EspSample:
        """One observation with a third of the tokens masked.  tied: of points that tie."""
        generator = torch.Generator().manual_seed(1)
        q, k = (
            tied_points(s, generator) if tied
            else torch.randn(s, generator=generator, dtype=torch.float64) for s in (q_shape, k_shape)
        )  # fmt: skip
        active = torch.arange(k_shape[2]) % 3 != 1
        mask = torch.full(self.cut.shape_of(self.cut.masks[0], lengths), not self.hidden)
        mask[..., ~active] = self.hidden
        result = self._run(q, k, [mask], lengths)
        if result is None:
            result = torch.full((*q.shape[:3], k.shape[2]), torch.nan, dtype=torch.float64)
        return EspSample(q, k, result, active.expand(q.shape[0], -1))

    def _run(
        self, q: Tensor, k: Tensor, masks: Sequence[Tensor], lengths: dict[Any, int]
    ) -> Tensor | None:
        tensors = [
            x.reshape(self.cut.shape_of(node, lengths))
            for x, node in zip((k, q) if self.swapped else (q, k), self.cut.inputs, strict=True)
        ]
        result = self.cut.run([*tensors, *masks], lengths)
        if self.value.left_order is not None:
            result = result.permute(self.value.left_order)
        if not bool(result.isfinite().all()):
            return None
        return result.reshape(*q.shape[:3], k.shape[2]).double()


def _slices(graph: GraphModule, pair: tuple[Node, Node], between: set[Node]) -> list[Tensor | None]:
    """The coordinate axes, and every matrix of directions among the parameters that enter."""
    dim = int(pair[0].meta["val"].shape[-1])
    found: list[Tensor | None] = [None]
    seen: set[Node] = set()
    for node in sorted(between, key=lambda n: n.name):
        for source in node.all_input_nodes:
            if source in between or source in pair or source in seen or not is_tensor(source):
                continue
            seen.add(source)
            value = source.meta["val"]
            if value.dim() < 2 or not value.is_floating_point() or depends_on_data(source):
                continue
            constant = constant_value(graph, source)
            if constant is None:
                continue
            while constant.dim() > 2 and constant.shape[0] == 1:
                constant = constant[0]
            if constant.dim() not in (2, 3):
                continue
            if constant.shape[-1] == dim:
                found.append(constant)
            if constant.shape[-2] == dim:
                found.append(constant.transpose(-1, -2).contiguous())
    return found
