"""Every example runs as its docstring says, and prints a loss and a ratio of bytes that only a compressed run has.

It runs in ranks that exist already, as torchrun would run it; so does what the notebook starts.
"""

import ast
import contextlib
import io
import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from programs import Ended
from ranks import RankPool
from test_nccl import lacking

EXAMPLES = Path(__file__).parent.parent / "examples"
STARTS = {  # of a command in a docstring: what python runs
    "torchrun": ("-m", "torch.distributed.run", "--standalone"),
    "accelerate": ("-m", "accelerate.commands.accelerate_cli"),
    "python": (),
}
RANKS_IMPORT = ("lightning.pytorch", "accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama")
FRAMEWORKS = {
    "accelerate_ddp.py": "accelerate",
    "lightning_ddp.py": "lightning",
    "rl_weight_sync.py": "transformers",
    "trainer.py": "transformers",
}


class Run(NamedTuple):
    """An example, and what it has to print at least."""

    name: str
    loss: float  # the last one printed is below
    fewer: float  # bytes, the last ratio printed is above
    steps: int = 0  # fewer than the example's own, where those take long
    at: int = 0  # of the commands in its docstring


# Losses begin at 5.5, that of guessing among 256 bytes.
RUNS = [
    Run("ddp.py", 3.4, 7.0, steps=30),
    Run("fsdp2.py", 4.4, 4.4, steps=8),
    Run("hsdp.py", 4.4, 3.3, steps=8),
    Run("onebit_adam.py", 2.9, 12.0),
    Run("moe_all_to_all.py", 4.4, 3.8, steps=8),
    Run("moe_all_to_all.py", 4.4, 3.8, steps=8, at=2),  # in a group that compresses
    Run("tensor_parallel.py", 3.8, 3.8, steps=12),
    Run("pipeline.py", 4.3, 3.8, steps=12),
    Run("qat.py", 3.4, 7.0, steps=30),
    Run("lightning_ddp.py", 3.3, 8.0, steps=15),  # in each of two epochs
    Run("accelerate_ddp.py", 0.1, 9.0),  # a regression
    Run("trainer.py", 0.3, 7.0),  # tokens that count upwards
    Run("rl_weight_sync.py", 0.47, 2.6, steps=8),  # half of a random policy's tokens are even
]
DILOCO = Run("diloco.py", 3.4, 50.0)


def commands(name: str) -> list[list[str]]:
    """The commands in an example's docstring, as arguments of python."""
    path = EXAMPLES / name
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    found = []
    for line in re.findall(rf"^ *((?:{'|'.join(STARTS)}) .*examples/{name}.*)$", text, re.MULTILINE):
        first, *rest = shlex.split(line, comments=True)
        found.append([*STARTS[first], *(str(path) if word == f"examples/{name}" else word for word in rest)])
    return found


def parameters() -> Iterator[object]:
    for run in RUNS:
        package = FRAMEWORKS.get(run.name)
        missing = package is not None and find_spec(package) is None
        mark = [pytest.mark.skip(reason=f"{package} is not installed")] if missing else []
        yield pytest.param(run, marks=mark, id=f"{run.name}{run.at or ''}")


