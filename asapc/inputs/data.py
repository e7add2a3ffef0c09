"""Examples for calibration, selection and the gate: arrays in a file, or batches from a callable.

Every example has a 64-bit hash of its content, which decides its split: the three splits stay
disjoint whatever the order of the data, and an example met twice lands in the same one.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
import math
import os
import shlex
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from asapc.device import CPU, moved
from asapc.errors import InputError
from asapc.formats import places
from asapc.formats.user_code import UserCode
from asapc.inputs.paths import check_data, identifier, is_array_file
from asapc.inputs.weights import fingerprint, layout_of, read_safetensors
from asapc.terminal.printed import reason

Split = Literal["calibration", "selection", "gate"]
Select = Callable[[int], bool]

MAX_UNPACKED = 1 << 28  # bytes; of larger data, at most MAX_RATIO times the file
MAX_RATIO = 200

_PIECE = 256  # examples: a selection copies, so never a whole file at once
_PIECE_BYTES = 1 << 24  # of them, where examples are large
_COUNTED = 4096  # examples, at most, where a split has none


def split_of(hash: int) -> Split:
    """70 % calibration, 15 % selection, 15 % gate, by hash modulo 100."""
    remainder = hash % 100
    if remainder < 70:
        return "calibration"
    return "selection" if remainder < 85 else "gate"


GATE_SHARE = 0.15  # see split_of


def empty_split(source: DataSource, split: Split) -> InputError:
    """The error for data of which a split has no example."""
    hashes = [content for batch in source.batches(_PIECE, limit=_COUNTED) for content in batch.hashes]
    read, different = len(hashes), len({*hashes})
    examples = f"none of {read}" if source.examples == read else f"none of the first {read}"
    kinds = "" if different == read else f", {different} of them different"
    return InputError(
        f"{source.source}: the {split} split needs examples",
        got=f"{examples}{kinds}",
        help="examples are split by content: 70 % for calibration, 15 % each for selection and the gate; "
        "pass more that differ, or other data to measure on",
    )


def require_splits(source: DataSource) -> None:
    """Raises InputError for data of which a split has no example."""
    missing: list[Split] = [*get_args(Split)]
    for batch in source.batches(_PIECE):
        present = {split_of(content) for content in batch.hashes}
        missing = [split for split in missing if split not in present]
        if not missing:
            return
    raise empty_split(source, missing[0])


@dataclass
class Batch:
    """One call of the model: forward(*args, **kwargs), for accuracy `labels` [B], `hashes` B long.

    Tensors are [B, ...]; anything else in args or kwargs is passed on as it is.
    numbers: of the examples in the data, counted from 0; empty if unknown.
    teacher: its class scores [B, classes], if training compares with them.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor | None
    hashes: list[int]
    numbers: list[int] = field(default_factory=list)
    teacher: Tensor | None = None

    def __len__(self) -> int:
        return len(self.hashes)

    def on(self, device: torch.device) -> Batch:
        """With args and kwargs on the device; labels stay on the CPU, where they are compared."""
        return replace(self, args=moved(self.args, device), kwargs=moved(self.kwargs, device))

    @property
    def device(self) -> torch.device:
        """Where its tensors are; the CPU if it has none."""
        return next((tensor.device for tensor in self.tensors()), CPU)

    @property
    def leaves(self) -> list[Any]:
        """What args and kwargs hold, in order."""
        return pytree.tree_leaves((self.args, self.kwargs))

    def with_leaves(self, leaves: Sequence[Any]) -> Batch:
        """With these in their place."""
        spec = pytree.tree_structure((self.args, self.kwargs))
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return replace(self, args=args, kwargs=kwargs)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """With what a function makes of each of its tensors."""
        return self.with_leaves([function(x) if isinstance(x, Tensor) else x for x in self.leaves])

    def tensors(self) -> list[Tensor]:
        """Those among args and kwargs, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def sizes(self) -> list[torch.Size]:
        """Of one example of each tensor."""
        return [tensor.shape[1:] for tensor in self.tensors()]


class DataSource(ABC):
    """Batches that can be read any number of times.

    source:      where the data came from, for reports.
    examples:    their number, or None if unknown.
    fingerprint: sha256 of the arrays, or of a callable's name and source file, wherever that lies.
    labels:      of all examples; None if there are none, or they are known only batch by batch.
    device:      the device that batches are moved to.
    """

    source: str
    examples: int | None
    fingerprint: str
    labels: Tensor | None = None
    device: torch.device = CPU

    def on(self, device: torch.device) -> Self:
        """The same data, in batches on the device."""
        elsewhere = copy.copy(self)
        elsewhere.device = device
        return elsewhere

    @abstractmethod
    def _batches(self) -> Iterator[Batch]:
        """All examples in order, in batches of any size."""

    def batches(
        self, batch_size: int, *, select: Select | None = None, limit: int | None = None
    ) -> Iterator[Batch]:
        """Batches of at most batch_size examples whose hash passes select, `limit` examples in all.

        Examples of different shapes never share a batch.  Nothing is yielded when none passes.
        Raises InputError for unusable data.
        """
        return (batch.on(self.device) for batch in self._cut(batch_size, select, limit))

    def _cut(self, batch_size: int, select: Select | None, limit: int | None) -> Iterator[Batch]:
        pending: Batch | None = None
        left = limit
        for batch in self._batches():
            if left is not None and left <= 0:
                break
            index = [i for i, hash in enumerate(batch.hashes) if select is None or select(hash)]
            index = index[:left]
            if left is not None:
                left -= len(index)
            if not index:
                continue
            chosen = batch if len(index) == len(batch) else rows(batch, index)
            if pending is not None and _layout(pending) != _layout(chosen):
                yield pending
                pending = None
            pending = chosen if pending is None else _joined([pending, chosen])
            while len(pending) > batch_size:
                yield rows(pending, range(batch_size))
                pending = rows(pending, range(batch_size, len(pending)))
        if pending is not None:
            yield pending

    def count(
        self, batch_size: int, *, select: Select | None = None, limit: int | None = None
    ) -> int | None:
        """How many batches batches() yields; None if only reading them shows it."""
        return None

    def gather(self, *, select: Select | None = None, limit: int | None = None) -> list[Batch]:
        """The examples batches() would yield, all in memory: one batch for each layout."""
        groups: dict[Any, list[Batch]] = {}
        for batch in self.batches(_PIECE, select=select, limit=limit):
            groups.setdefault(_layout(batch), []).append(batch)
        return [_joined(group) for group in groups.values()]


class HeldData(DataSource):
    """Examples in memory, already validated.  held: in batches of any size."""

    def __init__(self, source: str, held: Sequence[Batch], fingerprint: str) -> None:
        self.source, self.fingerprint, self._held = source, fingerprint, held
        self.examples = sum(map(len, held))
        self.labels = held[0].labels if len(held) == 1 else None

    def _batches(self) -> Iterator[Batch]:
        for batch in self._held:
            piece = _piece(sum(tensor.nbytes for tensor in batch.tensors()), len(batch))
            for start in range(0, len(batch), piece):
                yield rows(batch, range(start, min(start + piece, len(batch))))

    def count(
        self, batch_size: int, *, select: Select | None = None, limit: int | None = None
    ) -> int | None:
        if len(self._held) > 1:
            return None
        hashes = self._held[0].hashes
        chosen = len(hashes) if select is None else sum(map(select, hashes))
        return math.ceil(min(chosen, chosen if limit is None else limit) / batch_size)


def _of_arrays(source: str, arrays: Mapping[str, Any], signature: Signature, own: bool) -> HeldData:
    """own: nobody else holds the arrays, so they are copied only for another dtype or layout."""
    if not arrays:
        raise _empty(source)
    converted = {name: x if isinstance(x, Tensor) else np.asarray(x) for name, x in arrays.items()}
    whole = _batch(converted, signature, source, 0, own)
    inputs = dict(signature.names(whole.args, whole.kwargs))
    labels = {} if whole.labels is None else {"labels": whole.labels}
    return HeldData(source, [whole], fingerprint(inputs | labels))


def _of_batches(given: Iterable[object], signature: Signature) -> HeldData:
    source, held = "(batches in memory)", list[Batch]()
    for number, item in enumerate(given):
        held.append(_batch(item, signature, f"data, batch {number}", sum(map(len, held))))
    if not held:
        raise _empty(source)
    hashes = repr([batch.hashes for batch in held])
    return HeldData(source, held, hashlib.sha256(hashes.encode()).hexdigest())


def _piece(size: int, examples: int) -> int:
    """How many examples to look at at once, of so many that take `size` bytes together."""
    return max(1, min(_PIECE, _PIECE_BYTES * examples // max(1, size)))


class CallableData(DataSource):
    """Batches from the user's callable, called again for every pass over the data."""

    examples = None

    def __init__(self, spec: str, signature: Signature) -> None:
        self.source = spec
        self._code = UserCode(spec, "data")
        self._signature = signature
        is_file = spec.rpartition(":")[0].endswith(".py")
        digest = hashlib.sha256((spec.rpartition(":")[2] if is_file else spec).encode())
        if self._code.file is not None:
            digest.update(Path(self._code.file).read_bytes())
        self.fingerprint = digest.hexdigest()

    def _batches(self) -> Iterator[Batch]:
        yielded = self._code.call()
        if not isinstance(yielded, Iterable) or isinstance(yielded, (Tensor, Mapping, str)):
            raise InputError(
                f"data {self.source} must return or yield batches",
                got=f"a {type(yielded).__name__}",
                help="yield one tensor, tuple or dict of tensors per batch",
            )
        iterator = iter(yielded)
        end = object()
        count = 0
        for number in itertools.count():
            item = self._code.run(lambda: next(iterator, end), "yield batches")
            if item is end:
                break
            batch = _batch(item, self._signature, f"{self.source}, batch {number}", count)
            count += len(batch)
            yield batch
        if count == 0:
            raise _empty(self.source)


