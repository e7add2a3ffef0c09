"""The compiled artefact: a folder written whole, read back without any of the teacher's code.

docs/formats.md lists its files. The .pt2 files hold no weights. The three stages share one set of
weights, so that a report and a benchmark need nothing but the folder (and, for a capture per module, the
model around it). A weight of program <i> is named <i>.NAME; where training after the replacement has
moved the compiled program's away from the teacher's, the compiled one is graph.<i>.NAME. What a module's
program in live/ reads is the live model's, a tensor of the compiled program, or live.<j>.NAME, which
nothing else has.

    write.py      the folder, also with other weights
    manifest.py   what a manifest must hold
    read.py       the folder, checked
    model.py      a model of it: rebuilt, or a live one patched
"""

from asapc.artifact.manifest import STAGES, Stage, places_moved, read_manifest
from asapc.artifact.model import load, read_patches, returns_as, surrounding_model
from asapc.artifact.read import Artifact, read_artifact, read_exported, signature_of
from asapc.artifact.write import write_artifact, write_refreshed

__all__ = [
    "STAGES", "Artifact", "Stage", "load", "places_moved", "read_artifact", "read_exported",
    "read_manifest", "read_patches", "returns_as", "signature_of", "surrounding_model",
    "write_artifact", "write_refreshed",
]  # fmt: skip
