"""Ranks that die, stop or fail in the middle of a call: the others are told soon, by name, and can make a new group."""

import functools
import gc
import importlib
import itertools
import json
import math
import os
import re
import signal
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from cases import by_turns, in_time, on_ranks, until
from programs import TESTS, Ended
from ranks import RankPool
from rowed import RowedTransport, rowed
from thinwire.collectives import peers, transport
from thinwire.collectives.channel import channel_of
from thinwire.collectives.transport import LostRankError
from thinwire.errors import CollectiveError
from thinwire.kernels import cpu
from thinwire.qat.agreement import Agreement
from thinwire.wire import KEY_AT

Group = dist.ProcessGroup
CPU = torch.device("cpu")
LATE_S = 1.5  # the timeout of groups in which a rank stops
LONG_S = 60.0  # and of those in which it dies: nobody waits for so long
SOON_S = 10.0  # until others know, on any machine; test_others_know_as_soon_as_with_torch looks more closely
MARGIN_S = 1 + 2 * peers.ASK_S  # to look into the store, twice
HOW: Any = {"codec": "int8", "algorithm": "two_phase"}


def failure(call: Callable[[], Any]) -> BaseException | None:
    """What a call raises, without its traceback."""
    try:
        call()
    except Exception as error:
        return error.with_traceback(None)
    return None


