//! Python bindings of `harbor_trl_core::check`.

use crate::suite::{version, watched};
use harbor_trl_core::check::{self, Lacks, Options, Step};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::ffi::OsString;
use std::path::PathBuf;

type Finding = (&'static str, OsString, usize, usize, String);

/// For each task its findings, whether Harbor must be asked, and a key that tasks of the same content share.
#[pyfunction]
#[pyo3(signature = (root, tasks, *, lacks = Vec::new(), only_errors = false, toml_1_1 = false, watch = None))]
pub fn check_tasks(
    py: Python<'_>,
    root: PathBuf,
    tasks: Vec<PathBuf>,
    lacks: Vec<String>,
    only_errors: bool,
    toml_1_1: bool,
    watch: Option<Py<PyAny>>,
) -> PyResult<Vec<(Vec<Finding>, bool, u64)>> {
    let mut missing = Lacks::default();
    for name in &lacks {
        *match &**name {
            "gpus" => &mut missing.gpus,
            "tpus" => &mut missing.tpus,
            "windows" => &mut missing.windows,
            "docker_compose" => &mut missing.compose,
            "images" => &mut missing.images,
            "disable_internet" => &mut missing.no_network,
            "network_allowlist" => &mut missing.allowlist,
            "dynamic_network_policy" => &mut missing.changing_network,
            _ => return Err(PyValueError::new_err(format!("no such capability: {name}"))),
        } = true;
    }
    let options = Options {
        version: version(toml_1_1),
        lacks: missing,
        only_errors,
    };
    let reports = watched(py, watch, |watch| {
        check::check(&root, &tasks, &options, watch)
    })?;
    let finding =
        |f: check::Finding| (f.code, f.file.into_os_string(), f.line, f.column, f.message);
    Ok(reports
        .into_iter()
        .map(|report| {
            let findings = report.findings.into_iter().map(finding).collect();
            (findings, report.ask, report.key)
        })
        .collect())
}

/// For each task the place of the first one with the same content, or its own.
#[pyfunction]
pub fn same_content(py: Python<'_>, root: PathBuf, tasks: Vec<PathBuf>) -> PyResult<Vec<usize>> {
    watched(py, None, |watch| check::same_content(&root, &tasks, watch))
}

#[derive(FromPyObject)]
pub enum Part {
    Index(usize),
    Key(String),
}

/// Line and column of a key of a TOML document, as far down as it is there.
#[pyfunction]
#[pyo3(signature = (text, path, *, toml_1_1 = false))]
pub fn locate_key(
    py: Python<'_>,
    text: &str,
    path: Vec<Part>,
    toml_1_1: bool,
) -> Option<(usize, usize)> {
    py.detach(|| {
        let steps: Vec<Step<'_>> = path
            .iter()
            .map(|part| match part {
                Part::Index(index) => Step::Index(*index),
                Part::Key(key) => Step::Key(key),
            })
            .collect();
        let text = harbor_trl_core::toml::normalize_newlines(text);
        check::locate(&text, version(toml_1_1), &steps)
    })
}
