"""HSDP: shards inside a node, replicas across nodes; 16 bits inside, 4 bits across.

    torchrun --nproc-per-node 4 examples/hsdp.py        # one machine plays two nodes of two ranks
    torchrun --nproc-per-node 2 examples/hsdp.py        # two nodes of one rank: everything crosses

On several machines the nodes are the machines. Gradients are reduce-scattered inside a node in `inside`, then averaged
between the nodes in `--codec`: the slow link carries the narrow codec, and only a shard's worth from every rank.
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
CONTEXT = 16  # bytes from which the next one is guessed
BATCH = 128


def start() -> torch.device:
    """Join the other ranks and return this rank's device."""
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return device


def nodes() -> int:
    """The machines; one machine alone plays two."""
    world = dist.get_world_size()
    machines = world // int(os.environ["LOCAL_WORLD_SIZE"])
    return machines if machines > 1 else min(2, world)


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's batch of a step."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=generator)
    text = TEXT[starts + torch.arange(CONTEXT + 1)].long().to(device)
    return text[:, :-1], text[:, -1]


def main(steps: int, codec: str) -> None:
    device = start()
    shape = (nodes(), dist.get_world_size() // nodes())
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    layers = (nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 256))
    model = nn.Sequential(*layers).to(device)
    for layer in (model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    handle = thinwire.compress_fsdp(model, codec, inside="bf16", weights="int8", optimizer=optimizer)  # the one line
    losses: list[float] = []
    for step in range(steps):
        x, y = batch(step, device)
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    stats = handle.stats()
    if dist.get_rank() == 0:
        print(f"{shape[0]} nodes of {shape[1]}: {codec} across, bf16 inside; loss {mean(losses[-10:]):.3f}")
        print(f"sent {stats.bytes_sent:,} bytes instead of {stats.bytes_plain:,}: {stats.ratio:.2f} times fewer")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--codec", default="lloyd4", help="of gradients between nodes")
    options = parser.parse_args()
    main(options.steps, options.codec)
