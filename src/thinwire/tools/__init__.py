"""The command line and what it needs: cli parses and prints, bench measures, report draws, advise predicts.

Nothing of the library imports from here.
"""
