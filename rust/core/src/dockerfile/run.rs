//! Which paths a RUN may have touched.
//!
//! The question behind it: may a file that COPY put there be put back later? So the answer errs towards "touched". A
//! RUN touches a path if its text names the path's last component; if it removes, moves, or changes the mode of, or
//! otherwise writes to, a directory above it (wildcards included); if it runs a build tool (make, npm, git checkout, …)
//! in a directory above it; and it touches everything if it runs something whose effect cannot be told from its text:
//! a script, an unknown program, an interpreter, a removal whose target is computed. Installing packages, downloading,
//! printing, making directories touch nothing but what they name.

use std::collections::{HashMap, HashSet};

use super::instruction::Run;
use super::parser::heredoc_word;
use super::pathmatch::match_path;
use super::paths;
use super::shell::Value;

/// Commands that leave files alone that they do not name.
const READERS: &[&str] = &[
    ":",
    "[",
    "[[",
    "]]",
    "add-apt-repository",
    "addgroup",
    "adduser",
    "apk",
    "apt",
    "apt-cache",
    "apt-get",
    "apt-key",
    "apt-mark",
    "awk",
    "basename",
    "break",
    "cat",
    "cd",
    "chsh",
    "command",
    "conda",
    "continue",
    "corepack",
    "curl",
    "cut",
    "date",
    "debconf-set-selections",
    "df",
    "diff",
    "dirname",
    "dnf",
    "dpkg",
    "dpkg-reconfigure",
    "du",
    "echo",
    "egrep",
    "exit",
    "export",
    "false",
    "fc-cache",
    "fgrep",
    "file",
    "free",
    "gem",
    "getent",
    "gpg",
    "grep",
    "groupadd",
    "head",
    "hostname",
    "id",
    "jq",
    "ldconfig",
    "ldd",
    "local",
    "locale-gen",
    "localedef",
    "ls",
    "lsb_release",
    "mamba",
    "md5sum",
    "microdnf",
    "micromamba",
    "mkdir",
    "mktemp",
    "nproc",
    "opam",
    "passwd",
    "pip",
    "pip3",
    "popd",
    "printenv",
    "printf",
    "pushd",
    "pwd",
    "read",
    "readlink",
    "realpath",
    "return",
    "rustup",
    "seq",
    "set",
    "sha1sum",
    "sha256sum",
    "sha512sum",
    "shopt",
    "sleep",
    "sort",
    "stat",
    "tail",
    "tdnf",
    "test",
    "tr",
    "true",
    "type",
    "tzselect",
    "umask",
    "uname",
    "uniq",
    "unset",
    "update-alternatives",
    "update-ca-certificates",
    "update-locale",
    "useradd",
    "usermod",
    "wait",
    "wc",
    "wget",
    "which",
    "whoami",
    "yum",
    "zypper",
];

/// Commands that change what they name, and what lies below it.
const WRITERS: &[&str] = &[
    "chgrp", "chmod", "chown", "cp", "dd", "install", "ln", "mv", "rename", "rm", "rmdir", "rsync",
    "sed", "setfacl", "shred", "split", "tee", "touch", "truncate", "unlink",
];

/// Commands that work on the directory they are run in, and on what they name.
const TOOLS: &[&str] = &[
    "ant",
    "autoconf",
    "autoreconf",
    "bazel",
    "bun",
    "bundle",
    "bunzip2",
    "bzip2",
    "cabal",
    "cargo",
    "cc",
    "clang",
    "cmake",
    "composer",
    "cpanm",
    "dotnet",
    "elixir",
    "g++",
    "gcc",
    "git",
    "go",
    "gradle",
    "gunzip",
    "gzip",
    "hatch",
    "hg",
    "javac",
    "lake",
    "ld",
    "make",
    "meson",
    "mix",
    "mvn",
    "ninja",
    "npm",
    "npx",
    "patch",
    "pdm",
    "pipenv",
    "pnpm",
    "poetry",
    "pytest",
    "rebar3",
    "rustc",
    "sbt",
    "stack",
    "svn",
    "swift",
    "tar",
    "tox",
    "tsc",
    "unxz",
    "unzip",
    "uv",
    "xz",
    "yarn",
    "zip",
];

