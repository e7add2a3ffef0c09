"""The finite loop of a head by a cluster of blocks, its matrix in shared memory: host of resident.cu.

CUDA C++, since Triton's programs neither keep a matrix from one pass to the next nor share it; torch
compiles it at the first call of a shape, with the NVRTC that it brings along.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from asapc.kernels.gpu.tiles import LOG2_E, strides_of
from asapc.kernels.loop import SAFE_ROW_RANGE, Loop

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MOST_FEATURES = 128
MOST_WARPS = 16
MOST_CHUNKS = 5  # of 128 columns that the lanes of a warp share, where K is float32
MOST_BLOCKS = 8  # of a cluster
FEW_KEYS = 128  # up to which a cluster's waiting takes longer than what it saves
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest output
REGISTERS = {0: 128, 1: 72, 2: 72}  # that a thread needs at least
PROCESSOR = 228 << 10  # bytes of shared memory, of which a block takes 1 KiB beside its own


class Shape(NamedTuple):
    """The constants of resident.cu, in order."""

    warps: int
    cluster: int
    dim: int
    value_dim: int
    kind: int
    chunks: int
    blocks: int = 1

    def shared(self, keys: int) -> int:
        """Bytes of shared memory of a block."""
        columns, rows = -(-keys // 16) * 16, 16 * self.warps
        size, part, buffers = (2, 64, 2) if self.kind else (4, 32, 3)
        widest = max(self.dim + 8, self.value_dim + (8 if self.kind else 4))
        read = size * part * buffers * widest
        scalings = 4 * (columns * (3 if self.cluster > 1 else 1) + rows + 4)
        if self.kind == 2:
            return scalings + 4 * (rows + columns + 8) + read + 2 * rows * (columns + 8)
        return scalings + max(read, 4 * self.warps * columns) + 4 * rows * (columns + 8)

    def filling(self, keys: int) -> Shape:
        """With as many blocks as a processor has memory and registers for."""
        by_registers = 65536 // (32 * self.warps * REGISTERS[self.kind])
        by_memory = PROCESSOR // (self.shared(keys) + 1024)
        return self._replace(blocks=max(1, min(by_registers, by_memory, 16)))

    @property
    def source(self) -> str:
        constants = [f"#define {name.upper()} {value}\n" for name, value in self._asdict().items()]
        return "".join(constants) + files("asapc.kernels.gpu").joinpath("resident.cu").read_text()


def shape_for(q: Tensor, k: Tensor, v: Tensor) -> Shape | None:
    """None where the kernel cannot run, or not on this device."""
    if not q.is_cuda or not _compiles(q.device):
        return None
    own: Any = torch.cuda.get_device_properties(q.device)
    most_blocks = MOST_BLOCKS if own.major >= 9 else 1
    shape = shape_of(q, k, v, own.shared_memory_per_block_optin, most_blocks, own.multi_processor_count)
    return None if shape is None or compiled(shape, q.device).agrees is False else shape


@cache
def _compiles(device: torch.device) -> bool:
    """Whether the kernel does for this device; else Triton's run, which are slower."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        compiled(Shape(1, 1, 16, 16, 0, 1), device)
    except (AttributeError, ImportError, OSError, RuntimeError) as error:  # torch's or NVRTC's
        text = f"CUDA C++ does not compile here, so slower kernels run: {error}"
        warnings.warn(text, stacklevel=2)
        return False
    return True


