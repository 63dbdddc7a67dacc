"""Training steps of a GPT with 124 M weights by codec, beside plain torch, its bf16 hook and PowerSGD.

    torchrun --nproc-per-node 2 benchmarks/gpt124m_steps.py --parallel ddp --hosts 2 --json ddp.json
    torchrun --nproc-per-node 4 benchmarks/gpt124m_steps.py --parallel fsdp2 --json fsdp.json

bf16 autocast (FSDP2: bf16 weights, fp32 gradients) and AdamW, on NCCL where there is a GPU, else on gloo. Every arm has
a model of its own; arms take turns of a few steps, as training loops do without waiting for the GPU in between, and a
row holds the median over rounds of the slowest rank's time per step.
`--hosts N` makes NCCL take the ranks for N hosts that are connected by TCP, even on one machine. An arm such as
lloyd4@100 has DDP buckets of 100 MB instead of torch's default; lloyd4/int8@2 shards two of FSDP2's blocks together.
With `--own-group` FSDP2 reduces gradients in a process group of its own (torch 2.15).
"""

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.tools.bench import record

PLAIN, BF16, POWERSGD = "none", "bf16", "powersgd4"
ARMS = {
    "ddp": f"{PLAIN},{BF16},{POWERSGD},int8,lloyd4,lloyd2",
    "fsdp2": f"{PLAIN},int8/int8,lloyd4/int8",
}
WARMUP = 5  # steps of every arm before the first round
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Size:
    """A GPT, and the tokens of a rank's batch."""

    vocabulary: int = 50304
    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    rows: int = 1


SIZES = {"124m": Size(), "tiny": Size(256, 2, 2, 64, 32, 2)}


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.attended = nn.Linear(size.width, size.width)
        self.before_wide = nn.LayerNorm(size.width)
        self.wide = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """x plus what both parts add."""
        rows, length, width = x.shape
        split = self.qkv(self.before_attention(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = split.unbind()
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).reshape(rows, length, width))
        wider: Tensor = self.narrow(functional.gelu(self.wide(self.before_wide(x))))
        return x + wider


