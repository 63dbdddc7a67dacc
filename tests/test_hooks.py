"""thinwire.hooks: means within derived bounds, what torch's hooks get wrong, everything DDP does, the compiled path.

Rank functions name their hooks by a key of HOOKS and run many cases a call. `Given` is a model whose gradients are what
it is called with, so that a real DDP brings any numbers to a hook. Tests that take a device run with the buckets there:
all ranks on one GPU, over gloo.
"""

import inspect
import math
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import thinwire
from cases import (
    CPU,
    CUDA,
    Range,
    assert_same,
    digest,
    each_device,
    given,
    half_ulp,
    needs_cuda,
    no_host_sync,
    on_ranks,
    over,
    seeded,
    small_chunks,
    thorough,
    worlds,
)
from ranks import RankPool
from replicas import Device, Given, Group, draw
from thinwire import hooks
from thinwire.collectives import traffic, transport
from thinwire.errors import CodecError, CollectiveError

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]
WORLDS = (1, 2, 3, 4)
PER_TENSOR = f"int8:block={(1 << 32) - 8},mode=affine"
PER_CHANNEL, PER_64 = (f"int8:block={block},mode=affine,aligned=true" for block in (512, 64))
HOOKS: dict[str, Any] = {
    "allreduce": hooks.allreduce_hook,
    "fp16": hooks.fp16_compress_hook,
    "bf16": hooks.bf16_compress_hook,
    "pertensor": hooks.quantization_pertensor_hook,
    "perchannel": hooks.quantization_perchannel_hook,
    "perchannel 64": hooks.perchannel_hook(64),
    "perchannel 100": hooks.perchannel_hook(100),
    "fp16(allreduce)": hooks.fp16_compress_wrapper(hooks.allreduce_hook),
    "bf16(perchannel)": hooks.bf16_compress_wrapper(hooks.quantization_perchannel_hook),
    "fp16(bf16(fp16))": hooks.fp16_compress_wrapper(hooks.bf16_compress_wrapper(hooks.fp16_compress_hook)),
}
CODECS = {"fp16": "fp16", "bf16": "bf16", "pertensor": PER_TENSOR, "perchannel": PER_CHANNEL, "perchannel 64": PER_64}
QUANTIZED = ("pertensor", "perchannel", "perchannel 64")


class Bucket:
    """What most hooks ask of a bucket; torch's own cannot be made in Python."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> Tensor:
        """The gradients."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Other gradients."""
        self._buffer = buffer


def run_hook(hook: Any, x: Tensor, state: Any = None) -> Tensor:
    """The hook's result on a copy of x; it must be the bucket's own memory and dtype again."""
    buffer = x.clone()
    bucket = Bucket(buffer)
    result: Tensor = hook(state, bucket).wait()
    assert result.dtype == x.dtype == bucket.buffer().dtype
    assert result.data_ptr() == bucket.buffer().data_ptr() == buffer.data_ptr()
    return result


# --- names and shapes -------------------------------------------------------------------------------------------------
TORCH = {
    **{name: getattr(default_hooks, name) for name in default_hooks.__all__},
    "quantization_pertensor_hook": quantization_hooks.quantization_pertensor_hook,
    "quantization_perchannel_hook": quantization_hooks.quantization_perchannel_hook,
}


def test_names_and_arguments_are_torchs() -> None:
    for name, theirs in TORCH.items():
        ours, their = (inspect.signature(thing).parameters.values() for thing in (getattr(hooks, name), theirs))
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in their], name
    own = [name for name, value in vars(hooks).items() if getattr(value, "__module__", "") == hooks.__name__]
    assert sorted(hooks.__all__) == hooks.__all__ == sorted(name for name in own if not name.startswith("_"))


@over("hook", HOOKS.values())
def test_hooks_pickle(hook: Any) -> None:
    """torch's wrapped hooks do not."""
    again = pickle.loads(pickle.dumps(hook))
    assert again.__name__ == hook.__name__
    assert repr(again) == repr(hook)  # of a partial: the functions and settings that it holds


