//! What a suite's index takes from a `task.toml`: the task's name and its `[metadata]`.

use crate::toml::{self, Date, Document, ErrorKind, Time, Version};
use std::collections::HashMap;
use std::fmt::Write;
use std::ops::Range;
use std::sync::Arc;

/// A value of `[metadata]`, as a reader of a [`Store`] gets it.
#[derive(Clone, Copy)]
pub enum Value<'a> {
    Bool(bool),
    Int(i64),
    /// An integer beyond 64 bits, in decimal.
    BigInt(&'a str),
    Float(f64),
    Str(&'a str),
    Date(Date),
    Time(Time),
    LocalDateTime(Date, Time),
    /// With the offset from UTC in minutes.
    DateTime(Date, Time, i16),
    Array(Array<'a>),
    Table(Table<'a>),
}

#[derive(Clone, Copy)]
pub struct Array<'a> {
    store: &'a Store,
    items: &'a [Stored],
}

#[derive(Clone, Copy)]
pub struct Table<'a> {
    store: &'a Store,
    fields: &'a [(u32, Stored)],
}

impl<'a> Array<'a> {
    pub fn iter(self) -> impl ExactSizeIterator<Item = Value<'a>> {
        self.items.iter().map(move |item| self.store.value(item))
    }
}

impl<'a> Table<'a> {
    pub fn iter(self) -> impl ExactSizeIterator<Item = (&'a str, Value<'a>)> {
        let key = move |key: &u32| &*self.store.keys[*key as usize];
        self.fields
            .iter()
            .map(move |(id, value)| (key(id), self.store.value(value)))
    }

    /// The numbers of the keys in the store's [`Store::keys`], beside the values.
    pub fn numbered(self) -> impl ExactSizeIterator<Item = (usize, Value<'a>)> {
        self.fields
            .iter()
            .map(move |(id, value)| (*id as usize, self.store.value(value)))
    }

    pub fn get(self, name: &str) -> Option<Value<'a>> {
        self.iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value)
    }
}

/// A value that did not come from TOML text; see [`Store::add`].
#[derive(Clone, Debug)]
pub enum Given {
    Bool(bool),
    Int(i64),
    BigInt(String),
    Float(f64),
    Str(String),
    Date(Date),
    Time(Time),
    LocalDateTime(Date, Time),
    DateTime(Date, Time, i16),
    Array(Vec<Given>),
    Table(Vec<(String, Given)>),
}

/// What is known of one task; its values lie in the store that made it.
#[derive(Clone, Debug, Default)]
pub struct TaskInfo {
    name: Option<Range<usize>>,
    metadata: Range<usize>,
}

/// What many tasks say, in a few large allocations: ten thousand tasks have a hundred thousand small values, and to
/// allocate and free each costs more than to parse the text.
#[derive(Debug, Default)]
pub struct Store {
    text: String,
    items: Vec<Stored>,
    fields: Vec<(u32, Stored)>,
    keys: Vec<Arc<str>>,
    known: HashMap<Arc<str>, u32>,
    /// Keys of the `[metadata]` before, in its order: a suite repeats a few keys in each task.
    last: Vec<u32>,
}

/// Ranges are of the store's text, items and fields.
#[derive(Clone, Debug)]
enum Stored {
    Bool(bool),
    Int(i64),
    BigInt(Range<usize>),
    Float(f64),
    Str(Range<usize>),
    Date(Date),
    Time(Time),
    LocalDateTime(Date, Time),
    DateTime(Date, Time, i16),
    Array(Range<usize>),
    Table(Range<usize>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// Not TOML, or not UTF-8: `tomllib` and `read_text` have the better message.
    Syntax,
    /// Only `tomllib` itself knows, see [`ErrorKind::Limit`].
    Limit,
    /// The file cannot be read, or is beyond every sensible size.
    Unreadable,
    /// TOML, but not a task: `metadata` is no table.
    Metadata,
    /// The name of a directory on the way is not UTF-8, so that no column can hold it.
    Name,
}

/// Why a task is left out; line and column count from 1, 0 where there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub kind: RefusalKind,
    pub message: String,
    pub line: usize,
    pub column: usize,
}

impl Refusal {
    pub fn new(kind: RefusalKind, message: impl Into<String>) -> Self {
        Refusal {
            kind,
            message: message.into(),
            line: 0,
            column: 0,
        }
    }
}

/// Deeper tables and arrays fit no column and no JSON reader.
pub const MAX_DEPTH: usize = 100;

impl Store {
    /// Each key that some table of the store has.
    pub fn keys(&self) -> &[Arc<str>] {
        &self.keys
    }

    /// `[task] name`, where it is a string.
    pub fn name(&self, info: &TaskInfo) -> Option<&str> {
        Some(&self.text[info.name.clone()?])
    }

