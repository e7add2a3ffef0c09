"""Reads an artefact: programs, weights and facts, each checked before it is used."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

import asapc.kernels.library as _library  # registers torch.ops.asapc, which the programs call
from asapc.artifact.manifest import (
    STAGES,
    TENSORS,
    Stage,
    check_files,
    consistent,
    damaged,
    inside,
    read_manifest,
    read_selection,
)
from asapc.device import running_on
from asapc.errors import InputError
from asapc.formats.atomic import read_whole
from asapc.inputs.pt2 import load_program
from asapc.inputs.weights import read_safetensors
from asapc.ir import Program
from asapc.program.calls import name_calls
from asapc.program.code import under

SEEN = "asapc.seen_hashes"
MODEL = "model."  # begins the names of weights of the model around captured modules
HIDDEN = "hidden."  # buffers that sites hold and that no state dict has

assert _library is not None


@dataclass
class Artifact:
    """A loaded folder. programs: stage -> one program for each captured part of the model.

    tensors: of model.safetensors, by their names there.  trusted: read with trust, see read_artifact.
    """

    folder: Path
    manifest: dict[str, Any]
    tensors: dict[str, Tensor]
    programs: dict[Stage, list[Program]]
    seen_hashes: frozenset[int]
    selection: dict[str, Any]
    trusted: bool = False

    @property
    def fit_seconds(self) -> float:
        """The seconds spent on calibration."""
        return float(self.selection["fit_seconds"])

    @property
    def capture(self) -> str:
        return str(self.manifest["capture"])

    @property
    def site_names(self) -> list[str]:
        """The names of the manifest's sites, in order."""
        return [str(site["name"]) for site in self.manifest["sites"]]

    def running_on(
        self, device: torch.device, surrounding: nn.Module | None
    ) -> AbstractContextManager[None]:
        """Move all programs, and the model around them, to the device for a while (asapc.device)."""
        graphs = [program.graph for parts in self.programs.values() for program in parts]
        return running_on(device, [surrounding, *graphs])

    def signature(self) -> inspect.Signature:
        """The arguments the model was captured with, for reading data."""
        return signature_of(self.manifest["call"])


def signature_of(call: Mapping[str, Any]) -> inspect.Signature:
    """A signature.  call: the names of its positional and keyword arguments."""
    kinds = inspect.Parameter
    return inspect.Signature(
        [kinds(str(name), kinds.POSITIONAL_OR_KEYWORD) for name in call["args"]]
        + [kinds(str(name), kinds.KEYWORD_ONLY) for name in call["kwargs"]]
    )


def read_artifact(
    folder: str | Path, stages: Sequence[Stage] = STAGES, *, trust: bool = False
) -> Artifact:
    """Load the programs of some stages. Raises InputError if the folder is missing or unsafe.

    trust: the folder is the user's own, and its programs may call operators that are not on the list.
    """
    return read_whole(folder, lambda: _read(Path(folder), stages, trust))


def _read(place: Path, stages: Sequence[Stage], trust: bool) -> Artifact:
    manifest, selection = read_manifest(place), read_selection(place)
    check_files(place, manifest)
    tensors = read_safetensors(place / TENSORS)
    programs: dict[Stage, list[Program]] = {stage: [] for stage in stages}
    for index, entry in enumerate(manifest["programs"]):
        for stage in stages:
            path = inside(place, entry[stage])
            graph = runnable(path, trust, weights_of(tensors, index, stage))
            if not name_calls(graph, entry["calls"][stage]):
                raise damaged(
                    f"{path}: must have one operator call for each site that the manifest lists",
                    f"{len(entry['calls'][stage])} sites listed",
                )
            programs[stage].append(Program(str(entry["name"]), graph, (), {}, None))
    hashed = tensors.pop(SEEN, torch.empty(0, dtype=torch.int64))
    if hashed.dtype != torch.int64 or hashed.dim() != 1:
        raise InputError(f"{place}: {SEEN} must list integers", got=f"{hashed.dtype} {[*hashed.shape]}")
    hashes = frozenset(h & ((1 << 64) - 1) for h in hashed.tolist())
    return Artifact(place, manifest, tensors, programs, hashes, selection, trust)


def weights_of(tensors: Mapping[str, Tensor], index: int, stage: Stage) -> dict[str, Tensor]:
    """The weights of the index-th program in a stage, by their names in it."""
    return {**under(tensors, f"{index}."), **under(tensors, f"{stage}.{index}.")}


def read_exported(artifact: Artifact, stage: Stage = "graph") -> ExportedProgram:
    """The one program of a model captured whole, with its weights, as an ExportedProgram."""
    place = inside(artifact.folder, artifact.manifest["programs"][0][stage])
    return load_program(place, weights_of(artifact.tensors, 0, stage), trust=artifact.trusted)


def runnable(path: Path, trust: bool, weights: Mapping[str, Tensor] | None = None) -> GraphModule:
    """The program in a file as a module."""
    with consistent(path):
        graph = load_program(path, weights, trust=trust, sizes=False).module(check_guards=False)
    for name in ("train", "eval"):  # a program has one mode: these may be called, not fail
        graph.__dict__.pop(name, None)
    assert isinstance(graph, GraphModule)
    return graph
