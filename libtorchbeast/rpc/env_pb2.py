"""The messages of env.proto, made from env.binpb, its description; `make proto` writes that.

Not protoc's Python code: that refuses every protobuf older than the protoc it came from, and so
would keep out whatever else in the environment needs an older one. This runs with 5, 6 and 7.
"""

from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_files = descriptor_pb2.FileDescriptorSet.FromString(
    Path(__file__).with_name("env.binpb").read_bytes()
)
DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(_files.file[0].SerializeToString())
for _name, _message in DESCRIPTOR.message_types_by_name.items():
    globals()[_name] = message_factory.GetMessageClass(_message)