def _batch(item: object, signature: Signature, place: str, first: int, own: bool = False) -> Batch:
    """A batch from the user, checked.  first: number of examples before it.  own: see _of_arrays."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    labels = None
    if isinstance(item, Mapping):
        kwargs = {str(name): value for name, value in item.items()}
        labels = kwargs.pop("labels", None)
    else:
        args = tuple(item) if isinstance(item, (tuple, list)) else (item,)
    args, kwargs = signature.bind(args, kwargs, place)
    tensors: dict[str, Tensor] = {}

    def checked(name: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor | np.ndarray):
            tensors[name] = leaf = _input(leaf, name, place, first, own)
        elif not isinstance(leaf, bool | int | float | str | NoneType):
            raise InputError(
                f"{place}: {name} must be a tensor, an array or a plain constant, or a tuple, list or "
                "dict of these",
                got=f"a {type(leaf).__name__}",
            )
        return leaf

    def nested(name: str, value: Any) -> Any:
        return pytree.tree_map_with_path(lambda at, x: checked(name + pytree.keystr(at), x), value)

    named = {name: nested(name, value) for name, value in signature.names(args, kwargs)}
    if labels is not None:
        labels = _labels(labels, place)
    _check_lengths({**tensors, "labels": labels} if labels is not None else tensors, place)
    values, hashes = list(named.values()), _content_hashes(tensors)
    by_name = dict(zip(kwargs, values[len(args) :], strict=True))
    return Batch(
        tuple(values[: len(args)]), by_name, labels, hashes, [*range(first, first + len(hashes))]
    )


def data_of(
    given: str | DataSource | Mapping[str, Any] | Iterable[object],
    model_signature: inspect.Signature | None,
) -> DataSource:
    """DATA, or what Python code may give instead: arrays by the names of forward's arguments and
    `labels`, one array for the first argument, or batches (a tensor, tuple or mapping each), which are
    read once and held.

    Raises InputError as open_data.
    """
    if isinstance(given, str | DataSource):
        return open_data(given, model_signature)
    signature = Signature(model_signature)
    if isinstance(given, Tensor | np.ndarray):
        given = {signature.first_name: given}
    if isinstance(given, Mapping):
        return _of_arrays("(arrays in memory)", given, signature, own=False)
    return _of_batches(given, signature)


def open_data(spec: str | DataSource, model_signature: inspect.Signature | None) -> DataSource:
    """The data named by DATA (see DATA_GRAMMAR); names are checked against forward's arguments.

    Files: floating arrays pass as float32 unless float64 or a half, integers as int64, bool as
    bool.  Raises InputError for a missing or broken file, names that are not arguments, missing
    arguments, other dtypes, lengths that differ, no examples, NaN or infinity.  A callable's
    batches are checked the same way when they are read.
    """
    if isinstance(spec, DataSource):
        return spec
    check_data(spec)
    signature = Signature(model_signature)
    path = Path(spec)
    if is_array_file(spec):
        arrays = _read_npz(path) if path.suffix == ".npz" else read_safetensors(path)
        return _of_arrays(spec, signature.renamed(arrays), signature, own=True)
    if ":" in spec:
        return CallableData(spec, signature)
    what = "is not data that can be read" if path.exists() else "is not data, and no such file"
    help = f"np.savez('data.npz', {signature.first_name}=np.load({spec!r})) names its array"
    raise InputError(f"{spec} {what}", help=help)


class Signature:
    """Names and order of forward's arguments; without a signature every name is accepted."""

    def __init__(self, signature: inspect.Signature | None) -> None:
        either, only = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        declared = signature or inspect.signature(lambda *args, **kwargs: None)
        parameters = [
            p.replace(kind=either) if p.kind is inspect.Parameter.POSITIONAL_ONLY else p
            for p in declared.parameters.values() if p.name != "self"
        ]  # fmt: skip
        self._signature = inspect.Signature(parameters)
        self.arguments = tuple(p.name for p in parameters if p.kind in (either, only))
        self.positional = tuple(p.name for p in parameters if p.kind is either)

    @property
    def first_name(self) -> str:
        return self.arguments[0] if self.arguments else "NAME"

    def renamed(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays under forward's names where theirs are not Python: input_1 for ONNX's input.1."""
        by_argument = {}
        for name, array in arrays.items():
            argument = identifier(name)
            taken = name in self.arguments or argument in arrays or argument not in self.arguments
            by_argument[name if taken else argument] = array
        return by_argument

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: str
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Leading positional arguments by position, the rest by name, in forward's order.

        Raises InputError for too many, unknown or missing arguments.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            accepted = f"forward({', '.join(self.arguments)})" if self.arguments else "forward"
            names = [*kwargs] + [f"{len(args)} positional values"] * bool(args)
            raise InputError(
                f"{place}: arrays must be named after the arguments of {accepted}",
                got=f"{', '.join(names) or 'no arrays'}: {error}",
                help=f"np.savez('data.npz', {self.first_name}=...) does so; `labels` holds labels",
            ) from None
        return bound.args, bound.kwargs

    def names(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """(name, value) for a bound call, in its order."""
        for position, value in enumerate(args):
            known = position < len(self.positional)
            yield self.positional[position] if known else f"argument {position}", value
        yield from kwargs.items()


def _read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            _check_unpacked(archive, path)
            return {
                info.filename.removesuffix(".npy"): _read_npy(archive, info, path)
                for info in archive.infolist()
            }
    except zipfile.BadZipFile as error:
        with path.open("rb") as file:
            if file.read(6) == b"\x93NUMPY":
                raise InputError(
                    f"{path}: must be an .npz archive of named arrays",
                    got="a single unnamed array",
                    help="save it with np.savez(path, NAME=array)",
                ) from None
        raise _broken_npz(path, error) from error
    except InputError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise many types for a damaged file
        raise _broken_npz(path, error) from error


def _check_unpacked(archive: zipfile.ZipFile, path: Path) -> None:
    """Raises InputError where a small file would fill the memory."""
    unpacked = sum(info.file_size for info in archive.infolist())
    if unpacked > max(MAX_UNPACKED, MAX_RATIO * path.stat().st_size):
        raise InputError(
            f"{path}: must not unpack to more than {MAX_RATIO} times its size",
            got=f"{path.stat().st_size} bytes that unpack to {unpacked}",
            help="if this is your own data, save it with np.savez, uncompressed",
        )
    for info in archive.infolist():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("a compression that numpy does not write")


def _read_npy(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> np.ndarray[Any, Any]:
    """One array, whose declared shape must match the bytes that follow."""
    with archive.open(info) as content:
        version = np.lib.format.read_magic(content)
        if version not in ((1, 0), (2, 0)):  # 3.0 is for names of fields, which numbers do not have
            raise ValueError(f"version {version} of the .npy format")
        read = np.lib.format.read_array_header_1_0
        shape, _, dtype = (read if version == (1, 0) else np.lib.format.read_array_header_2_0)(content)
        if dtype.hasobject:
            raise InputError(
                f"{path}: arrays must hold numbers",
                got="Python objects (a pickle, which is never run)",
                help="convert them to numeric arrays, padded to one length, and save again",
            )
        declared = math.prod(shape) * dtype.itemsize
        stored = info.file_size - content.tell()
        if min(shape, default=0) < 0 or declared != stored:
            raise ValueError(f"an array of {declared} bytes declared, {stored} stored")
    with archive.open(info) as content:  # read piece by piece, so never in memory twice
        return np.lib.format.read_array(content, allow_pickle=False)


def _broken_npz(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path}: not an .npz archive, or a truncated one",
        got=f"{path.stat().st_size} bytes ({type(error).__name__}: {reason(error)})",
        help="write it again with np.savez",
    )


def _tensor(value: object, name: str, place: str, own: bool = False) -> Tensor:
    """An array as a tensor on the CPU, its dtype unchanged; a copy, unless it is our own."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise InputError(
            f"{place}: {name} must hold real numbers or booleans", got=f"dtype {array.dtype}"
        )
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if array.dtype.kind == "u":
        array = array.astype(np.int64)
    native = array.dtype.newbyteorder("=")
    if own:
        return torch.from_numpy(np.require(array, native, ["C", "W"]))
    return torch.from_numpy(np.array(array, dtype=native, order="C"))


