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

void poll_word(std::atomic<std::uint32_t>& word, std::uint32_t value, nanoseconds time) {
  const Clock::time_point deadline = Clock::now() + time;
  nanoseconds pause{5'000};
  while (word.load(std::memory_order_acquire) == value && Clock::now() < deadline) {
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, nanoseconds{500'000});
  }
}

void wake_nobody(std::atomic<std::uint32_t>&) {}

const WordWaiter kPolling{poll_word, wake_nobody};

#ifdef __linux__
// Not FUTEX_PRIVATE: the word is shared between processes.
long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout,
                 nullptr, 0);
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value, nanoseconds time) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
  const timespec timeout{static_cast<time_t>(seconds.count()),
                         static_cast<long>((time - seconds).count())};
  futex(word, FUTEX_WAIT, value, &timeout);  // Returns at once if the word is no longer `value`.
}

void futex_wake(std::atomic<std::uint32_t>& word) { futex(word, FUTEX_WAKE, 1 << 30, nullptr); }

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

// Another process may write anything: what is no state is the end.
Turn::State Turn::state() const {
  const std::uint32_t value = word_->load(std::memory_order_acquire);
  return value > kClosed ? kClosed : static_cast<State>(value);
}

bool Turn::pass(State from, State to) const {
  std::uint32_t expected = from;
  if (!word_->compare_exchange_strong(expected, to, std::memory_order_acq_rel)) return false;
  waiter->wake(*word_);
  return true;
}

void Turn::abandon() const {
  std::uint32_t state = word_->load(std::memory_order_acquire);
  while (state != kClosed && state != kFree && state != kGone) {
    if (word_->compare_exchange_weak(state, kGone, std::memory_order_acq_rel)) break;
  }
  waiter->wake(*word_);
}

void Turn::close() const {
  word_->store(kClosed, std::memory_order_release);
  waiter->wake(*word_);
}

Turn::State Turn::wait_while(State one, State other, Clock::time_point deadline) const {
  for (;;) {
    const State now = state();
    if (now != one && now != other) return now;
    const auto left = std::chrono::duration_cast<nanoseconds>(deadline - Clock::now());
    if (left.count() <= 0) return now;
    waiter->wait(*word_, now, left);
  }
}

}  // namespace torchbeast