def test_misuse_is_refused() -> None:
    for size in (0, -8, 12.5, True, "64", None):
        with pytest.raises(CodecError, match="bucket_size must be a positive number of elements, got"):
            hooks.perchannel_hook(size)
    for name, hook in HOOKS.items():
        with pytest.raises(CollectiveError, match="as FSDP1 passes it: shard the model with torch"):
            hook(None, torch.ones(8), torch.ones(4))
        for state in (7, dist.GroupMember.NON_GROUP_MEMBER, [None]) if name in ("allreduce", "perchannel") else ():
            with pytest.raises(CollectiveError, match=r"(?i)group"):
                hook(state, Bucket(torch.ones(3)))


# --- values -----------------------------------------------------------------------------------------------------------
def mean_range(name: str, xs: Sequence[Tensor]) -> Range:
    """Where the mean of all ranks' numbers may lie: a rounding a rank, and one of the sum unless two ranks tell all."""
    world, dtype, coder = len(xs), xs[0].dtype, thinwire.codec(CODECS[name])
    if world == 1:
        return Range.of(xs[0])
    shares = name == "bf16"
    sent = [x.mul(1 / world) if shares else x.float() if dtype == torch.float64 else x for x in xs]
    total = Range.total([Range.of(x).coded(coder) for x in sent], 1.0 if shares else 1 / world)
    in_one_shot = world == 2 and name != "pertensor"
    return (total if in_one_shot else total.coded(coder)).written(dtype)


def run_hooks(
    group: Group, names: Sequence[str], inputs: Sequence[list[Tensor]], device: Device = CPU
) -> list[tuple[str, Tensor]]:
    """(digest, result) of every hook on every input, of which each has one tensor a rank."""
    outputs = [run_hook(HOOKS[name], xs[group.rank()].to(device)) for name in names for xs in inputs]
    return [(digest(y), y.cpu()) for y in outputs]


def check_hooks(
    ranks: RankPool, names: Sequence[str], inputs: Sequence[list[Tensor]], device: Device = CPU
) -> list[Tensor]:
    """All ranks of the inputs' world agree, and on what the bound allows; the results."""
    world = len(inputs[0])
    cases = [(name, xs) for name in names for xs in inputs]
    told = ranks(world).run(run_hooks, names, inputs, device)
    for (name, xs), *answers in zip(cases, *told, strict=True):
        assert len({digest for digest, _ in answers}) == 1, f"ranks differ: {name}, {xs[0].numel()} {xs[0].dtype}"
        mean_range(name, xs).assert_holds(answers[0][1], f"{name}, {xs[0].numel()} {xs[0].dtype}")
    return [y for _, y in told[0]]


@each_device
@pytest.mark.parametrize(
    ("world", "lengths"), [(1, (0, 1, 700)), (2, (0, 1, 2, 511, 512, 513)), (3, (0, 1, 2, 7, 64, 600)), (4, (2, 3, 63))]
)
def test_means_of_any_length_are_within_their_error(
    ranks: RankPool, world: int, lengths: Sequence[int], device: Device
) -> None:
    """torch pads another row where the length divides."""
    check_hooks(ranks, list(CODECS), [[given(n, rank) for rank in range(world)] for n in lengths], device)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@on_ranks(3, gives=[])
def test_a_complex_bucket_is_its_real_and_imaginary_parts(group: Group, dtype: torch.dtype) -> list[str]:
    """Hooks that treat a complex bucket unlike its real and imaginary parts; DDP itself passes these."""
    pairs = given(600, group.rank(), torch.float64 if dtype == torch.complex128 else torch.float32).view(300, 2)
    results = {name: run_hook(hook, torch.view_as_complex(pairs)) for name, hook in HOOKS.items()}
    return [name for name, y in results.items() if digest(y) != digest(run_hook(HOOKS[name], pairs))]


