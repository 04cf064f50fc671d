// Another environment, whose action is not one number but floats: shoot at a target in a square.
//
//   observation  float32[2]: where the target is, both from -1 to 1
//   action       float32[2]: where to shoot, both from -1 to 1; the agent's may lie beyond
//   reward       1 for a hit in the middle, less farther away
//   time limit   10 shots
const place = () => 2 * Math.random() - 1;
const clip = (x) => Math.min(Math.max(x, Aim.low), Aim.high);

export class Aim {
  static title = "JavaScript aim";
  static observationSize = 2;
  static actionSize = 2; // floats
  static low = -1;
  static high = 1;
  static maxShots = 10;

  constructor() {
    this.reset();
  }

  reset() {
    this.target = [place(), place()];
    this.numShots = 0;
  }

  step(action) {
    const distances = action.map((x, i) => Math.abs(clip(x) - this.target[i]));
    this.target = [place(), place()];
    this.numShots += 1;
    return {
      reward: Math.max(0, 1 - distances[0] - distances[1]),
      terminated: false,
      truncated: this.numShots === Aim.maxShots,
    };
  }

  observation() {
    return this.target;
  }
}
