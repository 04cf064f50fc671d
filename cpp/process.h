// Which process made something. A forked child has a copy of all memory and none of the threads:
// what is shared with them cannot be taken apart there, and is left alone.
#pragma once

#include <unistd.h>

namespace torchbeast {

class Process {
 public:
  bool is_here() const { return ::getpid() == pid_; }

 private:
  pid_t pid_ = ::getpid();
};

}  // namespace torchbeast
