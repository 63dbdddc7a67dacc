"""Issue order, threads, scratch and works: what happens between the call of a verb and its end."""

import gc
import itertools
import operator
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given as forall, strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from cases import CPU, digest, generated, given, on_ranks, small_chunks, thorough, until, worlds
from ranks import RankPool
from thinwire.collectives import Work, channel as channels, chunks
from thinwire.collectives.channel import Channel, IssuedCall
from thinwire.collectives.chunks import Flat, Scratch, Span
from thinwire.collectives.peers import CallSite
from thinwire.collectives.pipeline import Operation, Pipeline, ScratchRing
from thinwire.collectives.plan import CallPlan
from thinwire.collectives.transport import Moving, Stages
from thinwire.errors import CollectiveError

Group = dist.ProcessGroup


# --- order ------------------------------------------------------------------------------------------------------------
@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Every third step of every pipeline, or so, waits up to 0.3 ms first."""
    advance, dice = Pipeline.advance, random.Random(seed)

    def late(pipeline: Pipeline) -> None:
        if dice.random() < 1 / 3:
            time.sleep(dice.random() * 3e-4)
        advance(pipeline)

    with patch.object(Pipeline, "advance", late):
        yield


Started = tuple[Work, list[Tensor]]
CODECS = ("int8", "lloyd4:block=64", "bf16", "int4:block=32,rounding=stochastic")


def start(group: Group, verb: int, numel: int, codec: str, step: int, *, wait: bool) -> list[Tensor] | Started:
    """One of the verbs on numbers that follow from rank, length and step."""
    rank, world = group.rank(), group.size()
    x = given(numel, rank + 10 * step)
    how: Any = {"group": group, "async_op": not wait, "codec": codec, "step": step}
    if verb < 3:
        algorithm = ("two_phase", "one_shot", "plain")[verb]
        work = thinwire.all_reduce(x, algorithm=algorithm, **how)
        outputs = [x]
    elif verb == 3:
        outputs = [torch.empty(numel // world)]
        work = thinwire.reduce_scatter_tensor(outputs[0], x[: numel // world * world], algorithm="compressed", **how)
    elif verb == 4:
        outputs = [torch.empty(numel + other) for other in range(world)]
        work = thinwire.all_gather(outputs, given(numel + rank, rank + step), algorithm="compressed", **how)
    elif verb == 5:
        outputs = [torch.empty(numel // world * world)]
        work = thinwire.all_to_all_single(outputs[0], x[: numel // world * world], algorithm="compressed", **how)
    else:
        work = thinwire.broadcast(x, group_src=step % world, algorithm="compressed", **how)
        outputs = [x]
    return outputs if wait else (work, outputs)


Bucket = tuple[int, int, str, int]  # verb, length, codec, step


def draw_buckets(count: int) -> list[Bucket]:
    """Operations of every verb, of several chunks and codecs, each on two sets of numbers."""
    kinds = [(i % 7, (150, 700, 1201)[i % 3], CODECS[i % 4]) for i in range(count)]
    return [(*kind, step) for kind in kinds for step in range(2)]


@pytest.mark.parametrize(("world", "rounds"), [(3, 5), *thorough((3, 8), (2, 40), (4, 20))])
@on_ranks(gives=0)
def test_operations_in_flight_give_the_bytes_of_the_blocking_run_whatever_the_delays(group: Group, rounds: int) -> int:
    """How many of 8 operations in flight, over all rounds, end in other bytes than the same ones run one by one."""
    dice, own, wrong = random.Random(17), random.Random(group.rank()), 0
    with small_chunks(800), delays(group.rank()):
        want = {bucket: digest(*start(group, *bucket, wait=True)) for bucket in draw_buckets(14 if rounds < 8 else 28)}
        for number in range(rounds):
            buckets = dice.choices(list(want), k=8)
            begun = [start(group, *bucket, wait=False) for bucket in buckets]
            if number % 5 == 0:
                dist.all_reduce(torch.ones(100), group=group)  # the user's own, in the midst
            own.shuffle(order := list(range(8)))
            for i in order:
                begun[i][0].wait()
            wrong += sum(digest(*outputs) != want[b] for (_, outputs), b in zip(begun, buckets, strict=True))
    return wrong


NESTED = [
    *((3, ("bf16", "int4"), 0), (700, ("bf16", "int4"), 0), (700, ("int8", "lloyd4:block=64"), 1)),
    *((2401, ("bf16", "int4"), 1), (2401, ("int8", "lloyd4:block=64"), 0)),
]  # length, codecs inside and across, step


@pytest.mark.parametrize("shape", [(2, 2), *thorough(((4, 1),))], ids=str)
@on_ranks(4, gives=0)
def test_sums_on_a_mesh_in_flight_give_the_bytes_of_the_blocking_run(group: Group, shape: tuple[int, int]) -> int:
    """The same of hierarchical sums, whose chunks go in step, beside flat ones of the group."""
    rounds, mesh, dice = 3, init_device_mesh("cpu", shape), random.Random(5)
    own, wrong = random.Random(group.rank()), 0

    def begin(numel: int, pair: tuple[str, str], step: int, *, wait: bool) -> Started:
        x = given(numel, group.rank() + 10 * step)
        how: Any = {"group": mesh, "async_op": not wait, "codec": pair, "algorithm": "hierarchical", "step": step}
        return thinwire.all_reduce(x, **how), [x]

    with small_chunks(800), delays(group.rank()):
        want = {nested: digest(*begin(*nested, wait=True)[1]) for nested in NESTED}
        flat = digest(*start(group, 0, 700, "int8", 1, wait=True))
        for _ in range(rounds):
            chosen = dice.choices(NESTED, k=6)
            begun = [begin(*nested, wait=False) for nested in chosen]
            begun.append(start(group, 0, 700, "int8", 1, wait=False))
            own.shuffle(order := list(range(7)))
            for i in order:
                begun[i][0].wait()
            found = [digest(*outputs) for _, outputs in begun]
            wrong += sum(map(operator.ne, found, [*(want[nested] for nested in chosen), flat]))
    return wrong


def threads_with_groups(group: Group) -> None:
    """Three threads, each with a group of its own, all verbs at once."""
    groups = [dist.new_group() for _ in range(3)]
    same = []

    def work(number: int) -> None:
        want = {bucket: digest(*start(groups[number], *bucket, wait=True)) for bucket in draw_buckets(7)}
        begun = [(*start(groups[number], *bucket, wait=False), seen) for bucket, seen in want.items()]
        for item, outputs, seen in begun:
            item.wait()
            same.append(digest(*outputs) == seen)

    with small_chunks(800), delays(group.rank()):
        _run_threads(work)
    assert same == [True] * 3 * 14


def threads_in_turn(group: Group) -> None:
    """Three threads on one group; they take turns in calling, and wait whenever they like."""
    turn, count, found = threading.Condition(), [0], []
    member, calls = dist.new_group(), 24

    def work(number: int) -> None:
        for step in range(number, calls, 3):
            with turn:
                turn.wait_for(lambda step=step: count[0] == step)
                item, outputs = start(member, step % 2, 777, "int8", step, wait=False)
                count[0] += 1
                turn.notify_all()
            item.wait()
            found.append((step, digest(*outputs)))

    with small_chunks(800):
        with delays(group.rank()):
            _run_threads(work)
        for step, seen in sorted(found):  # threads end in an order of their own on every rank
            assert seen == digest(*start(member, step % 2, 777, "int8", step, wait=True)), step


def _run_threads(work: Callable[[int], None]) -> None:
    """Run work(0..2) in threads; what one raises is raised here."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def beside_torch(group: Group) -> None:
    """The user's own collectives and messages on the same group, while ours are under way and late."""
    rank, world = group.rank(), group.size()
    ours, theirs = [], []
    with small_chunks(800), delays(rank):
        for step in range(10):
            ours.append(start(group, step % 2, 3001, "int8", 0, wait=False))
            theirs.append(torch.full((50,), float(rank)))
            dist.all_reduce(theirs[-1], group=group)
            dist.barrier(group=group)
            box = torch.zeros(1)
            sent = dist.isend(torch.tensor([rank + step]).float(), (rank + 1) % world, group=group, tag=step)
            dist.recv(box, (rank - 1) % world, group=group, tag=step)
            sent.wait()
            assert box.item() == (rank - 1) % world + step
        for work, _ in ours:
            work.wait()
    assert all(len({digest(*outputs) for _, outputs in ours[kind::2]}) == 1 for kind in (0, 1))
    assert all(bool((t == sum(range(world))).all()) for t in theirs)


