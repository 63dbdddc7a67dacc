"""Loads and stores of 1 to 16 bytes per thread, as instructions of their own.

[Note: Instructions for memory]
Triton finds layouts for its own loads and stores by a search over the program, which takes minutes for tiles of many
tensors, and may give neighboring rows to neighboring threads. An instruction for each access keeps every tensor in the
layout of the tile, columns on neighboring threads, and moves up to 16 bytes at once without a conversion.

Pointers are tensors of pointers to uint8; masked loads give zeros.
"""

import triton
import triton.language as tl


@triton.jit
def instruction(TEXT: tl.constexpr, OPERANDS: tl.constexpr, args):
    """PTX without effects, from and to registers; its result is an int32."""
    return tl.inline_asm_elementwise(TEXT, OPERANDS, args, dtype=tl.int32, is_pure=True, pack=1)


@triton.constexpr_function
def filled(text, number):
    """PTX with a number in place of {}."""
    return text.replace("{}", str(number))


@triton.jit
def wide(number):
    """The number in 64 bits: offsets of far blocks need more than 32."""
    return tl.full((), 0, tl.int64) + number


@triton.constexpr_function
def load_text(nbytes):
    """PTX that loads `nbytes` at the last operand but one, or zeros if the last is 0."""
    words = max(1, nbytes // 4)
    kind = {1: "u8", 2: "u16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}[nbytes]
    outs = ", ".join(f"${i}" for i in range(words))
    clear = " ".join(f"mov.b32 ${i}, 0;" for i in range(words))
    target = f"{{{outs}}}" if words > 1 else outs
    test = f".reg .pred p; setp.ne.b32 p, ${words + 1}, 0;"
    return f"{{ {test} {clear} @p ld.global.{kind} {target}, [${words}]; }}"


@triton.constexpr_function
def load_operands(nbytes):
    """The constraints of load_text's operands."""
    return ",".join(["=&r"] * max(1, nbytes // 4) + ["l", "r"])


@triton.jit
def load_words(pointer, inside, BYTES: tl.constexpr):
    """BYTES little-endian bytes at each pointer, which is aligned to BYTES, as one or more int32."""
    args = (pointer.to(tl.int64), inside.to(tl.int32))
    return tl.inline_asm_elementwise(
        load_text(BYTES), load_operands(BYTES), args, dtype=(tl.int32,) * max(1, BYTES // 4), is_pure=False, pack=1
    )


@triton.constexpr_function
def store_text(nbytes):
    """PTX that stores `nbytes` at operand 1, if the last is not 0."""
    words = max(1, nbytes // 4)
    kind = {1: "b8", 2: "b16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}[nbytes]
    values = ", ".join(f"${2 + i}" for i in range(words))
    test = f".reg .pred p; setp.ne.b32 p, ${words + 2}, 0; mov.b32 $0, 0;"
    if nbytes == 2:
        return f"{{ {test} .reg .b16 h; cvt.u16.u32 h, $2; @p st.global.b16 [$1], h; }}"
    return f"{{ {test} @p st.global.{kind} [$1], {f'{{{values}}}' if words > 1 else values}; }}"


@triton.constexpr_function
def store_operands(nbytes):
    """The constraints of store_text's operands."""
    return ",".join(["=r", "l"] + ["r"] * max(1, nbytes // 4) + ["r"])


@triton.jit
def store_words(pointer, words, inside, BYTES: tl.constexpr):
    """The opposite of load_words."""
    args = (pointer.to(tl.int64),) + words + (inside.to(tl.int32),)
    tl.inline_asm_elementwise(store_text(BYTES), store_operands(BYTES), args, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def look_up(table, index, START: tl.constexpr):
    """table[index - START] of int32. The table's addresses must all have the same upper half."""
    base = table.to(tl.int64)
    low = index * 4 + (base - 4 * START).to(tl.int32)
    high = tl.full(index.shape, 0, tl.int32) + (base >> 32).to(tl.int32)
    return instruction("{ .reg .b64 a; mov.b64 a, {$1, $2}; ld.global.nc.b32 $0, [a]; }", "=r,r,r", (low, high))


@triton.jit
def opaque(x):
    """x, an int32, hidden from the compiler: LLVM's vectorizer fails on 7-bit codes unpacked and packed again."""
    return instruction("mov.b32 $0, $1;", "=r,r", (x,))


@triton.jit
def load_bytes(pointer, at, inside, WHOLE: tl.constexpr, COUNT: tl.constexpr):
    """COUNT little-endian bytes, `at` times COUNT from the pointer, as an int32; one by one unless WHOLE (aligned)."""
    pointer = pointer + at * COUNT
    if WHOLE or COUNT == 1:
        return load_words(pointer, inside, COUNT)[0]
    else:
        word = load_words(pointer, inside, 1)[0]
        for i in tl.static_range(1, COUNT):
            word = word | (load_words(pointer + i, inside, 1)[0] << (8 * i))
        return word


@triton.jit
def store_bytes(pointer, at, word, inside, WHOLE: tl.constexpr, COUNT: tl.constexpr):
    """The opposite of load_bytes."""
    pointer = pointer + at * COUNT
    if WHOLE or COUNT == 1:
        store_words(pointer, (word,), inside, COUNT)
    else:
        for i in tl.static_range(COUNT):
            store_words(pointer + i, (word >> (8 * i),), inside, 1)


# --- floats -----------------------------------------------------------------------------------------------------------


@triton.jit
def load_floats(base, at, inside, COUNT: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr = True):
    """COUNT (1, 2, 4) neighbors from element `at` on, as fp32; in one access if WHOLE, byte by byte unless EVEN."""
    KIND: tl.constexpr = base.dtype.element_ty
    SIZE: tl.constexpr = KIND.primitive_bitwidth // 8
    pointer = base.to(tl.pointer_type(tl.uint8)) + at * SIZE
    floats = ()
    if WHOLE and COUNT > 1:
        words = load_words(pointer, inside, COUNT * SIZE)
        for i in tl.static_range(COUNT):
            floats = floats + (_widened(words[i * SIZE // 4], i % (4 // SIZE), KIND),)
    else:
        for i in tl.static_range(COUNT):
            floats = floats + (_widened(load_bytes(pointer + i * SIZE, 0, inside, EVEN, SIZE), 0, KIND),)
    return floats


@triton.jit
def _widened(word, HALF: tl.constexpr, KIND: tl.constexpr):
    """The fp32 number of a word, or its lower or upper 16-bit float, as fp32."""
    if tl.float32 == KIND:
        return word.to(tl.float32, bitcast=True)
    elif tl.float16 == KIND:
        return (word >> (16 * HALF)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif HALF:
        return (word & -65536).to(tl.float32, bitcast=True)
    else:
        return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def store_floats(base, floats, at, inside, COUNT: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr = True):
    """The opposite of load_floats: COUNT tensors of fp32, in the dtype of `base`."""
    KIND: tl.constexpr = base.dtype.element_ty
    SIZE: tl.constexpr = KIND.primitive_bitwidth // 8
    pointer = base.to(tl.pointer_type(tl.uint8)) + at * SIZE
    if WHOLE and COUNT > 1:
        words = ()
        for i in tl.static_range(0, COUNT, 4 // SIZE):
            if SIZE == 4:
                words = words + (narrowed(floats[i], KIND),)
            else:
                words = words + (_paired(floats[i], floats[i + 1], KIND),)
        store_words(pointer, words, inside, COUNT * SIZE)
    else:
        for i in tl.static_range(COUNT):
            store_bytes(pointer + i * SIZE, 0, narrowed(floats[i], KIND), inside, EVEN, SIZE)


@triton.jit
def narrowed(x, KIND: tl.constexpr):
    """The bits of x, or the 16 bits of x in a shorter format."""
    if tl.float32 == KIND:
        return x.to(tl.int32, bitcast=True)
    else:
        return x.to(KIND).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _paired(low, high, KIND: tl.constexpr):
    """Two floats of 16 bits in one word."""
    if tl.bfloat16 == KIND:
        return instruction("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", (high, low))
    else:
        return instruction("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", (high, low))
