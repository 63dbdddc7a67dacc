"""Quantization-aware training under DDP: weights of 4 bits are learned from gradients that travel in 4 bits.

    torchrun --nproc-per-node 2 examples/qat.py

A small network learns to guess the next byte of Python's help pages: on GPUs where every rank has one, else on the CPU.
In the end its weights are packed into integers, and it answers as before. First and last layer have 8 bits.
"""

import argparse
import os
from pydoc_data.topics import topics
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire import qat

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


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's batch of a step."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=generator)
    text = TEXT[starts + torch.arange(CONTEXT + 1)].long().to(device)
    return text[:, :-1], text[:, -1]


def main(steps: int, codec: str) -> None:
    device = start()
    torch.manual_seed(0)
    layers = (nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 256))
    net = qat.prepare(nn.Sequential(*layers).to(device), weight_bits=4, act_bits=8)
    qat.calibrate(net, [batch(steps, device)[0]])  # before DDP; all ranks take part
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(qat.parameter_groups(net, weight_decay=0.01, scale_lr=3e-4), lr=3e-3)
    handle = thinwire.compress_ddp(model, codec, optimizer=optimizer)  # the one line
    losses: list[float] = []
    for step in range(steps):
        x, y = batch(step, device)
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    stats = handle.stats()
    packed = qat.convert(net)
    x, y = batch(steps + 1, device)
    if dist.get_rank() == 0:
        with torch.no_grad():
            print(
                f"a new batch: {cross_entropy(net(x), y):.4f}, with packed integers {cross_entropy(packed(x), y):.4f}"
            )
        print(f"weights: {qat.weight_bytes(net):,} bytes, packed {qat.weight_bytes(packed):,}")
        qat.summary(net)
        print(f"gradients in {codec}: loss {mean(losses[-10:]):.3f}, {stats.ratio:.2f} times fewer bytes sent")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--codec", default="lloyd4")
    options = parser.parse_args()
    main(options.steps, options.codec)
