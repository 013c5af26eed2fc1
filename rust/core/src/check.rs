//! What is wrong with the tasks of a suite, without building or running any.
//!
//! Harbor's verdict is the measure: where the answer is not plain from a task's files, [`Report::ask`] says that only
//! Harbor itself knows. Nothing outside a task is read.

mod fields;

use crate::directory::{Buffer, Directory, FileType};
use crate::dockerfile::{self, EntryKind, PlanOptions, RootListing};
use crate::suite::{Crew, Error, NOT_UTF8, WATCH_INTERVAL, Watch, lock, threads, why_not};
use crate::toml::{self, Document, Value, Version};
use fields::{Facts, Offset};
use rustix::buffer::spare_capacity;
use rustix::io::retry_on_intr;
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::str::Utf8Error;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// Tasks that a thread takes at a time.
const CHUNK: usize = 16;
/// Deeper trees are left to Harbor, whose own walk recurses.
const MAX_DEPTH: usize = 48;
/// A file larger than this is not searched for words.
const MAX_SEARCHED: u64 = 1 << 20;
/// A larger `task.toml` or instruction is refused unread.
const MAX_TEXT: u64 = 64 << 20;
/// A larger Dockerfile is not followed.
const MAX_DOCKERFILE: u64 = 4 << 20;
/// Copied files times bytes of the Dockerfile in which their removal is looked for.
const MAX_REMOVAL_STEPS: usize = 1 << 30;
/// Bytes of a task that are compared with another's.
const MAX_COMPARED: u64 = 64 << 20;
/// Files of a task that are looked at for what is only worth a warning.
const MAX_LOOKED_AT: usize = 20_000;

/// One thing that is wrong with one task. Line and column count from 1; 0 where there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub code: &'static str,
    /// Below the task's directory; empty for the task itself.
    pub file: PathBuf,
    pub line: usize,
    pub column: usize,
    pub message: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub findings: Vec<Finding>,
    /// Whether Harbor takes the task is for Harbor to say; no finding is about that.
    pub ask: bool,
    /// Tasks of different keys have different content.
    pub key: u64,
}

/// What a backend cannot do; a task that needs it is worth a warning.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lacks {
    pub gpus: bool,
    pub tpus: bool,
    pub windows: bool,
    pub compose: bool,
    pub images: bool,
    pub no_network: bool,
    pub allowlist: bool,
    pub changing_network: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub version: Version,
    pub lacks: Lacks,
    /// Only what keeps a task from ever giving a reward.
    pub only_errors: bool,
}

/// Checks the tasks at these paths below `root`, side by side; the reports are in the same order.
pub fn check(
    root: &Path,
    tasks: &[PathBuf],
    options: &Options,
    watch: Watch<'_>,
) -> Result<Vec<Report>, Error> {
    let top = Directory::open(root).map_err(Error::Root)?;
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::with_capacity(tasks.len()));
    let crew = Crew::default();
    crew.run(
        threads().min(tasks.len().div_ceil(CHUNK)),
        &|| {
            let mut own = Vec::new();
            let mut buffer = Buffer::default();
            loop {
                let start = next.fetch_add(CHUNK, Relaxed);
                if start >= tasks.len() || crew.stopped() {
                    break;
                }
                for (i, task) in tasks.iter().enumerate().skip(start).take(CHUNK) {
                    if crew.stopped() {
                        break;
                    }
                    own.push((i, check_task(root, &top, task, options, &mut buffer)));
                    crew.read.fetch_add(1, Relaxed);
                }
            }
            lock(&results).append(&mut own);
        },
        watch,
    )?;
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_unstable_by_key(|(i, _)| *i);
    Ok(results.into_iter().map(|(_, report)| report).collect())
}

