#include "tensor.h"

#include <dlpack/dlpack.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "containers.h"
#include "references.h"

namespace nb = nanobind;

namespace torchbeast {
namespace {

[[noreturn]] void raise_python_error() { throw nb::python_error(); }

// PyTorch offers a list of tables of functions, the newest first. Returns the one with the layout
// of our version of DLPack, or null.
const DLPackExchangeAPI* our_version_of(const DLPackExchangeAPIHeader* header) {
  while (header != nullptr && header->version.major != DLPACK_MAJOR_VERSION) {
    header = header->prev_api;
  }
  return reinterpret_cast<const DLPackExchangeAPI*>(header);  // The header is its first member.
}

// What we need of PyTorch; looked up once, never freed.
struct Torch {
  PyTypeObject* tensor_type;
  nb::object from_dlpack;
  nb::object strided;
  const DLPackExchangeAPI* exchange = nullptr;  // Null before PyTorch 2.10.

  Torch() {
    nb::object torch = nb::module_::import_("torch");
    nb::object type = torch.attr("Tensor");
    from_dlpack = torch.attr("from_dlpack");
    strided = torch.attr("strided");
    if (nb::hasattr(type, "__dlpack_c_exchange_api__")) {
      nb::object capsule = type.attr("__dlpack_c_exchange_api__");
      const void* table = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
      if (table == nullptr) raise_python_error();
      exchange = our_version_of(static_cast<const DLPackExchangeAPIHeader*>(table));
    }
    tensor_type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
  }
};

const Torch& torch() {
  // Not a static object, whose guard could cause a deadlock: a second thread would wait for it with
  // the interpreter lock held, which the first one may have released during the import.
  static Torch* instance = nullptr;
  if (instance == nullptr) {
    auto made = std::make_unique<Torch>();
    if (instance == nullptr) instance = made.release();
  }
  return *instance;
}

bool is_tensor(nb::handle object) {
  // There are no tensors before torch is imported, and a NumPy array is no reason to import it.
  static bool imported = false;
  if (!imported) {
    PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
    imported = module != nullptr && module != Py_None;
    if (!imported) return false;
  }
  return PyObject_TypeCheck(object.ptr(), torch().tensor_type) != 0;
}

std::string text_of(nb::handle object) { return nb::str(object).c_str(); }

// An attribute's or a method's name, made once.
class Name {
 public:
  explicit Name(const char* name) : name_(PyUnicode_InternFromString(name)) {}
  PyObject* ptr() const { return name_; }

