"""Programs in the sandbox: what they may do, and that hostile ones harm nobody."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from hearth.errors import ConfigError
from training.sandbox import Limits, SandboxError, find_isolation, run_code
from training.sandbox.system_calls import build_filter

SOURCES = Path(__file__).resolve().parents[4] / "src"
SMALL = Limits(cpu_s=20, wall_s=60.0, memory_mb=128, processes=8, disk_mb=4, output_kb=64)


def find_reason(isolation):
    try:
        run_code("", isolation=isolation)
    except ConfigError as error:
        return str(error)
    return None


REASONS = {name: find_reason(name) for name in ("bubblewrap", "namespaces", "rlimits")}


@pytest.fixture(params=["bubblewrap", "namespaces"])
def isolation(request):
    if REASONS[request.param]:
        pytest.skip(REASONS[request.param])
    return request.param


@pytest.fixture(params=["bubblewrap", "namespaces", "rlimits"])
def any_isolation(request):
    if REASONS[request.param]:
        pytest.skip(REASONS[request.param])
    return request.param


def run(program, isolation, stdin="", limits=SMALL):
    return run_code(textwrap.dedent(program), stdin, limits=limits, isolation=isolation)


def test_a_program_runs_as_python_runs_a_file(any_isolation):
    result = run(
        """
        from __future__ import annotations
        import sys, pickle, threading, subprocess, multiprocessing, tempfile, os
        class Point:
            pass
        print(__name__, sys.argv, pickle.loads(pickle.dumps(Point())).__class__.__name__)
        thread = threading.Thread(target=lambda: print("thread"))
        thread.start(); thread.join()
        print(subprocess.run(["cat"], capture_output=True, text=True).stdout.split())
        open("mine.py", "w").write("value = 7")
        import mine
        print(mine.value, tempfile.gettempdir() in (os.getcwd(), "/tmp"))
        with multiprocessing.Pool(2) as pool:
            print(pool.map(abs, [-1, 2]))
        print("err", file=sys.stderr)
        exit(3)
        """,
        any_isolation,
        "first\nsecond\n",
        Limits(),
    )

    lines = result.stdout.splitlines()
    assert lines == [
        "__main__ ['program.py'] Point",
        "thread",
        "['first', 'second']",
        "7 True",
        "[1, 2]",
    ]
    assert result.stderr == "err\n"
    assert (result.ended, result.exit_code, result.is_success) == ("exited", 3, False)
    assert result.isolation == any_isolation


def test_standard_input_begins_behind_the_program(any_isolation):
    many = "".join(f"{number}\n" for number in range(200_000))

    whole = run("import sys; print(sum(map(int, sys.stdin)))", any_isolation, many)
    lines = run("print(int(input()) + int(input())); print(input())", any_isolation, "2\n3\n")
    unread = run("print('done')", any_isolation, many)

    assert whole.stdout == f"{sum(range(200_000))}\n"
    assert lines.stdout == "5\n"
    assert "EOFError" in lines.stderr
    assert unread.is_success


def test_an_error_shows_the_programs_lines_alone(any_isolation):
    result = run("def f():\n    return 1 / 0\nf()\n", any_isolation)

    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "Traceback (most recent call last):",
        '  File "program.py", line 3, in <module>',
        "    f()",
        '  File "program.py", line 2, in f',
        "    return 1 / 0",
        *(line for line in result.stderr.splitlines() if "~" in line),
        "ZeroDivisionError: division by zero",
    ]
    broken = run("def f(:\n", any_isolation)
    assert "SyntaxError" in broken.stderr
    assert broken.exit_code == 1


def test_texts_of_any_language_and_odd_bytes_come_back(any_isolation):
    result = run("print('größer'); import os; os.write(1, b'\\xff\\x00')", any_isolation)

    assert result.stdout in ("größer\n\ufffd\x00", "\ufffd\x00größer\n")


def test_sets_of_texts_have_the_same_order_each_time(any_isolation):
    program = "print({'a', 'b', 'c', 'd', 'e'})"

    assert run(program, any_isolation).stdout == run(program, any_isolation).stdout


ENDED = {
    "a loop": ("while True: pass", "timeout"),
    "a sleep": ("import time; time.sleep(60)", "timeout"),
    "who ignores the signal": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "timeout",
    ),
    "endless output": ("while True: print('x' * 1000)", "output"),
    "endless errors": ("import os\nwhile True: os.write(2, b'x' * 1000)", "output"),
}


@pytest.mark.parametrize(("program", "ended"), ENDED.values(), ids=ENDED.keys())
def test_a_program_without_end_is_ended(program, ended, any_isolation):
    limits = Limits(cpu_s=1, wall_s=1.2, output_kb=64)

    began = time.monotonic()
    result = run(program, any_isolation, limits=limits)

    assert time.monotonic() - began < 8.0
    # The kernel kills who ignores the signal, a second later or at the other limit.
    assert (result.ended, result.exit_code) == (ended, None)
    assert len(result.stdout) + len(result.stderr) <= 2 * (64 << 10)


def test_who_closes_its_output_is_waited_for_and_ended(any_isolation):
    limits = Limits(cpu_s=1, wall_s=0.5)
    closing = "import os\nfor fd in range(256):\n    try: os.close(fd)\n    except OSError: pass\n"

    result = run(closing + "os._exit(7)", any_isolation, limits=limits)
    lasting = run(closing + "while True: pass", any_isolation, limits=limits)

    assert (result.ended, result.exit_code, result.stdout) == ("exited", 7, "")
    assert lasting.ended == "timeout"


def test_memory_is_limited_for_each_process_and_for_all(any_isolation):
    one = run("x = bytearray(1 << 30)", any_isolation)
    many = run(
        """
        import os, time
        for _ in range(3):
            if os.fork() == 0:
                break
        x = bytearray(80 << 20)
        x[::4096] = b"x" * len(x[::4096])
        time.sleep(3)
        """,
        any_isolation,
    )

    assert "MemoryError" in one.stderr
    assert (many.ended, many.exit_code) == ("memory", None)


HIDDEN_MEMORY = {
    "anonymous files": "import os\nfor _ in range(200): os.memfd_create('x')",
    "System V": "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
    "if c.shmget(0, 1 << 20, 0o1600) < 0: raise OSError(ctypes.get_errno(), 'shmget')",
    "file systems of its own": "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
    "if c.unshare(0x10020000) < 0: raise OSError(ctypes.get_errno(), 'unshare')",
    "a clone with a user namespace": "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
    "if c.syscall(56, 0x10000011, 0, 0, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'clone')",
}


@pytest.mark.parametrize("program", HIDDEN_MEMORY.values(), ids=HIDDEN_MEMORY.keys())
def test_memory_that_no_process_has_is_refused(program, isolation):
    result = run(program, isolation)

    assert "Operation not permitted" in result.stderr or "PermissionError" in result.stderr, result


def test_a_fork_bomb_stays_small_and_ends(isolation):
    before = count_processes()
    result = run(
        """
        import os, time
        while True:
            try:
                os.fork()
            except OSError as error:
                print(type(error).__name__, flush=True)
                time.sleep(0.2)
        """,
        isolation,
        limits=Limits(cpu_s=1, wall_s=1.5, processes=8),
    )

    assert result.ended in ("timeout", "output", "memory")
    assert "BlockingIOError" in result.stdout
    assert wait_until(lambda: count_processes() <= before + 2)


def count_processes():
    return sum(path.name.isdigit() for path in Path("/proc").iterdir())


def wait_until(claim, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not claim() and time.monotonic() < deadline:
        time.sleep(0.02)
    return claim()


def test_files_stay_in_memory_and_small(isolation):
    result = run(
        """
        import os
        def fill(folder):
            total = 0
            try:
                for number in range(1000):
                    with open(f"{folder}/fill{number}", "wb") as file:
                        for _ in range(100):
                            file.write(bytes(1 << 16)); file.flush(); total += 1 << 16
            except OSError as error:
                pass
            return total
        seen = {}
        for folder, inner, _ in os.walk("/"):
            if folder.count("/") == 3 or folder == "/usr":
                inner.clear()
            if size := fill(folder):
                seen[folder] = size
        print(seen)
        """,
        isolation,
    )

    written = eval(result.stdout)
    assert set(written) == {"/tmp", "/dev/shm"}
    assert all(size <= 4 << 20 for size in written.values())
    assert not list(Path("/tmp").glob("fill*"))


def test_our_files_and_variables_are_not_there(isolation, tmp_path, monkeypatch):
    monkeypatch.setenv("HEARTH_API_KEY", "secret-key")
    (tmp_path / "key").write_text("secret-key")

    result = run(
        f"""
        import os
        print(sorted(os.environ))
        for path in ({str(tmp_path / "key")!r}, {__file__!r}, "/etc/passwd", "/etc/shadow",
                     "/root/.ssh", "/home", "/proc/1/environ", "/proc/self/environ", "/sys",
                     "/var", "/run"):
            if os.path.exists(path):
                print(path)
        print([name for name in os.listdir("/")])
        try:
            print(os.listdir("/root"))
        except OSError:
            print([])
        """,
        isolation,
    )

    lines = result.stdout.splitlines()
    assert "secret" not in result.stdout
    assert (
        lines[0] == str(["HOME", "LANG", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED"])
        or "LC_CTYPE" in lines[0]
        or "PWD" in lines[0]
    )
    assert len(lines) == 3, lines
    prefix = Path(os.path.realpath(sys.base_prefix))
    roots = {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "tmp", "usr"}
    assert set(eval(lines[1])) <= roots | {prefix.parts[1]}
    assert set(eval(lines[2])) <= set(prefix.parts)


def test_nothing_can_be_written_outside(isolation):
    outside = [*map(str, (Path.cwd(), Path.home(), sys.base_prefix)), "/usr", "/etc", "/", "/dev"]

    result = run(
        f"""
        import os
        for folder in {outside!r}:
            try:
                os.makedirs(folder, exist_ok=True)
                open(folder + "/planted", "w").close()
                print("wrote", folder)
            except OSError:
                pass
        """,
        isolation,
    )

    # Folders below /tmp can be made there, where they are the program's own.
    wrote = [line for line in result.stdout.splitlines() if not line.startswith("wrote /tmp")]
    assert (wrote, result.exit_code) == ([], 0)
    assert not any(Path(folder, "planted").exists() for folder in outside)


def test_no_network_is_reached(isolation):
    with socketserver() as port:
        result = run(
            f"""
            import socket
            print([name for _, name in socket.if_nameindex() if name != "lo"])
            for address in (("127.0.0.1", {port}), ("1.1.1.1", 53)):
                try:
                    socket.create_connection(address, 0.5)
                    print("connected", address)
                except OSError as error:
                    pass
            with socket.socket(socket.AF_UNIX) as client:
                try:
                    client.connect("\\0sandbox-test")
                    print("connected by name")
                except OSError:
                    pass
            """,
            isolation,
        )

    assert (result.stdout, result.exit_code) == ("[]\n", 0), result


class socketserver:  # noqa: N801
    """Servers on loopback and on an abstract name that answer nobody."""

    def __enter__(self):
        import socket

        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind("\0sandbox-test")
        self.unix.listen()
        return self.tcp.getsockname()[1]

    def __exit__(self, *_):
        self.tcp.close()
        self.unix.close()


def test_signals_reach_nobody_outside(isolation):
    with subprocess.Popen(["sleep", "60"]) as neighbour:
        result = run(
            f"""
            import os, signal
            for pid in (os.getppid(), {os.getpid()}, {neighbour.pid}, 1):
                for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
                    try:
                        if pid != os.getpid():
                            os.kill(pid, number)
                    except OSError:
                        pass
            print("alive", flush=True)
            os.kill(-1, signal.SIGKILL)
            """,
            isolation,
        )
        assert neighbour.poll() is None
        neighbour.kill()

    assert result.ended == "exited"
    assert result.stdout in ("alive\n", "")


def test_what_a_program_starts_ends_with_it(isolation):
    name = f"lasting-{os.getpid()}-{isolation}"
    result = run(
        f"""
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for fd in range(3):
                    os.close(fd)
                os.execv("/bin/sleep", [{name!r}, "60"])
            os._exit(0)
        time.sleep(0.3)
        print("done")
        """,
        isolation,
    )

    assert result.stdout == "done\n"
    assert wait_until(lambda: not find_processes(name))


def find_processes(name):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if name.encode() in (process / "cmdline").read_bytes():
                found.append(process)
        except OSError:
            continue
    return found


def test_a_program_has_no_rights_and_no_name_of_ours(isolation):
    result = run(
        """
        import ctypes, os
        c = ctypes.CDLL(None, use_errno=True)
        print(c.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None), c.sethostname(b"x", 1))
        print(c.prctl(39, 0, 0, 0, 0))
        try:
            os.setuid(0 if os.getuid() else 1)
            print("became another")
        except OSError:
            pass
        print(os.getuid())
        """,
        isolation,
    )

    lines = result.stdout.splitlines()
    assert lines[:2] == ["-1 -1", "1"], result
    assert len(lines) == 3
    if os.getuid() == 0:
        assert int(lines[2]) >= 65534


def test_many_threads_run_programs_at_once(isolation):
    results = {}

    def work(number):
        results[number] = run(f"print({number} ** 2)", isolation).stdout

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == {number: f"{number**2}\n" for number in range(12)}
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if is_memfd(fd)]


def is_memfd(descriptor):
    try:
        return "memfd:stdin" in str(descriptor.readlink())
    except OSError:
        return False


def test_bubblewrap_is_taken_where_it_works():
    works = [name for name in ("bubblewrap", "namespaces") if not REASONS[name]]
    if not works:
        pytest.skip(REASONS["namespaces"])

    assert find_isolation() == works[0]
    assert run_code("").isolation == works[0]


PROBES = """
import json, os, sys
from training.sandbox import Limits, SandboxError, find_isolation, run_code

