"""The networks of `bench step` and `demo`: multilayer perceptrons and transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]  # inputs, targets
TransformerBlock = nn.TransformerEncoderLayer


def mlp(*sizes: int) -> nn.Module:
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def loss_of(network: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    inputs, targets = batch
    return functional.cross_entropy(network(inputs).flatten(0, -2), targets.flatten(), reduction=reduction)


class Transformer(nn.Module):
    """Pre-norm, causal attention; positions are learned; tied: the head has the weights of the letters."""

    def __init__(self, letters: int, context: int, width: int, heads: int, depth: int, tied: bool = False) -> None:
        super().__init__()
        how: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, 4 * width, **how) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)
        for embedding in (self.letters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.letters.weight

    def forward(self, codes: Tensor) -> Tensor:
        x_BTD = self.letters(codes) + self.places.weight[: codes.shape[-1]]
        causal = nn.Transformer.generate_square_subsequent_mask(codes.shape[-1], x_BTD.device, x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, src_mask=causal, is_causal=True)
        logits: Tensor = self.head(self.norm(x_BTD))
        return logits


@dataclass(frozen=True)
class StepModel:
    """A network and random batches for it."""

    network: Callable[[], nn.Module]
    block: type[nn.Module]  # what FSDP2 shards one by one, before what is left
    inputs: tuple[int, int]  # of a batch: rows, and features or letters
    classes: int

    def build(self, seed: int = 0) -> nn.Module:
        """The same weights on every rank; torch's generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.network()

    def batch(self, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(rank)
        if self.block is TransformerBlock:
            inputs, targets = torch.randint(self.classes, (2, *self.inputs), generator=generator)
            return inputs, targets
        images = torch.randn(self.inputs, generator=generator)
        return images, torch.randint(self.classes, self.inputs[:1], generator=generator)

    def blocks(self, network: nn.Module) -> list[nn.Module]:
        return [module for module in network.modules() if isinstance(module, self.block)]


MODELS = {
    "mlp-1m": StepModel(partial(mlp, 64, 512, 1024, 512, 10), nn.Linear, (32, 64), 10),
    "mlp-25m": StepModel(partial(mlp, 64, 3520, 3520, 3520, 10), nn.Linear, (32, 64), 10),
    "gpt-3m": StepModel(partial(Transformer, 256, 512, 256, 4, 4), TransformerBlock, (8, 512), 256),
    "gpt-124m": StepModel(partial(Transformer, 50304, 1024, 768, 12, 12, True), TransformerBlock, (4, 1024), 50304),
}
