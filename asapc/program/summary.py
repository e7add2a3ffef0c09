"""What a notebook shows of a loaded model, whose class may be the user's own."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from pathlib import Path

from torch import nn

NAME = "_repr_html_"


class Summary:
    """Called for the HTML of a compiled model: its report, if its folder has one, and its layers.

    title: what it was compiled from.  lines: one a site.  folder: of the artefact.  measured: the HTML of
    its report, where that is at hand.
    """

    def __init__(
        self, title: str, lines: Sequence[str], folder: Path, measured: str | None = None
    ) -> None:
        self.title = title
        self.lines = tuple(lines)
        self.folder = str(folder.absolute())
        self.measured = measured

    def __call__(self) -> str:
        if self.measured is not None:
            return self.measured
        # By name: reports are made of models, and are in a layer above them.
        return pkgutil.resolve_name("asapc.report.html:model_html")(
            self.title, self.lines, self.folder
        )


def shown_by(model: nn.Module, summary: Summary | None) -> None:
    """Let a notebook show the model by this summary, or as before; a way of its own is left to it."""
    if isinstance(model.__dict__.get(NAME), Summary):
        del model.__dict__[NAME]
    if summary is not None and not hasattr(model, NAME):
        model.__dict__[NAME] = summary
