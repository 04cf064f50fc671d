// Copies numbers into an array of another dtype, as long as they stay the same numbers.
#pragma once

#include <optional>
#include <string>

#include "array.h"

namespace torchbeast {

// Both arrays must have the same shape. Integers and bools only take whole numbers within their
// range; floats take all numbers within theirs, rounded. Nothing is written if one does not fit:
// returns what is wrong, as the rest of a sentence: " with the value 0.5, which ...".
std::optional<std::string> cast(const Array& source, const Array& target);

}  // namespace torchbeast
