//! The copy plan: what COPY and ADD put where, stage by stage.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use super::context::{Context, FileKind, Info};
use super::ignore::{IgnorePatterns, PatternProblem, parse_ignore_file};
use super::instruction::{self, Command, CommandKind, Copy, Parts, Stage};
use super::pathmatch::{has_wildcard, match_path};
use super::run::{self, Effects};
use super::shell::{Expanded, ShellError, Value, expand, expand_heredoc};
use super::stages::{Source, StageGraph};
use super::tree::{Lookup, Node, Origin, Tree, resolve};
use super::{BuildError, parser, paths};

#[derive(Debug, Clone, Default)]
pub struct PlanOptions {
    /// Stage name; the last stage if none.
    pub target: Option<String>,
    pub build_args: HashMap<String, String>,
    /// Takes every RUN for one that may touch everything, instead of reading its commands: several times as fast.
    pub skip_runs: bool,
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
        lines: Vec::new(),
        escape: '\\',
        globals: HashMap::new(),
        visits: 0,
        entries: 0,
        sent: Vec::new(),
        sent_unknown: false,
        fruitless: Vec::new(),
    };
    if let Err(error) = planner.run(dockerfile, ignore_file, context) {
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
    lines: Vec<String>,
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

    fn run(
        &mut self,
        source: &[u8],
        ignore_file: Option<&[u8]>,
        root: &Path,
    ) -> Result<(), BuildError> {
        let parsed = parser::parse(source)?;
        self.escape = parsed.escape;
        self.lines = String::from_utf8_lossy(source)
            .lines()
            .map(str::to_owned)
            .collect();
        if let Some(syntax) = &parsed.syntax
            && !syntax.contains("docker/dockerfile")
        {
            self.unknown(1, format!("the frontend {syntax:?} may have other rules"));
        }
        let Parts {
            stages,
            global_args,
        } = instruction::parts(&parsed)?;
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
        self.finish(target, &stages, &states);
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
            Ok(ignore) => self.context = Some(Rc::new(RefCell::new(Context::new(root, ignore)))),
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
        let mut commands: Vec<Command> = Vec::new();
        let mut state = match source {
            Source::Stage(base) if states.contains_key(base) => {
                let mut state = states[base].clone();
                state.events = Vec::new();
                state.base = Some(*base);
                for onbuild in std::mem::take(&mut state.onbuild) {
                    match instruction::trigger(&onbuild, stage.line) {
                        Ok(command) => commands.push(command),
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
        commands.extend(stage.commands.iter().cloned());
        for command in &commands {
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
                if self.options.skip_runs {
                    state.tree = Tree::new(true);
                    state.traceable = false;
                    state
                        .events
                        .push(Event::Effects(Rc::new(Effects::any(line))));
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
        self.make_directories(
            &mut state.tree,
            &resolved,
            Some(0o755),
            owner.as_deref(),
            line,
            None,
        )
    }

    /// Makes the directories of a path that are missing; tells `events` about them.
    fn make_directories(
        &mut self,
        tree: &mut Tree,
        path: &str,
        mode: Option<u32>,
        owner: Option<&str>,
        line: usize,
        mut events: Option<&mut Vec<Event>>,
    ) -> Result<(), Stop> {
        let mut current = String::new();
        for part in paths::components(path) {
            current.push('/');
            current.push_str(part);
            let partial = match tree.lookup(&current) {
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
            tree.put(
                &current,
                Node::directory(mode, owner.map(str::to_owned), partial),
            );
            if let Some(events) = events.as_deref_mut() {
                let entry = Entry {
                    mode,
                    owner: owner.map(str::to_owned),
                    if_missing: true,
                    ..blank(EntryKind::Directory, current.clone(), line)
                };
                self.emit(events, entry)?;
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
        let text = self.lines.get(line.checked_sub(1)?)?;
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

    fn copy(
        &mut self,
        copy: &Copy,
        line: usize,
        state: &mut State,
        graph: &StageGraph,
        states: &HashMap<usize, State>,
        index: usize,
    ) -> Result<(), Stop> {
        let lookup = |name: &str| state.get(name);
        // What fails to expand fails the build, whatever else is unknown.
        let chown = self.expand(&copy.chown, line, &lookup);
        let chmod = self.expand(&copy.chmod, line, &lookup);
        let checksum = self.expand(&copy.checksum, line, &lookup);
        let sources: Vec<Result<String, Stop>> = copy
            .sources
            .iter()
            .map(|source| self.expand(source, line, &lookup))
            .collect();
        let destination = self.expand(&copy.destination, line, &lookup);
        let mut contents: Vec<(String, Result<Vec<u8>, Stop>)> = Vec::new();
        for content in &copy.contents {
            let data = if content.expand {
                let body = String::from_utf8_lossy(&content.data);
                expanded(expand_heredoc(&body, &lookup), &content.name, line)
                    .map(String::into_bytes)
            } else {
                Ok(content.data.clone())
            };
            contents.push((content.name.clone(), data));
        }
        let all = [&chown, &chmod, &checksum, &destination];
        let failed = all
            .into_iter()
            .chain(&sources)
            .find_map(|result| match result {
                Err(Stop::Error(error)) => Some(error.clone()),
                _ => None,
            });
        let failed = failed.or_else(|| {
            contents.iter().find_map(|(_, data)| match data {
                Err(Stop::Error(error)) => Some(error.clone()),
                _ => None,
            })
        });
        if let Some(error) = failed {
            return Err(Stop::Error(error));
        }

        let mut attributes = Attributes {
            owner: Some("0:0".to_owned()),
            owner_given: false,
            mode: ModeChange::Keep,
        };
        match chown {
            Ok(text) if text.is_empty() => {}
            Ok(text) => {
                attributes.owner_given = true;
                attributes.owner = numeric_owner(&text).or(Some(text));
            }
            Err(_) => {
                attributes.owner_given = true;
                attributes.owner = None;
                self.unknown(
                    line,
                    format!(
                        "--chown={} depends on a variable that isn't known",
                        copy.chown
                    ),
                );
            }
        }
        match chmod {
            Ok(text) if text.is_empty() => {}
            Ok(text) => attributes.mode = ModeChange::parse(&text, line)?,
            Err(_) => {
                attributes.mode = ModeChange::Unknown;
                self.unknown(
                    line,
                    format!(
                        "--chmod={} depends on a variable that isn't known",
                        copy.chmod
                    ),
                );
            }
        }
        if checksum.is_ok_and(|text| !text.is_empty())
            && (copy.sources.len() != 1
                || sources[0].as_ref().is_ok_and(|source| !is_remote(source)))
        {
            return refuse(
                "checksum",
                line,
                "--checksum needs exactly one source, a URL or git repository",
            );
        }
        let destination = destination?;
        let Some(destination) = absolute(state.workdir.as_deref(), &destination) else {
            return unclear(format!(
                "the destination {:?} is relative, and the base image's working directory isn't known",
                copy.destination
            ));
        };
        let destination = keep_slash(&destination);
        check_length(&destination, line)?;
        let excludes = match IgnorePatterns::new(&copy.excludes) {
            Ok(patterns) => patterns,
            Err(PatternProblem::Refused { message, .. }) => {
                return refuse("exclude-pattern", line, message);
            }
            Err(PatternProblem::Unclear { message, .. }) => {
                return unclear(format!("--exclude: {message}"));
            }
        };

        let from = if copy.from.is_empty() {
            None
        } else {
            Some(graph.from(&copy.from, line, self.escape)?)
        };
        let files = match &from {
            None => self.context.clone().map(Files::Context),
            Some(Source::Stage(stage)) if *stage >= index => {
                return refuse(
                    "from-later",
                    line,
                    format!("--from={} names no earlier stage", copy.from),
                );
            }
            Some(Source::Stage(stage)) => match states.get(stage) {
                Some(other) if other.traceable => Some(Files::Tree(other.tree.clone())),
                _ => None,
            },
            Some(Source::Scratch) => Some(Files::Tree(Tree::new(false))),
            Some(Source::Image(_) | Source::Unknown) => None,
        };
        // --link copies into an empty tree first, which is then laid over the stage.
        let linked = copy.link && copy.chmod.is_empty();
        let mut tree = if linked {
            Tree::new(false)
        } else {
            state.tree.clone()
        };
        let mut job = Job {
            copy,
            line,
            attributes,
            destination,
            excludes,
            from_stage: from.is_some(),
            current: 0,
            matches: 0,
            as_file: false,
        };
        let mut events = Vec::new();
        let result = self.copy_all(
            &mut job,
            sources,
            contents,
            files,
            &mut tree,
            &mut events,
            state,
        );
        if linked {
            for event in &mut events {
                if let Event::Entry(entry) = event {
                    Rc::make_mut(entry).if_missing = false;
                }
            }
            lay_over(&mut state.tree, &tree);
        } else {
            state.tree = tree;
        }
        state.events.extend(events);
        result
    }

    #[allow(clippy::too_many_arguments)]
    fn copy_all(
        &mut self,
        job: &mut Job,
        sources: Vec<Result<String, Stop>>,
        contents: Vec<(String, Result<Vec<u8>, Stop>)>,
        mut files: Option<Files>,
        tree: &mut Tree,
        events: &mut Vec<Event>,
        state: &mut State,
    ) -> Result<(), Stop> {
        let line = job.line;
        for (at, source) in sources.into_iter().enumerate() {
            job.current = at;
            let reason = match source {
                Err(Stop::Unknown(reason)) => reason,
                Err(stop) => return Err(stop),
                Ok(source) if is_remote(&source) => {
                    if !job.copy.is_add {
                        let message = format!(
                            "COPY takes no URL or git repository such as {source:?}; ADD does"
                        );
                        return refuse("copy-remote", line, message);
                    }
                    format!("{source} is fetched from the network")
                }
                Ok(source) => match files.as_mut() {
                    Some(files) => match self.copy_source(job, &source, files, tree, events, state)
                    {
                        Ok(()) => continue,
                        Err(Stop::Unknown(reason)) => reason,
                        Err(stop) => return Err(stop),
                    },
                    None if job.from_stage => {
                        format!(
                            "{source:?} comes from {:?}, whose files aren't known",
                            job.copy.from
                        )
                    }
                    None => format!(
                        "{source:?} cannot be looked up behind a .dockerignore that isn't understood"
                    ),
                },
            };
            self.unknown(line, reason);
            self.sent_unknown = true;
            state.traceable = false;
            let below = paths::clean(&job.destination);
            let reason = "a copy of something unknown";
            events.push(Event::Effects(Rc::new(Effects::overwrite(
                line, &below, reason,
            ))));
            tree.update(&below, |node| node.partial = true);
            mark_partial(tree, &below);
        }
        for (name, data) in contents {
            match data {
                Ok(data) => {
                    // The builder writes it into an empty file system first, and makes no directory there.
                    if paths::components(&paths::clean_absolute(&name)).count() != 1
                        || name.ends_with('/')
                    {
                        let message =
                            format!("the heredoc's name {name:?} isn't a plain file name");
                        return refuse("heredoc-name", line, message);
                    }
                    let data = Arc::new(data);
                    let source = Node {
                        origin: Origin::Content(data),
                        ..file_node(FileKind::File, Some(0o644))
                    };
                    job.matches += 1;
                    self.copy_file(job, &name, source, tree, events)?;
                }
                Err(Stop::Unknown(reason)) => {
                    self.unknown(line, format!("heredoc {name}: {reason}"))
                }
                Err(stop) => return Err(stop),
            }
        }
        if job.matches > 1 && job.as_file && !job.destination.ends_with('/') {
            let reason = "several sources, but the destination has no trailing slash: each overwrites the one before";
            self.unknown(line, reason);
        }
        Ok(())
    }

    fn copy_source(
        &mut self,
        job: &mut Job,
        source: &str,
        files: &mut Files,
        tree: &mut Tree,
        events: &mut Vec<Event>,
        state: &mut State,
    ) -> Result<(), Stop> {
        let line = job.line;
        if job.copy.parents {
            return self.copy_with_parents(job, source, files, tree, events);
        }
        let source = paths::clean_absolute(source);
        check_length(&source, line)?;
        if let (Files::Context(_), false) = (&*files, has_wildcard(&source)) {
            self.sent.push(source.clone());
            self.sent.push(files.resolve(&source)?);
        }
        if !has_wildcard(&source) {
            return self.copy_match(job, &source, files, tree, events, state);
        }
        let found = self.glob(&source, files, line)?;
        if let Files::Context(_) = files {
            self.sent.extend(found.iter().cloned());
            if found.is_empty() {
                self.fruitless.push((
                    line,
                    source,
                    self.column(line, &job.copy.sources[job.current]),
                ));
            }
        }
        for found in found {
            self.copy_match(job, &found, files, tree, events, state)?;
        }
        Ok(())
    }

    /// A wildcard without a match is fine, as long as the directory to look in reaches the builder: only what some
    /// COPY or ADD names is sent.
    fn check_fruitless(&mut self) {
        for (line, source, column) in std::mem::take(&mut self.fruitless) {
            let parts: Vec<&str> = paths::components(&source)
                .take_while(|part| !has_wildcard(part))
                .collect();
            let directory = format!("/{}", parts.join("/"));
            let below = format!("{directory}/");
            let is_sent = parts.is_empty()
                || self.sent.iter().any(|sent| {
                    sent == "/"
                        || *sent == directory
                        || sent.starts_with(&below)
                        || below.starts_with(&format!("{sent}/"))
                });
            if is_sent {
                continue;
            }
            if self.sent_unknown {
                self.unknown(line, format!("nothing matches {source:?}; whether {directory:?} is sent to the builder depends on other copies"));
                continue;
            }
            let message = format!(
                "nothing matches {source:?}, and no other copy needs {directory:?}: the builder doesn't get it"
            );
            let mut error = BuildError::new("source-missing", line, message);
            error.column = column;
            self.plan.errors.push(error);
        }
    }

    fn missing<T>(&self, job: &Job, source: &str, files: &Files) -> Result<T, Stop> {
        let source = source.trim_start_matches('/');
        let mut error = match files {
            Files::Context(_) => {
                let message = format!(
                    "{source:?} is not in the build context (or its .dockerignore hides it)"
                );
                BuildError::new("source-missing", job.line, message)
            }
            Files::Tree(_) => {
                let message = format!("{source:?} is not in {:?}", job.copy.from);
                BuildError::new("source-missing", job.line, message)
            }
        };
        error.column = self.column(job.line, &job.copy.sources[job.current]);
        Err(Stop::Error(error))
    }

    /// Paths that a wildcard matches, in walking order; a matched directory is not entered.
    fn glob(&mut self, source: &str, files: &mut Files, line: usize) -> Result<Vec<String>, Stop> {
        // The copy itself would match nothing, but the builder's cache refuses the pattern before that.
        if match_path(source, "").is_err() {
            return refuse(
                "source-pattern",
                line,
                format!("{source:?} is a malformed wildcard"),
            );
        }
        let parts: Vec<&str> = paths::components(source).collect();
        let split = parts
            .iter()
            .position(|part| has_wildcard(part))
            .unwrap_or(parts.len());
        let start = files.resolve(&format!("/{}", parts[..split].join("/")))?;
        let pattern = parts[split..].join("/");
        match files.info(&start)? {
            None => {
                let message = format!(
                    "{:?} is not there to look for {pattern:?} in",
                    parts[..split].join("/")
                );
                return refuse("source-missing", line, message);
            }
            Some(info) if info.kind != FileKind::Directory => return Ok(Vec::new()),
            Some(_) => {}
        }
        // `*` and `?` stop at a slash; only a class can match one.
        let depth = parts.len() - split + pattern.matches('[').count();
        let mut found = Vec::new();
        let mut waiting = vec![(start.clone(), String::new(), 0)];
        while let Some((path, relative, level)) = waiting.pop() {
            self.visit()?;
            if level > 0 && match_path(&pattern, &relative) == Ok(true) {
                found.push(path);
                continue;
            }
            if level < depth {
                let Some(info) = files.info(&path)? else {
                    continue;
                };
                if info.kind == FileKind::Directory {
                    for name in files.list(&path)?.into_iter().rev() {
                        let below = if relative.is_empty() {
                            name.clone()
                        } else {
                            format!("{relative}/{name}")
                        };
                        waiting.push((paths::join(&path, &name), below, level + 1));
                    }
                }
            }
        }
        Ok(found)
    }

    #[allow(clippy::too_many_arguments)]
    fn copy_match(
        &mut self,
        job: &mut Job,
        source: &str,
        files: &mut Files,
        tree: &mut Tree,
        events: &mut Vec<Event>,
        state: &mut State,
    ) -> Result<(), Stop> {
        job.matches += 1;
        let resolved = files.resolve(source)?;
        let Some(info) = files.info(&resolved)? else {
            return self.missing(job, source, files);
        };
        if info.kind == FileKind::Directory {
            return self.copy_directory(job, &resolved, files, tree, events);
        }
        let name = paths::base(source);
        let node = files.node(&resolved, &info);
        if job.copy.unpack.unwrap_or(job.copy.is_add) && info.kind == FileKind::File {
            match files.archive(&resolved) {
                Archive::No => {}
                Archive::Plain => return self.unpack(job, &resolved, tree, events, state),
                Archive::Compressed => {
                    return unclear(format!(
                        "{:?} is compressed; ADD unpacks it if it is a tar file",
                        source
                    ));
                }
            }
        }
        self.copy_file(job, name, node, tree, events)
    }

    fn unpack(
        &mut self,
        job: &Job,
        source: &str,
        tree: &mut Tree,
        events: &mut Vec<Event>,
        state: &mut State,
    ) -> Result<(), Stop> {
        let Some(target) = tree.resolve(&job.destination) else {
            return unclear("the destination has too many links");
        };
        let owner = job.attributes.owner.as_deref();
        self.make_directories(
            tree,
            &target,
            Some(0o755),
            owner,
            job.line,
            Some(&mut *events),
        )?;
        state.traceable = false;
        mark_partial(tree, &target);
        events.push(Event::Effects(Rc::new(Effects::overwrite(
            job.line,
            &target,
            "the unpacked archive",
        ))));
        let entry = Entry {
            source: Some(source.trim_start_matches('/').to_owned()),
            owner: job
                .attributes
                .owner_given
                .then(|| job.attributes.owner.clone())
                .flatten(),
            ..blank(EntryKind::Archive, target, job.line)
        };
        self.emit(events, entry)
    }

    /// Directories above the destination, then the destination itself, links followed.
    fn prepare(
        &mut self,
        job: &Job,
        tree: &mut Tree,
        events: &mut Vec<Event>,
    ) -> Result<String, Stop> {
        let above = match job.destination.rfind('/') {
            _ if job.destination.ends_with('/') || job.destination.ends_with("/.") => {
                job.destination.as_str()
            }
            Some(at) => &job.destination[..=at],
            None => "/",
        };
        let Some(above) = tree.resolve(above) else {
            return unclear("the destination has too many links");
        };
        let mode = job.attributes.mode.for_created();
        self.make_directories(
            tree,
            &above,
            mode,
            job.attributes.owner.as_deref(),
            job.line,
            Some(events),
        )?;
        match tree.resolve(&job.destination) {
            Some(path) => Ok(path),
            None => unclear("the destination has too many links"),
        }
    }

    fn copy_file(
        &mut self,
        job: &mut Job,
        name: &str,
        mut node: Node,
        tree: &mut Tree,
        events: &mut Vec<Event>,
    ) -> Result<(), Stop> {
        let line = job.line;
        let mut target = self.prepare(job, tree, events)?;
        let mut if_directory = None;
        match tree.lookup(&target) {
            Lookup::Found(found) if found.is_directory() => {
                target = paths::join(&target, paths::base(name))
            }
            Lookup::Found(_) | Lookup::Missing => job.as_file = true,
            Lookup::NotDirectory => {
                return refuse(
                    "not-a-directory",
                    line,
                    format!("{target} lies below something that is a file"),
                );
            }
            Lookup::Unknown => {
                job.as_file = true;
                if_directory = Some(paths::join(&target, paths::base(name)));
            }
        }
        check_length(&target, line)?;
        let mode = job.attributes.mode.for_created();
        let above = paths::parent(&target).to_owned();
        self.make_directories(
            tree,
            &above,
            mode,
            job.attributes.owner.as_deref(),
            line,
            Some(&mut *events),
        )?;
        if let Lookup::Found(found) = tree.lookup(&target)
            && found.is_directory()
        {
            return refuse(
                "file-over-directory",
                line,
                format!("{target} is a directory; a file cannot replace it"),
            );
        }
        job.apply(&mut node);
        let mut entry = entry_of(&node, &target, line);
        entry.if_directory.clone_from(&if_directory);
        self.emit(events, entry)?;
        if if_directory.is_none() {
            tree.put(&target, node);
        }
        Ok(())
    }

    fn copy_directory(
        &mut self,
        job: &Job,
        source: &str,
        files: &mut Files,
        tree: &mut Tree,
        events: &mut Vec<Event>,
    ) -> Result<(), Stop> {
        let target = self.prepare(job, tree, events)?;
        let mode = job.attributes.mode.for_created();
        self.make_directories(
            tree,
            &target,
            mode,
            job.attributes.owner.as_deref(),
            job.line,
            Some(&mut *events),
        )?;
        self.copy_children(job, source, &target, files, tree, events, None)
    }

    /// Copies what lies below `source`, filtered by the patterns of --exclude and --parents.
    #[allow(clippy::too_many_arguments)]
    fn copy_children(
        &mut self,
        job: &Job,
        source: &str,
        target: &str,
        files: &mut Files,
        tree: &mut Tree,
        events: &mut Vec<Event>,
        includes: Option<&IgnorePatterns>,
    ) -> Result<(), Stop> {
        struct Frame {
            source: String,
            target: String,
            relative: String,
            include: Option<Vec<bool>>,
            exclude: Option<Vec<bool>>,
            names: std::vec::IntoIter<String>,
            /// False while it waits for a first entry below it that is included.
            made: bool,
        }
        let line = job.line;
        let names = files.list(source)?.into_iter();
        let mut frames = vec![Frame {
            source: source.to_owned(),
            target: target.to_owned(),
            relative: String::new(),
            include: None,
            exclude: None,
            names,
            made: true,
        }];
        while let Some(frame) = frames.last_mut() {
            let Some(name) = frame.names.next() else {
                frames.pop();
                continue;
            };
            self.visit()?;
            let from = paths::join(&frame.source, &name);
            let to = paths::join(&frame.target, &name);
            let relative = if frame.relative.is_empty() {
                name
            } else {
                format!("{}/{name}", frame.relative)
            };
            let (mut included, include) = match includes {
                None => (true, None),
                Some(patterns) => {
                    let (hit, matches) = patterns.matches_below(&relative, frame.include.as_ref());
                    (hit, Some(matches))
                }
            };
            let mut excluded = false;
            let mut exclude = None;
            if !job.excludes.is_empty() {
                let (hit, matches) = job
                    .excludes
                    .matches_below(&relative, frame.exclude.as_ref());
                excluded = hit;
                included &= !hit;
                exclude = Some(matches);
            }
            let Some(info) = files.info(&from)? else {
                continue;
            };
            if !included && info.kind != FileKind::Directory {
                continue;
            }
            check_length(&to, line)?;
            if included {
                for frame in &mut frames {
                    if !std::mem::replace(&mut frame.made, true) {
                        let (from, to) = (frame.source.clone(), frame.target.clone());
                        let Some(info) = files.info(&from)? else {
                            continue;
                        };
                        let node = files.node(&from, &info);
                        self.copy_parent_directory(job, node, &to, tree, events)?;
                    }
                }
            }
            if info.kind == FileKind::Directory {
                if included {
                    let node = files.node(&from, &info);
                    self.copy_one_directory(job, node, &to, tree, events)?;
                }
                if excluded && !job.excludes.has_exceptions() {
                    continue;
                }
                let names = files.list(&from)?.into_iter();
                frames.push(Frame {
                    source: from,
                    target: to,
                    relative,
                    include,
                    exclude,
                    names,
                    made: included,
                });
                continue;
            }
            if let Lookup::Found(found) = tree.lookup(&to)
                && found.is_directory()
            {
                return refuse(
                    "file-over-directory",
                    line,
                    format!("{to} is a directory; a file cannot replace it"),
                );
            }
            if includes.is_some()
                && matches!(info.kind, FileKind::Symlink(_))
                && files.info(&files.resolve(&from)?)?.is_none()
            {
                return unclear(format!(
                    "--parents: the link {from:?} leads nowhere, which some builders refuse"
                ));
            }
            let mut node = files.node(&from, &info);
            job.apply(&mut node);
            self.emit(events, entry_of(&node, &to, line))?;
            tree.put(&to, node);
        }
        Ok(())
    }

    /// A directory that is only made because something below it is included. One that is there keeps its owner, and
    /// takes the source's mode whatever --chmod says.
    fn copy_parent_directory(
        &mut self,
        job: &Job,
        node: Node,
        target: &str,
        tree: &mut Tree,
        events: &mut Vec<Event>,
    ) -> Result<(), Stop> {
        let owner = match tree.lookup(target) {
            Lookup::Found(found) if found.is_directory() => found.owner.clone(),
            Lookup::Unknown => {
                let before = events.len();
                self.copy_one_directory(job, node, target, tree, events)?;
                for event in &mut events[before..] {
                    if let Event::Entry(entry) = event {
                        Rc::make_mut(entry).if_missing = true;
                    }
                }
                return Ok(());
            }
            _ => return self.copy_one_directory(job, node, target, tree, events),
        };
        tree.update(target, |found| found.mode = node.mode);
        let entry = Entry {
            owner,
            ..entry_of(&node, target, job.line)
        };
        self.emit(events, entry)
    }

    fn copy_one_directory(
        &mut self,
        job: &Job,
        mut node: Node,
        target: &str,
        tree: &mut Tree,
        events: &mut Vec<Event>,
    ) -> Result<(), Stop> {
        node.children.clear();
        job.apply(&mut node);
        let entry = entry_of(&node, target, job.line);
        match tree.lookup(target) {
            Lookup::Found(found) if found.is_directory() => {
                let (mode, owner) = (node.mode, node.owner);
                tree.update(target, |found| (found.mode, found.owner) = (mode, owner));
            }
            Lookup::Found(_) | Lookup::NotDirectory => {
                let message = format!("{target} is a file; a directory cannot replace it");
                return refuse("directory-over-file", job.line, message);
            }
            Lookup::Missing => {
                node.partial = false;
                tree.put(target, node);
            }
            Lookup::Unknown => {
                node.partial = true;
                tree.put(target, node);
            }
        }
        self.emit(events, entry)
    }

    fn copy_with_parents(
        &mut self,
        job: &mut Job,
        source: &str,
        files: &mut Files,
        tree: &mut Tree,
        events: &mut Vec<Event>,
    ) -> Result<(), Stop> {
        let line = job.line;
        self.sent_unknown = true;
        let (pivot, pattern) = source.split_once("/./").unwrap_or(("/", source));
        let pattern = paths::clean_absolute(pattern);
        let pivot = paths::clean_absolute(pivot);
        if !has_wildcard(&pivot) && !has_wildcard(&pattern) {
            if pattern == "/" {
                let message = format!("--parents: {source:?} names nothing behind its `/./`");
                return refuse("source-missing", line, message);
            }
            // What is looked for must be part of the result: links inside the pattern are not followed.
            let full = paths::join(&files.resolve(&pivot)?, &pattern);
            let found = files.info(&full)?;
            let leads_nowhere = matches!(
                &found,
                Some(Info {
                    kind: FileKind::Symlink(_),
                    ..
                })
            ) && files.info(&files.resolve(&full)?)?.is_none();
            if found.is_none() || leads_nowhere {
                return self.missing(job, source, files);
            }
            if job.excludes.matches(pattern.trim_start_matches('/')) {
                if job.excludes.has_exceptions() {
                    return unclear(format!(
                        "--parents and --exclude together leave open whether {source:?} is there"
                    ));
                }
                return self.missing(job, source, files);
            }
        }
        let starts = if has_wildcard(&pivot) {
            self.glob(&pivot, files, line)?
        } else {
            vec![pivot]
        };
        let include = pattern.trim_start_matches('/');
        let includes = match IgnorePatterns::new(&[include]) {
            Ok(patterns) => patterns,
            Err(PatternProblem::Refused { message, .. }) => {
                return refuse("parents-pattern", line, message);
            }
            Err(PatternProblem::Unclear { message, .. }) => {
                return unclear(format!("--parents: {message}"));
            }
        };
        for start in starts {
            let resolved = files.resolve(&start)?;
            match files.info(&resolved)? {
                None => return self.missing(job, &start, files),
                Some(info) if info.kind != FileKind::Directory => {
                    let node = files.node(&resolved, &info);
                    self.copy_file(job, paths::base(&start), node, tree, events)?;
                }
                Some(_) => {
                    let target = self.prepare(job, tree, events)?;
                    let mode = job.attributes.mode.for_created();
                    let owner = job.attributes.owner.as_deref();
                    self.make_directories(tree, &target, mode, owner, line, Some(&mut *events))?;
                    self.copy_children(
                        job,
                        &resolved,
                        &target,
                        files,
                        tree,
                        events,
                        Some(&includes),
                    )?;
                }
            }
        }
        Ok(())
    }

    fn finish(&mut self, target: usize, stages: &[Stage], states: &HashMap<usize, State>) {
        let Some(state) = states.get(&target) else {
            return;
        };
        let mut chain = vec![state];
        while let Some(base) = chain
            .last()
            .and_then(|state| state.base)
            .and_then(|base| states.get(&base))
        {
            chain.push(base);
        }
        let mut entries: Vec<Entry> = Vec::new();
        let mut untouched: Vec<usize> = Vec::new();
        let mut steps = 0usize;
        for event in chain.into_iter().rev().flat_map(|state| &state.events) {
            match event {
                Event::Entry(entry) => {
                    untouched.push(entries.len());
                    entries.push(Entry::clone(entry));
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
        self.plan.base.clone_from(&state.image);
        self.plan.stage.clone_from(&stages[target].name);
        self.plan.workdir.clone_from(&state.workdir);
        self.plan.workdirs.clone_from(&state.workdirs);
        self.plan.user.clone_from(&state.user);
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

/// Cleaned, but with a trailing `/` that says "this is a directory".
fn keep_slash(path: &str) -> String {
    let mut cleaned = paths::clean(path);
    if (path.ends_with('/') || path.ends_with("/.")) && cleaned != "/" {
        cleaned.push('/');
    }
    cleaned
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

fn is_remote(source: &str) -> bool {
    if ["http://", "https://", "git://", "ssh://"]
        .iter()
        .any(|scheme| source.starts_with(scheme))
    {
        return true;
    }
    // git@host:path
    let Some((user, rest)) = source.split_once('@') else {
        return false;
    };
    let Some((host, _)) = rest.split_once(':') else {
        return false;
    };
    let part = |text: &str, extra: &str| {
        !text.is_empty()
            && text
                .chars()
                .all(|ch| ch.is_ascii_alphanumeric() || extra.contains(ch))
    };
    part(user, "-_") && part(host, "-.")
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

fn file_node(kind: FileKind, mode: Option<u32>) -> Node {
    Node {
        kind,
        ..Node::directory(mode, Some("0:0".to_owned()), false)
    }
}

fn entry_of(node: &Node, destination: &str, line: usize) -> Entry {
    let kind = match &node.kind {
        FileKind::File => EntryKind::File,
        FileKind::Directory => EntryKind::Directory,
        FileKind::Symlink(_) => EntryKind::Symlink,
        FileKind::Special => EntryKind::Special,
    };
    let mut entry = blank(kind, destination.to_owned(), line);
    entry.owner.clone_from(&node.owner);
    entry.mode = node.mode;
    match &node.kind {
        FileKind::Symlink(target) => {
            entry.link = Some(target.clone());
            entry.mode = None;
        }
        FileKind::File | FileKind::Directory | FileKind::Special => {}
    }
    match &node.origin {
        Origin::Context(path) => entry.source = Some(path.trim_start_matches('/').to_owned()),
        Origin::Content(content) => entry.content = Some(Arc::clone(content)),
        Origin::None => {}
    }
    entry
}

/// One COPY or ADD.
struct Job<'a> {
    copy: &'a Copy,
    line: usize,
    attributes: Attributes,
    destination: String,
    excludes: IgnorePatterns,
    from_stage: bool,
    /// Which of its sources is being copied.
    current: usize,
    /// Files and directories that its sources name or match.
    matches: usize,
    /// One of them was put at the destination itself, which isn't known to be a directory.
    as_file: bool,
}

impl Job<'_> {
    fn apply(&self, node: &mut Node) {
        if self.attributes.owner_given {
            node.owner.clone_from(&self.attributes.owner);
        }
        if !matches!(node.kind, FileKind::Symlink(_)) {
            node.mode = self.attributes.mode.apply(node.mode, node.is_directory());
        }
    }
}

struct Attributes {
    owner: Option<String>,
    owner_given: bool,
    mode: ModeChange,
}

enum ModeChange {
    Keep,
    Set(u32),
    /// Clauses of who, operator and permissions.
    Symbolic(Vec<(u32, char, String)>),
    Unknown,
}

impl ModeChange {
    fn parse(text: &str, line: usize) -> Result<Self, Stop> {
        let invalid = || {
            let message =
                format!("--chmod={text} is neither octal up to 7777 nor a form like u=rwX,go=rX");
            refuse("chmod", line, message)
        };
        if text.starts_with(|ch: char| ch.is_ascii_digit()) {
            let octal = text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
            return match u32::from_str_radix(text, 8) {
                Ok(mode) if octal && mode <= 0o7777 => Ok(Self::Set(mode)),
                _ => invalid(),
            };
        }
        let mut clauses = Vec::new();
        for clause in text.split(',') {
            let Some(at) = clause.find(['+', '-', '=']) else {
                return invalid();
            };
            let mut who = 0;
            for ch in clause[..at].chars() {
                who |= match ch {
                    'a' => 0o6777,
                    'u' => 0o4700,
                    'g' => 0o2070,
                    'o' => 0o0007,
                    _ => return invalid(),
                };
            }
            let mut operator = None;
            let mut permissions = String::new();
            for ch in clause[at..].chars().chain(['+']) {
                match ch {
                    '+' | '-' | '=' => {
                        if let Some(operator) = operator.replace(ch) {
                            clauses.push((who, operator, std::mem::take(&mut permissions)));
                        }
                    }
                    'r' | 'w' | 'x' | 'X' | 's' | 't' | 'u' | 'g' | 'o' => permissions.push(ch),
                    _ => return invalid(),
                }
            }
        }
        Ok(Self::Symbolic(clauses))
    }

    /// Mode of directories made on the way.
    fn for_created(&self) -> Option<u32> {
        match self {
            Self::Keep | Self::Symbolic(_) => Some(0o755),
            Self::Set(mode) => Some(mode & 0o777),
            Self::Unknown => None,
        }
    }

    fn apply(&self, mode: Option<u32>, is_directory: bool) -> Option<u32> {
        match self {
            Self::Keep => mode,
            Self::Set(mode) => Some(*mode),
            Self::Unknown => None,
            Self::Symbolic(clauses) => {
                let original = mode?;
                let mut mode = original;
                for (who, operator, permissions) in clauses {
                    let who = if *who == 0 { 0o6777 } else { *who };
                    let mut bits = 0;
                    for ch in permissions.chars() {
                        bits |= match ch {
                            'r' => 0o444,
                            'w' => 0o222,
                            'x' => 0o111,
                            'X' if *operator == '-' || is_directory || original & 0o111 != 0 => {
                                0o111
                            }
                            'X' => 0,
                            copied @ ('u' | 'g' | 'o') if permissions.len() == 1 => {
                                let shift = match copied {
                                    'u' => 6,
                                    'g' => 3,
                                    _ => 0,
                                };
                                (mode >> shift & 7) * 0o111
                            }
                            // Set-id bits, and copies mixed with letters: not worth a model.
                            _ => return None,
                        };
                    }
                    let copies = matches!(permissions.as_str(), "u" | "g" | "o");
                    match operator {
                        '+' => mode |= bits & who,
                        '-' => mode &= !(bits & who),
                        _ => {
                            mode = (mode & !(if copies { who & 0o777 } else { who })) | (bits & who)
                        }
                    }
                }
                Some(mode)
            }
        }
    }
}

/// What a copy reads from.
enum Files {
    Context(Rc<RefCell<Context>>),
    Tree(Tree),
}

enum Archive {
    No,
    Plain,
    Compressed,
}

impl Files {
    fn resolve(&self, path: &str) -> Result<String, Stop> {
        let resolved = match self {
            Self::Context(context) => {
                resolve(path, |path| match context.borrow_mut().info(path)?.kind {
                    FileKind::Symlink(target) => Some(target),
                    _ => None,
                })
            }
            Self::Tree(tree) => tree.resolve(path),
        };
        self.check_exhausted()?;
        match resolved {
            Some(path) => Ok(path),
            None => unclear(format!("{path:?} leads through too many links")),
        }
    }

    fn check_exhausted(&self) -> Result<(), Stop> {
        match self {
            Self::Context(context) if context.borrow().exhausted => {
                unclear("the .dockerignore has too many patterns for a context of this size")
            }
            _ => Ok(()),
        }
    }

    fn info(&self, path: &str) -> Result<Option<Info>, Stop> {
        match self {
            Self::Context(context) => {
                let info = context.borrow_mut().info(path);
                self.check_exhausted()?;
                Ok(info)
            }
            Self::Tree(tree) => match tree.lookup(path) {
                Lookup::Found(node) => {
                    if node.is_directory() && node.partial {
                        return unclear(format!(
                            "{path:?} may hold files of the stage's base image"
                        ));
                    }
                    Ok(Some(Info {
                        kind: node.kind.clone(),
                        mode: node.mode.unwrap_or(0),
                    }))
                }
                Lookup::Missing | Lookup::NotDirectory => Ok(None),
                Lookup::Unknown => unclear(format!("{path:?} comes from the stage's base image")),
            },
        }
    }

    fn list(&self, path: &str) -> Result<Vec<String>, Stop> {
        match self {
            Self::Context(context) => {
                let listing = context.borrow_mut().list(path);
                self.check_exhausted()?;
                Ok(listing.iter().map(|(name, _)| name.clone()).collect())
            }
            Self::Tree(tree) => match tree.lookup(path) {
                Lookup::Found(node) => Ok(node.children.keys().cloned().collect()),
                _ => Ok(Vec::new()),
            },
        }
    }

    fn node(&self, path: &str, info: &Info) -> Node {
        match self {
            Self::Context(_) => {
                let origin = match info.kind {
                    FileKind::File | FileKind::Directory => Origin::Context(path.to_owned()),
                    FileKind::Symlink(_) | FileKind::Special => Origin::None,
                };
                Node {
                    origin,
                    ..file_node(info.kind.clone(), Some(info.mode))
                }
            }
            Self::Tree(tree) => match tree.lookup(path) {
                Lookup::Found(node) => node.clone(),
                _ => file_node(info.kind.clone(), Some(info.mode)),
            },
        }
    }

    fn archive(&self, path: &str) -> Archive {
        let head = match self {
            Self::Context(context) => context.borrow().head(path).unwrap_or_default(),
            Self::Tree(_) => return Archive::No,
        };
        let magics: [&[u8]; 4] = [
            b"\x1f\x8b\x08",
            b"BZh",
            b"\xfd7zXZ\x00",
            b"\x28\xb5\x2f\xfd",
        ];
        if magics.iter().any(|magic| head.starts_with(magic)) {
            return Archive::Compressed;
        }
        if is_tar_header(&head) {
            Archive::Plain
        } else {
            Archive::No
        }
    }
}

/// A block whose checksum field holds the sum of its bytes, that field counted as blanks.
fn is_tar_header(block: &[u8]) -> bool {
    if block.len() < 512 || block.iter().all(|byte| *byte == 0) {
        return false;
    }
    let field: String = block[148..156]
        .iter()
        .map(|byte| char::from(*byte))
        .collect();
    let field = field.trim_matches([' ', '\0']);
    let Ok(expected) = u64::from_str_radix(field, 8) else {
        return false;
    };
    let others = block[..148].iter().chain(&block[156..]);
    let unsigned: u64 =
        others.clone().map(|byte| u64::from(*byte)).sum::<u64>() + 8 * u64::from(b' ');
    let signed: i64 = others
        .map(|byte| i64::from(byte.cast_signed()))
        .sum::<i64>()
        + 8 * i64::from(b' ');
    expected == unsigned || i64::try_from(expected) == Ok(signed)
}

/// Something unknown was put at `path`: what is known there may be incomplete.
fn mark_partial(tree: &mut Tree, path: &str) {
    let mut current = String::from("/");
    let parts: Vec<String> = paths::components(path).map(str::to_owned).collect();
    tree.update("/", |node| node.partial = true);
    for part in parts {
        current = paths::join(&current, &part);
        tree.update(&current, |node| node.partial = true);
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

/// Lays the result of a `--link` copy over the stage: directories merge and take the new metadata, the rest is replaced.
fn lay_over(tree: &mut Tree, above: &Tree) {
    fn merge(below: &mut Arc<Node>, above: &Arc<Node>, is_root: bool) {
        if !(below.is_directory() && above.is_directory()) {
            *below = Arc::clone(above);
            return;
        }
        let inner = Arc::make_mut(below);
        if !is_root {
            inner.mode = above.mode;
            inner.owner.clone_from(&above.owner);
        }
        for (name, child) in &above.children {
            match inner.children.get_mut(name) {
                Some(existing) => merge(existing, child, false),
                None => {
                    let mut child = Arc::clone(child);
                    if inner.partial && child.is_directory() {
                        spread_partial(&mut child);
                    }
                    inner.children.insert(name.clone(), child);
                }
            }
        }
    }
    fn spread_partial(node: &mut Arc<Node>) {
        let inner = Arc::make_mut(node);
        inner.partial = true;
        for child in inner.children.values_mut() {
            if child.is_directory() {
                spread_partial(child);
            }
        }
    }
    merge(&mut tree.root, &above.root, true);
}
