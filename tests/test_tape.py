"""Launches and messages that C makes after the first time, without a GPU: what is on a tape, and when it is played."""

import ctypes
import gc
import struct
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.collectives import nccl, tapes, transport
from thinwire.collectives.rooms import Room, Scratch
from thinwire.collectives.tapes import Tapes
from thinwire.collectives.transport import StreamTransport
from thinwire.errors import BackendError
from thinwire.kernels import compiling, cpu, is_ahead, tape as taping
from thinwire.kernels.hashing import mix64
from thinwire.kernels.tape import Entry, Number, Player, Tape, Value, numbers, tear, writing, written
from thinwire.kernels.triton import prepared
from thinwire.kernels.triton.prepared import Prepared, Repeated

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason="the C library was not built")

KERNEL, STREAM, COMM = 77, 4321, 999
IN_PROGRESS = 7
BIG = 0xFEDCBA9876543210
POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int
PLACES = ctypes.POINTER(POINTER)
LAUNCH: Any = ctypes.CFUNCTYPE(NUMBER, POINTER, *[ctypes.c_uint] * 7, POINTER, PLACES, POINTER)
VERB: Any = ctypes.CFUNCTYPE(NUMBER, *nccl._VERB)
ASK: Any = ctypes.CFUNCTYPE(NUMBER, *nccl._SIGNATURES["ncclCommGetAsyncError"])


class Card:
    """Stands in for CUDA's driver and NCCL: notes what is started on it."""

    def __init__(self) -> None:
        self.kinds: Sequence[Any] = ()  # of the kernel's arguments
        self.sizes: Sequence[int] = ()  # what the driver says of them
        self.seen: list[tuple[Any, ...]] = []
        self.codes: list[int] = []  # what the next starts return, then 0
        self.states: list[int] = []  # what NCCL says when asked, then 0
        self.cuLaunchKernel, self.verb, self.ask = LAUNCH(self._launch), VERB(self._send), ASK(self._ask)

    def _launch(self, *given: Any) -> int:
        *how, args, extra = given
        found = [ctypes.cast(args[i], ctypes.POINTER(kind))[0] for i, kind in enumerate(self.kinds)]
        return self._send(*how, found, extra)

    def _send(self, *given: Any) -> int:
        self.seen.append(given)
        return self.codes.pop(0) if self.codes else 0

    def _ask(self, communicator: int, state: Any) -> int:
        self.seen.append((communicator,))
        state[0] = self.states.pop(0) if self.states else 0
        return 0

    def cuFuncGetParamInfo(self, kernel: Any, index: Any, offset: Any, size: Any) -> int:  # noqa: N802
        if kernel.value != KERNEL or index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def cuGetErrorName(self, code: int, name: Any) -> int:  # noqa: N802
        name._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS" if code == 700 else None
        return 0

    def kernel(self, *args: int) -> Entry:
        return Entry(taping.launch_address(), KERNEL, (3, 4), 64, 9, args)

    def message(self, source: int = 0, target: int = 0) -> Entry:
        args = (source, target, 55, 0, taping.address_of(self.ask))
        return Entry(taping.address_of(self.verb), 0, (0, 0), 0, 0, args)


def split(number: int) -> tuple[int, ...]:
    """Its halves, as signed numbers of 32 bits."""
    return struct.unpack("<ii", struct.pack("<Q", number))


def launched(*args: Any) -> tuple[Any, ...]:
    """What the card sees of its kernel."""
    return (KERNEL, 3, 4, 1, 64, 1, 1, 9, STREAM, [*args], None)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setattr(taping, "_driver", lambda: made)
    names = {"_cuda_getCurrentRawStream": lambda index: STREAM + index, "_cuda_getDevice": lambda: 0}
    for (name, value), own in zip(names.items(), ("_stream", "_device"), strict=True):
        monkeypatch.setattr(torch._C, name, value, raising=False)
        monkeypatch.setattr(prepared, own, value)
    return made


# --- C ----------------------------------------------------------------------------------------------------------------


