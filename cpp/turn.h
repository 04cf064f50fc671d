// Whose turn it is on a lane: one word in shared memory that environments and agent pass back and
// forth.
//
//   kFree ──first rows──► kAgent ──actions──► kEnvironment ──rows──► kAgent ...
//     ▲                      └───────┬───────────┘
//     └──open rollout padded── kGone ◄┘ the environments are gone        any ──► kClosed
//
// There is no lock: the side that has the turn owns the lane's memory, and passes the turn in one
// atomic step. A process that is killed keeps its turn until its supervisor calls abandon(), which
// sets kGone.
//
// The actor marks rows that it has shown to the agent as taken, and sleeps until the next rows
// come. The thread that has the agent's answer passes the turn without waking the actor.
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

  // Changes the state from `from` to `to` and wakes the side that gets the turn. Returns false, and
  // does nothing, if the state is not `from`.
  bool pass(State from, State to) const;

  // For the agent's side, which keeps the turn: marks the rows as taken, so that wait_for_rows()
  // waits for the next ones.
  void take_rows() const;

  // Sets kGone, whichever side has the turn: the environments are gone. A closed lane stays closed,
  // a free one free.
  void abandon() const;

  // Sets kClosed, whichever side has the turn.
  void close() const;

  // For both sides: waits for a state other than `state`. Returns the state, at the latest at the
  // deadline.
  State wait_while(State state, Clock::time_point deadline) const;

  // For the environments' side, after it has passed the turn: as wait_while(kAgent).
  State wait_for_actions(Clock::time_point deadline) const;

  // For the agent's side: returns kAgent when there are rows that were not taken, kGone or kClosed;
  // nothing at the deadline.
  std::optional<State> wait_for_rows(Clock::time_point deadline) const;

 private:
  template <typename IsOver>
  std::uint32_t wait(std::uint32_t side, Clock::time_point deadline, IsOver is_over) const;

  std::atomic<std::uint32_t>* word_;
  std::shared_ptr<const void> owner_;
};

// How a thread sleeps until another process changes a word: with the system's futex where there is
// one, else by polling at growing intervals. Sides are bits: wake() is for the threads that wait
// with one of its sides.
struct WordWaiter {
  void (*wait)(std::atomic<std::uint32_t>& word, std::uint32_t value, std::uint32_t side,
               std::chrono::nanoseconds time);
  void (*wake)(std::atomic<std::uint32_t>& word, std::uint32_t sides);
};

const WordWaiter& polling_waiter();
const WordWaiter& system_waiter();  // The futex on Linux, polling elsewhere.

// Lets tests use the waiter that this system does not use. Call it before any thread waits.
void use_waiter(const WordWaiter& waiter);

}  // namespace torchbeast
