"""compress_fsdp in every way of using FSDP2: plain FSDP2 bit by bit, where nothing is rounded."""

import contextlib
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cases import digest, on_ranks, seeded, thorough
from ranks import RankPool
from replicas import Group, mesh_of, message_of
from thinwire import compress_fsdp
from thinwire.integrations.fsdp import rows

# --- a network --------------------------------------------------------------------------------------------------------

STEPS = 2  # the first makes what the second uses again
LONG = 4
BF16 = torch.bfloat16
F16 = torch.float16
Compress = Callable[..., Any]  # compress_fsdp with the codecs of a test, or nothing


class Block(nn.Module):
    """Sizes that neither 2 nor 3 ranks divide."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self, width: int = 7, inner: int = 11) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(2))
        self.head = nn.Linear(width, 3)
        self.spare = nn.Parameter(torch.ones(width))
        self.skip_spare = False
        round_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x if self.skip_spare else x * self.spare)  # type: ignore[no-any-return]


def round_weights(model: nn.Module) -> None:
    """Weights of few digits: in bf16 they travel exactly."""
    with torch.no_grad():
        for p in model.parameters():
            local = p.to_local() if isinstance(p, DTensor) else p
            local.copy_(local.bfloat16())


def line(group: Group) -> DeviceMesh:
    return mesh_of(group.size())


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Every block a group of its own, and the rest one."""
    inner = dict(options)
    if "mp_policy" in options:  # what a block gives is for the next one
        inner["mp_policy"] = replace(options["mp_policy"], output_dtype=None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **inner)
    return fully_shard(model, mesh=mesh, **options)


def inputs(model: nn.Module, group: Group, step: int) -> Tensor:
    norm = model.blocks[0].norm
    return torch.randn(3, *norm.normalized_shape, generator=seeded(group.rank(), step)).to(norm.weight.dtype)


def train(
    model: nn.Module,
    group: Group,
    steps: range = range(STEPS),
    passes: Callable[[int], Sequence[int]] = lambda step: (step,),
    before_pass: Callable[[int, int], None] = lambda step, at: None,
    before_update: Callable[[], None] = lambda: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Tensor]:
    """Losses, and at the end every shard; each step adds up the gradients of some batches."""
    found = []
    for step in steps:
        model.zero_grad()
        for at, number in enumerate(passes(step)):
            before_pass(step, at)
            loss = model(inputs(model, group, number)).float().square().mean()
            loss.backward()
            found.append(loss.detach())
        before_update()
        optimizer.step() if optimizer else descend(model)
        round_weights(model)
    return [*found, *shards(model)]


def compressed(model: nn.Module, group: Group, compress: Compress, *args: Any, **how: Any) -> list[Tensor]:
    """What training gives once `compress` has had the model."""
    compress(model)
    return train(model, group, *args, **how)


def descend(model: nn.Module) -> None:
    """A step of SGD on the shards: torch's own asks at every operation on a DTensor how its result is to be placed."""
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.to_local().sub_(p.grad.to_local(), alpha=0.1)  # type: ignore[attr-defined, operator]


def shards(model: nn.Module) -> list[Tensor]:
    return [p.to_local().detach().clone() for p in model.parameters() if isinstance(p, DTensor)]


# --- ways of using FSDP2 ----------------------------------------------------------------------------------------------


def several_groups(group: Group, compress: Compress) -> list[Tensor]:
    return compressed(shard(Net(), line(group)), group, compress, range(LONG))


def one_group(group: Group, compress: Compress) -> list[Tensor]:
    return compressed(fully_shard(Net(), mesh=line(group)), group, compress)


def another_dimension(group: Group, compress: Compress) -> list[Tensor]:
    def placed(p: nn.Parameter) -> Shard | None:
        return Shard(1) if p.ndim == 2 and p.shape[1] % group.size() == 0 else None

    model = shard(Net(8, 12), line(group), shard_placement_fn=placed)
    assert any(p.placements == (Shard(1),) for p in model.parameters())
    return compressed(model, group, compress)


def kept_weights(group: Group, compress: Compress) -> list[Tensor]:
    return compressed(shard(Net(), line(group), reshard_after_forward=False), group, compress)


def larger_shards(group: Group, compress: Compress) -> list[Tensor]:
    """Between forward and backward, weights lie in shards of two ranks instead of four."""
    return compressed(shard(Net(8, 12), line(group), reshard_after_forward=2), group, compress)


