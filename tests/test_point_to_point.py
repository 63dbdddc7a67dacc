"""send, recv, isend, irecv, batch_isend_irecv: what arrives and in which order; what disagreement and loss raise."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from cases import on_ranks, seeded, wire_of
from ranks import RankPool
from thinwire.collectives import transport
from thinwire.collectives.chunks import Key
from thinwire.errors import CollectiveError, PeerError, WireError

Group = dist.ProcessGroup
CODECS = ("int8", "int4:block=32", "lloyd4", "bf16", "none")
SIZES = (0, 1, 127, 128, 129, 5000)


def numbers(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of both signs, with zeros and a huge one."""
    found = torch.randn(numel, generator=seeded(rank, numel), dtype=torch.float32)
    found[::7] = 0
    if numel > 100:
        found[50] = 1e4
    return found.to(dtype)


def decoded(rank: int, x: Tensor, codec: str, step: int = 0) -> Tensor:
    """What the codec alone makes of a rank's numbers: the definition of what arrives."""
    coder, out = thinwire.codec(codec), torch.empty_like(x)
    at = Key(step, 0).of(rank)
    coder.decode(wire_of(coder, x, step=at), out, step=at)
    return out


def around(group: Group, codec: str, dtype: torch.dtype) -> None:
    """Every rank sends to the next one, by each verb; what comes is what the codec decodes, bit for bit."""
    rank, world = group.rank(), group.size()
    to, source = (rank + 1) % world, (rank - 1) % world
    for numel in SIZES:
        x, out = numbers(rank, numel, dtype), torch.full((numel,), 3.0, dtype=dtype)
        works = [thinwire.irecv(out, source, codec=codec), thinwire.isend(x, to, codec=codec)]
        x.zero_()  # it is encoded already
        for work in works:
            assert work.wait() is True
            assert work.is_completed()
        expected = decoded(source, numbers(source, numel, dtype), codec)
        assert torch.equal(out, expected), (numel, codec, dtype)
        assert works[0].source_rank() == source
        wide = torch.zeros(numel, 2, dtype=dtype)
        ops = [
            dist.P2POp(dist.isend, numbers(rank, numel, dtype), to, tag=3),
            dist.P2POp(dist.irecv, wide[:, 1], source, tag=3),
        ]
        for work in thinwire.batch_isend_irecv(ops, codec=codec):
            work.wait()
        assert torch.equal(wide[:, 1], expected)
        assert not wide[:, 0].any()


def around_blocking(group: Group) -> None:
    """send and recv, ranks taking turns; steps vary what a rotating codec makes of the same numbers."""
    rank, world = group.rank(), group.size()
    found = []
    for step in (None, 7):
        for source in range(world):
            if rank == source:
                thinwire.send(numbers(source, 999), (source + 1) % world, codec="lloyd2", step=step)
            elif rank == (source + 1) % world:
                out = torch.empty(999)
                assert thinwire.recv(out, source, codec="lloyd2", step=step) == source
                assert torch.equal(out, decoded(source, numbers(source, 999), "lloyd2", step or 0))
                found.append(out)
    assert not torch.equal(found[0], found[1])


@on_ranks(2, 4)
def test_a_message_from_any_rank(group: Group) -> None:
    """Rank 0 receives from whoever sends; a future holds the tensor; plain messages of the same tag do not mix in."""
    rank, world = group.rank(), group.size()
    if rank:
        plain = dist.isend(torch.full((300,), float(rank)), 0, tag=5)
        work = thinwire.isend(numbers(rank, 300), 0, tag=5, codec="lloyd4")
        assert work.get_future().wait()[0].shape == (300,)
        plain.wait()
        return
    sources = set()
    for _ in range(world - 1):
        out = torch.empty(300)
        source = thinwire.recv(out, tag=5, codec="lloyd4")
        assert torch.equal(out, decoded(source, numbers(source, 300), "lloyd4"))
        sources.add(source)
    assert sources == set(range(1, world))
    for source in sorted(sources):
        raw = torch.empty(300)
        dist.recv(raw, source, tag=5)
        assert torch.equal(raw, torch.full((300,), float(source)))


@on_ranks(2, 4)
def test_many_messages_at_once(group: Group) -> None:
    """A late message holds up neither a sum nor the messages after it; equal ones arrive in the order of sending."""
    rank, world = group.rank(), group.size()
    other = (rank + 1) % world
    source = (rank - 1) % world
    late = torch.empty(640)
    waiting = thinwire.irecv(late, source, tag=9)
    total = torch.ones(5000)
    thinwire.all_reduce(total, algorithm="two_phase")
    assert torch.allclose(total, torch.full((5000,), float(world)), rtol=1e-2)
    outs = [torch.empty(256) for _ in range(5)]
    works = [thinwire.irecv(out, source) for out in outs]
    works += [thinwire.isend(torch.full((256,), float(count)), other) for count in range(5)]
    for work in reversed(works):
        work.wait()
    assert [round(out[0].item()) for out in outs] == [0, 1, 2, 3, 4]
    sent = thinwire.isend(torch.ones(640), other, tag=9)
    assert waiting.wait(timedelta(seconds=60))
    sent.wait()
    assert torch.allclose(late, torch.ones(640), rtol=1e-2)


