"""Report and model card of a validation: self-contained HTML pages, the card also as Markdown.

Both show the tables of facts and the code that calls the model.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, MultipleLocator
from scipy import sparse

from shardline.components.html import Rows, fact_rows, make_picture, render_page
from shardline.components.model_store import Export
from shardline.components.text import enumerate_names, hide_directories
from shardline.components.validate.gate import POWER, Blessing, PairedTest, TrainingRecord
from shardline.components.validate.metrics import BY_KIND, CHECKS, MAIN, SERVING, Metric
from shardline.components.validate.metrics.evaluation import Bin, Curve, Evaluation, Lead, NumberScore
from shardline.components.validate.rules import CHAMPION, FAMILY, LEVEL, parse_rules
from shardline.trainer.base import files
from shardline.trainer.base.settings import PATH_SETTINGS
from shardline.trainer.checkpoint import format_rate
from shardline.trainer.manifest import CLASS, LABEL, MULTILABEL, REGRESSION, Label, Manifest

# Drawn in these colours, which nothing else uses, and then replaced by the page's own.
INK, LINE, SOFT, FIRST, SECOND = "#010203", "#040506", "#050607", "#070809", "#0a0b0c"
_PAGE_COLOURS = {
    INK: "currentColor",
    LINE: "var(--line)",
    SOFT: "var(--soft)",
    FIRST: "var(--train)",
    SECOND: "var(--validation)",
}

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "text.parse_math": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), LINE),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "grid.linewidth": 0.6,
}

# Readable on a white page and on a black one: the cell's strength is its opacity.
_CELL = "#3b6fd4"
_MAX_NUMBERED_CLASSES = 20
# Characters of class names that fit side by side below a small matrix.
_LEVEL_CHARACTERS = 24
_LABEL_LENGTHS = (14, 20, 28, 36)

# Line styles of the weakest classes; more than these could not be distinguished.
_NAMED_LINES = ((SECOND, "-"), (FIRST, "--"), (INK, "-."))


def draw_reliability(bins: Sequence[Bin]) -> str:
    """Draws how often predictions of some probability are right, with the diagonal where both are equal."""
    points = [(each.confidence, each.accuracy) for each in bins]
    described = (f"{b.accuracy:.2f} right of {b.examples:,} at confidence {b.confidence:.2f}" for b in bins)
    with _axes((4.2, 4.7), "confidence", "right", shares=True) as axes:
        axes.plot((0, 1), (0, 1), ":", color=SOFT, label="as it should be")
        axes.plot(*zip(*points, strict=True), "-o", color=FIRST, markersize=4, label="measured")
        return _to_svg(axes, f"Reliability: {', '.join(described)}.", legend={"ncols": 2})


def draw_confusion(cells: Sequence[tuple[int, int, int]], names: Sequence[str], most: int) -> str:
    """Draws a confusion matrix, a row per true class; a cell shows its share of the row's examples.

    Of more than `most` classes those with the most mistakes, missed or wrongly predicted, are drawn.
    """
    true, predicted, examples = np.array(cells).T
    whole = sparse.csr_array((examples, (true, predicted)), shape=(len(names), len(names)))
    wrong = whole.sum(axis=0) + whole.sum(axis=1) - 2 * whole.diagonal()
    kept = np.sort(np.argsort(-wrong, kind="stable")[:most])
    short, counts = _shorten([names[i] for i in kept]), whole[kept][:, kept].toarray()
    shares = counts / np.maximum(whole.sum(axis=1)[kept, None], 1)
    side = float(np.clip(1.6 + 0.42 * len(short), 3.4, 8.5))
    colours = LinearSegmentedColormap.from_list("cells", [(*to_rgba(_CELL)[:3], 0.0), to_rgba(_CELL)])
    with _axes((side, side), "predicted class", "true class") as axes:
        axes.grid(visible=False)
        axes.imshow(shares, cmap=colours, vmin=0.0, vmax=1.0, interpolation="none")
        longest = max(map(len, short))
        upright = longest <= 3 or longest * len(short) <= _LEVEL_CHARACTERS
        axes.set_xticks(range(len(short)), short, rotation=0 if upright else 90)
        axes.set_yticks(range(len(short)), short)
        if len(short) <= _MAX_NUMBERED_CLASSES:
            for row, column in np.argwhere(counts > 0):
                colour = "white" if shares[row, column] > 0.5 else INK
                count = f"{counts[row, column]:,}"
                axes.text(column, row, count, ha="center", va="center", fontsize=9, color=colour)
        right = int(np.trace(counts))
        description = (
            f"Confusion matrix of {len(kept)} classes: {right:,} examples on the diagonal, "
            f"{int(counts.sum()) - right:,} off it."
        )
        return _to_svg(axes, description)


def draw_curves(curves: Sequence[Curve], title: str, x: str, y: str) -> str:
    """Draws the curves of classes; those with the smallest areas are named."""
    weakest = sorted(curves, key=lambda curve: curve.area)
    named = weakest[: len(_NAMED_LINES)]
    names = _shorten([curve.name for curve in named])
    with _axes((4.0, 5.2), x, y, shares=True) as axes:
        for curve in weakest[len(named) :]:
            axes.plot(curve.x, curve.y, color=SOFT, linewidth=0.8, alpha=0.5)
        lines = zip(named, names, _NAMED_LINES, strict=False)
        for curve, name, (colour, dashes) in reversed([*lines]):
            axes.plot(curve.x, curve.y, dashes, color=colour, label=f"{name} {curve.area:.3f}")
        smallest = ", ".join(f"{curve.name} {curve.area:.3f}" for curve in named)
        title_of_names = "smallest areas" if len(curves) > len(named) else "areas"
        description = f"{title} of {len(curves):,} classes; smallest areas: {smallest}."
        return _to_svg(axes, description, legend={"title": title_of_names, "reverse": True})


def draw_learning(name: str, history: Mapping[str, Sequence[float]]) -> str:
    """Draws one metric over the epochs, training and, where there is a column `val_<name>`, validation."""
    ranges = []
    with _axes((5.2, 3.2), "epoch", name) as axes:
        for column, label, colour, dashes, marker in (
            (name, "training", FIRST, "-", "o"),
            (f"val_{name}", "validation", SECOND, "--", "s"),
        ):
            if not (values := history.get(column)):
                continue
            epochs = history.get("epoch") or range(1, len(values) + 1)
            marked = marker if len(values) <= 30 else None
            axes.plot(epochs, values, dashes, color=colour, label=label, marker=marked, markersize=4)
            ranges.append(f"{label} from {values[0]:.4g} to {values[-1]:.4g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        description = f"{name} per epoch: {', '.join(ranges) or 'no values'}"
        return _to_svg(axes, description, legend={"ncols": 2})


def draw_predictions(score: NumberScore) -> str:
    """Draws predicted over true values, a point for each example, with the diagonal where both are equal."""
    true, predicted = np.array(score.points).T
    ends = float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))
    names = (f"{name}, {score.unit}" if score.unit else name for name in ("true", "predicted"))
    with _axes((4.4, 4.6), *names) as axes:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        opaque = 0.7 if len(true) < 300 else 0.35  # many points overlap
        axes.plot(true, predicted, "o", color=FIRST, markersize=3, alpha=opaque, markeredgewidth=0)
        axes.plot(ends, ends, ":", color=SOFT, label="predicted = true")
        examples = f"{len(true):,} examples from {true.min():.4g} to {true.max():.4g}"
        description = f"Predicted over true {score.name}, {examples}: RMSE {score.rmse:.4g}."
        return _to_svg(axes, description, legend={})


def draw_power(test: PairedTest) -> str:
    """Draws how often the gate finds a loss, over the true loss."""
    found, scale = test.smallest_loss(), 100 if test.unit else 1
    most = 1.5 * max(found, test.within) if found else 1.0
    losses = np.linspace(0.0, most if test.differ is None else min(most, 1.0), 60)
    with _axes((4.4, 3.2), f"true loss{f', {test.unit}' if test.unit else ''}", "share found") as axes:
        axes.axvline(scale * test.within, linestyle=":", color=SOFT, label="allowed")
        axes.plot(scale * losses, [test.power(float(loss)) for loss in losses], color=FIRST)
        if found:
            axes.plot(scale * found, POWER, "o", color=SECOND, label="found in 9 of 10 cases")
        axes.set(ylim=(-0.02, 1.02))
        return _to_svg(axes, f"How often a loss is found, over the true loss. {test}.", legend={"ncols": 2})


@contextmanager
def _axes(size: tuple[float, float], x: str, y: str, *, shares: bool = False) -> Iterator[Any]:
    """Yields the axes of a figure in the page's style; square where both show shares, 0..1."""
    with mpl.rc_context(_STYLE):
        axes = Figure(figsize=size, layout="constrained").subplots()
        axes.set(xlabel=x, ylabel=y)
        if shares:
            axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MultipleLocator(0.2))
        axes.grid()
        axes.set_axisbelow(True)
        yield axes


