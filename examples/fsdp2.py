"""FSDP2: a sharded GPT whose gradients travel in 4 bits and whose weights travel in 8.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    torchrun --nproc-per-node 2 examples/fsdp2.py --codec int8 --weights none

The model learns the bytes of Python's help pages: on GPUs where every rank has one, else on the CPU. Sharded parameters
stay exact. What is rounded is the copy of a layer's weights that a pass computes with, and the gradients on their way.
"""

import argparse
import os
from pydoc_data.topics import topics
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import thinwire

TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
CONTEXT = 64
BATCH = 8
WIDTH = 96


def start() -> torch.device:
    """Join the other ranks and return this rank's device."""
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return device


class GPT(nn.Module):
    """Two transformer layers over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device)
        hidden = self.bytes(x) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's batch: bytes, and for each the one that follows it."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=generator)
    text = TEXT[starts + torch.arange(CONTEXT + 1)].long().to(device)
    return text[:, :-1], text[:, 1:]


def main(steps: int, gradients: str, weights: str) -> None:
    device = start()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = GPT().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    handle = thinwire.compress_fsdp(model, gradients, weights=weights)  # the one line, after fully_shard
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(steps):
        loss = model(*batch(step, device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    stats = handle.stats()
    if dist.get_rank() == 0:
        print(f"gradients {gradients}, weights {weights}: loss {losses[0]:.3f} -> {mean(losses[-10:]):.3f}")
        print(f"sent {stats.bytes_sent:,} bytes instead of {stats.bytes_plain:,}: {stats.ratio:.2f} times fewer")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--codec", default="lloyd4", help="of gradients")
    parser.add_argument("--weights", default="int8", help="codec of weights")
    options = parser.parse_args()
    main(options.steps, options.codec, options.weights)
