"""What ranks do in tests/test_lightning.py. Only they import it: importing Lightning takes seconds."""

import contextlib
import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import thinwire
from replicas import OPTIMIZERS, batch, flat, message_of, network
from test_lightning import BATCHES, Fitted, Options, Way
from thinwire import Stats
from thinwire.integrations.lightning import Compress

# Lightning's own warnings, and torch's of a CPU without bfloat16.
ITS_OWN = (
    r".*isinstance\(treespec, LeafSpec\).* is deprecated",
    "The '.*_dataloader' does not have many workers",
    "mkldnn_matmul failed, switching to BLAS",
)
logging.getLogger("lightning").setLevel(logging.ERROR)
Group = dist.ProcessGroup


class Environment(LightningEnvironment):
    """The ranks of the pool, as Lightning's extension point for clusters has them."""

    creates_processes_externally = True

    def __init__(self, group: Group, per_node: int) -> None:
        super().__init__()
        self._group = group
        self._per_node = per_node

    def world_size(self) -> int:
        return self._group.size()

    def global_rank(self) -> int:
        return self._group.rank()

    def local_rank(self) -> int:
        return self._group.rank() % self._per_node

    def node_rank(self) -> int:
        return self._group.rank() // self._per_node


class _Net:
    """A network that learns: in DDP, or `sharded` by FSDP2; stepped by Lightning, or by itself (`manual`)."""

    def __init__(
        self,
        optimizer: str = "sgd",
        *,
        sharded: bool = False,
        manual: bool = False,
        forgets: bool = False,
        fails_at: int | None = None,
    ) -> None:
        super().__init__()
        self.net = network()
        self.automatic_optimization = not manual
        self._optimizer = optimizer
        self._sharded = sharded and not forgets
        self._fails_at = fails_at
        self.peaks = [0.0 for _ in self.net.parameters()]

    def configure_model(self) -> None:
        if self._sharded and not hasattr(self, "unshard"):
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self, mesh=mesh)

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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that are Lightning's own."""
    with warnings.catch_warnings():
        for message in ITS_OWN:
            warnings.filterwarnings("ignore", message)
        yield


def examples(world: int) -> DataLoader[Any]:
    """An epoch; Lightning deals its rows out to ranks."""
    pairs = [batch(0, step) for step in range(BATCHES * world)]
    return DataLoader(TensorDataset(*(torch.cat(column) for column in zip(*pairs, strict=True))), batch_size=16)


def trainer(group: Group, way: Way, package: Any = pl, **options: Any) -> pl.Trainer:
    """A Trainer on the ranks of the pool."""
    per_node = way.per_node or group.size()
    parallel = {"data_parallel_size": group.size(), "tensor_parallel_size": 1}
    strategies = package.strategies
    if way.module.get("sharded"):
        strategy = strategies.ModelParallelStrategy(**{**parallel, **way.strategy})
    else:
        strategy = strategies.DDPStrategy(**way.strategy)
    settings = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
    made: pl.Trainer = package.Trainer(
        accelerator="cpu",
        devices=per_node,
        num_nodes=group.size() // per_node,
        strategy=strategy,
        plugins=[Environment(group, per_node)],
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**settings, **way.trainer, **options},
    )
    return made


def fit(group: Group, way: Way, compress: Options | None, **options: Any) -> Fitted:
    """Train with these options of Compress, or without it."""
    callbacks = [] if compress is None else [Compress(**compress)]
    module = Net(**way.module)
    counters.clear()
    with quiet():
        runner = trainer(group, way, callbacks=callbacks, **options)
        runner.fit(torch.compile(module, backend="aot_eager") if way.compiled else module, examples(group.size()))
    stats = callbacks[0].handle.stats() if callbacks else None
    return Fitted(whole(module), max(module.peaks), counters["stats"]["unique_graphs"], stats)


def fits(group: Group, way: Way, *runs: tuple[Options | None, Options]) -> list[Fitted]:
    """`fit` several times in one process."""
    return [fit(group, way, compress, **options) for compress, options in runs]


