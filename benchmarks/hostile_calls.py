"""Calls of operators with hostile arguments, for benchmarks/fuzz.py: indices beyond their tables, sizes
that overflow, types and shapes that do not fit, memory that overlaps.

Most calls begin from one that is right, with an argument or two changed: a call of random arguments
seldom comes further than the first check.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from asapc.inputs.program_operators import allowed_operators, refused_call

CALLS = 40  # of one operator in one case
INTEGERS = [
    -(2**63), -(2**31), -5, -2, -1, 0, 0, 1, 1, 2, 2, 3, 5, 8, 100, 2**31 - 1, 2**31, 2**40, 2**62,
    2**63 - 1,
]  # fmt: skip
SMALL = [-1, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5]
FLOATS = [0.0, 1.0, 0.5, 2.0, -1.0, 1e-30, 1e-300, 1e30, 1e308, float("nan"), float("inf"), -float("inf")]
DTYPES = [torch.float32] * 6 + [
    torch.float64, torch.int64, torch.int64, torch.int32, torch.bool, torch.float16, torch.bfloat16,
    torch.complex64, torch.uint8, torch.int8, torch.int16,
]  # fmt: skip
TEXTS = [
    "ij,jk->ik", "bhid,bhjd->bhij", "sum", "mean", "prod", "amax", "none", "trunc", "floor", "constant",
    "reflect", "circular", "replicate", "ij", "tanh", "coarse:2", "target", "source", "gaussian",
]  # fmt: skip


def _f(*shape: int) -> Tensor:
    return torch.randn(shape)


def _i(*values: int) -> Tensor:
    return torch.tensor(values)


IMAGE = (2, 4, 6, 6)
HEADS = (1, 2, 5, 4)
LOOP = (1.0, 4, True, [5.0])
RIGHT: dict[str, Callable[[], list[Any]]] = {
    "aten.embedding.default": lambda: [_f(5, 3), _i(0, 4, 2)],
    "aten.gather.default": lambda: [_f(4, 5), 1, torch.zeros(4, 2, dtype=torch.int64)],
    "aten.index.Tensor": lambda: [_f(4, 5), [_i(0, 3), _i(1, 4)]],
    "aten.index_select.default": lambda: [_f(4, 5), 1, _i(0, 4)],
    "aten.index_put.default": lambda: [_f(4, 5), [_i(0, 3)], _f(2, 5), True],
    "aten.index_put_.default": lambda: [_f(4, 5), [_i(0, 3), _i(1, 2)], _f(2)],
    "aten.index_add.default": lambda: [_f(4, 5), 0, _i(0, 3), _f(2, 5)],
    "aten.index_copy.default": lambda: [_f(4, 5), 0, _i(0, 3), _f(2, 5)],
    "aten.index_fill.int_Scalar": lambda: [_f(4, 5), 0, _i(0, 3), 1.0],
    "aten.scatter.src": lambda: [_f(4, 5), 1, torch.zeros(4, 2, dtype=torch.int64), _f(4, 2)],
    "aten.scatter.value": lambda: [_f(4, 5), 1, torch.zeros(4, 2, dtype=torch.int64), 1.0],
    "aten.scatter_add.default": lambda: [_f(4, 5), 1, torch.zeros(4, 2, dtype=torch.int64), _f(4, 2)],
    "aten.scatter_reduce.two": lambda: (
        [_f(4, 5), 1, torch.zeros(4, 2, dtype=torch.int64), _f(4, 2), "amax"]
    ),
    "aten.take.default": lambda: [_f(4, 5), _i(0, 19)],
    "aten.take_along_dim.default": lambda: [_f(4, 5), torch.zeros(4, 2, dtype=torch.int64), 1],
    "aten.one_hot.default": lambda: [_i(0, 3, 2), 4],
    "aten.topk.default": lambda: [_f(4, 5), 2],
    "aten.sort.stable": lambda: [_f(4, 5)],
    "aten.bucketize.Tensor": lambda: [_f(4), _f(5)],
    "aten.searchsorted.Tensor": lambda: [_f(3, 5), _f(3, 2)],
    "aten.batch_norm.default": lambda: (
        [_f(*IMAGE), *[torch.ones(4) for _ in range(4)], False, 0.1, 1e-5, False]
    ),
    "aten.group_norm.default": lambda: [_f(*IMAGE), 2, torch.ones(4), torch.ones(4)],
    "aten.native_group_norm.default": lambda: (
        [_f(*IMAGE), torch.ones(4), torch.ones(4), 2, 4, 36, 2, 1e-5]
    ),
    "aten.instance_norm.default": lambda: (
        [_f(*IMAGE), torch.ones(4), torch.ones(4), None, None, True, 0.1, 1e-5, False]
    ),
    "aten.layer_norm.default": lambda: [_f(3, 4), [4], torch.ones(4), torch.ones(4)],
    "aten.native_layer_norm.default": lambda: [_f(3, 4), [4], torch.ones(4), torch.ones(4), 1e-5],
    "aten.rms_norm.default": lambda: [_f(3, 4), [4], torch.ones(4)],
    "aten.conv1d.default": lambda: [_f(2, 4, 6), _f(3, 4, 2), _f(3), [1], [1], [1]],
    "aten.conv2d.default": lambda: [_f(*IMAGE), _f(3, 4, 2, 2), _f(3), [1, 1], [1, 1], [1, 1]],
    "aten.conv_transpose2d.input": lambda: [_f(*IMAGE), _f(4, 3, 2, 2), _f(3), [2, 2], [0, 0], [1, 1]],
    "aten.convolution.default": lambda: (
        [_f(*IMAGE), _f(3, 4, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    ),
    "aten.avg_pool2d.default": lambda: [_f(*IMAGE), [2, 2], [2, 2], [0, 0]],
    "aten.max_pool2d.default": lambda: [_f(*IMAGE), [2, 2], [2, 2], [0, 0], [1, 1]],
    "aten.max_pool2d_with_indices.default": lambda: [_f(*IMAGE), [2, 2], [2, 2], [0, 0], [1, 1]],
    "aten.adaptive_avg_pool2d.default": lambda: [_f(*IMAGE), [2, 3]],
    "aten.im2col.default": lambda: [_f(*IMAGE), [2, 2], [1, 1], [0, 0], [1, 1]],
    "aten.pixel_shuffle.default": lambda: [_f(*IMAGE), 2],
    "aten.reflection_pad2d.default": lambda: [_f(*IMAGE), [1, 1, 1, 1]],
    "aten.replication_pad2d.default": lambda: [_f(*IMAGE), [1, 1, 1, 1]],
    "aten.constant_pad_nd.default": lambda: [_f(*IMAGE), [1, -1], 0.0],
    "aten.upsample_nearest2d.vec": lambda: [_f(*IMAGE), None, [2.0, 2.0]],
    "aten.upsample_bilinear2d.vec": lambda: [_f(*IMAGE), [7, 7], False, None],
    "aten.upsample_bicubic2d.vec": lambda: [_f(*IMAGE), [7, 7], False, None],
    "aten.upsample_nearest2d.default": lambda: [_f(*IMAGE), [7, 7], 1.2, 1.2],
    "aten.upsample_bilinear2d.default": lambda: [_f(*IMAGE), [7, 7], False, 1.2, 1.2],
    "aten.scaled_dot_product_attention.default": lambda: [*[_f(*HEADS) for _ in range(3)], _f(5, 5)],
    "aten.matmul.default": lambda: [_f(2, 3, 4), _f(2, 4, 5)],
    "aten.linear.default": lambda: [_f(2, 3, 4), _f(5, 4), _f(5)],
    "aten.bmm.default": lambda: [_f(2, 3, 4), _f(2, 4, 5)],
    "aten.baddbmm.default": lambda: [_f(2, 3, 5), _f(2, 3, 4), _f(2, 4, 5)],
    "aten.addmm.default": lambda: [_f(5), _f(3, 4), _f(4, 5)],
    "aten.bilinear.default": lambda: [_f(3, 4), _f(3, 5), _f(2, 4, 5), _f(2)],
    "aten._trilinear.default": lambda: [_f(3, 4, 1), _f(3, 1, 5), _f(1, 4, 5), [2], [1], [0], [1]],
    "aten.cdist.default": lambda: [_f(2, 3, 4), _f(2, 5, 4), 2.0],
    "aten._cdist_forward.default": lambda: [_f(2, 3, 4), _f(2, 5, 4), 2.0, None],
    "aten.tensordot.default": lambda: [_f(3, 4), _f(4, 5), [1], [0]],
    "aten.unfold.default": lambda: [_f(3, 8), 1, 3, 2],
    "aten.repeat_interleave.self_int": lambda: [_f(3, 4), 2, 1],
    "aten.diag_embed.default": lambda: [_f(3, 4)],
    "aten.select_scatter.default": lambda: [_f(3, 4), _f(3), 1, 2],
    "aten.slice_scatter.default": lambda: [_f(3, 4), _f(3, 2), 1, 1, 3, 1],
    "aten.prelu.default": lambda: [_f(2, 4, 3), torch.ones(4)],
    "aten.glu.default": lambda: [_f(2, 4)],
    "aten._softmax.default": lambda: [_f(2, 4), -1, False],
    "asapc.sinkhorn.default": lambda: [*[_f(*HEADS) for _ in range(3)], None, None, *LOOP],
    "asapc.sinkhorn_attention.default": lambda: [*[_f(*HEADS) for _ in range(2)], None, None, *LOOP],
    "asapc.asap.default": lambda: (
        [*[_f(*HEADS) for _ in range(3)], None, None, _f(1, 2, 5), None, 1.0, 1, [5.0]]
    ),
    "asapc.dual.default": lambda: (
        [*[_f(*HEADS) for _ in range(2)], None, None, [], _f(2, 3), "gaussian", "source", 1.0, 4, True]
    ),
    "asapc.esp_hard.default": lambda: (
        [*[_f(*HEADS) for _ in range(3)], None, None, _f(3, 4), torch.tensor(1.0), True, False, 5.0]
    ),
    "asapc.lot.default": lambda: (
        [*[_f(*HEADS) for _ in range(3)], None, None, None, _f(2, 3, 4), torch.full((2, 3), 1 / 3),
        1.0, 1.0, 3, True, 3, True, [5.0]]
    ),
}  # fmt: skip


def hostile_tensor(random: Random, shape: tuple[int, ...] | None = None, index: bool = False) -> Tensor:
    if shape is None or random.random() < 0.2:
        shape = tuple(random.choice([0, 1, 1, 2, 3, 4, 8]) for _ in range(random.randrange(6)))
    dtype = torch.int64 if index and random.random() < 0.8 else random.choice(DTYPES)
    if dtype.is_floating_point or dtype.is_complex:
        own = torch.randn(shape)
        if own.numel() and random.random() < 0.3:
            own.view(-1)[random.randrange(own.numel())] = random.choice(FLOATS)
    else:
        own = torch.randint(0, 3, shape)
        if own.numel() and random.random() < 0.5:
            own.view(-1)[random.randrange(own.numel())] = random.choice(INTEGERS)
    own = own.to(dtype)
    match random.randrange(20):
        case 0 if own.dim() > 1:
            return own.transpose(0, -1)
        case 1 if own.dim():
            return own[::2]
        case 2:
            return torch.zeros(1, dtype=dtype).as_strided(shape, [0] * len(shape))
    return own


def hostile_value(random: Random, kind: str, name: str, shape: tuple[int, ...]) -> Any:
    """For an argument of that type, near to a tensor of that shape."""
    if kind.startswith("Optional["):
        return None if random.random() < 0.4 else hostile_value(random, kind[9:-1], name, shape)
    match kind:
        case "Tensor":
            near = random.choice([None, shape, shape, shape[-1:], shape[:1], shape[1:2]])
            return hostile_tensor(random, near, "ind" in name)
        case "List[Tensor]" | "List[Optional[Tensor]]":
            return [hostile_tensor(random, shape, "ind" in name) for _ in range(random.randrange(4))]
        case "int" | "SymInt":
            if name == "dtype":
                return random.choice(DTYPES)
            if name in ("layout", "memory_format"):
                return None
            return random.choice(SMALL if random.random() < 0.6 else INTEGERS)
        case "List[int]" | "List[SymInt]":
            count = random.choice([0, 1, 2, 2, 3, 4, len(shape)])
            return [random.choice(SMALL if random.random() < 0.7 else INTEGERS) for _ in range(count)]
        case "bool":
            return random.random() < 0.5
        case "float":
            return random.choice(FLOATS) if random.random() < 0.6 else random.random() * 3
        case "List[float]":
            return [random.choice(FLOATS) for _ in range(random.randrange(4))]
        case "number":
            return random.choice([random.choice(INTEGERS), random.choice(FLOATS), True])
        case "str":
            return random.choice(TEXTS)
    return None


def call(random: Random, full: str) -> None:
    """One call; raises whatever the operator raises."""
    library, name, overload = full.split(".")
    operator = getattr(getattr(getattr(torch.ops, library), name), overload)
    arguments = operator._schema.arguments
    shape = tuple(random.choice([1, 2, 3, 4, 8]) for _ in range(random.randrange(1, 5)))
    kinds = [str(getattr(own, "real_type", own.type)) for own in arguments]
    given: dict[str, Any] = {}
    if full in RIGHT and random.random() < 0.9:
        values = RIGHT[full]()
        given = {own.name: value for own, value in zip(arguments, values, strict=False)}
        for place in random.sample(range(len(values)), min(len(values), random.choice([0, 1, 1, 2]))):
            own = arguments[place].name
            near = tuple(given[own].shape) if isinstance(given[own], Tensor) else shape
            given[own] = hostile_value(random, kinds[place], own, near)
    else:
        for own, kind in zip(arguments, kinds, strict=True):
            if not (own.has_default_value() and random.random() < 0.6):
                given[own.name] = hostile_value(random, kind, own.name, shape)
    if refused_call(full, given) is not None:
        return
    result = operator(**given)
    for tensor in result if isinstance(result, list | tuple) else [result]:
        if isinstance(tensor, Tensor) and tensor.numel() < 1 << 20:
            tensor.clone()  # every entry is read


def hostile_calls(seed: str, place: Path) -> None:
    """A few dozen calls of one allowed operator; the one that goes on is written to `place`."""
    random = Random(seed)
    torch.manual_seed(random.randrange(2**32))
    names = sorted(allowed_operators())
    full = random.choice([*RIGHT] if random.random() < 0.5 else names)
    place.write_text(f"{full} {os.getpid()}")
    for _ in range(CALLS):
        try:
            call(random, full)
        except Exception:  # every error is a check that worked
            continue
