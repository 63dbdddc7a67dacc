"""Ray Train: what examples/ray_train.py does on a worker, in ranks; with --thorough by the real package."""

import contextlib
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from programs import Ended
from ranks import RankPool
from replicas import Group
from thinwire import compress_ddp

EXAMPLE = Path(__file__).parent.parent / "examples" / "ray_train.py"
LEAVE_S = 60.0
TOLD = r"steps (\d+) to (\d+): loss ([\d.]+), weights ([\d.]+), ([\d.]+) times fewer bytes"


def run_example() -> None:
    """The example, with a folder of its own for Ray, all of whose processes have to be gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="thinwire-ray-") as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
        subprocess.run([sys.executable, str(EXAMPLE)], env=environment, check=True)
        deadline = time.monotonic() + LEAVE_S
        while (left := processes_in(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"Ray left behind: {left}"


def processes_in(folder: str) -> list[str]:
    """Ray's processes, which have inherited its folder; its workers are in process groups of their own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile, or is somebody else's
            if f"RAY_TMPDIR={folder}\0".encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@contextlib.contextmanager
def instead_of_ray(group: Group, folder: str) -> Iterator[list[dict[str, Any]]]:
    """What the example takes from Ray: the rank, DDP, and the last checkpoint in a folder. Gives what is reported."""
    found: list[dict[str, Any]] = []

    def report(metrics: dict[str, Any], checkpoint: str | None) -> None:
        found.append(metrics)
        torch.distributed.barrier(group)
        if checkpoint is not None:
            os.replace(Path(checkpoint) / "state.pt", Path(folder) / "state.pt")

    kept = SimpleNamespace(as_directory=lambda: contextlib.nullcontext(folder))
    ray = MagicMock()
    ray.train.get_context().get_world_rank = group.rank
    ray.train.get_checkpoint = lambda: kept if (Path(folder) / "state.pt").exists() else None
    ray.train.report = report
    ray.train.Checkpoint.from_directory = lambda made: made
    ray.train.torch.get_device = lambda: torch.device("cpu")
    ray.train.torch.prepare_model = lambda model: DistributedDataParallel(model, process_group=group)
    with patch.dict(sys.modules, {"ray": ray, "ray.train": ray.train, "ray.train.torch": ray.train.torch}):
        yield found


def uninterrupted(group: Group) -> float:
    """The same steps in plain DDP: the norm of the weights."""
    with instead_of_ray(group, ""):
        example = runpy.run_path(str(EXAMPLE))
    bare = example["network"]()
    model = DistributedDataParallel(bare, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=example["RATE"])
    compress_ddp(model, example["CODEC"], optimizer=optimizer)
    for step in range(example["STEPS"]):
        example["learn"](model, optimizer, group.rank(), step, torch.device("cpu"))
    return torch.cat([p.detach().flatten() for p in bare.parameters()]).double().norm().item()


def failed_and_resumed(group: Group, folder: str) -> list[dict[str, Any]]:
    """What a worker reports that fails, and one that goes on from its checkpoint."""
    with instead_of_ray(group, folder) as found:
        example = runpy.run_path(str(EXAMPLE))
        with pytest.raises(RuntimeError, match="a machine fails"):
            example["worker"]()
        torch.distributed.barrier(group)
        example["worker"]()
    return found


def test_a_worker_that_fails_goes_on_with_the_bits_of_plain_ddp(ranks: RankPool, tmp_path: Path) -> None:
    weights = ranks(2).run(uninterrupted)
    for want, (first, last) in zip(weights, ranks(2).run(failed_and_resumed, str(tmp_path)), strict=True):
        assert (first["begin"], last["begin"], last["weights"]) == (0, 20, want)
        assert last["ratio"] > 8


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray[train]")
@pytest.mark.program("-c", "import test_ray; test_ray.run_example()")
def test_workers_of_ray_have_the_bits_of_plain_ddp(program: Ended, ranks: RankPool) -> None:
    """They fail, too, and go on from Ray's own checkpoint. All that Ray starts takes a minute of a processor."""
    assert program.status == 0, program.told
    assert program.alone
    ((first, last, _, weights, ratio),) = re.findall(TOLD, program.out)
    assert (int(first), int(last)) == (20, 40)
    assert float(ratio) > 8
    assert ranks(2).run(uninterrupted) == [float(weights)] * 2
