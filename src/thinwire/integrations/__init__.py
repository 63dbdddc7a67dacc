"""thinwire in training frameworks: DDP, FSDP2, DiLoCo, Lightning, Accelerate, transformers' Trainer.

The path of a bucket: ddp (the hook) → checkpoint (buckets of a resumed run) → sync (lanes, messages, feedback) →
collectives. Sharded gradients and weights: fsdp/. DiLoCo's rounds take sync's path, too. Weights for workers: weights.
Beside them: choice/ (which codec and feedback a parameter has at a step), models (what is inside what a user passes,
and parameters' names), lanes, stats (what was sent and lost; handles and logs). On top: lightning, accelerate and
transformers, which call `compress_wrapped` (fsdp/) at the right time and put the handle's state into the framework's
checkpoints.

To add a framework: do what those three do. To add another kind of parallelism: a `Handle` that averages `GradientSet`s
with a `GradientSync`.
"""
