"""Ask what compression would do to your loss before you book a cluster.

    thinwire rehearse examples/rehearse.py --codecs int8,lloyd4,int2 --world 4 --seeds 3 -- 150

An ordinary training script with gradient accumulation: a step has one backward pass per rank, and nothing is divided
by their number. Run alone, it plays 4 ranks that send int8.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import thinwire

RANKS = 4
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 150
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
train, held_out = torch.arange(len(images)).split([1500, len(images) - 1500])

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
thinwire.rehearse(model, "int8", world=RANKS, optimizer=optimizer)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)


def loss_on(rows: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images[rows]), labels[rows])


for step in range(STEPS):
    for _ in range(RANKS):
        loss_on(train[torch.randint(len(train), (16,))]).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 10 == 9:
        with torch.no_grad():
            loss = loss_on(held_out)
        thinwire.report_loss(loss)
print(f"held-out loss {float(loss):.4f}")
