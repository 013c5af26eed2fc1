//! Finding the tasks of a suite, and reading them.
//!
//! A task is a directory with a file `task.toml`; what lies below a task is not searched. Threads are made per call, so that a
//! forked process can scan as well.

use crate::directory;
use crate::task::{Given, Refusal, RefusalKind, Store, TaskInfo};
use crate::toml::Version;
use std::cmp::Ordering;
use std::collections::{BTreeSet, HashSet};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A larger `task.toml` is refused unread.
const MAX_FILE_SIZE: u64 = 64 << 20;
/// Directories handed to another thread at a time.
const CHUNK: usize = 64;
const MAX_THREADS: usize = 8;
/// How often the caller hears of a long scan, and may stop it.
pub(crate) const WATCH_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Clone, Debug)]
pub enum State {
    /// Listed only.
    Unread,
    /// Which of the suite's stores holds its values.
    Read(usize, TaskInfo),
    Refused(Box<Refusal>),
}

#[derive(Clone, Debug)]
pub struct Task {
    /// Path below the suite's root; empty if the root itself is the task.
    pub path: PathBuf,
    pub state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProblemKind {
    /// A directory that cannot be listed, or a file that cannot be looked at.
    Unreadable,
    /// A link to a directory above it: not followed.
    Loop,
    /// A link to a directory outside the suite: followed.
    Outside,
    /// A link to a directory that is searched under another name: not followed.
    Again,
    /// A link to nothing.
    BrokenLink,
}

/// Something about the suite that is no task and deserves a look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Path below the suite's root.
    pub path: PathBuf,
    pub kind: ProblemKind,
    /// Where a link leads, or what the system says.
    pub detail: OsString,
}

#[derive(Debug)]
pub struct Suite {
    pub root: PathBuf,
    /// Ordered by path, component by component, as Python orders `Path`.
    pub tasks: Vec<Task>,
    pub problems: Vec<Problem>,
    /// What the tasks say; [`State::Read`] names one of them.
    pub stores: Vec<Store>,
}

#[derive(Debug)]
pub enum Error {
    /// The watcher said stop.
    Stopped,
    /// The root is no directory that can be listed.
    Root(io::Error),
}

/// Called about every 50 ms with the number of tasks found, and of tasks read, so far; `false` stops the work.
pub type Watch<'a> = &'a mut dyn FnMut(usize, usize) -> bool;

impl State {
    fn refused(kind: RefusalKind, message: impl Into<String>) -> State {
        State::Refused(Box::new(Refusal::new(kind, message)))
    }

    /// The same where the stores stand `places` further on.
    fn moved(self, places: usize) -> State {
        match self {
            State::Read(at, info) => State::Read(at + places, info),
            state => state,
        }
    }
}

impl Suite {
    /// Finds every task below `root`; with `read`, also reads each.
    pub fn scan(root: &Path, read: Option<Version>, watch: Watch<'_>) -> Result<Suite, Error> {
        let real_root = fs::canonicalize(root).map_err(Error::Root)?;
        fs::read_dir(root).map_err(Error::Root)?;
        let mut found = walk(
            &Start {
                root,
                path: Path::new(""),
                read,
                seen: None,
            },
            threads(),
            watch,
        )?;
        follow_links(root, &real_root, read, &mut found, watch)?;
        let Found {
            mut tasks,
            mut problems,
            stores,
            ..
        } = found;
        tasks.sort_by(|a, b| order(&a.path, &b.path));
        problems.sort_by(|a, b| order(&a.path, &b.path));
        Ok(Suite {
            root: root.to_owned(),
            tasks,
            problems,
            stores,
        })
    }

    /// A suite whose tasks are known already; none is read.
    pub fn of(root: &Path, paths: impl IntoIterator<Item = PathBuf>) -> Suite {
        let tasks = paths
            .into_iter()
            .map(|path| Task {
                state: unread(&path),
                path,
            })
            .collect();
        Suite {
            root: root.to_owned(),
            tasks,
            problems: Vec::new(),
            stores: Vec::new(),
        }
    }

