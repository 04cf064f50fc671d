"""What a gateway gets to know at its start; apart from it, for the learner does not import grpc."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.security import Security

DESCRIPTORS_PER_STREAM = 4  # a lane, its memory, its bell, a connection; at either end


@dataclass(frozen=True)
class GatewayConfig:
    """All that a gateway needs to know; goes to it as JSON."""

    control_fd: int
    bell_fd: int
    listen: list[str]
    dial: list[str]
    security: dict[str, Any]
    limits: dict[str, Any]
    share_port: bool
    knows_truncation: bool

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def make_security(self) -> Security:
        return Security.from_json(self.security)

    def make_limits(self) -> Limits:
        return Limits(**self.limits)
