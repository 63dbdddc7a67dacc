"""Exact differences: bits per weight from one training step to the next, beside entropy and other codes; speeds.

A GPT is trained, then trained on at every rate; the last step's weights, cast to bf16, are encoded against those
before. On the CPU it is the small one, on a GPU that of 25 M weights. Speeds are those of one thread by the processor's
time, or of the GPU by the clock, on the same weights many times in random orders: the fastest of some runs, on the CPU
in turns with zstd's.
"""

import copy
import ctypes
import ctypes.util
import time
from collections.abc import Callable, Generator
from functools import lru_cache, partial
from typing import Annotated, Any

import torch
from torch import Tensor

from benchmarks import clock, tasks
from benchmarks.command import start
from benchmarks.loss import task as large
from thinwire import exact, kernels
from thinwire.kernels.exact import differences, exponents
from thinwire.tools.bench.record import Progress, Record, Row, collect
from thinwire.tools.cli.bench import deliver
from thinwire.tools.cli.flags import Json, Quick, option

RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.95)),
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}
SGD_RATE = 100  # times the rate, whose steps are Adam's
WARM, STEPS = 40, 15  # at a rate of 1e-3, and at the rate
SPEED_NUMEL = {"cpu": 1 << 22, "cuda": 1 << 28}
TURNS = 5


class LargeGpt:
    """The network of the loss study at 25 M weights, on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._size = large.SIZES["25m"]
        text = large.sources()
        self._starts = large.starts_of(text, self._size, 1, 1).to(device)
        self._train = text.train.to(device)

    def model(self, seed: int) -> torch.nn.Module:
        """A network."""
        return large.network_of(self._size, seed).to(self._train.device)

    def loss(self, model: torch.nn.Module, rows: Tensor) -> Tensor:
        """The mean loss of a batch."""
        with large.autocast(rows.device):
            found: Tensor = model(rows)
        return found

    def batch(self, step: int, *_: int) -> Tensor:
        """Rows of text."""
        return large.windows(self._train, self._starts[step, 0], self._size.context)


Task = Any  # a Gpt or a LargeGpt


def run(
    rates: tuple[float, ...] = RATES, *, device: str = "cpu", quick: bool = False, progress: Progress = iter
) -> Record:
    """A record of kind "exact"."""
    place = torch.device(device)
    task: Any = tasks.find("gpt", quick=quick) if place.type == "cpu" or quick else LargeGpt(place)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = [(name, rate) for name in OPTIMIZERS for rate in rates]
        return collect("exact", place, _rows(task, cases, place, quick, progress))
    finally:
        torch.set_num_threads(threads)


def _rows(task: Task, cases: list[Any], device: torch.device, quick: bool, progress: Progress) -> Generator[Row]:
    backend = clock.name_of(kernels.select(device))
    warm = {name: _trained(task, name, 1e-3, quick) for name in OPTIMIZERS}
    for name, rate in progress(cases):
        base, new = (part.to(device) for part in _step(task, *copy.deepcopy(warm[name]), rate, name, quick))
        row: Row = {
            "optimizer": name,
            "rate": rate,
            "step": WARM + (1 if quick else STEPS),
            "numel": base.numel(),
            "backend": backend,
            "threads": 1,
        }
        yield {**row, **bits_of(new, base), **speeds_of(new, base, quick)}


def _trained(task: Task, name: str, rate: float, quick: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = task.model(0)
    optimizer = OPTIMIZERS[name](model.parameters(), lr=rate * (SGD_RATE if name == "sgd" else 1))
    _train(task, model, optimizer, range(3 if quick else WARM))
    return model, optimizer


def _train(task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        task.loss(model, task.batch(step, 0, 0, 1)).backward()
        optimizer.step()


def _step(
    task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rate: float, name: str, quick: bool
) -> tuple[Tensor, Tensor]:
    """All weights in bf16 before and after one step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * (SGD_RATE if name == "sgd" else 1)
    end = WARM + (1 if quick else STEPS)
    _train(task, model, optimizer, range(WARM, end))
    base = _flat(model)
    _train(task, model, optimizer, range(end, end + 1))
    return base, _flat(model)


def _flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().bfloat16().flatten() for parameter in model.parameters()])


