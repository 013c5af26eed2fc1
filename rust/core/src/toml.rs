//! A TOML parser that gives the verdict of Python's `tomllib`, because that is what Harbor reads a task with.
//!
//! Written from the TOML specification and held to `tomllib` by differential tests. Tables live in an arena, so that a
//! key of a million parts costs neither stack nor quadratic time. Where `tomllib`'s own limits decide (recursion, digits of an
//! integer), the answer is [`ErrorKind::Limit`]: only the interpreter at hand knows.

use std::borrow::Cow;
use std::collections::HashMap;

/// Which TOML `tomllib` reads: 1.0 up to Python 3.14, 1.1 from Python 3.15 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    V1_0,
    V1_1,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Not TOML.
    Refused,
    /// Beyond what every `tomllib` accepts; some do.
    Limit,
}

/// Why a document is refused, and where: line and column count from 1, columns in characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub kind: ErrorKind,
    pub message: &'static str,
    pub line: usize,
    pub column: usize,
}

/// Deeper arrays and inline tables are left to `tomllib`: it gives up between 300 and 500.
const MAX_NESTING: usize = 128;
/// Longer keys are left to `tomllib`: newer ones cap the number of parts.
const MAX_KEY_PARTS: usize = 128;
/// Longer integers are left to `tomllib`: 640 digits is the least that `sys.set_int_max_str_digits` can be set to.
const MAX_DIGITS: usize = 600;
/// Up to this many entries a table is searched one by one.
const LINEAR_TABLE: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Date {
    pub year: u16,
    pub month: u8,
    pub day: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time {
    pub hour: u8,
    pub minute: u8,
    pub second: u8,
    pub microsecond: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableId(usize);

#[derive(Clone, Debug)]
pub enum Value<'a> {
    Bool(bool),
    Int(i64),
    /// An integer beyond 64 bits, in decimal.
    BigInt(String),
    Float(f64),
    Str(Cow<'a, str>),
    Date(Date),
    Time(Time),
    LocalDateTime(Date, Time),
    /// With the offset from UTC in minutes.
    DateTime(Date, Time, i16),
    Array(Vec<Value<'a>>),
    /// An array of tables that headers in double brackets may extend.
    Tables(Vec<TableId>),
    Table(TableId),
}

#[derive(Debug)]
pub struct Entry<'a> {
    pub key: Cow<'a, str>,
    pub value: Value<'a>,
    /// Byte offset of the key, or of the header that opened it.
    pub start: usize,
    /// Byte offset just behind the key's value or header.
    pub offset: usize,
    /// Opened by a header, or by a dotted key of an earlier section: no header may open it again, no dotted key extend it.
    explicit: bool,
    /// An array or inline table: nothing below may change.
    frozen: bool,
}

#[derive(Debug, Default)]
pub struct Table<'a> {
    entries: Vec<Entry<'a>>,
    /// Of a large table only: a map costs more than it saves in a small one.
    by_key: Option<HashMap<Cow<'a, str>, usize>>,
}

impl<'a> Table<'a> {
    fn find(&self, key: &str) -> Option<usize> {
        match &self.by_key {
            None => self.entries.iter().position(|entry| entry.key == key),
            Some(by_key) => by_key.get(key).copied(),
        }
    }

    fn push(&mut self, entry: Entry<'a>) -> usize {
        let index = self.entries.len();
        if index == 0 {
            self.entries.reserve(8);
        }
        if index == LINEAR_TABLE {
            let keys = self.entries.iter().map(|entry| entry.key.clone());
            self.by_key = Some(keys.zip(0..).collect());
        }
        if let Some(by_key) = &mut self.by_key {
            by_key.insert(entry.key.clone(), index);
        }
        self.entries.push(entry);
        index
    }

    pub fn entries(&self) -> &[Entry<'a>] {
        &self.entries
    }

    pub fn get(&self, key: &str) -> Option<&Entry<'a>> {
        self.find(key).map(|index| &self.entries[index])
    }
}

/// A parsed document: the arena of its tables.
#[derive(Debug)]
pub struct Document<'a> {
    tables: Vec<Table<'a>>,
}

