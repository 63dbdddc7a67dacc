"""`thinwire doctor`: what works on this machine, and what to do about the rest."""

import importlib
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from thinwire.bench import selftest
from thinwire.kernels import BACKENDS, Backend, cpu

MARKS = {True: "✓", False: "✗", None: "–"}
ASCII_MARKS = {True: "ok  ", False: "FAIL", None: "-   "}
PYTHON, TORCH = (3, 11), (2, 11)  # the oldest that serve


@dataclass(frozen=True)
class Finding:
    """One line: works is False where something needed is broken, None where something optional is missing."""

    name: str
    works: bool | None
    detail: str
    todo: str = ""


def examine() -> Iterator[Finding]:
    """Look at everything thinwire can use here."""
    yield _python()
    yield _torch()
    yield _reference()
    yield from _native()
    yield from _other_backends()
    yield _package("triton", "triton", "GPU kernels need it: install a CUDA build of torch")
    yield _cuda()
    yield _transport("gloo", "collectives on CPU tensors need it: install a torch built with gloo")
    yield _transport("nccl", "collectives on GPU tensors need it: install a CUDA build of torch")
    yield _package("scikit-learn", "sklearn", "`bench codec` needs it for gradients: pip install 'thinwire[bench]'")


def as_text(findings: Sequence[Finding], encoding: str | None) -> str:
    """One line each, in marks the stream can show."""
    marks = MARKS if (encoding or "").lower().startswith("utf") else ASCII_MARKS
    return "\n".join(_line(marks[finding.works], finding) for finding in findings)


def as_json(findings: Sequence[Finding]) -> str:
    """{"works": whether nothing is broken, "findings": [...]}"""
    works = all(finding.works is not False for finding in findings)
    return json.dumps({"works": works, "findings": [asdict(finding) for finding in findings]}, indent=1)


def _line(mark: str, finding: Finding) -> str:
    return f"{mark} {finding.name:<20} {finding.detail}" + (f"; {finding.todo}" if finding.todo else "")


def _python() -> Finding:
    works = sys.version_info[:2] >= PYTHON
    return Finding("python", works, platform.python_version(), "" if works else "thinwire needs 3.11 or newer")


def _torch() -> Finding:
    numbers = tuple(int(part) for part in torch.__version__.split(".")[:2])
    works = numbers >= TORCH
    return Finding("torch", works, torch.__version__, "" if works else "thinwire needs 2.11 or newer")


def _reference() -> Finding:
    broken = selftest.broken_reference()
    if broken:
        return Finding("reference", False, f"loses its input in {', '.join(broken)}", "reinstall torch and thinwire")
    return Finding("reference", True, f"{len(selftest.codecs())} codecs give their input back")


def _native() -> Iterator[Finding]:
    why = cpu.unavailable()
    if why is None:
        yield Finding("C kernels", True, f"loaded, {cpu.variant()}")
        yield _same_bytes("C kernels", cpu, torch.device("cpu"))
    else:
        yield Finding("C kernels", False if cpu.LIBRARY.exists() else None, why)


def _other_backends() -> Iterator[Finding]:
    """Backends beside the reference and the C kernels, where they can run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, backend in BACKENDS.items():
        if name not in ("cpu", "reference") and backend.serves(device) and backend.unavailable() is None:
            yield _same_bytes(name, backend, device)


def _same_bytes(name: str, backend: Backend, device: torch.device) -> Finding:
    try:
        compared, wrong = selftest.differences(backend, device)
    except Exception as error:  # whatever a broken library throws is the finding
        return Finding(f"{name} self-test", False, f"{type(error).__name__}: {error}", "reinstall thinwire")
    if wrong:
        detail = f"{len(wrong)} of {compared} results differ from the reference, the first: {wrong[0]}"
        return Finding(f"{name} self-test", False, detail, "set THINWIRE_BACKEND=reference, and report it")
    return Finding(f"{name} self-test", True, f"{compared} results have the bytes of the reference")


def _package(name: str, module: str, todo: str) -> Finding:
    try:
        version = getattr(importlib.import_module(module), "__version__", "importable")
    except ImportError:
        return Finding(name, None, "not installed", todo)
    except Exception as error:  # a broken install may throw anything, and is the finding
        return Finding(name, None, f"does not import ({type(error).__name__}: {error})", todo)
    return Finding(name, True, str(version))


def _cuda() -> Finding:
    if torch.cuda.is_available():
        return Finding("CUDA", True, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
    return Finding("CUDA", None, "torch sees no device", "on a machine with a GPU, install a CUDA build of torch")


def _transport(name: str, todo: str) -> Finding:
    distributed = torch.distributed
    there = distributed.is_available() and getattr(distributed, f"is_{name}_available")()
    return Finding(name, True, "available") if there else Finding(name, None, "not in this torch", todo)
