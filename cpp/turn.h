// Whose turn it is on a lane: one word in shared memory that environments and agent pass back and
// forth.
//
//   kFree ──first rows──► kAgent ──actions──► kEnvironment ──rows──► kAgent ...
//     ▲                      └───────┬───────────┘
//     └──open rollout padded── kGone ◄┘ the environments are gone        any ──► kClosed
//
// There is no lock: whoever has the turn owns the lane's memory, and passing it on is one atomic
// step. A process that is killed keeps its turn, and its supervisor turns that into kGone.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "waiting.h"

namespace torchbeast {

class Turn {
 public:
  enum State : std::uint32_t { kFree = 0, kAgent, kEnvironment, kGone, kClosed };

  // The word lies in memory that several processes map; owner keeps it mapped here.
  Turn(std::uint32_t* word, std::shared_ptr<const void> owner);

  State state() const;

  // Passes the turn on and wakes who waits for it. False, and nothing done, if it is not `from`.
  bool pass(State from, State to) const;

  // The environments are gone, whoever had the turn; a closed lane stays closed.
  void abandon() const;

  // The end, whoever had the turn.
  void close() const;

  // Waits while the state is one of these two; returns the first other state, or one of the two
  // when the time is over.
  State wait_while(State one, State other, Clock::time_point deadline) const;
  State wait_while(State one, Clock::time_point deadline) const {
    return wait_while(one, one, deadline);
  }

 private:
  std::atomic<std::uint32_t>* word_;
  std::shared_ptr<const void> owner_;
};

// How a thread sleeps until a word changes that another process may write. The system's futex where
// there is one, else looking again and again, less and less often.
struct WordWaiter {
  void (*wait)(std::atomic<std::uint32_t>& word, std::uint32_t value,
               std::chrono::nanoseconds time);
  void (*wake)(std::atomic<std::uint32_t>& word);
};

const WordWaiter& polling_waiter();
const WordWaiter& system_waiter();  // The futex on Linux, polling elsewhere.

// For tests of the one that this system would not use; call it before any thread waits.
void use_waiter(const WordWaiter& waiter);

}  // namespace torchbeast
