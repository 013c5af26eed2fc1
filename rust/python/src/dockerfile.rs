//! Python bindings of `harbor_trl_core::dockerfile`.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use harbor_trl_core::dockerfile as core;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

#[derive(IntoPyObject)]
struct Problem {
    code: &'static str,
    line: usize,
    column: Option<usize>,
    message: String,
}

impl From<core::BuildError> for Problem {
    fn from(error: core::BuildError) -> Self {
        Self {
            code: error.code,
            line: error.line,
            column: error.column,
            message: error.message,
        }
    }
}

#[derive(IntoPyObject)]
struct Unknown {
    line: usize,
    reason: String,
}

#[derive(IntoPyObject)]
struct Touched {
    line: usize,
    reason: String,
}

#[derive(IntoPyObject)]
struct Entry {
    destination: String,
    kind: &'static str,
    source: Option<String>,
    content: Option<Cow<'static, [u8]>>,
    link: Option<String>,
    mode: Option<u32>,
    owner: Option<String>,
    line: usize,
    if_missing: bool,
    if_directory: Option<String>,
    touched: Option<Touched>,
}

#[derive(IntoPyObject)]
struct Plan {
    entries: Vec<Entry>,
    workdirs: Vec<Entry>,
    base: Option<String>,
    stage: String,
    workdir: Option<String>,
    user: Option<String>,
    env: BTreeMap<String, Option<String>>,
    errors: Vec<Problem>,
    unknowns: Vec<Unknown>,
}

fn entry(entry: core::Entry) -> Entry {
    Entry {
        destination: entry.destination,
        kind: match entry.kind {
            core::EntryKind::File => "file",
            core::EntryKind::Directory => "directory",
            core::EntryKind::Symlink => "symlink",
            core::EntryKind::Archive => "archive",
            core::EntryKind::Special => "special",
        },
        source: entry.source,
        content: entry.content.map(|content| Cow::Owned(content.to_vec())),
        link: entry.link,
        mode: entry.mode,
        owner: entry.owner,
        line: entry.line,
        if_missing: entry.if_missing,
        if_directory: entry.if_directory,
        touched: entry.touched.map(|touched| Touched {
            line: touched.line,
            reason: touched.reason,
        }),
    }
}

/// What a build of `dockerfile` in `context` copies into `target` (the last stage by default).
#[pyfunction]
#[pyo3(signature = (dockerfile, context, target=None, build_args=HashMap::new(), base_env=HashMap::new(), base_workdir=None, base_user=None))]
#[allow(clippy::too_many_arguments)] // Keywords in Python.
pub fn copy_plan(
    py: Python<'_>,
    dockerfile: PathBuf,
    context: PathBuf,
    target: Option<String>,
    build_args: HashMap<String, String>,
    base_env: HashMap<String, String>,
    base_workdir: Option<String>,
    base_user: Option<String>,
) -> PyResult<impl for<'py> IntoPyObject<'py>> {
    let plan = py.detach(|| -> std::io::Result<Plan> {
        let source = std::fs::read(&dockerfile)?;
        let ignore = core::read_ignore_file(&dockerfile, &context)?;
        let options = core::PlanOptions {
            target,
            build_args,
            quick: None,
            base_env,
            base_workdir,
            base_user,
        };
        let plan = core::copy_plan(&source, ignore.as_deref(), &context, &options);
        Ok(Plan {
            entries: plan.entries.into_iter().map(entry).collect(),
            workdirs: plan.workdirs.into_iter().map(entry).collect(),
            base: plan.base,
            stage: plan.stage,
            workdir: plan.workdir,
            user: plan.user,
            env: plan.env,
            errors: plan.errors.into_iter().map(Problem::from).collect(),
            unknowns: plan
                .unknowns
                .into_iter()
                .map(|unknown| Unknown {
                    line: unknown.line,
                    reason: unknown.reason,
                })
                .collect(),
        })
    })?;
    Ok(plan)
}

#[derive(IntoPyObject)]
struct Heredoc {
    name: String,
    expand: bool,
    chomp: bool,
    file_descriptor: u32,
    content: Cow<'static, [u8]>,
}

#[derive(IntoPyObject)]
struct Instruction {
    keyword: String,
    flags: Vec<String>,
    args: Vec<String>,
    json: bool,
    heredocs: Vec<Heredoc>,
    original: String,
    line: usize,
    end_line: usize,
}

#[derive(IntoPyObject)]
struct Parsed {
    instructions: Vec<Instruction>,
    escape: String,
    syntax: Option<String>,
    error: Option<Problem>,
}

/// Cuts a Dockerfile into instructions; `error` says why, where that failed.
#[pyfunction]
pub fn parse_dockerfile(py: Python<'_>, source: &[u8]) -> impl for<'py> IntoPyObject<'py> {
    match py.detach(|| core::parse(source)) {
        Err(error) => Parsed {
            instructions: Vec::new(),
            escape: "\\".to_owned(),
            syntax: None,
            error: Some(error.into()),
        },
        Ok(parsed) => Parsed {
            instructions: parsed
                .instructions
                .into_iter()
                .map(|instruction| Instruction {
                    keyword: instruction.keyword,
                    flags: instruction.flags,
                    args: instruction.args,
                    json: instruction.json,
                    heredocs: instruction
                        .heredocs
                        .into_iter()
                        .map(|heredoc| Heredoc {
                            name: heredoc.name,
                            expand: heredoc.expand,
                            chomp: heredoc.chomp,
                            file_descriptor: heredoc.file_descriptor,
                            content: Cow::Owned(heredoc.content),
                        })
                        .collect(),
                    original: instruction.original,
                    line: instruction.line,
                    end_line: instruction.end_line,
                })
                .collect(),
            escape: parsed.escape.to_string(),
            syntax: parsed.syntax,
            error: None,
        },
    }
}

/// Expands one word as ENV, COPY or WORKDIR do; a variable that `env` maps to None is unknown, and so is the result.
#[pyfunction]
#[pyo3(signature = (word, env, escape='\\'))]
pub fn expand_word(
    py: Python<'_>,
    word: &str,
    env: HashMap<String, Option<String>>,
    escape: char,
) -> PyResult<Option<String>> {
    let lookup = |name: &str| match env.get(name) {
        Some(Some(value)) => core::Value::Known(value.clone()),
        Some(None) => core::Value::Unknown,
        None => core::Value::Unset,
    };
    match py.detach(|| core::expand(word, escape, &lookup)) {
        Ok(expanded) => Ok(expanded.unknown.is_empty().then_some(expanded.text)),
        Err(core::ShellError::Limit(_)) => Ok(None),
        Err(core::ShellError::Syntax(message)) => Err(PyValueError::new_err(message)),
    }
}

/// Go's `filepath.Match`; None for a malformed pattern.
#[pyfunction]
pub fn match_path(py: Python<'_>, pattern: &str, name: &str) -> Option<bool> {
    py.detach(|| core::match_path(pattern, name).ok())
}

/// Which of `paths` a `.dockerignore` with this content hides; None for a file that a build refuses or that isn't
/// understood.
#[pyfunction]
pub fn match_ignore(py: Python<'_>, ignore_file: &[u8], paths: Vec<String>) -> Option<Vec<bool>> {
    py.detach(|| {
        let lines = core::parse_ignore_file(ignore_file).ok()?;
        let texts: Vec<&str> = lines.iter().map(|(_, pattern)| pattern.as_str()).collect();
        let patterns = core::IgnorePatterns::new(&texts).ok()?;
        Some(paths.iter().map(|path| patterns.matches(path)).collect())
    })
}
