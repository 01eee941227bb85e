"""How tf_gpipe was installed, and what pip has to be told where something is missing. It imports no TensorFlow."""

from __future__ import annotations

from importlib import metadata

from tf_gpipe.errors import InstallationError

_NEEDED = {"keras": "Keras", "numpy": "NumPy", "tensorflow": "TensorFlow"}


def is_installed() -> bool:
    """Whether pip knows tf_gpipe, as it does after an installation, but not where a clone is merely on the path."""
    # A clone may hold metadata, too, of an installation elsewhere: in a folder named egg-info, without this file.
    return any(found.read_text("METADATA") for found in metadata.distributions(name="tf_gpipe"))


def command(extra: str, installed: bool | None = None) -> str:
    """The command that brings an extra; in a shell, what follows it in a line is a comment.

    Args:
        extra: "cpu", "gpu" or "tpu".
        installed: whether pip knows tf_gpipe; None to look.

    Example:
        >>> command("cpu", installed=True)
        "pip install 'tf_gpipe[cpu]'"
        >>> command("cpu", installed=False)
        "pip install '.[cpu]'  # in a clone of tf_gpipe"
    """
    if installed or (installed is None and is_installed()):
        return f"pip install 'tf_gpipe[{extra}]'"
    return f"pip install '.[{extra}]'  # in a clone of tf_gpipe"


def missing(name: str, error: ModuleNotFoundError) -> InstallationError | None:
    """What to raise where a name of tf_gpipe could not be loaded.

    Args:
        name: the public name.
        error: from the import of its module.

    Returns:
        None if what is missing is nothing that tf_gpipe asks for.
    """
    what = _NEEDED.get((error.name or "").partition(".")[0])
    if what is None:
        return None
    return InstallationError(
        f"Expected {what}, which tf_gpipe.{name} needs. Received: {error}. Do `{command('cpu')}`, on other machines "
        "with [gpu] or [tpu] instead of [cpu]; `python -m tf_gpipe doctor` tells which one fits."
    )
