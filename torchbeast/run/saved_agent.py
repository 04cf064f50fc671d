"""`torchbeast.Agent`: a trained agent outside of its run, from an observation to an action."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from libtorchbeast.action_masks import ActionMasks
from libtorchbeast.rows import EpisodeCounter, Row, Spec
from libtorchbeast.specs import ACTION_MASK, ArraySpec, describe, environments_action, split_mask
from libtorchbeast.tree import map_tree
from torchbeast import user_code
from torchbeast.envs import REMOTE, look_at
from torchbeast.envs.registry import make_env
from torchbeast.envs.wrappers import show_masks
from torchbeast.errors import UsageError
from torchbeast.models import as_output, build_model
from torchbeast.run import checkpoint
from torchbeast.run.api_arguments import Wrappers, name_code
from torchbeast.run.eval_process import as_flags
from torchbeast.run.evaluate import prepare_to_play
from torchbeast.run.flags import TrainingFlags
from torchbeast.run.saved_run import code_is_missing, names_code


class Agent:
    """A trained agent that plays one episode at a time and keeps its memory between steps.

        agent = Agent.load("my-run")
        observation, info = env.reset()
        agent.reset()
        while playing:
            action = agent.act(observation)
            observation, reward, terminated, truncated, info = env.step(action)

    The built-in image nets, and models of your own that use it, also see the last reward: pass it
    to `act`. Pass action masks to `act`, too, if the environment has them outside of its
    observations; environments from `make_env` have them inside.
    """

    def __init__(self, model: nn.Module, spec: Spec, sample_actions: bool = False) -> None:
        """`spec` describes the environments that the model was made for."""
        self.spec = spec
        self._model = model
        self._taken = spec.action if spec.taken is None else spec.taken
        has_mask = split_mask(spec.observation)[1] is not None
        self._masks = ActionMasks(spec.action, "act(...)") if has_mask else None
        self._make_env: Callable[[bool], Any] | None = None
        prepare_to_play(model, sample_actions)
        self.reset()

    @classmethod
    def load(
        cls,
        run: str | Path = "latest",
        *,
        env: Any = None,
        model: Any = None,
        wrappers: Wrappers = (),
        checkpoint_name: str = checkpoint.FILE_NAME,
        sample_actions: bool | None = None,
        savedir: str | Path = TrainingFlags.savedir,
    ) -> "Agent":
        """The agent of a run, given by its name below `savedir`, its folder, or a checkpoint.

        Args:
            env: the environment it was trained on, if that is code of yours and `make_env` is to
                make it; or another environment in its place.
            model: the model's class, if it is code of yours: a checkpoint is data, and code that it
                names is not imported.
            wrappers: the wrappers it was trained with, needed for `make_env`.
            checkpoint_name: a checkpoint in the run's folder, such as `model-best.tar`.
            sample_actions: sample actions from the policy, or take the most likely ones; None: as
                the run's flags say.
        """
        path = checkpoint.find_in(str(run), Path(savedir), checkpoint_name)
        if path is None:
            raise UsageError(
                f"There is no agent in {run}; name a run in {savedir}, its folder, or a checkpoint."
            )
        path, contents = checkpoint.load_or_fall_back(path)
        given, objects = name_code(env, model, wrappers)
        flags = as_flags({**contents["flags"], **given})
        missing = {
            name: value
            for name, value in contents["flags"].items()
            if name not in given and names_code(name, value)
        }
        if "model" in missing:
            raise code_is_missing(path, {"model": missing["model"]})
        spec = None if "env" in given else checkpoint.spec_in(contents)
        if spec is None and missing:
            raise code_is_missing(path, missing)
        with user_code.offer(objects):
            spec = _look_at(path, flags) if spec is None else spec
            net = build_model(flags, spec)
        checkpoint.load_model(path, contents, net, flags.env, "give another env, or none")
        sample = flags.sample_actions if sample_actions is None else sample_actions
        agent = cls(net, spec, sample)

        def make(render: bool) -> Any:
            if missing:
                raise code_is_missing(path, missing)
            with user_code.offer(objects):
                env = make_env(flags.env_options, render)
                return env if agent._masks is None else show_masks(env, spec.action)

        agent._make_env = make
        return agent

    def make_env(self, render: bool = False) -> Any:
        """Make an environment as the agent was trained on: arguments, wrappers, frame stack.

        Its observations are what `act` takes, action masks included. With `render`, its `render()`
        returns images.
        """
        assert self._make_env is not None
        return self._make_env(render)

    def reset(self) -> None:
        """Clear the agent's memory at the start of an episode."""
        self._counter = EpisodeCounter(1, self.spec.action)
        self._last_action: Any = None
        self._state = self._model.initial_state(batch_size=1)  # type: ignore[operator]

    @torch.inference_mode()
    def act(self, observation: Any, reward: float = 0.0, action_mask: Any = None) -> Any:
        """The action for an observation, both in the environment's own format.

        `reward` is the reward of the last action. `action_mask` says which actions are possible, if
        the observation does not: `info["action_mask"]`, or what `action_masks()` returns.
        """
        frame = self._as_frame(self._with_mask(observation, action_mask))
        row = self._row(frame, reward)
        inputs = map_tree(lambda array: torch.from_numpy(array).unsqueeze(0), row)  # [1, 1, ...]
        output, self._state = self._model(inputs, self._state)
        self._last_action = map_tree(lambda x: x[0].numpy(), as_output(output)["action"])
        taken = environments_action(self._taken, self._last_action)
        return map_tree(_single, self._taken, taken)

    def _with_mask(self, observation: Any, mask: Any) -> Any:
        """The observation with its action mask, as in rows; UsageError if the mask is wrong."""
        if self._masks is None:
            if mask is not None:
                raise UsageError(
                    "This agent was trained without masks of actions and would ignore action_mask; "
                    "leave it out."
                )
            return observation
        if mask is None and isinstance(observation, dict):
            mask = observation.get(ACTION_MASK)
        if mask is None:
            raise UsageError(
                "This agent must know which actions are possible, got no action_mask; give "
                "action_mask=info['action_mask'], or env.action_masks(), to act."
            )
        try:
            return self._masks.add(None, observation, {ACTION_MASK: mask})
        except ValueError as error:
            raise UsageError(str(error)) from error

    def _as_frame(self, observation: Any) -> Any:
        """A copy of the observation, [1, ...] with the spec's dtypes; UsageError if it differs."""

        def convert(leaf: ArraySpec, value: Any) -> np.ndarray:
            array = np.asarray(value)
            if leaf.dtype == "bool":  # bools may come as numbers
                array = array.astype(bool)
            if array.shape != leaf.shape or not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
                raise UsageError(
                    f"The observation must be {describe(self.spec.observation)}, got "
                    f"{array.dtype}{list(array.shape)} for {leaf}."
                )
            return np.array(array, leaf.dtype)[None]

        try:
            return map_tree(convert, self.spec.observation, observation)
        except (KeyError, IndexError, TypeError) as error:
            raise UsageError(
                f"The observation must be {describe(self.spec.observation)}, got "
                f"{type(observation).__name__} ({type(error).__name__}: {error})."
            ) from error

    def _row(self, frame: Any, reward: float) -> Row:
        if self._last_action is None:
            return self._counter.first_row(frame)
        no = np.zeros(1, np.bool_)
        return self._counter.row(frame, np.array([reward]), no, no, self._last_action)


def _look_at(path: Path, flags: TrainingFlags) -> Spec:
    """The spec of `flags.env`, if the checkpoint has none or the environment is another one."""
    if flags.env == REMOTE:
        raise UsageError(
            f"The agent in {path} was trained on environments that dialled in; give env one like "
            "them."
        )
    return look_at(flags.env_options)


def _single(spec: ArraySpec, actions: np.ndarray) -> Any:
    """The action of one environment: a number for Discrete, else an array."""
    return actions[0].item() if spec.num_categories and not spec.shape else np.asarray(actions[0])
