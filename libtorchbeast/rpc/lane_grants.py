"""The learner's lanes for gateways: which gateway has which lanes, and when it is granted more.

Lanes belong to the learner. A gateway gets their file descriptors on request, and reuses them for
later streams. If a gateway process dies, the next one gets its lanes, except those that were handed
over to hosts.
"""

import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from libtorchbeast.json_socket import MAX_MESSAGE_BYTES
from libtorchbeast.rollout_layout import ModelOffer, RolloutSpec
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.gateway_config import GatewaysConfig
from libtorchbeast.rpc.handshake import Refused, check_fit, no_descriptor_left
from libtorchbeast.shared_lanes import CLOSED, FREE, Lane, close_free_lane
from libtorchbeast.shared_memory import memory_bytes
from libtorchbeast.specs import INT64, canonical

logger = logging.getLogger("torchbeast")

MAX_OFFER_BYTES = MAX_MESSAGE_BYTES - 1024  # as JSON, in a message to a gateway
MEMORY_SHARE = 0.5  # of this machine's memory, for rollouts of environments elsewhere

Send = Callable[..., bool]
"""`send(kind, **values)` to a gateway; returns False if no file descriptor is free for it."""


@dataclass(eq=False)
class GatewayLanes:
    """The lanes of one gateway, which outlive its process."""

    wakeup_fd: int  # to which actors write when they pass a turn
    lanes: list[Lane] = field(default_factory=list)
    lent: set[Lane] = field(default_factory=set)  # those that the current process has
    handed_over: set[Lane] = field(default_factory=set)  # those of hosts, which are not reused
    granted: dict[int, Lane] = field(default_factory=dict)  # by the number of the request
    requests: list[dict[str, Any]] = field(default_factory=list)  # not yet granted
    knows_model: bool = False  # whether the current process was sent the ModelOffer

    def forget_process(self) -> None:
        """Reset the state of the process, which has ended; now only hosts write to its lanes."""
        self.lent.clear()
        self.granted.clear()
        self.requests.clear()
        self.knows_model = False
        for lane in self.lanes:
            lane.turn.abandon()

    def forget_closed(self) -> None:
        """Drop closed lanes; close those of hosts whose gateway died, so that they leave."""
        for lane in self.handed_over - self.lent:  # the gateway died
            lane.turn.abandon()
            if lane.turn.state == FREE:
                lane.turn.close()
        for lane in [lane for lane in self.lanes if lane.turn.state == CLOSED]:
            lane.release()
            self.lanes.remove(lane)
            self.lent.discard(lane)
            self.handed_over.discard(lane)
            self.granted = {id: other for id, other in self.granted.items() if other is not lane}

    def close_lost(self, id: int) -> None:
        """Close the lane granted to request `id`, as it did not reach the gateway."""
        lane = self.granted.pop(id, None)
        if lane is not None:
            lane.turn.close()


