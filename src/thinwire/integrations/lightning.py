"""Lightning: a callback that compresses the communication of gradients and weights.

trainer = lightning.Trainer(strategy="ddp", callbacks=Compress("int8"))    # the rest of the script stays
"""

import sys
import typing
import weakref
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, Unpack

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.errors import CollectiveError, MissingPackageError
from thinwire.integrations.choice.options import (
    Algorithm,
    CodecChoice,
    CodecLike,
    SharedKeywords,
    Weigh,
    framework_options,
)
from thinwire.integrations.ddp import DDPState
from thinwire.integrations.fsdp import FSDPState, compress_wrapped
from thinwire.log import announce_once

if typing.TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    # The package that the program imported, or else can import: Lightning has two names.
    _NAMES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
    _packages = [module for module in _NAMES.values() if sys.modules.get(module)]
    _packages += [module for name, module in _NAMES.items() if find_spec(name) is not None]
    if not _packages:
        raise MissingPackageError(
            "thinwire.integrations.lightning needs lightning, not installed here: pip install 'thinwire[lightning]'"
        )
    Callback = import_module(_packages[0]).Callback

Handle = DDPState | FSDPState
_FSDP2 = "ModelParallelStrategy, with fully_shard called in configure_model()"
# By the module that was fitted. Weak on both sides: a handle of FSDP2 holds its module.
_handles: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Handle]]" = weakref.WeakKeyDictionary()


class Compress(Callback):
    """Compress what a Trainer's ranks send each other in `fit`.

    With strategy="ddp", or any other DDPStrategy, it calls `thinwire.compress_ddp`. With ModelParallelStrategy and a
    model that configure_model() passed to fully_shard (FSDP2), it calls `thinwire.compress_fsdp`. It takes the options
    of these two functions; an option of the wrong one raises an error when `fit` begins.

    `handle` is what they returned: `handle.stats()` says what the last `fit` sent. Every `fit` starts with a new one,
    as it does with new optimizers. Bytes and errors go to the Trainer's loggers as `thinwire/...`, every
    `log_every_n_steps`. The Trainer's checkpoints hold what feedback remembers on all ranks.

    codec: of gradients; a codec, a schedule, "auto" or "auto:2.5".
    weights, replica: FSDP2 only.
    weigh, algorithm: DDP only.
    mesh: DDP only; "nodes" is the Trainer's num_nodes by the ranks of each.
    options: feedback, exempt, policy, warmup_steps, optimizer, residual_dtype, error_budget, replan_every,
        measure_every, on_nonfinite, inside. `optimizer` is the Trainer's own unless you pass another.
    """

    state_key = "thinwire"  # the name of the state in a checkpoint

    def __init__(
        self,
        codec: CodecChoice = "int8",
        *,
        weights: CodecLike | None = None,
        replica: bool | None = None,
        weigh: Weigh | None = None,
        algorithm: Algorithm | None = None,
        mesh: DeviceMesh | Literal["nodes"] | None = None,
        **options: Unpack[SharedKeywords],
    ) -> None:
        by_model = {"weights": weights, "replica": replica, "weigh": weigh, "algorithm": algorithm, "mesh": mesh}
        self._options = framework_options(codec, options, **by_model)
        if mesh != "nodes" and not isinstance(mesh, DeviceMesh | None):
            raise CollectiveError(f"mesh must be 'nodes' or a DeviceMesh of nodes and the ranks inside, got {mesh!r}")
        self.handle: Handle | None = None
        self._codec = codec
        self._fitting = False
        self._failed = False
        self._saved: Mapping[str, Any] | None = None  # loaded from a checkpoint before the model was wrapped
        self._logged = -1  # the step that was logged last

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Forget the last run when a new one begins."""
        self._fitting = stage == "fit"
        if not self._fitting:
            return
        before = _handles.pop(pl_module, lambda: None)()
        if before is not None:
            before.close()
        self.handle = None
        self._failed = False
        self._saved = None
        self._logged = -1

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Compress the model, which is wrapped now. With DDP, Lightning has already loaded a checkpoint."""
        self.handle = self._compress(trainer)
        if self.handle is not None:
            _handles[pl_module] = weakref.ref(self.handle)
            if self._saved is not None:
                self.handle.load_state_dict(self._saved)
        self._saved = None

    def _compress(self, trainer: "Trainer") -> Handle | None:
        strategy = type(trainer.strategy).__name__
        optimizers: Any = trainer.optimizers
        known = {"optimizer": optimizers} if optimizers and all(isinstance(o, Optimizer) for o in optimizers) else {}
        options: Any = {**known, **self._options}
        if options.get("mesh") == "nodes" and isinstance(trainer.model, DistributedDataParallel):
            shape = (trainer.num_nodes, trainer.world_size // trainer.num_nodes)
            options["mesh"] = init_device_mesh(trainer.strategy.root_device.type, shape)
        handle = compress_wrapped(trainer.model, self._codec, options, strategy, ddp="strategy='ddp'", fsdp=_FSDP2)
        if handle is None and trainer.world_size > 1:
            raise CollectiveError(
                f"Compress expected a model in DistributedDataParallel or sharded by fully_shard, got {strategy} with "
                f"{type(trainer.model).__name__}: use strategy='ddp', or {_FSDP2}"
            )
        if handle is None:
            announce_once(f"{strategy} has only one rank: there is nothing to compress")
        return handle

    def on_before_optimizer_step(self, trainer: Any, pl_module: "LightningModule", optimizer: Optimizer) -> None:
        """Log what was sent, under the step number that Lightning's own metrics have."""
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        every = trainer.log_every_n_steps
        due = step != self._logged and every and (step + 1) % every == 0
        if self.handle is None or not due or not trainer.loggers or not trainer.is_global_zero:
            return
        self._logged = step
        stats = self.handle.stats().as_dict()
        found = {f"thinwire/{name}": value for name, value in stats.items() if not isinstance(value, str)}
        for logger in trainer.loggers:
            logger.log_metrics(found, step=step)

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        """Remember that the run failed, perhaps on this rank alone: other ranks may not answer any more."""
        self._failed = True

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks. Lightning asks every rank, and saves rank 0's answer in its checkpoint."""
        if self.handle is None or self.handle.closed:
            return {}
        try:
            if self._failed:
                raise CollectiveError("the run failed, and other ranks may not answer")
            return self.handle.state_dict(gather=True)
        except CollectiveError as error:  # the same on all ranks; a checkpoint without it is better than none
            if dist.get_rank() == 0:
                announce_once(f"a checkpoint is saved without the state of compression: {error}")
            return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load from Lightning's checkpoint: with DDP before the model is wrapped, with FSDP2 after."""
        if not self._fitting:
            return
        if self.handle is None:
            self._saved = state_dict
        else:
            self.handle.load_state_dict(state_dict)