const PREFIXES: &[&str] = &[
    "!", "{", "builtin", "do", "elif", "else", "env", "exec", "if", "nice", "nohup", "sudo",
    "then", "time", "until", "while",
];

const SHELLS: &[&str] = &["ash", "bash", "dash", "ksh", "sh", "zsh"];

const MAX_NESTING: usize = 10;
const MAX_DIRECTORIES: usize = 8;

/// What one RUN may have done.
#[derive(Debug, Clone, Default)]
pub struct Effects {
    pub line: usize,
    /// Everything may have changed, and why.
    everything: Option<String>,
    /// These paths and all below them, with the command.
    below: HashMap<String, String>,
    /// The same with wildcards, component by component.
    patterns: Vec<(Vec<String>, String)>,
    /// Relative paths whose directory is unknown: they may stand anywhere.
    anywhere: Vec<(Vec<String>, String)>,
    names: HashSet<String>,
    text: String,
}

impl Effects {
    /// Everything may have been touched.
    pub fn any(line: usize) -> Self {
        Self {
            line,
            everything: Some("RUN".to_owned()),
            ..Self::default()
        }
    }

    pub fn is_any(&self) -> bool {
        self.everything.is_some()
    }

    /// Everything below `path` may have been overwritten.
    pub fn overwrite(line: usize, path: &str, reason: &str) -> Self {
        let below = HashMap::from([(path.to_owned(), reason.to_owned())]);
        Self {
            line,
            below,
            ..Self::default()
        }
    }

    pub fn cost(&self) -> usize {
        4 + 8 * (self.patterns.len() + self.anywhere.len())
    }

    /// Why `path` may have been touched, if so.
    pub fn touches(&self, path: &str) -> Option<String> {
        if let Some(reason) = &self.everything {
            return Some(reason.clone());
        }
        let name = paths::base(path);
        let plain = name.chars().all(is_name_char);
        if self.names.contains(name) || (!plain && name != "/" && self.text.contains(name)) {
            return Some(format!("it names `{name}`"));
        }
        let mut ancestor = path;
        loop {
            if let Some(command) = self.below.get(ancestor) {
                return Some(format!("{command} may change `{ancestor}`"));
            }
            if ancestor == "/" {
                break;
            }
            ancestor = paths::parent(ancestor);
        }
        let parts: Vec<&str> = paths::components(path).collect();
        for (pattern, command) in &self.patterns {
            if starts_with(&parts, pattern) {
                return Some(format!("{command} may change `/{}`", pattern.join("/")));
            }
        }
        for (pattern, command) in &self.anywhere {
            if (0..parts.len()).any(|at| starts_with(&parts[at..], pattern)) {
                return Some(format!("{command} may change `{}`", pattern.join("/")));
            }
        }
        None
    }
}

fn starts_with(parts: &[&str], pattern: &[String]) -> bool {
    parts.len() >= pattern.len()
        && pattern
            .iter()
            .zip(parts)
            .all(|(pattern, part)| pattern == part || match_path(pattern, part) == Ok(true))
}

fn is_name_char(ch: char) -> bool {
    ch.is_ascii_alphanumeric() || matches!(ch, '_' | '.' | '-')
}

