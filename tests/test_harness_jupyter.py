"""The jupyter harness: a kernel that keeps its state, shows what a notebook shows, and comes back when it dies."""

from __future__ import annotations

import ast
import base64
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harbor_trl.harnesses.jupyter import env as jupyter
from harbor_trl.harnesses.jupyter.env import JupyterEnv
from harbor_trl.options import RolloutOptions
from harbor_trl.rollout import FailureKind
from tasks import make_task

KERNEL = Path(jupyter.__file__).with_name("kernel.py")
BACKENDS = ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]
LOST = "variables, functions and imports are gone"


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


# ── the kernel alone, on this machine's Python ──────────────────────────────────────────────────────────────────────


class Kernel:
    """A server in a directory of its own, as `install` starts it in a sandbox."""

    def __init__(self, kind: str, seconds: float = 60, python: str = sys.executable) -> None:
        self.kind = kind
        self.seconds = seconds
        self.python = python
        # Short: a Unix socket's path is at most 107 bytes long.
        self.scratch = tempfile.TemporaryDirectory(prefix="hk", dir="/tmp")
        self.directory = Path(self.scratch.name)
        self.images = self.directory / "images"
        source = KERNEL.read_text().replace('IMAGES = "/tmp/jupyter-images"', f"IMAGES = {str(self.images)!r}")
        (self.directory / "kernel.py").write_text(source)
        # ipykernel does not show what child processes write when it sees that pytest runs.
        env = {key: value for key, value in os.environ.items() if key not in ("MPLBACKEND", "PYTEST_CURRENT_TEST")}
        if kind == "plain":  # also where ipykernel is installed
            (self.directory / "hide").mkdir()
            (self.directory / "hide" / "ipykernel.py").write_text("raise ImportError\n")
            env["PYTHONPATH"] = str(self.directory / "hide")
        command = [python, "-I", "-S", str(self.directory / "kernel.py"), "serve"]
        self.server = subprocess.Popen(command, env=env, start_new_session=True)
        end = time.monotonic() + 90
        while not (self.directory / "ready").exists() and time.monotonic() < end:
            time.sleep(0.02)
        assert (self.directory / "ready").read_text().split()[:2] == ["ready", kind]

    def ask(self, *request: str, code: str = "") -> str:
        client = [self.python, "-I", "-S", str(self.directory / "kernel.py"), "client", *request]
        encoded = base64.b64encode(code.encode("utf-8", "surrogatepass"))
        done = subprocess.run(client, input=encoded, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    def run(self, code: str, seconds: float | None = None) -> str:
        return self.ask("run", str(seconds or self.seconds), code=code)

    def close(self) -> None:
        (self.directory / "socket").unlink(missing_ok=True)  # the server ends when nobody can reach it
        assert self.server.wait(30) == 0
        self.scratch.cleanup()


@pytest.fixture(scope="module", params=["plain", "ipykernel"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    if request.param == "ipykernel" and not (has("ipykernel") and has("jupyter_client")):
        pytest.skip("ipykernel is not installed")
    kernel = Kernel(request.param)
    yield kernel
    kernel.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Kernel]:
    kernel = Kernel("plain")
    yield kernel
    kernel.close()


def test_variables_persist_and_the_last_expression_is_shown(kernel):
    assert kernel.run("x = 40\nx + 2") == "42\n"
    assert kernel.run("x") == "40\n"
    assert kernel.run("'a' * 3") == "'aaa'\n"
    assert kernel.run("x;") == kernel.run("y = 1") == kernel.run("None") == "[no output]\n"


def test_output_of_python_and_of_its_children_is_shown(kernel):
    text = kernel.run("import os, sys\nprint('out'); print('err', file=sys.stderr)\nos.system('echo child');")
    assert sorted(text.split()) == ["child", "err", "out"]


def test_output_comes_in_the_order_in_which_it_was_written(plain):
    code = "import os, sys\n"
    code += "for i in range(3):\n    print(i, end='')\n    print('e', file=sys.stderr)\n    os.system('echo c')"
    assert plain.run(code) == "0e\nc\n1e\nc\n2e\nc\n"


def test_a_traceback_shows_the_cells_lines_without_colours(kernel):
    kernel.run("def invert(n):\n    return 1 / n")
    text = kernel.run("invert(0)")
    assert "return 1 / n" in text and "invert(0)" in text and "ZeroDivisionError: division by zero" in text
    assert "\x1b" not in text and "kernel.py" not in text
    assert kernel.run("'still here'") == "'still here'\n"


def test_a_syntax_error_points_at_the_place(kernel):
    text = kernel.run("a = 1\nb = (2,\n")
    assert "b = (2," in text and "^" in text and "SyntaxError" in text
    assert "kernel.py" not in text and "ast.py" not in text


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        pytest.param("print('é🎉\\x00')", "é🎉\x00\n", id="any character"),
        pytest.param("await __import__('asyncio').sleep(0, 7)", "7\n", id="top-level await"),
        pytest.param("display(1, 'a')", "1\n'a'\n", id="display"),
        pytest.param("!echo hello", "hello\n", id="shell line"),
        pytest.param("lines = !echo a; echo b\nlist(lines)", "['a', 'b']\n", id="shell output"),
        pytest.param("%%bash\nfor i in 1 2; do echo $i; done", "1\n2\n", id="bash cell"),
        pytest.param("import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))) is A", "True\n", id="pickle"),
        pytest.param("import inspect\ndef f(): return 1\ninspect.getsource(f)[:7]", "'def f()'\n", id="source"),
        pytest.param("from multiprocessing import get_context\ndef g(n): return n * n\n"
                     "with get_context('fork').Pool(2) as pool: r = pool.map(g, [2, 3])\nr", "[4, 9]\n",
                     id="processes"),
    ],
)  # fmt: skip
def test_what_notebooks_do(kernel, code, shown):
    text = kernel.run(code)
    # Python warns of forks in a process with threads, of which ipykernel has several.
    assert "".join(re.split(r".*DeprecationWarning: This process.*\n.*\n", text)) == shown


