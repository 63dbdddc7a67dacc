"""compress_ddp in every way of using DDP: plain DDP bit by bit uncompressed, bounds compressed, groups, overlap."""

import contextlib
import copy
import gc
import math
import os
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import cases
import replicas
import thinwire
from cases import CPU, CUDA, assert_same, by_turns, digest, each_device, half_ulp, needs_cuda, on_ranks, thorough
from ranks import RankPool
from replicas import READY, SHAPES, Device, Given, Group, Shapes, backward, draw, flat, grads_of, message_of, wrap
from test_schedule import delays
from thinwire import compress_ddp
from thinwire.collectives import transport
from thinwire.errors import CollectiveError

# --- everything DDP does ----------------------------------------------------------------------------------------------
Model = DistributedDataParallel
Result = list[Tensor | None]


class Way(NamedTuple):
    """A way of using DDP: what happens to the model, and how often a gradient is added up before it travels."""

    run: Callable[[Model, Callable[[int], Result], int], Result]
    options: Mapping[str, Any] = {}
    shapes: Shapes = SHAPES
    dtypes: replicas.Dtypes = torch.float32
    added: int = 1
    cap: float = replicas.CAP
    alike: bool = True  # whether all ranks get the same
    divides: bool = False  # DDP divides a gradient that is a view already, and multiplies one that it copies


def three_steps(model: Model, drawn: Callable[[int], Result], rank: int) -> Result:
    return [g for step in range(3) for g in backward(model, drawn(step))]


def kept_gradients(model: Model, drawn: Callable[[int], Result], rank: int) -> Result:
    found: Result = []
    for step in range(3):
        model.zero_grad(set_to_none=False)
        model(*drawn(step)).backward()
        found += grads_of(model)
    return found


def left_out(model: Model, drawn: Callable[[int], Result], rank: int) -> Result:
    """A parameter that no rank uses, then one that only the others use."""
    found = backward(model, [None if i == 1 else g for i, g in enumerate(drawn(0))])
    found += backward(model, [None if i == 2 and rank == 0 else g for i, g in enumerate(drawn(1))])
    return found + backward(model, drawn(2))


def accumulated(model: Model, drawn: Callable[[int], Result], rank: int) -> Result:
    found: Result = []
    for step in (0, 2, 4):
        model.zero_grad()
        with model.no_sync():
            model(*drawn(step)).backward()
        model(*drawn(step + 1)).backward()
        found += grads_of(model)
    return found


def added_twice(model: Model, drawn: Callable[[int], Result], rank: int) -> Result:
    """Two synchronized passes into the same gradients."""
    model.zero_grad()
    for step in range(2):
        model(*drawn(step)).backward()
    return grads_of(model)


def back_twice(model: Model, drawn: Callable[[int], Result], rank: int) -> Result:
    """DDP synchronizes the first pass through a graph only."""
    loss = model(*drawn(0))
    loss.backward(retain_graph=True)
    loss.backward()
    return grads_of(model) + backward(model, drawn(1)) + backward(model, drawn(2))


def looked_at(model: Model, drawn: Callable[[int], Result], rank: int) -> Result:
    found: Result = []
    for step, mode in enumerate((torch.no_grad, torch.inference_mode, torch.no_grad)):
        found += backward(model, drawn(step))
        model.eval()
        with mode():
            model(*drawn(step))
        model.train()
    return found


def joined(model: Model, drawn: Callable[[int], Result], rank: int) -> Result:
    found: Result = []
    with Join([model]):
        for step in range(2 + rank):
            found = backward(model, drawn(step))
    return found


