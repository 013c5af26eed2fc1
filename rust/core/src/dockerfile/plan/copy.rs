//! What COPY and ADD put where.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::files::{Archive, Files};
use super::mode::ModeChange;
use super::{
    Entry, EntryKind, Event, Missing, Planner, State, Stop, absolute, blank, check_length,
    expanded, numeric_owner, refuse, unclear,
};
use crate::dockerfile::context::{FileKind, Info};
use crate::dockerfile::ignore::{IgnorePatterns, PatternProblem};
use crate::dockerfile::instruction::Copy;
use crate::dockerfile::pathmatch::{has_wildcard, match_path};
use crate::dockerfile::run::Effects;
use crate::dockerfile::shell::expand_heredoc;
use crate::dockerfile::stages::{Source, StageGraph};
use crate::dockerfile::tree::{Lookup, Node, Origin, Tree};
use crate::dockerfile::{BuildError, paths};

impl Planner<'_> {
    pub(super) fn copy(
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
        // Where it leads may be unknown; a source that is missing fails the build all the same.
        let (destination, unclear_where) = match destination {
            Ok(destination) => match absolute(state.workdir.as_deref(), &destination) {
                Some(destination) => (destination, None),
                None => {
                    let reason = format!(
                        "the destination {:?} is relative, and the base image's working directory isn't known",
                        copy.destination
                    );
                    (format!("/{destination}"), Some(reason))
                }
            },
            Err(Stop::Unknown(reason)) => ("/".to_owned(), Some(reason)),
            Err(stop) => return Err(stop),
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
        let mut elsewhere = unclear_where.as_ref().map(|_| State {
            tree: Tree::new(true),
            ..state.clone()
        });
        let unknowns = self.plan.unknowns.len();
        let state = elsewhere.as_mut().unwrap_or(state);
        // --link copies into an empty tree first, which is then laid over the stage.
        let below = (copy.link && copy.chmod.is_empty())
            .then(|| std::mem::replace(&mut state.tree, Tree::new(false)));
        let before = state.events.len();
        let mut copying = Copying {
            job: Job {
                copy,
                line,
                attributes,
                destination,
                excludes,
                from_stage: from.is_some(),
                current: 0,
                matches: 0,
                as_file: false,
            },
            planner: self,
            state: &mut *state,
        };
        let result = copying.all(sources, contents, files.as_ref());
        if let Some(below) = below {
            for event in &mut state.events[before..] {
                if let Event::Entry(entry) = event {
                    Rc::make_mut(entry).if_missing = false;
                }
            }
            let above = std::mem::replace(&mut state.tree, below);
            lay_over(&mut state.tree, &above);
        }
        if let Some(reason) = unclear_where {
            self.plan.unknowns.truncate(unknowns);
            return result.and_then(|()| unclear(reason));
        }
        result
    }

    /// A wildcard without a match is fine, as long as the directory to look in reaches the builder: only what some
    /// COPY or ADD names is sent.
    pub(super) fn check_fruitless(&mut self) {
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

    /// Paths that a wildcard matches, in walking order; a matched directory is not entered.
    fn glob(&mut self, source: &str, files: &Files, line: usize) -> Result<Vec<String>, Stop> {
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
}

/// One COPY or ADD at work on the state of its stage.
struct Copying<'a, 'p> {
    planner: &'a mut Planner<'p>,
    state: &'a mut State,
    job: Job<'a>,
}

impl Copying<'_, '_> {
    fn emit(&mut self, entry: Entry) -> Result<(), Stop> {
        self.planner.emit(&mut self.state.events, entry)
    }

    fn make_directories(&mut self, path: &str, mode: Option<u32>) -> Result<(), Stop> {
        let missing = Missing {
            mode,
            owner: self.job.attributes.owner.as_deref(),
            line: self.job.line,
        };
        self.planner
            .make_directories(self.state, path, &missing, true)
    }

    fn all(
        &mut self,
        sources: Vec<Result<String, Stop>>,
        contents: Vec<(String, Result<Vec<u8>, Stop>)>,
        files: Option<&Files>,
    ) -> Result<(), Stop> {
        let line = self.job.line;
        for (at, source) in sources.into_iter().enumerate() {
            self.job.current = at;
            let reason = match source {
                Err(Stop::Unknown(reason)) => reason,
                Err(stop) => return Err(stop),
                Ok(source) if is_remote(&source) => {
                    if !self.job.copy.is_add {
                        let message = format!(
                            "COPY takes no URL or git repository such as {source:?}; ADD does"
                        );
                        return refuse("copy-remote", line, message);
                    }
                    format!("{source} is fetched from the network")
                }
                Ok(source) => match files {
                    Some(files) => match self.source(&source, files) {
                        Ok(()) => continue,
                        Err(Stop::Unknown(reason)) => reason,
                        Err(stop) => return Err(stop),
                    },
                    None if self.job.from_stage => {
                        format!(
                            "{source:?} comes from {:?}, whose files aren't known",
                            self.job.copy.from
                        )
                    }
                    None => format!(
                        "{source:?} cannot be looked up behind a .dockerignore that isn't understood"
                    ),
                },
            };
            self.planner.unknown(line, reason);
            self.planner.sent_unknown = true;
            self.state.traceable = false;
            let below = paths::clean(&self.job.destination);
            let reason = "a copy of something unknown";
            self.state
                .events
                .push(Event::Effects(Rc::new(Effects::overwrite(
                    line, &below, reason,
                ))));
            self.state.tree.update(&below, |node| node.partial = true);
            mark_partial(&mut self.state.tree, &below);
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
                    self.job.matches += 1;
                    self.file(&name, source)?;
                }
                Err(Stop::Unknown(reason)) => self
                    .planner
                    .unknown(line, format!("heredoc {name}: {reason}")),
                Err(stop) => return Err(stop),
            }
        }
        if self.job.matches > 1 && self.job.as_file && !self.job.destination.ends_with('/') {
            let reason = "several sources, but the destination has no trailing slash: each overwrites the one before";
            self.planner.unknown(line, reason);
        }
        Ok(())
    }

    fn source(&mut self, source: &str, files: &Files) -> Result<(), Stop> {
        let line = self.job.line;
        if self.job.copy.parents {
            return self.with_parents(source, files);
        }
        let source = paths::clean_absolute(source);
        check_length(&source, line)?;
        if let (Files::Context(_), false) = (files, has_wildcard(&source)) {
            self.planner.sent.push(source.clone());
            self.planner.sent.push(files.resolve(&source)?);
        }
        if !has_wildcard(&source) {
            return self.matched(&source, files);
        }
        let found = self.planner.glob(&source, files, line)?;
        if let Files::Context(_) = files {
            self.planner.sent.extend(found.iter().cloned());
            if found.is_empty() {
                self.planner.fruitless.push((
                    line,
                    source,
                    self.planner
                        .column(line, &self.job.copy.sources[self.job.current]),
                ));
            }
        }
        for found in found {
            self.matched(&found, files)?;
        }
        Ok(())
    }

    fn missing<T>(&self, source: &str, files: &Files) -> Result<T, Stop> {
        let source = source.trim_start_matches('/');
        let mut error = match files {
            Files::Context(_) => {
                let message = format!(
                    "{source:?} is not in the build context (or its .dockerignore hides it)"
                );
                BuildError::new("source-missing", self.job.line, message)
            }
            Files::Tree(_) => {
                let message = format!("{source:?} is not in {:?}", self.job.copy.from);
                BuildError::new("source-missing", self.job.line, message)
            }
        };
        error.column = self
            .planner
            .column(self.job.line, &self.job.copy.sources[self.job.current]);
        Err(Stop::Error(error))
    }

    fn matched(&mut self, source: &str, files: &Files) -> Result<(), Stop> {
        self.job.matches += 1;
        let resolved = files.resolve(source)?;
        let Some(info) = files.info(&resolved)? else {
            return self.missing(source, files);
        };
        if info.kind == FileKind::Directory {
            return self.directory(&resolved, files);
        }
        let name = paths::base(source);
        let node = files.node(&resolved, &info);
        if self.job.copy.unpack.unwrap_or(self.job.copy.is_add) && info.kind == FileKind::File {
            match files.archive(&resolved) {
                Archive::No => {}
                Archive::Plain => return self.unpack(&resolved),
                Archive::Compressed => {
                    return unclear(format!(
                        "{:?} is compressed; ADD unpacks it if it is a tar file",
                        source
                    ));
                }
            }
        }
        self.file(name, node)
    }

    fn unpack(&mut self, source: &str) -> Result<(), Stop> {
        let Some(target) = self.state.tree.resolve(&self.job.destination) else {
            return unclear("the destination has too many links");
        };
        self.make_directories(&target, Some(0o755))?;
        self.state.traceable = false;
        mark_partial(&mut self.state.tree, &target);
        self.state
            .events
            .push(Event::Effects(Rc::new(Effects::overwrite(
                self.job.line,
                &target,
                "the unpacked archive",
            ))));
        let entry = Entry {
            source: Some(source.trim_start_matches('/').to_owned()),
            owner: self
                .job
                .attributes
                .owner_given
                .then(|| self.job.attributes.owner.clone())
                .flatten(),
            ..blank(EntryKind::Archive, target, self.job.line)
        };
        self.emit(entry)
    }

    /// Directories above the destination, then the destination itself, links followed.
    fn prepare(&mut self) -> Result<String, Stop> {
        let above = match self.job.destination.rfind('/') {
            _ if self.job.destination.ends_with('/') || self.job.destination.ends_with("/.") => {
                self.job.destination.as_str()
            }
            Some(at) => &self.job.destination[..=at],
            None => "/",
        };
        let Some(above) = self.state.tree.resolve(above) else {
            return unclear("the destination has too many links");
        };
        let mode = self.job.attributes.mode.for_created();
        self.make_directories(&above, mode)?;
        match self.state.tree.resolve(&self.job.destination) {
            Some(path) => Ok(path),
            None => unclear("the destination has too many links"),
        }
    }

    fn file(&mut self, name: &str, mut node: Node) -> Result<(), Stop> {
        let line = self.job.line;
        let mut target = self.prepare()?;
        let mut if_directory = None;
        match self.state.tree.lookup(&target) {
            Lookup::Found(found) if found.is_directory() => {
                target = paths::join(&target, paths::base(name))
            }
            Lookup::Found(_) | Lookup::Missing => self.job.as_file = true,
            Lookup::NotDirectory => {
                return refuse(
                    "not-a-directory",
                    line,
                    format!("{target} lies below something that is a file"),
                );
            }
            Lookup::Unknown => {
                self.job.as_file = true;
                if_directory = Some(paths::join(&target, paths::base(name)));
            }
        }
        check_length(&target, line)?;
        let mode = self.job.attributes.mode.for_created();
        let above = paths::parent(&target).to_owned();
        self.make_directories(&above, mode)?;
        if let Lookup::Found(found) = self.state.tree.lookup(&target)
            && found.is_directory()
        {
            return refuse(
                "file-over-directory",
                line,
                format!("{target} is a directory; a file cannot replace it"),
            );
        }
        self.job.apply(&mut node);
        let mut entry = entry_of(&node, &target, line);
        entry.if_directory.clone_from(&if_directory);
        self.emit(entry)?;
        if if_directory.is_none() {
            self.state.tree.put(&target, node);
        }
        Ok(())
    }

    fn directory(&mut self, source: &str, files: &Files) -> Result<(), Stop> {
        let target = self.prepare()?;
        let mode = self.job.attributes.mode.for_created();
        self.make_directories(&target, mode)?;
        self.children(source, &target, files, None)
    }

    /// Copies what lies below `source`, filtered by the patterns of --exclude and --parents.
    fn children(
        &mut self,
        source: &str,
        target: &str,
        files: &Files,
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
        let line = self.job.line;
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
            self.planner.visit()?;
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
            if !self.job.excludes.is_empty() {
                let (hit, matches) = self
                    .job
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
                        self.parent_directory(node, &to)?;
                    }
                }
            }
            if info.kind == FileKind::Directory {
                if included {
                    let node = files.node(&from, &info);
                    self.one_directory(node, &to)?;
                }
                if excluded && !self.job.excludes.has_exceptions() {
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
            if let Lookup::Found(found) = self.state.tree.lookup(&to)
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
            self.job.apply(&mut node);
            self.emit(entry_of(&node, &to, line))?;
            self.state.tree.put(&to, node);
        }
        Ok(())
    }

    /// A directory that is only made because something below it is included. One that is there keeps its owner, and
    /// takes the source's mode whatever --chmod says.
    fn parent_directory(&mut self, node: Node, target: &str) -> Result<(), Stop> {
        let owner = match self.state.tree.lookup(target) {
            Lookup::Found(found) if found.is_directory() => found.owner.clone(),
            Lookup::Unknown => {
                let before = self.state.events.len();
                self.one_directory(node, target)?;
                for event in &mut self.state.events[before..] {
                    if let Event::Entry(entry) = event {
                        Rc::make_mut(entry).if_missing = true;
                    }
                }
                return Ok(());
            }
            _ => return self.one_directory(node, target),
        };
        self.state
            .tree
            .update(target, |found| found.mode = node.mode);
        let entry = Entry {
            owner,
            ..entry_of(&node, target, self.job.line)
        };
        self.emit(entry)
    }

    fn one_directory(&mut self, mut node: Node, target: &str) -> Result<(), Stop> {
        node.children.clear();
        self.job.apply(&mut node);
        let entry = entry_of(&node, target, self.job.line);
        match self.state.tree.lookup(target) {
            Lookup::Found(found) if found.is_directory() => {
                let (mode, owner) = (node.mode, node.owner);
                self.state
                    .tree
                    .update(target, |found| (found.mode, found.owner) = (mode, owner));
            }
            Lookup::Found(_) | Lookup::NotDirectory => {
                let message = format!("{target} is a file; a directory cannot replace it");
                return refuse("directory-over-file", self.job.line, message);
            }
            Lookup::Missing => {
                node.partial = false;
                self.state.tree.put(target, node);
            }
            Lookup::Unknown => {
                node.partial = true;
                self.state.tree.put(target, node);
            }
        }
        self.emit(entry)
    }

    fn with_parents(&mut self, source: &str, files: &Files) -> Result<(), Stop> {
        let line = self.job.line;
        self.planner.sent_unknown = true;
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
                return self.missing(source, files);
            }
            if self.job.excludes.matches(pattern.trim_start_matches('/')) {
                if self.job.excludes.has_exceptions() {
                    return unclear(format!(
                        "--parents and --exclude together leave open whether {source:?} is there"
                    ));
                }
                return self.missing(source, files);
            }
        }
        let starts = if has_wildcard(&pivot) {
            self.planner.glob(&pivot, files, line)?
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
                None => return self.missing(&start, files),
                Some(info) if info.kind != FileKind::Directory => {
                    let node = files.node(&resolved, &info);
                    self.file(paths::base(&start), node)?;
                }
                Some(_) => {
                    let target = self.prepare()?;
                    let mode = self.job.attributes.mode.for_created();
                    self.make_directories(&target, mode)?;
                    self.children(&resolved, &target, files, Some(&includes))?;
                }
            }
        }
        Ok(())
    }
}

/// Cleaned, but with a trailing `/` that says "this is a directory".
fn keep_slash(path: &str) -> String {
    let mut cleaned = paths::clean(path);
    if (path.ends_with('/') || path.ends_with("/.")) && cleaned != "/" {
        cleaned.push('/');
    }
    cleaned
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

pub(super) fn file_node(kind: FileKind, mode: Option<u32>) -> Node {
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
