"""Generated Dockerfiles, contexts, words and patterns: the native half against the Python reference."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dockerfile_builders import ALL_FEATURES
from dockerfile_cases import PATTERNS, Case, cases, contexts, copies
from harbor_trl import _native
from reference import dockerfile_copy, dockerfile_text
from test_dockerfile_parse import assert_oracle_agrees, native, plain

LINES = st.sampled_from(
    [
        "FROM a",
        "FROM a AS b",
        "COPY a /b",
        "COPY --chown=1 a /b",
        "RUN x",
        "RUN <<E",
        "COPY <<-E <<F /x",
        "E",
        "\tE",
        "F",
        "ENV a=b c='d e'",
        "ENV a b  c",
        'RUN ["a", "b"]',
        'CMD ["x", 1]',
        'ARG a="b c"',
        "# note",
        "# escape=`",
        "# syntax=x",
        "LABEL a=b\\ c",
        "ONBUILD RUN <<E",
        "HEALTHCHECK CMD x",
        "WORKDIR /a b",
        "",
        "  ",
        "x \\",
        "x `",
        "\\",
        "`",
        "\\\\",
        " $x",
        "--a='b c' d",
        "é \u00a0 x",
        "${a:-b}",
        "'",
        '"',
        "COPY --a\\ b c d",
        'VOLUME ["a"',
        "<<E",
        "EXPOSE 1 2",
    ]
)


@st.composite
def texts(draw: st.DrawFn) -> str:
    parts = draw(st.lists(LINES, max_size=8))
    ends = draw(st.lists(st.sampled_from(["\n", "\n", "\n", "\r\n", " ", " \\\n", "`\n", ""]), min_size=8, max_size=8))
    return "".join(part + end for part, end in zip(parts, ends, strict=False))


@given(texts())
def test_any_text_parses_as_the_reference_says(source: str) -> None:
    assert native(source) == plain(source)


@given(texts())
def test_any_text_parses_as_buildkit_does(source: str) -> None:
    assert_oracle_agrees(source)


@given(st.binary(max_size=200))
def test_any_bytes_parse_as_the_reference_says(source: bytes) -> None:
    assert native(source) == plain(source)


WORDS = st.lists(
    st.sampled_from(
        [
            "$",
            "{",
            "}",
            "x",
            "y",
            "u",
            "n",
            ":",
            "-",
            "+",
            "?",
            "#",
            "%",
            "/",
            "*",
            "\\",
            "'",
            '"',
            " ",
            "<",
            "${x",
            "${y:-",
            "a",
            "b",
            "`",
            "1",
            "é",
            "\n",
        ]
    ),
    max_size=12,
).map("".join)
VALUES = st.one_of(st.none(), st.text(alphabet="ab*/?\\ é", max_size=6))


@given(WORDS, st.dictionaries(st.sampled_from(["x", "y", "n", "1", "?", "-"]), VALUES), st.sampled_from("\\`"))
def test_any_word_expands_as_the_reference_says(word: str, env: dict[str, str | None], escape: str) -> None:
    def outcome(expand: Any) -> Any:
        try:
            return expand()
        except dockerfile_text.Unclear:
            return None
        except (ValueError, dockerfile_text.Refused):
            return "refused"

    expected = outcome(lambda: dockerfile_text.expand(word, escape, env))
    assert outcome(lambda: _native.expand_word(word, env, escape)) == expected


GLOBS = st.lists(
    st.sampled_from(["a", "b", "c", "*", "**", "?", "/", "[", "]", "^", "-", "\\", ".", "é", "["]), max_size=8
).map("".join)
NAMES = st.lists(st.sampled_from(["a", "b", "c", "/", "-", "]", "^", ".", "é", "\\"]), max_size=8).map("".join)


@given(GLOBS, NAMES)
def test_any_wildcard_matches_as_the_reference_says(pattern: str, name: str) -> None:
    assert _native.match_path(pattern, name) is dockerfile_text.match_path(pattern, name)


PATHS = st.lists(st.sampled_from(["a", "b", "f", "g.txt", ".env", "dir", "x[1]"]), min_size=1, max_size=4).map("/".join)


@given(
    st.lists(st.one_of(st.sampled_from(PATTERNS), GLOBS, GLOBS.map("!".__add__)), max_size=5),
    st.lists(PATHS, min_size=1, max_size=5),
)
def test_any_dockerignore_hides_what_the_reference_says(patterns: list[str], paths: list[str]) -> None:
    source = "\n".join(patterns).encode()
    try:
        compiled = dockerfile_text.Patterns(dockerfile_text.ignore_lines(source))
        expected = [compiled.matches(path) for path in paths]
    except (dockerfile_text.Refused, dockerfile_text.Unclear):
        expected = None
    assert _native.match_ignore(source, paths) == expected


RUNS = st.lists(
    st.sampled_from(
        [
            "rm -rf",
            "rm",
            "cd",
            "apt-get install -y git",
            "make",
            "/x",
            "/a",
            "f",
            "*",
            "/x/*",
            "&&",
            ";",
            "|",
            "(",
            ")",
            "$X",
            "$(",
            "`",
            '"',
            "'",
            "{",
            "}",
            "X=/x",
            "> /x/f",
            "<",
            "<<E",
            "-C/x",
            "if",
            "then",
            "fi",
            "for X in",
            "./f",
            "/usr/bin/rm",
            "~/x",
            "git clone",
            "git",
            "find",
            "-delete",
            "-exec",
            "sh",
            "python3 -m pip",
            ".",
            "..",
            "\\",
            "#",
            "g.txt",
            "{f,g}",
            "--to=/x",
            "${NAME}",
            "cp -r",
            "tar -C /x",
            "\t",
        ]
    ),
    max_size=9,
).map(" ".join)


@st.composite
def images(draw: st.DrawFn) -> Case:
    """Builds on images that aren't known, with RUN in between."""
    nodes = draw(contexts())
    lines = [draw(st.sampled_from(["FROM image", "FROM image AS s", "FROM scratch AS s", "ARG I=image\nFROM $I"]))]
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.integers(0, 9))
        if kind < 4:
            lines.append(draw(copies(list(nodes), ALL_FEATURES)))
        elif kind < 7:
            lines.append("RUN " + draw(RUNS) + " x\nE\n" * draw(st.integers(0, 1)))
        elif kind == 7:
            lines.append(
                draw(
                    st.sampled_from(
                        ["WORKDIR /w", "WORKDIR w", "WORKDIR $NAME", "USER u", "ENV NAME=x", "ENV P=/q:$PATH"]
                    )
                )
            )
        elif kind == 8:
            lines.append("FROM " + draw(st.sampled_from(["s AS t", "scratch", "image", "s"])))
        else:
            lines.append(
                draw(
                    st.sampled_from(
                        [
                            "COPY --from=s /x /y/",
                            "COPY --from=0 / /",
                            "COPY --from=other/image /x /x",
                            "ONBUILD COPY f /o",
                        ]
                    )
                )
            )
    ignore = draw(st.one_of(st.none(), st.lists(st.sampled_from(PATTERNS), max_size=3).map("\n".join)))
    build_args = draw(st.one_of(st.just({}), st.just({"NAME": "arg"})))
    return Case(nodes, "\n".join(lines) + "\n", ignore, build_args)