fn check_task(
    root: &Path,
    top: &Directory,
    path: &Path,
    options: &Options,
    buffer: &mut Buffer,
) -> Report {
    let mut report = Report::default();
    if path.to_str().is_none() {
        report.add("path-forbidden", "", NOT_UTF8);
        return report;
    }
    let handle = match top.below(path) {
        Ok(handle) => handle,
        Err(error) => {
            report.add("unreadable", "", error.to_string());
            return report;
        }
    };
    let bytes = match read(&handle, Path::new("task.toml"), MAX_TEXT) {
        Ok(Content::Bytes(bytes)) => bytes,
        Ok(Content::TooLarge(size)) => {
            let message =
                format!("{size} bytes, more than the {MAX_TEXT} that are read of a task.toml");
            report.add("toml-unreadable", "task.toml", message);
            return report;
        }
        Ok(Content::NotAFile) => {
            report.add("toml-unreadable", "task.toml", "not a regular file");
            return report;
        }
        Err(error) => {
            report.add("toml-unreadable", "task.toml", why_not(&error));
            return report;
        }
    };
    let refuse = |report: &mut Report, message: &str, line, column| {
        report.findings.push(Finding {
            code: "toml-syntax",
            file: PathBuf::from("task.toml"),
            line,
            column,
            message: message.to_owned(),
        });
    };
    let text = match std::str::from_utf8(&bytes) {
        Ok(text) => text,
        Err(error) => {
            let (line, column) = place(&bytes, error);
            refuse(&mut report, "not UTF-8", line, column);
            return report;
        }
    };
    let text = toml::normalize_newlines(text);
    let document = match Document::parse(&text, options.version) {
        Ok(document) => document,
        Err(error) => {
            refuse(&mut report, error.message, error.line, error.column);
            return report;
        }
    };
    let mut task = Task {
        directory: &root.join(path),
        text: &text,
        facts: fields::facts(&document),
        top: listing(&handle, buffer),
        context: RootListing::default(),
        handle,
        buffer,
        options,
        report,
        endless: false,
    };
    task.check(&document);
    task.report.ask &= !task.endless;
    if task.report.ask {
        let is_harbors = |code| {
            [
                "missing-instruction",
                "missing-tests",
                "missing-environment",
            ]
            .contains(&code)
        };
        task.report
            .findings
            .retain(|finding| !is_harbors(finding.code));
    }
    task.report
}

impl Report {
    fn add(&mut self, code: &'static str, file: impl Into<PathBuf>, message: impl Into<String>) {
        self.findings.push(Finding {
            code,
            file: file.into(),
            line: 0,
            column: 0,
            message: message.into(),
        });
    }
}

enum Content {
    Bytes(Vec<u8>),
    TooLarge(u64),
    NotAFile,
}

fn read(directory: &Directory, file: &Path, limit: u64) -> io::Result<Content> {
    let Some((opened, size)) = directory.file(file)? else {
        return Ok(Content::NotAFile);
    };
    if size > limit {
        return Ok(Content::TooLarge(size));
    }
    // A byte more than the size, so that one read says both all and no more.
    let mut bytes = Vec::with_capacity(size as usize + 1);
    loop {
        let count = retry_on_intr(|| rustix::io::read(&opened, spare_capacity(&mut bytes)))?;
        if count == 0 || bytes.len() as u64 >= size {
            return Ok(Content::Bytes(bytes));
        }
    }
}

/// What decides which files a build of `environment/Dockerfile` sees; `None` if that cannot be told.
fn read_ignore_file(task: &Directory) -> Option<Option<Vec<u8>>> {
    for name in ["Dockerfile.dockerignore", ".dockerignore"] {
        match read(task, &Path::new("environment").join(name), MAX_SEARCHED) {
            Ok(Content::Bytes(content)) => return Some(Some(content)),
            Err(error) if is_missing(&error) => {}
            _ => return None,
        }
    }
    Some(None)
}

/// Line and column of the first byte that is not UTF-8.
fn place(bytes: &[u8], error: Utf8Error) -> (usize, usize) {
    let valid = std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default();
    toml::position(valid, valid.len())
}

fn is_missing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

/// What a directory holds; what cannot be listed is left out.
fn listing(directory: &Directory, buffer: &mut Buffer) -> Vec<(OsString, FileType)> {
    let mut found = Vec::new();
    let _ = directory.list(buffer, |name, kind| found.push((name.to_owned(), kind)));
    found
}

fn has(listing: &[(OsString, FileType)], name: &str) -> bool {
    listing.iter().any(|(found, _)| found == name)
}

/// A tree of Harbor's inputs: nothing but plain files and directories, or not for us to judge.
#[derive(Default)]
struct Inputs {
    /// Below the task's directory.
    files: Vec<PathBuf>,
    plain: bool,
}

/// What has the name of a file that a task must have.
enum Place {
    File,
    /// A link, or something behind one: Harbor knows.
    Unclear,
    /// A directory, a pipe, a device.
    NoFile,
    Nothing,
}

struct Task<'a> {
    directory: &'a Path,
    text: &'a str,
    facts: Facts,
    handle: Directory,
    buffer: &'a mut Buffer,
    /// What the task's directory and its `environment` hold.
    top: Vec<(OsString, FileType)>,
    context: RootListing,
    options: &'a Options,
    report: Report,
    /// Harbor would read on and on, so it is not asked.
    endless: bool,
}