def _input(value: object, name: str, place: str, first: int, own: bool = False) -> Tensor:
    """An input array [B, ...] in its canonical dtype, finite.  first: examples before it."""
    tensor = _tensor(value, name, place, own)
    if tensor.is_complex():
        raise InputError(f"{place}: {name} must hold real numbers", got=f"dtype {tensor.dtype}")
    if tensor.is_floating_point():
        if tensor.dtype not in (torch.float64, torch.float16, torch.bfloat16):
            tensor = tensor.float()
        example = _first_bad(tensor)
        if example is not None:
            kind = "NaN" if torch.isnan(tensor[example] if tensor.dim() else tensor).any() else "inf"
            raise InputError(
                f"{place}: {name} must be finite",
                got=f"{kind} in example {first + example} (counted from 0)",
                help="fix or remove that example",
            )
    elif tensor.dtype != torch.bool:
        tensor = tensor.long()
    return tensor


def _first_bad(tensor: Tensor) -> int | None:
    """The first example [...] with a number that is not finite."""
    if not tensor.dim():
        return None if bool(tensor.isfinite()) else 0
    if not tensor.numel():  # a file may promise 10^12 examples of no number each
        return None
    first = 0
    for piece in tensor.split(_piece(tensor.nbytes, len(tensor))):  # comparing takes memory too
        bad = ~torch.isfinite(piece)
        if bad.any():
            return first + int(bad.reshape(len(bad), -1).any(dim=1).nonzero()[0])
        first += len(piece)
    return None


