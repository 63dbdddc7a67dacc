"""Hugging Face Accelerate: what a prepared model sends travels compressed.

model, optimizer = accelerator.prepare(model, optimizer)
handle = compress(accelerator, model, "int8")    # the rest of the script stays
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Unpack

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives.groups import resolve
from thinwire.errors import CollectiveError, MissingPackageError
from thinwire.integrations.averager import over_groups
from thinwire.integrations.checkpoint import device_of, spread
from thinwire.integrations.ddp import DDPState, compress_ddp
from thinwire.integrations.fsdp import FSDPState, compress_fsdp
from thinwire.integrations.names import describe
from thinwire.integrations.options import CodecChoice, DDPKeywords, check_options
from thinwire.integrations.policy import CodecLike
from thinwire.log import announce

if find_spec("accelerate") is None:
    raise MissingPackageError(
        "thinwire.integrations.accelerate needs accelerate, not installed here: pip install 'thinwire[accelerate]'"
    )
from accelerate import Accelerator, DDPCommunicationHookType

Handle = DDPState | FSDPState
_OF_DDP = ("algorithm", "mesh", "weigh")
_OF_FSDP = ("weights", "replica")
_PLUGIN = (
    "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)), which Accelerate uses on GPUs only: on a "
    "CPU it makes a DDP model all the same"
)


class Keywords(DDPKeywords, total=False):
    """The options of compress_ddp and those of compress_fsdp, for type checkers."""

    weights: CodecLike
    replica: bool | None


def compress(
    accelerator: Accelerator, model: nn.Module, codec: CodecChoice = "int8", **options: Unpack[Keywords]
) -> Handle:
    """Let what a prepared model's ranks send each other travel compressed; call it after `accelerator.prepare`.

    A model in DDP goes to `thinwire.compress_ddp`, one that Accelerate's FSDP2 plugin shards to
    `thinwire.compress_fsdp`. Options are those of these two functions; one of the other function raises. In a run of
    one process nothing travels: rank 0 says so, and the handle does nothing.

    `accelerator.save_state` then saves what feedback remembers on all ranks, and `load_state` resumes with the same
    bits, on the same number of ranks. On another number the sum over ranks is kept.
    """
    handle = compress_prepared(accelerator, model, codec, **options)
    accelerator.register_for_checkpointing(Checkpointed(handle))
    return handle


def compress_prepared(
    accelerator: Accelerator, model: nn.Module, codec: CodecChoice = "int8", **options: Unpack[Keywords]
) -> Handle:
    """`compress`, for those who save the handle's state themselves."""
    if not isinstance(accelerator, Accelerator):
        raise CollectiveError(f"expected compress(accelerator, model, ...), got {type(accelerator).__name__} first")
    check_options(codec, options)
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        _check_hook(accelerator)
        _refuse(options, _OF_FSDP, "is in DDP", _PLUGIN)
        return compress_ddp(model, codec, **options)  # type: ignore[misc]
    if any(isinstance(module, FSDPModule) for module in modules):
        _refuse(options, _OF_DDP, "is sharded by FSDP2", "no fsdp_plugin")
        return compress_fsdp(model, codec, **options)  # type: ignore[misc]
    if accelerator.num_processes > 1 or not modules:
        raise CollectiveError(
            f"expected a model that accelerator.prepare put into DDP or sharded by FSDP2, got {describe(model)} "
            f"(distributed_type={accelerator.distributed_type})"
        )
    _tell_alone(int(os.environ.get("WORLD_SIZE", 1)))
    of_one = (*_OF_FSDP, *_OF_DDP, "inside")
    kept: Any = {name: value for name, value in options.items() if name not in of_one}
    return Alone(None, codec, model=model, **kept)


def _refuse(options: Mapping[str, Any], names: Sequence[str], found: str, wanted: str) -> None:
    given = " and ".join(f"{name}=" for name in names if name in options)
    if given:
        raise CollectiveError(f"this model {found}, where {given} says nothing: leave it out, or use {wanted}")


def _check_hook(accelerator: Accelerator) -> None:
    """Accelerate looks `comm_hook` up among its own names, and registers nothing if it is none of them."""
    handler = accelerator.ddp_handler
    hook = DDPCommunicationHookType.NO if handler is None else handler.comm_hook
    if not isinstance(hook, DDPCommunicationHookType):
        warnings.warn(
            f"Accelerate ignores DistributedDataParallelKwargs(comm_hook={getattr(hook, '__name__', repr(hook))}): it "
            "knows the names of DDPCommunicationHookType alone. Leave it out: compress() registers thinwire's hook",
            stacklevel=4,
        )
    elif hook != DDPCommunicationHookType.NO:
        raise CollectiveError(
            f"Accelerate has registered DistributedDataParallelKwargs(comm_hook={hook}), and DDP takes one hook: leave "
            "comm_hook out"
        )


def _tell_alone(launched: int) -> None:
    if launched == 1:
        announce("one process trains, and sends nothing: there is nothing to compress")
        return
    warnings.warn(
        f"{launched} processes were launched, and Accelerate lets each of them train alone: without GPUs pass "
        "Accelerator(cpu=True), or TrainingArguments(use_cpu=True)",
        stacklevel=4,
    )


class Alone(DDPState):
    """The handle where one process trains: nothing travels, nothing is remembered."""

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        pass


class Checkpointed:
    """A handle as `save_state` and `load_state` want it: both ask every rank, and what rank 0 answers is saved."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on rank 0."""
        return self._handle.state_dict(gather=True)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what this rank has read; every rank calls it."""
        load_shared(self._handle, state)


def load_shared(handle: Handle, state: Mapping[str, Any]) -> None:
    """Let every rank go on from rank 0's state, which ranks on other machines may have no file of.

    Where each node saves its own checkpoint (`save_on_each_node`), those of other nodes hold nothing. A run of one
    process has nothing to save either: feedback then begins anew.
    """
    if not isinstance(handle, Alone) and dist.get_world_size() > 1:
        world = resolve(None)
        device = device_of(world)
        (all_have_one,) = over_groups("load_state_dict", (world,), device, [float(bool(state))], dist.ReduceOp.MIN)
        if not all_have_one:
            state = spread(dict(state), 0, world, device)
    if state:
        handle.load_state_dict(state)