    /// Reads the tasks at these positions that are not read yet. Positions beyond the suite are ignored.
    pub fn read(
        &mut self,
        positions: &[usize],
        version: Version,
        watch: Watch<'_>,
    ) -> Result<(), Error> {
        let mut wanted: Vec<usize> = positions.to_vec();
        wanted.sort_unstable();
        wanted.dedup();
        wanted.retain(|&i| {
            self.tasks
                .get(i)
                .is_some_and(|task| matches!(task.state, State::Unread))
        });
        let next = AtomicUsize::new(0);
        let results = Mutex::new(Vec::new());
        let crew = Crew::default();
        crew.run(
            threads().min(wanted.len().div_ceil(CHUNK)),
            &|| {
                let mut own = Vec::new();
                let mut reader = Reader::default();
                loop {
                    let start = next.fetch_add(CHUNK, Relaxed);
                    if start >= wanted.len() || crew.stopped() {
                        break;
                    }
                    for &i in &wanted[start..wanted.len().min(start + CHUNK)] {
                        if crew.stopped() {
                            break;
                        }
                        let file = self.root.join(&self.tasks[i].path).join("task.toml");
                        own.push((i, read_file(&file, version, &mut reader)));
                        crew.read.fetch_add(1, Relaxed);
                    }
                }
                lock(&results).push((own, reader.store));
            },
            watch,
        )?;
        for (states, store) in results.into_inner().unwrap_or_else(PoisonError::into_inner) {
            for (i, state) in states {
                self.tasks[i].state = state.moved(self.stores.len());
            }
            self.stores.push(store);
        }
        Ok(())
    }

    /// Takes the values of a task that were read elsewhere; false if there is no such task.
    pub fn supply(
        &mut self,
        position: usize,
        name: Option<&str>,
        metadata: &[(String, Given)],
    ) -> bool {
        let Some(task) = self.tasks.get_mut(position) else {
            return false;
        };
        if self.stores.is_empty() {
            self.stores.push(Store::default());
        }
        let at = self.stores.len() - 1;
        task.state = State::Read(at, self.stores[at].add(name, metadata));
        true
    }
}

pub(crate) fn threads() -> usize {
    std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(MAX_THREADS)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads that do one job together while the calling thread watches.
#[derive(Default)]
pub(crate) struct Crew {
    stop: AtomicBool,
    found: AtomicUsize,
    pub(crate) read: AtomicUsize,
    running: Mutex<usize>,
    finished: Condvar,
}

impl Crew {
    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }

    pub(crate) fn run(
        &self,
        threads: usize,
        job: &(dyn Fn() + Sync),
        watch: Watch<'_>,
    ) -> Result<(), Error> {
        *lock(&self.running) = 0;
        std::thread::scope(|scope| {
            for _ in 0..threads {
                *lock(&self.running) += 1;
                let spawned = std::thread::Builder::new().spawn_scoped(scope, || {
                    let _at_work = AtWork(self);
                    job();
                });
                if spawned.is_err() {
                    *lock(&self.running) -= 1;
                }
            }
            if *lock(&self.running) == 0 {
                // No thread could be had, or the others are through: what is left is done here.
                job();
            }
            let mut running = lock(&self.running);
            while *running > 0 {
                running = self
                    .finished
                    .wait_timeout(running, WATCH_INTERVAL)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                if *running > 0 && !self.stopped() {
                    drop(running);
                    if !watch(self.found.load(Relaxed), self.read.load(Relaxed)) {
                        self.stop.store(true, Relaxed);
                    }
                    running = lock(&self.running);
                }
            }
        });
        if self.stopped() {
            Err(Error::Stopped)
        } else {
            Ok(())
        }
    }
}

/// Counts a thread out however it ends, so that the caller never waits for one that is gone.
struct AtWork<'a>(&'a Crew);

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        *lock(&self.0.running) -= 1;
        self.0.finished.notify_all();
    }
}

/// Where a walk begins, and what it need not visit again.
struct Start<'a> {
    root: &'a Path,
    /// Below the root.
    path: &'a Path,
    read: Option<Version>,
    /// Real paths of directories visited before, and the real path of `path`.
    seen: Option<(&'a HashSet<PathBuf>, &'a Path)>,
}

#[derive(Default)]
struct Found {
    tasks: Vec<Task>,
    stores: Vec<Store>,
    problems: Vec<Problem>,
    /// Links to directories, not followed yet.
    links: Vec<PathBuf>,
    /// Directories that are no task.
    directories: Vec<PathBuf>,
}

impl Found {
    fn append(&mut self, mut other: Found) {
        let places = self.stores.len();
        self.tasks.extend(other.tasks.into_iter().map(|task| Task {
            state: task.state.moved(places),
            ..task
        }));
        self.stores.append(&mut other.stores);
        self.problems.append(&mut other.problems);
        self.links.append(&mut other.links);
        self.directories.append(&mut other.directories);
    }
}

