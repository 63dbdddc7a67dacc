"""Pipeline parallelism in a group that compresses: torch's own schedule, no call of thinwire in the model.

    torchrun --nproc-per-node 2 examples/pipeline.py
    torchrun --nproc-per-node 2 examples/pipeline.py --codec int4

Every rank has a stage. Activations and their gradients travel in `--codec`, by a rule of the group. The task is the
next byte of Python's help pages, on GPUs where every rank has one, else on the CPU.
"""

import argparse
import os
from pydoc_data.topics import topics
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

import thinwire
from thinwire.collectives import traffic

TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
CONTEXT = 8  # bytes from which the next one is guessed
BATCH = 256
PARTS = 4  # of a batch, which follow each other through the stages
WIDTH = 128


def start(codec: str) -> torch.device:
    """Join the other ranks in a group that sends in `codec`, and return this rank's device."""
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    options = thinwire.GroupOptions(f"send={codec}")
    dist.init_process_group(f"{device.type}:thinwire", pg_options=options)
    return device


def stage_of(rank: int, world: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    if rank == 0:
        layers = [nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, WIDTH), nn.ReLU()]
    if rank == world - 1:
        layers.append(nn.Linear(WIDTH, 256))
    return nn.Sequential(*layers)


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The batch of a step, the same on all ranks."""
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    text = TEXT[starts + torch.arange(CONTEXT + 1)].long().to(device)
    return text[:, :-1], text[:, -1]


def main(steps: int, codec: str) -> None:
    device = start(codec)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = stage_of(rank, world).to(device)
    schedule = Schedule1F1B(PipelineStage(model, rank, world, device), PARTS, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    for step in range(steps):
        x, y = batch(step, device)
        found: list[Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == world - 1:
            schedule.step(target=y, losses=found)
        else:
            schedule.step()
        optimizer.step()
        losses += [torch.stack(found).mean().item()] if found else []
    ways = (rank > 0) + (rank < world - 1)  # activations forward, gradients back
    plain = steps * BATCH * WIDTH * 4 * ways
    sent = traffic().sent
    told = [losses]
    dist.broadcast_object_list(told, src=world - 1)
    if rank == 0:
        print(f"{codec}: loss {told[0][0]:.3f} -> {mean(told[0][-10:]):.3f}")
        print(f"activations: {sent:,} bytes sent instead of {plain:,}: {plain / sent:.2f} times fewer")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--codec", default="int8")
    options = parser.parse_args()
    main(options.steps, options.codec)
