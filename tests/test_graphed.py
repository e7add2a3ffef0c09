"""asapc.graphed: with a GPU a real CUDA graph; without one, what is around it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from gpu_env import DEVICE
from second_device import GPU, NeverWaiting, one_gpu
from torch import Tensor, nn

import asapc
from asapc.device import moved, running_on
from asapc.errors import InputError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, str]:
        return self.linear(x) * scale, "said"


class FakeGraph:
    """Runs what it has seen again, eagerly: on no GPU there is no stream to record."""

    made: ClassVar[list[FakeGraph]] = []

    def __init__(self) -> None:
        self.replays = 0
        self.made.append(self)

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def nothing(*_: Any) -> Any:
        yield

    class Stream:
        def wait_stream(self, _: Any) -> None: ...

    one_gpu(monkeypatch)
    for name, value in {
        "CUDAGraph": FakeGraph, "graph": nothing, "stream": nothing, "Stream": Stream,
        "current_stream": Stream,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_inputs_are_copied_in_and_outputs_out(no_gpu: None) -> None:
    model, x = Net().eval(), torch.ones(2, 3)
    with running_on(GPU, [model]):
        there = moved(x, GPU)
        run = asapc.graphed(model, there, scale=2.0)
        graph = FakeGraph.made[-1]
        with NeverWaiting():
            (first, said), (second, _) = run(there, scale=2.0), run(there, scale=2.0)
        assert graph.replays == 2 and said == "said"
        assert first is not second
        assert torch.equal(first.inner, model(there, scale=2.0)[0].inner)
        for args, kwargs, told in (
            ((moved(torch.ones(3, 3), GPU),), {"scale": 2.0}, r"shape \[3, 3\]"),
            ((there.double(),), {"scale": 2.0}, "dtype torch.float64"),
            ((x,), {"scale": 2.0}, "device cpu"),
            ((there,), {"scale": 3.0}, "3.0 where it was 2.0"),
            ((there,), {}, "other arguments"),
        ):
            with pytest.raises(InputError, match=told):
                run(*args, **kwargs)
        assert graph.replays == 2
        model.train()
        with pytest.raises(InputError, match="eval mode"):
            asapc.graphed(model, there)


def test_a_model_on_the_cpu_is_refused() -> None:
    with pytest.raises(InputError, match="on a GPU"):
        asapc.graphed(Net().eval(), torch.ones(2, 3))
    with pytest.raises(InputError, match="no tensor in the call"):
        asapc.graphed(nn.Identity().eval(), 1)


@pytest.mark.skipif(DEVICE != "cuda", reason="there is no GPU")
def test_a_real_graph() -> None:
    from asapc.models import SinkformerText

    torch.manual_seed(0)
    model = SinkformerText(
        vocab_size=40, seq_len=12, d_model=16, n_layers=2, n_heads=2, d_ff=16, num_classes=3, max_iter=8
    ).eval()
    tokens = torch.randint(1, 40, (300, 12))
    compiled, _ = asapc.compile(model, {"inputs": tokens}, recipe={"operator": "asap"}, device="cuda")
    compiled.to("cuda")
    run = asapc.graphed(compiled, tokens[:8].cuda())
    with torch.no_grad():
        for start in (0, 8, 16):
            few = tokens[start : start + 8].cuda()
            assert torch.allclose(run(few)[0], compiled(few)[0], atol=1e-5)
