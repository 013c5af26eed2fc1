//! BuildKit's shell lexer: quotes, escapes and `$variables` in the words of an instruction.

use std::collections::BTreeSet;

/// A variable, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Known(String),
    /// Set by something outside the Dockerfile, or perhaps not set at all.
    Unknown,
    Unset,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShellError {
    /// The build refuses the word.
    Syntax(String),
    /// This model gives up: nesting or size beyond any real Dockerfile.
    Limit(&'static str),
}

/// Result of [`expand`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Expanded {
    /// Meaningless when `unknown` is not empty.
    pub text: String,
    /// Variables whose value decides the text and isn't known.
    pub unknown: BTreeSet<String>,
}

const MAX_DEPTH: usize = 200;
/// Linux refuses a single environment string beyond 128 KiB, so no build gets further with a larger one.
const MAX_TEXT: usize = 1 << 20;
/// Steps for matching one `${name#pattern}` or `${name/pattern/…}`.
const MAX_MATCH_STEPS: usize = 20_000_000;

#[derive(Clone, Copy, Default)]
struct Mode {
    raw_quotes: bool,
    skip_quotes: bool,
    keep_unset: bool,
}

/// Expands one word of an instruction (ENV, COPY, WORKDIR, …); quotes are removed, the result isn't split.
pub fn expand(
    word: &str,
    escape: char,
    lookup: &dyn Fn(&str) -> Value,
) -> Result<Expanded, ShellError> {
    let is_plain = |byte| !matches!(byte, b'$' | b'\'' | b'"') && byte != escape as u8;
    if word.len() <= MAX_TEXT && word.bytes().all(is_plain) {
        return Ok(Expanded {
            text: word.to_owned(),
            ..Expanded::default()
        });
    }
    run(word, escape, lookup, Mode::default(), false).map(|(expanded, _)| expanded)
}

/// Expands the body of an unquoted heredoc: quotes stay, a backslash escapes any character and disappears.
pub fn expand_heredoc(body: &str, lookup: &dyn Fn(&str) -> Value) -> Result<Expanded, ShellError> {
    run(
        body,
        '\\',
        lookup,
        Mode {
            skip_quotes: true,
            ..Mode::default()
        },
        false,
    )
    .map(|(expanded, _)| expanded)
}

/// Splits a line into words to look for heredocs, leaving variables, and (if `raw`) quotes and escapes, as written.
pub fn heredoc_words(
    line: &str,
    raw_quotes: bool,
    raw_escapes: bool,
) -> Result<Vec<String>, ShellError> {
    let mode = Mode {
        raw_quotes,
        keep_unset: true,
        ..Mode::default()
    };
    run(line, '\\', &|_| Value::Unset, mode, raw_escapes).map(|(_, words)| words)
}

fn run(
    word: &str,
    escape: char,
    lookup: &dyn Fn(&str) -> Value,
    mode: Mode,
    raw_escapes: bool,
) -> Result<(Expanded, Vec<String>), ShellError> {
    let mut lexer = Lexer {
        rest: word.chars(),
        escape,
        lookup,
        mode,
        raw_escapes,
        unknown: BTreeSet::new(),
        words_buffer: String::new(),
        depth: 0,
    };
    let (text, words) = lexer.until(None, raw_escapes)?;
    Ok((
        Expanded {
            text,
            unknown: lexer.unknown,
        },
        words,
    ))
}

struct Lexer<'a> {
    rest: std::str::Chars<'a>,
    escape: char,
    lookup: &'a dyn Fn(&str) -> Value,
    mode: Mode,
    raw_escapes: bool,
    unknown: BTreeSet<String>,
    /// One buffer for all nesting levels: a nested word discards what the outer word has collected so far. BuildKit
    /// does the same, and it decides which words of a RUN are heredocs.
    words_buffer: String,
    depth: usize,
}

#[derive(Default)]
struct Words {
    done: Vec<String>,
    in_word: bool,
}

