"""Ask what compression would do to your loss before you book a cluster.

    thinwire rehearse examples/rehearse.py --codecs int8,lloyd4,int2 --world 4 --seeds 3

An ordinary training script with gradient accumulation: a step has one backward pass per rank, and nothing is divided
by their number. Run alone, `python examples/rehearse.py` plays 4 ranks that send int8.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import thinwire

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--codec", default="int8")
parser.add_argument("--steps", type=int, default=150)
options = parser.parse_args()
RANKS = 4

images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
train, held_out = torch.arange(len(images)).split([1500, len(images) - 1500])

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
handle = thinwire.rehearse(model, options.codec, world=RANKS, optimizer=optimizer)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.steps)


def loss_on(rows: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images[rows]), labels[rows])


for step in range(options.steps):
    for _ in range(RANKS):
        loss_on(train[torch.randint(len(train), (16,))]).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 10 == 9:
        with torch.no_grad():
            loss = loss_on(held_out)
        thinwire.report_loss(loss)
print(f"loss {float(loss):.4f}, {handle.stats().ratio:.2f} times fewer bytes")