def _labels(value: object, place: str) -> Tensor:
    tensor = _tensor(value, "labels", place)
    integer = not tensor.is_floating_point() and not tensor.is_complex()
    if not integer or tensor.dim() != 1:
        raise InputError(
            f"{place}: labels must hold one class number (an integer) per example",
            got=layout_of(tensor),
        )
    return tensor.long()


def _check_lengths(tensors: Mapping[str, Tensor], place: str) -> None:
    """All tensors share their first dimension, which is not empty.  Raises InputError."""
    inputs = [name for name in tensors if name != "labels"]
    if not inputs:
        raise InputError(f"{place}: a batch must hold at least one array", got="none")
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            raise InputError(
                f"{place}: {name} needs a first dimension that counts examples",
                got="a single number",
            )
    lengths = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(
            f"{place}: arrays must hold equally many examples",
            got=", ".join(f"{name} {length}" for name, length in lengths.items()),
        )
    if lengths[inputs[0]] == 0:
        raise _empty(place)
    for name in inputs:
        if not tensors[name].numel():
            raise InputError(
                f"{place}: every example of {name} must hold a number",
                got=f"shape {[*tensors[name].shape]}",
            )


def _empty(place: str) -> InputError:
    return InputError(f"{place}: no examples", help="provide at least a few dozen")