def prefetched(group: Group, compress: Compress) -> list[Tensor]:
    model = shard(Net(), line(group))
    first, second = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    return compressed(model, group, compress)


def accumulated(group: Group, compress: Compress) -> list[Tensor]:
    """Two batches a step: gradients are reduced after the second, weights kept in between."""
    model = shard(Net(), line(group))

    def before(step: int, at: int) -> None:
        model.set_requires_gradient_sync(at == 1)
        model.set_is_last_backward(at == 1)
        model.set_reshard_after_backward(at == 1)

    return compressed(model, group, compress, passes=lambda step: (2 * step, 2 * step + 1), before_pass=before)


def added_twice(group: Group, compress: Compress) -> list[Tensor]:
    """Both batches of a step are reduced."""
    return compressed(shard(Net(), line(group)), group, compress, passes=lambda step: (2 * step, 2 * step + 1))


def divided(group: Group, compress: Compress) -> list[Tensor]:
    """By the number of ranks, and by another, which gloo has in sums alone."""
    model = shard(Net(), line(group))
    compress(model)
    model.set_gradient_divide_factor(float(group.size()))
    found = train(model, group)
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(8.0)
    return found + train(model, group)


def offloaded(group: Group, compress: Compress) -> list[Tensor]:
    return compressed(shard(Net(), line(group), offload_policy=CPUOffloadPolicy(pin_memory=False)), group, compress)


def recomputed_in_wrappers(group: Group, compress: Compress) -> list[Tensor]:
    net = Net()
    net.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in net.blocks)
    net.blocks[0].norm = net.blocks[0]._checkpoint_wrapped_module.norm  # for `inputs`
    return compressed(shard(net, line(group)), group, compress)


def tied(group: Group, compress: Compress) -> list[Tensor]:
    """Within a group, and between modules of one."""
    net = Net(7, 7)
    for block in net.blocks:
        block.down.weight = block.up.weight
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    return compressed(shard(net, line(group)), group, compress)


def frozen(group: Group, compress: Compress) -> list[Tensor]:
    """A whole block, and a weight of the other; the block learns later."""
    net = Net()
    net.blocks[0].requires_grad_(False)
    net.blocks[1].up.weight.requires_grad_(False)
    model = shard(net, line(group))
    found = compressed(model, group, compress, range(2))
    model.blocks[0].requires_grad_(True)
    return found + train(model, group, range(2, 4))


def unused(group: Group, compress: Compress) -> list[Tensor]:
    model = shard(Net(), line(group))

    def before(step: int, at: int) -> None:
        model.skip_spare = step != 1

    return compressed(model, group, compress, range(3), before_pass=before)


POLICIES = (
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32),
    MixedPrecisionPolicy(param_dtype=F16, reduce_dtype=torch.float32),
    MixedPrecisionPolicy(param_dtype=F16, reduce_dtype=F16),
    MixedPrecisionPolicy(reduce_dtype=BF16),
)


def mixed_precision(group: Group, compress: Compress) -> list[Tensor]:
    found, mesh = [], line(group)
    for policy in POLICIES:
        found += compressed(shard(Net(), mesh, mp_policy=policy), group, compress, range(2))
    return found


def clipped(group: Group, compress: Compress) -> list[Tensor]:
    model = shard(Net(), line(group))
    norms: list[Tensor] = []

    def before() -> None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    found = compressed(model, group, compress, before_update=before)
    assert float(norms[0]) > 0.1
    return found + norms