def _to_svg(axes: Any, description: str, legend: Mapping[str, Any] | None = None) -> str:
    """Returns a figure as an <svg> element for a page with other figures, in the page's style.

    `legend` are options of the legend, which is above the axes so that it hides no line; None for no legend.
    """
    figure, text = axes.figure, io.StringIO()
    if legend is not None:
        figure.legend(loc="outside upper left", alignment="left", **legend)
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with warnings.catch_warnings(), mpl.rc_context({"svg.hashsalt": description}):
        # The browser has the glyphs that matplotlib's own font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        FigureCanvasSVG(figure).print_svg(text, metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    # Its style sheet would apply to the whole page, which has the same rule for plots only.
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = svg.replace("font-family: 'DejaVu Sans', sans-serif; ", "")
    # Ids are numbered from 1 in each figure: not unique in the page, and nothing refers to them.
    svg = re.sub(r' id="[A-Za-z][A-Za-z0-9.]*_\d+"', "", svg)
    for drawn, shown in _PAGE_COLOURS.items():
        svg = svg.replace(drawn, shown)
    width, height = figure.get_size_inches() * 72
    opening = (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(description)}" style="max-width:{width * 1.35:.0f}px">'
    )
    # Our own markup; all text in it was escaped when it was drawn.
    return Markup(re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1))


