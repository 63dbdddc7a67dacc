"""Ray Train: gradients of two workers travel in two bits; a second run goes on from the first one's checkpoint.

python examples/ray_train.py          # two workers on CPUs
python examples/ray_train.py --gpu    # a GPU for each
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import Tensor, nn

import thinwire

WORKERS = 2
CODEC = "lloyd2"
RATE = 3e-3
FILE = "state.pt"


def network() -> nn.Module:
    """A small network, the same on every worker."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, device: torch.device) -> Tensor:
    """One step on a batch of this worker's own; gives the loss."""
    batch = torch.randn(64, 64, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)
    loss = (model(batch) - batch.roll(1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def worker(config: dict[str, Any]) -> None:
    """What every worker runs."""
    rank = ray.train.get_context().get_world_rank()
    bare = network()
    model = prepare_model(bare)  # DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    handle = thinwire.compress_ddp(model, CODEC, optimizer=optimizer)  # the one line
    begin = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / FILE, map_location=get_device(), weights_only=True)
        bare.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["thinwire"])
        begin = saved["step"]
    for step in range(begin, config["steps"]):
        loss = learn(model, optimizer, rank, step, get_device())
    compression = handle.state_dict(gather=True)  # every worker calls it; rank 0 gets what all of them remember
    weights = torch.cat([p.detach().flatten() for p in bare.parameters()]).double()
    found = {"begin": begin, "loss": loss.item(), "weights": weights.norm().item(), "ratio": handle.stats().ratio}
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "thinwire": compression}
        torch.save({**state, "step": config["steps"]}, Path(folder) / FILE)
        ray.train.report(found, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def train(steps: int, storage: str, gpu: bool) -> None:
    """A run of `steps` steps. One that has a checkpoint in `storage` already goes on from there."""
    trainer = TorchTrainer(
        worker,
        train_loop_config={"steps": steps},
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=gpu),
        run_config=RunConfig(name="thinwire", storage_path=storage),
    )
    found = trainer.fit().metrics or {}
    print(
        f"steps {found['begin']} to {steps}: loss {found['loss']:.4f}, weights {found['weights']!r}, "
        f"{found['ratio']:.1f} times fewer bytes"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    arguments = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as storage:
        train(20, storage, arguments.gpu)
        train(40, storage, arguments.gpu)
    ray.shutdown()
