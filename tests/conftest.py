"""Long files first: each is one worker's, and a late one would leave the other workers idle."""

from __future__ import annotations

import pytest

LONGEST = (
    "test_end_to_end.py", "test_select.py", "test_onnx_out.py", "test_onnx_in.py", "test_onnx_edit.py",
    "test_fuzz.py", "test_ci_examples.py", "test_reproducible.py", "test_html.py", "test_kill.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
