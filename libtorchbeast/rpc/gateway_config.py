"""What a gateway is told at its start; apart from it, for the learner does not import grpc."""

import json
from dataclasses import asdict, dataclass
from typing import Any

DESCRIPTORS_PER_STREAM = 4  # a lane, its memory, its bell, a connection; at either end


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
