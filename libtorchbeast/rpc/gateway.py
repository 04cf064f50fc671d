"""A gateway: a process in which connections from outside end and lanes begin.

    environments ── gRPC ──► gateway ── lanes ──► actors in the learner's process
    hosts on this machine ── unix socket ──► gateway: hands a lane over, then carries no data

Started by `Gateways` (gateway_processes.py) as `python -m libtorchbeast.rpc.gateway CONFIG`.
All data from other machines is parsed and checked here; the learner's process sees only rows of
numbers. A host that is handed a lane is a process of the same user, and writes to it directly.

One event loop serves all streams: in a trial, a thread for each of 256 streams was less than half
as fast, and some streams got nearly a hundred times as many turns as others.
"""

import asyncio
import contextlib
import json
import logging
import sys
import traceback
from pathlib import Path

from libtorchbeast.helper_process import SupervisorLine
from libtorchbeast.malloc import give_memory_back
from libtorchbeast.rpc.gateway_config import DESCRIPTORS_PER_STREAM, GatewayConfig
from libtorchbeast.rpc.gateway_dialer import Dialer
from libtorchbeast.rpc.gateway_listener import Listener
from libtorchbeast.rpc.grpc_streams import Watched, watch
from libtorchbeast.rpc.learner_connection import LearnerConnection
from libtorchbeast.shared_lanes import allow_descriptors


async def run(config: GatewayConfig, supervisor: SupervisorLine) -> None:
    """Serve connections until the learner stops this gateway, or is gone."""
    learner = LearnerConnection(config.control_fd, config.wakeup_fd, config.limits)
    asyncio.get_running_loop().set_exception_handler(learner.report_lost_error)
    streams: set[Watched] = set()
    listener = Listener(config, learner, streams)
    dialer = Dialer(config, learner, streams)

    def tick() -> None:
        supervisor.tick()
        listener.end_revoked()
        learner.send_news()

    async with contextlib.AsyncExitStack() as stack:
        try:
            addresses = [await stack.enter_async_context(listener.listen(a)) for a in config.listen]
        except (OSError, ValueError, RuntimeError) as error:
            learner.send("failed", text=str(error))
            return
        learner.send("ready", addresses=addresses)
        learner.start()
        watcher = asyncio.create_task(watch(streams, tick))
        dialer.start()
        await learner.stopped.wait()
        for stream in list(streams):
            stream.end(learner.ending())
        watcher.cancel()
        dialer.stop()
    learner.lanes.stop()


def raise_oom_score() -> None:
    """Make the kernel kill this process first if memory runs out, as it is soon restarted."""
    with contextlib.suppress(OSError):  # other systems have no such file
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(text: str) -> None:
    values = json.loads(text)
    supervisor = SupervisorLine(values.pop("line"))
    config = GatewayConfig.from_json(values)
    raise_oom_score()
    give_memory_back()
    allow_descriptors(DESCRIPTORS_PER_STREAM * config.limits.max_streams)
    try:
        asyncio.run(run(config, supervisor))
    except Exception:
        supervisor.send(logging.ERROR, traceback.format_exc())
        raise


if __name__ == "__main__":
    main(sys.argv[1])