def rising_lengths(group: Group) -> None:
    """The scratch grows when it is empty, and nothing is mixed up."""
    member = dist.new_group()
    kinds = [(i % 2, 200 * i + 7, "int8", 0) for i in range(15)]
    with small_chunks(), delays(group.rank()):
        begun = [start(member, *kind, wait=False) for kind in kinds]
        for work, _ in begun:
            work.wait()
        for kind, (_, outputs) in zip(kinds, begun, strict=True):
            assert digest(*outputs) == digest(*start(member, *kind, wait=True)), kind


IN_FLIGHT = [threads_with_groups, threads_in_turn, beside_torch, rising_lengths]


@worlds(3, rare=[2])
@pytest.mark.parametrize("check", IN_FLIGHT, ids=lambda check: check.__name__)
def test_operations_in_flight_do_not_disturb_each_other(
    ranks: RankPool, world: int, check: Callable[[Group], None]
) -> None:
    ranks(world).run(check)


@pytest.mark.parametrize("algorithm", ["two_phase", "plain"])
@on_ranks(2)
def test_a_work_is_not_done_before_the_last_rank_came(group: Group, algorithm: str) -> None:
    """Rank 1 comes late: until then rank 0's work is not done, and waiting for it a while raises."""
    x = torch.ones(300)
    thinwire.all_reduce(x, group=group, codec="int8", algorithm=algorithm)
    dist.barrier(group=group)
    if group.rank() == 1:
        time.sleep(0.5)
    work = thinwire.all_reduce(x, group=group, async_op=True, codec="int8", algorithm=algorithm)
    assert work is not None
    if group.rank() == 0:
        assert not work.is_completed()
        with pytest.raises(TimeoutError, match="did not end"):
            work.wait(timedelta(seconds=0.05))
    assert work.wait()
    assert work.is_completed()


