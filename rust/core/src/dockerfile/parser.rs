//! Lines to instructions: directives, comments, continuations, heredocs, flags, JSON and shell forms.

use std::borrow::Cow;

use super::json::{JsonArray, parse_array};
use super::shell::{ShellError, heredoc_words};
use super::{BuildError, instruction};

/// A file that has been cut into instructions; what they mean is not checked beyond the grammar of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dockerfile {
    pub instructions: Vec<Instruction>,
    /// `\` or `` ` ``.
    pub escape: char,
    /// Value of the `syntax` directive: another frontend than Docker's may have other rules.
    pub syntax: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instruction {
    /// Upper case; may be a word that is no instruction.
    pub keyword: String,
    /// Leading `--name=value` words, unquoted.
    pub flags: Vec<String>,
    /// ENV and LABEL: name, value, separator (`=`, or empty for the legacy form) in turn. ONBUILD: the inner keyword,
    /// then its arguments. RUN, CMD, … in shell form: one string. Others: one string a word.
    pub args: Vec<String>,
    pub json: bool,
    pub heredocs: Vec<Heredoc>,
    /// The joined line, without continuation marks and heredoc bodies.
    pub original: String,
    /// Flags of the instruction inside an ONBUILD.
    pub inner_flags: Vec<String>,
    pub line: usize,
    pub end_line: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heredoc {
    pub name: String,
    /// The word was not quoted: variables in the content are replaced.
    pub expand: bool,
    /// `<<-`: leading tabs go.
    pub chomp: bool,
    pub file_descriptor: u32,
    /// As it stands in the file, tabs included.
    pub content: Vec<u8>,
}

/// Longest physical line, its newline included.
const MAX_LINE: usize = 65_536;

const DIRECTIVES: [&str; 3] = ["syntax", "escape", "check"];

struct Lines<'a> {
    rest: &'a [u8],
    number: usize,
    too_long: bool,
}

impl<'a> Lines<'a> {
    /// The next line with its newline. A line beyond the limit ends the input, as in BuildKit.
    fn next(&mut self) -> Option<&'a [u8]> {
        if self.rest.is_empty() || self.too_long {
            return None;
        }
        let newline = self.rest[..self.rest.len().min(MAX_LINE)]
            .iter()
            .position(|byte| *byte == b'\n');
        let length = match newline {
            Some(at) => at + 1,
            None if self.rest.len() < MAX_LINE => self.rest.len(),
            None => {
                self.too_long = true;
                return None;
            }
        };
        let (line, rest) = self.rest.split_at(length);
        self.rest = rest;
        self.number += 1;
        Some(line)
    }
}

/// Cuts `source` into instructions.
///
/// # Errors
/// The first thing that BuildKit's parser refuses. Unknown instructions and wrong arguments are not errors here.
pub fn parse(source: &[u8]) -> Result<Dockerfile, BuildError> {
    let mut lines = Lines {
        rest: source.strip_prefix(b"\xef\xbb\xbf").unwrap_or(source),
        number: 0,
        too_long: false,
    };
    let mut directives = Directives {
        seen: Vec::new(),
        done: false,
        escape: '\\',
        syntax: None,
    };
    let mut instructions = Vec::new();
    while let Some(raw) = lines.next() {
        let text = decode(raw);
        let text = trim_newline(&text).trim_start();
        directives.line(text, lines.number)?;
        if text.starts_with('#') {
            continue;
        }
        let start = lines.number;
        let (first, mut continues) = continuation(text, directives.escape);
        if !continues && first.is_empty() {
            continue;
        }
        let mut joined = first.to_owned();
        while continues {
            let Some(raw) = lines.next() else { break };
            let text = decode(raw);
            let text = trim_newline(&text);
            let trimmed = text.trim_start();
            if trimmed.starts_with('#') || trimmed.is_empty() {
                continue;
            }
            let (part, more) = continuation(text, directives.escape);
            joined.push_str(part);
            continues = more;
        }
        let mut instruction = instruction_from_line(joined, directives.escape, start)?;
        if can_hold_heredoc(&instruction) && instruction.original.contains("<<") {
            for mut heredoc in heredocs_in(&instruction.original, start)? {
                read_body(&mut heredoc, &mut lines, start)?;
                instruction.heredocs.push(heredoc);
            }
        }
        instruction.end_line = lines.number;
        instructions.push(instruction);
    }
    if instructions.is_empty() {
        return Err(BuildError::new(
            "no-instructions",
            lines.number,
            "the Dockerfile holds no instruction",
        ));
    }
    if lines.too_long {
        let message = format!("the line is longer than {} bytes", MAX_LINE - 1);
        return Err(BuildError::new("line-too-long", lines.number + 1, message));
    }
    Ok(Dockerfile {
        instructions,
        escape: directives.escape,
        syntax: directives.syntax,
    })
}

