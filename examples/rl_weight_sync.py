"""Reinforcement learning as with GRPO: a trainer, and inference processes that follow its weights bit for bit.

    torchrun --nproc-per-node 3 examples/rl_weight_sync.py
    torchrun --nproc-per-node 3 examples/rl_weight_sync.py --rate 1e-5

Rank 0 trains a small random Llama in fp32. The other ranks hold it in bf16, as an inference engine would, and
`generate` several completions of every prompt. The reward of a completion is the share of its tokens that are even
numbers; its advantage is its reward beside those of the same prompt. After every step the trainer publishes what
changed in bf16, and the workers apply it: the same bits as if all weights had been sent. The printed loss is 1 - the
mean reward.
Runs on GPUs where every rank has one, else on the CPU. Needs transformers.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import thinwire

Model: Any = LlamaForCausalLM
Config: Any = LlamaConfig
VOCABULARY, PROMPT, LENGTH = 64, 4, 8  # tokens; of a prompt; of a completion
PROMPTS, EACH = 4, 8  # of every worker, completions of each prompt


def start() -> torch.device:
    """Join the other ranks and return this rank's device."""
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return device


def new_model(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Model(Config(vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=None, **sizes))


def complete(model: Any, step: int) -> Tensor:
    """Prompts with completions, those of one prompt one after the other: what an inference engine does."""
    torch.manual_seed(1000 * step + dist.get_rank())
    prompts = torch.randint(1, VOCABULARY, (PROMPTS, PROMPT), device=model.device).repeat_interleave(EACH, 0)
    mask = torch.ones_like(prompts)
    found: Tensor = model.generate(
        prompts, attention_mask=mask, do_sample=True, min_new_tokens=LENGTH, max_new_tokens=LENGTH, top_k=0
    )
    return found


def gathered(tokens: Tensor) -> Tensor:
    """The completions of all workers, on every rank; the trainer has none."""
    parts = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tokens)
    return torch.cat(parts[1:])


def rewards_of(tokens: Tensor) -> Tensor:
    return (tokens[:, PROMPT:] % 2 == 0).float().mean(1)


def improve(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    rewards = rewards_of(tokens).view(-1, EACH)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    logits = model(tokens).logits[:, PROMPT - 1 : -1]
    chosen = logits.log_softmax(2).gather(2, tokens[:, PROMPT:, None])[..., 0]
    optimizer.zero_grad()
    (-(advantages * chosen).mean()).backward()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-3, help="of AdamW; smaller => fewer weights change in bf16")
    args = parser.parse_args()
    device = start()
    group = dist.group.WORLD
    assert group is not None
    is_trainer = dist.get_rank() == 0
    model = new_model(dist.get_rank()).to(device, torch.float32 if is_trainer else torch.bfloat16)
    if is_trainer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
        publisher = thinwire.WeightPublisher(model, dtype=torch.bfloat16)
    else:
        subscriber = thinwire.WeightSubscriber(model)
    sent = []
    for step in range(args.steps):
        if is_trainer:
            sent.append(len(publisher.publish(group=group)))
            tokens = gathered(torch.zeros(PROMPTS * EACH, PROMPT + LENGTH, dtype=torch.int64, device=device))
            improve(model, optimizer, tokens)
            if step % 5 == 0 or step + 1 == args.steps:
                loss = 1 - rewards_of(tokens).mean().item()
                print(f"step {step:3}  version {publisher.version:3}  loss {loss:.3f}  {sent[-1]:,} bytes", flush=True)
        else:
            assert subscriber.receive(group) == step + 1
            gathered(complete(model, step))
    check = torch.cat([p.detach().bfloat16().float().flatten() for p in model.parameters()])
    if is_trainer:  # the last step is not published yet
        publisher.publish(group=group)
    else:
        subscriber.receive(group)
        check = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    copies = [torch.empty_like(check) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, check)
    if is_trainer:
        each = sum(sent[1:]) / len(sent[1:])
        print(f"workers have the trainer's weights: {all(torch.equal(copies[0], copy) for copy in copies)}")
        print(f"{each:,.0f} bytes a sync beside {sent[0]:,} of a snapshot: {sent[0] / each:.2f} times fewer")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
