"""Sequence parallelism: a compiled graph in which every process computes the tokens that are its own.

    ids [B, N]  ->  cut along N  ->  embedding, linear, norm, ..: on the own tokens
                ->  sinkhorn, asap: on the own queries, see sharded_sites
                ->  mean, sum, max over tokens: of the own, then of all processes
                ->  outputs: gathered

Which tensors are cut is decided as the graph runs, by one rule per operator. An operator without a rule,
or one that mixes tokens, gets whole tensors and computes the same in every process: that is always right,
and costs memory and time.

torch.distributed.tensor has such rules too, but refuses most views of an axis that does not divide
evenly, and needs a strategy for each of our operators.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Interpreter
from torch.utils import _pytree as pytree

from asapc.operators.catalogue import by_name
from asapc.program.call import Call
from asapc.program.code import GraphCode
from asapc.program.sharded_sites import QUERIES, SITES
from asapc.program.shards import Group, Shard, whole

Bound = dict[str, Any]
"""The arguments of an operator by the names of its schema."""

Rule = Callable[[Any, Bound], Any]
"""(operator, arguments) -> shards, or NotImplemented where it takes whole tensors."""


class SequenceCode(GraphCode):
    """A GraphCode that runs on this process's tokens; it takes and returns whole tensors.

    cut: for each tensor of the call, the axis of its tokens, or None.
    """

    def __init__(self, graph: Graph, dtype: torch.dtype, handle: Any, cut: Sequence[int | None]) -> None:
        self.group, self.cut = Group.of(handle), tuple(cut)
        super().__init__(graph, dtype)

    def runnable(self, graph: Graph) -> Callable[..., tuple[Any, ...]]:
        def run(module: nn.Module, *flat: Any) -> tuple[Any, ...]:
            pairs = zip(flat, self.cut, strict=True)
            tokens = [x if axis is None else Shard.of(x, axis, self.group) for x, axis in pairs]
            sizes = {x.size for x in tokens if isinstance(x, Shard)}
            with torch.no_grad():
                return tuple(map(whole, _Run(module, graph, self.group, sizes).run(*tokens)))

        return run

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceCode:
        return SequenceCode(copy.deepcopy(self.graph, memo), self.dtype, self.group.handle, self.cut)

    def __reduce__(self) -> Any:
        raise TypeError("a model on a sequence group belongs to its processes: load it in each of them")


def token_axes(call: Call) -> list[int | None]:
    """For every tensor of a call, its first axis after the batch whose size is free."""
    return [
        next((axis for axis, size in enumerate(like.sizes) if axis and isinstance(size, str)), None)
        for like in call.tensors
    ]


class _Run(Interpreter):
    """Runs a graph on this process's tokens.  sizes: of the axes of tokens."""

    def __init__(self, module: nn.Module, graph: Graph, group: Group, sizes: Set[int]) -> None:
        super().__init__(module, graph=graph)
        self.extra_traceback = False  # errors keep their own text
        self.group, self.sizes = group, sizes

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, torch._ops.OpOverload):
            return target(*args, **kwargs)  # of Python, on numbers and tuples
        namespace, _, name = target._schema.name.partition("::")
        bound = {**by_name(target, args), **kwargs}
        if namespace == "asapc" and name in SITES:
            q = bound["q"]
            if not isinstance(q, Shard) or q.axis != QUERIES:
                bound["q"] = Shard.of(whole(q), QUERIES, self.group)
            return SITES[name](**bound)
        if any(isinstance(leaf, Shard) for leaf in pytree.tree_leaves(bound)):
            rule = RULES.get(name) or (_pointwise if torch.Tag.pointwise in target.tags else None)
            sharded = NotImplemented if rule is None else rule(target, bound)
            if sharded is not NotImplemented:
                return sharded
        result = target(**pytree.tree_map(whole, bound))
        if name not in _MADE:
            return result
        # Positions, or other tensors made from sizes alone, of every token: cutting them is always right.
        axes = range(min(1, result.dim() - 1), result.dim())
        axis = next((axis for axis in axes if result.shape[axis] in self.sizes), None)
        return result if axis is None else Shard.of(result, axis, self.group)


_MADE = ("arange", "zeros", "ones", "full")


def _on_local(target: Any, bound: Bound) -> Any:
    """The operator on this process's parts."""
    return target(**pytree.tree_map(lambda x: x.local if isinstance(x, Shard) else x, bound))


def _first(bound: Bound) -> Any:
    return next(iter(bound.values()))


