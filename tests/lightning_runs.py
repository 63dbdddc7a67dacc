"""What ranks do in tests/test_lightning.py. Only they import it: importing Lightning takes seconds."""

import contextlib
import faulthandler
import functools
import importlib
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy as FabricParallel
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import thinwire
from cases import heard
from replicas import OPTIMIZERS, batch, flat, message_of, network
from test_lightning import BATCHES, Fitted, Options, Way
from thinwire import Stats
from thinwire.integrations.lightning import Compress

# Lightning's own warnings, and torch's of a CPU without bfloat16.
ITS_OWN = (
    r".*isinstance\(treespec, LeafSpec\).* is deprecated",
    "The '.*_dataloader' does not have many workers",
    "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",
    "You're resuming from a checkpoint that ended before the epoch ended",
    "mkldnn_matmul failed, switching to BLAS",
)
logging.getLogger("lightning").setLevel(logging.ERROR)
Group = dist.ProcessGroup


class _Net:
    """A network that learns.

    sharded: by FSDP2, not in DDP; `split` by tensor parallelism, too. One that `forgets` is neither.
    manual: it steps its optimizer itself.
    fails_at: the batch at which it raises.
    """

    def __init__(
        self,
        optimizer: str = "sgd",
        *,
        sharded: bool = False,
        manual: bool = False,
        forgets: bool = False,
        split: bool = False,
        fails_at: int | None = None,
    ) -> None:
        super().__init__()
        self.net = network()
        self.automatic_optimization = not manual
        self._optimizer = optimizer
        self._sharded = sharded and not forgets
        self._split = split
        self._fails_at = fails_at
        self.peaks = [0.0 for _ in self.net.parameters()]

    def configure_model(self) -> None:
        if not self._sharded or hasattr(self.net, "unshard"):
            return
        if self._split:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        else:
            shard(self.net, self.device_mesh)

    def on_train_start(self) -> None:
        for i, parameter in enumerate(self.net.parameters()):
            if not isinstance(parameter, DTensor):
                parameter.register_hook(functools.partial(self._look, i))

    def _look(self, i: int, gradient: Tensor) -> None:
        self.peaks[i] += float(gradient.abs().max())

    def training_step(self, pair: list[Tensor], index: int) -> Tensor | None:
        if index == self._fails_at:
            raise RuntimeError("as asked")
        loss = (self.net(pair[0]) - pair[1]).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = OPTIMIZERS[self._optimizer](self.parameters())
        return made


class Net(_Net, pl.LightningModule):
    """The same for the package that Compress is of."""


