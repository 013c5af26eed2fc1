"""The text half of the reference: a Dockerfile's grammar, variables and patterns, in plain Python.

The executable specification of `rust/core/src/dockerfile`: slow, and written the way one would explain it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

BLANKS = re.compile(r"[\t\v\f\r ]+")
# Unicode white space as Go and Rust see it; `str.isspace` has four more.
SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


class Refused(Exception):
    """A build refuses this."""

    def __init__(self, code: str, line: int = 0) -> None:
        super().__init__(code, line)
        self.code = code
        self.line = line


class Unclear(Exception):
    """This cannot be worked out."""


@dataclass
class Heredoc:
    name: str
    expand: bool
    chomp: bool
    content: bytes = b""


@dataclass
class Instruction:
    keyword: str
    flags: list[str]
    args: list[str]
    json: bool
    original: str
    line: int
    heredocs: list[Heredoc] = field(default_factory=list)
    end_line: int = 0


def parse(source: bytes) -> tuple[list[Instruction], str, str | None]:
    """Instructions, escape character, value of the syntax directive."""
    lines: list[bytes] = []
    too_long = False
    for line in _lines(source):
        if len(line) > 65536 or (len(line) == 65536 and not line.endswith(b"\n")):
            too_long = True
            break
        lines.append(line)
    escape, syntax, directives, seen = "\\", None, True, set()
    instructions: list[Instruction] = []
    at = 0
    while at < len(lines):
        text = lines[at].decode(errors="replace").rstrip("\r\n").lstrip(SPACES)
        at += 1
        if directives:
            found = re.match(
                r"#[" + SPACES + r"]*([a-zA-Z][a-zA-Z0-9]*)[\t\n\f\r ]*=[\t\n\f\r ]*(.+?)[\t\n\f\r ]*$", text, re.S
            )
            name = found[1].lower() if found else ""
            if found is None or name not in ("syntax", "escape", "check"):
                directives = False
            elif name in seen:
                raise Refused("directive-repeated", at)
            else:
                seen.add(name)
                if name == "escape":
                    if found[2] not in ("\\", "`"):
                        raise Refused("directive-escape", at)
                    escape = found[2]
                elif name == "syntax":
                    syntax = found[2]
        if text.startswith("#"):
            continue
        start = at
        joined, more = _continuation(text, escape)
        if not more and not joined:
            continue
        while more and at < len(lines):
            text = lines[at].decode(errors="replace").rstrip("\r\n")
            at += 1
            if text.strip(SPACES) and not text.lstrip(SPACES).startswith("#"):
                part, more = _continuation(text, escape)
                joined += part
        instruction = _instruction(joined, escape, start)
        inner = instruction.args[0] if instruction.keyword == "ONBUILD" and instruction.args else instruction.keyword
        if inner in ("ADD", "COPY", "RUN") and not instruction.json and "<<" in joined:
            for heredoc in _heredocs(joined, start):
                content = []
                while True:
                    if at >= len(lines):
                        raise Refused("heredoc-unterminated", start)
                    line = lines[at]
                    at += 1
                    end = line.rstrip(b"\r\n")
                    if (end.lstrip(b"\t") if heredoc.chomp else end) == heredoc.name.encode():
                        break
                    content.append(line)
                heredoc.content = b"".join(content)
                instruction.heredocs.append(heredoc)
        instruction.end_line = at
        instructions.append(instruction)
    if not instructions:
        raise Refused("no-instructions", at)
    if too_long:
        raise Refused("line-too-long", at + 1)
    return instructions, escape, syntax


def _lines(source: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", source.removeprefix(b"\xef\xbb\xbf"))


def _continuation(text: str, escape: str) -> tuple[str, bool]:
    escape = re.escape(escape)
    found = re.search(rf"(^|[^{escape}]){escape}[ \t]*\Z", text)
    return (text[: found.end(1)], True) if found else (text, False)


def _instruction(line: str, escape: str, number: int) -> Instruction:
    words = BLANKS.split(line.strip(SPACES), maxsplit=1)
    keyword = "".join(ch.upper() if ch.isascii() else ch for ch in words[0])
    flags, rest = _flags(words[1] if len(words) > 1 else "")
    rest = rest.strip(SPACES)
    args: list[str] = [rest] if rest else []
    is_json = False
    if keyword in ("ADD", "COPY", "VOLUME", "CMD", "ENTRYPOINT", "RUN", "SHELL"):
        array = _json_array(rest, number)
        is_json = array is not None
        if array is not None:
            args = array
        elif keyword in ("ADD", "COPY", "VOLUME"):
            args = [word for word in BLANKS.split(rest) if word]
    elif keyword in ("EXPOSE", "FROM"):
        args = [word for word in BLANKS.split(rest) if word]
    elif keyword == "ARG":
        args = _quoted_words(rest, escape)
    elif keyword in ("ENV", "LABEL"):
        args = _name_values(rest, escape, number)
    elif keyword == "HEALTHCHECK":
        kind, _, rest = re.sub(r"[\t\n\v\f\r ]+", " ", rest, count=1).partition(" ")
        array = _json_array(rest, number)
        is_json = array is not None
        args = ([kind] if kind else []) + (array if array is not None else [rest] if rest else [])
    elif keyword == "ONBUILD" and rest:
        inner = _instruction(rest, escape, number)
        args, is_json = [inner.keyword, *inner.args], inner.json
    elif keyword not in ("MAINTAINER", "STOPSIGNAL", "USER", "WORKDIR", "ONBUILD"):
        args = []
    return Instruction(keyword, flags, args, is_json, line, number)


def _flags(text: str) -> tuple[list[str], str]:
    """Leading `--words`. Bytes count here, each as one character; a backslash escapes, whatever `escape` says."""
    rest = text.encode().decode("latin-1")
    spaces = "\t\n\v\f\r \x85\xa0"
    flags = []
    while True:
        rest = rest.lstrip(spaces)
        if not rest.startswith("--"):
            break
        word, quote, quoted = "", "", False
        while rest and (quote or rest[0] not in spaces):
            ch, rest = rest[0], rest[1:]
            if ch == quote:
                quote = ""
            elif not quote and ch in "'\"":
                quote, quoted = ch, True
            elif ch == "\\":
                word, rest = word + rest[:1], rest[1:]
            else:
                word += ch
        if word == "--":
            break
        if word or quoted:
            flags.append(word)
    return flags, rest.encode("latin-1").decode(errors="ignore")


def _json_array(rest: str, number: int) -> list[str] | None:
    if not rest.startswith("["):
        return None
    try:
        # Python accepts NaN and its like, which Go doesn't.
        array = json.loads(rest, parse_constant=lambda _: json.loads("?"))
    except ValueError:
        return None
    if not all(isinstance(word, str) for word in array):
        raise Refused("json-not-strings", number)
    return [re.sub("[\ud800-\udfff]", "\ufffd", word) for word in array]


def _quoted_words(rest: str, escape: str) -> list[str]:
    words, word, quote, at = [], "", "", 0
    while at < len(rest):
        ch = rest[at]
        at += 1
        if not quote and ch in SPACES:
            words.append(word)
            word = ""
        elif ch == escape and quote != "'":
            word += rest[at - 1 : at + 1] if at < len(rest) else ""
            at += 1
        else:
            if quote == ch:
                quote = ""
            elif not quote and ch in "'\"":
                quote = ch
            word += ch
    return [word for word in [*words, word] if word]


def _name_values(rest: str, escape: str, number: int) -> list[str]:
    words = _quoted_words(rest, escape)
    if words and "=" not in words[0]:
        parts = BLANKS.split(rest, maxsplit=1)
        if len(parts) < 2:
            raise Refused("missing-value", number)
        return [*parts, ""]
    args = []
    for word in words:
        if "=" not in word:
            raise Refused("missing-equals", number)
        name, _, value = word.partition("=")
        args += [name, value, "="]
    return args


def _heredocs(line: str, number: int) -> list[Heredoc]:
    try:
        words = Lexer(line, "\\", {}, raw_quotes=True, raw_escapes=True, keep_unset=True).run()[1]
    except (Refused, Unclear):
        return []
    try:
        return [heredoc for word in words if (heredoc := heredoc_word(word))]
    except (Refused, Unclear):
        raise Refused("heredoc-word", number) from None


def heredoc_word(word: str) -> Heredoc | None:
    found = re.match(r"([0-9]*)<<(-?)[\t\n\f\r ]*([^<]*)\Z", word)
    if not found or not found[3]:
        return None
    words = Lexer(found[3], "\\", {}, keep_unset=True).run()[1]
    if len(words) != 1:
        return None
    raw = Lexer(found[3], "\\", {}, raw_quotes=True, keep_unset=True).run()[1]
    if len(raw) != 1:
        raise Refused("heredoc-word")
    quotes = [len(re.findall("['\"]", text)) for text in (words[0], raw[0])]
    return Heredoc(words[0], quotes[0] == quotes[1], bool(found[2]))


def chomp(content: bytes) -> bytes:
    return re.sub(rb"(?m)^\t+", b"", content)


class Lexer:
    """Expands one word. A variable that `env` maps to None is unknown; the names that decided go to `unknown`."""

    def __init__(
        self,
        word: str,
        escape: str,
        env: object,
        *,
        raw_quotes: bool = False,
        raw_escapes: bool = False,
        keep_unset: bool = False,
        skip_quotes: bool = False,
    ) -> None:
        self.text, self.at, self.escape = word, 0, escape
        self.get = env if callable(env) else lambda name: env.get(name, "unset") if name in env else Unset  # type: ignore[attr-defined]
        self.raw_quotes, self.raw_escapes, self.keep_unset, self.skip_quotes = (
            raw_quotes,
            raw_escapes,
            keep_unset,
            skip_quotes,
        )
        self.unknown: set[str] = set()
        self.word = ""  # one for all levels of nesting
        self.depth = 0

    def run(self) -> tuple[str, list[str]]:
        return self.until("", self.raw_escapes)

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def next(self) -> str:
        self.at += 1
        return self.text[self.at - 1 : self.at]

    def until(self, stop: str, raw_escapes: bool) -> tuple[str, list[str]]:
        self.depth += 1
        if self.depth > 200:
            raise Unclear("nesting")
        outer, self.raw_escapes = self.raw_escapes, raw_escapes
        result, words, self.word, in_word = "", [], "", False
        while ch := self.peek():
            if stop and ch == stop:
                self.next()
                break
            if ch in "$<" or (ch in "'\"" and not self.skip_quotes):
                text = {"$": self.dollar, "<": self.less, "'": self.single, '"': self.double}[ch]()
                result += text
                for part in text if ch == "$" else [text]:
                    if ch == "$" and part in SPACES:
                        if in_word and self.word:
                            words, self.word, in_word = [*words, self.word], "", False
                    else:
                        self.word += part
                        in_word = True
                continue
            self.next()
            if ch == self.escape:
                if self.raw_escapes:
                    result, self.word, in_word = result + ch, self.word + ch, True
                escaped = self.next()
                result, self.word, in_word = result + escaped, self.word + escaped, in_word or bool(escaped)
            else:
                result += ch
                if ch not in SPACES:
                    self.word += ch
                    in_word = True
                elif in_word and self.word:
                    words, self.word, in_word = [*words, self.word], "", False
        else:
            if stop:
                raise Refused("substitution")
        if self.word:
            words.append(self.word)
            self.word = ""
        self.raw_escapes = outer
        self.depth -= 1
        return result, words

    def single(self) -> str:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise Refused("substitution")
        inner, self.at = self.text[self.at + 1 : end], end + 1
        return f"'{inner}'" if self.raw_quotes else inner

    def double(self) -> str:
        self.next()
        result = ""
        while (ch := self.peek()) != '"':
            if not ch:
                raise Refused("substitution")
            if ch == "$":
                result += self.dollar()
                continue
            self.next()
            if ch == self.escape:
                result += ch if self.raw_escapes else ""
                if not self.peek():
                    continue
                if self.peek() in ('"', "$", self.escape):
                    ch = self.next()
            result += ch
        self.next()
        return f'"{result}"' if self.raw_quotes else result

    def less(self) -> str:
        found = re.compile(r"<<[\t\r ]*|<").match(self.text, self.at)
        assert found
        self.at = found.end()
        return found[0]

    def name(self) -> str:
        found = re.compile(r"[0-9]+|[@*#?$!-]|\w+").match(self.text, self.at)
        if found:
            self.at = found.end()
        return found[0] if found else ""

    def value(self, name: str) -> str | type[Unset] | None:
        value = self.get(name)
        if value is None:
            self.unknown.add(name)
        return value  # type: ignore[no-any-return]

    def dollar(self) -> str:
        self.next()
        if self.peek() != "{":
            name = self.name()
            value = self.value(name) if name else "$"
            return value or "" if value is not Unset else f"${name}" if self.keep_unset else ""  # type: ignore[return-value]
        self.next()
        if self.peek() in ("", "{", "}", ":"):
            raise Refused("substitution")
        name = self.name()
        operator = self.next()
        written = operator
        if operator == "}":
            value = self.value(name)
            return value or "" if value is not Unset else f"${{{name}}}" if self.keep_unset else ""  # type: ignore[return-value]
        if operator == "/":
            return self.replace(name)
        null_is_unset = operator == ":"
        if null_is_unset:
            operator = self.next()
            written += operator
            if operator in ("#", "%", ""):
                raise Refused("substitution")
        elif not operator or operator not in "+-?#%":
            raise Refused("substitution")
        word, word_unknown = self.nested("}", operator in "#%")
        value = self.value(name)
        if self.keep_unset and value is Unset:
            return f"${{{name}{written}{word}}}"
        missing = value is Unset or (null_is_unset and value == "")
        if operator in "-+?" and value is None:
            self.unknown |= word_unknown
            return ""
        text = value if isinstance(value, str) else ""
        if operator == "-":
            if missing:
                self.unknown |= word_unknown
            return word if missing else text
        if operator == "+":
            if not missing:
                self.unknown |= word_unknown
            return "" if missing else word
        if operator == "?":
            if missing:
                raise Refused("substitution")
            return text
        if operator in "#%":
            self.unknown |= word_unknown
            greedy = word.startswith(operator)
            word = word[1:] if greedy else word
            if operator == "%":
                word = "".join(reversed(re.findall(r"\\.|.", word, re.S)))
            pattern = _pattern(word, greedy)
            if self.unknown:
                return ""
            text = text[::-1] if operator == "%" else text
            found = pattern.match(text)
            text = text[found.end() :] if found else text
            return text[::-1] if operator == "%" else text
        raise Refused("substitution")

    def nested(self, stop: str, raw: bool) -> tuple[str, set[str]]:
        outer, self.unknown = self.unknown, set()
        try:
            word = self.until(stop, raw)[0]
        finally:
            inner, self.unknown = self.unknown, outer
        return word, inner

    def replace(self, name: str) -> str:
        every = self.peek() == "/"
        if every:
            self.next()
        word, word_unknown = self.nested("/", True)
        replacement, replacement_unknown = self.nested("}", True)
        value = self.value(name)
        if self.keep_unset and value is Unset:
            return f"${{{name}/{word}/{replacement}}}"
        self.unknown |= word_unknown | replacement_unknown
        pattern = _pattern(word, True)
        if self.unknown:
            return ""
        if every and "$" in replacement:
            raise Unclear("replacement")
        text = value if isinstance(value, str) else ""
        out, copied, search = "", 0, 0
        while search <= len(text) and (found := pattern.search(text, search)):
            out += text[copied : found.start()]
            if found.end() > copied or found.start() == 0:
                out += replacement
            copied = found.end()
            search = max(search + 1, found.end())
            if not every:
                break
        return out + text[copied:]


class Unset:
    """A variable that is certainly not set."""


def _pattern(word: str, greedy: bool) -> re.Pattern[str]:
    out, chars = "", list(word)
    while chars:
        ch = chars.pop(0)
        if ch == "*":
            out += ".*" if greedy else ".*?"
        elif ch == "?":
            out += "."
        elif ch == "\\":
            if chars and chars[0] in "}/":
                continue
            if not chars or chars[0] not in "*?\\":
                raise Refused("substitution")
            out += re.escape(chars.pop(0))
        else:
            out += re.escape(ch)
    return re.compile(out)


def expand(word: str, escape: str, env: object, *, heredoc: bool = False) -> str:
    lexer = Lexer(word, "\\" if heredoc else escape, env, skip_quotes=heredoc)
    text = lexer.run()[0]
    if lexer.unknown:
        raise Unclear(", ".join(sorted(lexer.unknown)))
    return text


def match_path(pattern: str, name: str) -> bool | None:
    """Go's `filepath.Match`; None for a malformed pattern."""
    out, at = "", 0
    while at < len(pattern):
        ch = pattern[at]
        at += 1
        if ch == "*":
            out += "[^/]*"
        elif ch == "?":
            out += "[^/]"
        elif ch == "\\":
            if at == len(pattern):
                return None
            out += re.escape(pattern[at])
            at += 1
        elif ch == "[":
            found = re.compile(r"(\^|(?!\^))((?:(?:\\.|[^\\\]-])(?:-(?:\\.|[^\\\]-]))?)+)\]", re.S).match(pattern, at)
            if not found:
                return None
            at = found.end()
            items = []
            for low, high in re.findall(r"(?s)(\\.|[^\\\]-])(?:-(\\.|[^\\\]-]))?", found[2]):
                low, high = low[-1], (high or low)[-1]
                if low <= high:
                    items.append(f"{re.escape(low)}-{re.escape(high)}")
            inside = f"[{''.join(items)}]" if items else "(?!)"
            out += f"(?!{inside})(?s:.)" if found[1] else inside
        else:
            out += re.escape(ch)
    return re.fullmatch(out, name, re.S) is not None


