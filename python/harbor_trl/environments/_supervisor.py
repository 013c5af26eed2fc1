"""PID 1 of a bubblewrap sandbox: starts commands, moves files, reaps, counts memory, ends everything at its own end.

It runs in a fork of `_launcher.py` and imports only what is imported there.

Being PID 1 of its process namespace is what protects it: the kernel drops every signal, SIGKILL too, that a process
inside sends to it, and its memory is closed to ptrace because it is not dumpable and nothing inside holds
CAP_SYS_PTRACE.
When the control socket closes (the trainer let go of the sandbox, or died) it exits, and the kernel kills the rest.

A command runs under a reaper of its own, a child of PID 1 that is a "subreaper": whatever the command leaves behind,
daemons included, stays below that reaper, so a time-out can find all of it.

Requests (one datagram each, descriptors attached): `boot`, `exec ID`, `run ID`, `kill ID`, `put ID`, `get ID`.
Answers, plain ASCII: `ready`, `exit ID CODE`, `gone ID`, `fail ID MESSAGE`, `memory USED_BYTES`, `done ID …`,
`refused ID CODE MESSAGE`.

`exec` leaves output and deadline to the trainer. `run` keeps both here, where the command cannot reach them either: see
`Run`.
"""

# ruff: noqa: SIM105 - contextlib would be an import more in each sandbox's way

import _signal
import _socket
import _thread
import ctypes
import marshal
import os
import resource
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, BinaryIO, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NAME = 4, 36, 15
CHUNK = 1 << 18

control = _socket.socket(fileno=3)
reapers: dict[int, str] = {}
transfers: dict[int, str] = {}
runs: "dict[str, Run]" = {}
boot: "dict[str, Any]" = {}


def tell(text: str) -> None:
    try:
        control.send(text.encode("ascii", "backslashreplace")[:4000])
    except OSError:
        os._exit(0)


