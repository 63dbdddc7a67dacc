"""The backend "thinwire": which calls travel in which codec, with which numbers, and what ends or refuses a group."""

import copy
import functools
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import thinwire
from cases import digest, on_ranks, seeded
from ranks import RankPool
from thinwire.collectives import groups, traffic
from thinwire.errors import CodecError, CollectiveError, DisagreementError, PeerError
from thinwire.group import ThinwireGroup
from thinwire.group.rules import DEFAULT_RULES, OPERATIONS, GroupRules, environment_rules

Group = dist.ProcessGroup
CPU = torch.device("cpu")
ALL = "; ".join(f"{operation}=int8" for operation in OPERATIONS)
EXACT = (torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SUM = dist.ReduceOp.SUM
MANY = 40_000  # elements, above the least size of the default rules


def made(rules: str | None = None, backend: str = "cpu:thinwire", **how: Any) -> Any:
    return dist.new_group(backend=backend, pg_options=thinwire.GroupOptions(rules), **how)


def numbers(rank: int, numel: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Tensor:
    found = torch.randn(numel, generator=seeded(rank, numel)) * 10
    if dtype == torch.bool:
        return found.gt(0).to(device)
    return (found.abs() if dtype == torch.uint8 else found).to(device, dtype)


# --- rules ------------------------------------------------------------------------------------------------------------


def test_the_first_rule_that_fits_decides() -> None:
    rules = GroupRules("all_reduce[bfloat16]=none; all_reduce=int4:block=64@1000 ; all_reduce = lloyd4@10;send=bf16")
    assert str(rules.find("all_reduce", torch.float32, 1000)) == "int4:block=64"
    assert str(rules.find("all_reduce", torch.float32, 999)) == "lloyd4"
    assert rules.find("all_reduce", torch.float32, 9) is None
    assert rules.find("all_reduce", torch.bfloat16, 5000) is None
    assert str(rules.find("send", torch.float16, 1)) == "bf16"
    assert rules.find("all_gather", torch.float32, 10**6) is None
    assert str(GroupRules(str(rules))) == str(rules)
    for dtype in EXACT:
        assert GroupRules(ALL).find("all_reduce", dtype, 10**6) is None
    default = GroupRules(DEFAULT_RULES)  # sums alone
    assert [op for op in OPERATIONS if default.find(op, torch.float32, 10**9)] == ["all_reduce", "reduce_scatter"]
    assert default.find("all_reduce", torch.float32, 32767) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("all_reduce", r"must read operation=codec@elements.*got 'all_reduce'"),
        ("reduce=int8", "operation must be one of all_reduce, reduce_scatter"),
        ("all_reduce[int64]=int8", "dtype must be one of float32, bfloat16, float16, got 'int64'"),
        ("all_reduce=int9", "in the rule 'all_reduce=int9' .*: unknown codec 'int9'"),
        ("all_reduce=int8,send=int8", "a semicolon ends a rule"),
        ("all_reduce=int8@many", "elements must be a whole number, got 'many'"),
        ("broadcast=topk", "serves sums only"),
        (5, "must be a string such as 'all_reduce=int8@16384; send=int8', got 5"),
    ],
)
def test_wrong_rules_are_refused(text: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((CollectiveError, CodecError), match=said):
        thinwire.GroupOptions(text)
    monkeypatch.setenv("THINWIRE_RULES", str(text))
    with pytest.raises((CollectiveError, CodecError), match=r"^THINWIRE_RULES: "):
        environment_rules()


def test_options_are_pickled_with_their_rules() -> None:
    for rules in ("", "'none'", "'all_reduce=int8@5; send[bfloat16]=int4@1'"):
        options = thinwire.GroupOptions(*filter(None, [rules.strip("'")]))
        assert repr(pickle.loads(pickle.dumps(options))) == repr(copy.copy(options)) == f"GroupOptions({rules})"


@on_ranks(2)
def test_rules_come_from_options_environment_or_defaults(group: Group) -> None:
    with mock.patch.dict(os.environ, THINWIRE_RULES="all_reduce=int4"):
        by_environment: Any = dist.new_group(backend="cpu:thinwire")
        both: Any = dist.new_group(backend="cpu:thinwire,cuda:thinwire", pg_options=thinwire.GroupOptions("send=int8"))
    default: Any = dist.new_group(backend="thinwire")
    names, override = ("a", "b"), {"b": ("cpu:thinwire", thinwire.GroupOptions(ALL))}
    mesh = init_device_mesh("cpu", (1, group.size()), mesh_dim_names=names, backend_override=override)
    of_mesh: Any = mesh.get_group("b")
    assert not isinstance(mesh.get_group("a"), ThinwireGroup)
    assert type(both.inner) is dist.ProcessGroup
    found = [str(one.rules) for one in (by_environment, both, default, of_mesh)]
    assert found == ["all_reduce=int4@1", "send=int8@1", str(GroupRules(DEFAULT_RULES)), str(GroupRules(ALL))]


@on_ranks(3)
def test_rules_are_compared(group: Group) -> str:
    with pytest.raises(DisagreementError) as caught:
        made("all_reduce=int8" if group.rank() else "all_reduce=int4")
    with pytest.raises(CollectiveError, match=r"must be thinwire.GroupOptions, got Options"):
        dist.new_group(backend="cpu:thinwire", pg_options=type(thinwire.GroupOptions()).__base__("gloo"))
    assert "rank 0 called a group with the rules all_reduce=int4@1; ranks 1, 2 called" in str(caught.value)
    return str(caught.value)


# --- every operation and dtype ----------------------------------------------------------------------------------------


def into(out: Any, verb: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """What a verb makes of its first argument."""
    work = verb(out, *args, **how)
    if isinstance(work, dist.Work):
        work.wait()
    return out


def batched(x: Tensor, group: Group, batch: Callable[..., Any] = dist.batch_isend_irecv, **how: Any) -> Tensor:
    """What comes from the rank before while x goes to the next."""
    came, rank, world = torch.zeros_like(x), group.rank(), group.size()
    ops = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % world, tag=1),
        dist.P2POp(dist.irecv, came, group=group, group_peer=(rank - 1) % world, tag=1),
    ]
    for work in batch(ops, **how):
        work.wait()
    return came


