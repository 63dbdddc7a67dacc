"""The string form of codecs, and codecs as values: what they are made of, what they refuse."""

import copy
import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st

import cases
from thinwire import BlockInt, ByName, BySize, Cast, Codec, CodecError, Identity, Lloyd, TopK, Trellis, codec
from thinwire.codecs import names

COMPOSITES: list[Codec] = [
    BySize(),
    BySize(small=Identity(), large=Lloyd(2, 64, seed=3), min_numel=7, min_ndim=2),
    ByName({"*": "int8"}),
    ByName([("*.bias", "bf16"), ("layers.[0-9].*", BlockInt(4, mode="affine")), ("*", "lloyd4:rotate=false")]),
    ByName({"norm?": BySize(small=Cast("e4m3")), "*": ByName({"a*": "int4:block=32,seed=9", "*": "none"})}),
    BySize(small=ByName({"*.b": "fp16:block=64", "*": "e5m2"}), large=BySize(small=Cast(), large=BlockInt(3))),
]
EVERY = [*cases.CODECS, *COMPOSITES]


seeds = st.integers(0, 2**64 - 1)
blocks = st.integers(1, 2**29 - 1).map(lambda k: 8 * k)
modes, roundings, scales = (
    st.sampled_from(pair) for pair in (("symmetric", "affine"), ("nearest", "stochastic"), ("mmse", "unbiased"))
)
leaves = st.one_of(
    st.just(Identity()),
    st.just(Cast("bf16")),
    st.builds(Cast, st.sampled_from(["fp16", "e4m3", "e5m2"]), blocks),
    st.builds(BlockInt, st.integers(2, 8), blocks, modes, roundings, seeds, st.booleans()),
    st.builds(Lloyd, st.integers(1, 4), st.sampled_from([32, 64, 128, 256, 512, 1024]), st.booleans(), scales, seeds),
)
patterns = st.text("".join(sorted(set(cases.LETTERS) - set("=;()"))), min_size=1, max_size=12)
codecs = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(BySize, inner, inner, st.integers(0, 2**70), st.integers(0, 9)),
        st.builds(
            lambda rules, last: ByName([*rules, ("*", last)]),
            st.lists(
                st.tuples(patterns.filter(lambda p: p == p.strip() and p != "*"), inner),
                max_size=3,
                unique_by=lambda rule: rule[0],
            ),
            inner,
        ),
    ),
    max_leaves=5,
)


@cases.generated(200)
@given(codecs)
def test_round_trip_of_any(value: Codec) -> None:
    again = codec(str(value))
    assert (again, hash(again)) == (value, hash(value))


@cases.generated(200)
@given(
    st.text(cases.LETTERS, max_size=30)
    | st.builds("{}:{}".format, st.sampled_from(names()), st.text(cases.LETTERS, max_size=15))
)
def test_any_text_is_a_codec_or_a_codec_error(text: str) -> None:
    try:
        value = codec(text)
    except CodecError:
        return
    assert codec(str(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("fp16:block=64", Cast("fp16", 64)),
        ("int4:block=128", BlockInt(4)),
        (" int4:block = 64 , mode=affine ", BlockInt(4, 64, "affine")),
        ("int2:rounding=stochastic,seed=18446744073709551615", BlockInt(2, rounding="stochastic", seed=2**64 - 1)),
        ("int8:block=104,aligned=true", BlockInt(8, 104, aligned=True)),
        ("lloyd2:block=256", Lloyd(2, 256)),
        ("lloyd1:rotate=false,scale=unbiased", Lloyd(1, rotate=False, scale="unbiased")),
        ("lloyd4:rotate=True", Lloyd(4)),
        ("trellis2:block=256,seed=7", Trellis(2, 256, seed=7)),
        ("topk:fraction=2e-2", TopK(0.02)),
        ("bysize(large=lloyd4:block=64,seed=2; min_numel=10)", BySize(large=Lloyd(4, 64, seed=2), min_numel=10)),
        ("byname( *.bias = bf16 ;; *=int4 ; )", ByName({"*.bias": "bf16", "*": "int4"})),
        ("byname(*=bysize(small=none; large=int4))", ByName({"*": BySize(Identity(), BlockInt(4))})),
    ],
)
def test_what_strings_mean(text: str, value: Codec) -> None:
    assert codec(text) == value


