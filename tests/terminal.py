"""A program for tests, which imports nothing slow: run Python on a terminal, press Ctrl-C, print what was shown.

`python tests/terminal.py PATTERN ARGUMENT ...` runs `python ARGUMENT ...`, presses Ctrl-C when PATTERN is shown, and
ends with the status of that program.
"""

import os
import pty
import re
import signal
import subprocess
import sys
from types import FrameType


def ignored(number: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN, not inherited by what is started."""


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


def main(pattern: str, *arguments: str) -> int:
    """Status of the program."""
    signal.signal(signal.SIGINT, ignored)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    pressed = False
    while data := read(ours):
        shown += data
        if not pressed and re.search(pattern.encode(), shown):
            os.killpg(0, signal.SIGINT)  # as a terminal does: to every process of the group
            pressed = True
    sys.stdout.write(shown.decode(errors="replace"))
    return process.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
