"""MODEL and weights from disk: built-in folders, a user's factory, exported programs.

Nothing here unpickles code: pickled checkpoints are read with weights_only=True or refused.
"""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.export import ExportedProgram

from asapc.errors import InputError
from asapc.formats.json_text import parse_json, read_json
from asapc.formats.user_code import UserCode, describe
from asapc.hints import command_line
from asapc.limits import MOST
from asapc.models import ARCHITECTURES

MODEL_GRAMMAR = (
    "give a folder with config.json and model.safetensors, pkg.module:factory or file.py:factory "
    "(with --weights), a .pt2 program or an .onnx model"
)
EXAMPLE_BATCH = 3
MAX_LOOP = 1000  # half-steps of a built-in model's loop: it is unrolled
MAX_SHARING = 16  # bytes of a checkpoint's tensors, which may share memory, for each of its file
SHOWN = 4  # names listed in a message before "and n more"


@dataclass(frozen=True)
class Teacher:
    """What is compiled: a module in eval mode or an exported program, never both.

    source:      where it came from, in words, for reports.
    fingerprint: sha256 over the sorted state-dict names, dtypes, shapes and bytes.
    builtin:     one of asapc.models.ARCHITECTURES, so example_inputs knows its inputs.
    factory:     "pkg.module:factory" or "file.py:factory", None otherwise.
    onnx:        the .onnx file that `model` evaluates, None otherwise.
    """

    model: nn.Module | None
    program: ExportedProgram | None
    source: str
    fingerprint: str
    builtin: bool
    factory: str | None
    onnx: Path | None = None


def load_teacher(
    model: str,
    *,
    weights: str | None = None,
    kwargs: str | Mapping[str, Any] | None = None,
    trust: bool = False,
) -> Teacher:
    """The teacher named by MODEL (see MODEL_GRAMMAR).

    weights: .safetensors, .pt or .pth for a factory's module; without it the factory's own weights
    are used, which `source` then says.  kwargs: the factory's arguments, a mapping or JSON text.
    trust: a .pt2 program may call any operator, an .onnx model take any memory (see SECURITY.md).
    Raises InputError.
    """
    path = Path(model)
    is_factory = ":" in model and not path.exists()
    if not is_factory and (weights is not None or kwargs is not None):
        option = "--weights" if weights is not None else "--kwargs"
        raise InputError(
            f"{option} belongs to a factory (pkg.module:factory or file.py:factory)",
            got=f"it together with {model}",
            help=f"drop {option}: a folder or a program brings its own",
        )
    if is_factory:
        return _factory_teacher(model, weights, kwargs)
    if path.is_dir():
        return _folder_teacher(path)
    if not path.exists():
        raise InputError(f"{model}: no such model", help=MODEL_GRAMMAR)
    if path.suffix == ".onnx":
        from asapc.onnx.load import onnx_teacher

        return onnx_teacher(path, trust)
    if path.suffix == ".pt2":
        return _program_teacher(path, trust)
    if path.suffix in (".safetensors", ".pt", ".pth"):
        raise InputError(
            f"{model} holds weights only, without the model they belong to",
            help=f"name the code that builds it: file.py:factory --weights {model}",
        )
    if path.suffix == ".py":
        raise InputError(f"{model} names no factory", help=f"write {model}:NAME_OF_THE_FUNCTION")
    raise InputError(f"{model} is not a model", help=MODEL_GRAMMAR)


def build_factory(spec: str, kwargs: str | Mapping[str, Any] | None = None) -> nn.Module:
    """The module that "pkg.module:factory" or "file.py:factory" returns for kwargs, in eval mode.

    Random initial weights are the same at every call (the CPU generator is seeded and restored).
    Raises InputError when the factory is missing, raises (SystemExit included) or returns anything
    but a module.
    """
    arguments = _parse_kwargs(kwargs)
    factory = UserCode(spec, "factory")
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(0)
    try:
        model = factory.call(**arguments)
    finally:
        torch.set_rng_state(state)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"factory {spec} must return a torch.nn.Module",
            got=f"a {type(model).__name__}",
            help="return the built model, without loading or running it",
        )
    return model.eval()


