"""The conformance test: the built-in harnesses pass, and each thing wrong with a harness has a finding of its own."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from harbor_trl import AGENTS, HarborBashEnv, HarborEnv
from harbor_trl.testing import HarnessConformanceError, check_harness, harness_findings, tools_of

ROOT = Path(__file__).parent.parent
TOOLS = {
    "bash": {"bash"},
    "terminal": {"bash"},
    "jupyter": {"run_cell", "restart_kernel", "bash"},
    "terminal_notes": {
        *("run_command", "start_process", "read_output", "send_input", "stop_process", "list_processes"),
        *("write_note", "read_note", "search_notes", "delete_note"),
    },
}


@pytest.mark.parametrize("name", TOOLS)
def test_the_built_in_harnesses_conform(name):
    check_harness(name, tools=TOOLS[name])


@pytest.mark.docker
@pytest.mark.parametrize("name", ["jupyter", "terminal_notes"])
def test_they_conform_on_docker(name):
    check_harness(name, tools=TOOLS[name], environment_type="docker")


@pytest.mark.parametrize("name", ["jupyter", "terminal_notes"])
def test_they_conform_by_file_path_from_a_clone(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    # What its tools do in a sandbox does not depend on where it was loaded from.
    check_harness(f"harnesses/{name}/env.py:{AGENTS[name].__name__}", tools=TOOLS[name], environment_type=None)


@pytest.mark.parametrize("name", TOOLS)
def test_what_the_model_is_told_fits_into_a_prompt(name):
    for tool in tools_of(AGENTS[name]).values():
        function = get_json_schema(tool)["function"]
        assert 10 < len(function["description"]) < 500
        assert all(len(it["description"]) < 200 for it in function["parameters"]["properties"].values())


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_that_the_prompt_names_exists(name):
    words = set(AGENTS[name].PROMPT_SUFFIX.replace("`", " ` ").split())
    assert {word for word in words if "_" in word and "/" not in word} <= TOOLS[name]
    assert TOOLS[name] <= words


def test_the_list_of_harnesses_is_the_users_to_extend():
    assert set(AGENTS) == set(TOOLS)
    assert all(issubclass(harness, HarborEnv) for harness in AGENTS.values())


@pytest.mark.parametrize("name", ["jupyter", "terminal_notes"])
def test_the_readme_lists_every_tool(name):
    readme = (ROOT / "harnesses" / name / "README.md").read_text()
    for tool in TOOLS[name]:
        assert f"`{tool}(" in readme, tool


# ── what is found ───────────────────────────────────────────────────────────────────────────────────────────────────


class NoTool(HarborEnv):
    pass


class NoSchema(HarborEnv):
    def run(self, command):
        return self._exec(command)

    def undocumented(self, command: str) -> str:
        """Runs a command."""
        return self._exec(command)

    def close(self) -> None:
        """Stop everything."""

    def many(self, *commands: str) -> str:
        """
        Run commands.

        Args:
            commands: Them.
        """
        return ""

    @classmethod
    def make(cls) -> None: ...

    def _run(self) -> None: ...


class BadReset(HarborBashEnv):
    def reset(self, task_dir):
        return super().reset(task_dir)

    def get_reward(self) -> float:
        return 1.0


class BadInit(HarborBashEnv):
    def __init__(self) -> None:
        super().__init__("bubblewrap")


class Raises(HarborEnv):
    def look(self, path: str) -> str:
        """
        Read a file.

        Args:
            path: Its name.
        """
        return self._run(self._env.exec(f"cat {path}")).stdout

    def nothing(self) -> str:
        """Return nothing."""
        return None  # type: ignore[return-value]


class BrokenSetup(HarborBashEnv):
    async def _setup(self) -> None:
        raise ZeroDivisionError("a bug in the harness")


@pytest.mark.parametrize(
    ("harness", "wanted"),
    [
        (NoTool, ["NoTool has no tool"]),
        (
            NoSchema,
            [
                "`close` looks like a helper",
                "`_run` replaces a method of that name",
                "`make` is public and callable but no plain method (classmethod)",
                "`run` is a tool without a schema",
                "`undocumented` is a tool without a schema",
                "`many` takes variadic positional parameters",
            ],
        ),
        (BadReset, ["cannot be called with the columns of a dataset", "GRPOTrainer then counts the reward twice"]),
        (BadInit, ["cannot be built as `BadInit(environment_type, options=...)`", "cannot be used in a fresh process"]),
        (
            Raises,
            [
                "`look(path='true')` raises AttributeError",
                "`look(path='true')` raises SandboxLostError",
                "`nothing()` returns NoneType on an environment that was never reset",
            ],
        ),
        (BrokenSetup, ["`_setup` failed in a sandbox", "a bug in the harness"]),
    ],
)
def test_a_finding_says_what_and_where(harness, wanted):
    with pytest.raises(HarnessConformanceError) as caught:
        check_harness(harness)
    for text in wanted:
        assert text in str(caught.value)


def test_a_tool_that_hangs_is_found(monkeypatch):
    import harbor_trl.testing

    monkeypatch.setattr(harbor_trl.testing, "DEAD_SANDBOX_SEC", 1.0)

    class Hangs(HarborEnv):
        def wait(self) -> str:
            """Wait."""
            import time

            time.sleep(5)
            return ""

    findings = "\n".join(harness_findings(Hangs, environment_type=None))
    assert "`wait()` has not come back after 1 s on an environment that was never reset" in findings
    assert "does not pickle" in findings and "top level of a module" in findings


def test_tools_that_are_wanted_and_missing_or_there_and_not_wanted_are_named():
    findings = harness_findings(HarborBashEnv, tools={"shell"}, environment_type=None)
    assert len(findings) == 2
    assert "`bash` is public, so the model sees it as a tool" in findings[0]
    assert "`shell` is named in `tools`" in findings[1]


def test_async_tools_and_arguments_of_all_kinds(tmp_path):
    (tmp_path / "harness.py").write_text(
        inspect.cleandoc("""
        from __future__ import annotations
        from typing import Literal
        from harbor_trl import HarborEnv

        class Async(HarborEnv):
            async def go(self, way: Literal["up", "down"], steps: int, names: list[str], far: bool | None = None):
                '''
                Go.

                Args:
                    way: The way.
                    steps: How many.
                    names: Names.
                    far: Whether far.
                '''
                assert way == "up" and steps == 1 and names == [] and far is None
                return await self._aexec("true")
        """)
    )
    check_harness(f"{tmp_path}/harness.py:Async")


def test_three_lines_of_pytest_are_enough(tmp_path):
    (tmp_path / "test_mine.py").write_text(
        "from harbor_trl.testing import check_harness\n"
        "def test_mine():\n"
        "    check_harness('harnesses/jupyter/env.py:JupyterEnv')\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        tmp_path,
        tmp_path / "test_mine.py",
    ]
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
