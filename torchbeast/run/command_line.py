"""The command line of both beasts: parse the flags, run the program, return an exit code."""

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
    secret.take()  # the token: environments must not inherit it
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)),  # as requested
        # Shells start background jobs with SIGINT ignored; here Ctrl-C always works.
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    try:
        flags = parse(flags_class, args)
        flags.validate()
        return main(flags)
    except UsageError as error:
        print(f"{_error()}: {error}", file=sys.stderr)
        return 2
    # Training cannot go on: no environment works, no gradient is finite, or a learner is lost.
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
    """The flags: from the command line, else the saved run, else the environment's recipe."""
    flags = with_values(flags_class(), "command line", given_flags(flags_class, args))
    return complete(flags, args)


def complete(flags: FlagsT, args: list[str] | None) -> FlagsT:
    """Add the values of the saved run and of the recipe; `args` is the command line, or None."""
    flags = with_saved_flags(flags, args)
    check_env(flags.env_options)
    return with_given_batch(with_recipe(flags)) if flags.mode == "train" else flags
