"""Benchmarks: measure, and hand back a record in which every number travels with its conditions.

To add one: list its columns in `record.COLUMNS`; write a module whose `run(..., progress) -> Record` makes a list of
cases and gives the rows of `progress(cases)` to `record.collect`; give it a grid in report/kinds.py and a command in
cli/bench.py.
"""