impl<'a> Document<'a> {
    /// Parses text whose line ends are `\n` already, see [`normalize_newlines`].
    pub fn parse(text: &'a str, version: Version) -> Result<Self, Error> {
        let mut parser = Parser {
            text,
            bytes: text.as_bytes(),
            pos: 0,
            start: 0,
            version,
            nesting: 0,
            tables: Vec::with_capacity(8),
            opened: Vec::new(),
        };
        parser.tables.push(Table::default());
        match parser.document() {
            Ok(()) => Ok(Document {
                tables: parser.tables,
            }),
            Err(failure) => {
                let (line, column) = position(text, failure.pos);
                Err(Error {
                    kind: failure.kind,
                    message: failure.message,
                    line,
                    column,
                })
            }
        }
    }

    pub fn root(&self) -> &Table<'a> {
        &self.tables[ROOT.0]
    }

    pub fn table(&self, id: TableId) -> &Table<'a> {
        &self.tables[id.0]
    }
}

const ROOT: TableId = TableId(0);

/// Line and column, from 1, of a byte offset.
pub fn position(text: &str, offset: usize) -> (usize, usize) {
    let mut end = offset.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let before = &text[..end];
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (
        before.bytes().filter(|&b| b == b'\n').count() + 1,
        before[line_start..].chars().count() + 1,
    )
}

/// What `Path.read_text` does: `\r\n` and a lone `\r` become `\n`.
pub fn normalize_newlines(text: &str) -> Cow<'_, str> {
    if text.as_bytes().contains(&b'\r') {
        Cow::Owned(text.replace("\r\n", "\n").replace('\r', "\n"))
    } else {
        Cow::Borrowed(text)
    }
}

struct Failure {
    kind: ErrorKind,
    message: &'static str,
    pos: usize,
}

/// Boxed, so that the results of the happy path stay small enough for registers.
type Parsed<T> = Result<T, Box<Failure>>;

struct Parser<'a> {
    text: &'a str,
    bytes: &'a [u8],
    pos: usize,
    /// Where the key or header began whose tables and values are being added.
    start: usize,
    version: Version,
    nesting: usize,
    tables: Vec<Table<'a>>,
    /// Tables that dotted keys opened or entered in this section: explicit from the next header on.
    opened: Vec<(TableId, usize)>,
}

impl<'a> Parser<'a> {
    fn fail<T>(&self, message: &'static str) -> Parsed<T> {
        Err(Box::new(Failure {
            kind: ErrorKind::Refused,
            message,
            pos: self.pos,
        }))
    }

