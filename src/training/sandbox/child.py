"""Becomes the program in the sandbox. It is a program of its own, and imports nothing of ours.

``python -s -S -c TEXT ISOLATION NUMBERS [FOLDER ...]`` with the program and then its standard input
at descriptor 0: what is read of it there is the program's. It takes every right away from itself,
writes one byte to say so, and runs the program in its own interpreter, which saves the start of
another. It writes no other byte: a start that failed is known by that.
"""

import os
import resource
import sys

WORK = "/tmp"  # noqa: S108 - of the sandbox, where it is empty


def main() -> None:
    """Enter the sandbox and run the program."""
    os.umask(0o022)
    isolation, numbers, *folders = sys.argv[1:]
    uid, size, report, calls, cpu_s, memory, processes, disk = map(int, numbers.split(","))
    text = read_program(size)
    if isolation == "namespaces":
        enter_namespaces(uid, disk, folders)
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NPROC, processes),
    ):
        resource.setrlimit(what, (limit, limit))
    # The first ends the program by a signal of its own, the second whoever ignores that.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    if isolation != "rlimits":
        os.chdir(WORK)
    if uid:
        become(uid)
    if isolation != "bubblewrap":
        give_up_rights(calls)
    os.write(report, b".")
    os.close(report)
    run(text)


def read_program(size: int) -> str:
    """The program's text: the first ``size`` bytes of descriptor 0."""
    parts = []
    while size:
        parts.append(os.read(0, size))
        size -= len(parts[-1])
    return b"".join(parts).decode()


def become(uid: int) -> None:
    """Be another user, in no group but its own."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def run(text: str) -> None:
    """Run the program as ``python program.py`` does."""
    import builtins
    import site

    site.setquit()
    name = "program.py"  # a traceback shows its lines
    with open(name, "w", encoding="utf-8") as file:
        file.write(text)
    sys.argv[:] = [name]
    sys.path[0] = os.getcwd()
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    main = type(sys)("__main__")
    main.__dict__.update(__builtins__=builtins, __file__=name)
    sys.modules["__main__"] = main
    try:
        exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)  # noqa: S102
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - it is printed, as the interpreter does
        trace = error.__traceback__  # without this function's own line
        shown = error.with_traceback(trace and trace.tb_next)
        sys.excepthook(type(shown), shown, shown.__traceback__)
        sys.exit(1)


NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Of mounts, names, shared memory, processes and the network."""
NEW_USER = 0x10000000
NO_SETUID, NO_DEVICES, READ_ONLY = 2, 4, 1
BIND, RECURSIVE, PRIVATE, DETACH = 0x1000, 0x4000, 0x40000, 2
DIE_WITH_PARENT, NO_NEW_RIGHTS, FILTER_CALLS = 1, 38, 22
SET_MOUNT = 442  # the number of mount_setattr on every kind of processor
HERE, ALL_BELOW = -100, 0x8000


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library.

    Raises:
        OSError: it failed; the message says which.
    """
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def enter_namespaces(uid: int, disk: int, folders: list[str]) -> None:
    """Go on as a process that sees no other and no network, and ``folders`` alone, to read them.

    Two processes stay outside: one that waits, and the first of the namespace, with which all end.
    """
    user, group = os.getuid(), os.getgid()
    call("unshare", NEW_NAMESPACES | (0 if uid else NEW_USER))
    if not uid:
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    call("prctl", DIE_WITH_PARENT, 9, 0, 0, 0)
    wait_for_child()
    call("prctl", DIE_WITH_PARENT, 9, 0, 0, 0)
    build_root(disk, folders)
    wait_for_child()


def wait_for_child() -> None:
    """Fork; the child returns, and the parent ends as the child does."""
    import signal

    child = os.fork()
    if not child:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def build_root(disk: int, folders: list[str]) -> None:
    """Make a file system of ``folders``, a few devices, and two empty folders to write into."""
    plain = NO_SETUID | NO_DEVICES
    call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)
    call("mount", b"tmpfs", WORK.encode(), b"tmpfs", NO_SETUID, b"size=1m,mode=755")
    os.chdir(WORK)
    os.mkdir("old")
    call("pivot_root", b".", b"old")
    os.chdir("/")
    for folder in folders:
        show(folder, plain | READ_ONLY)
    for device in ("null", "zero", "full", "random", "urandom"):
        show(f"/dev/{device}", NO_SETUID)
    for folder in (WORK, "/dev/shm"):  # noqa: S108
        os.makedirs(folder)
        options = f"size={disk},nr_inodes=4096,mode=1777".encode()
        call("mount", b"tmpfs", folder.encode(), b"tmpfs", plain, options)
    call("umount2", b"/old", DETACH)
    os.rmdir("/old")
    set_mount("/", READ_ONLY | NO_SETUID, 0)


def show(path: str, attributes: int) -> None:
    """Have a file, a folder or a link of the old file system at the same place of the new one."""
    old = f"/old{path}"
    if os.path.islink(old):
        os.symlink(os.readlink(old), path)
        return
    if os.path.isdir(old):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "w").close()
    call("mount", old.encode(), path.encode(), None, BIND | RECURSIVE, None)
    set_mount(path, attributes, ALL_BELOW)


def set_mount(path: str, attributes: int, extent: int) -> None:
    """Add attributes to what is mounted at a path, and to all below it."""
    import struct

    record = struct.pack("QQQQ", attributes, 0, 0, 0)
    call("syscall", SET_MOUNT, HERE, path.encode(), extent, record, len(record))


def give_up_rights(calls: int) -> None:
    """Keep no capability, get none by a file, and have system calls filtered from now on."""
    import ctypes
    import struct

    call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    call("prctl", NO_NEW_RIGHTS, 1, 0, 0, 0)
    rules = os.read(calls, 65536)
    os.close(calls)
    buffer = ctypes.create_string_buffer(rules, len(rules))
    record = struct.pack("HP", len(rules) // 8, ctypes.addressof(buffer))
    call("prctl", FILTER_CALLS, 2, record, 0, 0)


main()
