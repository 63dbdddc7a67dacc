"""From torch's PowerSGD hook to thinwire: the same network three times, with its loss and its bytes.

    torchrun --nproc-per-node 2 examples/powersgd_to_thinwire.py

What changes in a script is the hook, two lines that become one:

    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
    model.register_comm_hook(state, powerSGD_hook)

    handle = thinwire.compress_ddp(model, "lloyd4", optimizer=optimizer)

thinwire has no rank to tune and no steps to wait for. It takes any number of buckets under way, on gloo too, and its
checkpoint is `handle.state_dict()`. PowerSGD sends less; compare the losses. The task is the next byte of Python's help
pages, on GPUs where every rank has one, else on the CPU.
"""

import argparse
import os
from collections.abc import Callable
from pydoc_data.topics import topics
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import thinwire

TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
CONTEXT = 16  # bytes from which the next one is guessed
BATCH = 128
MATRIX_RANK = 4
WARMUP = 10  # steps that PowerSGD leaves uncompressed
Sent = Callable[[], float]  # bytes per rank so far
Hook = Callable[[DistributedDataParallel, AdamW], Sent]


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


def ring_bytes(numel: float) -> float:
    """What a ring sends per rank to sum so many fp32 numbers."""
    world = dist.get_world_size()
    return 4 * numel * 2 * (world - 1) / world


def powersgd(model: DistributedDataParallel, optimizer: AdamW) -> Sent:
    state = PowerSGDState(None, matrix_approximation_rank=MATRIX_RANK, start_powerSGD_iter=WARMUP)
    model.register_comm_hook(state, powerSGD_hook)
    warmup = WARMUP * sum(parameter.numel() for parameter in model.parameters())
    return lambda: ring_bytes(warmup + state.compression_stats()[2])


def compressed(model: DistributedDataParallel, optimizer: AdamW, codec: str) -> Sent:
    handle = thinwire.compress_ddp(model, codec, optimizer=optimizer)
    return lambda: handle.stats().bytes_sent


def train(device: torch.device, steps: int, hook: Hook) -> tuple[float, float, float]:
    """The loss of the last ten steps, the bytes that a rank sent in all, and those of the last step."""
    torch.manual_seed(0)
    layers = (nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 256))
    net = nn.Sequential(*layers).to(device)
    model = DistributedDataParallel(net, bucket_cap_mb=100)  # one bucket: PowerSGD hangs on gloo with several
    optimizer = AdamW(model.parameters(), lr=3e-3)
    sent = hook(model, optimizer)
    losses: list[float] = []
    before = 0.0
    for step in range(steps):
        before = sent()
        x, y = batch(step, device)
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return mean(losses[-10:]), sent(), sent() - before


def main(steps: int, codec: str) -> None:
    device = start()
    hooks: dict[str, Hook] = {
        "thinwire, none": lambda model, optimizer: compressed(model, optimizer, "none"),
        f"PowerSGD, rank {MATRIX_RANK}": powersgd,
        f"thinwire, {codec}": lambda model, optimizer: compressed(model, optimizer, codec),
    }
    rows = {name: train(device, steps, hook) for name, hook in hooks.items()}
    plain = rows["thinwire, none"][1]
    if dist.get_rank() == 0:
        print(f"{'':20}    loss  bytes sent  times fewer  bytes of a step")
        for name, (loss, sent, last) in rows.items():
            print(f"{name:20} {loss:7.4f} {sent:11,.0f} {plain / sent:12.2f} {last:16,.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--codec", default="lloyd4")
    options = parser.parse_args()
    main(options.steps, options.codec)
