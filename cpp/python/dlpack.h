// The part of DLPack's binary interface that we speak: struct layouts fixed by its specification
// (major version 1, and the older struct without a version that every PyTorch understands).
#pragma once

#include <cstdint>

namespace torchbeast::dlpack {

constexpr std::int32_t kCpu = 1;
constexpr std::int32_t kCudaHost = 3;  // Pinned memory, readable like any other.
constexpr std::uint32_t kMajorVersion = 1;

struct Device {
  std::int32_t device_type;
  std::int32_t device_id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // May be null: contiguous.
  std::uint64_t byte_offset;
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct VersionedTensor {
  Version version;
  void* context;
  void (*deleter)(VersionedTensor*);
  std::uint64_t flags;
  Tensor tensor;
};

// What a tensor type offers as `__dlpack_c_exchange_api__`: the exchange without Python calls,
// several times as fast. PyTorch has it since 2.10. Functions return 0, or -1 with an exception
// set.
struct ExchangeApi {
  Version version;
  const ExchangeApi* previous;
  void* allocate;
  int (*from_python)(void* object, VersionedTensor** result);
  int (*to_python)(VersionedTensor* tensor, void** object);
  void* borrow;
  void* current_stream;
};

}  // namespace torchbeast::dlpack