def compressed_before_memory(group: Group, compress: Compress) -> list[Tensor]:
    with torch.device("meta"):
        net = Net()
    model = shard(net, line(group))
    compress(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.to_local().copy_(torch.randn(p.to_local().shape, generator=seeded(i, group.rank())) / 3)
    round_weights(model)
    return train(model, group)


def compiled(group: Group, compress: Compress) -> list[Tensor]:
    net = Net()
    for block in net.blocks:
        block.compile(backend="eager")
    with warnings.catch_warnings():  # torch's own, about what its compiler looks at
        warnings.simplefilter("ignore")
        return compressed(shard(net, line(group)), group, compress)


def two_models(group: Group, compress: Compress) -> list[Tensor]:
    mesh = line(group)
    models = [shard(Net(7, inner), mesh) for inner in (11, 9)]
    for model in models:
        compress(model)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    found = []
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            found += train(model, group, range(step, step + 1), optimizer=optimizer)
    return found


def one_after_the_other(group: Group, compress: Compress) -> list[Tensor]:
    """A model that is compressed feeds one that is not."""
    mesh = line(group)
    front = shard(Net(7, 11), mesh)
    front.head = nn.Identity()
    back = shard(Net(7, 9), mesh)
    compress(front)
    both = nn.ModuleDict({"front": front, "back": back})
    both.forward = lambda x: back(front(x))  # type: ignore[method-assign]
    both.blocks = front.blocks
    return train(both, group)


def compressed_late(group: Group, compress: Compress) -> list[Tensor]:
    model = shard(Net(), line(group))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found = train(model, group, range(1), optimizer=optimizer)
    compress(model)
    return found + train(model, group, range(1, 3), optimizer=optimizer)


def evaluated(group: Group, compress: Compress) -> list[Tensor]:
    model = shard(Net(), line(group))
    compress(model)
    found = []
    for step in range(STEPS):
        found += train(model, group, range(step, step + 1))
        model.eval()
        with torch.no_grad():
            found.append(model(inputs(model, group, 50 + step)))
        model.train()
    return found


def replicated_in_sums(group: Group, compress: Compress) -> list[Tensor]:
    model = shard(Net(), mesh_of(2, 2))
    model.set_force_sum_reduction_for_comms(True)
    found = compressed(model, group, compress)
    model.set_gradient_divide_factor(8.0)
    return found + train(model, group)


def replicated_mixed(group: Group, compress: Compress) -> list[Tensor]:
    found, mesh = [], mesh_of(2, 2)
    for policy in POLICIES[::3]:
        found += compressed(shard(Net(), mesh, mp_policy=policy), group, compress, range(2))
    return found


def hooked(group: Group, compress: Compress) -> list[Tensor]:
    """A hook of the user's own changes what was summed over replicas."""
    model = shard(Net(), mesh_of(2, 2))
    model.set_all_reduce_hook(lambda gradients: gradients.mul_(0.5))
    return compressed(model, group, compress)


def replicas_of_all(group: Group, compress: Compress) -> list[Tensor]:
    """Shards of one rank, in sums and in fp16: torch reduces nothing inside."""
    found = []
    mesh = mesh_of(group.size(), 1)
    for policy in POLICIES[::3]:
        model = shard(Net(), mesh, mp_policy=policy)
        model.set_force_sum_reduction_for_comms(True)
        found += compressed(model, group, compress, range(2))
    return found


def replicas_later(group: Group, compress: Compress) -> list[Tensor]:
    """Three batches a step, each summed over shards; over replicas after the last."""
    model = shard(Net(), mesh_of(2, 2))

    def before(step: int, at: int) -> None:
        model.set_requires_all_reduce(at == 2)
        model.set_is_last_backward(at == 2)

    return compressed(model, group, compress, range(STEPS), lambda step: range(3 * step, 3 * step + 3), before)


def tensor_parallel(group: Group, compress: Compress) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    net = Net(8, 12)
    for block in net.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return compressed(shard(net, mesh["data"]), group, compress)


class Way(NamedTuple):
    run: Callable[[Group, Compress], list[Tensor]]
    world: int = 2
    two: bool = True  # sums are of two numbers, and so the same in any order

    @property
    def name(self) -> str:
        return f"{self.run.__name__.replace('_', ' ')}, {self.world} ranks"


WAYS = [
    *(Way(run) for run in (several_groups, one_group, another_dimension, kept_weights, prefetched, accumulated)),
    *(Way(run) for run in (added_twice, divided, offloaded, recomputed_in_wrappers, tied)),
    *(Way(run) for run in (frozen, unused, mixed_precision, clipped, compiled, evaluated)),
    *(Way(run) for run in (compressed_before_memory, compressed_late)),
    *(Way(run) for run in (two_models, one_after_the_other, replicas_of_all)),
    *(Way(run, 4) for run in (replicated_in_sums, replicated_mixed, replicas_later, hooked, tensor_parallel)),
    Way(several_groups, 3, False),
    Way(larger_shards, 4, False),
]
MORE = [  # of which others have the parts
    *(Way(run, 3, False) for run in (unused, frozen, accumulated, mixed_precision)),
    *(Way(run, 4, False) for run in (one_group, another_dimension)),
]
BY_NAME = {way.name: way for way in WAYS + MORE}


def compare(group: Group, name: str, with_none: bool) -> tuple[str, list[str], int]:
    """Digests of what plain FSDP2 makes of it, and of what compress_fsdp's messages do, a model of codec "none", and
    one with exact weights.

    Messages hold weights that bf16 holds exactly and, where a sum is of two numbers, gradients as they are.
    """
    way = BY_NAME[name]
    handles = []

    def in_messages(model: nn.Module, **options: Any) -> None:
        # A model without codecs sends no messages: here every parameter has a rule that says "none".
        handles.append(compress_fsdp(model, "int8", "bf16", policy={"*": "none"}, exempt="none", **options))

    plain = way.run(group, lambda model, **options: None)
    assert len(plain) > 3
    found = []
    if with_none:
        found.append(way.run(group, lambda model, **options: compress_fsdp(model, "none", **options)))
    found.append(way.run(group, lambda model, **options: compress_fsdp(model, "none", "exact", **options)))
    with mock.patch.object(rows, "is_exact", return_value=False) if way.two else contextlib.nullcontext():
        found.append(way.run(group, in_messages))
    return digest(*plain), [digest(*tensors) for tensors in found], sum(h.stats().bytes_sent for h in handles)


@pytest.mark.parametrize("name", [*(way.name for way in WAYS), *thorough(*(way.name for way in MORE))])
def test_where_nothing_is_rounded_it_is_plain_fsdp_bit_by_bit(
    ranks: RankPool, name: str, pytestconfig: pytest.Config
) -> None:
    """Messages every way; a model that sends none of its own in every third, or with --thorough."""
    with_none = pytestconfig.option.thorough or list(BY_NAME).index(name) % 3 == 0
    for plain, found, sent in ranks(BY_NAME[name].world).run(compare, name, with_none):
        assert found == [plain] * len(found)
        assert sent > 0


EXACTLY: list[dict[str, Any]] = [
    {"gradients": "none"},
    {"gradients": "int8", "warmup_steps": STEPS},
    {"gradients": "int8", "policy": {"*": "none"}, "exempt": "none"},
    {"gradients": "int8", "warmup_steps": STEPS - 1},
]


@on_ranks(4)
def test_steps_that_compress_nothing_between_replicas_do_not_inside_either(group: Group) -> None:
    """Plain HSDP, and models that compress nothing; the last one compresses its last step."""
    plain = replicas_later(group, lambda model, **_: None)
    ways = [replicas_later(group, lambda model, o=options, **_: compress_fsdp(model, **o)) for options in EXACTLY]
    assert [digest(*way) == digest(*plain) for way in ways] == [True] * 3 + [False]


@on_ranks(4)
def test_options_that_differ_by_rank_raise_on_all(group: Group) -> None:
    first = group.rank() == 0
    given: list[dict[str, Any]] = [
        {"weights": "none" if first else "int8"},
        {"weights": "lloyd4", "replica": first},
        {"inside": "bf16" if first else "int8"},
        {"gradients": "int8" if group.rank() % 2 else "int4"},  # alike on the ranks of a replica group
        {"gradients": "int8"},
    ]
    mesh = mesh_of(2, 2)
    *told, fine = [message_of(lambda o=options: compress_fsdp(shard(Net(), mesh), **o)) for options in given]
    assert all("the ranks disagree" in message for message in told), told
    assert fine == "accepted!"


@pytest.mark.parametrize("replica", [False, True])
@on_ranks(4)
def test_both_passes_have_the_same_weights_however_they_are_sharded_in_between(group: Group, replica: bool) -> None:
    """With weights that are rounded, and lie in shards of all ranks between the passes, or of two."""
    found = []
    for reshard in (True, 2):
        model = shard(Net(8, 12), line(group), reshard_after_forward=reshard)
        compress_fsdp(model, "none", "int8", replica=replica, exempt="none")
        found.append(digest(*train(model, group)))
    assert found[0] == found[1]


@on_ranks(1)
def test_one_rank_sends_nothing_and_rounds_nothing(group: Group) -> None:
    handles: list[Any] = []
    found = [several_groups(group, lambda model: None)]
    for weights in ("none", "exact"):
        found.append(several_groups(group, lambda m, w=weights: handles.append(compress_fsdp(m, "int8", w))))
    told = [handle.stats() for handle in handles]
    assert len({digest(*tensors) for tensors in found}) == 1
    assert sum(s.bytes_sent + s.replica_bytes for s in told) == 0


# --- handles ----------------------------------------------------------------------------------------------------------


@on_ranks(3, rare=[2])
def test_a_closed_handle_leaves_plain_fsdp_and_another_may_follow(group: Group) -> None:
    """Two steps as they are, two compressed and rolled back, then two as they are, and two compressed again."""
    found = []
    for compressed in (False, True):
        model = shard(Net(), line(group))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, group, range(2), optimizer=optimizer)
        if compressed:
            kept = shards(model)
            handle = compress_fsdp(model, "int8", "int8", replica=True, feedback="classic", exempt="none")
            train(model, group, range(20, 22), optimizer=optimizer)
            assert repr(handle).startswith("FSDPState(codec='int8, weights int8', feedback='classic', steps=2")
            held = handle.stats()
            handle.close()
            handle.close()
            left = handle.stats()
            assert repr(handle).endswith(", closed)")
            assert min(held.residual_bytes, held.replica_bytes) > 0 == left.residual_bytes == left.replica_bytes
            for p, local in zip(model.parameters(), kept, strict=True):
                p.to_local().data.copy_(local)
        found.append(digest(*train(model, group, range(2, 4), optimizer=optimizer)))
    again = compress_fsdp(model, "int8")
    train(model, group, range(4, 6), optimizer=optimizer)
    assert found[0] == found[1]
    assert "steps=2" in repr(again)
    assert "closed" not in repr(again)