#[derive(Default)]
struct Queue {
    chunks: Vec<Vec<PathBuf>>,
    /// Threads that may still add chunks.
    busy: usize,
}

fn walk(start: &Start<'_>, threads: usize, watch: Watch<'_>) -> Result<Found, Error> {
    let queue = Mutex::new(Queue {
        chunks: vec![vec![start.path.to_owned()]],
        busy: 0,
    });
    let changed = Condvar::new();
    let all = Mutex::new(Found::default());
    let crew = Crew::default();
    crew.run(
        threads,
        &|| {
            let mut walker = Walker {
                start,
                queue: &queue,
                changed: &changed,
                crew: &crew,
                found: Found::default(),
                reader: Reader::default(),
            };
            while let Some(chunk) = walker.take() {
                for path in chunk {
                    if crew.stopped() {
                        break;
                    }
                    walker.visit(path);
                }
                lock(&queue).busy -= 1;
                changed.notify_all();
            }
            // A large part of the sorting, side by side.
            walker
                .found
                .tasks
                .sort_unstable_by(|a, b| order(&a.path, &b.path));
            walker.found.stores.push(walker.reader.store);
            lock(&all).append(walker.found);
        },
        watch,
    )?;
    Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
}

struct Walker<'a> {
    start: &'a Start<'a>,
    queue: &'a Mutex<Queue>,
    changed: &'a Condvar,
    crew: &'a Crew,
    found: Found,
    reader: Reader,
}

impl Walker<'_> {
    fn take(&self) -> Option<Vec<PathBuf>> {
        let mut queue = lock(self.queue);
        loop {
            if self.crew.stopped() {
                return None;
            }
            if let Some(chunk) = queue.chunks.pop() {
                queue.busy += 1;
                return Some(chunk);
            }
            if queue.busy == 0 {
                return None;
            }
            queue = self
                .changed
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn give(&self, chunk: Vec<PathBuf>) {
        if !chunk.is_empty() {
            lock(self.queue).chunks.push(chunk);
            self.changed.notify_one();
        }
    }

    fn problem(&mut self, path: PathBuf, kind: ProblemKind, detail: impl Into<OsString>) {
        self.found.problems.push(Problem {
            path,
            kind,
            detail: detail.into(),
        });
    }

    fn visit(&mut self, path: PathBuf) {
        if let Some((seen, real_start)) = self.start.seen {
            let below = path.strip_prefix(self.start.path).unwrap_or(&path);
            if seen.contains(&join(real_start, below)) {
                return;
            }
        }
        let mut file = std::mem::take(&mut self.reader.file);
        file.as_mut_os_string().clear();
        file.push(self.start.root);
        if !path.as_os_str().is_empty() {
            file.push(&path);
        }
        file.push("task.toml");
        let state = match self.start.read {
            // Most directories are tasks, so opening the file is the cheapest question.
            Some(version) => match directory::file(&file) {
                Ok(Some((opened, size))) => {
                    Ok(Some(read_opened(opened, size, version, &mut self.reader)))
                }
                Ok(None) => fs::metadata(&file).map(|found| no_file(&found)),
                Err(error) => unopened(&file, error),
            },
            None => match fs::metadata(&file) {
                Ok(metadata) if metadata.is_file() => Ok(Some(State::Unread)),
                Ok(metadata) => Ok(no_file(&metadata)),
                Err(error) => unopened(&file, error),
            },
        };
        match state {
            Ok(Some(state)) => {
                self.crew.found.fetch_add(1, Relaxed);
                self.crew
                    .read
                    .fetch_add(usize::from(self.start.read.is_some()), Relaxed);
                let state = if path.to_str().is_none() {
                    unread(&path)
                } else {
                    state
                };
                self.found.tasks.push(Task { path, state });
            }
            Ok(None) => {
                file.pop();
                self.list(path, &file);
            }
            Err(error) => self.problem(path, ProblemKind::Unreadable, error.to_string()),
        }
        self.reader.file = file;
    }

    fn list(&mut self, path: PathBuf, directory: &Path) {
        let entries = match fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) => return self.problem(path, ProblemKind::Unreadable, error.to_string()),
        };
        let mut chunk = Vec::new();
        for entry in entries {
            if self.crew.stopped() {
                return;
            }
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    self.problem(path.clone(), ProblemKind::Unreadable, error.to_string());
                    break;
                }
            };
            let name = entry.file_name();
            if name.as_bytes().first() == Some(&b'.') {
                continue;
            }
            let Ok(file_type) = entry.file_type() else {
                continue;
            };
            if file_type.is_dir() {
                chunk.push(path.join(&name));
                if chunk.len() == CHUNK {
                    self.give(std::mem::take(&mut chunk));
                }
            } else if file_type.is_symlink() {
                let link = entry.path();
                match fs::metadata(&link) {
                    Ok(target) if target.is_dir() => self.found.links.push(path.join(&name)),
                    Ok(_) => {}
                    Err(error) => {
                        let kind = match error.kind() {
                            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                                ProblemKind::BrokenLink
                            }
                            _ if error.raw_os_error() == Some(libc::ELOOP) => ProblemKind::Loop,
                            _ => ProblemKind::Unreadable,
                        };
                        let target = fs::read_link(&link).unwrap_or_default();
                        self.problem(path.join(&name), kind, target);
                    }
                }
            }
        }
        self.give(chunk);
        self.found.directories.push(path);
    }
}

