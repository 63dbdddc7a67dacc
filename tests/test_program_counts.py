"""What a known call takes as a program (collectives/programs.py): launches, messages, Python's calls, torch's ops.

It is counted without a GPU: neither codecs nor messages do anything here, but note that they were asked to.
"""

import contextlib
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire
from ranks import RankPool
from replicas import Given, Group, Shapes, backward, draw, wrap
from rowed import RowedTransport, rowed
from thinwire.kernels import rows

WORLDS = (2, 4)
LENGTHS = (1000, 1_000_000)
EXPECTED = {  # launches of codecs, messages, and the most calls of Python functions
    **{"two_phase": (3, 2, 30), "one_shot": (2, 1, 26), "broadcast": (2, 1, 24)},
    **dict.fromkeys(("reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single"), (2, 1, 23)),
}
MOST_OF_BUCKET = 12  # launches and messages, of two lanes of which one has feedback
LAUNCHES = ("encoder", "recoder", "decoder", "scanner")
MESSAGES = ("all_to_all", "all_gather", "broadcast", "exchange_rows")


@contextlib.contextmanager
def noting() -> Iterator[list[str]]:
    """Calls are programs whose launches and messages are noted, and do nothing."""
    noted: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *args, **given: noted.append(name)

    made = {name: lambda *args, name=name: note(name) for name in LAUNCHES}
    launches = SimpleNamespace(**made, adds_own=lambda job: True)  # what a backend has: kernels/triton/row_launch.py
    with (
        rowed(),
        mock.patch.object(rows, "_fused", return_value=launches),
        mock.patch.multiple(RowedTransport, **{name: note(name) for name in MESSAGES}),
    ):
        yield noted


def calls_of(group: Group, numel: int) -> dict[str, Callable[[], Any]]:
    """Every verb that has a program of its own."""
    x = torch.ones(numel)
    whole = torch.ones(numel * group.size())
    verb: Any = {"group": group, "algorithm": "compressed"}
    return {
        "two_phase": partial(thinwire.all_reduce, x, group=group, algorithm="two_phase"),
        "one_shot": partial(thinwire.all_reduce, x, group=group, algorithm="one_shot"),
        "reduce_scatter_tensor": partial(thinwire.reduce_scatter_tensor, x, whole, **verb),
        "all_gather_into_tensor": partial(thinwire.all_gather_into_tensor, whole, x, **verb),
        "all_to_all_single": partial(thinwire.all_to_all_single, whole, whole.clone(), **verb),
        "broadcast": partial(thinwire.broadcast, x, 0, **verb),
    }


