"""The backend "thinwire" on NCCL: every operation, unmodified clients, and that the host waits for nothing."""

from typing import Any

import torch
import torch.distributed as dist

import thinwire
from cases import no_host_sync
from ranks import RankPool
from test_group import ALL, compressed, results, same
from test_group_clients import CLIENTS, compared as compared_clients
from test_nccl import each_world, on_nccl, on_worlds
from thinwire.collectives import traffic

NAMES = ("ddp", "fsdp2", "tensor_parallel", "pipelined", "one_forward_one_backward", "experts")


def made(rules: str) -> Any:
    return dist.new_group(backend="cuda:thinwire", pg_options=thinwire.GroupOptions(rules))


def client(group: Any, name: str) -> None:
    place = on_nccl(group)
    run, rules = next(one for one in CLIENTS if one[0].__name__ == name)
    compared_clients(place.group, made(rules), run, place.device)


def exact(group: Any) -> None:
    """What has no rule has NCCL's bits; dtypes and sizes without one send nothing by thinwire's verbs."""
    place = on_nccl(group)
    mine = made("all_reduce=int8@100000")
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        expected = results(place.group, dtype, 300, place.device)
        found = results(mine, dtype, 300, place.device)
        wrong = [name for name in expected if not same(expected[name], found[name])]
        assert not wrong, (dtype, wrong)
    assert traffic(mine) == (0, 0)


def with_rules(group: Any, codec: str) -> None:
    place = on_nccl(group)
    compressed(place.group, codec, torch.float32, place.device, "cuda:thinwire")


def unsynchronized(group: Any) -> None:
    """After the first call of a kind, no call makes the host wait for the GPU."""
    place = on_nccl(group)
    rank, world = group.rank(), group.size()
    mine = made(ALL)
    x = torch.ones(20_000, device=place.device)
    wide, part = torch.ones(world * 4096, device=place.device), torch.ones(4096, device=place.device)
    inbox = torch.zeros(4096, device=place.device)

    def calls() -> None:
        works = [dist.all_reduce(x, group=mine, async_op=True)]
        dist.all_reduce(x, group=mine)
        dist.all_to_all_single(wide, wide.clone(), group=mine)
        dist.broadcast(x, group=mine, group_src=0)
        dist.all_reduce(part.to(torch.float64), group=mine)
        ops = [
            dist.P2POp(dist.isend, part, group=mine, group_peer=(rank + 1) % world),
            dist.P2POp(dist.irecv, inbox, group=mine, group_peer=(rank - 1) % world),
        ]
        works += dist.batch_isend_irecv(ops)
        for work in works:
            work.wait()

    for _ in range(2):
        calls()
    torch.cuda.synchronize()
    with no_host_sync():
        calls()
    torch.cuda.synchronize()
    assert inbox.sub(1).abs().max().item() < 0.01


@each_world
def test_what_has_no_rule_has_the_bits_of_nccl(ranks: RankPool, world: int) -> None:
    ranks(world).run(exact)


@each_world
def test_what_has_a_rule_has_the_bits_of_the_verbs(ranks: RankPool, world: int) -> None:
    ranks(world).run(with_rules, "int8")


@on_worlds(2)
def test_the_host_waits_for_nothing(ranks: RankPool, world: int) -> None:
    ranks(world).run(unsynchronized)


@each_world
def test_clients_run_unmodified(ranks: RankPool, world: int) -> None:
    for name in NAMES:
        ranks(world).run(client, name)
