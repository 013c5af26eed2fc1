//! The JSON array form of arguments, as Go's `encoding/json` reads it.

pub enum JsonArray {
    Strings(Vec<String>),
    /// Valid JSON, but with an element that is no string: the build refuses it.
    OtherElements,
    /// No JSON array: the arguments are in shell form.
    Invalid,
}

/// Nesting that Go's decoder gives up on.
const MAX_DEPTH: usize = 10_000;

pub fn parse_array(text: &str) -> JsonArray {
    let mut reader = Reader {
        bytes: text.as_bytes(),
        text,
        at: 0,
    };
    match reader.array() {
        Some(result) => result,
        None => JsonArray::Invalid,
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
    }

    fn eat(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.at += 1)
    }

    fn array(&mut self) -> Option<JsonArray> {
        self.space();
        self.eat(b'[')?;
        self.space();
        let mut strings = Vec::new();
        let mut only_strings = true;
        if self.peek()? == b']' {
            self.at += 1;
        } else {
            loop {
                self.space();
                if self.peek()? == b'"' {
                    strings.push(self.string()?);
                } else {
                    only_strings = false;
                    self.value(1)?;
                }
                self.space();
                match self.peek()? {
                    b',' => self.at += 1,
                    b']' => {
                        self.at += 1;
                        break;
                    }
                    _ => return None,
                }
            }
        }
        self.space();
        if self.at != self.bytes.len() {
            return None;
        }
        Some(if only_strings {
            JsonArray::Strings(strings)
        } else {
            JsonArray::OtherElements
        })
    }

    /// Checks any value. Open brackets live in a vector, so that depth costs no stack.
    fn value(&mut self, outer: usize) -> Option<()> {
        let mut open: Vec<u8> = Vec::new();
        loop {
            self.space();
            match self.peek()? {
                b'[' => {
                    self.at += 1;
                    self.space();
                    if self.peek()? == b']' {
                        self.at += 1;
                    } else {
                        open.push(b'[');
                        if open.len() + outer > MAX_DEPTH {
                            return None;
                        }
                        continue;
                    }
                }
                b'{' => {
                    self.at += 1;
                    self.space();
                    if self.peek()? == b'}' {
                        self.at += 1;
                    } else {
                        open.push(b'{');
                        if open.len() + outer > MAX_DEPTH {
                            return None;
                        }
                        self.key()?;
                        continue;
                    }
                }
                b'"' => {
                    self.string()?;
                }
                b't' => self.word("true")?,
                b'f' => self.word("false")?,
                b'n' => self.word("null")?,
                _ => self.number()?,
            }
            loop {
                let Some(&bracket) = open.last() else {
                    return Some(());
                };
                self.space();
                match (self.peek()?, bracket) {
                    (b',', _) => {
                        self.at += 1;
                        if bracket == b'{' {
                            self.space();
                            self.key()?;
                        }
                        break;
                    }
                    (b']', b'[') | (b'}', b'{') => {
                        self.at += 1;
                        open.pop();
                    }
                    _ => return None,
                }
            }
        }
    }

    fn key(&mut self) -> Option<()> {
        self.string()?;
        self.space();
        self.eat(b':')
    }

    fn word(&mut self, word: &str) -> Option<()> {
        self.bytes[self.at..]
            .starts_with(word.as_bytes())
            .then(|| self.at += word.len())
    }

    fn digits(&mut self) -> Option<()> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        (self.at > start).then_some(())
    }

    fn number(&mut self) -> Option<()> {
        if self.peek()? == b'-' {
            self.at += 1;
        }
        if self.peek()? == b'0' {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Some(())
    }

    fn hex(&mut self) -> Option<u32> {
        let digits = self.text.get(self.at..self.at + 4)?;
        if !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        self.at += 4;
        u32::from_str_radix(digits, 16).ok()
    }

    fn string(&mut self) -> Option<String> {
        self.eat(b'"')?;
        let mut out = String::new();
        loop {
            let rest = self.text.get(self.at..)?;
            let ch = rest.chars().next()?;
            self.at += ch.len_utf8();
            match ch {
                '"' => return Some(out),
                '\0'..='\x1f' => return None,
                '\\' => {
                    let escape = self.peek()?;
                    self.at += 1;
                    out.push(match escape {
                        b'"' => '"',
                        b'\\' => '\\',
                        b'/' => '/',
                        b'b' => '\u{8}',
                        b'f' => '\u{c}',
                        b'n' => '\n',
                        b'r' => '\r',
                        b't' => '\t',
                        b'u' => self.unicode_escape()?,
                        _ => return None,
                    });
                }
                _ => out.push(ch),
            }
        }
    }

    /// A lone surrogate becomes U+FFFD, as in Go.
    fn unicode_escape(&mut self) -> Option<char> {
        let first = self.hex()?;
        if (0xd800..0xdc00).contains(&first) && self.bytes[self.at..].starts_with(b"\\u") {
            let mark = self.at;
            self.at += 2;
            let second = self.hex()?;
            if (0xdc00..0xe000).contains(&second) {
                return char::from_u32(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00));
            }
            self.at = mark;
        }
        Some(char::from_u32(first).unwrap_or('\u{fffd}'))
    }
}