def example_inputs(teacher: Teacher) -> dict[str, Tensor] | None:
    """A small deterministic batch by argument name for a built-in architecture, None otherwise."""
    if not teacher.builtin or teacher.model is None:
        return None
    inputs: dict[str, Tensor] = teacher.model.example_inputs(EXAMPLE_BATCH)  # type: ignore[operator]
    return inputs


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
    """sha256 over names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _parse_kwargs(kwargs: str | Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(kwargs, str):
        return dict(kwargs or {})
    help = """quote it for the shell, for example --kwargs '{"depth": 2}'"""
    try:
        parsed = parse_json(kwargs)
    except ValueError as error:
        raise InputError("--kwargs must be JSON", got=f"{kwargs} ({error})", help=help) from error
    if not isinstance(parsed, dict):
        raise InputError("--kwargs must be a JSON object", got=kwargs, help=help)
    return parsed


def _module_teacher(model: nn.Module, source: str, factory: str | None) -> Teacher:
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    check_finite(state, {name for name, _ in model.named_parameters()}, source)
    return Teacher(
        model=model.eval(),
        program=None,
        source=source,
        fingerprint=fingerprint(state),
        builtin=factory is None,
        factory=factory,
    )


def _factory_teacher(
    spec: str, weights: str | None, kwargs: str | Mapping[str, Any] | None
) -> Teacher:
    # weights are read first: a wrong path is found before a large model is built
    state = None if weights is None else read_state_dict(weights)
    model = build_factory(spec, kwargs)
    if state is None:
        return _module_teacher(model, f"{spec} with the weights it built (no --weights)", spec)
    _load_weights(model, state, f"{weights} and {spec}")
    return _module_teacher(model, f"{spec} with {weights}", spec)


def _folder_teacher(folder: Path) -> Teacher:
    config_path, weights_path = folder / "config.json", folder / "model.safetensors"
    if not config_path.is_file() and (folder / "manifest.json").is_file():
        raise InputError(
            f"{folder} is already compiled",
            help=f"give the teacher it was compiled from, or use: {command_line('report', folder)}",
        )
    for path in (config_path, weights_path):
        if not path.is_file():
            raise InputError(
                f"{folder} must hold {path.name}", got="no such file", help=MODEL_GRAMMAR
            )
    try:
        config = read_json(config_path)
    except (ValueError, OSError) as error:
        raise InputError(f"{config_path} must be JSON", got=describe(error)) from error
    known = ", ".join(ARCHITECTURES)
    name = config.pop("architecture", None) if isinstance(config, dict) else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InputError(
            f'{config_path}: "architecture" must be one of {known}',
            got=repr(name),
            help="any other model loads by its factory: file.py:factory --weights W.safetensors",
        )
    _check_types(config, ARCHITECTURES[name], config_path)
    state = read_safetensors(weights_path)
    _check_loops(config, len(state), config_path)
    try:
        with torch.device("meta"):  # sizes without memory: the weights show which are real
            skeleton = ARCHITECTURES[name](**config)
        _fitting(skeleton, state, str(folder))
        model = ARCHITECTURES[name](**config)
    except InputError:
        raise
    except Exception as error:  # whatever a constructor makes of a wrong value
        raise InputError(
            f"{config_path} must hold the arguments of {name}", got=describe(error)
        ) from error
    _load_weights(model, state, str(folder))
    return _module_teacher(model, str(folder), None)


def _check_types(config: Mapping[str, Any], architecture: type[nn.Module], place: Path) -> None:
    """Arguments of other types may build a model that fails only when it is run."""
    hints = get_type_hints(architecture.__init__)
    for name, value in config.items():
        hint = hints.get(name, Any)  # the constructor says which names it has
        if not _is_of(value, hint):
            what = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            raise InputError(f"{place}: {name} must be of type {what}, and finite", got=repr(value)[:80])


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value from JSON is what a constructor's annotation says."""
    if hint is int:
        return type(value) is int and -MOST <= value <= MOST
    if hint is float:
        return type(value) in (int, float) and -MOST <= value <= MOST
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(own) and value == own for own in inner)
    if origin is Sequence:
        return isinstance(value, list) and all(_is_of(item, inner[0]) for item in value)
    if origin in (Union, UnionType):
        return any(_is_of(value, own) for own in inner)
    return hint is Any or isinstance(value, hint)


