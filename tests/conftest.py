"""Shared by all tests: hypothesis profiles, and the marks for what a machine may lack."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter

import hypothesis
import pytest

# A shared machine makes single examples slow without being wrong, so no deadline.
hypothesis.settings.register_profile("dev", max_examples=50, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=200, deadline=None)
hypothesis.settings.register_profile("deep", max_examples=10_000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# A run in the background of a shell ignores SIGINT, one under nohup SIGHUP, and so would the processes of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

#: Made by tools/docker_test_images.sh.
BASE_IMAGE = "debian:bookworm-slim"


def missing_for_docker() -> str | None:
    """Why Docker tests cannot run here, or None."""
    for command, what in (
        (["docker", "version"], "no Docker engine answers"),
        (["docker", "compose", "version"], "no Compose v2 plugin"),
        (["docker", "image", "inspect", BASE_IMAGE], f"no image {BASE_IMAGE} (run tools/docker_test_images.sh)"),
    ):
        try:
            done = subprocess.run(command, capture_output=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return what
        if done.returncode != 0:
            return what
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("docker")]
    reason = missing_for_docker() if marked else None
    for item in marked:
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def no_keys_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh process: no verdict has had its scalar yet."""
    monkeypatch.setattr("harbor_trl.rollout._keys_seen", set())
    monkeypatch.setattr("harbor_trl.rollout._keyless", Counter())
