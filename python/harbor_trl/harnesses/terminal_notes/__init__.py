"""The terminal_notes harness: see README.md."""