def play(group: Group, name: str, *args: Any) -> Any:
    """Call a function of this file."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the pool's, which a Trainer takes away when it ends
    with torchrun(group, group.size()), warnings.catch_warnings():
        for message in ITS_OWN:
            warnings.filterwarnings("ignore", message)
        return globals()[name](group, *args)


@contextlib.contextmanager
def torchrun(group: Group, per_node: int) -> Iterator[None]:
    """As if torchrun had started these ranks."""
    node, place = divmod(group.rank(), per_node)
    told = {"RANK": group.rank(), "WORLD_SIZE": group.size(), "LOCAL_RANK": place, "LOCAL_WORLD_SIZE": per_node}
    told |= {"GROUP_RANK": node, "MASTER_ADDR": "localhost", "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "tests"}
    with patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        yield


def examples(world: int) -> DataLoader[Any]:
    """An epoch; Lightning deals its rows out to ranks."""
    pairs = [batch(0, step) for step in range(BATCHES * world)]
    return DataLoader(TensorDataset(*(torch.cat(column) for column in zip(*pairs, strict=True))), batch_size=16)


def trainer(group: Group, way: Way, callbacks: Sequence[Any] = (), package: Any = pl, **options: Any) -> pl.Trainer:
    """A Trainer of the ranks."""
    parallel = {"data_parallel_size": group.size(), "tensor_parallel_size": 1}
    strategies = package.strategies
    if way.module.get("sharded"):
        strategy = strategies.ModelParallelStrategy(**{**parallel, **way.strategy})
    else:
        strategy = strategies.DDPStrategy(**way.strategy)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"strategy": strategy, "devices": group.size(), "max_epochs": 1, **quiet, **way.trainer, **options}
    made: pl.Trainer = package.Trainer(accelerator="cpu", callbacks=[*callbacks], **settings)
    return made


def run(
    group: Group, way: Way, *callbacks: Any, ckpt_path: Path | None = None, **options: Any
) -> tuple[pl.Trainer, Net]:
    """Train a new module."""
    module = Net(**way.module)
    runner = trainer(group, way, callbacks, **options)
    runner.fit(module, examples(group.size()), ckpt_path=ckpt_path)
    return runner, module


def whole(module: nn.Module) -> Tensor:
    """All parameters in a row, those of other ranks too."""
    return flat([p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()])


def fits(group: Group, way: Way, *runs: tuple[Options | None, Options]) -> list[Fitted]:
    """One run after another: with these options of Compress, or without it; and with these of the Trainer."""
    found = []
    for compress, options in runs:
        callbacks = [] if compress is None else [Compress(**compress)]
        _, module = run(group, way, *callbacks, **options)
        stats = callbacks[0].handle.stats() if callbacks else None
        found.append(Fitted(whole(module), max(module.peaks), stats))
    return found


def resume(group: Group, way: Way, compress: Options, folder: Path) -> dict[str, Any]:
    """Three epochs at once; the last of them from a checkpoint saved on the way; what Compress saved in it."""
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    _, module = run(group, way, Compress(**compress), saving, max_epochs=3, enable_checkpointing=True)
    path = folder / "epoch=1.ckpt"
    _, resumed = run(group, way, Compress(**compress), max_epochs=3, ckpt_path=path)
    return {"at once": whole(module), "resumed": whole(resumed), "state": state_in(path)}


def _file(path: Path) -> Path:
    """What holds the states of callbacks: a file beside the shards, where a checkpoint is sharded."""
    return path / "meta.pt" if path.is_dir() else path


def state_in(path: Path) -> dict[str, Any] | None:
    """What Compress saved, plain enough for a loader that trusts nobody."""
    state: dict[str, Any] | None = torch.load(_file(path), weights_only=True)["callbacks"].get("thinwire")
    return state


def save(group: Group, way: Way, compress: Options, path: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Train, and save when `fit` is over. Gives what Compress saved, and what it announced."""
    with heard() as lines:
        runner, _ = run(group, way, Compress(**compress))
        runner.save_checkpoint(path)
    return state_in(path), lines


def owed(group: Group, way: Way, compress: Options, path: Path) -> dict[str, Any]:
    """What all ranks remember once a checkpoint was loaded, before any step; empty on all ranks but the first."""
    callback = Compress(**compress)
    run(group, way, callback, ckpt_path=path)
    return callback.handle.state_dict(gather=True)


def fail(group: Group, compress: Options, folder: Path) -> tuple[str, list[str], dict[str, Any] | None, Tensor]:
    """A run that fails saves a checkpoint without asking other ranks; another run goes on from it."""
    saving = ModelCheckpoint(folder, filename="failed", save_on_exception=True)
    path, said = folder / "failed.ckpt", ""
    with heard() as lines:
        try:
            run(group, Way(module={"fails_at": 2}), Compress(**compress), saving, enable_checkpointing=True)
        except RuntimeError as error:
            said = str(error)
    _, module = run(group, Way(), Compress(**compress), ckpt_path=path)
    return said, lines, state_in(path), whole(module)


def again(group: Group, compressed: bool) -> list[tuple[Tensor, Stats | None]]:
    """One module: fitted twice by one Trainer, then by another."""
    module = Net()
    callbacks = [[Compress("none")] if compressed else [] for _ in range(2)]
    first, second = (trainer(group, Way(), listed) for listed in callbacks)
    found = []
    for runner, epochs, listed in ((first, 1, callbacks[0]), (first, 2, callbacks[0]), (second, 1, callbacks[1])):
        runner.fit_loop.max_epochs = epochs
        runner.fit(module, examples(group.size()))
        found.append((whole(module), listed[0].handle.stats() if listed else None))
    return found