ODD: Shapes = {"z": (0, 3), "w": (37,), "one": (1,), "y": (0,), "v": (5, 7, 3), "x": ()}
MIXED = {"a": torch.bfloat16, "c": torch.float64, "d": torch.float16, "e": torch.complex64}
WAYS: dict[str, Way] = {
    "several buckets": Way(three_steps),
    "one bucket": Way(three_steps, cap=1024.0),
    "gradients are views of buckets": Way(three_steps, {"gradient_as_bucket_view": True}),
    "gradients are kept": Way(kept_gradients),
    "kept views": Way(kept_gradients, {"gradient_as_bucket_view": True}, divides=True),
    "a static graph": Way(three_steps, {"static_graph": True}),
    "a static graph with views": Way(three_steps, {"static_graph": True, "gradient_as_bucket_view": True}),
    "parameters left out": Way(left_out, {"find_unused_parameters": True}),
    "no_sync": Way(accumulated, added=2),
    "two passes": Way(added_twice, added=2),
    "one graph twice": Way(back_twice, added=2, alike=False),
    "evaluation in between": Way(looked_at),
    "Join": Way(joined, alike=False),
    "odd lengths": Way(three_steps, shapes=ODD, cap=0.05),
    "lanes of one element": Way(three_steps, shapes={"w": (40, 50), "x": (), "v": (30, 50), "y": (2,)}),
    "bfloat16": Way(three_steps, dtypes=torch.bfloat16),
    "float16": Way(three_steps, dtypes=torch.float16),
    "float64": Way(three_steps, dtypes=torch.float64),
    "complex64": Way(three_steps, dtypes=torch.complex64),
    "complex128": Way(three_steps, dtypes=torch.complex128),
    "mixed dtypes": Way(three_steps, dtypes=MIXED),
    "mixed dtypes in views": Way(kept_gradients, {"gradient_as_bucket_view": True}, dtypes=MIXED, divides=True),
}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "none": {"codec": "none"},
    "int8": {"codec": "int8", "exempt": "none"},
    "lloyd2 classic": {"codec": "lloyd2", "feedback": "classic", "exempt": "none"},
    "lloyd1 ef21": {"codec": "lloyd1:block=64", "feedback": "ef21"},
    "closed": {"codec": "lloyd2", "feedback": "classic"},
    "joined": {"codec": "int8", "exempt": "none"},  # buckets, three to a message
}


def use(group: Group, name: str, device: Device, kinds: Sequence[str]) -> tuple[float, dict[str, tuple[bool, Result]]]:
    """The largest number that any rank brings, and of every run: whether ranks ended alike, and its results."""
    way, rank, found = WAYS[name], group.rank(), {}

    def drawn(step: int) -> Result:
        return draw(rank, step, way.shapes, way.dtypes)

    for kind in kinds:
        options = RUNS[kind]
        ready = READY if way.shapes is SHAPES else ()
        model = wrap(Given(way.shapes, way.dtypes, ready), group, way.cap, device=device, **way.options)
        handle = compress_ddp(model, **options) if options else None
        if handle is not None and kind == "closed":
            handle.close()
        if handle is not None and kind == "joined":
            replicas.join_buckets(handle, 20_000)
        got = way.run(model, drawn, rank)
        found[kind] = replicas.same_everywhere(group, *(g for g in got if g is not None)), got
    peak = torch.tensor(max(float(torch.view_as_real(g).abs().max() if g.is_complex() else g.abs().max())
                            for step in range(6) for g in drawn(step) if g is not None and g.numel()))  # fmt: skip
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    return float(peak), found


SOME = ("several buckets", "parameters left out", "Join", "lanes of one element", "mixed dtypes")
THREE = (*SOME, "gradients are views of buckets", "kept views", "odd lengths", "no_sync", "bfloat16", "complex64")
MOST = ("several buckets", "mixed dtypes")
SINGLE = ("float16", "float64", "complex128")  # "mixed dtypes" has them, too
WORLD_WAYS = [*((2, name) for name in WAYS if name not in (*THREE, *SINGLE)), (2, "several buckets")]
WORLD_WAYS += [*((3, name) for name in THREE if name not in MOST), *((4, name) for name in MOST)]
MORE_WAYS = [*((2, name) for name in (*THREE[1:], *SINGLE)), *((3, name) for name in MOST)]
ON_CUDA = [*((2, name) for name in WAYS), *((3, name) for name in SOME)]


