"""Codecs, inputs and comparisons that the tests of codecs, kernels, wires and collectives share.

Shape suffixes: W ranks, N bytes of a wire, K blocks, B elements of a block.
"""

import functools
import gc
import hashlib
import importlib
import inspect
import itertools
import logging
import math
import string
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from thinwire import BlockInt, Cast, Codec, Identity, Lloyd, Trellis, codec as make, use_backend
from thinwire.collectives import chunks, plan
from thinwire.kernels import BACKENDS, rows
from thinwire.kernels.schema import LLOYD, TRELLIS, RowJob, Rows

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
needs_cuda = (pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(CUDA, id="cuda", marks=needs_cuda)]
each_device = pytest.mark.parametrize("device", DEVICES)
SERVING = [name for name, b in BACKENDS.items() if b.serves(CPU) and b.unavailable() is None]  # fastest first
OTHERS = [name for name in SERVING if name != "reference"]
STOOD_S = 0.5  # a machine that stood for so long may have made a rank late
TRIES = 4  # of a test that failed on such a machine


class Place(NamedTuple):
    """A backend, and the device its tensors are on."""

    backend: str
    device: torch.device


ON_CPU = [pytest.param(Place(name, CPU), id=name) for name in OTHERS]
ON_CUDA = [pytest.param(Place("triton", CUDA), id="triton-cuda", marks=needs_cuda)]
each_place = pytest.mark.parametrize("place", [*ON_CPU, *ON_CUDA])


def placed(on_cpu: Sequence[Codec], on_cuda: Sequence[Codec]) -> pytest.MarkDecorator:
    """Codecs with every backend but the reference, on the device it serves."""
    pairs = [(c, p) for c in on_cpu for p in ON_CPU] + [(c, p) for c in on_cuda for p in ON_CUDA]
    return pytest.mark.parametrize(
        ("codec", "place"), [pytest.param(c, *p.values, id=f"{c}-{p.id}", marks=p.marks) for c, p in pairs]
    )


def over(name: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run one test over a table of small cases, without pytest's overhead for each; a failure names its case."""
    table = list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**others: Any) -> None:
            for value in table:
                try:
                    test(**others, **{name: value})
                except BaseException as error:  # pytest's own outcomes are no Exceptions
                    error.add_note(f"where {name} is {value}")
                    raise

        parameters = [p for p in inspect.signature(test).parameters.values() if p.name != name]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def thorough(*rows: Any) -> list[Any]:
    """Rows of a table of parameters that run with --thorough only."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.thorough) for row in rows]


def worlds(*usual: int, rare: Sequence[int]) -> pytest.MarkDecorator:
    """How many ranks a test has; `rare` with --thorough only. Neighboring tests take different worlds."""
    return pytest.mark.parametrize("world", [*usual, *thorough(*rare)])


@dataclass(frozen=True)
class OnRank:
    """The body of an on_ranks test, sent to ranks by its name."""

    module: str
    test: str

    def __call__(self, group: Any, *given: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.test).on_rank(group, *given)


def on_ranks(
    *usual: int, rare: Sequence[int] = (), gives: Any = OnRank
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test whose body runs on every rank: test(group, ...). All ranks return `gives`, or at least the same.

    Without worlds, `world` is a parameter of the test, such as one of its table.
    """

    def decorate(check: Callable[..., Any]) -> Callable[..., None]:
        names = [*inspect.signature(check).parameters][1:]
        one = usual[0] if len(usual) == 1 and not rare else None

        @functools.wraps(check)
        def test(ranks: Any, **given: Any) -> None:
            world = given.setdefault("world", one)
            found = ranks(world).run(OnRank(check.__module__, check.__name__), *(given[name] for name in names))
            want = found[0] if gives is OnRank else gives
            wrong = {rank: each for rank, each in enumerate(found) if each != want}
            assert not wrong, f"expected {want} on all ranks, got {wrong}"

        shown = ["ranks", *([] if one else ["world"]), *(name for name in names if name != "world")]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in shown]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.on_rank = check  # type: ignore[attr-defined]
        return worlds(*usual, rare=rare)(test) if usual and not one else test

    return decorate


