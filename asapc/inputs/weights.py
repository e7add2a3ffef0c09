"""Weights from disk: state dicts in safetensors files or pickles, and how they fit a module.

Nothing here unpickles code: pickled checkpoints are read with weights_only=True or refused.
"""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from asapc.errors import InputError
from asapc.formats.user_code import describe
from asapc.terminal.printed import first_line

MAX_SHARING = 16  # bytes of tensors, which may share memory, per byte of a checkpoint
SHOWN = 4  # names listed in a message before "and n more"


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Weights by name, on the CPU.

    A pickled checkpoint may wrap them ({"state_dict": ..., "epoch": 3}).  Raises InputError when
    the file is missing, broken, of another format, holds no tensors or needs code to unpickle.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such weights file", help="check the path")
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return _read_pickle(path)
    raise InputError(
        f"{path}: weights must be a .safetensors, .pt or .pth file",
        help="save them with safetensors.torch.save_file(model.state_dict(), 'w.safetensors')",
    )


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Tensors by name.  Raises InputError when the file is unreadable, truncated or not one."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} must be a file", got="something else")
    try:
        return load_file(path)
    except OSError as error:
        raise InputError(f"{path} could not be read", got=describe(error)) from error
    except Exception as error:  # SafetensorError, or what torch says of an element type it lacks
        raise InputError(
            f"{path}: not a safetensors file, or a truncated one",
            got=f"{path.stat().st_size} bytes ({error})",
            help="copy or download it again and compare sizes",
        ) from error


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes, in the order of the names.  Raises InputError."""
    lazy = [name for name, tensor in state.items() if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise InputError(
            "a model's weights must have their sizes", got=f"{', '.join(lazy[:4])} of lazy layers",
            help="call the model once on a batch, then compile it",
        )  # fmt: skip
    other = [name for name, value in state.items() if not isinstance(value, Tensor) or value.is_quantized]
    if other:
        raise InputError(
            "a model's weights must be tensors of numbers",
            got=", ".join(f"{name}: {type(state[name]).__name__}" for name in other[:4]),
            help="compile a model before its layers are quantised; other extra state is not supported",
        )  # fmt: skip
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_finite(state: Mapping[str, Tensor], parameters: set[str], place: str) -> None:
    """No NaN anywhere, no infinity in a parameter (a buffer may hold a mask of -inf)."""
    for name, tensor in state.items():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        bad = ~torch.isfinite(tensor) if name in parameters else torch.isnan(tensor)
        if bad.any():
            kind = "NaN" if torch.isnan(tensor).any() else "infinite"
            raise InputError(
                f"{place}: weights must be finite",
                got=f"{int(bad.sum())} {kind} of {tensor.numel()} values in {name}",
                help="use a checkpoint from before the training diverged",
            )


def load_weights(model: nn.Module, state: dict[str, Tensor], place: str) -> None:
    """Copy state into model; every name and shape must agree.  Raises InputError."""
    model.load_state_dict(fitting(model, state, place), strict=False)


def take_weights(skeleton: nn.Module, state: dict[str, Tensor], place: str) -> None:
    """Make state the weights of a model without memory, without copying them.

    Raises InputError as load_weights.
    """
    wanted, fitted = skeleton.state_dict(), fitting(skeleton, state, place)
    taken = {name: tensor.to(wanted[name].dtype) for name, tensor in fitted.items()}
    skeleton.load_state_dict(taken, assign=True)


def _read_pickle(path: Path) -> dict[str, Tensor]:
    _check_unpacked(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            head = file.read(4)
        if head != b"PK\x03\x04" and head[:1] != b"\x80":  # no zip archive, and no pickle's protocol
            raise _broken_checkpoint(path, error) from error
        raise InputError(
            f"{path} must hold tensors only; this pickle needs to run code to load",
            help='if you trust it, convert it once: python -c "import torch; '
            "from safetensors.torch import save_file; "
            f"m = torch.load({str(path)!r}, weights_only=False, map_location='cpu'); "
            "m = m.state_dict() if hasattr(m, 'state_dict') else m.get('state_dict', m); "
            "save_file({n: t.clone().contiguous() for n, t in m.items()}, "
            f'{str(path.with_suffix(".safetensors"))!r})"',
        ) from error
    except Exception as error:  # the unpickler raises many types for a damaged file
        raise _broken_checkpoint(path, error) from error
    tensors = _tensors_of(loaded, path)
    _check_stored(tensors, path)
    return tensors


def _check_unpacked(path: Path) -> None:
    """torch.save does not compress, so a file that unpacks to more was made to fill the memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError):
        return  # of the older format, or damaged, which the reader reports better
    if unpacked > path.stat().st_size:
        raise InputError(
            f"{path} must hold as much as it unpacks to",
            got=f"{path.stat().st_size} bytes that unpack to {unpacked}",
            help="save it again with torch.save",
        )


