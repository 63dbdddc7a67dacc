"""The tree of errors: what is raised on purpose is a ThinwireError, and errors.py draws all of them."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

from thinwire import errors
from thinwire.errors import ThinwireError

PACKAGE = Path(errors.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ThinwireError)]

# What Python's protocols and a timeout ask for, in any file.
PROTOCOL = {"AttributeError", "BrokenPipeError", "KeyboardInterrupt", "NotImplementedError", "TimeoutError"}
# (file, class): a call that fits no signature is a TypeError and nothing else, as in any function.
SIGNATURES = {("collectives/auto_quantize.py", "TypeError"), ("integrations/choice/options.py", "TypeError")}


def builtins_raised(source: str) -> Iterator[tuple[int, str]]:
    """(line, class) of every raise of one of Python's own exceptions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(raised, ast.Name) and isinstance(getattr(builtins, raised.id, None), type):
                yield node.lineno, raised.id


def test_what_is_raised_on_purpose_is_of_the_tree() -> None:
    found = [
        (path.relative_to(PACKAGE).as_posix(), line, raised)
        for path in MODULES
        for line, raised in builtins_raised(path.read_text())
    ]
    strays = [one for one in found if one[2] not in PROTOCOL and (one[0], one[2]) not in SIGNATURES]
    faults = [f"{name}:{line} raises {raised}" for name, line, raised in strays]
    assert not faults, "raise a class of thinwire/errors.py:\n" + "\n".join(faults)


def test_the_rule_sees_both_forms_of_a_raise() -> None:
    source = "if x:\n    raise ValueError('x')\nelse:\n    raise TypeError\nraise errors.CodecError('y')\n"
    assert sorted(builtins_raised(source)) == [(2, "ValueError"), (4, "TypeError")]


def test_the_drawing_is_the_tree() -> None:
    """Every class stands in the docstring under its parent, with the class of Python's own that it is as well."""
    drawn: dict[str, tuple[str, str | None]] = {}
    above: dict[int, str] = {-1: "ThinwireError"}
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"([│ ]*)[├└]── (\w+)(?: +\((\w+)\))?", line):
            depth = len(found[1]) // 4
            above[depth] = found[2]
            drawn[found[2]] = above[depth - 1], found[3]
    made = {}
    for cls in CLASSES[1:]:
        parent, *own = cls.__bases__
        made[cls.__name__] = parent.__name__, own[0].__name__ if own else None
    assert CLASSES[0] is ThinwireError
    assert drawn == made
