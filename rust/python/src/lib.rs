//! `harbor_trl._native`: converts, releases the GIL, maps errors. Nothing else.

mod check;
mod dockerfile;
mod output;
mod suite;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::check::{check_tasks, locate_key, same_content};
    #[pymodule_export]
    use super::dockerfile::{copy_plan, expand_word, match_ignore, match_path, parse_dockerfile};

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use super::output::OutputBuffer;
    #[pymodule_export]
    use super::suite::{ArrowStream, SuiteIndex, parse_toml};
}
