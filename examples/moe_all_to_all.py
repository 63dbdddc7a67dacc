"""A mixture of experts: tokens travel to their expert and back through a differentiable all-to-all, with two codecs.

    torchrun --nproc-per-node 2 examples/moe_all_to_all.py
    torchrun --nproc-per-node 2 examples/moe_all_to_all.py --codec int4 --backward-codec int8
    torchrun --nproc-per-node 2 examples/moe_all_to_all.py --group --codec int8

Every rank holds one expert. A token goes to the expert that the router likes best, so the number of rows varies.
Tokens travel in `--codec`, their gradients in `--backward-codec`. With `--group` both travel in `--codec`: torch's own
all-to-all, in a group with a rule. The task is the next byte of Python's help pages, on GPUs where every rank has one,
else on the CPU.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pydoc_data.topics import topics
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import cross_entropy, one_hot

import thinwire
from thinwire.collectives import traffic
from thinwire.functional import all_to_all_single

TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
CONTEXT = 8  # bytes from which the next one is guessed
BATCH = 256
WIDTH = 128


def start() -> torch.device:
    """Join the other ranks and return this rank's device."""
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return device


class Experts(nn.Module):
    """One expert on every rank, and a router that all ranks share."""

    def __init__(self, group: dist.ProcessGroup, move: Callable[..., Any]) -> None:
        super().__init__()
        self.group = group
        self.move = move
        self.router = nn.Linear(WIDTH, group.size())
        torch.manual_seed(1 + group.rank())  # routers are alike, experts are not
        self.expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.rows_sent = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the experts make of x, and how unevenly they were asked."""
        world = self.group.size()
        share = self.router(x).softmax(-1)
        best, choice = share.max(-1)
        order = choice.argsort(stable=True)  # rows for expert 0 first, then those for expert 1, ...
        out_counts = choice.bincount(minlength=world)
        in_counts = torch.empty_like(out_counts)
        dist.all_to_all_single(in_counts, out_counts, group=self.group)
        out_rows = out_counts.tolist()
        in_rows = in_counts.tolist()
        self.rows_sent += sum(out_rows) + sum(in_rows) - 2 * out_rows[self.group.rank()]  # what stays does not travel
        came = self.move(x[order], in_rows, out_rows, self.group)
        back = self.move(self.expert(came), out_rows, in_rows, self.group)
        uneven = world * (one_hot(choice, world).float().mean(0) * share.mean(0)).sum()
        return torch.zeros_like(x).index_copy(0, order, back) * best[:, None], uneven


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's batch of a step."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=generator)
    text = TEXT[starts + torch.arange(CONTEXT + 1)].long().to(device)
    return text[:, :-1], text[:, -1]


def main(steps: int, codec: str, backward_codec: str, by_group: bool) -> None:
    device = start()
    move: Callable[..., Any] = all_to_all_single_autograd  # torch's own
    if by_group:
        rule = thinwire.GroupOptions(f"all_to_all={codec}")
        group: Any = dist.new_group(backend=f"{device.type}:thinwire", pg_options=rule)
        backward_codec = codec
    else:
        group = dist.new_group()  # of its own, so that its bytes are counted apart
        way: dict[str, Any] = {"codec": codec, "backward_codec": backward_codec, "algorithm": "compressed"}
        move = partial(all_to_all_single, **way)
    torch.manual_seed(0)
    front = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, WIDTH), nn.ReLU()).to(device)
    head = nn.Linear(WIDTH, 256).to(device)
    experts = Experts(group, move).to(device)
    shared = [*front.parameters(), *head.parameters(), *experts.router.parameters()]
    own = list(experts.expert.parameters())
    optimizer = torch.optim.AdamW([*shared, *own], lr=3e-3)
    losses: list[float] = []
    for step in range(steps):
        x, y = batch(step, device)
        hidden = front(x)
        mixed, uneven = experts(hidden)
        loss = cross_entropy(head(hidden + mixed), y)
        optimizer.zero_grad()
        (loss + 0.01 * uneven).backward()
        gradients = [parameter.grad for parameter in shared if parameter.grad is not None]
        thinwire.all_reduce_coalesced(gradients, dist.ReduceOp.AVG, codec="int8", algorithm="two_phase")
        for parameter in own:  # its tokens came from all ranks, whose losses are averaged
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        losses.append(loss.item())
    plain = 2 * experts.rows_sent * WIDTH * 4  # in fp32, forward and backward
    sent = traffic(group).sent
    if dist.get_rank() == 0:
        print(f"{codec} forward, {backward_codec} backward: loss {losses[0]:.3f} -> {mean(losses[-10:]):.3f}")
        print(f"tokens: {sent:,} bytes sent instead of {plain:,}: {plain / sent:.2f} times fewer")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--codec", default="e4m3", help="of tokens on their way to experts and back")
    parser.add_argument("--backward-codec", default="int8", help="of their gradients")
    parser.add_argument("--group", action="store_true", help="torch's own all-to-all, in a group that compresses")
    options = parser.parse_args()
    main(options.steps, options.codec, options.backward_codec, options.group)
