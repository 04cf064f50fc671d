// Waiting on a condition variable with a deadline, and with a callback at regular intervals.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>

#include "process.h"

namespace torchbeast {

#ifdef __SANITIZE_THREAD__
// g++ 12's thread sanitizer does not know the call behind a wait on the steady clock.
using Clock = std::chrono::system_clock;
#else
using Clock = std::chrono::steady_clock;
#endif

// Called about ten times a second in threads that must also react to something else while they wait
// (Python's main thread: to signals). An exception ends the wait. If it is empty, there are no
// calls.
using Poll = std::function<void()>;
constexpr std::chrono::milliseconds kPollInterval{100};

// A condition variable that a forked child may destroy. Destroying a std::condition_variable there
// would wait for threads that exist only in the parent.
class Condition {
 public:
  Condition() : condition_(new std::condition_variable) {}
  ~Condition() {
    if (process_.is_here()) delete condition_;
  }
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  void notify_one() { condition_->notify_one(); }
  void notify_all() { condition_->notify_all(); }
  template <typename Ready>
  void wait(std::unique_lock<std::mutex>& lock, Ready ready) {
    condition_->wait(lock, ready);
  }
  template <typename Ready>
  bool wait_until(std::unique_lock<std::mutex>& lock, Clock::time_point deadline, Ready ready) {
    return condition_->wait_until(lock, deadline, ready);
  }

 private:
  std::condition_variable* const condition_;
  const Process process_;
};

// Waits until ready() or the deadline; returns ready(). The lock is not held while poll() runs.
template <typename Ready>
bool wait(Condition& condition, std::unique_lock<std::mutex>& lock,
          const std::optional<Clock::time_point>& deadline, const Poll& poll, Ready ready) {
  if (!poll) {
    if (deadline) return condition.wait_until(lock, *deadline, ready);
    condition.wait(lock, ready);
    return true;
  }
  for (;;) {
    const Clock::time_point next_poll = Clock::now() + kPollInterval;
    const bool last = deadline && *deadline <= next_poll;
    if (condition.wait_until(lock, last ? *deadline : next_poll, ready)) return true;
    if (last) return false;
    lock.unlock();
    try {
      poll();
    } catch (...) {
      condition.notify_one();  // Passes on a wake-up that this thread may have got.
      throw;
    }
    lock.lock();
  }
}

}  // namespace torchbeast