def chained_futures(group: Group) -> None:
    x = torch.ones(300)
    work = thinwire.all_reduce(x, group=group, async_op=True, codec="none", algorithm="one_shot")
    assert work.get_future().then(lambda future: float(future.value()[0][0]) / 2).wait() == 1.0


def dropped_works(group: Group) -> None:
    """Nobody keeps the tensors' other names, the works, or waits before the last."""
    outputs = [torch.ones(2000) for _ in range(20)]
    with small_chunks():
        for x in outputs:
            thinwire.all_reduce(x.view(40, 50), group=group, async_op=True, codec="none", algorithm="two_phase")
        gc.collect()
        thinwire.all_reduce(torch.ones(3), group=group, codec="none", algorithm="two_phase")
    assert torch.cat(outputs).sum() == 80000


def empty_operations(group: Group) -> None:
    """They leave no scratch behind. Rank 1 comes late, so that rank 0's are all in the pipeline at once."""
    member = dist.new_group()
    how: Any = {"group": member, "codec": "int8"}
    reduce = partial(thinwire.all_reduce, algorithm="two_phase", **how)
    nothing = partial(thinwire.broadcast, torch.ones(0), group_src=0, algorithm="compressed", **how)
    for numel in (500, 4000):
        reduce(torch.ones(numel))
        nothing()
    if group.rank() == 1:
        time.sleep(0.3)
    works = [reduce(torch.ones(500), async_op=True), nothing(async_op=True), nothing(async_op=True)]
    works.append(thinwire.all_reduce(torch.ones(500), algorithm="one_shot", async_op=True, **how))
    for work in works:
        work.wait()
    assert reduce(torch.ones(400000), async_op=True).wait(timedelta(seconds=5))
    assert not channel_of(member).scratch._lent