impl Task<'_> {
    fn check(&mut self, document: &Document<'_>) {
        let tests = self.inputs("tests");
        let solution = self.inputs("solution");
        let has_steps = !self.facts.steps.is_empty();
        let steps = if has_steps {
            self.inputs("steps")
        } else {
            Inputs {
                plain: true,
                ..Inputs::default()
            }
        };
        let is_listed = has(&self.top, "task.toml");
        self.report.ask =
            !(self.facts.sure && is_listed && tests.plain && solution.plain && steps.plain)
                || self.facts.separate_verifier;

        let mut key = DefaultHasher::new();
        if has_steps {
            self.check_steps(&tests, &steps, &mut key);
        } else {
            self.check_instruction(Path::new("instruction.md"), &mut key);
            self.require_test(&tests, None);
        }
        self.check_environment(&solution, &tests);
        self.check_backend();
        for (offset, name) in std::mem::take(&mut self.facts.host_variables) {
            self.at("needs-variable", offset, &name);
        }
        if self.options.only_errors {
            return;
        }
        if self.facts.no_timeout {
            self.report.add(
                "no-timeout",
                "task.toml",
                "[agent].timeout_sec is not set: under Harbor the agent may work for ever",
            );
        }
        if !self.facts.separate_verifier {
            self.check_reward(&tests, &steps);
        }
        self.check_nested();
        hash_document(document, document.root(), &mut key, true);
        self.report.key = key.finish();
    }

    fn at(&mut self, code: &'static str, offset: Offset, message: &str) {
        let (line, column) = toml::position(self.text, offset);
        self.report.findings.push(Finding {
            code,
            file: PathBuf::from("task.toml"),
            line,
            column,
            message: message.to_owned(),
        });
    }

    fn inputs(&mut self, name: &str) -> Inputs {
        let mut inputs = Inputs {
            plain: true,
            ..Inputs::default()
        };
        match self.top.iter().find(|(found, _)| found == name) {
            Some((_, FileType::Directory)) => {}
            // A link, a file, or something of an unknown kind.
            Some(_) => {
                inputs.plain = false;
                return inputs;
            }
            None => return inputs,
        }
        let mut waiting = vec![(PathBuf::from(name), 0)];
        while let Some((path, depth)) = waiting.pop() {
            let listed = self.handle.below(&path).and_then(|directory| {
                directory.list(self.buffer, |name, kind| match kind {
                    _ if name == ".harborignore" => inputs.plain = false,
                    FileType::Directory if depth < MAX_DEPTH => {
                        waiting.push((path.join(name), depth + 1));
                    }
                    FileType::RegularFile => inputs.files.push(path.join(name)),
                    FileType::Directory | FileType::Symlink | FileType::Unknown => {
                        inputs.plain = false;
                    }
                    _ => {}
                })
            });
            inputs.plain &= listed.is_ok();
        }
        inputs
    }

    fn script(&self) -> &'static str {
        if self.facts.windows.is_some() {
            "test.bat"
        } else {
            "test.sh"
        }
    }

    /// What has this name among the inputs.
    fn place(&self, path: &Path, inputs: &Inputs) -> Place {
        if inputs.files.iter().any(|file| file == path) {
            return Place::File;
        }
        let path = self.directory.join(path);
        match fs::metadata(&path) {
            Ok(found) if found.is_file() => Place::Unclear,
            Ok(_) => Place::NoFile,
            Err(_) if fs::symlink_metadata(&path).is_ok() => Place::Unclear,
            Err(_) => Place::Nothing,
        }
    }

    fn require_test(&mut self, tests: &Inputs, step: Option<(&Path, &Inputs)>) {
        let shared = Path::new("tests").join(self.script());
        let own = step.map(|(directory, inputs)| (directory.join(&shared), inputs));
        for (path, inputs) in own.iter().chain([&(shared.clone(), tests)]) {
            match self.place(path, inputs) {
                Place::Nothing => continue,
                Place::File => {}
                Place::Unclear => self.report.ask = true,
                // The verifier may not need it.
                Place::NoFile if self.facts.separate_verifier => self.report.ask = true,
                Place::NoFile => self
                    .report
                    .add("tests-unreadable", path, "not a regular file"),
            }
            return;
        }
        match own {
            None => self
                .report
                .add("missing-tests", &shared, "there is no such verifier script"),
            Some((path, _)) => {
                let message = format!(
                    "there is neither this verifier script nor {}",
                    shared.display()
                );
                self.report.add("missing-tests", path, message);
            }
        }
    }

    fn check_instruction(&mut self, file: &Path, key: &mut DefaultHasher) {
        let mut unreadable = |message: String| {
            self.report.add("instruction-unreadable", file, message);
        };
        match read(&self.handle, file, MAX_TEXT) {
            Ok(Content::Bytes(bytes)) => match std::str::from_utf8(&bytes) {
                Ok(text) => {
                    bytes.hash(key);
                    if is_empty_instruction(text) {
                        self.report
                            .add("instruction-empty", file, "the instruction is empty");
                    }
                }
                Err(error) => {
                    let (line, column) = place(&bytes, error);
                    self.report.findings.push(Finding {
                        code: "instruction-unreadable",
                        file: file.to_owned(),
                        line,
                        column,
                        message: "not UTF-8".to_owned(),
                    });
                }
            },
            Ok(Content::TooLarge(size)) => {
                unreadable(format!(
                    "{size} bytes, more than the {MAX_TEXT} that are read of an instruction"
                ));
                self.endless = true;
            }
            Ok(Content::NotAFile) => {
                unreadable("not a regular file".to_owned());
                self.endless = true;
            }
            Err(error) if is_missing(&error) => {
                self.report
                    .add("missing-instruction", file, "there is no such file");
            }
            Err(error) => unreadable(error.to_string()),
        }
    }

    fn check_steps(&mut self, tests: &Inputs, steps: &Inputs, key: &mut DefaultHasher) {
        for name in std::mem::take(&mut self.facts.steps) {
            let directory = Path::new("steps").join(&name);
            let instruction = directory.join("instruction.md");
            match self.place(&instruction, steps) {
                Place::File => self.check_instruction(&instruction, key),
                Place::Unclear => self.report.ask = true,
                Place::NoFile => {
                    self.report
                        .add("instruction-unreadable", instruction, "not a regular file");
                }
                Place::Nothing => {
                    self.report
                        .add("missing-instruction", instruction, "there is no such file");
                }
            }
            self.require_test(tests, Some((&directory, steps)));
            self.facts.steps.push(name);
        }
    }

    fn check_environment(&mut self, solution: &Inputs, tests: &Inputs) {
        let is_context = match self.top.iter().find(|(name, _)| name == "environment") {
            None => false,
            Some((_, FileType::Directory)) => true,
            Some(_) => self.directory.join("environment").is_dir(),
        };
        if is_context && let Ok(context) = self.handle.below(Path::new("environment")) {
            self.context = listing(&context, self.buffer).into();
        }
        if self.facts.docker_image.is_some() {
            // The Dockerfile of such a task is not built.
            return;
        }
        if !is_context {
            self.report.add(
                "missing-environment",
                "environment",
                "there is no such directory, and no docker_image is set",
            );
            return;
        }
        let has_compose = has(&self.context, "docker-compose.yaml");
        let file = Path::new("environment/Dockerfile");
        let source = match read(&self.handle, file, MAX_DOCKERFILE) {
            Ok(Content::Bytes(source)) => source,
            Err(error) if is_missing(&error) => {
                if !has_compose {
                    self.report.add(
                        "missing-dockerfile",
                        "environment",
                        "there is neither a Dockerfile nor a docker-compose.yaml, and no docker_image is set",
                    );
                }
                return;
            }
            Ok(Content::TooLarge(_)) => return,
            Ok(Content::NotAFile) => {
                self.report.add(
                    "dockerfile-unreadable",
                    "environment/Dockerfile",
                    "not a regular file",
                );
                return;
            }
            Err(error) => {
                self.report.add(
                    "dockerfile-unreadable",
                    "environment/Dockerfile",
                    error.to_string(),
                );
                return;
            }
        };
        // Compose may build something else, or otherwise; Windows has rules of its own.
        if has_compose || self.facts.windows.is_some() {
            return;
        }
        self.check_dockerfile(&source, solution, tests);
    }

    fn check_dockerfile(&mut self, source: &[u8], solution: &Inputs, tests: &Inputs) {
        let context = &self.directory.join("environment");
        let ignores = ["Dockerfile.dockerignore", ".dockerignore"];
        let ignore = if ignores.iter().any(|name| has(&self.context, name)) {
            let Some(ignore) = read_ignore_file(&self.handle) else {
                return;
            };
            ignore
        } else {
            None
        };
        let quick = PlanOptions {
            quick: Some(Rc::clone(&self.context)),
            ..PlanOptions::default()
        };
        let mut plan = dockerfile::copy_plan(source, ignore.as_deref(), context, &quick);
        for error in std::mem::take(&mut plan.errors) {
            let is_ignore = error.code.starts_with("ignore-");
            let (code, message) = match error.code {
                "source-missing" => ("copy-missing", error.message),
                _ => ("dockerfile-invalid", error.message),
            };
            self.report.findings.push(Finding {
                code,
                file: PathBuf::from(if is_ignore {
                    "environment/.dockerignore"
                } else {
                    "environment/Dockerfile"
                }),
                line: error.line,
                column: error.column.unwrap_or(0),
                message,
            });
        }
        if self.options.only_errors {
            return;
        }
        let looked_at = MAX_LOOKED_AT.min(MAX_REMOVAL_STEPS / source.len().max(1));
        let wanted = |entry: &dockerfile::Entry| match (entry.kind, entry.source.as_deref()) {
            (EntryKind::File, Some(path)) if !is_removed(entry, path, source) => {
                self.why_answer(path, solution, tests)
            }
            _ => None,
        };
        if !plan
            .entries
            .iter()
            .take(looked_at)
            .any(|entry| wanted(entry).is_some())
        {
            return;
        }
        plan = dockerfile::copy_plan(source, ignore.as_deref(), context, &PlanOptions::default());
        // One finding for an instruction, however many files it copies.
        let mut by_line: BTreeMap<usize, (String, usize)> = BTreeMap::new();
        for entry in plan.entries.iter().take(looked_at) {
            if let Some(why) = wanted(entry).filter(|_| stays(entry, source)) {
                let path = entry.source.as_deref().unwrap_or_default();
                let message = || {
                    format!(
                        "{path} is copied to {} and stays there: {why}",
                        entry.destination
                    )
                };
                by_line
                    .entry(entry.line)
                    .or_insert_with(|| (message(), 0))
                    .1 += 1;
            }
        }
        for (line, (message, files)) in by_line {
            let more = if files > 1 {
                format!(" (and {} more)", files - 1)
            } else {
                String::new()
            };
            self.report.findings.push(Finding {
                code: "answer-copied",
                file: PathBuf::from("environment/Dockerfile"),
                line,
                column: 0,
                message: message + &more,
            });
        }
    }

    /// Why a file of the build context gives the answer away.
    fn why_answer(&self, path: &str, solution: &Inputs, tests: &Inputs) -> Option<String> {
        if let Some(same) = self.same_as(path, solution) {
            return Some(format!("it holds the same as {}", same.display()));
        }
        if path.starts_with("tests/")
            && let Some(same) = self.same_as(path, tests)
        {
            return Some(format!(
                "it holds the same as {}, which the verifier runs",
                same.display()
            ));
        }
        (path.matches('/').count() < 2 && says_answer(path))
            .then(|| "its name says that it holds a patch or an answer".to_owned())
    }

    /// The file of `inputs` with the name and the content of a file in the build context.
    fn same_as(&self, path: &str, inputs: &Inputs) -> Option<PathBuf> {
        let name = Path::new(path).file_name()?;
        let mut alike = inputs
            .files
            .iter()
            .filter(|file| file.file_name() == Some(name))
            .peekable();
        alike.peek()?;
        let file = Path::new("environment").join(path);
        let Ok(Content::Bytes(content)) = read(&self.handle, &file, MAX_SEARCHED) else {
            return None;
        };
        if content.is_empty() {
            return None;
        }
        alike
            .find(|file| {
                matches!(read(&self.handle, file, MAX_SEARCHED), Ok(Content::Bytes(other)) if other == content)
            })
            .cloned()
    }

    fn check_backend(&mut self) {
        let lacks = self.options.lacks;
        let facts = &self.facts;
        let wants = [
            (
                lacks.gpus,
                facts.gpus,
                "needs-gpu",
                "the task asks for GPUs",
            ),
            (
                lacks.tpus,
                facts.tpu,
                "needs-tpu",
                "the task asks for a TPU",
            ),
            (
                lacks.windows,
                facts.windows,
                "needs-windows",
                "the task runs on Windows",
            ),
            (
                lacks.images,
                facts.docker_image,
                "needs-image",
                "the task runs an image that is built already",
            ),
            (
                lacks.no_network,
                facts.no_network,
                "needs-network-policy",
                "a phase of the task has no network",
            ),
            (
                lacks.allowlist,
                facts.allowlist,
                "needs-network-policy",
                "a phase of the task may reach listed hosts only",
            ),
            (
                lacks.changing_network,
                facts.changing_network,
                "needs-network-policy",
                "this phase has another network policy than the environment",
            ),
        ];
        let mut last = None;
        for (is_lacking, offset, code, message) in wants {
            if let Some(offset) = offset
                && is_lacking
                && last != Some((code, offset))
            {
                last = Some((code, offset));
                self.at(code, offset, message);
            }
        }
        if lacks.compose {
            let file = "environment/docker-compose.yaml";
            if fs::metadata(self.directory.join(file)).is_ok() {
                self.report
                    .add("needs-compose", file, "the task has compose services");
            }
        }
    }

    /// Nothing that the verifier runs speaks of a reward. What it calls in the image cannot be seen, so only a script
    /// that calls nothing of the kind is reported.
    fn check_reward(&mut self, tests: &Inputs, steps: &Inputs) {
        let mut scripts = Vec::new();
        let mut others = Vec::new();
        let in_tests = |file: &&PathBuf| {
            file.components()
                .nth(2)
                .is_some_and(|part| part.as_os_str() == "tests")
        };
        for file in tests
            .files
            .iter()
            .chain(steps.files.iter().filter(in_tests))
        {
            if file.file_name().is_some_and(|name| name == "test.sh") {
                scripts.push(file);
            } else {
                others.push(file);
            }
        }
        if scripts.is_empty() || others.len() > MAX_LOOKED_AT {
            return;
        }
        for script in &scripts {
            match self.words_of(script) {
                Some(text) if !calls_unseen(&text) => {}
                _ => return,
            }
        }
        for file in others {
            if self.words_of(file).is_none() {
                return;
            }
        }
        if has(&self.context, "docker-compose.yaml") {
            return;
        }
        self.report.add(
            "no-reward",
            scripts[0],
            "neither this script nor another file of the tests speaks of a reward, so no reward is written",
        );
    }

    /// The text of a file that is no reason to believe in a reward; `None` if it is one.
    fn words_of(&self, file: &Path) -> Option<String> {
        let Ok(Content::Bytes(bytes)) = read(&self.handle, file, MAX_SEARCHED) else {
            return None;
        };
        let text = String::from_utf8(bytes).ok()?;
        let speaks = text
            .as_bytes()
            .windows(6)
            .any(|window| window.eq_ignore_ascii_case(b"reward") || window == b"/logs/");
        (!speaks).then_some(text)
    }

    fn check_nested(&mut self) {
        let mut waiting = vec![PathBuf::new()];
        let mut seen = 0;
        while let Some(path) = waiting.pop() {
            let found;
            let entries = if path.as_os_str().is_empty() {
                &self.top
            } else if path == Path::new("environment") && !self.context.is_empty() {
                &*self.context
            } else {
                let directory = self.handle.below(&path);
                found = directory
                    .map_or_else(|_| Vec::new(), |directory| listing(&directory, self.buffer));
                &found
            };
            let (mut has_toml, mut has_more) = (false, false);
            for (name, kind) in entries {
                seen += 1;
                let is_hidden = name.as_bytes().first() == Some(&b'.');
                let is_own = path.as_os_str().is_empty() && (name == "tests" || name == "solution");
                if *kind == FileType::Directory && !is_hidden && !is_own {
                    waiting.push(path.join(name));
                }
                has_toml |= name == "task.toml" && *kind == FileType::RegularFile;
                has_more |= (name == "instruction.md" && *kind == FileType::RegularFile)
                    || (name == "environment" && *kind == FileType::Directory);
            }
            if has_toml && has_more && !path.as_os_str().is_empty() {
                self.report.add(
                    "nested-task",
                    path.join("task.toml"),
                    "a task inside a task: it does not belong to the suite",
                );
            }
            if seen > MAX_LOOKED_AT {
                return;
            }
        }
    }
}

