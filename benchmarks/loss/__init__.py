"""What a codec costs in loss: pairs of runs that differ in nothing but what travels.

task.py has the text and the networks, arms.py what happens to gradients on their way, runs.py trains and keeps finished
runs in a file, curve.py compares runs by pairs, writes the record and draws the plot.
"""