def _shorten(names: Sequence[str]) -> list[str]:
    """Returns the names, shortened to the smallest length at which they stay distinct."""
    for length in _LABEL_LENGTHS:
        half = length // 2
        short = [name if len(name) <= length else f"{name[:half]}…{name[-half:]}" for name in names]
        if len(set(short)) == len(short):
            break
    return short


#: Rows of a table, at most.
MAX_ROWS = 40
#: Slices, rows with mistakes, and columns of a row that are shown; the others are folded.
MOST_SHOWN = 8

_SHORT = 40  # characters of a value that is no text
_MOST_DRAWN_CLASSES = 25

# Verdicts that decide come first.
_VERDICT_ORDER = ("failed", "unmeasured", "undecided", "off", "skipped", "passed")


def render_report(
    evaluation: Evaluation,
    blessing: Blessing,
    manifest: Manifest,
    export: Export,
    training: TrainingRecord,
    *,
    created: str = "",
    run: str = "",
    logs: str = "",
) -> str:
    """Returns the report as an HTML page; the same arguments give the same page.

    `created` and `run` are the time and the run of the validation, `logs` the directory for TensorBoard's
    --logdir; "" where not known.
    """
    return render_page(
        Path(__file__).with_name("report.html.j2"),
        model_name=training.settings.get("model", "model"),
        evaluation=evaluation,
        blessing=blessing,
        rules=sorted(blessing.rules, key=lambda rule: _VERDICT_ORDER.index(rule.verdict)),
        created=created,
        run=run,
        logs=logs,
        manifest=manifest,
        export=export,
        sections=sections(evaluation),
        power=_power(evaluation.champion_comparison, blessing),
        calls=make_calls(export),
        serving=metric_rows(evaluation.champion_comparison, SERVING),
        format_interval=format_interval,
        format_difference=format_difference,
        draw_predictions=draw_predictions,
        make_picture=make_picture,
        family=FAMILY,
        most_rows=MAX_ROWS,
        most_shown=MOST_SHOWN,
        most_drawn=_MOST_DRAWN_CLASSES,
        ruled={rule.metric for rule in blessing.rules},
        crossing=training.crossing,
        learning=[draw_learning(name, training.history) for name in training.metrics],
        tables=fact_tables(manifest, export, training),
    )


