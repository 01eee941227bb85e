"""A pytest plugin that runs every test under a `GPipeStrategy`, or plainly, and writes down how each one ended.

`run.py` starts pytest with it. One line of JSON is written when a test starts and one when it ends, so that a test that
never ends takes nothing but itself with it; tests that already have a line are not run again.
"""

import collections
import faulthandler
import fnmatch
import functools
import importlib.abc
import importlib.machinery
import json
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from expected import OWN_STRATEGY

ABSENT = ("grain", "jax", "pandas", "torch")
"""Packages that Keras's test modules import at their top, though only a few of their tests use them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("keras_suite")
    group.addoption("--stages", type=int, default=0, help="K; 0 for plain Keras")
    group.addoption("--micro-batches", type=int, default=1, help="M")
    group.addoption("--outcomes", type=pathlib.Path, required=True, help="file to add the outcomes to")
    group.addoption("--test-seconds", type=float, default=120.0, help="after which a test counts as hanging")


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("multi_device", "requires_trainable_backend", "skipif_backend"):
        config.addinivalue_line("markers", f"{marker}: one of the markers of Keras's tests")
    import tensorflow as tf

    stages = config.getoption("--stages")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * max(2, stages))
    config.pluginmanager.register(Recorder(config))
    if stages:
        config.pluginmanager.register(UnderStrategy(stages, config.getoption("--micro-batches")))


class UnderStrategy:
    """Makes a strategy the current one for the body of each test, and counts the calls of its pipelines."""

    def __init__(self, num_stages: int, num_micro_batches: int) -> None:
        self.num_stages = num_stages
        self.num_micro_batches = num_micro_batches
        self.calls: list[int] = []
        """Of each call of a pipeline, the number of stages that have operations."""

        from tf_gpipe.pipeline import Pipeline

        plain = Pipeline.__call__

        @functools.wraps(plain)
        def counted(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(sum(bool(stage.operations) for stage in pipeline.plan.stages))
            return plain(pipeline, *args, **kwargs)

        Pipeline.__call__ = counted
        self.move_xla()
        self.move_apply()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """Makes models of what the test modules mix from a trainer and a layer: only a model runs in a pipeline."""
        from keras.src.backend.tensorflow import trainer

        with mock.patch.object(trainer, "TensorFlowTrainer", _model_trainer()):
            return (yield)

    def move_xla(self) -> None:
        """Takes `jit_compile=True` from a model to its strategy, which is where a user is told to put it."""
        from keras.src.trainers.trainer import Trainer

        import tf_gpipe

        plain = Trainer.jit_compile

        def set_jit_compile(model: Any, value: Any) -> None:
            strategy = getattr(model, "_distribute_strategy", None)
            if value is True and isinstance(strategy, tf_gpipe.GPipeStrategy):
                strategy._jit_compile, value = True, False
            plain.fset(model, value)

        Trainer.jit_compile = plain.setter(set_jit_compile)

    def move_apply(self) -> None:
        """Calls `optimizer.apply` inside `strategy.run`, where TensorFlow wants it under any strategy."""
        import tensorflow as tf
        from keras.src.optimizers import base_optimizer, loss_scale_optimizer, multi_optimizer

        def moved(plain: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(plain)
            def apply(*args: Any, **kwargs: Any) -> Any:
                if tf.distribute.has_strategy() and tf.distribute.in_cross_replica_context():
                    return tf.distribute.get_strategy().run(plain, args, kwargs)
                return plain(*args, **kwargs)

            return apply

        base_optimizer.BaseOptimizer.apply = moved(base_optimizer.BaseOptimizer.apply)
        loss_scale_optimizer.LossScaleOptimizer.apply = moved(loss_scale_optimizer.LossScaleOptimizer.apply)
        multi_optimizer.MultiOptimizer.apply = moved(multi_optimizer.MultiOptimizer.apply)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.calls.clear()
        # The body alone, since the `setUp` of Keras's tests resets the graph, which forgets a strategy that is open.
        other = any(fnmatch.fnmatchcase(item.nodeid, pattern) for pattern in OWN_STRATEGY)
        around = self.after_strategy if other else self.under_strategy
        item.obj = functools.wraps(item.obj)(functools.partial(around, item.obj))
        try:
            return (yield)
        finally:
            item.user_properties.append(("stages", max(self.calls, default=0)))

    def under_strategy(self, test: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        import tensorflow as tf

        tf.distribute.experimental_set_strategy(self.strategy())
        try:
            test(*args, **kwargs)
        finally:
            tf.distribute.experimental_set_strategy(None)

    def after_strategy(self, test: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Trains a model under the strategy, leaves its scope, and runs the test."""
        import keras
        import numpy as np

        with self.strategy().scope():
            model = keras.Sequential([keras.Input([2]), *(keras.layers.Dense(2) for _ in range(self.num_stages))])
            model.compile("sgd", "mse")
        model.fit(np.ones([4, 2]), np.ones([4, 2]), verbose=0)
        assert max(self.calls) == self.num_stages
        self.calls.clear()
        test(*args, **kwargs)

    def strategy(self) -> Any:
        import tensorflow as tf

        import tf_gpipe

        there = len(tf.config.list_logical_devices("CPU"))  # A test may have started the devices anew, with fewer.
        devices = [f"/CPU:{k % there}" for k in range(self.num_stages)]
        return tf_gpipe.GPipeStrategy(num_micro_batches=self.num_micro_batches, devices=devices)


