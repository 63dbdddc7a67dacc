"""Every backend gives the reference's bytes, in one thread or many, from several callers, and after a fork."""

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cases
from thinwire import BackendError, BlockInt, Cast, Codec, Identity, Lloyd, kernels, use_backend
from thinwire.kernels import BACKENDS, cpu, dispatch

each_backend = pytest.mark.parametrize("backend", cases.OTHERS)
each_codec = pytest.mark.parametrize("codec", cases.CODECS, ids=str)
needs_cpu = pytest.mark.skipif("cpu" not in cases.OTHERS, reason="the C kernels were not built")
Results = dict[str, Tensor]


def assert_as_reference(backend: str, act: Callable[[], Results]) -> Results:
    """Run `act` on the reference and on `backend`, compare what they give, return the former."""
    with use_backend("reference"):
        want = act()
    with use_backend(backend):
        got = act()
    for what in want:
        cases.assert_same(got[what], want[what], what)
    return want


def encodings(codec: Codec, xs: list[Tensor], step: int = 0) -> Results:
    return {f"wire {i}": cases.wire_of(codec, x, step=step) for i, x in enumerate(xs)}


def with_residual(codec: Codec, x: Tensor, residual: Tensor) -> Results:
    residual = residual.clone()
    wire = cases.wire_of(codec, x, step=5, residual=residual)
    return {"wire of x + residual": wire, "residual": residual}


def sums(codec: Codec, wires_WN: Tensor, n: int, dtype: torch.dtype, worlds: tuple[int, ...]) -> Results:
    return {
        f"sum of {world} times {scale:.2}": cases.summed(codec, wires_WN[:world], n, dtype, scale)
        for world in worlds
        for scale in (1.0, 1 / 3)
    }


def recodings(codec: Codec, wires_WN: Tensor, n: int, dtype: torch.dtype, worlds: tuple[int, ...]) -> Results:
    return {
        f"recoded sum of {world}": cases.recoded(codec, wires_WN[:world], n, scale, step=2, dtype=dtype)
        for world, scale in zip(worlds, (1 / 3, 1.0, 1 / 3, 0.25), strict=False)
    }


# --- same bytes -------------------------------------------------------------------------------------------------------


@each_backend
@each_codec
def test_long_tensors_of_every_content(codec: Codec, backend: str) -> None:
    n, block = 5003, cases.block_of(codec)
    xs = [cases.mixed(n, block, torch.float32, rank, seed=1) for rank in range(6)]
    residual = cases.mixed(n, block, torch.float32, 7, seed=2)
    wires = list(assert_as_reference(backend, lambda: encodings(codec, xs, step=3)).values())
    wires_WN = torch.stack([wires[i] for i in (0, 1, 2, 3, 4, 5, 1, 0, 3)])
    assert_as_reference(backend, lambda: with_residual(codec, xs[0], residual))
    assert_as_reference(backend, lambda: sums(codec, wires_WN, n, torch.float32, (1, 2, 3, 4, 9)))
    assert_as_reference(backend, lambda: recodings(codec, wires_WN, n, torch.float32, (1, 3, 4, 9)))


@each_backend
@each_codec
def test_every_length(codec: Codec, backend: str) -> None:
    names = list(cases.CONTENTS)
    block = cases.block_of(codec)
    for i, n in enumerate({*cases.LENGTHS, max(block - 1, 0), block, block + 1}):
        first, second = names[i % len(names)], names[(i * 5 + cases.CODECS.index(codec)) % len(names)]
        xs = [cases.content(first, n, seed=1), cases.content(second, n, seed=2)]
        wires = list(assert_as_reference(backend, lambda xs=xs: encodings(codec, xs)).values())
        wires_WN = torch.stack([wires[0], wires[0], wires[1]])
        assert_as_reference(backend, lambda n=n, w=wires_WN[1:]: {"sum": cases.summed(codec, w, n)})
        assert_as_reference(backend, lambda n=n, w=wires_WN: {"recoded": cases.recoded(codec, w, n, 1 / 3)})


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_codec
def test_sixteen_bit_tensors(codec: Codec, dtype: torch.dtype, backend: str) -> None:
    n, block = 1000, cases.block_of(codec)
    xs = [cases.mixed(n, min(block, 256), dtype, rank, seed=4) for rank in range(2)]
    residual = cases.mixed(n, min(block, 256), torch.float32, 2, seed=5)
    wires_WN = torch.stack(list(assert_as_reference(backend, lambda: encodings(codec, xs)).values()))
    assert_as_reference(backend, lambda: with_residual(codec, xs[0], residual))
    assert_as_reference(backend, lambda: sums(codec, wires_WN, n, dtype, (2,)))
    assert_as_reference(backend, lambda: recodings(codec, wires_WN, n, dtype, (2,)))


