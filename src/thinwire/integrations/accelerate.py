"""Hugging Face Accelerate: compresses the communication of a prepared model.

model, optimizer = accelerator.prepare(model, optimizer)
handle = compress(accelerator, model, "int8")    # the rest of the script stays
"""

import functools
import os
import types
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Unpack

import torch.distributed as dist
from torch import nn

from thinwire.collectives.groups import resolve
from thinwire.collectives.torch_verbs import agree
from thinwire.errors import CollectiveError, MissingPackageError
from thinwire.integrations.checkpoint import device_of
from thinwire.integrations.choice.options import BY_MODEL, CodecChoice, CodecLike, DDPKeywords, framework_options
from thinwire.integrations.ddp import DDPState
from thinwire.integrations.fsdp import FSDPState, compress_wrapped
from thinwire.integrations.models import describe
from thinwire.log import announce

if find_spec("accelerate") is None:
    raise MissingPackageError(
        "thinwire.integrations.accelerate needs accelerate, not installed here: pip install 'thinwire[accelerate]'"
    )
from accelerate import Accelerator

Handle = DDPState | FSDPState
_PLUGIN = (
    "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)), which Accelerate uses on GPUs only: on a "
    "CPU it makes a DDP model instead"
)


def compress(
    accelerator: Accelerator,
    model: nn.Module,
    codec: CodecChoice = "int8",
    *,
    weights: CodecLike | None = None,
    replica: bool | None = None,
    **options: Unpack[DDPKeywords],
) -> Handle:
    """Compress the communication of a prepared model; call it after `accelerator.prepare`.

    It calls `thinwire.compress_ddp` for a model in DDP, and `thinwire.compress_fsdp` for one that Accelerate's FSDP2
    plugin shards. It takes the options of these two functions; an option of the wrong one raises an error. A single
    process sends nothing: it logs that, and the handle does nothing.

    `accelerator.save_state` then saves what feedback remembers on all ranks. `load_state` resumes bit-exactly on the
    same number of ranks; on another number the sum over ranks is kept.
    """
    asked = framework_options(codec, options, weights=weights, replica=replica)
    handle = compress_prepared(accelerator, model, codec, asked)
    gathered = functools.partial(handle.state_dict, gather=True)  # all ranks call it, and rank 0's answer is saved
    load = functools.partial(load_shared, handle)
    accelerator.register_for_checkpointing(types.SimpleNamespace(state_dict=gathered, load_state_dict=load))
    return handle


def compress_prepared(
    accelerator: Accelerator, model: nn.Module, codec: CodecChoice, options: Mapping[str, Any]
) -> Handle:
    """`compress` for callers that save the handle's state themselves; the options were checked."""
    if not isinstance(accelerator, Accelerator):
        raise CollectiveError(f"expected compress(accelerator, model, ...), got {type(accelerator).__name__} first")
    kind = f"distributed_type={accelerator.distributed_type}"
    if handle := compress_wrapped(model, codec, options, kind, ddp="no fsdp_plugin", fsdp=_PLUGIN):
        return handle
    if accelerator.num_processes > 1 or not isinstance(model, nn.Module):
        raise CollectiveError(
            "expected a model that accelerator.prepare put into DDP or sharded by FSDP2, got "
            f"{describe(model)} ({kind})"
        )
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched == 1:
        announce("only one process is training: there is nothing to compress")
    else:
        warnings.warn(
            f"{launched} processes were launched, but Accelerate trains each of them alone: without GPUs pass "
            "Accelerator(cpu=True), or TrainingArguments(use_cpu=True)",
            stacklevel=3,
        )
    rest = {name: value for name, value in options.items() if name not in BY_MODEL}
    return SingleProcess(None, codec, model=model, **rest)


class SingleProcess(DDPState):
    """The handle of a single process: nothing is sent or remembered."""

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        pass


def load_shared(handle: Handle, state: Mapping[str, Any]) -> None:
    """Load rank 0's state on every rank; ranks on other machines may not have the file.

    With `save_on_each_node` the checkpoints of other nodes are empty. So is the checkpoint of a single process: then
    feedback starts from zero.
    """
    if not isinstance(handle, SingleProcess) and dist.get_world_size() > 1:
        world = resolve(None)
        has_one = float(bool(state))
        (all_have_one,) = agree("load_state_dict", (world,), device_of(world), [has_one], dist.ReduceOp.MIN)
        if not all_have_one:
            sent = [state]
            dist.broadcast_object_list(sent, 0, world, device_of(world))
            state = sent[0]
    if state:
        handle.load_state_dict(state)