    /// `[metadata]`, in the order of the file.
    pub fn metadata(&self, info: &TaskInfo) -> Table<'_> {
        Table {
            store: self,
            fields: &self.fields[info.metadata.clone()],
        }
    }

    fn value(&self, stored: &Stored) -> Value<'_> {
        match stored {
            Stored::Bool(v) => Value::Bool(*v),
            Stored::Int(v) => Value::Int(*v),
            Stored::BigInt(at) => Value::BigInt(&self.text[at.clone()]),
            Stored::Float(v) => Value::Float(*v),
            Stored::Str(at) => Value::Str(&self.text[at.clone()]),
            Stored::Date(date) => Value::Date(*date),
            Stored::Time(time) => Value::Time(*time),
            Stored::LocalDateTime(date, time) => Value::LocalDateTime(*date, *time),
            Stored::DateTime(date, time, offset) => Value::DateTime(*date, *time, *offset),
            Stored::Array(at) => Value::Array(Array {
                store: self,
                items: &self.items[at.clone()],
            }),
            Stored::Table(at) => Value::Table(Table {
                store: self,
                fields: &self.fields[at.clone()],
            }),
        }
    }

    /// A task whose values were read elsewhere.
    pub fn add(&mut self, name: Option<&str>, metadata: &[(String, Given)]) -> TaskInfo {
        TaskInfo {
            name: name.map(|name| self.put_text(name)),
            metadata: self.put_given(metadata),
        }
    }

    fn put_text(&mut self, text: &str) -> Range<usize> {
        let start = self.text.len();
        self.text.push_str(text);
        start..self.text.len()
    }

    fn key(&mut self, key: &str) -> u32 {
        if let Some(known) = self.known.get(key) {
            return *known;
        }
        let id = self.keys.len() as u32;
        let key: Arc<str> = key.into();
        self.keys.push(key.clone());
        self.known.insert(key, id);
        id
    }

    /// A key of `[metadata]`, which is most often what stood at the same place in the task before.
    fn key_at(&mut self, place: usize, key: &str) -> u32 {
        if let Some(&last) = self.last.get(place)
            && *self.keys[last as usize] == *key
        {
            return last;
        }
        let id = self.key(key);
        self.last.truncate(place);
        self.last.push(id);
        id
    }

    /// Room for items that belong together, to be filled one by one.
    fn items(&mut self, count: usize) -> Range<usize> {
        let start = self.items.len();
        self.items.resize(start + count, Stored::Bool(false));
        start..start + count
    }

    fn fields(&mut self, count: usize) -> Range<usize> {
        let start = self.fields.len();
        self.fields.resize(start + count, (0, Stored::Bool(false)));
        start..start + count
    }

    fn put_given(&mut self, table: &[(String, Given)]) -> Range<usize> {
        let range = self.fields(table.len());
        for (at, (key, value)) in range.clone().zip(table) {
            self.fields[at] = (self.key(key), self.put_given_value(value));
        }
        range
    }

    fn put_given_value(&mut self, value: &Given) -> Stored {
        match value {
            Given::Bool(v) => Stored::Bool(*v),
            Given::Int(v) => Stored::Int(*v),
            Given::BigInt(v) => Stored::BigInt(self.put_text(v)),
            Given::Float(v) => Stored::Float(*v),
            Given::Str(v) => Stored::Str(self.put_text(v)),
            Given::Date(date) => Stored::Date(*date),
            Given::Time(time) => Stored::Time(*time),
            Given::LocalDateTime(date, time) => Stored::LocalDateTime(*date, *time),
            Given::DateTime(date, time, offset) => Stored::DateTime(*date, *time, *offset),
            Given::Array(items) => {
                let range = self.items(items.len());
                for (at, item) in range.clone().zip(items) {
                    self.items[at] = self.put_given_value(item);
                }
                Stored::Array(range)
            }
            Given::Table(table) => Stored::Table(self.put_given(table)),
        }
    }

    /// `None` if it is nested too deeply.
    fn put(
        &mut self,
        document: &Document<'_>,
        value: &toml::Value<'_>,
        depth: usize,
    ) -> Option<Stored> {
        if depth == MAX_DEPTH {
            return None;
        }
        Some(match value {
            toml::Value::Bool(v) => Stored::Bool(*v),
            toml::Value::Int(v) => Stored::Int(*v),
            toml::Value::BigInt(v) => Stored::BigInt(self.put_text(v)),
            toml::Value::Float(v) => Stored::Float(*v),
            toml::Value::Str(v) => Stored::Str(self.put_text(v)),
            toml::Value::Date(v) => Stored::Date(*v),
            toml::Value::Time(v) => Stored::Time(*v),
            toml::Value::LocalDateTime(date, time) => Stored::LocalDateTime(*date, *time),
            toml::Value::DateTime(date, time, offset) => Stored::DateTime(*date, *time, *offset),
            toml::Value::Array(items) => {
                let range = self.items(items.len());
                for (at, item) in range.clone().zip(items) {
                    self.items[at] = self.put(document, item, depth + 1)?;
                }
                Stored::Array(range)
            }
            toml::Value::Tables(ids) => {
                let range = self.items(ids.len());
                for (at, id) in range.clone().zip(ids) {
                    self.items[at] = self.put_table(document, *id, depth)?;
                }
                Stored::Array(range)
            }
            toml::Value::Table(id) => self.put_table(document, *id, depth)?,
        })
    }

    fn put_table(
        &mut self,
        document: &Document<'_>,
        id: toml::TableId,
        depth: usize,
    ) -> Option<Stored> {
        let entries = document.table(id).entries();
        let range = self.fields(entries.len());
        for (at, entry) in range.clone().zip(entries) {
            self.fields[at] = (
                self.key(&entry.key),
                self.put(document, &entry.value, depth + 1)?,
            );
        }
        Some(Stored::Table(range))
    }

    /// Parses the bytes of a `task.toml`.
    pub fn parse(&mut self, bytes: &[u8], version: Version) -> Result<TaskInfo, Refusal> {
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let valid = std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default();
            let (line, column) = toml::position(valid, valid.len());
            Refusal {
                kind: RefusalKind::Syntax,
                message: "not UTF-8".to_owned(),
                line,
                column,
            }
        })?;
        let text = toml::normalize_newlines(text);
        let document = Document::parse(&text, version).map_err(|error| Refusal {
            kind: match error.kind {
                ErrorKind::Refused => RefusalKind::Syntax,
                ErrorKind::Limit => RefusalKind::Limit,
            },
            message: error.message.to_owned(),
            line: error.line,
            column: error.column,
        })?;

        let name = match document.root().get("task").map(|entry| &entry.value) {
            Some(toml::Value::Table(id)) => {
                match document.table(*id).get("name").map(|entry| &entry.value) {
                    Some(toml::Value::Str(name)) => Some(self.put_text(name)),
                    _ => None,
                }
            }
            _ => None,
        };
        let refuse = |offset: usize, message: &str| {
            let (line, column) = toml::position(&text, offset);
            Refusal {
                kind: RefusalKind::Metadata,
                message: message.to_owned(),
                line,
                column,
            }
        };
        let mut metadata = 0..0;
        if let Some(entry) = document.root().get("metadata") {
            let toml::Value::Table(id) = entry.value else {
                return Err(refuse(entry.offset, "metadata is not a table"));
            };
            let entries = document.table(id).entries();
            metadata = self.fields(entries.len());
            for (place, entry) in entries.iter().enumerate() {
                let Some(value) = self.put(&document, &entry.value, 0) else {
                    return Err(refuse(
                        entry.offset,
                        "metadata is nested too deeply for a column",
                    ));
                };
                self.fields[metadata.start + place] = (self.key_at(place, &entry.key), value);
            }
        }
        Ok(TaskInfo { name, metadata })
    }
}

