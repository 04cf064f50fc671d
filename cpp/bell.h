// A bell for whoever waits for many lanes at once: a descriptor that its event loop watches, rung
// when a lane's turn was passed to the environments.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <stdexcept>

namespace torchbeast {

class Bell {
 public:
  Bell() = default;  // Rings for nobody.

  // Holds a copy of the descriptor, an eventfd or the end of a pipe that does not block.
  explicit Bell(int fd) : fd_(new int(::fcntl(fd, F_DUPFD_CLOEXEC, 0)), close_fd) {
    if (*fd_ < 0) throw std::runtime_error("The bell's descriptor cannot be copied");
  }

  void ring() const {
    if (!fd_) return;
    const std::uint64_t one = 1;
    // A bell that is full has been rung and not been heard yet: nothing is lost.
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
