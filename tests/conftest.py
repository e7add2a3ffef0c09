"""Long files first: each is one worker's, and a late one would leave the other workers idle."""

from __future__ import annotations

import copy
import gc
import os
import types
import typing
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _pytest
import gpu_env  # noqa: F401  before any test file: some import triton by way of torch
import pytest
import torch

os.environ.setdefault("SYMPY_CACHE_SIZE", "100000")  # sizes of traces: 1,000 terms are soon forgotten

LONGEST = (
    "test_onnx_out.py", "test_backend.py", "test_programs.py", "test_device.py", "test_end_to_end.py",
    "test_guards.py", "test_plan.py", "test_replay.py", "test_processes.py", "test_softmax.py",
    "test_match.py", "test_every_operator.py", "test_banded.py", "test_gpu_loops.py", "test_drop_in.py",
    "test_decisions.py", "test_sequence.py", "test_evaluate.py", "test_docs.py", "test_select.py",
    "test_onnx_in.py", "test_ci_examples.py", "test_differences.py", "test_sm90.py",
)  # fmt: skip
# Whose tests run several commands on one teacher, and are not about its analysis: see known_analyses.py.
ANALYSED_ONCE = {
    "test_end_to_end.py", "test_distill.py", "test_select.py", "test_evaluate.py",
    "test_enough.py", "test_api.py", "test_study.py", "test_refresh.py",
    "test_forged.py", "test_resume.py", "test_untrusted.py", "test_onnx_out.py", "test_onnx_edit.py",
    "test_ci_examples.py", "test_hints.py", "test_audit.py", "test_memory.py", "test_processes.py",
    "test_device.py", "test_onnx_in.py", "test_softmax_students.py", "test_sequence.py",
}  # fmt: skip


# Whose tests look at report.html, whose drawings are half a second a report: other files write none.
DRAWN = {
    "test_html.py", "test_api.py", "test_enough.py", "test_metrics.py", "test_notebook.py",
    "test_renderers.py", "test_reproducible.py",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def collected_less_often() -> Iterator[None]:
    """Traces leave a heap of a gigabyte, which Python walks through again and again."""
    gc.set_threshold(50_000, 20, 20)
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def numbers_of_its_own(request: pytest.FixtureRequest) -> None:
    """The same at every run, whatever ran before: examples are split by their content."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="module", autouse=True)
def what_is_kept_is_not_walked_through() -> Iterator[None]:
    """What outlives a file, mostly modules and caches of torch, is left out of later collections."""
    torch.manual_seed(0)
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def annotations_are_read_once() -> None:
    """torch's reader of .pt2 files evaluates the annotations of a class for every object of it, which is
    half of what reading a small artefact takes."""
    from torch._export.serde import serialize

    known: dict[type, dict[str, Any]] = {}

    def hints(kind: type, globalns: dict[str, Any]) -> dict[str, Any]:
        if kind not in known:
            known[kind] = typing.get_type_hints(kind, globalns=globalns)
        return known[kind]

    remembered = types.SimpleNamespace(**{**vars(typing), "get_type_hints": hints})
    serialize.typing = remembered  # type: ignore[attr-defined]


@pytest.fixture(scope="module", autouse=True)
def analyses(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.name not in ANALYSED_ONCE:
        yield
        return
    from known_analyses import analysed_once

    with analysed_once():
        yield


@pytest.fixture(scope="module", autouse=True)
def pages(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in DRAWN:
            patch.setattr("asapc.report._page", lambda report: {})
        yield


@pytest.fixture(scope="session", autouse=True)
def operators_of_onnx_are_listed_once() -> None:
    """torch's exporter parses the sources of all its operators anew for every graph, which is most of
    what a small one takes. Each gets a registry of its own: custom operators are added to it."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:
        return
    known: dict[tuple[Any, ...], ONNXRegistry] = {}
    listed = ONNXRegistry.from_torchlib.__func__  # type: ignore[attr-defined]

    def from_torchlib(kind: type[ONNXRegistry], *version: Any, **named: Any) -> ONNXRegistry:
        key = (kind, version, tuple(named.items()))
        if key not in known:
            known[key] = listed(kind, *version, **named)
        registry = copy.copy(known[key])
        registry.functions = {target: [*made] for target, made in known[key].functions.items()}
        return registry

    ONNXRegistry.from_torchlib = classmethod(from_torchlib)  # type: ignore[method-assign, assignment]


@pytest.fixture(scope="session", autouse=True)
def bodies_of_onnx_functions_are_traced_once() -> None:
    """Of calls that differ in nothing but their tensors, by all that decides what a body is."""
    try:
        import onnx_ir
    except ImportError:
        return
    from asapc.onnx.functions import _Call

    known: dict[tuple[Any, ...], Any] = {}
    made = _Call.function

    def function(call: _Call, name: str, opset: int) -> onnx_ir.Function:
        key = call.name, call.settings, call.layout, opset
        if key not in known:
            known[key] = onnx_ir.to_proto(made(call, name, opset))
        body = onnx_ir.from_proto(known[key])
        body.name = name
        return body

    _Call.function = function  # type: ignore[method-assign]


@pytest.fixture(scope="session", autouse=True)
def what_pytest_holds_is_no_models() -> None:
    """Test files import it, and the search for what a model keeps would walk through all its modules."""
    from asapc.passes import state

    folders = tuple(str(Path(module.__file__ or "").parent) for module in (pytest, _pytest))
    made = state.Fresh

    def fresh(model: torch.nn.Module, is_users: Callable[[str], bool]) -> state.Fresh:
        return made(model, lambda file: is_users(file) and not file.startswith(folders))

    state.Fresh = fresh  # type: ignore[assignment, misc]
