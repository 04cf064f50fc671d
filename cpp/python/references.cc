#include "references.h"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace torchbeast {
namespace {

struct Dropped {
  std::mutex mutex;
  std::vector<std::pair<void*, void (*)(void*)>> things;  // And the functions to release them.
  std::atomic<bool> any{false};  // Avoids the lock if there is nothing to do.
};

// Never destroyed: threads may outlive the interpreter.
Dropped& dropped() {
  static auto* const kDropped = new Dropped();
  return *kDropped;
}

void drop(PyObject* object) {
  let_go(object, [](void* o) { Py_DECREF(static_cast<PyObject*>(o)); });
}

}  // namespace

void let_go(void* thing, void (*release)(void*)) {
  if (!nb::is_alive()) return;  // The interpreter has ended: nothing can be released.
  if (PyGILState_Check() != 0) return release(thing);
  const std::lock_guard<std::mutex> lock(dropped().mutex);
  dropped().things.emplace_back(thing, release);
  dropped().any = true;
}

std::shared_ptr<void> hold(nb::handle object) {
  object.inc_ref();
  return {object.ptr(), drop};
}

void release_dropped() {
  if (!dropped().any) return;
  std::vector<std::pair<void*, void (*)(void*)>> things;
  {
    const std::lock_guard<std::mutex> lock(dropped().mutex);
    things.swap(dropped().things);
    dropped().any = false;
  }
  for (const auto& [thing, release] : things) release(thing);
}

}  // namespace torchbeast
