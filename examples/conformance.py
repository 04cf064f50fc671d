"""Does a client keep the rules of libtorchbeast/rpc/env.proto? Listens like a learner to check.

    python examples/conformance.py --listen 127.0.0.1:4242 -- ./my_client --connect 127.0.0.1:4242

The command after -- is started several times, and should open one stream each time. `{address}` in
it is replaced by the address, which is needed with port 0. It finds a token in TORCHBEAST_TOKEN.
One line is printed for each check; the exit code is 0 if the client kept all rules, 1 if it broke
one, 2 for a mistake in the arguments, 143 after SIGTERM.
"""

import argparse
import contextlib
import functools
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import grpc
import numpy as np
from conformance_rules import (
    BrokenRule,
    StepRules,
    check_hello,
    choose_actions,
    describe_hello,
    expect,
)

from libtorchbeast.rpc.address import Address
from libtorchbeast.rpc.handshake import Greeting, Hello
from libtorchbeast.rpc.limits import Limits, server_options
from libtorchbeast.rpc.messages import LEARNER_METHOD, encode_greeting, token_in
from libtorchbeast.rpc.security import Security

START_S = 60.0  # time for a client to dial after its start
DIAL_AGAIN_S = 25.0  # time to dial again: pauses may grow to 10 s
ANSWER_S = 15.0  # time for a Step to follow on Actions
QUIET_S = 0.4  # how long a client that must wait is watched
END_S = 10.0  # time for a client to end after SIGTERM
REFUSED_S = 2.0  # the pause that a client refused for good must reach, after some calls
MAX_DIALS_WHEN_REFUSED = 6
MIN_PAUSES_S = 1.0  # minimum sum of at most eight pauses, whose limits grow from 0.1 s to 10 s
STOP_S = 5.0
MAX_STREAMS = 64

TRY_AGAIN = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAVAILABLE") * 2
PERMANENT_REFUSALS = ("FAILED_PRECONDITION", "UNAUTHENTICATED")


class Stream:
    """One stream of a client, from the learner's end. Every wait has a limit."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.incoming: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.status: tuple[str, str] | None = None
        self.closed = threading.Event()

    def read(self, what: str, timeout_s: float = ANSWER_S) -> bytes:
        try:
            data = self.incoming.get(timeout=timeout_s)
        except queue.Empty:
            raise BrokenRule(f"expected {what} within {timeout_s:g} s, got nothing") from None
        if data is None:
            raise BrokenRule(f"expected {what}, but the client closed the stream")
        return data

    def write(self, data: bytes) -> None:
        self.outgoing.put(data)

    def expect_silence(self, what: str) -> None:
        with contextlib.suppress(queue.Empty):
            data = self.incoming.get(timeout=QUIET_S)
            got = "another message" if data is not None else "the end of the stream"
            raise BrokenRule(f"the client must wait for {what}, got {got}")

    def end(self, code: str = "", text: str = "") -> None:
        self.status = (code, text) if code else None
        self.outgoing.put(None)


class Learner:
    """A gRPC server with the service Learner; `accept` gives its streams, one by one."""

    def __init__(self, address: str, security: Security) -> None:
        self.address = address
        self._security = security
        self._streams: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self._server: Any = None

    def start(self) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_STREAMS, "stream"),
            options=server_options(Limits(max_streams=MAX_STREAMS)),
        )
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        service, method = LEARNER_METHOD
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        self.address = self._security.add_port(self._server, self.address)
        self._server.start()

    def stop(self) -> None:
        """End all streams and close the port; connections are broken."""
        if self._server is not None:
            self._server.stop(grace=0).wait(STOP_S)
            self._server = None
        self.forget_streams()

    def accept(self, timeout_s: float) -> Stream:
        stream = self.next_stream(timeout_s)
        if stream is None:
            raise BrokenRule(
                f"expected a call of {'/'.join(LEARNER_METHOD)} within {timeout_s:g} s, got none"
            )
        return stream

    def next_stream(self, timeout_s: float) -> Stream | None:
        with contextlib.suppress(queue.Empty):
            return self._streams.get(timeout=timeout_s)
        return None

    def forget_streams(self) -> int:
        """End streams that were not accepted; returns how many there were."""
        number = 0
        with contextlib.suppress(queue.Empty):
            while True:
                self._streams.get_nowait().end("UNAVAILABLE", "The learner is ending.")
                number += 1
        return number

    def _serve(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        stream = Stream(token_in(context.invocation_metadata()))

        def close() -> None:
            stream.closed.set()
            stream.incoming.put(None)
            stream.outgoing.put(None)

        def read() -> None:
            with contextlib.suppress(Exception):  # however the stream ends
                for data in requests:
                    stream.incoming.put(data)
            stream.incoming.put(None)

        if not context.add_callback(close):
            return
        threading.Thread(target=read, daemon=True).start()
        self._streams.put(stream)
        yield from iter(stream.outgoing.get, None)
        if stream.status is not None:
            code, text = stream.status
            context.abort(grpc.StatusCode[code], text)


class Client:
    """The client's process; its output is kept, to be shown if it breaks a rule."""

    def __init__(self, command: Sequence[str], address: str, token: str) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [part.replace("{address}", address) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TORCHBEAST_TOKEN": token},
            start_new_session=True,
        )

    def check_alive(self) -> None:
        if self.process.poll() is not None:
            raise BrokenRule(f"the client ended with exit code {self.process.returncode}")

    def terminate(self) -> int:
        """Send SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise BrokenRule(f"the client still runs {END_S:g} s after SIGTERM") from None

    def close(self) -> None:
        """Kill the client and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S)
        self._output.close()

    def tail(self) -> str:
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - 2000))
        return self._output.read().decode(errors="replace").strip()


