"""Importing the package costs nothing that is not used."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("harbor", "torch", "trl", "transformers", "datasets", "huggingface_hub", "pyarrow", "numpy", "asyncio")


@pytest.mark.parametrize(
    "statement",
    [
        "import harbor_trl",
        "from harbor_trl import HarborTrlError",
    ],
)
def test_importing_the_package_imports_nothing_heavy(statement):
    code = f"{statement}; import sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_building_an_environment_starts_nothing_and_imports_no_harbor():
    code = (
        "import sys, threading; from harbor_trl import AGENTS\n"
        "env = AGENTS['bash']('docker'); assert env.reward == 0.0\n"
        "assert not [m for m in ('harbor', 'torch', 'trl', 'transformers', 'datasets') if m in sys.modules]\n"
        "assert threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_exist_and_nothing_else_is_found():
    import harbor_trl

    for name in harbor_trl.__all__:
        assert getattr(harbor_trl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'HarborSpecs'"):
        _ = harbor_trl.HarborSpecs
