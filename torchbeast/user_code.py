"""The user's own environments and models: imported by name, or passed on as objects.

A name is `package.module:attribute`. An object that a program passes, as in
`torchbeast.train(env=MyEnv)`, may have no name that another process can import: a class in a
notebook, a lambda. While such an object is in use, it is offered under a name here (`offer`), and
sent to child processes as cloudpickle's bytes, over memory that only parent and child share. Such
bytes are never read from a file, a checkpoint or the network. This module does not import torch.
"""

import contextlib
import functools
import importlib.util
import pickle
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchbeast.errors import UsageError

_HERE = Path(__file__).parent
_OUR_PACKAGES = [_HERE, _HERE.with_name("libtorchbeast")]

_on_offer: dict[str, Any] = {}
_uses: Counter[str] = Counter()  # by name: how many `offer` blocks use it
_num_offering = 0
_lock = threading.Lock()  # guards all three


@contextlib.contextmanager
def offer(objects: Mapping[str, Any]) -> Iterator[None]:
    """While entered, `find` returns these objects by name, here and in processes started meanwhile.

    Several threads may offer objects at once; UsageError for different objects under one name.
    """
    global _num_offering
    with _lock:
        if taken := [k for k, v in objects.items() if _on_offer.get(k, v) is not v]:
            raise UsageError(
                f"Another run of this program uses a different {' and a different '.join(taken)}; "
                "wait until it ends, or give one of them another name."
            )
        _on_offer.update(objects)
        _uses.update(objects.keys())
        _num_offering += 1
    try:
        yield
    finally:
        with _lock:
            _num_offering -= 1
            _uses.subtract(objects.keys())
            for name in objects:
                if _uses[name] == 0:
                    del _on_offer[name]


def is_offering() -> bool:
    """Whether child processes get the program's objects from here, not from its main module."""
    return _num_offering > 0


def get(name: str) -> Any:
    """The object that is offered under this name, or None."""
    return _on_offer.get(name)


def find(name: str, flag: str) -> Any:
    """The object named `package.module:attribute`; a UsageError mentions the `flag` it was in."""
    if name in _on_offer:
        return _on_offer[name]
    module_name, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{flag} takes package.module:name, and {name} cannot be imported ({error})."
        ) from error
    except Exception as error:
        raise UsageError(f"{flag} {name}: its module fails with {say_where(error)}.") from error


def name_of(thing: Any) -> tuple[str, bool]:
    """`module:name` of a class or function, and whether other processes can import it by name."""
    named = thing
    while isinstance(named, functools.partial):
        named = named.func
    named = named if hasattr(named, "__qualname__") else type(named)
    module, name = named.__module__, named.__qualname__
    found = getattr(sys.modules.get(module), name, None)
    can_import = found is thing and module != "__main__" and _has_source(module)
    return f"{module}:{name}", can_import


def pack(names: Sequence[str] | None = None) -> bytes:
    """The offered objects (None: all of them) as bytes for a child process; empty without any."""
    objects = {k: v for k, v in _on_offer.items() if names is None or k in names}
    if not objects:
        return b""
    import cloudpickle

    try:
        return cloudpickle.dumps(objects)
    except Exception as error:  # the user's objects may raise anything
        raise UsageError(
            f"{' and '.join(objects)} cannot be handed to other processes ({type(error).__name__}: "
            f"{error}); make inside of it what it needs, or name it as package.module:name."
        ) from error


def unpack(data: bytes) -> None:
    """In a child process: offer the objects that its parent has packed with `pack()`."""
    global _num_offering
    if data:
        _on_offer.update(pickle.loads(data))
        _num_offering += 1


def say_where(error: BaseException) -> str:
    """An exception in one line, with the innermost line of the user's own code in its traceback.

    Without such a line, which is one outside of installed packages, the line that raised it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_installed(frame.filename)]
    frame = (own or frames)[-1]
    text = str(error).strip().splitlines()
    where = f"{frame.filename}:{frame.lineno}: {frame.line}"
    return f"{type(error).__name__}: {text[0] if text else ''} ({where})"


def _is_installed(filename: str) -> bool:
    """Whether the file belongs to an installed package, or to this project."""
    path = Path(filename)
    return "site-packages" in path.parts or any(path.is_relative_to(p) for p in _OUR_PACKAGES)


def _has_source(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a module that was created at run time
        return False