class Ops(TorchDispatchMode):
    """Notes what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def python_calls(call: Callable[[], Any]) -> int:
    """How many functions of Python's a call runs, those of the interpreter's own not counted."""
    count = 0

    def saw(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()  # what is collected meanwhile, as users of a room, may tell others of its end
    sys.setprofile(saw)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def taken(group: Group, numel: int) -> dict[str, tuple[int, int, list[str], int]]:
    """(launches, messages, torch's operations, Python's calls) of a call that is known, by verb."""
    found = {}
    with noting() as noted:
        for name, call in calls_of(group, numel).items():
            for _ in range(3):
                call()
            noted.clear()
            assert call() is None
            counts = Counter(noted)
            with Ops() as ops:
                call()
            launches = sum(counts[each] for each in LAUNCHES)
            found[name] = launches, counts.total() - launches, ops.names, python_calls(call)
    return found


def test_a_known_call_takes_few_launches_whatever_the_world_and_the_length(ranks: RankPool) -> None:
    """On rank 0, from which the broadcast comes: others have nothing to encode then."""
    found = {(world, numel): ranks(world).run(taken, numel)[0] for world in WORLDS for numel in LENGTHS}
    for verb, (launches, messages, most) in EXPECTED.items():
        for case, by_verb in found.items():
            assert by_verb[verb][:3] == (launches, messages, []), f"{verb} {case}"
        calls = {case: by_verb[verb][3] for case, by_verb in found.items()}
        assert len(set(calls.values())) == 1, f"{verb}: {calls}"
        assert max(calls.values()) <= most, f"{verb}: {calls}"


def taken_by_bucket(group: Group, count: int, algorithm: str) -> dict[str, int]:
    """Launches and messages of a step of one bucket of so many parameters: weights, and biases that are exempt."""
    shapes: Shapes = {f"{kind}{i}": (40, 50)[: 2 - (kind == "b")] for i in range(count // 2) for kind in "wb"}
    with noting() as noted:
        model = wrap(Given(shapes), group, cap=4096)
        thinwire.compress_ddp(model, "lloyd2", feedback="classic", algorithm=algorithm, measure_every=0)
        for step in range(4):
            noted.clear()
            backward(model, draw(group.rank(), step, shapes))
    return dict(Counter(noted))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_phase"])
def test_a_bucket_takes_few_launches_whatever_its_parameters(ranks: RankPool, world: int, algorithm: str) -> None:
    few, many = (ranks(world).run(taken_by_bucket, count, algorithm) for count in (4, 40))
    assert few == many
    for counts in few:
        assert counts["encoder"] == 2  # weights and biases: there are two lanes
        assert sum(counts.values()) <= MOST_OF_BUCKET


def asked_in_units(group: Group, count: int) -> list[str]:
    """What a bucket of so many weights in Adam's units asks of torch."""
    shapes: Shapes = {f"w{i}": (40, 50) for i in range(count)}
    called = mock.patch.object(torch.futures.Future, "then", side_effect=AssertionError("a GPU's callback costs much"))
    with noting(), called:
        model = wrap(Given(shapes), group, cap=4096)
        optimizer = torch.optim.Adam(model.parameters())
        handle = thinwire.compress_ddp(model, "lloyd2", optimizer=optimizer, measure_every=0)
        for step in range(4):
            with Ops() as ops:
                backward(model, draw(0, step, shapes))
            optimizer.step()
        parameter = weakref.ref(next(model.parameters()))
        del model, optimizer
        gc.collect()
        assert parameter() is None or handle.closed, "kept by the bucket"
    return [name for name in ops.names if "foreach" in name]


def test_units_take_few_operations_and_no_callback(ranks: RankPool) -> None:
    few, many = (ranks(2).run(asked_in_units, count)[0] for count in (2, 20))
    assert few == many
    assert len(few) == 7, few  # five for the roots, one to divide, one to multiply


def through_a_group(group: Group) -> dict[str, int]:
    """What a sum by a rule of a group costs beside the verb that the group calls, and a message of a known kind."""
    x, peer, found = torch.ones(1000), 1 - group.rank(), {}
    with noting() as noted:
        mine: Any = dist.new_group(backend="cpu:thinwire", pg_options=thinwire.GroupOptions("all_reduce=int8"))
        verb = partial(thinwire.all_reduce, x, group=mine.inner, algorithm="one_shot")
        options: Any = dist.AllreduceOptions()
        options.asyncOp = False
        for name, call in {"verb": verb, "rule": partial(mine.allreduce, [x], options)}.items():
            call()
            noted.clear()
            found[name] = python_calls(call) + 1000 * len(noted)
    works: list[Any] = []

    def message() -> None:
        works.append(thinwire.isend(x, peer))

    for _ in range(2):
        works.append(thinwire.irecv(torch.empty(1000), peer))
        found["message"] = python_calls(message)
    for work in works:
        work.wait()
    return found


def test_a_group_costs_few_calls_of_python_more(ranks: RankPool) -> None:
    """The same launches and messages; a group's rule is found once, and what describes a message is made once."""
    found = ranks(2).run(through_a_group)[0]
    assert found["verb"] < found["rule"] <= found["verb"] + 7, found
    assert found["message"] <= 100, found
