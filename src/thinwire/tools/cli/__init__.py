"""The command line: parse, call, print."""

__all__ = ["main"]


def main() -> None:
    """The `thinwire` command."""
    from thinwire.tools.cli.app import start  # typer and rich are loaded by the command alone

    start()