@each_backend
@pytest.mark.parametrize("codec", [*cases.PLAIN, *cases.CASTS], ids=str)
@pytest.mark.parametrize("n", [1, 129, 1500])
def test_double_tensors(codec: Codec, n: int, backend: str) -> None:
    xs = [torch.randn(n, dtype=torch.float64, generator=cases.seeded(rank)) for rank in range(3)]
    xs[0][0] = 1e300
    wires_WN = torch.stack(list(assert_as_reference(backend, lambda: encodings(codec, xs)).values()))
    assert_as_reference(backend, lambda: sums(codec, wires_WN, n, torch.float64, (1, 3)))
    assert_as_reference(backend, lambda: recodings(codec, wires_WN, n, torch.float64, (3,)))
    assert_as_reference(backend, lambda: with_residual(codec, xs[1], torch.randn(n, generator=cases.seeded(9))))


@each_backend
@pytest.mark.parametrize(
    "codec",
    [
        *(BlockInt(3, 5000), BlockInt(3, 3000, "affine"), BlockInt(5, 5000, "affine", "stochastic"), BlockInt(8, 3000)),
        *(BlockInt(7, 4096, rounding="stochastic"), BlockInt(2, 1 << 20), Cast("e4m3", 3000), Cast("fp16", 5000)),
    ],
    ids=str,
)
def test_blocks_longer_than_a_tile(codec: Codec, backend: str) -> None:
    for n in (1, 1025, 2999, 3000, 3001, 12007):
        xs = [cases.mixed(n, 3000, torch.float32, rank, seed=n) for rank in range(2)]
        wires_WN = torch.stack(list(assert_as_reference(backend, lambda xs=xs: encodings(codec, xs)).values()))
        assert_as_reference(backend, lambda xs=xs: with_residual(codec, xs[1], torch.ones_like(xs[0])))
        assert_as_reference(backend, lambda n=n, w=wires_WN: {"sum": cases.summed(codec, w, n)})
        assert_as_reference(backend, lambda n=n, w=wires_WN: {"recoded": cases.recoded(codec, w, n, 1 / 3)})


@each_backend
@pytest.mark.parametrize("codec", cases.ONE_OF_EACH, ids=str)
def test_wires_a_step_apart_and_at_odd_addresses(codec: Codec, backend: str) -> None:
    n = 1000
    rows = cases.wires_of(codec, [cases.content("gaussian", n, seed=rank) for rank in range(3)])
    spread = torch.zeros(3 * (rows.shape[1] + 37), dtype=torch.uint8)
    wires_WN = spread.as_strided(tuple(rows.shape), (rows.shape[1] + 36, 1), 1)
    odd_WN = spread.new_zeros(spread.numel()).as_strided(tuple(rows.shape), (rows.shape[1] + 35, 1), 1)
    for matrix in (wires_WN, odd_WN):
        matrix.copy_(rows)
        for world in (1, 3):
            want = cases.summed(codec, rows[:world], n)
            for name in ("reference", backend):
                with use_backend(name):
                    cases.assert_same(cases.summed(codec, matrix[:world], n), want, f"{name}, world {world}")


# --- threads, callers, processes --------------------------------------------------------------------------------------


