//! Python bindings of `harbor_trl_core::suite`, `::task` and `::columns`.

use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::{ArrayRef, Int64Array, RecordBatch, RecordBatchIterator};
use arrow_schema::{ArrowError, Field, Schema};
use harbor_trl_core::columns::{metadata_columns, name_column, strings};
use harbor_trl_core::suite::{self, Error, ProblemKind, State, Suite, Task};
use harbor_trl_core::task::{Given, MAX_DEPTH, RefusalKind, Value};
use harbor_trl_core::toml::{self, Document, Version};
use pyo3::exceptions::{PyIndexError, PyKeyboardInterrupt, PyRecursionError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyCapsule, PyDict, PyFloat, PyInt, PyList, PyString};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) fn version(toml_1_1: bool) -> Version {
    if toml_1_1 {
        Version::V1_1
    } else {
        Version::V1_0
    }
}

/// The tasks of a suite: found, and read where asked for.
#[pyclass(frozen, module = "harbor_trl._native")]
pub struct SuiteIndex {
    suite: Mutex<Suite>,
}

#[pymethods]
impl SuiteIndex {
    #[staticmethod]
    #[pyo3(signature = (root, *, read, toml_1_1 = false, watch = None))]
    fn scan(
        py: Python<'_>,
        root: PathBuf,
        read: bool,
        toml_1_1: bool,
        watch: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let read = read.then(|| version(toml_1_1));
        let suite = watched(py, watch, |watch| Suite::scan(&root, read, watch))?;
        Ok(SuiteIndex {
            suite: Mutex::new(suite),
        })
    }

    #[staticmethod]
    fn of(py: Python<'_>, root: PathBuf, paths: Vec<PathBuf>) -> Self {
        py.detach(|| SuiteIndex {
            suite: Mutex::new(Suite::of(&root, paths)),
        })
    }

    fn __len__(&self) -> usize {
        self.lock().tasks.len()
    }

    #[pyo3(signature = (positions = None, *, toml_1_1 = false, watch = None))]
    fn read(
        &self,
        py: Python<'_>,
        positions: Option<Vec<usize>>,
        toml_1_1: bool,
        watch: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        watched(py, watch, |watch| {
            let mut suite = self.lock();
            let positions = positions.unwrap_or_else(|| (0..suite.tasks.len()).collect());
            suite.read(&positions, version(toml_1_1), watch)
        })
    }

    #[pyo3(signature = (positions = None))]
    fn paths(&self, positions: Option<Vec<usize>>) -> PyResult<Vec<OsString>> {
        let suite = self.lock();
        let path = |task: &Task| task.path.clone().into_os_string();
        Ok(chosen(&suite, positions)?.1.into_iter().map(path).collect())
    }

    fn problems(&self) -> Vec<(OsString, &'static str, OsString)> {
        let name = |kind| match kind {
            ProblemKind::Unreadable => "unreadable",
            ProblemKind::Loop => "loop",
            ProblemKind::Outside => "outside",
            ProblemKind::Again => "again",
            ProblemKind::BrokenLink => "broken-link",
        };
        let suite = self.lock();
        suite
            .problems
            .iter()
            .map(|p| (p.path.clone().into(), name(p.kind), p.detail.clone()))
            .collect()
    }

    fn refused(&self) -> Vec<(usize, &'static str, String, usize, usize)> {
        let name = |kind| match kind {
            RefusalKind::Syntax => "syntax",
            RefusalKind::Limit => "limit",
            RefusalKind::Unreadable => "unreadable",
            RefusalKind::Metadata => "metadata",
            RefusalKind::Name => "name",
        };
        let suite = self.lock();
        let refusal = |(position, task): (usize, &Task)| match &task.state {
            State::Refused(r) => {
                Some((position, name(r.kind), r.message.clone(), r.line, r.column))
            }
            _ => None,
        };
        suite.tasks.iter().enumerate().filter_map(refusal).collect()
    }

    /// Takes values that Python read itself.
    fn supply(
        &self,
        position: usize,
        name: Option<String>,
        metadata: &Bound<'_, PyDict>,
    ) -> PyResult<()> {
        let metadata = entries(metadata, 0)?;
        if self.lock().supply(position, name.as_deref(), &metadata) {
            Ok(())
        } else {
            Err(PyIndexError::new_err("no such task"))
        }
    }

    /// The chosen tasks' columns, and the names of those that became JSON text.
    #[pyo3(signature = (positions = None))]
    fn columns(
        &self,
        py: Python<'_>,
        positions: Option<Vec<usize>>,
    ) -> PyResult<(ArrowStream, Vec<String>)> {
        py.detach(|| {
            let suite = self.lock();
            let (positions, tasks) = chosen(&suite, positions)?;
            batch(&suite, &positions, &tasks)
                .map_err(|error| PyValueError::new_err(error.to_string()))
        })
    }
}