    fn limit<T>(&self, message: &'static str) -> Parsed<T> {
        Err(Box::new(Failure {
            kind: ErrorKind::Limit,
            message,
            pos: self.pos,
        }))
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.pos).copied()
    }

    fn rest(&self) -> &'a [u8] {
        &self.bytes[self.pos.min(self.bytes.len())..]
    }

    fn eat(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.pos += usize::from(found);
        found
    }

    fn skip_while(&mut self, wanted: impl Fn(u8) -> bool) -> usize {
        let rest = self.rest();
        let length = rest.iter().position(|&b| !wanted(b)).unwrap_or(rest.len());
        self.pos += length;
        length
    }

    fn skip_blank(&mut self) {
        self.skip_while(is_blank);
    }

    fn skip_comment(&mut self) -> Parsed<()> {
        if self.peek() == Some(b'#') {
            self.pos += 1;
            self.skip_while(|b| b == b'\t' || !b.is_ascii_control());
            if self.peek().is_some_and(|b| b != b'\n') {
                return self.fail("control character in a comment");
            }
        }
        Ok(())
    }

    fn skip_blank_lines_and_comments(&mut self) -> Parsed<()> {
        loop {
            self.skip_while(|b| is_blank(b) || b == b'\n');
            if self.peek() != Some(b'#') {
                return Ok(());
            }
            self.skip_comment()?;
        }
    }

    fn document(&mut self) -> Parsed<()> {
        let mut section = ROOT;
        loop {
            self.skip_blank();
            match self.peek() {
                None => return Ok(()),
                Some(b'\n' | b'#') => {}
                Some(b'[') => section = self.header()?,
                Some(b) if is_bare(b) || b == b'"' || b == b'\'' => self.statement(section)?,
                Some(_) => return self.fail("neither a key, a table header nor a comment"),
            }
            self.skip_blank();
            self.skip_comment()?;
            if self.peek().is_some() && !self.eat(b'\n') {
                return self.fail("expected the end of the line");
            }
        }
    }

    fn new_table(&mut self) -> TableId {
        self.tables.push(Table::default());
        TableId(self.tables.len() - 1)
    }

    fn add(&mut self, table: TableId, key: Cow<'a, str>, value: Value<'a>) -> usize {
        let frozen = matches!(value, Value::Array(_) | Value::Table(_));
        let entry = Entry {
            key,
            value,
            start: self.start,
            offset: self.pos,
            explicit: false,
            frozen,
        };
        self.tables[table.0].push(entry)
    }

    /// The table below an entry; of an array of tables the last.
    fn enter(&self, table: TableId, index: usize) -> Parsed<TableId> {
        let entry = &self.tables[table.0].entries[index];
        match &entry.value {
            _ if entry.frozen => self.fail("an array or inline table cannot be extended"),
            Value::Table(id) => Ok(*id),
            Value::Tables(ids) => ids
                .last()
                .map_or_else(|| self.fail("empty array of tables"), |id| Ok(*id)),
            _ => self.fail("a value is in the way of this table"),
        }
    }

    fn add_open_table(&mut self, table: TableId, key: Cow<'a, str>) -> (usize, TableId) {
        let id = self.new_table();
        let index = self.add(table, key, Value::Table(id));
        self.tables[table.0].entries[index].frozen = false;
        (index, id)
    }

    fn header(&mut self) -> Parsed<TableId> {
        for (table, index) in std::mem::take(&mut self.opened) {
            self.tables[table.0].entries[index].explicit = true;
        }
        self.start = self.pos;
        self.pos += 1;
        let is_array = self.eat(b'[');
        self.skip_blank();
        let mut parents = Vec::new();
        let last = self.key(&mut parents)?;

        let mut table = ROOT;
        for part in parents {
            table = match self.tables[table.0].find(&part) {
                Some(index) => self.enter(table, index)?,
                None => self.add_open_table(table, part).1,
            };
        }
        let found = self.tables[table.0].find(&last);
        let (index, id) = match (found, is_array) {
            (None, false) => self.add_open_table(table, last),
            (None, true) => {
                let id = self.new_table();
                (self.add(table, last, Value::Tables(vec![id])), id)
            }
            (Some(index), false) => {
                if self.tables[table.0].entries[index].explicit {
                    return self.fail("a table cannot be declared twice");
                }
                (index, self.enter(table, index)?)
            }
            (Some(index), true) => {
                let id = self.new_table();
                match &mut self.tables[table.0].entries[index].value {
                    Value::Tables(ids) => ids.push(id),
                    _ => {
                        return self.fail("this key holds something other than an array of tables");
                    }
                }
                (index, id)
            }
        };
        self.tables[table.0].entries[index].explicit = true;
        if self.eat(b']') && (!is_array || self.eat(b']')) {
            Ok(id)
        } else {
            self.fail("unclosed table header")
        }
    }

    fn statement(&mut self, section: TableId) -> Parsed<()> {
        let start = self.pos;
        let mut parents = Vec::new();
        let (last, value) = self.pair(&mut parents)?;
        self.start = start;
        let mut table = section;
        for part in parents {
            let (index, next) = match self.tables[table.0].find(&part) {
                Some(index) if self.tables[table.0].entries[index].explicit => {
                    return self.fail("a dotted key cannot extend a table declared elsewhere");
                }
                Some(index) => (index, self.enter(table, index)?),
                None => self.add_open_table(table, part),
            };
            self.opened.push((table, index));
            table = next;
        }
        if self.tables[table.0].find(&last).is_some() {
            return self.fail("this key has a value already");
        }
        self.add(table, last, value);
        Ok(())
    }

    fn pair(&mut self, parents: &mut Vec<Cow<'a, str>>) -> Parsed<(Cow<'a, str>, Value<'a>)> {
        let key = self.key(parents)?;
        if !self.eat(b'=') {
            return self.fail("expected '=' after the key");
        }
        self.skip_blank();
        Ok((key, self.value()?))
    }

    /// The last part of a key; those before it, which most keys lack, go into `parents`.
    fn key(&mut self, parents: &mut Vec<Cow<'a, str>>) -> Parsed<Cow<'a, str>> {
        let mut last = self.key_part()?;
        loop {
            self.skip_blank();
            if !self.eat(b'.') {
                return Ok(last);
            }
            self.skip_blank();
            parents.push(std::mem::replace(&mut last, self.key_part()?));
            if parents.len() == MAX_KEY_PARTS {
                return self.limit("key of very many parts");
            }
        }
    }

    fn key_part(&mut self) -> Parsed<Cow<'a, str>> {
        match self.peek() {
            Some(b'"') => {
                self.pos += 1;
                self.basic_string(false)
            }
            Some(b'\'') => {
                self.pos += 1;
                self.literal_string()
            }
            _ => {
                let start = self.pos;
                if self.skip_while(is_bare) == 0 {
                    return self.fail("expected a key");
                }
                Ok(Cow::Borrowed(&self.text[start..self.pos]))
            }
        }
    }

    fn value(&mut self) -> Parsed<Value<'a>> {
        let rest = self.rest();
        match rest.first() {
            Some(b'"') if rest.starts_with(b"\"\"\"") => {
                self.multiline_string(b'"').map(Value::Str)
            }
            Some(b'"') => {
                self.pos += 1;
                self.basic_string(false).map(Value::Str)
            }
            Some(b'\'') if rest.starts_with(b"'''") => self.multiline_string(b'\'').map(Value::Str),
            Some(b'\'') => {
                self.pos += 1;
                self.literal_string().map(Value::Str)
            }
            Some(b'[' | b'{') => {
                if self.nesting == MAX_NESTING {
                    return self.limit("nested very deeply");
                }
                self.nesting += 1;
                self.pos += 1;
                let value = if rest[0] == b'[' {
                    self.array()
                } else {
                    self.inline_table()
                }?;
                self.nesting -= 1;
                Ok(value)
            }
            Some(b't') if rest.starts_with(b"true") => self.word(4, Value::Bool(true)),
            Some(b'f') if rest.starts_with(b"false") => self.word(5, Value::Bool(false)),
            Some(b'0'..=b'9' | b'+' | b'-' | b'i' | b'n') => {
                if let Some(value) = self.date_or_time()? {
                    return Ok(value);
                }
                self.number()
            }
            _ => self.fail("expected a value"),
        }
    }

    fn word(&mut self, length: usize, value: Value<'a>) -> Parsed<Value<'a>> {
        self.pos += length;
        Ok(value)
    }

    fn array(&mut self) -> Parsed<Value<'a>> {
        let mut items = Vec::new();
        loop {
            self.skip_blank_lines_and_comments()?;
            if self.eat(b']') {
                return Ok(Value::Array(items));
            }
            items.push(self.value()?);
            self.skip_blank_lines_and_comments()?;
            if self.eat(b']') {
                return Ok(Value::Array(items));
            }
            if !self.eat(b',') {
                return self.fail("unclosed array");
            }
        }
    }

    fn skip_in_inline_table(&mut self) -> Parsed<()> {
        match self.version {
            Version::V1_0 => {
                self.skip_blank();
                Ok(())
            }
            Version::V1_1 => self.skip_blank_lines_and_comments(),
        }
    }

    fn inline_table(&mut self) -> Parsed<Value<'a>> {
        let root = self.new_table();
        self.skip_in_inline_table()?;
        if self.eat(b'}') {
            return Ok(Value::Table(root));
        }
        loop {
            let start = self.pos;
            let mut parents = Vec::new();
            let (last, value) = self.pair(&mut parents)?;
            self.start = start;
            let mut table = root;
            for part in parents {
                table = match self.tables[table.0].find(&part) {
                    Some(index) => self.enter(table, index)?,
                    None => self.add_open_table(table, part).1,
                };
            }
            if self.tables[table.0].find(&last).is_some() {
                return self.fail("this key has a value already");
            }
            self.add(table, last, value);
            self.skip_in_inline_table()?;
            if self.eat(b'}') {
                return Ok(Value::Table(root));
            }
            if !self.eat(b',') {
                return self.fail("unclosed inline table");
            }
            self.skip_in_inline_table()?;
            if self.version == Version::V1_1 && self.eat(b'}') {
                return Ok(Value::Table(root));
            }
        }
    }

    fn literal_string(&mut self) -> Parsed<Cow<'a, str>> {
        let start = self.pos;
        self.skip_while(|b| b != b'\'' && (b == b'\t' || !b.is_ascii_control()));
        let text = &self.text[start..self.pos];
        if self.eat(b'\'') {
            Ok(Cow::Borrowed(text))
        } else {
            self.fail("unclosed string, or control character in it")
        }
    }

    fn multiline_string(&mut self, quote: u8) -> Parsed<Cow<'a, str>> {
        self.pos += 3;
        self.eat(b'\n');
        let mut text = if quote == b'"' {
            self.basic_string(true)?
        } else {
            let start = self.pos;
            loop {
                self.skip_while(|b| {
                    b != b'\'' && (b == b'\t' || b == b'\n' || !b.is_ascii_control())
                });
                if self.rest().starts_with(b"'''") {
                    break;
                }
                if !self.eat(b'\'') {
                    return self.fail("unclosed string, or control character in it");
                }
            }
            self.pos += 3;
            Cow::Borrowed(&self.text[start..self.pos - 3])
        };
        // Up to two quotes may stand directly before the closing three.
        for _ in 0..2 {
            if self.eat(quote) {
                text.to_mut().push(char::from(quote));
            }
        }
        Ok(text)
    }

    /// Behind the opening quotes.
    fn basic_string(&mut self, multiline: bool) -> Parsed<Cow<'a, str>> {
        let mut text = Cow::Borrowed("");
        loop {
            let start = self.pos;
            self.skip_while(|b| is_plain(b) || (multiline && b == b'\n'));
            let plain = &self.text[start..self.pos];
            if text.is_empty() {
                text = Cow::Borrowed(plain);
            } else {
                text.to_mut().push_str(plain);
            }
            match self.peek() {
                Some(b'"') if !multiline => {
                    self.pos += 1;
                    return Ok(text);
                }
                Some(b'"') if self.rest().starts_with(b"\"\"\"") => {
                    self.pos += 3;
                    return Ok(text);
                }
                Some(b'"') => {
                    self.pos += 1;
                    text.to_mut().push('"');
                }
                Some(b'\\') => {
                    if let Some(c) = self.escape(multiline)? {
                        text.to_mut().push(c);
                    }
                }
                _ => return self.fail("unclosed string, or control character in it"),
            }
        }
    }

    fn escape(&mut self, multiline: bool) -> Parsed<Option<char>> {
        let start = self.pos;
        self.pos += 2;
        let c = match self.bytes.get(start + 1) {
            Some(b'b') => '\u{8}',
            Some(b't') => '\t',
            Some(b'n') => '\n',
            Some(b'f') => '\u{c}',
            Some(b'r') => '\r',
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'u') => return self.hex_char(4),
            Some(b'U') => return self.hex_char(8),
            Some(b'e') if self.version == Version::V1_1 => '\u{1b}',
            Some(b'x') if self.version == Version::V1_1 => return self.hex_char(2),
            Some(b' ' | b'\t' | b'\n') if multiline => {
                self.pos -= 1;
                self.skip_blank();
                if self.peek().is_some_and(|b| b != b'\n') {
                    return self.fail("a backslash before a blank must end the line");
                }
                self.skip_while(|b| is_blank(b) || b == b'\n');
                return Ok(None);
            }
            _ => {
                self.pos = start;
                return self.fail("unknown escape in a string");
            }
        };
        Ok(Some(c))
    }

    fn hex_char(&mut self, digits: usize) -> Parsed<Option<char>> {
        let end = self.pos + digits;
        let code = self
            .bytes
            .get(self.pos..end)
            .filter(|hex| hex.iter().all(u8::is_ascii_hexdigit))
            .and_then(|_| u32::from_str_radix(&self.text[self.pos..end], 16).ok());
        match code.and_then(char::from_u32) {
            Some(c) => {
                self.pos = end;
                Ok(Some(c))
            }
            None => self.fail("not the code of a Unicode character"),
        }
    }

    fn date_or_time(&mut self) -> Parsed<Option<Value<'a>>> {
        let rest = self.rest();
        if let Some((date, length)) = parse_date(rest) {
            if date.day > days_in_month(date.year, date.month) || date.year == 0 {
                return self.fail("no such date");
            }
            self.pos += length;
            if !matches!(rest.get(length), Some(b'T' | b't' | b' ')) {
                return Ok(Some(Value::Date(date)));
            }
            let Some((time, time_length)) = parse_time(&rest[length + 1..], self.version) else {
                return Ok(Some(Value::Date(date)));
            };
            self.pos += 1 + time_length;
            return Ok(Some(match parse_offset(self.rest()) {
                Some((minutes, offset_length)) => {
                    self.pos += offset_length;
                    Value::DateTime(date, time, minutes)
                }
                None => Value::LocalDateTime(date, time),
            }));
        }
        Ok(parse_time(rest, self.version).map(|(time, length)| {
            self.pos += length;
            Value::Time(time)
        }))
    }

    fn number(&mut self) -> Parsed<Value<'a>> {
        let rest = self.rest();
        if rest[0] == b'0' {
            let radix = match rest.get(1) {
                Some(b'x') => 16,
                Some(b'o') => 8,
                Some(b'b') => 2,
                _ => 0,
            };
            let length = if radix == 0 {
                0
            } else {
                digits_length(&rest[2..], |b| char::from(b).is_digit(radix))
            };
            if length > 0 {
                let digits = &self.text[self.pos + 2..self.pos + 2 + length];
                self.pos += 2 + length;
                return self.integer(digits, radix);
            }
        }
        let signed = usize::from(matches!(rest[0], b'+' | b'-'));
        let unsigned = &rest[signed..];
        for (word, value) in [(b"inf", f64::INFINITY), (b"nan", f64::NAN)] {
            if unsigned.starts_with(word) {
                self.pos += signed + 3;
                return Ok(Value::Float(if rest[0] == b'-' { -value } else { value }));
            }
        }
        let is_digit = |b: u8| b.is_ascii_digit();
        let whole = match unsigned.first() {
            Some(b'0') => 1,
            Some(b'1'..=b'9') => digits_length(unsigned, is_digit),
            _ => return self.fail("expected a value"),
        };
        let mut length = signed + whole;
        if rest.get(length) == Some(&b'.') {
            let fraction = digits_length(&rest[length + 1..], is_digit);
            length += if fraction > 0 { 1 + fraction } else { 0 };
        }
        if matches!(rest.get(length), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(rest.get(length + 1), Some(b'+' | b'-')));
            let exponent =
                digits_length(rest.get(length + 1 + sign..).unwrap_or_default(), is_digit);
            length += if exponent > 0 { 1 + sign + exponent } else { 0 };
        }
        let literal = &self.text[self.pos..self.pos + length];
        if length == signed + whole {
            self.pos += length;
            return self.integer(literal, 10);
        }
        let plain = without_underscores(literal);
        match plain.parse() {
            Ok(float) => {
                self.pos += length;
                Ok(Value::Float(float))
            }
            Err(_) => self.fail("expected a value"),
        }
    }

    fn integer(&self, literal: &str, radix: u32) -> Parsed<Value<'a>> {
        let plain = without_underscores(literal);
        if let Ok(int) = i64::from_str_radix(&plain, radix) {
            return Ok(Value::Int(int));
        }
        if plain.len() > MAX_DIGITS {
            return self.limit("integer of very many digits");
        }
        if radix == 10 {
            return Ok(Value::BigInt(plain.trim_start_matches('+').to_owned()));
        }
        Ok(decimal(&plain, radix).map_or(Value::Int(0), Value::BigInt))
    }
}

