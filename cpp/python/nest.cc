// The Python module nest._C: nests of any Python objects.
//
// Everything that is not a tuple, list or dict is a leaf. Dicts are walked in the order of their
// sorted keys. A function that is called on leaves may change the containers meanwhile, so a
// reference to every item is held while the item is in use.
#include <array>
#include <string>
#include <vector>

#include "../errors.h"
#include "containers.h"

namespace nb = nanobind;

namespace torchbeast {
namespace {

// The keys in sorted order.
nb::object sorted_keys(PyObject* dict) {
  nb::object keys = checked(PyDict_Keys(dict));
  if (PyList_Sort(keys.ptr()) != 0) throw nb::python_error();
  return keys;
}

bool is_sequence(PyObject* object) { return PyTuple_Check(object) || PyList_Check(object); }

Py_ssize_t sequence_size(PyObject* sequence) { return PySequence_Fast_GET_SIZE(sequence); }

// A new reference, or NestError if a function has shortened the list meanwhile.
nb::object sequence_item(PyObject* sequence, Py_ssize_t i) {
  if (i >= sequence_size(sequence)) throw NestError("A list got shorter while it was mapped over");
  return nb::borrow(PySequence_Fast_GET_ITEM(sequence, i));
}

// A new reference, or an empty object if there is no such key.
nb::object dict_item(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
  return nb::borrow(value);
}

std::string type_name(const nb::object& object) { return Py_TYPE(object.ptr())->tp_name; }

std::string versus(Py_ssize_t left, Py_ssize_t right) {
  return std::to_string(left) + " vs " + std::to_string(right);
}

// Walks several nests side by side, calls function(leaves) and puts the results into containers
// like those of the first nest. Nests is a std::array or std::vector of nb::object.
template <typename Nests, typename Function>
class Walk {
 public:
  explicit Walk(Function function) : function_(function) {}

  nb::object run(const Nests& nests) {
    PyObject* first = nests[0].ptr();
    if (is_sequence(first)) return run_sequence(nests);
    if (PyDict_Check(first)) return run_dict(nests);
    for (const nb::object& nest : nests) require_match(!is_container(nest.ptr()), nests, nest);
    return function_(nests);
  }

 private:
  static void require_match(bool match, const Nests& nests, const nb::object& other) {
    if (match) return;
    throw NestError("nests don't match: " + type_name(nests[0]) + " vs " + type_name(other));
  }

  nb::object run_sequence(const Nests& nests) {
    const Recursion recursion;
    PyObject* first = nests[0].ptr();
    const Py_ssize_t size = sequence_size(first);
    for (const nb::object& nest : nests) {
      require_match(is_sequence(nest.ptr()), nests, nest);
      if (sequence_size(nest.ptr()) != size) {
        throw NestError("Expected sequences of the same length but got " +
                        versus(size, sequence_size(nest.ptr())));
      }
    }
    const bool is_list = PyList_Check(first);
    nb::object result = checked(is_list ? PyList_New(size) : PyTuple_New(size));
    Nests items = nests;
    for (Py_ssize_t i = 0; i < size; ++i) {
      for (std::size_t k = 0; k < nests.size(); ++k) items[k] = sequence_item(nests[k].ptr(), i);
      PyObject* item = run(items).release().ptr();
      if (is_list) {
        PyList_SET_ITEM(result.ptr(), i, item);
      } else {
        PyTuple_SET_ITEM(result.ptr(), i, item);
      }
    }
    if (!is_list && is_named_tuple(first)) return make_named_tuple(Py_TYPE(first), result);
    return result;
  }

  nb::object run_dict(const Nests& nests) {
    const Recursion recursion;
    PyObject* first = nests[0].ptr();
    for (const nb::object& nest : nests) {
      require_match(PyDict_Check(nest.ptr()), nests, nest);
      if (PyDict_GET_SIZE(nest.ptr()) != PyDict_GET_SIZE(first)) {
        throw NestError("Expected dicts of the same size but got " +
                        versus(PyDict_GET_SIZE(first), PyDict_GET_SIZE(nest.ptr())));
      }
    }
    const nb::object keys = sorted_keys(first);
    nb::object result = checked(PyDict_Copy(first));  // Keeps the order of its keys.
    Nests items = nests;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys.ptr()); ++i) {
      PyObject* key = PyList_GET_ITEM(keys.ptr(), i);
      for (std::size_t k = 0; k < nests.size(); ++k) {
        items[k] = dict_item(nests[k].ptr(), key);
        if (!items[k].is_valid()) {
          throw NestError("Expected dicts with the same keys but " +
                          std::string(nb::repr(key).c_str()) + " is missing in one of them");
        }
      }
      if (PyDict_SetItem(result.ptr(), key, run(items).ptr()) != 0) throw nb::python_error();
    }
    return result;
  }

  Function function_;
};

template <typename Nests, typename Function>
nb::object walk(const Nests& nests, Function function) {
  return Walk<Nests, Function>(function).run(nests);
}

