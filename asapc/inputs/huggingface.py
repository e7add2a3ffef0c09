"""A folder of Hugging Face transformers: config.json with `model_type`, weights in safetensors files.

The class is the one of the installed transformers that config.json names under `architectures`; code in
the folder only runs with remote_code. transformers gets the checked weights and the configuration, not
the folder: pickles, adapters and whatever else lies there are not read. Layers with older names are
renamed as in from_pretrained. Nothing is downloaded: a configuration may name kernels and backbones on
a hub, which are other people's code.

The function behind a custom attention (transformers.AttentionInterface) is not part of a checkpoint. The
user's code registers it, named as `attention`: "file.py:function".
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from asapc.errors import InputError
from asapc.formats.json_text import read_json
from asapc.formats.user_code import UserCode, describe
from asapc.inputs.weights import listed, read_safetensors
from asapc.terminal.hints import install_line

ATTENTION = "attention"  # the one argument in --kwargs
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def is_transformers(config: Any) -> bool:
    """Whether a config.json is one of transformers."""
    return isinstance(config, dict) and "architecture" not in config and (
        isinstance(config.get("model_type"), str) or isinstance(config.get("architectures"), list)
    )  # fmt: skip


def build_pretrained(
    folder: Path, config: Mapping[str, Any], kwargs: Mapping[str, Any], remote_code: bool
) -> nn.Module:
    """The model of the folder, in evaluation mode.  Raises InputError.

    kwargs: attention, see above.  remote_code: code in the folder may run.
    """
    unknown = sorted(set(kwargs) - {ATTENTION})
    if unknown:
        raise InputError(
            f"{folder}: for a transformers folder, --kwargs can only set {ATTENTION}", got=unknown[0],
            help="""--kwargs '{"attention": "my_attention.py:sinkhorn"}'""",
        )  # fmt: skip
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"{folder}: a folder of transformers is read by transformers", got=describe(error),
            help=install_line("hf"),
        ) from error  # fmt: skip
    if "quantization_config" in config:
        raise InputError(
            f"{folder}: weights must be plain floats", got="quantization_config in config.json",
            help="save the model unquantised",
        )  # fmt: skip
    state = _weights(folder)
    attention = _registered(kwargs.get(ATTENTION)) or _named(config)
    with _quiet_and_offline():
        try:
            plain = _without_kernels(dict(config))
            model_class, settings = _class_of(transformers, folder, plain, remote_code)
            settings._attn_implementation = attention
            built, loading = model_class.from_pretrained(
                None, config=settings, state_dict=state, output_loading_info=True
            )
        except InputError:
            raise
        except Exception as error:  # whatever a constructor makes of a wrong value
            raise InputError(
                f"{folder} must be a folder that transformers' from_pretrained reads",
                got=describe(error).splitlines()[0],
                help=f"load it in plain Python to see the whole traceback; {_OWN_ATTENTION}",
            ) from error
    _check_loading(folder, loading)
    model: nn.Module = built
    return model.eval()


_OWN_ATTENTION = (
    "name your own attention function with --kwargs '{\"attention\": \"file.py:function\"}'"
)


def _named(config: Mapping[str, Any]) -> str | None:
    """The registered attention that a configuration names, which some versions of transformers write."""
    from transformers import AttentionInterface

    for key in ("attn_implementation", "_attn_implementation"):
        name = config.get(key)
        if isinstance(name, str) and name in AttentionInterface():
            return name
    return None


def _without_kernels(config: Any) -> Any:
    """A configuration without the names of implementations, which may be repositories of code."""
    if isinstance(config, dict):
        kept = {key: value for key, value in config.items() if "_implementation" not in str(key)}
        return {key: _without_kernels(value) for key, value in kept.items()}
    return [_without_kernels(item) for item in config] if isinstance(config, list) else config


def _registered(spec: Any) -> str | None:
    """Register the user's attention function, with additive masks, and return its name."""
    if spec is None:
        return None
    if not isinstance(spec, str):
        raise InputError(
            f"{ATTENTION} must name a function: file.py:function or pkg.module:function", got=repr(spec)
        )
    code = UserCode(spec, ATTENTION)
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    name = spec.rpartition(":")[2]
    AttentionInterface.register(name, code.target)
    if name not in AttentionMaskInterface():
        AttentionMaskInterface.register(name, eager_mask)
    return name