def play(group: dist.ProcessGroup, name: str, arguments: list[str], port: int, folder: str) -> str:
    """Run an example as torchrun would, in `folder`; what it prints."""
    told = {"RANK": group.rank(), "LOCAL_RANK": group.rank(), "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    told |= {"WORLD_SIZE": group.size(), "LOCAL_WORLD_SIZE": group.size(), "MASTER_PORT": port}
    environment = {key: str(value) for key, value in told.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "none", **environment}
    os.chdir(folder)
    dist.destroy_process_group()
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
        warnings.simplefilter("ignore" if name in FRAMEWORKS else "error")
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


def printed(ranks: RankPool, name: str, folder: Path, words: list[str]) -> str:
    """What rank 0 of an example prints when python is given these arguments, or torchrun's."""
    script = next(at for at, word in enumerate(words) if word.endswith(name))
    world = ranks(int(words[words.index("--nproc-per-node") + 1]))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    try:
        return world.run(play, name, words[script + 1 :], port, str(folder))[0]
    finally:
        world.close()  # these ranks have another group now, or none


def test_every_example_is_run() -> None:
    elsewhere = {"powersgd_to_thinwire.py", "ray_train.py", "rehearse.py"}  # below, in test_ray.py, test_rehearse.py
    assert {path.name for path in EXAMPLES.glob("*.py")} == {run.name for run in (*RUNS, DILOCO)} | elsewhere
    listed = re.findall(r"\]\((\w+\.(?:py|ipynb))\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))


def on_two_nodes(name: str) -> None:
    """Run an example as two machines would, each with one rank, on the first GPU here if there is one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    start = [*STARTS["torchrun"][:2], "--nnodes", "2", "--master-addr", "localhost", "--master-port", str(port)]
    nodes = [
        subprocess.Popen(
            [sys.executable, *start, "--node-rank", str(node), str(EXAMPLES / name)],
            env={**os.environ, "NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "VERSION"},
        )
        for node in range(2)
    ]
    sys.exit(max(abs(node.wait()) for node in nodes))


def on_nccl() -> Iterator[object]:
    for run in RUNS:
        if package := FRAMEWORKS.get(run.name):
            why = lacking(2) or (find_spec(package) is None and f"{package} is not installed")
            started = pytest.mark.program("-c", f"import test_examples; test_examples.on_two_nodes({run.name!r})")
            marks = (pytest.mark.cuda, pytest.mark.skip(reason=why) if why else started)
            yield pytest.param(run, marks=marks, id=run.name)


@pytest.mark.parametrize("run", list(on_nccl()))
def test_a_framework_trains_and_compresses_on_nccl(run: Run, program: Ended) -> None:
    assert program.status == 0, program.told
    assert "NCCL version" in program.out + program.err, program.told  # which NCCL prints, gloo does not
    check(run, program.out)


@pytest.mark.parametrize("run", list(parameters()))
def test_an_example_trains_and_compresses(run: Run, ranks: RankPool, tmp_path: Path) -> None:
    steps = ["--steps", str(run.steps)] if run.steps else []
    check(run, printed(ranks, run.name, tmp_path, [*commands(run.name)[run.at], *steps]))


def check(run: Run, out: str) -> None:
    """Whether an example learned, sent as few bytes as it promises, and printed what it promises."""
    losses = [float(loss) for loss in re.findall(r"loss (?:[\d.]+ -> )?(\d+\.\d+)", out)]
    ratios = [float(ratio) for ratio in re.findall(r"(\d+\.\d+) times fewer", out)]
    assert losses[-1] < run.loss, out
    assert ratios[-1] > run.fewer, out
    for told in PROMISES.get(run.name, ()):
        assert re.search(told, out, re.MULTILINE), out


PROMISES = {
    "rl_weight_sync.py": ["workers have the trainer's weights: True"],
    "lightning_ddp.py": ["resumed weights differ by 0$"],
    "diloco.py": ["all ranks have the same model: True"],
    "onebit_adam.py": ["all ranks have the same model: True"],
    "ddp.py": ["resumed weights differ by 0$"],
    "hsdp.py": ["2 nodes of [12]: lloyd4 across, bf16 inside"],
    "qat.py": [r"a new batch: (\d\.\d+), with packed integers \1\n"],
}


def test_diloco_trains_and_continues_from_its_checkpoints(ranks: RankPool, tmp_path: Path) -> None:
    words = [*commands("diloco.py")[0], "--fragments", "2"]
    whole = printed(ranks, "diloco.py", tmp_path, [*words, "--steps", "40"])
    for steps in ("20", "40"):
        out = printed(ranks, "diloco.py", tmp_path, [*words, "--steps", steps, "--checkpoint", "run"])
    check(DILOCO, whole)
    assert re.match(r"step +40 +loss \d", out), out  # it took no other steps
    losses = [[line.split(",")[0] for line in each.splitlines()[-3:-1]] for each in (whole, out)]
    assert losses[0] == losses[1]


def test_powersgd_and_thinwire_side_by_side(ranks: RankPool, tmp_path: Path) -> None:
    name = "powersgd_to_thinwire.py"
    out = printed(ranks, name, tmp_path, [*commands(name)[0], "--steps", "30"])
    rows = re.findall(r"^(.+?)  +([\d.]+) +([\d,]+) +([\d.]+) +([\d,]+)$", out, re.MULTILINE)
    found = {name: (float(loss), float(fewer), int(last.replace(",", ""))) for name, loss, _, fewer, last in rows}
    plain, power, ours = (found[name] for name in ("thinwire, none", "PowerSGD, rank 4", "thinwire, lloyd4"))
    assert plain[1] == 1
    assert power[1] > 2
    assert ours[1] > 7
    assert power[2] < ours[2] < plain[2] / 7  # what a step sends once PowerSGD compresses
    assert ours[0] < plain[0] + 0.05 < 3.3  # lloyd4 trains as fp32 does


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_notebook_draws_losses_and_bytes(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its code as a script, in a folder beside the examples; of fewer steps."""
    import matplotlib

    def started(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, *STARTS["torchrun"]]
        return subprocess.CompletedProcess(command, 0, printed(ranks, "ddp.py", tmp_path, command[1:]))

    matplotlib.use("Agg")
    monkeypatch.setattr(subprocess, "run", started)
    monkeypatch.chdir(tmp_path)
    Path("ddp.py").symlink_to(EXAMPLES / "ddp.py")
    cells = json.loads((EXAMPLES / "loss_and_bytes.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for said, instead in (("STEPS = 60", "STEPS = 12"), ("plt.show()", "plt.savefig('drawn.png'); plt.close()")):
        assert code.count(said) == 1
        code = code.replace(said, instead)
    exec(compile(code, "loss_and_bytes.ipynb", "exec"), {})
    out = capsys.readouterr().out
    rows = re.findall(r"^(\w+) +loss ([\d.]+) \(([+-][\d.]+)\) .* MB +([\d.]+) times fewer$", out, re.MULTILINE)
    assert [row[0] for row in rows] == ["none", "int8", "lloyd4", "lloyd2"]
    fewer = [float(row[3]) for row in rows]
    assert all(found > least for found, least in zip(fewer, (0.99, 3.8, 7.5, 14), strict=True)), out
    assert all(abs(float(row[2])) < 0.2 for row in rows), out
    assert Path("drawn.png").stat().st_size > 10_000


def test_the_notebook_holds_no_outputs() -> None:
    cells = json.loads((EXAMPLES / "loss_and_bytes.ipynb").read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
