"""The README's Python runs as it is printed, each block a script of its own, on two ranks where it sends something."""

import contextlib
import io
import os
import re
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks import RankPool

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
TOLD = ("int8", "<- chosen", "4.06 bits", "SQNR")  # by the first script of DDP, the verbs, the codecs, qat


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == len(TOLD)


def play(group: dist.ProcessGroup, block: str, port: int) -> str:
    """Run a block as torchrun would, without a group; what it prints."""
    os.environ |= {"RANK": str(group.rank()), "WORLD_SIZE": str(group.size())}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.destroy_process_group()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(block, str(README), "exec"), {"__name__": "__main__"})
    return out.getvalue()


@pytest.mark.parametrize(
    ("block", "told"), [pytest.param(*pair, id=pair[1]) for pair in zip(BLOCKS, TOLD, strict=False)]
)
def test_a_block_runs_as_it_is_printed(ranks: RankPool, block: str, told: str) -> None:
    world = ranks(2 if "init_process_group" in block else 1)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    try:
        assert told in world.run(play, block, port)[0]
    finally:
        world.close()  # these ranks have no group any more
