//! `task.toml`, with the verdict of Python's `tomllib`.
