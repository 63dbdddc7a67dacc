"""compress() for Accelerate, with the real package: bits, bounds and bytes, checkpoints, FSDP2, and what is refused."""

import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import huggingface as hf
import thinwire
from cases import heard, on_ranks, seeded, thorough
from ranks import RankPool
from replicas import Group, flat, gradients_saved, message_of, network, same_everywhere

if importlib.util.find_spec("accelerate") is None:
    pytest.skip("Accelerate is not installed: pip install 'thinwire[accelerate]'", allow_module_level=True)

RANKS_IMPORT = ("accelerate",)
RATE = 0.1
Options = Mapping[str, Any]


class Net(nn.Module):
    """A network with a forward of its own: torch.compile captures nothing of a DDP model around an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def loader() -> "DataLoader[tuple[Tensor, ...]]":
    """Twelve batches for two ranks, which Accelerate deals out."""
    x = torch.randn(24 * 8, 20, generator=seeded(1))
    return DataLoader(TensorDataset(x, x @ torch.linspace(-1, 1, 20)[:, None]), batch_size=8)


class Run(NamedTuple):
    """A training with Accelerate, and what is done to it."""

    options: Options | None = None  # of compress; None trains without it
    accelerator: Mapping[str, Any] = {}
    optimizer: str = "adamw"
    steps: int = 4
    save: tuple[str, int] = ("", 0)  # where, and after how many steps
    resume: tuple[str, int] = ("", 0)  # from where, and how many steps that has had
    sharded: bool = False
    watched: bool = False  # whether the ranks' own gradients are looked at


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, RATE),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 3e-3),
}


def accelerated(run: Run) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    if not run.sharded:
        return Accelerator(cpu=True, **run.accelerator)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **run.accelerator)
    hf.shard_on_cpu(accelerator, plugin)
    return accelerator


def train(group: Group, run: Run, local_rank: int | None = None) -> hf.Found:
    """Train as Accelerate's users do."""
    from thinwire.integrations.accelerate import compress

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with hf.launched(group, local_rank=local_rank):
        accelerator, net = accelerated(run), Net()
        peaks = hf.watch_gradients(net) if run.watched else {}
        model, optimizer, batches = accelerator.prepare(net, OPTIMIZERS[run.optimizer](net.parameters()), loader())
        handle = None if run.options is None else compress(accelerator, model, **run.options)
        if run.resume[0]:
            accelerator.load_state(run.resume[0])
            batches = accelerator.skip_first_batches(batches, run.resume[1] * accelerator.gradient_accumulation_steps)
        step = run.resume[1]
        for x, y in batches:
            if step == run.steps:
                break
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                if accelerator.sync_gradients and run.optimizer != "sgd":
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if accelerator.sync_gradients and run.save == (run.save[0], step):
                accelerator.save_state(run.save[0])
        weights = [p.detach().full_tensor() if run.sharded else p.detach() for p in model.parameters()]
        assert same_everywhere(group, *weights)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        owed = torch.zeros(0) if handle is None else hf.remembered(handle)
        stats = None if handle is None else handle.stats()
        return hf.Found([w.clone() for w in weights], hf.largest(group, peaks), stats, owed, graphs)


WAYS: dict[str, Options] = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "accumulated in bf16": {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"},
    "compiled": {"dynamo_backend": "eager"},
}


@pytest.mark.parametrize(("way", "world"), [("accumulated", 2), ("compiled", 2), *thorough(("accumulated in bf16", 2))])
@on_ranks()
def test_a_prepared_model_is_compressed(group: Group, way: str) -> None:
    """Four steps of AdamW, and one of SGD: without thinwire, and with what rounds nothing or int8."""
    accelerator = WAYS[way]
    runs = [
        Run(None, accelerator),
        Run({"codec": "none"}, accelerator),
        Run(None, {**accelerator, "dynamo_backend": "no"}, optimizer="sgd", steps=1, watched=True),
        Run({}, accelerator, optimizer="sgd", steps=1),
    ]
    plain, none, exact, int8 = (train(group, run) for run in runs)
    hf.assert_compressed(plain, none, exact, int8, rate=RATE, share=0.31)
    assert (int8.graphs > 0) == (way == "compiled")


