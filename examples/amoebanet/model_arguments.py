"""The arguments that the model of a training was made with, kept beside its checkpoints, which fit no other model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FILE = "model.json"
NAMES = (
    "image_size",
    "genotype",
    "layout",
    "cells",
    "filters",
    "auxiliary_head",
    "dropout_keep",
    "drop_path_keep",
    "average",
)


def of(arguments: argparse.Namespace, num_classes: int) -> dict[str, Any]:
    """The arguments that decide which variables there are, and what they are for."""
    return {name: getattr(arguments, name) for name in NAMES} | {"classes": num_classes}


def save(made: dict[str, Any], output: Path) -> None:
    """Writes them into the folder of a training."""
    output.mkdir(parents=True, exist_ok=True)
    (output / FILE).write_text(json.dumps(made, indent=4) + "\n", encoding="utf-8")


def check(made: dict[str, Any], output: Path) -> None:
    """Compares them with those in the folder of a training, where there are any.

    Raises:
        ValueError: some differ.
    """
    if not (output / FILE).exists():
        return
    saved = json.loads((output / FILE).read_text(encoding="utf-8"))
    differ = [name for name in made if name in saved and saved[name] != made[name]]
    if differ:
        raise ValueError(
            f"Expected the model that {output} was made with: {_listed(saved, differ)}. Received: "
            f"{_listed(made, differ)}. Give the same arguments, or take another --output."
        )


def _listed(values: dict[str, Any], names: list[str]) -> str:
    return ", ".join(_as_flag(name, values[name]) for name in names)


def _as_flag(name: str, value: Any) -> str:
    """An argument as on the command line; the number of classes is the data's."""
    if name == "classes":
        return f"--data of {value} classes"
    flag = name.replace("_", "-")
    return f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}"