@pytest.mark.parametrize(
    ("world", "name", "device"),
    [
        *(pytest.param(*way, CPU, id="-".join(map(str, way))) for way in WORLD_WAYS),
        *thorough(*((*way, CPU) for way in MORE_WAYS)),
        *(pytest.param(*way, CUDA, id="-".join(map(str, (*way, "cuda"))), marks=needs_cuda) for way in ON_CUDA),
    ],
)
def test_every_way_of_using_ddp(
    ranks: RankPool, world: int, name: str, device: Device, pytestconfig: pytest.Config
) -> None:
    """Uncompressed and closed: bit for bit plain DDP. int8: two roundings of half a step, and those of the dtype."""
    kinds = list(RUNS)
    if not pytestconfig.option.thorough:  # what is uncompressed, and what is owed, by turns
        some = (("none", "lloyd1 ef21"), ("closed", "lloyd2 classic"))[list(WAYS).index(name) % 2]
        kinds = ["plain", "int8", "joined", *some]
    for peak, found in ranks(world).run(use, name, device, kinds):
        want = found["plain"][1]
        for kind, (alike, got) in found.items():
            assert alike or not WAYS[name].alike, f"{kind}: ranks differ"
            assert [g is None for g in got] == [w is None for w in want], kind
        for exact in {"none", "closed"} & found.keys():
            gap, bound = largest_gap(found[exact][1], want), world * peak * half_ulp(torch.bfloat16)
            assert gap == 0 or (WAYS[name].divides and world == 3 and gap <= bound), exact
        for g, w in zip([*found["int8"][1], *found["joined"][1]], [*want, *want], strict=True):
            if g is not None and w is not None and g.numel():
                bound = WAYS[name].added * peak * (1.02 / 127 + (world + 2) * half_ulp(g.real.dtype))
                assert largest_gap([g], [w]) <= bound
                assert g.abs().sum() > 0


def largest_gap(some: Result, others: Result) -> float:
    """The largest difference; a NaN is one."""
    pairs = [(x, y) for x, y in zip(some, others, strict=True) if x is not None and y is not None and x.numel()]
    gaps = [(torch.view_as_real(x - y) if x.is_complex() else x - y).abs().max() for x, y in pairs]
    return max((float(gap.nan_to_num(math.inf)) for gap in gaps), default=0.0)


@each_device
@pytest.mark.parametrize("options", [RUNS["int8"], RUNS["lloyd2 classic"], RUNS["lloyd1 ef21"]], ids=str)
@on_ranks(2)
def test_accumulated_gradients_travel_once(group: Group, options: Mapping[str, Any], device: Device) -> None:
    results = []
    for at_once in (False, True):
        model = wrap(Given(ready=READY), group, device=device)
        compress_ddp(model, **options)
        for step in (0, 2):
            model.zero_grad()
            first, second = draw(group.rank(), step), draw(group.rank(), step + 1)
            if at_once:
                model(*(x + y for x, y in zip(first, second, strict=True))).backward()
            else:
                with model.no_sync():
                    model(*first).backward()
                model(*second).backward()
        results.append(flat(grads_of(model)))
    assert_same(*results)


# --- groups -----------------------------------------------------------------------------------------------------------
def in_subgroup(group: Group, options: Mapping[str, Any]) -> Tensor | None:
    """A DDP of ranks 1 and 2 of three."""
    pair = dist.new_group([1, 2])
    if group.rank() == 0:
        return None
    model = wrap(Given(ready=READY), pair)
    handle = compress_ddp(model, **options)
    found = flat([g for step in range(3) for g in backward(model, draw(group.rank() - 1, step))])
    assert handle.state_dict()["world"] == 2
    dist.barrier(pair)
    return found