def one_thread(group: Group) -> None:
    member = dist.new_group()
    for _ in range(3):
        thinwire.all_reduce(torch.ones(9), group=member, codec="none", algorithm="two_phase")
        thinwire.broadcast(torch.ones(9), 0, member, codec="none", algorithm="compressed")
    assert sum(name == f"thinwire-{member.group_name}" for name in thread_names()) == 1


def thread_names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire-"))


@pytest.mark.parametrize("check", [chained_futures, dropped_works, empty_operations, one_thread])
def test_two_ranks_with(ranks: RankPool, check: Callable[[Group], None]) -> None:
    ranks(2).run(check)


# --- scratch ----------------------------------------------------------------------------------------------------------
def channel_of(group: Group) -> Channel:
    return channels.channel_of(group, CPU)


VERBS = ("two_phase", "one_shot", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


def run_verb(group: Group, verb: str, numel: int, codec: str, *, async_op: bool = False) -> Work | None:
    """A verb whose whole message has `numel` elements."""
    x = torch.ones(numel)
    part = torch.ones(numel // group.size())
    how: Any = {"group": group, "async_op": async_op, "codec": codec, "algorithm": "compressed"}
    if verb in ("two_phase", "one_shot"):
        return thinwire.all_reduce(x, **how | {"algorithm": verb})
    if verb == "reduce_scatter":
        return thinwire.reduce_scatter_tensor(part, x, **how)
    if verb == "all_gather":
        return thinwire.all_gather_into_tensor(x, part, **how)
    if verb == "all_to_all":
        return thinwire.all_to_all_single(x, torch.ones(numel), **how)
    return thinwire.broadcast(x, 0, **how)


def chunk_of(verb: str, numel: int, codec: str, world: int) -> int:
    """Elements of a chunk, over all ranks."""
    coder = thinwire.codec(codec)
    if verb in ("reduce_scatter", "all_gather"):
        part = numel // world
        return world * chunks.choose_chunking(part, world * coder.wire_bytes(part), world).chunk
    shards = world - 1 if verb == "broadcast" else world
    return chunks.choose_chunking(numel, coder.wire_bytes(numel), world, shards).chunk


CUT_VERBS = [verb for verb in VERBS if verb != "all_to_all"]


@pytest.mark.parametrize(("world", "codec"), [(2, "lloyd2"), (3, "int8")])
@pytest.mark.parametrize("verb", CUT_VERBS)
@on_ranks()
def test_scratch_is_a_wire_of_the_message_and_two_of_a_chunk_and_is_kept(
    group: Group, world: int, verb: str, codec: str
) -> None:
    """Every wire has a header and sections rounded up to 16 bytes, so a chunk's shards take a little more than it."""
    numel, coder = world << 19, thinwire.codec(codec)
    chunk = chunk_of(verb, numel, codec, world)
    assert chunk < numel, "the message must be cut for the bound to say anything"
    headers = (numel // chunk + 3) * 2 * world * 64
    bound = coder.wire_bytes(numel) + 2 * coder.wire_bytes(chunk) + headers
    member, held = dist.new_group(), set()
    for _ in range(2):
        for work in [run_verb(member, verb, numel, codec, async_op=True) for _ in range(2)]:
            work.wait()
        held.add((channel_of(member).scratch.nbytes, channel_of(member).scratch._buffer.data_ptr()))
    ((nbytes, _),) = held  # neither grown nor another after the first round
    assert nbytes <= bound


@on_ranks(2)
def test_an_exchange_takes_no_more_than_its_wires_both_ways(group: Group) -> None:
    member, numel = dist.new_group(), 1 << 21
    run_verb(member, "all_to_all", numel, "int8")
    held, wire = channel_of(member).scratch.nbytes, thinwire.codec("int8").wire_bytes(numel)
    assert held <= 2 * wire


@on_ranks(4, gives=True)
def test_hierarchical_operations_of_different_length_in_flight_end(group: Group) -> bool:
    """Three operations; rank 0's pipeline is empty before the third and its scratch can grow, the others' cannot."""
    mesh = init_device_mesh("cpu", (2, 2))
    how: Any = {"group": mesh, "codec": "none", "algorithm": "hierarchical", "async_op": True}
    inputs = [given(n, group.rank()) for n in (430, 16, 3000)]
    with small_chunks(1600):
        for x in inputs[:2]:
            thinwire.all_reduce(x.clone(), **how).wait()
        thinwire.all_reduce(given(2900, group.rank()), **how | {"async_op": True}).wait()
    for _ in range(3):
        with small_chunks(1600):
            begun = [x.clone() for x in inputs]
            works = []
            for x in begun:
                works.append(thinwire.all_reduce(x, **how))
                if group.rank() == 0:
                    time.sleep(0.05)
            assert all(work.wait(timedelta(seconds=5)) for work in works)
    return True


@generated(150)
@forall(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 7)), max_size=60), st.integers(64, 1500))
def test_lent_regions_never_overlap_and_all_comes_back(steps: list[tuple[int, int]], limit: int) -> None:
    """Each step takes some bytes; where there is no room, one of those that are out comes back, in any order."""
    scratch, out = ScratchRing(CPU), []
    for nbytes, which in steps:
        part = scratch.take(nbytes, max(limit, -(-nbytes // 64) * 64))
        if part is not None:
            assert part.numel() == nbytes
            out.append(part)
            edges = sorted((p.storage_offset(), p.storage_offset() + p.numel()) for p in out if p.numel())
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(edges)), f"overlap: {edges}"
            assert not edges or edges[-1][1] <= scratch.nbytes
        elif out:
            scratch.give(out.pop(which % len(out)))
        else:
            pytest.fail("nothing is out and there is no room")
    for part in out:
        scratch.give(part)
    assert scratch.take(2000, 2048) is not None, "not all came back"


def test_scratch_does_not_grow_under_what_is_lent() -> None:
    scratch = ScratchRing(CPU)
    first = scratch.take(100, 128)
    assert first is not None
    assert scratch.take(500, 512) is None
    scratch.give(first)
    assert scratch.take(500, 512) is not None


# --- cuts -------------------------------------------------------------------------------------------------------------
@generated(60)
@forall(st.integers(0, 3 << 20), st.integers(1, 9), st.sampled_from(["none", "int8", "lloyd1"]))
def test_chunks_and_shards_cover_a_message_once(numel: int, world: int, codec: str) -> None:
    chunking = chunks.choose_chunking(numel, thinwire.codec(codec).wire_bytes(numel), world, world)
    at = 0
    for index in range(chunking.num_chunks):
        span = chunking.span(index)
        parts = chunks.shards(span, world)
        assert len(parts) == world
        assert parts[0].begin == span.begin == at
        assert all(a.end == b.begin for a, b in itertools.pairwise(parts))
        assert (parts[-1].end, parts[0].numel) == (span.end, max(part.numel for part in parts))
        assert parts[0].numel == -(-span.numel // world) or parts[0].numel % 1024 == 0, "no longer than it must be"
        at = span.end
    assert (at, chunking.span(chunking.num_chunks).numel) == (numel, 0)


@generated(60)
@forall(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_several_tensors_are_read_and_written_as_one_row(sizes: list[int], begin: int, length: int) -> None:
    tensors = [torch.arange(float(n)) + 100 * i for i, n in enumerate(sizes)]
    row, flat = torch.cat(tensors), Flat(tensors)
    span = Span(min(begin, row.numel()), min(begin + length, row.numel()))
    read = flat.read(span, Scratch(torch.empty(4 * row.numel() + 64, dtype=torch.uint8)))
    assert torch.equal(read, row[span.begin : span.end])
    read += 1
    flat.write(span, read)
    want = torch.cat([torch.arange(float(n)) + 100 * i for i, n in enumerate(sizes)])
    want[span.begin : span.end] += 1
    assert torch.equal(torch.cat(tensors), want)


# --- pipelines and failures -------------------------------------------------------------------------------------------
class Fails(Operation):
    """Raises in its second stage."""

    num_chunks = 2
    chunk_bytes = 64
    scratch_bytes = 128

    def __init__(self) -> None: ...

    def chunk(self, index: int, scratch: Scratch) -> Stages:
        yield Moving()
        raise OSError("the cable is cut")


def submit_failing(member: Group) -> Any:
    call = IssuedCall(channel_of(member), CallSite(1, "all_reduce"), CallPlan(""), async_op=True)
    return call.channel.submit(Fails(), call)


@on_ranks(2)
def test_a_failure_reaches_everyone_who_waits_and_ends_the_group(group: Group) -> None:
    member, said = dist.new_group(), []
    works = [submit_failing(member) for _ in range(2)]
    calls: list[Callable[[], Any]] = [
        *(work.wait for work in works),
        works[0].get_future().wait,
        lambda: thinwire.all_reduce(torch.ones(9), group=member, codec="none", algorithm="two_phase"),
    ]
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (CollectiveError, OSError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    assert said[0].startswith("OSError: the cable is cut")
    assert all("the cable is cut" in line for line in said), said
    assert said[3].startswith("CollectiveError: an earlier collective of this group failed")


def ended(before: list[str]) -> bool:
    """Whether all threads that were not there before end soon."""
    return until(lambda: set(thread_names()) <= set(before), 60)


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2)
def test_the_thread_of_a_group_ends_with_it_and_nothing_is_kept(group: Group, fails: bool) -> None:
    thinwire.all_reduce(torch.ones(9), codec="none", algorithm="two_phase")
    before, kept, member = thread_names(), len(channels._groups), dist.new_group()
    thinwire.all_reduce(torch.ones(900), group=member, codec="int8", algorithm="two_phase")
    found = [len(thread_names()) == len(before) + 2, len(channels._groups) == kept + 1]  # one compares, one sends
    channel = channels.channel_of(member, CPU)
    freed_in: list[threading.Thread] = []  # a thread that Python has ended is a _DummyThread, and nothing waits for it
    for held in (channel._pipeline, channel.transport):
        weakref.finalize(held, lambda: freed_in.append(threading.current_thread()))
    del channel, held
    if fails:  # after which the thread ends by itself
        with suppress(OSError):
            submit_failing(member).wait()
    else:
        thinwire.all_reduce(torch.ones(900), group=member, codec="int8", algorithm="auto")
    with patch.object(threading.Thread, "join") as join:  # a thread that starts, as any, may collect the group
        dist.destroy_process_group(member)
        del member
        found = [*found, ended(before), len(channels._groups) == kept, not join.called]
    assert all(found), found
    assert len(freed_in) == 2
    assert not any(isinstance(thread, threading._DummyThread) for thread in freed_in), freed_in


@on_ranks(4, gives=[True])
def test_the_thread_of_a_mesh_ends_with_its_groups(group: Group) -> list[bool]:
    before = thread_names()
    mesh = init_device_mesh("cpu", (2, 2))
    thinwire.all_reduce(torch.ones(900), group=mesh, codec="int8", algorithm="hierarchical")
    groups = [mesh.get_group(i) for i in range(2)]
    del mesh
    for member in groups:
        dist.destroy_process_group(member)
    del groups, member
    return [ended(before)]


def test_who_waited_for_a_work_may_look_at_its_future() -> None:
    set_result = torch.futures.Future.set_result

    def slowly(future: Any, result: Any) -> None:
        time.sleep(0.2)
        set_result(future, result)

    work = Work([torch.ones(2)])
    future = work.get_future()
    with patch.object(torch.futures.Future, "set_result", slowly):
        thread = threading.Thread(target=work.finished)
        thread.start()
        work.wait()
        assert future.value()[0] is work.result()[0]
        thread.join()
