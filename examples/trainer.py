"""The Trainer of Hugging Face: a small Llama whose gradients travel in four bits, and which goes on from a checkpoint.

torchrun --nproc-per-node 2 examples/trainer.py    # on GPUs where there are any; writes to ./trainer-checkpoints
"""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from thinwire.integrations.transformers import Compress

FOLDER = "trainer-checkpoints"
LLAMA = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)


def texts() -> list[dict[str, Tensor]]:
    """Tokens that count upwards, from anywhere, by one, two or three."""
    starts = torch.randint(0, 64, (512, 1), generator=torch.Generator().manual_seed(0))
    tokens = (starts + torch.arange(32) * (1 + starts % 3)) % 64
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(steps: int, resume: str | None = None) -> None:
    """Train so many steps in all, from the beginning or from a checkpoint."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=FOLDER,
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=20,
        save_steps=40,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    compress = Compress("lloyd4")  # the one line, and the callback
    trainer = Trainer(LlamaForCausalLM(LLAMA), arguments, train_dataset=texts(), callbacks=[compress])
    result = trainer.train(resume_from_checkpoint=resume)
    if trainer.is_world_process_zero() and compress.handle is not None:
        print(f"steps {trainer.state.global_step}: loss {result.training_loss:.3f}")
        print(compress.handle.stats())


if __name__ == "__main__":
    train(40)
    train(60, resume=f"{FOLDER}/checkpoint-40")
    if dist.is_initialized():
        dist.destroy_process_group()
