//! The build context, read lazily: names, modes and link targets, through the `.dockerignore`.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::ignore::{IgnorePatterns, Matches};
use super::paths;
use crate::directory::FileType;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileKind {
    File,
    Directory,
    Symlink(String),
    /// Device, pipe or socket.
    Special,
}

#[derive(Debug, Clone)]
pub struct Info {
    pub kind: FileKind,
    /// None: not looked at, or not known.
    pub mode: Option<u32>,
}

/// What lies under one directory, sorted by name.
pub type Listing = Rc<Vec<(String, Info)>>;

/// Names and kinds of what lies in the context's directory, in any order.
pub type RootListing = Rc<Vec<(OsString, FileType)>>;

/// How deep to look for something re-included; each level costs stack.
const MAX_IGNORED_DEPTH: usize = 128;
/// Directory entries times bytes of patterns: at most some seconds of matching.
const MAX_IGNORE_STEPS: usize = 1_000_000_000;

/// Never follows a link of the host: every path is walked component by component from the root, and only
/// directories are entered.
pub struct Context {
    root: PathBuf,
    ignore: IgnorePatterns,
    listings: HashMap<String, Listing>,
    matches: HashMap<String, Option<Rc<Matches>>>,
    /// Names that are not UTF-8, by directory.
    pub unreadable: Vec<String>,
    /// Directory entries read so far.
    pub read: usize,
    /// What the root holds. With it, no file is looked at for its mode.
    quick: Option<RootListing>,
    ignore_steps: usize,
    /// There are too many patterns for this many entries: nothing more is listed, and nothing is known of the rest.
    pub exhausted: bool,
}

impl Context {
    pub fn new(root: &Path, ignore: IgnorePatterns, quick: Option<RootListing>) -> Self {
        Self {
            root: root.to_owned(),
            ignore,
            listings: HashMap::new(),
            matches: HashMap::new(),
            unreadable: Vec::new(),
            read: 0,
            quick,
            ignore_steps: 0,
            exhausted: false,
        }
    }

    /// Metadata of a cleaned absolute path, the context being `/`; parents that are links are not followed.
    pub fn info(&mut self, path: &str) -> Option<Info> {
        if path == "/" {
            return Some(Info {
                kind: FileKind::Directory,
                mode: Some(0o755),
            });
        }
        let mut directory = "/".to_owned();
        let mut parts = paths::components(path).peekable();
        while let Some(part) = parts.next() {
            let listing = self.list(&directory);
            let at = listing
                .binary_search_by(|(name, _)| name.as_str().cmp(part))
                .ok()?;
            let info = &listing[at].1;
            if parts.peek().is_none() {
                return Some(info.clone());
            }
            if info.kind != FileKind::Directory {
                return None;
            }
            directory = paths::join(&directory, part);
        }
        None
    }

    /// Entries of a directory that [`Self::info`] has found.
    pub fn list(&mut self, directory: &str) -> Listing {
        if let Some(listing) = self.listings.get(directory) {
            return Rc::clone(listing);
        }
        let host = self.root.join(directory.trim_start_matches('/'));
        let mut found = Vec::new();
        match self.quick.clone().filter(|_| directory == "/") {
            Some(entries) => {
                for (name, file_type) in entries.iter() {
                    found.extend(self.entry(directory, &host, name.clone(), *file_type, None));
                }
            }
            None => {
                for entry in fs::read_dir(&host).into_iter().flatten().flatten() {
                    let looked_at = match self.quick {
                        Some(_) => entry.file_type().map(|kind| (kind, None)),
                        None => entry.metadata().map(|metadata| {
                            let mode = metadata.permissions().mode() & 0o7777;
                            (metadata.file_type(), Some(mode))
                        }),
                    };
                    if let Ok((kind, mode)) = looked_at {
                        let name = entry.file_name();
                        let kind = match kind {
                            kind if kind.is_dir() => FileType::Directory,
                            kind if kind.is_symlink() => FileType::Symlink,
                            kind if kind.is_file() => FileType::RegularFile,
                            _ => FileType::Unknown,
                        };
                        found.extend(self.entry(directory, &host, name, kind, mode));
                    }
                }
            }
        }
        found.sort_by(|(left, _), (right, _)| left.cmp(right));
        let steps = found.len().saturating_mul(self.ignore.size());
        self.ignore_steps = self.ignore_steps.saturating_add(steps);
        if self.ignore_steps > MAX_IGNORE_STEPS {
            self.exhausted = true;
            found.clear();
        }
        if !self.ignore.is_empty() {
            let parent = self.matches.get(directory).cloned().flatten();
            found.retain(|(name, info)| self.is_visible(directory, name, info, parent.as_deref()));
        }
        let listing = Rc::new(found);
        self.listings
            .insert(directory.to_owned(), Rc::clone(&listing));
        listing
    }

    /// What a directory lists, unless its name or its link cannot be read.
    fn entry(
        &mut self,
        directory: &str,
        host: &Path,
        name: OsString,
        file_type: FileType,
        mode: Option<u32>,
    ) -> Option<(String, Info)> {
        self.read += 1;
        let kind = match file_type {
            FileType::Directory => Some(FileKind::Directory),
            FileType::RegularFile => Some(FileKind::File),
            FileType::Symlink => {
                let target = fs::read_link(host.join(&name)).ok();
                let target = target.and_then(|target| target.into_os_string().into_string().ok());
                target.map(FileKind::Symlink)
            }
            _ => Some(FileKind::Special),
        };
        let (Some(kind), Ok(name)) = (kind, name.into_string()) else {
            self.unreadable.push(directory.to_owned());
            return None;
        };
        Some((name, Info { kind, mode }))
    }

    fn is_visible(
        &mut self,
        directory: &str,
        name: &str,
        info: &Info,
        parent: Option<&Matches>,
    ) -> bool {
        let path = paths::join(directory, name);
        let (ignored, matches) = self
            .ignore
            .matches_below(path.trim_start_matches('/'), parent);
        if info.kind == FileKind::Directory {
            self.matches.insert(path.clone(), Some(Rc::new(matches)));
        }
        if !ignored {
            return true;
        }
        // An ignored directory still comes along as the parent of something that is re-included.
        info.kind == FileKind::Directory
            && self.ignore.has_exceptions()
            && (path.matches('/').count() > MAX_IGNORED_DEPTH || !self.list(&path).is_empty())
    }

    /// The first bytes of a file, for telling archives.
    pub fn head(&self, path: &str) -> Option<Vec<u8>> {
        let mut head = Vec::new();
        let file = fs::File::open(self.root.join(path.trim_start_matches('/'))).ok()?;
        file.take(512).read_to_end(&mut head).ok()?;
        Some(head)
    }
}