def has_wildcard(text: str) -> bool:
    return re.search(r"[*?\[]", re.sub(r"(?s)\\.", "", text)) is not None


class Patterns:
    """Moby's pattern matcher, through regular expressions as moby does it."""

    def __init__(self, patterns: list[str]) -> None:
        self.patterns: list[tuple[bool, object]] = []
        for pattern in patterns:
            pattern = pattern.strip(SPACES)
            if not pattern:
                continue
            pattern = clean(pattern)
            exception = pattern.startswith("!")
            if pattern == "!":
                raise Refused("ignore-pattern")
            pattern = pattern.removeprefix("!")
            if match_path(pattern, ".") is None:
                raise Refused("ignore-pattern")
            self.patterns.append((exception, self._compile(pattern)))
        self.exceptions = any(exception for exception, _ in self.patterns)

    @staticmethod
    def _compile(pattern: str) -> object:
        if not re.search(r"[*?\[\]\\]", pattern):
            return lambda path: path == pattern
        # A leading or trailing `**` alone is compared as text.
        if pattern.startswith("**") and not re.search(r"[*?\[\]\\]", pattern[2:]):
            suffix = pattern[2:]
            return lambda path: path.endswith(suffix) or (suffix.startswith("/") and path == suffix[1:])
        if pattern.endswith("**") and not re.search(r"[*?\[\]\\]", pattern[:-2]):
            return lambda path: path.startswith(pattern[:-2])
        out, at = "", 0
        while at < len(pattern):
            if pattern.startswith("**", at):
                at += 3 if pattern.startswith("**/", at) else 2
                out += ".*" if at >= len(pattern) else "(?:.*/)?"
                continue
            ch = pattern[at]
            at += 1
            if ch == "*":
                out += "[^/]*"
            elif ch == "?":
                out += "[^/]"
            elif ch == "\\":
                escaped = pattern[at : at + 1]
                at += 1
                if not escaped or not escaped.isascii() or escaped.isalnum():
                    raise Unclear("escape")
                out += re.escape(escaped)
            elif ch == "[":
                found = re.compile(r"(\^?)([^\]]+)\]", re.S).match(pattern, at)
                if not found or re.search(r"[*?\\\[^&~]", found[2]):
                    raise Unclear("class")
                at = found.end()
                for low, high in re.findall(r"(?s)(.)-(.)", found[2]):
                    if high < low:
                        raise Unclear("class")
                ranges = re.sub(
                    r"(?s)(.)-(.)|(.)", lambda m: f"{re.escape(m[1] or m[3])}-{re.escape(m[2] or m[3])}", found[2]
                )
                out += f"[{found[1]}{ranges}]"
            elif ch == "^":
                out += r"\A"
            else:
                out += re.escape(ch)
        compiled = re.compile(out)
        return lambda path: compiled.fullmatch(path) is not None

    def below(self, path: str, parent: list[bool] | None) -> tuple[bool, list[bool]]:
        matched, matches = False, []
        for index, (exception, pattern) in enumerate(self.patterns):
            hit = bool(parent and parent[index])
            if not hit and exception == matched:
                hit = pattern(path)  # type: ignore[operator]
            matches.append(hit)
            if hit:
                matched = not exception
        return matched, matches

    def matches(self, path: str) -> bool:
        parent, matched = None, False
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            matched, parent = self.below("/".join(parts[:count]), parent)
        return matched


def ignore_lines(source: bytes) -> list[str]:
    patterns = []
    for line in source.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if len(line) > 65535:
            raise Refused("ignore-line-too-long")
        text = line.decode(errors="replace").strip(SPACES)
        if line.startswith(b"#") or not text:
            continue
        mark = "!" if text.startswith("!") else ""
        text = text.removeprefix("!").strip(SPACES)
        text = clean(text) if text else ""
        patterns.append(mark + (text[1:] if len(text) > 1 and text.startswith("/") else text))
    return patterns


def clean(path: str) -> str:
    """Go's `path.Clean`."""
    rooted = path.startswith("/")
    parts: list[str] = []
    for part in path.split("/"):
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part == "..":
            parts += [] if rooted else [".."]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts) if rooted else "/".join(parts) or "."