fn syntax<T>(message: impl Into<String>) -> Result<T, ShellError> {
    Err(ShellError::Syntax(message.into()))
}

impl Lexer<'_> {
    fn peek(&self) -> Option<char> {
        self.rest.clone().next()
    }

    fn add_char(&mut self, words: &mut Words, ch: char) {
        if !ch.is_whitespace() {
            self.words_buffer.push(ch);
            words.in_word = true;
        } else if words.in_word && !self.words_buffer.is_empty() {
            words.done.push(std::mem::take(&mut self.words_buffer));
            words.in_word = false;
        }
    }

    fn until(
        &mut self,
        stop: Option<char>,
        raw_escapes: bool,
    ) -> Result<(String, Vec<String>), ShellError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(ShellError::Limit("variables are nested too deeply"));
        }
        let outer = std::mem::replace(&mut self.raw_escapes, raw_escapes);
        let result = self.until_inner(stop);
        self.raw_escapes = outer;
        self.depth -= 1;
        result
    }

    fn until_inner(&mut self, stop: Option<char>) -> Result<(String, Vec<String>), ShellError> {
        let mut result = String::new();
        let mut words = Words::default();
        self.words_buffer.clear();
        while let Some(ch) = self.peek() {
            if result.len() > MAX_TEXT {
                return Err(ShellError::Limit("the expanded text is too long"));
            }
            if Some(ch) == stop {
                self.rest.next();
                return Ok((result, self.finish(words)));
            }
            let special = match ch {
                '$' => Some(self.dollar()?),
                '<' => Some(self.less_than()),
                '\'' if !self.mode.skip_quotes => Some(self.single_quote()?),
                '"' if !self.mode.skip_quotes => Some(self.double_quote()?),
                _ => None,
            };
            if let Some(text) = special {
                if ch == '$' {
                    for ch in text.chars() {
                        self.add_char(&mut words, ch);
                    }
                } else {
                    self.words_buffer.push_str(&text);
                    words.in_word = true;
                }
                result.push_str(&text);
                continue;
            }
            self.rest.next();
            if ch != self.escape {
                self.add_char(&mut words, ch);
                result.push(ch);
                continue;
            }
            if self.raw_escapes {
                self.words_buffer.push(ch);
                words.in_word = true;
                result.push(ch);
            }
            let Some(escaped) = self.rest.next() else {
                break;
            };
            self.words_buffer.push(escaped);
            words.in_word = true;
            result.push(escaped);
        }
        match stop {
            Some(stop) => syntax(format!("the text ends before the matching `{stop}`")),
            None => Ok((result, self.finish(words))),
        }
    }

    fn finish(&mut self, mut words: Words) -> Vec<String> {
        if !self.words_buffer.is_empty() {
            words.done.push(std::mem::take(&mut self.words_buffer));
        }
        words.done
    }

    fn single_quote(&mut self) -> Result<String, ShellError> {
        let mut result = String::new();
        self.rest.next();
        if self.mode.raw_quotes {
            result.push('\'');
        }
        loop {
            match self.rest.next() {
                None => return syntax("a single quote is not closed"),
                Some('\'') => {
                    if self.mode.raw_quotes {
                        result.push('\'');
                    }
                    return Ok(result);
                }
                Some(ch) => result.push(ch),
            }
        }
    }

    fn double_quote(&mut self) -> Result<String, ShellError> {
        let mut result = String::new();
        self.rest.next();
        if self.mode.raw_quotes {
            result.push('"');
        }
        loop {
            if result.len() > MAX_TEXT {
                return Err(ShellError::Limit("the expanded text is too long"));
            }
            match self.peek() {
                None => return syntax("a double quote is not closed"),
                Some('"') => {
                    self.rest.next();
                    if self.mode.raw_quotes {
                        result.push('"');
                    }
                    return Ok(result);
                }
                Some('$') => result.push_str(&self.dollar()?),
                Some(mut ch) => {
                    self.rest.next();
                    if ch == self.escape {
                        if self.raw_escapes {
                            result.push(ch);
                        }
                        match self.peek() {
                            None => continue,
                            Some(next) if next == '"' || next == '$' || next == self.escape => {
                                self.rest.next();
                                ch = next;
                            }
                            Some(_) => {}
                        }
                    }
                    result.push(ch);
                }
            }
        }
    }

    fn less_than(&mut self) -> String {
        self.rest.next();
        if self.peek() != Some('<') {
            return "<".to_owned();
        }
        self.rest.next();
        let mut result = "<<".to_owned();
        while let Some(ch @ ('\t' | '\r' | ' ')) = self.peek() {
            self.rest.next();
            result.push(ch);
        }
        result
    }

    fn name(&mut self) -> String {
        let mut name = String::new();
        while let Some(ch) = self.peek() {
            if name.is_empty() && is_digit(ch) {
                while let Some(digit) = self.peek().filter(|ch| is_digit(*ch)) {
                    self.rest.next();
                    name.push(digit);
                }
                return name;
            }
            if name.is_empty() && matches!(ch, '@' | '*' | '#' | '?' | '-' | '$' | '!') {
                self.rest.next();
                return ch.to_string();
            }
            if !is_letter(ch) && !is_digit(ch) && ch != '_' {
                break;
            }
            self.rest.next();
            name.push(ch);
        }
        name
    }

    fn get(&mut self, name: &str) -> Value {
        let value = (self.lookup)(name);
        if value == Value::Unknown {
            self.unknown.insert(name.to_owned());
        }
        value
    }

    /// Text for a variable whose plain value is asked for.
    fn plain(&mut self, name: &str, as_written: String) -> String {
        match self.get(name) {
            Value::Known(value) => value,
            Value::Unset if self.mode.keep_unset => as_written,
            Value::Unset | Value::Unknown => String::new(),
        }
    }

    /// A word inside `${…}`, and the variables that it alone depends on.
    fn nested(
        &mut self,
        stop: char,
        raw_escapes: bool,
    ) -> Result<(String, BTreeSet<String>), ShellError> {
        let outer = std::mem::take(&mut self.unknown);
        let result = self.until(Some(stop), raw_escapes);
        let inner = std::mem::replace(&mut self.unknown, outer);
        match result {
            Err(ShellError::Syntax(_)) if self.peek().is_none() => {
                syntax(format!("`{stop}` is missing in ${{…}}"))
            }
            other => other.map(|(text, _)| (text, inner)),
        }
    }

    fn dollar(&mut self) -> Result<String, ShellError> {
        self.rest.next();
        if self.peek() != Some('{') {
            let name = self.name();
            if name.is_empty() {
                return Ok("$".to_owned());
            }
            let written = format!("${name}");
            return Ok(self.plain(&name, written));
        }
        self.rest.next();
        match self.peek() {
            None => return syntax("`}` is missing in ${…}"),
            Some('{' | '}' | ':') => return syntax("bad substitution"),
            Some(_) => {}
        }
        let name = self.name();
        let Some(mut operator) = self.rest.next() else {
            return syntax("the substitution has no modifier that is known");
        };
        let mut written_operator = operator.to_string();
        let mut null_is_unset = false;
        match operator {
            '}' => {
                let written = format!("${{{name}}}");
                return Ok(self.plain(&name, written));
            }
            '/' => return self.replace(&name),
            ':' => {
                null_is_unset = true;
                let Some(next) = self.rest.next() else {
                    return syntax("`}` is missing in ${…}");
                };
                operator = next;
                written_operator.push(next);
            }
            '+' | '-' | '?' | '#' | '%' => {}
            _ => return syntax(format!("modifier `{operator}` is not supported in ${{…}}")),
        }
        let raw = matches!(operator, '#' | '%');
        if null_is_unset && raw {
            return syntax(format!(
                "modifier `{written_operator}` is not supported in ${{…}}"
            ));
        }
        let (word, word_unknown) = self.nested('}', raw)?;
        let value = self.get(&name);
        if self.mode.keep_unset && value == Value::Unset {
            return Ok(format!("${{{name}{written_operator}{word}}}"));
        }
        let missing = match &value {
            Value::Unset => true,
            Value::Known(value) => null_is_unset && value.is_empty(),
            Value::Unknown => false,
        };
        let use_word = |lexer: &mut Self| {
            lexer.unknown.extend(word_unknown.iter().cloned());
        };
        match (operator, value) {
            ('-' | '+' | '?', Value::Unknown) => {
                use_word(self);
                Ok(String::new())
            }
            ('-', value) => Ok(if missing {
                use_word(self);
                word
            } else {
                known(value)
            }),
            ('+', _) => Ok(if missing {
                String::new()
            } else {
                use_word(self);
                word
            }),
            ('?', value) => {
                if !missing {
                    return Ok(known(value));
                }
                let state = if value == Value::Unset {
                    "unset"
                } else {
                    "empty"
                };
                let message = if word.is_empty() {
                    format!("is not allowed to be {state}")
                } else {
                    word
                };
                syntax(format!("{name}: {message}"))
            }
            ('#' | '%', value) => {
                use_word(self);
                let pattern = Pattern::parse(&word, operator)?;
                if !self.unknown.is_empty() {
                    return Ok(String::new());
                }
                pattern.trim(&known(value), operator)
            }
            _ => syntax(format!(
                "modifier `{written_operator}` is not supported in ${{…}}"
            )),
        }
    }

    fn replace(&mut self, name: &str) -> Result<String, ShellError> {
        let all = self.peek() == Some('/');
        if all {
            self.rest.next();
        }
        let (pattern, pattern_unknown) = self.nested('/', true)?;
        let (replacement, replacement_unknown) = self.nested('}', true)?;
        let value = self.get(name);
        if self.mode.keep_unset && value == Value::Unset {
            return Ok(format!("${{{name}/{pattern}/{replacement}}}"));
        }
        self.unknown.extend(pattern_unknown);
        self.unknown.extend(replacement_unknown);
        let pattern = Pattern::parse_tokens(&pattern)?;
        if !self.unknown.is_empty() {
            return Ok(String::new());
        }
        if all && replacement.contains('$') {
            return Err(ShellError::Limit(
                "the replacement in ${…//…} contains a `$`",
            ));
        }
        pattern.replace(&known(value), &replacement, all)
    }
}