@needs_cpu
@pytest.mark.parametrize("codec", cases.ONE_OF_EACH, ids=str)
def test_threads_do_not_change_a_byte(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    n, before = 3 * 2**18 + 4099, torch.get_num_threads()
    x = cases.content("gaussian", n)
    x[12345] = torch.nan
    x[n // 3 : n // 3 + 2000] *= 1e-30
    used: list[int] = []
    run = cpu._run
    monkeypatch.setattr(cpu, "_run", lambda name, job, *pointers: (used.append(job.threads), run(name, job, *pointers)))

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
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(act())
        finally:
            torch.set_num_threads(before)
    assert set(used) == {1, 2, 3}
    for other in results[1:]:
        for what in other:
            cases.assert_same(other[what], results[0][what], what)


@each_backend
@pytest.mark.parametrize("codec", [BlockInt(8), BlockInt(3, 40, "affine", "stochastic"), Lloyd(4)], ids=str)
def test_callers_at_once(codec: Codec, backend: str) -> None:
    n = 2**19 + 13
    xs = [cases.content("gaussian", n, seed=caller) for caller in range(4)]

    def act(x: Tensor) -> Results:
        wire = cases.wire_of(codec, x)
        return {"wire": wire, "decoded": cases.decoded(codec, wire, n), "recoded": cases.recoded(codec, wire[None], n)}

    with use_backend(backend):
        alone = [act(x) for x in xs]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(act, xs * 3))
    for i, results in enumerate(together):
        for what in results:
            cases.assert_same(results[what], alone[i % 4][what], f"caller {i}: {what}")


AFTER_FORK = """
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
"""


@needs_cpu
def test_after_fork() -> None:
    done = subprocess.run([sys.executable, "-c", AFTER_FORK, "cpu"], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout.strip()) == (0, "same"), done.stderr


# --- the choice of a backend ------------------------------------------------------------------------------------------


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process in which the C kernels were not built; the path they are looked for at."""
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "missing.so")
    monkeypatch.setattr(dispatch, "_said", set())
    cpu._load.cache_clear()
    yield cpu.LIBRARY
    cpu._load.cache_clear()


def a_wire() -> Tensor:
    return cases.wire_of(BlockInt(8), torch.arange(100.0))


def test_unknown_backend_lists_the_known() -> None:
    known = ", ".join(BACKENDS)
    with pytest.raises(BackendError, match=f"unknown backend 'gpu'; known: auto, {known}"), use_backend("gpu"):
        pass


FROM_THE_ENVIRONMENT = """
import importlib, os, torch
for name in ("reference", "nonsense"):
    os.environ["THINWIRE_BACKEND"] = name
    from thinwire.kernels import dispatch
    importlib.reload(dispatch)
    try:
        print(dispatch.select(torch.device("cpu")).__name__)
    except dispatch.BackendError as error:
        print(error)
"""


def test_backend_of_the_environment() -> None:
    script = [sys.executable, "-c", FROM_THE_ENVIRONMENT]
    done = subprocess.run(script, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.splitlines() == [
        "thinwire.kernels.reference",
        f"unknown backend 'nonsense'; known: auto, {', '.join(BACKENDS)}",
    ]


def test_named_backend_holds_inside_the_block_alone() -> None:
    before = dispatch._requested
    with use_backend("reference"):
        assert kernels.select(cases.CPU) is BACKENDS["reference"]
        with pytest.raises(KeyError), use_backend("auto"):
            raise KeyError
        assert kernels.select(cases.CPU) is BACKENDS["reference"]
    assert dispatch._requested == before


def test_auto_takes_the_fastest() -> None:
    with use_backend("auto"), warnings.catch_warnings():
        warnings.simplefilter("ignore" if not cases.OTHERS else "error")
        assert kernels.select(cases.CPU) is BACKENDS[cases.SERVING[0]]


def test_named_backend_that_is_missing_raises(no_library: Path) -> None:
    with use_backend("cpu"), pytest.raises(BackendError, match="'cpu' was requested but the C kernels were not built"):
        a_wire()


def test_library_that_does_not_load_raises(no_library: Path) -> None:
    no_library.write_text("not a library")
    with use_backend("cpu"), pytest.raises(BackendError, match="the C kernels do not load"):
        a_wire()


def test_auto_without_library_takes_the_reference_and_says_so_once(no_library: Path) -> None:
    with use_backend("auto"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        wires = [a_wire() for _ in range(3)]
    assert [w.category for w in said] == [RuntimeWarning]
    assert "served by the plain torch reference" in str(said[0].message)
    assert "not built" in str(said[0].message)
    with use_backend("reference"):
        assert all(torch.equal(wire, a_wire()) for wire in wires)


def test_asked_for_the_reference_nothing_is_said(no_library: Path) -> None:
    with use_backend("reference"), warnings.catch_warnings():
        warnings.simplefilter("error")
        a_wire()


def test_backend_that_does_not_serve_the_device() -> None:
    x = torch.empty(100, device="meta")
    wire = torch.empty(Identity().wire_bytes(100), dtype=torch.uint8, device="meta")
    with use_backend("cpu"), pytest.raises(BackendError, match="does not serve meta tensors"):
        Identity().encode(x, wire)
