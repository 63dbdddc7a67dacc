"""Hugging Face Accelerate: gradients travel in 8 bits, then in two, and a checkpoint goes on with the same bits.

torchrun --nproc-per-node 2 examples/accelerate_ddp.py                    # on GPUs where there are any
accelerate launch --multi_gpu --num_processes 2 examples/accelerate_ddp.py    # the same, CPUs included
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.accelerate import compress


def main() -> None:
    """Train, save, train on; go back to what was saved, and train on again."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(4096, 64)
    loader = DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=32)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    handle = compress(accelerator, model, {0: "int8", 10: "lloyd2"}, optimizer=optimizer)  # the one line

    def train() -> float:
        for inputs, wanted in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs) - wanted).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return float(accelerator.reduce(loss.detach(), "mean"))

    folder = broadcast_object_list([tempfile.mkdtemp()])[0]  # rank 0's
    accelerator.print(f"first epoch: loss {train():.6f}")
    accelerator.save_state(folder)
    accelerator.print(f"second epoch: loss {train():.6f}")
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    accelerator.print(f"second epoch, from the checkpoint: loss {train():.6f}")
    accelerator.print(handle.stats())
    accelerator.end_training()


if __name__ == "__main__":
    main()
