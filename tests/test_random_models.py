"""Random models, trained in random ways: what stages give is what plain Keras gives.

Every draw is a `Recipe` (see `random_models.py`), which is printed where a draw fails, made as small as Hypothesis can:
`check(Recipe(...))` repeats it. `make test` makes a dozen draws, always the same, and `make soak` 200. Two environment
variables ask for more, and for others:

    GPIPE_DRAWS=1000 GPIPE_SEED=1 python -m pytest -m soak tests/test_random_models.py

Everything is float64, since nothing but rounding may differ: micro-batches and stages only change the order in which
gradients are summed. That leaves relative differences of some 1e-15 in a gradient. Adam's epsilon of 1e-7 multiplies
the rounding of a gradient that is truly zero by up to 1e7, and the learning rate by 1e-2: some 1e-10 in a weight.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import keras
import numpy as np
import pytest
from helpers import scope_of, soaked, use_floats
from hypothesis import HealthCheck, given, settings
from random_models import Recipe, compile_arguments, counts_of, data_of, make_model, recipes

import tf_gpipe

TOLERANCE = 1e-9
VALIDATION_ROWS = 3
DRAWS = int(os.environ.get("GPIPE_DRAWS", "200"))
SEED = int(os.environ.get("GPIPE_SEED", "0"))
SHORT, PARTS = 12, 4
LONG = [soaked(range(i, DRAWS, PARTS)) for i in range(SHORT, SHORT + PARTS)]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    use_floats("float64")
    yield
    use_floats("float32")


def trained(recipe: Recipe, strategy: tf_gpipe.GPipeStrategy | None) -> dict[str, Any]:
    """Everything that a training leaves behind."""
    keras.backend.clear_session()  # so that layers get the same names each time
    with scope_of(strategy):
        keras.utils.set_random_seed(recipe.seed)
        model = make_model(recipe)
        # Without a graph to make, plain Keras is quicker on models so small. In a graph of unknown batch size it takes
        # the mean of an output's own loss over batches, else over rows: the same where all batches are of one size.
        rows = [recipe.rows, VALIDATION_ROWS] if recipe.validated else [recipe.rows]
        same = len(recipe.outputs) == 1 or all(n % recipe.batch_size == 0 or n < recipe.batch_size for n in rows)
        model.compile(**compile_arguments(recipe), run_eagerly=strategy is None and same)
    x, y, weights = data_of(recipe, model, recipe.rows)
    validation = data_of(recipe, model, VALIDATION_ROWS)[:2] if recipe.validated else None
    before = getattr(model, "inner", model).get_weights()
    history = model.fit(
        x,
        y,
        sample_weight=weights,
        validation_data=validation,
        batch_size=recipe.batch_size,
        epochs=recipe.epochs,
        shuffle=False,
        verbose=0,
    ).history
    predictions = model.predict(x, batch_size=recipe.batch_size, verbose=0) if recipe.predicted else []
    return {
        "model": model,
        "before": before,
        "weights": [w.numpy() for w in model.weights],
        "optimizer": [v.numpy() for v in model.optimizer.variables],
        "history": history,
        "predictions": keras.tree.flatten(predictions),
    }


def assert_equal(found: Any, wanted: Any, what: str) -> None:
    assert len(found) == len(wanted), what
    for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert np.all(np.isfinite(b)), f"{what} {k} is not finite in plain Keras"
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{what} {k}")


def check(recipe: Recipe) -> None:
    """Trains a recipe in its pipeline and without one, and compares."""
    gc.collect()  # models are rings of references
    partition: Any = "flops"
    if recipe.sizes:
        model = make_model(recipe)
        (whole,) = tf_gpipe.GPipeStrategy(1, 1).plan(getattr(model, "inner", model)).stages
        partition = counts_of(recipe, len(whole.operations))
    strategy = tf_gpipe.GPipeStrategy(
        recipe.num_stages, recipe.num_micro_batches, partition=partition, remat=recipe.remat
    )
    reference = None
    if recipe.depends_on_micro_batches and recipe.num_micro_batches > 1:
        reference = tf_gpipe.GPipeStrategy(1, recipe.num_micro_batches)
    wanted, found = trained(recipe, reference), trained(recipe, strategy)
    plans = [pipeline.plan for pipeline in vars(found["model"])["_gpipe_pipelines"][strategy].values()]
    assert plans
    assert all([stage.device for stage in plan.stages] == strategy.devices for plan in plans)
    assert not recipe.sizes or [len(stage.operations) for stage in plans[0].stages] == partition
    assert any(np.any(a != b) for a, b in zip(wanted["before"], wanted["weights"], strict=True)), "nothing was trained"
    for what in ("weights", "optimizer", "predictions"):
        assert_equal(found[what], wanted[what], what)
    assert found["history"].keys() == wanted["history"].keys()
    assert_equal(list(found["history"].values()), list(wanted["history"].values()), "history")


# Of Keras, for a layer that ends a mask, and for an output that is drawn as a probability and its loss for logits.
@pytest.mark.filterwarnings("ignore:.*does not support masking", "ignore:.*received `from_logits=True`")
@pytest.mark.parametrize("draws", [range(i, SHORT, PARTS) for i in range(PARTS)] + LONG)
def test_random_models(draws: range, tmp_path: Path) -> None:
    # Hypothesis keeps notes about the tested code in a folder, even without a database of examples.
    hypothesis.configuration.set_hypothesis_home_dir(tmp_path)

    for draw in draws:
        # One example for each seed: Hypothesis would go on with variations of what it has just drawn.
        @hypothesis.seed(1_000_000 * SEED + draw)
        @settings(
            max_examples=1, database=None, deadline=None, print_blob=False, suppress_health_check=list(HealthCheck)
        )
        @given(recipes())
        def one(recipe: Recipe) -> None:
            check(recipe)

        one()
