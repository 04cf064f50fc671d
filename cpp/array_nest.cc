#include "array_nest.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>

#include "errors.h"

namespace torchbeast {
namespace {

using Kind = Structure::Kind;

bool is_sequence(Kind kind) { return kind != Kind::kLeaf && kind != Kind::kDict; }

bool same_but_for(const Shape& left, const Shape& right, std::int64_t dim) {
  if (left.size() != right.size()) return false;
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (left[i] != right[i] && static_cast<std::int64_t>(i) != dim) return false;
  }
  return true;
}

// Writes a structure as Python would, a star for each leaf.
class Description {
 public:
  explicit Description(const Structure& structure) : structure_(structure) { add_next(); }
  std::string text;

 private:
  void add_next() {
    const Structure::Node node = structure_.nodes()[next_node_++];
    switch (node.kind) {
      case Kind::kLeaf: text += "*"; return;
      case Kind::kList: return add_children(node, "[", "]");
      case Kind::kDict: return add_children(node, "{", "}");
      case Kind::kTuple:
      case Kind::kNamedTuple: return add_children(node, "(", node.num_children == 1 ? ",)" : ")");
    }
  }

  void add_children(const Structure::Node& node, const char* open, const char* close) {
    text += open;
    // The keys of a dict stand together, those of the dicts inside it follow.
    const std::size_t first_key = next_key_;
    if (node.kind == Kind::kDict) next_key_ += node.num_children;
    for (std::uint32_t i = 0; i < node.num_children; ++i) {
      if (i > 0) text += ", ";
      if (node.kind == Kind::kDict) text += structure_.keys()[first_key + i] + ": ";
      add_next();
    }
    text += close;
  }

  const Structure& structure_;
  std::size_t next_node_ = 0;
  std::size_t next_key_ = 0;
};

}  // namespace

void Structure::add_named_tuple(std::uint32_t num_children, std::shared_ptr<void> type) {
  nodes_.push_back({Kind::kNamedTuple, num_children});
  types_.push_back(std::move(type));
}

void Structure::add_dict(const std::vector<std::string>& sorted_keys) {
  nodes_.push_back({Kind::kDict, static_cast<std::uint32_t>(sorted_keys.size())});
  keys_.insert(keys_.end(), sorted_keys.begin(), sorted_keys.end());
}

void Structure::add(const Structure& other) {
  nodes_.insert(nodes_.end(), other.nodes_.begin(), other.nodes_.end());
  types_.insert(types_.end(), other.types_.begin(), other.types_.end());
  keys_.insert(keys_.end(), other.keys_.begin(), other.keys_.end());
}

bool Structure::matches(const Structure& other) const {
  if (nodes_.size() != other.nodes_.size() || keys_ != other.keys_) return false;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const Node& mine = nodes_[i];
    const Node& theirs = other.nodes_[i];
    if (mine.num_children != theirs.num_children) return false;
    if (mine.kind != theirs.kind && !(is_sequence(mine.kind) && is_sequence(theirs.kind))) {
      return false;
    }
  }
  return true;
}

std::string Structure::describe() const { return Description(*this).text; }

ArrayNest ArrayNest::slice(std::int64_t dim, std::int64_t begin, std::int64_t end) const {
  ArrayNest result{structure, {}};
  result.leaves.reserve(leaves.size());
  for (const Array& leaf : leaves) result.leaves.push_back(leaf.slice(dim, begin, end));
  return result;
}

std::vector<ArrayNest> children(const ArrayNest& nest) {
  const Structure& structure = *nest.structure;
  const Structure::Node root = structure.nodes().front();
  if (root.kind == Kind::kLeaf) throw NestError("Expected a nest of several, got a mere tensor");
  std::vector<ArrayNest> result;
  std::size_t node = 1, leaf = 0, type = root.kind == Kind::kNamedTuple ? 1 : 0;
  std::size_t key = root.kind == Kind::kDict ? root.num_children : 0;
  for (std::uint32_t i = 0; i < root.num_children; ++i) {
    auto child = std::make_shared<Structure>();
    std::vector<Array> leaves;
    for (std::size_t missing = 1; missing > 0; --missing, ++node) {
      const Structure::Node& next = structure.nodes()[node];
      missing += next.num_children;
      switch (next.kind) {
        case Kind::kLeaf:
          child->add_leaf();
          leaves.push_back(nest.leaves[leaf++]);
          break;
        case Kind::kTuple: child->add_tuple(next.num_children); break;
        case Kind::kList: child->add_list(next.num_children); break;
        case Kind::kNamedTuple:
          child->add_named_tuple(next.num_children, structure.types()[type++]);
          break;
        case Kind::kDict: {
          const auto first = structure.keys().begin() + static_cast<std::ptrdiff_t>(key);
          child->add_dict({first, first + next.num_children});
          key += next.num_children;
          break;
        }
      }
    }
    result.push_back({std::move(child), std::move(leaves)});
  }
  return result;
}

std::optional<ArrayNest> child_at(const ArrayNest& nest, const std::string& key) {
  const Structure::Node root = nest.structure->nodes().front();
  if (root.kind != Kind::kDict) return std::nullopt;
  const auto first = nest.structure->keys().begin();  // The outermost dict's keys come first.
  const auto last = first + root.num_children;
  const auto found = std::find(first, last, key);
  if (found == last) return std::nullopt;
  return children(nest)[static_cast<std::size_t>(found - first)];
}

ArrayNest tuple_of_nests(const std::vector<ArrayNest>& nests) {
  auto structure = std::make_shared<Structure>();
  structure->add_tuple(static_cast<std::uint32_t>(nests.size()));
  ArrayNest result{structure, {}};
  for (const ArrayNest& nest : nests) {
    structure->add(*nest.structure);
    result.leaves.insert(result.leaves.end(), nest.leaves.begin(), nest.leaves.end());
  }
  return result;
}

void check_fits(const ArrayNest& nest, const ArrayNest& expected, std::int64_t dim) {
  if (nest.structure != expected.structure && !nest.structure->matches(*expected.structure)) {
    throw NestError("nests don't match: expected " + expected.structure->describe() +
                    " like the nests it would be batched with, got " + nest.structure->describe() +
                    "; give every item of a queue the same structure");
  }
  for (std::size_t i = 0; i < nest.leaves.size(); ++i) {
    const Array& leaf = nest.leaves[i];
    const Array& other = expected.leaves[i];
    if (leaf.dtype != other.dtype) {
      throw std::invalid_argument("Tensors of one batch must have the same dtype, got " +
                                  leaf.dtype.name() + " after " + other.dtype.name() + " in leaf " +
                                  std::to_string(i) + "; convert it first");
    }
    if (!same_but_for(leaf.shape, other.shape, dim)) {
      throw std::invalid_argument(
          "Tensors of one batch must have the same shape except in the batch dimension " +
          std::to_string(dim) + ", got " + to_string(leaf.shape) + " after " +
          to_string(other.shape) + " in leaf " + std::to_string(i) + "; pad or split it first");
    }
  }
}

}  // namespace torchbeast