def test_a_magic_that_plain_python_lacks_is_named(plain):
    assert "%prun is a magic of IPython" in plain.run("%prun f()")
    assert plain.run("%matplotlib inline\n1") == "1\n"
    assert plain.run("%cd /") == "/\n"


def test_nobody_is_asked_for_input(kernel):
    assert re.search("EOFError: input.. has nobody to ask|StdinNotImplementedError", kernel.run("input('name? ')"))


def test_sys_exit_does_not_end_the_kernel(kernel):
    kernel.run("kept = 5")
    assert "SystemExit" in kernel.run("import sys\nsys.exit(3)")
    assert kernel.run("kept") == "5\n"


def test_a_cell_is_interrupted_at_its_limit_and_keeps_its_variables(kernel):
    text = kernel.run("import time\nkept = 1\nprint('begun')\ntime.sleep(60)\nkept = 2", seconds=1)
    assert text.startswith("begun\n")
    assert "KeyboardInterrupt" in text and "interrupted after 1 s" in text
    assert kernel.run("kept") == "1\n"


def test_a_child_process_is_interrupted_with_its_cell(kernel):
    text = kernel.run("import subprocess\nsubprocess.run('sleep 60; echo reached', shell=True)", seconds=1)
    assert "interrupted after 1 s" in text and "\nreached\n" not in text
    assert kernel.run("1") == "1\n"


def test_a_cell_that_resists_the_interrupt_is_killed_and_says_what_is_lost(kernel):
    kernel.run("gone = 1")
    text = kernel.run("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", seconds=1)
    assert "did not end when it was interrupted" in text and LOST in text
    assert "NameError" in kernel.run("gone")


def test_a_cell_whose_client_is_killed_is_interrupted(kernel):
    kernel.run("kept = 3")
    client = [sys.executable, "-I", "-S", str(kernel.directory / "kernel.py"), "client", "run", "60"]
    code = f"open({str(kernel.directory / 'begun')!r}, 'w').close()\nimport time\ntime.sleep(60)"
    process = subprocess.Popen(client, stdin=subprocess.PIPE)
    process.stdin.write(base64.b64encode(code.encode()))
    process.stdin.close()
    end = time.monotonic() + 30
    while not (kernel.directory / "begun").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert kernel.run("kept", seconds=20).endswith("3\n")


def test_a_kernel_that_dies_is_replaced_and_says_what_is_lost(kernel):
    kernel.run("gone = 1")
    text = kernel.run("import os\nprint('last words', flush=True)\nos.kill(os.getpid(), 9)")
    assert "SIGKILL" in text and LOST in text
    assert "NameError" in kernel.run("gone")


def test_a_kernel_that_dies_between_cells_is_told_with_the_next(plain):
    plain.run("import os, threading\nthreading.Timer(0.3, os._exit, [7]).start()")
    time.sleep(1.5)
    text = plain.run("'next'")
    assert "died between the cells: it ended with exit code 7" in text and LOST in text
    assert text.endswith("'next'\n")


def test_restart_loses_variables_only(kernel):
    kernel.run("gone = 1")
    assert LOST in kernel.ask("restart")
    assert "NameError" in kernel.run("gone")