def test_c_starts_entries_in_their_order_with_their_arguments(card: Card) -> None:
    card.kinds = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_float)
    half = struct.unpack("<i", struct.pack("<f", -0.5))[0]
    first = card.kernel(100, 5, -7, -(1 << 40), half).words([(0, 1), (1, 2)])
    message = card.message(1, 2).words([(0, 1), (1, 3), (3, 0)])
    last = card.kernel(1 << 47, -1, 1, 2, 0).words([])
    assert Player([*first, *message, *last], 3, 4).play([COMM, 1 << 46, -8, 30], STREAM) == 0
    assert card.seen == [
        launched((1 << 46) + 100, -3, -7, -(1 << 40), -0.5),
        ((1 << 46) + 1, 32, 55, 1, COMM, STREAM),
        launched(1 << 47, -1, 1, 2, 0.0),
    ]


def test_an_entry_has_no_more_arguments_than_c_has_places_for(card: Card) -> None:
    most = taping._MOST_ARGS
    card.kinds = [ctypes.c_int64] * most
    Player(card.kernel(*range(most)).words([(i, 0) for i in range(most)]), 1, 1).play([10], STREAM)
    assert card.seen == [launched(*range(10, 10 + most))]
    card.sizes = [8] * (most + 1)
    assert [taping.takes(KERNEL, [8] * count) for count in (most, most + 1)] == [False, False]
    card.sizes = [8] * most
    assert taping.takes(KERNEL, card.sizes)


@pytest.mark.parametrize(("code", "said"), [(700, "CUDA_ERROR_ILLEGAL_ADDRESS"), (9, "error 9")])
def test_an_error_of_cuda_ends_the_tape(card: Card, code: int, said: str) -> None:
    card.codes = [0, code]
    with pytest.raises(BackendError, match=f"could not start a kernel: {said};"):
        Player(card.kernel().words([]) * 3, 3, 0).play([], STREAM)
    assert card.seen == [launched()] * 2


@pytest.mark.parametrize(
    ("code", "states", "asked", "found"),
    [(0, [], 0, 0), (3, [], 0, 3), (IN_PROGRESS, [IN_PROGRESS, IN_PROGRESS, 0], 3, 0), (IN_PROGRESS, [6], 1, 6)],
)
def test_c_waits_until_nccl_has_a_message_and_ends_at_its_error(
    card: Card, code: int, states: list[int], asked: int, found: int
) -> None:
    card.codes, card.states = [code], states
    words = [*card.message().words([(3, 0)]), *card.kernel().words([])]
    assert Player(words, 2, 1).play([COMM], STREAM) == found
    message = (None, None, 55, 1, COMM, STREAM)
    assert card.seen == [message, *[(COMM,)] * asked, *[launched()] * (found == 0)]


# --- tape -------------------------------------------------------------------------------------------------------------


def test_numbers_of_a_call_are_made_at_every_call(card: Card) -> None:
    card.kinds = [ctypes.c_int32] * 5
    tape = Tape([], BIG, 8)
    mixed, call = tape.begin()
    halves = numbers(split, mixed ^ 5 ^ (1 << 63))
    both = numbers(lambda n: (n, -n), call + 2)
    assert [n.now for n in (*halves, *both) if isinstance(n, Value)] == [*split(BIG ^ 5 ^ (1 << 63)), 10, -10]
    tape.write(card.kernel(0, 0, 0, 0, -3), [*enumerate((*both, *halves))])
    for step in (7, BIG):
        tape.play(COMM, [], step, 1 << 30, STREAM)
        assert card.seen.pop() == launched((1 << 30) + 2, -(1 << 30) - 2, *split(step ^ 5 ^ (1 << 63)), -3)
    assert numbers(split, BIG) == split(BIG)


@pytest.mark.parametrize("use", [lambda n: n - 1, lambda n: n * 2, lambda n: n & 1, lambda n: 1 ^ n, int, range])
def test_what_comes_later_cannot_be_used_now(use: Callable[[Any], Any]) -> None:
    for number in Tape([], 1, 2).begin():
        with pytest.raises(TypeError):
            use(number)


def test_inputs_move_and_what_else_is_used_stays(card: Card) -> None:
    card.kinds = [ctypes.c_uint64] * 6
    whole = torch.zeros(64)
    x, y = whole[:16], torch.zeros(8)
    beside, other = whole[16:], torch.zeros(8)
    tape = Tape([x, y], 0, 0)
    tape.write(card.kernel(1, 2, 3, 4, 5, 6), [*enumerate((x, x[15:], y[3:], beside, other))])
    stays = [beside.data_ptr(), other.data_ptr(), 6]
    held = weakref.ref(other)
    del beside, other
    gc.collect()
    assert held() is not None
    for a, b in ((x, y), (torch.zeros(16), torch.zeros(8))):
        tape.play(COMM, [a.data_ptr(), b.data_ptr()], 0, 0, STREAM)
        assert card.seen.pop() == launched(a.data_ptr(), a[15:].data_ptr(), b[3:].data_ptr(), *stays)