/// Harbor drops leading canary lines before it shows an instruction.
fn is_empty_instruction(text: &str) -> bool {
    let is_canary = |line: &str| {
        let line = line.trim().to_ascii_lowercase();
        line.contains("canary")
            && ((line.starts_with("<!--") && line.ends_with("-->")) || line.starts_with('#'))
    };
    text.lines()
        .skip_while(|line| is_canary(line))
        .all(|line| line.trim().is_empty())
}

/// The lines behind the one with this number, counted from 1, without comments.
fn later_lines(source: &[u8], line: usize) -> impl Iterator<Item = &[u8]> {
    source
        .split(|&b| b == b'\n')
        .skip(line)
        .filter(|line| !line.trim_ascii_start().starts_with(b"#"))
}

fn words_of_line(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|b| !b.is_ascii_alphanumeric())
}

/// Whether a later line plainly removes a COPY'd file; that it does not is no proof of the contrary.
fn is_removed(entry: &dockerfile::Entry, path: &str, source: &[u8]) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).as_bytes();
    later_lines(source, entry.line).any(|line| {
        line.windows(name.len()).any(|window| window == name)
            && words_of_line(line).any(|word| word == b"rm")
    })
}

/// Whether a COPY'd file is surely still there at the end.
fn stays(entry: &dockerfile::Entry, source: &[u8]) -> bool {
    /// Any of these may remove or empty a file without its name being seen.
    const REMOVERS: &[&[u8]] = &[
        b"rm",
        b"mv",
        b"unlink",
        b"shred",
        b"delete",
        b"truncate",
        b"remove",
        b"rmtree",
        b"clean",
        b"sh",
        b"py",
        b"python",
        b"python3",
        b"perl",
        b"node",
        b"ruby",
        b"make",
        b"bash",
        b"source",
        b"find",
        b"xargs",
        b"eval",
        b"rsync",
        b"sed",
        b"install",
        b"tar",
    ];
    /// What a RUN that only applies a patch is said to do.
    const APPLIED: &[&str] = &[
        "it names",
        "it runs `patch` in a directory that isn't known",
    ];
    entry.touched.as_ref().is_none_or(|touched| {
        APPLIED
            .iter()
            .any(|reason| touched.reason.starts_with(reason))
            && !later_lines(source, entry.line)
                .flat_map(words_of_line)
                .any(|word| REMOVERS.contains(&word))
    })
}

