"""Every backend gives the reference's bytes, in one thread or many, from several callers, and after a fork.

A GPU's backend is compared with the reference on the CPU. tests/test_kernels_cuda.py has what only a GPU does.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cases
from cases import Place, each_place
from programs import Ended
from thinwire import BackendError, BlockInt, Cast, Codec, Identity, Lloyd, kernels, use_backend
from thinwire.kernels import BACKENDS, cpu, dispatch

each_codec = pytest.mark.parametrize("codec", cases.CODECS, ids=str)
one_of_each = pytest.mark.parametrize("codec", cases.ONE_OF_EACH, ids=str)
needs_cpu = pytest.mark.skipif("cpu" not in cases.OTHERS, reason="the C kernels were not built")
Results = dict[str, Tensor]


def assert_as_reference(place: Place, act: Callable[..., Results], codec: Codec, *args: Any) -> Results:
    """Run `act` by the reference on the CPU and by `place` on its device, compare the results, return the former."""
    with use_backend("reference"):
        want = act(codec, *args)
    with use_backend(place.backend):
        got = act(codec, *(cases.moved(arg, place.device) for arg in args))
    for what in want:
        cases.assert_same(got[what].cpu(), want[what], what)
    return want


def encodings(codec: Codec, xs: list[Tensor], step: int = 0) -> Results:
    return {f"wire {i}": cases.wire_of(codec, x, step=step) for i, x in enumerate(xs)}


def with_residual(codec: Codec, x: Tensor, residual: Tensor) -> Results:
    residual = residual.clone()
    wire = cases.wire_of(codec, x, step=5, residual=residual)
    return {"wire of x + residual": wire, "residual": residual}


def sums(codec: Codec, wires_WN: Tensor, n: int, dtype: torch.dtype, worlds: Sequence[int]) -> Results:
    """Of the first world by either factor, of the others by turns."""
    factors = [(worlds[0], 1 / 3), *((world, (1.0, 1 / 3)[i % 2]) for i, world in enumerate(worlds))]
    return {
        f"sum of {world} times {scale:.2}": cases.summed(codec, wires_WN[:world], n, dtype, scale)
        for world, scale in factors
    }


def recodings(codec: Codec, wires_WN: Tensor, n: int, dtype: torch.dtype, worlds: Sequence[int]) -> Results:
    return {
        f"recoded sum of {world}": cases.recoded(codec, wires_WN[:world], n, scale, step=2, dtype=dtype)
        for world, scale in zip(worlds, (1 / 3, 1.0, 1 / 3, 0.25), strict=False)
    }


def sum_and_recoding(codec: Codec, wires_WN: Tensor, n: int, recoded: int = 2) -> Results:
    return {
        "sum of the last 2": cases.summed(codec, wires_WN[-2:], n),
        "recoded": cases.recoded(codec, wires_WN[-recoded:], n, 1 / 3),
    }


# --- same bytes -------------------------------------------------------------------------------------------------------
def half_of(codec: Codec) -> int:
    """0 or 1: of two codecs of one width and mode, or four of one width, half have the one and half the other."""
    number = cases.CODECS.index(codec)
    return (number + number // 4) % 2


HALVES = [[codec for codec in cases.CODECS if half_of(codec) == half] for half in range(2)]


@each_place
@pytest.mark.parametrize("codec", [*HALVES[0], *cases.thorough(*HALVES[1])], ids=str)
def test_long_tensors_of_every_content(codec: Codec, place: Place) -> None:
    """On a GPU few worlds: each of up to eight wires has kernels of its own, which take seconds to compile."""
    n, block = 5003, cases.block_of(codec)
    xs = [cases.mixed(n, block, torch.float32, rank, seed=1) for rank in range(4)]
    residual = cases.mixed(n, block, torch.float32, 7, seed=2)
    wires = list(assert_as_reference(place, encodings, codec, xs, 3).values())
    wires_WN = torch.stack([wires[i] for i in (0, 1, 2, 3, 1, 0, 2, 0, 3)])
    assert_as_reference(place, with_residual, codec, xs[0], residual)
    sizes, recoded = ((1, 3, 9), (1, 4)) if place.device == cases.CPU else ((1, 2, 9), (2, 9))
    assert_as_reference(place, sums, codec, wires_WN, n, torch.float32, sizes)
    assert_as_reference(place, recodings, codec, wires_WN, n, torch.float32, recoded)


@needs_cpu
def test_instructions_of_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that this machine would not choose, because it has newer instructions, give the same bytes."""
    chosen = cpu.variant()
    monkeypatch.setenv("THINWIRE_ISA", "baseline")
    if cpu.variant() == chosen:
        pytest.skip(f"this machine has no newer instructions than {chosen}")
    for codec in cases.ONE_OF_EACH:
        test_long_tensors_of_every_content(codec, Place("cpu", cases.CPU))