def _pointwise(target: Any, bound: Bound) -> Any:
    """Broadcasts: whole tensors are cut where the shards are; shards along two axes are gathered."""
    leaves = [leaf for leaf in pytree.tree_leaves(bound) if isinstance(leaf, Tensor | Shard)]
    shards = [leaf for leaf in leaves if isinstance(leaf, Shard)]
    first = max(shards, key=lambda shard: shard.size)
    axis, size = first.from_end, first.size
    if any((shard.from_end, shard.size) != (axis, size) for shard in shards):
        return NotImplemented
    if any(leaf.shape[axis] not in (1, size) for leaf in leaves if len(leaf.shape) >= -axis):
        return NotImplemented

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() >= -axis and leaf.shape[axis] == size > 1:
            return Shard.of(leaf, axis, first.group).local
        return leaf.local if isinstance(leaf, Shard) else leaf

    result = target(**pytree.tree_map(cut, bound))
    return first.like(result, axis)


def _size(target: Any, bound: Bound) -> Any:
    return _first(bound).shape[bound["dim"]]


def _dims(x: Shard, bound: Bound) -> Sequence[int]:
    """The axes that an operator works along: all of them if none are named."""
    dim = bound.get("dim", bound.get("dims"))
    dims = [dim] if isinstance(dim, int) else list(dim or range(len(x.shape)))
    return [d % len(x.shape) for d in dims]


def _last(count: Callable[[Bound], int]) -> Callable[[Shard, Bound], Sequence[int]]:
    """The last axes, as many as `count` says."""
    return lambda x, bound: range(len(x.shape) - count(bound), len(x.shape))


def _by_token(
    along: Callable[[Shard, Bound], Sequence[int]] = lambda *_: (), tokens: str | None = None
) -> Rule:
    """An operator on each token by itself, whose axis stays where it is.

    along: the axes that are mixed.  tokens: the argument with the tokens, the first one unless named.
    """

    def rule(target: Any, bound: Bound) -> Any:
        x = _first(bound) if tokens is None else bound[tokens]
        shards = [leaf for leaf in pytree.tree_leaves(bound) if isinstance(leaf, Shard)]
        if not isinstance(x, Shard) or len(shards) > 1 or x.axis in along(x, bound):
            return NotImplemented
        # Of native_layer_norm the mean and deviation of a token, too.
        return pytree.tree_map(lambda y: x.like(y) if y.dim() > x.axis else y, _on_local(target, bound))

    return rule


def _reduction(join: Callable[[Shard, Tensor], Tensor] | None) -> Rule:
    """A reduction.  join: combines the results of all processes; None: only over whole tensors."""

    def rule(target: Any, bound: Bound) -> Any:
        x = _first(bound)
        if not isinstance(x, Shard):
            return NotImplemented
        dims = _dims(x, bound)
        if x.axis in dims:
            if join is None or x.size < x.group.processes:  # a process without a token has no maximum
                return NotImplemented
            return join(x, _on_local(target, bound))
        before = 0 if bound.get("keepdim") else sum(d < x.axis for d in dims)
        result = _on_local(target, bound)
        return pytree.tree_map_only(Tensor, lambda part: x.like(part, x.axis - before), result)

    return rule


def _places(target: Any, bound: Bound) -> tuple[list[Tensor], list[int], Any] | None:
    """The parts that a view makes of a tensor in which only the tokens' axis has a stride, and that axis
    in each part.  None if a part has lost it, or is a copy."""
    x, name = _first(bound), next(iter(bound))
    strides = [int(axis == x.axis) for axis in range(len(x.shape))]
    probe = torch.empty_strided(x.shape, strides, device="meta")
    try:
        parts, spec = pytree.tree_flatten(target(**{**bound, name: probe}))
    except RuntimeError:  # tokens would be mixed with another axis
        return None
    memory = probe.untyped_storage()._cdata
    axes = [
        [a for a, size in enumerate(part.shape) if part.stride(a) == 1 and size == x.size]
        if part.untyped_storage()._cdata == memory else [] for part in parts
    ]  # fmt: skip
    return (parts, [found for (found,) in axes], spec) if all(len(own) == 1 for own in axes) else None


def _seen(target: Any, bound: Bound) -> Any:
    """transpose; select, slice, split, chunk, unbind along other axes, or of all tokens."""
    places = _places(target, bound)
    if places is None:
        return NotImplemented
    _, axes, spec = places
    parts = pytree.tree_leaves(_on_local(target, bound))
    shards = [_first(bound).like(part, axis) for part, axis in zip(parts, axes, strict=True)]
    return pytree.tree_unflatten(shards, spec)


def _viewed(target: Any, bound: Bound) -> Any:
    """Operators that name the sizes of their result: view, squeeze, expand."""
    x, places = _first(bound), None if "dtype" in bound else _places(target, bound)
    if places is None:
        return NotImplemented
    (part,), (axis,), _ = places
    sizes = list(part.shape)
    sizes[axis] = x.local.shape[x.axis]
    return x.like(x.local.expand(sizes) if "implicit" in bound else x.local.reshape(sizes), axis)


