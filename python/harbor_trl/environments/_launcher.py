"""Starts bubblewrap sandboxes for one trainer process; a program of its own, which gets the number of its socket.

It is a separate, small, single-threaded process for three reasons: forking it is cheap and safe, which forking a
trainer is not; it can do the set-up that needs a privilege which the trainer should not take on; and when the trainer
dies, it and every sandbox die with it.

Each request is one datagram (a marshalled dict) on a Unix socket, with file descriptors attached. The forked child of a
request, the keeper, makes a user namespace and mounts one size-limited tmpfs that holds everything the sandbox may
write. Its own child is PID 1 of a new process namespace: it has `bwrap` make the other namespaces and all mounts, joins
them, drops what bwrap would drop, and goes on as `_supervisor.py`. As a fork it saves the start of an interpreter,
which would be half of the sandbox's. No file is left on the host: the tmpfs goes when the last process goes.
"""

from __future__ import annotations

import _signal
import _socket
import _thread  # noqa: F401 - for the supervisor
import ctypes
import errno
import fcntl
import marshal
import os
import resource
import select
import sys
import time  # noqa: F401 - for the supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000, 0x80000
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
KEYCTL = {"x86_64": 250, "aarch64": 219}
KEYCTL_JOIN_SESSION_KEYRING = 1

#: In the small root: the tmpfs of all that a sandbox may write, bwrap's package, Python's directories by number.
LAYER, BWRAP, PREFIXES = "/layer", "/bwrap", "/prefixes"

#: Ids of a sandbox when the trainer is root: a range of its own, far from those that /etc/subuid hands out by default.
FIRST_ID, ID_RANGE, RANGES = 0x6000_0000, 0x1_0000, 0x1F00

#: Directories of the host's /usr that exist in each sandbox's own layer too. Ids outside the sandbox's map own the
#: host's directories, and nobody inside may write there; these are the sandbox's own, merged with what lies below.
OWN_DIRECTORIES = (
    "bin",
    "games",
    "include",
    "lib",
    "libexec",
    "local",
    "local/bin",
    "local/etc",
    "local/include",
    "local/lib",
    "local/libexec",
    "local/sbin",
    "local/share",
    "local/src",
    "sbin",
    "share",
    "src",
)

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: What a sandbox's root may do, by number in <linux/capability.h>: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID,
#: SETUID, NET_BIND_SERVICE, SYS_CHROOT.
CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 10, 18)
CAPABILITY_VERSION_3 = 0x20080522
#: Descriptors of the keeper, and all but the last two of PID 1; 0 and 1 are /dev/null.
ERRORS, CONTROL, ASK, ANSWER = 2, 3, 4, 5

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38


class StageError(Exception):
    """One step of the set-up failed: `stage` says which, `errno` why."""

    def __init__(self, stage: str, error: OSError) -> None:
        super().__init__(stage)
        self.stage = stage
        self.errno = error.errno or 0


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    def encode(text: str | None) -> bytes | None:
        return None if text is None else os.fsencode(text)

    if LIBC.mount(encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(options)):
        code = ctypes.get_errno()
        raise OSError(code, f"mount {target}: {os.strerror(code)}")


def private_mounts(propagation: int = MS_PRIVATE) -> None:
    try:
        os.unshare(os.CLONE_NEWNS)
        mount("none", "/", None, MS_REC | propagation, None)
    except OSError as error:
        raise StageError("mount namespace", error) from error


