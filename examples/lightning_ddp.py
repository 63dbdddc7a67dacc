"""Lightning: a callback compresses what `strategy="ddp"` sends, and Lightning's own checkpoint resumes bit for bit.

    torchrun --nproc-per-node 2 examples/lightning_ddp.py
    torchrun --nproc-per-node 2 examples/lightning_ddp.py --codec none int8 lloyd4 lloyd2    # one run after the other

A small network learns to guess the next byte of Python's help pages: on GPUs where every rank has one, else on the CPU.
Another run is saved after one epoch, and a third goes on from that checkpoint: it ends with the weights of the first.
"""

import argparse
import os
import tempfile
from pydoc_data.topics import topics

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.lightning import Compress

TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
CONTEXT = 16  # bytes from which the next one is guessed
BATCH = 128  # of every rank
EARLY = 5  # steps in int8 before a codec of less than 4 bits: Adam's moments have to mean something first
RANKS = int(os.environ["LOCAL_WORLD_SIZE"])  # of this machine


class Guesser(lightning.LightningModule):
    """An ordinary LightningModule: nothing in it knows of compression."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 256))
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (text,) = batch
        loss = cross_entropy(self.net(text[:, :-1]), text[:, -1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data(steps: int) -> DataLoader[tuple[Tensor, ...]]:
    """An epoch of `steps` batches for every rank; Lightning deals them out."""
    count = steps * int(os.environ["WORLD_SIZE"]) * BATCH
    starts = torch.randint(len(TEXT) - CONTEXT, (count, 1), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(TEXT[starts + torch.arange(CONTEXT + 1)].long()), batch_size=BATCH, shuffle=True)


def fit(compress: Compress, steps: int, epochs: int, path: str | None = None) -> lightning.Trainer:
    """Train a new network, or go on from the checkpoint at `path`."""
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.device_count() >= RANKS else "cpu",
        devices=RANKS,
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        callbacks=compress,  # the one line
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Guesser(), data(steps), ckpt_path=path)
    return trainer


def run(name: str, steps: int) -> None:
    """Two epochs without a break; then one that is saved, and another that goes on from there."""
    codec = {0: "int8", EARLY: name} if name[-1] in "123" else name
    compress = Compress(codec)
    straight = fit(compress, steps, epochs=2)
    with tempfile.TemporaryDirectory() as folder:
        path = straight.strategy.broadcast(f"{folder}/epoch1.ckpt")  # rank 0's
        fit(Compress(codec), steps, epochs=1).save_checkpoint(path)  # all ranks call it, rank 0 writes
        resumed = fit(Compress(codec), steps, epochs=2, path=path)
    if straight.is_global_zero and compress.handle is not None:
        weights = (run.lightning_module.parameters() for run in (straight, resumed))
        apart = max((one - other).abs().max().item() for one, other in zip(*weights, strict=True))
        stats = compress.handle.stats()
        print(stats)
        loss = straight.callback_metrics["loss"]
        print(f"{name:8} loss {loss:.3f}, {stats.ratio:.2f} times fewer bytes; resumed weights differ by {apart:g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of each of the two epochs")
    parser.add_argument("--codec", nargs="+", default=["lloyd2"])
    options = parser.parse_args()
    for codec in options.codec:
        run(codec, options.steps)
