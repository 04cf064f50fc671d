// Whose turn it is on a lane: one word in shared memory that environments and agent pass back and
// forth.
//
//   kFree ──first rows──► kAgent ──actions──► kEnvironment ──rows──► kAgent ...
//     ▲                      └───────┬───────────┘
//     └──open rollout padded── kGone ◄┘ the environments are gone        any ──► kClosed
//
// There is no lock: whoever has the turn owns the lane's memory, and passing it on is one atomic
// step. A process that is killed keeps its turn, and its supervisor turns that into kGone.
//
// The actor takes rows once: then it sleeps until the next ones are there, and who has the agent's
// answer passes the turn without waking it.
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

  // Passes the turn on and wakes the side that gets it. False, and nothing done, if it is not
  // `from`.
  bool pass(State from, State to) const;

  // The agent's side has seen the rows: wait_for_rows() waits for others. The turn stays its own.
  void take_rows() const;

  // The environments are gone, whoever had the turn; a closed lane stays closed.
  void abandon() const;

  // The end, whoever had the turn.
  void close() const;

  // For both sides: waits for another state and returns it, or the same when the time is over.
  State wait_while(State state, Clock::time_point deadline) const;

  // The environments' side, after it has passed its rows: as wait_while(kAgent).
  State wait_for_actions(Clock::time_point deadline) const;

  // The agent's side: kAgent when there are rows that were not taken, kGone or kClosed; nothing
  // when the time is over.
  std::optional<State> wait_for_rows(Clock::time_point deadline) const;

 private:
  template <typename IsOver>
  std::uint32_t wait(std::uint32_t side, Clock::time_point deadline, IsOver is_over) const;

  std::atomic<std::uint32_t>* word_;
  std::shared_ptr<const void> owner_;
};

// How a thread sleeps until a word changes that another process may write. The system's futex where
// there is one, else looking again and again, less and less often. Sides are bits: a wake is for
// those who wait on one of its sides.
struct WordWaiter {
  void (*wait)(std::atomic<std::uint32_t>& word, std::uint32_t value, std::uint32_t side,
               std::chrono::nanoseconds time);
  void (*wake)(std::atomic<std::uint32_t>& word, std::uint32_t sides);
};

const WordWaiter& polling_waiter();
const WordWaiter& system_waiter();  // The futex on Linux, polling elsewhere.

// For tests of the one that this system would not use; call it before any thread waits.
void use_waiter(const WordWaiter& waiter);

}  // namespace torchbeast
