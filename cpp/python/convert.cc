#include "convert.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "containers.h"
#include "references.h"
#include "tensor.h"

namespace nb = nanobind;

namespace torchbeast {
namespace {

using Kind = Structure::Kind;

class Reader {
 public:
  void read(PyObject* nest) {
    const Recursion recursion;
    if (PyTuple_Check(nest)) {
      const auto size = static_cast<std::uint32_t>(PyTuple_GET_SIZE(nest));
      if (is_named_tuple(nest)) {
        structure->add_named_tuple(size, hold(reinterpret_cast<PyObject*>(Py_TYPE(nest))));
      } else {
        structure->add_tuple(size);
      }
      for (std::uint32_t i = 0; i < size; ++i) read(PyTuple_GET_ITEM(nest, i));
    } else if (PyList_Check(nest)) {
      const nb::object items =
          checked(PyList_AsTuple(nest));  // A copy, as reading a leaf may run Python code.
      const auto size = static_cast<std::uint32_t>(PyTuple_GET_SIZE(items.ptr()));
      structure->add_list(size);
      for (std::uint32_t i = 0; i < size; ++i) read(PyTuple_GET_ITEM(items.ptr(), i));
    } else if (PyDict_Check(nest)) {
      read_dict(nest);
    } else {
      structure->add_leaf();
      leaves.push_back(array_from_python(nest));
    }
  }

  std::shared_ptr<Structure> structure = std::make_shared<Structure>();
  std::vector<Array> leaves;

 private:
  void read_dict(PyObject* dict) {
    std::vector<std::pair<std::string, nb::object>> items;
    PyObject *key, *value;
    for (Py_ssize_t position = 0; PyDict_Next(dict, &position, &key, &value) != 0;) {
      if (!PyUnicode_Check(key)) {
        throw nb::type_error(("Dicts of tensors must have strings as keys, got " +
                              std::string(nb::repr(key).c_str()) + "; convert it with str() first.")
                                 .c_str());
      }
      items.emplace_back(nb::cast<std::string>(nb::handle(key)), nb::borrow(value));
    }
    std::sort(items.begin(), items.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<std::string> keys;
    for (const auto& item : items) keys.push_back(item.first);
    structure->add_dict(keys);
    for (const auto& item : items) read(item.second.ptr());
  }
};

class Writer {
 public:
  explicit Writer(const ArrayNest& nest) : nest_(nest) {}

  nb::object write() {
    const Structure& structure = *nest_.structure;
    const Structure::Node node = structure.nodes()[next_node_++];
    switch (node.kind) {
      case Kind::kLeaf: return array_to_torch(nest_.leaves[next_leaf_++]);
      case Kind::kDict: return write_dict(node.num_children);
      case Kind::kList: {
        nb::object list = checked(PyList_New(node.num_children));
        for (std::uint32_t i = 0; i < node.num_children; ++i) {
          PyList_SET_ITEM(list.ptr(), i, write().release().ptr());
        }
        return list;
      }
      case Kind::kTuple: return write_tuple(node.num_children);
      case Kind::kNamedTuple: {
        auto* type = static_cast<PyTypeObject*>(structure.types()[next_type_++].get());
        return make_named_tuple(type, write_tuple(node.num_children));
      }
    }
    Py_UNREACHABLE();
  }

 private:
  nb::object write_tuple(std::uint32_t size) {
    nb::object tuple = checked(PyTuple_New(size));
    for (std::uint32_t i = 0; i < size; ++i) {
      PyTuple_SET_ITEM(tuple.ptr(), i, write().release().ptr());
    }
    return tuple;
  }

  nb::object write_dict(std::uint32_t size) {
    const std::size_t first_key = next_key_;  // The keys of the dicts inside come after these.
    next_key_ += size;
    nb::dict dict;
    for (std::uint32_t i = 0; i < size; ++i) {
      dict[nb::cast(nest_.structure->keys()[first_key + i])] = write();
    }
    return std::move(dict);
  }

  const ArrayNest& nest_;
  std::size_t next_node_ = 0, next_leaf_ = 0, next_type_ = 0, next_key_ = 0;
};

}  // namespace

ArrayNest nest_from_python(nb::handle nest) {
  release_dropped();
  Reader reader;
  reader.read(nest.ptr());
  return {std::move(reader.structure), std::move(reader.leaves)};
}

nb::object nest_to_python(const ArrayNest& nest) {
  release_dropped();
  return Writer(nest).write();
}

}  // namespace torchbeast