@on_ranks(2)
def test_what_cannot_be_sent_is_refused(group: Group) -> None:
    x = torch.ones(4)
    rank, world = group.rank(), group.size()
    other = (rank + 1) % world
    wrong: list[tuple[Any, str]] = [
        (lambda: thinwire.isend(x), "expected dst or group_dst"),
        (lambda: thinwire.isend(x, rank), f"got rank {rank}; this is rank {rank}"),
        (lambda: thinwire.irecv(x, group_src=world), "got 2"),
        (lambda: thinwire.isend(x, other, group_dst=other), "expected one rank"),
        (lambda: thinwire.isend(x, other, tag=-1), r"tag must be 0\.\.2\*\*29 - 1, got -1"),
        (lambda: thinwire.isend(torch.ones(3, dtype=torch.int64), other), "int64"),
        (lambda: thinwire.irecv(torch.ones(1).expand(4), other), "."),
        (lambda: thinwire.batch_isend_irecv([]), "."),
    ]
    for call, words in wrong:
        with pytest.raises(ValueError, match=words):  # CollectiveError or CodecError
            call()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_rank_sends_to_the_next(ranks: RankPool, world: int) -> None:
    dtypes = {"int8": torch.bfloat16, "lloyd4": torch.float16}
    for codec in CODECS if world == 3 else CODECS[:3]:
        ranks(world).run(around, codec, dtypes.get(codec, torch.float32) if world == 2 else torch.float32)
    ranks(world).run(around_blocking)


@on_ranks(2)
def test_ends_that_disagree_raise_and_read_nothing(group: Group) -> None:
    """Rank 0 sends something else than rank 1 expects, which raises at the timeout of the group."""
    ways = ("codec", "plain", "length")
    mine = {how: dist.new_group(backend="gloo", timeout=timedelta(seconds=1.5)) for how in ways}
    works = []

    def receive(how: str) -> str:
        out = torch.full((500,), 7.0)
        with pytest.raises(PeerError) as caught:
            thinwire.recv(out, 0, mine[how], codec="int4" if how == "codec" else "int8")
        assert torch.equal(out, torch.full((500,), 7.0)), how  # no bytes of another message
        return str(caught.value)

    for how in ways if group.rank() == 0 else ():
        x = torch.ones(400 if how == "length" else 500)
        works.append(
            dist.isend(x, 1, group=mine[how]) if how == "plain" else thinwire.isend(x, 1, mine[how], codec="int8")
        )
    with ThreadPoolExecutor(len(ways)) as threads:
        for said in threads.map(receive, ways if group.rank() else ()):
            assert "waited for rank 0 in recv(numel=500, float32, codec=int" in said
            assert "timeout of 1.5 s" in said
    dist.barrier()  # until then rank 0 holds what it sends


def killed(group: Group) -> str:
    if group.rank() == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError) as caught:
        thinwire.recv(torch.empty(500), 1)
    with pytest.raises(CollectiveError, match="create a new group"):
        thinwire.isend(torch.empty(500), 1)
    return str(caught.value)


def test_a_lost_sender_is_named(ranks: RankPool) -> None:
    said = ranks.fresh(2).run(killed, lost=1)[0]
    assert "rank 0 lost rank 1 in recv(numel=500, float32, codec=int8, from rank 1)" in said


def damaged(group: Group) -> str:
    """With checksums a flipped bit raises, and names the sender."""
    os.environ["THINWIRE_CHECKSUM"] = "1"
    mine = dist.new_group(backend="gloo")
    original = transport.checksums_of
    try:
        if group.rank() == 0:
            transport.checksums_of = lambda message: original(message) ^ 1
            thinwire.send(torch.ones(500), 1, mine)
            return ""
        with pytest.raises(WireError) as caught:
            thinwire.recv(torch.empty(500), 0, mine)
        with pytest.raises(CollectiveError, match=r"an earlier collective|checksums need"):
            thinwire.recv(torch.empty(500), None, mine)
        return str(caught.value)
    finally:
        transport.checksums_of = original
        del os.environ["THINWIRE_CHECKSUM"]


def test_a_damaged_message_is_refused(ranks: RankPool) -> None:
    said = ranks(2).run(damaged)[1]
    assert "from rank 0 was damaged in transit" in said
    assert "recv(numel=500" in said
