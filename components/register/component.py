"""The registration component. KFP embeds the source text of the function alone, so it imports inside."""

from kfp import dsl


def register(exported: dsl.Input[dsl.Model], accuracy: float, champion_uri: str) -> None:
    """Publishes a blessed model as the champion.

    Args:
        exported: SavedModel with its evaluation, report and verdict.
        accuracy: On the test split, 0..1.
        champion_uri: Directory or gs://; "" publishes nothing.
    """
    from pathlib import Path

    from components.register.run import register_model
    from trainer.progress import errors_end_the_process

    with errors_end_the_process("register"):
        register_model(Path(exported.path), accuracy, champion_uri)