fn decode(bytes: &[u8]) -> Cow<'_, str> {
    // The lossy reading of what is valid is several times as slow.
    std::str::from_utf8(bytes).map_or_else(|_| String::from_utf8_lossy(bytes), Cow::Borrowed)
}

fn trim_newline(text: &str) -> &str {
    text.trim_end_matches(['\r', '\n'])
}

/// The text without its continuation mark, and whether it had one.
fn continuation(text: &str, escape: char) -> (&str, bool) {
    let trimmed = text.trim_end_matches([' ', '\t']);
    match trimmed.strip_suffix(escape) {
        Some(rest) if !rest.ends_with(escape) => (rest, true),
        _ => (text, false),
    }
}

struct Directives {
    seen: Vec<String>,
    done: bool,
    escape: char,
    syntax: Option<String>,
}

impl Directives {
    fn line(&mut self, text: &str, number: usize) -> Result<(), BuildError> {
        if self.done {
            return Ok(());
        }
        let Some((key, value)) = split_directive(text) else {
            self.done = true;
            return Ok(());
        };
        let key = key.to_lowercase();
        if !DIRECTIVES.contains(&key.as_str()) {
            self.done = true;
            return Ok(());
        }
        if self.seen.contains(&key) {
            let message = format!("the directive `{key}` stands here a second time; keep one");
            return Err(BuildError::new("directive-repeated", number, message));
        }
        match key.as_str() {
            "escape" => {
                self.escape = match value {
                    "\\" => '\\',
                    "`" => '`',
                    _ => {
                        let message = format!("`escape` must be \\ or `, not {value:?}");
                        return Err(BuildError::new("directive-escape", number, message));
                    }
                };
            }
            "syntax" => self.syntax = Some(value.to_owned()),
            _ => {}
        }
        self.seen.push(key);
        Ok(())
    }
}

fn split_directive(text: &str) -> Option<(&str, &str)> {
    let text = text.strip_prefix('#')?.trim_start();
    let (key, value) = text.split_once('=')?;
    // Inside the expression blanks are ASCII only.
    let key = key.trim_end_matches(is_regex_space);
    let trimmed = value.trim_matches(is_regex_space);
    // A value of blanks alone is its last blank.
    let last = value.len().saturating_sub(1);
    let value = if trimmed.is_empty() {
        value.get(last..).unwrap_or("")
    } else {
        trimmed
    };
    let mut key_chars = key.chars();
    let valid =
        key_chars.next()?.is_ascii_alphabetic() && key_chars.all(|ch| ch.is_ascii_alphanumeric());
    (valid && !value.is_empty()).then_some((key, value))
}

fn is_regex_space(ch: char) -> bool {
    matches!(ch, ' ' | '\t' | '\n' | '\r' | '\x0c')
}

/// Blanks that separate words: no Unicode ones.
pub fn is_blank(ch: char) -> bool {
    matches!(ch, '\t' | '\x0b' | '\x0c' | '\r' | ' ')
}

fn instruction_from_line(
    line: String,
    escape: char,
    number: usize,
) -> Result<Instruction, BuildError> {
    let mut current = split_line(&line, escape, number)?;
    current.original = line;
    if current.keyword != "ONBUILD" {
        return Ok(current);
    }
    // ONBUILD nests without limit in the grammar (a later check refuses it), so no recursion.
    let Some(rest) = current.args.pop() else {
        return Ok(current);
    };
    let mut inner_line = rest;
    let mut args = Vec::new();
    loop {
        let inner = split_line(&inner_line, escape, number)?;
        if args.is_empty() {
            current.inner_flags = inner.flags;
        }
        args.push(inner.keyword.clone());
        current.json = inner.json;
        if inner.keyword != "ONBUILD" {
            args.extend(inner.args);
            break;
        }
        match inner.args.into_iter().next() {
            Some(next) => inner_line = next,
            None => break,
        }
    }
    current.args = args;
    Ok(current)
}

fn split_line(line: &str, escape: char, number: usize) -> Result<Instruction, BuildError> {
    let trimmed = line.trim();
    let (keyword, rest) = match trimmed.find(is_blank) {
        Some(at) => (&trimmed[..at], trimmed[at..].trim_start_matches(is_blank)),
        None => (trimmed, ""),
    };
    let (flags, rest) = split_flags(rest);
    let rest = rest.trim();
    let keyword = keyword.to_ascii_uppercase();
    let (args, json) = arguments(&keyword, rest, escape, number)?;
    Ok(Instruction {
        keyword,
        flags,
        args,
        json,
        heredocs: Vec::new(),
        original: String::new(),
        inner_flags: Vec::new(),
        line: number,
        end_line: number,
    })
}

