"""Ports of this machine, for learners and others who listen in tests."""

import socket


def free_port() -> int:
    """One that nobody listens at now; tests beside this one get another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