def log(group: Group, folder: Path) -> tuple[str, Stats]:
    """What a logger of Lightning's writes, and the stats at the end."""
    callback = Compress("lloyd4", measure_every=2)
    logger = CSVLogger(folder, name="", version="")
    run(group, Way({"accumulate_grad_batches": 2, "max_epochs": 2}), callback, logger=logger, log_every_n_steps=2)
    return (folder / "metrics.csv").read_text() if group.rank() == 0 else "", callback.handle.stats()


def other_package(group: Group) -> Stats:
    """A Trainer of Lightning's other package, pytorch_lightning."""
    other = importlib.import_module("pytorch_lightning")
    module = type("Other", (_Net, other.LightningModule), {})()
    callback = Compress()
    trainer(group, Way(), [callback], other).fit(module, examples(group.size()))
    return callback.handle.stats()


def nodes(group: Group, per_node: int) -> tuple[tuple[int, ...], Stats]:
    """Nodes of so many ranks."""
    callback = Compress("int8", mesh="nodes", inside="none")
    with torchrun(group, per_node):
        run(group, Way(), callback, devices=per_node, num_nodes=group.size() // per_node)
    assert isinstance(callback.handle, thinwire.DDPState)
    return callback.handle.options.mesh.shape, callback.handle.stats()


def refusals(group: Group) -> list[str]:
    """What errors say."""
    calls: list[Callable[[], object]] = [
        lambda: Compress("int9"),
        lambda: Compress(weights="int9"),
        lambda: Compress(inside="int9"),
        lambda: Compress(mesh="hosts"),  # type: ignore[arg-type]
        lambda: run(group, Way(), Compress(weights="int8")),
        lambda: run(group, Way(module={"sharded": True}), Compress(algorithm="two_phase")),
        lambda: run(group, Way(module={"sharded": True, "forgets": True}), Compress()),
    ]
    return [message_of(call) for call in calls]


def alone(group: Group) -> tuple[list[str], Tensor, Tensor]:
    """What two runs on one device announce, and what they and a run without Compress learn."""
    found = []
    with patch.dict(os.environ), heard() as lines:
        del os.environ["TORCHELASTIC_RUN_ID"]
        for callbacks in ([Compress()], [Compress()], []):
            _, module = run(group, Way(), *callbacks, devices=1, strategy="auto")
            found.append(whole(module))
    return lines, found[0], found[2]


def in_fabric(group: Group, codec: str | None, sharded: bool, path: Path) -> tuple[Tensor, Stats | None, list[Any]]:
    """Fabric: a loop of one's own, DDP with accumulation or FSDP2; and the states that were saved and loaded."""
    strategy = FabricParallel(shard, data_parallel_size=group.size(), tensor_parallel_size=1) if sharded else "ddp"
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=group.size())
    fabric.launch()
    model, optimizer, handle = _set_up(fabric, codec)
    for step in range(BATCHES):
        x, y = batch(group.rank(), step)
        with contextlib.nullcontext() if sharded else fabric.no_backward_sync(model, enabled=step % 2 == 0):
            fabric.backward((model(x) - y).square().mean())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    if handle is None:
        return whole(model), None, []
    saved = handle.state_dict(gather=True)
    fabric.save(path, {"model": model, "optimizer": optimizer, "thinwire": saved})
    other, others, another = _set_up(fabric, codec)
    loaded: dict[str, Any] = {"model": other, "optimizer": others, "thinwire": {}}
    fabric.load(path, loaded)
    another.load_state_dict(loaded["thinwire"])
    return whole(model), handle.stats(), [saved, another.state_dict(gather=True)]


def _set_up(fabric: Fabric, codec: str | None) -> tuple[Any, Any, thinwire.DDPState | thinwire.FSDPState | None]:
    model = fabric.setup_module(network())
    optimizer = fabric.setup_optimizers(OPTIMIZERS["adam"](model.parameters()))
    compress = thinwire.compress_ddp if fabric.strategy.__class__ is DDPStrategy else thinwire.compress_fsdp
    return model, optimizer, None if codec is None else compress(model, codec, optimizer=optimizer)


def shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in (*module.children(), module):
        if isinstance(layer, nn.Linear | nn.Sequential):
            fully_shard(layer, mesh=mesh["data_parallel"])
    return module