/// What a byte may be part of: one look-up instead of a chain of comparisons for each byte of a file.
const BARE: u8 = 1;
const PLAIN: u8 = 2;
static CLASSES: [u8; 256] = {
    let mut classes = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let b = byte as u8;
        if b.is_ascii_alphanumeric() || b == b'-' || b == b'_' {
            classes[byte] |= BARE;
        }
        if b == b'\t' || (!b.is_ascii_control() && b != b'"' && b != b'\\') {
            classes[byte] |= PLAIN;
        }
        byte += 1;
    }
    classes
};

fn is_blank(byte: u8) -> bool {
    byte == b' ' || byte == b'\t'
}

fn is_bare(byte: u8) -> bool {
    CLASSES[usize::from(byte)] & BARE != 0
}

/// Stands for itself in a string in double quotes.
fn is_plain(byte: u8) -> bool {
    CLASSES[usize::from(byte)] & PLAIN != 0
}

/// Length of digits with single underscores between them, at the start of `bytes`.
fn digits_length(bytes: &[u8], is_digit: impl Fn(u8) -> bool) -> usize {
    let digit_at = |i: usize| bytes.get(i).is_some_and(|&b| is_digit(b));
    let mut length = 0;
    loop {
        if digit_at(length) {
            length += 1;
        } else if length > 0 && bytes.get(length) == Some(&b'_') && digit_at(length + 1) {
            length += 2;
        } else {
            return length;
        }
    }
}