def find_logs(model_file: Path, training: TrainingRecord, run: str) -> str:
    """Returns the directory for TensorBoard's --logdir that a model's training wrote to; "" if not known."""
    named = training.options.get("tensorboard_log_dir")
    directory = model_file.parent
    paths = [files.local_path(named)] if named and isinstance(named, str) else []
    paths += [directory / "logs", directory.parent / "logs"]
    # All attempts of a job have one directory, below the root of the runs.
    paths += [root / "jobs" / run / "logs" for root in list(directory.parents)[:4] if run]
    # Shown as a URI: a bucket is mounted here only.
    return next((re.sub("^/gcs/", "gs://", str(path)) for path in paths if path.is_dir()), "")


class Row(NamedTuple):
    """A value of a model and of the champion, formatted; "" where there is none.

    The difference is the model's value minus the champion's; the intervals are 95 % intervals. `change` is
    better, worse or, where the interval of the difference contains 0, unclear; "" without an interval.
    """

    name: str
    label: str
    value: str
    interval: str
    champion: str = ""
    difference: str = ""
    difference_interval: str = ""
    change: str = ""
    examples: int = 0


def metric_rows(evaluation: Evaluation, metrics: Sequence[Metric]) -> list[Row]:
    """Returns rows of the metrics that were measured, in their order."""
    before = evaluation.champion.metrics if evaluation.champion else {}
    intervals, leads = evaluation.intervals, evaluation.leads
    rows = []
    for metric in metrics:
        if (value := evaluation.metrics.get(name := metric.name)) is not None:
            interval = format_interval(intervals.get(name), metric.text)
            row = Row(name, metric.label, metric.text(value), interval)
            rows.append(_compare_row(row, metric, value, before.get(name), leads.get(name)))
    return rows


def _compare_row(row: Row, metric: Metric, value: float, before: float | None, lead: Lead | None) -> Row:
    if before is None:
        return row
    text = metric.text
    difference, change = value - before, ""
    if lead and lead.interval[0] <= 0 <= lead.interval[1] and difference:
        change = "unclear"
    elif lead and difference:
        change = "better" if (difference > 0) == metric.higher_is_better else "worse"
    return row._replace(
        champion=text(before),
        difference=format_difference(difference, text),
        difference_interval=format_interval(lead.interval if lead else None, text),
        change=change,
    )


def format_interval(ends: tuple[float, float] | None, text: Callable[[float], str] = "{:.4f}".format) -> str:
    """Returns "0.9512 to 0.9740", or "" for none and for one whose ends are written alike."""
    texts = dict.fromkeys(map(text, ends or ()))
    return " to ".join(texts) if len(texts) > 1 else ""


def format_difference(difference: float, text: Callable[[float], str]) -> str:
    """Returns a difference with its sign."""
    sign = "±" if difference == 0 else "+" if difference > 0 else "-"
    return sign + text(abs(difference))


