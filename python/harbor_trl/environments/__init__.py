"""Sandboxes: Harbor environments that this package brings or improves."""
