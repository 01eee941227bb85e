"""A language model whose output layer is its embedding's table: one weight, used on the first and on the last stage.

Tied embeddings (arXiv:1608.05859) are a `keras.layers.ReversibleEmbedding` that is called twice. The table has one
place, on the first stage, where its optimizer state is too; the last stage reads it from there. Both stages make a
gradient of it, and the two are added, as in plain Keras. To show this, the script takes the gradients of the same model
with two separate tables, whose sum must be the gradient that the pipeline gives.

The model is a small causal transformer over characters, and the text is Python's own language reference, which the
standard library carries for `help()`. The causal mask is all that tells the model about positions.

    python examples/tied_embeddings.py          # 3 stages, about a minute
    python examples/tied_embeddings.py --quick  # a few steps, for the tests

It prints the plan, where the table is used and kept, the comparison of the gradients, that of the weights with plain
Keras's after five steps, and what the trained model needs to tell one character of text that it has not seen:

    the table is used on stages [0, 2] and kept on CPU:0
    norms of the gradients of a lookup's and an output's own table 1.312 and 1.526
    gradient of the tied table: largest difference from their sum 2.7e-07
    plain Keras and 3 stages: largest difference of any weight 1.2e-07
    test text: 3.42 bits a character
"""

import argparse
import contextlib
import os
import pydoc_data.topics

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow logs errors only; before it is imported

import keras
import numpy as np
import tensorflow as tf

import tf_gpipe

NUM_STAGES = 3
LENGTH, CHANNELS, HEADS, BLOCKS, CHARACTERS = 64, 64, 4, 3, 128
BATCH_SIZE, CHECK_STEPS = 64, 5
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def load_text() -> np.ndarray:
    """Returns windows of ASCII codes, (n, LENGTH + 1), in random order: inputs and, one further on, targets."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", errors="ignore")
    codes = np.frombuffer(text, np.uint8).astype("int32")
    windows = codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    return np.random.default_rng(0).permutation(windows)


def language_model(tie_weights: bool = True) -> keras.Model:
    keras.utils.set_random_seed(0)
    table = keras.layers.ReversibleEmbedding(CHARACTERS, CHANNELS, tie_weights=tie_weights, name="table")
    codes = keras.Input([LENGTH], dtype="int32", name="codes")
    x = table(codes)
    for i in range(BLOCKS):
        y = keras.layers.LayerNormalization(name=f"norm_{i}")(x)
        attention = keras.layers.MultiHeadAttention(HEADS, CHANNELS // HEADS, name=f"attention_{i}")
        x = x + attention(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization(name=f"wide_norm_{i}")(x)
        y = keras.layers.Dense(4 * CHANNELS, "gelu", name=f"wide_{i}")(y)
        x = x + keras.layers.Dense(CHANNELS, name=f"narrow_{i}")(y)
    x = keras.layers.LayerNormalization(name="last_norm")(x)
    return keras.Model(codes, table(x, reverse=True), name="language_model")


def gradients(model: keras.Model, variables: list[keras.Variable], codes: np.ndarray) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = LOSS(codes[:, 1:], model(codes[:, :-1], training=True))
    found = tape.gradient(loss, [variable.value for variable in variables])
    return [tf.convert_to_tensor(gradient) for gradient in found]  # that of a lookup alone is sparse


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a language model with tied embeddings in a pipeline.")
    parser.add_argument("--quick", action="store_true", help="one epoch on 512 pieces of text (default: two on all)")
    arguments = parser.parse_args()
    tf_gpipe.set_logical_cpus(NUM_STAGES)
    windows = load_text()
    test, train = windows[:256], windows[256:768] if arguments.quick else windows[256:]

    strategy = tf_gpipe.GPipeStrategy(NUM_STAGES, num_micro_batches=8)
    models = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        with scope:
            models.append(language_model())
            models[-1].compile(keras.optimizers.SGD(0.1), LOSS)
    plain, piped = models
    table = piped.get_layer("table").embeddings
    plan = strategy.place(piped)
    print(plan)
    used = [stage.index for stage in plan.stages if any(variable is table for variable in stage.variables)]
    print(f"the table is used on stages {used} and kept on {table.value.device[-5:]}")

    # The same weights, but with a table for each use.
    untied = language_model(tie_weights=False)
    values, *others = piped.get_weights()
    untied.set_weights([values, values.T, *others])
    of_lookup, of_output = gradients(untied, untied.get_layer("table").trainable_variables, train[:BATCH_SIZE])
    expected = of_lookup + tf.transpose(of_output)
    [received] = strategy.run(gradients, args=(piped, [table], train[:BATCH_SIZE]))
    norms = [float(tf.norm(gradient)) for gradient in (of_lookup, of_output)]
    print(f"norms of the gradients of a lookup's and an output's own table {norms[0]:.3f} and {norms[1]:.3f}")
    print(f"gradient of the tied table: largest difference from their sum {np.max(np.abs(received - expected)):.1e}")

    for model in models:
        for codes in np.split(train[: CHECK_STEPS * BATCH_SIZE], CHECK_STEPS):
            model.train_on_batch(codes[:, :-1], codes[:, 1:])
    pairs = zip(*(model.get_weights() for model in models), strict=True)
    difference = max(np.max(np.abs(theirs - ours)) for theirs, ours in pairs)
    print(f"plain Keras and {NUM_STAGES} stages: largest difference of any weight {difference:.1e}")

    with strategy.scope():
        piped.compile(keras.optimizers.Adam(0.003), LOSS)
    piped.fit(train[:, :-1], train[:, 1:], batch_size=BATCH_SIZE, epochs=1 if arguments.quick else 2, verbose=2)
    loss = piped.evaluate(test[:, :-1], test[:, 1:], verbose=0)
    print(f"test text: {loss / np.log(2):.2f} bits a character")
    if arguments.quick:
        print("--quick: too short to learn, it only shows that all of it runs")
    if arguments.quick:
        print("--quick: too short to learn, it only shows that all of it runs")


if __name__ == "__main__":
    main()