def become_root(first_id: int | None, ask: int, answer: int) -> None:
    """Become root of a new user namespace.

    `first_id` is where the sandbox's range of ids starts (the parent writes the maps), or None for an ordinary user,
    who can map only itself.
    """
    uid, gid = os.getuid(), os.getgid()
    try:
        os.unshare(os.CLONE_NEWUSER)
    except OSError as error:
        raise StageError("user namespace", error) from error
    try:
        if first_id is None:
            for name, text in (("setgroups", "deny"), ("gid_map", f"0 {gid} 1"), ("uid_map", f"0 {uid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        else:
            os.write(ask, b"m")
            if os.read(answer, 1) != b"m":
                raise OSError(1, "the id maps were refused")
            os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    except OSError as error:
        raise StageError("id map", error) from error
    try:
        # No user namespace inside the sandbox: the kernel code that it opens up has had most of the escapes.
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    except OSError:
        pass


def enter_small_root(setup: dict[str, Any]) -> None:
    """Leave the host's mounts behind, but for those that sandboxes are made of.

    There may be hundreds of them, and the kernel copies all for each mount namespace, and bwrap reads the list of all
    of them several times.
    """
    package = os.path.dirname(os.path.dirname(setup["bwrap"]))
    binds = {path: path for path in ("/usr", "/dev", "/proc", *setup["read_only"]) if os.path.exists(path)}
    binds[package] = f"{BWRAP}/{os.path.basename(package)}"
    if os.path.isdir(f"{package}.libs"):
        binds[f"{package}.libs"] = f"{BWRAP}/{os.path.basename(package)}.libs"
    for index, path in enumerate(setup["prefixes"]):
        binds[path] = f"{PREFIXES}/{index}"
    try:
        # Opened first: a path may lie below /tmp.
        descriptors = [os.open(path, os.O_PATH) for path in binds]
        mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0755")
        os.chdir("/tmp")
        for path in (LAYER, "/tmp"):
            os.mkdir(path[1:], 0o755)
        for path, target in setup["links"].items():
            if path.count("/") == 1:
                os.symlink(target, path[1:])
        for descriptor, target in zip(descriptors, binds.values(), strict=True):
            if os.path.isdir(f"/proc/self/fd/{descriptor}"):
                os.makedirs(target[1:], exist_ok=True)
            else:
                write_file(target[1:], b"")
            mount(f"/proc/self/fd/{descriptor}", target[1:], None, MS_BIND | MS_REC, None)
            os.close(descriptor)
        if LIBC.syscall(PIVOT_ROOT.get(os.uname().machine, -1), b".", b".") or LIBC.umount2(b".", MNT_DETACH):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        os.chdir("/")
    except OSError as error:
        raise StageError("small root", error) from error
    setup["in_small_root"] = True


def enter(first_id: int | None, ask: int, answer: int, setup: dict[str, Any], size: str) -> None:
    """All namespaces but those that bwrap makes, in the small root, the sandbox's tmpfs at LAYER."""
    become_root(first_id, ask, answer)
    private_mounts()
    if "in_small_root" not in setup:
        enter_small_root(setup)
    try:
        mount("tmpfs", LAYER, "tmpfs", MS_NOSUID | MS_NODEV, size)
    except OSError as error:
        raise StageError("tmpfs", error) from error


def fork_mapped(first_id: int | None) -> tuple[int, int, int]:
    """Fork; returns (pid, ask, answer): 0 in the child, whose two ends lead to the parent, which must `write_maps`."""
    ask_read, ask_write = os.pipe()
    answer_read, answer_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ask_read)
        os.close(answer_write)
        return 0, ask_write, answer_read
    os.close(ask_write)
    os.close(answer_read)
    if first_id is not None and os.read(ask_read, 1):
        try:
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{pid}/{name}", "w") as file:
                    file.write(f"0 {first_id} {ID_RANGE}")
            os.write(answer_write, b"m")
        except OSError:
            pass
    os.close(ask_read)
    os.close(answer_write)
    return pid, -1, -1


def probe(first_id: int | None, setup: dict[str, Any]) -> dict[str, Any]:
    """Whether sandboxes can be made here: the stage that fails with its errno, and whether overlayfs works."""
    read, write = os.pipe()
    pid, ask, answer = fork_mapped(first_id)
    if pid == 0:
        result: dict[str, Any] = {"stage": "", "errno": 0, "overlay": False}
        try:
            enter(first_id, ask, answer, setup, "size=1m")
            for name in ("upper", "work", "merged"):
                os.mkdir(f"{LAYER}/{name}")
            try:
                options = f"lowerdir=/usr,upperdir={LAYER}/upper,workdir={LAYER}/work,userxattr"
                mount("overlay", f"{LAYER}/merged", "overlay", 0, options)
                result["overlay"] = True
            except OSError:
                pass
        except StageError as error:
            result.update(stage=error.stage, errno=error.errno)
        except OSError as error:
            result.update(stage="set-up", errno=error.errno or 0)
        os.write(write, marshal.dumps(result))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    return marshal.loads(data) if data else {"stage": "set-up", "errno": 0, "overlay": False}


def write_file(path: str, data: bytes, mode: int = 0o644) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)


def build_tree(root: str, files: dict[str, bytes], links: dict[str, str]) -> None:
    """What a sandbox's root holds before anything is bound into it."""
    for path, mode in (
        ("dev", 0o755),
        ("etc", 0o755),
        ("home", 0o755),
        ("media", 0o755),
        ("mnt", 0o755),
        ("opt", 0o755),
        ("proc", 0o555),
        ("root", 0o755),
        ("run", 0o755),
        ("srv", 0o755),
        ("tmp", 0o1777),
        ("usr", 0o755),
        ("var", 0o755),
        ("var/cache", 0o755),
        ("var/lib", 0o755),
        ("var/log", 0o755),
        ("var/tmp", 0o1777),
    ):
        os.mkdir(f"{root}/{path}")
        os.chmod(f"{root}/{path}", mode)
    for path, data in files.items():
        write_file(root + path, data)
    for path, target in links.items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)