def _check_loops(config: Mapping[str, Any], tensors: int, place: Path) -> None:
    """Numbers that no weight's shape confirms, and that are counted up to."""
    for name, most in (("depth", tensors), ("n_layers", tensors), ("max_iter", MAX_LOOP),
                       ("n_iters", MAX_LOOP)):  # fmt: skip
        value = config.get(name, 0)
        if not isinstance(value, int) or value > most:
            raise InputError(f"{place}: {name} must be a whole number, at most {most}", got=repr(value))


def _program_teacher(path: Path, trust: bool) -> Teacher:
    from asapc.formats.pt2 import load_program

    program = load_program(path, trust=trust)
    state = dict(program.state_dict)
    check_finite(state, set(program.graph_signature.parameters), str(path))
    return Teacher(
        model=None,
        program=program,
        source=str(path),
        fingerprint=fingerprint(state),
        builtin=False,
        factory=None,
    )


def _read_pickle(path: Path) -> dict[str, Tensor]:
    _check_unpacked(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not _is_torch_file(path):
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
    """torch.save compresses nothing, so what is larger unpacked was made to fill the memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError):
        return  # of the older format, or damaged, which the reader says better
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
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    size = path.stat().st_size
    if total > MAX_SHARING * size + (1 << 20):
        raise InputError(
            f"{path} must hold the entries of its tensors",
            got=f"{total} bytes of tensors in a file of {size} bytes",
            help="save the tensors contiguous, each on its own",
        )


def _is_torch_file(path: Path) -> bool:
    """A zip archive or a pickle stream with a protocol marker, so not merely a damaged file."""
    with path.open("rb") as file:
        head = file.read(4)
    return head[:4] == b"PK\x03\x04" or head[:1] == b"\x80"


def _broken_checkpoint(path: Path, error: Exception) -> InputError:
    first_line = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return InputError(
        f"{path}: not a PyTorch checkpoint, or a truncated one",
        got=f"{path.stat().st_size} bytes ({first_line})",
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
        got += f" with {_listed(str(key) for key in loaded)}" if loaded else ", empty"
    raise InputError(
        f"{path} must hold tensors by name, itself or under state_dict",
        got=got,
        help="save model.state_dict()",
    )


def _load_weights(model: nn.Module, state: dict[str, Tensor], place: str) -> None:
    """Copy state into model; every name and shape must agree.  Raises InputError."""
    model.load_state_dict(_fitting(model, state, place), strict=False)


def _fitting(model: nn.Module, state: dict[str, Tensor], place: str) -> dict[str, Tensor]:
    """The weights under the model's names.  Raises InputError where names or shapes do not agree."""
    expected = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    prefix = "module."  # left by DataParallel
    if state.keys() != expected.keys() and all(name.startswith(prefix) for name in state):
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    # tied weights are saved once: a name whose tensor is another, present name's is not missing
    present = {_memory(tensor) for name, tensor in expected.items() if name in state}
    missing = [
        name for name, t in expected.items() if name not in state and _memory(t) not in present
    ]
    unexpected = [name for name in state if name not in expected]
    mismatched = [
        f"{name} ({_layout(state[name])} in the weights, {_layout(tensor)} in the model)"
        for name, tensor in expected.items()
        if name in state
        and (
            state[name].shape != tensor.shape
            or state[name].is_floating_point() != tensor.is_floating_point()
        )
    ]
    problems = [
        f"{label} {_listed(names)}"
        for label, names in (
            ("missing from the weights:", missing),
            ("not in the model:", unexpected),
            ("of another shape or type:", mismatched),
        )
        if names
    ]
    if problems:
        raise InputError(
            f"{place}: weights and model must agree in names and shapes",
            got="; ".join(problems),
            help="check the architecture's arguments (config.json or --kwargs) against the weights",
        )
    return state


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Where its entries lie, on the meta device too."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def _layout(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


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
