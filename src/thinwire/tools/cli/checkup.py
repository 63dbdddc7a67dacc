"""What `thinwire doctor` looks at: Python, torch, kernels, transports, interfaces and optional packages.

Kernels work if every op of every codec gives the bytes of the reference.
"""

import importlib
import os
import platform
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from thinwire.codecs import Codec, codec, names
from thinwire.errors import ThinwireError
from thinwire.kernels import BACKENDS, Backend, Encoding, cpu, hashing, reference, select, use_backend
from thinwire.tools.local import link as links

PYTHON = (3, 11)  # the oldest that serves
TORCH = (2, 11)
BACKEND = "THINWIRE_BACKEND"  # what the environment asks for
CASES = ((385, torch.float32), (1, torch.bfloat16))  # three blocks and a bit, one element
OPTIONS = (
    *("int8:mode=affine", "int3:block=24,mode=affine", "int4:rounding=stochastic"),
    *("lloyd2:block=64", "lloyd3:rotate=false", "lloyd4:scale=unbiased"),
)
OPS = ("encode", "encode_residual", "decode", "decode_sum", "recode")
FEW = ("int8", "lloyd4")
WORLD = 3
_KEY = hashing.key(0, 0, hashing.ROTATION)


@dataclass(frozen=True)
class Finding:
    """One line: works is False where something needed is broken, None where something optional is missing."""

    name: str
    works: bool | None
    detail: str
    todo: str = ""


def examine() -> Iterator[Finding]:
    """The findings, as they come."""
    yield _recent("python", platform.python_version(), PYTHON)
    yield _recent("torch", torch.__version__, TORCH)
    yield from _asked_backend()
    yield from _native()
    yield from _other_backends()
    yield _triton()
    yield _cuda()
    yield _transport("gloo", "collectives on CPU tensors need it: install a torch built with gloo")
    yield _transport("nccl", "collectives on GPU tensors need it: install a CUDA build of torch")
    yield from _chosen_interfaces()
    yield _host_name()
    yield _shaping()


def _recent(name: str, version: str, oldest: tuple[int, int]) -> Finding:
    works = tuple(int(part) for part in version.split(".")[:2]) >= oldest
    return Finding(name, works, version, "" if works else f"thinwire needs {oldest[0]}.{oldest[1]} or newer")


def _asked_backend() -> Iterator[Finding]:
    """What THINWIRE_BACKEND asks for, if anything, for the tensors that this machine computes with."""
    asked = os.environ.get(BACKEND)
    if asked:
        try:
            select(_device())
        except ThinwireError as error:
            yield Finding(BACKEND, False, str(error), "unset it, or name another")
        else:
            yield Finding(BACKEND, True, asked)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _native() -> Iterator[Finding]:
    why = cpu.unavailable()
    if why is None:
        yield Finding("C kernels", True, f"loaded, {cpu.variant()}")
        yield _same_bytes("C kernels", cpu, torch.device("cpu"))
    else:
        yield Finding("C kernels", False if cpu.LIBRARY.exists() else None, why)


def _other_backends() -> Iterator[Finding]:
    """Backends beside the reference and the C kernels, where they can run: theirs are compiled for the comparison."""
    device = _device()
    for name, backend in BACKENDS.items():
        if name not in ("cpu", "reference") and backend.serves(device) and backend.unavailable() is None:
            yield _same_bytes(name, backend, device, few=True)


def _same_bytes(name: str, backend: Backend, device: torch.device, few: bool = False) -> Finding:
    name = f"{name} self-test"
    try:
        with use_backend("auto"):
            compared, wrong = differences(backend, device, few)
    except Exception as error:  # whatever a broken library throws is the finding
        return Finding(name, False, f"{type(error).__name__}: {error}", "reinstall thinwire")
    if wrong:
        detail = f"{len(wrong)} of {compared} results differ from the reference, the first: {wrong[0]}"
        return Finding(name, False, detail, "set THINWIRE_BACKEND=reference, and report it")
    of = f" (of {' and '.join(FEW)})" if few else ""
    return Finding(name, True, f"{compared} results have the bytes of the reference{of}")


def _triton() -> Finding:
    try:
        return Finding("triton", True, importlib.import_module("triton").__version__)
    except Exception as error:  # a broken install may throw anything, and is the finding
        todo = "GPU kernels need it: install a CUDA build of torch"
        return Finding("triton", None, f"does not import ({type(error).__name__}: {error})", todo)


