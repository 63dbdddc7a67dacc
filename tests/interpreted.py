"""The Triton kernels under Triton's interpreter, on the CPU, against the reference: a script of its own.

The interpreter is chosen when kernels are defined, so it takes a process of its own:
`TRITON_INTERPRET=1 python tests/interpreted.py [CODEC ...]`. It is slow, so codecs, lengths and worlds
are few; with `everything` among the arguments there are some more. Prints a line for every case that differs, and ends
with their number.
"""

import functools
import operator
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

import cases
import ptx
import test_exact
from thinwire import Identity, codec as make, exact, use_backend
from thinwire.kernels import exact as definition
from thinwire.kernels.triton import exact as kernels
from thinwire.wire import EXACT_BLOCK, EXACT_CLASSES, EXACT_TABLES_AT

Results = dict[str, Tensor]
F32 = torch.float32
BF16 = torch.bfloat16
F16 = torch.float16


# --- what the interpreter does unlike a GPU ---------------------------------------------------------------------------
TORCH = {
    **{tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32, tl.float64: torch.float64},
    **{tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2},
}


@functools.cache
def mend() -> None:
    """PTX runs, fused multiply-adds and casts round as on a GPU, integers wrap, loops run to a tensor's value."""
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.InterpreterBuilder.create_fma = create_fma
    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm
    tl.tuple.__radd__ = lambda self, other: tl.tuple([*other, *self.values])
    interpreter._convert_float = convert_float
    atomic = interpreter.InterpreterBuilder.create_atomic_rmw

    def create_atomic(builder: Any, op: Any, to: Any, value: Any, mask: Any, *more: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return atomic(builder, op, to, value, mask, *more)

    interpreter.InterpreterBuilder.create_atomic_rmw = create_atomic
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
    hasten()


def hasten() -> None:
    """What the interpreter works out again at every operation is kept: types, shapes, and that all is patched."""
    patch_language = interpreter._patch_lang
    patched = interpreter._LangPatchScope()  # nothing left to patch or to restore
    numpy_type, make_block = interpreter._get_np_dtype, tl.block_type.__init__
    blocks: dict[Any, Any] = {}
    numpy_types: dict[str, Any] = {}

    @functools.cache
    def modules_of(function: Any) -> list[Any]:
        return [module for module in (tl, tl.core) if any(module is each for each in function.__globals__.values())]

    def patch_once(function: Any) -> Any:
        missing = any(tl.core.is_builtin(module.load) for module in modules_of(function))
        return patch_language(function) if missing else patched

    def numpy_type_once(type: Any) -> Any:
        return numpy_types.get(type.name) or numpy_types.setdefault(type.name, numpy_type(type))

    def new_block(cls: Any, element: Any, shape: Any) -> Any:
        key = (element.name, *map(operator.index, shape))
        return blocks.get(key) or blocks.setdefault(key, object.__new__(cls))

    def make_block_once(self: Any, element: Any, shape: Any) -> None:
        if not vars(self):
            make_block(self, element, shape)
            self.of_tensors = tl.tuple([tl.constexpr(size) for size in self.shape]), tl.constexpr(self.numel)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else scalar

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        alike = left.shape.values == right.shape.values
        return (left, right) if alike else broadcast_shapes(self, left, right)

    def scan(self: Any, input: Any) -> Any:
        """Of vectors, in as many turns as their length has bits: the function is associative."""
        data, shift = [x.handle.data.copy() for x in input], 1
        while shift < data[0].size:
            earlier, later = (
                [self.to_tensor(part, x.dtype) for part, x in zip(parts, input, strict=True)]
                for parts in ([np.roll(part, shift) for part in data], [part.copy() for part in data])
            )
            found = self.combine_fn.fn(*earlier, *later)
            for part, sums in zip(data, found if isinstance(found, tuple) else (found,), strict=True):
                part[shift:] = sums.handle.data[shift:]
            shift *= 2
        return [self.to_tensor(part, x.dtype) for part, x in zip(data, input, strict=True)]

    interpreter.ScanOps.generic_scan = scan
    scalar = tl.tuple([]), tl.constexpr(1)
    broadcast_shapes = TritonSemantic.broadcast_impl_value
    TritonSemantic.broadcast_impl_value = broadcast
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = numpy_type_once
    tl.block_type.__new__ = new_block
    tl.block_type.__init__ = make_block_once
    tl.block_type.to_ir = lambda self, builder: self
    tl.tensor.__init__ = make_tensor


def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """To the nearest number of another format, ties to even; the interpreter's own cuts bits off."""
    wide = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).reshape(-1).copy()).view(TORCH[source])
    whole = getattr(np, f"uint{target.primitive_bitwidth}")
    return wide.to(TORCH[target]).view(torch.uint8).numpy().view(whole).reshape(values.shape)