def in_world(group: Group, options: Mapping[str, Any]) -> Tensor:
    model = wrap(Given(ready=READY))
    compress_ddp(model, **options)
    return flat([g for step in range(3) for g in backward(model, draw(group.rank(), step))])


@pytest.mark.parametrize("name", ["none", "lloyd2 classic", *thorough("int8", "lloyd1 ef21")])
def test_a_subgroup_averages_among_itself(ranks: RankPool, name: str) -> None:
    want = ranks(2).run(in_world, RUNS[name])
    _, *got = ranks(3).run(in_subgroup, RUNS[name])
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)


@on_ranks(3, rare=[2])
def test_models_side_by_side_do_not_disturb_each_other(group: Group) -> None:
    """Models on a group of their own and two in one group, step by step in turn, against each alone."""
    other = dist.new_group()
    kinds = [(group, RUNS["int8"]), (other, RUNS["lloyd2 classic"]), (group, RUNS["lloyd1 ef21"])]

    def make(where: Group, options: Mapping[str, Any]) -> Model:
        model = wrap(Given(ready=READY), where)
        compress_ddp(model, **options)
        return model

    models = [make(*kind) for kind in kinds]
    turns = [flat(backward(model, draw(group.rank(), step))) for step in range(3) for model in models]
    for i, kind in enumerate(kinds):
        model = make(*kind)
        for step in range(3):
            assert_same(turns[3 * step + i], flat(backward(model, draw(group.rank(), step))), f"{kind}, step {step}")
    dist.barrier(other)


# --- by hand ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["int8", "lloyd1 ef21", *thorough("none", "lloyd2 classic")])
@on_ranks(3)
def test_a_state_by_hand_does_the_same(group: Group, name: str) -> None:
    """compress_ddp, a state with names, one without, and one of the world by default."""
    results = []
    for how in ("compress_ddp", "named", "unnamed", "the world"):
        model = wrap(Given(ready=READY), group)
        if how == "compress_ddp":
            compress_ddp(model, **RUNS[name])
        else:
            named = {"model": model.module} if how == "named" else {}
            where = [] if how == "the world" else [group]
            model.register_comm_hook(thinwire.DDPState(*where, **RUNS[name], **named), thinwire.ddp_hook)
        results.append(flat([g for step in range(4) for g in backward(model, draw(group.rank(), step))]))
        assert_same(results[-1], results[0], how)


# --- overlap ----------------------------------------------------------------------------------------------------------
class Hurdle(torch.autograd.Function):
    """In backward, waits until a message is being sent, which waits until backward has come here."""

    sending, reached = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if not Hurdle.sending.wait(10.0):
            raise RuntimeError("no bucket travels before backward ends")
        Hurdle.reached.set()
        return grad

    @staticmethod
    def jump(*events: threading.Event) -> None:
        """Set these events and no others."""
        for event in (Hurdle.sending, Hurdle.reached):
            event.set() if event in events else event.clear()