def test_blocks_that_c_has_no_room_for_are_the_references() -> None:
    format = Lloyd(4).encoding(torch.float32).format
    served = [dispatch.select(cases.CPU, replace(format, block=block)) for block in (1024, 2048)]
    assert served == [dispatch.select(cases.CPU), BACKENDS["reference"]]


def lengths_of(codec: Codec) -> list[int]:
    """Around a block, and all of LENGTHS; half of them where another codec of that width has the other half."""
    block = cases.block_of(codec)
    others = cases.LENGTHS[half_of(codec) :: 2] if isinstance(codec, (BlockInt, Lloyd)) else cases.LENGTHS
    return sorted({*others, block - 1, block, block + 1})


@each_place
@each_codec
def test_every_length(codec: Codec, place: Place) -> None:
    names = list(cases.CONTENTS)
    for i, n in enumerate(lengths_of(codec)):
        first = names[i % len(names)]
        second = names[(i * 5 + cases.CODECS.index(codec)) % len(names)]
        xs = [cases.content(first, n, seed=1), cases.content(second, n, seed=2)]
        wires = list(assert_as_reference(place, encodings, codec, xs).values())
        wires_WN = torch.stack([wires[0], wires[0], wires[1]])
        assert_as_reference(place, sum_and_recoding, codec, wires_WN, n, 3 if place.device == cases.CPU else 2)


@cases.placed(cases.CODECS, cases.ONE_OF_EACH)
def test_sixteen_bit_tensors(codec: Codec, place: Place) -> None:
    """On a CPU by turns: another codec of that width has the other dtype."""
    n = 1000
    block = min(cases.block_of(codec), 256)
    dtypes = [torch.bfloat16, torch.float16]
    if place.device == cases.CPU and isinstance(codec, (BlockInt, Lloyd)):
        dtypes = dtypes[half_of(codec) :][:1]
    for dtype in dtypes:
        xs = [cases.mixed(n, block, dtype, rank, seed=4) for rank in range(2)]
        residual = cases.mixed(n, block, torch.float32, 2, seed=5)
        wires_WN = torch.stack(list(assert_as_reference(place, encodings, codec, xs).values()))
        assert_as_reference(place, with_residual, codec, xs[0], residual)
        assert_as_reference(place, sums, codec, wires_WN, n, dtype, (2,))
        assert_as_reference(place, recodings, codec, wires_WN, n, dtype, (2,))


@each_place
@pytest.mark.parametrize("codec", [*cases.PLAIN, *cases.CASTS], ids=str)
@pytest.mark.parametrize("n", [1, 129, 1500])
def test_double_tensors(codec: Codec, n: int, place: Place) -> None:
    xs = [torch.randn(n, dtype=torch.float64, generator=cases.seeded(rank)) for rank in range(3)]
    xs[0][0] = 1e300
    wires_WN = torch.stack(list(assert_as_reference(place, encodings, codec, xs).values()))
    worlds = (1, 3) if place.device == cases.CPU else (1, 2)
    assert_as_reference(place, sums, codec, wires_WN, n, torch.float64, worlds)
    assert_as_reference(place, recodings, codec, wires_WN, n, torch.float64, worlds[1:])
    assert_as_reference(place, with_residual, codec, xs[1], torch.randn(n, generator=cases.seeded(9)))


@each_place
@pytest.mark.parametrize(
    "codec",
    [
        *(BlockInt(3, 5000), BlockInt(3, 3000, "affine"), BlockInt(5, 5000, "affine", "stochastic"), BlockInt(8, 3000)),
        *(BlockInt(7, 4096, rounding="stochastic"), BlockInt(2, 1 << 20), Cast("e4m3", 3000), Cast("fp16", 5000)),
        BlockInt(8, (1 << 32) - 8, "affine"),
    ],
    ids=str,
)
def test_blocks_longer_than_a_tile(codec: Codec, place: Place) -> None:
    for n in (1, 1025, 2999, 3000, 3001, 12007):
        xs = [cases.mixed(n, 3000, torch.float32, rank, seed=n) for rank in range(2)]
        wires_WN = torch.stack(list(assert_as_reference(place, encodings, codec, xs).values()))
        assert_as_reference(place, with_residual, codec, xs[1], torch.ones_like(xs[0]))
        assert_as_reference(place, sum_and_recoding, codec, wires_WN, n)


@each_place
@one_of_each
def test_sixty_four_wires(codec: Codec, place: Place) -> None:
    n, block = 700, cases.block_of(codec)
    xs = [cases.mixed(n, block, torch.float32, rank, seed=8) for rank in range(8)]
    with use_backend(cases.SERVING[0]):  # whose wires the tests above compare
        wires_WN = cases.wires_of(codec, xs)[torch.arange(64) * 5 % 8]
    assert_as_reference(place, sums, codec, wires_WN, n, torch.float32, (64,))
    assert_as_reference(place, recodings, codec, wires_WN, n, torch.float32, (64,))


