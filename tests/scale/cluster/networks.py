"""Machines that are none: network namespaces on a bridge of this machine, each with an address."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

_GONE_S = 20.0


_ANSWER = """
import socket, sys
server = socket.create_server((sys.argv[1], 9))
print("listening", flush=True)
server.accept()
"""
_ASK = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=5)"


def can_be_made() -> bool:
    """Whether this process may make a network, and the machines of it reach each other."""
    if not shutil.which("ip"):
        return False
    try:
        network = Network()
    except subprocess.CalledProcessError:
        return False
    try:
        server, client = network.add(), network.add()
        answering = server.argv([sys.executable, "-c", _ANSWER, server.address])
        with subprocess.Popen(answering, stdout=subprocess.PIPE) as answers:
            assert answers.stdout is not None
            answers.stdout.readline()
            asking = client.argv([sys.executable, "-c", _ASK, server.address])
            is_answered = subprocess.run(asking, check=False, capture_output=True).returncode == 0
            answers.kill()
        return is_answered
    except subprocess.CalledProcessError:
        return False
    finally:
        network.close()


@dataclass(frozen=True)
class Machine:
    """A namespace; its processes reach others, and are reached, at ``address`` alone."""

    namespace: str
    address: str

    def argv(self, argv: Sequence[str]) -> list[str]:
        """What runs a program there."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    def pids(self) -> list[int]:
        """What runs there."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def lose_power(self) -> None:
        """Kill all that runs there, and return once it is gone."""
        until = time.monotonic() + _GONE_S
        while pids := self.pids():
            assert time.monotonic() < until, f"{self.namespace} still runs {pids}"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


class Network:
    """A bridge with an address of this machine's own; ``close`` when done.

    Raises:
        CalledProcessError: this process may not make one.
    """

    def __init__(self) -> None:
        self._number = os.getpid() % 250
        self._bridge = f"hearth{os.getpid()}"[:15]
        self._machines: list[Machine] = []
        self._links: list[str] = []
        self._made = 0
        self.address = self._address(254)
        _ip("link", "add", self._bridge, "type", "bridge")
        try:
            _ip("address", "add", f"{self.address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except subprocess.CalledProcessError:
            self.close()
            raise

    def add(self) -> Machine:
        """One more machine, with an address that none had before."""
        self._made += 1
        machine = Machine(f"{self._bridge}-{self._made}", self._address(self._made))
        _ip("netns", "add", machine.namespace)
        self._machines.append(machine)
        here = f"h{self._made}x{os.getpid()}"[:15]
        inside = ["-n", machine.namespace]
        _ip("link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
        self._links.append(here)
        _ip("link", "set", here, "master", self._bridge, "up")
        _ip(*inside, "address", "add", f"{machine.address}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*inside, "link", "set", "lo", "up")
        return machine

    def remove(self, machine: Machine) -> None:
        """Take a machine away, with all that runs there."""
        machine.lose_power()
        self._machines.remove(machine)
        _ip("netns", "delete", machine.namespace)

    def close(self) -> None:
        """Take all machines away, and the bridge."""
        for machine in list(self._machines):
            self.remove(machine)
        for name in [*self._links, self._bridge]:
            # A machine's link goes with it, a moment after its last connection.
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("link", "delete", name)

    def _address(self, last: int) -> str:
        return f"10.213.{self._number}.{last}"


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    return done.stdout
