// Running C++ without the interpreter lock.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace torchbeast {

// Gives the interpreter lock away while it lives. When the interpreter ends meanwhile, Python
// before 3.14 ends the threads that ask for the lock by unwinding their stacks, which C++ answers
// with an abort; here such a thread stays asleep until the process is gone.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

template <typename Function>
auto without_gil(Function function) {
  const WithoutGil released;
  return function();
}

}  // namespace torchbeast
