"""Unmodified trainers whose default group compresses: their losses beside gloo's. The Makefile installs them."""

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import trainers
from ranks import RankPool
from test_group_clients import CLOSE

GROUPS = {  # backend and rules of the default group
    "plain": ("gloo", ""),
    "exact": ("cpu:thinwire", "all_reduce=none"),
    "int8": ("cpu:thinwire", "all_reduce=int8@512; reduce_scatter=int8@512; all_gather=int8@512; send=int8@512"),
}


def jobs(group: Any, trainer: str, cases: list[dict[str, int]], names: list[str], store: str) -> list[Any]:
    """Of every case the losses, and how many kinds of groups had compressed traffic; or what is not installed."""
    warnings.simplefilter("ignore")
    rank, world = group.rank(), group.size()
    os.environ["LOCAL_RANK"] = str(rank)
    found: list[Any] = []
    for name in names:
        dist.destroy_process_group()
        backend, os.environ["THINWIRE_RULES"] = GROUPS[name]
        dist.init_process_group(backend, store=dist.FileStore(store + name, world), rank=rank, world_size=world)
        found.append([])
        for case in cases:
            before = trainers.compressed()
            try:
                losses = trainers.TRAINERS[trainer](**case)
            except ModuleNotFoundError as error:  # the Makefile installs them without what they depend on
                return [str(error)]
            found[-1].append((losses, len(trainers.compressed() - before)))
    return found


@pytest.mark.parametrize("name", ["int8", pytest.param("exact", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("trainer", "world", "cases"),
    [
        ("torchtitan", 2, [{}, {"tensor": 2}, {"pipeline": 2}]),
        pytest.param("torchtitan", 4, [{"tensor": 2}, {"pipeline": 2}], marks=pytest.mark.thorough),
        ("deepspeed", 2, [{"stage": 2}, {"stage": 3}]),
        ("megatron", 2, [{}]),
    ],
)
def test_trainers_run_unmodified(
    ranks: RankPool, tmp_path: Any, trainer: str, world: int, cases: Any, name: str
) -> None:
    """Without rules their losses have gloo's bits; int8 moves them by less than CLOSE of what training gains."""
    if trainer == "torchtitan" and torch.__version__ < "2.14":
        if torch.__version__ < "2.13":
            pytest.skip("torchtitan needs torch 2.13")
        cases = [case for case in cases if "pipeline" not in case]  # needs 2.14
    # Processes of its own, which end: trainers and DTensor keep groups for good; from torch 2.14 torchtitan has one.
    named = [["plain", name]] if torch.__version__ < "2.14" else [["plain"], [name]]
    parts = [ranks.fresh(world).run(jobs, trainer, cases, one, str(tmp_path / "store"), lost=world) for one in named]
    of_ranks = [[one for part in of_rank for one in part] for of_rank in zip(*parts, strict=True)]
    if isinstance(of_ranks[0][0], str):
        pytest.skip(of_ranks[0][0])
    for (expected, _), (losses, kinds) in (pair for of_rank in of_ranks for pair in zip(*of_rank, strict=True)):
        assert kinds == (world // 2 if name == "int8" else 0)
        worst = max(abs(mine - plain) for mine, plain in zip(losses, expected, strict=True))
        assert worst <= (CLOSE if name == "int8" else 0) * (expected[0] - expected[-1])