def _content_hashes(tensors: Mapping[str, Tensor]) -> list[int]:
    """64 bits per example, over the names, dtypes, shapes and bytes of its inputs."""
    arrays = []
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        kind = str(tensor.dtype).removeprefix("torch.")
        array = (tensor.view(torch.int16) if kind == "bfloat16" else tensor).numpy()  # NumPy has none
        arrays.append((f"{name}\0{kind}\0{array.shape[1:]}\0".encode(), array))
    hashes = []
    for i in range(len(arrays[0][1])):
        digest = hashlib.blake2b(digest_size=8)
        for header, array in arrays:
            digest.update(header)
            digest.update(array[i].tobytes())
        hashes.append(int.from_bytes(digest.digest(), "little"))
    return hashes


def rows(batch: Batch, index: list[int] | range) -> Batch:
    """The examples at index; a range gives views, a list copies."""

    def pick(value: Tensor) -> Tensor:
        return value[index.start : index.stop] if isinstance(index, range) else value[index]

    return replace(
        batch.mapped(pick),
        labels=None if batch.labels is None else pick(batch.labels),
        teacher=None if batch.teacher is None else pick(batch.teacher),
        hashes=[batch.hashes[i] for i in index],
        numbers=[batch.numbers[i] for i in index] if batch.numbers else [],
    )