def sections(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Returns the data that the report's template shows of each label."""
    whole, compared = evaluation.champion_comparison, []
    for part in whole.parts:  # each with the champion's evaluation of the same label
        prefix = f"{part.label}."
        named = ((name, lead) for name, lead in whole.leads.items() if name.startswith(prefix))
        leads = {name.removeprefix(prefix): lead for name, lead in named}
        compared.append(replace(part, champion=whole.champion and whole.champion.of(part.label), leads=leads))
    pairs = zip(evaluation.each, compared or [whole], strict=True)
    return [_section(*pair, name_label=bool(whole.parts)) for pair in pairs]


def _section(evaluation: Evaluation, compared: Evaluation, *, name_label: bool) -> dict[str, Any]:
    main = next(metric for metric in BY_KIND[evaluation.kind] if metric.name == MAIN[evaluation.kind])
    bins, names, confusion = evaluation.calibration, evaluation.class_names, evaluation.confusion
    drawn, columns = {}, defaultdict[str, list[str]](list)
    for name, value in (pair for mistake in evaluation.mistakes for pair in mistake.values.items()):
        columns[name].append(value)  # texts come before the other columns of a row
    if bins:
        drawn["Calibration"] = draw_reliability(bins)
    if roc := evaluation.roc:
        drawn["ROC"] = draw_curves(roc, "ROC", "false positive rate", "true positive rate")
    if recall := evaluation.precision_recall:
        drawn["Precision and recall"] = draw_curves(recall, "Precision over recall", "recall", "precision")
    return {
        "label": evaluation.label if name_label else "",
        "main": main.name,
        "text": main.text,
        "evaluation": evaluation,
        "quality": metric_rows(compared, BY_KIND[evaluation.kind]),
        "confusion": confusion and draw_confusion(confusion, names, _MOST_DRAWN_CLASSES),
        "wrong": sum(examples for true, predicted, examples in confusion if true != predicted),
        "curves": drawn,
        "classes": sorted(evaluation.classes, key=lambda score: (score.f1, -score.examples))[:MAX_ROWS],
        "slices": _slice_rows(compared, main, decided=True),
        "small_slices": _slice_rows(compared, main, decided=False),
        "weakest": next(iter(_slice_rows(evaluation, main, decided=True)), None),
        "columns": sorted(columns, key=lambda name: len(max(columns[name], key=len)) <= _SHORT),
    }


def _power(evaluation: Evaluation, blessing: Blessing) -> dict[str, tuple[PairedTest, str]]:
    judged = [each for each in blessing.rules if each.name == CHAMPION and each.verdict != "off"]
    level = min(LEVEL, FAMILY / max(1, len(judged)))
    rules = parse_rules(each.rule for each in judged)
    tests = {rule.label: PairedTest.of(evaluation, rule, level) for rule in rules}
    return {label: (test, draw_power(test)) for label, test in tests.items() if test}


def _slice_rows(evaluation: Evaluation, main: Metric, *, decided: bool) -> list[Row]:
    """Returns rows of the slices that are decided, or not, the weakest and then the largest first."""
    champion = {item.name: item.value for item in evaluation.champion.slices} if evaluation.champion else {}
    slices = [item for item in evaluation.slices if item.examples and item.decided == decided]
    sign = 1 if main.higher_is_better else -1
    slices.sort(key=lambda item: (sign * item.value, -item.examples, item.name))
    rows = []
    for item in slices[:MAX_ROWS]:
        lead = evaluation.leads.get(f"{main.name}[{item.name}]")
        interval = format_interval(item.interval, main.text)
        row = Row(item.name, item.name, main.text(item.value), interval, examples=item.examples)
        rows.append(_compare_row(row, main, item.value, champion.get(item.name), lead))
    return rows


_UNSET = ("", "[]", "{}", "null")
_MOST_CLASSES = 40
_MOST_COLUMNS = 20

# Metrics that do not say how good the model is.
_FOLDED = {metric.name for metric in (*SERVING, *CHECKS)}
_ONLY_CLASSES = "It always predicts one of these classes, also for an input that belongs to none of them."

# Of settings.json: shown with the dataset, or in a table of its own.
_NOT_SETTINGS = ("class_names", "versions", "settings", "learning_rates")

_PYTHON = """\
import tensorflow as tf

call = tf.saved_model.load("saved_model").signatures["serving_default"]
answer = call(ARGUMENTS)
print({name: values.numpy()[0] for name, values in answer.items()})"""

_SERVER = """\
docker run --rm -p 8501:8501 -v "$PWD/saved_model:/models/model/1" tensorflow/serving
# then, in another terminal:
"""
_CURL = "curl -d DATA http://localhost:8501/v1/models/model:predict"
_IMAGE_DATA = """printf '{"instances": [{"b64": "%s"}]}' "$(base64 -w0 image.png)" |"""


def setting_rows(settings: Mapping[str, Any]) -> Rows:
    """Returns nested settings as rows, without those that are not set: null and empty values."""
    return [(name, value) for name, value in fact_rows(settings) if value not in _UNSET]


def describe_tensors(specs: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the tensors of a signature as text, at most 20 of them: "images: string [n]"."""
    shown = [
        f"{name}: {spec['dtype']} [{', '.join('n' if size is None else str(size) for size in spec['shape'])}]"
        for name, spec in list(specs.items())[:_MOST_COLUMNS]
    ]
    return "; ".join(shown) + (f"; {len(specs) - len(shown):,} more" if len(specs) > len(shown) else "")


@dataclass(frozen=True)
class Section:
    """One part of the card: heading, paragraphs, and, if it has rows, a table with `head` as column names."""

    title: str
    paragraphs: tuple[str, ...] = ()
    head: tuple[str, ...] = ("what", "value")
    rows: Sequence[tuple[str, ...]] = ()
    folded: bool = False


@dataclass(frozen=True)
class ModelCard:
    """A model card, to publish: no paths of this machine; `verdict` says whether the model was blessed."""

    title: str
    blessed: bool
    verdict: str
    sections: tuple[Section, ...]

    def to_markdown(self) -> str:
        """Returns the card as Markdown."""
        parts = [f"# {_escape(self.title)}", _escape(self.verdict)]
        for section in self.sections:
            title = "<details>\n<summary>{}</summary>" if section.folded else "## {}"
            parts += [title.format(section.title), *map(_escape, section.paragraphs)]
            if section.rows:
                lines = [section.head, ("---",) * len(section.head), *section.rows]
                parts.append("\n".join(f"| {' | '.join(map(_escape, line))} |" for line in lines))
            parts += ["</details>"] * section.folded
        return "\n\n".join(parts) + "\n"

    def to_html(self) -> str:
        """Returns the card as a self-contained HTML page."""
        folded = [(section.title, section.rows) for section in self.sections if section.folded]
        return render_page(Path(__file__).with_name("model_card.html.j2"), card=self, tables=folded)


def make_card(
    manifest: Manifest, export: Export, training: TrainingRecord, evaluation: Evaluation, blessing: Blessing
) -> ModelCard:
    """Returns the card of an exported model; a section without paragraphs and rows is left out."""
    names = enumerate_names(list(manifest.inputs), _MOST_COLUMNS)
    inputs = "images" if "image" in manifest.inputs else f"rows of the columns {names}"
    limits = [_ONLY_CLASSES] * any(label.kind == CLASS for label in manifest.labels)
    source = hide_directories(manifest.source)
    limits.append(f"Its quality was measured on held-out examples of {source} and holds for data like these.")
    limits += [f"{hide_directories(warning).removesuffix('.')}." for warning in blessing.warnings]
    quality = [
        (name, _number(value), " to ".join(map(_number, evaluation.intervals.get(name, ()))))
        for name, value in evaluation.metrics.items()
    ]
    serving = [(name, value) for name, value, _ in quality if name.rpartition(".")[2] in _FOLDED]
    text = f"Measured on the export with {evaluation.examples:,} {evaluation.split} examples, each used once."
    text += f" Intervals are over {evaluation.groups}." if evaluation.groups else ""
    if evaluation.non_finite:
        text += f" {evaluation.non_finite:,} of them got an output that is not finite."
    head = ("metric", "value", "95 % interval")
    rules = [
        (
            f"{rule.name}: {rule.rule}".removeprefix(": "),
            f"{rule.verdict}: {hide_directories(rule.note)}".removesuffix(": "),
            rule.left_text,
            f"{rule.operator} {rule.right_text}".strip(),
        )
        for rule in sorted(blessing.rules, key=lambda rule: rule.verdict == "passed")
    ]
    tables = dict(fact_tables(manifest, export, training))
    shown = [
        Section("Use", tuple(_describe_use(label, inputs) for label in manifest.labels)),
        Section("Rules", (), ("rule", "verdict", "value", "must be"), rules),
        Section("Quality", (text,), head, [row for row in quality if row[:2] not in serving]),
        Section("Dataset", rows=tables.pop("Dataset")),
        Section("Limits of use", tuple(limits)),
        Section("Training", rows=tables.pop("Training", ())),
        Section("Serving and checks", rows=serving, folded=True),
        *(Section(title, rows=rows, folded=True) for title, rows in tables.items()),
    ]
    title, verdict = str(training.settings.get("model", "model")), hide_directories(blessing.headline)
    shown = [section for section in shown if section.paragraphs or section.rows]
    return ModelCard(title, blessing.blessed, verdict, tuple(shown))


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def _describe_use(label: Label, inputs: str) -> str:
    names = enumerate_names(_with_units(label), _MOST_CLASSES)
    of = "" if label.name == LABEL else f"{label.name}: "
    if label.kind == REGRESSION:
        return f"{of}Predicts {names} from {inputs}."
    if label.kind == MULTILABEL:
        return f"{of}Predicts which of {len(label.outputs):,} labels {inputs} have, or none: {names}."
    return f"{of}Classifies {inputs} into {len(label.outputs):,} classes: {names}."


def _with_units(label: Label) -> list[str]:
    units = label.units or ("",) * len(label.outputs)
    return [f"{name} ({unit})" if unit else name for name, unit in zip(label.outputs, units, strict=True)]


def _escape(text: str) -> str:
    for sign in ("\\", "`", "*", "_", "|", "[", "]"):
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())


def make_calls(export: Export) -> dict[str, str]:
    """Returns code that calls a model through `serving_default`, by client or server that it is for.

    There is none where the model's inputs are not known.
    """
    inputs = export.signatures.get("serving_default", {}).get("inputs", {})
    row = next(iter((export.golden or {}).get("instances", ())), None)
    if not export.labels or not inputs:
        return {}
    if list(inputs) == ["images"]:
        arguments = 'images=tf.stack([tf.io.read_file("image.png")])'
        curl = f"{_IMAGE_DATA} \\\n  {_CURL.replace('DATA', '@-')}"
    elif isinstance(row, dict) and inputs.keys() <= row.keys():
        values = {name: row[name] for name in inputs}
        tensors = (f'tf.constant([{value!r}], "{inputs[name]["dtype"]}")' for name, value in values.items())
        arguments = "".join(map("\n    {}={},".format, values, tensors)) + "\n"
        data = json.dumps({"instances": [values]}, ensure_ascii=False).replace("'", "'\\''")
        curl = _CURL.replace("DATA", f"'{data}'")
    else:
        return {}
    python = _PYTHON.replace("ARGUMENTS", arguments)
    return {"Python, with TensorFlow alone": python, "TensorFlow Serving": _SERVER + curl}


def fact_tables(manifest: Manifest, export: Export, training: TrainingRecord) -> list[tuple[str, Rows]]:
    """Returns the titles and rows of the tables of dataset, training, export and versions."""
    record, rate = training.settings, _describe_learning_rate(training)
    settings = {name: value for name, value in record.items() if name not in _NOT_SETTINGS}
    settings |= record.get("settings", {})
    hidden = (*PATH_SETTINGS, *(("learning_rate",) if rate else ()))
    trained = {"learning rate": rate, "epochs": len(training.history.get("epoch", ())) or ""}
    trained |= {
        name.replace("_", " "): record.get(name, "") for name in ("model", "examples_per_update", "cluster")
    }
    signatures = [
        (name, f"{describe_tensors(parts['inputs'])} → {describe_tensors(parts['outputs'])}")
        for name, parts in export.signatures.items()
    ]
    names = ("parameters", "bytes", "softmax_added", "git_revision", "compared_examples", "max_difference")
    single = {name.replace("_", " "): getattr(export, name) for name in names}
    tables = [
        ("Dataset", _dataset_rows(manifest)),
        ("Training", setting_rows(trained)),
        ("Settings of the training", [row for row in setting_rows(settings) if row[0] not in hidden]),
        ("Settings of the dataset", setting_rows(manifest.settings)),
        ("Export", signatures + fact_rows({k: value for k, value in single.items() if value is not None})),
        ("Versions in training", fact_rows(record.get("versions", {}))),
        ("Versions in validation", fact_rows(export.versions)),
    ]
    return [
        (title, [(name, hide_directories(value)) for name, value in rows]) for title, rows in tables if rows
    ]


def _describe_learning_rate(training: TrainingRecord) -> str:
    texts = [str(format_rate(rate)) for rate in training.settings.get("learning_rates", ())]
    if rates := training.history.get("learning_rate"):  # a callback has changed it
        texts.append(f"{rates[-1]:.4g} in the last epoch")
    return "; ".join(texts)


def _dataset_rows(manifest: Manifest) -> Rows:
    names = list(manifest.inputs)
    inputs = (f"{len(names):,} columns", enumerate_names(names, _MOST_COLUMNS))
    if "image" in manifest.inputs:
        image = manifest.inputs["image"]
        shape = " x ".join("any" if size is None else str(size) for size in image.shape)
        inputs = ("image", f"{shape}, {image.encoding}")
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in manifest.rejected.items())
    labels = []
    for label in manifest.labels:
        of = f" of {label.name}" if label.name != LABEL else ""
        if label.kind == REGRESSION:
            labels.append((f"numbers{of}", enumerate_names(_with_units(label), _MOST_CLASSES)))
        else:
            plural = "labels" if label.kind == MULTILABEL else "classes"
            labels.append((f"{plural}{of}", f"{len(label.outputs):,}"))
    return [
        ("source", manifest.source),
        ("fingerprint", manifest.fingerprint),
        ("examples", ", ".join(f"{name} {split.records:,}" for name, split in manifest.splits.items())),
        *labels,
        inputs,
        ("rejected examples", f"{sum(manifest.rejected.values()):,} ({reasons})" if reasons else "none"),
    ]
