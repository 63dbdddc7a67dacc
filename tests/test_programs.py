"""Calls as programs (collectives/programs.py), which NCCL runs: they give the bytes that operations give.

Rows travel over gloo here (tests/rowed.py), so that no GPU is needed. tests/test_program_counts.py counts what a
program takes.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

import test_nccl
import thinwire
from cases import CPU, assert_same, digest, on_ranks, thorough, worlds
from ranks import RankPool
from replicas import Group
from rowed import RowedTransport, anew, rowed
from test_collectives import Case, reduce_cases, reduced_range
from test_nccl import OWN, Kind, Options, Outputs, Place, hierarchies, in_flight, in_units, layouts, means, verbs
from thinwire.collectives import channel, chunks, programs
from thinwire.collectives.programs import Workspace
from thinwire.errors import CollectiveError

BF16 = torch.bfloat16
SHARED = ("one_shot", "two_phase")


def links() -> list[RowedTransport]:
    """All transports in use, inside `rowed`."""
    states = list(channel._groups.values())
    return [link for state in states for link in state.transports.values() if isinstance(link, RowedTransport)]


def on_both(
    group: Group, turns: int, run: Callable[..., Outputs], *args: Any
) -> tuple[list[str], dict[str, str], int, int]:
    """Where programs differ from operations, digests of what they made, and their messages: in rows, bytes in pairs."""
    place = Place(group, CPU)
    with anew():
        wanted = run(place, *args)
    wrong = []
    with rowed():
        for turn in range(turns):
            found = run(place, *args)
            assert list(found) == list(wanted)
            for name, want in wanted.items():
                try:
                    assert_same(found[name], want, f"{name}, turn {turn}")
                except AssertionError as error:
                    wrong.append(str(error))
        rows = sum(len(link.log) for link in links())
        pairs = sum(link.sent for link in links())  # by operations alone
    return wrong, {name: digest(x) for name, x in found.items() if not name.startswith(OWN)}, rows, pairs


def check_both(ranks: RankPool, world: int, turns: int, run: Callable[..., Outputs], *args: Any) -> tuple[int, int]:
    """Run by all ranks: the bytes of operations, and the same on all ranks. Gives rank 0's messages."""
    answers = ranks(world).run(on_both, turns, run, *args)
    wrong = [f"rank {rank}: {line}" for rank, (lines, *_) in enumerate(answers) for line in lines]
    assert not wrong, f"{len(wrong)} outputs differ from those of operations\n" + "\n".join(wrong[:40])
    differing = [name for name in answers[0][1] if len({shared[name] for _, shared, *_ in answers}) > 1]
    assert differing == [], "ranks differ"
    return answers[0][2:]


SHORT: tuple[tuple[int, float | str], ...] = ((1, "avg"), (1003, "sum"), (7, -3.0))
KINDS = [
    *(Kind(codec, n, factor=f) for codec, few in (("int8", 3), ("lloyd4", 2)) for n, f in SHORT[:few]),
    *(Kind(codec, 1003) for codec in ("none", "bf16", "lloyd1:scale=unbiased", "trellis2", "e4m3:block=64")),
    *(Kind(codec, 511, BF16, "avg") for codec in ("none", "int3:block=40,mode=affine,rounding=stochastic")),
    Kind("none", 5003, torch.float16, -0.25),
    Kind("int4:block=32", 5003, factor="avg"),
]


@pytest.mark.parametrize(("world", "count"), [(2, 99), (3, 5), *thorough((4, 5), (3, 99), (4, 99))])
def test_every_verb_has_the_bytes_of_operations(ranks: RankPool, world: int, count: int) -> None:
    kinds = KINDS[:count] if world == 3 else KINDS[-count:]
    rows, _ = check_both(ranks, world, 2, verbs, kinds)
    assert rows == 2 * len(kinds) * (11 + world)  # two sums in two phases, a broadcast from every rank, and 7 more


@worlds(3, rare=[2])
def test_what_has_no_program_has_the_bytes_of_operations(ranks: RankPool, world: int) -> None:
    kinds = [Kind("int8", 0), Kind("none", 7, torch.float64), Kind("bysize(small=bf16; large=int4; min_numel=9)", 11)]
    check_both(ranks, world, 1, verbs, kinds)


@pytest.mark.parametrize(("world", "run"), [(3, layouts), (2, in_flight), (2, in_units), *thorough((3, in_flight))])
def test_layouts_and_calls_under_way(ranks: RankPool, world: int, run: Callable[..., Outputs]) -> None:
    check_both(ranks, world, 1, run)


def test_sums_on_a_mesh_have_the_bytes_of_operations(ranks: RankPool) -> None:
    rows, _ = check_both(ranks, 4, 1, hierarchies)
    assert rows >= 5 * 3 * 3  # fp32, of each pair of codecs and length: inside, across, inside


@contextlib.contextmanager
def short_wires() -> Iterator[None]:
    """Programs cut messages into chunks of half a kilobyte, and so do operations, in the same places."""

    def tiny(numel: int, wire: int, world: int, shards: int, unit: int) -> chunks.Chunking:
        return programs.stream_chunking(numel, wire, shards, unit)

    with mock.patch.multiple(chunks, choose_chunking=tiny, _WHOLE=4), mock.patch.multiple(programs, MAX_WIRE_BYTES=512):
        yield


def in_chunks(place: Place, run: Callable[..., Outputs], *args: Any) -> Outputs:
    with short_wires():
        return run(place, *args)


def sums(place: Place, kinds: Sequence[Kind]) -> Outputs:
    """Sums in place of every kind."""
    found = {}
    for kind in kinds:
        for name, (call, outputs) in test_nccl.sums_of(place, kind, 5).items():
            if "reduce_scatter" not in name:
                call()
                found[f"{name}, {kind}"] = torch.cat(outputs)
    return found


