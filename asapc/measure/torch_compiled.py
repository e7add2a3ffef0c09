"""A runner under torch.compile: the first alternative that anyone asks about, timed beside the others."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from asapc.inputs.data import Batch
from asapc.measure.differences import comparable, largest_difference
from asapc.program.runner import Runner, installed
from asapc.terminal.printed import reason

SAME = 1e-3  # relative difference from the runner itself, beyond which it is not timed
CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class TorchCompiled:
    """call: the runner under torch.compile, None where that failed.  seconds: until its first output.
    failed: why it cannot be timed; empty where it can."""

    call: Callable[[Batch], Any] | None
    seconds: float
    failed: str = ""


def torch_compiled(runner: Runner, batch: Batch) -> TorchCompiled:
    """Compile what a runner calls for this batch's shapes, and compare the outputs on the batch.

    torch.compile fails in many ways that are no fault of the model (no C++ compiler, an operator or a
    system it does not support): such a failure is reported, and raises nothing. Earlier compilations
    stay, so that several may be timed in turns; for a cold start, call torch._dynamo.reset first.
    """
    whole = runner.graphs.get("")
    model = whole if whole is not None else runner.model
    assert model is not None
    start = time.perf_counter()
    fast = torch.compile(model, dynamic=False)

    def call(batch: Batch) -> Any:
        inside = contextlib.nullcontext() if whole is not None else installed(model, runner.graphs)
        with torch.no_grad(), inside:
            return fast(*batch.args, **batch.kwargs)

    try:
        # Nothing that an earlier process has compiled is found, or the time would be another.
        with tempfile.TemporaryDirectory(prefix="asapc-") as new, patch.dict(os.environ, {CACHE: new}):
            output = call(batch)
    except Exception as error:
        return TorchCompiled(None, time.perf_counter() - start, reason(error, 120))
    seconds = time.perf_counter() - start
    off = largest_difference(comparable(runner(batch)), comparable(output))
    if not off <= SAME:
        return TorchCompiled(None, seconds, f"its outputs are {off:.2g} from those without it")
    return TorchCompiled(call, seconds)