fn says_answer(path: &str) -> bool {
    const WORDS: &[&str] = &["answer", "answers", "solution", "solutions"];
    const HARMLESS: &[&str] = &[
        "template", "example", "examples", "sample", "schema", "format", "stub", "skeleton",
        "empty", "test", "tests", "bug", "break", "inject", "readme",
    ];
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    let (stem, extension) = name.rsplit_once('.').unwrap_or((&name, ""));
    let mut words = stem.split(|c: char| !c.is_ascii_alphanumeric()).peekable();
    let all: Vec<&str> = words.by_ref().collect();
    let is_patch = matches!(extension, "patch" | "diff") || all.contains(&"patch");
    let is_harmless = all.iter().any(|word| HARMLESS.contains(word));
    (is_patch && matches!(extension, "patch" | "diff"))
        || (!is_harmless && all.iter().any(|word| WORDS.contains(word)))
}

/// Whether a shell script runs something that is neither a well-known tool nor a file of the tests.
fn calls_unseen(script: &str) -> bool {
    const KNOWN: &[&str] = &[
        "[", "[[", "apk", "apt", "apt-get", "awk", "break", "cargo", "cat", "cd", "chmod",
        "continue", "cp", "curl", "date", "diff", "do", "done", "echo", "elif", "else", "esac",
        "exit", "export", "false", "fi", "find", "for", "function", "git", "go", "grep", "head",
        "if", "ls", "mkdir", "mv", "pip", "pip3", "popd", "printf", "pushd", "pwd", "pytest",
        "read", "return", "rm", "sed", "set", "shift", "sleep", "sort", "tail", "tar", "test",
        "then", "touch", "tr", "true", "unset", "uv", "uvx", "wait", "wc", "wget", "while", "{",
        "}", "(", ")", "!", "python", "python3", "bash", "sh",
    ];
    const PLACES: &[&str] = &[
        "/tests",
        "/tmp",
        "/dev/",
        "/bin/",
        "/usr/bin/",
        "/usr/local/bin/",
    ];
    for line in script
        .lines()
        .map(str::trim)
        .filter(|line| !line.starts_with('#'))
    {
        let mut is_command = true;
        for word in line.split_whitespace() {
            let bare = word.trim_matches(|c| "\"'`;()&|".contains(c));
            let is_elsewhere = bare.contains('/')
                && !PLACES.iter().any(|place| bare.starts_with(place))
                && !bare.contains("://");
            let is_script = [".sh", ".py", ".js", ".pl", ".rb"]
                .iter()
                .any(|end| bare.ends_with(end));
            if is_command {
                let is_assignment = bare.split_once('=').is_some_and(|(name, _)| {
                    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
                });
                if !is_assignment && !bare.is_empty() && !KNOWN.contains(&bare) {
                    return true;
                }
            }
            if bare.contains('$')
                || (is_elsewhere && is_script)
                || bare == "-m"
                || (is_script && !bare.contains('/'))
            {
                // `python -m pytest` is the one module that is known.
                if !(bare == "-m" && line.contains("-m pytest")) {
                    return true;
                }
            }
            is_command = matches!(
                bare,
                "" | "if" | "then" | "else" | "do" | "!" | "while" | "{" | "elif"
            ) || word.ends_with(';')
                || matches!(word, "&&" | "||" | "|" | ";");
        }
    }
    false
}

