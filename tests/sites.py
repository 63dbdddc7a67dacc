"""Sites of a DiLoCo run that die, join, leave and come back, under real torchruns; found.json says what became of them.

    python tests/sites.py                  # in an empty folder

Every site is a torchrun of one worker. a and b begin. b is killed in the middle of an outer step, when half of its
parameters are updated. c joins. Later c is killed, worker and torchrun, while it writes its file; a and b go on, and c
comes back with the file it had. Then a is killed between two rounds. All three go on to the end.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 30
EVERY = 3
LEAVES_AT = 5  # rounds of c
DIES_AT = 8  # rounds of a
# Where torchruns share the store of the first rendezvous, one that joins later is never told its address.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
CONF = "join_timeout=120,last_call_timeout=6,keep_alive_interval=2,keep_alive_max_attempt=4"


def main() -> None:
    """Start the sites, c once b was killed and again once it was killed itself, and wait for all."""
    port = _free_port()
    sites = {name: _start(name, port) for name in "ab"}
    try:
        _wait_for(Path("killed-b").exists, "b was not killed")
        sites["c"] = _start("c", port)
        left = sites["c"].wait(timeout=180)
        _wait_for(_went_on_without_c, "a and b did not go on without c")
        sites["c"] = _start("c", port)
        status = {name: site.wait(timeout=180) for name, site in sites.items()}
    finally:
        for site in sites.values():
            site.kill()
    lines = {name: _lines(name) for name in "abc"}
    Path("found.json").write_text(json.dumps({"status": status, "left": left, "lines": lines}))
    starts = sum(line["what"] == "start" for name in "abc" for line in lines[name])
    ends = [lines[name][-1] for name in "abc"]
    print(
        f"{ends[0]['rounds']} rounds, {len(list(Path().glob('killed-*')))} kills, 2 joins, {starts} starts of a worker"
    )
    print(f"final parameters equal on all: {all(end == ends[0] for end in ends)}")


def _wait_for(condition: Callable[[], bool], otherwise: str) -> None:
    for _ in range(9000):
        if condition():
            return
        time.sleep(0.02)
    raise TimeoutError(f"{otherwise}: see the logs of the sites")


def _went_on_without_c() -> bool:
    rounds = (line for line in _lines("b") if line["what"] == "round")
    return any(line["rounds"] > LEAVES_AT and line["world"] == 2 for line in rounds)


def _lines(name: str) -> list[dict[str, Any]]:
    """What a site has written so far; a line that is not whole yet is left out."""
    return [
        json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]


def _free_port() -> int:
    store = dist.TCPStore("localhost", 0, is_master=True)  # type: ignore[attr-defined]
    return int(store.port)


def _start(name: str, port: int) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **ENVIRONMENT, "SITE": name, "PORT": str(port)}
    with Path(f"{name}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, __file__, "agent"], env=environment, stdout=log, stderr=log)


def agent() -> None:
    """torchrun."""
    from torch.distributed.run import main as torchrun

    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{os.environ['PORT']}", "--rdzv-conf", CONF]
    where += ["--rdzv-id", "sites", "--local-addr", "localhost"]
    torchrun([*where, "--nnodes", "1:3", "--nproc-per-node", "1", "--max-restarts", "20", __file__, "site"])


def _die(name: str, *others: int) -> None:
    """Kill this process, once, and others before it."""
    Path(f"killed-{name}").touch()
    for process in (*others, os.getpid()):
        os.kill(process, signal.SIGKILL)


class Mortal(torch.optim.SGD):
    """The outer optimizer of b kills its process when half of the parameters are stepped."""

    def step(self, closure: Any = None) -> Any:
        """A step, or half of one."""
        if os.environ["SITE"] == "b" and self.state and not Path("killed-b").exists():
            parameters = self.param_groups[0]["params"]
            for parameter in parameters[: len(parameters) // 2]:
                parameter.data -= parameter.grad
            _die("b")
        return super().step(closure)


def _is_awaited(diloco: Any) -> bool:
    """Whether a site is to come before training goes on; torchrun then starts all workers anew."""
    if not Path("killed-b").exists():
        return dist.get_world_size() < 2
    left = Path("killed-c").exists()
    return dist.get_world_size() < 3 and (not left or diloco.rounds > LEAVES_AT)


def site() -> None:
    """Train, and write a line at the start, after every round and at the end."""
    import thinwire
    from thinwire.integrations import rejoin

    name = os.environ["SITE"]
    dist.init_process_group("gloo")
    torch.manual_seed(ord(name))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    diloco = thinwire.DiLoCo(
        model, optimizer, lambda copies: Mortal(copies, 0.7, 0.9, nesterov=True), every=EVERY, codec="lloyd2",
        feedback="classic", snapshot=f"{name}.pt",
    )  # fmt: skip
    _tell(name, "start", diloco)
    write = torch.save

    def last_words(state: Any, file: Any) -> None:
        if name == "c" and diloco.rounds >= LEAVES_AT and not Path("killed-c").exists():
            file.write(b"half of a file")
            file.flush()
            _die("c", os.getppid())
        write(state, file)

    rejoin.torch.save = last_words  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(ord(name))
    before = diloco.rounds
    while diloco.steps < STEPS:
        while _is_awaited(diloco):
            time.sleep(0.05)
        if name == "a" and diloco.steps == DIES_AT * EVERY + 1 and not Path("killed-a").exists():
            _die("a")
        x = torch.randn(16, 16, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
        if diloco.rounds > before:
            before = diloco.rounds
            _tell(name, "round", diloco)
        time.sleep(0.05)
    diloco.close()
    _tell(name, "end", diloco)
    dist.destroy_process_group()


def _tell(name: str, what: str, diloco: Any) -> None:
    outer = [p.detach() for group in diloco.outer_optimizer.param_groups for p in group["params"]]
    line = {
        "what": what,
        "world": dist.get_world_size(),
        "rounds": diloco.rounds,
        "steps": diloco.steps,
        "outer": [part.double().sum().item() for part in outer],
        "residual": diloco.stats().residual_bytes,
    }
    with Path(f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    {"agent": agent, "site": site, "": main}["".join(sys.argv[1:])]()