/// What `run` may touch, run in `workdir` (None: unknown).
pub fn effects(
    run: &Run,
    line: usize,
    workdir: Option<&str>,
    shell: Option<&[String]>,
    lookup: &dyn Fn(&str) -> Value,
) -> Effects {
    let mut analysis = Analysis {
        effects: Effects {
            line,
            ..Effects::default()
        },
        directories: workdir.map(str::to_owned).into_iter().collect(),
        lost: workdir.is_none(),
        variables: HashMap::new(),
        lookup,
    };
    if run.json {
        analysis.remember(&run.args.join(" "));
        let name = run.args.first().map_or("", |first| paths::base(first));
        if SHELLS.contains(&name)
            && let Some(at) = run
                .args
                .iter()
                .position(|arg| arg.starts_with('-') && arg.ends_with('c'))
        {
            analysis.script(run.args.get(at + 1).map_or("", String::as_str), 0);
        } else {
            let words = run
                .args
                .iter()
                .map(|arg| Word {
                    text: arg.clone(),
                    ..Word::default()
                })
                .collect();
            analysis.command(words);
        }
        return analysis.effects;
    }
    let line_text = run.args.first().map_or("", String::as_str);
    analysis.remember(line_text);
    let bodies: Vec<String> = run
        .heredocs
        .iter()
        .map(|heredoc| String::from_utf8_lossy(&heredoc.content).into_owned())
        .collect();
    for body in &bodies {
        analysis.remember(body);
    }
    if let Some(shell) = shell
        && !shell
            .first()
            .is_some_and(|first| SHELLS.contains(&paths::base(first)))
    {
        analysis.everything("its shell isn't a POSIX shell");
        return analysis.effects;
    }
    match (heredoc_word(line_text), bodies.as_slice()) {
        (Ok(Some(_)), [body, ..]) => {
            if let Some(rest) = body.trim_start_matches('\t').strip_prefix("#!") {
                let interpreter = rest.lines().next().unwrap_or("");
                let is_shell = interpreter
                    .split([' ', '/', '\t'])
                    .any(|word| SHELLS.contains(&word));
                if !is_shell {
                    analysis.everything("it is a script that isn't shell");
                    return analysis.effects;
                }
            }
            analysis.script(body, 0);
        }
        _ => analysis.script(line_text, 0),
    }
    analysis.effects
}

#[derive(Debug, Clone, Default)]
struct Word {
    text: String,
    /// The text ends where something begins that is known only at build time.
    unknown: bool,
    wildcard: bool,
    quoted: bool,
    output: bool,
    skip: bool,
}

struct Analysis<'a> {
    effects: Effects,
    /// Directories that commands may have run in so far.
    directories: Vec<String>,
    /// Some command may run in a directory that isn't known.
    lost: bool,
    variables: HashMap<String, Option<String>>,
    lookup: &'a dyn Fn(&str) -> Value,
}

