// A nest of arrays as the queues hold it: a flat list of its arrays, and their structure.
//
//   ((frame, {"reward": reward}), [])  =  leaves [frame, reward] + structure ((*, {reward: *}), [])
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "array.h"

namespace torchbeast {

// Which containers hold the leaves. Written once, depth first, then shared and never changed.
class Structure {
 public:
  enum class Kind : std::uint8_t { kLeaf, kTuple, kList, kNamedTuple, kDict };

  struct Node {
    Kind kind;
    std::uint32_t num_children;
  };

  void add_leaf() { nodes_.push_back({Kind::kLeaf, 0}); }
  void add_tuple(std::uint32_t num_children) { nodes_.push_back({Kind::kTuple, num_children}); }
  void add_list(std::uint32_t num_children) { nodes_.push_back({Kind::kList, num_children}); }
  // Only the bindings use `type`; the core just stores it.
  void add_named_tuple(std::uint32_t num_children, std::shared_ptr<void> type);
  void add_dict(const std::vector<std::string>& sorted_keys);
  void add(const Structure& other);  // As the next child.

  const std::vector<Node>& nodes() const { return nodes_; }
  const std::vector<std::shared_ptr<void>>& types() const { return types_; }  // Of named tuples.
  const std::vector<std::string>& keys() const {
    return keys_;
  }  // Of all dicts, one after another.

  // Whether the leaves correspond. Tuples, lists and named tuples of equal lengths count as equal.
  bool matches(const Structure& other) const;

  std::string describe() const;  // "(*, {a: *, b: [*]})"

 private:
  std::vector<Node> nodes_;
  std::vector<std::shared_ptr<void>> types_;
  std::vector<std::string> keys_;
};

struct ArrayNest {
  std::shared_ptr<const Structure> structure;
  std::vector<Array> leaves;  // Depth first.

  ArrayNest slice(std::int64_t dim, std::int64_t begin, std::int64_t end) const;
};

// The nests inside the outermost container; throws NestError if the nest is a single leaf.
std::vector<ArrayNest> children(const ArrayNest& nest);

// The nest at this key of the outermost container, if that is a dict and has it.
std::optional<ArrayNest> child_at(const ArrayNest& nest, const std::string& key);

// The tuple of these nests.
ArrayNest tuple_of_nests(const std::vector<ArrayNest>& nests);

// Throws NestError or std::invalid_argument unless both can be concatenated along dim: they must
// have the same structure, dtypes and, except in dim, shapes.
void check_fits(const ArrayNest& nest, const ArrayNest& expected, std::int64_t dim);

}  // namespace torchbeast