# --- any address ------------------------------------------------------------------------------------------------------
def at_odd_addresses(codec: Codec, x: Tensor, residual: Tensor, wires_WN: Tensor) -> Results:
    """Every operation with all its tensors off the start of their memory: an element, or a byte of a wire.

    Wires lie apart, each at another odd address.
    """
    n, nbytes, x = x.numel(), wires_WN.shape[1], cases.shifted(x)
    carried = cases.shifted(residual)
    wire, with_carry, recoded = (cases.shifted(wires_WN[0]).fill_(cases.GARBAGE) for _ in range(3))
    codec.encode(x, wire, step=1)
    codec.encode(x, with_carry, step=1, residual=carried)
    odd_WN = wires_WN.new_zeros(len(wires_WN) * (nbytes + 36)).as_strided(wires_WN.shape, (nbytes + 35, 1), 1)
    odd_WN.copy_(wires_WN)
    out, alone = (cases.shifted(torch.full_like(x, torch.nan)) for _ in range(2))
    codec.decode_sum(odd_WN, out, scale=0.5)
    codec.decode(odd_WN[1], alone)
    codec.recode(odd_WN, recoded, n, scale=0.5, step=1, dtype=x.dtype)
    results = {"wire": wire, "with carry": with_carry, "residual": carried}
    return {**results, "sum": out, "decoded": alone, "recoded": recoded}


@each_place
@one_of_each
def test_every_tensor_at_an_odd_address(codec: Codec, place: Place) -> None:
    for n in (997, 1024):
        xs = [cases.content("gaussian", n, seed=rank) for rank in range(2)]
        with use_backend("reference"):
            wires_WN = cases.wires_of(codec, xs)
        assert_as_reference(place, at_odd_addresses, codec, xs[0], cases.content("gaussian", n, seed=3), wires_WN)


# --- threads, callers, processes --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("place", [pytest.param(Place("reference", cases.CPU)), *cases.ON_CUDA], ids=str)
def test_picked_numbers_have_the_wires_of_numbers_side_by_side(place: Place, dtype: torch.dtype) -> None:
    cases.check_picked(place.backend, place.device, dtype)