def whole(module: nn.Module) -> Tensor:
    """All parameters in a row, those of other ranks too."""
    return flat([p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()])


# --- checkpoints ------------------------------------------------------------------------------------------------------


def resume(group: Group, way: Way, compress: Options, folder: Path) -> dict[str, Any]:
    """Three epochs at once, then the last of them from a checkpoint that was saved on the way, with its state and not."""
    module = Net(**way.module)
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    with quiet():
        runner = trainer(group, way, callbacks=[Compress(**compress), saving], max_epochs=3, enable_checkpointing=True)
        runner.fit(module, examples(group.size()))
    path = folder / "epoch=1.ckpt"
    found = {"at once": whole(module), "resumed": go_on(group, way, compress, path), "state": state_in(path)}
    if group.rank() == 0:
        forget_state(path)
    dist.barrier()
    return {**found, "without its state": go_on(group, way, compress, path)}


def go_on(group: Group, way: Way, compress: Options, path: Path) -> Tensor:
    module = Net(**way.module)
    with quiet():
        trainer(group, way, callbacks=[Compress(**compress)], max_epochs=3).fit(
            module, examples(group.size()), ckpt_path=path
        )
    return whole(module)


def _file(path: Path) -> Path:
    """Of what callbacks saved: a sharded checkpoint has it beside the shards."""
    return path / "meta.pt" if path.is_dir() else path


def state_in(path: Path) -> dict[str, Any] | None:
    """What Compress saved, as any loader that trusts nobody may have it."""
    state: dict[str, Any] | None = torch.load(_file(path), weights_only=True)["callbacks"].get("thinwire")
    return state


def forget_state(path: Path) -> None:
    saved = torch.load(_file(path), weights_only=True)
    del saved["callbacks"]["thinwire"]
    torch.save(saved, _file(path))


def save(group: Group, way: Way, compress: Options, path: Path) -> dict[str, Any] | None:
    """Train, and save when `fit` is over. Gives what Compress saved."""
    with quiet():
        runner = trainer(group, way, callbacks=[Compress(**compress)])
        runner.fit(Net(**way.module), examples(group.size()))
        runner.save_checkpoint(path)
    return state_in(path)


def owed(group: Group, way: Way, compress: Options, path: Path) -> dict[str, Any]:
    """What all ranks remember once a checkpoint was loaded, before any step; empty on all ranks but the first."""
    callback = Compress(**compress)
    with quiet():
        trainer(group, way, callbacks=[callback]).fit(Net(**way.module), examples(group.size()), ckpt_path=path)
    assert callback.handle is not None
    return callback.handle.state_dict(gather=True)


def fail(group: Group, compress: Options, folder: Path) -> tuple[str, dict[str, Any] | None, Tensor]:
    """A run that fails saves a checkpoint without asking other ranks; another run goes on from it."""
    way = Way(module={"fails_at": 2})
    callbacks = [Compress(**compress), OnExceptionCheckpoint(folder)]
    runner = trainer(group, way, callbacks=callbacks, enable_checkpointing=True)
    with quiet():
        try:
            runner.fit(Net(**way.module), examples(group.size()))
        except RuntimeError as error:
            said = str(error)
    path = folder / "on_exception.ckpt"
    return said, state_in(path), go_on(group, Way(), compress, path)


# --- one Trainer, several; loggers; nodes; errors ---------------------------------------------------------------------


def again(group: Group, way: Way, compress: Options | None) -> list[tuple[Tensor, Stats | None]]:
    """One module: fitted twice by one Trainer, then by another."""
    module = Net(**way.module)
    found = []
    with quiet():
        first = _with(group, way, compress)
        for runner, epochs in ((first, 1), (first, 2), (_with(group, way, compress), 1)):
            runner.fit_loop.max_epochs = epochs
            runner.fit(module, examples(group.size()))
            handles = [callback.handle for callback in runner.callbacks if isinstance(callback, Compress)]
            found.append((whole(module), handles[0].stats() if handles and handles[0] else None))
    return found