 private:
  PyObject* name_;
};

bool attribute_is_true(nb::handle object, const Name& name) {
  return checked(PyObject_GetAttr(object.ptr(), name.ptr())).is(nb::handle(Py_True));
}

bool method_says_true(nb::handle object, const Name& name) {
  return checked(PyObject_CallMethodNoArgs(object.ptr(), name.ptr())).is(nb::handle(Py_True));
}

// Checks the rules for tensors, which the exchange would ignore or report less clearly.
void check_tensor(nb::handle tensor) {
  static const Name kRequiresGrad("requires_grad"), kIsCpu("is_cpu"), kLayout("layout");
  if (attribute_is_true(tensor, kRequiresGrad)) {
    throw std::invalid_argument("Tensors must not require grad, got one of shape " +
                                text_of(checked(PySequence_List(tensor.attr("shape").ptr()))) +
                                "; call .detach() on it or compute it under torch.no_grad().");
  }
  if (!attribute_is_true(tensor, kIsCpu)) {
    throw std::invalid_argument("Tensors must live on the CPU, got one on " +
                                text_of(tensor.attr("device")) + "; call .cpu() on it.");
  }
  if (checked(PyObject_GetAttr(tensor.ptr(), kLayout.ptr())).ptr() != torch().strided.ptr()) {
    throw std::invalid_argument("Tensors must be dense, got one of layout " +
                                text_of(tensor.attr("layout")) + "; call .to_dense() on it.");
  }
}

// Whether PyTorch has postponed a change of sign or a conjugation, so that memory does not have it.
bool is_negated(nb::handle tensor) {
  static const Name kIsNeg("is_neg");
  return method_says_true(tensor, kIsNeg);
}

bool is_conjugated(nb::handle tensor) {
  static const Name kIsConj("is_conj");
  return method_says_true(tensor, kIsConj);
}

nb::object resolve(nb::handle tensor) {
  return tensor.attr("resolve_conj")().attr("resolve_neg")();
}

template <typename Managed>
Array adopt(Managed* managed) {
  // PyTorch's deleter takes the interpreter lock when the tensor still has a Python object.
  std::shared_ptr<const void> owner(managed, [](Managed* m) {
    let_go(m, [](void* pointer) {
      auto* tensor = static_cast<Managed*>(pointer);
      if (tensor->deleter != nullptr) tensor->deleter(tensor);
    });
  });
  const DLTensor& tensor = managed->dl_tensor;
  const DLDeviceType device = tensor.device.device_type;
  if (device != kDLCPU && device != kDLCUDAHost) {  // The latter is pinned memory of the host.
    throw std::invalid_argument("Tensors must live on the CPU, got one on DLPack device type " +
                                std::to_string(device) + "; copy it to the host first.");
  }
  Array array;
  array.dtype = {tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes};
  array.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  if (tensor.strides != nullptr) {
    array.strides.assign(tensor.strides, tensor.strides + tensor.ndim);
  } else {
    array.strides = contiguous_strides(array.shape);
  }
  array.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  array.owner = std::move(owner);
  return array;
}

Array from_dlpack_capsule(nb::handle object) {
  nb::object capsule = object.attr("__dlpack__")();
  void* pointer = PyCapsule_GetPointer(capsule.ptr(), "dltensor");
  if (pointer == nullptr) raise_python_error();
  if (PyCapsule_SetName(capsule.ptr(), "used_dltensor") != 0) raise_python_error();
  return adopt(static_cast<DLManagedTensor*>(pointer));
}

Array from_tensor(nb::handle tensor) {
  check_tensor(tensor);
  const DLPackExchangeAPI* exchange = torch().exchange;
  // A subclass may define its elements in another way, which only its own __dlpack__() knows.
  if (exchange == nullptr || Py_TYPE(tensor.ptr()) != torch().tensor_type) {
    const bool is_lazy = is_negated(tensor) || is_conjugated(tensor);
    return from_dlpack_capsule(is_lazy ? resolve(tensor) : nb::borrow(tensor));
  }
  DLManagedTensorVersioned* managed = nullptr;
  if (exchange->managed_tensor_from_py_object_no_sync(tensor.ptr(), &managed) != 0) {
    raise_python_error();
  }
  Array array = adopt(managed);
  const bool is_complex = array.dtype.code == kComplex;
  const bool is_lazy = (is_complex && is_conjugated(tensor)) ||
                       ((is_complex || array.dtype.code == kFloat) && is_negated(tensor));
  return is_lazy ? from_tensor(resolve(tensor)) : array;
}

// The dtype that a buffer's `format`, a format string of the struct module, stands for.
DType dtype_of_format(const char* format, Py_ssize_t itemsize) {
  const char* code = format;
  if (*code == '@' || *code == '=' || *code == '<' || *code == '|') ++code;
  const bool is_complex = *code == 'Z';
  if (is_complex) ++code;
  if (*code != '\0' && code[1] == '\0' && itemsize <= 16) {
    const auto is_one_of = [code](const char* codes) {
      return std::strchr(codes, *code) != nullptr;
    };
    const auto bits = static_cast<std::uint8_t>(itemsize * 8);
    if (is_complex && is_one_of("fd")) return {kComplex, bits, 1};
    if (!is_complex && is_one_of("bhilqn")) return {kInt, bits, 1};
    if (!is_complex && is_one_of("BHILQN")) return {kUInt, bits, 1};
    if (!is_complex && is_one_of("efd")) return {kFloat, bits, 1};
    if (!is_complex && is_one_of("?")) return {kBool, bits, 1};
  }
  throw nb::type_error(("Arrays must hold numbers or bools in native byte order, got format '" +
                        std::string(format) + "'; convert it with .astype() first.")
                           .c_str());
}

Array from_buffer(nb::handle object) {
  const nb::object view = checked(PyMemoryView_FromObject(object.ptr()));
  const Py_buffer& buffer = *PyMemoryView_GET_BUFFER(view.ptr());
  Array array;
  array.dtype = dtype_of_format(buffer.format, buffer.itemsize);
  array.shape = Shape(static_cast<std::size_t>(buffer.ndim));
  array.strides = Shape(static_cast<std::size_t>(buffer.ndim));
  for (int i = 0; i < buffer.ndim; ++i) {
    if (buffer.strides[i] % buffer.itemsize != 0) {
      throw std::invalid_argument("Arrays must have strides of whole elements, got " +
                                  std::to_string(buffer.strides[i]) + " bytes for elements of " +
                                  std::to_string(buffer.itemsize) +
                                  "; call numpy.ascontiguousarray() on it.");
    }
    array.shape[static_cast<std::size_t>(i)] = buffer.shape[i];
    array.strides[static_cast<std::size_t>(i)] = buffer.strides[i] / buffer.itemsize;
  }
  array.data = static_cast<char*>(buffer.buf);
  array.owner = hold(view);
  return array;
}

// A managed tensor and the array that it refers to, in one object. Its deleter uses no Python.
template <typename Managed>
struct Lease {
  explicit Lease(const Array& source) : array(source) {
    managed.dl_tensor = {array.data,
                         {kDLCPU, 0},
                         static_cast<std::int32_t>(array.ndim()),
                         {array.dtype.code, array.dtype.bits, array.dtype.lanes},
                         array.shape.data(),
                         array.strides.data(),
                         0};
    managed.manager_ctx = this;
    managed.deleter = [](Managed* m) { delete static_cast<Lease*>(m->manager_ctx); };
  }

