"""`jit_compile="auto"`: whether XLA pays, found out by trying it.

XLA joins small operations into large ones, at the price of TensorFlow's own kernels for the large ones. On processors
that mostly costs time, and it always costs start-up; on accelerators it mostly pays (docs/benchmarks.md). So the first
call that trains on known shapes takes one micro-batch of zeros through the stage with most operations, both ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import tensorflow as tf

from tf_gpipe import compat
from tf_gpipe.gradients import Buffers
from tf_gpipe.placed_function import PlacedFunction
from tf_gpipe.stage import NotForXLAError, Stage
from tf_gpipe.stage_functions import BackwardKind, input_specs
from tf_gpipe.values import has_gradient

if TYPE_CHECKING:
    from tf_gpipe.model_graph import Ref

REPEATS = 3
GAIN = 0.1
"""Share of the time that XLA must save to be chosen: below, noise would decide."""


def xla_pays(
    plain: Stage,
    compiled: Stage,
    training: bool | None,
    kinds: Mapping[Ref, Any],
    needs_gradient: Mapping[Ref, bool],
    *,
    keep: bool,
) -> tuple[bool, str] | None:
    """Tells whether a micro-batch goes through a stage faster when XLA compiles it, and the reason in words.

    Args:
        plain: the stage without XLA.
        compiled: the same stage with it.
        training: the training flag.
        kinds: kinds of the value and of the mask of everything that goes into the stage.
        needs_gradient: whether the gradient of each is wanted.
        keep: whether the backward pass takes kept activations, and makes none again.

    Returns:
        None if the shapes are not known yet, so that there is nothing to try it on.
    """
    seconds = []
    for stage in (plain, compiled):
        try:
            with tf.init_scope(), tf.device(stage.device):
                passes = _passes(stage, training, kinds, needs_gradient, keep=keep)
                if passes is None:
                    return None
                seconds.append(_seconds(passes))
        except (tf.errors.OpError, NotForXLAError) as error:
            # Without XLA it can only be the zeros, which the model's own checks may refuse.
            what = "XLA cannot compile" if stage is compiled else "XLA cannot be tried on zeros in"
            return False, f"stages are not compiled: {what} stage {plain.index} ({compat.one_line(error)})"
    without, with_xla = (1e3 * s for s in seconds)
    pays = with_xla < (1 - GAIN) * without
    timed = f"a micro-batch took {with_xla:.2f} ms forward and back through stage {plain.index} with XLA"
    timed += f" and {without:.2f} without"
    return pays, f"stages are {'' if pays else 'not '}compiled: {timed}"


def first_refused(stages: Sequence[Stage], training: bool | None, kinds: Mapping[Ref, Any]) -> str | None:
    """Of stages to be compiled, none of which was tried, the first that XLA cannot take, with the reason, in words."""
    for stage in stages:
        try:
            _, forward = stage.traced(training, kinds, None)
            reason = compat.refusal_of_xla(cast(PlacedFunction, forward.function).traced, stage.device)
        except NotForXLAError as error:
            reason = compat.one_line(error)
        if reason is not None:
            return f"XLA cannot compile stage {stage.index} ({reason})"
    return None


def _passes(
    stage: Stage,
    training: bool | None,
    kinds: Mapping[Ref, Any],
    needs_gradient: Mapping[Ref, bool],
    *,
    keep: bool,
) -> Callable[[], list[tf.Tensor]] | None:
    """What takes a micro-batch of zeros through a stage, forward and, if there are gradients, back."""
    signature, forward = stage.traced(training, kinds, needs_gradient if keep else None)
    inputs = _zeros(input_specs(signature, forward.given))
    if inputs is None:
        return None
    wanted, trained = tuple(needs_gradient[ref] for ref in signature.inputs), stage.trained(signature)
    kind = BackwardKind(signature, wanted, tuple(map(has_gradient, forward.values)), (True,) * len(forward.losses))
    given = _zeros(kind.specs(forward.values, forward.losses))
    recorded = stage.recorded(signature, wanted) if keep else None
    if given is None:
        return None
    if not given or not (trained or any(wanted)):
        return lambda: forward.function(*inputs)
    sums = Buffers.of(trained).zeros(trained, compiled=stage.jit_compile)
    if recorded is not None and stage.keeps(recorded):
        there, back = recorded.kept_forward, recorded.kept_backward
        return lambda: back.function(*there.take(there.function(*inputs)).residuals, *given, *sums)
    back = stage.backward(kind)
    return lambda: [*forward.function(*inputs), *back.function(*inputs, *given, *sums)]


def _zeros(specs: list[Any]) -> list[tf.Tensor] | None:
    """Tensors of these kinds; None if there are none without knowing more."""
    known = all(isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined() for spec in specs)
    return [tf.zeros(spec.shape, spec.dtype) for spec in specs] if known else None


def _seconds(run: Callable[[], list[tf.Tensor]]) -> float:
    """The shortest of a few runs, after one that is not counted."""
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        for tensor in run():
            if tensor.dtype.is_floating:
                tensor.numpy()  # until it has been computed, wherever it is
        times.append(time.perf_counter() - start)
    return min(times[1:])