class Late(nn.Module):
    """Its first layer's gradient is ready when another bucket is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 60), nn.Linear(60, 50)

    def forward(self, x: Tensor) -> Tensor:
        """Both layers."""
        y: Tensor = self.second(Hurdle.apply(self.first(x)))
        return y.square().mean()


@pytest.mark.parametrize("options", [RUNS["int8"], RUNS["lloyd2 classic"]], ids=str)
@on_ranks(2, gives=True)
def test_buckets_travel_while_backward_runs(group: Group, options: Mapping[str, Any]) -> bool:
    model = wrap(Late(), group)
    compress_ddp(model, **options)
    x, send = torch.randn(8, 40), transport.PairTransport.exchange
    Hurdle.jump(Hurdle.sending, Hurdle.reached)
    for _ in range(2):
        model(x).backward()  # one bucket; rebuilt after it

    def wait_and_send(*args: Any) -> Any:
        Hurdle.sending.set()
        if not Hurdle.reached.wait(10.0):
            raise RuntimeError("backward waits for its buckets")
        return send(*args)

    with patch.object(transport.PairTransport, "exchange", wait_and_send):
        for _ in range(2):
            Hurdle.jump()
            model(x).backward()
    return replicas.same_everywhere(group, flat(grads_of(model)))


@by_turns("name, world", ["int8", "lloyd2 classic", "lloyd1 ef21"], [4, 2])
@on_ranks()
def test_delays_change_no_result(group: Group, name: str) -> str:
    """Three steps of many buckets, of several chunks: at ease, and under delays of each rank's own."""
    found = []
    for late in (False, True):
        model = wrap(Given(ready=READY), group, 2.0)
        compress_ddp(model, **RUNS[name])
        with cases.small_chunks(2000), delays(group.rank()) if late else contextlib.nullcontext():
            found.append(digest(*(flat(backward(model, draw(group.rank(), step))) for step in range(3))))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("options", [RUNS["int8"], RUNS["lloyd1 ef21"], {"codec": "lloyd2", "exempt": ["d"]}], ids=str)
@on_ranks(3, rare=[2])
def test_joined_buckets_are_those_of_a_larger_size(group: Group, options: Mapping[str, Any]) -> None:
    """From the second step on, when DDP has buckets in the order of the gradients, the same lanes and bits."""
    found = []
    for cap, most in ((1024.0, 0), (2.0, 1 << 20), (2.0, 16_000)):
        model = wrap(Given(ready=READY), group, cap)
        handle = compress_ddp(model, **options)
        replicas.join_buckets(handle, most)
        backward(model, [gradient * 0 for gradient in draw(group.rank())])
        found.append([flat(backward(model, draw(group.rank(), step))) for step in range(1, 3)])
        assert len(handle.state_dict()["layout"]) == (2 if most == 16_000 else 1)
    assert_same(flat(found[1]), flat(found[0]), "joined into one")
    assert largest_gap([flat(found[2])], [flat(found[0])]) > 0


@pytest.mark.parametrize(
    ("want", "numel", "changed"),
    [
        (60_000_000, 60_000_000, {}),
        (100_000_000, 10**9, {}),
        (0, 50_000_000, {}),  # less than two buckets
        (0, 10**9, {"bucket_cap_mb": 25}),
        (0, 10**9, {"static_graph": True}),
        (0, 10**9, {"codec": "none"}),
        (0, 10**9, {"backend": "gloo"}),
        (0, 10**9, {"hosts": 2}),
    ],
    ids=str,
)
@on_ranks(2)
def test_what_is_joined(group: Group, want: int, numel: int, changed: Mapping[str, Any]) -> None:
    """On NCCL on one host, buckets of DDP's own size, from a fourth of the gradients or 100 MB on."""
    how = {"codec": "int8", "backend": "nccl", "hosts": 1, **changed}
    options = {name: how[name] for name in ("bucket_cap_mb", "static_graph") if name in how}
    model = DistributedDataParallel(Given({"w": (8, 2)}), process_group=group, **options)
    handle = compress_ddp(model, how["codec"])
    model._module_parameters = [nn.Parameter(torch.empty(numel, device="meta"))]
    model._module_parameters += [nn.Parameter(torch.empty(10**9, device="meta"), requires_grad=False)]
    with (
        patch("thinwire.collectives.groups.backend", return_value=how["backend"]),
        patch.dict(os.environ, {"NCCL_HOSTID": f"host {group.rank() % how['hosts']}"}),
    ):
        assert handle._size_to_join(group, CPU) == want


@on_ranks(2)
def test_buckets_that_are_held_when_a_handle_is_closed_are_averaged(group: Group) -> None:
    model = wrap(Given(ready=READY), group, 2.0)
    handle = compress_ddp(model, "int8")
    replicas.join_buckets(handle, 16_000)
    backward(model, draw(group.rank()))
    model.module.get_parameter("e").register_hook(lambda gradient: handle.close())
    got = flat(backward(model, draw(group.rank(), 1))).double()
    assert handle.closed
    assert (got - replicas.mean_of(group.size(), 1)).abs().max() < 0.1


