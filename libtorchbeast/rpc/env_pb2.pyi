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

class ActorMessage(_message.Message):
    __slots__ = ("hello", "request", "rollout", "failure")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    hello: ActorHello
    request: WeightsRequest
    rollout: Rollout
    failure: Failure
    def __init__(self, hello: _Optional[_Union[ActorHello, _Mapping]] = ..., request: _Optional[_Union[WeightsRequest, _Mapping]] = ..., rollout: _Optional[_Union[Rollout, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class LearnerMessage(_message.Message):
    __slots__ = ("welcome", "weights", "taken")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    weights: Weights
    taken: Taken
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ...) -> None: ...

class ActorHello(_message.Message):
    __slots__ = ("hello", "weights_dtype")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DTYPE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    weights_dtype: str
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., weights_dtype: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("greeting", "observation", "action", "model", "unroll_length", "num_params", "state", "tensors", "rollouts_ahead", "max_policy_lag")
    GREETING_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UNROLL_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    MAX_POLICY_LAG_FIELD_NUMBER: _ClassVar[int]
    greeting: Greeting
    observation: NestSpec
    action: NestSpec
    model: ModelSpec
    unroll_length: int
    num_params: int
    state: _containers.RepeatedCompositeFieldContainer[ArraySpec]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    rollouts_ahead: int
    max_policy_lag: int
    def __init__(self, greeting: _Optional[_Union[Greeting, _Mapping]] = ..., observation: _Optional[_Union[NestSpec, _Mapping]] = ..., action: _Optional[_Union[NestSpec, _Mapping]] = ..., model: _Optional[_Union[ModelSpec, _Mapping]] = ..., unroll_length: _Optional[int] = ..., num_params: _Optional[int] = ..., state: _Optional[_Iterable[_Union[ArraySpec, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., rollouts_ahead: _Optional[int] = ..., max_policy_lag: _Optional[int] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("name", "use_lstm", "normalize_observations", "squash_actions", "separate_nets", "normalize_images")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USE_LSTM_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    SQUASH_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    SEPARATE_NETS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_IMAGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    use_lstm: bool
    normalize_observations: bool
    squash_actions: bool
    separate_nets: bool
    normalize_images: bool
    def __init__(self, name: _Optional[str] = ..., use_lstm: _Optional[bool] = ..., normalize_observations: _Optional[bool] = ..., squash_actions: _Optional[bool] = ..., separate_nets: _Optional[bool] = ..., normalize_images: _Optional[bool] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class WeightsRequest(_message.Message):
    __slots__ = ("have",)
    HAVE_FIELD_NUMBER: _ClassVar[int]
    have: int
    def __init__(self, have: _Optional[int] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("version", "num_bytes", "offset", "data", "checksum", "newest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    num_bytes: int
    offset: int
    data: bytes
    checksum: int
    newest: int
    def __init__(self, version: _Optional[int] = ..., num_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ..., newest: _Optional[int] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("version", "observation", "reward", "done", "truncated", "episode_step", "episode_return", "last_action", "action", "policy_logits", "baseline", "state", "stacked", "info", "num_unsent")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    EPISODE_STEP_FIELD_NUMBER: _ClassVar[int]
    EPISODE_RETURN_FIELD_NUMBER: _ClassVar[int]
    LAST_ACTION_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    POLICY_LOGITS_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STACKED_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    NUM_UNSENT_FIELD_NUMBER: _ClassVar[int]
    version: int
    observation: _containers.RepeatedScalarFieldContainer[bytes]
    reward: bytes
    done: bytes
    truncated: bytes
    episode_step: bytes
    episode_return: bytes
    last_action: _containers.RepeatedScalarFieldContainer[bytes]
    action: _containers.RepeatedScalarFieldContainer[bytes]
    policy_logits: bytes
    baseline: bytes
    state: _containers.RepeatedScalarFieldContainer[bytes]
    stacked: _containers.RepeatedScalarFieldContainer[bytes]
    info: _containers.RepeatedCompositeFieldContainer[Info]
    num_unsent: int
    def __init__(self, version: _Optional[int] = ..., observation: _Optional[_Iterable[bytes]] = ..., reward: _Optional[bytes] = ..., done: _Optional[bytes] = ..., truncated: _Optional[bytes] = ..., episode_step: _Optional[bytes] = ..., episode_return: _Optional[bytes] = ..., last_action: _Optional[_Iterable[bytes]] = ..., action: _Optional[_Iterable[bytes]] = ..., policy_logits: _Optional[bytes] = ..., baseline: _Optional[bytes] = ..., state: _Optional[_Iterable[bytes]] = ..., stacked: _Optional[_Iterable[bytes]] = ..., info: _Optional[_Iterable[_Union[Info, _Mapping]]] = ..., num_unsent: _Optional[int] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ("newest",)
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    newest: int
    def __init__(self, newest: _Optional[int] = ...) -> None: ...
