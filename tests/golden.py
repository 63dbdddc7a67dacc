"""What the library computed once, as hashes: every codec, verb, algorithm, hook and DDP run, worlds 1 to 4.

    python tests/golden.py        # writes tests/golden.json anew, when bytes are meant to change

Inputs are exact in float32 (products of small integers), so that they are the same on every machine. What is computed
with factors that are no powers of two (DDP in worlds of 3) may round differently where a processor fuses multiply and
add, and so may sums of squared errors, from which "auto:2.5" deals its bits: those are compared on the kind of machine
that wrote the file.
"""

import functools
import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import thinwire
import thinwire.collectives
from ranks import RankPool

FILE = Path(__file__).with_name("golden.json")
WORLDS = (1, 2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODECS = (
    "none", "bf16", "fp16", "e4m3", "e5m2", "int8", "int6", "int4", "int3", "int2", "lloyd4", "lloyd3", "lloyd2",
    "lloyd1", "int8:mode=affine", "int4:block=64,rounding=stochastic", "lloyd2:block=128",
    "bysize(small=bf16; large=int8; min_numel=2000)", "trellis3", "trellis2", "trellis1:block=64",
)  # fmt: skip
Hashes = dict[str, str]


def numbers(numel: int, *seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of both signs and many sizes: cubes of integers, over a power of two."""
    key = functools.reduce(lambda sofar, part: 1009 * sofar + part, seed, numel)
    generator = torch.Generator().manual_seed(key)
    x = torch.randint(-255, 256, (numel,), generator=generator).float()
    return (x * x * x / 2**22).to(dtype)


def digest(*tensors: Tensor) -> str:
    """A short hash of dtypes and bytes."""
    state = hashlib.sha256()
    for tensor in tensors:
        row = tensor.detach().contiguous().view(-1)
        row = torch.view_as_real(row).view(-1) if row.is_complex() else row
        state.update(str(row.dtype).encode() + row.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


def wires() -> Iterator[tuple[str, str]]:
    """Wires, what they decode to, and sums of them recoded."""
    for name in CODECS:
        codec = thinwire.codec(name)
        for dtype in DTYPES:
            for numel in (1, 130, 4999):
                made = torch.zeros(3, codec.wire_bytes(numel, dtype), dtype=torch.uint8)
                for rank, wire in enumerate(made):
                    codec.encode(numbers(numel, rank, dtype=dtype), wire, step=5)
                out = torch.empty(numel, dtype=dtype)
                codec.decode(made[0], out)
                again = torch.zeros_like(made[0])
                codec.recode(made, again, numel, scale=0.5, step=6, dtype=dtype)
                yield f"wires {name} {dtype} {numel}", digest(made, out, again)


def turn(items: Iterable[Any], world: int, everything: bool) -> list[Any]:
    """All items, or those whose turn it is in this world: every third."""
    return list(items) if everything else list(items)[world % 3 :: 3]


def verbs(group: dist.ProcessGroup, everything: bool) -> Hashes:
    """Every verb on this rank, and the bytes it sent; without `everything` some codecs only."""
    found: Hashes = {}
    world = group.size()
    before = thinwire.collectives.traffic(group).sent

    def keep(name: str, *tensors: Tensor) -> None:
        nonlocal before
        sent = thinwire.collectives.traffic(group).sent
        found[name] = f"{digest(*tensors)} {sent - before}"
        before = sent

    for codec in turn(CODECS, world, everything):
        for numel in (1, 2503) if codec in ("none", "int8", "lloyd2") else (2503,):
            for name, tensors in _calls(group, codec, numel, torch.float32):
                keep(f"{name} {codec} {numel}", *tensors)
    for dtype in (torch.bfloat16, torch.float16):
        for codec in turn(("none", "int8", "lloyd4"), world, everything):
            for name, tensors in _calls(group, codec, 2503, dtype):
                keep(f"{name} {codec} {dtype}", *tensors)
    for codec in {2: ("int8", "lloyd2"), 3: ("lloyd2", "int8")}.get(world, ())[: 2 if everything else 1]:  # in chunks
        for name, tensors in _calls(group, codec, 1_300_003, torch.float32):
            keep(f"{name} {codec} large", *tensors)
    if world == 4:
        for name, tensors in _hierarchies(group):
            keep(name, *tensors)
    return found


def _calls(group: dist.ProcessGroup, codec: str, numel: int, dtype: torch.dtype) -> Iterator[tuple[str, list[Tensor]]]:
    rank, world = group.rank(), group.size()
    options: dict[str, Any] = {"group": group, "codec": codec, "step": 7}
    x = numbers(numel, rank, dtype=dtype)
    for algorithm in ("one_shot", "two_phase"):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            y = x.clone()
            thinwire.all_reduce(y, op, algorithm=algorithm, **options)
            yield f"all_reduce {algorithm} {op}", [y]
    if codec.startswith("bysize"):
        return
    whole = numbers(world * numel, rank, dtype=dtype)
    options["algorithm"] = "compressed"
    out = torch.empty_like(x)
    thinwire.reduce_scatter_tensor(out, whole, **options)
    yield "reduce_scatter", [out]
    thinwire.all_gather_into_tensor(whole, x, **options)
    yield "all_gather_into_tensor", [whole]
    uneven = [torch.empty(numel // (r + 1), dtype=dtype) for r in range(world)]
    thinwire.all_gather(uneven, x[: numel // (rank + 1)], **options)
    yield "all_gather", uneven
    splits = [(r + rank) % 3 for r in range(world)]
    rows = torch.empty(sum(splits), numel, dtype=dtype)
    sent = numbers(sum(splits) * numel, rank, dtype=dtype).view(-1, numel)
    thinwire.all_to_all_single(rows, sent, splits, splits, **options)
    yield "all_to_all_single", [rows]
    y = x.clone()
    thinwire.broadcast(y, group_src=world - 1, **options)
    yield "broadcast", [y]
    parts = [x.clone(), x.clone()[: numel // 2]]
    thinwire.all_reduce_coalesced(parts, **{**options, "algorithm": "two_phase"})
    yield "all_reduce_coalesced", parts


def _hierarchies(group: dist.ProcessGroup) -> Iterator[tuple[str, list[Tensor]]]:
    mesh = init_device_mesh("cpu", (2, 2))
    for numel, *pairs in ((2503, ("bf16", "lloyd4"), ("none", "lloyd2")), (1_300_003, ("int8", "int4"))):
        for pair in pairs:
            y = numbers(numel, group.rank())
            thinwire.all_reduce(y, group=mesh, codec=pair, algorithm="hierarchical", step=7)
            yield f"hierarchical {pair} {numel}", [y]


SHAPES = {"a": (40, 50), "b": (70,), "c": (33, 61), "d": (9,), "e": (64, 32)}
RUNS: dict[str, dict[str, Any]] = {
    "int8": {"codec": "int8"},
    "lloyd4": {"codec": "lloyd4"},
    "lloyd4 two_phase": {"codec": "lloyd4", "algorithm": "two_phase"},
    "lloyd4 one_shot": {"codec": "lloyd4", "algorithm": "one_shot"},
    "lloyd3 none": {"codec": "lloyd3", "feedback": "none"},
    "lloyd2 none": {"codec": "lloyd2", "feedback": "none"},
    "lloyd2 classic": {"codec": "lloyd2", "feedback": "classic"},
    "lloyd2 ef21": {"codec": "lloyd2", "feedback": "ef21"},
    "int4 classic": {"codec": "int4", "feedback": "classic"},
    "schedule": {"codec": {0: "none", 1: "int8", 3: "lloyd2"}, "optimizer": "adaptive"},
    "budget": {"codec": "auto:2.5", "optimizer": "adaptive", "replan_every": 2},
    "policy": {"codec": "lloyd4", "policy": {"a": "int8", "*": "int4"}, "exempt": ["b"]},
    "warm-up": {"codec": "lloyd1", "feedback": "classic", "warmup_steps": 2},
    "bf16": {"dtype": torch.bfloat16, "codec": "lloyd2", "feedback": "classic"},
    "complex": {"dtype": torch.complex64, "codec": "int8"},
}


class Given(nn.Module):
    """Parameters whose gradients are the numbers it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, rank: int, step: int) -> Tensor:
        """The sum of products; the factors of a product are each other's gradients."""
        total = torch.zeros(())
        for i, parameter in enumerate(self.parameters()):
            total = total + (parameter * numbers(parameter.numel(), i, rank, step).view_as(parameter)).real.sum()
        return total


def trainings(group: dist.ProcessGroup, everything: bool) -> Hashes:
    """Averaged gradients of DDP runs, the last step after a checkpoint was loaded into a new model."""
    runs = {name: _run(group, **RUNS[name]) for name in turn(RUNS, group.size(), everything)}
    if group.size() == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        runs["mesh"] = _run(group, codec="lloyd4", mesh=mesh, inside="int8")
    hooks = thinwire.hooks
    for hook in (hooks.allreduce_hook, hooks.fp16_compress_hook, hooks.bf16_compress_hook):
        runs[hook.__name__] = _hooked(group, hook)
    return runs


def _wrapped(group: dist.ProcessGroup, dtype: torch.dtype) -> DistributedDataParallel:
    return DistributedDataParallel(Given(dtype), process_group=group, bucket_cap_mb=0.0156)


def _step(model: DistributedDataParallel, group: dist.ProcessGroup, step: int) -> str:
    model.zero_grad()
    model(group.rank(), step).backward()
    return digest(*(p.grad for p in model.parameters() if p.grad is not None))


def _run(group: dist.ProcessGroup, dtype: torch.dtype = torch.float32, **options: Any) -> str:
    model = _wrapped(group, dtype)
    handle = thinwire.compress_ddp(model, **options)
    hashes = [_step(model, group, step) for step in range(5)]
    sent, resumed = handle.stats().bytes_sent, _wrapped(group, dtype)
    thinwire.compress_ddp(resumed, **options).load_state_dict(handle.state_dict())
    return " ".join([*hashes, _step(resumed, group, 5), str(sent)])


def _hooked(group: dist.ProcessGroup, hook: Callable[..., Any]) -> str:
    model = _wrapped(group, torch.float32)
    model.register_comm_hook(group, hook)
    return " ".join(_step(model, group, step) for step in range(3))


PARTS = {"verbs": verbs, "ddp": trainings}


def collect(ranks: RankPool, world: int, part: str, everything: bool = True) -> Hashes:
    """The hashes of one part in one world."""
    return _joined(ranks(world).run(PARTS[part], everything))


def _joined(ranks: list[Hashes]) -> Hashes:
    """One hash for what all ranks found; ranks that found the same are as good as one."""
    found = {name: sorted({rank[name] for rank in ranks}) for name in ranks[0]}
    return {
        name: told[0] if len(told) == 1 else hashlib.sha256(" ".join(told).encode()).hexdigest()[:16]
        for name, told in found.items()
    }


def write() -> None:
    """Write the file anew."""
    pool = RankPool()
    worlds = {str(world): {part: collect(pool, world, part) for part in PARTS} for world in WORLDS}
    kept = {"machine": platform.machine(), "wires": dict(wires()), "worlds": worlds}
    FILE.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")
    pool.close()


if __name__ == "__main__":
    import golden  # under a name that ranks can import

    golden.write()
