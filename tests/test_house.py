"""The rules of the house: who imports whom, what is public, what an import costs, what no file may say."""

import __future__

import ast
import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "thinwire"
MODULES = sorted(PACKAGE.rglob("*.py"))

# From the ground up. A room imports only rooms of lower floors.
FLOORS = [
    {"errors", "log", "ranges", "version"},
    {"wire"},
    {"kernels"},
    {"codecs", "exact", "feedback"},
    {"collectives", "schema"},
    {"functional", "group", "qat"},
    {"integrations"},
    {"integrations.fsdp"},
    {"integrations.__init__", "integrations.lightning", "integrations.accelerate"},
    {"integrations.transformers"},
    {"hooks", "registration", "rehearsal"},
    {"tools.local", "tools.pairs"},
    {"tools.bench", "tools.recommend"},
    {"tools.report", "tools.advise", "tools.rehearsal"},
    {"tools.cli"},
    {"tools", "__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
VERSION = "thinwire.__version__"  # what the tools may ask of the package itself


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    return room_in(path.relative_to(PACKAGE).with_suffix("").parts)


def room_in(parts: Sequence[str]) -> str:
    """The room that a dotted name below thinwire lies in; the tools, and some integrations, have rooms of their own."""
    two = ".".join(parts[:2])
    if parts[0] == "tools":
        return two.removesuffix(".__init__")
    return two if two in FLOOR else parts[0]


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of a file's syntax."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every thinwire import in a file, wherever it stands; relative ones keep their dots."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.startswith(".") or name.split(".")[0] == "thinwire")


def may_import(room: str, target: str) -> bool:
    other = room_in(target.split(".")[1:]) if "." in target else ""
    if other == room or (target == VERSION and room.startswith("tools.")):
        return True
    return FLOOR.get(other, len(FLOORS)) < FLOOR[room]


def test_a_module_opens_by_saying_its_room() -> None:
    files = [*MODULES, *(path for room in ("tests", "benchmarks") for path in sorted((ROOT / room).rglob("*.py")))]
    files.append(ROOT / "setup.py")
    silent = [name_of(path) for path in files if not re.match(r'r?"""\S', path.read_text())]
    assert not silent, f"these open with no docstring; say their room: {silent}"


def test_imports_flow_downwards() -> None:
    unknown = [name_of(path) for path in MODULES if room_of(path) not in {*FLOOR, "__init__"}]
    assert not unknown, f"{unknown} are in no known room; give theirs a floor in {Path(__file__).name}"
    places = [(path, room_of(path), line, target) for path in MODULES for line, target in imports_of(path)]
    relative = [f"{name_of(path)}:{line} imports {to}" for path, _, line, to in places if to.startswith(".")]
    assert not relative, f"write absolute imports (from thinwire.codecs.base import Codec): {relative}"
    inside = [place for place in places if place[1] != "__init__"]
    upward = [f"{name_of(path)}:{line} imports {to}" for path, room, line, to in inside if not may_import(room, to)]
    assert not upward, f"a room may only import rooms of lower floors: {upward}"


@pytest.mark.parametrize(
    ("room", "target", "allowed"),
    [
        ("codecs", "thinwire.kernels.reference", True),
        ("kernels", "thinwire.codecs", False),
        ("tools.cli", "thinwire.Codec", False),
        ("integrations", "thinwire.integrations.fsdp.rows.ShardSync", False),
        ("integrations.fsdp", "thinwire.integrations.sync", True),
        ("tools.bench", "thinwire.__version__", True),
        ("kernels", "thinwire.__version__", False),
        ("tools.report", "thinwire.tools.recommend.Recommendation", True),
    ],
)
def test_the_import_rule(room: str, target: str, allowed: bool) -> None:
    assert may_import(room, target) is allowed


def test_nothing_of_the_package_imports_the_studies() -> None:
    """benchmarks/ is not in the wheel."""
    studies = re.compile(r"^\s*(from|import) benchmarks\b", re.M)
    assert not [name_of(path) for path in MODULES if studies.search(path.read_text())]


LINES = {  # at most
    "kernels": 6730,
    "tools.bench": 947,
    "tools.advise": 811,
    "tools.report": 274,
    "tools.local": 458,
    "tools": 4413,
    "qat": 2235,
}


def test_rooms_keep_their_budgets() -> None:
    found = dict.fromkeys(LINES, 0)
    for path in MODULES:
        lines = len(path.read_text().splitlines())
        for room in {room_of(path), room_of(path).partition(".")[0]} & set(LINES):
            found[room] += lines
    over = {room: count for room, count in found.items() if count > LINES[room]}
    assert not over, f"lines over the budget {LINES}: {over}"


def test_kernels_take_structures() -> None:
    """Arguments that belong together are one named tuple ([Note: Structures] in kernels/triton/prepared.py)."""
    functions = [
        (path, node)
        for path in sorted((PACKAGE / "kernels" / "triton").glob("*.py"))
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef)
    ]
    long = [f"{name_of(path)}: {node.name}" for path, node in functions if len(node.args.args) > 20]
    assert not long, f"more than 20 parameters: {long}"


def packages_with_all() -> list[str]:
    """thinwire itself, and every room whose __init__ names what it gives."""
    rooms = [init.parent for init in sorted(PACKAGE.rglob("__init__.py")) if "__all__" in init.read_text()]
    return [".".join(room.relative_to(PACKAGE.parent).parts) for room in rooms]


@pytest.mark.parametrize("name", packages_with_all())
def test_all_is_what_can_be_seen(name: str) -> None:
    module = importlib.import_module(name)
    listed = list(module.__all__)
    assert listed == sorted(set(listed)), f"sort {name}.__all__ and say each name once"
    absent = [name for name in listed if not hasattr(module, name)]
    assert not absent, f"{name}.__all__ lists what is not there: {absent}"
    unlisted = sorted(visible_names(module) - set(listed))
    assert not unlisted, f"list {unlisted} in {name}.__all__ or give them an underscore"


def test_names_are_imported_when_they_are_used() -> None:
    """So that the command line can answer without torch; and completion in a shell offers the public names alone."""
    facts = "import sys, thinwire; print('torch' in sys.modules, dir(thinwire) == thinwire.__all__)"
    run = subprocess.run([sys.executable, "-c", facts], capture_output=True, text=True, timeout=600)
    assert run.stdout.split() == ["False", "True"], run.stdout + run.stderr
    with pytest.raises(AttributeError, match="module 'thinwire' has no attribute 'compress'"):
        _ = importlib.import_module("thinwire").compress


def visible_names(module: ModuleType) -> set[str]:
    hidden = (ModuleType, type(__future__.annotations))
    return {name for name, value in vars(module).items() if not (name.startswith("_") or isinstance(value, hidden))}


# Files, lines and classes of a room with all that is in it, at most: what is new needs a place that something leaves.
BUDGETS = {"collectives": (19, 5150, 61), "integrations": (20, 5246, 46)}


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_stays_within_its_budget(room: str) -> None:
    files = [path for path in MODULES if room_of(path).partition(".")[0] == room]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    found = len(files), lines, sum(len(classes_in(path)) for path in files)
    assert all(count <= most for count, most in zip(found, BUDGETS[room], strict=True)), f"{found}: {BUDGETS[room]}"


WHOLE = {  # the house: lines, or words
    "source": (["src/**/*.py", "native/*"], str.splitlines, 30_086),
    "tests": (["tests/*.py"], str.splitlines, 30_000),
    "docs": (["docs/**/*.md"], str.split, 38_000),
    "README": (["README.md"], str.split, 1_000),
}


@pytest.mark.parametrize("part", WHOLE)
def test_the_house_stays_within_its_budget(part: str) -> None:
    patterns, count, most = WHOLE[part]
    found = sum(len(count(path.read_text())) for pattern in patterns for path in ROOT.glob(pattern))
    assert found <= most, f"{part}: {found} of {most}"


def test_no_two_classes_have_one_name() -> None:
    classes = [name for path in MODULES for name in classes_in(path)]
    twice = sorted({name for name in classes if classes.count(name) > 1})
    assert not twice, f"class names used twice: {twice}"


def classes_in(path: Path) -> list[str]:
    return [node.name for node in nodes_of(path) if isinstance(node, ast.ClassDef)]


PUBLIC_SPECIAL = {"__init__", "__call__"}


def surface(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """(dotted name, object) of every class and function of ours reachable from module.__all__."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            yield from surface(value) if hasattr(value, "__all__") else ()
        elif (inspect.isclass(value) or inspect.isroutine(value)) and value.__module__.startswith("thinwire"):
            yield f"{module.__name__}.{name}", value


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties written in the class body; generated ones are nobody's to annotate."""
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else inspect.unwrap(getattr(value, "__func__", value))
        ours = inspect.isfunction(function) and Path(function.__code__.co_filename).is_relative_to(PACKAGE)
        if ours and (name in PUBLIC_SPECIAL or not name.startswith("_")):
            yield name, function


def unannotated(function: Any) -> list[str]:
    signature = inspect.signature(function)
    missing = [
        name
        for position, (name, parameter) in enumerate(signature.parameters.items())
        if parameter.annotation is parameter.empty and not (position == 0 and name in ("self", "cls"))
    ]
    return missing + (["return"] if signature.return_annotation is signature.empty else [])


def has_own_docstring(value: Any) -> bool:
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    return bool(doc) and not doc.startswith(f"{value.__name__}(")  # what a dataclass writes for itself


def test_the_public_surface_is_documented_and_annotated() -> None:
    faults = []
    for name, value in surface(importlib.import_module("thinwire")):
        if not has_own_docstring(value):
            faults.append(f"{name} has no docstring")
        if inspect.isroutine(value) and name.count(".") == 1 and f"thinwire.{value.__name__}" not in str(value.__doc__):
            faults.append(f"{name} has no example in its docstring")
        functions = methods(value) if inspect.isclass(value) else [("", value)]
        for method, function in functions:
            faults += [f"{name}.{method}".rstrip(".") + f" does not annotate {what}" for what in unannotated(function)]
    assert not faults, "\n".join(faults)


# Run in fresh interpreters; the facts go to a file because an import has no business on stdout or stderr.
PROBE = """if True:
    import json, sys, threading, time
    threads = lambda: next((l.split()[1] for l in open("/proc/self/status") if l.startswith("Threads")), None)
    t0 = time.perf_counter()
    import torch
    t1, threads_of_torch, modules_of_torch = time.perf_counter(), threads(), set(sys.modules)
    t2 = time.perf_counter()
    import thinwire
    rooms = [thinwire.collectives.traffic.__name__, thinwire.errors.QatError.__name__]
    for name in thinwire.__all__:
        name in ("DiLoCo", "FSDPState", "compress_fsdp", "qat") or getattr(thinwire, name)  # torch.ao, DTensor: long
    t3 = time.perf_counter()
    json.dump({
        "torch_s": t1 - t0,
        "thinwire_s": t3 - t2,
        "threads": threads(),
        "threads_of_torch": threads_of_torch,
        "python_threads": threading.active_count(),
        "cuda": torch.cuda.is_initialized(),
        "modules": sorted(set(sys.modules) - modules_of_torch),
        "rooms": rooms,
    }, open(sys.argv[1], "w"))
"""
HEAVY = {"typer", "rich", "sklearn", "matplotlib", "lightning", "pytorch_lightning", "accelerate", "transformers"}
SHARE = 0.15  # of the time that torch takes


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What fresh interpreters saw when they imported torch, then thinwire: one, or up to three where it took long."""
    facts = tmp_path_factory.mktemp("probe") / "facts.json"
    # Bytecode is written as on any user's machine, or compiling would be counted as importing.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    seen = []
    for _ in range(3):
        command = [sys.executable, "-c", PROBE, str(facts)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, run.stderr
        seen.append(json.loads(facts.read_text()) | {"output": run.stdout + run.stderr})
        if seen[-1]["thinwire_s"] <= SHARE * seen[-1]["torch_s"]:
            break  # the others are against noise
    return seen


def test_an_import_is_silent_and_light(probes: list[dict[str, Any]]) -> None:
    """It starts no thread, leaves CUDA alone, and gives the rooms as attributes of the package."""
    first = probes[0]
    assert first["output"] == ""
    assert (first["python_threads"], first["threads"]) == (1, first["threads_of_torch"])
    assert first["rooms"] == ["traffic", "QatError"]
    assert not first["cuda"]
    assert not HEAVY & set(first["modules"])


def test_import_costs_little_beyond_torch(probes: list[dict[str, Any]]) -> None:
    torch_s, thinwire_s = (min(probe[key] for probe in probes) for key in ("torch_s", "thinwire_s"))
    assert thinwire_s <= SHARE * torch_s, f"import thinwire adds {thinwire_s:.3f} s to torch's {torch_s:.3f} s"


# Spelled in two parts so that this file does not hold them.
FORBIDDEN = [
    "".join(parts)
    for parts in (("/wo", "rk/"), ("/op", "t/"), *((name, ".org") for name in ("pypi", "pythonhosted", "anaconda")))
]
FORBIDDEN.append("download.pytorch" + ".org")


def repository_files() -> list[Path]:
    """Tracked files, and untracked ones git would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine_or_a_registry() -> None:
    faults = [
        f"{name_of(path)} says {needle!r}"
        for path in repository_files()
        for needle in FORBIDDEN
        if needle.encode() in path.read_bytes()
    ]
    assert not faults, "\n".join(faults)
