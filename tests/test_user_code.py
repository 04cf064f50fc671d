"""Objects of the user's program: found by name, or handed to the processes that it starts."""

import functools
import subprocess
import sys
import threading

import pytest

from tests.helpers.tasks import Corridor
from torchbeast import user_code
from torchbeast.errors import UsageError


class Own:
    """Something with a name that can be imported."""


def test_a_class_of_a_module_is_named_and_not_handed_over():
    assert user_code.name_of(Corridor) == ("tests.helpers.tasks:Corridor", True)
    assert user_code.find("tests.helpers.tasks:Corridor", "--env") is Corridor


def test_what_no_module_has_under_its_name_must_be_handed_over():
    class Local:
        pass

    _, can_import = user_code.name_of(Local)
    assert not can_import
    assert user_code.name_of(functools.partial(Corridor, size=3)) == (
        "tests.helpers.tasks:Corridor",
        False,
    )
    main = sys.modules["__main__"]
    assert user_code.name_of(type("InMain", (), {"__module__": main.__name__}))[1] is False


def test_an_offer_ends():
    with user_code.offer({"__main__:thing": 7}):
        assert user_code.find("__main__:thing", "--env") == 7
        assert user_code.is_offering()
    assert user_code.get("__main__:thing") is None
    assert not user_code.is_offering()


def test_only_what_is_asked_for_is_packed():
    """A worker has no use for the model, which would make it import torch."""
    with user_code.offer({"a": 1, "b": threading.Lock()}):
        assert user_code.pack(["a"])
        assert user_code.pack([]) == b""
        with pytest.raises(UsageError, match=r"b cannot be handed to other processes .*TypeError"):
            user_code.pack(["b"])


def test_another_process_finds_what_was_packed():
    add = 3
    with user_code.offer({"__main__:f": lambda x: x + add}):
        data = user_code.pack()
    program = (
        "import sys\nfrom torchbeast import user_code\n"
        "user_code.unpack(sys.stdin.buffer.read())\n"
        "assert user_code.find('__main__:f', '--env')(4) == 7 and user_code.is_offering()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], input=data, timeout=60, check=True)


def test_a_module_that_fails_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "fails_on_import.py").write_text("x = 1\nraise KeyError('key')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"fails with KeyError.*fails_on_import.py:2: raise Key"):
        user_code.find("fails_on_import:Model", "--model")


def test_offers_of_several_threads_do_not_end_each_other():
    first, second = user_code.offer({"a": 1, "b": 2}), user_code.offer({"b": 2, "c": 3})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (user_code.get("a"), user_code.get("b"), user_code.get("c")) == (None, 2, 3)
    assert user_code.is_offering()
    with pytest.raises(UsageError, match="uses a different c; wait"), user_code.offer({"c": 4}):
        pass
    second.__exit__(None, None, None)
    assert user_code.get("b") is None
    assert not user_code.is_offering()