def threads() -> list[str]:
    """Those of thinwire's groups that run. What compiles GPU kernels belongs to the process."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire-")]
    return [name for name in names if not name.startswith("thinwire-compiler")]


# --- a rank that is lost ----------------------------------------------------------------------------------------------
def calls_of(verb: str, group: Group) -> Callable[[int], Any]:
    """A call of some kind on so many elements."""
    if verb == "ddp":
        model = DistributedDataParallel(nn.Linear(40, 40), process_group=group)
        thinwire.compress_ddp(model, "int8")
        return lambda numel: model(torch.ones(2, 40)).sum().backward()
    if verb == "diloco":
        layer = nn.Linear(40, 40)
        diloco = thinwire.DiLoCo(layer, None, every=1, codec="int8", group=group)
        return lambda numel: diloco.step()
    if verb == "broadcast":
        how: Any = {"group": group, "group_src": 2, "codec": "int8", "algorithm": "compressed"}
        return lambda numel: thinwire.broadcast(torch.ones(numel), **how)
    algorithm: Any = {"plain": "plain", "all_reduce": "two_phase"}[verb]
    return lambda numel: thinwire.all_reduce(torch.ones(numel), group=group, codec="int8", algorithm=algorithm)


def lose(group: Group, verb: str, first: bool, how: int, folder: str) -> dict[str, Any]:
    """Rank 2 ends in the middle of calls, of which the next is the first of its kind or not; what the others find."""
    others = Counter(threads())  # of groups that tests before this one have left
    member = dist.new_group(timeout=timedelta(seconds=LATE_S if how == signal.SIGSTOP else LONG_S))
    call = calls_of(verb, member)
    for _ in range(3):
        call(5000)
    dist.barrier(member)
    if group.rank() == 2:
        os.kill(os.getpid(), how)
    start = time.monotonic()
    error = failure(functools.partial(call, 6000 if first else 5000))
    seconds, name = time.monotonic() - start, member.group_name
    dead = weakref.ref(member)
    del call, member
    dist.destroy_process_group()
    again = torch.full((3,), 127.0)
    store = dist.FileStore(f"{folder}/again", 2)
    dist.init_process_group("gloo", store=store, rank=group.rank(), world_size=2, timeout=timedelta(seconds=LONG_S))
    thinwire.all_reduce(again, **HOW)
    dist.destroy_process_group()
    return {
        "error": f"{type(error).__name__}: {error}",
        "group": name,
        "seconds": seconds,
        "again": again.tolist(),
        "ended": until(lambda: not Counter(threads()) - others) or threads(),
        "freed": until(lambda: dead() is None) or str(gc.get_referrers(dead()))[:2000],
    }


@by_turns(
    "verb, first, how",
    ["all_reduce", "ddp", "broadcast", "plain", "diloco"],
    [False, False, True, True],
    [signal.SIGKILL, signal.SIGSTOP, *[signal.SIGKILL] * 3],
)
@in_time
def test_a_lost_rank_is_named_and_the_others_go_on(
    ranks: RankPool, tmp_path: Path, verb: str, first: bool, how: signal.Signals
) -> None:
    for told in ranks(3).run(lose, verb, first, how, tempfile.mkdtemp(dir=tmp_path), lost=2):
        text = told["error"]
        assert "rank 2" in text or verb == "plain", text  # gloo does not tell which one
        assert f"of group '{told['group']}')" in text, text
        names = {"ddp": "gradients(", "diloco": "gradients(", "broadcast": "broadcast("}
        assert names.get(verb, "all_reduce(") in text, text
        assert text.startswith("PeerError: rank ") or verb == "ddp", text  # torch tells it in an error of its own
        assert told["seconds"] < (LATE_S if how == signal.SIGSTOP else 0) + SOON_S, told
        assert told["again"] == [254.0] * 3
        assert told["ended"] is True, told
        assert told["freed"] is True, told


def lose_beside_training(group: Group, kind: str) -> str:
    """Rank 2 ends where ranks only agree on something; what is said to the others."""
    diloco = thinwire.DiLoCo(nn.Linear(40, 40), None, every=1, codec="int8")
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    state = thinwire.compress_ddp(ddp, "lloyd2")
    ddp(torch.ones(2, 40)).sum().backward()
    if group.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    calls: dict[str, Callable[[], Any]] = {
        "synchronize": diloco.synchronize,
        "gather": lambda: state.state_dict(gather=True),
        "load": lambda: importlib.import_module("thinwire.integrations.accelerate").load_shared(state, {}),
        "qat": lambda: Agreement().total(torch.ones(7)),
    }
    error = failure(calls[kind])
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("kind", "said"),
    [("synchronize", "DiLoCo.synchronize("), ("gather", "state_dict("), ("load", "load_state_dict("), ("qat", "qat(")],
)
@in_time
def test_a_rank_that_is_lost_beside_training_is_named(ranks: RankPool, kind: str, said: str) -> None:
    if kind == "load":
        pytest.importorskip("accelerate")
    for text in ranks.fresh(3).run(lose_beside_training, kind, lost=2):
        where = rf"{re.escape(said)}.* for the first time \(operation \d+ of group '.+'\)"
        assert re.match(rf"PeerError: rank [01] lost rank [012] in {where}", text), text


CROSSED: tuple[tuple[Any, bool], ...] = (("two_phase", True), ("two_phase", False), ("plain", False))


@in_time
@on_ranks(2)
def test_calls_on_two_groups_that_cross_name_who_was_waited_for(group: Group) -> None:
    """Ranks call on two groups in different orders."""
    begun: list[tuple[Group, Any]] = []
    for algorithm, first in CROSSED:
        members = [dist.new_group(timeout=timedelta(seconds=LATE_S)) for _ in range(2)]
        how: Any = {"codec": "int8", "algorithm": algorithm}
        for member in () if first else (*members, *members):
            thinwire.all_reduce(torch.ones(500), group=member, **how)
        begun.append((members[group.rank() % 2], how))
    dist.barrier()

    def told(member: Group, how: Any) -> tuple[str, str]:
        error = failure(lambda: thinwire.all_reduce(torch.ones(500), group=member, **how))
        return member.group_name, f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(begun)) as threads:
        for name, text in threads.map(told, *zip(*begun, strict=True)):
            known = f"PeerError: rank {group.rank()} waited for rank {1 - group.rank()} in all_reduce("
            assert text.startswith(known), text
            assert f"of group {name!r}) for the group's timeout of 1.5 s" in text, text


def torchs(verb: str, group: Group) -> Callable[[int], Any]:
    """The like of `calls_of` in plain torch."""
    if verb == "ddp":
        model = DistributedDataParallel(nn.Linear(40, 40), process_group=group)
        return lambda numel: model(torch.ones(2, 40)).sum().backward()
    return lambda numel: dist.all_reduce(torch.ones(numel), group=group)


def lose_beside(group: Group, how: int) -> dict[str, tuple[float, str]]:
    """Rank 2 ends; when torch's calls and ours raise that the others make at that time, and what."""
    calls = {}
    for whose, verb in itertools.product(("torch's", "first", "later"), ("all_reduce", "ddp")):
        member = dist.new_group(timeout=timedelta(seconds=LATE_S if how == signal.SIGSTOP else LONG_S))
        call = (torchs if whose == "torch's" else calls_of)(verb, member)
        for _ in range(0 if whose == "first" else 3):
            call(5000)
        calls[f"{whose} {verb}"] = call
    dist.barrier()
    if group.rank() == 2:
        os.kill(os.getpid(), how)
    start = time.monotonic()

    def timed(call: Callable[[int], Any]) -> tuple[float, str]:
        error = failure(functools.partial(call, 5000))
        return time.monotonic() - start, f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(calls)) as threads:
        return dict(zip(calls, threads.map(timed, calls.values()), strict=True))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@in_time