def by_turns(names: str, *axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Every value of every axis but `world`, in as few combinations as the longest of them has values.

    The other combinations run with --thorough.
    """
    count = max(len(axis) for name, axis in zip(names.split(", "), axes, strict=True) if name != "world")
    usual = [tuple(axis[i % len(axis)] for axis in axes) for i in range(count)]
    others = [row for row in itertools.product(*axes) if row not in usual]
    return pytest.mark.parametrize(names, [*usual, *thorough(*others)])


def generated(count: int) -> settings:
    """Try `count` Hypothesis cases with --thorough, otherwise a third of them; every run tries the same cases."""
    return settings(
        max_examples=count if "--thorough" in sys.argv else count // 3,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class Standstill:
    """`seconds`: the longest time in the block for which this process, and so probably all of the machine, stood."""

    def __enter__(self) -> "Standstill":
        self.seconds = 0.0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._over.is_set():
            begun = time.monotonic()
            self._over.wait(0.05)
            self.seconds = max(self.seconds, time.monotonic() - begun - 0.05)


def until(holds: Callable[[], bool], seconds: float = 3.0) -> bool:
    """Whether `holds` comes true in that time; what nobody holds is freed meanwhile."""
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return found


def in_time(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test with a deadline: if it fails while the machine stood still, it runs again."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        for left in range(TRIES, 0, -1):
            with Standstill() as stood:
                try:
                    test(**given)
                    return
                except Exception as error:
                    failed = error
            if left == 1 or stood.seconds < STOOD_S:
                raise failed

    return run


@contextmanager
def heard() -> Iterator[list[str]]:
    """The lines that thinwire logs."""
    lines: list[str] = []
    logger, handler = logging.getLogger("thinwire"), logging.Handler(logging.INFO)
    with patch.object(handler, "emit", lambda record: lines.append(record.getMessage())):
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield lines
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 7, 8, 9, 31, 32, 33, 127, 128, 129, 1000)
FLOAT_MAX = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149
ROUND = 2.0**-24  # relative error of one fp32 rounding
# with what is no letter, ends a line, or is a control code
LETTERS = string.printable + "é¹²٣語😀 \0\x1b\x1c\x7f\x85\x9b\u200b\u2028\u2029\u202e"
GARBAGE = 0xA5  # what buffers hold before they are written


# --- codecs -----------------------------------------------------------------------------------------------------------
def _integers() -> list[BlockInt]:
    blocks = (128, 32, 40, 8, 256, 1000, 64)  # not all a power of two, not all a multiple of a vector
    choices = [(bits, m, r) for bits in range(8, 1, -1) for m in (0, 1) for r in (0, 1)]
    modes = ("symmetric", "affine")
    roundings = ("nearest", "stochastic")
    return [BlockInt(bits, blocks[(i + i // 7) % 7], modes[m], roundings[r]) for i, (bits, m, r) in enumerate(choices)]


def _lloyds() -> list[Lloyd]:
    blocks = (512, 1024, 256, 128, 64, 32)  # each has its own path through the rotation
    choices = [(bits, rotate, s) for rotate in (True, False) for s in ("mmse", "unbiased") for bits in (4, 3, 2, 1)]
    return [Lloyd(bits, blocks[i % 6], rotate, s) for i, (bits, rotate, s) in enumerate(choices)]  # type: ignore[arg-type]


PLAIN = [Identity(), Cast("bf16")]
CASTS = [Cast("fp16"), Cast("fp16", 24), Cast("e4m3"), Cast("e4m3", 8), Cast("e5m2"), Cast("e5m2", 1000)]
INTEGERS = _integers()
LLOYDS = _lloyds()
TRELLISES = [
    *(Trellis(2), Trellis(1, 256, scale="unbiased"), Trellis(3, 1024), Trellis(2, 32), Trellis(3, 64, rotate=False))
]
CODECS: list[Codec] = [*PLAIN, *CASTS, *INTEGERS, *LLOYDS, *TRELLISES]
BLOCKED: list[Codec] = [*CASTS, *INTEGERS, *LLOYDS, *TRELLISES]
ONE_OF_EACH: list[Codec] = [
    *(Identity(), Cast("bf16"), Cast("fp16"), Cast("e4m3", 64), Cast("e5m2"), BlockInt(8), BlockInt(4, 32)),
    *(BlockInt(3, 40, "affine"), BlockInt(5, 64, "affine", "stochastic"), BlockInt(2, 128, rounding="stochastic")),
    *(Lloyd(4), Lloyd(2, 64), Lloyd(1, 256, scale="unbiased"), Lloyd(3, 32, rotate=False)),
    Trellis(2),
]


def block_of(codec: Codec) -> int:
    """Elements that share a scale; 1 where every element stands for itself."""
    return codec.encoding(torch.float32).format.block or 1


# --- inputs -----------------------------------------------------------------------------------------------------------
def _signs(shape: int, g: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (shape,), generator=g).float() * 2 - 1


def _huge(n: int, g: torch.Generator) -> Tensor:
    x = (torch.rand(n, generator=g) * 2 - 1) * FLOAT_MAX
    x[::61] = FLOAT_MAX
    x[5::97] = -FLOAT_MAX
    return x


def _nonfinite(n: int, g: torch.Generator) -> Tensor:
    x = torch.randn(n, generator=g)
    for value in (math.nan, math.inf, -math.inf):
        x[torch.randint(0, max(n, 1), (1 + n // 700,), generator=g) if n else slice(0)] = value
    return x


def _spike(n: int, g: torch.Generator) -> Tensor:
    x = torch.zeros(n)
    x[torch.randint(0, max(n, 1), (1 + n // 300,), generator=g) if n else slice(0)] = -1e30
    return x


CONTENTS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "gaussian": lambda n, g: torch.randn(n, generator=g),
    "1e-40": lambda n, g: torch.randn(n, generator=g) * 1e-40,
    "1e-21": lambda n, g: torch.randn(n, generator=g) * 1e-21,
    "1e20": lambda n, g: torch.randn(n, generator=g) * 1e20,
    "huge": _huge,
    "nonfinite": _nonfinite,
    "zeros": lambda n, g: torch.zeros(n) * _signs(n, g),
    "constant": lambda n, g: _signs(1, g).expand(n) * 0.7,
    "spike": _spike,
    "decades": lambda n, g: _signs(n, g) * 10 ** (torch.rand(n, generator=g) * 60 - 38),
    "subnormals": lambda n, g: torch.randint(-9, 10, (n,), generator=g).float() * SMALLEST,
}
FINITE = [name for name in CONTENTS if name != "nonfinite"]


def seeded(*seeds: int) -> torch.Generator:
    """A generator of its own: tests depend neither on their order nor on the global one."""
    return torch.Generator().manual_seed(hash(seeds) & 0x7FFFFFFF)


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`; what is finite stays finite, so that fp16 meets its extremes and not Inf."""
    most = torch.finfo(dtype).max
    return torch.where(x.isfinite(), x.clamp(-most, most), x).to(dtype)


def content(name: str, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """n numbers of one kind."""
    return to_dtype(CONTENTS[name](n, seeded(seed, n)), dtype)


def mixed(n: int, block: int, dtype: torch.dtype, rank: int, seed: int) -> Tensor:
    """Runs of one kind, of a block and a half or more. Ranks agree on the kind of half of them; few are not finite."""
    run = max(96, block * 3 // 2)
    runs = -(-n // run)
    weights = torch.tensor([0.2 if name == "nonfinite" else 1.0 for name in CONTENTS])
    common = torch.multinomial(weights, max(runs, 1), True, generator=seeded(seed))
    own = torch.multinomial(weights, max(runs, 1), True, generator=seeded(seed, rank, 1))
    kinds = torch.where(torch.rand(max(runs, 1), generator=seeded(seed, rank, 2)) < 0.5, common, own).tolist()
    makers = list(CONTENTS.values())
    parts = [makers[kind](run, seeded(seed + 100 * i + rank, run)) for i, kind in enumerate(kinds)]
    return to_dtype(torch.cat(parts)[:n], dtype)


# --- doing ------------------------------------------------------------------------------------------------------------
def wire_of(codec: Codec, x: Tensor, *, step: int = 0, residual: Tensor | None = None) -> Tensor:
    """The wire of x, in a buffer that held something else."""
    wire = torch.full((codec.wire_bytes(x.numel(), x.dtype),), GARBAGE, dtype=torch.uint8, device=x.device)
    codec.encode(x, wire, step=step, residual=residual)
    return wire


def wires_of(codec: Codec, xs: Iterable[Tensor], *, step: int = 0) -> Tensor:
    """One wire a row."""
    return torch.stack([wire_of(codec, x, step=step) for x in xs])


def decoded(codec: Codec, wire: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode a wire into a buffer that held NaN."""
    out = torch.full((n,), math.nan, dtype=dtype, device=wire.device)
    codec.decode(wire, out)
    return out


def summed(codec: Codec, wires_WN: Tensor, n: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """The sum of wires."""
    out = torch.full((n,), math.nan, dtype=dtype, device=wires_WN.device)
    codec.decode_sum(wires_WN, out, scale=scale)
    return out


def recoded(
    codec: Codec, wires_WN: Tensor, n: int, scale: float = 1.0, step: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The wire of the sum of wires."""
    wire = torch.full((codec.wire_bytes(n, dtype),), GARBAGE, dtype=torch.uint8, device=wires_WN.device)
    codec.recode(wires_WN, wire, n, scale=scale, step=step, dtype=dtype)
    return wire


def check_picked(backend: str, device: torch.device, dtype: torch.dtype, n: int = 3001) -> None:
    """Numbers picked from a tensor leave zeros, have the wires of the same numbers side by side, and come back."""
    whole = torch.randn(n, generator=seeded(n)).to(device, dtype)
    index = torch.randperm(n, generator=seeded(n, 2))[:1500].to(device)
    whole[index[7]] = math.nan
    numbers, zeroed = whole[index], whole.index_fill(0, index, 0)
    for name, skip in itertools.product(("none", "bf16"), (-1, 1)):
        how, shape = make(name).encoding(dtype), Rows(1500, 640, 3)
        job = RowJob(how, 0, shape, dtype, device, how.format.layout(640).nbytes + 16)
        results = []
        for kind, x in ((backend, rows.Picked(whole.clone(), index, numbers * 0)), ("reference", numbers.clone())):
            wires = torch.full((3 * job.stride,), GARBAGE, dtype=torch.uint8, device=device)
            bad = rows.Bad(torch.zeros(2, dtype=torch.int32, device=device), 5)
            with use_backend(kind):
                rows.encoder(job, skip=skip)(x, wires, 1, None)
                results += [wires.clone(), bad.noted]
                if skip < 0:
                    rows.decoder(job, scale=-0.5)(wires, x, None, bad)
                if isinstance(x, rows.Picked):
                    assert_same(x.whole.index_fill(0, index, 0), zeroed, "what was not picked")
                    assert skip < 0 or not x.whole[index].any()
                    assert skip < 0 or bool(x.copy.eq(numbers).sum() == 1499)
                results.append(x.whole[index] if isinstance(x, rows.Picked) else x if skip < 0 else torch.zeros_like(x))
        for found, want in zip(results[:3], results[3:], strict=True):
            assert_same(found, want, f"{name}, without row {skip}")


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a list of them, on a device; anything else as it is."""
    if isinstance(value, list):
        return [moved(each, device) for each in value]
    return value.to(device) if isinstance(value, Tensor) else value


def shifted(x: Tensor, by: int = 1) -> Tensor:
    """A copy that starts `by` elements after the start of its memory."""
    room = x.new_zeros(x.numel() + by)
    room[by:] = x
    return room[by:]


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise where the host waits for a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- comparing --------------------------------------------------------------------------------------------------------
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(x: Tensor) -> Tensor:
    """The bits of x as integers; every NaN has the same bits."""
    if not x.is_floating_point():
        return x
    return torch.where(x.isnan(), torch.nan, x).contiguous().view(_INTEGERS[x.dtype.itemsize])


def assert_same(got: Tensor, want: Tensor, what: str = "") -> None:
    """Equal in every bit, the sign of zero too; any NaN equals any other."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    differs = (bits_of(got) != bits_of(want)).reshape(-1).nonzero().reshape(-1)
    if differs.numel():
        i = int(differs[0])
        pair = f"{got.reshape(-1)[i]}, expected {want.reshape(-1)[i]}"
        raise AssertionError(f"{what}: {differs.numel()} of {got.numel()} differ, first [{i}]: {pair}")


def guarded(n: int, dtype: torch.dtype, shift: int = 0, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    """A buffer of bytes, and n elements inside it; wires start at any byte, floats at a multiple of their size."""
    start = 64 + shift // dtype.itemsize * dtype.itemsize
    room = torch.full((start + n * dtype.itemsize + 64,), GARBAGE, dtype=torch.uint8, device=device)
    return room, room[start : start + n * dtype.itemsize].view(dtype)


def assert_untouched(room: Tensor, buffer: Tensor, what: str) -> None:
    """No byte around the buffer was written."""
    start = buffer.storage_offset() * buffer.element_size()
    around = torch.cat((room[:start], room[start + buffer.nbytes :]))
    assert (around == GARBAGE).all(), f"{what}: bytes outside of it were written"


# --- error bounds, from the definitions in kernels/reference.py -------------------------------------------------------
def blocks_of(x: Tensor, block: int) -> Tensor:
    """x as (K, block) in float64, the last block filled with its last element."""
    flat = x.detach().reshape(-1).double()
    return torch.cat((flat, flat[-1:].expand(-flat.numel() % block))).view(-1, block)


def _cast_bound(codec: Cast, x_KB: Tensor) -> Tensor:
    """Half an ulp: relative for normal numbers, absolute below; the block's peak comes to [2**top, 2**(top+1))."""
    mantissa, top, lowest = {"fp16": (10, 14, -14), "e4m3": (3, 7, -6), "e5m2": (2, 14, -14)}[codec.format]
    peak_K1 = x_KB.abs().amax(1, keepdim=True)
    scale_K1 = torch.where(peak_K1 > 0, torch.exp2(torch.floor(torch.log2(peak_K1)) - top), 0)
    return torch.maximum(x_KB.abs() * 2.0 ** -(mantissa + 1), scale_K1 * 2.0 ** (lowest - mantissa - 1))


def _symmetric_bound(codec: BlockInt, x_KB: Tensor) -> Tensor:
    """Half a step, or one (stochastic). The step has one bfloat16 rounding, x * (1 / step) two of fp32."""
    qmax = (1 << codec.bits - 1) - 1
    step_K1 = x_KB.abs().amax(1, keepdim=True) / qmax * (1 + 2.0**-8)
    return (step_K1 * (_rounding(codec) + qmax * 4 * ROUND)).expand_as(x_KB)


def _affine_bound(codec: BlockInt, x_KB: Tensor) -> Tensor:
    """Half a step (or one) of a range that starts at a rounded-down minimum and whose step is rounded up.

    x - minimum and minimum + code * scale have one fp32 rounding each. Where the top code would decode past the largest
    float it is not used: a step more, short of the last 2**-20 of the range. No minimum lies below the lowest bfloat16.
    """
    top = (1 << codec.bits) - 1
    low_K1, high_K1 = x_KB.amin(1, keepdim=True), x_KB.amax(1, keepdim=True)
    peak_K1 = torch.maximum(low_K1.abs(), high_K1.abs())
    step_K1 = (high_K1 - low_K1 + low_K1.abs() * 2.0**-7 + SMALLEST) / top * (1 + 2.0**-7)
    error_K1 = step_K1 * (_rounding(codec) + top * 4 * ROUND) + 4 * peak_K1 * ROUND
    at_the_top = low_K1 * (1 + 2.0**-7) + top * step_K1 >= FLOAT_MAX * (1 - 2.0**-19)
    error_K1 = torch.where(at_the_top, error_K1.clamp(min=step_K1) + FLOAT_MAX * 2.0**-19, error_K1)
    return error_K1.clamp(min=-torch.finfo(torch.bfloat16).max - low_K1).expand_as(x_KB)


def _rounding(codec: BlockInt) -> float:
    return 0.5 if codec.rounding == "nearest" else 1.0


def _lloyd_bound(codec: Lloyd, x_KB: Tensor) -> Tensor:
    """On the norm of a block's error.

    y is the block on the integer grid: half a cell, 1 / (2 * grid) of the norm, away from it; q are the levels. By
    least squares the error of y is no longer than y. Unbiased: the decoded block is |x|**2 |q| / <y, q>, where <y, q>
    is at least the lowest level times |y|, and |q| at most sqrt(codes) times the highest. The scale has one bfloat16
    rounding.
    """
    table = TRELLIS[codec.bits] if isinstance(codec, Trellis) else LLOYD[codec.bits]
    codes = max(8, 1 << (x_KB.shape[1] - 1).bit_length())
    off_grid, rounded = 1 / table.grid, 1 + 2.0**-8 + 64 * ROUND
    longest = math.sqrt(codes) * table.levels[-1] / table.levels[0]
    factor = 1 + off_grid if codec.scale == "mmse" else 1 + longest / (1 - off_grid / 2)
    return x_KB.norm(dim=1, keepdim=True) * factor * rounded


def assert_within_bound(codec: Codec, x: Tensor, y: Tensor) -> None:
    """y (fp32) is what x may decode to: NaN for a block that is not finite, zero for zeros, else within the bound."""
    if isinstance(codec, Identity) or (isinstance(codec, Cast) and codec.format == "bf16"):
        assert_same(y, x.float() if isinstance(codec, Identity) else x.to(torch.bfloat16).float(), str(codec))
        return
    block = block_of(codec)
    full = x.numel() // block * block
    for part, decoded_part, size in ((x[:full], y[:full], block), (x[full:], y[full:], max(1, x.numel() - full))):
        _assert_blocks(codec, blocks_of(part, size), blocks_of(decoded_part, size))


def _assert_blocks(codec: Codec, x_KB: Tensor, y_KB: Tensor) -> None:
    finite_K = x_KB.isfinite().all(1)
    assert y_KB[~finite_K].isnan().all(), f"{codec}: a block with NaN or Inf must decode to NaN"
    x_KB, y_KB = x_KB[finite_K], y_KB[finite_K]
    assert y_KB.isfinite().all(), f"{codec}: a finite block must decode to finite numbers"
    zero_K = (x_KB == 0).all(1)
    assert (y_KB[zero_K] == 0).all(), f"{codec}: a zero block must decode to zero"
    error_KB, bound_KB = (y_KB - x_KB).abs(), error_bound(codec, x_KB)
    if isinstance(codec, Lloyd):
        error_KB = error_KB.norm(dim=1, keepdim=True)
    worst = (error_KB - bound_KB).reshape(-1)
    if worst.numel() and worst.max() > 0:
        i = int(worst.argmax())
        raise AssertionError(f"{codec}: error {error_KB.reshape(-1)[i]} > bound {bound_KB.reshape(-1)[i]} at {i}")


def error_bound(codec: Codec, x_KB: Tensor) -> Tensor:
    """Of every element of finite blocks; Lloyd: of every block's norm. Leaving the lifted domain rounds once more."""
    if isinstance(codec, Lloyd):
        return _lloyd_bound(codec, x_KB) + x_KB.shape[1] * SMALLEST
    if isinstance(codec, Cast):
        return _cast_bound(codec, x_KB) + SMALLEST
    assert isinstance(codec, BlockInt)
    return (_affine_bound if codec.mode == "affine" else _symmetric_bound)(codec, x_KB) + SMALLEST


# --- collectives ------------------------------------------------------------------------------------------------------
def given(n: int, rank: int, dtype: torch.dtype = torch.float32, *, broken: bool = False) -> Tensor:
    """A rank's n numbers: both signs, a stretch of zeros, one huge value; broken: one Inf and one NaN as well."""
    x = torch.randn(n, generator=seeded(n, rank), dtype=torch.float64)
    x[n // 5 : n // 3] = 0
    x[n // 2 : n // 2 + 40].abs_().neg_()
    if n > 9:
        x[n - 2 - rank % 8] = (-1) ** rank * (1e4 if dtype == torch.float16 else 1e30)
    if broken and n:
        x[n // 7 + rank % 4] = math.inf
        x[n // 2] = math.nan
    return x.to(dtype)


def digest(*tensors: Tensor) -> str:
    """One string for the bytes of tensors, wherever they are."""
    rows = (t.detach().cpu().resolve_conj().contiguous().reshape(-1) for t in tensors)
    return hashlib.sha256(b"/".join(row.view(torch.uint8).numpy().tobytes() for row in rows)).hexdigest()


@contextmanager
def small_chunks(nbytes: int = 400) -> Iterator[None]:
    """Cut small messages into many chunks inside the block. All ranks must do the same."""
    with patch.multiple(chunks, MAX_CHUNK_BYTES=nbytes, _WHOLE=4), patch.multiple(plan, _MESSAGE_BYTES=nbytes):
        yield


@dataclass(frozen=True)
class Range:
    """Numbers known to within `lost`, which is infinite where anything may stand."""

    value: Tensor
    lost: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Range":
        """The numbers themselves."""
        return cls(x.detach().reshape(-1).double(), torch.zeros(x.numel(), dtype=torch.float64))

    @classmethod
    def total(cls, ranges: Sequence["Range"], scale: float = 1.0, dtype: torch.dtype = torch.float32) -> "Range":
        """scale * sum, in any order: a rounding an addition, one for the factor, one of the factor itself."""
        value = scale * torch.stack([r.value for r in ranges]).sum(0)
        lost = abs(scale) * torch.stack([r.lost for r in ranges]).sum(0)
        sizes = abs(scale) * torch.stack([r.value.abs() + r.lost for r in ranges]).sum(0)
        return cls(value, lost + (len(ranges) + 1) * sizes * half_ulp(dtype) + SMALLEST)

    def coded(self, codec: Codec) -> "Range":
        """Through encode and decode. Blocks may begin anywhere: an element shares one with its neighbors only."""
        return Range(self.value, self.lost + _coding_bound(codec, self.value - self.lost, self.value + self.lost))

    def written(self, dtype: torch.dtype) -> "Range":
        """Rounded to `dtype`."""
        smallest = max(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, SMALLEST)
        return Range(self.value, self.lost + (self.value.abs() + self.lost) * half_ulp(dtype) + smallest)

    def assert_holds(self, got: Tensor, what: str = "") -> None:
        """`got` lies within; NaN or infinite where the numbers are, and nowhere beyond the blocks of those."""
        flat = got.detach().reshape(-1).double()
        finite = self.value.isfinite()
        assert not flat[~finite].isfinite().any(), f"{what}: NaN or Inf was lost"
        bound = torch.where(self.lost.isnan(), math.inf, self.lost)
        bad = ~((flat - self.value).abs() <= bound) & bound.isfinite() & finite
        if bad.any():
            i = int(bad.nonzero()[0])
            gap = f"{flat[i]}, expected {self.value[i]} within {bound[i]}"
            raise AssertionError(f"{what}: {int(bad.sum())} of {flat.numel()} out of bounds, first [{i}]: {gap}")


def half_ulp(dtype: torch.dtype) -> float:
    """Relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def _coding_bound(codec: Codec, low: Tensor, high: Tensor) -> Tensor:
    """On the error of every element of a tensor between `low` and `high`, wherever its blocks begin."""
    if isinstance(codec, Identity) or not low.numel():
        return torch.zeros_like(low)
    if isinstance(codec, Cast) and codec.format == "bf16":
        return torch.maximum(low.abs(), high.abs()) * 2.0**-8 + 2.0**-134
    reach = min(block_of(codec), low.numel()) - 1
    lows, highs = _windows(low, reach), _windows(high, reach)
    if isinstance(codec, Lloyd):  # the norm of a block decides
        rows = torch.cat((lows, highs), 1)
    else:  # an element and the ends of its block
        rows = torch.stack((low, high, lows.amin(1), highs.amax(1)), 1)
    bound = torch.where(rows.isfinite().all(1, keepdim=True), error_bound(codec, rows), math.inf)
    return bound[:, :2].amax(1)


def _windows(x: Tensor, reach: int) -> Tensor:
    """One row per element: its neighbors on both sides, and itself."""
    return torch.cat((x[:1].expand(reach), x, x[-1:].expand(reach))).unfold(0, 2 * reach + 1, 1)
