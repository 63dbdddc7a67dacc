"""Messages that go to NCCL without torch, without a GPU: who sends them when, and what watches them."""

import contextlib
import ctypes
import io
import os
import sys
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ranks import RankPool
from thinwire.collectives import nccl, watchdog
from thinwire.collectives.transport import StreamTransport, Tags
from thinwire.collectives.watchdog import Watchdog
from thinwire.errors import CollectiveError

STILL = 10.0  # seconds, the timeout of the group
CARD = torch.device("cuda", 1)


class Event:
    """An event of a stream that may stand still."""

    still = False  # the stream, from now on

    def __init__(self) -> None:
        self.stuck = False

    def record(self, stream: object) -> None:
        self.stuck = Event.still

    def query(self) -> bool:
        return not self.stuck


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Event, "still", False)
    monkeypatch.setattr(watchdog, "_live", weakref.WeakSet())
    monkeypatch.setattr(watchdog, "_watch", watchdog._live.add)
    monkeypatch.setattr(watchdog, "current_stream", lambda index: f"stream of {index}")
    return Watchdog("dp", 3, lambda: STILL, CARD, int)


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_message_that_does_not_come_to_its_end_ends_the_process(
    dog: Watchdog, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the host goes on with other messages meanwhile, or waits for it."""
    ended: list[int] = []
    now = 0
    monkeypatch.setattr(os, "abort", lambda: ended.append(now))
    for now in range(30):
        dog.note()
        dog.look(now)
    monkeypatch.setattr(Event, "still", True)
    dog.note()
    for now in range(30, 60):
        if runs_ahead:
            dog.note()
        dog.look(now)
    assert ended[0] == 41
    said = capsys.readouterr().err
    assert "rank 3, in messages of group 'dp', waited for the group's timeout of 10 s" in said


def test_a_connection_that_nccl_has_lost_ends_the_process_soon(
    dog: Watchdog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not at once: the lookouts may know better, and end the message."""
    ended: list[int] = []
    codes = {3: 6, 4: 6, 5: 0} | dict.fromkeys(range(10, 60), 6)
    now = 0
    patient = Watchdog("dp", 3, lambda: 1000.0, CARD, lambda: codes.get(now, 0))
    monkeypatch.setattr(os, "abort", lambda: ended.append(now))
    monkeypatch.setattr(Event, "still", True)
    patient.note()
    for now in range(30):
        patient.look(now)
    assert ended[0] == 26  # the first that is more than 15 s after the tenth
    assert "rank 3, in messages of group 'dp', lost a rank: NCCL reports error 6" in capsys.readouterr().err
    assert patient._taken is not None
    assert isinstance(patient._taken[0], Event)
    patient._taken[0].stuck = False
    monkeypatch.setattr(Event, "still", False)
    patient.note()
    ended.clear()
    for now in range(30, 60):
        patient.look(now)
    assert ended == []  # no message is under way


def test_the_process_ends_though_nobody_can_be_told(dog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(os, "abort", lambda: ended.append(True))
    monkeypatch.setattr(Event, "still", True)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.stderr.close()
    dog.note()
    dog.look(0)
    with pytest.raises(ValueError, match="closed file"):
        dog.look(STILL + 1)
    assert ended == [True]


def waited(group: dist.ProcessGroup) -> list[float]:
    """How long messages may take, by the watchdog of a group whose timeout is changed later."""
    member = dist.new_group(timeout=timedelta(seconds=7))
    with patch.object(torch.cuda, "Event", Event):
        link = StreamTransport(member, Tags(), torch.device("cpu"))
    found = [link._watchdog._timeout_s()]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=9), member)
    return [*found, link._watchdog._timeout_s()]


def test_the_timeout_of_a_group_may_be_changed(ranks: RankPool) -> None:
    assert ranks(2).run(waited) == [[7, 9]] * 2