def keep_sandbox(request: dict[str, Any], setup: dict[str, Any], launcher: int) -> None:
    """In the forked child: make a sandbox and stay until the last of its processes is gone. PID 1 never returns."""
    size = f"size={request['storage_bytes']},nr_inodes={request['inodes']},mode=0755"
    enter(request["first_id"], ASK, ANSWER, setup, size)
    os.closerange(ASK, ANSWER + 1)
    os.umask(0o022)
    root = f"{LAYER}/root"
    os.mkdir(root, 0o755)
    build_tree(root, {**setup["files"], **request["files"]}, setup["links"])
    bwrap = os.path.join(BWRAP, *setup["bwrap"].split("/")[-3:])
    arguments = bwrap_arguments(request, setup, root)

    for limit, value in request["limits"].items():
        kind = getattr(resource, limit)
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))
    # What the trainer keeps in its session keyring would come along otherwise.
    if os.uname().machine in KEYCTL:
        LIBC.syscall(KEYCTL[os.uname().machine], KEYCTL_JOIN_SESSION_KEYRING, None)
    for number in (_signal.SIGCHLD, _signal.SIGPIPE, _signal.SIGINT):
        _signal.signal(number, _signal.SIG_DFL)
    # After the last change of ids, which would undo it.
    LIBC.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        return
    try:
        os.unshare(os.CLONE_NEWPID)
        pid = os.fork()
    except OSError as error:
        raise StageError("process namespace", error) from error
    if pid == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
        os.setsid()
        enter_sandbox(bwrap, arguments, request["network"])
        exec(setup["supervisor"], {"__name__": "supervisor", "__builtins__": __builtins__})
        os._exit(1)
    # The other one stays open: its end says that everything in the sandbox is gone.
    os.close(CONTROL)
    os.waitpid(pid, 0)


