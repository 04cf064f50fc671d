// A stream to a learner that listens, dialled again whenever it breaks. Knows nothing of what is
// played: that is the player's (hello, firstStep, step).
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTO = fileURLToPath(new URL("../../libtorchbeast/rpc/env.proto", import.meta.url));
const FIRST_PAUSE_MS = 100;
const MAX_PAUSE_MS = 10_000;
const HANDSHAKE_MS = 150_000; // a learner may be building its model
const ACTIONS_MS = 600_000; // and may be held up later, too
const FAILURE_MS = 2_000;
const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;
const KEEPALIVE_MS = 10_000;
const MAX_FAILURE_TEXT = 10_000;

// After these there is something to correct before it makes sense to dial again.
const PERMANENT = new Set([
  grpc.status.INVALID_ARGUMENT,
  grpc.status.FAILED_PRECONDITION,
  grpc.status.UNAUTHENTICATED,
  grpc.status.UNIMPLEMENTED,
]);

const definition = protoLoader.loadSync(PROTO, { keepCase: true, defaults: true, oneofs: true });
const { Learner } = grpc.loadPackageDefinition(definition).torchbeast.v1;

/** The learner does not want these environments: something is to be corrected first. */
export class Refused extends Error {}

class LearnerGone extends Error {}

function makeCredentials({ tlsCa, tlsCert, tlsKey }) {
  if (!tlsCa) {
    return grpc.credentials.createInsecure();
  }
  const read = (path) => (path ? readFileSync(path) : null);
  return grpc.credentials.createSsl(read(tlsCa), read(tlsKey), read(tlsCert));
}

// The learner looks at the token before it reads any message.
function makeMetadata({ token }) {
  const metadata = new grpc.Metadata();
  if (token) {
    metadata.set("authorization", `Bearer ${token}`);
  }
  return metadata;
}

/** One stream; answers come one at a time. */
class Connection {
  constructor(options) {
    const { address, tlsCa, tlsServerName } = options;
    this.client = new Learner(address, makeCredentials(options), {
      "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
      "grpc.max_send_message_length": -1,
      "grpc.keepalive_time_ms": KEEPALIVE_MS, // find out when the other end is gone
      "grpc.keepalive_timeout_ms": KEEPALIVE_MS,
      "grpc.enable_retries": 0,
      // The token is for the learner alone, not for a proxy that the environment names.
      "grpc.enable_http_proxy": tlsCa ? 1 : 0,
      "grpc.use_local_subchannel_pool": 1, // a shared one has pauses of its own between its calls
      ...(tlsServerName && { "grpc.ssl_target_name_override": tlsServerName }),
    });
    this.waiting = null; // whoever waits for an answer
    this.ended = null; // why there will be no more
    this.call = this.client.Play(makeMetadata(options));
    this.call.on("data", (message) => this.#settle((waiting) => waiting.resolve(message)));
    this.call.on("end", () => this.#end(new LearnerGone("The learner ended the stream.")));
    this.call.on("error", ({ code, details }) => {
      const text = details || grpc.status[code];
      this.ended = null; // the status says more than a mere end
      this.#end(PERMANENT.has(code) ? new Refused(text) : new LearnerGone(text));
    });
  }

  /** Send a message and wait for the answer. */
  async exchange(message, limitMs) {
    if (this.ended) {
      throw this.ended;
    }
    const answer = new Promise((resolve, reject) => (this.waiting = { resolve, reject }));
    const timer = setTimeout(() => this.close("The learner is silent for too long."), limitMs);
    try {
      this.call.write(message);
      return await answer;
    } finally {
      clearTimeout(timer);
    }
  }

  close(why = "The stream is closed.") {
    this.#end(new LearnerGone(why));
    this.call.cancel();
    this.client.close();
  }

  #end(why) {
    this.ended ??= why;
    this.#settle((waiting) => waiting.reject(this.ended));
  }

  #settle(action) {
    const waiting = this.waiting;
    this.waiting = null;
    if (waiting) {
      action(waiting);
    }
  }
}

/** Plays until `stop()`. */
export class Client {
  constructor(options) {
    this.options = options;
    this.stopping = new AbortController();
    this.connection = null;
    this.pauseMs = FIRST_PAUSE_MS;
    this.logged = "";
    this.numSteps = 0;
  }

  /** Throws Refused, and what the player throws. */
  async run(player) {
    while (!this.stopping.signal.aborted) {
      this.connection = new Connection(this.options);
      try {
        await this.#play(player);
      } catch (error) {
        if (this.stopping.signal.aborted) {
          return;
        }
        if (!(error instanceof LearnerGone)) {
          throw error;
        }
        this.#log(`No learner at ${this.options.address}: ${error.message} Calling again.`);
      } finally {
        this.connection.close();
      }
      await this.#pause();
    }
  }

  stop() {
    this.stopping.abort();
    this.connection?.close();
  }

  // One stream, from its start to its end, which is an error.
  async #play(player) {
    const { greeting } = await this.connection.exchange(player.hello, HANDSHAKE_MS);
    if (greeting?.version !== 2) {
      throw new Error("Expected a Greeting of version 2, got something else.");
    }
    this.#log(`Playing with the learner at ${this.options.address}.`);
    let message = player.firstStep();
    for (;;) {
      const { actions } = await this.connection.exchange(message, ACTIONS_MS);
      this.pauseMs = FIRST_PAUSE_MS; // it works: forgive the past
      try {
        message = player.step(actions, greeting.knows_truncation);
        this.numSteps += 1;
      } catch (error) {
        await this.#tellFailure(error);
        throw error;
      }
    }
  }

  // The learner ends the stream after this; wait a moment for that.
  async #tellFailure(error) {
    const text = String(error.stack ?? error).slice(0, MAX_FAILURE_TEXT);
    await this.connection.exchange({ failure: { text } }, FAILURE_MS).catch(() => {});
  }

  // Each pause is longer than the last, and a little different, so that many do not come at once.
  async #pause() {
    const ms = this.pauseMs * (0.75 + 0.5 * Math.random());
    this.pauseMs = Math.min(2 * this.pauseMs, MAX_PAUSE_MS);
    await sleep(ms, undefined, { signal: this.stopping.signal }).catch(() => {});
  }

  #log(text) {
    if (text !== this.logged) {
      this.logged = text; // once, however often it is tried
      console.error(`[balance] ${text}`);
    }
  }
}
