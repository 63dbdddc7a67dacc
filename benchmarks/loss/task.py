"""The text and the networks of the loss study. A seed fixes the weights and all batches.

Nothing is downloaded: the text is all Python sources that are installed, each once, and random files are held out. It
depends on the machine; runs are compared only if `Text.digest` is the same.

Legend: B rows of a batch, T tokens of a row, H heads, D numbers per head, C width.
"""

import hashlib
import math
import site
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from thinwire.kernels import hashing

HEAD = 64  # numbers per head
HELD_OUT = 26  # one file in so many
JUDGED = 8 << 20  # tokens that a validation loss is taken over, at most
WORLD = 8
LETTERS = 256


@dataclass(frozen=True)
class Size:
    """A network and its recipe; `rows` rows of `context` tokens per replica and step."""

    width: int
    depth: int
    rate: float = 1e-3
    steps: int = 1000
    rows: int = 16
    context: int = 512


SIZES = {
    "tiny": Size(64, 2, steps=20, rows=2, context=64),
    "3m": Size(256, 4),
    "25m": Size(512, 8),
    "126m": Size(1024, 10, rate=6e-4),
}


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and bytes of other files."""

    train: Tensor
    held_out: Tensor
    digest: str


@lru_cache(maxsize=1)
def sources(most: int | None = None) -> Text:
    """All installed Python sources, in an order and a split that depend on their contents alone; `most` bytes."""
    found = {hashlib.sha256(source).digest(): source for source in _files()}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    digest = hashlib.sha256()
    for key, source in sorted(found.items()):
        if most is not None and total >= most:
            break
        total += len(source)
        digest.update(key)
        parts[key[-1] % HELD_OUT == 0].append(source)
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return Text(train, held_out, digest.hexdigest()[:16])


def _files() -> Iterator[bytes]:
    roots = {Path(root) for root in (*site.getsitepackages(), sysconfig.get_path("stdlib"))}
    paths = {path.resolve() for root in roots for path in root.rglob("*.py") if path.is_file()}
    for path in sorted(paths):
        yield path.read_bytes()


def starts_of(text: Text, size: Size, seed: int, world: int = WORLD) -> Tensor:
    """Where the rows of every step and replica begin: [steps, world, rows]."""
    generator = torch.Generator().manual_seed(hashing.key(seed, 0, 0) & 0xFFFFFFFF)
    shape = (size.steps, world, size.rows)
    return torch.randint(len(text.train) - size.context - 1, shape, generator=generator)


def windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    """Rows of context + 1 tokens."""
    places = starts[:, None] + torch.arange(context + 1, device=text.device)
    return text[places].long()


def rate_of(size: Size, step: int) -> float:
    """Rises for 5 % of the steps, then falls linearly to zero."""
    rise = max(1, size.steps // 20)
    return size.rate * min((step + 1) / rise, (size.steps - step) / max(1, size.steps - rise))


class Block(nn.Module):
    """Attention with rotary positions, and a feed-forward network; no biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTC: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """x plus what both parts add."""
        rows, context, width = x_BTC.shape
        split = self.qkv(self.norm1(x_BTC)).view(rows, context, 3, width // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind()
        mixed = F.scaled_dot_product_attention(
            rotated(q, cos_TE, sin_TE), rotated(k, cos_TE, sin_TE), v, is_causal=True
        )
        x_BTC = x_BTC + self.out(mixed.transpose(1, 2).reshape(rows, context, width))
        wider: Tensor = self.narrow(F.gelu(self.wide(self.norm2(x_BTC))))
        return x_BTC + wider


def rotated(x_BHTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Each pair of numbers rotated by its position's angle."""
    a, b = x_BHTD.chunk(2, dim=-1)
    return torch.cat([a * cos_TE - b * sin_TE, a * sin_TE + b * cos_TE], dim=-1).to(x_BHTD.dtype)


class GPT(nn.Module):
    """A byte-level transformer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.depth))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, LETTERS, bias=False)
        rates_E = 10_000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        angles_TE = torch.arange(size.context)[:, None] * rates_E
        self.register_buffer("cos", angles_TE.cos(), persistent=False)
        self.register_buffer("sin", angles_TE.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                adds = name.endswith(("out.weight", "narrow.weight"))  # to what the next blocks see
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.depth) if adds else 0.02)

    def forward(self, rows: Tensor) -> Tensor:
        """The mean loss of predicting every token from those before it."""
        x_BTC = self.letters(rows[:, :-1])
        for block in self.blocks:
            x_BTC = block(x_BTC, self.cos, self.sin)
        logits = self.head(self.norm(x_BTC))
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def network_of(size: Size, seed: int) -> GPT:
    """The network as a seed makes it; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(size)


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU, fp32 elsewhere. Nothing is cached: a CUDA graph must not hold copies of weights from outside."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


@torch.no_grad()
def judge(network: GPT, text: Text, size: Size, most: int = JUDGED) -> float:
    """The mean loss over the first tokens of the held-out text, in windows side by side."""
    held_out = text.held_out
    count = min(len(held_out) - 1, most) // size.context
    starts = torch.arange(count, device=held_out.device) * size.context
    batches = starts.split(128)
    with autocast(held_out.device):
        total = sum(network(windows(held_out, part, size.context)).double() * len(part) for part in batches)
    return float(total) / count
