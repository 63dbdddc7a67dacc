"""Hooks for mkdocs: files beside docs/, and docstrings as Markdown."""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "examples/*.*")  # files outside docs/ that the site has too
ARGUMENT = re.compile(r"^(?P<names>\w+(?:, \w+)*): ", re.MULTILINE)
STARRED = re.compile(r'(?<!`)"[^"\n`]*\*[^"\n`]*"(?!`)')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages and examples outside docs/ to the site."""
    for path in sorted(found for pattern in BESIDE for found in ROOT.glob(pattern)):
        name = str(path.relative_to(ROOT))
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/: the site has everything below one root."""
    up = "../" * page.file.src_uri.count("/")
    if page.file.src_dir == config.docs_dir:
        return markdown.replace(f"]({up}../", f"]({up}")
    return markdown.replace(f"]({up}docs/", f"]({up}")


class Arguments(griffe.Extension):
    """Turns lines `name: meaning` of a docstring into list items, and strings with a star into code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Turn the arguments in a docstring into a list."""
        if obj.docstring is not None and isinstance(obj, griffe.Function | griffe.Class):
            head, first, rest = _partition(STARRED.sub(r"`\g<0>`", obj.docstring.value))
            obj.docstring.value = head + ARGUMENT.sub(r"- `\g<names>`: ", first + rest)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Give keywords from `unpack_typeddict` the defaults of the dataclass."""
        fields = func.package["integrations.choice.options.DDPOptions"].members
        for parameter in func.parameters:
            if parameter.default == "..." and parameter.name in fields:
                parameter.default = fields[parameter.name].value


def _partition(text: str) -> tuple[str, str, str]:
    """Return the text before the first argument, the argument's name, and the rest."""
    found = ARGUMENT.search(text)
    if found is None:
        return text, "", ""
    return text[: found.start()].rstrip("\n") + "\n\n", found[0], text[found.end() :]