def plans(dockerfile: Path, context: Path, build_args: dict[str, str] | None = None) -> tuple[Any, Any]:
    """The plans of the two halves, to be compared."""
    found = _native.copy_plan(dockerfile, context, None, build_args or {})
    result = {
        **found,
        "entries": [{**entry, "touched": entry["touched"] and entry["touched"]["line"]} for entry in found["entries"]],
        "errors": [(error["code"], error["line"]) for error in found["errors"]],
        "unknowns": [unknown["line"] for unknown in found["unknowns"]],
    }
    return result, dockerfile_copy.copy_plan(dockerfile, context, None, build_args or {})


def assert_halves_agree(case: Case) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        context = case.write(root)
        result, expected = plans(root / "Dockerfile", context, case.build_args)
    assert result == expected


@given(cases(ALL_FEATURES))
def test_any_build_from_scratch_is_planned_as_the_reference_says(case: Case) -> None:
    assert_halves_agree(case)


@given(images())
def test_any_build_on_an_image_is_planned_as_the_reference_says(case: Case) -> None:
    assert_halves_agree(case)


@settings(max_examples=30)
@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_broken_dockerfiles_never_break_the_planner(shuffle: random.Random, count: int) -> None:
    pieces = [
        "FROM scratch\n",
        "COPY ",
        "a ",
        "/b\n",
        "<<E\n",
        "E\n",
        "\\\n",
        "[",
        '"',
        "$",
        "{",
        "}",
        "--from=",
        "RUN ",
        "\0",
        "\xff",
        "ADD ",
        "* ",
    ]
    source = "".join(shuffle.choice(pieces) for _ in range(count))
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "Dockerfile").write_bytes(source.encode("latin-1"))
        plan = _native.copy_plan(Path(directory) / "Dockerfile", directory)
    assert isinstance(plan["errors"], list)


@pytest.mark.parametrize("table", ["READERS", "WRITERS", "TOOLS"])
def test_no_command_is_in_two_tables(table: str) -> None:
    from reference import dockerfile_run

    tables = {name: getattr(dockerfile_run, name) for name in ("READERS", "WRITERS", "TOOLS")}
    mine = tables.pop(table)
    assert not any(mine & other for other in tables.values())
