//! The metadata of many tasks as typed Arrow columns.
//!
//! A column has one type across the suite. Integers beside floats become floats; whatever else does not agree becomes JSON
//! text, the whole column of it, so that a reader never has to guess.

use crate::suite::{State, Suite, Task};
use crate::task::{Value, write_json_string};
use crate::toml::{Date, Time};
use arrow_array::builder::{LargeStringBuilder, StringBuilder};
use arrow_array::{
    ArrayRef, BooleanArray, Date32Array, Float64Array, Int64Array, ListArray, NullArray,
    StructArray, Time64MicrosecondArray, TimestampMicrosecondArray,
};
use arrow_buffer::{NullBuffer, OffsetBuffer};
use arrow_schema::{ArrowError, Field, Fields};
use std::collections::HashMap;
use std::sync::Arc;

/// More keys than this share one column of JSON text, [`OTHER`]: a column costs memory for every task, also where it is empty.
pub const MAX_COLUMNS: usize = 512;
pub const OTHER: &str = "metadata_other";
/// Tables with more keys than this, over the whole suite, become JSON text.
const MAX_FIELDS: usize = 64;
/// Lists and tables nested deeper become JSON text.
const MAX_DEPTH: usize = 8;
/// Floats hold every integer up to here.
const EXACT_IN_FLOAT: u64 = 1 << 53;

pub struct Columns {
    /// Name and cells, in the order in which the keys first appear.
    pub columns: Vec<(String, ArrayRef)>,
    /// Names of the columns that are JSON text because their values do not agree on a type that a column can have.
    pub json: Vec<String>,
}

/// Columns of the chosen tasks' metadata. Tasks that are not read count as empty.
pub fn metadata_columns(suite: &Suite, tasks: &[&Task]) -> Result<Columns, ArrowError> {
    let mut index: HashMap<&str, usize> = HashMap::new();
    let mut cells: Vec<(&str, Vec<(usize, Value)>)> = Vec::new();
    // The column of each key of each store.
    let mut columns: Vec<Vec<Option<usize>>> = suite
        .stores
        .iter()
        .map(|store| vec![None; store.keys().len()])
        .collect();
    for (row, task) in tasks.iter().enumerate() {
        let State::Read(at, info) = &task.state else {
            continue;
        };
        let store = &suite.stores[*at];
        for (key, value) in store.metadata(info).numbered() {
            let column = *columns[*at][key].get_or_insert_with(|| {
                let key = &*store.keys()[key];
                *index.entry(key).or_insert_with(|| {
                    cells.push((key, Vec::with_capacity(tasks.len() - row)));
                    cells.len() - 1
                })
            });
            cells[column].1.push((row, value));
        }
    }
    let mut others = Vec::new();
    if cells.len() > MAX_COLUMNS {
        let mut by_count: Vec<usize> = (0..cells.len()).collect();
        by_count.sort_by_key(|&column| std::cmp::Reverse(cells[column].1.len()));
        let mut kept = vec![false; cells.len()];
        for &column in &by_count[..MAX_COLUMNS - 1] {
            kept[column] = true;
        }
        let mut kept = kept.into_iter();
        others = cells
            .extract_if(.., |_| !kept.next().unwrap_or(true))
            .collect();
    }

    let mut result = Columns {
        columns: Vec::with_capacity(cells.len() + 1),
        json: Vec::new(),
    };
    for (key, sparse) in cells {
        let mut column = vec![None; tasks.len()];
        for (row, value) in sparse {
            column[row] = Some(value);
        }
        let kind = infer(&column, 0);
        if kind == Kind::Json {
            result.json.push(key.to_owned());
        }
        result
            .columns
            .push((key.to_owned(), build(&kind, &column)?));
    }
    if !others.is_empty() {
        let mut name = OTHER.to_owned();
        while result.columns.iter().any(|(column, _)| *column == name) {
            name.insert_str(0, "metadata_");
        }
        result.json.push(name.clone());
        result
            .columns
            .push((name, other_column(&others, tasks.len())));
    }
    Ok(result)
}

/// The tasks' names, null where they have none.
pub fn name_column(suite: &Suite, tasks: &[&Task]) -> ArrayRef {
    let name = |task: &&Task| match &task.state {
        State::Read(at, info) => suite.stores[*at].name(info),
        _ => None,
    };
    strings(tasks.iter().map(name), tasks.len())
}

