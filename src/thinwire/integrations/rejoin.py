"""A DiLoCo run that outlives its processes: a file per rank, and how ranks that start agree on where to go on.

A file holds the state after a round, and takes the place of the one before in one move: a process that is killed leaves
the old one or the new one. Ranks that start go on from the newest state that any of them has.
"""

import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from thinwire.collectives import all_gather
from thinwire.errors import CollectiveError
from thinwire.integrations.checkpoint import State, spread


class Told(NamedTuple):
    """What a rank says about its file when it starts."""

    rounds: int  # -1: it has none; -2: what lies there is none
    world: int  # in which it was written
    place: int  # a hash of machine and path


def write(path: Path, state: State) -> None:
    """Put a state in the place of the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")  # what a killed process left of it is written over
    with new.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read(path: Path) -> State | None:
    """The state in a file, on the CPU; None where there is no file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # raises now rather than after the first round
        if not path.exists():
            return None
        found: State = torch.load(path, map_location="cpu", weights_only=True)
        _saved(found)
        return found
    except Exception as error:  # of any kind, by what the bytes look like
        raise CollectiveError(
            f"snapshot={str(path)!r}: expected what DiLoCo wrote there, got {type(error).__name__}: {error}; remove "
            "the file, and this rank goes on from the others' state"
        ) from error


def _saved(state: State) -> tuple[int, int]:
    """After how many rounds, and in which world."""
    return state["compression"]["step"], state["compression"]["world"]


def meet(path: Path, group: dist.ProcessGroup, device: torch.device) -> tuple[State | None, list[Told]]:
    """This rank's state, and what all ranks say, in rank order; raises on all of them where a file is of no use."""
    state = None
    wrong: CollectiveError | None = None
    try:
        state = read(path)
        saved = (-1, 0) if state is None else _saved(state)
    except CollectiveError as error:
        wrong = error
        saved = (-2, 0)
    place = zlib.crc32(f"{socket.gethostname()}:{path.resolve()}".encode())
    mine = torch.tensor([*saved, place], dtype=torch.int64, device=device)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    all_gather(rows, mine, group, algorithm="plain")
    told = [Told(*row.tolist()) for row in rows]
    if wrong is not None:
        raise wrong
    bad = [rank for rank, one in enumerate(told) if one.rounds == -2]
    if bad:
        raise CollectiveError(
            f"snapshot: expected what DiLoCo wrote, got something else on rank {bad[0]}, which says more"
        )
    if len({one.place for one in told}) < len(told):
        raise CollectiveError(
            f"snapshot={str(path)!r}: expected a file of its own for every rank, got one that several write: put the "
            "rank into the name"
        )
    return state, told


def agree(
    state: State | None, told: Sequence[Told], group: dist.ProcessGroup, device: torch.device
) -> tuple[State, int]:
    """The state that this rank goes on from, on all ranks the newest one, and the rank that had it.

    What a rank still owed is its own, and is kept where its file is as new; what was sent since must not be sent twice.
    EF21 remembers what all ranks have sent, and begins anew unless all are there with the newest.
    """
    rank = group.rank()
    newest = max(one.rounds for one in told)
    source = [one.rounds for one in told].index(newest)
    head = spread(_without_own(state) if rank == source and state is not None else None, source, group, device)
    own: Mapping[str, Any] = {}
    if state is not None and told[rank].rounds == newest:
        own = next(iter(state["compression"]["ranks"].values()))
    if any((one.rounds, one.world) != (newest, group.size()) for one in told):
        lost = {name for name, kind in head["compression"]["feedback"] if kind == "ef21"}
        own = {name: values for name, values in own.items() if name not in lost}
        head["compression"]["mean"] = {}
    head["compression"] |= {"world": group.size(), "ranks": {str(rank): own}, "errors": {str(rank): []}}
    return head, source


def _without_own(state: State) -> State:
    """What all ranks share of a state."""
    shared = {name: value for name, value in state.items() if name != "inner"}
    return {**shared, "compression": {**state["compression"], "ranks": {}, "errors": {}}}
