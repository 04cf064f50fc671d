"""What the learner wants of its gateways, and what each of them gets to know at its start."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from libtorchbeast.rpc.address import Address
from libtorchbeast.rpc.handshake import Greeting
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.security import Security

DESCRIPTORS_PER_STREAM = 4  # a lane, its memory, its wakeup, a connection; at either end


@dataclass(frozen=True)
class GatewaysConfig:
    """Where environments come from, and how much of them is taken."""

    listen: Sequence[str] = ()
    """Addresses for environments that dial in."""
    server_addresses: Sequence[str] = ()
    """Each gets a stream, or as many as the server there asks for; one may be there twice."""
    expects_servers: bool = True
    """Whether somebody is to be at each of them, and not only at some."""
    security: Security = field(default_factory=Security)
    limits: Limits = field(default_factory=Limits)
    num_gateways: int = 1
    max_groups: int | None = None
    """Of environments, all gateways together."""
    knows_truncation: bool = True
    rows_per_rollout: int = 1
    """Says how much memory an environment takes."""

    def check(self) -> None:
        """ValueError with one sentence."""
        if self.num_gateways < 1:
            raise ValueError(f"num_gateways must be at least 1, got {self.num_gateways}.")
        for address in self.listen:
            self.security.check_listening(address)
            if self.num_gateways > 1 and Address.parse(address).path:
                raise ValueError(
                    f"Several gateways cannot share a unix socket, got {address}; listen at a "
                    "port, or use one gateway."
                )
        for address in self.server_addresses:
            self.security.check_dialing(address)


@dataclass(frozen=True)
class GatewayConfig:
    """All that a gateway needs to know; goes to it as JSON."""

    control_fd: int
    wakeup_fd: int
    listen: list[str]
    dial: list[str]
    security: Security
    limits: Limits
    share_port: bool
    knows_truncation: bool

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "security": self.security.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "GatewayConfig":
        security, limits = Security.from_json(values["security"]), Limits(**values["limits"])
        return cls(**{**values, "security": security, "limits": limits})

    def greeting(self, token: str = "") -> Greeting:
        return Greeting("learner", token, self.knows_truncation)
