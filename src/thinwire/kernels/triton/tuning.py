"""How kernels are cut into programs: by a table in this file, or by measurement if requested.

The table holds what was fastest on an H200; GPUs with less memory bandwidth per multiprocessor use small tiles. With
THINWIRE_TUNE=1, the first large tensor of each kind triggers a measurement of a few configurations on separate buffers,
which compiles each and waits for the device. Results are kept in THINWIRE_CACHE, or thinwire/ in the user's cache
directory, and reused. No configuration changes a byte.
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton

from thinwire.kernels.schema import Encoding
from thinwire.kernels.triton import launch
from thinwire.kernels.triton.compiling import say
from thinwire.kernels.triton.launch import MOST_UNROLLED, Config
from thinwire.kernels.triton.tile import MOST_CODES
from thinwire.wire import Format, Kind

SMALL = 1 << 20  # elements; fewer do not fill the GPU, so a thread should have little to do
LARGE = 1 << 22  # from here on a better configuration is worth a measurement, if measurements are wanted
SHORT = Config(4, 1)
STARVED = Config(4, 2)  # few registers, quickly compiled; two warps, as such GPUs hold few programs at a time
FED_BYTES = 13e9  # of memory bandwidth per multiprocessor: A100 14 to 19, H100 25, H200 36; RTX, L40S, A10 5 to 12
_ELEMENTS = 1 << 25  # measured on: more than an L2 cache holds
_ROUNDS = 5
_lock = threading.Lock()
_Key = tuple[str, Encoding, torch.dtype, int]  # operation and its wires, encoding, dtype, number of the device
_chosen: dict[_Key, Config] = {}


def choose(op: str, how: Encoding, dtype: torch.dtype, device: torch.device, numel: int, world: int = 1) -> Config:
    """The configuration of `op` for tensors of `dtype` on `device`.

    op: encode, encode_residual, decode_sum, recode, or recode_own, whose own part is a tensor.
    One serves all sizes, so that a kernel is compiled once; but a small tensor does not wait for the 64 numbers a
    thread has in the tiles of a large Lloyd encode or recode.
    """
    if not how.format.block:
        return Config()
    if how.format.block > MOST_CODES:  # one program per block, whatever the configuration
        return SHORT
    if numel < SMALL and op in ("encode", "recode") and how.format.kind == Kind.LLOYD:
        return SHORT
    if device.type != "cuda":
        return candidates(op, how.format, dtype)[0]
    world = min(world, MOST_UNROLLED + 1)  # more are one kernel
    key = (op if world == 1 else f"{op}_{world}", how, dtype, device.index or 0)
    found = _chosen.get(key)
    if found is None:
        with _lock:
            found = _chosen.get(key) or _first_choice(key, op, device, numel, world)
    return found


def candidates(op: str, format: Format, dtype: torch.dtype) -> list[Config]:
    """What is worth measuring, the best on an H200 first."""
    if format.kind == Kind.TRELLIS:  # whose strands fix the lanes
        return [SHORT, STARVED, Config(4, 4)]
    if format.kind != Kind.LLOYD:
        if (op.startswith("recode") and format.bits < 8) or (op.startswith("encode") and dtype.itemsize == 2):
            return [Config(8, 2), STARVED, Config(8, 4)]
        return [STARVED, Config(8, 2), Config(4, 4)]
    if op == "encode_residual":  # ptxas would take up to 160 registers, for a short last block
        most = {1: 128, 2: 96, 4: 96}.get(format.bits) if format.block <= 512 else None
        return [Config(4, 1, most), Config(8, 1), Config(8, 2), STARVED]
    if op == "encode":
        return [Config(16, 2), Config(8, 1), Config(32, 1, 200), STARVED]
    if op == "recode" and format.bits != 3:  # ptxas would take up to 255 registers, for sums of unusual scales
        return [Config(16, 1, 96), Config(8, 1), Config(32, 1, 168), STARVED]
    return [Config(8, 1), Config(4, 1), Config(16, 2), STARVED]


@lru_cache(maxsize=64)
def starved(device: torch.device) -> bool:
    """Whether memory bandwidth, not arithmetic, limits every kernel on this GPU."""
    return _starved(torch.cuda.get_device_properties(device))


def _starved(gpu: Any) -> bool:
    bandwidth = 2 * 1e3 * gpu.memory_clock_rate * gpu.memory_bus_width / 8  # kHz, twice a cycle; bits
    return bool(0 < bandwidth < FED_BYTES * gpu.multi_processor_count)


def _first_choice(key: _Key, op: str, device: torch.device, numel: int, world: int) -> Config:
    """Called with the lock: what the disk says, what a measurement says if one is wanted, or what the table says."""
    kind, how, dtype, _ = key
    name = f"{kind} {_text(how)} {str(dtype).removeprefix('torch.')}"
    known = _known(device).get(name)
    options = candidates(op, how.format, dtype)
    table = STARVED if starved(device) else options[0]
    found = next((config for config in options if known == [config.lanes, config.warps]), None)
    if found is None and os.environ.get("THINWIRE_TUNE") == "1":
        if numel < LARGE or _captured(device):
            return table  # and perhaps better the next time
        say(f"measuring configurations of {name}, some seconds; kept for later runs in {_file(device)}")
        found = _measured(op, how, dtype, device, world)
        if found is not None:
            _write(device, {name: [found.lanes, found.warps]})
    return _chosen.setdefault(key, found or table)


def _captured(device: torch.device) -> bool:
    """Whether launches are captured in a graph."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