def bwrap_arguments(request: dict[str, Any], setup: dict[str, Any], root: str) -> list[str]:
    arguments = [
        "bwrap",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
        *(() if request["network"] else ("--unshare-net",)),
        "--hostname",
        "sandbox",
        "--clearenv",
        "--bind",
        root,
        "/",
    ]
    if setup["overlay"]:
        upper = f"{LAYER}/usr"
        for name in OWN_DIRECTORIES:
            below = f"/usr/{name}"
            if name.startswith("local") or (os.path.isdir(below) and not os.path.islink(below)):
                os.makedirs(f"{upper}/{name}", exist_ok=True)
        for path, target in setup["usr_links"].items():
            os.symlink(target, f"{LAYER}{path}")
        os.mkdir(f"{LAYER}/work")
        arguments += ["--overlay-src", "/usr", "--overlay", upper, f"{LAYER}/work", "/usr"]
    else:
        arguments += ["--ro-bind", "/usr", "/usr"]
    for path in setup["read_only"]:
        arguments += ["--ro-bind-try", path, path]
    for index, path in enumerate(setup["prefixes"]):
        arguments += ["--ro-bind", f"{PREFIXES}/{index}", path]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    arguments += ["--perms", "1777", "--size", str(request["shm_bytes"]), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    # What runs in there holds the namespaces until they are joined, and has said by its output that they are complete.
    return [*arguments, "--cap-drop", "ALL", "--chdir", "/", "--", "/usr/bin/cat"]


def enter_sandbox(bwrap: str, arguments: list[str], network: bool) -> None:
    """In PID 1 of the new process namespace: have the namespaces and mounts made, join them, give up all privilege."""
    try:
        # bwrap binds the /proc that it finds where it makes no process namespace of its own.
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    except OSError as error:
        raise StageError("proc", error) from error
    their_input, our_output = os.pipe()
    our_input, their_output = os.pipe()
    os.write(our_output, b"+")
    if os.fork() == 0:
        try:
            os.dup2(their_input, 0)
            os.dup2(their_output, 1)
            os.closerange(3, 1024)
            os.execve(bwrap, arguments, {})
        except OSError as error:
            os.write(ERRORS, f"{bwrap}: {error.strerror}".encode())
        os._exit(1)
    os.close(their_input)
    os.close(their_output)
    if os.read(our_input, 1) != b"+":
        # bwrap has said why.
        os._exit(1)
    try:
        # Only bwrap and its child have been started in here: they are 2 and 3.
        child = os.pidfd_open(3)
        flags = os.CLONE_NEWNS | os.CLONE_NEWIPC | os.CLONE_NEWUTS | (0 if network else os.CLONE_NEWNET)
        try:
            os.setns(child, flags | os.CLONE_NEWCGROUP)
        except OSError:
            os.setns(child, flags)
        os.kill(-1, _signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        os.closerange(CONTROL + 1, 1024)
    except OSError as error:
        raise StageError("join", error) from error
    give_up_privileges()


def give_up_privileges() -> None:
    """Keep CAPABILITIES, for good; without ids of its own, nothing that is started can have more."""
    bits = sum(1 << number for number in CAPABILITIES)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    # Effective, permitted and inheritable, of the first and the second 32.
    sets = (ctypes.c_uint32 * 6)(bits, bits, bits, 0, 0, 0)
    dropped = all(
        LIBC.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0 or ctypes.get_errno() == errno.EINVAL
        for number in range(64)
        if number not in CAPABILITIES
    )
    if not dropped or LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or LIBC.capset(header, sets):
        code = ctypes.get_errno()
        raise StageError("capabilities", OSError(code, os.strerror(code)))


def serve(channel: _socket.socket, trainer: int, setup: dict[str, Any]) -> None:
    next_range = int.from_bytes(os.urandom(2), "little") % RANGES
    many_users = False
    # Root of a container may lack what this needs; then it is as good as an ordinary user.
    if os.getuid() == 0:
        try:
            private_mounts(MS_SLAVE)
        except StageError:
            pass
        else:
            # Once for all sandboxes.
            enter_small_root(setup)
            many_users = not probe(FIRST_ID + next_range * ID_RANGE, setup)["stage"]
    result = probe(FIRST_ID + next_range * ID_RANGE if many_users else None, setup)
    setup["overlay"] = result["overlay"]
    channel.send(marshal.dumps({**result, "many_users": many_users}))
    # The dead are collected by the kernel.
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)

    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(trainer, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if trainer in ready or ready.get(channel.fileno(), 0) & ~select.POLLIN:
            return
        data, descriptors = receive(channel)
        if not data:
            return
        try:
            next_range = (next_range + 1) % RANGES
            first_id = FIRST_ID + next_range * ID_RANGE if many_users else None
            start_sandbox(setup, first_id, *descriptors)
        except Exception as error:
            # One sandbox that cannot be started must not take the others along.
            if len(descriptors) > 1:
                os.write(descriptors[1], f"error {getattr(error, 'errno', 0) or 0} launcher: {error!r}".encode())
        for descriptor in descriptors:
            os.close(descriptor)


def start_sandbox(setup: dict[str, Any], first_id: int | None, request_file: int, control: int, errors: int) -> None:
    with open(request_file, "rb", closefd=False) as content:
        request = {**marshal.load(content), "first_id": first_id}
    launcher = os.getpid()
    pid, ask, answer = fork_mapped(first_id)
    if pid == 0:
        try:
            null = os.open("/dev/null", os.O_RDWR)
            # Out of the way first: a source may have a number that is a target.
            sources = (null, null, errors, control, ask, answer)
            high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 16) for descriptor in sources]
            for number, descriptor in enumerate(high):
                os.dup2(descriptor, number)
            os.closerange(len(high), 1024)
            os.setsid()
            # The kernel's own out-of-memory killer should take a sandbox before it takes the trainer.
            try:
                with open("/proc/self/oom_score_adj", "w") as file:
                    file.write("900")
            except OSError:
                pass
            os.write(CONTROL, b"pid %d" % os.getpid())
            keep_sandbox(request, setup, launcher)
        except StageError as error:
            os.write(CONTROL, f"error {error.errno} {error.stage}".encode())
        except BaseException as error:
            os.write(CONTROL, f"error {getattr(error, 'errno', 0) or 0} set-up: {error!r}".encode())
        finally:
            os._exit(1)


def receive(channel: _socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, _, _ = channel.recvmsg(4096, _socket.CMSG_SPACE(4 * 8))
    descriptors: list[int] = []
    for level, kind, content in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            descriptors += memoryview(content[: len(content) // 4 * 4]).cast("i").tolist()
    return data, descriptors


def main() -> None:
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    # Nothing may be imported any more: in PID 1, the files that it would come from are the sandbox's.
    sys.meta_path.clear()
    channel = _socket.socket(fileno=int(sys.argv[2]))
    with open(receive(channel)[1][0], "rb") as file:
        setup = marshal.load(file)
    try:
        trainer = os.pidfd_open(setup["trainer"])
    except ProcessLookupError:
        return
    if os.getppid() != setup["trainer"]:
        return
    try:
        serve(channel, trainer, setup)
    except StageError as error:
        channel.send(marshal.dumps({"stage": error.stage, "errno": error.errno}))


main()