# --- what torch's hooks get wrong -------------------------------------------------------------------------------------
@worlds(3, rare=[2, 4])
def test_sixteen_bits_keep_the_range_of_the_bucket(ranks: RankPool, world: int) -> None:
    """1e-30 is 0 in float16, the sum of two 3e38 infinite in float32; torch casts 1e5 before it divides: inf."""
    alone = [torch.tensor([1e5, -1e5, 3.0]) * (rank == 1) for rank in range(world)]
    numbers = (torch.tensor([3e38, -3e38, 1e37]), torch.tensor([1e-30, -3e-31, 0.0]))
    inputs = [alone, *([x] * world for x in numbers)]
    assert all(y.isfinite().all() for y in check_hooks(ranks, ["fp16", "bf16"], inputs))


HARD = {
    "under 1e-7": lambda n: torch.linspace(-3e-8, 2e-8, n),  # torch: 0
    "range 1e-6": lambda n: torch.linspace(-5e-7, 5e-7, n),  # torch: 5 % lost
    "1e-40": lambda n: torch.linspace(-3e-40, 2e-40, n),
    "3e38": lambda n: torch.linspace(-1, 1, n) * 3e38,  # torch: NaN
    "one sign": lambda n: torch.linspace(1e-3, 2e-3, n),
    "constant": lambda n: torch.full((n,), -7e-9),
}


@each_device
@worlds(2, rare=[3, 4])
def test_quantization_is_as_fine_as_the_range(ranks: RankPool, world: int, device: Device) -> None:
    found = check_hooks(ranks, QUANTIZED, [[make(333)] * world for make in HARD.values()], device)
    assert all(y.isfinite().all() for y in found)


