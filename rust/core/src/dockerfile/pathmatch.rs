//! Go's `filepath.Match`.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadPattern;

/// Whether `name` as a whole matches `pattern`: `*` and `?` stop at `/`, `[a-z]`, `[^a-z]`, `\` escapes.
///
/// # Errors
/// A malformed pattern, whether or not the name got that far.
pub fn match_path(pattern: &str, name: &str) -> Result<bool, BadPattern> {
    let mut pattern = pattern;
    let mut name = name;
    while !pattern.is_empty() {
        let (star, chunk, rest) = scan_chunk(pattern);
        pattern = rest;
        if star && chunk.is_empty() {
            return Ok(!name.contains('/'));
        }
        if let Some(rest) = match_chunk(chunk, name)?
            && (rest.is_empty() || !pattern.is_empty())
        {
            name = rest;
            continue;
        }
        let mut advanced = None;
        if star {
            for (at, ch) in name.char_indices() {
                if ch == '/' {
                    break;
                }
                let after = &name[at + ch.len_utf8()..];
                if let Some(rest) = match_chunk(chunk, after)? {
                    if pattern.is_empty() && !rest.is_empty() {
                        continue;
                    }
                    advanced = Some(rest);
                    break;
                }
            }
        }
        match advanced {
            Some(rest) => name = rest,
            None => {
                check(pattern)?;
                return Ok(false);
            }
        }
    }
    Ok(name.is_empty())
}

/// A mismatch doesn't hide that the rest of the pattern is malformed.
fn check(mut pattern: &str) -> Result<(), BadPattern> {
    while !pattern.is_empty() {
        let (_, chunk, rest) = scan_chunk(pattern);
        match_chunk(chunk, "")?;
        pattern = rest;
    }
    Ok(())
}

/// Leading stars, then what stands before the next star.
fn scan_chunk(pattern: &str) -> (bool, &str, &str) {
    let trimmed = pattern.trim_start_matches('*');
    let star = trimmed.len() < pattern.len();
    let mut in_range = false;
    let mut escaped = false;
    for (at, byte) in trimmed.bytes().enumerate() {
        if escaped {
            escaped = false;
            continue;
        }
        match byte {
            b'\\' => escaped = true,
            b'[' => in_range = true,
            b']' => in_range = false,
            b'*' if !in_range => return (star, &trimmed[..at], &trimmed[at..]),
            _ => {}
        }
    }
    (star, trimmed, "")
}

/// The rest of `name` behind `chunk`, which holds no star.
fn match_chunk<'a>(mut chunk: &str, name: &'a str) -> Result<Option<&'a str>, BadPattern> {
    let mut name = name;
    let mut failed = false;
    while let Some(first) = chunk.chars().next() {
        if !failed && name.is_empty() {
            failed = true;
        }
        match first {
            '[' => {
                let mut current = '\0';
                if !failed {
                    current = name.chars().next().unwrap_or('\0');
                    name = &name[current.len_utf8()..];
                }
                chunk = &chunk[1..];
                let negated = chunk.starts_with('^');
                if negated {
                    chunk = &chunk[1..];
                }
                let mut matched = false;
                let mut ranges = 0;
                loop {
                    if ranges > 0 && chunk.starts_with(']') {
                        chunk = &chunk[1..];
                        break;
                    }
                    let (low, rest) = class_char(chunk)?;
                    let mut high = low;
                    chunk = rest;
                    if let Some(rest) = chunk.strip_prefix('-') {
                        (high, chunk) = class_char(rest)?;
                    }
                    matched |= low <= current && current <= high;
                    ranges += 1;
                }
                failed |= matched == negated;
            }
            '?' => {
                if !failed {
                    let current = name.chars().next().unwrap_or('\0');
                    failed |= current == '/';
                    name = &name[current.len_utf8()..];
                }
                chunk = &chunk[1..];
            }
            mut literal => {
                if literal == '\\' {
                    chunk = &chunk[1..];
                    literal = chunk.chars().next().ok_or(BadPattern)?;
                }
                if !failed {
                    let current = name.chars().next().unwrap_or('\0');
                    failed |= current != literal;
                    name = &name[current.len_utf8()..];
                }
                chunk = &chunk[literal.len_utf8()..];
            }
        }
    }
    Ok((!failed).then_some(name))
}

fn class_char(chunk: &str) -> Result<(char, &str), BadPattern> {
    let mut chars = chunk.chars();
    let mut ch = chars
        .next()
        .filter(|ch| !matches!(ch, '-' | ']'))
        .ok_or(BadPattern)?;
    if ch == '\\' {
        ch = chars.next().ok_or(BadPattern)?;
    }
    if chars.as_str().is_empty() {
        return Err(BadPattern);
    }
    Ok((ch, chars.as_str()))
}

/// Whether the text holds an unescaped wildcard.
pub fn has_wildcard(text: &str) -> bool {
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' => {
                bytes.next();
            }
            b'*' | b'?' | b'[' => return true,
            _ => {}
        }
    }
    false
}
