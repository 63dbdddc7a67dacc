"""Advice: link + model + world -> codec and algorithm, with the predicted time of a step.

    slow, fast = (LinkModel.of_rate(units.rate(text)) for text in ("25gbit", "400GB/s"))
    job = TrainingJob(params=7_000_000_000, step_s=1.2)
    verdict.judge(job, Cluster(64, 8, across=slow, inside=fast), machine.recorded("cuda"))

Pure functions of their arguments, but for `measure.py`, which asks the ranks of a running job. The formulas stand in
docs/reference/advise.md. To add a scheme: its name and where it applies in `schemes.py`, its stages in `model.py`.
"""