def results(group: Any, dtype: torch.dtype, numel: int, device: torch.device = CPU) -> dict[str, Any]:
    """What every operation makes of numbers of a dtype."""
    rank, world, run = group.rank(), group.size(), functools.partial(into, group=group)
    x, wide = numbers(rank, numel, dtype, device), numbers(rank, world * numel, dtype, device)
    sent, mine = [numel + to for to in range(world)], [numel + rank] * world
    uneven, none = numbers(rank, sum(sent), dtype, device), torch.zeros_like(x)
    reduced = run(x.clone(), dist.reduce, group_dst=0)
    out: dict[str, Any] = {f"all_reduce {op}": run(x.clone(), dist.all_reduce, op) for op in (SUM, dist.ReduceOp.MAX)}
    out |= {
        "all_gather_single": run(x.new_zeros(world * numel), groups.all_gather_single, x),
        "all_gather": run([none.clone() for _ in range(world)], dist.all_gather, x, async_op=True),
        "reduce_scatter": run(none.clone(), groups.reduce_scatter_single, wide.clone()),
        "reduce_scatter list": run(none.clone(), dist.reduce_scatter, list(wide.clone().view(world, -1))),
        "all_to_all": run(torch.zeros_like(wide), dist.all_to_all_single, wide),
        "all_to_all uneven": run(x.new_zeros(sum(mine)), dist.all_to_all_single, uneven, mine, sent),
        "broadcast": run(x.clone(), dist.broadcast, group_src=world - 1),
        "reduce": reduced if rank == 0 else None,
        "objects": run([None] * world, dist.all_gather_object, {"rank": rank, "x": 0.1}),
    }
    if world > 1:
        out["recv"] = torch.zeros_like(x)
        send = functools.partial(dist.send, x, group=group, group_dst=(rank + 1) % world)
        receive = functools.partial(dist.recv, out["recv"], group=group, group_src=(rank - 1) % world)
        for call in (receive, send) if rank % 2 else (send, receive):
            call()
        out["batch"] = batched(x, group)
    dist.barrier(group=group, device_ids=[device.index] if device.index is not None else None)
    return out


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@on_ranks(1, 2, 3, 4)
def test_what_has_no_rule_has_the_bits_of_gloo(group: Group) -> None:
    """Small calls under the default rules, and other dtypes under any: the bits of gloo."""
    default, everything = made(), made(ALL)
    for dtype in (*FLOATS, *EXACT):
        mine = default if dtype in FLOATS else everything
        expected, found = results(group, dtype, 300), results(mine, dtype, 300)
        wrong = [name for name in expected if not same(expected[name], found[name])]
        assert not wrong, (dtype, wrong)
    assert traffic(default) == traffic(everything) == (0, 0)
    large = results(default, torch.float32, MANY)
    expected = results(group, torch.float32, MANY)
    changed = {name for name in expected if not same(expected[name], large[name])}
    compressed = {"all_reduce RedOpType.SUM", "reduce_scatter", "reduce_scatter list"}
    assert changed == (compressed if group.size() > 1 else set())


