"""The shortest complete program: a Keras model in stages, trained, tested, saved, and loaded with fewer stages.

Everything between `with strategy.scope()` and the last line is plain Keras. The model reads scikit-learn's handwritten
digits; its stages run on logical CPU devices of this machine.

    python examples/quickstart.py          # a few seconds of training after the start-up
    python examples/quickstart.py --quick  # fewer epochs, for the tests

It prints which layers each stage holds, Keras's progress bars, the accuracy on 357 digits that were held out, and what
is left of the difference between the saved model and the one that was loaded into two stages:

    test accuracy 97.8 %
    loaded into 2 stages: largest difference of any logit 0.0e+00
    test accuracy after another epoch 97.5 %

The figures vary a little from machine to machine.
"""

import argparse
import os
import pathlib
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow logs errors only; before it is imported

import keras
import numpy as np
import sklearn.datasets
import sklearn.model_selection

import tf_gpipe


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a model on digits in four stages, and goes on in two.")
    parser.add_argument("--quick", action="store_true", help="two epochs (default: ten)")
    arguments = parser.parse_args()

    tf_gpipe.set_logical_cpus(4)  # only without GPUs, and before anything else
    keras.utils.set_random_seed(0)
    pixels, digits = sklearn.datasets.load_digits(return_X_y=True)  # (1797, 64), from 0 to 16
    pixels, test_pixels, digits, test_digits = sklearn.model_selection.train_test_split(
        (pixels / 16).astype("float32"), digits, test_size=357, random_state=0
    )

    strategy = tf_gpipe.GPipeStrategy(num_stages=4, num_micro_batches=8)
    with strategy.scope():
        hidden = [keras.layers.Dense(128, "relu", name=f"hidden_{i}") for i in range(8)]
        model = keras.Sequential([keras.Input([64]), *hidden, keras.layers.Dense(10, name="logits")], name="digits")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    print(strategy.plan(model))

    model.fit(pixels, digits, batch_size=72, epochs=2 if arguments.quick else 10, verbose=2)
    print(f"test accuracy {100 * model.evaluate(test_pixels, test_digits, verbose=0)[1]:.1f} %")
    logits = model.predict(test_pixels, verbose=0)

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "digits.keras"
        model.save(path)
        fewer = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=8)
        with fewer.scope():
            loaded = keras.models.load_model(path)
    print(fewer.plan(loaded))
    difference = np.max(np.abs(loaded.predict(test_pixels, verbose=0) - logits))
    print(f"loaded into 2 stages: largest difference of any logit {difference:.1e}")

    loaded.fit(pixels, digits, batch_size=72, verbose=2)  # goes on with the optimizer's state
    print(f"test accuracy after another epoch {100 * loaded.evaluate(test_pixels, test_digits, verbose=0)[1]:.1f} %")
    if arguments.quick:
        print("--quick: too short to learn, it only shows that all of it runs")


if __name__ == "__main__":
    main()
