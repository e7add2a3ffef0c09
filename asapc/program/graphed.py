"""A model as one CUDA graph, for inputs of fixed shapes: no Python and no launches between its kernels.

    run = asapc.graphed(model, tokens)     # on the GPU
    logits, maps = run(other_tokens)

A compiled model of short sequences is a chain of launches, each as long as its kernel. A graph is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from asapc.errors import InputError

WARM_UP = 3  # calls before the capture, which compile kernels and allocate workspaces


def graphed(model: nn.Module, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Record model(*args, **kwargs) as a CUDA graph; return it as a function, without gradients.

    args, kwargs: an example call. The function takes other tensors of the same shapes; arguments that are
    not tensors are fixed. Outputs are new tensors, as the model's are. The weights stay those of the
    model, even if changed in place.  Raises InputError if the model is in training mode, or if it or a
    tensor is not on a GPU; the function raises it for another layout, shape, dtype or device.
    """
    leaves, layout = pytree.tree_flatten((args, kwargs))
    held = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    _check(model, [leaf for leaf in held if isinstance(leaf, Tensor)])
    inputs, keywords = pytree.tree_unflatten(held, layout)

    def call() -> Any:
        # Autocast keeps the copies of weights that it has cast until it ends; a graph reads them after.
        enabled, kind = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        casting = torch.autocast("cuda", kind, enabled, cache_enabled=False)
        with torch.no_grad(), casting:
            return model(*inputs, **keywords)

    with torch.cuda.device(next(leaf for leaf in held if isinstance(leaf, Tensor)).device):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = call()

    def run(*args: Any, **kwargs: Any) -> Any:
        values, now = pytree.tree_flatten((args, kwargs))
        if now != layout:
            raise InputError("a graphed model is called as in its example", got="other arguments")
        for place, (into, value) in enumerate(zip(held, values, strict=True)):
            problem = _other(into, value)
            if problem is not None:
                raise InputError(
                    "a graphed model takes what its example had", got=f"argument {place}: {problem}",
                    help="make another with asapc.graphed for it, or call the model itself",
                )  # fmt: skip
        with torch.no_grad():
            for into, value in zip(held, values, strict=True):
                if isinstance(into, Tensor):
                    into.copy_(value)
        graph.replay()
        return pytree.tree_map_only(Tensor, Tensor.clone, outputs)

    return run


def _check(model: nn.Module, inputs: list[Tensor]) -> None:
    places = [*model.parameters(), *model.buffers(), *inputs]
    elsewhere = next((x.device for x in places if x.device.type != "cuda"), None)
    if elsewhere is not None or not inputs:
        raise InputError(
            "a CUDA graph needs the model and its inputs on a GPU",
            got="no tensor in the call" if elsewhere is None else f"a tensor on {elsewhere}",
            help='move both: model.to("cuda"), inputs.to("cuda")',
        )
    if model.training:
        raise InputError("a graphed model must be in eval mode", help="call model.eval() first")


def _other(held: Any, value: Any) -> str | None:
    """How a value differs from the one in the example, in words, or None."""
    if not isinstance(held, Tensor) or not isinstance(value, Tensor):
        same = type(held) is type(value) and held == value
        return None if same else f"{value!r:.80} where it was {held!r:.80}"
    for what in ("shape", "dtype", "device"):
        was, now = getattr(held, what), getattr(value, what)
        if was != now:
            return f"{what} {list(now) if what == 'shape' else now}, where it was {was}"
    return None
