// Running C++ without the interpreter lock.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace torchbeast {

// Releases the interpreter lock while it lives. If the interpreter ends meanwhile, Python before
// 3.14 ends the threads that ask for the lock by unwinding their stacks, which would abort the
// process, as this is a destructor. Here such a thread sleeps until the process ends.
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
