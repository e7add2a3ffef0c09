"""An extension of griffe for mkdocs.yml: docstrings are plain text in columns, and shown as such."""

from __future__ import annotations

from typing import Any

import griffe


class PlainDocstrings(griffe.Extension):
    """The first paragraph stays a paragraph; what follows keeps its lines."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            summary, _, rest = obj.docstring.value.partition("\n\n")
            obj.docstring.value = summary + (f"\n\n```text\n{rest}\n```" if rest else "")
