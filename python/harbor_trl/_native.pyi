from os import PathLike
from typing import Literal, TypedDict

__version__: str

class _Problem(TypedDict):
    code: str
    line: int
    column: int | None
    message: str

class _Unknown(TypedDict):
    line: int
    reason: str

class _Touched(TypedDict):
    line: int
    reason: str

class _Entry(TypedDict):
    destination: str
    kind: Literal["file", "directory", "symlink", "archive", "special"]
    source: str | None
    content: bytes | None
    link: str | None
    mode: int | None
    owner: str | None
    line: int
    if_missing: bool
    if_directory: str | None
    touched: _Touched | None

class _Plan(TypedDict):
    entries: list[_Entry]
    base: str | None
    stage: str
    workdir: str | None
    user: str | None
    env: dict[str, str | None]
    errors: list[_Problem]
    unknowns: list[_Unknown]

class _Heredoc(TypedDict):
    name: str
    expand: bool
    chomp: bool
    file_descriptor: int
    content: bytes

class _Instruction(TypedDict):
    keyword: str
    flags: list[str]
    args: list[str]
    json: bool
    heredocs: list[_Heredoc]
    original: str
    line: int
    end_line: int

class _Parsed(TypedDict):
    instructions: list[_Instruction]
    escape: str
    syntax: str | None
    error: _Problem | None

def copy_plan(
    dockerfile: str | PathLike[str],
    context: str | PathLike[str],
    target: str | None = None,
    build_args: dict[str, str] = ...,
) -> _Plan: ...
def parse_dockerfile(source: bytes) -> _Parsed: ...
def expand_word(word: str, env: dict[str, str | None], escape: str = "\\") -> str | None: ...
def match_path(pattern: str, name: str) -> bool | None: ...
def match_ignore(ignore_file: bytes, paths: list[str]) -> list[bool] | None: ...
