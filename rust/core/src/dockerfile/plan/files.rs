//! What a copy reads from: the build context, or what is known of another stage.

use std::cell::RefCell;
use std::rc::Rc;

use super::copy::file_node;
use super::{Stop, unclear};
use crate::dockerfile::context::{Context, FileKind, Info};
use crate::dockerfile::tree::{Lookup, Node, Origin, Tree, resolve};

pub(super) enum Files {
    Context(Rc<RefCell<Context>>),
    Tree(Tree),
}

pub(super) enum Archive {
    No,
    Plain,
    Compressed,
}

impl Files {
    pub(super) fn resolve(&self, path: &str) -> Result<String, Stop> {
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

    pub(super) fn info(&self, path: &str) -> Result<Option<Info>, Stop> {
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
                        mode: node.mode,
                    }))
                }
                Lookup::Missing | Lookup::NotDirectory => Ok(None),
                Lookup::Unknown => unclear(format!("{path:?} comes from the stage's base image")),
            },
        }
    }

    pub(super) fn list(&self, path: &str) -> Result<Vec<String>, Stop> {
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

    pub(super) fn node(&self, path: &str, info: &Info) -> Node {
        match self {
            Self::Context(_) => {
                let origin = match info.kind {
                    FileKind::File | FileKind::Directory => Origin::Context(path.to_owned()),
                    FileKind::Symlink(_) | FileKind::Special => Origin::None,
                };
                Node {
                    origin,
                    ..file_node(info.kind.clone(), info.mode)
                }
            }
            Self::Tree(tree) => match tree.lookup(path) {
                Lookup::Found(node) => node.clone(),
                _ => file_node(info.kind.clone(), info.mode),
            },
        }
    }

    pub(super) fn archive(&self, path: &str) -> Archive {
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
