"""What a gateway is told at its start; apart from it, for the learner does not import grpc."""

import json
import resource
from dataclasses import asdict, dataclass
from typing import Any

DESCRIPTORS_PER_STREAM = 4  # a lane, its memory, its bell, a connection; at either end


def allow_descriptors(number: int) -> None:
    """Let this process open so many files, as far as the system allows: the default is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


@dataclass(frozen=True)
class GatewayConfig:
    """All that a gateway needs to know; goes to it as JSON."""

    control_fd: int
    bell_fd: int
    parent: int
    listen: list[str]
    dial: list[str]
    security: dict[str, Any]
    limits: dict[str, Any]
    share_port: bool
    knows_truncation: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "GatewayConfig":
        return cls(**json.loads(text))