def test_others_know_as_soon_as_with_torch(ranks: RankPool, how: signal.Signals) -> None:
    for told in ranks(3).run(lose_beside, how, lost=2):
        for whose, verb in itertools.product(("first", "later"), ("all_reduce", "ddp")):
            seconds, text = told[f"{whose} {verb}"]
            assert re.search(r"rank [01] (lost|waited for) rank [012] in ", text), text
            assert seconds <= told[f"torch's {verb}"][0] + MARGIN_S, (whose, verb, told)


class Waiting(RowedTransport):
    """A stream whose messages from rank 2 do not come, on a host that was asked to wait."""

    blocking = True
    lost = False

    def settle(self) -> None:
        if self.lost and self.rank != 2:
            raise LostRankError(None, TimeoutError("the messages did not come"), waited=math.inf)


def wait_on_a_stream(group: Group, verb: str) -> tuple[str, str, str]:
    """What is said in a call on a stream, and in the next."""
    with rowed(), patch.object(transport, "transport", Waiting):
        member = dist.new_group()
        call = calls_of(verb, member)
        call(5000)
        dist.barrier()
        with patch.object(Waiting, "lost", True):
            error = failure(lambda: call(5000))
        dist.barrier()
        after = failure(lambda: group.rank() == 2 or thinwire.all_reduce(torch.ones(5), group=member, **HOW))
        return str(member.group_name), str(error), str(after)


@pytest.mark.parametrize("verb", ["all_reduce", "ddp"])
@in_time
def test_a_host_that_waits_for_a_stream_names_the_call(ranks: RankPool, verb: str) -> None:
    found = ranks(3).run(wait_on_a_stream, verb)
    for name, text, after in found[:2]:
        assert re.match(r"rank [01] waited for another rank in (all_reduce|gradients)\(", text), text
        assert f"(operation 2 of group '{name}')" in text or verb == "ddp", text
        assert "create a new group to continue" in after
    assert found[2][1:] == ("None", "None")


@pytest.mark.parametrize("first", [False, True])
@on_ranks(2)
def test_a_connection_that_was_lost_before_a_call_is_told_in_it(group: Group, first: bool) -> None:
    """What is said of a call that starts when the connections are known to be closed."""
    member = dist.new_group()
    thinwire.all_reduce(torch.ones(500), group=member, **HOW)
    dist.barrier()
    if group.rank() == 1:
        channel_of(member, CPU).transport.close()
    dist.barrier()
    time.sleep(0.1)
    text = str(failure(lambda: thinwire.all_reduce(torch.ones(600 if first else 500), group=member, **HOW)))
    assert re.match(r"rank [01] lost rank [01] in all_reduce\(numel=", text), text


