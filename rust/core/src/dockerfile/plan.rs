//! The copy plan: what COPY and ADD put where, stage by stage.

mod copy;
mod files;
mod mode;

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use super::context::{Context, RootListing};
use super::ignore::{IgnorePatterns, PatternProblem, parse_ignore_file};
use super::instruction::{self, Command, CommandKind, Parts, Stage};
use super::run::{self, Effects};
use super::shell::{Expanded, ShellError, Value, expand};
use super::stages::{Source, StageGraph};
use super::tree::{Lookup, Node, Tree};
use super::{BuildError, parser, paths};

#[derive(Debug, Clone, Default)]
pub struct PlanOptions {
    /// Stage name; the last stage if none.
    pub target: Option<String>,
    pub build_args: HashMap<String, String>,
    /// What the context's directory holds. With it, a RUN counts as one that may touch everything, its commands unread,
    /// and the modes of the context's files stay unknown: several times as fast.
    pub quick: Option<RootListing>,
    /// Variables that the base image is known to set; others stay unknown.
    pub base_env: HashMap<String, String>,
    /// The base image's working directory and user, where they are known.
    pub base_workdir: Option<String>,
    pub base_user: Option<String>,
}

#[derive(Debug, Clone, Default)]
pub struct CopyPlan {
    /// In the order in which the build puts them there.
    pub entries: Vec<Entry>,
    /// Directories that WORKDIR makes where they are missing, in order; where their names are known.
    pub workdirs: Vec<Entry>,
    /// Image that the stage is built on in the end; none if that is unknown.
    pub base: Option<String>,
    pub stage: String,
    /// None: the base image decides.
    pub workdir: Option<String>,
    pub user: Option<String>,
    /// What ENV sets; None for a value that isn't known.
    pub env: BTreeMap<String, Option<String>>,
    pub errors: Vec<BuildError>,
    pub unknowns: Vec<Unknown>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    File,
    Directory,
    Symlink,
    /// A tar file that ADD unpacks into `destination`.
    Archive,
    /// Device, pipe or socket.
    Special,
}

#[derive(Debug, Clone)]
pub struct Entry {
    pub destination: String,
    pub kind: EntryKind,
    /// Path in the context, no leading `/`.
    pub source: Option<String>,
    /// A heredoc's content.
    pub content: Option<Arc<Vec<u8>>>,
    pub link: Option<String>,
    pub mode: Option<u32>,
    /// `user:group` as ids, or as names where the image's files decide; None: unknown.
    pub owner: Option<String>,
    pub line: usize,
    /// A directory that is only made if it isn't there, and else stays as it is.
    pub if_missing: bool,
    /// Where a file lands if `destination` turns out to be a directory of the image.
    pub if_directory: Option<String>,
    pub touched: Option<Touched>,
}

#[derive(Debug, Clone)]
pub struct Touched {
    pub line: usize,
    pub reason: String,
}

/// Something that could not be worked out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unknown {
    pub line: usize,
    pub reason: String,
}

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Set by the builder for the machine it runs on.
const PLATFORM_ARGS: [&str; 11] = [
    "BUILDPLATFORM",
    "BUILDOS",
    "BUILDOSVERSION",
    "BUILDARCH",
    "BUILDVARIANT",
    "TARGETPLATFORM",
    "TARGETOS",
    "TARGETOSVERSION",
    "TARGETARCH",
    "TARGETVARIANT",
    "TARGETSTAGE",
];

const MAX_ENTRIES: usize = 1_000_000;
const MAX_STAGES: usize = 256;
/// Paths looked at, over all instructions.
const MAX_VISITS: usize = 20_000_000;
/// Comparisons of an entry with a RUN.
const MAX_TOUCH_STEPS: usize = 200_000_000;
/// Longest path that Linux takes.
const MAX_PATH: usize = 4096;

/// Works out what a build of `dockerfile` in `context` copies into the target stage.
///
/// `ignore_name` is the Dockerfile's own name: `NAME.dockerignore` beside it wins over `.dockerignore`.
/// What a build refuses stands in `errors`; the rest of the plan is then as complete as it can be.
pub fn copy_plan(
    dockerfile: &[u8],
    ignore_file: Option<&[u8]>,
    context: &Path,
    options: &PlanOptions,
) -> CopyPlan {
    let mut planner = Planner {
        plan: CopyPlan::default(),
        context: None,
        options,
        source: dockerfile,
        line_starts: OnceCell::new(),
        escape: '\\',
        globals: HashMap::new(),
        visits: 0,
        entries: 0,
        sent: Vec::new(),
        sent_unknown: false,
        fruitless: Vec::new(),
    };
    if let Err(error) = planner.run(ignore_file, context) {
        planner.plan.errors.push(error);
    }
    planner.plan
}

