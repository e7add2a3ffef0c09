"""What a notebook shows for a loaded model, whose class may be the user's own."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

NAME = "_repr_html_"


@dataclass(frozen=True)
class Summary:
    """Returns the HTML of a compiled model when called: its report, if its folder has one, or its layers.

    title: what it was compiled from.  lines: one per site.  folder: the artefact's.  measured: its report
    as HTML, if that is at hand.
    """

    title: str
    lines: Sequence[str]
    folder: Path
    measured: str | None = None

    def __call__(self) -> str:
        if self.measured is not None:
            return self.measured
        # By name: reports are made from models, and are in a layer above them.
        html = pkgutil.resolve_name("asapc.report.html:model_html")
        return str(html(self.title, self.lines, self.folder))


def shown_by(model: nn.Module, summary: Summary | None) -> None:
    """Let a notebook show this summary of the model, or none; a model's own `_repr_html_` stays."""
    if isinstance(model.__dict__.get(NAME), Summary):
        del model.__dict__[NAME]
    if summary is not None and not hasattr(model, NAME):
        model.__dict__[NAME] = summary