def test_a_host_that_is_always_ahead_is_not_late(dog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look finds a message under way, but never the same one for long."""
    monkeypatch.setattr(os, "abort", lambda: pytest.fail("ended"))
    monkeypatch.setattr(Event, "still", True)
    for now in range(50):
        dog.note()
        dog.look(now)
        if now % 5 == 4 and dog._taken is not None:
            assert isinstance(dog._taken[0], Event)
            dog._taken[0].stuck = False


def test_captured_messages_are_not_noted(dog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their events would never come up."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Event, "still", True)
    dog.note()
    assert dog._last.query()
    assert dog not in watchdog._live


def test_nobody_holds_what_was_looked_at(dog: Watchdog) -> None:
    held = [Watchdog("other", 0, lambda: STILL, CARD, int)]
    held[0].note()
    gone = weakref.ref(held[0])
    watchdog.look_at_all()
    held.clear()
    assert gone() is None


def test_a_forked_child_watches_nothing(dog: Watchdog) -> None:
    dog.note()
    assert dog in watchdog._live
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        free = watchdog._lock.acquire(blocking=False)
        os.write(writing, bytes([free, not watchdog._live, watchdog._thread is None]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 9) == bytes([True] * 3)
    os.close(reading)
    os.close(writing)
    assert not watchdog._lock.locked()


# --- who sends --------------------------------------------------------------------------------------------------------


class Library:
    """Stands in for NCCL: verbs that note what they were given."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []
        self.code = 0

    def verbs(self) -> dict[str, Any]:
        return {name: lambda *args, name=name: self.take(name, *args) for name in nccl._SIGNATURES}

    def take(self, *args: Any) -> int:
        self.given.append(args)
        return self.code


def group_with(**backend: Any) -> Any:
    return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(**backend))


def test_messages_are_given_to_nccl_as_torch_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    current = [CARD.index]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    library = Library()
    communicators = [5, 5, 0, 5]
    group = group_with(_comm_ptr=lambda: communicators.pop(0))
    direct = nccl.Direct(group, CARD, library.verbs())
    whole, other = torch.zeros(2, 12, dtype=torch.uint8)
    assert direct.all_gather(whole, whole[4:8])
    assert direct.all_to_all(other, whole, 3)
    start, end = whole.data_ptr(), other.data_ptr()
    assert library.given == [
        ("ncclAllGather", start + 4, start, 4, 1, 5, 71),
        ("ncclAlltoAll", start, end, 4, 1, 5, 71),
    ]
    assert not direct.all_gather(whole, whole[4:8])  # torch has no communicator there
    states = [7, 0]
    direct._ask_error = lambda communicator, found: setattr(found._obj, "value", states.pop(0)) or 0
    communicators.append(5)
    library.code = 7  # in progress
    assert direct.all_gather(whole, whole[4:8])
    assert states == []
    library.code = 3
    with pytest.raises(torch.distributed.DistBackendError, match="error 3"):
        direct.all_gather(whole, whole[4:8])
    current[0] = 0
    communicators.append(6)  # of the current device
    assert not direct.all_gather(whole, whole[4:8])


def test_nccl_is_asked_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    answers = [(5, 6), (5, 7), (5, 0), (0, 6), (None, 6)]

    def communicator() -> int:
        if answers[0][0] is None:
            raise RuntimeError("aborted")
        return answers[0][0]

    def ask(communicator: int, found: Any) -> int:
        found._obj.value = answers[0][1]
        return 0

    verbs = {**Library().verbs(), "ncclCommGetAsyncError": ask}
    direct = nccl.Direct(group_with(_comm_ptr=communicator), CARD, verbs)
    with direct.aborting:
        assert direct.error() == 0
    found = []
    while answers:
        found.append(direct.error())
        answers.pop(0)
    assert found == [6, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("THINWIRE_NCCL", "torch"),
        ("TORCH_NCCL_USE_COMM_NONBLOCKING", "1"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1"),
        ("NCCL_BLOCKING_WAIT", "1"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"),  # the process goes on
        ("NCCL_ASYNC_ERROR_HANDLING", "2"),
    ],
)
def test_torch_sends_where_it_is_told_something_unusual(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_verbs", Library().verbs)
    usual = group_with(_comm_ptr=lambda: 5)
    assert nccl.direct(usual, CARD) is not None
    config = SimpleNamespace(blocking=0)
    assert nccl.direct(group_with(_comm_ptr=lambda: 5, options=SimpleNamespace(config=config)), CARD) is None
    assert nccl.direct(group_with(), CARD) is None  # of another kind than NCCL's own
    monkeypatch.setenv(name, value)
    assert nccl.direct(usual, CARD) is None
    assert nccl.host_waits() == name.endswith("BLOCKING_WAIT")


def test_a_sender_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_NCCL", "Torch")
    with pytest.raises(CollectiveError, match="THINWIRE_NCCL must be direct or torch, got 'Torch'"):
        nccl.direct(group_with(_comm_ptr=lambda: 5), CARD)


def test_torch_sends_where_its_library_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str, mode: int) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", nothing)
    nccl._verbs.cache_clear()
    try:
        assert nccl._verbs() is None
    finally:
        nccl._verbs.cache_clear()