@on_ranks(2)
def test_what_a_failed_backward_held_is_forgotten(group: Group) -> None:
    """By a state that is registered again, on another DDP."""
    state = thinwire.DDPState(group, "lloyd2", feedback="classic", model=Given())
    replicas.join_buckets(state, 1 << 20)
    first, second = (wrap(Given(ready=READY), group, 2.0) for _ in range(2))
    for model in (first, second):
        model.register_comm_hook(state, thinwire.ddp_hook)
    backward(first, draw(group.rank()))
    first.module.get_parameter("e").register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(first, draw(group.rank()))
    assert len(state._held) == 2
    backward(second, draw(group.rank()))
    assert [len(names) for names in state.state_dict()["layout"]] == [len(SHAPES)]


@on_ranks(2)
def test_what_a_joined_message_cannot_do_fails_every_bucket_of_it(group: Group) -> None:
    model = wrap(Given(), group)
    handle = compress_ddp(model, "int8")
    replicas.join_buckets(handle, 1 << 20)
    backward(model, draw(group.rank()))
    failed: torch.futures.Future[Tensor] = torch.futures.Future()
    failed.set_exception(CollectiveError("no room"))
    with patch.object(handle._sync, "average", return_value=failed), pytest.raises(RuntimeError, match="no room"):
        backward(model, draw(group.rank()))


# --- beginning and end ------------------------------------------------------------------------------------------------
@on_ranks(2, rare=[3])
def test_a_closed_model_is_plain_and_may_be_opened_again(group: Group) -> None:
    model, bare = wrap(Given(ready=READY), group), wrap(Given(ready=READY), group)
    handle = compress_ddp(model, "lloyd2", feedback="classic")
    found = {}
    for step in range(2):
        gradients = draw(group.rank(), step)
        found["compressed"] = not torch.equal(flat(backward(model, gradients)), flat(backward(bare, gradients)))
    found["remembers"] = handle.stats().residual_bytes > 0
    handle.close()
    handle.close()
    found["forgets"] = handle.stats().residual_bytes == 0
    gradients = draw(group.rank(), 2)
    found["closed is plain"] = torch.equal(flat(backward(model, gradients)), flat(backward(bare, gradients)))
    again = compress_ddp(model, "int8", feedback="none", exempt="none")
    fresh = wrap(Given(ready=READY), group)
    for step in range(3):
        backward(fresh, draw(group.rank(), step))
    compress_ddp(fresh, "int8", feedback="none", exempt="none")
    gradients = draw(group.rank(), 3)
    found["opened again"] = torch.equal(flat(backward(model, gradients)), flat(backward(fresh, gradients)))
    found["counts anew"] = again.stats().steps == 1
    handle.close()  # the old one has nothing to say any more
    found["still open"] = not torch.equal(flat(backward(model, gradients)), flat(backward(bare, gradients)))
    assert all(found.values()), found


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@on_ranks(2)
def test_copies_of_a_compressed_model_are_plain_and_may_be_compressed(group: Group, how: str) -> None:
    """A copy of a compressed model, as an average of its weights is one: plain, until it is compressed itself."""
    mesh = init_device_mesh("cpu", (group.size(), 1))
    model, fresh, bare = (wrap(Given(), group) for _ in range(3))
    handle = compress_ddp(model, "lloyd2", mesh=mesh)
    first, second = draw(group.rank(), 0), draw(group.rank(), 1)
    backward(model, first)
    again = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    found = {"a copy is plain": torch.equal(flat(backward(again, first)), flat(backward(bare, first)))}
    found["the original is not"] = not torch.equal(flat(backward(model, first)), flat(backward(bare, first)))
    found["nor counts for it"] = handle.stats().steps == 2
    backward(fresh, first)
    for other in (again, fresh):
        compress_ddp(other, "int8", exempt="none")
    found["a copy is compressed"] = torch.equal(flat(backward(again, second)), flat(backward(fresh, second)))
    found["once"] = "already compressed" in message_of(lambda: compress_ddp(again, "int8"))
    others = torch.optim.SGD(fresh.parameters(), 0.1)
    found["by its optimizer"] = "steps none" in message_of(lambda: compress_ddp(bare, "lloyd2", optimizer=others))
    assert all(found.values()), found