def interrupt(group: Group) -> tuple[str, float]:
    """Ctrl-C on rank 0 while it waits for rank 1 in a first call, then what rank 1 is told in that call."""
    member, start = dist.new_group(), time.monotonic()
    if group.rank() == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        if group.rank() == 0:
            thinwire.all_reduce(torch.ones(500), group=member, **HOW)
    except KeyboardInterrupt:
        start += 0.3
    seconds = time.monotonic() - start
    dist.barrier()
    return str(failure(lambda: thinwire.all_reduce(torch.ones(500), group=member, **HOW))), seconds


@in_time
def test_a_first_call_that_waits_for_others_can_be_interrupted(ranks: RankPool) -> None:
    (after, seconds), (other, _) = ranks(2).run(interrupt)
    assert seconds < SOON_S
    assert "create a new group to continue" in after
    assert other.startswith("rank 1 lost rank 0 in all_reduce(numel=500"), other


# --- a rank that fails by itself --------------------------------------------------------------------------------------
def fail(group: Group, async_op: bool) -> tuple[str, float]:
    """Rank 1 has no memory left when it encodes."""
    member = dist.new_group()
    thinwire.all_reduce(torch.ones(500), group=member, **HOW)
    dist.barrier(member)
    start = time.monotonic()

    def encode(*args: object, **kwargs: object) -> None:
        raise MemoryError("no room")

    with patch.object(cpu, "encode", encode if group.rank() == 1 else cpu.encode):
        work: Any = thinwire.all_reduce(torch.ones(500), group=member, async_op=True, **HOW)
        error = failure(work.get_future().wait if async_op else work.wait)
    return f"{type(error).__name__}: {error}", time.monotonic() - start


@by_turns("world, async_op", [2, 3], [False, True])
@in_time
def test_the_failure_of_one_rank_is_told_to_all(ranks: RankPool, world: int, async_op: bool) -> None:
    told = ranks(world).run(fail, async_op)
    assert told[1][0] == "MemoryError: no room"
    assert all(seconds < SOON_S for _, seconds in told)
    for text, _ in (told[0], *told[2:]):
        assert text.startswith("PeerError: rank 1 failed in all_reduce(numel=500, op=sum, float32, codec=int8,"), text
        assert "(operation 2 of group " in text
        assert "MemoryError: no room" in text


