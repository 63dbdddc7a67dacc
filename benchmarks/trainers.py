"""Unmodified trainers, whose default group may compress: torchtitan, DeepSpeed and Megatron-core on CPU ranks.

    torchrun --nproc-per-node 4 -m benchmarks.trainers torchtitan tensor=2 --backend cpu:thinwire

THINWIRE_RULES has the rules. torchtitan takes CUDA where it finds no accelerator, and its attention has no backward on
the CPU: it is made to find the CPU, and gets its other attention. Megatron-core's pipeline needs CUDA.
"""

import os
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from benchmarks.command import start
from thinwire.collectives import traffic
from thinwire.group import ThinwireGroup

STEPS = 4
WIDTH = 64


def torchtitan(**degrees: int) -> list[float]:
    """The trainer and the Llama 3 debug model of torchtitan; FSDP2 takes the ranks that no degree takes."""
    with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
        from torchtitan.models.common.attention import ScaledDotProductAttention
        from torchtitan.models.llama3.config_registry import llama3_debugmodel
        from torchtitan.trainer import Trainer

    def batches(*, dp_rank: int, local_batch_size: int, seq_len: int, **given: Any) -> list[Any]:
        x = torch.randint(64, (local_batch_size, seq_len), generator=torch.Generator().manual_seed(dp_rank))
        return [({"input": x, "positions": torch.arange(seq_len).expand(x.shape)}, (3 * x + 1) % 64)] * 4 * STEPS

    log = mock.MagicMock()
    log.device_memory_monitor.get_peak_stats.return_value = SimpleNamespace(max_reserved_gib=0, max_reserved_pct=0)
    config = llama3_debugmodel()
    config.metrics, config.dataloader = SimpleNamespace(build=lambda **given: log), SimpleNamespace(build=batches)
    config.tokenizer, config.validator.enable, config.checkpoint.enable = mock.MagicMock(), False, False
    config.training.local_batch_size, config.training.seq_len, config.training.disable_cuda_graphs = 2, 16, True
    config.debug.seed = 0
    if torch.__version__ < "2.14":
        config.parallelism.spmd_backend = "partial_dtensor"
    for name, degree in degrees.items():
        setattr(config.parallelism, f"{name}_parallel_degree", degree)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]  # of 6 that are alike
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    trainer = Trainer(config)
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    data = trainer.batch_generator(trainer.dataloader)
    for trainer.step in range(1, STEPS + 1):
        trainer.train_step(data)
    trainer.close()
    return [call.args[1] for call in log.log.call_args_list]


def deepspeed(stage: int = 2) -> list[float]:
    """DeepSpeed's ZeRO."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__.clear()  # else it compiles one for shared memory
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
    adam = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": stage}, "optimizer": adam}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = _steps(lambda: (engine(x) - x).square().mean(), engine.backward, engine.step)
    deepspeed.utils.groups._release_process_group_references()
    return losses


def megatron() -> list[float]:
    """Megatron-core's linear layers in tensor parallelism."""
    from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel

    torch.manual_seed(0)
    world, x = dist.get_world_size(), torch.randn(8, WIDTH, requires_grad=True)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    config = ModelParallelConfig(tensor_model_parallel_size=world, use_cpu_initialization=True)
    how = {"config": config, "init_method": nn.init.xavier_normal_, "skip_bias_add": False}
    up = tensor_parallel.ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_output=False, **how)
    down = tensor_parallel.RowParallelLinear(4 * WIDTH, WIDTH, bias=True, input_is_parallel=True, **how)
    optimizer = torch.optim.Adam([*up.parameters(), *down.parameters()], lr=0.01)

    def loss() -> Tensor:
        optimizer.zero_grad()
        y: Tensor = down(torch.tanh(up(x)[0]))[0]
        return (y - x).square().mean()

    losses = _steps(loss, Tensor.backward, optimizer.step)
    parallel_state.destroy_model_parallel()
    return losses


def _steps(loss: Callable[[], Tensor], backward: Callable[[Tensor], Any], step: Callable[[], Any]) -> list[float]:
    losses = []
    for _ in range(STEPS):
        found = loss()
        backward(found)
        step()
        losses.append(found.item())
    return losses


TRAINERS: dict[str, Callable[..., list[float]]] = {one.__name__: one for one in (torchtitan, deepspeed, megatron)}


def compressed() -> Counter[tuple[int, ...]]:
    """Bytes that this rank has sent in codecs, by the ranks of a group."""
    found: Counter[tuple[int, ...]] = Counter()
    for one in dist.distributed_c10d._world.pg_map:
        if isinstance(one, ThinwireGroup):
            found[tuple(dist.get_process_group_ranks(one))] += traffic(one).sent
    return found


def command(
    trainer: str, options: Annotated[list[str] | None, typer.Argument()] = None, backend: str = "cpu:thinwire"
) -> None:
    """Losses of a trainer, and what it sent in codecs: options such as tensor=2, pipeline=2 or stage=3."""
    dist.init_process_group(backend)
    how = {name: int(value) for name, _, value in (one.partition("=") for one in options or ())}
    losses = TRAINERS[trainer](**how)
    print(f"rank {dist.get_rank()}: losses {losses}, sent {dict(compressed())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    start(command)
