// K environments that step together, as env.proto wants to see them. Works for any environment like
//
//   Walk        an action is one number from 0 to kNumActions - 1
//   MaskedWalk  the same, with a mask of what is possible
//   Aim         an action is kActionSize floats from kLow to kHigh
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "env.pb.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Arrays travel as little-endian bytes; swap them on this machine."
#endif

namespace proto = torchbeast::v1;

template <typename Environment>
class Group {
 public:
  Group(std::uint32_t num_envs, std::uint32_t seed) {
    slots_.reserve(num_envs);
    for (std::uint32_t i = 0; i < num_envs; ++i) {
      slots_.emplace_back(seed + i);
    }
  }

  proto::EnvironmentMessage hello() const {
    proto::EnvironmentMessage message;
    proto::Hello& hello = *message.mutable_hello();
    hello.set_version(2);
    hello.set_name(Environment::kName);
    hello.set_num_envs(static_cast<std::uint32_t>(slots_.size()));
    describe_observation(*hello.mutable_observation());
    proto::ArraySpec& action = *hello.mutable_action()->mutable_array();
    if constexpr (kHasFloats) {
      action.set_dtype("float32");
      action.add_shape(Environment::kActionSize);
      action.add_low(Environment::kLow);
      action.add_high(Environment::kHigh);
    } else {
      action.set_dtype("int64");
      hello.set_num_actions(Environment::kNumActions);
    }
    return message;
  }

  // The first Step of a stream: nothing led to it. Episodes that were under way go on.
  proto::EnvironmentMessage first_step() {
    for (Slot& slot : slots_) {
      if (slot.is_at_limit) {
        slot.start_episode();
      }
    }
    return message(/*is_first=*/true);
  }

  // Throws std::runtime_error if the actions are not K that the environment knows.
  proto::EnvironmentMessage step(const proto::Actions& actions, bool knows_truncation) {
    const std::vector<Number> chosen = read(actions);
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      slots_[i].step(&chosen[i * Environment::kActionSize], knows_truncation);
    }
    return message(/*is_first=*/false);
  }

 private:
  using Number = typename Environment::Number;
  static constexpr bool kHasFloats = std::is_same_v<Number, float>;

  struct Slot {
    explicit Slot(std::uint32_t seed) : environment(seed) {}

    void step(const Number* action, bool knows_truncation) {
      truncated = is_at_limit;
      if (is_at_limit) {  // The last Step had the true end; this one is the new beginning.
        start_episode();
        return;
      }
      if (done) {
        episode_step = 0;
        episode_return = 0;
      }
      const auto result = environment.step(action);
      reward = result.reward;
      ++episode_step;
      episode_return += reward;
      is_at_limit = result.truncated && knows_truncation;
      done = result.terminated || (result.truncated && !knows_truncation);
      if (done) {
        environment.reset();
      }
    }

    // The counts speak of the old episode until the next step.
    void start_episode() {
      environment.reset();
      is_at_limit = false;
      reward = 0;
      done = true;
    }

    Environment environment;
    float reward = 0;
    bool done = true;
    bool truncated = false;
    bool is_at_limit = false;
    std::uint32_t episode_step = 0;
    float episode_return = 0;
  };

  // An array, or with a mask a dict of two: their bytes travel in the order of the keys.
  static void describe_observation(proto::NestSpec& nest) {
    proto::NestSpec* place = &nest;
    if constexpr (Environment::kHasMask) {
      auto& items = *nest.mutable_dict()->mutable_items();
      proto::ArraySpec& mask = *items["action_mask"].mutable_array();
      mask.set_dtype("bool");
      mask.add_shape(Environment::kNumActions);
      place = &items["observation"];
    }
    place->mutable_array()->set_dtype("float32");
    place->mutable_array()->add_shape(Environment::kObservationSize);
  }

  proto::EnvironmentMessage message(bool is_first) const {
    proto::EnvironmentMessage message;
    proto::Step& step = *message.mutable_step();
    if constexpr (Environment::kHasMask) {
      std::string& masks = *step.add_observation();  // [K, kNumActions], a byte each
      for (const Slot& slot : slots_) {
        for (const bool is_possible : slot.environment.mask()) {
          masks.push_back(is_possible ? 1 : 0);
        }
      }
    }
    std::string& observations = *step.add_observation();  // [K, kObservationSize]
    for (const Slot& slot : slots_) {
      const auto observation = slot.environment.observation();
      observations.append(reinterpret_cast<const char*>(observation.data()),
                          observation.size() * sizeof(float));
      step.add_reward(is_first ? 0 : slot.reward);
      step.add_done(is_first || slot.done);
      step.add_truncated(!is_first && slot.truncated);
      step.add_episode_step(is_first ? 0 : slot.episode_step);
      step.add_episode_return(is_first ? 0 : slot.episode_return);
    }
    return message;
  }

  // [K, kActionSize]
  std::vector<Number> read(const proto::Actions& actions) const {
    std::vector<Number> chosen(slots_.size() * Environment::kActionSize);
    const std::size_t num_bytes = chosen.size() * sizeof(Number);
    if (actions.action_size() != 1 || actions.action(0).size() != num_bytes) {
      throw std::runtime_error("Expected one action for each environment, got something else.");
    }
    std::memcpy(chosen.data(), actions.action(0).data(), num_bytes);
    if constexpr (!kHasFloats) {
      for (const Number action : chosen) {
        if (action < 0 || action >= Number{Environment::kNumActions}) {
          throw std::runtime_error("There is no action " + std::to_string(action) + ".");
        }
      }
    }
    return chosen;
  }

  std::vector<Slot> slots_;
};
