"""How kernels are cut up: measured once per machine, remembered on disk. No choice changes a byte.

The first large tensor of a kind is preceded by a measurement of a few configurations on buffers of its own, which waits
for the device; others, and all while a CUDA graph is being captured, take what is known or the default. Results are
kept in THINWIRE_CACHE, or thinwire/ in the user's cache directory; THINWIRE_TUNE=0 keeps the defaults.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
import triton

from thinwire.kernels.schema import Encoding
from thinwire.kernels.triton import launch
from thinwire.kernels.triton.launch import MOST_UNROLLED, Config
from thinwire.kernels.triton.tile import MOST_CODES
from thinwire.wire import Format, Kind

SMALL = 1 << 20  # elements; fewer do not fill the card, so that a thread should have little to do
LARGE = 1 << 22  # from here on a better configuration is worth a measurement
SHORT = Config(4, 1)
_ELEMENTS = 1 << 25  # measured on: more than an L2 cache holds
_ROUNDS = 5
_say = logging.getLogger("thinwire")
_lock = threading.Lock()
_Key = tuple[str, Encoding, torch.dtype, int]  # operation and its wires, encoding, dtype, number of the device
_chosen: dict[_Key, Config] = {}
_announced = False


def choose(op: str, how: Encoding, dtype: torch.dtype, device: torch.device, numel: int, world: int = 1) -> Config:
    """The configuration of `op` (encode, encode_residual, decode_sum, recode) for tensors of `dtype` on `device`."""
    if not how.format.block:
        return Config()
    if how.format.block > MOST_CODES:  # one program per block, whatever the configuration
        return SHORT
    if numel < SMALL:
        meet(device)
        return SHORT
    world = min(world, MOST_UNROLLED + 1)  # more are one kernel
    key = (op if world == 1 else f"{op}_{world}", how, dtype, device.index or 0)
    found = _chosen.get(key)
    if found is not None:
        return found
    if device.type != "cuda":
        return default(op, how.format, dtype)
    with _lock:
        return _chosen.get(key) or _first_choice(key, op, device, numel, world)


def default(op: str, format: Format, dtype: torch.dtype) -> Config:
    """The configuration of a kernel that was not tuned: what was best on an H200."""
    return candidates(op, format, dtype)[0]


def candidates(op: str, format: Format, dtype: torch.dtype) -> list[Config]:
    """What is worth measuring, likeliest first."""
    if format.kind != Kind.LLOYD:
        if (op == "recode" and format.bits < 8) or (op.startswith("encode") and dtype.itemsize == 2):
            return [Config(8, 2), Config(4, 2), Config(8, 4)]
        return [Config(4, 2), Config(8, 2), Config(4, 4)]
    if op == "encode_residual":
        return [Config(4, 1), Config(8, 1), Config(8, 2)]
    if op == "encode":
        return [Config(16, 2), Config(8, 1), Config(16, 1)]
    return [Config(8, 1), Config(4, 1), Config(16, 2)]


def _first_choice(key: _Key, op: str, device: torch.device, numel: int, world: int) -> Config:
    """Called with the lock: what the disk says, what a measurement says, or for now the default."""
    kind, how, dtype, _ = key
    name = f"{kind} {_text(how)} {str(dtype).removeprefix('torch.')}"
    known = _known(device).get(name)
    options = candidates(op, how.format, dtype)
    found = next((config for config in options if known == [config.lanes, config.warps]), None)
    if found is None:
        _announce(device)
        if os.environ.get("THINWIRE_TUNE", "1") == "0":
            found = options[0]
        elif numel >= LARGE and not _capturing(device):
            _say.info("thinwire: measuring configurations of %s", name)
            found = _measured(op, how, dtype, device, world)
            if found is not None:
                _write(device, {name: [found.lanes, found.warps]})
    if found is None:
        return options[0]
    _chosen[key] = found
    return found


def _capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _announce(device: torch.device) -> None:
    """Say once per process that kernels are compiled and measured now, where this was not done before."""
    global _announced
    if not _announced:
        _announced = True
        _say.warning(
            "thinwire: compiling GPU kernels as codecs are first used, a few seconds each; kept for later runs "
            "in Triton's cache, with their measured configurations in %s",
            _file(device),
        )


def meet(device: torch.device) -> None:
    """Announce compilation on a machine where no file of this card says that it happened before, and leave one."""
    global _announced
    if _announced or device.type != "cuda":
        return
    with _lock:
        new = True
        with contextlib.suppress(OSError):
            new = not _file(device).exists()
        if new:
            _announce(device)
            _write(device, {})
        _announced = True


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
    launch.encode(how, x, wire, None, 1, 1, default("encode", how.format, dtype))
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
    card = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name(device)).strip("-").lower()
    return home / f"kernels-{card}-triton-{triton.__version__}.json"


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
