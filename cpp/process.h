// Remembers which process made an object. A forked child has a copy of all memory but none of the
// threads, so objects that the parent's threads use cannot be destroyed there.
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
