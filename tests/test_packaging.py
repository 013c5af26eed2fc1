"""What is built from the sources: the sdist's and the wheel's files, and the repository's own scripts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return subprocess.run(command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist and a wheel. The Rust half is compiled for real, without optimisation, into the usual target folder."""
    maturin = shutil.which("maturin", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if maturin is None:
        pytest.skip("maturin is not installed")
    out = tmp_path_factory.mktemp("dist")
    for command in (["sdist"], ["build", "--profile", "dev", "--interpreter", sys.executable]):
        done = run(maturin, *command, "--out", out, PYO3_PYTHON=sys.executable)
        assert done.returncode == 0, done.stderr
    return out


def test_the_wheel_holds_the_package_and_works_for_each_python_from_3_12(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert "-cp312-abi3-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if name.startswith("harbor_trl/")}
    sources = {
        str(path.relative_to(ROOT / "python"))
        for path in (ROOT / "python/harbor_trl").rglob("*")
        if path.is_file() and path.suffix in (".py", ".pyi", ".typed", ".sh", ".toml", ".md", ".yaml")
    }
    assert sources | {"harbor_trl/py.typed"} <= package
    assert [name for name in package - sources if "__pycache__" not in name and not name.endswith(".so")] in (
        [],
        ["harbor_trl/py.typed"],
    )
    assert sum(name.endswith(".so") for name in package) == 1
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_installs_and_imports_with_nothing_else_there(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import harbor_trl, harbor_trl._native as n; print(harbor_trl.__file__, n.__version__)"
    done = run(
        sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}", cwd=tmp_path
    )
    assert done.stdout.startswith(str(tmp_path)), done.stderr


def test_the_sdist_builds_what_the_lock_file_says(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Cargo.lock", "Cargo.toml", "pyproject.toml", "README.md", "rust/core/src/lib.rs"} <= names
    assert {"python/harbor_trl/__init__.py", "python/harbor_trl/_native.pyi", "python/harbor_trl/py.typed"} <= names
    assert not [name for name in names if name.startswith(("target/", ".venv/", "tests/")) or name.endswith(".so")]


def test_the_lock_file_knows_every_dependency_and_names_no_private_registry() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    locked = {package["name"] for package in lock["package"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    assert {re.split(r"[^A-Za-z0-9_.-]", name)[0].lower().replace("_", "-") for name in wanted} <= locked
    (registry,) = {package["source"]["registry"] for package in lock["package"] if "registry" in package["source"]}
    files = {file["url"] for package in lock["package"] for file in package.get("wheels", [])}
    # A mirror's address has a port, a user or a path of its own, and is the same for the index and the files.
    hosts = {url.split("/")[2] for url in files}
    assert registry.startswith("https://") and registry.count("/") == 3
    assert len(hosts) == 1 and not any(mark in host for host in (*hosts, registry.split("/")[2]) for mark in "@:")
    assert hosts != {registry.split("/")[2]}


def test_the_installed_version_is_the_workspace_version() -> None:
    from harbor_trl import _native

    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert _native.__version__ == version
    assert distribution("harbor-trl").version == version


@pytest.mark.parametrize("script", ["tools/setup.sh", "tools/docker_test_images.sh", ".ci/run"])
def test_the_scripts_parse(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    assert run("bash", "-n", script).stderr == ""


def commands(directory: Path, *names: str) -> str:
    """A PATH with nothing but these commands."""
    directory.mkdir()
    for name in names:
        (directory / name).symlink_to(shutil.which(name) or pytest.skip(f"no {name} here"))
    return str(directory)


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ([], "Python 3.12 or newer is missing: install it"),
        (["python"], "Rust is missing: install 1.88 or newer"),
    ],
)
def test_set_up_says_in_one_line_what_to_install(tmp_path: Path, there: list[str], message: str) -> None:
    path = commands(tmp_path / "bin", "bash", "dirname", "awk", "sort", "head")
    env = {"PATH": path, "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path / "none"), "PYTHON": ""}
    if "python" in there:
        env["PYTHON"] = sys.executable
    done = run("bash", "tools/setup.sh", **env)
    assert done.returncode == 1
    assert done.stderr.startswith(f"harbor-trl: {message}") and done.stderr.count("\n") == 1


def test_docker_images_are_skipped_in_one_line_without_docker(tmp_path: Path) -> None:
    done = run("bash", "tools/docker_test_images.sh", PATH=commands(tmp_path / "bin", "bash"))
    assert (done.returncode, done.stdout) == (0, "skipped: no docker command on this machine\n")


def test_an_engine_that_does_not_start_is_skipped_with_its_own_words(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may start an engine")
    path = commands(tmp_path / "bin", "bash", "timeout", "id", "setsid", "seq", "sleep", "tail")
    for name, script in {"docker": "exit 1", "dockerd": "echo no kernel support; exit 1"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    done = run("bash", "tools/docker_test_images.sh", PATH=path, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "skipped: dockerd does not start: no kernel support\n")
