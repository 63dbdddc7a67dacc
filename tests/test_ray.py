"""Ray Train, with the real package: examples/ray_train.py, whose workers fail and go on from Ray's own checkpoint."""

import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from programs import Ended
from ranks import RankPool
from replicas import Group
from thinwire import compress_ddp

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'ray[train]'", allow_module_level=True)

EXAMPLE = Path(__file__).parent.parent / "examples" / "ray_train.py"
LEAVE_S = 60.0
TOLD = r"steps (\d+) to (\d+): loss ([\d.]+), weights ([\d.]+), ([\d.]+) times fewer bytes"


def run_example(fails: bool) -> None:
    """The example, with a folder of its own for Ray, all of whose processes have to be gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="thinwire-ray-") as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
        code = EXAMPLE.read_text()
        assert code.count("FAIL_AT = 30") == 1
        script = Path(folder) / EXAMPLE.name
        script.write_text(code if fails else code.replace("FAIL_AT = 30", "FAIL_AT = STEPS"))
        subprocess.run([sys.executable, str(script)], env=environment, check=True)
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


def uninterrupted(group: Group) -> float:
    """The same steps in plain DDP: the norm of the weights."""
    example = runpy.run_path(str(EXAMPLE))
    bare = example["network"]()
    model = DistributedDataParallel(bare, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=example["RATE"])
    compress_ddp(model, example["CODEC"], optimizer=optimizer)
    for step in range(example["STEPS"]):
        example["learn"](model, optimizer, group.rank(), step, torch.device("cpu"))
    return torch.cat([p.detach().flatten() for p in bare.parameters()]).double().norm().item()


def started(fails: bool) -> pytest.MarkDecorator:
    return pytest.mark.program("-c", f"import test_ray; test_ray.run_example({fails})")


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(0, marks=started(False), id="at once"),
        pytest.param(20, marks=(started(True), pytest.mark.thorough), id="after a failure"),  # starts workers again
    ],
)
def test_workers_have_the_bits_of_plain_ddp(program: Ended, ranks: RankPool, begin: int) -> None:
    """Also those that fail, and go on from Ray's checkpoint."""
    assert program.status == 0, program.told
    assert program.alone
    ((first, last, _, weights, ratio),) = re.findall(TOLD, program.out)
    assert (int(first), int(last)) == (begin, 40)
    assert float(ratio) > 8
    assert ranks(2).run(uninterrupted) == [float(weights)] * 2
