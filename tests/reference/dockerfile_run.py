"""Which paths a RUN may have touched: the rule of `rust/core/src/dockerfile/run.rs`, in plain Python."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference.dockerfile_text import Instruction, Refused, Unclear, clean, heredoc_word, match_path

RUST = Path(__file__).parents[2] / "rust/core/src/dockerfile/run.rs"


def _table(name: str) -> set[str]:
    """The lists of commands are data; they stand in one place."""
    body = re.search(rf"const {name}: &\[&str\] = &\[(.*?)\];", RUST.read_text(), re.S)
    assert body
    return set(re.findall(r'"([^"]*)"', body[1]))


READERS, WRITERS, TOOLS = _table("READERS"), _table("WRITERS"), _table("TOOLS")
PREFIXES, SHELLS = _table("PREFIXES"), _table("SHELLS")


@dataclass
class Effects:
    line: int
    everything: bool = False
    below: dict[str, str] = field(default_factory=dict)
    patterns: list[list[str]] = field(default_factory=list)
    anywhere: list[list[str]] = field(default_factory=list)
    text: str = ""

    def touches(self, path: str) -> bool:
        if self.everything:
            return True
        name = path.rsplit("/", 1)[-1]
        if re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            if name in re.split(r"[^A-Za-z0-9_.-]+", self.text):
                return True
        elif name and name in self.text:
            return True
        parts = [part for part in path.split("/") if part]
        if any("/" + "/".join(parts[:count]) in self.below for count in range(len(parts) + 1)):
            return True
        if any(_starts_with(parts, pattern) for pattern in self.patterns):
            return True
        return any(_starts_with(parts[at:], pattern) for at in range(len(parts)) for pattern in self.anywhere)


def _starts_with(parts: list[str], pattern: list[str]) -> bool:
    pairs = zip(pattern, parts, strict=False)
    return len(parts) >= len(pattern) and all(glob == part or match_path(glob, part) is True for glob, part in pairs)


@dataclass
class Word:
    text: str = ""
    unknown: bool = False
    wildcard: bool = False
    quoted: bool = False
    output: bool = False
    skip: bool = False

    def push(self, text: str) -> None:
        if not self.unknown:
            self.text += text


def run_effects(run: Instruction, line: int, workdir: str | None, shell: list[str] | None, get: Any) -> Effects:
    analysis = Analysis(Effects(line), workdir, get)
    effects = analysis.effects
    if run.json:
        effects.text = " ".join(run.args)
        name = (run.args or [""])[0].rstrip("/").rsplit("/", 1)[-1]
        at = next((at for at, arg in enumerate(run.args) if arg.startswith("-") and arg.endswith("c")), None)
        if name in SHELLS and at is not None:
            analysis.script((run.args[at + 1 :] or [""])[0], 0)
        else:
            analysis.command([Word(arg) for arg in run.args])
        return effects
    text = (run.args or [""])[0]
    bodies = [heredoc.content.decode(errors="replace") for heredoc in run.heredocs]
    effects.text = "\n".join([text, *bodies, ""])
    if shell and shell[0].rstrip("/").rsplit("/", 1)[-1] not in SHELLS:
        effects.everything = True
        return effects
    try:
        is_document = heredoc_word(text) is not None
    except (Refused, Unclear):
        is_document = False
    if is_document and bodies:
        body = bodies[0]
        if body.lstrip("\t").startswith("#!"):
            interpreter = body.lstrip("\t").split("\n")[0][2:]
            if not SHELLS & set(re.split(r"[ /\t\r]", interpreter)):
                effects.everything = True
                return effects
        text = body
    analysis.script(text, 0)
    return effects


class Analysis:
    def __init__(self, effects: Effects, workdir: str | None, get: Any) -> None:
        self.effects, self.get = effects, get
        self.directories = [workdir] if workdir else []
        self.lost = workdir is None
        self.variables: dict[str, str | None] = {}

    def script(self, script: str, nesting: int) -> None:
        if nesting > 10:
            self.effects.everything = True
            return
        words: list[Word] = []
        word: Word | None = None
        output = skip = False
        quote, at = "", 0

        def finish() -> None:
            nonlocal word, output, skip
            if word is not None:
                word.output, word.skip = output, skip
                words.append(word)
                word, output, skip = None, False, False

        while at < len(script):
            ch = script[at]
            at += 1
            if quote == "'":
                if ch == "'":
                    quote = ""
                else:
                    word = word or Word()
                    word.push(ch)
            elif ch == "\\":
                if at < len(script) and script[at] != "\n":
                    word = word or Word()
                    word.push(script[at])
                at += 1
            elif ch == '"' and quote:
                quote = ""
            elif ch in "\"'" and not quote:
                quote = ch
                word = word or Word()
                word.quoted = True
            elif ch == "`":
                end = script.find("`", at)
                end = len(script) if end < 0 else end
                self.script(script[at:end], nesting + 1)
                word = word or Word()
                word.unknown = True
                at = end + 1
            elif ch == "$":
                word, at = self.dollar(script, at, word, nesting)
            elif quote:
                word = word or Word()
                word.push(ch)
            elif ch in " \t\r":
                finish()
            elif ch == "#" and word is None:
                end = script.find("\n", at)
                at = len(script) if end < 0 else end
            elif ch in "\n;&|()":
                finish()
                if not (ch == "&" and script[at : at + 1] == ">"):
                    self.command(words)
                    words = []
            elif ch in "<>":
                if word is not None and re.fullmatch("[0-9]*", word.text):
                    word = None
                finish()
                length = 1
                while script[at : at + 1] == ch:
                    at, length = at + 1, length + 1
                if ch == ">" and script[at : at + 1] in ("&", "|"):
                    at += 1
                output, skip = ch == ">", ch == "<" and length == 2
            else:
                word = word or Word()
                word.push(ch)
                word.wildcard |= ch in "*?["
        finish()
        self.command(words)

    def dollar(self, script: str, at: int, word: Word | None, nesting: int) -> tuple[Word, int]:
        ch = script[at : at + 1]
        if ch and ch in "({":
            start, depth = at + 1, 0
            closing = {"(": ")", "{": "}"}[ch]
            while at < len(script):
                depth += (script[at] == ch) - (script[at] == closing)
                at += 1
                if depth == 0:
                    break
            if ch == "(":
                self.script(script[start : at - 1 if depth == 0 else at], nesting + 1)
                word = word or Word()
                word.unknown = True
                return word, at
            name = script[start : max(at - 1, start)]
        elif found := re.compile("[A-Za-z0-9_]+").match(script, at):
            name, at = found[0], found.end()
        elif ch and ch in "?#@*$!-":
            word = word or Word()
            word.unknown = True
            return word, at + 1
        else:
            word = word or Word()
            word.push("$")
            return word, at
        word = word or Word()
        value = self.variables[name] if name in self.variables else self.get(name)
        if isinstance(value, str) and not word.unknown and re.fullmatch(r"[A-Za-z0-9_./:@+,%=-]*", value):
            word.text += value
        else:
            word.unknown = True
        return word, at

    def command(self, words: list[Word]) -> None:
        for word in words:
            if word.output:
                self.written(word)
        words = [word for word in words if not word.output and not word.skip]
        assigned: dict[str, str | None] = {}
        while words:
            first = words[0]
            if found := re.match(r"([A-Za-z0-9_]+)=(.*)", first.text, re.S):
                assigned[found[1]] = None if first.unknown or first.wildcard else found[2]
                words = words[1:]
            elif first.text in PREFIXES and not first.unknown:
                words = words[1:]
                while words and words[0].text.startswith("-"):
                    words = words[1:]
            else:
                break
        if not words:
            self.variables |= assigned
            return
        directory, slash, _ = words[0].text.rpartition("/")
        if words[0].unknown or (slash and directory.rstrip("/").rsplit("/", 1)[-1] not in ("bin", "sbin")):
            self.effects.everything = True
            return
        name, args = words[0].text.rstrip("/").rsplit("/", 1)[-1] or ("/" if words[0].text else ""), words[1:]
        if words[0].text == "":
            name = "/"
        texts = [word.text for word in args]
        only_asks = texts and all(text in ("--version", "-V", "-version", "--help", "version") for text in texts)
        if name in ("fi", "done", "}", "esac"):
            pass
        elif name == "for":
            self.variables[(texts or [""])[0]] = None
        elif name in ("export", "local", "readonly"):
            for word in args:
                variable, equals, value = word.text.partition("=")
                if equals:
                    self.variables[variable] = None if word.unknown or word.wildcard else value
        elif name == "read":
            self.variables |= dict.fromkeys(texts)
        elif name in ("cd", "pushd"):
            self.change_directory(args)
        elif (
            only_asks
            or name in READERS
            or (name in ("python", "python3") and texts[:1] == ["-m"] and texts[1:2] in (["pip"], ["venv"]))
            or (name == "uv" and texts[:1] in (["pip"], ["tool"], ["python"], ["venv"]))
            or (name in ("npm", "pnpm", "yarn") and {"-g", "--global", "config", "cache", "global"} & set(texts))
            or (name == "git" and git_verb(texts) in ("clone", "config", "init", "log", "ls-remote", "status"))
            or (name in ("cargo", "go") and texts[:1] == ["install"])
        ):
            pass
        elif name == "find":
            self.find(args)
        elif name in WRITERS:
            for word in args:
                self.written(word)
        elif name in TOOLS:
            if not (name == "tar" and any(text.startswith(("-C", "--directory")) for text in texts)):
                self.here()
            for word in args:
                self.written(word)
        else:
            self.effects.everything = True

    def find(self, args: list[Word]) -> None:
        actions = ("-delete", "-exec", "-execdir", "-ok", "-okdir", "-fprint", "-fprintf", "-fls")
        at = next((at for at, word in enumerate(args) if word.text in actions), None)
        if at is None:
            return
        if args[at].text != "-delete" and not (at + 1 < len(args) and args[at + 1].text in WRITERS):
            self.effects.everything = True
            return
        places = []
        for word in args:
            if word.text.startswith("-"):
                break
            places.append(word)
        if not places:
            self.here()
        for word in places:
            self.written(word)

    def here(self) -> None:
        self.effects.everything |= self.lost
        self.effects.below |= dict.fromkeys(self.directories, "")

    def change_directory(self, args: list[Word]) -> None:
        word = next((word for word in args if not word.text.startswith("-")), None)
        if word is None or word.unknown or word.wildcard or word.text.startswith("~"):
            self.lost |= not any(word.text == "-" for word in args)
        elif word.text.startswith("/") or self.directories:
            target = clean(word.text if word.text.startswith("/") else f"{self.directories[-1]}/{word.text}")
            if len(self.directories) >= 8:
                self.lost = True
            else:
                self.directories.append(target)

    def written(self, word: Word) -> None:
        text = word.text
        if "://" in text:
            return
        if text.startswith("-") or "=" in text:
            found = re.search("[/=]", text)
            if not found and not word.unknown:
                return
            text = text[found.start() :].lstrip("=") if found else text
        if text.startswith("~"):
            self.effects.below |= {"/root": "", "/home": ""}
            return
        brace = text.find("{") if not word.quoted and "," in text else -1
        if word.unknown or brace >= 0:
            directory = (text[:brace] if brace >= 0 else text).rpartition("/")[0]
            if directory.startswith("/"):
                self.effects.below[clean(directory)] = ""
            else:
                self.effects.everything = True
            return
        if not text:
            return
        starts = [""] if text.startswith("/") else list(self.directories)
        if not text.startswith("/") and self.lost:
            parts = [part for part in text.split("/") if part not in ("", ".")]
            if not parts or ".." in parts or "*" in parts:
                self.effects.everything = True
                return
            self.effects.anywhere.append(parts)
        for start in starts:
            full = clean(f"/{start}/{text}")
            if word.wildcard:
                self.effects.patterns.append([part for part in full.split("/") if part])
            else:
                self.effects.below[full] = ""


def git_verb(texts: list[str]) -> str:
    at = 0
    while at < len(texts):
        if texts[at] in ("-C", "-c"):
            at += 2
        elif texts[at].startswith("-"):
            at += 1
        else:
            return texts[at]
    return ""
