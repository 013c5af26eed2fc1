//! The hot half of harbor-trl. Knows nothing of Python; `rust/python` only converts.

pub mod check;
pub mod columns;
mod directory;
pub mod dockerfile;
pub mod output;
pub mod suite;
pub mod task;
pub mod toml;