/// Without what only names and describes a task.
fn hash_document(
    document: &Document<'_>,
    table: &toml::Table<'_>,
    key: &mut DefaultHasher,
    is_root: bool,
) {
    for entry in table.entries() {
        if is_root
            && matches!(
                &*entry.key,
                "task" | "metadata" | "version" | "schema_version" | "source"
            )
        {
            continue;
        }
        entry.key.hash(key);
        hash_value(document, &entry.value, key);
    }
    key.write_u8(0xfe);
}

fn hash_value(document: &Document<'_>, value: &Value<'_>, key: &mut DefaultHasher) {
    std::mem::discriminant(value).hash(key);
    match value {
        Value::Bool(v) => v.hash(key),
        Value::Int(v) => v.hash(key),
        Value::BigInt(v) => v.hash(key),
        Value::Float(v) => v.to_bits().hash(key),
        Value::Str(v) => v.hash(key),
        Value::Array(items) => items
            .iter()
            .for_each(|item| hash_value(document, item, key)),
        Value::Tables(ids) => ids
            .iter()
            .for_each(|id| hash_document(document, document.table(*id), key, false)),
        Value::Table(id) => hash_document(document, document.table(*id), key, false),
        // Dates have no place in a config; two that differ only there count as the same until compared.
        Value::Date(_) | Value::Time(_) | Value::LocalDateTime(..) | Value::DateTime(..) => {}
    }
}

