"""What everything makes of the operator: run where the package has it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import asapc.passes
from asapc.inputs.data import Batch
from asapc.inputs.program_operators import allowed_operators
from asapc.inputs.recipe import Recipe
from asapc.inputs.teacher import Teacher
from asapc.operators.catalogue import convention_from_json, reference_named
from asapc.passes.analyse import analyse
from asapc.passes.candidates import check_operator, proposed
from asapc.program.calls import operator_calls
from asapc.program.runner import Runner
from asapc.report.document import SiteReport
from asapc.report.tables import convention_text

assert Path(asapc.passes.__path__[0]).is_relative_to(Path.cwd()), "the changed package, not this one"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attention = torch.softmax(0.5 * (q @ k.transpose(-1, -2)), -1)
        return (attention @ v).transpose(1, 2).flatten(2)


torch.manual_seed(0)
model, x = Layer().eval(), torch.randn(3, 7, 8)
batch = Batch((x,), {}, None, [0, 1, 2])
analysis = analyse(Teacher(model, None, "a toy", "", False, None), batch)
(site,) = analysis.sites
assert site.convention.to_json() == {"operator": "softmax", "score_multiplier": 0.5, "mask": "none"}
assert convention_from_json(site.convention.to_json()) == site.convention
(call,) = operator_calls(analysis.lifted[0].graph)
assert call.operator.name == "softmax" and call.settings == {"score_multiplier": 0.5}
with torch.no_grad():
    own, expected = Runner(model, analysis.lifted)(batch), model(x)
assert torch.allclose(own, expected, atol=1e-6)

# A gradient, from the reference; a program from a file may call it; ONNX has the reference.
q, k, v = (torch.randn(1, 1, 5, 4, requires_grad=True) for _ in range(3))
torch.ops.asapc.softmax(q, k, v, None, None, 1.0).sum().backward()
assert v.grad is not None and torch.allclose(v.grad.sum(), torch.tensor(20.0))
assert "asapc.softmax.default" in allowed_operators()
assert reference_named("softmax_attention").__name__ == "softmax_attention"

# A recipe may ask for it, and reports show it.
check_operator(site.convention, Recipe(operator="lossless"))
choice = proposed(site.convention, Recipe(operator="lossless"))
assert choice is not None and choice.operator == "softmax"
entry = {"name": site.name, "operator": "softmax", "convention": site.convention.to_json()}
report = SiteReport.from_json(entry, "a site")
assert not report.approximate
print(convention_text(report.convention.to_json()))