def _class_of(
    transformers: Any, folder: Path, config: Mapping[str, Any], remote_code: bool
) -> tuple[Any, Any]:
    """(model class, its configuration)"""
    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    if remote_code and isinstance(config.get("auto_map"), dict):
        return _remote(folder, config)
    for name in names:
        model_class: Any = getattr(transformers, name, None) if name.isidentifier() else None
        if inspect.isclass(model_class) and issubclass(model_class, transformers.PreTrainedModel):
            settings: Any = model_class.config_class  # type: ignore[attr-defined]
            return model_class, settings.from_dict(dict(config))
    if "auto_map" in config:
        raise InputError(
            f"{folder}: its model is code in the folder, which runs only if you trust it",
            got=", ".join(names) or config.get("model_type"),
            help="read the code, then pass --trust-remote-code",
        )
    raise InputError(
        f"{folder}: config.json must name a class of transformers under architectures",
        got=f"{', '.join(names) or 'none'} (transformers {transformers.__version__})",
        help="save the model with save_pretrained, or give it as file.py:factory with --weights",
    )


def _remote(folder: Path, config: Mapping[str, Any]) -> tuple[Any, Any]:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    auto_map = config["auto_map"]

    def code_of(name: str) -> Any:
        reference = auto_map[name]
        reference = reference[0] if isinstance(reference, list) else reference
        if not isinstance(reference, str) or "--" in reference:
            raise InputError(
                f"{folder}: auto_map must name code in the folder", got=repr(reference)[:80],
                help="download the code beside config.json",
            )  # fmt: skip
        return get_class_from_dynamic_module(reference, str(folder), local_files_only=True)

    heads = [name for name in auto_map if name.startswith("AutoModel")]
    if not heads:
        raise InputError(f"{folder}: auto_map must name a model", got=", ".join(auto_map) or "nothing")
    heads.sort(key=lambda name: name == "AutoModel")  # a head, where there is one
    model_class = code_of(heads[0])
    config_class = code_of("AutoConfig") if "AutoConfig" in auto_map else model_class.config_class
    return model_class, config_class.from_dict(dict(config))


def _weights(folder: Path) -> dict[str, Tensor]:
    if (folder / SINGLE).is_file():
        return read_safetensors(folder / SINGLE)
    if not (folder / INDEX).is_file():
        others = sorted(path.name for path in folder.glob("*.bin"))
        raise InputError(
            f"{folder} must hold {SINGLE} or {INDEX}", got=others[0] if others else "neither",
            help="save it with model.save_pretrained(FOLDER), which writes safetensors",
        )  # fmt: skip
    try:
        places = read_json(folder / INDEX)["weight_map"]
        names = sorted({str(name) for name in places.values()})
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / INDEX} must list the weights' files", got=describe(error)) from error
    state: dict[str, Tensor] = {}
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(
                f"{folder / INDEX} must name safetensors files in the folder", got=repr(name)[:80]
            )
        state |= read_safetensors(folder / name)
    return state


def _check_loading(folder: Path, loading: Mapping[str, Any]) -> None:
    """Raise unless the files hold every weight of the model in its shape; warn about other weights."""
    kinds = "missing_keys", "mismatched_keys", "unexpected_keys"
    missing, other, unexpected = (listed(sorted(map(str, loading.get(kind) or ()))) for kind in kinds)
    for names, what in ((missing, "the files lack"), (other, "of another shape are")):
        if names:
            raise InputError(
                f"{folder}: weights and model must agree", got=f"{what} {names}",
                help="config.json must name the class that was trained under architectures",
            )  # fmt: skip
    if unexpected:
        warnings.warn(f"{folder}: the model does not have {unexpected}", stacklevel=2)


@contextlib.contextmanager
def _quiet_and_offline() -> Iterator[None]:
    """Download nothing, and silence what transformers logs on loading: _check_loading reports it."""
    from huggingface_hub import constants
    from transformers.utils import logging as bars

    log = logging.getLogger("transformers")
    offline, level, shown = constants.HF_HUB_OFFLINE, log.level, bars.is_progress_bar_enabled()
    constants.HF_HUB_OFFLINE = True
    log.setLevel(logging.ERROR)
    bars.disable_progress_bar()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        log.setLevel(level)
        if shown:
            bars.enable_progress_bar()
