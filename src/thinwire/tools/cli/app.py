"""The root of the command line: every command is entered here, one line each, and imported when it is called."""

import importlib
import io
import sys
import warnings
from collections import UserDict
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from thinwire import __version__
from thinwire.tools.cli import screen

_COMMANDS = {  # each a module of this room
    "demo": "See it work: train a small GPT plainly and compressed.",
    "bench": "Measure your link and training steps.",
    "advise": "Which codec and algorithm, if any, suit your links.",
    "rehearse": "What compression would do to the loss of your own script.",
    "report": "Show records as tables.",
    "doctor": "Report what works on this machine, and how to fix the rest.",
}
_EPILOG = """\b
Exit status:
  0    done
  1    failed; doctor: something is broken
  2    bad arguments; the message says what is allowed
  130  interrupted; measurements so far are written and printed
  141  the reader of the output went away (thinwire report ... | head -1)
\b
Example:
  thinwire demo
  thinwire doctor
  thinwire bench step --quick --json step.json
  thinwire report step.json
  thinwire --install-completion
"""


class _Commands(UserDict[str, Any]):
    """The commands by name. One is imported when it is asked for: most need torch, `thinwire --help` does not."""

    def __getitem__(self, name: str) -> Any:
        super().__getitem__(name)
        module = importlib.import_module(f"thinwire.tools.cli.{name}")
        holder = typer.Typer(rich_markup_mode=None, add_completion=False, callback=root)
        if hasattr(module, "app"):
            holder.add_typer(module.app, name=name)
        else:
            holder.command(name)(module.command)
        return get_command(holder).commands[name]  # type: ignore[attr-defined]


class _Root(TyperGroup):
    """The root command. A flag or a command that does not exist is answered with those that do."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands(_COMMANDS)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with screen.without_traceback():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with screen.without_traceback():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


def start() -> None:
    """Run the command line. Where the terminal cannot show a character, a question mark stands for it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # A warning is for the user of the command: its text, not where the code gave it.
    warnings.formatwarning = lambda message, *place, **more: f"Warning: {message}\n"
    app(prog_name="thinwire")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"thinwire {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="thinwire",
    cls=_Root,
    help="Everything a PyTorch training job puts on the wire, in 1 to 8 bits.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: the same text in a terminal, a pipe and a log
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Everything a PyTorch training job puts on the wire, in 1 to 8 bits."""