# --- a store that hangs or is gone ------------------------------------------------------------------------------------
class Hung:
    """A store whose host does not answer."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def check(self, *args: object) -> bool:
        self.over.wait()
        raise ConnectionError("gone")

    set = compare_set = check


def late(group: Group, hung: bool) -> tuple[str | None, str, float]:
    """Rank 1 comes late to a call, and then not at all, while the store hangs or is gone."""
    member = dist.new_group(timeout=timedelta(seconds=LATE_S))
    thinwire.all_reduce(torch.ones(500), group=member, **HOW)
    store = Hung()
    if not hung:
        store.over.set()
    ending = channel_of(member, CPU).failures
    dist.barrier(member)
    with patch.object(ending, "_store", store):
        if group.rank() == 1:
            time.sleep(0.4)
        healthy = failure(lambda: thinwire.all_reduce(torch.ones(500), group=member, **HOW))
        start = time.monotonic()
        error = failure(lambda: group.rank() or thinwire.all_reduce(torch.ones(500), group=member, **HOW))
        seconds = time.monotonic() - start
        dist.barrier()  # until then connections stay open
        store.over.set()
    return healthy and str(healthy), f"{type(error).__name__}: {error}", seconds


@pytest.mark.parametrize("hung", [False, True])
@in_time
def test_without_a_store_a_late_call_goes_on_and_a_lost_one_ends_in_time(ranks: RankPool, hung: bool) -> None:
    (healthy, text, seconds), (other, _, _) = ranks(2).run(late, hung)
    assert healthy is None
    assert other is None
    assert "PeerError: rank 0 waited for rank 1 in all_reduce(numel=500" in text
    assert LATE_S <= seconds < LATE_S + SOON_S


# --- a bit that flips on the way --------------------------------------------------------------------------------------
@pytest.mark.parametrize("variable", ["THINWIRE_CHECKSUM", "THINWIRE_DEBUG"])
@on_ranks(2)
def test_a_checksum_tells_of_a_flipped_bit_and_who_sent_it(group: Group, variable: str) -> None:
    """A sum when all is well, and one when what rank 0 sends changes after its checksum was taken."""
    summed, to_damage = transport.checksums_of, [False]

    def damaged(message: Tensor) -> Tensor:
        sums = summed(message)
        if to_damage.pop() if to_damage else False:
            message.view(torch.uint8).view(-1)[1000] ^= 4
        return sums

    with patch.dict(os.environ, {variable: "1"}), patch.object(transport, "checksums_of", damaged):
        member, x = dist.new_group(), torch.full((100_000,), 127.0)
        thinwire.all_reduce(x, group=member, **HOW)
        assert (x == 254).all()
        dist.barrier()
        to_damage.append(group.rank() == 0)
        text = str(failure(lambda: thinwire.all_reduce(x, group=member, **HOW)))
        dist.barrier()
    assert "a message of " in text
    assert "bytes from rank 0 was damaged in transit: bytes 0 to " in text
    assert re.search(r"all_reduce\(numel=100000, .* at step 1 \(operation 2 of group '\w+'\)", text), text


@pytest.mark.parametrize("verb", ["gather", "exchange", "broadcast", "scatter"])
@on_ranks(2)
def test_a_flipped_bit_of_a_rotation_key_is_noticed(group: Group, verb: str) -> None:
    """In the header of what rank 0 encodes."""
    how: Any = {"group": dist.new_group(), "codec": "lloyd4", "algorithm": "compressed"}
    encode = cpu.encode

    def flipped(how: Any, x: Tensor, wire: Tensor, *args: Any, **options: Any) -> None:
        encode(how, x, wire, *args, **options)
        wire[KEY_AT] ^= int(group.rank() == 0)

    x, whole = torch.ones(600), torch.ones(1200)
    calls: dict[str, Callable[[], Any]] = {
        "gather": lambda: thinwire.all_gather_into_tensor(whole, x, **how),
        "exchange": lambda: thinwire.all_to_all_single(whole.clone(), whole, **how),
        "broadcast": lambda: thinwire.broadcast(x, 0, **how),
        "scatter": lambda: thinwire.reduce_scatter_tensor(x, whole, **how),
    }
    with patch.object(cpu, "encode", flipped):
        text = str(failure(calls[verb]))
    assert group.rank() == 0 or re.search(r"was rotated with key 0x\w+, expected 0x", text), text


@on_ranks(2)
def test_checksums_are_for_all_ranks(group: Group) -> None:
    with patch.dict(os.environ, {"THINWIRE_CHECKSUM": str(group.rank())}):
        alone = str(failure(lambda: thinwire.all_reduce(torch.ones(5), group=dist.new_group(), **HOW)))
    assert "checksums=0; rank 1 runs thinwire" in alone
    assert "checksums=1" in alone


# --- what a failure leaves --------------------------------------------------------------------------------------------
@on_ranks(2, gives=(True, True, True))
def test_a_failure_keeps_nothing_alive(group: Group) -> tuple[bool, bool, bool]:
    """Whether tensor, group and thread end, when the caller has let go of everything but the error."""
    member, x = dist.new_group(), torch.ones(500)
    work: Any = thinwire.all_reduce(x, group=member, async_op=True, **HOW)
    work.wait()
    with patch.object(cpu, "encode", None):
        work = thinwire.all_reduce(x, group=member, async_op=True, **HOW)
        future = work.get_future()
        kept = [failure(work.wait), failure(future.wait), failure(future.value)]
    assert all(kept)
    held = channel_of(member, CPU).scratch.nbytes
    refs = weakref.ref(x), weakref.ref(member)
    dist.barrier()
    dist.destroy_process_group(member)
    del x, member, work, future
    return until(lambda: refs[0]() is None), until(lambda: refs[1]() is None), held == 0


def use_and_destroy(group: Group, kind: str) -> tuple[list[str], list[str], list[float]]:
    """The threads in use, those that are left when the groups are destroyed, and what a call gives even then."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    if kind == "fsdp":
        fully_shard(model)
        handle: Any = thinwire.compress_fsdp(model, "int8")
    else:
        handle = thinwire.DiLoCo(model, optimizer, every=1, codec="int8")
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    used = threads()
    dist.barrier()
    dist.destroy_process_group()
    until(lambda: not threads())
    left, x = threads(), torch.full((3,), 127.0)
    thinwire.all_reduce(x, group=group, **HOW)
    del handle  # was not closed, and held until now
    return used, left, x.tolist()


