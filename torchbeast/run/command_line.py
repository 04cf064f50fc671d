"""From the arguments of a program to its flags, and to its exit code."""

import signal
import sys
from collections.abc import Callable

from libtorchbeast import secret
from libtorchbeast.groups import Broken, describe_failure
from libtorchbeast.supervisor import NobodyLeft
from torchbeast.core.learner import NothingFinite
from torchbeast.core.ranks import LostLearner, Place
from torchbeast.envs import check_env
from torchbeast.errors import UsageError
from torchbeast.run.flags import FlagsT, given_flags, with_given_batch, with_recipe, with_values
from torchbeast.run.saved_run import with_saved_flags


def run_command_line(
    flags_class: type[FlagsT], main: Callable[[FlagsT], int], args: list[str] | None = None
) -> int:
    """Read the flags and call `main`; a user's mistake is one sentence and exit code 2."""
    args = sys.argv[1:] if args is None else args
    secret.take()  # before environments are made, which have no use for it
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)),  # as was asked for
        # Also where a shell's background jobs ignore it.
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    try:
        flags = parse(flags_class, args)
        flags.validate()
        return main(flags)
    except UsageError as error:
        print(f"{_error()}: {error}", file=sys.stderr)
        return 2
    # Nothing can be learnt from these, or not by this learner alone.
    except (NobodyLeft, Broken, NothingFinite, LostLearner) as error:
        text = describe_failure(error) if isinstance(error, Broken) else error
        print(f"{_error()}: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _error() -> str:
    place = Place.find()
    return "error" if place.is_alone else f"error (learner {place.rank})"


def parse(flags_class: type[FlagsT], args: list[str]) -> FlagsT:
    """What the command line says, else the saved run, else what is right for the environment."""
    flags = with_values(flags_class(), "command line", given_flags(flags_class, args))
    return complete(flags, args)


def complete(flags: FlagsT, args: list[str] | None) -> FlagsT:
    """With what the saved run says, and the recipe; `args` is the command line, if there is one."""
    flags = with_saved_flags(flags, args)
    check_env(flags.env_options)
    return with_given_batch(with_recipe(flags)) if flags.mode == "train" else flags
