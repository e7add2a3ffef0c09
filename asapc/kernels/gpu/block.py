"""The finite loop of a head in one block of threads, its matrix in registers: host side of resident.cu.

CUDA C++, since Triton's tensors have powers of two as sizes and no registers to choose from; torch
compiles it at the first call of a shape, with the NVRTC that it brings along.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asapc.kernels.gpu.tiles import LOG2_E, strides_of
from asapc.kernels.loop import SAFE_ROW_RANGE, Loop

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MOST_TOKENS = 256
MOST_FEATURES = 128
REGISTERS = 16384  # of each of the four parts of a processor, which share the warps of a block
OTHER_REGISTERS = {4: 52, 2: 36}  # beside the matrix, by bytes of an element


class Shape(NamedTuple):
    """The constants of resident.cu, in order."""

    warps: int
    strips: int
    tiles: int
    held: int
    dim: int
    value_dim: int
    kind: int
    late: bool

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        size = 2 if self.kind else 4
        pad, keys, queries = (8 if self.kind else 4), 8 * self.tiles, 16 * self.strips * self.warps
        scored, valued = (keys + queries) * (self.dim + pad), keys * (self.value_dim + pad)
        kept = max(scored, valued) if self.late else scored + valued
        parts = self.warps * 32 * -(-self.tiles // 4)
        others = 16 * (self.tiles - self.held) * self.strips * 32 * self.warps
        return 4 * (keys + parts) + 16 + size * kept + others

    @property
    def blocks(self) -> int:
        """That a processor has registers for, and an H100 the memory (1 KiB a block is lost)."""
        registers = 4 * self.strips * self.held + (44 if self.kind else 64)
        by_registers = 4 * REGISTERS // (32 * self.warps * registers)
        return max(1, min(by_registers, (228 << 10) // (self.shared + 1024), 16))

    @property
    def source(self) -> str:
        named = {**self._asdict(), "blocks": self.blocks}
        constants = [f"#define {name.upper()} {int(value)}\n" for name, value in named.items()]
        return "".join(constants) + files("asapc.kernels.gpu").joinpath("resident.cu").read_text()


def shape_for(q: Tensor, k: Tensor, v: Tensor) -> Shape | None:
    """None where the kernel cannot run, or not on this device."""
    if not q.is_cuda or not _compiles(q.device):
        return None
    own: Any = torch.cuda.get_device_properties(q.device)
    return shape_of(q, k, v, own.shared_memory_per_block_optin)


@cache
def _compiles(device: torch.device) -> bool:
    """Whether the kernel does for this device; else Triton's run, which are slower."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        compiled(Shape(1, 1, 2, 2, 16, 16, 0, False), device)
    except (AttributeError, OSError, RuntimeError) as error:  # of torch's private function, or of NVRTC
        text = f"CUDA C++ does not compile here, so slower kernels run: {error}"
        warnings.warn(text, stacklevel=2)
        return False
    return True


def shape_of(q: Tensor, k: Tensor, v: Tensor, shared: int) -> Shape | None:
    """None where the kernel cannot hold these.  shared: bytes of shared memory that a block may take."""
    if {k.dtype, v.dtype} != {q.dtype} or q.dtype not in KINDS:
        return None
    return _shape(q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, shared)


@cache
def _shape(
    queries: int, keys: int, dim: int, value_dim: int, dtype: torch.dtype, shared: int
) -> Shape | None:
    if not (min(queries, keys) > 0 and max(queries, keys) <= MOST_TOKENS):
        return None
    if max(dim, value_dim) > MOST_FEATURES:
        return None
    strips = 1 if queries <= 128 else 2  # the fewer warps, the less they exchange, and the less they hide
    warps, tiles = -(-queries // (16 * strips)), -(-keys // 16) * 2  # a kernel for every 16 keys
    registers = min(255, REGISTERS // (32 * -(-warps // 4)) // 8 * 8)
    held = max(0, min(tiles, (registers - OTHER_REGISTERS[dtype.itemsize]) // (4 * strips)))
    dims = (-(-dim // 16) * 16, -(-value_dim // 8) * 8)
    for late in (False, True):
        shape = Shape(warps, strips, tiles, held, *dims, KINDS[dtype], late)
        if shape.shared <= shared:
            return shape
    return None


def arguments(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None, dual: Tensor | None,
    factors: Tensor | None, out: Tensor, done: Tensor, loop: Loop, factor: float,
) -> tuple[list[Tensor], list[int]]:  # fmt: skip
    """Of the kernel: tensors, and numbers.

    bias: [B, H, N, M] float32, any strides.  dual: float32.  factors [B] and factor: of a K b v.
    done: [B H], 1 where the head stayed in range, else 0.
    """
    (_, heads, queries, dim), (keys, value_dim) = q.shape, v.shape[2:]
    rows_first = loop.first_side == "row"
    given = (keep, bias, dual, factors)
    flags = [x is not None for x in given] + [rows_first, loop.ends_on_rows, *map(_is_wide, (q, k, v))]
    reals = (loop.score_multiplier * LOG2_E.value, factor, SAFE_ROW_RANGE[torch.float32] * LOG2_E.value)
    strides = (*q.stride(), *k.stride(), *v.stride(), *strides_of(keep, 2), *strides_of(bias, 4))
    numbers = [
        heads, queries, keys, dim, value_dim, *strides, *strides_of(dual, 3), *map(_bits, reals),
        (loop.half_steps - (not rows_first)) // 2, sum(flag << i for i, flag in enumerate(flags)),
    ]  # fmt: skip
    return [q, k, v, *(out if x is None else x for x in given), out, done], numbers


def _is_wide(x: Tensor) -> bool:
    """Whether its rows are read 16 bytes at a time."""
    size = x.element_size()
    places = (x.data_ptr(), *(size * step for step in x.stride()[:3]), size * x.shape[3])
    return x.stride(3) == 1 and all(place % 16 == 0 for place in places)


def _bits(x: float) -> int:
    """Of a float32: torch passes whole numbers, and floats in a width of its own."""
    return struct.unpack("i", struct.pack("f", x))[0]


def launch(shape: Shape, tensors: Sequence[Tensor], numbers: Sequence[int], heads: int) -> None:
    """On the current stream, for so many heads of the whole batch."""
    kernel = compiled(shape, tensors[0].device)
    torch.cuda.is_current_stream_capturing()  # makes the device's context current in a thread without one
    kernel((heads, 1, 1), (32 * shape.warps, 1, 1), [*tensors, *numbers], shape.shared)


@cache
def compiled(shape: Shape, device: torch.device) -> Any:
    """The kernel, to be called with a grid, a block, arguments and bytes of shared memory."""
    with torch.cuda.device(device):
        torch.cuda.is_current_stream_capturing()  # as in `launch`
        kernel = torch.cuda._compile_kernel(shape.source, "resident")
        kernel.set_shared_memory_config(shape.shared)
    return kernel
