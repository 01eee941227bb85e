"""Mixed precision: stages compute and send sixteen bits, weights stay in thirty-two.

A Keras dtype policy is all that it takes. Under `mixed_bfloat16` and `mixed_float16` activations, and so what a stage
sends to the next one, have half the bytes; weights, their gradients' sum and the optimizer are in float32. Under
`mixed_float16` Keras scales the loss, so that small gradients do not vanish: an overflow in any stage skips the step in
all of them, and halves the scale. Here the scale begins far too high, so that this happens.

    python examples/mixed_precision.py          # 4 stages, half a minute
    python examples/mixed_precision.py --quick  # fewer epochs, for the tests

The same network is trained on scikit-learn's digits under each policy, from the same weights. For each the script
prints the dtypes of weights and of tensors between stages, the bytes that all stages receive for a row, how many steps
the optimizer took and its loss scale, and the loss and accuracy on 357 digits that were held out:

    policy         weights  between stages  received/row  steps  loss scale  test loss  test accuracy
    float32        float32  float32               1536 B    300           1     0.1209         97.5 %
    mixed_bfloat16 float32  bfloat16               768 B    300           1     0.1238         97.8 %
    mixed_float16  float32  float16                768 B    294      262144     0.1030         98.0 %
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow logs errors only; before it is imported

import keras
import sklearn.datasets
import sklearn.model_selection

import tf_gpipe

NUM_STAGES = 4


def compiled_model(strategy: tf_gpipe.GPipeStrategy, policy: str) -> keras.Model:
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        pixels = keras.Input([64], name="pixels")
        x = pixels
        for i in range(7):
            x = keras.layers.Dense(128, "relu", name=f"hidden_{i}")(x)
        logits = keras.layers.Dense(10, dtype="float32", name="logits")(x)  # so that the loss is taken in float32
        model = keras.Model(pixels, logits, name=policy)
        optimizer = keras.optimizers.Adam(0.001)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**24)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def dtypes(values: list) -> str:
    return ",".join(sorted({keras.backend.standardize_dtype(value.dtype) for value in values}))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a model on digits under three dtype policies.")
    parser.add_argument("--quick", action="store_true", help="four epochs (default: fifteen)")
    arguments = parser.parse_args()
    tf_gpipe.set_logical_cpus(NUM_STAGES)
    pixels, digits = sklearn.datasets.load_digits(return_X_y=True)
    pixels, test_pixels, digits, test_digits = sklearn.model_selection.train_test_split(
        (pixels / 16).astype("float32"), digits, test_size=357, random_state=0
    )
    print(f"{'policy':15}weights  between stages  received/row  steps  loss scale  test loss  test accuracy")
    for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
        strategy = tf_gpipe.GPipeStrategy(NUM_STAGES, num_micro_batches=8)
        model = compiled_model(strategy, policy)
        model.fit(pixels, digits, batch_size=72, epochs=4 if arguments.quick else 15, shuffle=False, verbose=0)
        loss, accuracy = model.evaluate(test_pixels, test_digits, verbose=0)

        stages = strategy.plan(model).stages
        sent = dtypes([tensor for stage in stages[1:] for tensor in stage.model.inputs])
        received = sum(stage.received_bytes for stage in stages)
        steps = int(model.optimizer.iterations)
        scale = int(model.optimizer.dynamic_scale) if policy == "mixed_float16" else 1
        print(
            f"{policy:15}{dtypes(model.weights)}  {sent:14}  {received:10} B  {steps:5}  {scale:10}"
            f"  {loss:9.4f}  {100 * accuracy:11.1f} %"
        )
    if arguments.quick:
        print("--quick: too short to learn, it only shows that all of it runs")


if __name__ == "__main__":
    main()
