"""The one build step pyproject.toml cannot say: native/*.c becomes thinwire/kernels/_native.so.

The library is plain C for ctypes, tied to no Python or torch ABI, hence the bare file name and the py3-none wheel tag.
It is optional: with no working compiler, or with THINWIRE_NO_NATIVE=1 in the environment, the package is built without
it (tag py3-none-any) and the torch reference serves.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from textwrap import shorten
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

NATIVE = Extension(
    "thinwire.kernels._native",
    sources=sorted(glob("native/*.c")),
    depends=sorted(glob("native/*.h") + glob("native/*.inc")),
    extra_compile_args=[
        "-O3",
        "-g0",  # Python's own flags may ask for symbols, four fifths of the library
        "-std=gnu11",
        "-fPIC",
        "-fno-fast-math",
        "-ffp-contract=off",  # same bytes as the torch reference: no fused multiply-add
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-pthread",
    ],
    extra_link_args=["-pthread"],
    libraries=["m"],
    optional=True,
)


def at_once(compile_in_turn: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Compiles all sources at the same time: one per instruction set takes most of the time."""

    def compile_all(sources: list[str], *args: Any, **kwargs: Any) -> list[str]:
        with ThreadPoolExecutor() as threads:
            made = list(threads.map(lambda source: compile_in_turn([source], *args, **kwargs), sources))
        return [name for names in made for name in names]

    return compile_all


class BuildNative(build_ext):
    """Builds the library, or says in one line why the package goes without it."""

    built = False

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            if os.environ.get("THINWIRE_NO_NATIVE") == "1":
                raise CCompilerError("THINWIRE_NO_NATIVE=1 is set")
            self.compiler.compile = at_once(self.compiler.compile)
            super().build_extension(ext)
        except (BaseError, CCompilerError) as reason:
            self._go_without(ext, reason)
        else:
            self.built = True

    def _go_without(self, ext: Extension, reason: Exception) -> None:
        # A library left by an earlier build would be shipped, or loaded, beside newer Python code.
        in_source, in_build = self._get_inplace_equivalent(self.get_finalized_command("build_py"), ext)
        for stale in [in_build, in_source] if self.editable_mode else [in_build]:
            Path(stale).unlink(missing_ok=True)
        self.warn(f"no native CPU kernels, the torch reference serves instead: {shorten(str(reason), 120)}")


class PlainWheel(bdist_wheel):
    """Tags the wheel by platform alone, or not at all when it holds no library."""

    def get_tag(self) -> tuple[str, str, str]:
        built = self.get_finalized_command("build_ext").built
        return "py3", "none", super().get_tag()[2] if built else "any"


setup(ext_modules=[NATIVE], cmdclass={"build_ext": BuildNative, "bdist_wheel": PlainWheel})
