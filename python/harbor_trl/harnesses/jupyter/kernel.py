"""The Python kernel of `JupyterEnv`. It runs in the sandbox, on Python 3.8 or newer, and needs no package.

A server process owns the kernel: it starts it, feeds it one cell at a time, collects what the kernel and its children
write, keeps the time limit, and starts a new one when it dies. The kernel is ipykernel where the image has it, else
plain Python (`Interpreter`). Each tool call is one short-lived client that talks to the server through a Unix socket.

    install(source)                      write this file into the sandbox and start the server
    kernel.py serve                      the server
    kernel.py client run SECONDS         run the cell that stands on stdin in base64; print its output
    kernel.py client restart
    kernel.py work FD                    the kernel

Only modules of Debian's python3-minimal are used.
"""

from __future__ import annotations

import ast
import binascii
import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import types

NAME = ".harbor-trl-jupyter"
#: Not /tmp first: policies tidy up there.
BASES = ("/dev/shm", "/tmp", "/var/tmp", "~")
IMAGES = "/tmp/jupyter-images"
#: Printed instead of, or behind, a cell's output.
UNREACHABLE = "@@harbor-trl: the kernel cannot be reached@@"
CUT_OFF = "@@harbor-trl: the kernel is gone@@"

START_SEC = 60.0
#: Between interrupt, second interrupt and kill.
PATIENCE_SEC = 3.0
LOST = "All variables, functions and imports are gone, files are still there: run again the cells that you still need."
#: What a kernel says when it is ready.
KINDS = {b"i": "ipykernel", b"p": "plain"}
_BETWEEN_CELLS_LIMIT = 4096
_BUFFER_LIMIT = 1 << 20


# ── starting ───────────────────────────────────────────────────────────────────────────────────────────────────────


def install(source: bytes) -> str:
    """Start a server, ending one that runs already. Returns `ready KIND VERSION`, or what is wrong."""
    end_processes()
    problem = "no writable directory"
    for base in BASES:
        directory = os.path.join(os.path.expanduser(base), NAME)
        try:
            subprocess.call(["rm", "-rf", directory])
            os.mkdir(directory, 0o700)
            with open(os.path.join(directory, "kernel.py"), "wb") as file:
                file.write(source)
            os.symlink(sys.executable, os.path.join(directory, "python"))
        except OSError as error:
            problem = str(error)
            continue
        return start(directory)
    return problem


def start(directory: str) -> str:
    pid = os.fork()
    if pid == 0:
        try:
            detach(directory)
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + START_SEC
    while time.monotonic() < deadline:
        try:
            with open(os.path.join(directory, "ready")) as file:
                return file.read()
        except OSError:
            time.sleep(0.01)
    with open(os.path.join(directory, "log"), errors="replace") as file:
        return f"it was not ready within {START_SEC:g} s; {file.read()[-1000:]}"


