// Another environment, with a mask of actions: the walk, in which nobody can walk past an end.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "walk.h"

class MaskedWalk : public Walk {
 public:
  static constexpr const char* kName = "C++ masked walk";
  static constexpr bool kHasMask = true;

  using Walk::Walk;

  // Which of the actions are possible.
  std::array<bool, kNumActions> mask() const {
    const Observation places = observation();
    return {places[0] > -1.0F, true, places[0] < 1.0F};
  }

  Result step(const std::int64_t* action) {
    if (!mask()[static_cast<std::size_t>(*action)]) {
      throw std::runtime_error("Action " + std::to_string(*action) + " is not possible here.");
    }
    return Walk::step(action);
  }
};