impl Value<'_> {
    /// JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it; dates and times as `isoformat()`, in quotes.
    pub fn to_json(&self) -> String {
        let mut json = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_json(&mut json);
        json
    }

    fn write_json(&self, out: &mut String) -> std::fmt::Result {
        match self {
            Value::Bool(v) => write!(out, "{v}"),
            Value::Int(v) => write!(out, "{v}"),
            Value::BigInt(v) => out.write_str(v),
            Value::Float(v) => out.write_str(&python_float(*v)),
            Value::Str(v) => write_json_string(out, v),
            Value::Date(date) => write!(out, "\"{}\"", iso_date(*date)),
            Value::Time(time) => write!(out, "\"{}\"", iso_time(*time)),
            Value::LocalDateTime(date, time) => {
                write!(out, "\"{}T{}\"", iso_date(*date), iso_time(*time))
            }
            Value::DateTime(date, time, offset) => {
                let sign = if *offset < 0 { '-' } else { '+' };
                let (hours, minutes) = (offset.abs() / 60, offset.abs() % 60);
                write!(
                    out,
                    "\"{}T{}{sign}{hours:02}:{minutes:02}\"",
                    iso_date(*date),
                    iso_time(*time)
                )
            }
            Value::Array(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    out.push_str(if i > 0 { ", " } else { "" });
                    item.write_json(out)?;
                }
                out.write_char(']')
            }
            Value::Table(entries) => {
                out.push('{');
                for (i, (key, value)) in entries.iter().enumerate() {
                    out.push_str(if i > 0 { ", " } else { "" });
                    write_json_string(out, key)?;
                    out.push_str(": ");
                    value.write_json(out)?;
                }
                out.write_char('}')
            }
        }
    }
}

pub(crate) fn write_json_string(out: &mut String, text: &str) -> std::fmt::Result {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' => write!(out, "\\u{:04x}", u32::from(c))?,
            c => out.push(c),
        }
    }
    out.write_char('"')
}

fn iso_date(date: Date) -> String {
    format!("{:04}-{:02}-{:02}", date.year, date.month, date.day)
}

fn iso_time(time: Time) -> String {
    let seconds = format!("{:02}:{:02}:{:02}", time.hour, time.minute, time.second);
    if time.microsecond == 0 {
        seconds
    } else {
        format!("{seconds}.{:06}", time.microsecond)
    }
}

/// `json.dumps` of a float: the shortest digits that read back, with an exponent below 1e-4 and from 1e16 on.
fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.abs());
    }
    let plain = value.to_string();
    if plain.contains('.') {
        plain
    } else {
        format!("{plain}.0")
    }
}