fn other_column(others: &[(&str, Vec<(usize, Value)>)], rows: usize) -> ArrayRef {
    let mut texts: Vec<Option<String>> = vec![None; rows];
    for (key, sparse) in others {
        for (row, value) in sparse {
            let text = texts[*row].get_or_insert_default();
            text.push_str(if text.is_empty() { "{" } else { ", " });
            // Writing to a String cannot fail.
            let _ = write_json_string(text, key);
            text.push_str(": ");
            text.push_str(&value.to_json());
        }
    }
    for text in texts.iter_mut().flatten() {
        text.push('}');
    }
    strings(texts.iter().map(Option::as_deref), rows)
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    /// No value at all.
    Null,
    Bool,
    Int,
    Float,
    Str,
    Date,
    Time,
    LocalDateTime,
    DateTime,
    List(Box<Kind>),
    Struct(Vec<(String, Kind)>),
    Json,
}

fn infer(cells: &[Option<Value>], depth: usize) -> Kind {
    let values = || cells.iter().flatten().copied();
    let Some(first) = values().next() else {
        return Kind::Null;
    };
    let all = |kind: fn(Value) -> bool| values().all(kind);
    match first {
        Value::Bool(_) if all(|v| matches!(v, Value::Bool(_))) => Kind::Bool,
        Value::Int(_) if all(|v| matches!(v, Value::Int(_))) => Kind::Int,
        Value::Int(_) | Value::Float(_) if all(|v| as_float(v).is_some()) => Kind::Float,
        Value::Str(_) if all(|v| matches!(v, Value::Str(_))) => Kind::Str,
        Value::Date(_) if all(|v| matches!(v, Value::Date(_))) => Kind::Date,
        Value::Time(_) if all(|v| matches!(v, Value::Time(_))) => Kind::Time,
        Value::LocalDateTime(..) if all(|v| matches!(v, Value::LocalDateTime(..))) => {
            Kind::LocalDateTime
        }
        Value::DateTime(..) if all(|v| utc_microseconds(v).is_some()) => Kind::DateTime,
        Value::Array(_) if depth < MAX_DEPTH => {
            let mut items = Vec::new();
            for value in values() {
                let Value::Array(array) = value else {
                    return Kind::Json;
                };
                items.extend(array.iter().map(Some));
            }
            match infer(&items, depth + 1) {
                Kind::Json => Kind::Json,
                kind => Kind::List(Box::new(kind)),
            }
        }
        Value::Table(_) if depth < MAX_DEPTH => {
            let mut names: Vec<&str> = Vec::new();
            for value in values() {
                let Value::Table(entries) = value else {
                    return Kind::Json;
                };
                for (key, _) in entries.iter() {
                    if !names.contains(&key) {
                        names.push(key);
                    }
                }
                if names.len() > MAX_FIELDS {
                    return Kind::Json;
                }
            }
            let mut fields = Vec::with_capacity(names.len());
            for name in names {
                match infer(&field_cells(cells, name), depth + 1) {
                    Kind::Json => return Kind::Json,
                    kind => fields.push((name.to_owned(), kind)),
                }
            }
            if fields.is_empty() {
                Kind::Json
            } else {
                Kind::Struct(fields)
            }
        }
        _ => Kind::Json,
    }
}

fn field_cells<'a>(cells: &[Option<Value<'a>>], name: &str) -> Vec<Option<Value<'a>>> {
    let field = |value: Value<'a>| match value {
        Value::Table(entries) => entries.get(name),
        _ => None,
    };
    cells.iter().map(|cell| cell.and_then(field)).collect()
}

