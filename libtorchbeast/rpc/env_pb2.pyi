from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnvironmentMessage(_message.Message):
    __slots__ = ("hello", "step", "failure")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: Step
    failure: Failure
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class AgentMessage(_message.Message):
    __slots__ = ("greeting", "actions")
    GREETING_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    greeting: Greeting
    actions: Actions
    def __init__(self, greeting: _Optional[_Union[Greeting, _Mapping]] = ..., actions: _Optional[_Union[Actions, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "name", "num_envs", "observation", "action", "num_actions", "num_streams", "minor")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_ENVS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    version: int
    name: str
    num_envs: int
    observation: NestSpec
    action: NestSpec
    num_actions: int
    num_streams: int
    minor: int
    def __init__(self, version: _Optional[int] = ..., name: _Optional[str] = ..., num_envs: _Optional[int] = ..., observation: _Optional[_Union[NestSpec, _Mapping]] = ..., action: _Optional[_Union[NestSpec, _Mapping]] = ..., num_actions: _Optional[int] = ..., num_streams: _Optional[int] = ..., minor: _Optional[int] = ...) -> None: ...

class Greeting(_message.Message):
    __slots__ = ("version", "name", "knows_truncation", "minor")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KNOWS_TRUNCATION_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    version: int
    name: str
    knows_truncation: bool
    minor: int
    def __init__(self, version: _Optional[int] = ..., name: _Optional[str] = ..., knows_truncation: _Optional[bool] = ..., minor: _Optional[int] = ...) -> None: ...

class NestSpec(_message.Message):
    __slots__ = ("array", "sequence", "dict")
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    array: ArraySpec
    sequence: SequenceSpec
    dict: DictSpec
    def __init__(self, array: _Optional[_Union[ArraySpec, _Mapping]] = ..., sequence: _Optional[_Union[SequenceSpec, _Mapping]] = ..., dict: _Optional[_Union[DictSpec, _Mapping]] = ...) -> None: ...

class SequenceSpec(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[NestSpec]
    def __init__(self, items: _Optional[_Iterable[_Union[NestSpec, _Mapping]]] = ...) -> None: ...

class DictSpec(_message.Message):
    __slots__ = ("items",)
    class ItemsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: NestSpec
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[NestSpec, _Mapping]] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.MessageMap[str, NestSpec]
    def __init__(self, items: _Optional[_Mapping[str, NestSpec]] = ...) -> None: ...

class ArraySpec(_message.Message):
    __slots__ = ("dtype", "shape", "low", "high", "categories")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    CATEGORIES_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    low: _containers.RepeatedScalarFieldContainer[float]
    high: _containers.RepeatedScalarFieldContainer[float]
    categories: bool
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., low: _Optional[_Iterable[float]] = ..., high: _Optional[_Iterable[float]] = ..., categories: _Optional[bool] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("observation", "reward", "done", "truncated", "episode_step", "episode_return", "info")
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    EPISODE_STEP_FIELD_NUMBER: _ClassVar[int]
    EPISODE_RETURN_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    observation: _containers.RepeatedScalarFieldContainer[bytes]
    reward: _containers.RepeatedScalarFieldContainer[float]
    done: _containers.RepeatedScalarFieldContainer[bool]
    truncated: _containers.RepeatedScalarFieldContainer[bool]
    episode_step: _containers.RepeatedScalarFieldContainer[int]
    episode_return: _containers.RepeatedScalarFieldContainer[float]
    info: _containers.RepeatedCompositeFieldContainer[Info]
    def __init__(self, observation: _Optional[_Iterable[bytes]] = ..., reward: _Optional[_Iterable[float]] = ..., done: _Optional[_Iterable[bool]] = ..., truncated: _Optional[_Iterable[bool]] = ..., episode_step: _Optional[_Iterable[int]] = ..., episode_return: _Optional[_Iterable[float]] = ..., info: _Optional[_Iterable[_Union[Info, _Mapping]]] = ...) -> None: ...

class Info(_message.Message):
    __slots__ = ("name", "total", "count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    total: float
    count: int
    def __init__(self, name: _Optional[str] = ..., total: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class Actions(_message.Message):
    __slots__ = ("action",)
    ACTION_FIELD_NUMBER: _ClassVar[int]
    action: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, action: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
