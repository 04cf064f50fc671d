#include "action.h"

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cast.h"
#include "errors.h"

namespace torchbeast {
namespace {

[[noreturn]] void refuse(const Array& from, const Array& to, const std::string& why) {
  throw std::invalid_argument("The environments expect an action " + to.dtype.name() + " " +
                              to_string(to.shape) + ", the agent gave " + from.dtype.name() + " " +
                              to_string(from.shape) + why);
}

void write_leaf(const Array& from, const Array& to) {
  if (from.shape != to.shape) refuse(from, to, "");
  if (from.dtype == to.dtype) {
    copy(from, to);
  } else if (const std::optional<std::string> why = cast(from, to)) {
    refuse(from, to, *why);
  }
}

}  // namespace

ArrayNest action_of(const ArrayNest& output) {
  if (std::optional<ArrayNest> action = child_at(output, "action")) return std::move(*action);
  const Structure::Node root = output.structure->nodes().front();
  if (root.kind == Structure::Kind::kDict || root.num_children == 0) {
    throw NestError(
        "The agent's output must be a dict with the key 'action' or a tuple that begins with the "
        "action, got " +
        output.structure->describe());
  }
  return children(output).front();
}

void write_action(const ArrayNest& action, const ArrayNest& target) {
  if (!action.structure->matches(*target.structure)) {
    throw NestError("nests don't match: the environments expect an action " +
                    target.structure->describe() + ", the agent gave " +
                    action.structure->describe());
  }
  for (std::size_t i = 0; i < action.leaves.size(); ++i) {
    write_leaf(action.leaves[i], target.leaves[i]);
  }
}

}  // namespace torchbeast