class Recorder:
    """Writes the outcomes, passes over the tests that have one, and ends the process where a test hangs."""

    def __init__(self, config: pytest.Config) -> None:
        path = config.getoption("--outcomes")
        self.seconds = config.getoption("--test-seconds")
        self.known = {json.loads(line)["test"] for line in path.read_text().splitlines()} if path.exists() else set()
        self.file = path.open("a")
        self.stacks = path.with_suffix(".stacks").open("w")
        self.reports: dict[str, list[pytest.TestReport]] = collections.defaultdict(list)

    def write(self, test: str, outcome: str, message: str = "", **more: Any) -> None:
        print(json.dumps({"test": test, "outcome": outcome, "message": message, **more}), file=self.file, flush=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """Lets test modules import what is not installed; a test that uses it fails, in plain Keras too."""
        finder = _StandIns()
        sys.meta_path.append(finder)
        try:
            return (yield)
        finally:
            sys.meta_path.remove(finder)
            for name in finder.made:  # Keras must not take a stand-in for the package.
                del sys.modules[name]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid not in self.known:
            self.write(report.nodeid, "fail", f"not imported: {_last_line(report)}")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.known]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.write(item.nodeid, "start")
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.stacks)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports[report.nodeid].append(report)
        if report.when != "teardown":
            return
        reports = self.reports.pop(report.nodeid)
        more = dict(reports[-1].user_properties) | {"seconds": round(sum(r.duration for r in reports), 2)}
        failed = [r for r in reports if r.failed]
        if failed:
            self.write(report.nodeid, "fail", _last_line(failed[0]), **more)
        else:
            self.write(report.nodeid, "skip" if any(r.skipped for r in reports) else "pass", **more)

    def pytest_sessionfinish(self) -> None:
        self.write("", "end")


def _model_trainer() -> type:
    """What stands for Keras's trainer class in a test module: `class Model(Trainer, layers.Dense)` becomes a model."""
    import keras
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    class ModelTrainer(keras.Model):
        def __init_subclass__(cls) -> None:
            super().__init_subclass__()
            cls.call = next(base for base in cls.__mro__ if "call" in vars(base) and base is not keras.Model).call

        def __init__(self) -> None:
            TensorFlowTrainer.__init__(self)  # The layer's own part has been made before.

        @property
        def layers(self) -> Any:
            return self.own_layers if hasattr(self, "own_layers") else super().layers

        @layers.setter
        def layers(self, layers: Any) -> None:
            self.own_layers = layers

    return ModelTrainer


def _last_line(report: Any) -> str:
    """What a failure says, on one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join((crash.message if crash else str(report.longrepr)).split())[:600]


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes an empty module for each import from `ABSENT` that nothing else can serve."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        self.made.append(spec.name)
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            return type(name, (), {})  # No object is one.
        return mock.MagicMock(name=f"{self.__name__}.{name}")
