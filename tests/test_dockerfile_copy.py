"""Copy plans: each rule for the native half and the Python reference, on real files."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harbor_trl import _native
from harbor_trl.dockerfile import copy_plan
from reference import dockerfile_copy as reference

Files = dict[str, Any]


def lay_out(root: Path, files: Files) -> None:
    """`{"a/b": "text", "d/": mode, "link": ("->", target), "f": (text, mode)}`."""
    for name, what in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
            path.chmod(what)
        elif isinstance(what, tuple) and what[0] == "->":
            path.symlink_to(what[1])
        else:
            text, mode = what if isinstance(what, tuple) else (what, 0o644)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            path.chmod(mode)


class Plan:
    """A plan on which both halves agree."""

    def __init__(self, root: Path, text: str, files: Files, target: str | None, build_args: dict[str, str]) -> None:
        context = root / "context"
        context.mkdir()
        context.chmod(0o755)
        lay_out(context, files)
        dockerfile = root / "Dockerfile"
        dockerfile.write_text(text)
        self.native = _native.copy_plan(dockerfile, context, target, build_args)
        plain = reference.copy_plan(dockerfile, context, target, build_args)
        assert [(e["code"], e["line"]) for e in self.native["errors"]] == plain["errors"]
        assert [u["line"] for u in self.native["unknowns"]] == plain["unknowns"]
        flat = [{**e, "touched": e["touched"] and e["touched"]["line"]} for e in self.native["entries"]]
        assert flat == plain["entries"]
        for key in ("base", "stage", "workdir", "user", "env"):
            assert self.native[key] == plain[key]
        self.entries = flat
        self.errors = [error["code"] for error in self.native["errors"]]
        self.unknowns = self.native["unknowns"]

    @property
    def files(self) -> dict[str, str | bytes | None]:
        """Destination to source, content or link target, of all but directories."""
        assert self.errors == [], self.native["errors"]
        assert self.unknowns == []
        return {
            e["destination"]: e["source"] or e["content"] or e["link"] for e in self.entries if e["kind"] != "directory"
        }

    def directories(self, *, made_on_the_way: bool) -> list[str]:
        found = [e for e in self.entries if e["kind"] == "directory" and e["if_missing"] is made_on_the_way]
        return [e["destination"] for e in found]

    def __getitem__(self, destination: str) -> dict[str, Any]:
        return [e for e in self.entries if e["destination"] == destination][-1]


Make = Callable[..., Plan]


@pytest.fixture
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    def make(text: str, files: Files | None = None, target: str | None = None, **build_args: str) -> Plan:
        return Plan(tmp_path_factory.mktemp("build"), text, files or {}, target, build_args)

    return make


SCRATCH = "FROM scratch\n"


# Instructions


def test_L8_what_must_stand_where(make: Make) -> None:
    assert make("FROM a\nCOPPY a b").errors == ["unknown-instruction"]
    assert make("RUN x\nFROM a").errors == ["before-from"]
    assert make("ARG A=1").errors == ["no-from"]
    assert make("ARG A=1\nFROM a").errors == []


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("COPY --form=x a /b", "unknown-flag"),
        ("COPY --chown=1 --chown=2 a /b", "repeated-flag"),
        ("COPY --link= a /b", "flag-value"),
        ("COPY --link=1 a /b", "flag-value"),
        ("COPY --chown a /b", "flag-value"),
        ("COPY --checksum=x a /b", "unknown-flag"),
        ("ADD --from=x a /b", "unknown-flag"),
        ("ENV --x=1 a=b", "unknown-flag"),
        ("ADD --checksum=sha256:1 a /b", "checksum"),
    ],
)
def test_F1_F2_wrong_flags(make: Make, line: str, code: str) -> None:
    assert make(SCRATCH + line, {"a": ""}).errors == [code]


@pytest.mark.parametrize(
    "line",
    [
        "COPY --link a /b",
        "COPY --link=TRUE a /b",
        "COPY --link=false a /b",
        "COPY --exclude=x --exclude=y a /b",
        "ADD --keep-git-dir a /b",
        "ADD --unpack=false --link --chown=1 --chmod=644 --exclude=z a /b",
        "COPY --from= a /b",
    ],
)
def test_F2_right_flags(make: Make, line: str) -> None:
    assert make(SCRATCH + line, {"a": ""}).files == {"/b": "a"}


def test_F4_blanks_need_json(make: Make) -> None:
    files = {"a b": ""}
    assert make(SCRATCH + 'COPY "a b" /x/', files).errors == ["substitution"]
    assert make(SCRATCH + 'COPY ["a b", "/x y/"]', files).files == {"/x y/a b": "a b"}


def test_F5_a_destination_is_needed(make: Make) -> None:
    assert make(SCRATCH + "COPY a", {"a": ""}).errors == ["copy-arguments"]
    assert make(SCRATCH + "COPY a <<E\nE", {"a": ""}).errors == ["heredoc-destination"]


def test_F6_words_are_expanded_in_both_forms(make: Make) -> None:
    head = SCRATCH + "WORKDIR /w\nENV D=/d\n"
    files = {"foo": "", "$FOO": "", "arr[0].txt": ""}
    assert make(head + "COPY 'foo' \"$D\"/x", files).files == {"/d/x": "foo"}
    assert make(head + 'COPY ["\'foo\'", "${D}/"]', files).files == {"/d/foo": "foo"}
    assert make(head + "COPY foo ''", files).files == {"/w/foo": "foo"}
    assert make(head + "COPY \\$FOO /x/", files).files == {"/x/$FOO": "$FOO"}
    assert make(head + "COPY arr\\[0\\].txt /x/", files).files == {}
    assert make(head + "COPY arr[[]0].txt /x/", files).files == {"/x/arr[0].txt": "arr[0].txt"}


# Variables


def test_V4_one_env_sees_the_state_before_it_but_arg_goes_item_by_item(make: Make) -> None:
    assert make(SCRATCH + "ENV abc=hello\nENV abc=bye def=$abc\nENV ghi=$abc").native["env"] == {
        "abc": "bye",
        "def": "hello",
        "ghi": "bye",
    }
    assert make(SCRATCH + "ARG a=1 b=$a\nENV c=$b").native["env"] == {"c": "1"}


def test_V5_global_args_need_redeclaring(make: Make) -> None:
    head = "ARG A=one\nARG B=${A}two\n"
    assert make(head + "FROM scratch\nENV x=[$A]").native["env"] == {"x": "[]"}
    assert make(head + "FROM scratch\nARG B\nENV x=[$B]").native["env"] == {"x": "[onetwo]"}
    assert make(head + "FROM scratch\nARG A=own\nENV x=[$A]").native["env"] == {"x": "[own]"}
    assert make(head + "FROM scratch\nARG A=own\nENV x=[$A]", A="given").native["env"] == {"x": "[given]"}
    assert make("ARG I=scratch\nFROM $I\nCOPY a /a", {"a": ""}).files == {"/a": "a"}
    assert make("FROM scratch\nARG TARGETARCH\nENV x=$TARGETARCH").native["env"] == {"x": None}
    assert make("FROM scratch\nENV x=[$TARGETARCH]").native["env"] == {"x": "[]"}


def test_V6_a_stage_inherits_args_of_its_base_only(make: Make) -> None:
    head = "FROM scratch AS one\nARG A=1\nENV E=2\n"
    assert make(head + "FROM one\nENV x=[$A$E]").native["env"]["x"] == "[12]"
    assert make(head + "FROM scratch\nENV x=[$A$E]").native["env"]["x"] == "[]"
    assert make(SCRATCH + "ENV x=[$A]\nARG A=1").native["env"]["x"] == "[]"


def test_V7_env_after_arg_wins(make: Make) -> None:
    assert make(SCRATCH + "ARG V=arg\nENV V=env\nENV x=$V", V="given").native["env"]["x"] == "env"


def test_V9_what_is_expanded(make: Make) -> None:
    head = SCRATCH + "ENV S=a D=/d O=5:6 M=600 P=*.txt\n"
    plan = make(head + "COPY --chown=$O --chmod=$M $S $D", {"a": ""})
    assert (plan["/d"]["source"], plan["/d"]["owner"], plan["/d"]["mode"]) == ("a", "5:6", 0o600)
    assert make(head + "COPY --exclude=$P d /x/", {"d/a.txt": "", "d/b": ""}).files == {
        "/x/a.txt": "d/a.txt",
        "/x/b": "d/b",
    }
    assert make("FROM scratch AS a\nFROM scratch\nENV X=a\nCOPY --from=$X / /").errors == ["from-variable"]
    assert make("FROM $nothing").errors == ["from-blank"]
    assert make("FROM --platform=$nothing scratch").errors == ["platform-blank"]


def test_V10_path_is_set_from_scratch_and_unknown_from_an_image(make: Make) -> None:
    assert make(SCRATCH + "ENV x=$PATH").native["env"]["x"].startswith("/usr/local/sbin:")
    plan = make("FROM image\nENV x=/a:$PATH\nCOPY a $HOME/x", {"a": ""})
    assert plan.native["env"] == {"x": None}
    assert [unknown["line"] for unknown in plan.unknowns] == [3]
    assert "$HOME" in plan.unknowns[0]["reason"]


# Stages


def test_S1_stage_names(make: Make) -> None:
    files = {"a": ""}
    assert make("FROM scratch AS 1x").errors == ["stage-name"]
    assert make("FROM scratch AS a/b").errors == ["stage-name"]
    assert make("FROM scratch AS Base\nCOPY a /a\nFROM scratch\nCOPY --from=BASE /a /b", files).files == {"/b": "a"}
    assert make("FROM scratch AS Base\nCOPY a /a\nFROM Base", files).native["base"] == "Base"
    assert make("FROM scratch AS Base\nCOPY a /a\nFROM base", files).files == {"/a": "a"}


def test_S2_from_indexes_order_cycles_and_duplicates(make: Make) -> None:
    files = {"a": "", "b": ""}
    assert make("FROM scratch\nCOPY a /a\nFROM scratch\nCOPY --from=0 /a /b", files).files == {"/b": "a"}
    assert make("FROM scratch\nCOPY --from=7 /a /b").errors == ["from-index"]
    assert make("FROM scratch AS x\nCOPY --from=y /a /b\nFROM scratch AS y\n", files, "x").errors == ["from-later"]
    assert make("FROM scratch AS x\nCOPY --from=x /a /b").errors == ["stage-cycle"]
    two = "FROM scratch AS x\nCOPY a /f\nFROM x AS y\nFROM scratch AS x\nCOPY b /f\n"
    assert make(two + "FROM scratch\nCOPY --from=x /f /g", files).files == {"/g": "b"}
    assert make(two, files, "y").files == {"/f": "a"}
    plan = make("FROM scratch\nCOPY --from=some/image /a /b")
    assert [unknown["line"] for unknown in plan.unknowns] == [2]


def test_S3_only_needed_stages_count(make: Make) -> None:
    text = "FROM scratch AS one\nCOPY nothing /x\nFROM scratch AS two\nCOPY a /a\n"
    assert make(text, {"a": ""}).files == {"/a": "a"}
    assert make(text, {"a": ""}, "one").errors == ["source-missing"]
    assert make(text, {"a": ""}, "TWO").files == {"/a": "a"}
    assert make(text, {"a": ""}, "three").errors == ["target-missing"]
    assert make("FROM scratch AS one\nCOPY nothing /x\nFROM scratch\nRUN --mount=from=one,target=/m x").errors == [
        "source-missing"
    ]


def test_S4_a_stage_inherits_files_env_workdir_and_user(make: Make) -> None:
    text = "FROM scratch AS one\nWORKDIR /w\nUSER 7\nENV E=1\nCOPY a .\nFROM one\nCOPY b $E/"
    plan = make(text, {"a": "", "b": ""})
    assert plan.files == {"/w/a": "a", "/w/1/b": "b"}
    assert (plan.native["workdir"], plan.native["user"], plan.native["base"]) == ("/w", "7", "scratch")
    unknown = make("FROM image")
    assert (unknown.native["workdir"], unknown.native["user"], unknown.native["base"]) == (None, None, "image")


def test_S5_from_starts_at_the_root_and_past_the_dockerignore(make: Make) -> None:
    text = "FROM scratch AS one\nWORKDIR /w\nCOPY a b/\nFROM scratch\nCOPY --from=one w/b/a /x"
    assert make(text, {"a": "", ".dockerignore": "w\n"}).files == {"/x": "a"}
    changed = make("FROM image AS one\nCOPY a /a\nRUN x\nFROM scratch\nCOPY --from=one /a /b", {"a": ""})
    assert [unknown["line"] for unknown in changed.unknowns] == [5]


def test_S6_onbuild_runs_first_in_the_child_only(make: Make) -> None:
    files = {"a": "", "b": ""}
    text = "FROM scratch AS one\nONBUILD COPY a /f\n"
    assert make(text, files).files == {}
    plan = make(text + "FROM one AS two\nCOPY b /g\n", files)
    assert plan.files == {"/f": "a", "/g": "b"}
    assert plan["/f"]["line"] == 3
    assert make(text + "FROM one AS two\nFROM two AS three\nCOPY b /f", files).files == {"/f": "b"}
    heredoc = "FROM scratch AS one\nONBUILD COPY <<E /f\nhi\nE\nFROM one"
    assert make(heredoc).files == {"/f": b"hi\n"}
    for inner in ("ONBUILD RUN x", "FROM x", "MAINTAINER x"):
        assert make(f"FROM a\nONBUILD {inner}").errors == ["onbuild-trigger"]


def test_S7_workdir(make: Make) -> None:
    assert make(SCRATCH + "ENV N=c\nWORKDIR /a\nWORKDIR b/../$N\nCOPY f .", {"f": ""}).files == {"/a/c/f": "f"}
    assert make(SCRATCH + "WORKDIR ../..\nCOPY f .", {"f": ""}).files == {"/f": "f"}
    # It makes the directory, so a file goes into it.
    assert make(SCRATCH + "WORKDIR /a\nCOPY f /a", {"f": ""}).files == {"/a/f": "f"}


# Destinations


@pytest.mark.parametrize(
    ("destination", "expected"),
    [
        ("/x", "/x"),
        ("x", "/w/x"),
        (".", "/w/f"),
        ("./", "/w/f"),
        ("..", "/f"),
        ("../x", "/x"),
        ("/../../x", "/x"),
        ("/x/", "/x/f"),
        ("/x/.", "/x/f"),
        ("/", "/f"),
        ("/x/../y", "/y"),
        ("//x//y", "/x/y"),
    ],
)
def test_D1_D2_where_one_file_goes(make: Make, destination: str, expected: str) -> None:
    assert make(SCRATCH + f"WORKDIR /w\nCOPY f {destination}", {"f": ""}).files == {expected: "f"}


def test_D1_a_relative_destination_in_an_unknown_workdir_is_unknown(make: Make) -> None:
    plan = make("FROM image\nCOPY f x/\nWORKDIR sub\nCOPY f .\nWORKDIR /w\nCOPY f .", {"f": ""})
    assert [unknown["line"] for unknown in plan.unknowns] == [2, 4]
    assert plan["/w/f"]["source"] == "f"


@pytest.mark.parametrize("destination", ["x/", "x", ".", "$HOME/", "$HOME"])
@pytest.mark.parametrize("flag", ["", "--link "])
def test_D1_a_missing_source_fails_the_build_wherever_it_is_to_go(make: Make, flag: str, destination: str) -> None:
    files: Files = {"f": "", "d/g": ""}
    plan = make(f"FROM image\nWORKDIR sub\nCOPY {flag}f gone {destination}", files)
    assert (plan.errors, plan.unknowns) == (["source-missing"], [])
    assert make(f"FROM image\nWORKDIR sub\nCOPY {flag}no/* {destination}", files).errors == ["source-missing"]
    assert make(f"FROM image\nWORKDIR sub\nCOPY {flag}f {destination}", files).errors == []


def test_D1_what_goes_to_an_unknown_place_is_sent_to_the_builder_too(make: Make) -> None:
    plan = make("FROM image\nCOPY d/g x/\nCOPY d/no* /y/", {"d/g": ""})
    assert (plan.errors, [unknown["line"] for unknown in plan.unknowns]) == ([], [2])


def test_D2_a_destination_that_may_be_a_directory_says_so(make: Make) -> None:
    plan = make("FROM image\nCOPY f /x\nCOPY g /y/\nCOPY g /y", {"f": "", "g": ""})
    assert [e["if_directory"] for e in plan.entries if e["kind"] == "file"] == ["/x/f", None, None]
    assert plan.entries[-1]["destination"] == "/y/g"


def test_D3_the_name_is_the_one_written(make: Make) -> None:
    assert make(SCRATCH + "COPY link /x/", {"real": "", "link": ("->", "real")}).files == {"/x/link": "real"}


@pytest.mark.parametrize("source", ["d", "d/", "d/.", "./d", "/d"])
@pytest.mark.parametrize("destination", ["/x", "/x/"])
def test_D4_a_directory_gives_its_contents(make: Make, source: str, destination: str) -> None:
    files = {"d/a": "", "d/e/b": ""}
    assert make(SCRATCH + f"COPY {source} {destination}", files).files == {"/x/a": "d/a", "/x/e/b": "d/e/b"}


def test_D4_directories_merge_and_kinds_do_not_mix(make: Make) -> None:
    files = {"d/a": "", "d/e/b": "", "f": ""}
    assert make(SCRATCH + "COPY d /x\nCOPY f /x/a\nCOPY d/e /x", files).files == {
        "/x/a": "f",
        "/x/e/b": "d/e/b",
        "/x/b": "d/e/b",
    }
    assert make(SCRATCH + "COPY f /x\nCOPY d /x", files).errors == ["not-a-directory"]
    assert make(SCRATCH + "COPY f /x/e\nCOPY d /x", files).errors == ["directory-over-file"]
    assert make(SCRATCH + "COPY f /x\nCOPY f /x/y", files).errors == ["not-a-directory"]
    assert make(SCRATCH + "COPY d /x/f\nCOPY f /x/", files).errors == ["file-over-directory"]


def test_D5_missing_parents(make: Make) -> None:
    plan = make(SCRATCH + "COPY --chown=5 --chmod=4711 f /a/b/c", {"f": ""})
    assert plan.directories(made_on_the_way=True) == ["/a", "/a/b"]
    assert (plan["/a"]["mode"], plan["/a"]["owner"], plan["/a/b/c"]["mode"]) == (0o711, "5:5", 0o4711)
    assert make(SCRATCH + "COPY f /a/b", {"f": ""})["/a"]["mode"] == 0o755


def test_D6_metadata_of_directories(make: Make) -> None:
    files = {"d/": 0o700, "d/e/": 0o711, "d/e/f": "", "d/g": ""}
    plan = make(SCRATCH + "COPY --chown=5 d /x\nCOPY d /x", files)
    top = [(e["mode"], e["owner"], e["if_missing"]) for e in plan.entries if e["destination"] == "/x"]
    nested = [(e["mode"], e["owner"], e["if_missing"]) for e in plan.entries if e["destination"] == "/x/e"]
    assert top == [(0o755, "5:5", True)]
    assert nested == [(0o711, "5:5", False), (0o711, "0:0", False)]


def test_D7_several_sources_without_a_slash_are_reported(make: Make) -> None:
    assert make(SCRATCH + "COPY a b /x/", {"a": "", "b": ""}).files == {"/x/a": "a", "/x/b": "b"}
    files = {"a": "", "b": "", "d/c": ""}
    for base in (SCRATCH, "FROM debian\n"):
        for sources in ("a b", "[ab]", "a a"):
            assert [u["line"] for u in make(base + f"COPY {sources} /x", files).unknowns] == [2], sources
        # The directory comes first, so that there is one to put the file into.
        assert make(base + "COPY d a /x", files).unknowns == []
        assert make(base + "COPY a no* /x", files).unknowns == []
    assert [e["code"] for e in make(SCRATCH + "COPY a d /x", files).native["errors"]] == ["not-a-directory"]
    # Fine if the image has a directory /x.
    assert [u["line"] for u in make("FROM debian\nCOPY a d /x", files).unknowns] == [2]


def test_D8_links_at_the_destination_are_followed_but_not_by_link(make: Make) -> None:
    files = {"d/bin": ("->", "usr/bin"), "f": ""}
    assert make(SCRATCH + "COPY d /\nCOPY f /bin/", files).files == {"/bin": "usr/bin", "/usr/bin/f": "f"}
    assert make(SCRATCH + "COPY d /\nCOPY --link f /bin/", files)["/bin"]["kind"] == "directory"
    plan = make(SCRATCH + "COPY --chmod=700 f /x/\nCOPY --link f /x/g", {"f": ""})
    assert (plan["/x"]["mode"], plan["/x"]["if_missing"]) == (0o755, False)


# Sources


@pytest.mark.parametrize("source", ["/d/f", "./d/f", "../d/f", "d/../../d/f", "d/f/", "/./d//f"])
def test_C1_sources_stay_in_the_context(make: Make, source: str) -> None:
    assert make(SCRATCH + f"COPY {source} /x", {"d/f": ""}).files == {"/x": "d/f"}


def test_C2_wildcards_match_dot_files_and_stop_at_slashes(make: Make) -> None:
    files = {".env": "", "a.txt": "", "B.TXT": "", "d/c.txt": "", "d/e/g.txt": ""}
    assert make(SCRATCH + "COPY *.txt /x/", files).files == {"/x/a.txt": "a.txt"}
    assert make(SCRATCH + "COPY d/*.txt d/**/*.txt /x/", files).files == {
        "/x/c.txt": "d/c.txt",
        "/x/g.txt": "d/e/g.txt",
    }
    assert make(SCRATCH + "COPY .* [B]* /x/", files).files == {"/x/.env": ".env", "/x/B.TXT": "B.TXT"}


def test_C3_a_matched_directory_gives_its_contents(make: Make) -> None:
    files = {"a": "", "d/b": "", "d/e/c": ""}
    assert make(SCRATCH + "COPY * /x/", files).files == {"/x/a": "a", "/x/b": "d/b", "/x/e/c": "d/e/c"}


def test_C4_missing_sources(make: Make) -> None:
    assert make(SCRATCH + "COPY no* /x/", {"a": ""}).files == {}
    plan = make(SCRATCH + "COPY a no /x/", {"a": ""})
    assert plan.native["errors"][0] | {"message": ""} == {
        "code": "source-missing",
        "line": 2,
        "column": 8,
        "message": "",
    }
    assert make(SCRATCH + "COPY no/* /x/", {"a": ""}).errors == ["source-missing"]
    assert make(SCRATCH + "COPY a [^ /x/", {"a": ""}).errors == ["source-pattern"]


def test_C4_a_wildcard_into_a_directory_that_no_copy_needs_fails(make: Make) -> None:
    files = {"d/a": "", "d/b": ""}
    assert make(SCRATCH + "COPY d/no* /x/", files).errors == ["source-missing"]
    assert make(SCRATCH + "COPY d/no* /x/\nCOPY d/a /y", files).files == {"/y": "d/a"}


def test_C5_named_links_are_followed_inside_the_context_and_others_copied(make: Make, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host")
    files = {
        "real/f": "",
        "link": ("->", "real"),
        "absolute": ("->", "/real/f"),
        "up": ("->", "../../real/f"),
        "host": ("->", str(tmp_path / "secret")),
        "d/l": ("->", "/etc/passwd"),
        "loop": ("->", "loop"),
    }
    assert make(SCRATCH + "COPY link /x/", files).files == {"/x/f": "real/f"}
    assert make(SCRATCH + "COPY link/f /x", files).files == {"/x": "real/f"}
    assert make(SCRATCH + "COPY absolute up /x/", files).files == {"/x/absolute": "real/f", "/x/up": "real/f"}
    assert make(SCRATCH + "COPY host /x/", files).errors == ["source-missing"]
    assert make(SCRATCH + "COPY d /x/", files).files == {"/x/l": "/etc/passwd"}
    assert [u["line"] for u in make(SCRATCH + "COPY loop /x/", files).unknowns] == [2]


def test_C6_owners_and_modes(make: Make) -> None:
    plan = make(SCRATCH + "COPY f /x", {"f": ("", 0o4750)})
    assert (plan["/x"]["mode"], plan["/x"]["owner"]) == (0o4750, "0:0")
    text = "FROM scratch AS one\nCOPY --chown=3:4 f /x\nFROM scratch\nCOPY --from=one /x /y"
    assert make(text, {"f": ""})["/y"]["owner"] == "3:4"


def test_C7_order_and_remote_sources(make: Make) -> None:
    files = {"a/f": "", "b/f": ""}
    assert make(SCRATCH + "COPY b a /x/", files).files == {"/x/f": "a/f"}
    assert [e["source"] for e in make(SCRATCH + "COPY [ab] /x/", files).entries if e["source"]] == ["a/f", "b/f"]
    for remote in ("https://host/f", "git@host:a/b.git", "https://host/a.git"):
        assert make(SCRATCH + f"COPY {remote} /x/").errors == ["copy-remote"]
        assert [u["line"] for u in make(SCRATCH + f"ADD {remote} /x/").unknowns] == [2]


# Flags


@pytest.mark.parametrize(
    ("flag", "owner"), [("5", "5:5"), ("5:6", "5:6"), ("user", "user"), ("user:6", "user:6"), ("5:group", "5:group")]
)
def test_G1_chown(make: Make, flag: str, owner: str) -> None:
    assert make(SCRATCH + f"COPY --chown={flag} f /x", {"f": ""})["/x"]["owner"] == owner


@pytest.mark.parametrize(
    ("flag", "before", "after"),
    [
        ("755", 0o600, 0o755),
        ("0755", 0o600, 0o755),
        ("4711", 0o600, 0o4711),
        ("+x", 0o640, 0o751),
        ("a-w", 0o666, 0o444),
        ("u=rwX,go=rX", 0o600, 0o644),
        ("u=rwX,go=rX", 0o700, 0o755),
        ("g=u", 0o640, 0o660),
        ("o+w,g-r", 0o644, 0o606),
        ("=r", 0o755, 0o444),
        ("u+x", 0o644, 0o744),
        ("go=", 0o755, 0o700),
    ],
)
def test_G2_chmod(make: Make, flag: str, before: int, after: int) -> None:
    assert make(SCRATCH + f"COPY --chmod={flag} f /x", {"f": ("", before)})["/x"]["mode"] == after


@pytest.mark.parametrize("flag", ["64a", "10000", "9", "x", "u", "+y", "u+x,", "7777777777777"])
def test_G2_wrong_chmod(make: Make, flag: str) -> None:
    assert make(SCRATCH + f"COPY --chmod={flag} f /x", {"f": ""}).errors == ["chmod"]


def test_G2_directories_and_links(make: Make) -> None:
    files = {"d/e/f": "", "d/l": ("->", "e")}
    plan = make(SCRATCH + "COPY --chmod=750 d /x", files)
    assert [plan[path]["mode"] for path in ("/x", "/x/e", "/x/e/f", "/x/l")] == [0o750, 0o750, 0o750, None]
    assert make(SCRATCH + "COPY --chmod=u=rwX,go= d /x", files)["/x/e"]["mode"] == 0o700


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ("a/b/f", {"/x/a/b/f": "a/b/f"}),
        ("./a/b/f a/g", {"/x/a/b/f": "a/b/f", "/x/a/g": "a/g"}),
        ("a/./b/f", {"/x/b/f": "a/b/f"}),
        ("a/b", {"/x/a/b/f": "a/b/f"}),
        ("a/./b", {"/x/b/f": "a/b/f"}),
        ("**/f", {"/x/a/b/f": "a/b/f"}),
        ("a/*/f", {"/x/a/b/f": "a/b/f"}),
        ("*/./g", {"/x/g": "a/g"}),
        ("no*", {}),
    ],
)
def test_G3_parents(make: Make, sources: str, expected: dict[str, str]) -> None:
    assert make(SCRATCH + f"COPY --parents {sources} /x/", {"a/b/f": "", "a/g": ""}).files == expected


def test_G3_parents_of_something_missing(make: Make) -> None:
    assert make(SCRATCH + "COPY --parents a/no /x/", {"a/f": ""}).errors == ["source-missing"]
    plan = make(SCRATCH + "COPY --parents a/f /x/", {"a/": 0o711, "a/f": ""})
    assert plan["/x/a"]["mode"] == 0o711


def test_G4_exclude(make: Make) -> None:
    files = {"d/a.txt": "", "d/b": "", "d/e/c.txt": "", "f.txt": ""}
    copied = {"/x/b": "d/b", "/x/e/c.txt": "d/e/c.txt"}
    assert make(SCRATCH + "COPY --exclude=*.txt d /x", files).files == copied
    assert make(SCRATCH + "COPY --exclude=**/*.txt d /x", files).files == {"/x/b": "d/b"}
    assert make(SCRATCH + "COPY --exclude=* --exclude=!b d /x", files).files == {"/x/b": "d/b"}
    # A source that is a file, or that a wildcard found, is not asked about.
    assert make(SCRATCH + "COPY --exclude=*.txt f.txt /x/", files).files == {"/x/f.txt": "f.txt"}
    assert make(SCRATCH + "COPY --exclude=*.txt f* /x/", files).files == {"/x/f.txt": "f.txt"}


def test_G5_link_does_nothing_with_chmod(make: Make) -> None:
    files = {"d/bin": ("->", "usr/bin"), "f": ""}
    assert "/usr/bin/f" in make(SCRATCH + "COPY d /\nCOPY --link --chmod=600 f /bin/", files).files
    assert make(SCRATCH + "COPY --link f /x/", files).files == {"/x/f": "f"}


# Heredocs


def test_H6_expansion_in_heredocs(make: Make) -> None:
    head = SCRATCH + "ENV N=v\n"
    body = "$N ${N} ${M:-w} '$N' \"$N\" \\$N \\\\ \\n a\\\nb\n"
    assert make(head + f"COPY <<E /x\n{body}E").files == {"/x": b"v v w 'v' \"v\" $N \\ n a\nb\n"}
    assert make(head + f"COPY <<'E' /x\n{body}E").files == {"/x": body.encode()}
    assert make("# escape=`\n" + head + "COPY <<E /x\n\\$N `$N\nE").files == {"/x": b"$N `v\n"}
    assert [u["line"] for u in make("FROM image\nCOPY <<E /x\n$N\nE").unknowns] == [2]


def test_H7_where_heredocs_go(make: Make) -> None:
    head = SCRATCH + "WORKDIR /w\n"
    assert make(head + "COPY <<E f\nhi\nE").files == {"/w/f": b"hi\n"}
    plan = make(head + "COPY --chmod=700 --chown=5 <<A <<B dir/\n1\nA\n2\nB")
    assert plan.files == {"/w/dir/A": b"1\n", "/w/dir/B": b"2\n"}
    assert (plan["/w/dir/A"]["mode"], plan["/w/dir/A"]["owner"]) == (0o700, "5:5")
    assert make(head + "COPY <<E /x\nE")["/x"]["mode"] == 0o644
    both = make(head + "COPY <<A f /d/\n1\nA", {"f": ""})
    assert list(both.files) == ["/d/f", "/d/A"]
    assert make(head + "COPY <<A <<A /d/\n1\nA\n2\nA").files == {"/d/A": b"2\n"}
    assert make(head + "COPY <<a/b /d/\n1\na/b").errors == ["heredoc-name"]


# ADD


def archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo("inside")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    return buffer.getvalue()


def test_A1_archives_are_told_by_content(make: Make) -> None:
    files = {
        "a.bin": archive(),
        "b.tar": "no archive",
        "c.zip": b"PK\x03\x04",
        "d.gz": b"\x1f\x8b\x08rest",
        "e": b"\0" * 600,
    }
    plan = make(SCRATCH + "ADD --chown=5 a.bin /x/y", files)
    assert (plan["/x/y"]["kind"], plan["/x/y"]["source"], plan["/x/y"]["owner"]) == ("archive", "a.bin", "5:5")
    assert make(SCRATCH + "ADD b.tar c.zip e /x/", files).files == {
        "/x/b.tar": "b.tar",
        "/x/c.zip": "c.zip",
        "/x/e": "e",
    }
    assert make(SCRATCH + "ADD --unpack=false a.bin /x", files).files == {"/x": "a.bin"}
    assert make(SCRATCH + "COPY a.bin /x", files).files == {"/x": "a.bin"}
    assert [u["line"] for u in make(SCRATCH + "ADD d.gz /x/", files).unknowns] == [2]
    mixed = make(SCRATCH + "ADD [ab].* /x/", files)
    assert [e["kind"] for e in mixed.entries] == ["directory", "archive", "file"]


def test_A2_urls_are_reported_never_fetched(make: Make) -> None:
    plan = make(SCRATCH + "COPY f /x/f\nADD https://host/f /x/\nCOPY f /y", {"f": ""})
    assert [u["line"] for u in plan.unknowns] == [3]
    assert (plan["/x/f"]["touched"], plan["/y"]["touched"]) == (3, None)


# .dockerignore


def test_I1_the_dockerfiles_own_ignore_file_wins(tmp_path: Path) -> None:
    lay_out(tmp_path, {"a": "", "b": "", ".dockerignore": "a\n", "sub/D": "FROM scratch\nCOPY [ab] /x/\n"})
    sources = lambda plan: {e["source"] for e in plan["entries"] if e["source"]}  # noqa: E731
    args = (tmp_path / "sub/D", tmp_path)
    assert sources(_native.copy_plan(*args)) == sources(reference.copy_plan(*args)) == {"b"}
    lay_out(tmp_path, {"sub/D.dockerignore": "b\n"})
    assert sources(_native.copy_plan(*args)) == sources(reference.copy_plan(*args)) == {"a"}


def test_I4_a_file_can_come_back_under_an_ignored_directory(make: Make) -> None:
    files = {"d/a": "", "d/b": "", "e/c": "", ".dockerignore": "d\n!d/a\ne\n"}
    assert make(SCRATCH + "COPY . /x/", files).files == {"/x/.dockerignore": ".dockerignore", "/x/d/a": "d/a"}


def test_I5_ignored_sources_are_missing(make: Make) -> None:
    files = {"a": "", "b": "", ".dockerignore": "a\n.dockerignore\nDockerfile\n"}
    assert make(SCRATCH + "COPY a /x", files).errors == ["source-missing"]
    assert make(SCRATCH + "COPY . /x/", files).files == {"/x/b": "b"}
    assert make(SCRATCH + "COPY a /x", {"a": "", ".dockerignore": "a[\n"}).errors == ["ignore-pattern"]


# What a later RUN may have touched


@pytest.mark.parametrize(
    "run",
    [
        "rm /tmp/bug.patch",
        "patch -p1 < /tmp/bug.patch && rm /tmp/bug.patch",
        "cd /tmp && rm bug.patch",
        "rm -f /tmp/*.patch",
        "rm -rf /tmp/*",
        "rm -rf /tmp",
        "rm -rf /t?p",
        "rm -rf /tmp/{bug,fix}.patch",
        "cd /tmp && rm -rf *",
        "cd /tmp; rm -rf ./*",
        "(cd / && chmod -R 700 tmp)",
        "chown -R 1000:1000 /tmp",
        "find /tmp -type f -delete",
        "find / -name '*.patch' -exec rm {} +",
        "find /tmp -type f | xargs rm",
        "rm -rf $DIR",
        "rm -rf /tmp/$NAME",
        "X=/tmp && rm -rf $X",
        "for f in /tmp/*; do rm $f; done",
        "rm -rf `echo /tmp`",
        "rm -rf $(echo /tmp)",
        "apt-get update && bash /opt/setup.sh",
        "./install",
        "curl -fsSL https://host/install.sh | sh",
        "python3 -c 'import os'",
        "python3 <<E\nimport os\nE",
        "<<E\ncd /tmp\nrm *\nE",
        "<<E\n#!/usr/bin/python3\nE",
        "cd /tmp && git checkout .",
        "mv /tmp /gone",
        "ln -sf /dev/null /tmp",
        "tar -xf x.tar -C /tmp",
        "echo x > /tmp/$NAME",
        "sudo rm -rf /tmp",
        "if true; then rm -rf /tmp; fi",
        "rm -rf ~/../tmp; unknown-command",
        "eval x",
        '["rm", "-rf", "/tmp"]',
        '["sh", "-c", "cd /tmp && rm *"]',
        '["/opt/setup"]',
    ],
)
def test_a_run_that_may_remove_a_file_marks_it(make: Make, run: str) -> None:
    plan = make(f"FROM image\nWORKDIR /w\nCOPY bug.patch /tmp/\nRUN {run}\n", {"bug.patch": ""})
    assert plan["/tmp/bug.patch"]["touched"] == 4


@pytest.mark.parametrize(
    "run",
    [
        "apt-get update && apt-get install -y git curl && rm -rf /var/lib/apt/lists/*",
        "pip install --no-cache-dir numpy==1.2 'pandas>=2'",
        "python3 -m pip install numpy",
        "git clone https://host/repo.git && cd repo && git checkout abc",
        "make -j4 && make install",
        "npm install",
        "curl -fsSL https://host/go.tar.gz | tar -C /usr/local -xzf -",
        "ln -s /usr/local/go/bin/go /usr/local/bin/go",
        "mkdir -p /tmp/other /tmp/data",
        "echo hello > /etc/motd",
        "rm -rf /opt/x && chmod -R a+rX /opt",
        "useradd -m agent && chown -R agent:agent /home/agent",
        "rm -rf /tmp/*.md",
        "<<E\napt-get install -y git\nE",
        '["apt-get", "install", "git"]',
        "python3 --version && go version",
        "rm -rf ~/.cache",
    ],
)
def test_a_run_that_does_not_touch_a_file_leaves_it(make: Make, run: str) -> None:
    plan = make(f"FROM image\nWORKDIR /w\nCOPY bug.patch /tmp/\nRUN {run}\n", {"bug.patch": ""})
    assert plan["/tmp/bug.patch"]["touched"] is None


def test_a_run_touches_only_what_was_there_before_it(make: Make) -> None:
    plan = make("FROM image\nCOPY f /a/\nRUN rm -rf /a /b\nCOPY f /b/", {"f": ""})
    assert (plan["/a/f"]["touched"], plan["/b/f"]["touched"]) == (3, None)
    child = make("FROM image AS one\nCOPY f /a/\nFROM one\nRUN rm -rf /a", {"f": ""})
    assert child["/a/f"]["touched"] == 4


# Bounds. Timings are not asserted; each of these runs for minutes or fills the memory if it isn't linear.


def native_only(tmp_path: Path, text: str, files: Files) -> Any:
    context = tmp_path / "context"
    context.mkdir()
    lay_out(context, files)
    (tmp_path / "Dockerfile").write_text(text)
    return _native.copy_plan(tmp_path / "Dockerfile", context)


def nested(depth: int) -> str:
    return "${a:-" * depth + "x" + "}" * depth


@pytest.mark.parametrize(
    "lines",
    [
        ["RUN \\\n" + "x \\\n" * 100_000 + "y"],
        ["RUN \\\n" + ("x" * 60_000 + " \\\n") * 170 + "y"],
        ["ENV x=" + nested(3000)],
        ["ENV a0=xxxxxxxxxx", *[f"ENV a{n + 1}=${{a{n}}}${{a{n}}}$a{n}" for n in range(60)], "COPY f $a60"],
        ["ENV v=" + "a" * 60_000, "ENV w=${v//*a*a*a*a*b/x}"],
        ["COPY " + "a*" * 2000 + "b /x/"],
        ["COPY f " + "/a" * 30_000],
        ["RUN " + "$(" * 20_000],
        ["RUN echo " + "`a" * 20_000],
        ["ONBUILD " * 8000 + "RUN x"],
        ['COPY ["' + "x" * 60_000 + '", ' + "[" * 5000],
        ["COPY d /x"] * 2000,
        *[[f"COPY d /{n}" for n in range(300)] + ["RUN make"] * 300],
        ["COPY f /x", *["RUN rm -rf /y"] * 20_000],
        ["RUN " + "x" * 10_000_000],
        ["COPY <<E /x", *["x" * 60_000] * 170, "E"],
        ["COPY <<E /x", *["$v \\$v"] * 300_000, "E"],
        ["COPY f /x", "RUN <<E", *["rm -rf /y"] * 300_000, "E"],
        ["COPY " + " ".join(f"<<{n}" for n in range(5000)) + " /x/", *[str(n) for n in range(5000)]],
        ["COPY " + "--exclude=a \\\n" * 100_000 + "d /x"],
        ["COPY " + "--link \\\n" * 100_000 + "d /x"],
        ["COPY " + "f \\\n" * 100_000 + "/x/"],
        ["COPY " + "* \\\n" * 3000 + "/x/"],
        ["ENV " + "a=b \\\n" * 100_000 + "c=d"],
        [f"ENV a{n}=b" for n in range(100_000)],
        ["COPY f /x", "RUN " + "rm -rf /y && \\\n" * 100_000 + "z"],
        ["COPY f /x", "RUN " + "( \\\n" * 100_000 + "z"],
        ["COPY f /x", "RUN " + "if true; then \\\n" * 50_000 + "z"],
        ["COPY d /d", *[f"FROM scratch\nCOPY --from={n} / /a/\nCOPY --from={n} / /b/" for n in range(12)]],
    ],
    ids=range(29),
)
def test_hostile_dockerfiles_end(tmp_path: Path, lines: list[str]) -> None:
    files = {"f": "", **{f"d/{n}": "" for n in range(100)}}
    assert native_only(tmp_path, "FROM scratch\n" + "\n".join(lines) + "\n", files)["stage"] == ""


def test_links_without_end_end(tmp_path: Path) -> None:
    chain: Files = {f"l{n}": ("->", f"l{n + 1}") for n in range(5000)}
    doubling: Files = {f"d{n}/l": ("->", f"../d{n + 1}/l") for n in range(3000)}
    lines = ["COPY l0 /a", "COPY d0/l/l/l /b", "COPY . /c", "COPY f " + "/c/self/l" * 200 + "/y"]
    plan = native_only(
        tmp_path, "FROM scratch\n" + "\n".join(lines), {**chain, **doubling, "f": "", "self/l": ("->", "../self")}
    )
    assert {unknown["line"] for unknown in plan["unknowns"]} == {2, 3}


def test_many_patterns_for_many_files_end(tmp_path: Path) -> None:
    files: Files = {f"d/f{n}": "" for n in range(2000)}
    for count, unknowns in ((1000, 0), (100_000, 1)):
        patterns = "".join(f"**/p{n}*\n!d/q{n}/**\n" for n in range(count // 2))
        root = tmp_path / str(count)
        root.mkdir()
        plan = native_only(root, "FROM scratch\nCOPY d /x\n", {**files, ".dockerignore": patterns})
        assert len(plan["unknowns"]) == unknowns
        assert len(plan["entries"]) == (1 if unknowns else 2001)
        assert plan["errors"] == []


def test_many_stages_end(tmp_path: Path) -> None:
    lines = ["FROM scratch AS s0"] + [f"FROM s{n} AS s{n + 1}\nENV e{n}=x\nCOPY d /d{n}" for n in range(2000)]
    plan = native_only(tmp_path, "\n".join(lines), {f"d/{n}": "" for n in range(20)})
    assert len(plan["unknowns"]) == 1


def test_patterns_with_many_stars_end() -> None:
    assert _native.match_path("a*" * 3000 + "b", "a" * 10_000) is False
    assert _native.match_ignore(("**/a*" * 300 + "b\n").encode(), ["a" * 2000, "a/" * 500]) == [False, False]


def test_the_wrapper_gives_typed_values_and_reads_no_content(tmp_path: Path) -> None:
    lay_out(tmp_path, {"Dockerfile": "FROM image\nCOPY f /tmp/\nRUN rm /tmp/f\nCOPY nothing /x\n", "f": ""})
    (tmp_path / "f").chmod(0)
    plan = copy_plan(tmp_path / "Dockerfile", tmp_path, build_args={"A": "1"})
    assert plan.entries[-1].touched is not None and plan.entries[-1].touched.line == 3
    assert (plan.errors[0].code, plan.errors[0].line, plan.errors[0].column) == ("source-missing", 4, 6)
    with pytest.raises(FileNotFoundError):
        copy_plan(tmp_path / "absent", tmp_path)


def test_names_that_are_not_utf8_are_reported(tmp_path: Path) -> None:
    lay_out(tmp_path, {"d/a": "", "Dockerfile": "FROM scratch\nCOPY d /x\n"})
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/d/\xff")).write_text("")
    plan = copy_plan(tmp_path / "Dockerfile", tmp_path)
    assert [entry.source for entry in plan.entries if entry.kind == "file"] == ["d/a"]
    assert "UTF-8" in plan.unknowns[0].reason
