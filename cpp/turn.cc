#include "turn.h"

#include <algorithm>
#include <thread>
#include <utility>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace torchbeast {
namespace {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "shared between processes");
static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t), "shared with Python");

using std::chrono::nanoseconds;

// The word while the agent has the turn and the actor has taken the rows. It is not a state: only
// wait_for_rows() distinguishes it from kAgent.
constexpr std::uint32_t kTaken = Turn::kClosed + 1;

constexpr std::uint32_t kAgentSide = 1, kEnvironmentSide = 2, kBothSides = 3;

// Another process may write any number: one that is not a state counts as kClosed.
Turn::State state_of(std::uint32_t word) {
  if (word == kTaken) return Turn::kAgent;
  return word > Turn::kClosed ? Turn::kClosed : static_cast<Turn::State>(word);
}

void poll_word(std::atomic<std::uint32_t>& word, std::uint32_t value, std::uint32_t,
               nanoseconds time) {
  const Clock::time_point deadline = Clock::now() + time;
  nanoseconds pause{5'000};
  while (word.load(std::memory_order_acquire) == value && Clock::now() < deadline) {
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, nanoseconds{500'000});
  }
}

void wake_nobody(std::atomic<std::uint32_t>&, std::uint32_t) {}

const WordWaiter kPolling{poll_word, wake_nobody};

#ifdef __linux__
// Not FUTEX_PRIVATE: the word is shared between processes.
void futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* deadline, std::uint32_t sides) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, deadline, nullptr,
          sides);
}

// Returns at once if the word is no longer `value`.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value, std::uint32_t side,
                nanoseconds time) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const nanoseconds end = std::chrono::seconds(now.tv_sec) + nanoseconds(now.tv_nsec) + time;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(end);
  const timespec deadline{static_cast<time_t>(seconds.count()),
                          static_cast<long>((end - seconds).count())};
  futex(word, FUTEX_WAIT_BITSET, value, &deadline, side);
}

void futex_wake(std::atomic<std::uint32_t>& word, std::uint32_t sides) {
  futex(word, FUTEX_WAKE_BITSET, 1 << 30, nullptr, sides);
}

const WordWaiter kFutex{futex_wait, futex_wake};
const WordWaiter* waiter = &kFutex;
#else
const WordWaiter* waiter = &kPolling;
#endif

}  // namespace

const WordWaiter& polling_waiter() { return kPolling; }

const WordWaiter& system_waiter() {
#ifdef __linux__
  return kFutex;
#else
  return kPolling;
#endif
}

void use_waiter(const WordWaiter& chosen) { waiter = &chosen; }

Turn::Turn(std::uint32_t* word, std::shared_ptr<const void> owner)
    : word_(reinterpret_cast<std::atomic<std::uint32_t>*>(word)), owner_(std::move(owner)) {}

Turn::State Turn::state() const { return state_of(word_->load(std::memory_order_acquire)); }

bool Turn::pass(State from, State to) const {
  std::uint32_t expected = word_->load(std::memory_order_acquire);
  if (state_of(expected) != from) return false;
  // It fails if the other side has closed or abandoned the lane meanwhile.
  if (!word_->compare_exchange_strong(expected, to, std::memory_order_acq_rel)) return false;
  waiter->wake(*word_, to == kAgent ? kAgentSide : kEnvironmentSide);
  return true;
}

void Turn::take_rows() const {
  std::uint32_t expected = kAgent;
  word_->compare_exchange_strong(expected, kTaken, std::memory_order_acq_rel);
}

void Turn::abandon() const {
  std::uint32_t state = word_->load(std::memory_order_acquire);
  while (state != kClosed && state != kFree && state != kGone) {
    if (word_->compare_exchange_weak(state, kGone, std::memory_order_acq_rel)) break;
  }
  waiter->wake(*word_, kBothSides);
}

void Turn::close() const {
  word_->store(kClosed, std::memory_order_release);
  waiter->wake(*word_, kBothSides);
}

Turn::State Turn::wait_while(State state, Clock::time_point deadline) const {
  return state_of(wait(kBothSides, deadline, [=](auto word) { return state_of(word) != state; }));
}

Turn::State Turn::wait_for_actions(Clock::time_point deadline) const {
  return state_of(
      wait(kEnvironmentSide, deadline, [](auto word) { return state_of(word) != kAgent; }));
}

std::optional<Turn::State> Turn::wait_for_rows(Clock::time_point deadline) const {
  const auto is_over = [](std::uint32_t word) {
    return word != kFree && word != kTaken && word != kEnvironment;
  };
  const std::uint32_t word = wait(kAgentSide, deadline, is_over);
  if (!is_over(word)) return {};
  return state_of(word);
}

// Waits until is_over(word); returns the word, at the latest at the deadline.
template <typename IsOver>
std::uint32_t Turn::wait(std::uint32_t side, Clock::time_point deadline, IsOver is_over) const {
  for (;;) {
    const std::uint32_t word = word_->load(std::memory_order_acquire);
    if (is_over(word)) return word;
    const auto left = std::chrono::duration_cast<nanoseconds>(deadline - Clock::now());
    if (left.count() <= 0) return word;
    waiter->wait(*word_, word, side, left);
  }
}

}  // namespace torchbeast
