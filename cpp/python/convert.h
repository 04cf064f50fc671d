// Nests of Python's tensors to nests of the core and back.
#pragma once

#include <nanobind/nanobind.h>

#include "../array_nest.h"

namespace torchbeast {

ArrayNest nest_from_python(nanobind::handle nest);
nanobind::object nest_to_python(const ArrayNest& nest);

}  // namespace torchbeast