nb::object map(const nb::object& f, const nb::object& n) {
  using Nests = std::array<nb::object, 1>;
  return walk(Nests{n}, [&f](const Nests& leaf) {
    return checked(PyObject_CallOneArg(f.ptr(), leaf[0].ptr()));
  });
}

nb::object map_many2(const nb::object& f, const nb::object& a, const nb::object& b) {
  using Nests = std::array<nb::object, 2>;
  return walk(Nests{a, b}, [&f](const Nests& leaves) {
    PyObject* arguments[] = {leaves[0].ptr(), leaves[1].ptr()};
    return checked(PyObject_Vectorcall(f.ptr(), arguments, 2, nullptr));
  });
}

nb::object map_many(const nb::object& f, const nb::args& nests) {
  if (nests.size() == 0) throw NestError("map_many needs at least one nest, got none");
  using Nests = std::vector<nb::object>;
  Nests all;
  for (nb::handle nest : nests) all.push_back(nb::borrow(nest));
  return walk(all, [&f](const Nests& leaves) {
    const nb::object list = checked(PyList_New(static_cast<Py_ssize_t>(leaves.size())));
    for (std::size_t k = 0; k < leaves.size(); ++k) {
      PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(k),
                      nb::object(leaves[k]).release().ptr());
    }
    return checked(PyObject_CallOneArg(f.ptr(), list.ptr()));
  });
}

// Calls visit(leaf) until it returns true. Except for comparisons of keys, no Python code runs.
template <typename Visit>
bool visit_leaves(PyObject* nest, Visit& visit) {
  if (!is_container(nest)) return visit(nest);
  const Recursion recursion;
  if (PyDict_Check(nest)) {
    const nb::object keys = sorted_keys(nest);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys.ptr()); ++i) {
      const nb::object item = dict_item(nest, PyList_GET_ITEM(keys.ptr(), i));
      if (item.is_valid() && visit_leaves(item.ptr(), visit)) return true;
    }
    return false;
  }
  for (Py_ssize_t i = 0; i < sequence_size(nest); ++i) {
    const nb::object item = nb::borrow(PySequence_Fast_GET_ITEM(nest, i));
    if (visit_leaves(item.ptr(), visit)) return true;
  }
  return false;
}

nb::object flatten(const nb::object& n) {
  nb::list leaves;
  auto append = [&leaves](PyObject* leaf) {
    if (PyList_Append(leaves.ptr(), leaf) != 0) throw nb::python_error();
    return false;
  };
  visit_leaves(n.ptr(), append);
  return std::move(leaves);
}

nb::object front(const nb::object& n) {
  nb::object first;
  auto take = [&first](PyObject* leaf) {
    first = nb::borrow(leaf);
    return true;
  };
  if (!visit_leaves(n.ptr(), take))
    throw NestError("front needs a nest with a leaf, got an empty one");
  return first;
}

nb::object pack_as(const nb::object& n, const nb::object& sequence) {
  const nb::object items = checked(PySequence_Tuple(sequence.ptr()));
  const Py_ssize_t size = PyTuple_GET_SIZE(items.ptr());
  Py_ssize_t next = 0;
  using Nests = std::array<nb::object, 1>;
  nb::object result = walk(Nests{n}, [&](const Nests&) {
    if (next == size) {
      throw NestError("Too few elements in the sequence: the nest has more leaves than the " +
                      std::to_string(size) + " given");
    }
    return nb::borrow(PyTuple_GET_ITEM(items.ptr(), next++));
  });
  if (next != size) {
    throw NestError("The nest didn't exhaust sequence: it has " + std::to_string(next) +
                    " leaves, the sequence " + std::to_string(size) + " elements");
  }
  return result;
}

}  // namespace
}  // namespace torchbeast

NB_MODULE(_C, m) {
  using namespace torchbeast;
  m.doc() = "Nested structures of tuples, lists and dicts.";
  nb::exception<NestError>(m, "NestError", PyExc_ValueError);

  m.def("map", &map, nb::arg("f").none(), nb::arg("n").none(),
        "Call f on every leaf of n; return the results in containers of the same kinds.");
  m.def("map_many", &map_many, nb::arg("f"), nb::arg("nests"),
        "Call f on the list of corresponding leaves of all nests; containers as in the first.");
  m.def("map_many2", &map_many2, nb::arg("f").none(), nb::arg("a").none(), nb::arg("b").none(),
        "Call f on corresponding leaves of a and b; containers as in a.");
  m.def("flatten", &flatten, nb::arg("n").none(),
        "All leaves in a list, depth first, dicts in the order of their sorted keys.");
  m.def("front", &front, nb::arg("n").none(), "The first leaf.");
  m.def("pack_as", &pack_as, nb::arg("n").none(), nb::arg("sequence").none(),
        "The elements of a sequence in containers like those of n; the inverse of flatten.");
}