/// The `.dockerignore` that a build with this Dockerfile and context reads.
///
/// # Errors
/// A file that is there and cannot be read.
pub fn read_ignore_file(dockerfile: &Path, context: &Path) -> std::io::Result<Option<Vec<u8>>> {
    let mut own = dockerfile.as_os_str().to_owned();
    own.push(".dockerignore");
    for path in [Path::new(&own), &context.join(".dockerignore")] {
        match fs::read(path) {
            Ok(content) => return Ok(Some(content)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

#[derive(Clone)]
enum Event {
    Entry(Rc<Entry>),
    Effects(Rc<Effects>),
}

#[derive(Clone)]
struct State {
    env: Rc<HashMap<String, Value>>,
    /// Names that ENV (not ARG) set.
    exported: Rc<BTreeSet<String>>,
    /// Variables that are not set here may be set by the base image.
    env_open: bool,
    workdir: Option<String>,
    workdirs: Vec<Entry>,
    user: Option<String>,
    shell: Option<Rc<Vec<String>>>,
    tree: Tree,
    /// No RUN has changed the file system, nor a copy from outside.
    traceable: bool,
    events: Vec<Event>,
    base: Option<usize>,
    image: Option<String>,
    onbuild: Vec<instruction::Onbuild>,
}

impl State {
    fn get(&self, name: &str) -> Value {
        match self.env.get(name) {
            Some(value) => value.clone(),
            None if self.env_open => Value::Unknown,
            None => Value::Unset,
        }
    }
}

struct Planner<'a> {
    plan: CopyPlan,
    context: Option<Rc<RefCell<Context>>>,
    options: &'a PlanOptions,
    source: &'a [u8],
    line_starts: OnceCell<Vec<usize>>,
    escape: char,
    globals: HashMap<String, Value>,
    visits: usize,
    entries: usize,
    /// Context paths that copies name or match: what a builder is sent.
    sent: Vec<String>,
    sent_unknown: bool,
    /// Wildcards into a directory that matched nothing: line, source, column.
    fruitless: Vec<(usize, String, Option<usize>)>,
}

/// What directories are made like where they are missing.
struct Missing<'a> {
    mode: Option<u32>,
    owner: Option<&'a str>,
    line: usize,
}

/// Why one instruction could not be followed.
enum Stop {
    Error(BuildError),
    Unknown(String),
}

impl From<BuildError> for Stop {
    fn from(error: BuildError) -> Self {
        Self::Error(error)
    }
}

fn refuse<T>(code: &'static str, line: usize, message: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Error(BuildError::new(code, line, message)))
}

fn unclear<T>(reason: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Unknown(reason.into()))
}

impl Planner<'_> {
    fn unknown(&mut self, line: usize, reason: impl Into<String>) {
        self.plan.unknowns.push(Unknown {
            line,
            reason: reason.into(),
        });
    }

    fn run(&mut self, ignore_file: Option<&[u8]>, root: &Path) -> Result<(), BuildError> {
        let parsed = parser::parse(self.source)?;
        self.escape = parsed.escape;
        if let Some(syntax) = &parsed.syntax
            && !syntax.contains("docker/dockerfile")
        {
            self.unknown(1, format!("the frontend {syntax:?} may have other rules"));
        }
        let Parts {
            stages,
            global_args,
        } = instruction::parts(parsed.instructions)?;
        if stages.len() > MAX_STAGES {
            self.unknown(
                stages[MAX_STAGES].line,
                format!("there are more than {MAX_STAGES} stages"),
            );
            return Ok(());
        }
        self.global_args(&global_args)?;
        let graph = StageGraph::new(&stages, self.escape, &|name| self.global(name))?;
        let target = match &self.options.target {
            None => stages.len() - 1,
            Some(name) => *graph.names.get(&name.to_lowercase()).ok_or_else(|| {
                BuildError::new(
                    "target-missing",
                    0,
                    format!("there is no stage {name:?} to build"),
                )
            })?,
        };
        let needed = graph.needed(&stages, target, self.escape)?;
        self.open_context(ignore_file, root);
        let mut states: HashMap<usize, State> = HashMap::new();
        for index in needed {
            let state = self.stage(index, &stages[index], &graph, &states);
            states.insert(index, state);
        }
        self.check_fruitless();
        if let Some(context) = &self.context {
            let mut unreadable = std::mem::take(&mut context.borrow_mut().unreadable);
            unreadable.sort();
            unreadable.dedup();
            for directory in unreadable {
                self.unknown(
                    0,
                    format!(
                        "a name or link in the context's {directory:?} isn't UTF-8; it is left out"
                    ),
                );
            }
        }
        self.finish(target, &stages, states);
        Ok(())
    }

    fn open_context(&mut self, ignore_file: Option<&[u8]>, root: &Path) {
        let patterns = match ignore_file.map(parse_ignore_file).transpose() {
            Ok(patterns) => patterns.unwrap_or_default(),
            Err(error) => {
                self.plan.errors.push(error);
                return;
            }
        };
        let texts: Vec<&str> = patterns
            .iter()
            .map(|(_, pattern)| pattern.as_str())
            .collect();
        let line = |index: usize| patterns.get(index).map_or(0, |(line, _)| *line);
        match IgnorePatterns::new(&texts) {
            Ok(ignore) => {
                let context = Context::new(root, ignore, self.options.quick.clone());
                self.context = Some(Rc::new(RefCell::new(context)));
            }
            Err(PatternProblem::Refused { index, message }) => {
                let message = format!(".dockerignore line {}: {message}", line(index));
                self.plan
                    .errors
                    .push(BuildError::new("ignore-pattern", 0, message));
            }
            Err(PatternProblem::Unclear { index, message }) => {
                self.unknown(0, format!(".dockerignore line {}: {message}", line(index)));
            }
        }
    }

    fn global(&self, name: &str) -> Value {
        if let Some(value) = self.globals.get(name) {
            return value.clone();
        }
        if PLATFORM_ARGS.contains(&name) {
            return match self.options.build_args.get(name) {
                Some(value) => Value::Known(value.clone()),
                None => Value::Unknown,
            };
        }
        Value::Unset
    }

    fn global_args(&mut self, commands: &[Command]) -> Result<(), BuildError> {
        for command in commands {
            let CommandKind::Arg(pairs) = &command.kind else {
                continue;
            };
            for (name, default) in pairs {
                let value = match (self.options.build_args.get(name), default) {
                    (Some(value), _) => Value::Known(value.clone()),
                    (None, Some(default)) => {
                        match self.expand(default, command.line, &|name| self.global(name)) {
                            Ok(text) => Value::Known(text),
                            Err(Stop::Error(error)) => return Err(error),
                            Err(Stop::Unknown(_)) => Value::Unknown,
                        }
                    }
                    (None, None) => continue,
                };
                self.globals.insert(name.clone(), value);
            }
        }
        Ok(())
    }

    fn expand(
        &self,
        word: &str,
        line: usize,
        lookup: &dyn Fn(&str) -> Value,
    ) -> Result<String, Stop> {
        expanded(expand(word, self.escape, lookup), word, line)
    }

    fn stage(
        &mut self,
        index: usize,
        stage: &Stage,
        graph: &StageGraph,
        states: &HashMap<usize, State>,
    ) -> State {
        let source = &graph.bases[index];
        let mut triggers: Vec<Command> = Vec::new();
        let mut state = match source {
            Source::Stage(base) if states.contains_key(base) => {
                let mut state = states[base].clone();
                state.events = Vec::new();
                state.base = Some(*base);
                for onbuild in std::mem::take(&mut state.onbuild) {
                    match instruction::trigger(&onbuild, stage.line) {
                        Ok(command) => triggers.push(command),
                        Err(error) => self.plan.errors.push(error),
                    }
                }
                state
            }
            source => {
                let scratch = *source == Source::Scratch;
                let mut env = HashMap::new();
                env.insert(
                    "PATH".to_owned(),
                    if scratch {
                        Value::Known(DEFAULT_PATH.to_owned())
                    } else {
                        Value::Unknown
                    },
                );
                if !scratch {
                    env.extend(
                        self.options
                            .base_env
                            .iter()
                            .map(|(name, value)| (name.clone(), Value::Known(value.clone()))),
                    );
                }
                State {
                    env: Rc::new(env),
                    exported: Rc::new(BTreeSet::new()),
                    env_open: !scratch,
                    workdir: if scratch {
                        Some("/".to_owned())
                    } else {
                        self.options.base_workdir.clone()
                    },
                    workdirs: Vec::new(),
                    user: if scratch {
                        Some(String::new())
                    } else {
                        self.options.base_user.clone()
                    },
                    shell: None,
                    tree: Tree::new(!scratch),
                    traceable: true,
                    events: Vec::new(),
                    base: None,
                    image: match source {
                        Source::Image(image) => Some(image.clone()),
                        Source::Scratch => Some("scratch".to_owned()),
                        Source::Stage(_) | Source::Unknown => None,
                    },
                    onbuild: Vec::new(),
                }
            }
        };
        if *source == Source::Unknown {
            self.unknown(
                stage.line,
                format!(
                    "the base image {:?} depends on a variable that isn't known",
                    stage.base
                ),
            );
        }
        for command in triggers.iter().chain(&stage.commands) {
            match self.command(command, &mut state, graph, states, index) {
                Ok(()) => {}
                Err(Stop::Error(error)) => self.plan.errors.push(error),
                Err(Stop::Unknown(reason)) => {
                    self.unknown(command.line, reason);
                    if matches!(command.kind, CommandKind::Copy(_)) {
                        state.traceable = false;
                    }
                }
            }
        }
        state
    }

    fn command(
        &mut self,
        command: &Command,
        state: &mut State,
        graph: &StageGraph,
        states: &HashMap<usize, State>,
        index: usize,
    ) -> Result<(), Stop> {
        let line = command.line;
        match &command.kind {
            CommandKind::Env(pairs) => {
                // All of one instruction see the state before it.
                let mut values = Vec::new();
                for (name, value) in pairs {
                    let name = self.expand(name, line, &|name| state.get(name))?;
                    let value = match self.expand(value, line, &|name| state.get(name)) {
                        Ok(value) => Value::Known(value),
                        Err(Stop::Unknown(_)) => Value::Unknown,
                        Err(stop) => return Err(stop),
                    };
                    values.push((name, value));
                }
                for (name, value) in values {
                    if !state.exported.contains(&name) {
                        Rc::make_mut(&mut state.exported).insert(name.clone());
                    }
                    Rc::make_mut(&mut state.env).insert(name, value);
                }
            }
            CommandKind::Arg(pairs) => {
                for (name, default) in pairs {
                    let value = if let Some(value) = self.options.build_args.get(name) {
                        Value::Known(value.clone())
                    } else if let Some(default) = default {
                        match self.expand(default, line, &|name| state.get(name)) {
                            Ok(value) => Value::Known(value),
                            Err(Stop::Unknown(_)) => Value::Unknown,
                            Err(stop) => return Err(stop),
                        }
                    } else {
                        match self.global(name) {
                            Value::Unset => continue,
                            value => value,
                        }
                    };
                    Rc::make_mut(&mut state.env).insert(name.clone(), value);
                }
            }
            CommandKind::Workdir(path) => self.workdir(path, line, state)?,
            CommandKind::User(user) => {
                state.user = match self.expand(user, line, &|name| state.get(name)) {
                    Ok(user) => Some(user),
                    Err(Stop::Unknown(reason)) => {
                        state.user = None;
                        return Err(Stop::Unknown(reason));
                    }
                    Err(stop) => return Err(stop),
                };
            }
            CommandKind::Words(words) => {
                for word in words {
                    match self.expand(word, line, &|name| state.get(name)) {
                        Err(Stop::Error(error)) => return Err(Stop::Error(error)),
                        Ok(_) | Err(Stop::Unknown(_)) => {}
                    }
                }
            }
            CommandKind::Shell(shell) => state.shell = Some(Rc::new(shell.clone())),
            CommandKind::Onbuild(onbuild) => state.onbuild.push(onbuild.clone()),
            CommandKind::Run(run) => {
                if self.options.quick.is_some() {
                    if !state.tree.is_blank() {
                        state.tree = Tree::new(true);
                    }
                    state.traceable = false;
                    // What is touched already need not be touched again.
                    if !matches!(state.events.last(), Some(Event::Effects(last)) if last.is_any()) {
                        state
                            .events
                            .push(Event::Effects(Rc::new(Effects::any(line))));
                    }
                    return Ok(());
                }
                let shell = state.shell.as_deref().map(Vec::as_slice);
                let effects = run::effects(run, line, state.workdir.as_deref(), shell, &|name| {
                    state.get(name)
                });
                if !forget_touched(&mut state.tree, &effects, &mut self.visits) {
                    state.tree = Tree::new(true);
                }
                state.traceable = false;
                state.events.push(Event::Effects(Rc::new(effects)));
            }
            CommandKind::Copy(copy) => self.copy(copy, line, state, graph, states, index)?,
            CommandKind::Nothing => {}
        }
        Ok(())
    }

    fn workdir(&mut self, path: &str, line: usize, state: &mut State) -> Result<(), Stop> {
        let path = match self.expand(path, line, &|name| state.get(name)) {
            Ok(path) => path,
            Err(Stop::Unknown(reason)) => {
                state.workdir = None;
                return Err(Stop::Unknown(reason));
            }
            Err(stop) => return Err(stop),
        };
        // Without a known start, a relative path leads nowhere known; later instructions report it where it matters.
        let Some(full) = absolute(state.workdir.as_deref(), &path) else {
            return Ok(());
        };
        check_length(&full, line)?;
        state.workdir = Some(paths::clean(&full));
        let owner = match state.user.as_deref() {
            Some("") => Some("0:0".to_owned()),
            Some(user) => numeric_owner(user),
            None => None,
        };
        let mut made = blank(EntryKind::Directory, paths::clean(&full), line);
        (made.mode, made.owner, made.if_missing) = (Some(0o755), owner.clone(), true);
        state.workdirs.push(made);
        let Some(resolved) = state.tree.resolve(&full) else {
            return unclear("WORKDIR leads through too many links");
        };
        let missing = Missing {
            mode: Some(0o755),
            owner: owner.as_deref(),
            line,
        };
        self.make_directories(state, &resolved, &missing, false)
    }

    /// Makes the directories of a path that are missing; with `as_entries`, they are entries of the plan.
    fn make_directories(
        &mut self,
        state: &mut State,
        path: &str,
        missing: &Missing,
        as_entries: bool,
    ) -> Result<(), Stop> {
        let &Missing { mode, owner, line } = missing;
        let mut current = String::new();
        for part in paths::components(path) {
            current.push('/');
            current.push_str(part);
            let partial = match state.tree.lookup(&current) {
                Lookup::Found(node) if node.is_directory() => continue,
                Lookup::Found(_) | Lookup::NotDirectory => {
                    return refuse(
                        "not-a-directory",
                        line,
                        format!("{current} is a file, so nothing can be put below it"),
                    );
                }
                Lookup::Missing => false,
                Lookup::Unknown => true,
            };
            state.tree.put(
                &current,
                Node::directory(mode, owner.map(str::to_owned), partial),
            );
            if as_entries {
                let entry = Entry {
                    mode,
                    owner: owner.map(str::to_owned),
                    if_missing: true,
                    ..blank(EntryKind::Directory, current.clone(), line)
                };
                self.emit(&mut state.events, entry)?;
            }
        }
        Ok(())
    }

    fn emit(&mut self, events: &mut Vec<Event>, entry: Entry) -> Result<(), Stop> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return unclear(format!(
                "more than {MAX_ENTRIES} files and directories are copied; the rest is left out"
            ));
        }
        events.push(Event::Entry(Rc::new(entry)));
        Ok(())
    }

    /// Where a word stands on a line of the Dockerfile, counted from 1 in characters.
    fn column(&self, line: usize, word: &str) -> Option<usize> {
        let line_starts = self.line_starts.get_or_init(|| {
            let newlines = (0..self.source.len()).filter(|&at| self.source[at] == b'\n');
            std::iter::once(0)
                .chain(newlines.map(|at| at + 1))
                .collect()
        });
        let rest = &self.source[*line_starts.get(line.checked_sub(1)?)?..];
        let end = rest.iter().position(|&byte| byte == b'\n');
        let text = String::from_utf8_lossy(&rest[..end.unwrap_or(rest.len())]);
        let at = text.find(word)?;
        Some(text[..at].chars().count() + 1)
    }

    fn visit(&mut self) -> Result<(), Stop> {
        self.visits += 1;
        if self.visits > MAX_VISITS {
            return unclear("the context is too large to follow all copies");
        }
        Ok(())
    }

    fn finish(&mut self, target: usize, stages: &[Stage], mut states: HashMap<usize, State>) {
        let Some(state) = states.remove(&target) else {
            return;
        };
        let mut base = state.base;
        let mut chain = vec![state.events];
        while let Some(below) = base.and_then(|base| states.remove(&base)) {
            chain.push(below.events);
            base = below.base;
        }
        let mut entries: Vec<Entry> = Vec::new();
        let mut untouched: Vec<usize> = Vec::new();
        let mut steps = 0usize;
        for event in chain.into_iter().rev().flatten() {
            match event {
                Event::Entry(entry) => {
                    untouched.push(entries.len());
                    entries.push(Rc::unwrap_or_clone(entry));
                }
                Event::Effects(effects) => {
                    steps = steps.saturating_add(effects.cost().saturating_mul(untouched.len()));
                    untouched.retain(|&at| {
                        let entry = &mut entries[at];
                        let reason = if steps > MAX_TOUCH_STEPS {
                            Some("there is too much to compare".to_owned())
                        } else {
                            let also = entry.if_directory.as_deref();
                            effects
                                .touches(&entry.destination)
                                .or_else(|| also.and_then(|path| effects.touches(path)))
                        };
                        let keep = reason.is_none();
                        entry.touched = reason.map(|reason| Touched {
                            line: effects.line,
                            reason,
                        });
                        keep
                    });
                }
            }
        }
        self.plan.entries = entries;
        self.plan.base = state.image;
        self.plan.stage.clone_from(&stages[target].name);
        self.plan.workdir = state.workdir;
        self.plan.workdirs = state.workdirs;
        self.plan.user = state.user;
        self.plan.env = state
            .exported
            .iter()
            .map(|name| {
                let value = match state.env.get(name) {
                    Some(Value::Known(value)) => Some(value.clone()),
                    _ => None,
                };
                (name.clone(), value)
            })
            .collect();
    }
}