def create_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """What InterpreterBuilder makes of tl.fma: one rounding, as a GPU has it; the interpreter's own has two."""
    assert {x.data.dtype, y.data.dtype, z.data.dtype} == {np.dtype(np.float32)}
    return interpreter.TensorHandle(ptx.fused(*np.broadcast_arrays(x.data, y.data, z.data)), z.dtype.scalar)


def create_inline_asm(builder: Any, text: str, constraints: str, values: Any, types: Any, *more: Any) -> Any:
    """What InterpreterBuilder makes of tl.inline_asm_elementwise, whose results are int32 here."""
    operands = [value.data for value in values]
    found = ptx.run(text, operands, constraints.count("="), interpreter._interpreter)
    shape = np.broadcast_shapes(*(operand.shape for operand in operands))
    results = [np.broadcast_to(words, shape).astype(np.uint32).view(np.int32) for words in found]
    return SimpleNamespace(get_result=lambda i: interpreter.TensorHandle(results[i], tl.int32))


# --- cases ------------------------------------------------------------------------------------------------------------
class Case(NamedTuple):
    """One codec and what it is tried on."""

    codec: str
    lengths: tuple[int, ...] = (1, 130)  # all in float32; the last one in other dtypes, and at odd addresses
    dtypes: tuple[torch.dtype, ...] = ()
    worlds: tuple[int, ...] = (1, 3)
    odd: bool = False  # tensors and wires off the start of their memory, too


CASES = [
    Case("int8", (1, 300), (BF16,), odd=True),
    Case("int8:block=32", (40,), worlds=(9,)),
    Case("int4:block=32", (517,), (BF16,)),
    Case("int3:block=40,mode=affine,rounding=stochastic", (130,), odd=True),
    Case("int2", (130,)),
    Case("int6", (7,)),
    Case("lloyd4:block=32", (40,), (BF16,), (9,), odd=True),
    Case("lloyd1:block=32", (1, 130)),
    Case("lloyd3:block=32,rotate=false,scale=unbiased", (130,)),
    Case("lloyd2:block=128", (130,), worlds=(2,)),
    Case("trellis2:block=32", (70,), odd=True),
    Case("int4:block=20000,mode=affine", (9001,), worlds=(2,)),
    Case("int8:block=2048,mode=affine", (1025,), worlds=(2,)),  # pads in a piece of their own
    Case("fp16", (130,)),
    Case("e4m3:block=24", (40,), odd=True),
    Case("e5m2", (7,)),
    Case("bf16", (1, 130), (F16,)),
    Case("none", (0, 130), (BF16, torch.float64), odd=True),
]
MORE = [  # of which others have the parts
    Case("int8", (0, 7, 300), (F16,)),
    Case("trellis2:block=32", (1, 140)),
    Case("trellis3:scale=unbiased", (530,), worlds=(2,)),
    Case("trellis1:block=128,rotate=false", (149, 277), (BF16,), (2,)),
    *(Case(codec, (0, 1)) for codec in ("lloyd1:block=32", "bf16", "none")),
    Case("int3:block=40,mode=affine,rounding=stochastic", (1, 40)),
    Case("lloyd4:block=64", (7, 130)),
    Case("int8:block=4294967288,mode=affine", (130,), worlds=(2,)),
    Case("fp16", (1, 40)),
    Case("e4m3:block=24", (1, 130)),
    Case("e5m2", (1, 130)),
]


