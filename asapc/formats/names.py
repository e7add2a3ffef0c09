"""Names from files, as Python has them."""

from __future__ import annotations

import re


def identifier(name: str) -> str:
    """The name with everything replaced that Python, or a path of modules, would take for syntax."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return plain if re.match(r"[A-Za-z_]", plain) else f"_{plain}"