def _selected(target: Any, bound: Bound) -> Any:
    """One entry of an axis.  A token, such as [CLS], comes from the process that has it."""
    x = _first(bound)
    dim = bound["dim"] % len(x.shape)
    if dim != x.axis:
        return _seen(target, bound)
    index, share = bound["index"] % x.size, x.group.share(x.size)
    owner = next(r for r in range(x.group.processes) if index < x.group.share(x.size, r).stop)
    shape = [size for axis, size in enumerate(x.shape) if axis != dim]
    is_owner = owner == x.group.rank
    token = x.local.select(dim, index - share.start) if is_owner else x.local.new_empty(shape)
    return x.group.all_of(token)[owner]


def _concatenated(target: Any, bound: Bound) -> Any:
    parts = bound["tensors"]
    first = next(part for part in parts if isinstance(part, Shard))
    stacks = target._schema.name == "aten::stack"
    dim = bound.get("dim", 0) % (len(first.shape) + stacks)
    if not stacks and dim == first.axis:  # a [CLS] before the tokens: cut anew
        return Shard.of(target(**pytree.tree_map(whole, bound)), dim, first.group)
    if any(isinstance(p, Shard) and (p.axis, p.size) != (first.axis, first.size) for p in parts):
        return NotImplemented
    shards = [p if isinstance(p, Shard) else Shard.of(p, first.axis, first.group) for p in parts]
    result = target(**{**bound, "tensors": [shard.local for shard in shards]})
    return first.like(result, first.axis + (stacks and dim <= first.axis))


def _expanded_as(target: Any, bound: Bound) -> Any:
    x, other = bound["self"], bound["other"]
    if not isinstance(other, Shard) or isinstance(x, Shard):
        return NotImplemented
    return Shard.of(x.expand(other.shape), other.axis, other.group)


def _repeated(target: Any, bound: Bound) -> Any:
    x = _first(bound)
    axis = len(bound["repeats"]) + x.from_end
    return NotImplemented if bound["repeats"][axis] != 1 else x.like(_on_local(target, bound), axis)


def _multiplied(target: Any, bound: Bound) -> Any:
    """The rows of the left factor are tokens and see all of the right, or tokens are a batch of both."""
    left, right = bound["self"], bound["mat2" if "mat2" in bound else "other"]
    if not isinstance(left, Shard) or min(len(left.shape), len(right.shape)) < 2:
        return NotImplemented
    if left.from_end == -2:
        return left.like(target(left.local, whole(right)), -2)
    if left.from_end == -1 or not isinstance(right, Shard):
        return NotImplemented
    if (left.from_end, left.size) != (right.from_end, right.size):
        return NotImplemented
    return left.like(target(left.local, right.local), left.from_end)


def _attended(target: Any, bound: Bound) -> Any:
    """Softmax attention of the own queries, keys and values gathered."""
    q: Any = bound["query"]
    mask: Any = bound.get("attn_mask")
    if not isinstance(q, Shard) or q.from_end != -2 or bound.get("is_causal"):
        return NotImplemented
    if not (isinstance(mask, Shard) and mask.from_end == -2):
        mask = whole(mask)
        if mask is not None and mask.shape[-2] != 1:
            mask = Shard.of(mask, -2, q.group)
    local = {"key": whole(bound["key"]), "value": whole(bound["value"]), "attn_mask": mask}
    return q.like(_on_local(target, {**bound, **local}))


RULES: dict[str, Rule] = {
    name: rule for rule, names in (
        (_size, "sym_size"),
        (_by_token(), "contiguous clone to _to_copy alias detach dropout zeros_like ones_like full_like "
                      "type_as float"),
        # Of whole sizes, and of nothing that is in the shard.
        (_on_local, "new_zeros new_ones new_full new_empty"),
        (_by_token(_last(lambda _: 1)), "linear"),
        (_by_token(_last(lambda bound: len(bound["normalized_shape"]))),
         "layer_norm rms_norm native_layer_norm"),
        (_by_token(tokens="indices"), "embedding"),
        (_by_token(_dims), "softmax _softmax log_softmax _log_softmax cumsum sort topk argsort glu"),
        (_reduction(lambda x, own: x.group.summed(own)), "sum"),
        (_reduction(lambda x, own: x.group.summed(own * (x.local.shape[x.axis] / x.size))), "mean"),
        (_reduction(lambda x, own: x.group.all_of(own).amax(0)), "amax any"),
        (_reduction(lambda x, own: x.group.all_of(own).amin(0)), "amin all"),
        (_reduction(None),
         "var std argmax argmin max min logsumexp prod linalg_vector_norm norm"),
        (_seen, "transpose permute t slice split split_with_sizes chunk unbind"),
        (_selected, "select"),
        (_concatenated, "cat concat stack"),
        (_expanded_as, "expand_as"),
        (_repeated, "repeat"),
        (_viewed, "view reshape _unsafe_view flatten unflatten squeeze unsqueeze expand"),
        (_multiplied, "matmul bmm mm"),
        (_attended, "scaled_dot_product_attention"),
    ) for name in names.split()
}  # fmt: skip
"""By operator of torch, without its namespace and overload."""
