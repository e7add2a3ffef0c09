"""MODEL from disk: a folder (built in, or of transformers), a factory, a program or an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor, nn

from asapc.errors import InputError
from asapc.formats.json_text import parse_json, read_json
from asapc.formats.limits import MOST
from asapc.formats.user_code import UserCode, describe
from asapc.inputs.huggingface import build_pretrained, is_transformers
from asapc.inputs.onnx.settings import require_extra
from asapc.inputs.paths import MODEL_GRAMMAR, check_model
from asapc.inputs.teacher import Teacher, uncompiled
from asapc.inputs.weights import (
    check_finite,
    fingerprint,
    load_weights,
    read_safetensors,
    read_state_dict,
    take_weights,
)
from asapc.models import ARCHITECTURES

EXAMPLE_BATCH = 3
MAX_LOOP = 1000  # half-steps of a built-in model's loop: it is unrolled


def load_teacher(
    model: str,
    *,
    weights: str | None = None,
    kwargs: str | Mapping[str, Any] | None = None,
    trust: bool = False,
    remote_code: bool = False,
) -> Teacher:
    """The teacher named by MODEL (see MODEL_GRAMMAR).

    weights: .safetensors, .pt or .pth for a factory's module; without it the factory's own weights
    are used, which `source` then says.  kwargs: the factory's arguments, a mapping or JSON text.
    trust: a .pt2 program may call any operator, an .onnx model take any memory (see SECURITY.md).
    remote_code: code in a transformers folder may run.
    Raises InputError.
    """
    check_model(model, weights)
    path = Path(model)
    is_factory = ":" in model and not path.exists()
    if path.is_dir() and weights is None:
        return _folder_teacher(path, kwargs, remote_code)
    if not is_factory and (weights is not None or kwargs is not None):
        raise _not_for(model, "--weights" if weights is not None else "--kwargs")
    if is_factory:
        return _factory_teacher(model, weights, kwargs)
    if path.suffix == ".onnx":
        require_extra("onnx")
        from asapc.inputs.onnx.load import onnx_teacher

        return onnx_teacher(path, trust)
    return _program_teacher(path, trust)


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
    return teacher.model.example_inputs(EXAMPLE_BATCH)  # type: ignore[operator]


def _not_for(model: str | Path, option: str) -> InputError:
    return InputError(
        f"{option} applies only to a factory (pkg.module:factory or file.py:factory)",
        got=f"it together with {model}",
        help=f"drop {option}: a folder or a program brings its own",
    )


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


def _module_teacher(model: nn.Module, source: str, builtin: bool = False) -> Teacher:
    model = uncompiled(model)
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    check_finite(state, {name for name, _ in model.named_parameters()}, source)
    return Teacher(model.eval(), None, source, fingerprint(state), builtin)


def _factory_teacher(spec: str, weights: str | None, kwargs: str | Mapping[str, Any] | None) -> Teacher:
    # read the weights first, to find a wrong path before a large model is built
    state = None if weights is None else read_state_dict(weights)
    model = build_factory(spec, kwargs)
    if state is None:
        return _module_teacher(model, f"{spec} with the weights it built (no --weights)")
    load_weights(model, state, f"{weights} and {spec}")
    return _module_teacher(model, f"{spec} with {weights}")


def _folder_teacher(folder: Path, kwargs: str | Mapping[str, Any] | None, remote_code: bool) -> Teacher:
    config_path, weights_path = folder / "config.json", folder / "model.safetensors"
    try:
        config = read_json(config_path)
    except (ValueError, OSError) as error:
        raise InputError(f"{config_path} must be JSON", got=describe(error)) from error
    if is_transformers(config):
        built = build_pretrained(folder, config, _parse_kwargs(kwargs), remote_code)
        return _module_teacher(built, str(folder))
    if kwargs is not None:
        raise _not_for(folder, "--kwargs")
    if not weights_path.is_file():
        raise InputError(
            f"{folder} must hold {weights_path.name}", got="no such file", help=MODEL_GRAMMAR
        )
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
        with torch.device("meta"):  # without memory: only the weights show which sizes are real
            model = ARCHITECTURES[name](**config)
        take_weights(model, state, str(folder))
    except InputError:
        raise
    except Exception as error:  # whatever a constructor makes of a wrong value
        raise InputError(
            f"{config_path} must hold the arguments of {name}", got=describe(error)
        ) from error
    return _module_teacher(model, str(folder), builtin=True)


def _check_types(config: Mapping[str, Any], architecture: type[nn.Module], place: Path) -> None:
    """Arguments of the wrong type may build a model that fails only when it runs."""
    hints: dict[str, Any] = {}
    for kind in reversed(architecture.__mro__):
        hints |= get_type_hints(kind.__init__)  # type: ignore[misc]
    for name, value in config.items():
        hint = hints.get(name, Any)  # the constructor says which names it has
        items = value if isinstance(value, list) else [value]
        try:
            TypeAdapter(hint, config=ConfigDict(strict=True)).validate_python(value)
            fits = all(-MOST <= x <= MOST for x in items if isinstance(x, int | float))
        except ValidationError:
            fits = False
        if not fits:
            what = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            raise InputError(f"{place}: {name} must be of type {what}, and finite", got=repr(value)[:80])


def _check_loops(config: Mapping[str, Any], tensors: int, place: Path) -> None:
    """Check numbers that the model counts up to and that no weight's shape confirms."""
    for name, most in (("depth", tensors), ("n_layers", tensors), ("max_iter", MAX_LOOP),
                       ("n_iters", MAX_LOOP)):  # fmt: skip
        value = config.get(name, 0)
        if not isinstance(value, int) or value > most:
            raise InputError(f"{place}: {name} must be a whole number, at most {most}", got=repr(value))


def _program_teacher(path: Path, trust: bool) -> Teacher:
    from asapc.inputs.pt2 import load_program

    program = load_program(path, trust=trust)
    state = dict(program.state_dict)
    check_finite(state, set(program.graph_signature.parameters), str(path))
    return Teacher(None, program, str(path), fingerprint(state))