def acts_of(case: Case, n: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Results]]]:
    """What is run by both backends, by name."""
    codec = make(case.codec)
    block = min(cases.block_of(codec), 256)
    narrow = F32 if dtype == torch.float64 else dtype
    xs = [cases.mixed(n, block, narrow, rank, seed=n).to(dtype) for rank in range(max(case.worlds))]
    residual = cases.mixed(n, block, F32, 77, seed=n + 1)
    with use_backend("reference"):
        wires_WN = cases.wires_of(codec, xs, step=2)
    yield "encode", lambda: {"wire": cases.wire_of(codec, xs[0], step=3)}
    yield "encode with residual", lambda: _encode_with_residual(codec, xs[0], residual.clone())
    for world in case.worlds if dtype == F32 else case.worlds[-1:]:
        wires = wires_WN[:world]
        yield f"decode_sum of {world}", lambda wires=wires: {"sum": cases.summed(codec, wires, n, dtype, 1 / 3)}
        if dtype == F32 or codec == Identity():
            yield f"recode of {world}", lambda wires=wires: {"wire": cases.recoded(codec, wires, n, 1 / 3, 4, dtype)}
    if case.odd and dtype == F32 and n == case.lengths[-1]:
        yield "odd addresses", lambda: _at_odd_addresses(codec, xs[0], residual, wires_WN[:2])


def everything() -> bool:
    """Whether to try what is left out where time is short."""
    return "everything" in sys.argv


def _encode_with_residual(codec: Any, x: Tensor, residual: Tensor) -> Results:
    return {"wire": cases.wire_of(codec, x, step=5, residual=residual), "residual": residual}


def _at_odd_addresses(codec: Any, x: Tensor, residual: Tensor, wires_WN: Tensor) -> Results:
    x, carried = cases.shifted(x), cases.shifted(residual)
    wire, recoded = (cases.shifted(wires_WN[0]).fill_(cases.GARBAGE) for _ in range(2))
    codec.encode(x, wire, step=1, residual=carried)
    odd_WN = cases.shifted(wires_WN.reshape(-1)).view(wires_WN.shape)
    out = cases.shifted(torch.full_like(x, torch.nan))
    codec.decode_sum(odd_WN, out, scale=0.5)
    codec.recode(odd_WN, recoded, x.numel(), scale=0.5, step=1, dtype=x.dtype)
    return {"wire": wire, "residual": carried, "sum": out, "recoded": recoded}


def difference(act: Callable[[], Results]) -> str:
    """Where the kernels differ from the reference, or nothing."""
    with use_backend("reference"):
        want = act()
    try:
        with use_backend("triton"):
            got = act()
        for what in want:
            cases.assert_same(got[what], want[what], what)
    except Exception as error:
        return _told(error)
    return ""