@pytest.mark.parametrize("kind", ["fsdp", "diloco"])
@in_time
def test_threads_end_with_the_groups_whoever_holds_them(ranks: RankPool, kind: str) -> None:
    world = ranks.fresh(2)
    for used, left, again in world.run(use_and_destroy, kind):
        assert used
        assert not left
        assert again == [254.0] * 3
    world.close()


# --- callbacks, forks, and the end of a process -----------------------------------------------------------------------
@on_ranks(2)
def test_a_callback_may_start_calls_of_its_group_but_not_wait_for_them(group: Group) -> None:
    """A callback that waits for its own group, and one that only starts something: on each rank in turn."""
    member = dist.new_group()
    thinwire.all_reduce(torch.ones(500), group=member, **HOW)
    for chosen in range(2):
        y = torch.full((500,), 127.0)
        refused: list[object] = []

        def waits(done: object, y: Tensor = y, refused: list[object] = refused) -> Any:
            refused.append(failure(lambda: thinwire.all_reduce(y, group=member, **HOW)))
            return thinwire.all_reduce(y, group=member, async_op=True, **HOW)

        if group.rank() == chosen:  # the call cannot end before the other rank comes
            work: Any = thinwire.all_reduce(torch.ones(500), group=member, async_op=True, **HOW)
            started = work.get_future().then(waits)
            dist.barrier()
            started.wait().wait()
            assert "a callback of a future waits for a collective of its own group" in str(refused[0])
        else:
            dist.barrier()
            thinwire.all_reduce(torch.ones(500), group=member, **HOW)
            for _ in range(2):  # also the one whose end must not be waited for
                thinwire.all_reduce(y, group=member, **HOW)
        assert y[:2].tolist() == [508.0, 508.0]


@on_ranks(2, gives=[7, 7])
def test_a_forked_child_is_told_that_the_group_is_not_its_own(group: Group) -> list[int]:
    """How children end that call the group of their parent: one that it has used, one that it has not."""
    thinwire.all_reduce(torch.ones(500), **HOW)
    found = []
    for member in (group, dist.new_group()):
        child = os.fork()
        if not child:
            error = failure(lambda member=member: thinwire.all_reduce(torch.ones(500), group=member, **HOW))
            os._exit(7 if isinstance(error, CollectiveError) and "was forked" in str(error) else 1)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    thinwire.all_reduce(torch.ones(500), **HOW)
    return found


# --- jobs that are started again --------------------------------------------------------------------------------------
KINDS = [pytest.param(kind, marks=pytest.mark.program(str(TESTS / "elastic.py"), kind)) for kind in ("ddp", "fsdp")]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_loses_ranks_goes_on_from_its_checkpoint_with_the_same_bits(program: Ended, kind: str) -> None:
    """See tests/elastic.py: one rank is killed in a backward pass, one while it writes the checkpoint."""
    assert program.status == 0, program.told
    found = json.loads((program.folder / "found.json").read_text())
    kills = found["kills"]
    assert found["status"] == {"whole": 0, "broken": 0}, found
    assert found["begun"] == {"whole": [0], "broken": [0, kills["backward"], kills["writing"]]}, found
    assert found["same"], found
    assert found["numbers"] > 10
    assert program.alone