@needs_cpu
@one_of_each
@pytest.mark.usefixtures("restored_threads")
def test_threads_do_not_change_a_byte(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 3 * 2**13 + 4099
    monkeypatch.setattr(cpu, "_ELEMENTS_PER_THREAD", 2**13)
    x = cases.content("gaussian", n)
    x[2345] = torch.nan
    x[n // 3 : n // 3 + 900] *= 1e-30
    used: list[int] = []
    make = cpu._job
    monkeypatch.setattr(cpu, "_job", lambda *how: (job := make(*how), used.append(job.threads))[0])

    def act() -> Results:
        wire = cases.wire_of(codec, x)
        wires_WN = torch.stack((wire, wire))
        return {
            "wire": wire,
            **with_residual(codec, x, torch.ones(n)),
            "sum": cases.summed(codec, wires_WN, n),
            "recoded": cases.recoded(codec, wires_WN, n, 1 / 3),
        }

    results = []
    with use_backend("cpu"):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(act())
    assert set(used) == {1, 2, 3}
    for other in results[1:]:
        for what in other:
            cases.assert_same(other[what], results[0][what], what)


@each_place
@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("codec", [BlockInt(8), BlockInt(3, 40, "affine", "stochastic"), Lloyd(4)], ids=str)
def test_callers_at_once(codec: Codec, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu, "_ELEMENTS_PER_THREAD", 2**15)
    n = 2**16 + 13
    xs = [cases.content("gaussian", n, seed=caller).to(place.device) for caller in range(4)]

    def act(x: Tensor) -> Results:
        wire = cases.wire_of(codec, x)
        return {"wire": wire, "decoded": cases.decoded(codec, wire, n), "recoded": cases.recoded(codec, wire[None], n)}

    with use_backend(place.backend):
        alone = [act(x) for x in xs]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(act, xs * 3))
    for i, results in enumerate(together):
        for what in results:
            cases.assert_same(results[what].cpu(), alone[i % 4][what].cpu(), f"caller {i}: {what}")


ALONE = """
import os, sys, torch
from thinwire import codec, use_backend

def act(c, x):
    wire = torch.empty(c.wire_bytes(x.numel()), dtype=torch.uint8)
    out = torch.empty_like(x)
    c.encode(x, wire)
    c.decode(wire, out)
    return wire.numpy().tobytes(), out.numpy().tobytes()

torch.set_num_threads(2)
x = torch.randn(2**19 + 5)
for name in ("int8", "lloyd4", "e4m3"):
    with use_backend(sys.argv[1]):
        want = act(codec(name), x)
        child = os.fork()
        if child == 0:
            os._exit(0 if act(codec(name), x) == want else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, name
        assert act(codec(name), x) == want
print("same")

import importlib
for name in ("", "reference", "nonsense"):
    os.environ["THINWIRE_BACKEND"] = name
    from thinwire.kernels import dispatch
    importlib.reload(dispatch)
    try:
        print(dispatch.select(torch.device("cpu")).__name__)
    except dispatch.BackendError as error:
        print(error)
"""


@needs_cpu
@pytest.mark.program("-c", ALONE, "cpu")
def test_after_a_fork_and_by_the_environment(program: Ended) -> None:
    """What only a process of its own shows: kernels after a fork, and the backend that THINWIRE_BACKEND names."""
    told = f"unknown backend 'nonsense'; known: auto, {', '.join(BACKENDS)}"
    chosen = ["thinwire.kernels.cpu", "thinwire.kernels.reference"]
    assert program.out.splitlines() == ["same", *chosen, told], program.told
    assert program.status == 0, program.told


# --- the choice of a backend ------------------------------------------------------------------------------------------
def a_wire() -> Tensor:
    return cases.wire_of(BlockInt(8), torch.arange(100.0))


def test_a_named_backend_holds_inside_the_block_alone() -> None:
    before = dispatch._requested
    with use_backend("reference"):
        assert kernels.select(cases.CPU) is BACKENDS["reference"]
        with pytest.raises(KeyError), use_backend("auto"):
            raise KeyError
        assert kernels.select(cases.CPU) is BACKENDS["reference"]
    assert dispatch._requested == before
    with use_backend("auto"), warnings.catch_warnings():
        warnings.simplefilter("ignore" if not cases.OTHERS else "error")
        assert kernels.select(cases.CPU) is BACKENDS[cases.SERVING[0]], "the fastest"
    with pytest.raises(BackendError, match=f"unknown backend 'gpu'; known: auto, {', '.join(BACKENDS)}"):
        use_backend("gpu").__enter__()


@pytest.fixture
def without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """without("triton"), "cuda" or "library": a process that lacks it, and was told nothing about it yet."""

    def forget() -> None:
        cpu._load.cache_clear()
        getattr(BACKENDS["triton"].unavailable, "cache_clear", bool)()

    def act(name: str) -> None:
        if name == "triton":
            monkeypatch.setitem(sys.modules, "triton", None)
        elif name == "cuda":
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        else:
            monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "missing.so")
        monkeypatch.setattr(dispatch, "_said", set())
        forget()

    yield act
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("missing", ["triton", "cuda", "library", "a library that loads"])
def test_a_named_backend_that_is_missing_says_what_to_do(without: Callable[[str], None], missing: str) -> None:
    without(missing)
    if missing in ("triton", "cuda"):
        said = rf"(?i)backend='triton' was requested but .*{missing}.*use backend='auto'"
        with use_backend("triton"), pytest.raises(BackendError, match=said):
            kernels.select(cases.CUDA)
        return
    said = "'cpu' was requested but the C kernels were not built"
    if missing != "library":
        cpu.LIBRARY.write_text("not a library")
        said = "the C kernels do not load"
    with use_backend("cpu"), pytest.raises(BackendError, match=said):
        a_wire()


def test_a_named_backend_does_not_serve_other_devices() -> None:
    x, wire = torch.empty(100, device="meta"), torch.empty(Identity().wire_bytes(100), dtype=torch.uint8, device="meta")
    with use_backend("cpu"), pytest.raises(BackendError, match="does not serve meta tensors"):
        Identity().encode(x, wire)
    with use_backend("triton"), pytest.raises(BackendError, match="does not serve cpu tensors"):
        a_wire()


@pytest.mark.parametrize(("missing", "device"), [("library", cases.CPU), ("triton", cases.CUDA)], ids=str)
def test_the_reference_stands_in_and_says_so_once(
    without: Callable[[str], None], missing: str, device: torch.device
) -> None:
    without(missing)
    with use_backend("reference"), warnings.catch_warnings():
        warnings.simplefilter("error")
        want = a_wire()  # asked for, nothing is said
    with use_backend("auto"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [kernels.select(device) for _ in range(3)] == [BACKENDS["reference"]] * 3
        assert device == cases.CUDA or torch.equal(a_wire(), want)
    assert [w.category for w in said] == [RuntimeWarning]
    assert f"{device.type} tensors are served by the plain torch reference" in str(said[0].message)
    assert {"library": "not built", "triton": "triton"}[missing] in str(said[0].message)