class Report:
    """Prints a line for each check."""

    def __init__(self) -> None:
        self.num_failed = 0

    @contextlib.contextmanager
    def check(self, rule: str) -> Iterator[list[str]]:
        """A `BrokenRule` inside is reported, and ends the trial; the list is for notes."""
        notes: list[str] = []
        try:
            yield notes
        except BrokenRule as broken:
            self.num_failed += 1
            print(f"FAIL  {rule}: {broken}", flush=True)
            raise
        print(f"ok    {rule}" + "".join(f" ({note})" for note in notes), flush=True)


class Trials:
    """The trials, each of which starts the client once."""

    def __init__(self, command: Sequence[str], learner: Learner, num_steps: int) -> None:
        self._command = command
        self._learner = learner
        self._num_steps = num_steps
        self._token = secrets.token_hex(16)
        self._random = np.random.default_rng(1)
        self.report = Report()

    def run(self) -> bool:
        """Run all trials; returns whether the client kept the rules."""
        self._try(self._play)
        for code in PERMANENT_REFUSALS:
            self._try(functools.partial(self._refuse_for_good, code))
        self._try(self._stay_silent, is_silent=True)
        return self.report.num_failed == 0

    def _try(self, trial: Callable[[Client], None], is_silent: bool = False) -> None:
        with self._listening(is_silent):
            client = Client(self._command, self._learner.address, self._token)
            try:
                trial(client)
            except BrokenRule:
                print("      The rest of this trial is left out. The client's last words:")
                print("      | " + (client.tail() or "(none)").replace("\n", "\n      | "))
            finally:
                client.close()

    @contextlib.contextmanager
    def _listening(self, is_silent: bool) -> Iterator[None]:
        """A learner; or, if silent, a port that accepts connections and never sends anything."""
        if is_silent:
            where = Address.parse(self._learner.address)
            family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
            with socket.create_server((where.host, where.port), family=family) as self._silent:
                yield
            return
        self._learner.start()
        try:
            yield
        finally:
            self._learner.stop()

    # The trials.

    def _play(self, client: Client) -> None:
        check = self.report.check
        hello, stream = self._meet()
        with check("dials again when the learner ends the stream"):
            stream.end()
            stream = self._learner.accept(DIAL_AGAIN_S)
        with check("starts over, and truncates nothing for a learner without knows_truncation"):
            rules = self._start_over(stream, hello, knows_truncation=False)
            self._play_steps(stream, hello, rules, self._num_steps)
        with check("dials again when the connection breaks, and plays on"):
            self._learner.stop()
            time.sleep(QUIET_S)
            self._learner.start()
            stream = self._learner.accept(DIAL_AGAIN_S)
            self._play_steps(stream, hello, self._start_over(stream, hello), 10)
        stream = self._back_off(stream)
        with check("plays when it is let in again, and opens one stream at a time"):
            self._play_steps(stream, hello, self._start_over(stream, hello), 10)
            expect("the number of other streams", 0, self._learner.forget_streams())
            client.check_alive()
        with check(f"ends within {END_S:g} s of SIGTERM, with its stream") as notes:
            notes.append(f"exit code {client.terminate()}")
            if not stream.closed.wait(END_S):
                raise BrokenRule("the client has ended, its stream has not")

    def _meet(self) -> tuple[Hello, Stream]:
        """Check the client's first stream, message by message."""
        check = self.report.check
        with check(f"dials within {START_S:g} s"):
            stream = self._learner.accept(START_S)
        with check("introduces itself") as notes:
            hello = check_hello(stream.read("a Hello"), stream.token, self._token)
            notes.append(describe_hello(hello))
        with check("waits for the Greeting"):
            stream.expect_silence("the Greeting")
        rules = StepRules(hello)
        with check("the first Step is done everywhere, and 0 everywhere else"):
            stream.write(encode_greeting(Greeting("conformance")))
            rules.check(stream.read("the first Step"))
        with check("waits for Actions"):
            stream.expect_silence("Actions")
        with check("each Step has the right sizes, finite numbers, and right counts") as notes:
            self._play_steps(stream, hello, rules, self._num_steps)
            notes.append(f"{self._num_steps} Steps of {hello.num_envs} environments")
            notes.append(f"episodes: {rules.num_episodes}, truncated: {rules.num_truncated}")
        with check("exactly one Step follows on Actions"):
            stream.expect_silence("Actions")
        return hello, stream

    def _start_over(self, stream: Stream, hello: Hello, knows_truncation: bool = True) -> StepRules:
        """Check a later stream up to its first Step; the same rules hold."""
        if check_hello(stream.read("a Hello"), stream.token, self._token) != hello:
            raise BrokenRule("the Hello must say the same as before, got another")
        stream.expect_silence("the Greeting")
        stream.write(encode_greeting(Greeting("conformance", "", knows_truncation)))
        rules = StepRules(hello, is_new=False, knows_truncation=knows_truncation)
        rules.check(stream.read("the first Step"))
        return rules

    def _play_steps(self, stream: Stream, hello: Hello, rules: StepRules, number: int) -> None:
        for _ in range(number):
            stream.write(choose_actions(hello, self._random, rules.mask))
            rules.check(stream.read("a Step"))

    def _back_off(self, stream: Stream) -> Stream:
        """Refuse the client several times, and check its pauses; returns its next stream."""
        pauses_s = []
        with self.report.check("dials again after passing refusals, with growing pauses") as notes:
            for number, code in enumerate(TRY_AGAIN):
                if number > 0:  # the first ends a stream that played
                    check_hello(stream.read("a Hello"), stream.token, self._token)
                stream.end(code, "Not now.")
                since = time.monotonic()
                stream = self._learner.accept(DIAL_AGAIN_S)
                pauses_s.append(time.monotonic() - since)
                # A pause may be any part of its limit: only many of them show that the limit grows.
                if number >= 3 and sum(pauses_s) >= MIN_PAUSES_S:
                    break
            text = ", ".join(f"{pause_s:.2f}" for pause_s in pauses_s) + " s"
            if sum(pauses_s) < MIN_PAUSES_S or max(pauses_s) < 1.3 * min(pauses_s):
                raise BrokenRule(f"pauses must grow, from about 0.1 s to several s, got {text}")
            notes.append(f"pauses of {text}")
        return stream

    def _refuse_for_good(self, code: str, client: Client) -> None:
        with self.report.check(f"does not hammer when it is refused with {code}") as notes:
            stream: Stream | None = self._learner.accept(START_S)
            num_dials = 0
            while stream is not None:
                num_dials += 1
                if num_dials > MAX_DIALS_WHEN_REFUSED:
                    raise BrokenRule(
                        f"at most {MAX_DIALS_WHEN_REFUSED} calls without a pause of "
                        f"{REFUSED_S:g} s, got {num_dials}"
                    )
                stream.read("a Hello")
                stream.end(code, "There is something to correct.")
                stream = self._learner.next_stream(REFUSED_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                client.process.wait(1.0)
            code_text = client.process.poll()
            how = "still running" if code_text is None else f"ended with exit code {code_text}"
            notes.append(f"calls: {num_dials}, {how}")
        if client.process.poll() is None:
            with self.report.check(f"then ends within {END_S:g} s of SIGTERM"):
                client.terminate()

    def _stay_silent(self, client: Client) -> None:
        rule = f"ends within {END_S:g} s of SIGTERM while it waits for a learner that says nothing"
        with self.report.check(rule) as notes:
            self._silent.settimeout(START_S)
            try:
                connection, _ = self._silent.accept()
            except TimeoutError:
                raise BrokenRule(f"expected a connection within {START_S:g} s") from None
            with connection:
                time.sleep(QUIET_S)
                client.check_alive()
                notes.append(f"exit code {client.terminate()}")


def exit_tidily(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM: exit through the `finally` blocks, which end the client."""
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt them
    sys.exit(128 + number)


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listen", default="127.0.0.1:4242", help="host:port")
    parser.add_argument("--num_steps", type=int, default=300, help="in each long stream")
    parser.add_argument("--tls_cert", type=Path, help="listen with TLS")
    parser.add_argument("--tls_key", type=Path, help="the key of --tls_cert")
    parser.add_argument("command", nargs="+", help="the client's, after --")
    flags = parser.parse_args(args)
    try:
        if not Address.parse(flags.listen).host:
            raise ValueError(f"listen must be host:port here, got {flags.listen}.")
        security = Security(tls_cert=flags.tls_cert, tls_key=flags.tls_key, insecure=True)
        security.check_listening(flags.listen)
        trials = Trials(flags.command, Learner(flags.listen, security), flags.num_steps)
        ok = trials.run()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("All checks passed." if ok else f"Failed checks: {trials.report.num_failed}.")
    return 0 if ok else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_tidily)
    sys.exit(main())