/// For each task the place of the first one whose directory holds the same, hidden files and `task.toml` aside; its own
/// where there is none before it. Contents are read only where names and sizes agree, and not beyond [`MAX_COMPARED`].
pub fn same_content(root: &Path, tasks: &[PathBuf], watch: Watch<'_>) -> Result<Vec<usize>, Error> {
    let mut since_watch = Instant::now();
    let mut go_on = || {
        if since_watch.elapsed() < WATCH_INTERVAL {
            return Ok(());
        }
        since_watch = Instant::now();
        watch(0, 0).then_some(()).ok_or(Error::Stopped)
    };
    let mut alike: HashMap<Vec<Held>, Vec<usize>> = HashMap::new();
    for (at, task) in tasks.iter().enumerate() {
        go_on()?;
        if let Some(held) = held(&root.join(task)) {
            alike.entry(held).or_default().push(at);
        }
    }
    let mut firsts: Vec<usize> = (0..tasks.len()).collect();
    for (held, places) in alike.iter().filter(|(_, places)| places.len() > 1) {
        let mut first = HashMap::new();
        for &at in places {
            go_on()?;
            if let Some(digest) = digest(&root.join(&tasks[at]), held) {
                firsts[at] = *first.entry(digest).or_insert(at);
            }
        }
    }
    Ok(firsts)
}

