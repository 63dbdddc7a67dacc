"""What handles owe to frameworks: models inside wrappers, states in one file, logs, pickles, and silence closed."""

import copy
import io
import json
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import thinwire
from cases import assert_same, by_turns, digest, heard, on_ranks
from ranks import RankPool
from replicas import OPTIMIZERS, Given, Group, backward, batch, draw, flat, learn, mesh_of, message_of, network, wrap
from test_fsdp_checkpoint import Run
from thinwire import CodecError, CollectiveError, DDPState, DiLoCo, compress_ddp, compress_fsdp
from thinwire.integrations.choice.options import Rules, family
from thinwire.integrations.models import bare_optimizer, plain_name

STEPS = 6
SAVED_AT = 3


class Around(nn.Module):
    """A framework's wrapper: holds the model, and the one it wrapped."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._forward_module = inner
        self._original_module = getattr(inner, "module", inner)

    def forward(self, *args: Tensor) -> Any:
        return self._forward_module(*args)


@on_ranks(2, gives=[])
def test_a_ddp_model_is_found_inside_what_wraps_it(group: Group) -> list[str]:
    """Of a DDP model in every wrapper: the ones whose gradients are not those of the model itself."""
    made = {
        "itself": lambda: wrap(Given(), group),
        "framework": lambda: Around(wrap(Given(), group)),
        "twice": lambda: nn.ModuleDict({"model": Around(wrap(Around(Given()), group))})["model"],
    }
    found = {}
    for name, make in made.items():
        model = make()
        handle = compress_ddp(model, "lloyd4", policy={"a": "int8"})
        backward(model, draw(group.rank()))
        found[name] = flat([p.grad for p in model.parameters()])
        assert handle.stats().ratio > 3, name
        assert not any("_forward_module" in parameter for row in handle.state_dict()["layout"] for parameter in row)
    return [name for name, gradients in found.items() if not torch.equal(gradients, found["itself"])]


def test_names_lose_wrappers_and_nothing_else() -> None:
    assert plain_name("_forward_module._orig_mod.a._checkpoint_wrapped_module.weight") == "a.weight"
    assert plain_name("_orig_mod") == ""
    assert plain_name("pre_forward_module.weight") == "pre_forward_module.weight"


@on_ranks(2)
def test_what_is_not_one_ddp_model_is_named(group: Group) -> None:
    sharded, hooked = nn.Linear(8, 8), wrap(Given())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (group.size(),)))
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    ddp, fsdp = compress_ddp, compress_fsdp
    calls: list[tuple[Any, Any, str]] = [
        (ddp, nn.Linear(2, 2), "trainer.model_wrapped"),
        (ddp, 3, "int: pass the model"),
        (ddp, sharded, "which FSDP2 shards: call thinwire.compress_fsdp"),
        (ddp, nn.ModuleList([wrap(Given()), wrap(Given())]), "ModuleList holds 2"),
        (ddp, hooked, "fp16_compress_hook"),
        (fsdp, torch.compile(wrap(Given()), backend="eager"), "call thinwire.compress_ddp"),
        (fsdp, nn.Linear(2, 2), "which nothing wraps or shards"),
    ]
    for call, model, words in calls:
        told = message_of(lambda call=call, model=model: call(model))
        assert words in told, told


def test_fsdp1_and_replicate_are_named() -> None:
    class Sharded(FullyShardedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

        def modules(self) -> Any:
            return iter([self])

    class Replicated(nn.Linear):
        __module__ = "torch.distributed._composable.replicate"

    with pytest.raises(CollectiveError, match=r"FSDP1 shards.*fully_shard"):
        compress_ddp(Sharded())
    with pytest.raises(CollectiveError, match=r"replicate\(\).*DistributedDataParallel"):
        compress_ddp(Replicated(2, 2))


class Wrapped:
    """An optimizer as a framework hands it out."""

    def __init__(self, inner: object) -> None:
        self._optimizer = inner


def test_an_optimizer_is_found_inside_what_wraps_it() -> None:
    sgd = torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1)
    assert bare_optimizer(Wrapped(Wrapped(sgd))) is sgd
    assert bare_optimizer(sgd) is sgd
    assert family(Wrapped(sgd)) == "linear"
    assert DDPState(None, "lloyd2", optimizer=Wrapped(sgd)).options.optimizer == "linear"  # type: ignore[arg-type]
    for wrong in (Wrapped(3), [Wrapped(sgd), 3], [], 3):
        with pytest.raises(CodecError, match="optimizer must be"):
            DDPState(None, "lloyd2", optimizer=wrong)  # type: ignore[arg-type]


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    names = ["layers.0.weight", "layers.0.bias", "embed.weight", "head.weight"]
    Rules(["*.bias"], {"embed*": "int8", "*": "lloyd4"}).check_names(names)
    with pytest.raises(CodecError, match=r"policy has the pattern 'nope\*'.*none of the 4 parameters"):
        Rules("auto", {"embed*": "int8", "nope*": "int8"}).check_names(names)
    with pytest.raises(CodecError, match=r"exempt has the pattern 'norm'"):
        Rules(["*.bias", "norm"], None).check_names(names)
    with pytest.raises(CodecError, match="nope"):
        DDPState(None, "int8", model=nn.Linear(3, 3), policy={"nope": "none"})
    frozen = nn.Linear(3, 3)
    frozen.weight.requires_grad = False
    DDPState(None, "int8", model=frozen, policy={"weight": "none"})  # it may be thawed


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_a_state_does_not_pickle(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(CollectiveError, match=r"does not pickle: save its state_dict\(\)"):
        copied(DDPState(None, "lloyd2"))


@on_ranks(3)
def test_a_state_of_the_world_is_refused_on_a_part_of_it(group: Group) -> None:
    pair = dist.new_group([0, 1])
    if group.rank() < 2:
        model = wrap(Given(), pair)
        model.register_comm_hook(DDPState(None, "int8"), thinwire.ddp_hook)
        told = message_of(lambda: backward(model, draw(group.rank())))
        assert "ranks [0, 1] of 3" in told
        assert "DDPState(process_group" in told


# States of all ranks in one.


def trained(group: Group, options: Mapping[str, Any], saved: bytes | None) -> tuple[Tensor, bytes]:
    """Parameters after all steps, from the beginning or from a state, and the gathered state half-way."""
    model = wrap(network(), group)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    handle, begin, file = compress_ddp(model, **options), 0, io.BytesIO()
    if saved is not None:
        loaded = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        handle.load_state_dict(loaded["thinwire"])
        begin = SAVED_AT
    for step in range(begin, STEPS):
        if step == SAVED_AT:
            state = handle.state_dict(gather=True)
            assert bool(state) == (group.rank() == 0)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "thinwire": state}, file)
        learn(model, optimizer, group.rank(), range(step, step + 1))
    assert handle.step == STEPS
    return flat(list(model.parameters())), file.getvalue()


GATHERED: dict[str, Mapping[str, Any]] = {
    "classic": {"codec": "lloyd2", "feedback": "classic"},
    "ef21": {"codec": "lloyd2", "feedback": "ef21"},
    "bf16": {"codec": "lloyd4", "feedback": "classic", "residual_dtype": torch.bfloat16},
    "dealt": {"codec": "auto:2.5", "optimizer": "adaptive", "replan_every": 3},
}


@pytest.mark.parametrize("options", GATHERED.values(), ids=GATHERED)
def test_one_file_of_all_ranks_resumes_bit_by_bit(ranks: RankPool, options: Mapping[str, Any]) -> None:
    world = ranks(3)
    straight = world.run(trained, options, None)
    resumed = world.run(trained, options, straight[0][1])
    for (expected, _), (got, _) in zip(straight, resumed, strict=True):
        assert_same(got, expected)


def test_ranks_that_remember_different_things_are_gathered(ranks: RankPool) -> None:
    """A run continues without feedback on more ranks: those that are new have loaded nothing."""
    saved = ranks(2).run(trained, GATHERED["classic"], None)[0][1]
    again = ranks(3).run(trained, {"codec": "lloyd2", "feedback": "none"}, saved)[0][1]
    owed, nothing = (torch.load(io.BytesIO(again), weights_only=True)["thinwire"]["ranks"][rank] for rank in "12")
    assert all(values.any() and not nothing[name].any() for name, values in owed.items())


SHARDED: list[Mapping[str, Any]] = [
    {"gradients": "lloyd2", "feedback": "classic"},
    {"gradients": "lloyd2", "feedback": "ef21"},
    {"gradients": "lloyd4", "weights": "lloyd4", "replica": True},
    {"gradients": "auto:3", "optimizer": "adaptive", "replan_every": 3},
]


@by_turns("turn, world", [0, 1], [3, 4])
@on_ranks()
def test_one_file_of_all_shards_resumes_bit_by_bit(group: Group, tmp_path: Path, turn: int) -> None:
    """On four ranks, of replicas."""
    mesh = mesh_of(*((2, 2) if group.size() == 4 else (3,)))
    for at, options in enumerate(SHARDED[turn::2]):
        first = Run(mesh, options)
        first.train(0, SAVED_AT)
        state = first.handle.state_dict(gather=True)
        if group.rank() == 0:
            torch.save(state, tmp_path / f"{at}.pt")
        dist.barrier()
        weights = first.shards()
        momenta = copy.deepcopy(first.optimizer.state_dict())
        first.train(SAVED_AT, STEPS)
        second = Run(mesh, options)
        second.optimizer.load_state_dict(momenta)
        with torch.no_grad():
            for parameter, value in zip(second.model.parameters(), weights, strict=True):
                parameter.to_local().copy_(value)  # type: ignore[attr-defined]
        second.handle.load_state_dict(torch.load(tmp_path / f"{at}.pt", weights_only=True))
        second.train(SAVED_AT, STEPS)
        assert second.handle.step == STEPS
        assert all(map(torch.equal, first.shards(), second.shards())), options


# What is told, and when.


def logged(group: Group, path: str) -> tuple[list[dict[str, Any]], list[Any], int]:
    model, own = wrap(network(), group), f"{path}.{group.rank()}"
    called: list[dict[str, Any]] = []
    tracked: list[dict[str, Any]] = []
    tracker: Any = SimpleNamespace(log=tracked.append)  # as a run of Weights & Biases
    handle = compress_ddp(model, "int8").log_to(own, every=2)
    handle.log_to(tracker, every=4).log_to(called.append, every=100)
    learn(model, OPTIMIZERS["sgd"](model.parameters()), group.rank(), range(7))
    assert called == []
    lines = Path(own).read_text().splitlines() if Path(own).exists() else []
    return [json.loads(line) for line in lines], tracked, handle.stats().bytes_sent


def test_a_handle_logs_what_it_did(ranks: RankPool, tmp_path: Path) -> None:
    (lines, rows, sent), other = ranks(2).run(logged, str(tmp_path / "log"))
    assert other[:2] == ([], [])  # the first rank writes
    assert ([line["steps"] for line in lines], lines[-1]["bytes_sent"] * 7) == ([2, 4, 6], sent * 6)
    assert (lines[-1]["codec"], [row["thinwire/steps"] for row in rows]) == ("int8", [4])


@on_ranks(1, 2)
def test_steps_that_are_taken_again_are_logged_again(group: Group) -> None:
    """A run goes back from its seventh step to its fifth; the first rank logs."""
    model = wrap(network(), group)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    rows: list[dict[str, Any]] = []
    handle = compress_ddp(model, "int8").log_to(rows.append, every=2)
    learn(model, optimizer, group.rank(), range(5))
    state = handle.state_dict()
    learn(model, optimizer, group.rank(), range(5, 7))
    handle.load_state_dict(state)
    learn(model, optimizer, group.rank(), range(5, 9))
    assert [row["steps"] for row in rows] == ([] if group.rank() else [2, 4, 6, 6, 8])


def to_tensorboard(group: Group, path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorBoard's own
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(path) as writer:
            model = wrap(network(), group)
            compress_ddp(model, "int8").log_to(writer, every=3)
            learn(model, OPTIMIZERS["sgd"](model.parameters()), group.rank(), range(7))


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_tensorboard_has_the_figures(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks(2).run(to_tensorboard, str(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    names = events.Tags()["scalars"]
    assert {"thinwire/ratio", "thinwire/relative_error", "thinwire/bytes_sent"} <= set(names)
    assert "thinwire/codec" not in names
    assert [event.step for event in events.Scalars("thinwire/ratio")] == [3, 6]
    assert events.Scalars("thinwire/ratio")[-1].value > 3


def test_a_handle_does_not_log_to_anything() -> None:
    for target, every in ((3, 1), ("log", 0), ("log", True)):
        with pytest.raises(CollectiveError, match="log_to"):
            DDPState(None).log_to(target, every=every)


@pytest.mark.parametrize("optimizer", ["adam", ""], ids=["seen", "by hand"])
@on_ranks(2)
def test_bits_that_wait_for_an_optimizer_are_told_once(group: Group, optimizer: str) -> None:
    """The relative error after every step of 2 bits, and what the first rank says; "" updates parameters by hand."""
    model = wrap(network(), group)
    stepped = OPTIMIZERS[optimizer](model.parameters()) if optimizer else None
    handle, errors = compress_ddp(model, "lloyd2"), []
    with heard() as lines:
        for step in range(3 if optimizer else 33):
            if stepped is not None:
                learn(model, stepped, group.rank(), range(step, step + 1))
            else:
                x, y = batch(group.rank(), step)
                (model(x) - y).square().mean().backward()
                for parameter in model.parameters():
                    parameter.data -= 0.01 * parameter.grad  # type: ignore[operator]
                    parameter.grad = None
            errors.append(handle.stats().relative_error or 0.0)
    assert errors[0 if optimizer else 29] < 0.02  # int8, while no optimizer was seen
    assert errors[-1] > 0.2  # lloyd2 loses 0.34 of a Gaussian
    if optimizer or group.rank():
        assert lines == []  # it was seen after the first step
    else:
        assert len(lines) == 2
        assert "int8 travels instead of 1 to 3 bits" in lines[0]
        assert "no optimizer was seen in 30 steps" in lines[1]


@on_ranks(2)
def test_a_profile_has_ranges(group: Group) -> None:
    model = wrap(network(), group)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    compress_ddp(model, "int8", algorithm="two_phase")
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=threads) as found:
        learn(model, optimizer, group.rank(), range(1))
    seen = {event.key for event in found.key_averages()}
    assert seen >= {"thinwire::encode", "thinwire::wire", "thinwire::decode"}


# States that are damaged.


WRONG: dict[str, Any] = {
    **{"None": None, "text": "boo", "negative": -5, "huge": 10**30, "NaN": math.nan, "mapping": {"boo": 1}},
    "integers": lambda values: values.to(torch.int32),
    "not finite": lambda values: torch.full_like(values, math.nan),
    "too few": lambda values: local(values).reshape(-1)[:-1],
}
VALID = {  # by field, what makes another valid state
    r".*(why|(feedback|widths|sent)\.\d+\.0)": {"text"},
    r".*errors\.\d\.\d+\.1": {"huge", "NaN"},  # those of a step with NaN are not finite
    r"under_way\.0\.(sent|average)": {"not finite"},  # a round that is not finite is dropped when it is due
    r"outer_optimizer\.param_groups\.0\.\w+": {"None", "huge"},  # torch's defaults; a learning rate of 10**30
    r"outer_optimizer\.state\.\d(\.step)?": {"mapping", "huge"},
    r"outer_optimizer\.state\.\d\.momentum_buffer": {"None"},  # SGD has none yet
}
STATES: dict[str, dict[str, Any]] = {
    "DDP": {"codec": "auto:2.5", "feedback": "ef21", "replan_every": 1},
    "FSDP2": {"gradients": "auto:3", "feedback": "ef21", "replan_every": 1},
    "FSDP2 with copies": {"gradients": "lloyd4", "weights": "lloyd4", "replica": True},
    "DiLoCo": {"codec": "auto:2.5", "feedback": "classic"},
    "DiLoCo with Adam": {"codec": "lloyd2", "outer_optimizer": torch.optim.Adam},
}


def run_of(group: Group, kind: str) -> tuple[Any, nn.Module]:
    """A handle and its model after some steps; DiLoCo's with one round applied and another in flight."""
    if kind.startswith("FSDP2"):
        run = Run(mesh_of(group.size()), STATES[kind])
        run.train(0, 2)
        return run.handle, run.model
    model = wrap(network(), group) if kind == "DDP" else network()
    inner = OPTIMIZERS["sgd"](model.parameters())
    make: Any = compress_ddp if kind == "DDP" else partial(DiLoCo, inner_optimizer=inner, every=2, overlap=1)
    handle = make(model, **STATES[kind])
    learn(model, inner, group.rank(), range(4))
    return handle, model