def run(program, isolation):
    limits = Limits(cpu_s=20, wall_s=60.0, processes=6)
    try:
        result = run_code(program, limits=limits, isolation=isolation)
        return [result.ended, result.stdout]
    except SandboxError as error:
        return ["refused", str(error)]

seen = {}
for isolation in (None, "bubblewrap", "namespaces", "rlimits"):
    seen[str(isolation)] = [run(program, isolation) for program in json.loads(sys.argv[1])]
print(json.dumps(seen))
"""
HOSTILE = [
    "import os, time\ntry:\n    for _ in range(50):\n        if os.fork() == 0: time.sleep(1)\n"
    "except BlockingIOError: print('bounded')",
    "import socket; print([name for _, name in socket.if_nameindex() if name != 'lo'])",
    "import os; print(os.path.exists('/etc/passwd'), os.listdir('.'))",
    "import ctypes; print(ctypes.CDLL(None).unshare(0x10020000))",
]
OTHER = "/usr/bin/python3"
"""An interpreter that other users may run."""


def run_as_other(*wrapper, programs=HOSTILE):
    command = [*wrapper, OTHER, "-c", PROBES, json.dumps(programs)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(SOURCES)},
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def can_be_other():
    if os.getuid() != 0 or not shutil.which("setpriv") or not Path(OTHER).exists():
        return False
    asked = (
        "import sys; sys.path += sys.argv[1:]; assert sys.version_info > (3, 10, 99); import hearth"
    )
    done = subprocess.run(
        ["setpriv", "--reuid=4321", "--regid=4321", "--clear-groups", OTHER, "-c", asked, SOURCES],
        capture_output=True,
        cwd="/",
    )
    return done.returncode == 0


as_root = pytest.mark.skipif(
    not can_be_other(), reason="needs root, setpriv and the system's Python"
)
OTHER_USER = ("setpriv", "--reuid=4321", "--regid=4321", "--clear-groups")


@as_root
def test_a_user_without_rights_has_the_same_sandbox():
    seen = run_as_other(*OTHER_USER)

    for isolation in ("bubblewrap", "namespaces"):
        if seen[isolation][0][0] == "refused":
            continue
        outputs = [stdout.strip() for _, stdout in seen[isolation]]
        assert outputs[0] == "bounded"
        assert outputs[1:3] == ["[]", "False ['program.py']"]
        assert outputs[3] == "-1"
    assert seen["namespaces"][0][0] != "refused", seen["namespaces"]
    assert seen["None"] in (seen["bubblewrap"], seen["namespaces"])
    assert seen["rlimits"][0] == ["exited", "bounded\n"]


@as_root
def test_where_nothing_isolates_the_network_a_program_is_refused_unless_it_is_told():
    closed = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    seen = run_as_other(
        *OTHER_USER, "unshare", "--user", "--map-root-user", "sh", "-c", closed, "sh"
    )

    for isolation in ("None", "bubblewrap", "namespaces"):
        assert seen[isolation][0][0] == "refused", seen
    assert "a sandbox must keep programs off files and network, got" in seen["None"][0][1]
    assert "isolation='rlimits'" in seen["None"][0][1]
    assert seen["rlimits"][2][0] == "exited"


@as_root
def test_with_limits_alone_a_program_of_root_is_another_user_and_leaves_nothing():
    name = f"left-{os.getpid()}"
    leaving = (
        "import os\nprint(os.getuid() >= 65534, flush=True)\n"
        f"if os.fork() == 0:\n    os.setsid()\n    os.execv('/bin/sleep', ['{name}', '60'])"
    )
    signals = f"import os\ntry: os.kill({os.getpid()}, 9)\nexcept PermissionError: print('no')"

    seen = run_as_other(programs=[leaving, signals, HOSTILE[0]])["rlimits"]

    assert seen == [["exited", "True\n"], ["exited", "no\n"], ["exited", "bounded\n"]]
    assert wait_until(lambda: not find_processes(name))


REFUSED = {
    "no time": ({"cpu_s": 0}, "limits.cpu_s must be a whole number above 0, got 0"),
    "part of a second": ({"cpu_s": 0.5}, "limits.cpu_s must be a whole number above 0, got 0.5"),
    "no memory": ({"memory_mb": -1}, "limits.memory_mb must be a whole number above 0, got -1"),
    "no number": ({"wall_s": "1"}, "limits.wall_s must be a number above 0, got '1'"),
}


@pytest.mark.parametrize(("limits", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_limits_that_cannot_be_are_refused(limits, message):
    with pytest.raises(ConfigError) as caught:
        Limits(**limits)

    assert str(caught.value) == message


def test_a_sandbox_that_does_not_start_says_nothing_of_the_program(isolation):
    with pytest.raises(SandboxError, match="the sandbox must start, got exit code 137"):
        run("print(1)", isolation, limits=Limits(wall_s=1e-3))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_whole_instructions_whose_jumps_stay_inside(machine):
    rules = build_filter(machine)

    assert len(rules) % 8 == 0
    count = len(rules) // 8
    for place in range(count):
        code, if_true, if_false = rules[place * 8], rules[place * 8 + 2], rules[place * 8 + 3]
        if code & 7 == 5:
            assert place + 1 + max(if_true, if_false) < count