@on_ranks(2)
def test_rules_know_parameters_by_the_names_of_the_plain_network(group: Group) -> None:
    """What an exemption by name hears of, of gradients and of weights."""
    plain = {f"{name} {tuple(p.shape)}" for name, p in Net().named_parameters()}
    tied_too = {f"{name} {tuple(p.shape)}" for name, p in Net(7, 7).named_parameters() if "down.w" not in name}
    for run, want in ((recomputed_in_wrappers, plain), (compiled, plain), (tied, tied_too)):
        heard: set[str] = set()

        def exempt(name: str, shape: torch.Size) -> bool:
            heard.add(f"{name} {tuple(shape)}")  # noqa: B023
            return False

        run(group, lambda model: compress_fsdp(model, "int8", "int8", exempt=exempt))
        assert heard == want


@on_ranks(2)
def test_steps_are_reductions(group: Group) -> None:
    """Steps are told by gradients that are reduced anew, however many groups there are and passes in between."""
    for run, steps in ((accumulated, STEPS), (added_twice, 2 * STEPS), (several_groups, LONG)):
        handles: list[Any] = []
        run(group, lambda model: handles.append(compress_fsdp(model, "int8")))  # noqa: B023
        assert handles[0].stats().steps == steps


def logged_steps(group: Group, run: Callable[[Group, Compress], object] = several_groups) -> list[int]:
    rows: list[dict[str, Any]] = []
    run(group, lambda model: compress_fsdp(model, "int8").log_to(rows.append, every=2))
    return [row["steps"] for row in rows]


