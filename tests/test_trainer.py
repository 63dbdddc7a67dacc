"""Compress for Hugging Face's Trainer, with the real package: bits, bounds and bytes, logs, checkpoints, FSDP2."""

import shutil
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import huggingface as hf
from cases import on_ranks, seeded
from ranks import RankPool
from replicas import Group, flat, gradients_saved, message_of, same_everywhere

for package in ("accelerate", "transformers"):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'thinwire[transformers]'", allow_module_level=True)

RANKS_IMPORT = ("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama")
RATE = 0.1
LLAMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}


class Run(NamedTuple):
    """A training with the Trainer, and what is done to it."""

    options: Mapping[str, Any] | None = None  # of Compress; None trains without it
    args: Mapping[str, Any] = {}
    folder: str = ""
    resume: str | bool | None = None
    sharded: bool = False
    watched: bool = False  # whether the ranks' own gradients are looked at
    times: int = 1  # that train() is called


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def texts() -> list[dict[str, Tensor]]:
    drawn = torch.randint(0, 64, (48, 16), generator=seeded(2))
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn]


def trainer_of(run: Run, model: nn.Module, callbacks: list[Any], **more: Any) -> Any:
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import Trainer, TrainingArguments

    args = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 3e-3, "logging_steps": 1}
    args |= {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, **run.args}
    with tempfile.TemporaryDirectory() as unused:
        arguments = TrainingArguments(output_dir=run.folder or unused, **args)
        trainer = Trainer(
            model, arguments, train_dataset=texts(), eval_dataset=texts()[:4], callbacks=callbacks, **more
        )
    if run.sharded:
        hf.shard_on_cpu(trainer.accelerator, FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args))
        trainer.is_fsdp_enabled = True
    return trainer


def train(group: Group, run: Run) -> hf.Found:
    """Train as the Trainer's users do."""
    from transformers import TrainerCallback

    from thinwire.integrations.transformers import Compress

    class Reporter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, *given: Any, logs: dict[str, Any], **more: Any) -> None:
            reported.append(dict(logs))

    reported: list[dict[str, Any]] = []
    with hf.launched(group):
        compress = None if run.options is None else Compress(**run.options)
        model = llama()
        peaks = hf.watch_gradients(model) if run.watched else {}
        trainer = trainer_of(run, model, [Reporter(), *([] if compress is None else [compress])])
        for _ in range(run.times):
            trainer.train(resume_from_checkpoint=run.resume)
        weights = [p.detach().full_tensor() if run.sharded else p.detach() for p in trainer.model.parameters()]
        assert same_everywhere(group, *weights)
        kept = [w.clone() for w in weights]
        if compress is None or compress.handle is None:
            return hf.Found(kept, hf.largest(group, peaks), None, torch.zeros(0), reported=reported)
        stats, owed = compress.handle.stats(), hf.remembered(compress.handle)
        return hf.Found(kept, 0.0, stats, owed, logs=trainer.state.log_history, reported=reported)


ACCUMULATED = {"gradient_accumulation_steps": 2}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
WAYS: dict[str, Mapping[str, Any]] = {
    "accumulated in bf16": {"bf16": True, **ACCUMULATED},
    "recomputed and evaluated": {"gradient_checkpointing": True, **EVALUATED},
}
STEP = {"optim": "sgd", "learning_rate": RATE, "max_steps": 1, "max_grad_norm": 0.0}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_trainer_s_model_is_compressed(group: Group, way: str) -> None:
    """Four clipped steps of AdamW, and one of SGD: without thinwire, and with what rounds nothing or int8."""
    args = WAYS[way]
    step = {**args, **STEP}
    runs = [Run(None, args), Run({"codec": "none"}, args), Run(None, step, watched=True), Run({}, step)]
    plain, none, exact, int8 = (train(group, run) for run in runs)
    hf.assert_compressed(plain, none, exact, int8, rate=RATE, share=0.3)


def test_stats_are_in_the_trainer_s_logs(ranks: RankPool) -> None:
    first, other = ranks(2).run(train, Run({"codec": "lloyd4"}, {"eval_strategy": "steps", "eval_steps": 2}))
    ratios = [entry["thinwire/ratio"] for entry in first.logs if "loss" in entry]
    assert (len(ratios), ratios[-1]) == (4, pytest.approx(first.stats.ratio))
    assert [entry["thinwire/ratio"] for entry in first.reported if "loss" in entry] == ratios
    assert all("thinwire/ratio" not in entry for entry in first.logs if "eval_loss" in entry)
    assert all("thinwire/ratio" not in entry for entry in other.logs)


def test_train_may_be_called_again(ranks: RankPool) -> None:
    for found in ranks(2).run(train, Run({"codec": "lloyd2"}, {"max_steps": 2}, times=2)):
        assert (found.stats.steps, found.stats.feedback) == (4, "none+moments")
        assert found.stats.ratio > 12  # from the first step on: the optimizer is known


