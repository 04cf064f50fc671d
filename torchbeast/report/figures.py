"""The figures that a run reports, with one name for terminal, CSV, TensorBoard and docs/runs.md."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """What a figure is, and how it is shown."""

    group: str
    """The first part of its TensorBoard tag: <group>/<name>."""
    meaning: str
    form: str = "{:,.2f}"
    in_view: bool = True
    """Whether the live view shows it."""


FIGURES = {
    "step": Figure("train", "environment steps that were learnt from", "{:,.0f}"),
    "sps": Figure("system", "steps per second since the last row", "{:,.0f}"),
    "mean_episode_return": Figure("episodes", "mean return of the last 100 episodes"),
    "eval_return": Figure("episodes", "mean return of the last evaluation (`--eval_every`)"),
    "eval_step": Figure("episodes", "step of the weights in it", "{:,.0f}", in_view=False),
    "total_loss": Figure("train", "sum of the losses below, per step of the optimizer"),
    "episodes": Figure("episodes", "episodes that have ended", "{:,.0f}"),
    "mean_episode_step": Figure("episodes", "mean length of the last 100 episodes", "{:,.0f}"),
    "pg_loss": Figure("train", "policy gradient", in_view=False),
    "baseline_loss": Figure("train", "error of the value, times `--baseline_cost`", in_view=False),
    "entropy_loss": Figure("train", "negative entropy, times `--entropy_cost`"),
    "grad_norm": Figure("train", "norm of the gradient before it is clipped", "{:,.1f}"),
    "learning_rate": Figure("train", "of the last update", "{:.2e}"),
    "effective_sample_size": Figure(
        "train", "of the importance weights, as a part of the steps; 1: all weigh the same"
    ),
    "explained_variance": Figure("train", "of V-trace's targets by the value; 1 is perfect"),
    "clipped_rho_fraction": Figure("train", "part of the importance weights clipped", "{:.1%}"),
    "policy_lag": Figure("train", "updates between acting and learning, mean", "{:.1f}"),
    "batch_size": Figure("train", "rollouts in an update, mean", "{:,.1f}"),
    "updates": Figure("train", "updates of the weights", "{:,.0f}", in_view=False),
    "dropped_rollouts": Figure(
        "train", "rollouts older than `--max_policy_lag`, so far", "{:,.0f}", in_view=False
    ),
    "nonfinite_rollouts": Figure(
        "train", "rollouts left out, as their gradient was not finite", "{:,.0f}", in_view=False
    ),
    "skipped_updates": Figure(
        "train", "updates left out, as no gradient was finite", "{:,.0f}", in_view=False
    ),
    "outliers": Figure(
        "train", "numbers far from the mean when normalising, so far", "{:,.0f}", in_view=False
    ),
    "padded_rollouts": Figure(
        "system", "rollouts that ended with their process or connection", "{:,.0f}", in_view=False
    ),
    "num_learners": Figure("system", "learners with rollouts for an update, mean", "{:.1f}"),
    "num_actors": Figure("system", "groups of environments", "{:,.0f}", in_view=False),
    "inference_batch_size": Figure("system", "rows the agent answers at once, mean", "{:.1f}"),
    "inference_queue_size": Figure("system", "rows that wait for the agent", in_view=False),
    "inference_idle": Figure("system", "part of their time that inference threads wait", "{:.0%}"),
    "learner_queue_size": Figure("system", "rollouts that wait for the learner", "{:.1f}"),
    "learner_idle": Figure("system", "part of their time that learner threads wait", "{:.0%}"),
    **{
        f"actors_wait_for_{who}": Figure(
            "system", f"fraction of time actors wait for the {who}", in_view=False
        )
        for who in ("environments", "agent", "learner")
    },
}


def tag_of(name: str) -> str:
    """A figure's TensorBoard tag; one that is not in FIGURES has a group in its name, or `own`."""
    if "/" in name:
        return name
    return f"{FIGURES[name].group if name in FIGURES else 'own'}/{name}"


def show(name: str, value: float | int | None) -> str:
    """A figure's value as text, in its own format."""
    return "-" if value is None else FIGURES[name].form.format(value)
