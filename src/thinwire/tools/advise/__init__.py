"""Advice: model, ranks and links -> codec and algorithm, with the predicted time of a step.

    slow, fast = (LinkModel.of_rate(units.rate(text)) for text in ("25gbit", "400GB/s"))
    job = TrainingJob(params=7_000_000_000, step_s=1.2)
    verdict.judge(job, Cluster(64, 8, across=slow, inside=fast), cluster.recorded("cuda"))

Pure functions of their arguments. The formula is at the top of model.py and in docs/reference/cli.md.
"""
