"""Tensors of an ONNX file, inside it or in files beside it, read without trusting what it declares."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from asapc.errors import InputError
from asapc.formats.user_code import describe
from asapc.inputs.onnx.host import DTYPES

MOST_STORED = 1 << 40  # entries, counting empty axes as one; beyond that, sizes overflow
MAX_RANK = 64


def read_tensor(proto: onnx.TensorProto, path: Path) -> Tensor:
    """The tensor, on the CPU.  path: of the ONNX file.

    Raises InputError for other element types and for data that is missing, outside the file's folder or
    of another size than the shape says.
    """
    place = f"{path}: tensor {proto.name or '(unnamed)'}"
    if proto.data_type not in DTYPES:
        raise InputError(
            f"{place} must hold floats, integers or bools", got=type_name(proto.data_type),
            help="export the model in float32",
        )  # fmt: skip
    dtype, shape = DTYPES[proto.data_type], list(proto.dims)
    possible = min(shape, default=0) >= 0 and math.prod(max(n, 1) for n in shape) < MOST_STORED
    if proto.HasField("segment") or not possible or len(shape) > MAX_RANK:
        raise InputError(f"{place} must be whole and have sizes", got=f"dimensions {shape}")
    count = math.prod(shape)
    size = count * torch.empty((), dtype=dtype).element_size()
    if proto.data_location == onnx.TensorProto.EXTERNAL:
        data = _external(proto, path, place, size)
    elif proto.HasField("raw_data"):
        data = proto.raw_data
    else:
        data = _typed(proto, place, count)
    if len(data) != size:
        raise InputError(
            f"{place} must hold the {size} bytes of {dtype} {shape}", got=f"{len(data)} bytes",
            help="the file is damaged or truncated: copy or export it again",
        )  # fmt: skip
    stored = torch.uint8 if dtype == torch.bool else dtype
    flat = torch.frombuffer(bytearray(data), dtype=stored) if count else torch.empty(0, dtype=stored)
    return flat.to(dtype).reshape(shape)


def check_external(protos: Iterable[onnx.TensorProto], path: Path) -> None:
    """Raises InputError where tensors would take more memory than the files that hold them.

    read_tensor reports everything else that is wrong with one of them.
    """
    wanted, stored = 0, {}
    for proto in protos:
        if proto.data_location != onnx.TensorProto.EXTERNAL or proto.data_type not in DTYPES:
            continue
        location = next((entry.value for entry in proto.external_data if entry.key == "location"), "")
        file = _beside(location, path.parent.resolve())
        try:
            status = None if file is None else file.stat()
        except OSError:
            continue
        size = torch.empty((), dtype=DTYPES[proto.data_type]).element_size()
        size *= math.prod(max(n, 0) for n in proto.dims)
        if status is not None and size <= status.st_size:
            stored[status.st_dev, status.st_ino] = status.st_size
            wanted += size
    if wanted > sum(stored.values()):
        raise InputError(
            f"{path}: its tensors must not share the bytes of their files",
            got=f"{wanted} bytes in {len(stored)} files of {sum(stored.values())}",
            help="the files are truncated or belong to another model: copy or export them again",
        )


def type_name(number: int) -> str:
    """FLOAT8E4M3FN and the like."""
    known = onnx.TensorProto.DataType
    return known.Name(number) if number in known.values() else f"type {number}"


def _typed(proto: onnx.TensorProto, place: str, count: int) -> bytes:
    """Data that is not raw: a number for each entry, in a field of its type."""
    try:
        return numpy_helper.to_array(proto).tobytes()
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(
            f"{place} must hold {count} entries", got=describe(error),
            help="the file is damaged: export it again",
        ) from error  # fmt: skip


def _external(proto: onnx.TensorProto, path: Path, place: str, size: int) -> bytes:
    entries = {entry.key: entry.value for entry in proto.external_data}
    location = entries.get("location", "")
    file = _beside(location, path.parent.resolve())
    if file is None:
        raise InputError(
            f"{place}: its data must lie in the folder of the ONNX file", got=repr(location),
            help="put both files into one folder, as files and not as links",
        )  # fmt: skip
    offset, length = (_number(entries, key, default, place)
                      for key, default in (("offset", 0), ("length", size)))  # fmt: skip
    try:
        stored = file.stat().st_size if file.is_file() else None
        content = _part(file, offset, size) if stored and length == size else b""
    except OSError as error:  # the name is too long, or reading is not permitted
        raise InputError(f"{place}: its data could not be read", got=describe(error)) from error
    if stored is None:
        raise InputError(
            f"{place}: the file with its data must be there", got=f"no {file}",
            help=f"copy {file.name} into the folder of the ONNX file",
        )  # fmt: skip
    if len(content) != size:
        raise InputError(
            f"{place}: {file.name} must hold its {size} bytes from {offset} on",
            got=f"{length} bytes declared, in a file of {stored}",
            help="the file is truncated or belongs to another model: copy or export both again",
        )
    return content


def _part(file: Path, offset: int, size: int) -> bytes:
    with file.open("rb") as stream:
        if offset + size > file.stat().st_size:
            return b""
        stream.seek(offset)
        return stream.read(size)


def _beside(location: str, folder: Path) -> Path | None:
    """The file in the folder, or None if it lies elsewhere."""
    relative = Path(location)
    inside = location and not relative.is_absolute() and ".." not in relative.parts
    if not inside or "\0" in location or "\\" in location or not _within(folder / relative, folder):
        return None
    return folder / relative


def _within(file: Path, folder: Path) -> bool:
    try:
        return file.resolve().is_relative_to(folder)
    except (OSError, RuntimeError):  # links in a circle
        return False


def _number(entries: dict[str, str], key: str, default: int, place: str) -> int:
    text = entries.get(key, str(default))
    if not text.isdecimal() or len(text) > 18:
        raise InputError(f"{place}: {key} of its data must be a number of bytes", got=repr(text))
    return int(text)
