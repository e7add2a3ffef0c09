"""The user's own metric: a function of what a model returns and of the batch, one number per example.

    def hits(output, batch):
        return output.argmax(-1) == batch["labels"]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Signature as PythonSignature
from typing import Any

import torch
from torch import Tensor

from asapc.device import CPU, moved
from asapc.errors import InputError
from asapc.formats.user_code import UserCode
from asapc.inputs.data import Batch, Signature


class OwnMetric:
    """Your own metric.

    function: or its name, "file.py:function" or "pkg.module:function".  lower_is_better: its direction.
    name: shown in reports, with the direction.
    """

    def __init__(self, function: str | Callable[..., Any], lower_is_better: bool = False) -> None:
        self.lower = lower_is_better
        if isinstance(function, str):
            code, called = UserCode(function, "metric"), function
            self._function, self._run = code.target, code.run
        else:
            self._function, called = function, getattr(function, "__qualname__", repr(function))
            self._run = lambda function, action: function()  # what it raises is the caller's own
        self.name = f"{called}, {'smaller' if lower_is_better else 'larger'} is better"

    def values(
        self, outputs: Mapping[str, Any], batch: Batch, signature: PythonSignature
    ) -> dict[str, Tensor]:
        """One number per example [B] of each model, under metric_teacher and metric_compiled.

        The function is given the output as the model returns it and a dictionary: the model's inputs by
        name, labels (None without), and the examples' numbers in DATA, all on the CPU.
        Raises InputError where it raises, or returns something else.
        """
        there = batch.on(CPU)
        inputs = Signature(signature).names(there.args, there.kwargs)
        facts = {**dict(inputs), "labels": batch.labels, "numbers": batch.numbers}
        values = {who: self._values(moved(output, CPU), facts, batch) for who, output in outputs.items()}
        broken = (~values["teacher"].isfinite()).nonzero().flatten().tolist()
        if broken:  # the compiled model's is in the report, where no limit is kept
            example = f", example {batch.numbers[broken[0]]} (counted from 0)" if batch.numbers else ""
            raise InputError(
                f"metric {self.name}: must be finite for the teacher's outputs",
                got=f"{values['teacher'][broken[0]]:g}{example}",
                help="return a number for every example, such as 0 where there is nothing to count",
            )
        return {f"metric_{who}": of_examples for who, of_examples in values.items()}

    def _values(self, output: Any, facts: Mapping[str, Any], batch: Batch) -> Tensor:
        returned = self._run(lambda: self._function(output, dict(facts)), "measure a batch")
        got = f"a {type(returned).__name__}"
        try:
            values = torch.as_tensor(returned).detach().to(CPU, torch.float64)
            if values.shape == (len(batch),):
                return values
            got += f" of shape {[*values.shape]}"
        except (TypeError, ValueError, RuntimeError):
            pass  # no numbers at all
        raise InputError(
            f"metric {self.name}: must return one number for each of the batch's examples",
            got=f"{got} for {len(batch)} examples",
            help="return values of shape [examples]; asapc takes their mean",
        )