def test_logs_tell_the_steps_that_are_done(ranks: RankPool) -> None:
    done = list(range(2, LONG, 2))
    assert ranks(1).run(logged_steps) == [done]
    assert ranks(2).run(logged_steps) == [done, []]
    assert ranks(4).run(logged_steps, replicated_in_sums) == [done, [], [], []]  # two are the first among replicas


@on_ranks(4)
def test_steps_with_replicas_are_sums_over_them(group: Group) -> None:
    """Every third pass is one, and every second of these is measured."""
    handles: list[Any] = []

    def compress(model: nn.Module, **options: Any) -> None:
        handles.append(compress_fsdp(model, "int8", measure_every=2, **options))

    replicas_later(group, compress)
    assert handles[0].step == STEPS
    assert handles[0].stats().relative_error is not None


@on_ranks(4)
def test_groups_with_other_replicas_are_averaged_over_their_own(group: Group) -> None:
    """A block has four replicas of one shard, the rest two of two."""
    found = []
    meshes = [mesh_of(4, 1), mesh_of(2, 2)]
    for compressed in (False, True):
        model = Net()
        fully_shard(model.blocks[0], mesh=meshes[0])
        fully_shard(model, mesh=meshes[1])
        if compressed:
            compress_fsdp(model, "none", inside="none")
        found.append(train(model, group))
    torch.testing.assert_close(*found)


# --- misuse -----------------------------------------------------------------------------------------------------------