def local(values: Any) -> Any:
    return values.to_local() if isinstance(values, DTensor) else values


def bits(value: Any) -> Any:
    """A state, to compare."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.shape, digest(local(value))
    if isinstance(value, Mapping):
        return {key: bits(held) for key, held in value.items()}
    return [bits(held) for held in value] if isinstance(value, list | tuple) else repr(value)


def replaced(state: Any, path: Sequence[Any], new: Any) -> Any:
    """A state with something else in one field."""
    if not path:
        return new(state) if callable(new) else new
    inner = replaced(state[path[0]], path[1:], new)
    if isinstance(state, Mapping):
        return {**state, path[0]: inner}
    return [inner if at == path[0] else held for at, held in enumerate(state)]


def fields_of(value: Any) -> Iterator[tuple[list[Any], Any]]:
    """Every field with its path."""
    if isinstance(value, Mapping | list | tuple):
        for key, held in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield [key], held
            yield from (([key, *path], inner) for path, inner in fields_of(held))


@pytest.mark.parametrize("kind", STATES)
@on_ranks(2)
def test_a_damaged_state_is_refused_and_changes_nothing(group: Group, kind: str) -> None:
    """How many damaged states there are; those that are loaded, change something, or are rejected in other words."""
    handle, model = run_of(group, kind)
    state = copy.deepcopy(handle.state_dict())
    before = bits([state, model.state_dict()])
    count, found = 0, []
    for path, value in fields_of(state):
        name = ".".join(map(str, path))
        fits = {what for pattern, some in VALID.items() if re.fullmatch(pattern, name) for what in some}
        wrong = {what: new for what, new in WRONG.items() if not callable(new) or isinstance(value, Tensor)}
        cases = {what: replaced(state, path, wrong[what]) for what in wrong.keys() - fits if value is not None}
        if len(path) == 1:
            cases["nothing"] = {key: held for key, held in state.items() if key != path[0]}
        for what, case in cases.items():
            text = message_of(lambda case=case: handle.load_state_dict(case))
            if not text.startswith("load_state_dict: ") or str(path[0]) not in text:
                found.append(f"{name}, {what}: {text}")
        count += len(cases)
        if bits([handle.state_dict(), model.state_dict()]) != before:
            found.append(f"{name}: changed")
    handle.load_state_dict(state)
    assert bits([handle.state_dict(), model.state_dict()]) == before, "the state itself"
    assert not found, "\n".join(found)
    assert count > 200
