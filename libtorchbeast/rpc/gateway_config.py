"""The configuration of a learner's gateways, and of each gateway process."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from libtorchbeast.rpc.address import Address
from libtorchbeast.rpc.handshake import Greeting
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.security import Security

DESCRIPTORS_PER_STREAM = 4  # at either end: a lane, its memory, its wakeup, a connection


@dataclass(frozen=True)
class GatewaysConfig:
    """Where environments connect from, and how many of them are accepted."""

    listen: Sequence[str] = ()
    """Addresses for environments that dial in."""
    server_addresses: Sequence[str] = ()
    """Servers to dial; each gets a stream per mention here, or as many as it asks for if more."""
    expects_servers: bool = True
    """Whether a server is expected at each of these addresses, and not only at some."""
    security: Security = field(default_factory=Security)
    limits: Limits = field(default_factory=Limits)
    num_gateways: int = 1
    max_groups: int | None = None
    """Groups of environments that may play, over all gateways; None: no limit."""
    knows_truncation: bool = True
    rows_per_rollout: int = 1
    """T+1, from which the memory for an environment's rollouts is computed."""

    def check(self) -> None:
        """Raise ValueError with one sentence if this configuration cannot work."""
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
    """The configuration of one gateway process, which gets it as JSON."""

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