def compressed(
    group: Group, codec: str, dtype: torch.dtype, device: torch.device = CPU, backend: str = "cpu:thinwire"
) -> list[str]:
    """Calls with a rule give the bits of thinwire's verbs on a plain group."""
    rank, world, numel = group.rank(), group.size(), 3001
    mine = made("; ".join(f"{operation}={codec}" for operation in OPERATIONS), backend)
    found = results(mine, dtype, numel, device)
    how: Any = {"codec": codec, "algorithm": "compressed", "step": 0, "group": group}
    x, wide = numbers(rank, numel, dtype, device), numbers(rank, world * numel, dtype, device)
    sent, mine_ = [numel + to for to in range(world)], [numel + rank] * world
    uneven = numbers(rank, sum(sent), dtype, device)
    source = numbers(world - 1, numel, dtype, device) if rank == world - 1 else x.clone()
    total, came = x.clone(), batched(x, group, thinwire.batch_isend_irecv, codec=codec)
    thinwire.all_reduce(total, group=group, codec=codec, algorithm="one_shot" if world == 2 else "two_phase")
    run, none = functools.partial(into, **how), torch.zeros_like(x)
    expected = {
        "all_reduce RedOpType.SUM": total,
        "all_gather_single": (gathered := run(x.new_zeros(world * numel), thinwire.all_gather_into_tensor, x)),
        "all_gather": [*gathered.chunk(world)],
        "reduce_scatter": run(none.clone(), thinwire.reduce_scatter_tensor, wide.clone()),
        "all_to_all": run(torch.zeros_like(wide), thinwire.all_to_all_single, wide),
        "all_to_all uneven": run(x.new_zeros(sum(mine_)), thinwire.all_to_all_single, uneven, mine_, sent),
        "broadcast": run(source, thinwire.broadcast, group_src=world - 1),
        "recv": came,
    }
    expected |= {"reduce_scatter list": expected["reduce_scatter"], "batch": came}
    assert not [name for name, one in expected.items() if not same(found[name], one)]
    exact_ones = results(group, dtype, numel, device)
    for name in ("all_reduce RedOpType.MAX", "reduce", "objects"):
        assert same(found[name], exact_ones[name])
    assert not same(found["recv"], exact_ones["recv"])
    return [digest(found[name].cpu()) for name in ("all_reduce RedOpType.SUM", "all_gather_single", "broadcast")]


@pytest.mark.parametrize(
    ("world", "codec", "dtype"),
    [(2, "int8", torch.float32), (3, "int8", torch.bfloat16), (4, "int4", torch.float32), (2, "e4m3", torch.float16)],
)
def test_what_has_a_rule_has_the_bits_of_the_verbs(ranks: RankPool, world: int, codec: str, dtype: torch.dtype) -> None:
    found = ranks(world).run(compressed, codec, dtype)
    assert all(one == found[0] for one in found)


def test_every_call_of_torch_is_defined() -> None:
    """See [Note: Inner group]: with the GIL held, a barrier waited for a thread of gloo that waited for the GIL."""
    calls = [name for name in dir(dist.ProcessGroup) if "Work" in str(getattr(dist.ProcessGroup, name).__doc__)]
    assert {"barrier", "reduce", "allreduce"} <= set(calls)
    assert set(calls) - set(vars(ThinwireGroup)) <= {"_register_on_completion_hook", "reconfigure"}