def run_out(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
    if len(inputs["input_ids"]) == 4:
        raise RuntimeError("CUDA out of memory.")


@on_ranks(2)
def test_a_model_that_is_wrapped_anew_is_compressed(group: Group) -> None:
    """The Trainer runs out of memory, and wraps the model anew for smaller batches."""
    from thinwire.integrations.transformers import Compress

    model = llama()
    model.model.register_forward_pre_hook(run_out, with_kwargs=True)
    compress = Compress("int8")
    with hf.launched(group):
        args = {"per_device_train_batch_size": 4, "auto_find_batch_size": True, "max_steps": 2}
        trainer = trainer_of(Run(None, args), model, [compress])
        trainer.train()
        assert same_everywhere(group, flat(list(model.parameters())))
    assert trainer._train_batch_size < 4
    assert compress.handle.stats().steps == 2


SAVED = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
FSDP = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
REMEMBERED: dict[str, Run] = {
    "ef21": Run({"codec": "lloyd2", "feedback": "ef21"}, SAVED),
    "sharded": Run({"codec": "lloyd2", "feedback": "ef21", "weights": "int8"}, {**SAVED, **FSDP}, sharded=True),
}
CLASSIC = Run({"codec": "lloyd2"}, {**SAVED, "optim": "sgd", "learning_rate": RATE})


def assert_goes_on(resumed: hf.Found, whole: hf.Found) -> None:
    assert all(torch.equal(mine, other) for mine, other in zip(resumed.weights, whole.weights, strict=True))
    assert torch.equal(resumed.owed, whole.owed)


@pytest.mark.parametrize("kind", REMEMBERED)
def test_a_checkpoint_goes_on_with_the_same_bits(ranks: RankPool, kind: str) -> None:
    """From the last one in the folder of the run."""
    with tempfile.TemporaryDirectory() as folder:
        run = REMEMBERED[kind]._replace(folder=folder)
        whole, kept = ranks(2).run(train, run), Path(folder) / "checkpoint-3"
        assert [path.name for path in kept.glob("thinwire*")] == ["thinwire.pt"]
        shutil.rmtree(Path(folder) / "checkpoint-6")
        resumed = ranks(2).run(train, run._replace(resume=True))
    for mine, other in zip(resumed, whole, strict=True):
        assert_goes_on(mine, other)
        assert other.owed.abs().max() > 1e-4
        assert other.stats.bytes_sent < 0.3 * other.stats.bytes_plain
    assert not torch.equal(whole[0].owed, whole[1].owed)


def lost(group: Group, run: Run) -> list[str]:
    if group.rank() > 0:
        train(group, run)
        return []
    with pytest.warns(UserWarning, match="thinwire.pt") as told:
        train(group, run)
    return [str(warning.message) for warning in told]


def test_a_checkpoint_elsewhere_is_found_or_missed_aloud(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        run = CLASSIC._replace(folder=first)
        whole, moved = ranks(2).run(train, run), f"{second}/moved"
        shutil.move(f"{first}/checkpoint-3", moved)
        other = run._replace(folder=f"{second}/run", resume=moved)
        missing, _ = ranks(2).run(lost, other)
        ranks(2).run(train, other._replace(resume=None, args={**run.args, "max_steps": 3, "seed": 7}))
        strange, _ = ranks(2).run(lost, other)  # of the same step, and of another run
        resumed = ranks(2).run(train, other._replace(args={**run.args, "resume_from_checkpoint": moved}))
    for mine, one in zip(resumed, whole, strict=True):
        assert_goes_on(mine, one)
    for told in (missing, strange):
        assert len(told) == 1
        assert f"{second}/run/checkpoint-3" in told[0]


def test_a_run_that_was_not_compressed_goes_on_compressed(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks(2).run(train, Run(None, {**SAVED, "max_steps": 3}, folder))
        for found in ranks(2).run(train, Run({"codec": "lloyd2"}, SAVED, folder, resume=True)):
            assert found.stats.steps == 3
            assert found.stats.bytes_sent > 0


@on_ranks(2)
def test_a_sharded_model_is_compressed(group: Group) -> None:
    """FSDP2 without thinwire, and with it; one step of SGD, in DDP and in FSDP2."""
    several = {**FSDP, **ACCUMULATED}
    runs = [
        Run(None, several, sharded=True),
        Run({"codec": "none"}, several, sharded=True),
        Run(None, STEP, watched=True),
        Run({}, {**STEP, **FSDP}, sharded=True),
    ]
    plain, none, exact, int8 = (train(group, run) for run in runs)
    assert all(torch.equal(mine, other) for mine, other in zip(none.weights, plain.weights, strict=True))
    hf.assert_within_int8(int8.weights, exact.weights, exact.peak, RATE)
    assert gradients_saved(int8.stats, flat(int8.weights).numel()) > 0.7


@on_ranks(1)
def test_one_process_trains(group: Group, tmp_path: Path) -> None:
    """A program that nobody launched."""
    from thinwire.integrations.transformers import Compress

    compress = Compress("lloyd2")
    with hf.launched(None):
        run = Run(None, {**SAVED, "max_steps": 3}, str(tmp_path))
        trainer_of(run, llama(), [compress]).train()
        trainer_of(run._replace(args=SAVED), llama(), [compress]).train(resume_from_checkpoint=True)
    assert compress.handle.stats().bytes_sent == 0
    assert not [*tmp_path.glob("*/thinwire.pt")]


@on_ranks(2)
def test_misuse_is_refused_by_name(group: Group) -> None:
    from transformers import TrainerControl, TrainerState

    from thinwire.integrations.transformers import Compress

    with hf.launched(group):
        trainer = trainer_of(Run(), llama(), [Compress(weights="int8")])
        calls: list[tuple[Any, str]] = [
            (lambda: Compress("int99"), "int99"),
            (lambda: Compress(weights="int99"), "int99"),
            (lambda: Compress(color="red"), "TypeError!"),  # type: ignore[call-arg]
            (trainer.train, "weights="),
            (lambda: Compress().on_train_begin(trainer.args, TrainerState(), TrainerControl()), "Trainer"),
        ]
        for call, word in calls:
            assert word in message_of(call)
