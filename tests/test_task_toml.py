"""`task.toml` gets tomllib's verdict and tomllib's values, whatever is in it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harbor_trl._native import parse_toml
from reference import toml as reference

TOML_1_1 = sys.version_info >= (3, 15)

#: Written in the manner of public suites: what their authors do, and what their tools write.
FILES = [
    'version = "1.0"\n\n[metadata]\nauthor_name = "anonymous"\ndifficulty = "medium"\n'
    'category = "software-engineering"\n'
    'tags = [ "go", "library",]\nexpert_time_estimate_min = 60.0\njunior_time_estimate_min = 240.0\n\n[verifier]\n'
    "timeout_sec = 600.0\n\n[agent]\ntimeout_sec = 600.0\n\n[environment]\nbuild_timeout_sec = 600.0\ncpus = 1\n"
    'memory_mb = 2048\nallow_internet = true\n\n[verifier.env]\nKEY = "${KEY:-none}"\n\n[solution.env]\n',
    "# A comment, é\n[metadata]\ngold_answer = '''\nline one\n  \"line\" two'''\nreward_mode_initial = \"exact\"\n"
    'kaggle_dataset_name = "a/b"\ncreated = 2025-01-31T08:00:00Z\nday = 2025-01-31\nhours = [ 08:00:00, 17:30:00.25 ]\n'
    "scores = { easy = 0.9, hard = 1e-3, nested = { deep = [ 1, 2, 3 ] } }\nmask = 0xdead_beef\nlimit = -inf\n",
    '[task]\nname = "org/name"\n[metadata]\n"quoted key" = 1\na.b.c = true\na.b.d = """\n  folded \\\n     text\n"""\n'
    '[[steps]]\nname = "one"\n[steps.verifier]\ntimeout_sec = 1\n[[steps]]\nname = "two"\n'
    '[[artifacts]]\n[[artifacts]]\npath = "x"\n',
    "\r\n[metadata]\r\nkey = '''a\r\nb'''\r\nother = \"\\u00e9\\U0001F600\"\r\n",
    "[metadata]\rlone = 1\rreturns = 2\r",
]

#: Where parsers tend to part from tomllib: rules of the specification, and habits of tomllib that follow from its code.
CASES = [
    "",
    "a",
    "a =",
    "= 1",
    "a = 1 b = 2",
    "\ufeffa = 1",
    "a = 1\n\ufeff",
    "a.b = 1\na = 2",
    "a = 1\na.b = 2",
    "[a]\n[a]",
    "[a.b]\n[a]\n[a.b.c]",
    "[a.b]\n[a]\nb = 1",
    "[a.b]\n[a]\nb.c = 1",
    "[a]\nb.c = 1\n[a.b]",
    "[a]\nb.c = 1\n[a.b.d]",
    "a.b.c = 1\n[a.b.d]\n[a.e]",
    "[[a]]\n[a]",
    "[a]\n[[a]]",
    "a = []\n[[a]]",
    "a = []\n[a.b]",
    "[[a]]\n[a.b]\n[[a]]\n[a.b]",
    "[[a.b]]\n[a]\nb.c = 1",
    "[[a.b]]\n[a]\nc = 1\n[[a.b]]\nd = 2",
    "a = {}\n[a.b]",
    "a = {b = 1}\na.c = 2",
    "a = {b.c = 1, b.d = 2}",
    "a = {b = {}, b.c = 1}",
    "a = {b = [{}], b.c = 1}",
    "a = {b = 1,}",
    "a = {\nb = 1\n}",
    "a = {b = 1 # comment\n}",
    "a = [1, # comment\n\n2,]",
    "a = [1,,2]",
    "a = [,]",
    'a = "\\e\\x41"',
    'a = "\\ud800"',
    'a = "\\U00110000"',
    'a = "\\q"',
    'a = "\x7f"',
    "a = '\x00'",
    "# \x7f",
    "# \t",
    'a = """""x"""',
    'a = """x"""""',
    'a = """x""""""',
    "a = '''x'''''",
    'a = """\\',
    'a = """\\ \n\n \t x"""',
    'a = """\\ x"""',
    "a = 01",
    "a = 1_000",
    "a = 1__0",
    "a = _1",
    "a = 1_",
    "a = 0x_1",
    "a = 0xF_f",
    "a = +0x1",
    "a = 0X1",
    "a = -0",
    "a = -0.0",
    "a = 1.",
    "a = .1",
    "a = 1.e1",
    "a = 1e1_0",
    "a = 1E+05",
    "a = 1e400",
    "a = 5e-324",
    "a = 9223372036854775807",
    "a = 9223372036854775808",
    "a = -9223372036854775809",
    "a = 0xffffffffffffffffffff",
    "a = 0o7777777777777777777777777",
    "a = +inf",
    "a = -nan",
    "a = infinity",
    "a = truee",
    "a = True",
    "a = 2024-02-30",
    "a = 2023-02-29",
    "a = 2000-02-29",
    "a = 1900-02-29",
    "a = 0000-01-01",
    "a = 2024-13-01",
    "a = 2024-1-1",
    "a = 2024-01-01T",
    "a = 2024-01-01 ",
    "a = 2024-01-01 # day",
    "a = 2024-01-01 07:32:00",
    "a = 2024-01-01t07:32:00z",
    "a = 2024-01-01T07:32",
    "a = 2024-01-01T07:32:60",
    "a = 2024-01-01T24:00:00",
    "a = 2024-01-01T07:32:00.123456789+23:59",
    "a = 2024-01-01T07:32:00+24:00",
    "a = 07:32:00.",
    "a = 07:32",
    "a = 7:32:00",
    "é = 1",
    '"é" = 1',
    "'' = 1",
    '"" . b = 1',
    '"""a""" = 1',
    "a . b = 1",
    "a. = 1",
    ".a = 1",
    "[ a . b ]",
    "[a",
    "[[a]",
    "[[a] ]",
    "[ [a]]",
    "[]",
    "[a]b = 1",
    "[a] # comment",
]


