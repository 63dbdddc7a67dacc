"""Several ranks on NCCL: every verb, meshes, streams, DDP, hooks, compiled functions, ranks that disagree.

Each rank has a GPU of its own, or all share one, which NCCL 2.30 allows with NCCL_MULTI_RANK_GPU_ENABLE=1 (and which is
slow without MPS: nvidia-cuda-mps-control -d). What can be compared with the CPU is run twice by the same ranks, over
NCCL and over gloo, and must give the same bytes: it is so short that neither cuts it into chunks. What is longer is
held against exact sums.
"""

import contextlib
import ctypes
import functools
import itertools
import math
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

import thinwire
from cases import CPU, assert_same, decoded, digest, given, no_host_sync, on_ranks, seeded, shifted, wire_of
from ranks import RankPool
from replicas import CAP, READY, Dtypes, Given, Group, backward, draw, flat, join_buckets, residuals, wrap
from test_collectives import op_of
from test_ddp_checkpoint import Run, interrupted
from test_hooks import HOOKS
from test_program_counts import python_calls
from thinwire import DisagreementError, Work, compress_ddp, functional as F  # noqa: N812
from thinwire.collectives import groups
from thinwire.collectives.channel import channel_of
from thinwire.collectives.work import new_future
from thinwire.integrations.choice import moments

Device = torch.device
Options = Mapping[str, Any]  # of compress_ddp
Outputs = dict[str, Tensor]  # on the CPU, by what they are
Call = Callable[..., Work | None]
Calls = dict[str, tuple[Call, list[Tensor]]]  # a verb with its arguments, and its outputs
SUMS: tuple[Any, ...] = ("two_phase", "one_shot")
SHARED_FROM = 23000  # the NCCL, 2.30.0, from which ranks may share a GPU
LATE = 30_000_000  # cycles: work that has not run when the host comes to the next line


# --- where they can run -----------------------------------------------------------------------------------------------
def nccl_version() -> int:
    """Of the library that is loaded, which need not be the one torch was built with: 2.30.1 is 23001."""
    found = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(found))
    except OSError:  # it is a part of torch's own library
        major, minor, patch = torch.cuda.nccl.version()[:3]
        return int(major * 10_000 + minor * 100 + patch)
    return found.value


def lacking(world: int) -> str:
    """What `world` ranks on NCCL lack here, or nothing."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if not dist.is_nccl_available():
        return "needs a torch with NCCL"
    count = torch.cuda.device_count()
    if count >= world:
        return ""
    few = f"{count} GPU{'s' if count > 1 else ''} for {world} ranks"
    version = nccl_version()
    if version < SHARED_FROM:
        numbers = (version // 10_000, version // 100 % 100, version % 100)
        return f"{few}, and NCCL {'.'.join(map(str, numbers))} lets no ranks share one: needs 2.30 or newer"
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return f"{few}: needs NCCL_MULTI_RANK_GPU_ENABLE=1"
    return ""


def on_worlds(*worlds: int) -> pytest.MarkDecorator:
    marks = {w: (pytest.mark.cuda, pytest.mark.skipif(bool(lacking(w)), reason=lacking(w))) for w in worlds}
    return pytest.mark.parametrize("world", [pytest.param(world, marks=marks[world]) for world in worlds])


each_world = on_worlds(2, 4)


class Place(NamedTuple):
    """A group of all ranks, and where this rank's tensors are."""

    group: Group
    device: Device

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def world(self) -> int:
        return self.group.size()


@functools.lru_cache(maxsize=1)
def on_nccl(group: Group) -> Place:
    """Made once per rank, as in a job."""
    shared = torch.cuda.device_count() < group.size()
    if shared:
        os.environ.setdefault("NCCL_MAX_CTAS", "8")  # four ranks would take more of the GPU than there is, and hang
    device = torch.device("cuda", 0 if shared else group.rank())
    torch.cuda.set_device(device)
    return Place(dist.new_group(backend="nccl"), device)


