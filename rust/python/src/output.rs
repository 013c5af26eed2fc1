//! Python bindings of `harbor_trl_core::output`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use harbor_trl_core::output::OutputBuffer as Core;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Below this many bytes a feed is done before another thread could make use of the GIL.
const DETACH_FROM: usize = 256 * 1024;

#[pyclass(frozen, module = "harbor_trl._native")]
pub struct OutputBuffer(Mutex<Core>);

impl OutputBuffer {
    fn lock(&self) -> MutexGuard<'_, Core> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl OutputBuffer {
    #[new]
    #[pyo3(signature = (limit, *, head=None, fold=true))]
    fn new(limit: i64, head: Option<i64>, fold: bool) -> PyResult<Self> {
        let limit_chars = usize::try_from(limit).map_err(|_| {
            PyValueError::new_err(format!("limit must be 0 characters or more, not {limit}"))
        })?;
        let head_chars = match head {
            None => limit_chars / 2,
            Some(head) => usize::try_from(head)
                .ok()
                .filter(|&head| head <= limit_chars)
                .ok_or_else(|| {
                    PyValueError::new_err(format!(
                        "head must be 0 to limit={limit} characters, not {head}"
                    ))
                })?,
        };
        Ok(Self(Mutex::new(Core::new(limit_chars, head_chars, fold))))
    }

    #[pyo3(signature = (data, /))]
    fn feed(&self, py: Python<'_>, data: &[u8]) {
        // A thread that waits for the lock must not hold the GIL, or the one that holds the lock could never return.
        match self.0.try_lock() {
            Ok(mut core) if data.len() < DETACH_FROM => core.feed(data),
            attempt => {
                drop(attempt);
                py.detach(|| self.lock().feed(data));
            }
        }
    }

    fn skip(&self, py: Python<'_>, bytes: u64, lines: u64) {
        py.detach(|| self.lock().skip(bytes, lines));
    }

    #[pyo3(signature = (note=""))]
    fn text(&self, py: Python<'_>, note: &str) -> String {
        py.detach(|| self.lock().finish().render(note))
    }

    #[getter]
    fn dropped_bytes(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.lock().finish().dropped_bytes)
    }

    #[getter]
    fn dropped_lines(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.lock().finish().dropped_lines)
    }
}