  Array array;
  Managed managed{};
};

nb::object to_torch_by_exchange(const Array& array, const DLPackExchangeAPI& exchange) {
  auto lease = std::make_unique<Lease<DLManagedTensorVersioned>>(array);
  lease->managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  void* object = nullptr;
  if (exchange.managed_tensor_to_py_object_no_sync(&lease->managed, &object) != 0) {
    raise_python_error();
  }
  lease.release();  // The tensor owns it now.
  return nb::steal(static_cast<PyObject*>(object));
}

nb::object to_torch_by_capsule(const Array& array) {
  auto lease = std::make_unique<Lease<DLManagedTensor>>(array);
  PyObject* capsule = PyCapsule_New(&lease->managed, "dltensor", [](PyObject* self) {
    // A consumer that has taken the tensor has renamed the capsule, and deletes the tensor itself.
    if (PyCapsule_IsValid(self, "dltensor") == 0) return;
    auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(self, "dltensor"));
    managed->deleter(managed);
  });
  if (capsule == nullptr) raise_python_error();
  lease.release();
  return torch().from_dlpack(nb::steal(capsule));
}

// PyTorch has no negative strides.
Array without_negative_strides(const Array& array) {
  Array result = array;
  result.strides = contiguous_strides(array.shape);
  std::shared_ptr<char[]> memory(new char[std::max<std::size_t>(array.num_bytes(), 1)]);
  result.data = memory.get();
  result.owner = std::move(memory);
  copy(array, result);
  return result;
}

}  // namespace

Array array_from_python(nb::handle object) {
  if (is_tensor(object)) return from_tensor(object);
  if (PyObject_CheckBuffer(object.ptr()) != 0) return from_buffer(object);
  if (nb::hasattr(object, "__dlpack__")) return from_dlpack_capsule(object);
  throw nb::type_error(
      ("The leaves of a nest must be torch tensors or NumPy arrays, got " +
       text_of(nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()))).attr("__name__")) +
       "; convert it with torch.as_tensor() first.")
          .c_str());
}

nb::object array_to_torch(const Array& array) {
  for (const std::int64_t stride : array.strides) {
    if (stride < 0) return array_to_torch(without_negative_strides(array));
  }
  const DLPackExchangeAPI* exchange = torch().exchange;
  return exchange != nullptr ? to_torch_by_exchange(array, *exchange) : to_torch_by_capsule(array);
}

}  // namespace torchbeast