def test_restart_ends_a_running_cell(plain):
    import threading

    results = []
    thread = threading.Thread(target=lambda: results.append(plain.run("print('busy')\nimport time; time.sleep(60)")))
    thread.start()
    time.sleep(1)
    assert LOST in plain.ask("restart")
    thread.join(30)
    assert results[0].startswith("busy\n") and "restarted while this cell ran" in results[0]


def test_cells_sent_at_once_run_one_after_the_other(plain):
    from concurrent.futures import ThreadPoolExecutor

    plain.run("import time\nlog = []")
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda n: plain.run(f"log.append(({n}, 'in'))\ntime.sleep(0.1)\nlog.append(({n}, 'out'))"), range(4)
            )
        )
    log = ast.literal_eval(plain.run("log"))
    assert [step for _, step in log] == ["in", "out"] * 4
    assert all(first[0] == second[0] for first, second in zip(log[::2], log[1::2], strict=True))


def test_what_earlier_cells_print_later_is_told_apart(plain):
    plain.run("import subprocess\nchild = subprocess.Popen('sleep 0.3; echo late', shell=True)")
    time.sleep(1)
    text = plain.run("'now'")
    assert re.fullmatch(r"\[written between the cells.*\]\nlate\n\[this cell:\]\n'now'\n", text)


def test_a_fork_that_leaves_the_cell_does_not_become_a_second_kernel(plain):
    text = plain.run(
        "import os\npid = os.fork()\nif not pid:\n    raise RuntimeError('child')\n"
        "_ = os.waitpid(pid, 0)\nprint('parent')"
    )
    assert "RuntimeError: child" in text and text.endswith("parent\n")
    assert plain.run("1") == "1\n"


def test_a_flood_is_passed_on_without_being_kept(plain):
    text = plain.run("for _ in range(200): print('x' * 100_000)")
    assert len(text) == 200 * 100_001
    assert int(Path(f"/proc/{plain.server.pid}/statm").read_text().split()[1]) * 4096 < 100 << 20


@pytest.mark.skipif(not has("matplotlib"), reason="matplotlib is not installed")
def test_images_are_saved_and_named_in_order(kernel):
    text = kernel.run(
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\n"
        "print('before')\nplt.show()\nprint('after')\nplt.plot([3]);",
        90,
    )
    before, saved, after, *rest = text.splitlines()
    assert (before, after) == ("before", "after")
    first, second = (
        re.fullmatch(r"\[image saved: (.*\.png), (\d+) x (\d+) pixels\]", line) for line in (saved, rest[-1])
    )
    for found in (first, second):
        assert Path(found[1]).parent == kernel.images
        assert Path(found[1]).read_bytes().startswith(b"\x89PNG")
    assert first[1] != second[1]


def test_an_object_with_an_image_is_saved(kernel):
    pixel = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"0" * 8 + b"\0\0\0\7\0\0\0\5" + b"rest").decode()
    code = f"import base64\nclass Picture:\n    def _repr_png_(self): return base64.b64decode({pixel!r})\nPicture()"
    assert re.fullmatch(r"\[image saved: .*\.png, 7 x 5 pixels\]\n", kernel.run(code))


