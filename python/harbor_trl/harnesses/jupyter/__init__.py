"""The jupyter harness: see README.md."""
