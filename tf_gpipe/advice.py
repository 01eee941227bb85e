"""What a first training step warns of: a pipeline that gives right results, but wastes devices or accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import keras

from tf_gpipe import costs
from tf_gpipe.devices import short_name
from tf_gpipe.errors import GPipeWarning
from tf_gpipe.messages import warn
from tf_gpipe.plan import Plan

LEAST_ROWS = 8
"""Rows of a micro-batch below which statistics of batch norm are poor."""

LEAST_BALANCE = 0.8
"""Mean over heaviest load of the stages below which a plan is uneven."""


class Advice:
    """Warns once of each kind of thing about one model.

    Args:
        name: the model's.
        num_micro_batches: M.
        chosen: whether the user wrote the partition.
    """

    def __init__(self, name: str, num_micro_batches: int, *, chosen: bool) -> None:
        self._name = name
        self._num_micro_batches = num_micro_batches
        self._chosen = chosen
        self._told: set[str] = set()

    def give(self, plan: Plan, anew: Callable[[], Plan], rows: int | None, pooled: Sequence[keras.Layer]) -> None:
        """Looks at a training step.

        Args:
            plan: the model's stages.
            anew: gives what they would be if no variable had its place yet.
            rows: of the mini-batch, if that is known.
            pooled: batch-norm layers that normalise each micro-batch by its own statistics.
        """
        for kind, text in (*self._of_plan(plan, anew), *self._of_rows(rows, pooled)):
            if kind not in self._told:
                self._told.add(kind)
                warn(text, GPipeWarning)

    def _of_plan(self, plan: Plan, anew: Callable[[], Plan]) -> Iterator[tuple[str, str]]:
        count, flops = len(plan.stages), [cost.flops for cost in costs.costs(plan.graph)]
        idle = [short_name(stage.device) for stage in plan.stages if not stage.steps]
        heaviest = max(plan.stages, key=lambda stage: stage.work)
        if idle:
            yield (
                "idle",
                f"'{self._name}' has no work for {', '.join(idle)}: its {len(flops)} operations make "
                f"{count - len(idle)} of {count} stages. Set num_stages={count - len(idle)}, or make the model of more "
                "layers, since a layer is never cut.",
            )
        elif plan.balance < LEAST_BALANCE:
            largest = max(range(heaviest.start, heaviest.end), key=flops.__getitem__)
            of_stage = flops[largest] / heaviest.flops if heaviest.flops else 0.0
            share = of_stage * heaviest.work / sum(stage.work for stage in plan.stages)
            even = 1 / count
            if self._chosen:
                advice = "Leave out `partition` to have them balanced, or move its cuts: `print(strategy.plan(model))`."
            elif (better := anew().balance) > plan.balance + 0.05:
                advice = (
                    f"Its weights stay where they were placed; cut anew, its balance would be {better:.2f}. Save the "
                    "model, and load it inside `strategy.scope()`, to have it cut for what is frozen now."
                )
            elif share > even:
                advice = (
                    f"'{plan.graph.names[largest]}' alone has {share:.0%} of the work, where an even stage has "
                    f"{even:.0%}, and an operation is never cut. Make it of several smaller layers, or set a smaller "
                    "num_stages."
                )
            else:
                advice = "Set a smaller num_stages, or make the model of layers of more equal size."
            yield (
                "balance",
                f"The stages of '{self._name}' are uneven (balance {plan.balance:.2f}, where 1.00 is best), so that "
                f"devices wait for stage {heaviest.index}. {advice}",
            )

    def _of_rows(self, rows: int | None, pooled: Sequence[keras.Layer]) -> Iterator[tuple[str, str]]:
        count = self._num_micro_batches
        if not rows or count == 1:
            return
        if rows < count:
            yield (
                "rows",
                f"'{self._name}' trains on mini-batches of {rows} rows, fewer than its {count} micro-batches, so that "
                f"some have nothing to do. Train on at least {count} rows, or set num_micro_batches={rows}.",
            )
        least = max(rows // count, 1)
        if pooled and least < LEAST_ROWS:
            others = f" and {len(pooled) - 1} more" if len(pooled) > 1 else ""
            yield (
                "batch norm",
                f"Batch norm in '{self._name}' ('{pooled[0].name}'{others}) normalises each micro-batch by itself, and "
                f"{rows} rows in {count} micro-batches leave {least} for each: their statistics are noisy. Train on at "
                f"least {LEAST_ROWS * count} rows, set a smaller num_micro_batches, or use another normalisation.",
            )
