"""Benchmarks a user runs: link, collectives, step. Each returns a record that keeps its numbers with their conditions.

To add one: list its columns in `record.COLUMNS`; write a module whose `run(..., progress) -> Record` passes the rows of
`progress(cases)` to `record.collect`; give it a table in report.py and a command in cli/bench.py. Studies that
only the authors run are in the repository's benchmarks/ folder.
"""
