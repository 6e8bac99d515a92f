"""The validation component. KFP embeds the source text of the function alone, so it imports inside."""

from typing import Any

from kfp import dsl


def export_validate(
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    exported: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    confusion: dsl.Output[dsl.ClassificationMetrics],
    sliced: dsl.Output[dsl.SlicedClassificationMetrics],
    report: dsl.Output[dsl.HTML],
    rules: list[str] = [],
    champion_uri: str = "",
    options: dict[str, Any] = {},
    job_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
) -> bool:
    """Exports a model and judges the export on the test split.

    Args:
        dataset: Dataset directory.
        model: Directory with model.keras.
        exported: SavedModel with its evaluation, report and verdict.
        metrics: Every metric and the number of examples.
        confusion: Confusion matrix, and of two classes the ROC curve.
        sliced: ROC curve of each class against the others, up to twelve classes.
        report: HTML report.
        rules: Rules besides the default ones or, with a name, instead: ["accuracy >= 0.9", "classes: off"].
        champion_uri: Directory or gs:// with the champion to compare with; "" for none.
        options: Other fields of `components.validate.Gate`, {"first_run": "block"}.
        job_name: Name of the run.

    Returns:
        Whether the model is blessed.
    """
    arguments = dict(locals())
    from shardline.trainer.base.progress import exit_on_error

    with exit_on_error("validate"):
        from shardline.components.validate.validation import validate_artifacts

        return validate_artifacts(**arguments)