def exact_differences() -> Iterator[str]:
    """Exact differences that are not the definition's: all kinds of changes, plain blocks, damaged wires."""
    tries = [pair for dtype in test_exact.DTYPES for pair in test_exact.changes(33, dtype)[2::4]]
    base = test_exact.weights(2 * EXACT_BLOCK + 70, BF16)
    new = torch.where(torch.arange(base.numel()) % 97 > 0, base, test_exact.moved(base, 1e-2))
    new[EXACT_BLOCK : 2 * EXACT_BLOCK] = test_exact.patterns(EXACT_BLOCK, BF16)  # is sent as it is
    for pair in (*tries, (new, base), (base[:0], base[:0])):
        with use_backend("cpu"):
            wire = exact.encode(*pair)
        wires = [wire, *(wire.clone() for _ in range(3))]
        for damaged, at in zip(wires[1:], (-1, wire.numel() // 2, EXACT_TABLES_AT - 1), strict=True):
            damaged[at] ^= 0x4D
        acts = (lambda pair=pair: exact.encode(*pair), *(functools.partial(bits, w, pair[1]) for w in wires))
        for act in acts:
            got, want = (test_exact.result_of(act, backend) for backend in ("triton", "cpu"))
            if not (torch.equal(got, want) if isinstance(want, Tensor) and isinstance(got, Tensor) else got == want):
                yield f"exact differences of {pair[1].numel()} x {pair[1].dtype}: {got}, expected {want}"

    for dtype in (BF16, F32):
        base, chosen = torch.empty(0, dtype=dtype), torch.zeros(1 + 2 * EXACT_CLASSES, dtype=torch.int64)
        for turn in range(8):  # few exponents or many, few changes or many
            counts = torch.randint(1 << 11, (256, 33), generator=cases.seeded(turn))
            counts *= torch.rand(256, 33, generator=cases.seeded(turn)) < 0.1 * turn
            counts[:, 1:] //= 1 << 3 * turn % 11
            counts[:, 1 + 8 * base.itemsize :] = 0
            costs = definition.value_costs(8 * base.itemsize, base.device)
            kernels.launch(kernels.exact_choose_kernel, dtype, base.device, EXACT_CLASSES, 16)(
                counts=counts.to(torch.int32), costs=costs, tables=chosen
            )
            want = definition.choose(counts, 8 * base.itemsize)
            if chosen.tolist() != [want.top, *want.gaps, *want.values]:
                yield f"parameters {chosen.tolist()}, expected {want}"


def bits(wire: Tensor, base: Tensor) -> Tensor:
    return exact.decode(wire, base).view(test_exact.signed(base.dtype))


def survivors(name: str) -> list[str]:
    """Operations on wires of which one has a broken header that give a number instead of NaN."""
    codec, n = make(name), 70
    wires_WN = cases.wires_of(codec, [torch.ones(n), torch.zeros(n)])
    wires_WN[1, 6] ^= 1  # a reserved byte
    with use_backend("triton"):
        sums = {
            "decode_sum": cases.summed(codec, wires_WN, n),
            "recode": cases.decoded(codec, cases.recoded(codec, wires_WN, n), n),
        }
    return [what for what, found in sums.items() if not found.isnan().all()]


def _told(error: BaseException) -> str:
    """The error itself, which the interpreter wraps once for every call, and where in a kernel it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    while error.__cause__ is not None:
        error = error.__cause__
        frames += traceback.extract_tb(error.__traceback__)
    lines = [
        f"{Path(frame.filename).name}:{frame.lineno} {frame.line}" for frame in frames if "thinwire" in frame.filename
    ]
    return f"{type(error).__name__}: {error} ({lines[-1] if lines else 'nowhere in thinwire'})"


def main(*names: str) -> int:
    """Run all cases, or those of the named codecs; what differs and what warned."""
    mend()
    np.seterr(all="ignore")
    warned: set[str] = set()
    warnings.simplefilter("always")
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of overflows and NaN that are meant
    warnings.showwarning = lambda message, *_: warned.add(str(message))
    torch.set_num_threads(1)
    bad = run = 0
    for case in (case for case in (*CASES, *(MORE if everything() else ())) if not names or case.codec in names):
        start = time.perf_counter()
        for dtype in (F32, *case.dtypes):
            for n in case.lengths if dtype == F32 else case.lengths[-1:]:
                for what, act in acts_of(case, n, dtype):
                    run += 1
                    if found := difference(act):
                        bad += 1
                        print(f"{case.codec}, {n} x {dtype}, {what}: {found}", flush=True)
        print(f"# {case.codec}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    for name in () if names else ("int8:block=32", "lloyd1:block=32", "bf16"):
        for what in survivors(name):
            bad += 1
            print(f"{name}, {what} of a wire with a broken header is not NaN", flush=True)
    for text in () if names else exact_differences():
        bad += 1
        print(text, flush=True)
    for message in warned:
        print(f"warned: {message}")
    print(f"{bad} of {run} differ")
    return bad + len(warned)


if __name__ == "__main__":
    sys.exit(1 if main(*(name for name in sys.argv[1:] if name != "everything")) else 0)
