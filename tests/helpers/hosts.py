"""Two hosts and a router between them, as network namespaces: for tests across machines.

    learner 192.0.2.7 ── 192.0.2.1 router 10.0.0.1 ── 10.0.0.2 environments

The router masquerades: environments reach the learner, and nobody reaches the environments. All
traffic stays in namespaces made here; they are removed whatever happens.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

LEARNER, ENVIRONMENTS = "192.0.2.7", "10.0.0.2"
ROUTER_OUTSIDE, ROUTER_INSIDE = "192.0.2.1", "10.0.0.1"
COMMAND_S = 60
PACKAGES = {"ip": "iproute2", "nft": "nftables"}

RULES = """
table ip nat {
    chain outwards {
        type nat hook postrouting priority srcnat;
        oifname "outside" masquerade
    }
}
table ip filter {
    chain forward {
        type filter hook forward priority filter; policy drop;
        iifname "inside" accept
        ct state established,related accept
    }
}
"""


class Hosts:
    """The namespaces, and the cable between learner and router."""

    def __init__(self) -> None:
        # The process's number keeps two runs of the tests apart.
        self.learner, self.router, self.environments = (
            f"torchbeast-{name}-{os.getpid()}" for name in ("learner", "router", "envs")
        )

    @property
    def names(self) -> tuple[str, str, str]:
        return self.learner, self.router, self.environments

    @staticmethod
    def within(name: str) -> tuple[str, ...]:
        """What to put before a command to run it on a host."""
        return ("ip", "netns", "exec", name)

    def build(self) -> None:
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        self._connect("outside", ROUTER_OUTSIDE, self.learner, LEARNER)
        self._connect("inside", ROUTER_INSIDE, self.environments, ENVIRONMENTS)
        run("ip", "-n", self.environments, "route", "add", "default", "via", ROUTER_INSIDE)
        run(*self.within(self.router), "sysctl", "-qw", "net.ipv4.ip_forward=1")
        run(*self.within(self.router), "nft", "-f", "-", text=RULES)

    def pull_cable(self) -> None:
        run("ip", "-n", self.router, "link", "set", "outside", "down")

    def plug_cable(self) -> None:
        run("ip", "-n", self.router, "link", "set", "outside", "up")

    def peers_of_learner(self) -> set[str]:
        """The hosts that the learner's side sees at the other end of its connections."""
        text = run(*self.within(self.learner), "ss", "-Htn", "state", "established")
        hosts = [line.split()[3].rpartition(":")[0] for line in text.splitlines()]
        return {host.strip("[]").removeprefix("::ffff:") for host in hosts}

    def has_route(self, name: str, address: str) -> bool:
        command = ["ip", "-n", name, "route", "get", address]
        return subprocess.run(command, capture_output=True, timeout=COMMAND_S).returncode == 0

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=COMMAND_S)

    def _connect(self, port: str, port_address: str, host: str, address: str) -> None:
        """A cable from the router's port to a host."""
        peer = ("peer", "name", "eth0", "netns", host)
        run("ip", "-n", self.router, "link", "add", port, "type", "veth", *peer)
        for name, device, own in ((self.router, port, port_address), (host, "eth0", address)):
            run("ip", "-n", name, "address", "add", f"{own}/24", "dev", device)
            run("ip", "-n", name, "link", "set", device, "up")


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Skips the test where namespaces cannot be made."""
    require_tools()
    hosts = Hosts()
    try:
        try:
            run("ip", "netns", "add", hosts.router)
        except RuntimeError as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        run("ip", "netns", "del", hosts.router)
        hosts.build()
        yield hosts
    finally:
        hosts.remove()


def require_tools() -> None:
    missing = [package for tool, package in PACKAGES.items() if shutil.which(tool) is None]
    if missing:
        what = " and ".join(missing)
        pytest.skip(f"network namespaces need {what}; make test-packages installs them")
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")


def run(*command: str, text: str | None = None, seconds: float = COMMAND_S) -> str:
    result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=seconds)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout
