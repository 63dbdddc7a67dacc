"""Tensor parallelism in a group that compresses: torch's own parallelize_module, no call of thinwire in the model.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --codec int4

The sums of activations and of their gradients travel in `--codec`, by a rule of the group. The task is the next byte of
Python's help pages, on GPUs where every rank has one, else on the CPU.
"""

import argparse
import os
from pydoc_data.topics import topics
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import thinwire
from thinwire.collectives import traffic

TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
CONTEXT = 8  # bytes from which the next one is guessed
BATCH = 256
WIDTH = 128
LAYERS = 2


def start(codec: str) -> torch.device:
    """Join the other ranks in a group that sums in `codec`, and return this rank's device."""
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    options = thinwire.GroupOptions(f"all_reduce={codec}")
    dist.init_process_group(f"{device.type}:thinwire", pg_options=options)
    return device


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The batch of a step, the same on all ranks."""
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    text = TEXT[starts + torch.arange(CONTEXT + 1)].long().to(device)
    return text[:, :-1], text[:, -1]


def main(steps: int, codec: str) -> None:
    device = start(codec)
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    front = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, WIDTH), nn.ReLU())
    model = nn.Sequential(front, *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 256)).to(device)
    for block in list(model)[1:-1]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses = []
    for step in range(steps):
        x, y = batch(step, device)
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sums = 2 * LAYERS * steps  # of a layer's activations, and of their gradients
    share = 1 if world == 2 else 2 * (world - 1) / world
    plain = int(sums * share * BATCH * WIDTH * 4)
    sent = traffic(mesh.get_group()).sent
    if dist.get_rank() == 0:
        print(f"{codec}: loss {losses[0]:.3f} -> {mean(losses[-10:]):.3f}")
        print(f"activations: {sent:,} bytes sent instead of {plain:,}: {plain / sent:.2f} times fewer")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--codec", default="int8")
    options = parser.parse_args()
    main(options.steps, options.codec)