fn without_underscores(literal: &str) -> Cow<'_, str> {
    if literal.contains('_') {
        Cow::Owned(literal.replace('_', ""))
    } else {
        Cow::Borrowed(literal)
    }
}

/// Decimal form of a hexadecimal, octal or binary number; `None` for zero.
fn decimal(digits: &str, radix: u32) -> Option<String> {
    const BASE: u64 = 1_000_000_000;
    let mut limbs: Vec<u64> = Vec::new();
    for digit in digits.chars().filter_map(|c| c.to_digit(radix)) {
        let mut carry = u64::from(digit);
        for limb in &mut limbs {
            let sum = *limb * u64::from(radix) + carry;
            *limb = sum % BASE;
            carry = sum / BASE;
        }
        if carry > 0 {
            limbs.push(carry);
        }
    }
    let mut text = limbs.pop()?.to_string();
    for limb in limbs.iter().rev() {
        text.push_str(&format!("{limb:09}"));
    }
    Some(text)
}

fn number_at(
    bytes: &[u8],
    at: usize,
    length: usize,
    range: std::ops::RangeInclusive<u32>,
) -> Option<u32> {
    let digits = bytes.get(at..at + length)?;
    let mut number = 0;
    for digit in digits {
        number = number * 10 + char::from(*digit).to_digit(10)?;
    }
    range.contains(&number).then_some(number)
}