# --- works, windows, lists, ends --------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_works_windows_subgroups_and_ends(group: Group) -> None:
    rank, world = group.rank(), group.size()
    mine = made(ALL)
    x = torch.ones(MANY)
    work = dist.all_reduce(x, group=mine, async_op=True)
    (out,) = work.get_future().wait()
    assert out is x
    assert work.is_completed()
    assert work.is_success()
    assert work.wait(timedelta(seconds=9))
    assert torch.allclose(x, torch.full((MANY,), float(world)), rtol=1e-2)

    def sum_once_more(done: Any) -> float:
        dist.all_reduce(total := done.value()[0].clone(), group=mine)
        return total[0].item() / world

    again = dist.all_reduce(x, group=mine, async_op=True).get_future().then(sum_once_more)
    assert round(again.wait()) == world**2
    tensors = [torch.ones(50), torch.full((70,), 2.0)]
    with dist._coalescing_manager(mine, torch.device("cpu"), async_ops=True) as window:
        for tensor in tensors:
            dist.all_reduce(tensor, group=mine)
    window.wait()
    assert [round(tensor[0].item()) for tensor in tensors] == [world, 2 * world]
    mine._start_coalescing(torch.device("cpu"))
    inbox = torch.zeros(80)
    mine.send([torch.full((80,), float(rank))], (rank + 1) % world, 4)
    mine.recv([inbox], (rank - 1) % world, 4)
    together = mine._end_coalescing(torch.device("cpu"))
    together.get_future().wait()
    assert together.is_completed()
    assert round(inbox[0].item()) == (rank - 1) % world
    with pytest.raises(CollectiveError, match="not coalescing"):
        mine._end_coalescing(torch.device("cpu"))
    if rank == 0:
        sources = {dist.recv(torch.zeros(64), group=mine) for _ in range(world - 1)}
        assert sources == set(range(1, world))
    else:
        dist.send(torch.ones(64), 0, group=mine)
    sub = made(ALL, ranks=[world - 1, 0], timeout=timedelta(seconds=30))
    if rank in (0, world - 1):
        dist.broadcast(x, world - 1, group=sub)
        assert traffic(sub) != (0, 0)
        assert groups.timeout_s(sub) == 30
        dist.destroy_process_group(sub)
        assert not [thread.name for thread in threading.enumerate() if sub.group_name in thread.name]
    assert (dist.get_backend(mine), mine.name()) == ("cpu:thinwire", "thinwire")


@on_ranks(2, 3)
def test_nothing_is_compressed_twice(group: Group) -> None:
    """thinwire's verbs, and compress_ddp, run on the inner group: nothing is compressed twice."""
    mine = made("all_reduce=int4")
    x = numbers(group.rank(), MANY)
    expected = x.clone()
    thinwire.all_reduce(expected, codec="int8", algorithm="two_phase")
    thinwire.all_reduce(x, group=mine, codec="int8", algorithm="two_phase")
    assert torch.equal(x, expected)
    grads = []
    for which in (group, mine):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100), process_group=which)
        thinwire.compress_ddp(model, "int8")
        model(numbers(group.rank(), 300).view(3, 100)).square().sum().backward()
        grads.append(model.module.weight.grad)
    assert torch.equal(*grads)
    assert [getattr(group, "inner", group), mine.inner] == [groups.resolve(one) for one in (group, mine)]


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch splits groups of the CPU since 2.15")
@on_ranks(3)
def test_a_group_splits_into_groups_that_compress(group: Group) -> None:
    mine = made("all_reduce=int8")
    found: Any = dist.split_group(mine, [[0], [1, 2]])
    assert isinstance(found, ThinwireGroup)
    assert str(found.rules) == "all_reduce=int8@1"
    x = torch.full((100,), 1.0 + group.rank())
    dist.all_reduce(x, group=found)
    assert round(x[0].item()) == (1 if group.rank() == 0 else 5)
    dist.barrier(found)
    dist.destroy_process_group(found)


@on_ranks(2)
def test_torchs_debug_level_is_served(group: Group) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        mine = made("all_reduce=int8")
        x = torch.ones(1000)
        dist.all_reduce(x, group=mine)
        dist.all_gather_object([None] * group.size(), 1, group=mine)
        dist.barrier(mine)
        assert round(x[0].item()) == group.size()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@on_ranks(2)