def receive() -> tuple[str, list[int]]:
    data, ancillary, _, _ = control.recvmsg(4096, _socket.CMSG_SPACE(4 * 8))
    descriptors: list[int] = []
    for level, kind, content in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            descriptors += memoryview(content[: len(content) // 4 * 4]).cast("i").tolist()
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return data.decode(), descriptors


def load(descriptor: int) -> "dict[str, Any]":
    with open(descriptor, "rb") as file:
        request: dict[str, Any] = marshal.load(file)
    return request


# --- users ------------------------------------------------------------------------------------------------------------


def records(path: str) -> list[list[str]]:
    """Lines of a file such as /etc/passwd, which the sandbox's root may have made into anything."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o170000 != 0o100000:
                return []
            lines = file.read(1 << 20).decode("utf-8", "surrogateescape").split("\n")
    except OSError:
        return []
    return [line.split(":") for line in lines if line.count(":") >= 2]


class UnknownUser(Exception):
    pass


def is_number(text: str) -> bool:
    """Whether `text` is a user's or group's number: a policy may have written these files."""
    return text.isascii() and text.isdigit() and len(text) < 11 and int(text) < 1 << 31


def find_user(user: str) -> tuple[int, int, list[int], str]:
    """(uid, gid, groups, home) of `user`: a name, an id, or either with `:group`, as in a Dockerfile's USER."""
    name, _, group = str(user).partition(":")
    uid, gid, home = -1, 0, "/"
    for record in records("/etc/passwd"):
        if len(record) >= 6 and (record[0] == name or record[2] == name) and is_number(record[2]):
            name, uid, home = record[0], int(record[2]), record[5]
            gid = int(record[3]) if is_number(record[3]) else 0
            break
    if uid < 0 and name == "root":
        uid, home = 0, "/root"
    elif uid < 0:
        if not is_number(name):
            raise UnknownUser(f"unable to find user {name}: no matching entries in passwd file")
        uid = int(name)
    if group:
        for record in records("/etc/group"):
            if (record[0] == group or record[2] == group) and is_number(record[2]):
                gid = int(record[2])
                break
        else:
            if not is_number(group):
                raise UnknownUser(f"unable to find group {group}: no matching entries in group file")
            gid = int(group)
    groups = [gid]
    if not group:
        for record in records("/etc/group"):
            if len(record) >= 4 and name in record[3].split(",") and is_number(record[2]):
                groups.append(int(record[2]))
    return uid, gid, groups, home or "/"


# --- processes --------------------------------------------------------------------------------------------------------


def parents() -> dict[int, int]:
    """Parent of each process, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                pass
    return found


def below(top: int) -> list[int]:
    """Every living descendant of `top`."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [top]
    while queue:
        more = children.get(queue.pop(), [])
        found += more
        queue += more
    return found


def send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def kill_below(top: int) -> None:
    """Kill all descendants of `top`, including those that fork while this runs."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        stopped: set[int] = set()
        while time.monotonic() < deadline:
            new = [pid for pid in below(top) if pid not in stopped]
            if not new:
                break
            for pid in new:
                # A stopped process keeps its place under the process limit and cannot fork again.
                send_signal(pid, _signal.SIGSTOP)
            stopped.update(new)
        alive = [pid for pid in below(top) if not is_zombie(pid)]
        if not alive:
            return
        for pid in alive:
            send_signal(pid, _signal.SIGKILL)
        time.sleep(0.002)


def is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (OSError, IndexError):
        return True


def memory_used() -> int:
    """Bytes of anonymous and shared memory that the sandbox's processes hold; its files are bounded elsewhere."""
    total, skip = 0, {1, *reapers}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in skip:
            try:
                with open(f"/proc/{name}/status", "rb") as file:
                    text = file.read()
            except OSError:
                continue
            # At the beginning of a line: the first line holds a name that the process chose.
            for key in (b"\nRssAnon:", b"\nRssShmem:"):
                at = text.find(key)
                if at >= 0:
                    total += int(text[at + len(key) : text.index(b"kB", at)]) * 1024
    return total


def quiet_child() -> None:
    """In a fresh child: forget the parent's signal handling and its files, which may outlive their use there."""
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    for run in runs.values():
        for descriptor in (run.output, run.status, run.result, run.file):
            if descriptor >= 0:
                os.close(descriptor)


def limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


class Exhausted(Exception):
    pass


def shell_arguments(shell: str, script: bytes) -> list[bytes]:
    name = os.path.basename(shell).encode()
    if len(script) >= 131_000:
        # Longer than one argument may be: the shell reads it from a file, as what it would have been.
        descriptor = os.memfd_create("command", 0)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(script)
        path = b"/proc/self/fd/%d" % descriptor
        read = b"<" + path if name == b"bash" else b"cat " + path
        script = b'eval "exec %d<&-; $(%s)"' % (descriptor, read)
    return [name, b"-c", script]


def run_command(request: "dict[str, Any]", output: int, status: int = -1) -> "NoReturn":
    """In the command's own process: become the shell. Does not return.

    What keeps the command from running is told on `status`; without it, where Docker would tell it: in the output, with
    Docker's exit code.
    """
    os.setsid()
    message, code = "", 126
    try:
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        uid, gid, groups, home = find_user(request["user"])
        environment = dict(request["env"])
        environment.setdefault("HOME", home)
        limit(resource.RLIMIT_DATA, boot["memory_bytes"])
        limit(resource.RLIMIT_FSIZE, boot["file_bytes"])
        if boot["many_users"]:
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
        limit(resource.RLIMIT_NPROC, boot["processes"])
        if uid or boot["many_users"]:
            os.setresuid(uid, uid, uid)
        if status >= 0:
            try:
                # A thread counts like a process, and this one ends with `execve`.
                _thread.stack_size(1 << 16)
                _thread.start_new_thread(_thread.get_ident, ())
            except RuntimeError:
                raise Exhausted from None
        try:
            os.chdir(request["cwd"])
        except OSError:
            if status < 0:
                raise
            os.write(status, b"nowhere 0\n")
            os.chdir("/")
        for number in (_signal.SIGPIPE, _signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGXFSZ):
            _signal.signal(number, _signal.SIG_DFL)
        os.umask(0o022)
        script = request["command"]
        try:
            os.execve("/bin/bash", shell_arguments("/bin/bash", script), environment)
        except FileNotFoundError:
            if status < 0:
                raise
            os.execve("/bin/sh", shell_arguments("/bin/sh", script), environment)
    except Exhausted:
        os.write(status, b"exhausted 0\n")
        os._exit(code)
    except UnknownUser as error:
        message = str(error)
    except OSError as error:
        message = f"cannot run the command: {error.filename or request['user']!r}: {error.strerror}"
        code = 127 if error.filename in ("/bin/bash", "/bin/sh") else 126
    except BaseException as error:
        message = f"cannot run the command: {error!r}"
    text = message.encode("utf-8", "surrogateescape")
    if status >= 0:
        os.write(status, b"refused %d %s\n" % (code, text[:500].replace(b"\n", b" ")))
    else:
        os.write(2, text + b"\n")
    os._exit(code)


def become_reaper() -> None:
    quiet_child()
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    LIBC.prctl(PR_SET_NAME, b"reaper", 0, 0, 0)


def reap_command(name: str, request: "dict[str, Any]", output: int, reader: int) -> "NoReturn":
    """In the reaper: run the command, report its exit code, stay until nothing of it is left. Does not return."""
    become_reaper()
    child = os.fork()
    if child == 0:
        os.close(reader)
        run_command(request, output)
    os.close(output)
    ended = 0.0
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG if ended and reader >= 0 else 0)
        except ChildProcessError:
            os._exit(0)
        if pid == child:
            tell(f"exit {name} {exit_code(status)}")
            ended = time.monotonic()
        elif pid == 0:
            # What is left in the background may go on writing: somebody must read, or it would block or be killed
            # by SIGPIPE. Slowly, so that a flood costs nothing.
            time.sleep(0.05)
            if time.monotonic() - ended > 0.5 and poll.poll(0) and not os.read(reader, CHUNK):
                os.close(reader)
                reader = -1


def exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


# --- bounded commands -------------------------------------------------------------------------------------------------

#: Seconds: for a command to end after SIGTERM; for its output to end after its own end; between two readings of what
#: is left in the background; for what was killed to be gone.
TERM_SEC, DRAIN_SEC, BACKGROUND_SEC, GIVE_UP_SEC = 1.0, 0.15, 0.05, 3.0
#: Linux's default capacity of a pipe.
PIPE_BYTES = 1 << 16
FOREVER = float("inf")


def reap_run(request: "dict[str, Any]", output: int, status: int) -> "NoReturn":
    """In the reaper of a `Run`: as `reap_command`, but all that is said goes to PID 1. Does not return."""
    become_reaper()
    try:
        child = os.fork()
    except OSError:
        os.write(status, b"exhausted 0\n")
        os._exit(0)
    if child == 0:
        run_command(request, output, status)
    os.close(output)
    os.write(status, b"pid %d\n" % child)
    while True:
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            os._exit(0)
        if pid == child:
            os.write(status, b"exit %d\n" % exit_code(ended))


class Run:
    """One command whose output and deadline are kept here.

    The first and the last bytes of its output stay in memory, all of it goes to a file once it is more than is shown.
    At the deadline and at the cap the command gets SIGTERM, then all that it started SIGKILL. When it has ended, what
    is left of it in the background may go on writing, to the file.
    """

    def __init__(self, name: str, request: "dict[str, Any]", result: int) -> None:
        self.name = name
        self.request = request
        self.result = result
        self.output = self.status = self.file = -1
        self.path = ""
        self.reaper = self.leader = 0
        self.head, self.tail = bytearray(), bytearray()
        self.size = self.cut_bytes = self.cut_lines = 0
        self.code = -1
        self.refusal = b""
        self.timed_out = self.over = self.lost = self.exhausted = self.held = self.nowhere = False
        self.killed = self.reported = False
        self.deadline = time.monotonic() + request["timeout_sec"]
        #: When SIGKILL follows SIGTERM; when what was killed is given up; when output is no longer waited for.
        self.kill_at = self.give_up_at = self.drained_at = FOREVER
        #: When output is read again; 0: as soon as there is some.
        self.read_at = 0.0
        #: All that the command itself can have left in the pipe at its end; who writes more is somebody else.
        self.left = PIPE_BYTES
        runs[name] = self
        self.start()

    def start(self) -> None:
        self.output, output = os.pipe()
        self.status, status = os.pipe()
        os.set_blocking(self.output, False)
        os.set_blocking(self.status, False)
        try:
            self.reaper = os.fork()
        except OSError:
            self.reaper = -1
        if self.reaper == 0:
            reap_run(self.request, output, status)
        os.close(output)
        os.close(status)
        if self.reaper > 0:
            reapers[self.reaper] = self.name
        else:
            self.start_again()

    def start_again(self) -> None:
        """No process could be had. What commands left running is the likely reason: it is killed, once."""
        if self.exhausted:
            self.refuse(126, b"cannot start a process: Resource temporarily unavailable")
            return
        self.exhausted = True
        kill_everything()
        os.close(self.output)
        os.close(self.status)
        self.start()

    def refuse(self, code: int, reason: bytes) -> None:
        self.refusal = reason
        self.end(code)

    def end(self, code: int) -> None:
        if self.code < 0:
            self.code = code
            self.drained_at = time.monotonic() + DRAIN_SEC

    def hear(self) -> None:
        """What the reaper, and the command before it became the shell, have to say."""
        try:
            text = os.read(self.status, 4096)
        except BlockingIOError:
            return
        if not text:
            os.close(self.status)
            self.status = -1
            # Without a word of the command's end, the reaper was killed from inside.
            self.end(137)
        for line in text.splitlines():
            word, number_, *rest = line.split(b" ", 2)
            if word == b"pid":
                self.leader = int(number_)
            elif word == b"exit":
                self.end(int(number_))
            elif word == b"nowhere":
                self.nowhere = True
            elif word == b"refused":
                self.refuse(int(number_), rest[0])
            elif word == b"exhausted":
                self.start_again()
                return

    def read(self) -> bool:
        """Take a piece of the output; False if there is none, or no more that counts."""
        try:
            data = os.read(self.output, PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            os.close(self.output)
            self.output = -1
            return False
        if self.code >= 0 and not self.reported:
            self.left -= len(data)
        room = self.request["cap_bytes"] - self.size
        if len(data) > room:
            data = data[:room]
            if not self.reported and not self.over and not self.timed_out:
                self.over = True
                self.stop()
        self.size += len(data)
        if not self.reported:
            self.keep_ends(data)
        if self.file >= 0:
            self.write(data)
        elif not self.reported and not self.lost and self.size > self.request["shown_bytes"]:
            self.lost = not self.make_file()
        return self.reported or self.left >= 0

    def keep_ends(self, data: bytes) -> None:
        room = self.request["head_bytes"] - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        # Seldom: each cut moves the whole tail.
        if len(self.tail) - self.request["tail_bytes"] > PIPE_BYTES:
            self.cut()

    def cut(self) -> None:
        extra = len(self.tail) - self.request["tail_bytes"]
        if extra > 0:
            self.cut_bytes += extra
            self.cut_lines += self.tail.count(b"\n", 0, extra)
            del self.tail[:extra]

    def make_file(self) -> bool:
        """The file, with the output so far, all of which is still in memory."""
        for directory in ("/tmp", "/dev/shm", "/var/tmp"):
            self.path = f"{directory}/harbor-trl-{os.urandom(8).hex()}.out"
            try:
                self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
                os.fchown(self.file, *find_user(self.request["user"])[:2])
            except (OSError, UnknownUser):
                # A sandbox with one user has nobody to give it to.
                if self.file < 0:
                    continue
            if self.write(bytes(self.head + self.tail)):
                self.lost = False
                return True
        self.path = ""
        return False

    def write(self, data: bytes) -> bool:
        try:
            while data:
                data = data[os.write(self.file, data) :]
            return True
        except OSError:
            os.close(self.file)
            self.file = -1
            if not self.reported:
                # Part of an output is of little use, and the room is needed.
                self.lost = True
                try:
                    os.unlink(self.path)
                except OSError:
                    pass
                self.path = ""
        return False

    def stop(self) -> None:
        """Begin to end the command."""
        if self.leader:
            try:
                os.killpg(self.leader, _signal.SIGTERM)
            except OSError:
                pass
        self.kill_at = time.monotonic() + TERM_SEC

    def is_killed(self) -> None:
        """All of it gets SIGKILL: whoever still has the output open takes time to die, and writes no more."""
        self.killed = True
        self.kill_at = FOREVER
        self.give_up_at = time.monotonic() + GIVE_UP_SEC

    def kill(self) -> None:
        self.is_killed()
        if reapers.get(self.reaper) == self.name:
            kill_below(self.reaper)
            # The command may have stopped it.
            send_signal(self.reaper, _signal.SIGCONT)

    def group_is_gone(self) -> bool:
        try:
            os.killpg(self.leader, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False

    def attend(self) -> float:
        """Do what can be done now; returns when there is something to do even if nobody says a word until then."""
        if self.status >= 0:
            self.hear()
        now = time.monotonic()
        if self.reported:
            # Somebody must read, or what is left in the background would block or be killed by SIGPIPE. Slowly, so
            # that a flood costs nothing.
            if now >= self.read_at:
                self.read_at = now + BACKGROUND_SEC if self.read() else 0.0
            if self.output < 0:
                self.close()
            return self.read_at or FOREVER
        if self.output >= 0 and self.code < 0:
            self.read()
        if self.code < 0 and now >= self.deadline and not (self.over or self.timed_out):
            self.timed_out = True
            self.stop()
        while self.code >= 0 and self.output >= 0 and self.read():
            pass
        if self.kill_at < FOREVER:
            if now < self.kill_at and not (self.leader and self.group_is_gone()):
                return now + 0.02
            self.kill()
            return now
        if now >= self.give_up_at:
            self.end(137)
        if self.code < 0:
            return self.give_up_at if self.killed else self.deadline
        if self.output < 0 or self.killed or self.left < 0 or now >= self.drained_at:
            self.report()
            return now
        return self.drained_at

    def report(self) -> None:
        self.held = self.output >= 0 and not self.killed
        if self.held and self.file < 0 and not self.lost and not self.make_file():
            # All of the output so far is here, there just is no file to name.
            self.lost = False
        self.cut()
        lengths = f"{len(self.head)} {len(self.tail)}"
        try:
            for data in (self.head, self.tail):
                while data:
                    del data[: os.write(self.result, data)]
        except OSError:
            lengths = "0 0"
        os.close(self.result)
        self.result, self.reported = -1, True
        if not self.held:
            self.close()
        if self.refusal:
            tell(f"refused {self.name} {self.code} {self.refusal.decode('utf-8', 'backslashreplace')}")
        else:
            flags = (self.timed_out, self.over, self.lost, self.exhausted, self.held, self.nowhere)
            numbers = " ".join(str(int(flag)) for flag in flags)
            counts = f"{self.cut_bytes} {self.cut_lines} {lengths}"
            tell(f"done {self.name} {self.code} {numbers} {counts} {self.path or '-'}")

    def close(self) -> None:
        for descriptor in (self.output, self.status, self.file):
            if descriptor >= 0:
                os.close(descriptor)
        self.output = self.status = self.file = -1
        runs.pop(self.name, None)


# --- files ------------------------------------------------------------------------------------------------------------
#
# A transfer is a file of records: kind (1 byte), mode (4), length of the path (4), path, then
# for `f` chunks: length (4), data, ended by a length of 0; for `l` length (4) and target. `.` ends it. What goes in
# may also hold `m` (a directory, if nothing is there), `i` (where the next file goes instead if its path turns out to
# be a directory) and `o` (USER:GROUP in place of a path: owner of what was made last).


def number(value: int) -> bytes:
    return value.to_bytes(4, "big")


def exactly(file: "BinaryIO", size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("the transfer ends too early")
    return data


def chunks(file: "BinaryIO") -> "Iterator[bytes]":
    while size := int.from_bytes(exactly(file, 4), "big"):
        yield exactly(file, size)


def make_way(path: bytes) -> None:
    """Remove whatever is at `path`, unless it is a directory."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def put(request: "dict[str, Any]", data: int) -> None:
    """Write the records of `data` below `target`, owned by root."""
    target = request["target"]
    if request["is_file"] and (target.endswith(b"/") or os.path.isdir(target)):
        target = os.path.join(target, request["name"])
    os.makedirs(os.path.dirname(target) or b"/" if request["is_file"] else target, exist_ok=True)
    late: list[tuple[bytes, int]] = []
    last = instead = b""
    with open(data, "rb") as file:
        while True:
            kind = exactly(file, 1)
            if kind == b".":
                break
            mode = int.from_bytes(exactly(file, 4), "big") & 0o7777
            name = exactly(file, int.from_bytes(exactly(file, 4), "big"))
            path = os.path.normpath(os.path.join(target, name))
            if kind == b"o":
                if last:
                    user, group = map(int, name.split(b":"))
                    os.chown(last, user, group, follow_symlinks=False)
                    if not os.path.islink(last):
                        os.chmod(last, mode)
                continue
            if kind == b"i":
                instead = path
                continue
            if kind == b"f" and instead and os.path.isdir(path):
                path = instead
            last, instead = path, b""
            if kind == b"m":
                if os.path.isdir(path):
                    last = b""
                else:
                    os.makedirs(path)
                    os.chmod(path, mode)
            elif kind == b"d":
                if not os.path.isdir(path):
                    make_way(path)
                    os.mkdir(path)
                late.append((path, mode))
            elif kind == b"l":
                make_way(path)
                os.symlink(exactly(file, int.from_bytes(exactly(file, 4), "big")), path)
            else:
                make_way(path)
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as out:
                    for chunk in chunks(file):
                        out.write(chunk)
                    os.fchmod(out.fileno(), mode)
    for path, mode in reversed(late):
        os.chmod(path, mode)


def add_file(out: "BinaryIO", path: bytes, name: bytes, limit_bytes: int) -> int:
    """Append one regular file; returns its size."""
    source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with open(source, "rb", buffering=0) as file:
        state = os.fstat(source)
        if state.st_mode & 0o170000 != 0o100000:
            raise OSError(22, "not a regular file", path)
        out.write(b"f" + number(state.st_mode & 0o7777) + number(len(name)) + name)
        size = 0
        while chunk := file.read(CHUNK):
            size += len(chunk)
            if size > limit_bytes:
                raise OSError(27, "more than may be downloaded", path)
            out.write(number(len(chunk)) + chunk)
        out.write(number(0))
    return size


def get(request: "dict[str, Any]", data: int) -> None:
    """Write `source` as records: a file (links followed), or what a directory holds (links kept, no special files)."""
    source, left, entries = request["source"], request["limit_bytes"], request["limit_entries"]
    with open(data, "wb") as out:
        if request["is_file"]:
            add_file(out, source, b"", left)
        else:
            queue = [(source, b"")]
            while queue:
                directory, prefix = queue.pop()
                with os.scandir(directory) as listing:
                    for entry in listing:
                        name = prefix + entry.name
                        entries -= 1
                        if entries < 0:
                            raise OSError(27, "more files than may be downloaded", source)
                        if entry.is_symlink():
                            target = os.readlink(entry.path)
                            out.write(b"l" + number(0) + number(len(name)) + name + number(len(target)) + target)
                        elif entry.is_dir(follow_symlinks=False):
                            mode = entry.stat(follow_symlinks=False).st_mode & 0o7777
                            out.write(b"d" + number(mode) + number(len(name)) + name)
                            queue.append((entry.path, name + b"/"))
                        elif entry.is_file(follow_symlinks=False):
                            left -= add_file(out, entry.path, name, left)
        out.write(b".")


def transfer(
    action: "Callable[[dict[str, Any], int], None]", name: str, request: "dict[str, Any]", data: int
) -> "NoReturn":
    """In a child of its own. Does not return."""
    quiet_child()
    try:
        _signal.signal(_signal.SIGXFSZ, _signal.SIG_IGN)
        limit(resource.RLIMIT_FSIZE, request["file_bytes"])
        action(request, data)
        tell(f"exit {name} 0")
    except OSError as error:
        where = error.filename
        if isinstance(where, bytes):
            where = where.decode("utf-8", "backslashreplace")
        tell(f"fail {name} {error.strerror}: {where}")
    except BaseException as error:
        tell(f"fail {name} {error!r}")
    os._exit(0)


# --- the loop ---------------------------------------------------------------------------------------------------------


def handle() -> None:
    text, descriptors = receive()
    if not text:
        os._exit(0)
    verb, _, name = text.partition(" ")
    if verb == "boot":
        boot.update(load(descriptors[0]))
        try:
            for path in boot["directories"]:
                os.makedirs(path, exist_ok=True)
            for path in boot["open_directories"]:
                os.chmod(path, 0o777)
        except OSError as error:
            tell(f"broken {error.strerror}: {error.filename}")
        else:
            tell("ready")
    elif verb == "exec":
        request = load(descriptors[0])
        try:
            pid = os.fork()
        except OSError as error:
            tell(f"fail {name} cannot start a process: {error.strerror}")
        else:
            if pid == 0:
                reap_command(name, request, descriptors[1], descriptors[2])
            reapers[pid] = name
        os.close(descriptors[1])
        os.close(descriptors[2])
    elif verb == "run":
        try:
            Run(name, load(descriptors[0]), descriptors[1])
        except OSError as error:
            runs.pop(name, None)
            tell(f"fail {name} cannot start a process: {error.strerror}")
    elif verb == "kill":
        for pid, command in {**reapers, **transfers}.items():
            if command == name:
                kill_below(pid)
                send_signal(pid, _signal.SIGKILL)
                return
        tell(f"gone {name}")
    elif verb in ("put", "get"):
        request = load(descriptors[0])
        try:
            pid = os.fork()
        except OSError as error:
            tell(f"fail {name} cannot start a process: {error.strerror}")
        else:
            if pid == 0:
                transfer(put if verb == "put" else get, name, request, descriptors[1])
            transfers[pid] = name
        os.close(descriptors[1])


def kill_everything() -> None:
    """Kill all processes but PID 1, and collect them: until then they count."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        try:
            os.kill(-1, _signal.SIGKILL)
        except ProcessLookupError:
            pass
        if not reap():
            return
        time.sleep(0.005)


def reap() -> bool:
    """Collect the dead; False if nobody is left.

    A reaper killed from inside leaves its command's processes to PID 1: they are killed too.
    """
    orphaned = False
    children = True
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            children = False
            break
        if pid == 0:
            break
        if pid in reapers:
            orphaned |= os.WIFSIGNALED(status)
            tell(f"gone {reapers.pop(pid)}")
        elif pid in transfers:
            tell(f"gone {transfers.pop(pid)}")
    if orphaned:
        for pid, parent in parents().items():
            if parent == 1 and pid not in reapers and pid not in transfers:
                kill_below(pid)
                send_signal(pid, _signal.SIGKILL)
    return children


def main() -> None:
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    LIBC.prctl(PR_SET_NAME, b"supervisor", 0, 0, 0)
    os.dup2(0, 2)
    os.closerange(4, 1024)
    os.set_inheritable(3, False)
    for number_ in (_signal.SIGINT, _signal.SIGPIPE, _signal.SIGHUP, _signal.SIGTERM):
        _signal.signal(number_, _signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    next_count = 0.0
    while True:
        due = FOREVER
        if not reapers:
            next_count = 0.0
        else:
            now = time.monotonic()
            # Most commands end before anything needs counting.
            next_count = next_count or now + 0.1
            if now >= next_count:
                used = memory_used()
                if used > boot["memory_bytes"]:
                    tell(f"memory {used}")
                    try:
                        os.kill(-1, _signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                    for run in runs.values():
                        run.is_killed()
                next_count = now + (0.1 if used > boot["memory_bytes"] // 8 else 0.4)
            due = next_count
        poll = select.poll()
        poll.register(3, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        for run in list(runs.values()):
            due = min(due, run.attend())
            if run.status >= 0:
                poll.register(run.status, select.POLLIN)
            if run.output >= 0 and not run.read_at:
                poll.register(run.output, select.POLLIN)
        interval = None if due == FOREVER else min(max(0.0, due - time.monotonic()), 3600.0) * 1000 + 1
        for descriptor, events in poll.poll(interval):
            if descriptor == 3:
                if events & select.POLLIN:
                    handle()
                else:
                    os._exit(0)
            elif descriptor == wake_read:
                try:
                    os.read(wake_read, 4096)
                except BlockingIOError:
                    pass
        reap()


main()