# --- when it is played ------------------------------------------------------------------------------------------------


class Link(StreamTransport):
    """A rank on NCCL, whose messages go to the card."""

    def __init__(self, card: Card) -> None:
        self.communicator = COMM
        self.device = torch.device("cuda", 0)
        self.rank, self.world = 0, 2
        self.sent = self.received = self.noted = 0
        self._group: Any = lambda: self
        backend = SimpleNamespace(_comm_ptr=lambda: self.communicator)
        group: Any = SimpleNamespace(_get_backend=lambda device: backend)
        verbs = {**dict.fromkeys(nccl._SIGNATURES, card.verb), "ncclCommGetAsyncError": card.ask}
        self.direct: nccl.Direct | None = nccl.Direct(group, self.device, verbs)

    def note(self) -> None:
        self.noted += 1


class Program:
    """A kernel, a message, and the kernel again: on the tensors of a call, and 32 bytes of scratch."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.link = Link(card)
        self.tapes = Tapes(self.link)
        self.room = Room(torch.device("cpu"))
        self.tears = False
        self._scratch = Scratch(32, lambda buffer: buffer)
        self._call = 0

    def run(self, *tensors: Tensor, room: Room | None = None) -> str:
        """Whether the call was launched, launched to be written, or played: then C started just what launches do."""
        self._call += 1
        room = room or self.room
        ways: list[str] = []

        def launch(mixed: Number, call: Number) -> None:
            ways.append("launched" if (mixed, call) == (mix64(self._call), self._call) else "written")
            wire = self._scratch.views(room)[:32]
            tape = writing.get()
            args = (*tensors, wire, *numbers(split, mixed), *numbers(lambda n: (n,), call))
            for send in (lambda: self.link.all_gather(wire, wire[:16]), tear if self.tears else int):
                if tape is not None:
                    tape.write(self.card.kernel(*[0] * len(args)), [*enumerate(args)])
                send()

        before = self.link.sent, self.link.received, self.link.noted
        self.card.kinds = [*[ctypes.c_uint64] * (len(tensors) + 1), *[ctypes.c_int32] * 3]
        self.card.seen.clear()
        self.tapes.run(launch, room, tensors, mix64(self._call), self._call)
        after = self.link.sent, self.link.received, self.link.noted
        assert [b - a for a, b in zip(before, after, strict=True)] == ([0] * 3 if is_ahead() else [16, 16, 1])
        wire = room.buffer.data_ptr()
        kernel = launched(*[t.data_ptr() for t in tensors], wire, *split(mix64(self._call)), self._call)
        if not ways:
            assert self.card.seen == [kernel, (wire, wire, 16, 1, self.link.communicator, STREAM), kernel]
        return ways[0] if ways else "played"


@pytest.fixture
def program(card: Card, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.setattr(transport, "_all_gather", lambda link, whole, own, options: link.note())  # torch sends
    return Program(card)


X, Y = torch.zeros(2, 64, dtype=torch.uint8)


def test_a_program_is_launched_once_and_played_wherever_its_tensors_are(program: Program) -> None:
    assert program.run(X, Y) == "written"
    assert [program.run(*pair) for pair in ((X, Y), (Y, X), torch.zeros(2, 64))] == ["played"] * 3
    program.link.communicator = 5
    assert program.run(X, Y) == "played"


def test_tensors_that_begin_elsewhere_within_16_bytes_have_a_tape_of_their_own(program: Program) -> None:
    pairs = [(X, Y), (X[4:], Y), (X, Y[4:]), (X[8:], Y)]
    assert [program.run(*pair) for pair in pairs] == ["written"] * 4
    assert [program.run(*pair) for pair in pairs] == ["played"] * 4
    assert program.run(X[16:], Y[32:]) == "played"


@pytest.mark.parametrize("apart_first", [True, False])
def test_tensors_in_each_other_have_a_tape_of_their_own(program: Program, apart_first: bool) -> None:
    """Which of them something lies in could not be told apart from its address."""
    within = [(X, X[16:]), (X[16:], X), (X, X[32:]), (X, X), (X[:32], X[16:])]
    apart = [(X, Y), (X[:16], X[16:]), (X[16:], X[:16])]
    for pairs in (apart, within) if apart_first else (within, apart):
        first = [program.run(*pair) for pair in pairs]
        assert first == (["written", "played", "played"] if pairs is apart else [*["written"] * 4, "played"])
    assert {program.run(*pair) for pair in (*apart, *within)} == {"played"}


def test_a_room_that_changes_forgets_its_tapes(program: Program) -> None:
    other = Room(program.room.device)
    for room in (program.room, other):
        assert [program.run(X, room=room) for _ in range(2)] == ["written", "played"]
    for change in (program.room.release, lambda: program.room.reserve(1 << 12)):
        change()
        assert [program.run(X) for _ in range(2)] == ["written", "played"]
        assert program.run(X, room=other) == "played"


def test_a_tape_that_is_forgotten_lets_go_of_its_scratch_at_once(program: Program) -> None:
    gc.disable()
    try:
        program.run(X)
        tape = weakref.ref(next(iter(program.tapes._found.values())))
        program.room.release()
        assert tape() is None
    finally:
        gc.enable()


def test_a_room_is_told_of_calls_that_are_played(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may come from another stream."""
    told: list[int] = []
    program.run(X)
    monkeypatch.setattr(program.room, "reserve", told.append)
    assert (program.run(X), told) == ("played", [0])


