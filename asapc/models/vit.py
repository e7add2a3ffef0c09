"""Sinkformer ViT: an image classifier whose attention is the finite Sinkhorn loop.

State-dict names and the forward pass equal those of the released Sinkformers code (Sander et al.
2022), so that its checkpoints load; only the attention maps stay tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from asapc.models.sinkhorn import sinkhorn_attention


class Patches(nn.Module):
    """[B, C, height * p1, width * p2] -> [B, height * width, p1 * p2 * C]"""

    def __init__(self, patch_size: tuple[int, int]) -> None:
        super().__init__()
        self.patch_size = patch_size

    def forward(self, img: Tensor) -> Tensor:
        batch, channels, image_height, image_width = img.shape
        p1, p2 = self.patch_size
        height, width = image_height // p1, image_width // p2
        x = img.reshape(batch, channels, height, p1, width, p2).permute(0, 2, 4, 3, 5, 1)
        return x.reshape(batch, height * width, p1 * p2 * channels)


class SinkhornAttention(nn.Module):
    """x: [B, N, dim] -> ([B, N, dim], attention [B, H, N, N])"""

    def __init__(
        self, dim: int, heads: int, dim_head: int, dropout: float, max_iter: int, eps: float
    ) -> None:
        super().__init__()
        self.heads = heads
        self.scale = dim_head**-0.5
        self.max_iter = max_iter
        self.loop = sinkhorn_attention  # training may put a faster twin here
        self.eps = eps
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out: nn.Module
        if heads == 1 and dim_head == dim:
            self.to_out = nn.Identity()
        else:
            self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        qkv = self.to_qkv(x).unflatten(-1, (3, self.heads, -1))  # [B, N, 3, H, D]
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D]
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.scale  # [B, H, N, N]
        attention = self.loop(scores, self.max_iter, self.eps)
        out = torch.matmul(attention, v).transpose(1, 2).flatten(2)  # [B, N, H * D]
        return self.to_out(out), attention


class PreNorm(nn.Module):
    """norm, then a block; the residual is added outside."""

    def __init__(self, dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(self.norm(x))


class FeedForward(nn.Module):
    """x: [B, N, dim] -> [B, N, dim]"""

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, hidden),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.net(x))


class Transformer(nn.Module):
    """x: [B, N, dim] -> ([B, N, dim], one attention [B, H, N, N] per layer)"""

    def __init__(
        self, dim: int, depth: int, mlp_dim: int, dropout: float, attention: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(depth):
            blocks = [PreNorm(dim, attention())]
            if mlp_dim > 0:
                blocks.append(PreNorm(dim, FeedForward(dim, mlp_dim, dropout)))
            self.layers.append(nn.ModuleList(blocks))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        maps = []
        for layer in self.layers:
            attention, *feed_forward = cast(nn.ModuleList, layer)
            update, attention_map = attention(x)
            x = update + x
            for block in feed_forward:
                x = block(x) + x
            maps.append(attention_map)
        return x, maps


class ViT(nn.Module):
    """Image classifier: patches, a [CLS] token, learnt positions, layers of some attention, a head.

    image_size, patch_size: pixels, one number or (height, width).  mlp_dim: 0 leaves the feed-forward
    blocks out.  pool: "cls" or "mean".  attention: makes one layer's.
    Raises ValueError when the patches do not tile the image or pool is unknown.
    """

    def __init__(
        self,
        attention: Callable[[], nn.Module],
        *,
        image_size: int | Sequence[int],
        patch_size: int | Sequence[int],
        num_classes: int,
        dim: int,
        depth: int,
        mlp_dim: int,
        pool: Literal["cls", "mean"] = "cls",
        channels: int = 3,
        dropout: float = 0.0,
        emb_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        image_height, image_width = _pair(image_size)
        p1, p2 = _pair(patch_size)
        if image_height % p1 or image_width % p2:
            raise ValueError(
                f"patches of {p1} x {p2} do not tile an image of {image_height} x {image_width}"
            )
        if pool not in ("cls", "mean"):
            raise ValueError(f'pool must be "cls" or "mean", got {pool!r}')
        self.image_shape = (channels, image_height, image_width)
        self.pool = pool
        num_patches = (image_height // p1) * (image_width // p2)
        self.to_patch_embedding = nn.Sequential(Patches((p1, p2)), nn.Linear(channels * p1 * p2, dim))
        self.pos_embedding = nn.Parameter(torch.randn(1, num_patches + 1, dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.dropout = nn.Dropout(emb_dropout)
        self.transformer = Transformer(dim, depth, mlp_dim, dropout, attention)
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_classes))

    def classify(self, img: Tensor) -> tuple[Tensor, list[Tensor]]:
        """img: [B, C, height, width].  Returns logits [B, classes] and the attention maps."""
        x = self.to_patch_embedding(img)  # [B, N - 1, dim]
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.dropout(x + self.pos_embedding[:, : x.shape[1]])
        x, maps = self.transformer(x)
        x = x.mean(dim=1) if self.pool == "mean" else x[:, 0]
        return self.mlp_head(x), maps

    def example_inputs(self, batch: int) -> dict[str, Tensor]:
        """A deterministic batch of noise images, to capture the model without data."""
        generator = torch.Generator().manual_seed(0)
        return {"img": torch.rand(batch, *self.image_shape, generator=generator)}


class SinkformerViT(ViT):
    """A ViT whose attention is the finite Sinkhorn loop.

    heads, dim_head: H and D; the score is D^-1/2 q k^T.  max_iter: half-steps T, rows first.
    eps: epsilon.  The other arguments are those of ViT.
    """

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        dim_head: int = 64,
        dropout: float = 0.0,
        max_iter: int = 1,
        eps: float = 1.0,
        **vit: Any,
    ) -> None:
        def attention() -> nn.Module:
            return SinkhornAttention(dim, heads, dim_head, dropout, max_iter, eps)

        super().__init__(attention, dim=dim, dropout=dropout, **vit)

    def forward(self, img: Tensor) -> tuple[Tensor, list[Tensor]]:
        """img: [B, C, height, width].  Returns logits [B, classes] and the attention maps."""
        return self.classify(img)
