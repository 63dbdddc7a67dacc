"""Ray Train: gradients of two workers travel in few bits. They fail once, and go on from Ray's checkpoint bit by bit.

python examples/ray_train.py          # two workers on CPUs
python examples/ray_train.py --gpu    # a GPU for each
"""

import argparse
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import Tensor, nn

import thinwire

STEPS = 40
SAVE_EVERY = 20
FAIL_AT = 30
RATE = 3e-3
CODEC = {0: "int8", 10: "lloyd2"}  # below 4 bits after some steps, when Adam's moments mean something
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


def worker() -> None:
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
    for step in range(begin, STEPS):
        if step == FAIL_AT and begin == 0:
            raise RuntimeError("a machine fails")
        loss = learn(model, optimizer, rank, step, get_device())
        if (step + 1) % SAVE_EVERY == 0:
            state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            state["thinwire"] = handle.state_dict(gather=True)  # every worker calls it; rank 0 gets that of all
            weights = torch.cat([p.detach().flatten() for p in bare.parameters()]).double().norm()
            found = {"begin": begin, "loss": loss.item(), "weights": weights.item(), "ratio": handle.stats().ratio}
            with tempfile.TemporaryDirectory() as folder:
                torch.save(state, Path(folder) / FILE)
                ray.train.report(found, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    arguments = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            worker,
            scaling_config=ScalingConfig(num_workers=2, use_gpu=arguments.gpu),
            run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=1)),
        )
        found = trainer.fit().metrics or {}
    print(
        f"steps {found['begin']} to {STEPS}: loss {found['loss']:.4f}, weights {found['weights']!r}, "
        f"{found['ratio']:.1f} times fewer bytes"
    )
    ray.shutdown()