def test_a_tape_that_was_torn_is_never_played(program: Program) -> None:
    program.tears = True
    assert program.run(X) == "written"
    program.tears = False
    assert [program.run(X) for _ in range(3)] == ["launched"] * 3


def test_torch_sends_for_a_while_and_the_tape_is_kept(program: Program) -> None:
    program.link.communicator = 0
    assert program.run(X) == "launched"
    assert program.card.seen == []
    program.link.communicator = COMM
    assert [program.run(X) for _ in range(2)] == ["written", "played"]
    program.link.communicator = 0
    assert program.run(X) == "launched"
    program.link.communicator = COMM
    assert program.run(X) == "played"


def test_nothing_is_written_while_kernels_are_compiled_ahead(program: Program) -> None:
    with compiling():
        assert program.run(X) == "launched"
    assert [program.run(X) for _ in range(2)] == ["written", "played"]
    with compiling():
        assert program.run(X) == "launched"


def test_an_error_of_nccl_is_one_of_torchs(program: Program) -> None:
    program.run(X)
    program.card.codes = [0, 3]
    with pytest.raises(dist.DistBackendError, match="NCCL could not start a message: error 3"):
        program.run(X)
    assert len(program.card.seen) == 2


def test_tapes_do_not_pile_up(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tapes, "_MOST", 3)
    for i in range(10):
        assert [program.run(X[i:]) for _ in range(2)] == ["written", "played"]
        assert len(program.tapes._found) <= 3
    assert len(program.room._users) == 2  # the tapes, and the program's views


