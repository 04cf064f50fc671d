// Another environment, with a mask of actions: the ball, on a beam that cannot be tilted to the side
// to which the ball rolls fast.
import { Balance } from "./balance.js";

const FAST = 0.05;

export class MaskedBalance extends Balance {
  static title = "JavaScript masked balance";
  static hasMask = true;

  // Which of the actions are possible.
  mask() {
    return [this.speed > -FAST, true, this.speed < FAST];
  }

  step(action) {
    if (!this.mask()[action]) {
      throw new Error(`Action ${action} is not possible here.`);
    }
    return super.step(action);
  }
}