/// A file of a task: its path, and its size or where it leads.
type Held = (PathBuf, Result<u64, PathBuf>);

/// `None` if that cannot be told, or is too much to compare.
fn held(directory: &Path) -> Option<Vec<Held>> {
    let mut files = Vec::new();
    let mut size = 0;
    let mut waiting = vec![PathBuf::new()];
    while let Some(path) = waiting.pop() {
        for entry in fs::read_dir(directory.join(&path)).ok()? {
            let entry = entry.ok()?;
            let name = entry.file_name();
            if name.as_bytes().first() == Some(&b'.')
                || (path.as_os_str().is_empty() && name == *"task.toml")
            {
                continue;
            }
            let below = path.join(&name);
            let metadata = entry.metadata().ok()?;
            if metadata.is_dir() {
                waiting.push(below);
                continue;
            }
            files.push(if metadata.is_file() {
                size += metadata.len();
                (below, Ok(metadata.len()))
            } else {
                // Empty for what is no link.
                (below, Err(fs::read_link(entry.path()).unwrap_or_default()))
            });
            if files.len() > MAX_LOOKED_AT || size > MAX_COMPARED {
                return None;
            }
        }
    }
    files.sort_unstable();
    Some(files)
}

/// Of the contents of these files; `None` if one cannot be read, or has changed since.
fn digest(directory: &Path, files: &[Held]) -> Option<u128> {
    let directory = Directory::open(directory).ok()?;
    let mut hashers = [DefaultHasher::new(), DefaultHasher::new()];
    hashers[1].write_u8(1);
    for (path, size) in files {
        let Ok(size) = size else { continue };
        match read(&directory, path, *size).ok()? {
            Content::Bytes(bytes) if bytes.len() as u64 == *size => {
                hashers.iter_mut().for_each(|hasher| hasher.write(&bytes));
            }
            _ => return None,
        }
    }
    Some((u128::from(hashers[0].finish()) << 64) | u128::from(hashers[1].finish()))
}

/// Line and column of a key of a `task.toml`, as far down as it is there; table headers count.
pub fn locate(text: &str, version: Version, path: &[Step<'_>]) -> Option<(usize, usize)> {
    let document = Document::parse(text, version).ok()?;
    let mut table = Some(document.root());
    let mut found = None;
    let mut array: Option<&Value<'_>> = None;
    for step in path {
        match step {
            Step::Key(key) => {
                let Some(entry) = table.and_then(|table| table.get(key)) else {
                    break;
                };
                found = Some(entry.start);
                array = Some(&entry.value);
            }
            Step::Index(index) => {
                let item = match array {
                    Some(Value::Tables(ids)) => ids.get(*index).map(|id| document.table(*id)),
                    Some(Value::Array(items)) => match items.get(*index) {
                        Some(Value::Table(id)) => Some(document.table(*id)),
                        _ => None,
                    },
                    _ => None,
                };
                // An array of tables begins with its first header; the table itself is known by its first key.
                if let Some(first) = item.and_then(|item| item.entries().first()) {
                    found = Some(first.start);
                }
                table = item;
                array = None;
                continue;
            }
        }
        table = match array {
            Some(Value::Table(id)) => Some(document.table(*id)),
            _ => None,
        };
    }
    found.map(|offset| toml::position(text, offset))
}

pub enum Step<'a> {
    Key(&'a str),
    Index(usize),
}
