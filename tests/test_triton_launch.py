"""Launches of GPU kernels: arguments by name, a compiled kernel kept by what Triton distinguishes, or made ahead."""

import fcntl
import logging
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from thinwire.kernels.triton import compiling, prepared
from thinwire.kernels.triton.prepared import Prepared, Repeated

NAMES = ("x", "stride", "numel", "rows", "wire", "shape", "SIZE")
X = torch.zeros(8)
WIRE = torch.zeros(8, dtype=torch.uint8)
OPTIONS = {"enable_fp_fusion": False, "maxnreg": None}


class Shape(NamedTuple):
    """A structure, with another one in it."""

    height: int
    halves: tuple[int, int]


SHAPE = Shape(16, (1, 1 << 40))


class Kernel:
    """Stands in for one of Triton's, and for what it compiles: the arguments of every launch, by name."""

    __name__ = "some_kernel"
    arg_names = NAMES
    do_not_specialize = ("stride", "numel")

    def __init__(self, compiles: bool = True) -> None:
        self.made = Kernel(compiles=False) if compiles else None
        self.launches: list[dict[str, Any]] = []
        self.warmups: list[dict[str, Any]] = []
        self.meet = threading.Barrier(1)  # where compilers wait for each other

    def warmup(self, *args: Any, **options: Any) -> "Kernel | None":
        self.meet.wait(10)
        self.warmups.append({**dict(zip(NAMES, args, strict=True)), **options})
        return self.made

    function = packed_metadata = None

    def run(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        self.launches.append({"grid": (x, y, z), **dict(zip(NAMES, args[5:], strict=True)), "stream": stream})

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Kernel | None:
            self.launches.append({"grid": grid, **dict(zip(NAMES, args, strict=True)), **options})
            return self.made

        return launch


def start(kernel: Kernel, size: int = 4, numel: int = 32, rows: int = 32, **given: Any) -> None:
    known = {"numel": numel, "rows": rows, "unasked": 5}
    launch = Prepared(kernel, X.device, 7, 2, known, {"SIZE": size, "UNASKED": True})
    launch(**{"wire": WIRE, "x": X, "stride": 3, "shape": SHAPE, **given})


def started(kernel: Kernel) -> list[dict[str, Any]]:
    """The launches of what it compiled."""
    assert kernel.made is not None
    assert not kernel.launches  # Triton's own way from arguments to a compiled kernel is long
    return kernel.made.launches


def test_arguments_find_their_places_by_name() -> None:
    kernel = Kernel()
    start(kernel)
    start(kernel, stride=48)
    known = {"x": X, "numel": 32, "rows": 32, "wire": WIRE, "SIZE": 4, "grid": (7, 1, 1)}
    typical = Shape(3, (3, (1 << 40) + 3))
    assert kernel.warmups == [{**known, "stride": 3, "shape": typical, "num_warps": 2, **OPTIONS}]
    assert started(kernel) == [{**known, "stride": stride, "shape": SHAPE} for stride in (3, 48)]


SAME: list[dict[str, Any]] = [
    *({"numel": 33}, {"numel": 1}, {"rows": 48}, {"shape": Shape(1, (32, 1 << 50))}, {"shape": Shape(-5, (0, 1 << 32))})
]
OTHER: list[dict[str, Any]] = [
    {"x": torch.zeros(9)[1:]},  # not on 16 bytes
    *({"x": torch.zeros(8, dtype=torch.bfloat16)}, {"numel": 1 << 40}, {"rows": 33}, {"rows": 1}, {"size": 8}),
    *({"stride": 1 << 31}, {"shape": Shape(1 << 31, (1, 1 << 40))}),  # 64 bits
]


@pytest.mark.parametrize(("other", "kernels"), [*((each, 1) for each in SAME), *((each, 2) for each in OTHER)])
def test_what_triton_distinguishes_is_compiled_by_itself_and_nothing_else(other: dict[str, Any], kernels: int) -> None:
    kernel = Kernel()
    start(kernel)
    start(kernel, **other)
    assert len(kernel.warmups) == kernels
    assert kernels > 1 or other.items() <= started(kernel)[1].items()


def test_wrong_arguments_are_slips_of_ours() -> None:
    launch = Prepared(Kernel(), X.device, 7, 2, {"numel": 32, "rows": 32}, {"SIZE": 4})
    with pytest.raises(AssertionError, match="wire"):
        launch(x=X, stride=1, shape=SHAPE)
    with pytest.raises(KeyError, match="numel"):
        launch(x=X, stride=1, wire=WIRE, shape=SHAPE, numel=2)
    with pytest.raises(AssertionError):  # an integer that Triton specializes
        start(Kernel(), x=16)


NOWHERE = {"x": X.to("meta"), "wire": WIRE.to("meta")}


def test_kernels_are_compiled_ahead_each_once_several_at_a_time() -> None:
    kernel = Kernel()
    kernel.meet = threading.Barrier(2)  # breaks if one is compiled after the other
    start(kernel, **NOWHERE)
    start(kernel, numel=33, **NOWHERE)
    start(kernel, size=8, wire=NOWHERE["wire"])  # one tensor without memory is enough
    compiling.compiled()
    assert sorted(made["SIZE"] for made in kernel.warmups) == [4, 8]
    assert kernel.warmups[0].items() >= {"grid": (7, 1, 1), "num_warps": 2, "enable_fp_fusion": False}.items()
    assert not started(kernel)
    start(kernel)
    assert (len(kernel.warmups), len(started(kernel))) == (2, 1)


def test_a_launch_waits_for_the_compiler_that_was_begun() -> None:
    kernel = Kernel()
    kernel.meet = threading.Barrier(2)
    start(kernel, **NOWHERE)
    waiting = threading.Thread(target=start, args=[kernel])
    waiting.start()
    assert not started(kernel)
    kernel.meet.wait(10)
    waiting.join()
    assert len(kernel.warmups) == len(started(kernel)) == 1


def test_a_compiler_that_fails_says_so_and_the_next_launch_tries_again() -> None:
    kernel = Kernel()
    kernel.meet.abort()
    start(kernel, **NOWHERE)
    with pytest.raises(threading.BrokenBarrierError):
        compiling.compiled()
    kernel.meet.reset()
    start(kernel)
    assert len(started(kernel)) == 1


@pytest.mark.parametrize(("rank", "seconds", "said"), [("0", 0.1, 1), ("1", 0.1, 0), ("0", 0.0, 0)])
def test_a_long_compilation_is_announced_once_a_machine(
    rank: str, seconds: float, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(compiling, "PATIENCE_S", 0.02 if seconds else 60.0)
    monkeypatch.setattr(compiling, "_announced", threading.Event())
    monkeypatch.setenv("LOCAL_RANK", rank)
    with caplog.at_level(logging.INFO, logger="thinwire"):
        for _ in range(2):
            with compiling.announcing("compiling things"):
                time.sleep(seconds)
    assert ["compiling things" in text for text in caplog.messages] == [True] * said


def test_one_rank_of_a_machine_compiles_a_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiling._alone("one"), lock_in(tmp_path).open() as another, pytest.raises(BlockingIOError):
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock_in(tmp_path).open() as another:
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_rank_that_loads_a_kernel_keeps_no_other_from_compiling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA may load it only once other ranks have sent something. See [Note: Loaded without the lock]."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def load(made: str) -> None:
        assert made == "kernel"
        with lock_in(tmp_path).open() as another:
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
        loaded.append(made)

    loaded: list[str] = []
    assert compiling.begin("one", lambda: "kernel", load).result(60) == "kernel"
    assert loaded == ["kernel"]
    compiling.compiled()


def lock_in(folder: Path) -> Path:
    (found,) = folder.glob("*.lock")
    return found


def test_a_repeated_launch_tells_dtypes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program may serve two models, of which one remembers in fp32 and one in bf16."""
    monkeypatch.setattr(prepared, "_stream", lambda device: 0)
    monkeypatch.setattr(prepared, "_device", lambda: None)  # a CUDA build asks the driver
    kernel = Kernel()
    known = {"stride": 3, "numel": 5, "rows": 7, "shape": SHAPE}
    made = Prepared(kernel, torch.device("cpu"), 1, 4, known, {"SIZE": 4})
    repeated = Repeated(lambda grouped: made, ("x", "wire"))
    for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        repeated((torch.zeros(16, dtype=dtype), WIRE))
    repeated((torch.zeros(32, device="meta")[16:], WIRE))  # of a dry run, whose address is not zero: nothing starts
    assert [warmup["x"].dtype for warmup in kernel.warmups] == [torch.float32, torch.bfloat16]
    kinds = [type(launch["x"]) for launch in kernel.made.launches]
    assert kinds == [Tensor, int, Tensor, int, int]  # addresses, once a kernel is known
