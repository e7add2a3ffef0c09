"""Try an installed wheel: it has its engine, says its version, and compiles a small model exactly."""

import subprocess
import sys

import torch

import asapc
from asapc.models import SinkformerText

command = [sys.executable, "-m", "asapc", "--version"]
said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
assert "(C++ engine, " in said, said
torch.manual_seed(0)
teacher = SinkformerText(
    vocab_size=40, seq_len=12, d_model=16, n_layers=1, n_heads=2, d_ff=16, num_classes=3, max_iter=8
).eval()
tokens = torch.randint(1, 40, (200, 12))
model, report = asapc.compile(teacher, {"inputs": tokens}, recipe={"operator": "lossless"})
torch.testing.assert_close(model(tokens[:5])[0], teacher(tokens[:5])[0], atol=1e-5, rtol=1e-4)
print(said.strip(), report)