def own(batch: Batch) -> Batch:
    """A copy; a view would keep the parent tensor alive."""
    return batch.mapped(Tensor.clone)


def output_of(model: Callable[..., Any], batch: Batch) -> Any:
    """Run a model on copies of the arguments, since it may write into them."""
    copied = own(batch)
    return model(*copied.args, **copied.kwargs)


def _layout(batch: Batch) -> Any:
    """What must agree for two batches to be joined: names, shapes, dtypes and constants."""
    leaves, spec = pytree.tree_flatten((batch.args, batch.kwargs))
    kinds = tuple((x.dtype, x.shape[1:]) if isinstance(x, Tensor) else x for x in leaves)
    return spec, kinds, batch.labels is None


def _joined(batches: Sequence[Batch]) -> Batch:
    """Batches of one layout as one."""

    def join(*values: Any) -> Any:
        return torch.cat(values) if isinstance(values[0], Tensor) else values[0]

    args, kwargs = pytree.tree_map(join, *((b.args, b.kwargs) for b in batches))
    return Batch(
        args=args,
        kwargs=kwargs,
        labels=join(*(b.labels for b in batches)),
        hashes=[hash for b in batches for hash in b.hashes],
        numbers=[number for b in batches for number in b.numbers],
    )


def recorded_data(record: str, folder: str | Path, command: str) -> str:
    """DATA as recorded in `folder`: a file is read again, but code only runs if the user names it.

    record: see formats.places.  Raises InputError for a missing file, and for anything but a file.
    """
    data = places.found(record, folder)
    if not is_array_file(data):
        code = ":" in data
        raise InputError(
            f"{command}: the data that {folder} was made from must be named again",
            got=f"{data}; asapc runs code only if you name it" if code else data,
            help=f"pass --data {shlex.quote(data)}" if code else "pass --data DATA",
        )
    if not Path(data).is_file():
        raise InputError(
            f"{command}: the data that {folder} was made from must be there, or be named again",
            got=f"no file {os.path.abspath(data)}",
            help="pass --data DATA, with the same file where it is now or with other data",
        )
    return data