def test_defaults_are_not_spelled() -> None:
    plain = ["none", "bf16", "fp16", "int8", "int3", "lloyd4", "lloyd1", *names()]
    assert [str(codec(text)) for text in plain] == plain
    assert str(BlockInt(4, 64, "affine", seed=7)) == "int4:block=64,mode=affine,seed=7"
    assert str(BlockInt(8, 104, aligned=True)) == "int8:block=104,aligned=true"
    assert str(Lloyd(2, rotate=False)) == "lloyd2:rotate=false"
    assert str(Trellis(3, rotate=False)) == "trellis3:rotate=false"
    assert (str(TopK(0.03125)), str(TopK(0.02))) == ("topk", "topk:fraction=0.02")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int8:", "ends in ':' without options"),
        ("int8:blok=64", "'int8' does not know the option 'blok=64'; options: block, mode, rounding, seed"),
        ("int8:block", "the option 'block' needs a value, as in block=..."),
        ("int8:block=1_28", "got '1_28'"),
        ("int8:seed=" + 5000 * "9", "seed must be 0 .. 2**64 - 1, got inf"),  # int() refuses so many digits
        ("int8:block=64,", "does not know the option ''"),
        ("int8:block=64,block=32", "the option 'block' twice"),
        ("lloyd4:mode=affine", "options: block, rotate, scale, seed"),
        ("e4m3:format=e5m2", "options: block"),
        ("none:block=8", "options: none"),
        ("bf16:block=64", "bf16 has no blocks"),
        ("int8:block=12", "block must be a multiple of 8"),
        ("int8:block=big", "got 'big'"),
        ("int8:block=1e3", "got 1000.0"),
        ("int8:block=true", "got True"),
        ("int8:mode=linear", "mode must be 'symmetric' or 'affine', got 'linear'"),
        ("int8:rounding=up", "rounding must be 'nearest' or 'stochastic', got 'up'"),
        ("int8:aligned=1", "aligned must be True or False, got 1"),
        ("int8:seed=-1", "seed must be 0 .. 2**64 - 1, got -1"),
        ("lloyd4:block=16", "power of two from 32 to 1024, got 16"),
        ("lloyd4:rotate=yes", "rotate must be True or False, got 'yes'"),
        ("lloyd4:scale=best", "scale must be 'mmse' or 'unbiased', got 'best'"),
        ("topk:block=64", "options: fraction"),
        ("topk:fraction=few", "fraction must be from 1/256 to 1/4, such as 0.02, got 'few'"),
        ("bysize(small)", "the option 'small' needs a value, as in small=..."),
        ("bysize(tiny=bf16)", "does not know the option 'tiny=bf16'; options: small, large, min_numel, min_ndim"),
        ("bysize(large=int8; large=int4)", "the option 'large' twice"),
        ("bysize(min_numel=-1)", "min_numel must be an integer, 0 or more, got -1"),
        ("bysize(min_ndim=two)", "min_ndim must be an integer, 0 or more, got 'two'"),
        ("bysize(large=int9)", "unknown codec 'int9'"),
        ("byname()", "the last rule of ByName must be '*'"),
        ("byname(*=int8; *=int4)", "a pattern of ByName has one codec, got several for '*'"),
        ("byname(*=int8; *.bias=bf16)", "the last rule of ByName must be '*'"),
        ("byname(*.bias=bf16; *=int8:x=1)", "does not know the option 'x=1'"),
        ("byname(a)", "takes entries 'pattern=codec'"),
    ],
)
def test_bad_options(text: str, said: str) -> None:
    with pytest.raises(CodecError, match=re.escape(said)):
        codec(text)


BAD_VALUES: list[tuple[Callable[..., Codec], str, list[Any]]] = [
    (BlockInt, "bits", [1, 9, 0, -4, 4.0, "4", None, True]),
    (BlockInt, "block", [0, 7, 12, -8, 64.0, "64", None, 2**32]),
    (BlockInt, "mode", [None, "linear", 0]),
    (BlockInt, "rounding", [True, "up", ""]),
    (BlockInt, "seed", [-1, 2**64, 0.5, "1", None]),
    (BlockInt, "aligned", [0, 1, "true", None]),
    (Lloyd, "bits", [0, 5, 2.0, "2", None, True]),
    (Lloyd, "block", [0, 16, 48, 2048, 256.0, "256", None, [64]]),
    (Lloyd, "rotate", [0, 1, "true", None]),
    (Lloyd, "scale", ["", "best", None]),
    (Lloyd, "seed", [-1, 2**64, 0.5, "1", None]),
    (Cast, "format", ["fp32", "", None, 16]),
    (partial(Cast, "e4m3"), "block", [0, 4, 64.0, None]),
    (partial(Cast, "bf16"), "block", [64, 8]),
    (Trellis, "bits", [0, 4]),
    (TopK, "fraction", [0.5, 0.001, 1]),
    (BySize, "small", ["bf16", None]),
    (BySize, "large", ["int8", BlockInt]),
    (BySize, "min_numel", [-1, 1.5, "9", None, True]),
    (BySize, "min_ndim", [-1, 1.5]),
    (ByName, "rules", [{}, [("a", "int8")], {"*": "int9"}, {"*": None}]),
    (ByName, "rules", [{bad: "int8", "*": "int8"} for bad in ("a=b", "a;b", "(a", "a)", 3)]),
]


@cases.over("bad", BAD_VALUES)
def test_bad_values(bad: tuple[Callable[..., Codec], str, list[Any]]) -> None:
    make, name, values = bad
    for value in values:
        with pytest.raises(CodecError):
            make(**{name: value})


def test_what_names_no_codec_is_refused() -> None:
    for text in ("int9", "int1", "int", "", "INT8", "lloyd5", "bf16x", "int8(block=3)", "bysize", "byname("):
        said = f"unknown codec {text!r}; known: {', '.join(names())}, bysize(...), byname(...)"
        with pytest.raises(CodecError, match=re.escape(said)):
            codec(text)
    for value in (None, 8, 4.0, b"int8", ["int8"], BlockInt):
        with pytest.raises(CodecError, match="expected a codec or a string such as"):
            codec(value)  # type: ignore[arg-type]
    for pattern in (" a", "a ", "\ta", " ", ""):
        with suppress(CodecError):  # or it goes round
            made = ByName([(pattern, "int8"), ("*", "bf16")])
            assert codec(str(made)) == made


def test_codecs_compare_and_hash_by_value() -> None:
    again = [codec(str(value)) for value in EVERY]
    assert (again, len({*again, *EVERY})) == (EVERY, len(EVERY))
    assert BlockInt(4) != Lloyd(4)
    assert BlockInt(8) not in (BlockInt(8, seed=1), BlockInt(8, aligned=True))
    for value in EVERY:
        with pytest.raises(FrozenInstanceError):
            setattr(value, next(iter(vars(value)), "seed"), 1)
        assert codec(value) is value
        assert copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value
        assert eval(repr(value)) == value  # repr names every field