fn known(value: Value) -> String {
    match value {
        Value::Known(value) => value,
        Value::Unknown | Value::Unset => String::new(),
    }
}

fn is_digit(ch: char) -> bool {
    // Go asks for category Nd; beyond ASCII that only matters for where a nonsensical name ends.
    ch.is_ascii_digit()
}

fn is_letter(ch: char) -> bool {
    ch.is_alphabetic()
}

enum Token {
    Any,
    Star,
    Char(char),
}

/// `*`, `?` and literals; neither wildcard matches a newline.
struct Pattern {
    tokens: Vec<Token>,
    greedy: bool,
}

impl Pattern {
    /// The word after `#`, `##`, `%` or `%%`; for `%` it is reversed, as the value will be.
    fn parse(word: &str, operator: char) -> Result<Self, ShellError> {
        let (greedy, word) = match word.strip_prefix(operator) {
            Some(rest) => (true, rest),
            None => (false, word),
        };
        let mut pattern = if operator == '%' {
            Self::parse_tokens(&reverse_keeping_escapes(word))?
        } else {
            Self::parse_tokens(word)?
        };
        pattern.greedy = greedy;
        Ok(pattern)
    }

    fn parse_tokens(word: &str) -> Result<Self, ShellError> {
        let mut tokens = Vec::new();
        let mut chars = word.chars().peekable();
        while let Some(ch) = chars.next() {
            tokens.push(match ch {
                '*' => Token::Star,
                '?' => Token::Any,
                '\\' => match chars.peek() {
                    Some('}' | '/') => continue,
                    Some(&next @ ('*' | '?' | '\\')) => {
                        chars.next();
                        Token::Char(next)
                    }
                    Some(next) => return syntax(format!("invalid escape `\\{next}` in a pattern")),
                    None => return syntax("a pattern ends with an escape"),
                },
                ch => Token::Char(ch),
            });
        }
        Ok(Self {
            tokens,
            greedy: true,
        })
    }

