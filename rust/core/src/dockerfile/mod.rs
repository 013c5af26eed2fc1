//! What a Dockerfile's COPY and ADD put into an image, worked out without building it.
//!
//! [`parse`] turns a Dockerfile into instructions, [`copy_plan`] follows the stages that a target needs through a model
//! of their file systems. The rules are BuildKit's. What depends on something outside the Dockerfile and the build
//! context (the base image, a URL, the machine) is reported as unknown, never guessed.

mod context;
mod ignore;
mod instruction;
mod json;
mod parser;
mod pathmatch;
mod paths;
mod plan;
mod run;
mod shell;
mod stages;
mod tree;

pub use crate::directory::FileType;
pub use context::RootListing;
pub use ignore::{IgnorePatterns, parse_ignore_file};
pub use parser::{Dockerfile, Heredoc, Instruction, parse};
pub use pathmatch::{BadPattern, match_path};
pub use plan::{
    CopyPlan, Entry, EntryKind, PlanOptions, Touched, Unknown, copy_plan, read_ignore_file,
};
pub use shell::{ShellError, Value, expand};

/// Something that a build refuses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildError {
    /// Stable, short, kebab-case.
    pub code: &'static str,
    /// First line of the instruction, counted from 1; 0 when it is about the file as a whole.
    pub line: usize,
    /// Column of the offending word on `line`, counted from 1 in characters, where it could be found there.
    pub column: Option<usize>,
    pub message: String,
}

impl BuildError {
    pub(crate) fn new(code: &'static str, line: usize, message: impl Into<String>) -> Self {
        Self {
            code,
            line,
            column: None,
            message: message.into(),
        }
    }
}

impl std::fmt::Display for BuildError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {}: {} ({})", self.line, self.message, self.code)
    }
}

impl std::error::Error for BuildError {}
