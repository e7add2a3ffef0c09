"""A transformers folder that holds the compiled model beside the original.

    config.json, model.safetensors, tokenizer.json   as they were, for transformers
    asapc/                                           the artefact, for asapc.from_pretrained, and a README
"""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from asapc.artifact.manifest import check_files, read_manifest
from asapc.artifact.model import load
from asapc.errors import InputError
from asapc.formats.atomic import check_replaceable, replace_folder
from asapc.inputs.huggingface import ATTENTION
from asapc.inputs.load import load_teacher
from asapc.inputs.paths import check_artifact

FOLDER = "asapc"
README = """\
# The compiled form of the model in the folder above

`asapc.from_pretrained(FOLDER)` loads it, where FOLDER is the folder above.

transformers loads the original weights from that folder. If its attention is a function of the author's,
register it first, under the name it was trained with; otherwise the weights run with softmax attention:

    transformers.AttentionInterface.register("NAME", FUNCTION)
    AutoModel.from_pretrained(FOLDER, attn_implementation="NAME")
"""


def save_pretrained(
    out: str | Path, folder: str | Path, model: str | Path = "", *, trust_remote_code: bool = False
) -> None:
    """Write a transformers folder that works without asapc and also contains the compiled model OUT.

    folder: new or empty.  It gets all files of the original (except hidden ones), unchanged, and OUT.
    model:  the transformers folder that OUT was compiled from, if it has moved.
    Raises InputError, also if the weights are not those that OUT was compiled from.
    """
    manifest = read_manifest(Path(out))
    check_files(Path(out), manifest)
    taught = manifest["teacher"]
    original = Path(model or taught["source"])
    if not (original / "config.json").is_file():
        raise InputError(
            f"{out}: the original must be a transformers folder", got=str(original),
            help="name that folder with model=",
        )  # fmt: skip
    teacher = load_teacher(str(original), remote_code=trust_remote_code)
    if teacher.fingerprint != taught["fingerprint"]:
        raise InputError(
            f"{original}: must hold the weights that {out} was compiled from", got="others",
            help="compile it again, or name the original with model=",
        )  # fmt: skip
    check_replaceable(folder, [original, out])
    with replace_folder(folder) as made:
        hidden = shutil.ignore_patterns(".*", FOLDER)
        shutil.copytree(original, made, ignore=hidden, dirs_exist_ok=True)
        shutil.copytree(out, made / FOLDER)
        (made / FOLDER / "README.md").write_text(README, encoding="utf-8")


def from_pretrained(
    folder: str | Path, attention: str = "", *, trust: bool = False, trust_remote_code: bool = False
) -> nn.Module:
    """Load the compiled model from a folder written by save_pretrained.

    attention: "file.py:function", whose code runs. The result is then a transformers model with compiled
    layers, for pipelines and generate.  Without it, a model captured whole is loaded as a program.
    trust: see load.  trust_remote_code: allow code in the folder to run.
    """
    artifact = Path(folder) / FOLDER
    check_artifact(artifact)
    if not attention and read_manifest(artifact)["capture"] == "whole":
        return load(artifact, trust=trust)
    named = {ATTENTION: attention} if attention else None
    original = load_teacher(str(folder), kwargs=named, remote_code=trust_remote_code)
    return load(artifact, model=original.model, trust=trust)