impl SuiteIndex {
    fn lock(&self) -> MutexGuard<'_, Suite> {
        self.suite.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn chosen(suite: &Suite, positions: Option<Vec<usize>>) -> PyResult<(Vec<usize>, Vec<&Task>)> {
    let positions = positions.unwrap_or_else(|| (0..suite.tasks.len()).collect());
    let task = |&i: &usize| {
        suite
            .tasks
            .get(i)
            .ok_or_else(|| PyIndexError::new_err(format!("no task {i}")))
    };
    let tasks = positions.iter().map(task).collect::<PyResult<Vec<_>>>()?;
    Ok((positions, tasks))
}

fn batch(
    suite: &Suite,
    positions: &[usize],
    tasks: &[&Task],
) -> Result<(ArrowStream, Vec<String>), ArrowError> {
    let not_utf8 = || ArrowError::InvalidArgumentError("path is not UTF-8".to_owned());
    let root = suite.root.to_str().ok_or_else(not_utf8)?;
    // `root` and a task's path become one path, or only the task's.
    let paths = |root: &str| -> Result<ArrayRef, ArrowError> {
        let mut text = String::with_capacity(tasks.len() * (root.len() + 32));
        let mut ends = Vec::with_capacity(tasks.len());
        for task in tasks {
            let path = task.path.to_str().ok_or_else(not_utf8)?;
            let start = text.len();
            text.push_str(root);
            if !path.is_empty() && !root.is_empty() && !root.ends_with('/') {
                text.push('/');
            }
            text.push_str(path);
            if text.len() == start {
                text.push('.');
            }
            ends.push(text.len());
        }
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let cells = starts
            .zip(&ends)
            .map(|(start, end)| Some(&text[start..*end]));
        Ok(strings(cells, tasks.len()))
    };
    let mut columns = vec![
        ("task_dir".to_owned(), paths(root)?),
        (
            "task_index".to_owned(),
            Arc::new(positions.iter().map(|&i| i as i64).collect::<Int64Array>()) as ArrayRef,
        ),
        ("task_id".to_owned(), paths("")?),
        ("task_name".to_owned(), name_column(suite, tasks)),
    ];
    let metadata = metadata_columns(suite, tasks)?;
    columns.extend(metadata.columns);
    let field =
        |(name, array): &(String, ArrayRef)| Field::new(name, array.data_type().clone(), true);
    let schema = Schema::new(columns.iter().map(field).collect::<Vec<_>>());
    let arrays = columns.into_iter().map(|(_, array)| array).collect();
    Ok((
        ArrowStream {
            batch: RecordBatch::try_new(Arc::new(schema), arrays)?,
        },
        metadata.json,
    ))
}

/// One record batch, for whatever takes the Arrow PyCapsule interface, such as `pyarrow.table`.
#[pyclass(frozen, module = "harbor_trl._native")]
pub struct ArrowStream {
    batch: RecordBatch,
}

#[pymethods]
impl ArrowStream {
    #[pyo3(signature = (requested_schema = None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        // A producer may leave the consumer's wish to the consumer.
        let _ = requested_schema;
        let reader = RecordBatchIterator::new([Ok(self.batch.clone())], self.batch.schema());
        PyCapsule::new_with_value(
            py,
            FFI_ArrowArrayStream::new(Box::new(reader)),
            c"arrow_array_stream",
        )
    }
}

