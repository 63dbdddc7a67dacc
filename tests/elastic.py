"""A DDP or FSDP2 job that loses ranks under `torchrun --max-restarts`, beside one that loses none; see found.json.

    python tests/elastic.py ddp                  # or fsdp; in an empty folder; ELASTIC_SEED=7 repeats a run

Every step ends with a checkpoint, written by rank 0 into one file. A rank that is drawn by lot is killed in the middle
of a backward pass, at a step that is drawn too. Later rank 0 is killed while it writes the file.
"""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

STEPS = 12
# Where torchruns share the store of the first rendezvous, what a killed worker left there outlives it.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def main(kind: str) -> None:
    """Run both jobs, one beside the other, and compare where they end."""
    seed = int(os.environ.get("ELASTIC_SEED") or random.SystemRandom().randrange(10**6))
    lots = random.Random(seed)
    step = lots.randrange(3, STEPS - 4)  # DDP has its final buckets by then
    kills = {"rank": lots.randrange(2), "backward": step, "writing": lots.randrange(step + 1, STEPS)}
    jobs = {name: _start(kind, name, found) for name, found in {"whole": {}, "broken": kills}.items()}
    try:
        status = {name: job.wait(timeout=240) for name, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.kill()
    ends = [torch.load(f"{name}/run.pt", weights_only=True) for name in jobs]
    begun = {name: [int(line) for line in Path(name, "begun").read_text().split()] for name in jobs}
    same = _flat(ends[0]) == _flat(ends[1])
    found = {
        "seed": seed,
        "kills": kills,
        "status": status,
        "begun": begun,
        "same": same,
        "numbers": len(_flat(ends[0])),
    }
    Path("found.json").write_text(json.dumps(found))


def _start(kind: str, name: str, kills: dict[str, int]) -> "subprocess.Popen[bytes]":
    Path(name).mkdir()
    script = str(Path(__file__).resolve())
    how = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.1"]
    environment = {**os.environ, **ENVIRONMENT, "KILLS": json.dumps(kills)}
    with Path(name, "log").open("wb") as log:
        command = [sys.executable, "-m", "torch.distributed.run", *how, script, "worker", kind]
        return subprocess.Popen(command, cwd=name, env=environment, stdout=log, stderr=log)


def _flat(state: Any, name: str = "") -> dict[str, Any]:
    """All that a state holds, by path: tensors as their bytes."""
    if isinstance(state, Tensor):
        return {name: (str(state.dtype), state.contiguous().view(-1).view(torch.uint8).tolist())}
    if isinstance(state, dict | list | tuple):
        parts = state.items() if isinstance(state, dict) else enumerate(state)
        return {path: value for key, part in parts for path, value in _flat(part, f"{name}/{key}").items()}
    return {name: state}


def worker(kind: str) -> None:
    """Train from the checkpoint, if there is one."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer, handle = _made(kind)
    path, begin = Path("run.pt"), 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        begin = saved["step"]
        weights, states = saved["model"], saved["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=WHOLE)
        handle.load_state_dict(saved["thinwire"])
    if rank == 0:
        with Path("begun").open("a") as file:
            file.write(f"{begin}\n")
    for step in range(begin, STEPS):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.register_hook(lambda gradient, step=step: _die("backward", step, rank))
        loss.backward()
        optimizer.step()
        _save(path, step, rank, *get_state_dict(model, optimizer, options=WHOLE), handle.state_dict(gather=True))
    dist.barrier()
    dist.destroy_process_group()


def _made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    import thinwire

    torch.manual_seed(5)
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    if kind == "ddp":
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        return model, optimizer, thinwire.compress_ddp(model, "lloyd2", optimizer=optimizer)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    adam = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, adam, thinwire.compress_fsdp(model, "lloyd2", "int8", feedback="ef21", optimizer=adam)


def _save(path: Path, step: int, rank: int, weights: Any, states: Any, compression: Any) -> None:
    from thinwire.integrations import checkpoint

    if rank == 0:
        write = torch.save

        def half(state: Any, file: Any) -> None:
            if _is_due("writing", step):
                file.write(b"half of a file")
                file.flush()
                _die("writing", step, rank)
            write(state, file)

        checkpoint.torch.save = half  # type: ignore[assignment]
        state = {"step": step + 1, "model": weights, "optimizer": states, "thinwire": compression}
        checkpoint.write(path, state)
        checkpoint.torch.save = write


def _is_due(moment: str, step: int) -> bool:
    return json.loads(os.environ["KILLS"]).get(moment) == step and not Path(f"killed-{moment}").exists()


def _die(moment: str, step: int, rank: int) -> None:
    if _is_due(moment, step) and (moment == "writing" or json.loads(os.environ["KILLS"])["rank"] == rank):
        Path(f"killed-{moment}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    (worker if sys.argv[1] == "worker" else main)(sys.argv[-1])
