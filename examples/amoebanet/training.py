"""The training recipe of AmoebaNet: learning rate, dropped paths, checkpoints, transfer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from amoebanet.model import AuxiliaryHead, Cell, Classifier

LOSS_WEIGHTS = {"logits": 1.0, "auxiliary": 0.4}


@keras.saving.register_keras_serializable("amoebanet")
class WarmUpAndDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Rises from 0 in a line, then falls by a factor after each epoch, down to a floor.

    Args:
        peak: the rate that the decay begins from; the epochs of the warm-up count for the decay, too.
        steps_per_epoch: training steps of one epoch.
        warm_up_epochs: how long it rises.
        decay: the factor.
        floor: the least rate, as a fraction of `peak`.
    """

    def __init__(
        self, peak: float, steps_per_epoch: int, warm_up_epochs: float = 3.0, decay: float = 0.9, floor: float = 1e-4
    ) -> None:
        self.peak = peak
        self.steps_per_epoch = steps_per_epoch
        self.warm_up_epochs = warm_up_epochs
        self.decay = decay
        self.floor = floor

    def __call__(self, step):
        """Returns the rate of a step."""
        epoch = ops.cast(step, "float32") / self.steps_per_epoch
        decayed = ops.maximum(self.decay ** ops.floor(epoch), self.floor)
        risen = epoch / self.warm_up_epochs if self.warm_up_epochs else 1.0
        return self.peak * ops.where(epoch < self.warm_up_epochs, risen, decayed)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of `__init__`."""
        names = ("peak", "steps_per_epoch", "warm_up_epochs", "decay", "floor")
        return {name: getattr(self, name) for name in names}


class ScheduledDropPath(keras.callbacks.Callback):
    """Lowers the probability to keep a path in a line, from 1 at the first step to a final one at the last.

    Args:
        final_keep: the probability at the last step.
        num_steps: steps of the whole training.
    """

    def __init__(self, final_keep: float, num_steps: int) -> None:
        super().__init__()
        self.final_keep = final_keep
        self.num_steps = num_steps

    def on_train_begin(self, logs=None) -> None:
        """Finds the cells, and the step to go on from."""
        self.cells = [layer for layer in self.model.layers if isinstance(layer, Cell)]
        self.step = int(self.model.optimizer.iterations)

    def on_train_batch_begin(self, batch, logs=None) -> None:
        """Sets the probability of the step."""
        keep = 1 - min(1.0, self.step / self.num_steps) * (1 - self.final_keep)
        for cell in self.cells:
            cell.keep.assign(keep)
        self.step += 1


class Checkpoints:
    """Saves after each epoch all that training goes on from: weights, optimizer, seeds of random layers.

    Args:
        model: a compiled model.
        directory: where the newest checkpoint is.
    """

    def __init__(self, model: keras.Model, directory: Path) -> None:
        model.optimizer.build(model.trainable_variables)
        # By name, TensorFlow would not find layers in lists.
        variables = [variable.value for variable in (*model.variables, *model.optimizer.variables)]
        checkpoint = tf.train.Checkpoint(variables=variables)
        self.manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=1)
        self.callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: self.manager.save(epoch + 1))

    def restore(self) -> None:
        """Loads the newest checkpoint, of which there is one if `epochs_done` is not 0."""
        self.manager.checkpoint.restore(self.manager.latest_checkpoint).assert_existing_objects_matched()


def epochs_done(directory: Path) -> int:
    """The number of epochs after which the newest checkpoint in a directory was saved; 0 if there is none."""
    path = tf.train.latest_checkpoint(str(directory))
    return int(path.rpartition("-")[2]) if path else 0


def compile_model(
    model: keras.Model,
    learning_rate: float | keras.optimizers.schedules.LearningRateSchedule,
    *,
    label_smoothing: float = 0.1,
    average: float = 0.9999,
    epsilon: float = 1.0,
) -> None:
    """Compiles a model for one-hot labels: RMSProp, smoothed cross-entropy, top-1 and top-5 of the main output.

    Args:
        model: the model.
        learning_rate: a number or a schedule.
        label_smoothing: the part of each label that is spread over all classes.
        average: the decay of the moving averages of weights; 0 for none.
        epsilon: of RMSProp.
    """
    averages = {"use_ema": True, "ema_momentum": average} if average else {}
    optimizer = keras.optimizers.RMSprop(learning_rate, rho=0.9, momentum=0.9, epsilon=epsilon, **averages)
    losses, weights = {}, {}
    for name in model.output:
        losses[name] = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=label_smoothing)
        weights[name] = LOSS_WEIGHTS[name]
    top_1 = keras.metrics.CategoricalAccuracy(name="top_1")
    top_5 = keras.metrics.TopKCategoricalAccuracy(5, name="top_5")
    model.compile(optimizer, losses, loss_weights=weights, metrics={"logits": [top_1, top_5]})


def metric_names(model: keras.Model) -> tuple[str, str]:
    """What Keras calls top-1 and top-5 in its results: with several outputs, the output's name comes first."""
    prefix = "logits_" if len(model.output) > 1 else ""
    return f"{prefix}top_1", f"{prefix}top_5"


def averaging_callbacks(model: keras.Model) -> list[keras.callbacks.Callback]:
    """The callback that evaluates by the averages of weights, where there are any."""
    return [keras.callbacks.SwapEMAWeights()] if getattr(model.optimizer, "use_ema", False) else []


def load_pretrained(model: keras.Model, path: Path) -> None:
    """Loads all weights of a file but those of the classifiers, which stay new.

    Args:
        model: a model that has not been compiled, with the cells and filters of the file's.
        path: a `.weights.h5` file.
    """
    heads = [layer for layer in model.layers if isinstance(layer, AuxiliaryHead | Classifier)]
    model.load_weights(path, objects_to_skip=heads)
