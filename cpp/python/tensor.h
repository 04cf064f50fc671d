// Converts Python's tensors to arrays of the core and back, without a copy. The caller holds the
// interpreter lock; owners of memory may be released in any thread, with the lock or without.
#pragma once

#include <nanobind/nanobind.h>

#include "../array.h"

namespace torchbeast {

// From a torch tensor, a NumPy array, or another object with DLPack or the buffer protocol.
// Throws nb::type_error or std::invalid_argument.
Array array_from_python(nanobind::handle object);

// To a torch tensor. Imports torch the first time.
nanobind::object array_to_torch(const Array& array);

}  // namespace torchbeast