def agrees(text: str) -> None:
    ours = parse_toml(text, toml_1_1=TOML_1_1)
    if isinstance(ours, tuple) and ours[0] == "limit":
        return
    # repr also tells 1 from 1.0 and True, and shows NaN and the order of keys.
    assert repr(None if isinstance(ours, tuple) else ours) == repr(reference.read(text))


@pytest.mark.parametrize("text", FILES)
def test_files_like_those_of_public_suites(text: str) -> None:
    assert isinstance(parse_toml(text), dict)
    agrees(text)


@pytest.mark.parametrize("text", CASES)
def test_corners_of_the_grammar(text: str) -> None:
    agrees(text)


KEYS = st.sampled_from(["a", "b", "c", "a.b", "b.a", "a.b.c", "c.a", "'a'", '"b"', "a . c", '"\\u0061"'])
INLINE = st.recursive(
    st.sampled_from(["1", "'x'", "[]", "{}", "[{}]"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(st.tuples(KEYS, inner), max_size=3).map(lambda ps: f"{{{', '.join(f'{k} = {v}' for k, v in ps)}}}"),
    ),
    max_leaves=5,
)
LINES = st.one_of(
    st.tuples(KEYS, INLINE).map(" = ".join),
    KEYS.map("[{}]".format),
    KEYS.map("[[{}]]".format),
)


@settings(max_examples=max(500, settings.default.max_examples))
@given(st.lists(LINES, max_size=10))
def test_tables_reopened_extended_and_redefined(lines: list[str]) -> None:
    agrees("\n".join(lines))


PIECES = [
    *"[]{}=.,\n\r \t\"'\\#_-+019exTZ:ab\x00\x7fé\ufeff\u2028",
    *("\r\n", "'''", '"""', "inf", "nan", "true", "\\u00e9", "\\x41", "\\e", "\\\n", "[[", "]]", "= 1\n"),
    *("1979-05-27", "07:32:00", "0x", "1e400", "1_0"),
]
TOKENS = st.one_of(st.sampled_from(PIECES), st.text(st.characters(exclude_categories=["Cs"]), max_size=3))


@settings(max_examples=max(500, settings.default.max_examples))
@given(st.lists(TOKENS, max_size=12).map("".join))
def test_any_text(text: str) -> None:
    agrees(text)
    agrees("a = " + text)


@st.composite
def mutated(draw: Callable[[st.SearchStrategy[Any]], Any]) -> str:
    text: str = draw(st.sampled_from(FILES + CASES))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 0, 1, 1, 5, 40])))
        text = text[:start] + draw(st.one_of(st.just(""), TOKENS, st.just(text[start:end] * 2))) + text[end:]
    return text


