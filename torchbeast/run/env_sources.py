"""Sources of PolyBeast's environments: workers on this machine, connections, or both.

A source knows its environments' spec before they are there, adds their lanes to the actor pool, and
supervises their processes.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from libtorchbeast.actor_pool import ActorPool
from libtorchbeast.env_workers import Workers, WorkersConfig
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.connected_clients import ClientFigures
from libtorchbeast.rpc.gateway_config import GatewaysConfig
from libtorchbeast.rpc.gateway_processes import Gateways
from libtorchbeast.rpc.handshake import Refused
from libtorchbeast.specs import INT64
from torchbeast import user_code
from torchbeast.core.ranks import ALONE, Ranks
from torchbeast.envs import GROUP_FACTORY, REMOTE, EnvOptions, look_at
from torchbeast.envs.options import names_of_code
from torchbeast.errors import UsageError
from torchbeast.run.signals import StopRequest

logger = logging.getLogger("torchbeast")

LOOK_S = 0.2  # interval of checks for a signal
SPEC = "spec"  # the key under which several learners share the spec of their first environments
STOP = "stop"  # the key under which they share the signal that has ended the wait for these


class Source(Protocol):
    """Environments for the actor pool, wherever they are."""

    spec: Spec
    num_envs: int
    """The number of environments that are expected; 0 if it is not known."""

    def start(self, pool: ActorPool, seed: int) -> None:
        """Add lanes to the pool, now or when environments connect."""

    def poll(self) -> None:
        """Supervise the environments. Called a few times a second; does not wait."""

    def late(self) -> list[str]:
        """The workers or connections that are late, in words."""

    def clients(self) -> list[ClientFigures]:
        """Figures of the clients that are connected, or were."""

    def finish(self) -> None:
        """Notify clients that training is finished; `close` follows."""

    def close(self) -> None: ...


class LocalEnvironments:
    """Worker processes on this machine, connected by shared memory."""

    def __init__(
        self,
        options: EnvOptions,
        num_workers: int,
        num_groups: int,
        envs_per_group: int,
        env_timeout_s: float,
        output_path: Path,
    ) -> None:
        self.spec = look_at(options, envs_per_group)
        self.num_envs = num_groups * envs_per_group
        self._config = WorkersConfig(
            factory=GROUP_FACTORY,
            factory_options=dataclasses.asdict(options),
            spec=self.spec,
            num_workers=num_workers,
            num_groups=num_groups,
            envs_per_group=envs_per_group,
            seed=0,  # until `start`
            env_timeout_s=env_timeout_s,
            factory_data=user_code.pack(names_of_code(options)),
            output_path=output_path,
        )
        self._workers: Workers | None = None

    def start(self, pool: ActorPool, seed: int) -> None:
        self._workers = Workers(dataclasses.replace(self._config, seed=seed))
        for lane in self._workers.lanes:
            pool.add_lane(lane)

    def poll(self) -> None:
        if self._workers is not None:
            self._workers.poll()

    def late(self) -> list[str]:
        return [] if self._workers is None else self._workers.supervisor.late()

    def clients(self) -> list[ClientFigures]:
        return []

    def finish(self) -> None:
        pass

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()


class RemoteEnvironments:
    """Gateways, which dial environment servers, or listen for environments that dial in."""

    num_envs = 0

    def __init__(
        self,
        options: EnvOptions,
        config: GatewaysConfig,
        check_model: Callable[[Spec], object] = lambda spec: None,
    ) -> None:
        """`check_model` raises an exception if there is no model for environments with a spec."""
        self._check_model = check_model
        spec = None if options.env == REMOTE else look_at(options)
        plain = EnvOptions(options.env)
        for field in dataclasses.fields(options):
            if getattr(options, field.name) != getattr(plain, field.name):
                logger.warning("--%s does not reach environments elsewhere; give it to "
                               "polybeast_env.", field.name)  # fmt: skip
        try:
            self._gateways = Gateways(config, spec, check_first=self._check_first)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def open(self, stop: StopRequest, ranks: Ranks = ALONE) -> None:
        """Start the gateways, and wait until the environments' spec is known.

        The first environments of any learner decide for all learners.
        """
        try:
            self._gateways.open()
        except OSError as error:
            raise UsageError(str(error)) from error
        for address in self._gateways.listening:
            logger.info("Environments can dial in at %s.", address)
        try:
            self.spec = self._wait_for_spec(stop, ranks)
        except BaseException:
            self.close()
            raise

    def start(self, pool: ActorPool, seed: int) -> None:
        self._gateways.start(pool.add_lane, pool.offer_model)

    def poll(self) -> None:
        self._gateways.poll()

    def late(self) -> list[str]:
        return self._gateways.late()

    def clients(self) -> list[ClientFigures]:
        return self._gateways.clients

    def finish(self) -> None:
        self._gateways.finish()

    def close(self) -> None:
        self._gateways.close()

    def _wait_for_spec(self, stop: StopRequest, ranks: Ranks) -> Spec:
        """Wait for the first environments, without a limit; SystemExit after a stop signal."""
        if self._gateways.spec is not None:
            return self._gateways.spec
        while (text := ranks.look_up(SPEC)) is None:
            if stop.signal is not None:
                ranks.write(STOP, str(int(stop.signal)))
            if (number := ranks.look_up(STOP)) is not None:  # a signal to one learner ends all
                stop.signal = int(number)
            if stop.signal is not None:
                raise SystemExit(stop.exit_code)
            with suppress(TimeoutError):
                spec = self._gateways.wait_for_spec(LOOK_S)
                if ranks.size == 1:
                    return spec
                ranks.write(SPEC, json.dumps(spec.to_json()))
        self._gateways.decide(Spec.from_json(json.loads(text)))
        assert self._gateways.spec is not None
        return self._gateways.spec

    def _check_first(self, spec: Spec) -> None:
        """Refuse environments that cannot be learnt from; the wait for others goes on."""
        if spec.action == INT64:
            raise Refused(
                "FAILED_PRECONDITION",
                "These environments do not say how many actions they take; set num_actions in "
                "their Hello, or name them to the learner with --env.",
            )
        try:
            self._check_model(spec)
        except Exception as error:  # a model of the user's own may raise anything
            text = f"The learner has no model for these environments: {error}"
            raise Refused("FAILED_PRECONDITION", text) from error


class BothEnvironments:
    """Several sources as one; the spec is that of the first."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._working = list(sources)
        self.spec = sources[0].spec
        self.num_envs = sum(source.num_envs for source in sources)

    def start(self, pool: ActorPool, seed: int) -> None:
        for source in self._sources:
            source.start(pool, seed)

    def poll(self) -> None:
        for source in list(self._working):
            try:
                source.poll()
            except RuntimeError as error:  # it gave up; training goes on while others work
                if len(self._working) == 1:
                    raise
                logger.error("%s", error)
                self._working.remove(source)

    def late(self) -> list[str]:
        return [name for source in self._working for name in source.late()]

    def clients(self) -> list[ClientFigures]:
        return [figures for source in self._sources for figures in source.clients()]

    def finish(self) -> None:
        for source in self._sources:
            source.finish()

    def close(self) -> None:
        with ExitStack() as stack:  # closes all of them, even if one raises
            for source in self._sources:
                stack.callback(source.close)