REMEMBERED: dict[str, Run] = {
    "accumulated": Run({"codec": "lloyd2", "feedback": "ef21"}, {"gradient_accumulation_steps": 2}),
    "sharded": Run({"codec": "lloyd2", "feedback": "ef21", "weights": "lloyd4", "replica": True}, sharded=True),
}


CLASSIC = Run({"codec": "lloyd2"}, optimizer="sgd")


def whole_and_resumed(group: Group, run: Run, folder: str) -> tuple[hf.Found, hf.Found]:
    """Six steps, saved after three; and the last three again, from what was saved."""
    kept = f"{folder}/checkpoint"
    whole = train(group, run._replace(steps=6, save=(kept, 3)))
    return whole, train(group, run._replace(steps=6, resume=(kept, 3)))


@pytest.mark.parametrize("kind", REMEMBERED)
def test_load_state_goes_on_with_the_same_bits(ranks: RankPool, kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        answers = ranks(2).run(whole_and_resumed, REMEMBERED[kind], folder)
        assert (Path(folder) / "checkpoint" / "custom_checkpoint_0.pkl").is_file()
    for whole, resumed in answers:
        assert all(torch.equal(mine, other) for mine, other in zip(resumed.weights, whole.weights, strict=True))
        assert torch.equal(resumed.owed, whole.owed)
        assert whole.owed.abs().max() > 1e-3
        assert whole.stats.bytes_sent < 0.3 * whole.stats.bytes_plain
    assert not torch.equal(answers[0][0].owed, answers[1][0].owed)


def test_load_state_goes_on_with_fewer_ranks(ranks: RankPool) -> None:
    """What all ranks together remember stays."""
    run = CLASSIC._replace(steps=3)
    with tempfile.TemporaryDirectory() as folder:
        saved = ranks(3).run(train, run._replace(save=(folder, 3)))
        loaded = ranks(2).run(train, run._replace(resume=(folder, 3)))
        later = ranks(2).run(train, run._replace(resume=(folder, 3), steps=4))
    before, after = (torch.stack([found.owed for found in answers]).sum(0) for answers in (saved, loaded))
    assert before.abs().max() > 1e-3
    assert torch.allclose(after, before, rtol=0, atol=4 * torch.finfo(torch.float32).eps * float(before.abs().max()))
    assert [found.stats.steps for found in later] == [4, 4]


@on_ranks(2)
def test_nodes_without_a_common_disk_are_resumed(group: Group, tmp_path: Path) -> None:
    """Each rank is a node of its own, and saves in a folder that the other does not see."""
    from accelerate.utils import ProjectConfiguration

    alone = CLASSIC._replace(accelerator={"project_config": ProjectConfiguration(save_on_each_node=True)}, steps=6)
    kept = str(tmp_path / str(group.rank()))
    whole = train(group, alone._replace(save=(kept, 3)), 0)
    resumed = train(group, alone._replace(resume=(kept, 3)), 0)
    assert all(torch.equal(mine, other) for mine, other in zip(resumed.weights, whole.weights, strict=True))


@pytest.mark.parametrize("way", ["accumulated", *thorough("compiled")])
@on_ranks(2)
def test_a_model_of_the_fsdp_plugin_is_compressed(group: Group, way: str) -> None:
    """FSDP2 without thinwire, and with it; one step of SGD, in DDP and in FSDP2."""
    accelerator = WAYS[way]
    step = Run(None, {**accelerator, "dynamo_backend": "no"}, optimizer="sgd", steps=1)
    runs = [
        Run(None, accelerator, sharded=True),
        Run({"codec": "none"}, accelerator, sharded=True),
        Run({"weights": "int8"}, accelerator, sharded=True),
        step._replace(watched=True),
        step._replace(options={}, sharded=True),
    ]
    plain, none, rounded, exact, int8 = (train(group, run) for run in runs)
    assert all(torch.equal(mine, other) for mine, other in zip(none.weights, plain.weights, strict=True))
    assert rounded.stats.codec == "int8, weights int8"
    hf.assert_within_int8(int8.weights, exact.weights, exact.peak, RATE)
    assert rounded.stats.bytes_sent < 0.31 * rounded.stats.bytes_plain
    assert gradients_saved(int8.stats, flat(int8.weights).numel()) > 0.69
    assert (rounded.graphs > 0) == (way == "compiled")


@on_ranks(2)
def test_accelerate_leaves_the_fsdp_plugin_unused_on_a_cpu(group: Group) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from thinwire.integrations.accelerate import compress

    with hf.launched(group):
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        model = accelerator.prepare(Net())
        assert type(model).__name__ == "DistributedDataParallel"
        told = message_of(lambda: compress(accelerator, model, weights="int8"))
    assert "weights=" in told
    assert "on GPUs only" in told


@on_ranks(1, gives=["only one process is training: there is nothing to compress"])
def test_one_process_trains_and_is_told(group: Group) -> list[str]:
    from accelerate import Accelerator

    from thinwire.integrations.accelerate import compress

    with hf.launched(None), heard() as lines, tempfile.TemporaryDirectory() as folder:
        accelerator, net = Accelerator(cpu=True), Net()
        model, optimizer, batches = accelerator.prepare(net, OPTIMIZERS["sgd"](net.parameters()), loader())
        handle = compress(accelerator, model, "lloyd2", optimizer=optimizer, weights="int8")
        for x, y in batches:
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
        accelerator.save_state(f"{folder}/kept")
        accelerator.load_state(f"{folder}/kept")
    assert (handle.stats().bytes_sent, handle.state_dict()) == (0, {})
    return lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="Accelerate takes the GPUs")
