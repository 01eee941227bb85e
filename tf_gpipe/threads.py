"""What keeps threads apart: one lock for work on models, and attributes that are another in one thread only.

A model's plans, its traced functions and the places of its variables belong to all threads; whoever reads or makes them
does so in turn. Layers belong to all threads as well. While a thread traces a stage, some of their methods act
differently, for this thread:

    layer.call ──▶ one function for all threads ──▶ what this thread has put there, else what was there before

Other threads, which call the layer plainly, see nothing of it. docs/threads.md says what users may count on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

turn = threading.RLock()
"""Held by the thread that plans, places or traces a model. Code of layers runs inside: nothing else may be held for."""


def in_turn(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function that works on what models share between threads: one thread at a time."""

    @functools.wraps(function)
    def waiting(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with turn:
            return function(*args, **kwargs)

    return waiting


@contextlib.contextmanager
def replaced(target: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """While open, an attribute of an instance that is called is `value` in this thread, past Keras's tracking.

    Threads may enter and leave in any order. What someone else puts there meanwhile stays there.
    """
    if not callable(value):
        raise TypeError(f"only what is called can be another in one thread; received {name}={value!r}")
    thread = threading.get_ident()
    with _lock:
        shared = _installed(target, name)
        if shared is None:
            shared = _shared[id(target), name] = _Shared(target, name)
        shared.values.setdefault(thread, []).append(value)
    try:
        yield
    finally:
        with _lock:
            shared.leave(thread, value)


def attribute(target: Any, name: str) -> Any:
    """An attribute of an instance as this thread sees it: never the function that serves all threads."""
    shared = _installed(target, name)
    return getattr(target, name) if shared is None else shared.now()


def is_own(target: Any, name: str) -> bool:
    """Whether an attribute is the instance's own, not its class's, for this thread."""
    shared = _installed(target, name)
    if shared is None:
        return name in vars(target)
    return shared.was_own or threading.get_ident() in shared.values


class _Shared:
    """An attribute that is another in some threads.

    Attributes:
        values: what each of these threads has put there, the latest last.
        was_own: whether the instance had the attribute itself.
        function: what serves all threads.
    """

    def __init__(self, target: Any, name: str) -> None:
        self.values: dict[int, list[Callable[..., Any]]] = {}
        self.was_own = name in vars(target)
        self._target, self._name = target, name
        self._before = getattr(target, name)

        def of_this_thread(*args: Any, **kwargs: Any) -> Any:
            return self.now()(*args, **kwargs)

        self.function = of_this_thread
        vars(target)[name] = of_this_thread

    def now(self) -> Callable[..., Any]:
        """What the attribute is in this thread."""
        values = self.values.get(threading.get_ident())
        return values[-1] if values else self._before

    def leave(self, thread: int, value: Callable[..., Any]) -> None:
        """Takes back what a thread has put there; the last one leaves what was there before."""
        values = self.values[thread]
        del values[next(i for i in reversed(range(len(values))) if values[i] is value)]
        if not values:
            del self.values[thread]
        if self.values:
            return
        own = vars(self._target)
        if own.get(self._name) is self.function:
            if self.was_own:
                own[self._name] = self._before
            else:
                del own[self._name]
        if _shared.get((id(self._target), self._name)) is self:
            del _shared[id(self._target), self._name]


_lock = threading.Lock()
_shared: dict[tuple[int, str], _Shared] = {}
"""By instance and name; each keeps its instance alive, so that no other has its identity."""


def _installed(target: Any, name: str) -> _Shared | None:
    """What serves all threads; None if nothing does, or someone else has put something over it."""
    shared = _shared.get((id(target), name))
    return shared if shared is not None and vars(target).get(name) is shared.function else None