/// Follows links to directories, one after the other in the order of their paths, so that the result does not depend on
/// the threads. Each real directory is visited once; its own name wins over a link's.
fn follow_links(
    root: &Path,
    real_root: &Path,
    read: Option<Version>,
    found: &mut Found,
    watch: Watch<'_>,
) -> Result<(), Error> {
    let mut links: BTreeSet<InOrder> = std::mem::take(&mut found.links)
        .into_iter()
        .map(InOrder)
        .collect();
    if links.is_empty() {
        return Ok(());
    }
    let mut tasks: HashSet<PathBuf> = found
        .tasks
        .iter()
        .map(|task| join(real_root, &task.path))
        .collect();
    let mut seen: HashSet<PathBuf> = found
        .directories
        .iter()
        .map(|path| join(real_root, path))
        .collect();
    seen.extend(tasks.iter().cloned());
    let mut since_watch = Instant::now();
    while let Some(InOrder(path)) = links.pop_first() {
        if since_watch.elapsed() > WATCH_INTERVAL {
            since_watch = Instant::now();
            if !watch(
                found.tasks.len(),
                if read.is_some() { found.tasks.len() } else { 0 },
            ) {
                return Err(Error::Stopped);
            }
        }
        let link = root.join(&path);
        let target = match fs::canonicalize(&link) {
            Ok(target) => target,
            Err(error) => {
                let detail = error.to_string().into();
                found.problems.push(Problem {
                    path,
                    kind: ProblemKind::Unreadable,
                    detail,
                });
                continue;
            }
        };
        let real_parent = link
            .parent()
            .and_then(|parent| fs::canonicalize(parent).ok())
            .unwrap_or_default();
        let mut problem = |kind| {
            found.problems.push(Problem {
                path: path.clone(),
                kind,
                detail: target.clone().into(),
            });
        };
        if real_parent.starts_with(&target) || real_root.starts_with(&target) {
            problem(ProblemKind::Loop);
            continue;
        }
        if seen.contains(&target) || target.ancestors().any(|above| tasks.contains(above)) {
            problem(ProblemKind::Again);
            continue;
        }
        if !target.starts_with(real_root) {
            problem(ProblemKind::Outside);
        }
        let start = Start {
            root,
            path: &path,
            read,
            seen: Some((&seen, &target)),
        };
        // A link to a task is the common case, and not worth a thread.
        let threads = if target.join("task.toml").is_file() {
            0
        } else {
            threads()
        };
        let before = found.tasks.len();
        let before_read = if read.is_some() { before } else { 0 };
        let mut more = walk(&start, threads, &mut |found, read| {
            watch(before + found, before_read + read)
        })?;
        let real = |below: &Path| join(&target, below.strip_prefix(&path).unwrap_or(below));
        tasks.extend(more.tasks.iter().map(|task| real(&task.path)));
        seen.extend(more.tasks.iter().map(|task| real(&task.path)));
        seen.extend(more.directories.iter().map(|directory| real(directory)));
        links.extend(std::mem::take(&mut more.links).into_iter().map(InOrder));
        found.append(more);
    }
    Ok(())
}

/// `base` itself for an empty path, which `Path::join` would end with a slash.
fn join(base: &Path, path: &Path) -> PathBuf {
    if path.as_os_str().is_empty() {
        base.to_owned()
    } else {
        base.join(path)
    }
}

pub(crate) const NOT_UTF8: &str =
    "the name of the task's directory, or of one above it, is not UTF-8: rename it";

fn unread(path: &Path) -> State {
    match path.to_str() {
        Some(_) => State::Unread,
        None => State::refused(RefusalKind::Name, NOT_UTF8),
    }
}