@on_ranks(2)
def test_processes_that_train_alone_are_told(group: Group) -> None:
    """torchrun without GPUs, and without cpu=True: Accelerate sees one process."""
    from accelerate import Accelerator

    from thinwire.integrations.accelerate import compress

    with hf.launched(group):
        accelerator = Accelerator()
        with pytest.warns(UserWarning, match="cpu=True") as told:
            compress(accelerator, accelerator.prepare(Net()))
        assert told[0].filename == __file__
        assert "2 processes were launched" in str(told[0].message)


def test_a_world_of_one_rank_trains(ranks: RankPool) -> None:
    """Under torchrun Accelerate wraps one rank in DDP, too."""
    (found,) = ranks(1).run(train, Run({"codec": "lloyd2"}))
    assert (found.stats.steps, found.stats.bytes_sent) == (4, 0)


@on_ranks(2)
def test_misuse_is_refused_by_name(group: Group) -> None:
    from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs

    from thinwire.integrations.accelerate import compress

    found = {}
    with hf.launched(group):
        accelerator, bare = Accelerator(cpu=True), Net()
        model = accelerator.prepare(bare)
        found["bare"] = message_of(lambda: compress(accelerator, bare))
        found["swapped"] = message_of(lambda: compress(model, accelerator))  # type: ignore[arg-type]
        found["no model"] = message_of(lambda: compress(accelerator, None))  # type: ignore[arg-type]
        found["codec"] = message_of(lambda: compress(accelerator, model, "int99"))
        found["weights"] = message_of(lambda: compress(accelerator, model, weights="int8", replica=True))
        found["option"] = message_of(lambda: compress(accelerator, model, color="red"))  # type: ignore[call-arg]
    with hf.launched(group):
        hooked = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[hooked])
        model = accelerator.prepare(Net())
        found["fp16"] = message_of(lambda: compress(accelerator, model))
    with hf.launched(group):
        accelerator, net = accelerated(Run(sharded=True)), Net()
        model, _ = accelerator.prepare(net, OPTIMIZERS["sgd"](net.parameters()))
        found["algorithm"] = message_of(lambda: compress(accelerator, model, algorithm="two_phase"))
        accelerator.state.fsdp_plugin = None
    words = {"bare": "accelerator.prepare", "swapped": "compress(accelerator, model", "no model": "NoneType"}
    words |= {"codec": "int99", "weights": "weights= and replica=", "option": "has no option 'color'", "fp16": "fp16"}
    words["algorithm"] = "algorithm="
    assert {name: found[name] for name, word in words.items() if word not in found[name]} == {}


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"thinwire.integrations.{name}", raising=False)
    with pytest.raises(thinwire.MissingPackageError, match=rf"pip install 'thinwire\[{name}\]'"):
        importlib.import_module(f"thinwire.integrations.{name}")
