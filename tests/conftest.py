"""Shared by all tests: hypothesis profiles, and the marks for what a machine may lack."""

from __future__ import annotations

import os

import hypothesis

# A shared machine makes single examples slow without being wrong, so no deadline.
hypothesis.settings.register_profile("dev", max_examples=50, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=200, deadline=None)
hypothesis.settings.register_profile("deep", max_examples=10_000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
