// Another environment, whose action is not one number but floats: shoot at a target in a square.
//
//   observation  float32[2]: where the target is, both from -1 to 1
//   action       float32[2]: where to shoot, both from -1 to 1; the agent's may lie beyond
//   reward       1 for a hit in the middle, less farther away
//   time limit   10 shots
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

class Aim {
 public:
  using Number = float;  // What actions are made of.
  static constexpr const char* kName = "C++ aim";
  static constexpr std::uint32_t kObservationSize = 2;
  static constexpr std::uint32_t kActionSize = 2;
  static constexpr float kLow = -1.0F;
  static constexpr float kHigh = 1.0F;
  static constexpr bool kHasMask = false;
  static constexpr std::uint32_t kMaxShots = 10;

  using Observation = std::array<float, kObservationSize>;

  struct Result {
    float reward;
    bool terminated;
    bool truncated;
  };

  explicit Aim(std::uint32_t seed) : random_(seed) { reset(); }

  void reset() {
    num_shots_ = 0;
    place_target();
  }

  Result step(const float* action) {
    float distance = 0;
    for (std::size_t i = 0; i < target_.size(); ++i) {
      distance += std::abs(std::clamp(action[i], kLow, kHigh) - target_[i]);
    }
    place_target();
    ++num_shots_;
    return {std::max(0.0F, 1.0F - distance), false, num_shots_ == kMaxShots};
  }

  Observation observation() const { return target_; }

 private:
  void place_target() {
    for (float& place : target_) {
      place = std::uniform_real_distribution<float>(kLow, kHigh)(random_);
    }
  }

  std::mt19937 random_;
  Observation target_{};
  std::uint32_t num_shots_ = 0;
};