fn is_latin1_space(byte: u8) -> bool {
    matches!(byte, b'\t'..=b'\r' | b' ' | 0x85 | 0xa0)
}

/// Leading words that start with `--`, quotes and escapes removed. BuildKit reads bytes here, each as one character, and
/// escapes with a backslash whatever the directive `escape` says.
fn split_flags(text: &str) -> (Vec<String>, &str) {
    let bytes = text.as_bytes();
    let mut flags = Vec::new();
    let mut at = 0;
    loop {
        while bytes.get(at).is_some_and(|byte| is_latin1_space(*byte)) {
            at += 1;
        }
        if !bytes[at..].starts_with(b"--") {
            return (flags, text.get(at..).unwrap_or(""));
        }
        let mut word = String::new();
        let mut quoted = false;
        let mut quote = None;
        while let Some(&byte) = bytes.get(at) {
            if quote.is_none() && is_latin1_space(byte) {
                break;
            }
            at += 1;
            if quote == Some(byte) {
                quote = None;
            } else if quote.is_none() && matches!(byte, b'\'' | b'"') {
                quote = Some(byte);
                quoted = true;
            } else if byte == b'\\' {
                match bytes.get(at) {
                    Some(&next) => {
                        word.push(char::from(next));
                        at += 1;
                    }
                    None => quote = None,
                }
            } else {
                word.push(char::from(byte));
            }
        }
        if word == "--" {
            return (flags, text.get(at..).unwrap_or(""));
        }
        if quoted || !word.is_empty() {
            flags.push(word);
        }
    }
}

fn arguments(
    keyword: &str,
    rest: &str,
    escape: char,
    number: usize,
) -> Result<(Vec<String>, bool), BuildError> {
    let one = || {
        if rest.is_empty() {
            Vec::new()
        } else {
            vec![rest.to_owned()]
        }
    };
    Ok(match keyword {
        "ADD" | "COPY" | "VOLUME" => match json_form(rest, number)? {
            Some(args) => (args, true),
            None => (blank_words(rest), false),
        },
        "CMD" | "ENTRYPOINT" | "RUN" | "SHELL" => match json_form(rest, number)? {
            Some(args) => (args, true),
            None => (one(), false),
        },
        "EXPOSE" | "FROM" => (blank_words(rest), false),
        "ARG" => (quoted_words(rest, escape), false),
        "ENV" | "LABEL" => (name_values(keyword, rest, escape, number)?, false),
        "HEALTHCHECK" => {
            let end = rest
                .find(|ch: char| ch.is_ascii() && is_latin1_space(ch as u8))
                .unwrap_or(rest.len());
            let (kind, rest) = rest.split_at(end);
            let rest = rest.trim_start();
            let mut args = if kind.is_empty() {
                Vec::new()
            } else {
                vec![kind.to_owned()]
            };
            let json = json_form(rest, number)?;
            let is_json = json.is_some();
            match json {
                Some(words) => args.extend(words),
                None if !rest.is_empty() => args.push(rest.to_owned()),
                None => {}
            }
            (args, is_json)
        }
        "MAINTAINER" | "STOPSIGNAL" | "USER" | "WORKDIR" | "ONBUILD" => (one(), false),
        _ => (Vec::new(), false),
    })
}

fn json_form(rest: &str, number: usize) -> Result<Option<Vec<String>>, BuildError> {
    if !rest.starts_with('[') {
        return Ok(None);
    }
    match parse_array(rest) {
        JsonArray::Strings(strings) => Ok(Some(strings)),
        JsonArray::Invalid => Ok(None),
        JsonArray::OtherElements => Err(BuildError::new(
            "json-not-strings",
            number,
            "the JSON array may hold nothing but strings",
        )),
    }
}