def _with(group: Group, way: Way, compress: Options | None) -> pl.Trainer:
    return trainer(group, way, callbacks=[] if compress is None else [Compress(**compress)])


def log(group: Group, folder: Path) -> tuple[str, Stats]:
    """What a logger of Lightning's writes, and the stats at the end."""
    callback = Compress("lloyd4", measure_every=2)
    way = Way({"accumulate_grad_batches": 2, "log_every_n_steps": 2, "max_epochs": 2})
    logger = CSVLogger(folder, name="", version="")
    with quiet():
        trainer(group, way, callbacks=[callback], logger=logger).fit(Net(), examples(group.size()))
    assert callback.handle is not None
    return (folder / "metrics.csv").read_text() if group.rank() == 0 else "", callback.handle.stats()


def other_package(group: Group) -> Stats:
    """A Trainer of Lightning's other package, pytorch_lightning."""
    other = importlib.import_module("pytorch_lightning")
    module = type("Other", (_Net, other.LightningModule), {})()
    callback = Compress()
    with quiet():
        trainer(group, Way(), other, callbacks=[callback]).fit(module, examples(group.size()))
    assert callback.handle is not None
    return callback.handle.stats()


def nodes(group: Group, per_node: int) -> tuple[tuple[int, ...], Stats]:
    """Nodes of so many ranks."""
    callback = Compress("int8", mesh="nodes", inside="none")
    way = Way(per_node=per_node)
    with quiet():
        trainer(group, way, callbacks=[callback]).fit(Net(), examples(group.size()))
    handle = callback.handle
    assert isinstance(handle, thinwire.DDPState)
    assert handle.options.mesh is not None
    return handle.options.mesh.shape, handle.stats()


def refusals(group: Group) -> list[str]:
    """What errors say."""
    calls: list[Callable[[], object]] = [
        lambda: Compress("int9"),
        lambda: Compress(weights="int9"),
        lambda: Compress(inside="int9"),
        lambda: Compress(mesh="hosts"),  # type: ignore[arg-type]
        lambda: fit(group, Way(), {"weights": "int8"}),
        lambda: fit(group, Way(module={"sharded": True}), {"algorithm": "two_phase"}),
        lambda: fit(group, Way(strategy={"ddp_comm_hook": thinwire.ddp_hook, "ddp_comm_state": None}), {}),
        lambda: fit(group, Way(module={"sharded": True, "forgets": True}), {}),
    ]
    return [message_of(call) for call in calls]


def alone(group: Group) -> tuple[list[str], Tensor, Tensor]:
    """What is announced by two runs on one device, and what they and a run without Compress learn."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("thinwire")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    found = []
    for callbacks in ([Compress()], [Compress()], []):
        module = Net()
        with quiet():
            pl.Trainer(
                accelerator="cpu",
                devices=1,
                max_epochs=1,
                logger=False,
                callbacks=callbacks,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            ).fit(module, examples(1))
        found.append(whole(module))
    logger.removeHandler(handler)
    return lines, found[0], found[2]


def in_fabric(group: Group, codec: str | None) -> tuple[Tensor, Stats | None]:
    """Lightning Fabric: a loop of one's own, with accumulation."""
    fabric = Fabric("cpu", "ddp", devices=group.size(), plugins=[Environment(group, group.size())])
    fabric.launch()
    module = network()
    model, optimizer = fabric.setup(module, OPTIMIZERS["adam"](module.parameters()))
    handle = None if codec is None else thinwire.compress_ddp(model, codec, optimizer=optimizer)
    for step in range(BATCHES):
        x, y = batch(group.rank(), step)
        with quiet(), fabric.no_backward_sync(model, enabled=step % 2 == 0):
            fabric.backward((model(x) - y).square().mean())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return whole(module), None if handle is None else handle.stats()
