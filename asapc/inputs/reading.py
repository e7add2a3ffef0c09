"""How a model that the user names is read, and where it runs: the options that commands share.

torch takes seconds to import, so what needs it is imported where it is used.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from asapc.inputs.teacher import Teacher

AUTO = "auto"  # of --device


@dataclass(frozen=True)
class Reading:
    """weights, kwargs: of a factory.  trust: a program may call any operator.  trust_remote_code: code in
    a transformers folder may run.  device: by its name, see asapc.device.  threads: of a CPU, as many as
    torch takes where None."""

    weights: str | None = None
    kwargs: str | None = None
    trust: bool = False
    trust_remote_code: bool = False
    device: str = AUTO
    threads: int | None = None

    def teacher(self, model: str) -> Teacher:
        from asapc.inputs.load import load_teacher

        return load_teacher(
            model, weights=self.weights, kwargs=self.kwargs, trust=self.trust,
            remote_code=self.trust_remote_code,
        )  # fmt: skip

    def place(self) -> torch.device:
        """The device. From here on the process uses so many threads."""
        import torch

        from asapc.device import chosen_device

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return chosen_device(self.device)

    def options(self) -> dict[str, Any]:
        """For the line of a command that reads the same model."""
        return {key: value for key, value in asdict(self).items() if key not in ("device", "threads")}


NO_OPTIONS = Reading()
ON_CPU = Reading(device="cpu")