@settings(max_examples=max(500, settings.default.max_examples))
@given(mutated())
@example("a = 1\r\r\n[b]")
def test_mutated_files(text: str) -> None:
    agrees(text)


def test_shuffled_lines() -> None:
    generator = random.Random(0)
    lines = [line for file in FILES for line in file.split("\n")]
    for _ in range(500):
        agrees("\n".join(generator.sample(lines, 6)))


def test_toml_1_1_against_tomli() -> None:
    tomli = pytest.importorskip("tomli", minversion="2.4", reason="tomli is the reference for TOML 1.1")
    generator = random.Random(1)
    texts = FILES + CASES + ["a = {\n b = 1, # c\n}", 'a = "\\x41\\e"', "a = 07:32", "a = 2024-01-01T07:32Z", "a = {,}"]
    texts += ["".join(generator.choices(text, k=len(text))) for text in CASES]
    for text in texts:
        ours = parse_toml(text, toml_1_1=True)
        try:
            expected = tomli.loads(text.replace("\r\n", "\n").replace("\r", "\n"))
        except ValueError:
            expected = None
        assert repr(None if isinstance(ours, tuple) else ours) == repr(expected), text


def test_a_refusal_has_a_line_and_a_column_in_characters() -> None:
    assert parse_toml("é = 1") == ("syntax", "neither a key, a table header nor a comment", 1, 1)
    kind, _, line, column = parse_toml("a = 1\r\n'é' = é")  # type: ignore[misc]
    assert (kind, line, column) == ("syntax", 2, 7)


HUGE = {
    "keys": "".join(f"k{i}.x = {i}\n" for i in range(200_000)),
    "one section": "[a.b]\n" + "".join(f"k{i} = {i}\n" for i in range(200_000)),
    "headers": "".join(f"[t{i}.x]\n" for i in range(200_000)),
    "array of tables": "[[a]]\nx.y = 1\n" * 200_000,
    "long key": "k" * 5_000_000 + " = 1",
    "long string": "a = '" + "x" * 10_000_000 + "'",
    "escapes": 'a = "' + "\\n" * 2_000_000 + '"',
    "long array": "a = [" + "1," * 2_000_000 + "]",
    "inline keys": "a = {" + ", ".join(f"k{i}.x = 1" for i in range(200_000)) + "}",
    "comment": "#" + "x" * 10_000_000,
    "blank lines": "\n" * 10_000_000,
    "quotes": 'a = """' + '""x' * 2_000_000 + '"""',
    "carriage returns": "\r" * 5_000_000,
    "digits with underscores": "a = " + "1_" * 200 + "1",
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_documents_take_time_in_proportion(name: str) -> None:
    # Anything quadratic here would take hours.
    assert isinstance(parse_toml(HUGE[name]), dict)


@pytest.mark.parametrize(
    "text", ["[" * 1_000_000, "a = " + "[" * 1_000_000, "a = " + "{a = " * 1_000_000, "a." * 1_000_000]
)
def test_bottomless_documents_end(text: str) -> None:
    assert isinstance(parse_toml(text), tuple)