def test_a_program_that_no_tape_has_is_launched(card: Card, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch = Link(card)
    by_torch.direct = None
    found = [Tapes(None), Tapes(by_torch), Tapes(object())]
    monkeypatch.setattr(taping, "_driver", lambda: None)
    found.append(Tapes(program.link))
    for program.tapes in found:
        assert [program.run(X) for _ in range(2)] == ["launched"] * 2


# --- kernels ----------------------------------------------------------------------------------------------------------

KNOWN: dict[str, Any] = {"norm": -0.5, "rows": -3, "far": -(1 << 40), "table": torch.zeros(4)}
KINDS = ("*fp32", "constexpr", "fp32", "i32", "i64", "*fp32", "i32", "*fp32")
SIGNATURE = dict(zip(("x", "SIZE", *KNOWN, "n", "out"), KINDS, strict=True))
SIZES = [8, 4, 4, 8, 8, 4, 8, 8, 8]  # with two kinds of scratch
USUAL = {"num_ctas": 1, "num_warps": 2, "shared": 9, "launch_cooperative_grid": False, "global_scratch_size": 0}


class Kernel:
    """Stands in for one of Triton's, and for what it compiles: the arguments of launches that are not known before."""

    __name__ = "some_kernel"
    arg_names = tuple(SIGNATURE)
    do_not_specialize = ("n",)
    function = KERNEL

    def __init__(self, card: Card) -> None:
        word, number = ctypes.c_uint64, ctypes.c_int32
        card.kinds = (word, ctypes.c_float, number, ctypes.c_int64, word, number, word, word, word)
        card.sizes = SIZES
        self.metadata = SimpleNamespace(**USUAL)
        self.src = SimpleNamespace(signature=SIGNATURE)
        self.launches: list[tuple[Any, ...]] = []
        device = torch.device("cpu", 0)  # the number is that of the card
        self.made = Prepared(self, device, (3, 4), 2, KNOWN, {"SIZE": 16})
        self.start = Repeated(lambda _: self.made, ("out", "x"), ("n",))

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(x: Tensor, *args: Any, **options: Any) -> Kernel:
            self.launches.append((args[-1].data_ptr(), x.data_ptr(), args[-2]))
            return self

        return launch


@pytest.fixture
def kernel(card: Card) -> Kernel:
    return Kernel(card)


def started(out: int, x: int, n: int) -> tuple[Any, ...]:
    """What the card sees of the stand-in for Triton's."""
    *known, table = KNOWN.values()
    return launched(x, *known, table.data_ptr(), n, out, 0, 0)


@pytest.mark.parametrize("scratch", [2, 1, 0])
def test_a_kernel_is_compiled_by_name_and_started_by_address(card: Card, kernel: Kernel, scratch: int) -> None:
    card.sizes = SIZES[: 7 + scratch]
    x, out = torch.zeros(2, 16)
    calls = [((out, x), 5), ((x, out[4:]), -6), ((out, x[1:]), 1 << 30), ((out[4:], x[5:]), -1), ((out[1:], x), 2)]
    for tensors, n in calls:
        kernel.start(tensors, (n,))
    given = [(a.data_ptr(), b.data_ptr(), n) for (a, b), n in calls]
    assert kernel.launches == [given[0], given[2], given[4]]
    assert card.seen == [started(*given[1]), started(*given[3])]


def test_a_kernel_that_is_started_is_written(card: Card, kernel: Kernel) -> None:
    x, out = torch.zeros(2, 16)
    with written(Tape([x], 7, 8)) as tape:
        number = numbers(lambda n: (-n,), tape.begin()[1])
        for n in (number, number, (5,)):
            kernel.start((out, x), n)
    assert tape.is_whole
    at = out.data_ptr()
    assert kernel.launches == [(at, x.data_ptr(), -8)]
    assert card.seen == [started(at, x.data_ptr(), n) for n in (-8, 5)]
    card.seen.clear()
    tape.play(COMM, [1 << 40], 7, 9, STREAM)
    assert card.seen == [started(at, 1 << 40, n) for n in (-9, -9, 5)]


REFUSED: list[tuple[str, Any]] = [
    ("num_ctas", 2),
    *[(name, 1) for name in ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")],
    *[("signature", {**SIGNATURE, name: kind}) for name, kind in (("rows", "fp64"), ("out", "constexpr"))],
    *[("sizes", sizes) for sizes in ([], [8, 8, *SIZES[2:]], [*SIZES, 8])],
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: str(value)[-20:])
def test_a_kernel_that_takes_something_else_is_left_to_triton(
    card: Card, kernel: Kernel, name: str, value: Any
) -> None:
    card.sizes = SIZES[:6]  # to be refused by nothing else
    setattr({"sizes": card, "signature": kernel.src}.get(name, kernel.metadata), name, value)
    with written(Tape([X], 0, 0)) as tape:
        for _ in range(2):
            kernel.start((X, X), (1,))
    assert (len(kernel.launches), tape.is_whole, card.seen) == (2, False, [])


def test_triton_launches_on_another_device_and_notes_ahead(
    card: Card, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.start((X, X), (1,))
    with compiling():
        kernel.start((X, X), (2,))
    assert len(kernel.launches) == 1
    monkeypatch.setattr(prepared, "_device", lambda: 1)
    kernel.start((X, X), (3,))
    assert (len(kernel.launches), card.seen) == (2, [])


def test_a_kernel_that_is_started_otherwise_tears_the_tape(kernel: Kernel) -> None:
    with written(Tape([X], 0, 0)) as tape:
        kernel.made(x=X, n=1, out=X)
    assert not tape.is_whole
    assert writing.get() is None
