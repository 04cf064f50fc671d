// Finds the action in an agent's output, and copies it into the memory of the environments.
#pragma once

#include "array_nest.h"

namespace torchbeast {

// The output is a dict with the key "action", or a sequence whose first element is the action.
ArrayNest action_of(const ArrayNest& output);

// Copies an action, converted to the environments' dtypes where they differ (cast.h). Throws
// NestError or std::invalid_argument if it has another structure or shape, or if a number does not
// fit. The target may then be half written: the environments must not read it.
void write_action(const ArrayNest& action, const ArrayNest& target);

}  // namespace torchbeast