def two_nodes(place: Place) -> DeviceMesh:
    """A mesh of two nodes of two ranks."""
    backend = "gloo" if place.device.type == "cpu" else "nccl"
    rows = torch.arange(4).view(2, 2)
    made = [[dist.new_group(ranks, backend=backend) for ranks in lines.tolist()] for lines in (rows.t(), rows)]
    own = [made[0][place.rank % 2], made[1][place.rank // 2]]
    return DeviceMesh.from_group(own, place.device.type, rows, mesh_dim_names=("node", "rank"))


# --- comparing --------------------------------------------------------------------------------------------------------
OWN = "own "  # begins the name of an output that ranks do not share


def on_both(group: Group, run: Callable[..., Outputs], *args: Any) -> tuple[list[str], dict[str, str]]:
    """Where NCCL's bytes are not the CPU's, and digests of the outputs that ranks share."""
    found, wanted = run(on_nccl(group), *args), run(Place(group, CPU), *args)
    assert list(found) == list(wanted)
    wrong = []
    for name, want in wanted.items():
        try:
            assert_same(found[name], want, name)
        except AssertionError as error:
            wrong.append(str(error))
    return wrong, {name: digest(x) for name, x in found.items() if not name.startswith(OWN)}


def check_both(ranks: RankPool, world: int, run: Callable[..., Outputs], *args: Any) -> None:
    """Run on both by all ranks: the CPU's bytes, and the same on all ranks."""
    answers = ranks(world).run(on_both, run, *args)
    wrong = [f"rank {rank}: {line}" for rank, (lines, _) in enumerate(answers) for line in lines]
    assert not wrong, f"{len(wrong)} outputs differ from the CPU's\n" + "\n".join(wrong[:40])
    differing = [name for name in answers[0][1] if len({shared[name] for _, shared in answers}) > 1]
    assert differing == [], "ranks differ"


# --- every verb -------------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=1024)
def drawn(numel: int, rank: int, dtype: torch.dtype, device: Device, whole: bool) -> Tensor:
    """A rank's numbers, which may all be small and whole."""
    x = torch.arange(numel) * (rank + 3) % 17 - 8 if whole else given(numel, rank, dtype)
    return x.to(device, dtype)


class Kind(NamedTuple):
    """What calls have in common."""

    codec: str
    numel: int
    dtype: torch.dtype = torch.float32
    factor: float | str = "sum"
    plain: bool = False  # by torch itself, of whole numbers, whose sums are exact in any order

    def drawn(self, place: Place, numel: int) -> Tensor:
        """This rank's numbers, by a copy on the GPU."""
        return drawn(numel, place.rank, self.dtype, place.device, self.plain).clone()

    def how(self, place: Place, step: int, **more: Any) -> dict[str, Any]:
        """Keywords of a call."""
        algorithm = "plain" if self.plain else "compressed"
        return {"group": place.group, "codec": self.codec, "step": step, "algorithm": algorithm, **more}

    def empty(self, place: Place, *numels: int) -> list[Tensor]:
        """Outputs that hold NaN."""
        return [torch.full((numel,), math.nan, dtype=self.dtype, device=place.device) for numel in numels]


def sums_of(place: Place, kind: Kind, step: int) -> Calls:
    """The verbs that add."""
    op = op_of(kind.factor)
    (part,) = kind.empty(place, kind.numel)
    whole = kind.drawn(place, kind.numel * place.world)
    scatter = partial(thinwire.reduce_scatter_tensor, part, whole, op, **kind.how(place, step))
    found: Calls = {f"{OWN}reduce_scatter_tensor": (scatter, [part])}
    for algorithm in ("plain",) if kind.plain else SUMS:
        how = kind.how(place, step, algorithm=algorithm)
        x = kind.drawn(place, kind.numel)
        found[f"all_reduce {algorithm}"] = partial(thinwire.all_reduce, x, op, **how), [x]
        xs = [kind.drawn(place, numel) for numel in (kind.numel // 2, 0, 1, kind.numel)]
        found[f"all_reduce_coalesced {algorithm}"] = partial(thinwire.all_reduce_coalesced, xs, op, **how), xs
    return found


def copies_of(place: Place, kind: Kind, step: int) -> Calls:
    """The verbs that copy to all ranks."""
    how = kind.how(place, step)
    sizes = [(kind.numel, 1, kind.numel + 7, 0)[rank] for rank in range(place.world)]
    (whole,) = kind.empty(place, kind.numel * place.world)
    parts = kind.empty(place, *sizes)
    mine = kind.drawn(place, sizes[place.rank])
    gather = partial(thinwire.all_gather_into_tensor, whole, kind.drawn(place, kind.numel), **how)
    found: Calls = {
        "all_gather_into_tensor": (gather, [whole]),
        "all_gather uneven": (partial(thinwire.all_gather, parts, mine, **how), parts),
    }
    for source in range(place.world):
        x = kind.drawn(place, kind.numel)
        found[f"broadcast from {source}"] = partial(thinwire.broadcast, x, source, **how), [x]
    return found


def exchanges_of(place: Place, kind: Kind, step: int) -> Calls:
    """The verbs that go from every rank to every rank."""
    how = kind.how(place, step)

    def rows(source: int, target: int) -> int:
        return (0, kind.numel, 1, kind.numel // 2, kind.numel + 3)[(source * 7 + target * 3) % 5]

    sent = [rows(place.rank, other) for other in range(place.world)]
    came = [rows(other, place.rank) for other in range(place.world)]
    even, uneven = kind.empty(place, kind.numel * place.world, sum(came))
    parts = kind.empty(place, *came)
    whole = kind.drawn(place, kind.numel * place.world)
    mixed, single = kind.drawn(place, sum(sent)), thinwire.all_to_all_single
    lists = partial(thinwire.all_to_all, parts, list(kind.drawn(place, sum(sent)).split(sent)), **how)
    return {
        f"{OWN}all_to_all_single": (partial(single, even, whole, **how), [even]),
        f"{OWN}all_to_all_single uneven": (partial(single, uneven, mixed, came, sent, **how), [uneven]),
        f"{OWN}all_to_all": (lists, parts),
    }


def calls_of(place: Place, kind: Kind, step: int = 3) -> Calls:
    """Every verb."""
    return sums_of(place, kind, step) | copies_of(place, kind, step) | exchanges_of(place, kind, step)


def verbs(place: Place, kinds: Sequence[Kind]) -> Outputs:
    """The outputs of every verb, of every kind."""
    found = {}
    for kind in kinds:
        if place.device.type == "cuda":
            for call, _ in calls_of(place, kind, step=2).values():
                call()  # the next one of its kind finds its kernels by address
        for name, (call, outputs) in calls_of(place, kind).items():
            assert call() is None
            found[f"{name}, {kind}"] = flat(outputs).cpu()
    return found


HALVES = (torch.bfloat16, torch.float16)
CODECS = {
    "floats": ("none", "bf16", "fp16", "e4m3", "e5m2"),
    "integers": ("int8", "int4:block=32", "int2", "int3:block=40,mode=affine", "int8:rounding=stochastic"),
    "lloyds": ("lloyd4", "lloyd2", "lloyd1:block=64", "lloyd1:scale=unbiased", "lloyd3:block=32,rotate=false"),
    "trellises": ("trellis2", "trellis3:block=64"),
}
IN_HALVES = ("none", "bf16", "int8", "int4:mode=affine,rounding=stochastic", "lloyd4")
SHORT: tuple[tuple[int, float | str], ...] = ((0, "sum"), (1, "avg"), (7, "sum"), (1003, -3.0))
KINDS: dict[str, list[Kind]] = {
    **{name: [Kind(codec, n, factor=f) for codec in codecs for n, f in SHORT] for name, codecs in CODECS.items()},
    "halves": [Kind(c, n, dtype, f) for c in IN_HALVES for dtype in HALVES for n, f in ((1, "sum"), (1003, "avg"))],
    "longer": [Kind(c, n) for c in ("none", "int8", "lloyd4") for n in (16_411, 100_003)],
    "torch's own": [
        Kind("int8", n, dtype, f, plain=True)
        for n, f in ((1, "sum"), (1003, "avg"))
        for dtype in (torch.float32, torch.bfloat16)
    ],
    "by size": [Kind("bysize(small=bf16; large=int4; min_numel=500)", n) for n in (101, 1003)],
}


@each_world
@pytest.mark.parametrize("kinds", KINDS)
def test_every_verb_has_the_bytes_of_the_cpu(ranks: RankPool, world: int, kinds: str) -> None:
    check_both(ranks, world, verbs, KINDS[kinds])


def premultiplied(place: Place) -> Outputs:
    """torch's own sums of whole numbers times a factor, and what `auto` makes of whole numbers with an exact codec."""
    found = {}
    for factor in (0.5, -3.0):
        x = Kind("int8", 1003, plain=True).drawn(place, 1003)
        thinwire.all_reduce(x, op_of(factor), place.group, codec="int8", algorithm="plain")
        found[f"times {factor}"] = x.cpu() + 0.0  # NCCL multiplies first, which decides the sign of zero sums
    for n in (1, 5003):
        x = Kind("none", n, plain=True).drawn(place, n)
        thinwire.all_reduce(x, group=place.group, codec="none", algorithm="auto")
        found[f"auto of {n}"] = x.cpu()
    return found


# --- long messages ----------------------------------------------------------------------------------------------------
PIECE = 1 << 16  # elements whose error is looked at together, so that no wrong chunk hides among right ones
LENGTHS = ((1 << 18) + 1, 1_000_003, 16_777_259, (1 << 26) + 3)
LONG_CODECS = ("int8", "lloyd4")


def gaussian(place: Place, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(place.device).manual_seed(numel + place.rank)
    return torch.randn(numel, generator=generator, device=place.device).to(dtype)


def lost(got: Tensor, want: Tensor) -> float:
    """The error's share of the energy, in the piece where that is largest; the last piece overlaps another."""
    pieces = [x[: x.numel() // PIECE * PIECE] for x in (got, want)]
    pairs = [(pieces[0].view(-1, PIECE), pieces[1].view(-1, PIECE)), (got[None, -PIECE:], want[None, -PIECE:])]
    shares = [((y.double() - x).square().sum(1) / x.double().square().sum(1)).max() for y, x in pairs]
    return float(torch.stack(shares).max())


def long_sums(
    group: Group, algorithms: Sequence[Any], lengths: Sequence[int], dtype: torch.dtype
) -> dict[tuple[str, str, int], tuple[float, bool]]:
    """(error, whether this rank has rank 0's bytes) by codec, algorithm and length."""
    place = on_nccl(group)
    members = two_nodes(place) if "hierarchical" in algorithms else place.group
    found = {}
    for numel in lengths:
        x = gaussian(place, numel, dtype)
        want = x.double()
        dist.all_reduce(want, group=place.group)
        for codec in LONG_CODECS:
            for algorithm in algorithms:
                y = x.clone()
                thinwire.all_reduce(y, group=members, codec=codec, algorithm=algorithm, step=numel)
                first = y.clone()
                dist.broadcast(first, 0, group=place.group)
                found[codec, algorithm, numel] = lost(y, want), torch.equal(first, y)
    return found


@functools.cache
def lost_once(codec: str) -> float:
    """What one rounding loses of Gaussian numbers."""
    x = torch.randn(PIECE, generator=seeded(6))
    coder = thinwire.codec(codec)
    return lost(decoded(coder, wire_of(coder, x), PIECE), x)


def bound(codec: str, roundings: int, dtype: torch.dtype = torch.float32) -> float:
    """What so many roundings lose, and one of the dtype: errors of independent numbers are orthogonal.

    The error of a block of 128 in int8 goes with its peak squared, which varies by 0.3; of both `lost_once` and a piece
    8 sigma are allowed, for there are thousands of pieces.
    """
    slack = 1 + 8 * 0.3 * math.sqrt(2 / (PIECE / 128))
    return roundings * lost_once(codec) * slack + (torch.finfo(dtype).eps / 2) ** 2


ROUNDINGS = {"one_shot": 1, "two_phase": 2, "hierarchical": 3}


def check_long(
    ranks: RankPool, world: int, algorithms: Sequence[str], lengths: Sequence[int], dtype: torch.dtype
) -> None:
    for answer in ranks(world).run(long_sums, algorithms, lengths, dtype):
        for (codec, algorithm, numel), (error, alike) in answer.items():
            case = f"{codec} {algorithm} {numel}"
            assert alike, f"ranks differ: {case}"
            assert 0 < error <= bound(codec, ROUNDINGS[algorithm], dtype), case


@each_world
def test_long_sums_lose_what_their_roundings_lose(ranks: RankPool, world: int) -> None:
    check_long(ranks, world, SUMS, LENGTHS, torch.float32)
    check_long(ranks, world, SUMS, LENGTHS[:2], torch.bfloat16)


@on_worlds(4)
def test_long_sums_on_a_mesh_round_three_times(ranks: RankPool, world: int) -> None:
    check_long(ranks, world, ["hierarchical"], LENGTHS[:2], torch.float32)


@each_world
@on_ranks()
def test_long_copies_lose_one_rounding(group: Group) -> None:
    """Errors of the other verbs. For rank r, others have their numbers rolled on by r."""
    numel, place = 1_000_003, on_nccl(group)
    rank, world = place.rank, place.world
    mine = gaussian(place, numel)
    every = mine.new_empty(world, numel)
    dist.all_gather(list(every.unbind()), mine, group=place.group)
    rolled = torch.cat([mine.roll(other) for other in range(world)])
    others = [other for other in range(world) if other != rank]
    found = {}
    for codec in LONG_CODECS:
        how: Any = {"group": place.group, "codec": codec, "algorithm": "compressed"}
        whole = torch.empty_like(rolled)
        thinwire.all_gather_into_tensor(whole, mine, **how)
        found[f"{codec} all_gather_into_tensor"] = lost(whole, every.view(-1))
        thinwire.all_to_all_single(whole, rolled, **how)
        came = whole.view(world, numel)[others]  # what a rank keeps is exact
        found[f"{codec} all_to_all_single"] = lost(came.view(-1), every[others].roll(rank, 1).view(-1))
        part = torch.empty_like(mine)
        thinwire.reduce_scatter_tensor(part, rolled, **how)
        found[f"{codec} reduce_scatter_tensor"] = lost(part, every.sum(0).roll(rank))
        for source in range(world):
            x = mine.clone()
            thinwire.broadcast(x, source, **how)
            found[f"{codec} broadcast from {source}"] = lost(x, every[source])
    for case, error in found.items():
        assert 0 < error <= bound(case.split()[0], 1), case


# --- a mesh -----------------------------------------------------------------------------------------------------------
PAIRS: tuple[Any, ...] = ("int8", "lloyd4", ("int8", "lloyd2:block=64"), ("none", "int4"), ("bf16", "lloyd4"))


def hierarchies(place: Place) -> Outputs:
    """Sums on a mesh with one codec and with two, waited for and not, and by torch itself."""
    mesh, found = two_nodes(place), {}
    for codec in PAIRS:
        works = []
        for numel, factor in ((0, "sum"), (3, "avg"), (1511, -2.0), (60_001, "avg")):
            x = given(numel, place.rank).to(place.device)
            how: Any = {"codec": codec, "algorithm": "hierarchical", "step": numel}
            works.append((thinwire.all_reduce(x, op_of(factor), mesh, True, **how), x))
            y = given(numel, place.rank, torch.bfloat16).to(place.device)
            thinwire.all_reduce(y, op_of(factor), mesh, **how)
            found[f"{codec} of {numel} in bfloat16"] = y.cpu()
        for work, x in works:
            work.wait()
            found[f"{codec} of {x.numel()}"] = x.cpu()
    x = Kind("none", 1003, plain=True).drawn(place, 1003)
    thinwire.all_reduce(x, group=mesh, codec="int8", algorithm="plain")
    return found | {"plain": x.cpu()}


# --- layouts ----------------------------------------------------------------------------------------------------------
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.view(30, 40).t(),
    "every other": lambda x: x[::2],
    "columns": lambda x: x.view(2, 30, 20)[:, 3:9],
    "channels last": lambda x: x.view(4, 3, 10, 10).to(memory_format=torch.channels_last),
    "unaligned": lambda x: shifted(x)[1:],
    "a scalar": lambda x: x[5],
    "nothing": lambda x: x[:0],
    "complex": lambda x: torch.view_as_complex(x.view(-1, 2)),
    "strided complex": lambda x: torch.view_as_complex(x.view(-1, 2))[::3],
}


def layouts(place: Place) -> Outputs:
    """Tensors that are no row of numbers; what lies between their elements stays."""
    found = {}
    for name, lay in LAYOUTS.items():
        for algorithm in SUMS:
            x = lay(given(1200, place.rank).to(place.device))
            thinwire.all_reduce(x, group=place.group, codec="int8", algorithm=algorithm)
            found[f"{algorithm} {name}"] = real(x)
        how: Any = {"group": place.group, "codec": "int4", "algorithm": "compressed"}
        x = lay(given(1200, place.rank).to(place.device))
        thinwire.broadcast(x, place.world - 1, **how)
        found[f"broadcast {name}"] = real(x)
        if x.numel() > 1:
            x = lay(given(1200, place.rank).to(place.device))
            y = x.new_zeros(x.shape[0] * place.world, x[0].numel()).t()  # not in the order of memory either
            thinwire.all_gather_into_tensor(y, x, **how)
            found[f"all_gather_into_tensor {name}"] = real(y)
    return found


def real(x: Tensor) -> Tensor:
    """The numbers in a row on the CPU."""
    return (torch.view_as_real(x) if x.is_complex() else x).reshape(-1).cpu()


@each_world
@on_ranks()
def test_what_lies_around_a_view_stays(group: Group) -> None:
    place = on_nccl(group)
    room = torch.ones(200, 5, device=place.device)
    thinwire.all_reduce(room[:, 1:3], group=place.group, codec="int8", algorithm="two_phase")
    row = torch.ones(1001, device=place.device)
    thinwire.all_reduce(row[1:-3], group=place.group, codec="lloyd4", algorithm="one_shot")
    written = torch.cat((room[:, 1:3].reshape(-1), row[1:-3]))
    around = torch.cat((room[:, [0, 3, 4]].reshape(-1), row[[0, -3, -2, -1]]))
    assert (written != 1).all()
    assert (around == 1).all()


# --- calls under way --------------------------------------------------------------------------------------------------
def in_flight(place: Place) -> Outputs:
    """Twelve calls and more of alternating verbs and codecs, of which none is waited for before all are made.

    They are waited for in another order; every fourth call blocks, while others are under way. Inputs are let go of as
    soon as a call has been made, and their memory is asked for again and overwritten.
    """
    found = {}
    for numel in (257, 60_001):
        kinds = [Kind(codec, numel) for codec in ("int8", "lloyd4")]
        calls = [(f"{n}, {kind}", *pair) for kind in kinds for n, pair in calls_of(place, kind, numel).items()]
        calls, under_way = calls[::2] + calls[1::2], []
        if place.device.type == "cuda":
            torch.cuda._sleep(LATE)  # the host is ahead of the GPU
        while calls:
            name, call, outputs = calls.pop()
            under_way.append((name, call(async_op=len(calls) % 4 > 0), outputs))
            del call  # and its input with it
            for length in (numel, numel * place.world):
                torch.full((length,), math.nan, device=place.device)
        assert len([work for _, work, _ in under_way if work is not None]) >= 12
        stride = next(k for k in (7, 5, 3) if math.gcd(k, len(under_way)) == 1)
        for i in range(len(under_way)):
            name, work, outputs = under_way[i * stride % len(under_way)]
            assert work is None or work.wait() is True
            found[name] = flat(outputs).cpu()
    return found


@each_world
@on_ranks(gives=[])
def test_works_tell_when_they_are_done(group: Group) -> list[str]:
    """What is wrong with the works of asynchronous calls."""
    place, wrong = on_nccl(group), []
    for kind in (Kind("int8", 1003), Kind("int8", 1003, plain=True)):
        for name, (call, outputs) in calls_of(place, kind).items():
            work = call(async_op=True)
            assert isinstance(work, Work), name
            value = work.get_future().wait()
            said = {"wait": work.wait() is True, "exception": work.exception() is None}
            for holder, held in (("future", value), ("result", work.result())):
                said[holder] = len(held) == len(outputs) and all(a is b for a, b in zip(held, outputs, strict=True))
            until = time.monotonic() + 20
            while not work.is_completed() and time.monotonic() < until:
                time.sleep(0.001)
            said |= {"is_completed": work.is_completed(), "is_success": work.is_success()}
            said["numbers"] = not flat(outputs).isnan().any().item()
            wrong += [f"{name}, {kind}: {what}" for what, fine in said.items() if not fine]
    return wrong


def by_callback(place: Place) -> Outputs:
    """What a future's callback makes of the outputs."""
    found = {}
    for algorithm in SUMS:
        x = given(5003, place.rank).to(place.device)
        work = thinwire.all_reduce(x, group=place.group, async_op=True, codec="int8", algorithm=algorithm)
        found[algorithm] = work.get_future().then(lambda done: done.value()[0] * 2).wait().cpu()
    return found


# --- streams ----------------------------------------------------------------------------------------------------------
@each_world
@on_ranks(gives=[])
def test_a_new_thread_makes_a_known_call(group: Group) -> list[str]:
    """What differs where a known call is the first thing that a thread asks of CUDA."""
    place, wrong = on_nccl(group), []
    for algorithm in SUMS:
        how: Any = {"codec": "lloyd4", "algorithm": algorithm, "step": 1, "group": place.group}
        want, x = gaussian(place, 5003), gaussian(place, 5003)
        for _ in range(2):
            thinwire.all_reduce(want.copy_(x), **how)
        torch.cuda.synchronize()
        thread = threading.Thread(target=thinwire.all_reduce, args=(x,), kwargs=how)
        thread.start()
        thread.join()
        wrong += [algorithm] * (not torch.equal(x, want))
    return wrong


@each_world
@on_ranks(gives=[])
def test_calls_follow_the_streams_they_are_made_on(group: Group) -> list[str]:
    """Calls on the current stream and on another, behind work that takes long, whose results are used at once."""
    place = on_nccl(group)
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    late = 2 * LATE if place.rank == 0 else LATE  # ranks come at different times
    wrong = []
    for kind in (Kind("int8", 60_001), Kind("lloyd4", 5003)):
        wanted = verbs(place, [kind])
        ways = itertools.product(wanted, (torch.cuda.current_stream(), side), (False, True), (False, True))
        for name, stream, async_op, elsewhere in ways:
            if elsewhere and not async_op:
                continue
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(late)
                call, outputs = calls_of(place, kind)[name.split(",")[0]]  # made here: their numbers come late
                work = call(async_op=async_op)
            with torch.cuda.stream(other if elsewhere else stream):
                if work is not None:
                    work.wait()
                doubled = flat(outputs) * 2  # right after the call, which has not run
            torch.cuda.synchronize()
            if not torch.equal(doubled.cpu(), wanted[name] * 2):
                where = "side" if stream is side else "current"
                wrong.append(f"{name}: on the {where} stream, async_op {async_op}, waited for elsewhere {elsewhere}")
    return wrong


@each_world
@on_ranks(gives=[])
def test_no_call_waits_for_the_gpu(group: Group) -> list[str]:
    """Calls that make the host wait once the ranks know them."""
    place, wrong = on_nccl(group), []
    for kind in (*(Kind(c, 5003) for c in ("none", "int8", "lloyd4")), Kind("int8", 600_007)):
        for async_op in (False, True):
            for call, _ in calls_of(place, kind).values():
                call()  # the ranks compare it, and kernels are compiled
            for name, (call, _) in calls_of(place, kind).items():
                try:
                    with no_host_sync():
                        work = call(async_op=async_op)
                        if work is not None:
                            work.wait()
                except RuntimeError as error:
                    wrong.append(f"{name}, {kind}: {error}")
    torch.cuda.synchronize()
    return wrong


@each_world
@on_ranks(gives=[])
def test_no_step_of_ddp_waits_for_the_gpu(group: Group) -> list[str]:
    """Kinds of DDP whose steps make the host wait, from the fourth on."""
    place, wrong = on_nccl(group), []
    kinds: list[Options] = [{"codec": "int8"}, *({"codec": "lloyd2", "feedback": kind} for kind in ("classic", "ef21"))]
    for joined, options in itertools.product((0, 14_000), (*kinds, {"codec": "lloyd2"})):  # the last in Adam's units
        model = wrap(Given(ready=READY), place.group, device=place.device)
        optimizer = torch.optim.Adam(model.parameters())
        handle = compress_ddp(model, measure_every=0, algorithm="two_phase", optimizer=optimizer, **options)
        join_buckets(handle, joined)
        for step in range(6):
            gradients = [g.to(place.device) for g in draw(place.rank, step)]
            model.zero_grad()
            torch.cuda.synchronize()
            try:
                with no_host_sync() if step > 2 else contextlib.nullcontext():
                    model(*gradients).backward()
            except RuntimeError as error:
                wrong.append(f"{options}, joined {joined}, step {step}: {error}")
            optimizer.step()
    torch.cuda.synchronize()
    assert handle.stats().feedback == "none+moments"
    return wrong


# --- what a known call takes ------------------------------------------------------------------------------------------
TIMES = 10
TAKEN: dict[str, tuple[int, tuple[str, ...]]] = {  # launches of codecs, and messages
    "all_reduce two_phase": (3, ("all_to_all", "all_gather")),
    "all_reduce one_shot": (2, ("all_gather",)),
    f"{OWN}reduce_scatter_tensor": (2, ("all_to_all",)),
    "all_gather_into_tensor": (2, ("all_gather",)),
    f"{OWN}all_to_all_single": (2, ("all_to_all",)),
    "broadcast from 0": (2, ("broadcast",)),
}
MOST_EVENTS = 4  # recorded or waited for, by an asynchronous call and whoever waits for it
MOST_CALLS = 95  # of Python functions by a known call, torch's own among them: 93 on torch 2.15
MOST_OF_BUCKET = 13  # launches, of two lanes of which one has feedback


def profiled(call: Callable[[], object]) -> Counter[str]:
    """What torch and CUDA are asked for by so many calls, by name."""
    call()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the profiler's, about itself
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
            for _ in range(TIMES):
                call()
            torch.cuda.synchronize()
    return Counter({event.key: event.count for event in seen.key_averages()})


def some(counts: Counter[str], *parts: str) -> int:
    """How often names were seen that have one of these in them."""
    return sum(count for name, count in counts.items() if any(part in name for part in parts))


def bare_messages(place: Place) -> dict[str, Callable[[], object]]:
    """The messages of programs, by torch itself; two ranks exchange rows by a gather and a copy."""
    whole, other = (torch.zeros(4096 * place.world, dtype=torch.uint8, device=place.device) for _ in range(2))
    own = whole.view(place.world, -1)[place.rank]
    return {
        "all_to_all": partial(channel_of(place.group, place.device).transport.all_to_all, other, whole)
        if place.world == 2
        else partial(dist.all_to_all_single, other, whole, group=place.group),
        "all_gather": partial(groups.all_gather_single, whole, own, group=place.group),
        "broadcast": partial(dist.broadcast, whole, group=place.group, group_src=0),
    }


def awaited(call: Call) -> None:
    work = call(async_op=True)
    work.wait()


def too_much(call: Callable[[], object], launches: int, bare: Counter[str], events: int) -> list[str]:
    """What calls take besides so many launches of codecs, their messages, and so many events."""
    for _ in range(3):
        call()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_host_sync():
        for _ in range(TIMES):
            call()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    seen = profiled(call)
    more = seen - bare
    launched = some(seen, "LaunchKernel") - some(bare, "LaunchKernel")
    recorded = some(seen, "EventRecord", "StreamWaitEvent") - some(bare, "EventRecord", "StreamWaitEvent")
    # Asynchronous calls tell the allocator who uses their tensors, which nothing on the GPU is done for.
    operations = [name for name in more if name.startswith("aten::") and not (events and "record_stream" in name)]
    told = {
        f"{allocated} allocations": allocated > 0,
        f"{launched / TIMES} launches, not {launches}": launched != TIMES * launches,
        f"{recorded / TIMES} events, not {events}": recorded // TIMES > events,  # NCCL records one now and then
        f"operations {operations}": operations,
    }
    return [line for line, wrong in told.items() if wrong]


@each_world
@on_ranks(gives=[])
def test_a_known_call_takes_few_launches_and_nothing_else(group: Group) -> list[str]:
    kinds = [Kind("int8", 1003, factor="avg"), Kind("lloyd4", 1_000_003, factor="avg"), Kind("none", 60_001)]
    place = on_nccl(group)
    bare = {name: profiled(call) for name, call in bare_messages(place).items()}
    wrong = []
    for kind in kinds:
        calls = calls_of(place, kind)
        for name, (launches, messages) in TAKEN.items():
            call = calls[name][0]
            codecs = launches - ("broadcast" in name and place.rank != 0)  # who has nothing to encode
            own = sum((bare[message] for message in messages), Counter[str]())
            for way, run, events in (("", call, 0), ("async ", partial(awaited, call), MOST_EVENTS)):
                wrong += [f"{way}{name}, {kind}: {line}" for line in too_much(run, codecs, own, events)]
            calls_made = python_calls(call)
            if "broadcast" not in messages and "all_to_all_single" not in name and calls_made > MOST_CALLS:
                wrong.append(f"{name}, {kind}: {calls_made} calls of Python's functions")
    return wrong


@each_world
@on_ranks(gives=[])
def test_a_group_that_is_destroyed_ends_its_sums(group: Group) -> list[str]:
    """What is lost of long sums whose group is destroyed at once."""
    place, wrong = on_nccl(group), []
    for algorithm in SUMS:
        how: Any = {"codec": "int8", "algorithm": algorithm, "step": 1}
        x = gaussian(place, 30_000_001)
        want = x.clone()
        thinwire.all_reduce(want, group=place.group, **how)
        member = dist.new_group(backend="nccl")
        thinwire.all_reduce(torch.zeros_like(x), group=member, **how)
        thinwire.all_reduce(x, group=member, **how)
        dist.destroy_process_group(member)
        wrong += [algorithm] * (not torch.equal(x, want))
    return wrong


def unchanged(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook that averages nothing."""
    future = new_future(bucket.buffer().device)
    future.set_result(bucket.buffer())
    return future


def launches_of_step(group: Group, count: int) -> float:
    """Launches that averaging adds to a step of one bucket of so many parameters, half of them biases, exempt."""
    place = on_nccl(group)
    shapes = {f"{kind}{i}": (40, 50)[: 2 - (kind == "b")] for i in range(count // 2) for kind in "wb"}
    gradients = [gradient.to(place.device) for gradient in draw(place.rank, 0, shapes)]
    found = []
    for options in (None, {"feedback": "classic", "algorithm": "two_phase", "measure_every": 0}):
        model = wrap(Given(shapes), place.group, 4096, device=place.device)
        if options is None:
            model.register_comm_hook(None, unchanged)
        else:
            compress_ddp(model, "lloyd2", **options)
        for _ in range(6):
            model(*gradients).backward()
        found.append(some(profiled(lambda model=model: model(*gradients).backward()), "LaunchKernel"))
    return (found[1] - found[0]) / TIMES


@each_world
def test_a_bucket_takes_few_launches_whatever_its_parameters(ranks: RankPool, world: int) -> None:
    few, many = (ranks(world).run(launches_of_step, count) for count in (4, 40))
    assert few == many
    assert 0 < max(few) <= MOST_OF_BUCKET, few


# --- ranks that disagree ----------------------------------------------------------------------------------------------
def disagreements(group: Group) -> dict[str, tuple[str, float]]:
    """What ranks are told that make different calls, rank 0 another than the rest, and whether sums are right then."""
    place = on_nccl(group)
    odd = place.rank == 0
    x = torch.ones(96, device=place.device)
    even = [96 // place.world] * place.world
    late = [even[0] - 1, *even[1:-1], even[0] + 1] if odd else even
    how: Any = {"group": place.group, "codec": "int8"}
    pair: Any = {**how, "algorithm": "two_phase"}
    verb: Any = {**how, "algorithm": "compressed"}
    calls: dict[str, Callable[[], Any]] = {
        "sizes": lambda: thinwire.all_reduce(x[: 90 if odd else 93], **pair),
        "codecs": lambda: thinwire.all_reduce(x, **{**pair, "codec": "int5" if odd else "int6"}),
        "dtypes": lambda: thinwire.all_reduce(x.bfloat16() if odd else x.half(), **pair),
        "ops": lambda: thinwire.all_reduce(x[:50], op_of(2.0 if odd else 3.0), **pair),
        "algorithms": lambda: thinwire.all_reduce(x[:51], **{**how, "algorithm": "one_shot" if odd else "two_phase"}),
        "verbs": lambda: thinwire.broadcast(x[:52], 0, **verb) if odd else thinwire.all_reduce(x[:52], **pair),
        "sources": lambda: thinwire.broadcast(x[:53], 0 if odd else 1, **verb),
        "splits": lambda: thinwire.all_to_all_single(x, x + 1, even, late, **{**verb, "codec": "int7"}),
        "async calls": lambda: thinwire.all_reduce(x[: 54 if odd else 55], async_op=True, **pair),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            said = "accepted"
        except DisagreementError as error:
            said = str(error)
        total = torch.ones(30, device=place.device)
        thinwire.all_reduce(total, group=place.group, codec="none", algorithm="two_phase")
        found[name] = said, float(total.sum())
    return found


@each_world
def test_every_rank_is_told_and_the_group_stays_usable(ranks: RankPool, world: int) -> None:
    answers = ranks(world).run(disagreements)
    for name in answers[0]:
        assert len({answer[name] for answer in answers}) == 1, name
        said, total = answers[0][name]
        assert said.startswith("the ranks disagree about operation"), f"{name}: {said}"
        assert total == 30 * world, name


# --- DDP --------------------------------------------------------------------------------------------------------------
FLOATS = (torch.float32, torch.bfloat16)  # of residuals
TRAININGS: list[Options] = [
    {"codec": "none"},
    *({"codec": codec, "feedback": "none", "exempt": "none"} for codec in ("bf16", "int8", "lloyd4")),
    *({"codec": "lloyd2", "feedback": "classic", "residual_dtype": dtype} for dtype in FLOATS),
    {"codec": "lloyd1:block=64", "feedback": "classic", "exempt": "none"},
    *({"codec": codec, "feedback": "ef21"} for codec in ("lloyd2", "lloyd1")),
    {"codec": "int4", "feedback": "classic"},  # biases travel in 16 bits, in a lane of their own
    {"codec": "int4", "policy": {"a": "lloyd2", "c": "none", "d": "int8"}, "feedback": "none"},
    {"codec": "byname(a=int8; *=lloyd4)", "feedback": "none", "exempt": "none"},
    {"codec": "bysize(small=int8; large=int4; min_numel=2010)", "feedback": "none", "exempt": "none"},
    {"codec": {0: "none", 2: "int8", 4: "lloyd2"}, "feedback": "classic"},
    {"codec": "int4", "feedback": "none", "warmup_steps": 3},
    {"codec": "auto:2.5", "replan_every": 2, "optimizer": "linear"},
    {"codec": "int8", "feedback": "none", "joined": 14_000},
    {"codec": "lloyd2", "feedback": "classic", "joined": 14_000},
]
STEPS = 6


def dyadic(rank: int, step: int, dtypes: Dtypes = torch.float32, per_unit: int = 1024) -> list[Tensor]:
    """A rank's gradients on so fine a grid: sums of few are exact, so torch's own do not depend on their order."""
    return [((x.float() * per_unit).round() / per_unit).to(x.dtype) for x in draw(rank, step, dtypes=dtypes)]


def means(
    place: Place,
    options: Options,
    dtypes: Dtypes = torch.float32,
    poisoned: int | None = None,
    cap: float = CAP,
    ready: Sequence[str] = READY,
) -> Outputs:
    """What DDP makes of a rank's gradients at every step, and what it remembers; at one, rank 1 has NaN and Inf."""
    model = wrap(Given(dtypes=dtypes, ready=ready), place.group, cap, device=place.device)
    handle, found = compress_ddp(model, **{name: how for name, how in options.items() if name != "joined"}), {}
    join_buckets(handle, options.get("joined", 0))
    for step in range(STEPS):
        gradients = dyadic(place.rank, step, dtypes)
        if step == poisoned and place.rank == 1:
            gradients[0][3, 7] = math.nan
            gradients[4][0, 0] = math.inf
        found[f"step {step}"] = flat(backward(model, gradients)).float()
        assert found[f"step {step}"].isfinite().all() == (step != poisoned)
    kept = residuals(handle)
    assert kept.isfinite().all()
    return {**found, f"{OWN}residuals": kept, "not finite": torch.tensor(handle.stats().nonfinite)}


def trainings(place: Place, table: Sequence[Options], **common: Any) -> Outputs:
    found = {}
    for options in table:
        for name, x in means(place, {**common, **options}).items():
            found[f"{OWN if name.startswith(OWN) else ''}{options}, {name}"] = x
    return found


@each_world
@pytest.mark.parametrize("algorithm", SUMS)
@pytest.mark.parametrize("options", TRAININGS, ids=lambda options: "-".join(map(str, options.values())))
def test_ddp_has_the_means_of_the_cpu(ranks: RankPool, world: int, algorithm: str, options: Options) -> None:
    check_both(ranks, world, means, {**options, "algorithm": algorithm})


SOME: list[Options] = [{"codec": "int8", "feedback": "none"}, {"codec": "lloyd2", "feedback": "classic"}]
POISONED: list[Options] = [
    *SOME,
    {"codec": "lloyd2", "feedback": "ef21"},
    {"codec": "int4", "feedback": "classic", "residual_dtype": torch.bfloat16},
]


@each_world
def test_nan_of_one_rank_reaches_all_and_no_memory(ranks: RankPool, world: int) -> None:
    for options in POISONED:
        for algorithm in SUMS:
            check_both(ranks, world, means, {"algorithm": algorithm, **options}, torch.float32, 3)


@each_world
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_sixteen_bits(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    for options in SOME:
        check_both(ranks, world, means, {"algorithm": "two_phase", **options}, dtype)


def accumulated(place: Place) -> Outputs:
    """Gradients of three batches, two of them inside no_sync; what is accumulated is exact."""
    found = {}
    for options in SOME:
        model = wrap(Given(ready=READY), place.group, device=place.device)
        compress_ddp(model, algorithm="two_phase", **options)
        for step in range(4):
            model.zero_grad()
            with model.no_sync():
                for part in range(2):
                    model(*dyadic(place.rank, 10 * step + part)).backward()
            model(*dyadic(place.rank, 10 * step + 2)).backward()
            grads = [p.grad for p in model.parameters()]
            found[f"{options}, step {step}"] = flat(grads).cpu()
    return found


MESH_TRAININGS: list[Options] = [
    {"codec": "int8"},
    {"codec": "lloyd4", "inside": "int8"},
    {"codec": "int4", "inside": "none", "exempt": "none"},
    {"codec": {0: "none", 2: "lloyd2"}, "inside": "int8"},
]


def mesh_trainings(place: Place) -> Outputs:
    return trainings(place, MESH_TRAININGS, mesh=two_nodes(place))


INTERRUPTED: list[Options] = [
    {"codec": "int8"},
    *({"codec": "lloyd2", "feedback": "classic", "residual_dtype": dtype} for dtype in FLOATS),
    {"codec": "lloyd2", "feedback": "ef21"},
    {"codec": "auto:2.5", "replan_every": 3},
]


def resumed(group: Group, options: Options, how: str) -> list[tuple[str, str, bool]]:
    """Digests of parameters of a run with and without an interruption, and whether ranks are alike."""
    place = on_nccl(group)
    run = Run({"algorithm": "two_phase", **options}, ddp={"device": place.device})
    return interrupted(place.group, [run, run._replace(joined=14_000)], how)


@each_world
@pytest.mark.parametrize("options", INTERRUPTED, ids=lambda options: "-".join(map(str, options.values())))
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    ranks: RankPool, world: int, options: Options
) -> None:
    for how in ("files", "rolled back"):
        for want, got, alike in itertools.chain(*ranks(world).run(resumed, options, how)):
            assert alike
            assert got == want


def in_units(place: Place) -> Outputs:
    """Means in Adam's units, by moments that are new at every step and have exact roots: a CPU rounds others else."""
    found = {}
    for algorithm, dtype in itertools.product(SUMS, FLOATS):
        model = wrap(Given(dtypes=dtype, ready=READY), place.group, device=place.device)
        optimizer = torch.optim.Adam(model.parameters())
        handle = compress_ddp(model, "lloyd2", optimizer=optimizer, algorithm=algorithm)
        for step in range(4):
            for parameter, drawn_once in zip(model.parameters(), draw(7, step, dtypes=dtype), strict=True):
                moment = torch.where(drawn_once > 0, 4.0, 0.25).to(place.device, dtype)
                optimizer.state[parameter] = {"exp_avg_sq": moment}
            with mock.patch.object(moments, "FLOOR", 0.0):
                grads = backward(model, dyadic(place.rank, step, dtype))
            found[f"{algorithm}, {dtype}, step {step}"] = flat(grads).float()
        assert handle.stats().feedback == "none+moments"
    return found


def hooked(place: Place) -> Outputs:
    """What DDP makes of gradients with every hook of torch's names; some add in 16 bits, exact on a coarse grid."""
    found = {}
    for name, hook in HOOKS.items():
        model = wrap(Given(ready=READY), place.group, device=place.device)
        model.register_comm_hook(place.group, hook)
        for step in range(3):
            found[f"{name}, step {step}"] = flat(backward(model, dyadic(place.rank, step, per_unit=8)))
    return found


# --- compiled functions -----------------------------------------------------------------------------------------------
def differentiable(group: Group) -> dict[str, Callable[[Tensor], Tensor]]:
    """Every differentiable verb, for 8 rows per rank."""
    rank, world = group.rank(), group.size()
    sent = [8 + (other == world - 1) - (other == 0) for other in range(world)]
    verb: Any = {"group": group, "codec": "lloyd4", "backward_codec": "int8", "step": 5, "algorithm": "compressed"}
    uneven: Any = {"output_split_sizes": [sent[rank]] * world, "input_split_sizes": sent}
    return {
        "all_reduce": partial(F.all_reduce, **{**verb, "algorithm": "two_phase"}),
        "all_reduce avg": partial(F.all_reduce, op="avg", **{**verb, "algorithm": "one_shot"}),
        f"{OWN}all_gather": partial(F.all_gather, dim=1, **verb),
        f"{OWN}reduce_scatter": partial(F.reduce_scatter, **verb),
        f"{OWN}all_to_all_single": partial(F.all_to_all_single, **verb),
        f"{OWN}all_to_all_single uneven": partial(F.all_to_all_single, **uneven, **verb),
    }


def compiled(place: Place) -> Outputs:
    """Outputs and gradients of compiled functions, which are those of the functions themselves."""
    found = {}
    for name, verb in differentiable(place.group).items():
        torch._dynamo.reset()
        x = torch.randn(8 * place.world, 4, generator=seeded(place.rank)).to(place.device).requires_grad_()

        def function(x: Tensor, verb: Callable[[Tensor], Tensor] = verb) -> Tensor:
            return verb(x * 2) + 1

        pairs = []
        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            y = run(x)
            (grad,) = torch.autograd.grad(y, x, torch.ones_like(y) * (place.rank + 1))
            pairs.append(torch.cat((y.detach().reshape(-1), grad.reshape(-1))).cpu())
        assert_same(pairs[1], pairs[0], name)
        found[name] = pairs[0]
    return found


RUNS = (premultiplied, layouts, in_flight, by_callback, accumulated, in_units, hooked, compiled)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@each_world
def test_runs_have_the_bytes_of_the_cpu(ranks: RankPool, world: int, run: Callable[..., Outputs]) -> None:
    check_both(ranks, world, run)


@pytest.mark.parametrize("run", [hierarchies, mesh_trainings], ids=lambda run: run.__name__)
@on_worlds(4)
def test_runs_on_a_mesh_have_the_bytes_of_the_cpu(ranks: RankPool, world: int, run: Callable[..., Outputs]) -> None:
    check_both(ranks, world, run)
