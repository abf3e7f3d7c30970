"""expected/ is what the code of today does: the first steps of a default run, from every start."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shared import chapters, cli, runs

STEPS = 20  # so few that another machine's rounding has not grown yet


def default_plan(chapter: int) -> tuple[runs.Experiment, cli.Plan]:
    """The experiment of a chapter's default run, and its plan with less to train and evaluate."""
    build = chapters.load_build(chapter)
    preset = build.PRESETS["tiny"]
    experiment = {5: "OneGPT", 7: "FourWay", 18: "SparseOrDense", 38: "SideBySide"}[chapter]
    options = cli.parse("", [], Path("outputs"))
    if chapter == 38:
        variants = build.variants(preset.model, build.DENSE)
        plan = build.at_equal_size(cli.make_plan("", preset, variants, options))
    else:
        variants = build.variants(preset.model) if chapter == 18 else build.VARIANTS
        plan = cli.make_plan("", preset, variants, options)
    training = replace(plan.training, steps=STEPS, observe_every=0)
    corpus = replace(plan.corpus, validation=plan.corpus.validation[: 2 * preset.model.block_size])
    return getattr(build, experiment)(), replace(plan, training=training, corpus=corpus)


@pytest.mark.slow
@pytest.mark.parametrize("chapter", [5, 7, 18, 38])
def test_a_default_run_begins_as_the_expected_one(chapter, monkeypatch, tmp_path):
    experiment, plan = default_plan(chapter)
    monkeypatch.setattr(experiment, "inspect", lambda *_: {})
    plan = replace(plan, options=replace(plan.options, output_dir=tmp_path))
    path = chapters.chapter_folder(chapter) / "expected" / "results.json"
    expected = {
        run["variant"]: run["losses"]
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]
        if run["seed"] == 1
    }
    assert list(expected) == list(plan.configs)
    for name in expected:
        result = runs.train_one(runs.Context(experiment, plan), runs.Run(name, 1), lambda *_: None)
        assert result.history.losses == pytest.approx(expected[name][:STEPS], abs=2e-4), name
