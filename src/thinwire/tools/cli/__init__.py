"""The command line: parse, call, print."""

import time

__all__ = ["BEGUN", "main"]

BEGUN = time.monotonic()  # of the command: what it imports counts


def main() -> None:
    """The `thinwire` command."""
    from thinwire.tools.cli.app import start  # typer and rich are loaded by the command alone

    start()
