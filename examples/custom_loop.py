"""A training loop of one's own: `strategy.run` with a `GradientTape`, as in tf.distribute.

The loop is what TensorFlow's guide writes for `MirroredStrategy`: a distributed dataset, a `tf.function`, a tape, an
optimizer, a reduced loss. Inside `strategy.run`, calling the model means calling its pipeline. There is one replica, so
the loss is the plain mean over the mini-batch. The same initial weights are trained by plain Keras with `fit` as well,
on one device, and both come to the same weights.

    python examples/custom_loop.py          # a few seconds of training after the start-up
    python examples/custom_loop.py --quick  # fewer epochs, for the tests

It prints the loss of every epoch, where each weight and its momentum are, and the comparison:

    epoch 10: loss 0.1064
    digits/hidden_0/kernel on CPU:0, its momentum on CPU:0
    this loop and fit of plain Keras: largest difference of any weight 1.2e-07
"""

import argparse
import os
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow logs errors only; before it is imported

import keras
import numpy as np
import sklearn.datasets
import tensorflow as tf

import tf_gpipe

BATCH_SIZE = 72


def make_model(name: str) -> keras.Model:
    hidden = [keras.layers.Dense(64, "tanh", name=f"hidden_{i}") for i in range(3)]
    return keras.Sequential([keras.Input([64]), *hidden, keras.layers.Dense(10, name="logits")], name=name)


def make_optimizer() -> keras.Optimizer:
    return keras.optimizers.SGD(0.02, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a model on digits in a loop of its own.")
    parser.add_argument("--quick", action="store_true", help="two epochs (default: ten)")
    arguments = parser.parse_args()
    epochs = 2 if arguments.quick else 10

    tf_gpipe.set_logical_cpus(4)
    keras.utils.set_random_seed(0)
    pixels, digits = sklearn.datasets.load_digits(return_X_y=True)
    pixels = (pixels / 16).astype("float32")
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    plain = make_model("plain")
    plain.compile(make_optimizer(), loss_fn)

    warnings.filterwarnings("ignore", category=tf_gpipe.GPipeWarning)  # four layers of different size
    strategy = tf_gpipe.GPipeStrategy(num_stages=4, num_micro_batches=8)
    with strategy.scope():
        model = make_model("digits")
        strategy.place(model)  # before anything is traced
        optimizer = make_optimizer()
        optimizer.build(model.trainable_variables)  # after `place`: momenta are made beside their weights
    model.set_weights(plain.get_weights())

    dataset = tf.data.Dataset.from_tensor_slices((pixels, digits)).batch(BATCH_SIZE)
    dataset = strategy.experimental_distribute_dataset(dataset)

    def step(pixels: tf.Tensor, digits: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_fn(digits, model(pixels, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def train_step(pixels: tf.Tensor, digits: tf.Tensor) -> tf.Tensor:
        losses = strategy.run(step, args=(pixels, digits))
        return strategy.reduce("MEAN", losses, axis=None)

    for epoch in range(epochs):
        losses = [float(train_step(*batch)) for batch in dataset]
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")

    for weight, momentum in zip(model.trainable_variables, optimizer.momentums, strict=True):
        print(f"{weight.path:15} on {weight.value.device[-5:]}, its momentum on {momentum.value.device[-5:]}")

    plain.fit(pixels, digits, batch_size=BATCH_SIZE, epochs=epochs, shuffle=False, verbose=0)
    pairs = zip(model.get_weights(), plain.get_weights(), strict=True)
    difference = max(np.max(np.abs(ours - theirs)) for ours, theirs in pairs)
    print(f"this loop and fit of plain Keras: largest difference of any weight {difference:.1e}")
    if arguments.quick:
        print("--quick: too short to learn, it only shows that all of it runs")


if __name__ == "__main__":
    main()
