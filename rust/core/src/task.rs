//! What a suite's index takes from a `task.toml`: the task's name and its `[metadata]`.

use crate::toml::{self, Date, Document, ErrorKind, Time, Version};
use std::collections::HashSet;
use std::fmt::Write;
use std::sync::Arc;

/// A value of `[metadata]`, independent of the text it came from.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Bool(bool),
    Int(i64),
    /// An integer beyond 64 bits, in decimal.
    BigInt(String),
    Float(f64),
    Str(String),
    Date(Date),
    Time(Time),
    LocalDateTime(Date, Time),
    /// With the offset from UTC in minutes.
    DateTime(Date, Time, i16),
    Array(Vec<Value>),
    Table(Vec<(String, Value)>),
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct TaskInfo {
    /// `[task] name`, where it is a string.
    pub name: Option<String>,
    /// `[metadata]`, in the order of the file.
    pub metadata: Vec<(Arc<str>, Value)>,
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

/// The keys of the tasks read before: a suite repeats a few keys in each task.
#[derive(Default)]
pub struct Keys {
    known: HashSet<Arc<str>>,
    /// Of the task before, in its order.
    last: Vec<Arc<str>>,
}

impl Keys {
    fn share(&mut self, place: usize, key: &str) -> Arc<str> {
        if let Some(last) = self.last.get(place).filter(|last| ***last == *key) {
            return last.clone();
        }
        let key = match self.known.get(key) {
            Some(known) => known.clone(),
            None => {
                let new: Arc<str> = key.into();
                self.known.insert(new.clone());
                new
            }
        };
        self.last.truncate(place);
        self.last.push(key.clone());
        key
    }
}

/// Parses the bytes of a `task.toml`.
pub fn parse(bytes: &[u8], version: Version, keys: &mut Keys) -> Result<TaskInfo, Refusal> {
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
                Some(toml::Value::Str(name)) => Some(name.clone().into_owned()),
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
    let mut metadata = Vec::new();
    if let Some(entry) = document.root().get("metadata") {
        let toml::Value::Table(id) = entry.value else {
            return Err(refuse(entry.offset, "metadata is not a table"));
        };
        let entries = document.table(id).entries();
        metadata.reserve_exact(entries.len());
        for (place, entry) in entries.iter().enumerate() {
            let Some(value) = own(&document, &entry.value, 0) else {
                return Err(refuse(
                    entry.offset,
                    "metadata is nested too deeply for a column",
                ));
            };
            metadata.push((keys.share(place, &entry.key), value));
        }
    }
    Ok(TaskInfo { name, metadata })
}

fn own(document: &Document<'_>, value: &toml::Value<'_>, depth: usize) -> Option<Value> {
    if depth == MAX_DEPTH {
        return None;
    }
    let table = |id| {
        let entries = document.table(id).entries().iter();
        let own_entry = |e: &toml::Entry<'_>| {
            Some((
                e.key.clone().into_owned(),
                own(document, &e.value, depth + 1)?,
            ))
        };
        entries
            .map(own_entry)
            .collect::<Option<Vec<_>>>()
            .map(Value::Table)
    };
    Some(match value {
        toml::Value::Bool(v) => Value::Bool(*v),
        toml::Value::Int(v) => Value::Int(*v),
        toml::Value::BigInt(v) => Value::BigInt(v.clone()),
        toml::Value::Float(v) => Value::Float(*v),
        toml::Value::Str(v) => Value::Str(v.clone().into_owned()),
        toml::Value::Date(v) => Value::Date(*v),
        toml::Value::Time(v) => Value::Time(*v),
        toml::Value::LocalDateTime(date, time) => Value::LocalDateTime(*date, *time),
        toml::Value::DateTime(date, time, offset) => Value::DateTime(*date, *time, *offset),
        toml::Value::Array(items) => Value::Array(
            items
                .iter()
                .map(|item| own(document, item, depth + 1))
                .collect::<Option<_>>()?,
        ),
        toml::Value::Tables(ids) => {
            Value::Array(ids.iter().map(|id| table(*id)).collect::<Option<_>>()?)
        }
        toml::Value::Table(id) => table(*id)?,
    })
}

impl Value {
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
