//! `.dockerignore`: the file, and moby's pattern matcher.

use super::pathmatch::match_path;
use super::{BuildError, paths};

/// Longest line that BuildKit reads.
const MAX_LINE: usize = 65_535;

/// Patterns of a `.dockerignore`, each with its line.
///
/// # Errors
/// A line that is too long.
pub fn parse_ignore_file(source: &[u8]) -> Result<Vec<(usize, String)>, BuildError> {
    let source = source.strip_prefix(b"\xef\xbb\xbf").unwrap_or(source);
    let mut patterns = Vec::new();
    for (index, line) in source.split(|byte| *byte == b'\n').enumerate() {
        if line.len() > MAX_LINE {
            return Err(BuildError::new(
                "ignore-line-too-long",
                index + 1,
                "a .dockerignore line is longer than 64 KiB",
            ));
        }
        if line.starts_with(b"#") {
            continue;
        }
        let text = String::from_utf8_lossy(line);
        let text = text.trim();
        if text.is_empty() {
            continue;
        }
        let (mark, pattern) = match text.strip_prefix('!') {
            Some(rest) => ("!", rest.trim()),
            None => ("", text),
        };
        let mut cleaned = if pattern.is_empty() {
            String::new()
        } else {
            paths::clean(pattern)
        };
        if cleaned.len() > 1 && cleaned.starts_with('/') {
            cleaned.remove(0);
        }
        patterns.push((index + 1, format!("{mark}{cleaned}")));
    }
    Ok(patterns)
}

/// A compiled list of patterns; the last one that matches a path or one of its parents decides.
#[derive(Debug, Clone, Default)]
pub struct IgnorePatterns {
    patterns: Vec<Pattern>,
    has_exceptions: bool,
}

#[derive(Debug, Clone)]
struct Pattern {
    exception: bool,
    text: String,
    matcher: Matcher,
}

#[derive(Debug, Clone)]
enum Matcher {
    Exact,
    /// `text` without its trailing `**`.
    Prefix(String),
    /// `text` without its leading `**`.
    Suffix(String),
    Tokens(Vec<Token>),
}

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Char(char),
    /// One character but `/`.
    Any,
    /// Any number of characters but `/`.
    Star,
    /// `**/`: nothing, or anything that ends with `/`. Always followed by `DeepRest`.
    Deep,
    DeepRest,
    /// A trailing `**`.
    All,
    Class {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
    /// `^` isn't escaped in moby's regular expression, so it anchors.
    Start,
}

/// Which patterns matched a directory, for its children.
pub type Matches = Vec<bool>;

/// Why a list of patterns cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PatternProblem {
    /// The build refuses it.
    Refused { index: usize, message: String },
    /// Moby turns it into a regular expression with a meaning of its own.
    Unclear { index: usize, message: String },
}