def bits_of(new: Tensor, base: Tensor) -> Row:
    """Bits per weight of the difference, in several codes; None where zstd's library is not found."""
    changed = (new.view(torch.int16) != base.view(torch.int16)).double().mean().item()
    ours = 8 * exact.encode(new, base).numel() / base.numel()
    least = entropy(new, base)
    xor = (new.view(torch.int16) ^ base.view(torch.int16)).cpu()
    return {
        "changed_share": changed,
        "entropy_bits": least,
        "bits": ours,
        "times_entropy": ours / least,
        "bits_index_value": 48 * changed,
        "bits_zstd": zstd_bits(planes_of(new, base)),
        "bits_xor_zstd": zstd_bits(xor.view(torch.uint8)),
    }


def planes_of(new: Tensor, base: Tensor) -> Tensor:
    """The low bytes of all differences, then the high ones."""
    u = differences(new, base).to(torch.int32)
    return torch.cat([(u & 0xFF).to(torch.uint8), (u >> 8).to(torch.uint8)]).cpu()


def entropy(new: Tensor, base: Tensor) -> float:
    """Bits per weight of the differences, given the exponent of the base."""
    given = exponents(base)
    counts = [x.unique(return_counts=True)[1].double() for x in (given << 32 | differences(new, base), given)]
    joint, known = (float(-(count * (count / base.numel()).log2()).sum()) for count in counts)
    return (joint - known) / base.numel()


def speeds_of(new: Tensor, base: Tensor, quick: bool) -> Row:
    """GB of bf16 weights per second."""
    times = max(1, (1 << 18 if quick else SPEED_NUMEL[base.device.type]) // base.numel())
    random = torch.Generator(base.device).manual_seed(1)
    order = torch.cat([torch.randperm(base.numel(), generator=random, device=base.device) for _ in range(times)])
    base, new = base[order], new[order]
    wire = exact.encode(new, base)
    works: dict[str, Callable[[], object]] = {
        "encode_gb_s": lambda: exact.encode(new, base),
        "decode_gb_s": lambda: exact.decode(wire, base),
        "copy_gb_s": new.clone,
    }
    packed = None if base.is_cuda else zstd(planes_of(new, base))
    if packed is not None:
        planes = planes_of(new, base)
        works["zstd_encode_gb_s"] = lambda: zstd(planes)
        works["zstd_decode_gb_s"] = lambda: unzstd(packed, planes.numel())
    now = time.perf_counter if base.is_cuda else time.process_time  # other processes take no part in the latter
    best = dict.fromkeys(works, float("inf"))
    for _ in range(2 if quick else TURNS):
        for name, work in works.items():
            began = now()
            work()
            if base.is_cuda:
                torch.cuda.synchronize()
            best[name] = min(best[name], now() - began)
    return {"speed_numel": base.numel(), **{name: base.nbytes / 1e9 / seconds for name, seconds in best.items()}}


@lru_cache(maxsize=1)
def _zstd() -> ctypes.CDLL | None:
    name = ctypes.util.find_library("zstd")
    if name is None:
        return None
    library = ctypes.CDLL(name)
    for function in (library.ZSTD_compress, library.ZSTD_decompress, library.ZSTD_compressBound):
        function.restype = ctypes.c_size_t
    return library


def zstd(data: Tensor, level: int = 3) -> Tensor | None:
    """The bytes in zstd's code, by the system's library; None where there is none."""
    library = _zstd()
    if library is None:
        return None
    room = torch.empty(library.ZSTD_compressBound(ctypes.c_size_t(data.nbytes)), dtype=torch.uint8)
    sizes = ctypes.c_size_t(room.nbytes), ctypes.c_size_t(data.nbytes)
    to, source = ctypes.c_void_p(room.data_ptr()), ctypes.c_void_p(data.data_ptr())
    return room[: library.ZSTD_compress(to, sizes[0], source, sizes[1], level)].clone()


def unzstd(packed: Tensor, numel: int) -> Tensor:
    library = _zstd()
    assert library is not None
    out = torch.empty(numel, dtype=torch.uint8)
    to, source = ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(packed.data_ptr())
    library.ZSTD_decompress(to, ctypes.c_size_t(numel), source, ctypes.c_size_t(packed.nbytes))
    return out


def zstd_bits(data: Tensor) -> float | None:
    """Bits for every two bytes, a weight."""
    packed = zstd(data)
    return None if packed is None else 16 * packed.nbytes / data.nbytes


def command(device: Annotated[str, option("cpu, or cuda.")] = "cpu", json: Json = None, quick: Quick = False) -> None:
    """Bits per weight of exact differences, beside entropy, index + value and zstd, by optimizer and rate; speeds."""
    deliver(partial(run, RATES[::3] if quick else RATES, device=device, quick=quick), json)


if __name__ == "__main__":
    from benchmarks import exact as study

    start(study.command)