/// What a thread keeps from one task to the next.
#[derive(Default)]
struct Reader {
    buffer: Vec<u8>,
    /// The path of the file to open.
    file: PathBuf,
    store: Store,
}

/// What to make of a `task.toml` that cannot be opened: no task, a broken task, or a directory that cannot be searched.
fn unopened(file: &Path, error: io::Error) -> io::Result<Option<State>> {
    let is_link = || fs::symlink_metadata(file).is_ok();
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            Ok(is_link().then(|| unreadable(&error)))
        }
        _ => match fs::metadata(file) {
            Ok(metadata) if metadata.is_file() => Ok(Some(unreadable(&error))),
            Ok(metadata) => Ok(no_file(&metadata)),
            Err(error) if error.raw_os_error() == Some(libc::ENAMETOOLONG) => Err(error),
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => Ok(Some(unreadable(&error))),
            // Listing the directory fails with the better reason.
            Err(_) => Ok(None),
        },
    }
}

/// A `task.toml` that is no file: a directory may have any name, anything else was meant as a task.
fn no_file(found: &fs::Metadata) -> Option<State> {
    (!found.is_dir()).then(|| {
        State::refused(
            RefusalKind::Unreadable,
            "cannot be read: not a regular file",
        )
    })
}

fn unreadable(error: &io::Error) -> State {
    let message = format!("cannot be read: {}", why_not(error));
    State::refused(RefusalKind::Unreadable, message)
}

/// Why a file that a directory lists cannot be opened.
pub(crate) fn why_not(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            "a link to something that does not exist".to_owned()
        }
        _ => error.to_string(),
    }
}

fn read_file(file: &Path, version: Version, reader: &mut Reader) -> State {
    match directory::file(file) {
        Ok(Some((opened, size))) => read_opened(opened, size, version, reader),
        Ok(None) => State::refused(
            RefusalKind::Unreadable,
            "cannot be read: not a regular file",
        ),
        Err(error) => unreadable(&error),
    }
}

fn read_opened(mut file: File, size: u64, version: Version, reader: &mut Reader) -> State {
    if size > MAX_FILE_SIZE {
        return State::refused(
            RefusalKind::Unreadable,
            format!("{size} bytes, more than the {MAX_FILE_SIZE} that are read of a task.toml"),
        );
    }
    let Reader { buffer, store, .. } = reader;
    // A byte more than the size, so that one read says both all and no more.
    buffer.resize(size as usize + 1, 0);
    let mut length = 0;
    loop {
        match file.read(&mut buffer[length..]) {
            Ok(0) => break,
            Ok(n) => length += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return unreadable(&error),
        }
        if length as u64 == size {
            break;
        }
        if length == buffer.len() {
            return State::refused(
                RefusalKind::Unreadable,
                "cannot be read: it grew while it was read",
            );
        }
    }
    match store.parse(&buffer[..length], version) {
        Ok(info) => State::Read(0, info),
        Err(refusal) => State::Refused(Box::new(refusal)),
    }
}

#[derive(PartialEq, Eq)]
struct InOrder(PathBuf);

impl Ord for InOrder {
    fn cmp(&self, other: &Self) -> Ordering {
        order(&self.0, &other.0)
    }
}

impl PartialOrd for InOrder {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Python's order of `Path`: by component, each as a string of code points, in which a byte that is not UTF-8 is a
/// lone surrogate.
pub fn order(a: &Path, b: &Path) -> Ordering {
    let (a, b) = (a.as_os_str().as_bytes(), b.as_os_str().as_bytes());
    let common = a.iter().zip(b).take_while(|(x, y)| x == y).count();
    match (a.get(common), b.get(common)) {
        (None, None) => Ordering::Equal,
        (None, Some(_)) => Ordering::Less,
        (Some(_), None) => Ordering::Greater,
        (Some(b'/'), Some(_)) => Ordering::Less,
        (Some(_), Some(b'/')) => Ordering::Greater,
        (Some(x), Some(y)) if x.is_ascii() || y.is_ascii() => x.cmp(y),
        (Some(_), Some(_)) => code_points(a).cmp(code_points(b)),
    }
}

/// With `/` as 0, so that a shorter component comes first.
fn code_points(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.utf8_chunks().flat_map(|chunk| {
        let valid = chunk
            .valid()
            .chars()
            .map(|c| if c == '/' { 0 } else { u32::from(c) });
        valid.chain(chunk.invalid().iter().map(|&byte| 0xDC00 + u32::from(byte)))
    })
}