impl IgnorePatterns {
    /// Compiles patterns, `!` in front of the exceptions.
    ///
    /// # Errors
    /// The first pattern that a build refuses, or that isn't understood here.
    pub fn new<S: AsRef<str>>(patterns: &[S]) -> Result<Self, PatternProblem> {
        let mut compiled = Self::default();
        for (index, pattern) in patterns.iter().enumerate() {
            let trimmed = pattern.as_ref().trim();
            if trimmed.is_empty() {
                continue;
            }
            let cleaned = paths::clean(trimmed);
            let (exception, text) = match cleaned.strip_prefix('!') {
                Some("") => {
                    let message = "a lone `!` re-includes nothing".to_owned();
                    return Err(PatternProblem::Refused { index, message });
                }
                Some(rest) => (true, rest.to_owned()),
                None => (false, cleaned),
            };
            if match_path(&text, ".").is_err() {
                let message = format!("pattern {text:?} is malformed");
                return Err(PatternProblem::Refused { index, message });
            }
            compiled.has_exceptions |= exception;
            let Some(matcher) = compile(&text) else {
                let message =
                    format!("pattern {text:?} has a meaning of its own in Docker's matcher");
                return Err(PatternProblem::Unclear { index, message });
            };
            compiled.patterns.push(Pattern {
                exception,
                text,
                matcher,
            });
        }
        Ok(compiled)
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Bytes of all patterns.
    #[must_use]
    pub fn size(&self) -> usize {
        self.patterns.iter().map(|pattern| pattern.text.len()).sum()
    }

    #[must_use]
    pub fn has_exceptions(&self) -> bool {
        self.has_exceptions
    }

    /// Whether `path` (relative, no leading `/`) is matched, by itself or through a parent.
    #[must_use]
    pub fn matches(&self, path: &str) -> bool {
        let mut parent = None;
        let mut matched = false;
        let ends = path
            .match_indices('/')
            .map(|(at, _)| at)
            .chain([path.len()]);
        for end in ends {
            let (result, matches) = self.matches_below(&path[..end], parent.as_ref());
            matched = result;
            parent = Some(matches);
        }
        matched
    }

    /// Whether `path` is matched, given what matched its parent directory; and what matched it, for its children.
    #[must_use]
    pub fn matches_below(&self, path: &str, parent: Option<&Matches>) -> (bool, Matches) {
        let mut matched = false;
        let mut matches = vec![false; self.patterns.len()];
        for (index, pattern) in self.patterns.iter().enumerate() {
            let mut hit = parent.is_some_and(|parent| parent.get(index) == Some(&true));
            if !hit {
                if pattern.exception != matched {
                    continue;
                }
                hit = pattern.matches(path);
            }
            matches[index] = hit;
            if hit {
                matched = !pattern.exception;
            }
        }
        (matched, matches)
    }
}

impl Pattern {
    fn matches(&self, path: &str) -> bool {
        match &self.matcher {
            Matcher::Exact => path == self.text,
            Matcher::Prefix(prefix) => path.starts_with(prefix.as_str()),
            Matcher::Suffix(suffix) => {
                path.ends_with(suffix.as_str())
                    || suffix.strip_prefix('/').is_some_and(|rest| rest == path)
            }
            Matcher::Tokens(tokens) => tokens_match(tokens, path),
        }
    }
}

/// None if moby's regular expression means something else than the pattern.
fn compile(pattern: &str) -> Option<Matcher> {
    #[derive(PartialEq)]
    enum Kind {
        Exact,
        Prefix,
        Suffix,
        Tokens,
    }
    let mut kind = Kind::Exact;
    let mut tokens = Vec::new();
    let mut chars = pattern.chars().peekable();
    let mut first = true;
    while let Some(ch) = chars.next() {
        match ch {
            '*' if chars.peek() == Some(&'*') => {
                chars.next();
                if chars.peek() == Some(&'/') {
                    chars.next();
                }
                if chars.peek().is_none() {
                    if kind == Kind::Exact {
                        kind = Kind::Prefix;
                    } else {
                        tokens.push(Token::All);
                        kind = Kind::Tokens;
                    }
                } else {
                    tokens.extend([Token::Deep, Token::DeepRest]);
                    kind = Kind::Tokens;
                }
                if first {
                    kind = Kind::Suffix;
                }
            }
            '*' => {
                tokens.push(Token::Star);
                kind = Kind::Tokens;
            }
            '?' => {
                tokens.push(Token::Any);
                kind = Kind::Tokens;
            }
            '\\' => {
                let escaped = chars.next()?;
                if escaped.is_ascii_alphanumeric() || !escaped.is_ascii() {
                    return None;
                }
                tokens.push(Token::Char(escaped));
                kind = Kind::Tokens;
            }
            '[' => {
                let negated = chars.next_if_eq(&'^').is_some();
                let mut ranges = Vec::new();
                loop {
                    let low = chars.next()?;
                    if low == ']' && !ranges.is_empty() {
                        break;
                    }
                    let mut high = low;
                    if chars.next_if_eq(&'-').is_some() {
                        high = chars.next()?;
                    }
                    if [low, high].iter().any(|ch| "*?\\[]^&~".contains(*ch)) || high < low {
                        return None;
                    }
                    ranges.push((low, high));
                }
                tokens.push(Token::Class { negated, ranges });
                kind = Kind::Tokens;
            }
            ']' => {
                tokens.push(Token::Char(']'));
                kind = Kind::Tokens;
            }
            '^' => tokens.push(Token::Start),
            ch => tokens.push(Token::Char(ch)),
        }
        first = false;
    }
    Some(match kind {
        Kind::Exact => Matcher::Exact,
        // As moby cuts it: `a**/` cannot occur in a cleaned pattern.
        Kind::Prefix => Matcher::Prefix(pattern.get(..pattern.len().saturating_sub(2))?.to_owned()),
        Kind::Suffix => Matcher::Suffix(pattern.get(2..)?.to_owned()),
        Kind::Tokens => Matcher::Tokens(tokens),
    })
}

fn tokens_match(tokens: &[Token], path: &str) -> bool {
    let count = tokens.len();
    let mut states = vec![false; count + 1];
    let mut next = vec![false; count + 1];
    states[0] = true;
    let mut at_start = true;
    for ch in path.chars().map(Some).chain([None]) {
        for index in 0..count {
            if !states[index] {
                continue;
            }
            match tokens[index] {
                Token::Star | Token::All => states[index + 1] = true,
                Token::Deep => {
                    states[index + 1] = true;
                    states[index + 2] = true;
                }
                Token::Start if at_start => states[index + 1] = true,
                _ => {}
            }
        }
        let Some(ch) = ch else { break };
        next.fill(false);
        let mut alive = false;
        for index in 0..count {
            if !states[index] {
                continue;
            }
            let (stay, go) = match &tokens[index] {
                Token::Char(expected) => (false, ch == *expected),
                Token::Any => (false, ch != '/'),
                Token::Star => (ch != '/', false),
                Token::DeepRest => (ch != '\n', ch == '/'),
                Token::All => (ch != '\n', false),
                Token::Class { negated, ranges } => (
                    false,
                    ranges.iter().any(|(low, high)| *low <= ch && ch <= *high) != *negated,
                ),
                Token::Deep | Token::Start => (false, false),
            };
            next[index] |= stay;
            next[index + 1] |= go;
            alive |= stay | go;
        }
        std::mem::swap(&mut states, &mut next);
        if !alive {
            return false;
        }
        at_start = false;
    }
    states[count]
}