class GPT(nn.Module):
    """GPT-2's shape; the head shares the weights of the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of predicting y."""
        hidden = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = functional.linear(self.norm(hidden), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def units_of(arm: str) -> tuple[str, float | None]:
    """What travels, and the size of DDP's buckets in MB, or how many of FSDP2's blocks are one; None is the default."""
    codec, _, size = arm.partition("@")
    return (codec, float(size)) if size else (arm, None)


def ddp_step(arm: str, size: Size, batch: tuple[Tensor, Tensor]) -> Step:
    """A step of DDP; `arm` names what its gradients travel in."""
    torch.manual_seed(0)
    device = batch[0].device
    arm, bucket_mb = units_of(arm)
    model = DistributedDataParallel(GPT(size).to(device), gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device.type == "cuda")
    if arm == BF16 and device.type == "cuda":  # DDP refuses torch's hook of this name on CPU builds
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif arm == BF16:
        model.register_comm_hook(None, thinwire.hooks.bf16_compress_hook)
    elif arm == POWERSGD:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif arm != PLAIN:
        thinwire.compress_ddp(model, arm, optimizer=optimizer)
    return _step(model, optimizer, batch, torch.autocast(device.type, torch.bfloat16))


def fsdp_step(arm: str, size: Size, batch: tuple[Tensor, Tensor], own_group: bool = False) -> Step:
    """A step of FSDP2; `arm` is `gradients/weights`."""
    torch.manual_seed(0)
    device = batch[0].device
    arm, blocks_per_unit = units_of(arm)
    wrap = int(blocks_per_unit or 1)
    model = GPT(size).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = list(model.blocks)
    for at in range(0, len(blocks), wrap):
        fully_shard(blocks[at : at + wrap], mp_policy=policy)
    sharded: Any = fully_shard(model, mp_policy=policy)
    if own_group:
        sharded.set_separate_reduce_scatter_group()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device.type == "cuda")
    if arm != PLAIN:
        gradients, _, weights = arm.partition("/")
        thinwire.compress_fsdp(model, gradients, weights)
    return _step(model, optimizer, batch, nullcontext())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], casting: object) -> Step:
    def step() -> Tensor:
        with casting:  # type: ignore[attr-defined]
            loss: Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def measure(steps: dict[str, Step], rounds: int, turn: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds per step of every arm, the slowest rank's, by turns of `turn` steps."""
    found: dict[str, list[float]] = {arm: [] for arm in steps}
    for _ in range(rounds):
        for arm, step in steps.items():
            _settle(device)
            start = time.perf_counter()
            for _ in range(turn):
                step()
            _settle_own(device)
            taken = torch.tensor((time.perf_counter() - start) / turn, device=device)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            found[arm].append(1e3 * float(taken))
    return found


def _settle(device: torch.device) -> None:
    _settle_own(device)
    dist.all_reduce(torch.zeros(1, device=device))
    _settle_own(device)


def _settle_own(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_up(steps: dict[str, Step], device: torch.device, show: Callable[[str], None]) -> dict[str, float]:
    """Seconds of every arm's first step, in which GPU kernels are compiled; more steps follow."""
    first = {}
    for arm, step in steps.items():
        _settle(device)
        start = time.perf_counter()
        step()
        _settle_own(device)
        first[arm] = time.perf_counter() - start
        for _ in range(WARMUP - 1):
            loss = step()
        show(f"{arm}: first step {first[arm]:.2f} s, loss {float(loss.detach()):.4f}")
    return first


def rows(options: argparse.Namespace, numel: int, taken: dict[str, list[float]], first: dict[str, float]) -> list[dict]:  # type: ignore[type-arg]
    """One per arm, beside plain torch and, of DDP, its bf16 hook."""
    median = {arm: statistics.median(times) for arm, times in taken.items()}
    found = []
    for arm, times in taken.items():
        deciles = statistics.quantiles(times, n=10)
        found.append(
            {
                "verb": "ddp_step" if options.parallel == "ddp" else "fsdp_step",
                "codec": units_of(arm)[0],
                "algorithm": None,
                "world": dist.get_world_size(),
                "nodes": options.hosts or 1,
                "link": "tcp" if options.hosts else "memory",
                "numel": numel,
                "ms_p50": median[arm],
                "ms_p20": deciles[1],
                "ms_p80": deciles[7],
                "plain_ms": median.get(PLAIN),
                "bf16_ms": median.get(BF16),
                "speedup_plain": median[PLAIN] / median[arm] if PLAIN in median else None,
                "speedup_bf16": median[BF16] / median[arm] if BF16 in median else None,
                **dict.fromkeys(("bytes_per_rank", "bytes_formula", "wire_limit_share", "cpu_ms_per_rank")),
                **dict.fromkeys(("rel_error", "identical")),
                "bucket_mb": units_of(arm)[1] if options.parallel == "ddp" else None,
                "own_group": options.own_group,
                "wrap": int(units_of(arm)[1] or 1) if options.parallel == "fsdp2" else 1,
                "tokens": SIZES[options.size].context * SIZES[options.size].rows,  # per rank and step
                "first_step_s": first[arm],
                "rounds": len(times),
                "steps_per_turn": options.turn,
                "backend": dist.get_backend(),
                "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
            }
        )
    return found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=ARMS, default="ddp")
    parser.add_argument("--arms", help="comma-separated codecs; FSDP2: gradients/weights")
    parser.add_argument("--hosts", type=int, default=0, help="let NCCL take the ranks for so many hosts, over TCP")
    parser.add_argument("--own-group", action="store_true", help="reduce FSDP2's gradients in a group of their own")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turn", type=int, default=4, help="steps between two waits for the GPU")
    parser.add_argument("--size", choices=SIZES, default="124m")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write the record."""
    options = parse()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.hosts:
        os.environ["NCCL_HOSTID"] = f"host{rank * options.hosts // world}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    size = SIZES[options.size]
    torch.manual_seed(rank)
    tokens = torch.randint(size.vocabulary, (size.rows, size.context + 1), device=device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    make = ddp_step if options.parallel == "ddp" else functools.partial(fsdp_step, own_group=options.own_group)
    steps = {arm: make(arm, size, batch) for arm in (options.arms or ARMS[options.parallel]).split(",")}
    show: Callable[[str], None] = functools.partial(print, flush=True) if rank == 0 else lambda text: None
    first = warm_up(steps, device, show)
    taken = measure(steps, options.rounds, options.turn, device)
    numel = sum(parameter.numel() for parameter in GPT(size).parameters())
    found = rows(options, numel, taken, first)
    for arm, row in zip(steps, found, strict=True):
        show(f"{arm:>14}  {row['ms_p50']:7.1f} ms  {row['speedup_plain'] or 0:.2f} x plain")
    if rank == 0 and options.json:
        record.write(record.Record("collectives", record.conditions(device), found), options.json)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