class LaneGrants:
    """Grants lanes that gateways request for their environments, or refuses them."""

    def __init__(
        self,
        config: GatewaysConfig,
        spec: Spec | None,
        check_first: Callable[[Spec], None] | None,
        gateways: list[GatewayLanes],
    ) -> None:
        """Without a `spec`, the first environments determine it; `check_first` may refuse them."""
        self.spec = spec
        self.add_lane: Callable[[Lane], None] | None = None  # None: nothing may play yet
        self.offer_model: Callable[[], ModelOffer] | None = None  # None: actors are refused
        self._offer: ModelOffer | None = None
        self._offer_json: dict[str, Any] = {}
        self._offer_bytes = 0  # as JSON
        self._config = config
        self._check_first = check_first
        self._gateways = gateways

    def add_request(self, gateway: GatewayLanes, request: dict[str, Any], send: Send) -> None:
        """Queue a request for a lane; its spec becomes that of the run if there is none yet."""
        try:
            self._learn_spec(request)
            gateway.requests.append(request)
        except Exception as error:  # nothing that comes from outside ends a run
            _refuse(request, error, send)

    def answer_requests(self, gateway: GatewayLanes, send: Send) -> None:
        """Grant or refuse the queued requests of a gateway, once environments may play."""
        if self.add_lane is None:
            return
        gateway.forget_closed()
        while gateway.requests:
            request = gateway.requests.pop(0)
            try:
                self._answer(gateway, request, send)
            except Exception as error:  # such as no descriptor or thread left
                _refuse(request, error, send)

    def _learn_spec(self, request: dict[str, Any]) -> None:
        """Take from a request what is not known of the spec yet."""
        spec = Spec.from_json(request["spec"])
        if self.spec is None:
            if self._check_first is not None:
                self._check_first(spec)
            self.spec = spec
        if self.spec.action == INT64 and canonical(spec.action) == INT64:  # number unknown
            self.spec = dataclasses.replace(self.spec, action=spec.action)

    def _answer(self, gateway: GatewayLanes, request: dict[str, Any], send: Send) -> None:
        """Send a gateway the lane that it requests; raise `Refused` if it cannot have one."""
        assert self.spec is not None  # `_learn_spec` was called before
        check_fit(self.spec, Spec.from_json(request["spec"]))
        spec: Spec | RolloutSpec = self.spec
        if request["has_model"]:
            offer = self._find_offer()
            spec = offer.rollout
            if not gateway.knows_model:
                if not send("model", fd=offer.weights_fd, offer=self._offer_json):
                    raise no_descriptor_left("learner")
                gateway.knows_model = True
        lane = self._find_lane(gateway, spec, request)
        gateway.lent.add(lane)
        gateway.granted[request["id"]] = lane
        lent = {"fd": lane.fd, "spec": self.spec.to_json(), "num_envs": lane.num_envs}
        if not send("lane", id=request["id"], rollouts=lane.has_rollouts, **lent):
            gateway.close_lost(request["id"])
            raise no_descriptor_left("learner")

    def _find_offer(self) -> ModelOffer:
        """Return the offer for actors that carry the model; raise `Refused` if there is none.

        It is made when the first of them connects.
        """
        if self.offer_model is None:
            text = "This learner takes environments, and no actors that carry the model."
            raise Refused("FAILED_PRECONDITION", text)
        if self._offer is None:
            self._offer = self.offer_model()
            self._offer_json = self._offer.to_json()
            self._offer_bytes = len(json.dumps(self._offer_json))
        if self._offer_bytes > MAX_OFFER_BYTES:
            raise Refused(
                "FAILED_PRECONDITION",
                f"Names and shapes of a model's tensors may have {MAX_OFFER_BYTES} bytes where "
                f"actors carry it, those of the learner's {len(self._offer.tensors)} have "
                f"{self._offer_bytes}; dial in with polybeast_env.",
            )
        return self._offer

    def _find_lane(
        self, gateway: GatewayLanes, spec: Spec | RolloutSpec, request: dict[str, Any]
    ) -> Lane:
        """Return an unused lane of this client, or else a new one."""
        num_envs, hand_over = request["num_envs"], request["hand_over"]
        unused = [lane for lane in gateway.lanes if lane not in gateway.lent | gateway.handed_over]
        for lane in unused:
            if lane.fits(num_envs, request["client"], request["has_model"]) and not hand_over:
                return lane
        self._check_places(gateway, unused)
        self._check_memory(spec, num_envs)
        lane = Lane.create(spec, num_envs)
        lane.client = request["client"]
        lane.marks_rows = request["knows_marks"]
        if not hand_over:
            lane.wakeup_fd = gateway.wakeup_fd
        assert self.add_lane is not None
        try:
            self.add_lane(lane)
        except BaseException:
            lane.close()
            raise
        gateway.lanes.append(lane)
        if hand_over:
            gateway.handed_over.add(lane)
        return lane

    def _check_places(self, gateway: GatewayLanes, unused: list[Lane]) -> None:
        """Raise `Refused` if there are too many lanes or groups to add one."""
        if len(gateway.lanes) >= self._config.limits.max_streams:
            close_free_lane(unused)
            gateway.forget_closed()
        if len(gateway.lanes) >= self._config.limits.max_streams:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"A gateway takes {self._config.limits.max_streams} streams, and all are in use; "
                "put more environments in a stream, or raise the learner's --num_gateways.",
            )
        most = self._config.max_groups
        if most is not None and sum(len(g.lent) for g in self._gateways) >= most:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"The learner takes {most} groups of environments, and all are in use; raise its "
                "--num_actors, or leave it out.",
            )

    def _check_memory(self, spec: Spec | RolloutSpec, num_envs: int) -> None:
        """Raise `Refused` if the rollouts of all environments might take too much memory."""
        rollout_bytes = self._rollout_bytes(spec, num_envs)
        most = self._config.limits.max_message_bytes
        if isinstance(spec, RolloutSpec) and num_envs * spec.num_bytes > most:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"A rollout may have {most} bytes, {num_envs} environments like these have "
                f"{num_envs * spec.num_bytes}; put fewer in an actor.",
            )
        others = (
            self._rollout_bytes(lane.spec, lane.num_envs)
            for gateway in self._gateways
            for lane in gateway.lanes
        )
        num_bytes = sum(others) + rollout_bytes
        if num_bytes > MEMORY_SHARE * memory_bytes():
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"Rollouts of {num_envs} more environments would take too much of the learner's "
                f"memory, {num_bytes >> 20} MiB in all of {memory_bytes() >> 20}; connect fewer, "
                "or lower its --unroll_length.",
            )

    def _rollout_bytes(self, spec: Spec | RolloutSpec, num_envs: int) -> int:
        """Return the most memory that the rollouts of a lane's environments may take.

        Each environment has a rollout in the making and one on its way to the learner. With an
        actor that carries the model, there are two more, in the lane and on the way to it, and a
        version of the weights of its own if it reads slowly.
        """
        if isinstance(spec, Spec):
            return 2 * num_envs * self._config.rows_per_rollout * spec.row_bytes
        weights = 0 if self._offer is None else self._offer.weights_bytes
        return 4 * num_envs * spec.num_bytes + weights


def _refuse(request: dict[str, Any], error: Exception, send: Send) -> None:
    """Refuse a request because of `error`; unless that is `Refused`, it is logged here only."""
    if not isinstance(error, Refused):
        who = "Actors" if request.get("has_model") else "Environments"
        logger.error("%s are refused, there is no lane for them: %s", who, error)
        text = "The learner cannot take more environments now; wait."
        error = Refused("RESOURCE_EXHAUSTED", text)
    send("refuse", id=request["id"], **error.to_json())
