"""Values that are no number in a column of numbers."""

import json

import pytest

from shardline.components.preprocess.run import preprocess
from shardline.components.preprocess.settings import PreprocessSettings
from shardline.trainer.base.errors import SourceError


@pytest.fixture
def made(tmp_path):
    """Makes a dataset of 200 rows with a column of numbers, but for these, and returns its features."""

    def make(others, **settings):
        rows = [
            f"{'12a' if row in others else row},{row % 7},{'yes' if row % 2 else 'no'}" for row in range(200)
        ]
        table = tmp_path / "homes.csv"
        table.write_text("\n".join(["number,rooms,label", *rows]) + "\n")
        manifest = preprocess(
            PreprocessSettings(source=f"table:{table}", processes=1, **settings), tmp_path / "out"
        )
        return {feature.name: feature.dtype for feature in manifest.columns}

    return make


def test_few_values_that_are_no_numbers_are_refused(made):
    message = (
        "column 'number' has '12a' in row 8, and numbers in 198 of 200 rows; correct it, or leave it empty, "
        "or if the column is text, say so: --column number=text (columns in a pipeline)"
    )
    with pytest.raises(SourceError) as raised:
        made({7, 70})
    assert str(raised.value) == message


def test_more_of_them_are_what_the_column_is(made, capsys):
    assert made({7, 70, 71})["number"] == "string"
    assert "warning: column 'number' has '12a' in row 8, and numbers in 197 of 200 rows: it is text" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "settings", [{"schema": "schema.json"}, {"columns": {"number": "text"}}, {"group": "number"}]
)
def test_a_column_is_text_if_set_or_if_it_groups_rows(made, tmp_path, monkeypatch, settings):
    monkeypatch.chdir(tmp_path)
    schema = {"fields": [{"name": "number", "type": "string"}]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    assert made({7}, **settings)["number"] == "string"