def find_python(version: str) -> str:
    """An interpreter of this version, on PATH or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    for path in (shutil.which(f"python{version}"), *sorted(pyenv.glob(f"versions/{version}.*/bin/python"))):
        if path:
            print_version = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            if subprocess.run(print_version, capture_output=True, text=True).stdout.strip() == version:
                return str(path)
    pytest.skip(f"no Python {version} on this machine")


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14"])
def test_the_kernel_runs_on_every_python_from_3_8_on(version):
    kernel = Kernel("plain", python=find_python(version))
    try:
        assert kernel.run("import sys\nx = 40\n'%d.%d' % sys.version_info[:2], x + 2") == f"({version!r}, 42)\n"
        assert kernel.run("await __import__('asyncio').sleep(0, x)") == "40\n"
        assert kernel.run("lines = !echo a\nprint(lines, end='')\n%cd /") == "['a']/\n"
        traceback = kernel.run("def invert(n):\n    return 1 / n\ninvert(0)")
        assert "return 1 / n" in traceback and "ZeroDivisionError" in traceback and "kernel.py" not in traceback
        assert "SyntaxError" in kernel.run("a = (") and "SystemExit: 3" in kernel.run("sys.exit(3)")
        assert kernel.run("import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))) is A") == "True\n"
        text = kernel.run("import time\nprint('begun')\ntime.sleep(60)", seconds=1)
        assert text.startswith("begun\n") and "interrupted after 1 s" in text
        assert kernel.run("x") == "40\n"
        assert LOST in kernel.run("import os\nos.kill(os.getpid(), 9)")
        assert "NameError" in kernel.run("x")
    finally:
        kernel.close()


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7"])
def test_an_older_python_is_named_and_not_used(version, tmp_path):
    (tmp_path / "python3").symlink_to(find_python(version))
    shell = shutil.which("sh")
    command = [shell, "-c", jupyter._start_command()]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert re.fullmatch(rf"no Python 3.8 or newer, python3 is {version}\.\d+\n", done.stdout), done


def test_both_halves_know_the_same_words():
    source = KERNEL.read_text()
    for text in (jupyter._UNREACHABLE, jupyter._CUT_OFF, jupyter._LOST):
        assert f'"{text}"' in source


# ── in a sandbox ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., JupyterEnv]:
    def start(backend: str, **task: str) -> JupyterEnv:
        env = JupyterEnv(backend, options=RolloutOptions(trials_dir=str(tmp_path / "trials")))
        env.reset(task_dir=make_task(tmp_path / "task", **task))
        return env

    return start


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rollout(backend, start):
    env = start(backend)
    assert env.run_cell("import os\nanswer = 42\nos.getcwd()") == "'/app'\n"
    assert env.bash("echo shell") == "shell\n"
    assert env.run_cell("answer") == "42\n"
    # Whatever is done to the kernel, it comes back, and the text says that the variables are lost.
    assert LOST in env.restart_kernel()
    assert "NameError" in env.run_cell("answer")
    env.bash("kill -9 $(pgrep -f '[k]ernel.py serve')")
    text = env.run_cell("1")
    assert "was not run" in text and LOST in text
    assert env.run_cell("1") == "1\n"
    text = env.run_cell(
        "import subprocess\nsubprocess.call(['pkill', '-9', '-f', 'kernel.py serve'])\nimport time; time.sleep(9)"
    )
    assert "killed while this cell ran" in text and LOST in text
    env.bash("rm -rf /dev/shm/.harbor* /tmp/.harbor*")
    assert LOST in env.run_cell("1")
    assert env.run_cell("open('/workdir/answer.txt', 'w').write(str(40 + 2))") == "2\n"
    assert env.reward == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_output_of_a_cell_is_bounded(backend, start):
    env = start(backend)
    text = env.run_cell("print('first')\nfor i in range(300_000): print(i)\nprint('last')")
    assert text.startswith("first\n0\n") and text.endswith("299999\nlast\n")
    assert len(text) < env._options.output_limit + 500
    assert env.run_cell("i") == "299999\n"


def test_a_cell_with_any_text_in_it_arrives(start):
    env = start("bubblewrap")
    code = "text = '''it's \"$HOME\" `id` \\\\ é🎉 %s\n<<EOF'''\nlen(text), text[-5:]"
    assert (
        env.run_cell(code)
        == f"{(len(ast.literal_eval(code.split('=', 1)[1].rsplit(chr(10), 1)[0].strip())), '<<EOF')}\n"
    )
    assert "surrogates not allowed" in env.run_cell("'\ud800'")
    assert env.run_cell("x = '''" + "long line\n" * 15_000 + "'''\nlen(x)") == "150000\n"
    for nothing in ("", "  \n", None, 5):
        assert "must be a text with Python code" in env.run_cell(nothing)


def test_it_runs_as_the_tasks_user(start):
    env = start("bubblewrap", toml='[agent]\nuser = "nobody"\n')
    if env.run_cell("import os\nos.getuid()") != "65534\n":
        assert os.getuid() != 0, env._failure  # an ordinary user's sandboxes have no other users
        pytest.skip("bubblewrap sandboxes have one user here")
    assert "Permission" in env.run_cell("open('/root/x', 'w')")


@pytest.mark.docker
def test_an_image_without_python_is_refused_by_name_and_masked(start):
    dockerfile = (
        "FROM harbor-trl-busybox:latest\nRUN printf '#!/bin/sh\\nexec sh \"$@\"\\n' >/bin/bash; chmod +x /bin/bash\n"
    )
    env = start("docker", dockerfile=dockerfile)
    assert "needs Python 3.8 or newer in the task's image" in env.run_cell("1")
    assert env.reward is None
    assert env._failure.kind is FailureKind.SETUP_FAILED


def test_a_policy_that_removes_python_gets_a_text(start):
    env = start("bubblewrap")
    env.bash("rm -f /usr/bin/python3* /dev/shm/.harbor-trl-jupyter/python; pkill -9 -f 'kernel.py serve'")
    text = env.run_cell("1")
    assert "no Python" in text and "bash tool" in text
    assert env.reward == 0.0
