// Environments that dial a learner: flags, signals, exit codes.
//
//   node client.js --connect 127.0.0.1:4242 --num_envs 8 --task balance
//
// Exit codes: 0 after SIGTERM, 130 after Ctrl-C, 1 if something broke, 2 for a mistake or a refusal.
import { accessSync, constants } from "node:fs";
import { isIPv4 } from "node:net";
import { parseArgs } from "node:util";

import { Aim } from "./aim.js";
import { Balance } from "./balance.js";
import { Group } from "./group.js";
import { MaskedBalance } from "./masked_balance.js";
import { Client, Refused } from "./stream.js";

const TASKS = { balance: Balance, masked_balance: MaskedBalance, aim: Aim };

class UsageError extends Error {}

// Whether only users of this machine can be at the other end.
function isLocal(address) {
  const host = address.slice(0, address.lastIndexOf(":"));
  const isLoopback = isIPv4(host) && host.startsWith("127.");
  return address.startsWith("unix:") || ["localhost", "[::1]"].includes(host) || isLoopback;
}

function checkTls(values) {
  if (!values.tls_cert !== !values.tls_key) {
    throw new UsageError("--tls_cert and --tls_key belong together, got only one; give both.");
  }
  if (values.tls_cert && !values.tls_ca) {
    throw new UsageError("--tls_cert needs --tls_ca, got none; give both.");
  }
  for (const flag of ["tls_ca", "tls_cert", "tls_key"]) {
    try {
      if (values[flag]) {
        accessSync(values[flag], constants.R_OK);
      }
    } catch {
      throw new UsageError(`--${flag} must be a file that can be read, got ${values[flag]}.`);
    }
  }
}

function parse() {
  const text = (value) => ({ type: "string", default: value });
  let values;
  try {
    ({ values } = parseArgs({
      options: {
        connect: text("127.0.0.1:4242"),
        num_envs: text("8"),
        task: text("balance"),
        tls_ca: text(""),
        tls_cert: text(""),
        tls_key: text(""),
        tls_server_name: text(""),
        insecure: { type: "boolean", default: false },
      },
    }));
  } catch (error) {
    throw new UsageError(error.message);
  }
  const numEnvs = Number(values.num_envs);
  if (!Number.isInteger(numEnvs) || numEnvs < 1 || numEnvs > 65536) {
    throw new UsageError(`--num_envs must be from 1 to 65536, got ${values.num_envs}.`);
  }
  if (!Object.hasOwn(TASKS, values.task)) {
    const known = "balance, masked_balance or aim";
    throw new UsageError(`--task must be ${known}, got ${values.task}.`);
  }
  checkTls(values);
  const token = process.env.TORCHBEAST_TOKEN ?? "";
  const isSafe = values.tls_ca && token;
  if (!isLocal(values.connect) && !isSafe && !values.insecure) {
    throw new UsageError(
      "Dialing another machine needs --tls_ca and a token in TORCHBEAST_TOKEN, or --insecure for " +
        "a network that you trust.",
    );
  }
  return {
    address: values.connect,
    tlsCa: values.tls_ca,
    tlsCert: values.tls_cert,
    tlsKey: values.tls_key,
    tlsServerName: values.tls_server_name,
    numEnvs,
    task: values.task,
    token,
  };
}

async function main() {
  const options = parse();
  const group = new Group(TASKS[options.task], options.numEnvs);
  const client = new Client(options);
  let exitCode = 0;
  const stop = (signal) => {
    exitCode = signal === "SIGINT" ? 130 : 0;
    client.stop();
  };
  process.on("SIGINT", stop).on("SIGTERM", stop);
  await client.run({
    hello: group.hello(),
    firstStep: () => group.firstStep(),
    step: (actions, knowsTruncation) => group.step(actions, knowsTruncation),
  });
  console.error(`[balance] Played ${client.numSteps} steps.`);
  return exitCode;
}

// A connection that is still being made would keep the process alive: leave without it.
try {
  process.exit(await main());
} catch (error) {
  const isExpected = error instanceof Refused || error instanceof UsageError;
  console.error(`error: ${isExpected ? error.message : (error.stack ?? error)}`);
  process.exit(isExpected ? 2 : 1);
}