LONG = [Kind("int8", 2001, factor="avg"), Kind("lloyd4", 4001), Kind("none", 1500, BF16)]


@worlds(3, rare=[2, 4])
def test_chunks_have_the_bytes_of_the_same_chunks_of_operations(ranks: RankPool, world: int) -> None:
    rows, _ = check_both(ranks, world, 2, in_chunks, sums, LONG)
    assert rows > 2 * len(LONG) * 2 * (1 + 2) * 4  # of more than four chunks each


def rowed_cases(group: Group, cases: Sequence[Case]) -> tuple[list[str], list[torch.Tensor]]:
    with rowed(), short_wires():
        return reduce_cases(group, cases, CPU)


@worlds(2, rare=[3, 4])
def test_chunks_are_within_the_error_and_the_same_on_all_ranks(ranks: RankPool, world: int) -> None:
    cases = [Case(codec, 2003, a, "avg") for codec in ("none", "int8", "int4:block=32") for a in SHARED]
    answers = ranks(world).run(rowed_cases, cases)
    for case, got, *digests in zip(cases, answers[0][1], *(answer[0] for answer in answers), strict=True):
        assert len(set(digests)) == 1, f"ranks differ: {case}"
        reduced_range(case, world).assert_holds(got, str(case))


BACKWARDS = ("e", "d", "c", "b", "a")  # biases between weights
ONE = 64.0  # kilobytes: one bucket
CLASSIC = {"codec": "lloyd2", "feedback": "classic"}
EF21 = {"codec": "lloyd2", "feedback": "ef21"}
INT8 = {"codec": "int8", "feedback": "none"}
TRAININGS: list[tuple[Options, dict[str, Any]]] = [
    (INT8, {"poisoned": 3}),
    (CLASSIC, {"poisoned": 3}),
    (EF21, {"poisoned": 3, "cap": ONE, "ready": BACKWARDS}),  # memories of what is set aside
    ({**CLASSIC, "residual_dtype": BF16}, {"cap": ONE, "ready": BACKWARDS}),
    ({"codec": "int4", "feedback": "classic", "exempt": "none"}, {}),
    ({"codec": "lloyd2", "feedback": "none"}, {}),  # in two phases the first has another scale
    (CLASSIC, {"dtypes": BF16, "poisoned": 3}),
    (EF21, {"dtypes": BF16}),
    ({**INT8, "policy": {"a": "lloyd4"}}, {"cap": ONE, "ready": ("c", "d", "a", "e", "b")}),  # in two stretches
    ({**CLASSIC, "policy": {"a": "int4"}}, {"cap": ONE}),
]


def trained(place: Place, algorithm: str, table: Sequence[tuple[Options, dict[str, Any]]]) -> Outputs:
    found = {}
    for options, how in table:
        for name, x in means(place, {"algorithm": algorithm, **options}, **how).items():
            found[f"{OWN if name.startswith(OWN) else ''}{options}, {how}, {name}"] = x
    return found


@pytest.mark.parametrize(
    ("world", "algorithm", "count"),
    [*((2, "one_shot", 99), (3, "two_phase", 5)), *thorough((4, "auto", 2), (3, "two_phase", 99), (2, "two_phase", 3))],
)
def test_ddp_has_the_means_and_memories_of_operations(ranks: RankPool, world: int, algorithm: str, count: int) -> None:
    table = TRAININGS[-count:]
    rows, _ = check_both(ranks, world, 1, trained, algorithm, table)
    assert rows >= 5 * (len(table) - 1)  # of every step but the first, which is measured


def test_chunks_of_ddp_have_the_means_and_memories_of_operations(ranks: RankPool) -> None:
    check_both(ranks, 2, 1, in_chunks, trained, "two_phase", TRAININGS[:3])


def test_ddp_on_a_mesh_has_the_means_of_operations(ranks: RankPool) -> None:
    rows, _ = check_both(ranks, 4, 1, test_nccl.mesh_trainings)
    assert rows > 0


def test_scratch_that_grows_is_held_by_nobody() -> None:
    space = Workspace(CPU)
    small, large = (mock.Mock(nbytes=n, split=lambda buffer: buffer[:8]) for n in (64, 4096))
    space.views(small)
    held = weakref.ref(space.buffer)
    space.views(large)
    assert held() is None
    assert space.views(small).data_ptr() == space.views(large).data_ptr() == space.buffer.data_ptr()


@on_ranks(2, gives=["4.00"])
def test_what_was_remembered_is_not_misused(group: Group) -> list[str]:
    """What goes wrong when a call whose like was made before is given something else."""
    with rowed():
        how: Any = {"group": group, "codec": "int8", "algorithm": "compressed", "step": 0}
        out = torch.zeros(64 * group.size())
        for _ in range(2):
            thinwire.all_gather_into_tensor(out, torch.ones(64), **how)
        with pytest.raises(CollectiveError, match="got a meta tensor"):
            thinwire.all_gather_into_tensor(out, torch.ones(64, device="meta"), **how)
        leaf = torch.nn.Parameter(torch.ones(64))
        for _ in range(2):
            thinwire.all_reduce(leaf, group=group, codec="int8", algorithm="one_shot", step=0)
        lost = mock.patch.object(RowedTransport, "all_gather", side_effect=RuntimeError("lost"))
        with lost, pytest.raises(RuntimeError, match="lost"):
            thinwire.all_reduce(torch.ones(64), group=group, codec="int8", algorithm="one_shot", step=0)
        with pytest.raises(CollectiveError, match="RuntimeError: lost"):
            thinwire.all_reduce(torch.ones(64), group=group, codec="int8", algorithm="one_shot", step=0)
    return [f"{leaf.detach()[0].item():.2f}"]
