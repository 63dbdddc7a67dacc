"""Weight sync: every version bit for bit on the worker, or the model as it was and an error that says why."""

import copy
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import cases
from replicas import mesh_of
from thinwire import CollectiveError, WeightPublisher, WeightSubscriber, WireError
from thinwire.integrations import weights

pytestmark = pytest.mark.usefixtures("served")


class Net(nn.Module):
    """Tied, transposed and frozen weights, and buffers of several kinds."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.body = nn.Sequential(nn.Linear(width, 3 * width), nn.BatchNorm1d(3 * width), nn.Linear(3 * width, width))
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = nn.Parameter(torch.randn(width, 7).t())
        self.register_buffer("passed", torch.tensor(0.0), persistent=False)


def net(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net().to(dtype)


def train(model: nn.Module, rate: float = 1e-3, seed: int = 0) -> None:
    generator = cases.seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rate * torch.randn(parameter.shape, generator=generator).to(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("num_batches_tracked"):
                buffer += 1


def assert_same(got: nn.Module, want: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    for (name, a), b in zip(got.state_dict().items(), want.state_dict().values(), strict=True):
        b = b.to(dtype).to(a.dtype) if b.is_floating_point() else b
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("numel", [1 << 25, 200])
def test_versions_follow_the_trainer(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SEGMENT_NUMEL", numel)  # one segment of a dtype, or several
    trainer, worker = net(), net(1)
    publisher, subscriber = WeightPublisher(trainer), WeightSubscriber(worker)
    assert (publisher.version, subscriber.version) == (0, 0)
    sizes = []
    for version in range(1, 5):
        update = publisher.publish()
        assert subscriber.apply(update) == publisher.version == subscriber.version == version
        assert_same(worker, trainer)
        sizes.append(len(update))
        train(trainer, seed=version)
    assert max(sizes[1:]) < sizes[0] / (2 if numel > 200 else 1)
    publisher.publish()
    train(trainer, rate=0)  # nothing but the counters of batches
    assert len(publisher.publish()) < 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_worker_with_another_dtype(dtype: torch.dtype) -> None:
    """The differences are of what was published, whatever the worker makes of it."""
    trainer, worker = net(dtype=torch.float32), net(1)
    publisher, subscriber = WeightPublisher(trainer, dtype=torch.bfloat16), WeightSubscriber(worker)
    for seed in range(3):
        worker.to(dtype)  # it has other tensors from then on, as after .to("cuda")
        subscriber.apply(publisher.publish())
        assert_same(worker, trainer)
        train(trainer, 1e-4, seed)


def test_a_worker_with_some_of_the_names() -> None:
    trainer = net()
    before = net(1)
    worker = copy.deepcopy(before)
    names = ["body.0.weight", "head.weight", "turned"]
    publisher, subscriber = WeightPublisher(trainer), WeightSubscriber(worker, names=iter(names))
    few = {"turned": torch.zeros(7, 24)}
    also = WeightSubscriber(few)
    for _ in range(2):
        update = publisher.publish()
        subscriber.apply(update)
        also.apply(update)
        for name, value in worker.state_dict().items():
            is_followed = name in (*names, "embedding.weight")  # which is tied
            assert torch.equal(value, (trainer if is_followed else before).state_dict()[name]), name
        assert torch.equal(few["turned"], trainer.turned.float())
        train(trainer)


def test_an_untied_worker_gets_tied_weights_twice() -> None:
    trainer, worker = net(), net(1)
    worker.head.weight = nn.Parameter(torch.zeros(50, 24, dtype=torch.bfloat16))
    publisher, subscriber = WeightPublisher(trainer), WeightSubscriber(worker)
    plain = sum(t.nbytes for t in {t.data_ptr(): t for t in trainer.state_dict().values()}.values())
    update = publisher.publish()
    assert len(update) < plain + 2000  # once on the wire
    subscriber.apply(update)
    assert_same(worker, trainer)


def test_publishers_of_some_names_and_other_models() -> None:
    trainer = net()
    named = nn.ModuleDict({"_orig_mod": trainer})  # as by torch.compile
    update = WeightPublisher(named, names=["turned"]).publish()
    with torch.inference_mode():
        found = {"turned": torch.empty(7, 24)}
    WeightSubscriber(found).apply(update)
    assert torch.equal(found["turned"], trainer.turned.float())
    learned = {"turned": nn.Parameter(torch.empty(7, 24))}
    WeightSubscriber(learned).apply(update)
    assert torch.equal(learned["turned"], trainer.turned.float())
    with pytest.raises(CollectiveError, match="the model has no nothing: check names="):
        WeightPublisher(trainer, names=["nothing"]).publish()
    with pytest.raises(CollectiveError, match="the model has no nothing: check names="):
        WeightSubscriber(trainer, names=["nothing"])
    with pytest.raises(CollectiveError, match="turned is expanded"):
        WeightSubscriber({"turned": torch.zeros(1).expand(7, 24)})
    with pytest.raises(CollectiveError, match="turned is on the meta device"):
        WeightSubscriber(net().to("meta"), names=["turned"])
    with pytest.raises(CollectiveError, match="expected an update as bytes, a path, or a list of these, got Tensor"):
        WeightSubscriber(found).apply(torch.zeros(3, dtype=torch.uint8))  # type: ignore[arg-type]
    with pytest.raises(CollectiveError, match="0 or more, got -1"):
        WeightPublisher(trainer, history=-1)
    with pytest.raises(CollectiveError, match=r"dtype=torch\.int8"):
        WeightPublisher(trainer, dtype=torch.int8)
    with pytest.raises(CollectiveError, match="got list"):
        WeightPublisher([trainer]).publish()  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_copies_are_refused_by_name(dtype: torch.dtype) -> None:
    worker = {"turned": torch.zeros(7, 24).to(dtype)}
    with pytest.raises((CollectiveError, WireError), match=r"turned is .*(quantized|published as)"):
        WeightSubscriber(worker).apply(WeightPublisher(net()).publish())


def test_what_was_missed_comes_later() -> None:
    trainer = net()
    publisher = WeightPublisher(trainer, history=2)
    with pytest.raises(CollectiveError, match="nothing was published"):
        publisher.snapshot()
    workers = [WeightSubscriber(net(seed)) for seed in range(1, 4)]
    first = publisher.publish()
    for worker in workers[:2]:
        worker.apply(first)
    assert workers[0].apply(publisher.since(1)) == 1  # nothing
    updates = []
    for seed in range(2):
        train(trainer, 1e-5, seed)
        updates.append(publisher.publish())
    assert publisher.since(1) == b"".join(updates)
    workers[0].apply(publisher.since(1))
    assert len(publisher.since(2)) < len(first) / 4
    train(trainer)
    publisher.publish()
    assert publisher.since(1) == publisher.since(0) == publisher.since(9) == publisher.snapshot()
    workers[2].apply([updates[1], first, updates[0]])  # a bundle is put in order
    assert workers[2].version == 3
    for worker in workers:  # one after one, one after two, one after none
        worker.apply(publisher.since(worker.version))
        assert worker.version == 4
        assert all(
            torch.equal(a, b) for a, b in zip(worker._targets.values(), trainer.state_dict().values(), strict=True)
        )


def test_another_shape_begins_anew() -> None:
    trainer = {"w": torch.ones(5), "n": torch.arange(3)}
    publisher = WeightPublisher(trainer)
    subscriber = WeightSubscriber(copy.deepcopy(trainer))
    subscriber.apply(publisher.publish())
    trainer["w"] = torch.ones(6)
    with pytest.raises(WireError, match=r"w is published with shape \(6,\), the model has \(5,\)"):
        subscriber.apply(publisher.publish())
    assert subscriber.version == 1
    assert publisher.since(1) == publisher.snapshot()  # no update leads from the old shape to the new one


def test_a_snapshot_replaces_updates_that_are_longer() -> None:
    trainer = {"w": torch.randn(5000)}
    publisher = WeightPublisher(trainer)
    publisher.publish()
    for _ in range(2):
        trainer["w"] = torch.randn(5000)
        publisher.publish()
    assert publisher.since(1) == publisher.snapshot()
    trainer["w"] = trainer["w"] * (1 + 1e-6)
    assert publisher.publish() == publisher.since(3) != publisher.snapshot()


def refused(subscriber: WeightSubscriber, update: object, says: str) -> None:
    version = subscriber.version
    before = {name: value.clone() for name, value in subscriber._targets.items()}
    with pytest.raises(WireError, match=says):
        subscriber.apply(update)  # type: ignore[arg-type]
    assert subscriber.version == version
    assert all(torch.equal(before[name], value) for name, value in subscriber._targets.items())


def test_wrong_updates_are_refused() -> None:
    trainer = net()
    publisher, subscriber = WeightPublisher(trainer), WeightSubscriber(net(1))
    updates = [publisher.publish()]
    for seed in range(3):
        train(trainer, seed=seed)
        updates.append(publisher.publish())
    refused(subscriber, updates[1], "another publisher")
    subscriber.apply(updates[:2])
    refused(subscriber, updates[3], r"from version 3 to 4, the subscriber has 2: apply publisher.since\(2\)")
    refused(subscriber, updates[1], "from version 1 to 2, the subscriber has 2")
    refused(subscriber, updates[0], "it is old")
    refused(subscriber, [updates[2], updates[2][:-1]], "cut short or damaged")
    refused(subscriber, b"TWU1", "cut short")
    other = WeightPublisher(trainer)
    other.publish()
    train(trainer)
    refused(subscriber, other.publish(), "another publisher, or a restarted one")
    assert subscriber.apply(other.snapshot()) == 2
    refused(subscriber, updates[2], "another publisher")
    missing = WeightSubscriber({"turned": torch.zeros(7, 24), "extra": torch.zeros(1)})
    refused(missing, other.snapshot(), "extra of the model are not published")


FORGED: dict[str, Callable[[bytearray], object]] = {  # of an update's header, body and checksum, the last made anew
    "do not have the sum": lambda message: message.__setitem__(60, message[60] ^ 1),
    "other names, shapes or dtypes": lambda message: message.__setitem__(36, message[36] ^ 1),
    "does not end with its last segment": lambda message: message.__setitem__(slice(-4, -4), bytes(3)),
}


@pytest.mark.parametrize("says", FORGED)
def test_updates_with_a_right_checksum_are_checked_too(says: str) -> None:
    trainer = {"w": torch.randn(64)}
    publisher, subscriber = WeightPublisher(trainer), WeightSubscriber({"w": torch.zeros(64)})
    subscriber.apply(publisher.publish())
    trainer["w"] = trainer["w"] + 1
    message = bytearray(publisher.publish())
    FORGED[says](message)
    message[44:52] = struct.pack("<Q", len(message) - 56)
    message[-4:] = struct.pack("<I", zlib.crc32(message[:-4]))
    refused(subscriber, bytes(message), says)


@cases.generated(150)
@given(data=st.data())
def test_damaged_updates_change_nothing(data: st.DataObject) -> None:
    """Also where the checksum is right: whoever writes it may err."""
    trainer = {"w": torch.linspace(-1, 1, 5000).bfloat16(), "n": torch.arange(3)}
    worker = {"w": torch.zeros(5000, dtype=torch.bfloat16), "n": torch.zeros(3, dtype=torch.int64)}
    publisher, subscriber = WeightPublisher(trainer), WeightSubscriber(worker)
    snapshot = publisher.publish()
    trainer["w"] += 0.001
    message = bytearray(publisher.publish() if data.draw(st.booleans()) else snapshot)
    if message != snapshot:
        subscriber.apply(snapshot)
    before = {name: value.clone() for name, value in worker.items()}
    at = data.draw(st.integers(0, len(message) - 1))
    message[at] ^= data.draw(st.integers(1, 255))
    is_signed = data.draw(st.booleans()) and 24 < at < len(message) - 4
    if is_signed:
        message[-4:] = struct.pack("<I", zlib.crc32(message[:-4]))
    try:
        subscriber.apply(bytes(message))
        assert is_signed
    except WireError:
        assert all(torch.equal(before[name], value) for name, value in worker.items())


def test_files_are_there_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = net()
    publisher, subscriber = WeightPublisher(trainer), WeightSubscriber(net(1))
    path = tmp_path / "weights"
    assert publisher.publish(to=path) == path.read_bytes()
    subscriber.apply(path)
    train(trainer)

    def fails(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="no space"):
            publisher.publish(to=path)
    assert [one.name for one in tmp_path.iterdir()] == ["weights"]
    subscriber.apply(publisher.since(subscriber.version))
    assert subscriber.version == publisher.version == 2


# --- groups -----------------------------------------------------------------------------------------------------------


@cases.on_ranks(2, 3)
def test_a_group_of_workers(group: dist.ProcessGroup) -> str:
    """Rank 0 trains, a DDP model as it is; the others follow."""
    model = net(dist.get_rank(group))
    if dist.get_rank(group) == 0:
        alone = dist.new_group([0])
        trainer = DistributedDataParallel(model, process_group=alone)
        publisher = WeightPublisher(trainer)
    else:
        dist.new_group([0])
        subscriber = WeightSubscriber(model)
    for seed in range(3):
        if dist.get_rank(group) == 0:
            publisher.publish(group=group)
            if seed < 2:
                train(trainer, seed=seed)
        else:
            assert subscriber.receive(group) == seed + 1
    return cases.digest(*model.state_dict().values())


class Blocks(nn.Module):
    """For FSDP2: rows that no world divides, fewer rows than ranks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(15, 17)
        self.second = nn.Linear(17, 2)
        self.register_buffer("count", torch.zeros(3))