fn build(kind: &Kind, cells: &[Option<Value>]) -> Result<ArrayRef, ArrowError> {
    let cell = || cells.iter().copied();
    Ok(match kind {
        Kind::Null => Arc::new(NullArray::new(cells.len())),
        Kind::Bool => Arc::new(BooleanArray::from_iter(cell().map(|v| match v? {
            Value::Bool(v) => Some(v),
            _ => None,
        }))),
        Kind::Int => Arc::new(Int64Array::from_iter(cell().map(|v| match v? {
            Value::Int(v) => Some(v),
            _ => None,
        }))),
        Kind::Float => Arc::new(Float64Array::from_iter(cell().map(|v| as_float(v?)))),
        Kind::Str => strings(
            cell().map(|v| match v? {
                Value::Str(v) => Some(v),
                _ => None,
            }),
            cells.len(),
        ),
        Kind::Date => Arc::new(Date32Array::from_iter(cell().map(|v| match v? {
            Value::Date(v) => i32::try_from(days_from_epoch(v)).ok(),
            _ => None,
        }))),
        Kind::Time => Arc::new(Time64MicrosecondArray::from_iter(cell().map(
            |v| match v? {
                Value::Time(v) => Some(microseconds(v)),
                _ => None,
            },
        ))),
        Kind::LocalDateTime => Arc::new(TimestampMicrosecondArray::from_iter(cell().map(
            |v| match v? {
                Value::LocalDateTime(date, time) => Some(timestamp(date, time)),
                _ => None,
            },
        ))),
        Kind::DateTime => Arc::new(
            TimestampMicrosecondArray::from_iter(cell().map(|v| utc_microseconds(v?)))
                .with_timezone("UTC"),
        ),
        Kind::List(item) => {
            let mut items = Vec::new();
            let mut lengths = Vec::with_capacity(cells.len());
            for value in cell() {
                let before = items.len();
                if let Some(Value::Array(array)) = value {
                    items.extend(array.iter().map(Some));
                }
                lengths.push(items.len() - before);
            }
            if i32::try_from(items.len()).is_err() {
                return build(&Kind::Json, cells);
            }
            let values = build(item, &items)?;
            let field = Arc::new(Field::new("item", values.data_type().clone(), true));
            Arc::new(ListArray::try_new(
                field,
                OffsetBuffer::from_lengths(lengths),
                values,
                nulls(cells),
            )?)
        }
        Kind::Struct(fields) => {
            let mut arrays = Vec::with_capacity(fields.len());
            for (name, kind) in fields {
                arrays.push(build(kind, &field_cells(cells, name))?);
            }
            let field = |((name, _), array): (&(String, Kind), &ArrayRef)| {
                Field::new(name, array.data_type().clone(), true)
            };
            let fields: Fields = fields.iter().zip(&arrays).map(field).collect();
            Arc::new(StructArray::try_new_with_length(
                fields,
                arrays,
                nulls(cells),
                cells.len(),
            )?)
        }
        Kind::Json => {
            let texts: Vec<Option<String>> = cell().map(|v| v.map(|v| v.to_json())).collect();
            strings(texts.iter().map(Option::as_deref), cells.len())
        }
    })
}

fn nulls(cells: &[Option<Value>]) -> Option<NullBuffer> {
    Some(cells.iter().map(Option::is_some).collect::<NullBuffer>())
        .filter(|nulls| nulls.null_count() > 0)
}

/// A string column, of the type with 64-bit offsets where 32 do not reach.
pub fn strings<'a>(cells: impl Iterator<Item = Option<&'a str>> + Clone, rows: usize) -> ArrayRef {
    let bytes: usize = cells.clone().flatten().map(str::len).sum();
    if i32::try_from(bytes).is_ok() {
        let mut builder = StringBuilder::with_capacity(rows, bytes);
        builder.extend(cells);
        Arc::new(builder.finish())
    } else {
        let mut builder = LargeStringBuilder::with_capacity(rows, bytes);
        builder.extend(cells);
        Arc::new(builder.finish())
    }
}

fn as_float(value: Value) -> Option<f64> {
    match value {
        Value::Float(v) => Some(v),
        Value::Int(v) if v.unsigned_abs() <= EXACT_IN_FLOAT => Some(v as f64),
        _ => None,
    }
}

/// Days since 1970-01-01 in the proleptic Gregorian calendar.
fn days_from_epoch(date: Date) -> i64 {
    // Years that begin in March put the leap day last.
    let year = i64::from(date.year) - i64::from(date.month <= 2);
    let month = (i64::from(date.month) + 9) % 12;
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    365 * year + leap_days + (153 * month + 2) / 5 + i64::from(date.day) - 1 - 719_468
}

fn microseconds(time: Time) -> i64 {
    let seconds =
        i64::from(time.hour) * 3600 + i64::from(time.minute) * 60 + i64::from(time.second);
    seconds * 1_000_000 + i64::from(time.microsecond)
}

fn timestamp(date: Date, time: Time) -> i64 {
    days_from_epoch(date) * 86_400_000_000 + microseconds(time)
}

/// `None` also where UTC leaves the years 1 to 9999, which Python cannot hold.
fn utc_microseconds(value: Value) -> Option<i64> {
    let Value::DateTime(date, time, offset) = value else {
        return None;
    };
    let utc = timestamp(date, time) - i64::from(offset) * 60_000_000;
    let first = timestamp(
        Date {
            year: 1,
            month: 1,
            day: 1,
        },
        Time {
            hour: 0,
            minute: 0,
            second: 0,
            microsecond: 0,
        },
    );
    let end = timestamp(
        Date {
            year: 9999,
            month: 12,
            day: 31,
        },
        Time {
            hour: 24,
            minute: 0,
            second: 0,
            microsecond: 0,
        },
    );
    (first..end).contains(&utc).then_some(utc)
}
