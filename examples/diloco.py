"""DiLoCo: ranks train alone for `--every` steps and average what they learned, so that almost nothing is sent.

    torchrun --nproc-per-node 2 examples/diloco.py
    torchrun --nproc-per-node 2 examples/diloco.py --codec lloyd2 --fragments 4 --overlap 2
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # a defect of torch: else restarted ranks may wait forever
    torchrun --nproc-per-node 2 --max-restarts 3 examples/diloco.py --checkpoint run

A small network learns to guess the next byte of Python's help pages: on GPUs where every rank has one, else on the CPU.
Every rank stands for a site: between two rounds nothing travels. The bytes are set beside those of DDP in fp32.
With --checkpoint every rank saves its state after each round, and a restarted run continues from it, bit for bit.
"""

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
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


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=generator)
    text = TEXT[starts + torch.arange(CONTEXT + 1)].long().to(device)
    return text[:, :-1], text[:, -1]


def tell(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


class Checkpoints:
    """A file per rank and round, written in one move: a killed process leaves whole files."""

    def __init__(self, name: str, **parts: Any) -> None:
        self.name = f"{name}.rank{dist.get_rank()}"
        self.parts = parts  # the model, its optimizer and DiLoCo

    def save(self, step: int, every: int) -> None:
        new = Path(f"{self.name}.new")
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, new)
        new.replace(f"{self.name}.step{step}.pt")
        Path(f"{self.name}.step{step - 2 * every}.pt").unlink(missing_ok=True)

    def load(self, device: torch.device) -> None:
        """Continue from the newest step that every rank has: ranks are at most one round apart."""
        steps = [int(path.stem.rpartition("step")[2]) for path in Path().glob(f"{self.name}.step*.pt")]
        newest = torch.tensor(max(steps, default=0), device=device)
        dist.all_reduce(newest, dist.ReduceOp.MIN)
        if newest:
            saved = torch.load(f"{self.name}.step{newest}.pt", map_location=device, weights_only=True)
            for name, part in self.parts.items():
                part.load_state_dict(saved[name])


def run(options: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    layers = (nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 256))
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    how = {"every": options.every, "codec": options.codec, "fragments": options.fragments, "overlap": options.overlap}
    losses: list[float] = []
    with thinwire.DiLoCo(model, optimizer, **how) as diloco:  # the one line; the loop is an ordinary one
        checkpoints = Checkpoints(options.checkpoint, model=model, optimizer=optimizer, diloco=diloco)
        if options.checkpoint:
            checkpoints.load(device)
        for step in range(diloco.steps, options.steps):
            x, y = batch(step, device)
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if options.checkpoint and (step + 1) % options.every == 0:
                checkpoints.save(step + 1, options.every)
            if step % 20 == 19:
                tell(f"step {step + 1:4}  loss {mean(losses[-10:]):.3f}  rounds {diloco.rounds}")
    sent = diloco.stats().bytes_sent
    numel = sum(parameter.numel() for parameter in model.parameters())
    world = dist.get_world_size()
    plain = options.steps * 2 * (world - 1) / world * 4 * numel  # a ring of fp32 gradients, every step
    check = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    sums = [torch.empty_like(check) for _ in range(world)]
    dist.all_gather(sums, check)
    same = all(torch.equal(other, check) for other in sums)
    tell(f"loss {mean(losses[-10:]):.3f}, {plain / sent:.2f} times fewer bytes than DDP in fp32")
    tell(f"all ranks have the same model: {same}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--codec", default="lloyd4")
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--overlap", type=int, default=0)
    parser.add_argument("--checkpoint", default="", help="save to files NAME.rank0... and continue from them")
    chosen = parser.parse_args()
    run(chosen, start())
    dist.destroy_process_group()