def detach(directory: str) -> None:
    """Become a process that outlives the call that started it and holds none of its pipes."""
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(os.path.join(directory, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.closerange(3, 256)
    # The marks by which a tool call's own processes are found, to be killed at its deadline.
    env = {name: value for name, value in os.environ.items() if not name.startswith("HARBOR_TRL_")}
    os.execve(sys.executable, [sys.executable, "-I", "-S", os.path.join(directory, "kernel.py"), "serve"], env)


def end_processes() -> None:
    """Kill the servers and kernels that an earlier start left, found by their arguments."""
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    arguments = file.read().split(b"\0")
                if any(it.startswith(b"/") and f"/{NAME}/".encode() in it and len(it) < 200 for it in arguments):
                    os.kill(int(entry), signal.SIGKILL)
            except OSError:
                pass


# ── client ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def client(directory: str, request: list[str]) -> None:
    code = binascii.a2b_base64(sys.stdin.buffer.read()) if request[0] == "run" else b""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(os.path.join(directory, "socket"))
        server.sendall(f"{' '.join(request)} {len(code)}\n".encode() + code)
    except OSError:
        print(UNREACHABLE)
        return
    # Frames: length, bytes; an empty one is the end.
    stream = server.makefile("rb")
    while True:
        header = stream.read(4)
        size = int.from_bytes(header, "big")
        if len(header) == 4 and size == 0:
            return
        chunk = stream.read(size)
        view = memoryview(chunk)
        while view:
            view = view[os.write(1, view) :]
        if len(header) < 4 or len(chunk) < size:
            os.write(1, f"\n{CUT_OFF}\n".encode())
            return


# ── server ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Client:
    """A connection: first its request, then the answer."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setblocking(False)
        self.received = b""
        self.action = ""
        self.seconds = 0.0
        self.code = b""
        self.pending = bytearray()
        self.wrote = False
        self.at_line_start = True
        self.ended = False

    def read(self) -> bool:
        """Take in more of the request. False when the other side is gone."""
        try:
            chunk = self.socket.recv(65536)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not chunk:
            return False
        if not self.action:
            self.received += chunk
            header, newline, body = self.received.partition(b"\n")
            if newline:
                fields = header.decode().split()
                if len(body) >= int(fields[-1]):
                    self.seconds = float(fields[1]) if fields[0] == "run" else 0.0
                    self.action, self.code = fields[0], body
        return True

    def write(self, data: bytes) -> None:
        if data:
            self.pending += len(data).to_bytes(4, "big") + data
            self.wrote = True
            self.at_line_start = data.endswith(b"\n")

    def note(self, text: str) -> None:
        self.write(("" if self.at_line_start else "\n").encode() + f"[{text}]\n".encode())

    def end(self) -> None:
        self.pending += bytes(4)
        self.ended = True


class Server:
    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.path = os.path.join(directory, "socket")
        try:
            self.cwd = os.getcwd()
        except OSError:
            self.cwd = "/"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(16)
        self.clients: list[Client] = []
        self.waiting: list[Client] = []
        self.running: Client | None = None
        self.busy = False
        self.limit = self.deadline = 0.0
        self.interrupts = 0
        #: What happened while nobody listened; told with the next cell.
        self.news = ""
        self.between = bytearray()
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = False
        self.kind = ""

    # ── the kernel's process ──

    def launch(self) -> None:
        ours, theirs = socket.socketpair()
        self.output, output = os.pipe()
        os.set_blocking(self.output, False)
        self.control = ours
        self.ready = self.busy = False
        self.deadline = time.monotonic() + START_SEC
        env = dict(os.environ)
        for name, value in (("TERM", "dumb"), ("NO_COLOR", "1"), ("PAGER", "cat"), ("GIT_PAGER", "cat")):
            env.setdefault(name, value)
        script = os.path.join(self.directory, "kernel.py")
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-u", script, "work", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd=self.cwd if os.path.isdir(self.cwd) else "/",
                env=env,
            )
        except OSError as error:
            self.process = None
            self.fail_waiting(str(error))
        os.close(output)
        theirs.close()

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, number)  # type: ignore[union-attr]

    def bury(self) -> str:
        """End the kernel and all of its group; returns how it ended."""
        assert self.process is not None
        code = self.process.poll()
        if code is None:  # it may be dying
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(0.5)
        self.signal(signal.SIGKILL)
        if code is None:
            code = self.process.wait()
        self.drain()
        self.control.close()
        os.close(self.output)
        self.process = None
        return describe(code)

    def relaunch(self) -> None:
        self.busy, self.running = False, None
        self.launch()

    # ── output ──

    def take_output(self) -> bool:
        try:
            data = os.read(self.output, 65536)
        except BlockingIOError:
            return False
        if self.running is not None:
            self.running.write(data)
        elif not self.busy:
            self.between = (self.between + data)[-_BETWEEN_CELLS_LIMIT:]
        return bool(data)

    def drain(self) -> None:
        for _ in range(64):
            if not self.take_output():
                break

    # ── cells ──

    def run_next(self) -> None:
        if self.waiting and self.process is None:
            self.launch()
        if not self.waiting or self.busy or not self.ready:
            return
        self.drain()
        cell = self.running = self.waiting.pop(0)
        if self.news:
            cell.note(self.news)
            self.news = ""
        if self.between:
            cell.note("written between the cells, by what earlier cells left running:")
            cell.write(bytes(self.between))
            if not cell.at_line_start:
                cell.write(b"\n")
            cell.note("this cell:")
            self.between.clear()
        cell.wrote = False
        self.busy, self.interrupts, self.limit = True, 0, cell.seconds
        self.deadline = time.monotonic() + cell.seconds
        with contextlib.suppress(OSError):  # it died; the loop sees that
            self.control.sendall(len(cell.code).to_bytes(8, "big") + cell.code)

    def finish(self) -> None:
        self.drain()
        cell, self.running, self.busy = self.running, None, False
        if cell is None:
            self.news = self.news or "the cell before was cut off by its tool call's end and interrupted"
            return
        if self.interrupts:
            cell.note(
                f"interrupted after {self.limit:g} s, the time limit of one cell. The kernel and its variables are "
                "still there. Do less in one cell, or start long work in the background with the bash tool"
            )
        elif not cell.wrote:
            cell.note("no output")
        cell.end()

    def on_death(self) -> None:
        was_ready, was_busy, limit_passed = self.ready, self.busy, self.interrupts
        cell = self.running
        how = self.bury()
        if not was_ready:
            said = bytes(self.between[-1000:]).decode(errors="replace").strip()
            self.between.clear()
            self.fail_waiting(f"{how}: {said}" if said else how)
            return
        if limit_passed:
            text = f"the cell did not end when it was interrupted after {self.limit:g} s, so the kernel was killed"
        elif was_busy:
            text = f"the kernel died while this cell ran: {how}"
        else:
            text = f"the kernel died between the cells: {how}"
        text += f". A new one is running. {LOST}"
        if cell is not None:
            cell.note(text)
            cell.end()
        else:
            self.news = text
        self.relaunch()

    def fail_waiting(self, reason: str) -> None:
        for cell in self.waiting:
            cell.note(f"the kernel cannot be started: {reason}. The bash tool may still work")
            cell.end()
        self.waiting.clear()

    def restart(self, asker: Client) -> None:
        cell = self.running
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.bury()
        if cell is not None:
            cell.note(f"the kernel was restarted while this cell ran. {LOST}")
            cell.end()
        self.news = ""
        self.between.clear()
        self.relaunch()
        asker.note(f"the kernel was restarted. {LOST}")
        asker.end()

    def on_deadline(self) -> None:
        if not self.ready:
            self.signal(signal.SIGKILL)
        elif self.interrupts < 2:
            self.interrupts += 1
            self.signal(signal.SIGINT)
        else:
            self.signal(signal.SIGKILL)
        self.deadline = time.monotonic() + PATIENCE_SEC

    # ── the loop ──

    def drop(self, gone: Client) -> None:
        self.clients.remove(gone)
        gone.socket.close()
        if gone in self.waiting:
            self.waiting.remove(gone)
        if gone is self.running:
            self.running = None
            if not self.interrupts:
                self.deadline = time.monotonic()

    def step(self) -> None:
        reads: list[socket.socket | int] = [self.listener, *(it.socket for it in self.clients)]
        if self.process is not None:
            reads.append(self.control)
            if self.running is None or len(self.running.pending) < _BUFFER_LIMIT:
                reads.append(self.output)
        writes = [it.socket for it in self.clients if it.pending]
        timed = self.process is not None and (self.busy or not self.ready)
        wait = min(0.2, max(0.0, self.deadline - time.monotonic())) if timed else 2.0
        readable, writable, _ = select.select(reads, writes, [], wait)
        if self.listener in readable:
            self.clients.append(Client(self.listener.accept()[0]))
        for it in list(self.clients):
            if it.socket in writable:
                try:
                    del it.pending[: it.socket.send(it.pending)]
                except BlockingIOError:
                    pass
                except OSError:
                    self.drop(it)
                    continue
            if it.socket in readable:
                asked = it.action
                if not it.read():
                    self.drop(it)
                elif it.action == "run" and not asked:
                    self.waiting.append(it)
                elif it.action == "restart" and not asked:
                    self.restart(it)
                    return
            elif it.ended and not it.pending:
                self.drop(it)
        if self.process is not None:
            if self.output in readable:
                self.take_output()
            if self.control in readable:
                try:
                    said = self.control.recv(1)
                except OSError:
                    said = b""
                if said in KINDS:
                    self.kind, self.ready = KINDS[said], True
                elif said == b"d":
                    self.finish()
            # A child of the kernel may keep the control channel open, so its end says nothing.
            if self.process.poll() is not None:
                self.on_death()
            elif timed and time.monotonic() >= self.deadline:
                self.on_deadline()
        self.run_next()

    def serve(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.launch()
        while not self.ready and self.process is not None:
            self.step()
        text = (
            f"ready {self.kind} {sys.version.split()[0]}"
            if self.ready
            else bytes(self.between).decode(errors="replace")
        )
        path = os.path.join(self.directory, "ready")
        with open(path + ".new", "w") as file:
            file.write(text)
        os.rename(path + ".new", path)
        inode = os.stat(self.path).st_ino
        while self.inode() == inode:
            self.step()
        if self.process is not None:  # unreachable from now on
            self.signal(signal.SIGKILL)

    def inode(self) -> int:
        try:
            return os.stat(self.path).st_ino
        except OSError:
            return -1


def describe(code: int) -> str:
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"it ended with exit code {code}"
    return f"killed by {name}" + (", perhaps for using too much memory" if number == signal.SIGKILL else "")


# ── kernel ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def work(descriptor: int) -> None:
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        sys.path[0] = ""
    kernel: Interpreter | IPythonKernel
    try:
        import ipykernel  # noqa: F401
        import jupyter_client  # noqa: F401

        kernel = IPythonKernel()
    except ImportError:
        kernel = Interpreter()
    pid = os.getpid()
    stream = control.makefile("rb")
    control.sendall(b"p" if isinstance(kernel, Interpreter) else b"i")
    while True:
        header = stream.read(8)
        if len(header) < 8:
            os._exit(0)
        code = stream.read(int.from_bytes(header, "big"))
        kernel.run(code.decode("utf-8", "surrogatepass"))
        if os.getpid() != pid:  # a fork of the cell's, which got this far
            os._exit(0)
        control.sendall(b"d")


class Images:
    """Saves what cannot be printed, and says where."""

    def __init__(self) -> None:
        self.cell = 0
        self.count = 0

    def next_cell(self) -> None:
        self.cell += 1
        self.count = 0

    def save(self, data: bytes, kind: str) -> str:
        self.count += 1
        path = f"{IMAGES}/cell-{self.cell}-{self.count}.{kind}"
        try:
            os.makedirs(IMAGES, exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
        except OSError as error:
            return f"[an image of {len(data)} bytes could not be saved: {error}]"
        size = ""
        if data[:8] == b"\x89PNG\r\n\x1a\n":
            size = f", {int.from_bytes(data[16:20], 'big')} x {int.from_bytes(data[20:24], 'big')} pixels"
        return f"[image saved: {path}{size}]"


class Interpreter:
    """Plain Python that behaves as a notebook."""

    def __init__(self) -> None:
        self.images = Images()
        main = types.ModuleType("__main__")
        self.space = main.__dict__
        self.space.update(__builtins__=__builtins__, _="", display=self.display, __magic__=self.magic)
        self.loop = None
        # The cells' `__main__`, where pickle looks for what they define.
        sys.modules["__main__"] = main
        import builtins

        builtins.input = self.no_input
        if "MPLBACKEND" not in os.environ:
            os.environ["MPLBACKEND"] = f"module://{InlineBackend.NAME}"
            sys.meta_path.append(InlineBackend(self.show_figures))  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run(self, source: str) -> None:
        self.images.next_cell()
        name = f"<cell {self.images.cell}>"
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                self.execute(source, name)
            except SystemExit as error:
                print(f"[SystemExit: {error}; the kernel goes on. To end it, use the restart tool]", file=sys.stderr)
            except BaseException as error:
                self.show_error(error)
            self.show_figures()
        except BaseException as error:  # an interrupt in the lines above
            self.show_error(error)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # replaced or closed by the cell
                sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__

    def execute(self, source: str, name: str) -> None:
        import linecache

        try:
            tree = parse(source, name)
        except SyntaxError:
            translated = translate_magics(source)
            if translated == source:
                remember(linecache, name, source)
                raise
            source = translated
            tree = parse(source, name)
        remember(linecache, name, source)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not ends_in_semicolon(source):
            last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
        self.evaluate(compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True))
        if last is not None:
            value = self.evaluate(compile(last, name, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True))
            if value is not None:
                self.space["_"] = value
                self.display(value)

    def evaluate(self, code: types.CodeType) -> object:
        value = eval(code, self.space)
        if not code.co_flags & 0x80:  # inspect.CO_COROUTINE: the cell awaits
            return value
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()  # type: ignore[assignment]
            asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(value)  # type: ignore[attr-defined]

    def display(self, *values: object) -> None:
        """Show values as a notebook does: images are saved, the rest is printed."""
        for value in values:
            for method, kind in (("_repr_png_", "png"), ("_repr_jpeg_", "jpg")):
                image = getattr(value, method, None) if not isinstance(value, type) else None
                data = image() if image is not None else None
                if isinstance(data, bytes):
                    print(self.images.save(data, kind))
                    break
            else:
                if type(value).__module__ == "matplotlib.figure":
                    self.save_figure(value)
                else:
                    print(repr(value))

    # ── matplotlib ──

    def show_figures(self, *_args: object, **_options: object) -> None:
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None and InlineBackend.NAME in sys.modules:
            for number in pyplot.get_fignums():
                self.save_figure(pyplot.figure(number))
            pyplot.close("all")

    def save_figure(self, figure: object) -> None:
        import io

        file = io.BytesIO()
        figure.savefig(file, format="png", bbox_inches="tight")  # type: ignore[attr-defined]
        print(self.images.save(file.getvalue(), "png"))
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:
            pyplot.close(figure)

    # ── what a terminal or IPython would do ──

    def no_input(self, prompt: object = "", /) -> str:
        print(prompt, end="")
        raise EOFError("input() has nobody to ask here: write the value into the code")

    def magic(self, name: str, text: str, body: str | None = None) -> object:
        text = re.sub(r"\{(\w+)\}", lambda found: str(self.space.get(found[1], found[0])), text)
        if name in ("!", "bash", "sh", "system"):
            shell(text if body is None else body)
        elif name == "=":
            command = subprocess.run(text, shell=True, stdout=subprocess.PIPE)
            return command.stdout.decode(errors="replace").splitlines()
        elif name == "pip":
            shell(f"'{sys.executable}' -m pip {text}")
        elif name == "cd":
            os.chdir(os.path.expanduser(text.strip() or "~"))
            print(os.getcwd())
        elif name == "pwd":
            return os.getcwd()
        elif name in ("time", "timeit"):
            started = time.monotonic()
            self.execute(body if body is not None else text, f"<cell {self.images.cell}>")
            print(f"Wall time: {time.monotonic() - started:.3g} s")
        elif name == "writefile":
            with open(text.strip(), "w") as file:
                file.write(body or "")
            print(f"Wrote {text.strip()}")
        elif name not in ("matplotlib", "load_ext", "autoreload", "config"):
            raise NameError(f"%{name} is a magic of IPython, which this image does not have: write it as plain Python")
        return None

    def show_error(self, error: BaseException) -> None:
        try:
            report: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
            first = report
            while report is not None:  # without this file's own frames
                report.stack[:] = [frame for frame in report.stack if frame.filename != __file__]
                report = report.__cause__ or report.__context__
            text = "".join(first.format())  # type: ignore[union-attr]
        except Exception:
            text = f"{type(error).__name__}: an exception that cannot be printed\n"
        try:
            sys.stderr.write(text)
        except Exception:
            os.write(2, text.encode(errors="replace"))


class InlineBackend:
    """Finds and makes matplotlib's backend: Agg, whose `show` saves the figures. Costs nothing without matplotlib."""

    NAME = "harbor_trl_inline"

    def __init__(self, show: object) -> None:
        self.show = show

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != self.NAME:
            return None
        import importlib.util

        return importlib.util.spec_from_loader(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        from matplotlib.backends import backend_agg

        module.__dict__.update({key: value for key, value in vars(backend_agg).items() if not key.startswith("__")})
        module.show = self.show  # type: ignore[attr-defined]


def shell(command: str) -> None:
    code = subprocess.call(["bash" if os.path.exists("/bin/bash") else "sh", "-c", command])
    if code:
        print(f"(rc={code})")


def parse(source: str, name: str) -> ast.Module:
    # Not `ast.parse`: its frame would stand in the traceback of a syntax error.
    return compile(source, name, "exec", ast.PyCF_ONLY_AST, True)  # type: ignore[return-value]


def remember(cache: types.ModuleType, name: str, source: str) -> None:
    """Let tracebacks find the cell's lines."""
    cache.cache[name] = (len(source), None, source.splitlines(True), name)


def ends_in_semicolon(source: str) -> bool:
    """Whether the last line says, as in a notebook, that its value is not to be shown."""
    line = source.rstrip().rpartition("\n")[2]
    return line.endswith(";")


def translate_magics(source: str) -> str:
    """Python for a cell with `!command`, `name = !command`, `%magic` or `%%magic` lines."""
    stripped = source.lstrip()
    if stripped.startswith("%%"):
        first, _, body = stripped[2:].partition("\n")
        name, _, text = first.strip().partition(" ")
        return f"__magic__({name!r}, {text!r}, {body!r})"
    lines = []
    for line in source.split("\n"):
        found = re.match(r"(\s*)(?:(\w+)\s*=\s*)?([!%])\s*(\w*)(.*)", line)
        if found is None or (found[2] and found[3] == "%"):
            lines.append(line)
            continue
        indent, target, sign, word, rest = found.groups()
        if sign == "%":
            lines.append(f"{indent}__magic__({word!r}, {rest.strip()!r})")
        elif target:
            lines.append(f"{indent}{target} = __magic__('=', {word + rest!r})")
        else:
            lines.append(f"{indent}__magic__('!', {word + rest!r})")
    return "\n".join(lines)


class IPythonKernel:
    """ipykernel as a child in this process's group, so that signals reach both."""

    def __init__(self) -> None:
        from jupyter_client.blocking.client import BlockingKernelClient

        self.images = Images()
        directory = os.path.dirname(os.path.abspath(__file__))
        connection = os.path.join(directory, f"connection-{os.getpid()}.json")
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", connection]
        # Not TCP: a sandbox may share its network with others.
        command += ["--transport=ipc", f"--ip={directory}/zmq-{os.getpid()}"]
        # ipykernel collects what is written to its descriptors, and writes it to the original ones too.
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "JPY_PARENT_PID": str(os.getpid())},
        )
        signal.signal(signal.SIGINT, lambda *_: None)
        while not (os.path.exists(connection) and os.path.getsize(connection)):
            if self.process.poll() is not None:
                os._exit(1)
            time.sleep(0.02)
        self.client = BlockingKernelClient(connection_file=connection)
        self.client.load_connection_file()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=START_SEC)

    def run(self, source: str) -> None:
        self.images.next_cell()
        self.execute(source)
        # What the cell's child processes wrote takes its own way through ipykernel, and up to 0.2 s if not flushed.
        self.execute("import sys, time; time.sleep(0.02); sys.stdout.flush(); sys.stderr.flush()", silent=True)

    def execute(self, source: str, silent: bool = False) -> None:
        from queue import Empty

        request = self.client.execute(source, silent=silent, allow_stdin=False)
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=0.5)
            except Empty:
                code = self.process.poll()
                if code is not None:
                    os._exit(128 - code if code < 0 else code)
                continue
            kind, content = message["msg_type"], message["content"]
            ours = message["parent_header"].get("msg_id") == request
            if ours and kind == "status" and content["execution_state"] == "idle":
                break
            # A stream may also be of a thread that an earlier cell left.
            if kind == "stream" or (ours and not silent):
                self.show(kind, content)
        while True:
            reply = self.client.get_shell_msg(timeout=PATIENCE_SEC)
            if reply["parent_header"].get("msg_id") == request:
                break
        if any(it.get("source") == "ask_exit" for it in reply["content"].get("payload", [])):
            self.process.kill()
            os._exit(0)

    def show(self, kind: str, content: dict[str, object]) -> None:
        if kind == "stream":
            write_text(str(content["text"]).replace("\r\n", "\n"))
        elif kind == "error":
            write_text("\n".join(content["traceback"]) + "\n")  # type: ignore[arg-type]
        elif kind in ("execute_result", "display_data", "update_display_data"):
            data: dict[str, str] = content["data"]  # type: ignore[assignment]
            for mime, suffix in (("image/png", "png"), ("image/jpeg", "jpg")):
                if mime in data:
                    write_text(self.images.save(binascii.a2b_base64(data[mime]), suffix) + "\n")
                    return
            if "text/plain" in data:
                write_text(data["text/plain"] + "\n")
            else:
                write_text(f"[output of the kind {', '.join(data)}, which cannot be shown as text]\n")


def write_text(text: str) -> None:
    data = re.sub(r"\x1b\[[0-9;]*m", "", text).encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    _directory = os.path.dirname(os.path.abspath(__file__))
    if sys.argv[1] == "serve":
        Server(_directory).serve()
    elif sys.argv[1] == "client":
        client(_directory, sys.argv[2:])
    else:
        work(int(sys.argv[2]))