def shape_of(
    q: Tensor, k: Tensor, v: Tensor, shared: int, most_blocks: int = MOST_BLOCKS, processors: int = 132
) -> Shape | None:
    """None where the kernel cannot hold these.

    shared: bytes of shared memory that a block may take.  most_blocks: that a cluster may have.
    """
    if {k.dtype, v.dtype} != {q.dtype} or q.dtype not in KINDS:
        return None
    batch, heads, queries, dim = q.shape
    idle = max(1, processors // max(1, batch * heads))
    sizes = (queries, k.shape[2], dim, v.shape[3])
    return _shape(sizes, q.dtype, shared, most_blocks, min(most_blocks, idle))


@cache
def _shape(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, shared: int, most: int, idle: int
) -> Shape | None:
    """most: blocks of a cluster; idle: while there are processors for each."""
    queries, keys, dim, value_dim = sizes
    if min(sizes) < 1 or max(dim, value_dim) > MOST_FEATURES:
        return None
    kind, strips = KINDS[dtype], -(-queries // 16)
    chunks = 0 if kind == 2 else -(-keys // 128)
    dims = (-(-dim // 16) * 16, -(-value_dim // 16) * 16)
    if chunks > MOST_CHUNKS:
        return None
    fitting = [
        shape for cluster in range(1, min(most, strips) + 1)
        if (shape := Shape(-(-strips // cluster), cluster, *dims, kind, chunks)).warps <= MOST_WARPS
        and shape.shared(keys) <= shared
    ]  # fmt: skip
    if not fitting:
        return None
    wanted = [shape for shape in fitting if shape.cluster <= idle] if keys > FEW_KEYS else []
    return (min(wanted) if wanted else fitting[0]).filling(keys)  # least warps, then blocks


def arguments(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None, dual: Tensor | None,
    factors: Tensor | None, out: Tensor, done: Tensor, loop: Loop, factor: float,
) -> tuple[list[Tensor], list[int]]:  # fmt: skip
    """Of the kernel: tensors, and numbers.

    bias: [B, H, N, M] float32, any strides.  dual: float32.  factors [B] and factor: of a K b v.
    done: [B H], 1 where the head stayed in range, else 0.
    """
    (_, heads, queries, dim), (keys, value_dim) = q.shape, v.shape[2:]
    given = (keep, bias, dual, factors)
    flags = [x is not None for x in given] + [loop.first_side == "row", *map(_is_wide, (q, k, v))]
    reals = (loop.score_multiplier * LOG2_E.value, factor, SAFE_ROW_RANGE[torch.float32] * LOG2_E.value)
    strides = (*q.stride(), *k.stride(), *v.stride(), *strides_of(keep, 2), *strides_of(bias, 4))
    numbers = [
        heads, queries, keys, dim, value_dim, *strides, *strides_of(dual, 3), *map(_bits, reals),
        loop.half_steps, sum(flag << i for i, flag in enumerate(flags)),
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
    kernel = compiled(shape, tensors[0].device).run
    torch.cuda.is_current_stream_capturing()  # makes the device's context current in a thread without one
    grid, keys = (heads * shape.cluster, 1, 1), tensors[1].shape[2]
    kernel(grid, (32 * shape.warps, 1, 1), [*tensors, *numbers], shape.shared(keys))


@dataclass
class Kernel:
    """run: to be called with a grid, a block, arguments and bytes of shared memory.

    agrees: with Triton's, whether it did at its first call here; None before that.
    """

    run: Any
    agrees: bool | None = None


@cache
def compiled(shape: Shape, device: torch.device) -> Kernel:
    from torch.utils import cpp_extension  # setuptools with it, which not all have

    # Torch asks for a toolkit's headers, which resident.cu does without: there may be none.
    home = patch.object(cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME or "")
    with torch.cuda.device(device), home:
        torch.cuda.is_current_stream_capturing()  # as in `launch`
        kernel = torch.cuda._compile_kernel(shape.source, "resident")
        own: Any = torch.cuda.get_device_properties(device)
        kernel.set_shared_memory_config(own.shared_memory_per_block_optin)
    return Kernel(kernel)


def is_new(shape: Shape, device: torch.device) -> bool:
    """Whether the kernel is to be compared with Triton's: compilers differ from machine to machine."""
    recorded = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return compiled(shape, device).agrees is None and not recorded


def agrees(shape: Shape, out: Tensor, by_triton: Tensor) -> bool:
    """Whether both are the same but for their roundings; if not, the kernel is not called again here."""
    own = compiled(shape, out.device)
    most = TOLERANCE[out.dtype] * by_triton.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    own.agrees = bool(torch.isclose(out, by_triton, rtol=0.0, atol=most, equal_nan=True).all())
    if not own.agrees:
        warnings.warn(f"CUDA C++ gives other numbers than Triton here, which runs: {shape}", stacklevel=2)
    return own.agrees
