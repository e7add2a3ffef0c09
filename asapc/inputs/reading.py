"""How the user's model is read and where it runs: the options that commands share.

torch takes seconds to import, so what needs it is imported where it is used.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from asapc.terminal.hints import option

if TYPE_CHECKING:
    import torch

    from asapc.inputs.teacher import Teacher

AUTO = "auto"  # of --device


@dataclass(frozen=True)
class Reading:
    """device: see asapc.device."""

    weights: str | None = option(
        None, "Weights for a factory: .safetensors, .pt or .pth.", metavar="FILE"
    )
    kwargs: str | None = option(None, "Keyword arguments for a factory.", metavar="JSON")
    trust: bool = option(False, "Trust the file: allow any operator and any memory (see SECURITY.md).")
    trust_remote_code: bool = option(False, "Run code from a transformers folder MODEL that you trust.")
    device: str = option(
        AUTO, "auto, cpu, cuda, or cuda:1; auto uses a GPU if there is one.", metavar="DEVICE"
    )
    threads: int | None = option(None, "Number of CPU threads. Default: torch's.", metavar="N", min=1)

    def teacher(self, model: str) -> Teacher:
        from asapc.inputs.load import load_teacher

        return load_teacher(
            model, weights=self.weights, kwargs=self.kwargs, trust=self.trust,
            remote_code=self.trust_remote_code,
        )  # fmt: skip

    def place(self) -> torch.device:
        """The device; also sets the number of threads of the process."""
        import torch

        from asapc.device import chosen_device

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return chosen_device(self.device)

    def options(self) -> dict[str, Any]:
        """For the command line of another command that reads the same model."""
        return {key: value for key, value in asdict(self).items() if key not in ("device", "threads")}


NO_OPTIONS = Reading()
ON_CPU = Reading(device="cpu")
