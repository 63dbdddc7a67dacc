"""Hugging Face's Trainer: a callback that compresses what its ranks send each other.

trainer = Trainer(model, args, train_dataset=..., callbacks=[Compress("int8")])    # the rest of the script stays
"""

import uuid
import warnings
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Unpack

import torch

from thinwire.errors import CollectiveError, MissingPackageError
from thinwire.integrations import checkpoint
from thinwire.integrations.choice.options import CodecChoice, CodecLike, DDPKeywords, framework_options
from thinwire.integrations.models import live_objects

if find_spec("transformers") is None or find_spec("accelerate") is None:
    raise MissingPackageError(
        "thinwire.integrations.transformers needs transformers and accelerate, not installed here: "
        "pip install 'thinwire[transformers]'"
    )
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from thinwire.integrations.accelerate import Handle, SingleProcess, compress_prepared, load_shared

_FILE = "thinwire.pt"  # in a checkpoint's folder
_KEY = "thinwire"  # in trainer_state.json
_LOGGED = ("bytes_sent", "ratio", "bits_per_element", "relative_error", "nonfinite")


class TrainerCompress(TrainerCallback):  # type: ignore[misc]
    """Compress what a Trainer's ranks send each other in `train`.

    It calls `thinwire.compress_ddp` for a model in DDP, and `thinwire.compress_fsdp` for one that FSDP2 shards. It
    takes the options of these functions; `optimizer` is the Trainer's own unless you pass another. `handle` is what
    they returned: `handle.stats()` says what was sent. Bytes and errors go into the Trainer's logs as `thinwire/...`.
    Checkpoints hold what feedback remembers on all ranks, in thinwire.pt; `resume_from_checkpoint` loads it.
    """

    def __init__(
        self,
        codec: CodecChoice = "int8",
        *,
        weights: CodecLike | None = None,
        replica: bool | None = None,
        **options: Unpack[DDPKeywords],
    ) -> None:
        self._options = framework_options(codec, options, weights=weights, replica=replica)
        self.handle: Handle | None = None
        self._codec = codec
        self._model: Callable[[], Any] = lambda: None  # a weak reference to what is compressed
        self._run = ""  # a name for this run, in the checkpoints that it writes

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compress the model, which is wrapped now; a checkpoint's weights and optimizer are loaded already."""
        trainer = _trainer_of(state)
        handler = trainer.callback_handler
        handler.callbacks = [self, *(other for other in handler.callbacks if other is not self)]  # on_log runs first
        if self.handle is None or trainer.model_wrapped is not self._model():
            options = {"optimizer": trainer.optimizer, **self._options}
            self.handle = compress_prepared(trainer.accelerator, trainer.model_wrapped, self._codec, options)
            self._model = weakref.ref(trainer.model_wrapped)
        if isinstance(self.handle, SingleProcess):
            return
        if state.global_step:
            load_shared(self.handle, self._read(args, state))
        self._run = uuid.uuid4().hex
        kept: Any = state.stateful_callbacks  # goes into trainer_state.json; a dict once training has begun
        kept[_KEY] = {"run": self._run}

    def _read(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        """Our state from the checkpoint that the Trainer resumes from; the Trainer does not say where that is."""
        kept: Any = state.stateful_callbacks
        run = kept.get(_KEY, {}).get("run")
        folders = [_folder(args, state)]
        if isinstance(args.resume_from_checkpoint, str):
            folders.insert(0, Path(args.resume_from_checkpoint))
        for path in (folder / _FILE for folder in folders):
            if run is not None and path.is_file():
                saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                if (saved["run"], saved["step"]) == (run, state.global_step):
                    return dict(saved["state"])
        if run is not None and state.is_world_process_zero:
            warnings.warn(
                f"the run resumes from step {state.global_step} without what compression remembered there: its "
                f"{_FILE} is not in {' nor in '.join(map(str, folders))}. If the checkpoint is elsewhere, name it "
                "in TrainingArguments(resume_from_checkpoint=...), too",
                stacklevel=2,
            )
        return {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add what was sent to the logs, before other callbacks report them."""
        if self.handle is None or not logs or "loss" not in logs or not state.is_world_process_zero:
            return
        stats = self.handle.stats()
        found = {f"thinwire/{name}": value for name in _LOGGED if (value := getattr(stats, name)) is not None}
        logs.update(found)
        state.log_history[-1].update(found)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add rank 0's file to the checkpoint that the Trainer has just written."""
        if self.handle is None or self.handle.closed or args.save_only_model or state.is_hyper_param_search:
            return
        if saved := self.handle.state_dict(gather=True):
            content = {"run": self._run, "step": state.global_step, "state": saved}
            checkpoint.write(_folder(args, state) / _FILE, content)


Compress = TrainerCompress


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer keeps the checkpoint of this step."""
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def _trainer_of(state: TrainerState) -> Trainer:
    """The Trainer whose state this is. It passes callbacks neither itself nor the wrapped model."""
    for trainer in live_objects(Trainer):
        if vars(trainer).get("state") is state:
            return trainer
    raise CollectiveError("Compress: expected to be called by a transformers.Trainer, and none has this state")