@on_ranks(2, gives=True)
def test_a_compressed_model_is_let_go(group: Group) -> bool:
    model = wrap(Given(), group)
    handle = compress_ddp(model, "lloyd2", feedback="classic")
    backward(model, draw(group.rank()))
    seen = weakref.ref(model.module)
    del model, handle
    gc.collect()
    return seen() is None


# tests/test_policy.py has what else is refused.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "algorithm": ({"algorithm": "ring"}, "one_shot"),
    "codec": ({"codec": "int9"}, "int8"),
    "policy of auto": ({"policy": {"a": "auto"}}, "known"),
}


@on_ranks(2)
def test_misuse_is_refused_by_name(group: Group) -> None:
    told = {**{name: word for name, (_, word) in REFUSED.items()}, "no DDP": "DistributedDataParallel"}
    told |= {"no names": "model=", "twice": "close()", "sparse": "dense", "in backward": "step in backward"}
    told["traced"] = "optimize_ddp='python_reducer'"
    told |= dict.fromkeys(("hooked", "hooked still"), "hook ddp_hook")
    model, found = wrap(Given(), group), {}
    for name, (options, _) in REFUSED.items():
        found[name] = message_of(lambda options=options: compress_ddp(model, **options).close())
    found["no DDP"] = message_of(lambda: compress_ddp(model.module))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^compress_ddp\(\) has no option 'bits'; apart from the codec it takes "):
        compress_ddp(model, bits=4)  # type: ignore[call-arg]
    found["no names"] = message_of(lambda: thinwire.DDPState(group, policy={"a": "int8"}))
    handle = compress_ddp(model, "int8")  # what was refused left nothing behind
    found["twice"] = message_of(lambda: compress_ddp(model, "int8"))
    backward(model, draw(group.rank()))
    handle.close()
    sparse = wrap(nn.Embedding(10, 3, sparse=True), group)
    compress_ddp(sparse, "int8")
    found["sparse"] = message_of(lambda: sparse(torch.tensor([1, 2])).sum().backward())
    hooked = wrap(Given(), group)
    hooked.register_comm_hook(thinwire.DDPState(group, "int8"), thinwire.ddp_hook)
    found["hooked"], found["hooked still"] = (message_of(lambda: compress_ddp(hooked, "int8")) for _ in range(2))
    stepping = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of torch.jit
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, stepping.parameters(), {"lr": 0.1})
    found["in backward"] = message_of(lambda: compress_ddp(wrap(stepping, group), "int8"))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        traced = wrap(Given(), group)
    found["traced"] = message_of(lambda: compress_ddp(traced, "int8"))
    assert not {name: found[name] for name, w in told.items() if w not in found[name] or "!" in found[name][:20]}


@on_ranks(2)
def test_an_optimizer_that_does_not_go_with_the_residuals_is_named(group: Group) -> None:
    """In front of Adam's kin topk asks for EF21, the user for residuals in bf16: known when it steps."""
    model = wrap(replicas.network(), group)
    optimizer = torch.optim.Adamax(model.parameters())
    told = message_of(
        lambda: (
            compress_ddp(model, "topk", residual_dtype=torch.bfloat16),
            replicas.learn(model, optimizer, group.rank(), range(2)),
        )
    )
    assert "residual_dtype" in told
    assert "float32" in told
