"""DDP: one line compresses the gradients of an ordinary training loop, and a checkpoint resumes bit for bit.

    torchrun --nproc-per-node 2 examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py --codec none int8 lloyd4 lloyd2    # one run after the other

A small network learns to guess the next byte of Python's help pages: on GPUs where every rank has one, else on the CPU.
Half-way the run is saved. A second one starts from there, and ends with the weights of the first.
"""

import argparse
import os
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

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
    """This rank's batch of a step, the same whenever the step is taken."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=generator)
    text = TEXT[starts + torch.arange(CONTEXT + 1)].long().to(device)
    return text[:, :-1], text[:, -1]


class Job:
    """What trains, and what a checkpoint has to hold."""

    def __init__(self, codec: str, device: torch.device) -> None:
        self.codec = codec
        self.device = device
        torch.manual_seed(0)
        layers = (nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 256))
        self.model = DistributedDataParallel(nn.Sequential(*layers).to(device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.handle = thinwire.compress_ddp(self.model, codec, optimizer=self.optimizer)  # the one line

    def train(self, first: int, last: int) -> float:
        """Take the steps from `first` to `last`; the mean loss of the last ten, on rank 0's batches."""
        losses: list[float] = []
        for step in range(first, last):
            x, y = batch(step, self.device)
            loss = cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            if step % 10 == 9:
                sent = self.handle.stats().bytes_sent
                tell(f"{self.codec:8} step {step + 1:4}  loss {mean(losses[-10:]):.3f}  sent {sent:,} bytes")
        return mean(losses[-10:])

    def save(self, path: Path) -> None:
        """Every rank its own file: models and optimizers are alike, what compression remembers is not."""
        saved = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**saved, "thinwire": self.handle.state_dict()}, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.handle.load_state_dict(saved["thinwire"])


def tell(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def run(codec: str, steps: int, device: torch.device) -> None:
    """Train, save half-way, train on; then resume from the file and compare."""
    half = steps // 2
    job = Job(codec, device)
    again = Job(codec, device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rank{dist.get_rank()}.pt"
        job.train(0, half)
        job.save(path)
        loss = job.train(half, steps)
        again.load(path)
    tell(f"{codec:8} resumes after step {half}")
    again.train(half, steps)
    pairs = zip(job.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    apart = max((one - other).abs().max().item() for one, other in pairs)
    ratio = job.handle.stats().ratio
    tell(f"{codec:8} loss {loss:.3f}, {ratio:.2f} times fewer bytes; resumed weights differ by {apart:g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--codec", nargs="+", default=["lloyd4"])
    options = parser.parse_args()
    device = start()
    for codec in options.codec:
        run(codec, options.steps, device)
    dist.destroy_process_group()
