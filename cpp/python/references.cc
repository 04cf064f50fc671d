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
  std::vector<PyObject*> objects;
  std::atomic<bool> any{false};  // Spares the lock where there is nothing to do.
};

// Never destroyed: threads may outlive the interpreter.
Dropped& dropped() {
  static auto* const kDropped = new Dropped();
  return *kDropped;
}

void drop(PyObject* object) {
  if (!nb::is_alive()) return;  // Too late to tell Python.
  if (PyGILState_Check() != 0) {
    Py_DECREF(object);
    return;
  }
  const std::lock_guard<std::mutex> lock(dropped().mutex);
  dropped().objects.push_back(object);
  dropped().any = true;
}

}  // namespace

std::shared_ptr<void> hold(nb::handle object) {
  object.inc_ref();
  return {object.ptr(), drop};
}

void release_dropped() {
  if (!dropped().any) return;
  std::vector<PyObject*> objects;
  {
    const std::lock_guard<std::mutex> lock(dropped().mutex);
    objects.swap(dropped().objects);
    dropped().any = false;
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

}  // namespace torchbeast