def nan_block(name: str, n: int, at: int, world: int) -> range:
    """Which elements share a scale with element `at`: its shard, or its channel, counted from the bucket's start."""
    block = {"pertensor": -(-n // world), "perchannel": 512, "perchannel 64": 64}[name]
    begin = at // block * block
    return range(begin, min(begin + block, n))


@each_device
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@worlds(4, rare=[2, 3])
def test_one_nan_stays_in_its_block(ranks: RankPool, world: int, bad: float, device: Device) -> None:
    """torch's: the whole bucket is NaN."""
    n, at = 2003, 1100
    clean = [given(n, rank) for rank in range(world)]
    broken = [x.clone() for x in clean]
    broken[1][at] = bad
    answers = [y for _, y in ranks(world).run(run_hooks, QUANTIZED, [clean, broken], device)[0]]
    for name, good, got in zip(QUANTIZED, answers[::2], answers[1::2], strict=True):
        block = list(nan_block(name, n, at, world))
        want = good.clone()
        want[block] = math.nan
        assert len(block) < n
        assert_same(got, want, name)


@pytest.mark.parametrize("name", QUANTIZED)
@on_ranks(4)
def test_two_phases_of_one_message_each(group: Group, name: str) -> None:
    """torch's: an all-gather of scales and another of everything, (W - 1) * N bytes."""
    world, n = 4, 4 * 512 * 8
    wire = thinwire.codec(CODECS[name]).wire_bytes(n // world)
    x, exchange = given(n, group.rank()), transport.PairTransport.exchange
    run_hook(HOOKS[name], x)
    before = traffic().sent
    with patch.object(transport.PairTransport, "exchange", autospec=True, side_effect=exchange) as spy:
        run_hook(HOOKS[name], x)
    assert (traffic().sent - before, spy.call_count) == (2 * (world - 1) * wire, 2)
    assert 2 * (world - 1) * wire < 0.6 * (world - 1) * n


@on_ranks(2)
def test_no_loop_over_rows(group: Group) -> None:
    """131,072 of them: some 10 ms, and several seconds in Python."""
    x = torch.randn(1 << 20)
    for _ in range(2):
        start = time.process_time()
        hooks.quantization_perchannel_hook(None, Bucket(x), 8).wait()  # type: ignore[arg-type]
    assert time.process_time() - start < 1.0


def scales_of(n: int, size: int) -> Tensor:
    """A size for every element, by channel: neighbors differ by orders of magnitude."""
    return torch.tensor([1.0, 1e-4, 1e3, 1e-7])[torch.arange(n) // size % 4]


CHANNELS = [(1, 1), (13, 5), (99, 100), (100, 100), (513, 512), (1000, 100), (1037, 7), (2050, 513), (300, 1 << 40)]
IN_CHUNKS = [(4000, 100), (4001, 512)]


@pytest.mark.parametrize(
    ("world", "pairs"),
    [(1, CHANNELS), (3, CHANNELS), (3, IN_CHUNKS), *thorough((2, CHANNELS), (4, CHANNELS), (2, IN_CHUNKS))],
)
@on_ranks()
def test_channels_of_any_size_are_counted_from_the_start(
    group: Group, world: int, pairs: list[tuple[int, int]]
) -> list[str]:
    """One that shared a scale with its neighbor would lose all of its digits; torch's hook does not run on gloo."""
    found = []
    most = (2 * AFFINE + 4 * half_ulp(torch.bfloat16)) * (world > 1) + half_ulp(torch.float32)
    for n, size in pairs:  # lengths, and bucket_size
        scale = scales_of(n, size)
        xs = [torch.rand(n, generator=seeded(n, rank)).mul_(2).sub_(1) * scale for rank in range(world)]
        with small_chunks() if pairs[0] == IN_CHUNKS[0] else nullcontext():
            y = run_hook(hooks.perchannel_hook(size), xs[group.rank()])
            grad = xs[group.rank()].clone()
            hooks.quantization_perchannel_hook(None, (grad, nn.Parameter(torch.zeros(n))), size)  # type: ignore[arg-type]
        assert_same(grad, y, f"{n} {size}")
        assert ((y - torch.stack(xs).double().mean(0)).abs() / scale).max() <= most, (n, size)
        found.append(digest(y))
    return found


# --- wrappers ---------------------------------------------------------------------------------------------------------
def summing_hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """A user's hook: its state is no group, and its future holds a list of one, as torch's works give it."""
    state.append(bucket.buffer().dtype)
    future: Future[Tensor] = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future


def failing_hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Another, in trouble."""
    future: Future[Tensor] = Future()
    future.set_exception(ValueError("the link is cut"))  # type: ignore[arg-type]
    return future


@on_ranks(2, rare=[3], gives=[])
def test_wrappers_run_any_hook_in_sixteen_bits(group: Group) -> list[str]:
    """run_hook asks for the input dtype back, where torch's future holds 16 bits."""
    wrong = []
    for wrapper, dtype in ((hooks.fp16_compress_wrapper, torch.float16), (hooks.bf16_compress_wrapper, torch.bfloat16)):
        x, seen = torch.randn(50, generator=seeded(group.rank())).double(), []
        narrow = x.to(dtype)
        dist.all_reduce(narrow)
        if not torch.equal(run_hook(wrapper(summing_hook), x, seen), narrow.double()) or seen != [dtype]:
            wrong.append(f"{dtype}: a user's hook")
        if digest(run_hook(wrapper(default_hooks.allreduce_hook), x.to(dtype))) != digest(
            run_hook(default_hooks.allreduce_hook, x.to(dtype))
        ):
            wrong.append(f"{dtype}: a bucket that has 16 bits already")
        try:
            run_hook(wrapper(failing_hook), x)
            wrong.append(f"{dtype}: an error got lost")
        except RuntimeError as error:
            wrong += [] if "the link is cut" in str(error) else [str(error)]
    return wrong


def recording_hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """A user's hook whose answer does not depend on the bucket, which it keeps as it saw it."""
    state["seen"] = bucket.buffer().clone()
    future: Future[Tensor] = Future()
    future.set_result(state["answer"])
    return future


@on_ranks(1, 2, rare=[3, 4])
def test_a_wrapped_hook_sees_the_plain_cast_and_its_answer_is_given(group: Group) -> None:
    """In every world, as with torch's wrappers; only the dtype of the future differs."""
    x = torch.tensor([5e4, -7e4, 1 / 3, 2.0**-25, 0.0, -0.0, math.inf, math.nan]) * (1 + group.rank())
    wrappers = {torch.float16: "fp16_compress_wrapper", torch.bfloat16: "bf16_compress_wrapper"}
    for dtype, name in wrappers.items():
        answer = torch.tensor([1e4, -3.0, 65504.0, 2.0**-24, -0.0, 7.0, math.inf, math.nan]).to(dtype)
        for module in (hooks, default_hooks):
            state = {"answer": answer}
            hook = getattr(module, name)(recording_hook)
            got = run_hook(hook, x, state) if module is hooks else hook(state, Bucket(x.clone())).wait()
            assert_same(state["seen"], x.to(dtype), f"{module.__name__}.{name}: seen")
            assert_same(got.to(dtype), answer, f"{module.__name__}.{name}: given")


@on_ranks(3)
def test_the_stateful_hook_runs_in_sixteen_bits(group: Group) -> list[str]:
    state = thinwire.DDPState(codec=PER_CHANNEL, feedback="none")
    found = train(group, hooks.fp16_compress_wrapper(thinwire.ddp_hook), FLOATS, state=state)
    for step, got in enumerate(found):
        assert_means("bf16(perchannel)", got, [gradients_of(FLOATS, rank, step) for rank in range(3)], 3)
    return [digest(g) for got in found for g in got if g is not None]


# --- DDP --------------------------------------------------------------------------------------------------------------
MIXED: Shapes = (
    *(((5, 7), torch.float32), ((0, 3), torch.float32), ((33,), torch.bfloat16), ((9,), torch.float16)),
    *(((4, 4), torch.float64), ((3, 5), torch.complex64), ((11,), torch.complex128), ((600,), torch.float32)),
)
FLOATS: Shapes = tuple(((n,), torch.float32) for n in (301, 77, 1, 600, 512, 2003))


def named(shapes: Shapes) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    return tuple({f"p{i}": pair[part] for i, pair in enumerate(shapes)} for part in range(2))  # type: ignore[return-value]


def gradients_of(shapes: Shapes, rank: int, step: int) -> list[Tensor]:
    names, dtypes = named(shapes)
    return draw(rank, step, names, dtypes)


def taken(model: nn.Module) -> list[Tensor | None]:
    """A copy of the gradients, which are then dropped."""
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return grads


def registered(
    shapes: Shapes, hook: Any, group: Group | None = None, state: Any = None, **options: Any
) -> DistributedDataParallel:
    model = DistributedDataParallel(Given(*named(shapes)), process_group=group, **options)
    if hook is not None:
        model.register_comm_hook(group if state is None else state, hook)
    return model


def train(
    group: Group, hook: Any, shapes: Shapes, steps: int = 2, state: Any = None, **options: Any
) -> list[list[Tensor | None]]:
    """DDP rebuilds its buckets between the first step and the second."""
    model, found = registered(shapes, hook, state=state, **options), []
    for step in range(steps):
        model(*gradients_of(shapes, group.rank(), step)).backward()
        found.append(taken(model))
    return found


AFFINE = (2 + 2.0**-7) / 255 * (1 + 2.0**-7) / 2  # half a step of a range from -peak to peak; see cases._affine_bound
F16, B16 = 2.0**-11, 2.0**-9  # half an ulp


def lost(name: str, world: int) -> float:
    """What a hook may lose, as a share of the bucket's peak: its casts, codings and 16-bit additions."""
    return 1.02 * {
        "allreduce": 0,
        "fp16": 2 * F16,
        "bf16": 2 * B16,
        **dict.fromkeys((*QUANTIZED, "perchannel 100"), 2 * AFFINE),
        "fp16(allreduce)": (world + 1) * F16,
        "bf16(perchannel)": 2 * B16 + 2 * AFFINE,
        "fp16(bf16(fp16))": 2 * B16 + 4 * F16,
    }.get(name, 0.0)


def assert_means(
    name: str, got: Sequence[Tensor | None], inputs: Sequence[Sequence[Tensor | None]], world: int
) -> None:
    """`got` are the means over `world` ranks of `inputs`, one list a rank; None counts as zero."""
    peaks: dict[torch.dtype, float] = {}
    for g in (g for row in inputs for g in row if g is not None and g.numel()):
        peaks[g.dtype] = max(peaks.get(g.dtype, 0.0), float(g.abs().max()))
    for i, y in enumerate(got):
        given = [row[i] for row in inputs if row[i] is not None]
        if not given:
            assert y is None
            continue
        assert y.dtype == given[0].dtype
        wide = torch.complex128 if y.is_complex() else torch.float64
        error = (y.to(wide) - torch.stack([g.to(wide) for g in given]).sum(0) / world).abs()
        bound = peaks.get(y.dtype, 0.0) * (lost(name, world) + (world + 3) * half_ulp(y.dtype)) * math.sqrt(2)
        assert not error.numel() or error.max() <= bound, f"{name}: parameter {i}, {error.max()} > {bound}"


def identical(answers: Sequence[Any]) -> bool:
    told = {tuple(digest(g) for grads in answer for g in grads if g is not None) for answer in answers}
    return len(told) == 1


def train_with_all(
    group: Group, names: Sequence[str], shapes: Shapes, options: dict[str, Any]
) -> list[list[list[Tensor | None]]]:
    return [train(group, HOOKS[name], shapes, **options) for name in names]


@pytest.fixture
def some(pytestconfig: pytest.Config) -> list[str]:
    """A hook of each kind; with --thorough all of them. What DDP does to a hook does not hang on its bits."""
    return list(HOOKS) if pytestconfig.option.thorough else ["allreduce", "bf16", "perchannel", "fp16(bf16(fp16))"]


OPTIONS: dict[str, dict[str, Any]] = {
    "small buckets": {"bucket_cap_mb": 0.001},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True, "steps": 3},
}


@pytest.mark.parametrize(
    ("world", "option"),
    [
        *((2, "bucket views"), (3, "static graph"), (2, "small buckets")),
        *thorough(*((world, "small buckets") for world in (1, 3, 4)), (3, "bucket views")),
    ],
)
def test_ddp_of_every_dtype(ranks: RankPool, world: int, option: str, some: list[str]) -> None:
    """On gloo, where DDP refuses torch's bf16 hooks by name and torch's quantization hooks crash."""
    names = list(HOOKS) if option == "small buckets" else some
    answers = ranks(world).run(train_with_all, names, MIXED, OPTIONS[option])
    for i, name in enumerate(names):
        assert identical([answer[i] for answer in answers]), name
        for step, got in enumerate(answers[0][i]):
            assert_means(name, got, [gradients_of(MIXED, rank, step) for rank in range(world)], world)


def compare_with_plain(group: Group, hook: Any, options: Sequence[dict[str, Any]]) -> list[bool]:
    """Whether a hook gives the bits that DDP gives without one."""
    same = []
    for how in options:
        same.append(identical([train(group, h, MIXED, **how) for h in (None, hook)]))
    return same


@worlds(1, 3, rare=[2, 4])
def test_allreduce_is_plain_ddp_bit_by_bit(ranks: RankPool, world: int) -> None:
    """torch's divides where DDP multiplies by 1 / world: other bits at 3 ranks."""
    options = list(OPTIONS.values())
    assert ranks(world).run(compare_with_plain, hooks.allreduce_hook, options) == [[True] * 3] * world
    if world == 3:
        assert ranks(3).run(compare_with_plain, default_hooks.allreduce_hook, options) == [[False] * 3] * 3


@contextmanager
def groups_of(*members: list[int]) -> Iterator[list[Any]]:
    made = [dist.new_group(ranks) for ranks in members]
    yield made
    for group in made:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def train_side_by_side(group: Group, names: Sequence[str]) -> list[tuple[list[Tensor | None], list[Tensor | None]]]:
    """Two models in one backward pass: one in the own pair of ranks, its group passed as state, one in the world."""
    rank, found = group.rank(), []
    with groups_of([0, 1], [2, 3]) as pairs:
        for hook in map(HOOKS.__getitem__, names):
            inner = registered(FLOATS, hook, pairs[rank // 2], bucket_cap_mb=0.001)
            outer = registered(FLOATS, hook, bucket_cap_mb=0.001)
            (inner(*gradients_of(FLOATS, rank, 0)) + outer(*gradients_of(FLOATS, rank, 1))).backward()
            found.append((taken(inner), taken(outer)))
    return found


def test_groups_side_by_side(ranks: RankPool, some: list[str]) -> None:
    answers = ranks(4).run(train_side_by_side, some)
    for i, name in enumerate(some):
        for rank, answer in enumerate(answers):
            pair = rank // 2 * 2
            assert_means(name, answer[i][0], [gradients_of(FLOATS, r, 0) for r in (pair, pair + 1)], 2)
            assert_means(name, answer[i][1], [gradients_of(FLOATS, r, 1) for r in range(4)], 4)


DENSE = [name for name in HOOKS if name != "allreduce"]


@on_ranks(2)
def test_compressed_hooks_refuse_sparse_gradients(group: Group) -> None:
    """What hooks say to sparse gradients, in buckets and in pairs."""
    said = []
    for name in DENSE:
        model = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
        model.register_comm_hook(None, HOOKS[name])
        with pytest.raises((CollectiveError, RuntimeError)) as raised:
            model(torch.tensor([1, 2])).sum().backward()
        said.append(str(raised.value))
        run_hook(HOOKS[name], torch.ones(9))  # the group is as it was
    for hook in HOOKS.values():
        with pytest.raises(CollectiveError) as told:
            hook(None, (torch.eye(3).to_sparse(), torch.eye(3)))
        said.append(str(told.value))
    assert all("dense gradients, got torch.sparse_coo" in text for text in said), said


@on_ranks(1, 3, rare=[2, 4])
def test_allreduce_takes_sparse_gradients_as_ddp_does(group: Group) -> str:
    """Two steps without a hook, with ours and with torch's; some rows several ranks look at."""
    found = []
    for hook in (None, hooks.allreduce_hook, default_hooks.allreduce_hook):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.EmbeddingBag(31, 5, sparse=True, mode="sum"))
        if hook is not None:
            model.register_comm_hook(None, hook)
        grads = []
        for step in range(2):
            model.zero_grad()
            rows = torch.randint(31, (7, 3), generator=seeded(1, group.rank(), step))
            (model(rows) * torch.randn(7, 5, generator=seeded(2, group.rank(), step))).sum().backward()
            assert model.module.weight.grad.is_sparse
            grads.append(model.module.weight.grad.to_dense())
        assert all(g.abs().sum() > 0 for g in grads)
        found.append(digest(*grads))
    assert found == [found[0]] * 3
    return found[0]


# --- the compiled path ------------------------------------------------------------------------------------------------
@on_ranks(1, 2, rare=[3], gives=[])
def test_a_pair_is_reduced_in_place(group: Group) -> list[str]:
    """Hooks that do something else to a (grad, param) pair than to a bucket; some of torch's take no pairs."""
    wrong = []
    for name, hook in HOOKS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
            grad = gradients_of([((6, 9), dtype)], group.rank(), 0)[0]
            want = run_hook(hook, grad.view(-1))
            for x in (grad.clone(), grad.t().contiguous().t()):
                result = hook(None, (x, nn.Parameter(torch.zeros(6, 9, dtype=dtype))))
                if result is not x or digest(x) != digest(want):
                    wrong.append(f"{name} {dtype} {x.stride()}")
    return wrong


@on_ranks(2, gives=[])
def test_a_conjugated_gradient_is_reduced_in_place(group: Group) -> list[str]:
    """Autograd leaves such gradients: views that conjugate when they are read."""
    x, wrong = gradients_of([((6, 9), torch.complex64)], group.rank(), 0)[0], []
    for name, hook in HOOKS.items():
        lazy = x.clone().conj()
        assert lazy.is_conj()
        hook(None, (lazy, nn.Parameter(torch.zeros_like(x))))
        if digest(lazy) != digest(run_hook(hook, x.view(-1)).conj()):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    ("world", "names"), [(2, ["bf16", "perchannel 100", "fp16(allreduce)"]), *thorough((2, list(HOOKS)))]
)
@on_ranks(gives=[])
def test_pairs_trace_without_a_break(group: Group, names: list[str]) -> list[str]:
    """Hooks whose traced result is not the eager one; by turns with the world's group named and not."""
    wrong = []
    for i, name in enumerate(names):
        hook, state, dtype = HOOKS[name], (None, group)[i % 2], (torch.float32, torch.float64)[i % 2]
        x = gradients_of([((6, 9), dtype)], group.rank(), 0)[0]
        traced, param = x.clone(), nn.Parameter(torch.zeros(6, 9, dtype=dtype))
        hook(state, (x, param))
        torch._dynamo.reset()
        call = torch.compile(
            lambda g, hook=hook, state=state, param=param: hook(state, (g, param)), fullgraph=True, backend="aot_eager"
        )
        if digest(call(traced)) != digest(x) or digest(traced) != digest(x):
            wrong.append(name)
    return wrong


# --- GPUs -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [pytest.param(1, marks=needs_cuda)])
@on_ranks(gives=[])
def test_no_hook_waits_for_the_gpu(group: Group) -> list[str]:
    """Hooks that make the host wait for the GPU, as torch's quantization hooks do for every bucket."""
    wrong: list[str] = []
    torch.cuda.set_device(CUDA)
    members = dist.new_group(backend="nccl")
    for name, hook in HOOKS.items():
        x = torch.randn(1000, device=CUDA)
        run_hook(hook, x, members)
        bucket = Bucket(x)
        try:
            with no_host_sync():
                hook(members, bucket).wait()
        except RuntimeError as error:
            wrong.append(f"{name}: {error}")
    dist.destroy_process_group(members)
    return wrong


@pytest.mark.parametrize(
    ("backend", "world"), [pytest.param("nccl", 1, marks=needs_cuda), pytest.param("gloo", 2, marks=needs_cuda)]
)
@on_ranks(gives=[])
def test_ddp_on_a_gpu(group: Group, backend: str) -> list[str]:
    """Hooks whose DDP on the GPU differs from that on the CPU, apart from the order of torch's own sums."""
    wrong: list[str] = []
    torch.cuda.set_device(CUDA)
    members = dist.new_group(backend=backend)
    for name, hook in HOOKS.items():
        model = DistributedDataParallel(Given(*named(MIXED)).to(CUDA), process_group=members, bucket_cap_mb=0.001)
        model.register_comm_hook(members, hook)
        for step, want in enumerate(train(group, hook, MIXED, bucket_cap_mb=0.001)):
            model(*(g.to(CUDA) for g in gradients_of(MIXED, group.rank(), step))).backward()
            got = [g.cpu() for g in taken(model) if g is not None]
            if [digest(g) for g in got] != [digest(g) for g in want if g is not None]:
                wrong.append(name)
    dist.destroy_process_group(members)
    return wrong
