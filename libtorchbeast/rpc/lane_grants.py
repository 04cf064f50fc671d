"""The learner's lanes for gateways: who gets one, and who has it.

Lanes belong to the learner's side; a gateway gets their descriptors when it asks, and uses them
again for later streams. They outlive a gateway that dies: the one that takes its place gets them,
but for those that were handed over to hosts.
"""

import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from libtorchbeast.json_socket import MAX_MESSAGE_BYTES
from libtorchbeast.rollouts import ModelOffer, RolloutSpec
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.gateway_config import GatewaysConfig
from libtorchbeast.rpc.handshake import Refused, check_fit, no_descriptor_left
from libtorchbeast.shared_lanes import CLOSED, FREE, Lane, close_free_lane
from libtorchbeast.shared_memory import memory_bytes
from libtorchbeast.specs import INT64, canonical

logger = logging.getLogger("torchbeast")

MAX_OFFER_BYTES = MAX_MESSAGE_BYTES - 1024  # as JSON, in a message to a gateway
MEMORY_SHARE = 0.5  # of this machine's, for rollouts of environments elsewhere

Send = Callable[..., bool]
"""A message to a gateway, its kind first; False if there is no descriptor left to send it with."""


@dataclass(eq=False)
class GatewayLanes:
    """Of one gateway; they stay while its processes come and go."""

    wakeup_fd: int  # that actors write to
    lanes: list[Lane] = field(default_factory=list)
    lent: set[Lane] = field(default_factory=set)  # of `lanes`, to the process that runs now
    handed_over: set[Lane] = field(default_factory=set)  # of `lanes`, to hosts: used once
    granted: dict[int, Lane] = field(default_factory=dict)  # to the requests with these numbers
    requests: list[dict[str, Any]] = field(default_factory=list)  # not yet granted
    knows_model: bool = False  # the process that runs now

    def forget_process(self) -> None:
        """It is gone: nobody but hosts writes to its lanes any more."""
        self.lent.clear()
        self.granted.clear()
        self.requests.clear()
        self.knows_model = False
        for lane in self.lanes:
            lane.turn.abandon()

    def forget_closed(self) -> None:
        for lane in self.handed_over - self.lent:  # their gateway died: the hosts must leave, too
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
        """The lane for this request did not arrive."""
        lane = self.granted.pop(id, None)
        if lane is not None:
            lane.turn.close()


class LaneGrants:
    """Says which lane a gateway gets for environments, or why there is none."""

    def __init__(
        self,
        config: GatewaysConfig,
        spec: Spec | None,
        check_first: Callable[[Spec], None] | None,
        gateways: list[GatewayLanes],
    ) -> None:
        """Without a `spec` the first environments decide; `check_first` may refuse them."""
        self.spec = spec
        self.add_lane: Callable[[Lane], None] | None = None  # None: not yet
        self.offer_model: Callable[[], ModelOffer] | None = None  # None: actors are not taken
        self._offer: ModelOffer | None = None
        self._offer_json: dict[str, Any] = {}
        self._offer_bytes = 0  # as JSON
        self._config = config
        self._check_first = check_first
        self._gateways = gateways

    def add_request(self, gateway: GatewayLanes, request: dict[str, Any], send: Send) -> None:
        """A request for a lane. The first environments say what all are to be like."""
        try:
            self._learn_spec(request)
            gateway.requests.append(request)
        except Exception as error:  # nothing that comes from outside ends a run
            _refuse(request, error, send)

    def answer_requests(self, gateway: GatewayLanes, send: Send) -> None:
        """Those of a gateway, once environments may play."""
        if self.add_lane is None:
            return
        gateway.forget_closed()
        while gateway.requests:
            request = gateway.requests.pop(0)
            try:
                self._answer(gateway, request, send)
            except Exception as error:  # no descriptor or thread is left, perhaps
                _refuse(request, error, send)

    def _learn_spec(self, request: dict[str, Any]) -> None:
        spec = Spec.from_json(request["spec"])
        if self.spec is None:
            if self._check_first is not None:
                self._check_first(spec)
            self.spec = spec
        if self.spec.action == INT64 and canonical(spec.action) == INT64:  # nobody said how many
            self.spec = dataclasses.replace(self.spec, action=spec.action)

    def _answer(self, gateway: GatewayLanes, request: dict[str, Any], send: Send) -> None:
        """A lane for a gateway that asks for one, or `Refused`."""
        assert self.spec is not None  # `_learn_spec` was first
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
        """What actors that carry the model must know, once the first of them asks."""
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
        """A lane of this client that no stream has; a new one if need be."""
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
        if len(gateway.lanes) >= self._config.limits.max_streams:
            close_free_lane(unused)
            gateway.forget_closed()
        if len(gateway.lanes) >= self._config.limits.max_streams:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"The learner has {len(gateway.lanes)} lanes and makes no more.",
            )
        most = self._config.max_groups
        if most is not None and sum(len(g.lent) for g in self._gateways) >= most:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"The learner plays with {most} groups (--num_actors) and has them all.",
            )

    def _check_memory(self, spec: Spec | RolloutSpec, num_envs: int) -> None:
        """Rollouts of all environments, one in the making and one on its way each, must fit."""
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
                f"Rollouts of {num_envs} more environments would take the learner's memory: "
                f"{num_bytes >> 20} MiB in all of {memory_bytes() >> 20}.",
            )

    def _rollout_bytes(self, spec: Spec | RolloutSpec, num_envs: int) -> int:
        """At worst: of actors that carry the model, two more are in their lane and on the way
        there, and one that reads slowly has a version of the weights to itself."""
        if isinstance(spec, Spec):
            return 2 * num_envs * self._config.rows_per_rollout * spec.row_bytes
        weights = 0 if self._offer is None else self._offer.weights_bytes
        return 4 * num_envs * spec.num_bytes + weights


def _refuse(request: dict[str, Any], error: Exception, send: Send) -> None:
    """Of environments that cannot be taken, for whatever reason."""
    if not isinstance(error, Refused):
        who = "Actors" if request.get("has_model") else "Environments"
        logger.error("%s are refused, there is no lane for them: %s", who, error)
        text = "The learner cannot take more environments now; wait."
        error = Refused("RESOURCE_EXHAUSTED", text)
    send("refuse", id=request["id"], **error.to_json())
