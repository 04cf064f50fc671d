// The environment: a walk along a line to a goal. Replace this file with your own.
//
//   observation  float32[2]: where the walker is, and where the goal is, both from -1 to 1
//   action       0 a step to the left, 1 stay, 2 a step to the right
//   reward       1 at the goal, which ends the episode; else -0.01
//   time limit   60 steps
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>

class Walk {
 public:
  using Number = std::int64_t;  // What actions are made of.
  static constexpr const char* kName = "C++ walk";
  static constexpr std::uint32_t kObservationSize = 2;
  static constexpr std::uint32_t kActionSize = 1;
  static constexpr std::uint32_t kNumActions = 3;
  static constexpr bool kHasMask = false;
  static constexpr std::uint32_t kMaxSteps = 60;

  using Observation = std::array<float, kObservationSize>;

  struct Result {
    float reward;
    bool terminated;  // The goal was reached: nothing is to come.
    bool truncated;   // The time limit was hit: it could have gone on.
  };

  explicit Walk(std::uint32_t seed) : random_(seed) { reset(); }

  void reset() {
    std::uniform_int_distribution<int> place(0, kLength - 1);
    goal_ = place(random_);
    do {
      position_ = place(random_);
    } while (position_ == goal_);
    num_steps_ = 0;
  }

  Result step(const std::int64_t* action) {
    position_ = std::clamp(position_ + static_cast<int>(*action) - 1, 0, kLength - 1);
    ++num_steps_;
    const bool arrived = position_ == goal_;
    return {arrived ? 1.0F : -0.01F, arrived, !arrived && num_steps_ == kMaxSteps};
  }

  Observation observation() const { return {scale(position_), scale(goal_)}; }

 private:
  static constexpr int kLength = 11;

  static float scale(int place) { return 2.0F * place / (kLength - 1) - 1.0F; }

  std::mt19937 random_;
  int position_ = 0;
  int goal_ = 0;
  std::uint32_t num_steps_ = 0;
};