def _cuda() -> Finding:
    if torch.cuda.is_available():
        return Finding("CUDA", True, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
    if torch.version.cuda is None and torch.version.hip is None:
        return Finding("CUDA", None, "this torch was built without it", "for a GPU, install a CUDA build of torch")
    return Finding("CUDA", None, "torch sees no device", "see nvidia-smi, its driver, and CUDA_VISIBLE_DEVICES")


def _transport(name: str, todo: str) -> Finding:
    there = torch.distributed.is_available() and getattr(torch.distributed, f"is_{name}_available")()
    return Finding(name, True, "available") if there else Finding(name, None, "not in this torch", todo)


def _chosen_interfaces() -> Iterator[Finding]:
    """Whether the interfaces in GLOO_SOCKET_IFNAME exist."""
    there = [name for _, name in socket.if_nameindex()]
    if wanted := os.environ.get("GLOO_SOCKET_IFNAME"):
        absent = [name for name in wanted.split(",") if name not in there]
        todo = f"there is no {', '.join(absent)} here: unset it, or name one of {', '.join(there)}" if absent else ""
        yield Finding("GLOO_SOCKET_IFNAME", not absent, wanted, todo)


def _host_name() -> Finding:
    """gloo binds to the address the hostname resolves to, unless an interface is set."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        todo = "gloo looks it up to choose an interface: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return Finding("host name", None, f"{name} has no address ({error})", todo)
    if address.startswith("127."):
        todo = "fine on one machine; for several, map it to an outside address, or set GLOO_SOCKET_IFNAME"
        return Finding("host name", None, f"{name} is {address}, loopback", todo)
    return Finding("host name", True, f"{name} is {address}")


def _shaping() -> Finding:
    """Whether `bench --link` can hold ranks to a rate: made and removed for real."""
    try:
        with links.hosts(1, links.parse("1gbit")):
            return Finding("shaped links", True, "network namespaces and tbf work")
    except ThinwireError as error:
        return Finding("shaped links", None, "not here", str(error))


# The self-test.


def codecs() -> list[Codec]:
    """Every codec that is not made of others, and one of each option that changes the bytes."""
    return [codec(spec) for spec in (*names(), *OPTIONS)]


def differences(backend: Backend, device: torch.device, few: bool = False) -> tuple[int, list[str]]:
    """How many results of `backend` were compared with the reference, and those whose bytes differ; [] is good.

    few: what a DDP model uses first, for kernels that are compiled when they are used.
    """
    cases = product(map(codec, FEW), CASES[:1]) if few else product(codecs(), CASES)

    def compare(chosen: Codec, numel: int, dtype: torch.dtype) -> list[tuple[str, bool]]:
        how = chosen.encoding(dtype)
        if select(device, how.format) is reference:  # it serves this format alone
            return []
        x_WN = torch.randn(WORLD, numel, generator=torch.Generator().manual_seed(numel)).to(device, dtype)
        pairs = zip(OPS, *(_results(each, how, x_WN) for each in (backend, reference)), strict=True)
        return [(f"{op} {chosen} {dtype} numel={numel}", torch.equal(ours, theirs)) for op, ours, theirs in pairs]

    with ThreadPoolExecutor(8 if device.type == "cuda" else 1) as pool:  # so that kernels are compiled together
        waiting = [pool.submit(compare, chosen, *case) for chosen, case in cases]
        found = [pair for one in waiting for pair in one.result()]
    return len(found), [name for name, same in found if not same]


def _results(backend: Backend, how: Encoding, x_WN: Tensor) -> list[Tensor]:
    """The bytes that each of OPS gives; those after encode start from the reference's wires, to name a fault once."""
    numel, keys = x_WN.shape[1], {"rotation": _KEY, "dither": 1}
    wires_WN = x_WN.new_empty(WORLD, how.format.layout(numel).nbytes, dtype=torch.uint8)
    for x, wire in zip(x_WN, wires_WN, strict=True):
        reference.encode(how, x, wire, None, **keys)
    alone, fed, recoded = torch.full_like(wires_WN, 255)
    residual = x_WN[1].float().clone()  # which encode writes into
    backend.encode(how, x_WN[0], alone, None, **keys)
    backend.encode(how, x_WN[0], fed, residual, **keys)
    decoded, summed = torch.empty_like(x_WN[:2])
    backend.decode_sum(how.format, wires_WN[:1], decoded, scale=1.0, rotation=_KEY)
    backend.decode_sum(how.format, wires_WN, summed, scale=1 / WORLD, rotation=_KEY)
    backend.recode(how, wires_WN, recoded, numel, scale=1 / WORLD, **keys)
    fed = torch.cat((fed, residual.view(torch.uint8)))
    return [alone, fed, decoded.view(torch.uint8), summed.view(torch.uint8), recoded]
