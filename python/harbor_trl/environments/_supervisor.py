"""PID 1 of a bubblewrap sandbox: starts commands, moves files, reaps, counts memory, ends everything at its own end.

It is compiled once by `_launcher.py` and run from there, so it imports little: each import is paid for per sandbox.

Being PID 1 of its process namespace is what protects it: the kernel drops every signal, SIGKILL too, that a process
inside sends to it, and its memory is closed to ptrace because it is not dumpable and nothing inside holds
CAP_SYS_PTRACE.
When the control socket closes (the trainer let go of the sandbox, or died) it exits, and the kernel kills the rest.

A command runs under a reaper of its own, a child of PID 1 that is a "subreaper": whatever the command leaves behind,
daemons included, stays below that reaper, so a time-out can find all of it.

Requests (one datagram each, descriptors attached): `boot`, `exec ID`, `kill ID`, `put ID`, `get ID`.
Answers, plain ASCII: `ready`, `exit ID CODE`, `gone ID`, `fail ID MESSAGE`, `memory USED_BYTES`.
"""

# ruff: noqa: SIM105 - contextlib would be an import more in each sandbox's way

import _signal
import _socket
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


def find_user(user: str) -> tuple[int, int, list[int], str]:
    """(uid, gid, groups, home) of `user`: a name, an id, or either with `:group`, as in a Dockerfile's USER."""
    name, _, group = str(user).partition(":")
    uid, gid, home = -1, 0, "/"
    for record in records("/etc/passwd"):
        if len(record) >= 6 and (record[0] == name or record[2] == name) and record[2].isdigit():
            name, uid, gid, home = record[0], int(record[2]), int(record[3]), record[5]
            break
    if uid < 0 and name == "root":
        uid, home = 0, "/root"
    elif uid < 0:
        if not name.isdigit():
            raise UnknownUser(f"unable to find user {name}: no matching entries in passwd file")
        uid = int(name)
    if group:
        for record in records("/etc/group"):
            if record[0] == group or record[2] == group:
                gid = int(record[2])
                break
        else:
            if not group.isdigit():
                raise UnknownUser(f"unable to find group {group}: no matching entries in group file")
            gid = int(group)
    groups = [gid]
    if not group:
        for record in records("/etc/group"):
            if len(record) >= 4 and name in record[3].split(",") and record[2].isdigit():
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
            for key in (b"RssAnon:", b"RssShmem:"):
                at = text.find(key)
                if at >= 0:
                    total += int(text[at + len(key) : text.index(b"kB", at)]) * 1024
    return total


def quiet_child() -> None:
    """In a fresh child: forget the parent's signal handling."""
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)


def limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def run_command(request: "dict[str, Any]", output: int) -> "NoReturn":
    """In the command's own process: become the shell. Does not return."""
    os.setsid()
    # A message of ours, where Docker's would stand: in the output, with its exit code.
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
        script = request["command"]
        arguments = [b"bash", b"-c", script]
        if len(script) >= 131_000:
            # Longer than one argument may be: the shell reads it as a file.
            descriptor = os.memfd_create("command", 0)
            with open(descriptor, "wb", closefd=False) as file:
                file.write(script)
            arguments = [b"bash", b"/proc/self/fd/%d" % descriptor]
        if boot["many_users"]:
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
        limit(resource.RLIMIT_NPROC, boot["processes"])
        if uid or boot["many_users"]:
            os.setresuid(uid, uid, uid)
        os.chdir(request["cwd"])
        for number in (_signal.SIGPIPE, _signal.SIGINT, _signal.SIGXFSZ):
            _signal.signal(number, _signal.SIG_DFL)
        os.umask(0o022)
        os.execve("/bin/bash", arguments, environment)
    except UnknownUser as error:
        message = str(error)
    except OSError as error:
        message = f"cannot run the command: {error.strerror}: {error.filename or request['user']!r}"
        code = 127 if error.filename == "/bin/bash" else 126
    except BaseException as error:
        message = f"cannot run the command: {error!r}"
    os.write(2, (message + "\n").encode("utf-8", "surrogateescape"))
    os._exit(code)


def reap_command(name: str, request: "dict[str, Any]", output: int, reader: int) -> "NoReturn":
    """In the reaper: run the command, report its exit code, stay until nothing of it is left. Does not return."""
    quiet_child()
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    LIBC.prctl(PR_SET_NAME, b"reaper", 0, 0, 0)
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
            code = os.waitstatus_to_exitcode(status)
            tell(f"exit {name} {code if code >= 0 else 128 - code}")
            ended = time.monotonic()
        elif pid == 0:
            # What is left in the background may go on writing: somebody must read, or it would block or be killed
            # by SIGPIPE. Slowly, so that a flood costs nothing.
            time.sleep(0.05)
            if time.monotonic() - ended > 0.5 and poll.poll(0) and not os.read(reader, CHUNK):
                os.close(reader)
                reader = -1


# --- files ------------------------------------------------------------------------------------------------------------
#
# A transfer is a file of records: kind (1 byte), mode (4), length of the path (4), path, then
# for `f` chunks: length (4), data, ended by a length of 0; for `l` length (4) and target. `.` ends it.


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
    with open(data, "rb") as file:
        while True:
            kind = exactly(file, 1)
            if kind == b".":
                break
            mode = int.from_bytes(exactly(file, 4), "big") & 0o7777
            path = os.path.normpath(os.path.join(target, exactly(file, int.from_bytes(exactly(file, 4), "big"))))
            if kind == b"d":
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


def reap() -> None:
    """Collect the dead. A reaper killed from inside leaves its command's processes to PID 1: they are killed too."""
    orphaned = False
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
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


def main() -> None:
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    LIBC.prctl(PR_SET_NAME, b"supervisor", 0, 0, 0)
    os.dup2(0, 2)
    os.closerange(4, 1024)
    os.set_inheritable(3, False)
    for number_ in (_signal.SIGINT, _signal.SIGPIPE, _signal.SIGHUP, _signal.SIGTERM):
        _signal.signal(number_, _signal.SIG_IGN)
    try:
        # The kernel's own out-of-memory killer should take a sandbox before it takes the trainer.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("900")
    except OSError:
        pass
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(3, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    next_count = 0.0
    while True:
        interval = None
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
                next_count = now + (0.1 if used > boot["memory_bytes"] // 8 else 0.4)
            interval = max(0.0, next_count - now) * 1000 + 1
        for descriptor, events in poll.poll(interval):
            if descriptor == 3:
                if events & select.POLLIN:
                    handle()
                else:
                    os._exit(0)
            else:
                try:
                    os.read(wake_read, 4096)
                except BlockingIOError:
                    pass
        reap()


main()