class _OwnScatter(ReduceScatter):
    allocate = DefaultReduceScatter.allocate
    __call__ = DefaultReduceScatter.__call__


class _OwnGather(AllGather):
    allocate = DefaultAllGather.allocate
    __call__ = DefaultAllGather.__call__


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"inside": "int8"}, "inside='int8' requires replicas of shards"),
    ({"replica": True}, "replica=True keeps copies to send weights as differences"),
    ({"weights": "int4", "replica": "no"}, "replica must be True, False or None, got 'no'"),
    *(({name: "int99"}, "int99") for name in ("gradients", "weights", "inside")),
    ({"feedback": "ef20"}, "feedback must be one of auto, none, classic, ef21, got 'ef20'"),
]


@on_ranks(2)
def test_misuse_is_refused_and_changes_nothing(group: Group) -> None:
    mesh = line(group)
    model, own, gathers = (shard(Net(), mesh) for _ in range(3))
    own.blocks[1].set_custom_reduce_scatter(_OwnScatter())
    gathers.set_custom_all_gather(_OwnGather())

    def check(model: Any, options: dict[str, Any], words: str) -> None:
        assert words in message_of(lambda: compress_fsdp(model, **options)), options

    check(3, {}, "expected a model that fully_shard was called on, got int")
    check(own, {}, "blocks.1 has a communication of its own, _OwnScatter")
    check(gathers, {"weights": "int8"}, "the root has a communication of its own, _OwnGather")
    for options, words in REFUSED:
        check(model, options, words)
    compress_fsdp(model)  # nothing of all that was left in it
    check(model, {}, "this model is already compressed: close() the handle")
    train(model, group, range(2))
    compress_fsdp(own.blocks[0])  # nor here
    compress_fsdp(gathers)  # weights are gathered as before
    train(gathers, group, range(2))
    late = Net()
    fully_shard(late.blocks[0], mesh=mesh)
    compress_fsdp(late)
    fully_shard(late, mesh=mesh)  # the root's gradients would travel uncompressed
    assert "fully_shard was called on the root after it" in message_of(lambda: train(late, group, range(1)))


@on_ranks(2)
def test_weights_of_few_bits_without_a_copy_warn(group: Group) -> None:
    mesh = line(group)
    for kept, options, warns, copies in (
        (True, {"weights": "int4"}, True, False),
        (True, {"weights": "int8"}, False, False),
        (True, {"weights": "int4", "replica": True}, False, True),
        (False, {"weights": "int4"}, False, True),  # they are kept anyway
        (False, {"weights": "int4", "replica": False}, True, False),
    ):
        model = shard(Net(), mesh, reshard_after_forward=kept)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle = compress_fsdp(model, "none", **options)
        train(model, group, range(1))
        said = [str(one.message) for one in caught]
        assert (len(said), handle.stats().replica_bytes > 0) == (warns, copies), options
        assert all("weights='int4" in text and "replica=True" in text for text in said)


@pytest.mark.parametrize(("world", "replicas"), [(2, False), (4, True)])
@on_ranks()
def test_what_travels_as_it_is_is_announced_once(group: Group, replicas: bool) -> None:
    """The first rank says where numbers travel as they are; gradients are then those of plain FSDP2."""
    said = []
    mesh = mesh_of(2, 2) if replicas else line(group)
    for kind in ("weights", "gradients"):
        plain, mixed = (shard(_typed(kind), mesh) for _ in range(2))
        handle = compress_fsdp(mixed, "int8", "int8" if replicas or kind == "weights" else "none")
        out = io.StringIO()
        with contextlib.redirect_stderr(out):
            found = train(mixed, group, range(3))
        said.append(out.getvalue())
        assert kind == "weights" or handle.stats().bytes_sent == handle.stats().bytes_plain > 0
        wanted = train(plain, group, range(3))
        assert (digest(*found) == digest(*wanted)) == (kind == "gradients")
    line_of = "weights of fp64, of several dtypes or of integers are not compressed"
    assert said[0] == ("" if group.rank() else f"thinwire: compress_fsdp: {line_of}\n")
    assert said[1].count("compress_fsdp: gradients of torch.float64 are not compressed\n") == (group.rank() == 0)


def _typed(kind: str) -> Net:
    """A frozen bf16 weight among those of fp32, or all in fp64."""
    net = Net()
    if kind == "gradients":
        return net.double()
    net.spare = nn.Parameter(net.spare.detach().bfloat16(), requires_grad=False)
    return net