    /// End of the match that starts at `start`: the longest if greedy, else the shortest.
    fn match_at(
        &self,
        value: &[char],
        start: usize,
        steps: &mut usize,
    ) -> Result<Option<usize>, ShellError> {
        let count = self.tokens.len();
        let mut states = vec![false; count + 1];
        states[0] = true;
        let mut best = None;
        let mut at = start;
        loop {
            for index in 0..count {
                if states[index] && matches!(self.tokens[index], Token::Star) {
                    states[index + 1] = true;
                }
            }
            if states[count] {
                best = Some(at);
                if !self.greedy {
                    return Ok(best);
                }
            }
            if at == value.len() || !states.contains(&true) {
                return Ok(best);
            }
            *steps = steps.saturating_add(count + 1);
            if *steps > MAX_MATCH_STEPS {
                return Err(ShellError::Limit(
                    "matching the pattern in ${…} takes too long",
                ));
            }
            let ch = value[at];
            for index in (0..=count).rev() {
                let from_before = index > 0
                    && states[index - 1]
                    && match self.tokens[index - 1] {
                        Token::Any => ch != '\n',
                        Token::Char(expected) => ch == expected,
                        Token::Star => false,
                    };
                let stays = index < count
                    && states[index]
                    && matches!(self.tokens[index], Token::Star)
                    && ch != '\n';
                states[index] = from_before || stays;
            }
            at += 1;
        }
    }