impl Analysis<'_> {
    fn everything(&mut self, reason: &str) {
        if self.effects.everything.is_none() {
            self.effects.everything = Some(reason.to_owned());
        }
    }

    fn remember(&mut self, text: &str) {
        let names = text
            .split(|ch| !is_name_char(ch))
            .filter(|name| !name.is_empty())
            .map(str::to_owned);
        self.effects.names.extend(names);
        self.effects.text.push_str(text);
        self.effects.text.push('\n');
    }

    fn variable(&self, name: &str) -> Option<String> {
        if let Some(value) = self.variables.get(name) {
            return value.clone();
        }
        match (self.lookup)(name) {
            Value::Known(value) => Some(value),
            Value::Unknown | Value::Unset => None,
        }
    }

    fn script(&mut self, script: &str, nesting: usize) {
        if nesting > MAX_NESTING {
            self.everything("its commands are nested too deeply to follow");
            return;
        }
        let chars: Vec<char> = script.chars().collect();
        let mut words: Vec<Word> = Vec::new();
        let mut word: Option<Word> = None;
        // What a redirection makes of the next word.
        let mut output = false;
        let mut skip = false;
        let mut quote = None;
        let mut at = 0;
        while at < chars.len() {
            let ch = chars[at];
            at += 1;
            if quote == Some('\'') {
                if ch == '\'' {
                    quote = None;
                } else {
                    push(&mut word, ch);
                }
                continue;
            }
            match ch {
                '\\' => {
                    if let Some(&next) = chars.get(at) {
                        at += 1;
                        if next != '\n' {
                            push(&mut word, next);
                        }
                    }
                }
                '"' if quote.is_some() => quote = None,
                '"' | '\'' if quote.is_none() => {
                    quote = Some(ch);
                    word.get_or_insert_default().quoted = true;
                }
                '`' => {
                    let end = chars[at..]
                        .iter()
                        .position(|ch| *ch == '`')
                        .map_or(chars.len(), |length| at + length);
                    let inner: String = chars[at..end].iter().collect();
                    self.script(&inner, nesting + 1);
                    word.get_or_insert_default().unknown = true;
                    at = end + 1;
                }
                '$' => at = self.dollar(&chars, at, &mut word, nesting),
                _ if quote.is_some() => push(&mut word, ch),
                ' ' | '\t' | '\r' => finish(&mut words, &mut word, &mut output, &mut skip),
                '#' if word.is_none() => {
                    while at < chars.len() && chars[at] != '\n' {
                        at += 1;
                    }
                }
                '\n' | ';' | '&' | '|' | '(' | ')' => {
                    finish(&mut words, &mut word, &mut output, &mut skip);
                    let redirects = ch == '&' && matches!(chars.get(at), Some('>'));
                    if !redirects {
                        self.command(std::mem::take(&mut words));
                    }
                }
                '<' | '>' => {
                    if word
                        .as_ref()
                        .is_some_and(|word| word.text.chars().all(|ch| ch.is_ascii_digit()))
                    {
                        word = None;
                    }
                    finish(&mut words, &mut word, &mut output, &mut skip);
                    let mut length = 1;
                    while chars.get(at).is_some_and(|next| *next == ch) {
                        at += 1;
                        length += 1;
                    }
                    if ch == '>' && matches!(chars.get(at), Some('&' | '|')) {
                        at += 1;
                    }
                    output = ch == '>';
                    skip = ch == '<' && length == 2;
                }
                '*' | '?' | '[' => {
                    push(&mut word, ch);
                    word.get_or_insert_default().wildcard = true;
                }
                _ => push(&mut word, ch),
            }
        }
        finish(&mut words, &mut word, &mut output, &mut skip);
        self.command(words);
    }

    /// Reads what follows a `$`; returns where to go on.
    fn dollar(
        &mut self,
        chars: &[char],
        mut at: usize,
        word: &mut Option<Word>,
        nesting: usize,
    ) -> usize {
        let name: String = match chars.get(at) {
            Some('(') => {
                let start = at + 1;
                let mut depth = 0usize;
                while at < chars.len() {
                    match chars[at] {
                        '(' => depth += 1,
                        ')' => depth -= 1,
                        _ => {}
                    }
                    at += 1;
                    if depth == 0 {
                        break;
                    }
                }
                let end = if depth == 0 { at - 1 } else { at };
                let inner: String = chars[start.min(end)..end].iter().collect();
                self.script(&inner, nesting + 1);
                word.get_or_insert_default().unknown = true;
                return at;
            }
            Some('{') => {
                let start = at + 1;
                let mut depth = 0usize;
                while at < chars.len() {
                    match chars[at] {
                        '{' => depth += 1,
                        '}' => depth -= 1,
                        _ => {}
                    }
                    at += 1;
                    if depth == 0 {
                        break;
                    }
                }
                chars[start.min(at)..at.saturating_sub(1).max(start.min(at))]
                    .iter()
                    .collect()
            }
            Some(ch) if is_variable_char(*ch) => {
                let start = at;
                while chars.get(at).is_some_and(|ch| is_variable_char(*ch)) {
                    at += 1;
                }
                chars[start..at].iter().collect()
            }
            Some('?' | '#' | '@' | '*' | '$' | '!' | '-') => {
                word.get_or_insert_default().unknown = true;
                return at + 1;
            }
            _ => {
                push(word, '$');
                return at;
            }
        };
        let word = word.get_or_insert_default();
        match self.variable(&name) {
            Some(value)
                if !word.unknown
                    && value
                        .chars()
                        .all(|ch| is_name_char(ch) || "/:@+,%=".contains(ch)) =>
            {
                word.text.push_str(&value);
            }
            _ => word.unknown = true,
        }
        at
    }

    fn command(&mut self, words: Vec<Word>) {
        for word in words.iter().filter(|word| word.output) {
            self.written(word, "a redirection");
        }
        let mut words: Vec<Word> = words
            .into_iter()
            .filter(|word| !word.output && !word.skip)
            .collect();
        let mut assigned = Vec::new();
        while let Some(first) = words.first() {
            if let Some((name, value)) = first.text.split_once('=')
                && !name.is_empty()
                && name.chars().all(is_variable_char)
            {
                let value = (!first.unknown && !first.wildcard).then(|| value.to_owned());
                assigned.push((name.to_owned(), value));
                words.remove(0);
            } else if PREFIXES.contains(&first.text.as_str()) && !first.unknown {
                words.remove(0);
                while words.first().is_some_and(|word| word.text.starts_with('-')) {
                    words.remove(0);
                }
            } else {
                break;
            }
        }
        let Some(first) = words.first() else {
            self.variables.extend(assigned);
            return;
        };
        if first.unknown {
            self.everything("it runs a command whose name is computed");
            return;
        }
        let name = paths::base(&first.text).to_owned();
        if let Some((directory, _)) = first.text.rsplit_once('/')
            && !matches!(paths::base(directory), "bin" | "sbin")
        {
            self.everything(&format!(
                "it runs `{}`, which may be any script",
                first.text
            ));
            return;
        }
        let args = &words[1..];
        let texts: Vec<&str> = args.iter().map(|word| word.text.as_str()).collect();
        let only_asks = !texts.is_empty()
            && texts.iter().all(|text| {
                matches!(
                    *text,
                    "--version" | "-V" | "-version" | "--help" | "version"
                )
            });
        match name.as_str() {
            "fi" | "done" | "}" | "esac" => {}
            "for" => {
                self.variables
                    .insert(texts.first().copied().unwrap_or("").to_owned(), None);
            }
            "export" | "local" | "readonly" => {
                for word in args {
                    if let Some((name, value)) = word.text.split_once('=') {
                        let value = (!word.unknown && !word.wildcard).then(|| value.to_owned());
                        self.variables.insert(name.to_owned(), value);
                    }
                }
            }
            "read" => {
                self.variables
                    .extend(texts.iter().map(|text| ((*text).to_owned(), None)));
            }
            "cd" | "pushd" => self.change_directory(args),
            _ if only_asks || READERS.contains(&name.as_str()) => {}
            "python" | "python3"
                if texts.first() == Some(&"-m")
                    && matches!(texts.get(1), Some(&("pip" | "venv"))) => {}
            "uv" if matches!(texts.first(), Some(&("pip" | "tool" | "python" | "venv"))) => {}
            "npm" | "pnpm" | "yarn"
                if texts.iter().any(|text| {
                    matches!(*text, "-g" | "--global" | "config" | "cache" | "global")
                }) => {}
            "git"
                if matches!(
                    git_verb(&texts),
                    "clone" | "config" | "init" | "log" | "ls-remote" | "status"
                ) => {}
            "cargo" | "go" if texts.first() == Some(&"install") => {}
            "find" => self.find(args),
            _ if WRITERS.contains(&name.as_str()) => {
                for word in args {
                    self.written(word, &format!("`{name}`"));
                }
            }
            _ if TOOLS.contains(&name.as_str()) => {
                let elsewhere = texts
                    .iter()
                    .any(|text| text.starts_with("-C") || text.starts_with("--directory"));
                if !(name == "tar" && elsewhere) {
                    self.here(&format!("`{name}`"));
                }
                for word in args {
                    self.written(word, &format!("`{name}`"));
                }
            }
            _ => self.everything(&format!("it runs `{name}`, whose effects are not known")),
        }
    }

    fn find(&mut self, args: &[Word]) {
        let actions = [
            "-delete", "-exec", "-execdir", "-ok", "-okdir", "-fprint", "-fprintf", "-fls",
        ];
        let Some(at) = args
            .iter()
            .position(|word| actions.contains(&word.text.as_str()))
        else {
            return;
        };
        if args[at].text != "-delete"
            && !args
                .get(at + 1)
                .is_some_and(|word| WRITERS.contains(&word.text.as_str()))
        {
            self.everything("it runs `find` with a command");
            return;
        }
        let places: Vec<&Word> = args
            .iter()
            .take_while(|word| !word.text.starts_with('-'))
            .collect();
        if places.is_empty() {
            self.here("`find`");
        }
        for word in places {
            self.written(word, "`find`");
        }
    }

    fn here(&mut self, command: &str) {
        if self.lost {
            self.everything(&format!(
                "it runs {command} in a directory that isn't known"
            ));
        }
        for directory in self.directories.clone() {
            self.effects.below.insert(directory, command.to_owned());
        }
    }

    fn change_directory(&mut self, args: &[Word]) {
        let target = args.iter().find(|word| !word.text.starts_with('-'));
        let Some(word) =
            target.filter(|word| !word.unknown && !word.wildcard && !word.text.starts_with('~'))
        else {
            self.lost |= !args.iter().any(|word| word.text == "-");
            return;
        };
        let next = match (word.text.starts_with('/'), self.directories.last()) {
            (true, _) => paths::clean(&word.text),
            (false, Some(current)) => paths::join(current, &word.text),
            (false, None) => return,
        };
        if self.directories.len() >= MAX_DIRECTORIES {
            self.lost = true;
        } else {
            self.directories.push(next);
        }
    }

    /// A path that `command` writes to, removes, or changes the metadata of.
    fn written(&mut self, word: &Word, command: &str) {
        let mut text = word.text.as_str();
        if text.contains("://") {
            return;
        }
        if text.starts_with('-') || text.contains('=') {
            // `--target=/x`, `of=/x`, `-C/x`; an option without a path names none.
            match text.find(['/', '=']) {
                Some(at) => text = text[at..].trim_start_matches('='),
                None if !word.unknown => return,
                None => {}
            }
        }
        if text.starts_with('~') {
            for home in ["/root", "/home"] {
                self.effects
                    .below
                    .insert(home.to_owned(), command.to_owned());
            }
            return;
        }
        let brace = if word.quoted {
            None
        } else {
            text.find('{').filter(|_| text.contains(','))
        };
        if word.unknown || brace.is_some() {
            let certain = &text[..brace.unwrap_or(text.len())];
            let directory = certain.rfind('/').map_or("", |end| &certain[..end]);
            if directory.starts_with('/') {
                self.effects
                    .below
                    .insert(paths::clean(directory), command.to_owned());
            } else {
                self.everything(&format!("it runs {command} on a path that is computed"));
            }
            return;
        }
        if text.is_empty() {
            return;
        }
        let mut starts: Vec<String> = Vec::new();
        if text.starts_with('/') {
            starts.push(String::new());
        } else {
            starts.extend(self.directories.iter().cloned());
            if self.lost {
                let parts: Vec<String> = paths::components(text).map(str::to_owned).collect();
                if parts.is_empty() || parts.iter().any(|part| part == ".." || part == "*") {
                    self.everything(&format!(
                        "it runs {command} in a directory that isn't known"
                    ));
                    return;
                }
                self.effects.anywhere.push((parts, command.to_owned()));
            }
        }
        for start in starts {
            let full = paths::clean_absolute(&format!("{start}/{text}"));
            if word.wildcard {
                let parts = paths::components(&full).map(str::to_owned).collect();
                self.effects.patterns.push((parts, command.to_owned()));
            } else {
                self.effects.below.insert(full, command.to_owned());
            }
        }
    }
}

fn is_variable_char(ch: char) -> bool {
    ch.is_ascii_alphanumeric() || ch == '_'
}

fn push(word: &mut Option<Word>, ch: char) {
    let word = word.get_or_insert_default();
    if !word.unknown {
        word.text.push(ch);
    }
}

fn finish(words: &mut Vec<Word>, word: &mut Option<Word>, output: &mut bool, skip: &mut bool) {
    if let Some(mut done) = word.take() {
        done.output = std::mem::take(output);
        done.skip = std::mem::take(skip);
        words.push(done);
    }
}

/// The subcommand of git, behind its own options.
fn git_verb<'a>(texts: &[&'a str]) -> &'a str {
    let mut at = 0;
    while let Some(text) = texts.get(at) {
        match *text {
            "-C" | "-c" => at += 2,
            text if text.starts_with('-') => at += 1,
            text => return text,
        }
    }
    ""
}