# --- measuring --------------------------------------------------------------------------------------------------------


def _measured(op: str, how: Encoding, dtype: torch.dtype, device: torch.device, world: int) -> Config | None:
    """The fastest candidate, or None where the measurement fails, for want of memory or otherwise."""
    with torch.cuda.device(device), contextlib.suppress(RuntimeError):
        run = _trial(op, how, dtype, device, world)
        times = {config: _milliseconds(run, config) for config in candidates(op, how.format, dtype)}
        return min(times, key=lambda config: times[config])
    return None


def _trial(op: str, how: Encoding, dtype: torch.dtype, device: torch.device, world: int) -> Callable[[Config], None]:
    """The operation on buffers of its own."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(_ELEMENTS, generator=generator, device=device).to(dtype)
    nbytes = how.format.layout(_ELEMENTS).nbytes
    wire = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if op.startswith("encode"):
        residual = torch.zeros(_ELEMENTS, device=device) if op == "encode_residual" else None
        return lambda config: launch.encode(how, x, wire, residual, 1, 1, config)
    launch.encode(how, x, wire, None, 1, 1, SHORT)
    wires_WN = wire.repeat(world, 1)
    if op == "decode_sum":
        return lambda config: launch.decode_sum(how.format, wires_WN, x, 1 / world, 1, config)
    return lambda config: launch.recode(how, wires_WN, wire, _ELEMENTS, 1 / world, 1, 1, config)


def _milliseconds(run: Callable[[Config], None], config: Config) -> float:
    run(config)
    times = []
    for _ in range(_ROUNDS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        run(config)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(sorted(times)[_ROUNDS // 2])


# --- the disk ---------------------------------------------------------------------------------------------------------


def _text(how: Encoding) -> str:
    format = how.format
    choices = "".join(mark for mark, on in (("s", how.stochastic), ("u", how.unbiased)) if on)
    return f"{format.kind.name.lower()}{format.bits}.{format.variant}/{format.block}{choices}"


def _file(device: torch.device) -> Path:
    root = os.environ.get("THINWIRE_CACHE")
    home = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "thinwire"
    gpu = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name(device)).strip("-").lower()
    return home / f"kernels-{gpu}-triton-{triton.__version__}.json"


@lru_cache(maxsize=16)
def _known(device: torch.device) -> dict[str, list[int]]:
    """What the file said when this process first looked."""
    return _read(device)


def _read(device: torch.device) -> dict[str, list[int]]:
    """What was measured before; nothing if the file is missing or not readable."""
    try:
        found = json.loads(_file(device).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(device: torch.device, entries: dict[str, list[int]]) -> None:
    """Add entries. Other processes may be writing: the file is replaced as a whole, the last one wins."""
    file = _file(device)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({**_read(device), **entries}, indent=1, sort_keys=True))
        partial.replace(file)
