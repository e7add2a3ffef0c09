"""Products: batched matrix products of a graph in one canonical form, however they were written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from asapc.ir import OutputFactor, Program
from asapc.operators.masks import HIDDEN_SCORE
from asapc.passes.cut import is_tensor

aten = torch.ops.aten

# Data passing through one of these has left the region between two products of one attention.
BARRIERS = {
    aten.linear.default, aten.addmm.default, aten.mm.default, aten.layer_norm.default,
    aten.embedding.default, aten.conv1d.default, aten.conv2d.default, aten.batch_norm.default,
    aten.native_layer_norm.default, aten.convolution.default, aten.rms_norm.default,
}  # fmt: skip
SOFTMAXES = {
    aten.softmax.int, aten._softmax.default, aten._safe_softmax.default, aten.log_softmax.int,
    aten._log_softmax.default,
}  # fmt: skip
NORMALISERS = {*SOFTMAXES, aten.logsumexp.default, aten.exp.default}
UNSTABLE = {aten.sort.default, aten.argsort.default, aten.topk.default}
SORTS = UNSTABLE | {aten.sort.stable, aten.argsort.stable}
RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int,
}  # fmt: skip
COPIES = {aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default}
VIEWS = {*RESHAPES, *COPIES, aten.to.dtype, aten._to_copy.default}
SQUEEZES = {  # of axes of size 1, that go or come
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
}  # fmt: skip
SCALINGS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}


@dataclass(frozen=True)
class Canonical:
    """A tensor of a graph as [B, H, X, Y] or [B * H, X, Y].

    order: the permutation that makes it so; None: it is so already.
    """

    node: Node
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.order is not None and [*self.order] == sorted(self.order):
            object.__setattr__(self, "order", None)

    @property
    def shape(self) -> list[Any]:
        shape = list(self.node.meta["val"].shape)
        return shape if self.order is None else [shape[axis] for axis in self.order]

    def canonical(self, value: Tensor) -> Tensor:
        """What the node holds, with canonical axes."""
        return value if self.order is None else value.permute(self.order)

    def raw(self, value: Tensor, shape: Sequence[int]) -> Tensor:
        """What the node holds, of this shape, where its entries with canonical axes are these."""
        if self.order is None:
            return value.reshape(tuple(shape)).contiguous()
        value = value.reshape([shape[axis] for axis in self.order])
        return value.permute([self.order.index(axis) for axis in range(len(shape))]).contiguous()

    def turned(self) -> Canonical:
        """With its last two axes exchanged."""
        *batch, x, y = self.order or range(rank_of(self.node))
        return Canonical(self.node, (*batch, y, x))


@dataclass(frozen=True)
class Product:
    """A batched product left [*, X, C] x right [*, C, Y].

    map: the left operand, which is the map in a product with values; values: the right one.
    """

    result: Canonical
    map: Canonical
    values: Canonical

    @property
    def node(self) -> Node:
        return self.result.node

    @property
    def left(self) -> Node:
        return self.map.node

    @property
    def right(self) -> Node:
        return self.values.node

    @property
    def keys(self) -> Canonical:
        """The right operand [*, Y, C], which is the keys in a product of scores."""
        return self.values.turned()

    def turned(self) -> Product:
        """The product of keys and queries, whose transpose the graph has."""
        return Product(self.result.turned(), self.keys, self.map.turned())


SAME = OutputFactor()


@dataclass(frozen=True)
class Empty:
    """What an example without an active key gives, beside the operator's map of equal scores.

    share:    by how much its map is larger: 0 where it gives nothing, NaN where it gives NaN.
    open:     it is the map of the scores with every key active instead, as low numbers that are added to
              all scores alike change nothing.
    reach:    additive masks: below this number of units in the last place of what hides them, scores are
              lost beside it, and only then are they as equal; 0 where they always are.
    infinite: additive masks: the share where all numbers are -inf.
    refused:  no operator gives the same: such an example is an error when it comes, and NaN in ONNX.
    """

    share: OutputFactor = SAME
    open: bool = False
    reach: float = 0.0
    infinite: OutputFactor = SAME
    refused: bool = False


@dataclass(frozen=True)
class KeyMask:
    """A node that masks keys: bool with the given polarity, or additive with very low entries."""

    node: Node
    true_means_masked: bool | None  # None: additive
    merged: bool  # leading dimension is batch times heads
    is_bias: bool = False  # additive, and what it holds besides very low entries is added to the scores
    empty: Empty = Empty()
    hides: float = HIDDEN_SCORE  # additive: scores up to here remove their keys


def product_of(node: Node) -> Product | None:
    if node.op != "call_function" or not is_tensor(node):
        return None
    if node.target in (aten.matmul.default, aten.bmm.default):
        left, right = node.args[0], node.args[1]
        if not isinstance(left, Node) or not isinstance(right, Node) or left is right:
            return None
        batched = min(rank_of(left), rank_of(right)) >= 3 and rank_of(node) == rank_of(left)
        return Product(*map(Canonical, (node, left, right))) if batched else None
    return _einsum_product(node) if node.target is aten.einsum.default else None


def einsum_of_two(node: Node) -> tuple[str, str, str, Node, Node] | None:
    """The letters of both operands and of the result, and the operands."""
    equation, operands = str(node.args[0]).replace(" ", ""), node.args[1]
    explicit = "->" in equation and "." not in equation
    if not explicit or not isinstance(operands, (list, tuple)) or len(operands) != 2:
        return None
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    first, second = operands
    assert isinstance(first, Node) and isinstance(second, Node)
    return left, right, out, first, second


def _einsum_product(node: Node) -> Product | None:
    operands = einsum_of_two(node)
    if operands is None:
        return None
    left, right, out, first, second = operands
    batch = [c for c in out if c in left and c in right]
    contracted = [c for c in left if c in right and c not in out]
    only_left = [c for c in left if c not in right]
    only_right = [c for c in right if c not in left]
    if not (len(contracted) == len(only_left) == len(only_right) == 1) or not batch:
        return None
    if sorted(out) != sorted([*batch, *only_left, *only_right]):
        return None
    x, y, c = only_left[0], only_right[0], contracted[0]
    order = [ch for ch in left if ch in batch]
    return Product(
        Canonical(node, tuple(out.index(ch) for ch in [*order, x, y])),
        Canonical(first, tuple(left.index(ch) for ch in [*order, x, c])),
        Canonical(second, tuple(right.index(ch) for ch in [*order, c, y])),
    )


def padding_of(node: Node) -> float | None:
    """The number that a node puts around a tensor, None where it does no such thing."""
    if node.target is aten.constant_pad_nd.default:
        value: Any = (*node.args, 0.0)[2]
    elif node.target is aten.pad.default and node.args[2:3] in ((), ("constant",)):
        value = (*node.args, None, None)[3]
    else:
        return None
    return float(value or 0.0)


def is_vector(product: Product) -> bool:
    """A matrix-vector product: a step of an exp-domain loop, never the value product."""
    return same(product.values.shape[-1], 1)


def same(a: Any, b: Any) -> bool:
    """Equal as expressions, or wherever they are tried; never adds a guard."""
    left, right = (x.node.expr if isinstance(x, torch.SymInt) else x for x in (a, b))
    if left == right:
        return True
    symbols = {s for x in (left, right) for s in getattr(x, "free_symbols", ())}
    if not symbols:
        return False
    for start in (0, 3):  # other large primes: nothing else makes n^2 // n and n equal
        values = dict(zip(sorted(symbols, key=str), PRIMES[start:] * len(symbols), strict=False))
        first, second = (x.xreplace(values) if hasattr(x, "xreplace") else x for x in (left, right))
        if int(first) != int(second):
            return False
    return True


PRIMES = [1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049]


def merged_heads(node: Node) -> int:
    """H, where a view made [B * H, N, D] of [B, H, N, D], or [N, B * H, D] of [N, B, H * D], else 1."""
    while node.target in {*VIEWS, *SCALINGS, aten.transpose.int}:
        source = node.args[0]
        if not isinstance(source, Node) or not is_tensor(source):
            return 1
        before, after = source.meta["val"].shape, node.meta["val"].shape
        if len(before) == 4 and len(after) == 3 and isinstance(before[1], int):
            return before[1] if same(before[0] * before[1], after[0]) else 1
        widths = (before[-1], after[-1])  # a comparison with a free size would bound it
        if len(before) == len(after) == 3 and all(isinstance(width, int) for width in widths):
            heads = before[2] // max(after[2], 1)
            if heads > 1:
                return heads if same(before[1] * heads, after[1]) else 1
        node = source
    return 1


def rank_of(node: Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, Tensor) else 0


def site_name(program: Program, node: Node) -> str:
    """The dotted name of the module the node was traced in, with the program's name in front."""
    stack = node.meta.get("nn_module_stack") or {}
    inner = ""
    for path, _ in stack.values():
        inner = str(path)
    return ".".join(part for part in (program.name, inner) if part) or "model"
