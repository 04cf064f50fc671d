// The environment: keep a ball on a beam by tilting it. Replace this file with your own.
//
//   observation  float32[2]: where the ball is (the beam goes from -1 to 1), and how fast it is
//   action       0 tilt to the left, 1 hold level, 2 tilt to the right
//   reward       1 for each step with the ball on the beam; when it falls, 0, and the episode ends
//   time limit   60 steps
export class Balance {
  static title = "JavaScript balance";
  static observationSize = 2;
  static numActions = 3;
  static maxSteps = 60;

  constructor() {
    this.reset();
  }

  reset() {
    this.position = 0.5 * (2 * Math.random() - 1);
    this.speed = 0.05 * (2 * Math.random() - 1);
    this.numSteps = 0;
  }

  step(action) {
    this.speed += 0.01 * (action - 1) + 0.01 * (2 * Math.random() - 1);
    this.position += this.speed;
    this.numSteps += 1;
    const terminated = Math.abs(this.position) > 1; // the ball fell: nothing is to come
    const truncated = !terminated && this.numSteps === Balance.maxSteps; // it could have gone on
    return { reward: terminated ? 0 : 1, terminated, truncated };
  }

  observation() {
    return [this.position, this.speed];
  }
}