fn byte_at(bytes: &[u8], at: usize, byte: u8) -> Option<()> {
    (bytes.get(at) == Some(&byte)).then_some(())
}

fn parse_date(bytes: &[u8]) -> Option<(Date, usize)> {
    byte_at(bytes, 4, b'-')?;
    byte_at(bytes, 7, b'-')?;
    let year = number_at(bytes, 0, 4, 0..=9999)?;
    let month = number_at(bytes, 5, 2, 1..=12)?;
    let day = number_at(bytes, 8, 2, 1..=31)?;
    Some((
        Date {
            year: year as u16,
            month: month as u8,
            day: day as u8,
        },
        10,
    ))
}

fn parse_time(bytes: &[u8], version: Version) -> Option<(Time, usize)> {
    byte_at(bytes, 2, b':')?;
    let hour = number_at(bytes, 0, 2, 0..=23)? as u8;
    let minute = number_at(bytes, 3, 2, 0..=59)? as u8;
    let second = byte_at(bytes, 5, b':').and_then(|()| number_at(bytes, 6, 2, 0..=59));
    let Some(second) = second else {
        return (version == Version::V1_1).then_some((
            Time {
                hour,
                minute,
                second: 0,
                microsecond: 0,
            },
            5,
        ));
    };
    let mut time = Time {
        hour,
        minute,
        second: second as u8,
        microsecond: 0,
    };
    let fraction = bytes.get(9..).unwrap_or_default();
    let length = fraction.iter().take_while(|b| b.is_ascii_digit()).count();
    if byte_at(bytes, 8, b'.').is_none() || length == 0 {
        return Some((time, 8));
    }
    let digits = fraction[..length]
        .iter()
        .map(|digit| u32::from(digit - b'0'));
    for digit in digits.chain(std::iter::repeat(0)).take(6) {
        time.microsecond = time.microsecond * 10 + digit;
    }
    Some((time, 9 + length))
}

fn parse_offset(bytes: &[u8]) -> Option<(i16, usize)> {
    let sign = match bytes.first()? {
        b'Z' | b'z' => return Some((0, 1)),
        b'+' => 1,
        b'-' => -1,
        _ => return None,
    };
    byte_at(bytes, 3, b':')?;
    let hours = number_at(bytes, 1, 2, 0..=23)? as i16;
    let minutes = number_at(bytes, 4, 2, 0..=59)? as i16;
    Some((sign * (hours * 60 + minutes), 6))
}

pub(crate) fn days_in_month(year: u16, month: u8) -> u8 {
    match month {
        2 if year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400)) => {
            29
        }
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}
