// K environments that step together, as env.proto wants to see them. Works for any environment like
//
//   Balance        an action is one number from 0 to numActions - 1
//   MaskedBalance  the same, with a mask of what is possible
//   Aim            an action is actionSize floats from low to high

class Slot {
  constructor(environment) {
    this.environment = environment;
    this.reward = 0;
    this.done = true;
    this.truncated = false;
    this.isAtLimit = false;
    this.episodeStep = 0;
    this.episodeReturn = 0;
  }

  step(action, knowsTruncation) {
    this.truncated = this.isAtLimit;
    if (this.isAtLimit) {
      this.startEpisode(); // the last Step had the true end; this one is the new beginning
      return;
    }
    if (this.done) {
      this.episodeStep = 0;
      this.episodeReturn = 0;
    }
    const { reward, terminated, truncated } = this.environment.step(action);
    this.reward = reward;
    this.episodeStep += 1;
    this.episodeReturn += reward;
    this.isAtLimit = truncated && knowsTruncation;
    this.done = terminated || (truncated && !knowsTruncation);
    if (this.done) {
      this.environment.reset();
    }
  }

  // The counts speak of the old episode until the next step.
  startEpisode() {
    this.environment.reset();
    this.isAtLimit = false;
    this.reward = 0;
    this.done = true;
  }
}

export class Group {
  constructor(Environment, numEnvs) {
    this.Environment = Environment;
    this.slots = Array.from({ length: numEnvs }, () => new Slot(new Environment()));
  }

  hello() {
    const { title, observationSize, numActions, hasMask } = this.Environment;
    const observation = { array: { dtype: "float32", shape: [observationSize] } };
    const action_mask = { array: { dtype: "bool", shape: [numActions] } };
    return {
      hello: {
        version: 2,
        name: title,
        num_envs: this.slots.length,
        observation: hasMask ? { dict: { items: { action_mask, observation } } } : observation,
        ...this.#describeAction(),
      },
    };
  }

  #describeAction() {
    const { numActions, actionSize, low, high } = this.Environment;
    if (!actionSize) {
      return { action: { array: { dtype: "int64", shape: [] } }, num_actions: numActions };
    }
    const shape = [actionSize];
    return { action: { array: { dtype: "float32", shape, low: [low], high: [high] } } };
  }

  // The first Step of a stream: nothing led to it. Episodes that were under way go on.
  firstStep() {
    for (const slot of this.slots) {
      if (slot.isAtLimit) {
        slot.startEpisode();
      }
    }
    const zeros = this.slots.map(() => 0);
    return {
      step: {
        observation: this.#observations(),
        reward: zeros,
        done: this.slots.map(() => true),
        episode_step: zeros,
        episode_return: zeros,
      },
    };
  }

  // Throws an Error if the actions are not K that the environment knows.
  step(actions, knowsTruncation) {
    const chosen = this.#read(actions);
    this.slots.forEach((slot, i) => slot.step(chosen[i], knowsTruncation));
    return {
      step: {
        observation: this.#observations(),
        reward: this.slots.map((slot) => slot.reward),
        done: this.slots.map((slot) => slot.done),
        truncated: this.slots.map((slot) => slot.truncated),
        episode_step: this.slots.map((slot) => slot.episodeStep),
        episode_return: this.slots.map((slot) => slot.episodeReturn),
      },
    };
  }

  // One array; with a mask two, in the order of their keys.
  #observations() {
    if (!this.Environment.hasMask) {
      return [this.#numbers()];
    }
    const masks = this.slots.flatMap((slot) => slot.environment.mask().map(Number));
    return [Buffer.from(masks), this.#numbers()]; // [K, numActions], a byte each
  }

  // [K, observationSize] as little-endian float32, whatever this machine likes.
  #numbers() {
    const { observationSize } = this.Environment;
    const bytes = Buffer.alloc(4 * observationSize * this.slots.length);
    let offset = 0;
    for (const slot of this.slots) {
      for (const number of slot.environment.observation()) {
        offset = bytes.writeFloatLE(number, offset);
      }
    }
    return bytes;
  }

  #read(actions) {
    const leaves = actions.action;
    const { actionSize } = this.Environment;
    const numBytes = actionSize ? 4 * actionSize : 8; // of one environment
    if (leaves.length !== 1 || leaves[0].length !== numBytes * this.slots.length) {
      throw new Error("Expected one action for each environment, got something else.");
    }
    const read = actionSize ? this.#readFloats : this.#readNumber;
    return this.slots.map((_, i) => read.call(this, leaves[0], numBytes * i));
  }

  #readNumber(bytes, offset) {
    const action = Number(bytes.readBigInt64LE(offset));
    if (action < 0 || action >= this.Environment.numActions) {
      throw new Error(`There is no action ${action}.`);
    }
    return action;
  }

  #readFloats(bytes, offset) {
    const { actionSize } = this.Environment;
    return Array.from({ length: actionSize }, (_, i) => bytes.readFloatLE(offset + 4 * i));
  }
}