fn expanded(result: Result<Expanded, ShellError>, word: &str, line: usize) -> Result<String, Stop> {
    match result {
        Ok(expanded) if expanded.unknown.is_empty() => Ok(expanded.text),
        Ok(expanded) => {
            let names: Vec<String> = expanded
                .unknown
                .iter()
                .map(|name| format!("${name}"))
                .collect();
            let short: String = word.chars().take(80).collect();
            unclear(format!(
                "{short:?} depends on {}, which only the base image or the build sets",
                names.join(", ")
            ))
        }
        Err(ShellError::Limit(message)) => unclear(message),
        Err(ShellError::Syntax(message)) => {
            let short: String = word.chars().take(80).collect();
            refuse("substitution", line, format!("{short:?}: {message}"))
        }
    }
}

/// A path made absolute; a trailing slash stays. None without a working directory to start from.
fn absolute(workdir: Option<&str>, path: &str) -> Option<String> {
    if path.starts_with('/') {
        return Some(path.to_owned());
    }
    let path = if path.is_empty() || path == "." {
        "./"
    } else {
        path
    };
    Some(format!("{}/{path}", workdir?))
}

fn check_length(path: &str, line: usize) -> Result<(), Stop> {
    if path.len() >= MAX_PATH || path.split('/').any(|part| part.len() > 255) {
        return refuse(
            "path-too-long",
            line,
            "a path is longer than Linux allows (4095 bytes, 255 a name)",
        );
    }
    if path.contains('\0') {
        return refuse("path-nul", line, "a path contains a NUL character");
    }
    Ok(())
}