def test_a_fork_is_told(group: Group) -> None:
    mine = made(ALL)
    dist.all_reduce(torch.ones(10), group=mine)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            dist.all_reduce(torch.ones(10), group=mine)
            said = "nothing"
        except BaseException as error:
            said = str(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    dist.all_reduce(torch.ones(10), group=mine)  # the parent goes on
    assert "this process was forked from one that has the group" in os.read(reading, 500).decode()


SOON = timedelta(seconds=1.5)


def summed(mine: Any, limit: timedelta | None) -> Any:
    opts = dist.AllreduceOptions()
    if limit is not None:
        opts.timeout = limit
    return mine.allreduce([torch.ones(100)], opts)


LATE: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {  # what sets a timeout, what waits
    "made": (lambda mine: None, lambda mine: dist.all_reduce(torch.ones(100), group=mine)),
    "set": (lambda mine: mine.set_timeout(SOON), lambda mine: dist.all_reduce(torch.ones(100), group=mine)),
    "set, first": (lambda mine: mine.set_timeout(SOON), lambda mine: dist.all_reduce(torch.ones(99), group=mine)),
    "set by torch": (
        lambda mine: getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)(SOON, mine),
        lambda mine: dist.recv(torch.ones(100), 1, group=mine),
    ),
    "of a call": (lambda mine: None, lambda mine: summed(mine, SOON).wait()),
    "of a wait": (lambda mine: None, lambda mine: summed(mine, None).wait(SOON)),
    "of a message": (lambda mine: None, lambda mine: dist.irecv(torch.ones(9), 1, group=mine).wait(SOON)),
}


def late(group: Group) -> dict[str, tuple[float, str]]:
    """How long rank 0 waits for rank 1, and what it is told: in every way at once, each in a group of its own."""
    groups_by_way = {how: made(ALL, timeout=SOON if how == "made" else timedelta(seconds=60)) for how in LATE}
    for how, mine in groups_by_way.items():
        summed(mine, None).wait()
        LATE[how][0](mine)

    def wait(how: str) -> tuple[float, str]:
        began = time.monotonic()
        with pytest.raises((PeerError, TimeoutError)) as caught:
            LATE[how][1](groups_by_way[how])
        return time.monotonic() - began, str(caught.value)

    dist.barrier(group)
    with ThreadPoolExecutor(len(LATE)) as threads:
        found = dict(zip(LATE, threads.map(wait, LATE), strict=True)) if group.rank() == 0 else {}
    dist.barrier(group)
    return found


def dead(group: Group) -> list[str]:
    mine = made(ALL)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 9), process_group=mine)
    for _ in range(2):  # its buckets are final
        model(torch.ones(10)).sum().backward()
    loss = model(torch.ones(10)).sum()
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = []
    for call in (loss.backward, lambda: dist.isend(torch.ones(9), 1, mine)):
        with pytest.raises((RuntimeError, CollectiveError)) as caught:  # DDP's reducer, in C++, quotes the error
            call()
        found.append(str(caught.value))
    return found


def test_a_late_rank_is_named_within_the_timeout(ranks: RankPool) -> None:
    """gloo's own messages keep the timeout of the group's first day."""
    for how, (taken, said) in ranks(2).run(late)[0].items():
        assert 1.4 < taken < 15, how
        verb = "recv(numel" if "torch" in how or "message" in how else "all_reduce(numel"
        if how in ("of a call", "of a wait"):
            assert said == "the collective did not end within 0:00:01.500000", how
        else:
            assert re.match(rf"rank 0 (waited for|lost) rank 1 in {re.escape(verb)}", said), (how, said)
            assert ("the group's timeout of 1.5 s" in said) == (how != "of a message"), (how, said)


def test_a_dead_rank_is_named(ranks: RankPool) -> None:
    first, second = ranks.fresh(2).run(dead, lost=1)[0]
    assert "PeerError: rank 0 lost rank 1 in all_reduce(numel=99" in first
    assert "an earlier collective of this group failed" in second


def again(group: Group, path: str) -> list[int]:
    """Destroy the default group, and make one that compresses in its place, twice."""
    rank, world = group.rank(), group.size()
    dist.destroy_process_group()
    found = []
    for count in range(2):
        store = dist.FileStore(f"{path}{count}", world)
        dist.init_process_group("cpu:thinwire", store=store, rank=rank, world_size=world)
        x = torch.ones(MANY)
        dist.all_reduce(x)
        found.append(round(x[0].item()) if traffic() != (0, 0) else 0)
        sub: Any = dist.new_group()
        assert str(sub.rules) == str(GroupRules(DEFAULT_RULES))
        assert sub.inner is not dist.group.WORLD.inner  # type: ignore[union-attr]
        (dist.destroy_process_group if count == 0 else dist.distributed_c10d._abort_process_group)()
    return found


def test_the_default_group_ends_and_begins_again(ranks: RankPool, tmp_path: Any) -> None:
    fresh = ranks.fresh(2)
    try:
        assert fresh.run(again, str(tmp_path / "store")) == [[2, 2], [2, 2]]
    finally:
        fresh.close(kill=True)