fn blank_words(rest: &str) -> Vec<String> {
    rest.split(is_blank)
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Words of ARG, ENV and LABEL: quotes group, and stay.
fn quoted_words(rest: &str, escape: char) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quote: Option<char> = None;
    let mut chars = rest.chars();
    while let Some(ch) = chars.next() {
        if quote.is_none() && ch.is_whitespace() {
            if !word.is_empty() {
                words.push(std::mem::take(&mut word));
            }
            continue;
        }
        if ch == escape && quote != Some('\'') {
            match chars.next() {
                Some(next) => {
                    word.push(ch);
                    word.push(next);
                }
                None => break,
            }
            continue;
        }
        match quote {
            Some(open) if open == ch => quote = None,
            None if matches!(ch, '\'' | '"') => quote = Some(ch),
            _ => {}
        }
        word.push(ch);
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}

fn name_values(
    keyword: &str,
    rest: &str,
    escape: char,
    number: usize,
) -> Result<Vec<String>, BuildError> {
    let words = quoted_words(rest, escape);
    let Some(first) = words.first() else {
        return Ok(Vec::new());
    };
    if !first.contains('=') {
        let Some(at) = rest.find(is_blank) else {
            let message = format!("{keyword} needs a name and a value");
            return Err(BuildError::new("missing-value", number, message));
        };
        let value = rest[at..].trim_start_matches(is_blank);
        return Ok(vec![rest[..at].to_owned(), value.to_owned(), String::new()]);
    }
    let mut args = Vec::with_capacity(words.len() * 3);
    for word in &words {
        let Some((name, value)) = word.split_once('=') else {
            let message = format!(
                "{keyword}: {word:?} has no `=`; write name=value, and quote a value with blanks"
            );
            return Err(BuildError::new("missing-equals", number, message));
        };
        args.extend([name.to_owned(), value.to_owned(), "=".to_owned()]);
    }
    Ok(args)
}

fn can_hold_heredoc(instruction: &Instruction) -> bool {
    let keyword = match instruction.keyword.as_str() {
        "ONBUILD" => instruction.args.first().map_or("", String::as_str),
        keyword => keyword,
    };
    !instruction.json && instruction::HEREDOC_KEYWORDS.contains(&keyword)
}

fn heredocs_in(line: &str, number: usize) -> Result<Vec<Heredoc>, BuildError> {
    // A line that the lexer refuses holds no heredoc; its own shell may still accept it.
    let words = heredoc_words(line, true, true).unwrap_or_default();
    let mut heredocs = Vec::new();
    for word in words {
        heredocs.extend(heredoc_word(&word).map_err(|error| lexer_error(error, number))?);
    }
    Ok(heredocs)
}

fn lexer_error(error: ShellError, number: usize) -> BuildError {
    let message = match error {
        ShellError::Syntax(message) => message,
        ShellError::Limit(message) => message.to_owned(),
    };
    BuildError::new(
        "heredoc-word",
        number,
        format!("the heredoc's name cannot be read: {message}"),
    )
}

/// Reads `3<<-"NAME"`; none if the word is no heredoc.
pub fn heredoc_word(word: &str) -> Result<Option<Heredoc>, ShellError> {
    let digits = word.bytes().take_while(u8::is_ascii_digit).count();
    let Some(rest) = word[digits..].strip_prefix("<<") else {
        return Ok(None);
    };
    let (chomp, rest) = match rest.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, rest),
    };
    let rest = rest.trim_start_matches(is_regex_space);
    if rest.is_empty() || rest.contains('<') {
        return Ok(None);
    }
    let mut words = heredoc_words(rest, false, false)?;
    if words.len() != 1 {
        return Ok(None);
    }
    let raw = heredoc_words(rest, true, false)?;
    if raw.len() != 1 {
        return Err(ShellError::Syntax("quotes are not clear".to_owned()));
    }
    let quotes = |text: &str| text.matches(['\'', '"']).count();
    let name = words.remove(0);
    Ok(Some(Heredoc {
        expand: quotes(&name) == quotes(&raw[0]),
        name,
        chomp,
        file_descriptor: word[..digits].parse().unwrap_or(0),
        content: Vec::new(),
    }))
}

fn read_body(heredoc: &mut Heredoc, lines: &mut Lines, start: usize) -> Result<(), BuildError> {
    while let Some(raw) = lines.next() {
        let mut end = raw;
        while let Some(rest) = end.strip_suffix(b"\n").or_else(|| end.strip_suffix(b"\r")) {
            end = rest;
        }
        while let (true, Some(rest)) = (heredoc.chomp, end.strip_prefix(b"\t")) {
            end = rest;
        }
        if end == heredoc.name.as_bytes() {
            return Ok(());
        }
        heredoc.content.extend_from_slice(raw);
    }
    let message = format!(
        "the heredoc {:?} isn't closed: no line holds just its name",
        heredoc.name
    );
    Err(BuildError::new("heredoc-unterminated", start, message))
}

/// The content with the leading tabs of each line gone.
pub fn chomp(content: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(content.len());
    for line in content.split_inclusive(|byte| *byte == b'\n') {
        let tabs = line.iter().take_while(|byte| **byte == b'\t').count();
        out.extend_from_slice(&line[tabs..]);
    }
    out
}
