"""The task `bytes`: a byte-level GPT of up to 124 million weights, on text that every machine with torch has.

The text is the Python sources of the standard library, help pages included, and of torch. Files are in the order of the
hash of their names, so that every rank's part is like the others. Whole packages are held out. The text depends on the
installed versions: `digest` tells texts apart.
"""

import hashlib
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.tools.bench.tasks import Gpt, Transformer

HELD_OUT = ("asyncio", "email", "logging", "xml", "torch/distributions", "torch/onnx", "torch/optim")
_ELSEWHERE = {"site-packages", "dist-packages", "__pycache__"}  # what else is installed differs between machines


@dataclass(frozen=True)
class Bytes(Gpt):
    """A transformer on bytes; the rate rises for a tenth of the steps, since a large network wants that."""

    ramp: float = field(default=0.1, kw_only=True)
    judged: int = 1 << 20

    def network(self) -> nn.Module:
        """Rotary positions and small weights: with learned positions 600 steps end at twice the loss."""
        network = Transformer(256, self.context, self.width, self.heads, self.depth, rotary=True)
        for name, layer in network.named_modules():
            if isinstance(layer, nn.Linear):
                adds = name.endswith(("out", "narrow"))  # to what the next blocks see
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * self.depth) if adds else 0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        return network

    def training_text(self) -> Tensor:
        return texts()[0]

    def held_out_text(self) -> Tensor:
        return texts()[1]

    def digest(self) -> str:
        """The same for the same text."""
        return hashlib.sha256(b"".join(bytes(text.numpy()) for text in texts())).hexdigest()[:16]


@lru_cache(maxsize=1)
def texts() -> tuple[Tensor, Tensor]:
    """To train on, and held out."""
    files = sorted(_files(), key=lambda named: hashlib.sha256(named[0].encode()).digest())
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name, path in files:
        parts[any(name.startswith(f"{package}/") for package in HELD_OUT)].append(path.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


def _files() -> Iterator[tuple[str, Path]]:
    """Every source with its name: from the root of the standard library, or from torch's parent."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    package = Path(torch.__file__).parent
    for root, base in ((stdlib, stdlib), (package, package.parent)):
        for path in root.rglob("*.py"):
            name = path.relative_to(base)
            if path.is_file() and not _ELSEWHERE.intersection(name.parts):
                yield name.as_posix(), path


def _bytes(size: str, rate: float, width: int, heads: int, depth: int, context: int = 1024, rows: int = 4) -> Bytes:
    rates = (("adamw", rate), ("muon", rate))
    return Bytes(f"bytes-{size}", 600, 2, rates, width, heads, depth, context, rows=rows)


SIZES = {
    "250k": _bytes("250k", 3e-3, 96, 4, 2, context=128, rows=8),
    "3m": _bytes("3m", 2e-3, 256, 4, 4, context=512, rows=8),
    "30m": _bytes("30m", 1e-3, 512, 8, 9),
    "124m": _bytes("124m", 6e-4, 768, 12, 17),
}
QUICK = replace(
    SIZES["250k"], name="bytes-quick", steps=6, width=32, heads=2, depth=1, context=64, rows=4, judged=1 << 12
)
