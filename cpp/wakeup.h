// Wakes an event loop that waits for many lanes at once: it watches a descriptor, which is written
// to when a lane's turn has been passed to the environments.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <stdexcept>

namespace torchbeast {

class Wakeup {
 public:
  Wakeup() = default;  // Wakes nobody.

  // Holds a copy of the descriptor, an eventfd or the end of a pipe that does not block.
  explicit Wakeup(int fd) : fd_(new int(::fcntl(fd, F_DUPFD_CLOEXEC, 0)), close_fd) {
    if (*fd_ < 0) throw std::runtime_error("The wakeup descriptor cannot be copied");
  }

  void notify() const {
    if (!fd_) return;
    const std::uint64_t one = 1;
    // If the descriptor is full, earlier wake-ups have not been read yet: nothing is lost.
    [[maybe_unused]] const auto written = ::write(*fd_, &one, sizeof(one));
  }

 private:
  static void close_fd(const int* fd) {
    if (*fd >= 0) ::close(*fd);
    delete fd;
  }

  std::shared_ptr<const int> fd_;
};

}  // namespace torchbeast
