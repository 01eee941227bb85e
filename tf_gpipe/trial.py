"""`jit_compile="auto"`: whether XLA pays, found out by trying it.

XLA joins small operations into large ones. On a stage of many small operations that saves up to a third of its time; on
one of a few wide layers it costs as much, and it always costs start-up (docs/benchmarks.md). So the first call whose
shapes are known runs the forward function of the stage with most operations, on zeros, both ways.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_gpipe.stage import Stage
from tf_gpipe.stage_functions import input_specs

if TYPE_CHECKING:
    from tf_gpipe.model_graph import Ref

REPEATS = 3
GAIN = 0.1
"""Share of the time that XLA must save to be chosen: below, noise would decide."""


def xla_pays(plain: Stage, compiled: Stage, training: bool | None, kinds: Mapping[Ref, Any]) -> tuple[bool, str] | None:
    """Tells whether a stage's forward pass is faster when XLA compiles it, and the reason in words.

    Args:
        plain: the stage without XLA.
        compiled: the same stage with it.
        training: the training flag.
        kinds: kinds of the value and of the mask of everything that goes into the stage.

    Returns:
        None if the shapes are not known yet, so that there is nothing to try it on.
    """
    seconds = []
    for stage in (plain, compiled):
        signature, forward = stage.traced(training, kinds, None)
        specs = input_specs(signature, forward.given)
        if not all(spec.shape.is_fully_defined() for spec in specs):
            return None
        try:
            with tf.init_scope(), tf.device(stage.device):
                seconds.append(_seconds(forward.function, [tf.zeros(spec.shape, spec.dtype) for spec in specs]))
        except tf.errors.OpError as error:
            return False, f"stages are not compiled: XLA cannot compile stage {plain.index} ({type(error).__name__})"
    without, with_xla = (1e3 * s for s in seconds)
    pays = with_xla < (1 - GAIN) * without
    timed = f"the forward pass of stage {plain.index} took {with_xla:.2f} ms with XLA and {without:.2f} without"
    return pays, f"stages are {'' if pays else 'not '}compiled: {timed}"


def _seconds(function: Any, inputs: list[tf.Tensor]) -> float:
    """The shortest of a few runs, after one that is not counted."""
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        for tensor in function(*inputs):
            if tensor.dtype.is_floating:
                tensor.numpy()  # until it has been computed, wherever it is
        times.append(time.perf_counter() - start)
    return min(times[1:])