/// Runs `work` without the GIL; every 50 ms `watch(found, read)` is called and Ctrl-C gets its chance.
pub(crate) fn watched<T: Send>(
    py: Python<'_>,
    watch: Option<Py<PyAny>>,
    work: impl Send + FnOnce(suite::Watch<'_>) -> Result<T, Error>,
) -> PyResult<T> {
    let mut interruption = None;
    let result = py.detach(|| {
        work(&mut |found, read| {
            let heard = Python::attach(|py| {
                py.check_signals()?;
                watch
                    .as_ref()
                    .map_or(Ok(()), |watch| watch.call1(py, (found, read)).map(drop))
            });
            interruption = heard.err();
            interruption.is_none()
        })
    });
    result.map_err(|error| match error {
        Error::Root(error) => error.into(),
        Error::Stopped => interruption.unwrap_or_else(|| PyKeyboardInterrupt::new_err(())),
    })
}

fn entries(table: &Bound<'_, PyDict>, depth: usize) -> PyResult<Vec<(String, Given)>> {
    table
        .iter()
        .map(|(key, value)| Ok((key.extract()?, own(&value, depth)?)))
        .collect()
}

fn own(value: &Bound<'_, PyAny>, depth: usize) -> PyResult<Given> {
    if depth == MAX_DEPTH {
        return Err(PyValueError::new_err(
            "metadata is nested too deeply for a column",
        ));
    }
    Ok(if value.is_instance_of::<PyBool>() {
        Given::Bool(value.extract()?)
    } else if value.is_instance_of::<PyInt>() {
        match value.extract() {
            Ok(int) => Given::Int(int),
            Err(_) => Given::BigInt(value.str()?.extract()?),
        }
    } else if value.is_instance_of::<PyFloat>() {
        Given::Float(value.extract()?)
    } else if value.is_instance_of::<PyString>() {
        Given::Str(value.extract()?)
    } else if let Ok(list) = value.cast::<PyList>() {
        Given::Array(
            list.iter()
                .map(|item| own(&item, depth + 1))
                .collect::<PyResult<_>>()?,
        )
    } else if let Ok(table) = value.cast::<PyDict>() {
        Given::Table(entries(table, depth + 1)?)
    } else {
        date_or_time(&value.call_method0("isoformat")?.extract::<String>()?)?
    })
}

fn date_or_time(iso: &str) -> PyResult<Given> {
    let text = format!("it = {iso}");
    let document = Document::parse(&text, Version::V1_0)
        .map_err(|error| PyValueError::new_err(error.message))?;
    match document.root().get("it").map(|entry| &entry.value) {
        Some(toml::Value::Date(date)) => Ok(Given::Date(*date)),
        Some(toml::Value::Time(time)) => Ok(Given::Time(*time)),
        Some(toml::Value::LocalDateTime(date, time)) => Ok(Given::LocalDateTime(*date, *time)),
        Some(toml::Value::DateTime(date, time, offset)) => {
            Ok(Given::DateTime(*date, *time, *offset))
        }
        _ => Err(PyValueError::new_err(format!("not a date or time: {iso}"))),
    }
}

/// Parses TOML text to Python values, for tests: what the index takes from a file is made of the same values.
///
/// Returns the document, or `(kind, message, line, column)` of a refusal.
#[pyfunction]
#[pyo3(signature = (text, *, toml_1_1 = false))]
pub fn parse_toml(py: Python<'_>, text: &str, toml_1_1: bool) -> PyResult<Py<PyAny>> {
    let text = toml::normalize_newlines(text);
    match py.detach(|| Document::parse(&text, version(toml_1_1))) {
        Ok(document) => Ok(to_dict(py, &document, document.root(), 0)?
            .into_any()
            .unbind()),
        Err(error) => {
            let kind = if error.kind == toml::ErrorKind::Limit {
                "limit"
            } else {
                "syntax"
            };
            Ok((kind, error.message, error.line, error.column)
                .into_pyobject(py)?
                .into_any()
                .unbind())
        }
    }
}

fn to_dict<'py>(
    py: Python<'py>,
    document: &Document<'_>,
    table: &toml::Table<'_>,
    depth: usize,
) -> PyResult<Bound<'py, PyDict>> {
    if depth > 1000 {
        return Err(PyRecursionError::new_err(
            "nested more than 1000 levels deep",
        ));
    }
    let dict = PyDict::new(py);
    for entry in table.entries() {
        dict.set_item(
            &*entry.key,
            to_python(py, document, &entry.value, depth + 1)?,
        )?;
    }
    Ok(dict)
}

fn to_python<'py>(
    py: Python<'py>,
    document: &Document<'_>,
    value: &toml::Value<'_>,
    depth: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let tables = |ids: &[toml::TableId]| -> PyResult<Vec<_>> {
        ids.iter()
            .map(|id| to_dict(py, document, document.table(*id), depth))
            .collect()
    };
    Ok(match value {
        toml::Value::Table(id) => to_dict(py, document, document.table(*id), depth)?.into_any(),
        toml::Value::Tables(ids) => tables(ids)?.into_pyobject(py)?.into_any(),
        toml::Value::Array(items) => {
            let items = items
                .iter()
                .map(|item| to_python(py, document, item, depth + 1))
                .collect::<PyResult<Vec<_>>>()?;
            items.into_pyobject(py)?.into_any()
        }
        toml::Value::Bool(v) => v.into_pyobject(py)?.to_owned().into_any(),
        toml::Value::Int(v) => v.into_pyobject(py)?.into_any(),
        toml::Value::BigInt(v) => py.get_type::<PyInt>().call1((v,))?,
        toml::Value::Float(v) => v.into_pyobject(py)?.into_any(),
        toml::Value::Str(v) => v.into_pyobject(py)?.into_any(),
        toml::Value::Date(date) => iso(py, "date", Value::Date(*date))?,
        toml::Value::Time(time) => iso(py, "time", Value::Time(*time))?,
        toml::Value::LocalDateTime(date, time) => {
            iso(py, "datetime", Value::LocalDateTime(*date, *time))?
        }
        toml::Value::DateTime(date, time, offset) => {
            iso(py, "datetime", Value::DateTime(*date, *time, *offset))?
        }
    })
}

fn iso<'py>(py: Python<'py>, class: &str, value: Value) -> PyResult<Bound<'py, PyAny>> {
    let text = value.to_json();
    py.import("datetime")?
        .getattr(class)?
        .call_method1("fromisoformat", (text.trim_matches('"'),))
}