    fn trim(&self, value: &str, operator: char) -> Result<String, ShellError> {
        let mut chars: Vec<char> = value.chars().collect();
        if operator == '%' {
            chars.reverse();
        }
        let cut = self.match_at(&chars, 0, &mut 0)?.unwrap_or(0);
        let mut rest = chars.split_off(cut);
        if operator == '%' {
            rest.reverse();
        }
        Ok(rest.into_iter().collect())
    }

    fn find(
        &self,
        value: &[char],
        from: usize,
        steps: &mut usize,
    ) -> Result<Option<(usize, usize)>, ShellError> {
        for start in from..=value.len() {
            if let Some(end) = self.match_at(value, start, steps)? {
                return Ok(Some((start, end)));
            }
        }
        Ok(None)
    }

    fn replace(&self, value: &str, replacement: &str, all: bool) -> Result<String, ShellError> {
        let chars: Vec<char> = value.chars().collect();
        let mut steps = 0;
        let mut out = String::new();
        let mut copied = 0;
        let mut search = 0;
        while let Some((start, end)) = self.find(&chars, search, &mut steps)? {
            out.extend(&chars[copied..start]);
            // An empty match right behind the previous one doesn't count.
            if end > copied || start == 0 {
                out.push_str(replacement);
                if out.len() > MAX_TEXT {
                    return Err(ShellError::Limit("the expanded text is too long"));
                }
            }
            copied = end;
            search = if search + 1 > end { search + 1 } else { end };
            if !all || search > chars.len() {
                break;
            }
        }
        out.extend(&chars[copied..]);
        Ok(out)
    }
}

fn reverse_keeping_escapes(pattern: &str) -> String {
    let mut groups: Vec<String> = Vec::new();
    let mut chars = pattern.chars();
    while let Some(ch) = chars.next() {
        let mut group = ch.to_string();
        if ch == '\\' {
            group.extend(chars.next());
        }
        groups.push(group);
    }
    groups.reverse();
    groups.concat()
}
