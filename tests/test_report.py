"""The comparison with expected/: inside the band, outside it, and when there is nothing to compare."""

import copy
import json

import pytest

from shared import report

RECORD = {
    "complete": True,
    "settings": {
        "preset": "tiny",
        "seeds": [1, 2],
        "training": {"steps": 200},
        "variants": {"a": {}, "b": {}},
        "corpus": {"sha256": "00", "tokenizer": "char"},
    },
    "variants": [
        {"variant": "a", "validation_loss": {"mean": 2.0}, "difference": None},
        {"variant": "b", "validation_loss": {"mean": 1.9}, "difference": {"mean": -0.1}},
    ],
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(RECORD), encoding="utf-8")
    return tmp_path


def changed(**places):
    record = copy.deepcopy(RECORD)
    for path, value in places.items():
        *parents, last = path.split("__")
        node = record
        for key in parents:
            node = node[int(key) if key.isdigit() else key]
        node[last] = value
    return record


def test_inside_the_band_says_how_far_off(folder):
    record = changed(variants__0__validation_loss={"mean": 2.0 + 0.9 * report.BAND["validation_loss"]})
    text = report.compare(record, folder)
    assert text.startswith("As expected") and f"furthest off: {0.9 * report.BAND['validation_loss']:.3f}" in text


def test_the_band_is_half_a_hundredth():
    assert report.BAND == {"validation_loss": 0.005, "difference": 0.005}


@pytest.mark.parametrize(("row", "key"), [(0, "validation_loss"), (1, "validation_loss"), (1, "difference")])
@pytest.mark.parametrize("sign", [-1, 1])
def test_outside_the_band_names_the_variant_and_both_numbers(folder, row, key, sign):
    mean = RECORD["variants"][row][key]["mean"] + sign * 1.01 * report.BAND[key]
    text = report.compare(changed(**{f"variants__{row}__{key}": {"mean": mean}}), folder)
    assert "OUTSIDE" in text and "ab"[row] + ": " in text and f"{mean:+.3f}" in text


def test_a_chapter_may_have_a_wider_band(folder):
    for gap, says in ((0.03, "As expected"), (0.05, "OUTSIDE")):
        record = changed(variants__0__validation_loss={"mean": 2.0 + gap})
        assert says in report.compare(record, folder, band=0.04)
    assert "OUTSIDE" in report.compare(changed(variants__0__validation_loss={"mean": 2.03}), folder)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ({"settings__corpus": {"sha256": "11", "tokenizer": "char"}}, "another text"),
        ({"settings__preset": "full"}, "--tiny run"),
        ({"settings__seeds": [1]}, "seeds differ"),
        ({"settings__training": {"steps": 5}}, "training differ"),
        ({"complete": False}, "not every run finished"),
    ],
)
def test_another_setting_is_not_compared(folder, places, says):
    text = report.compare(changed(**places), folder)
    assert text.startswith("Not compared") and says in text


def test_nothing_to_compare_with(tmp_path):
    assert "nothing to compare with" in report.compare(RECORD, tmp_path)
