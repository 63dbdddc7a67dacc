"""The network of the task "gpt": a transformer whose layers have names of their own."""

from torch import Tensor, nn
from torch.nn import functional


class GptNetwork(nn.Module):
    """Pre-norm, causal attention; positions are learned. Its layers can be cut into parts (benchmarks.group)."""

    def __init__(self, letters: int, context: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)
        for embedding in (self.letters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        x_BTD = self.letters(codes) + self.places.weight[: codes.shape[-1]]
        logits: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits


class GptBlock(nn.Module):
    """Attention and a feed-forward part, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self._attend(self.norm1(x_BTD))
        added: Tensor = self.narrow(functional.gelu(self.wide(self.norm2(x_BTD))))
        return x_BTD + added

    def _attend(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.mixed(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return result