def shard(model: nn.Module, mesh_shape: tuple[int, ...], columns: bool) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if columns and parameter.shape[-1] == 15 else None  # torch divides columns evenly only

    return fully_shard(model, mesh=mesh_of(*mesh_shape), shard_placement_fn=place)


@pytest.mark.parametrize(("world", "mesh_shape", "columns"), [(2, (2,), False), (3, (3,), True), (4, (2, 2), False)])
@cases.on_ranks()
def test_shards_are_published_where_they_are(
    group: dist.ProcessGroup, mesh_shape: tuple[int, ...], columns: bool, tmp_path: Path
) -> None:
    """No rank sends more than its shards, and none gathers the model."""
    torch.manual_seed(0)
    model = Blocks()
    whole = copy.deepcopy(model)
    worker = copy.deepcopy(model).bfloat16()
    trainer = shard(model, mesh_shape, columns)
    mesh = trainer.first.weight.device_mesh
    trainer.count = distribute_tensor(trainer.count, mesh, [Replicate()] * mesh.ndim)  # as tensor parallelism has norms
    publisher = WeightPublisher(trainer, dtype=torch.bfloat16)
    subscriber = WeightSubscriber(worker)
    sizes = []
    for seed in range(3):
        file = tmp_path / f"of rank {group.rank()}"
        update = publisher.publish(group=group, to=file)
        written = [one for part in range(mesh_shape[-1]) if (one := Path(f"{file}.{part}")).exists()]
        assert [one.read_bytes() for one in written] == [update] * publisher._part.is_sent  # of one replica alone
        sizes.append(len(update))
        parts: list[object] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, update)
        shards = mesh_shape[-1]
        subscriber.apply(parts[:shards])
        assert subscriber.version == seed + 1
        assert_same(worker, whole)
        with torch.no_grad():
            for (name, p), full in zip(trainer.named_parameters(), whole.parameters(), strict=True):
                step = 1e-3 * torch.randn(full.shape, generator=cases.seeded(seed, len(name)))
                full += step
                p += distribute_tensor(step, p.device_mesh, p.placements)
    if shards > 1:
        with pytest.raises(WireError, match=rf"has {shards} parts, got 0: pass the parts of all ranks"):
            subscriber.apply(publisher.snapshot() if publisher._part.number == 0 else parts[0])
    assert sizes[0] < 2 * sum(p.numel() for p in Blocks().parameters()) / mesh_shape[-1] + 1500


@cases.on_ranks(2)
def test_sharded_workers_are_refused(group: dist.ProcessGroup) -> None:
    model = shard(Blocks(), (2,), False)
    weight = model.first.weight
    state = {"weight": weight, "odd": DTensor.from_local(torch.ones(3), weight.device_mesh, [Partial()])}
    WeightPublisher(state, names=["weight"]).publish()
    with pytest.raises(CollectiveError, match="odd has placements"):
        WeightPublisher(state).publish()
    with pytest.raises(CollectiveError, match=r"^first\.weight is sharded, and a worker needs whole tensors"):
        WeightSubscriber(model)
