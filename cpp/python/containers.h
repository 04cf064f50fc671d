// Python's containers, as both modules treat them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

namespace torchbeast {

// Takes ownership of a new reference; throws the current Python error if it is null.
inline nanobind::object checked(PyObject* object) {
  if (object == nullptr) throw nanobind::python_error();
  return nanobind::steal(object);
}

// Turns a nest that contains itself into a RecursionError.
class Recursion {
 public:
  Recursion() {
    if (Py_EnterRecursiveCall(" in a nest") != 0) throw nanobind::python_error();
  }
  ~Recursion() { Py_LeaveRecursiveCall(); }
  Recursion(const Recursion&) = delete;
  Recursion& operator=(const Recursion&) = delete;
};

inline bool is_container(PyObject* object) {
  return PyTuple_Check(object) || PyList_Check(object) || PyDict_Check(object);
}

inline bool is_named_tuple(PyObject* tuple) {
  return !PyTuple_CheckExact(tuple) &&
         PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(tuple)), "_fields") != 0;
}

// As the type's own _make(): a __new__ written by the user is not called.
inline nanobind::object make_named_tuple(PyTypeObject* type, const nanobind::object& items) {
  const nanobind::object arguments = checked(PyTuple_Pack(1, items.ptr()));
  return checked(PyTuple_Type.tp_new(type, arguments.ptr(), nullptr));
}

}  // namespace torchbeast