def _check_stored(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises InputError for tensors that are not plain, or more than the file can hold."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise InputError(
                f"{path}: {name} must be a dense tensor",
                got=f"{tensor.layout} on {tensor.device}" + " quantized" * tensor.is_quantized,
            )
    total = sum(tensor.nbytes for tensor in tensors.values())
    size = path.stat().st_size
    if total > MAX_SHARING * size + (1 << 20):
        raise InputError(
            f"{path} must hold the entries of its tensors",
            got=f"{total} bytes of tensors in a file of {size} bytes",
            help="save the tensors contiguous, each on its own",
        )


def _broken_checkpoint(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path}: not a PyTorch checkpoint, or a truncated one",
        got=f"{path.stat().st_size} bytes ({first_line(error, 120)})",
        help="copy or download it again and compare sizes",
    )


def _tensors_of(loaded: object, path: Path) -> dict[str, Tensor]:
    """The state dict in a checkpoint: itself, or under one of the usual keys."""
    if isinstance(loaded, Mapping):
        for key in ("state_dict", "model_state_dict", "model"):
            if isinstance(loaded.get(key), Mapping):
                return _tensors_of(loaded[key], path)
        if loaded and all(isinstance(value, Tensor) for value in loaded.values()):
            return {str(name): tensor for name, tensor in loaded.items()}
    got = f"a {type(loaded).__name__}"
    if isinstance(loaded, Mapping):
        got += f" with {listed(str(key) for key in loaded)}" if loaded else ", empty"
    raise InputError(
        f"{path} must hold tensors by name, itself or under state_dict",
        got=got,
        help="save model.state_dict()",
    )


def fitting(model: nn.Module, state: dict[str, Tensor], place: str) -> dict[str, Tensor]:
    """The weights under the model's names.  Raises InputError where names or shapes do not agree."""
    expected = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    state = _unwrapped(state, expected)
    # tied weights are saved once: a name whose tensor is another, present name's is not missing
    present = {_memory(tensor) for name, tensor in expected.items() if name in state}
    missing = [name for name, t in expected.items() if name not in state and _memory(t) not in present]
    unexpected = [name for name in state if name not in expected]
    mismatched = [
        f"{name} ({layout_of(state[name])} in the weights, {layout_of(tensor)} in the model)"
        for name, tensor in expected.items() if name in state and _kind(state[name]) != _kind(tensor)
    ]  # fmt: skip
    problems = {
        "missing from the weights:": missing, "not in the model:": unexpected,
        "of another shape or type:": mismatched,
    }  # fmt: skip
    differences = [f"{what} {listed(names)}" for what, names in problems.items() if names]
    if differences:
        raise InputError(
            f"{place}: weights and model must agree in names and shapes", got="; ".join(differences),
            help="check the architecture's arguments (config.json or --kwargs) against the weights",
        )  # fmt: skip
    return state


def _unwrapped(state: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights without what a wrapper put before all names: DataParallel "module.", torch.compile
    "_orig_mod.", a trainer the attribute that held the model. As they were where that does not help."""
    stripped = state
    while stripped and not stripped.keys() & expected.keys():
        if len({name.partition(".")[0] for name in stripped}) > 1 or "" in stripped:
            return state
        stripped = {name.partition(".")[2]: tensor for name, tensor in stripped.items()}
    return stripped


def _kind(tensor: Tensor) -> tuple[torch.Size, bool]:
    return tensor.shape, tensor.is_floating_point()


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Identifies the tensor's memory, on the meta device too."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def layout_of(tensor: Tensor) -> str:
    """ "float32 [2, 3]" """
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def listed(names: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    names = list(names)
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