/// `1000` and `1000:1000` alike; None with a name in it.
fn numeric_owner(text: &str) -> Option<String> {
    let (user, group) = text.split_once(':').unwrap_or((text, text));
    let user: u32 = user.parse().ok()?;
    let group: u32 = group.parse().ok()?;
    Some(format!("{user}:{group}"))
}

fn blank(kind: EntryKind, destination: String, line: usize) -> Entry {
    Entry {
        destination,
        kind,
        source: None,
        content: None,
        link: None,
        mode: None,
        owner: None,
        line,
        if_missing: false,
        if_directory: None,
        touched: None,
    }
}

/// Drops from the tree what a RUN may have changed: whether it still is there, and as what, is unknown. False if that is
/// too much work.
fn forget_touched(tree: &mut Tree, effects: &Effects, visits: &mut usize) -> bool {
    fn visit(node: &mut Arc<Node>, path: &str, effects: &Effects, visits: &mut usize) {
        // A RUN may also add anything anywhere.
        let inner = Arc::make_mut(node);
        inner.partial = true;
        *visits += inner.children.len();
        if *visits > MAX_VISITS {
            return;
        }
        inner.children.retain(|name, child| {
            let path = paths::join(path, name);
            if effects.touches(&path).is_some() {
                return false;
            }
            if child.is_directory() {
                visit(child, &path, effects, visits);
            }
            true
        });
    }
    visit(&mut tree.root, "/", effects, visits);
    *visits <= MAX_VISITS
}
