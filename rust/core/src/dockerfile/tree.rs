//! A stage's file system, as far as it is known.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::context::FileKind;
use super::paths;

/// Where something in the tree came from: enough to put it there again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Path in the build context.
    Context(String),
    Content(Arc<Vec<u8>>),
    None,
}

#[derive(Debug, Clone)]
pub struct Node {
    pub kind: FileKind,
    /// None where a symbolic mode or a base image decides.
    pub mode: Option<u32>,
    pub owner: Option<String>,
    pub origin: Origin,
    pub children: BTreeMap<String, Arc<Node>>,
    /// A directory that may hold more than is known.
    pub partial: bool,
}

impl Node {
    pub fn directory(mode: Option<u32>, owner: Option<String>, partial: bool) -> Self {
        Self {
            kind: FileKind::Directory,
            mode,
            owner,
            origin: Origin::None,
            children: BTreeMap::new(),
            partial,
        }
    }

    pub fn is_directory(&self) -> bool {
        self.kind == FileKind::Directory
    }
}

pub enum Lookup<'a> {
    Found(&'a Node),
    Missing,
    /// Below something that isn't a directory.
    NotDirectory,
    Unknown,
}

#[derive(Debug, Clone)]
pub struct Tree {
    pub root: Arc<Node>,
}

/// As many links as Linux and BuildKit follow in one path, roughly.
const MAX_LINKS: usize = 255;

impl Tree {
    pub fn new(partial: bool) -> Self {
        Self {
            root: Arc::new(Node::directory(
                Some(0o755),
                Some("0:0".to_owned()),
                partial,
            )),
        }
    }

    /// Whether nothing at all is known of it.
    pub fn is_blank(&self) -> bool {
        self.root.partial && self.root.children.is_empty()
    }

    /// Looks a cleaned absolute path up; follows no link.
    pub fn lookup(&self, path: &str) -> Lookup<'_> {
        let mut node = &self.root;
        for part in paths::components(path) {
            if !node.is_directory() {
                return Lookup::NotDirectory;
            }
            match node.children.get(part) {
                Some(child) => node = child,
                None if node.partial => return Lookup::Unknown,
                None => return Lookup::Missing,
            }
        }
        Lookup::Found(node)
    }

    /// The path without links, as far as they are known; None beyond too many links.
    pub fn resolve(&self, path: &str) -> Option<String> {
        resolve(path, |path| match self.lookup(path) {
            Lookup::Found(Node {
                kind: FileKind::Symlink(target),
                ..
            }) => Some(target.clone()),
            _ => None,
        })
    }

    /// Puts a node at a path whose parents are directories, or become such.
    pub fn put(&mut self, path: &str, node: Node) {
        let mut current = &mut self.root;
        for part in paths::components(path) {
            let inner = Arc::make_mut(current);
            let partial = inner.partial;
            current = inner
                .children
                .entry(part.to_owned())
                .or_insert_with(|| Arc::new(Node::directory(None, None, partial)));
        }
        *current = Arc::new(node);
    }

    pub fn update(&mut self, path: &str, change: impl FnOnce(&mut Node)) {
        let mut current = &mut self.root;
        for part in paths::components(path) {
            match Arc::make_mut(current).children.get_mut(part) {
                Some(child) => current = child,
                None => return,
            }
        }
        change(Arc::make_mut(current));
    }
}

/// Follows the links that `link` knows, inside the root; `..` stops there.
pub fn resolve(path: &str, mut link: impl FnMut(&str) -> Option<String>) -> Option<String> {
    let mut waiting: Vec<Cow<'_, str>> = paths::components(path).map(Cow::Borrowed).collect();
    waiting.reverse();
    let mut resolved = String::from("/");
    let mut links = 0;
    while let Some(part) = waiting.pop() {
        let length = resolved.len();
        if part == ".." {
            resolved.truncate(paths::parent(&resolved).len());
            continue;
        }
        if length > 1 {
            resolved.push('/');
        }
        resolved.push_str(&part);
        let Some(target) = link(&resolved) else {
            continue;
        };
        resolved.truncate(length);
        links += 1;
        if links > MAX_LINKS {
            return None;
        }
        if target.starts_with('/') {
            resolved.truncate(1);
        }
        let parts: Vec<_> = paths::components(&target).map(str::to_owned).collect();
        waiting.extend(parts.into_iter().rev().map(Cow::Owned));
    }
    Some(resolved)
}
