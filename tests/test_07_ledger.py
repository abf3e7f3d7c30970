"""The ledger: its rule on both sides of every border, its pages, its commands, and what it trains."""

import math
import re
from dataclasses import replace

import pytest
import torch

from shared import chapters, training, verdict
from shared.console import UserError
from shared.verdict import Interval

FOLDER = chapters.chapter_folder(7)
ROOT = chapters.PROJECTS.parent
ledger = chapters.load_file(FOLDER / "ledger.py")
rows = ledger.rows
rule = ledger.rule
trained = rows.trained
study = rows.study

# ---------------------------------------------------------------- the rule

LOWER = Interval(-0.1, 0.05, 6)
HIGHER = Interval(0.1, 0.05, 6)
EQUAL = Interval(0.0, 0.01, 6)
WIDE = Interval(0.0, 0.5, 6)  # can't tell
MISSING = None


def compared(*groups, claimed="lower", **options) -> "rule.Compared":
    made = [
        rule.Group(f"thing {i}", [rule.Measured("", found) for found in group])
        for i, group in enumerate(groups, start=1)
    ]
    return rule.Compared(tuple(claimed.split()), made, **options)


@pytest.mark.parametrize(
    ("found", "claimed", "said"),
    [
        (Interval(-0.1, 0.0999, 6), "lower", "holds"),  # 0 lies just outside
        (Interval(-0.1, 0.1001, 6), "lower", "can't tell"),
        (Interval(-0.1, 0.0999, 6), "higher", "not at this scale"),
        (Interval(0.1, 0.0999, 6), "higher", "holds"),
        (Interval(0.01, 0.0099, 6), "lower", "equal within 0.02"),
        (Interval(0.01, 0.0101, 6), "lower", "can't tell"),  # it reaches beyond δ, and 0 is in it
        (Interval(0.01, 0.0099, 6), "equal", "equal within 0.02"),
        (Interval(-0.1, 0.05, 6), "equal", "not at this scale"),
        (Interval(-0.1, 0.05, 6), "lower higher", "holds"),
        (Interval(-0.1, None, 1), "lower", "can't tell"),  # one seed
        (0.02, "equal", "equal within 0.02"),  # a number without an error
        (0.0201, "equal", "not at this scale"),
        (-0.0201, "lower", "holds"),
        (-0.02, "lower", "equal within 0.02"),
        (math.nan, "lower", "can't tell"),
        (MISSING, "lower", "not yet run"),
    ],
)
def test_a_single_measurement(found, claimed, said):
    assert rule.judge(compared([found], claimed=claimed)) == said


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([[LOWER, LOWER]], "holds"),
        ([[LOWER, HIGHER]], "depends on thing 1"),
        ([[LOWER, EQUAL]], "depends on thing 1"),
        ([[HIGHER, EQUAL]], "not at this scale"),
        ([[EQUAL, EQUAL]], "equal within 0.02"),
        ([[LOWER, LOWER], [LOWER, HIGHER]], "depends on thing 2"),
        ([[LOWER, HIGHER], [LOWER, EQUAL]], "depends on thing 1 and thing 2"),
        ([[LOWER], [HIGHER]], "depends on thing 1 and thing 2"),  # each agrees with itself
        ([[LOWER, WIDE]], "can't tell"),  # half of them answer
        ([[EQUAL, WIDE]], "can't tell"),
        ([[LOWER, LOWER, WIDE]], "holds"),
        ([[EQUAL, EQUAL, WIDE]], "equal within 0.02"),
        ([[LOWER, WIDE], [HIGHER, HIGHER]], "depends on thing 1 and thing 2"),  # no answer is no side
        ([[LOWER, WIDE, WIDE]], "can't tell"),
        ([[LOWER, HIGHER, WIDE]], "depends on thing 1"),
        ([[LOWER, HIGHER, WIDE, WIDE]], "can't tell"),
        ([[LOWER, MISSING]], "not yet run"),
        ([[LOWER, LOWER], [LOWER, MISSING]], "holds, so far"),
        ([[LOWER, HIGHER], [MISSING]], "depends on thing 1, so far"),
        ([[EQUAL], [MISSING]], "equal within 0.02, so far"),
    ],
)
def test_several_measurements(groups, said):
    assert rule.judge(compared(*groups)) == said


def test_a_group_is_corrected_together_and_another_group_apart():
    """At 6 seeds an interval of 0.9 times the mean is enough alone, and not as one of eight."""
    close = Interval(-0.1, 0.09, 6)
    assert rule.judge(compared([close])) == "holds"
    assert rule.judge(compared([close] * 8)) == "can't tell"
    assert rule.judge(compared(*[[close]] * 8)) == "holds"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Interval(1.0, 0.0999, 6), "equal within 0.1"),
        (Interval(1.0, 0.1001, 6), "can't tell"),
        (Interval(1.3, 0.2999, 6), "not at this scale"),
        (1.099, "equal within 0.1"),
        (1.101, "not at this scale"),
        (0.899, "not at this scale"),
    ],
)
def test_a_row_may_have_a_border_and_a_width_of_its_own(found, said):
    assert rule.judge(compared([found], claimed="equal", border=1.0, delta=0.1)) == said


def test_a_border_may_be_passed_and_not_only_met():
    above = {"claimed": "higher equal", "border": 0.5, "delta": 0.01}
    assert rule.judge(compared([Interval(0.8, 0.29, 6)], **above)) == "holds"
    assert rule.judge(compared([Interval(0.8, 0.31, 6)], **above)) == "can't tell"
    assert rule.judge(compared([Interval(0.2, 0.29, 6)], **above)) == "not at this scale"
    assert rule.judge(compared([Interval(0.0, 0.0, 6)], **above)) == "not at this scale"


@pytest.mark.parametrize(
    ("operations", "times", "said"),
    [
        (0.6, [0.6], "holds"),
        (0.6, [0.5, 0.61], "of operations, not of time"),
        (0.61, [0.1], "false"),
        (0.5, [Interval(0.59, 0.2, 3)], "holds"),
        (0.5, [Interval(0.61, 0.2, 3)], "of operations, not of time"),
        (0.5, [None], "not yet run"),
    ],
)
def test_work(operations, times, said):
    assert rule.judge(rule.Work(0.6, operations, [rule.Measured("", time) for time in times])) == said


def test_answers_that_were_given_elsewhere_are_taken():
    said = [verdict.Verdict("lower"), verdict.Verdict("can't tell", 9)]
    group = rule.Group("the size", [rule.Measured("", LOWER), rule.Measured("", LOWER)], said)
    assert rule.answers(group, rule.Compared(("lower",), [group])) == said
    other = replace(group, said=[verdict.Verdict("higher"), verdict.Verdict("equal")])
    assert rule.judge(rule.Compared(("lower",), [other])) == "not at this scale"
    assert [ledger.in_words(one) for one in said] == ["lower", "can't tell; about 9 seeds needed"]


def test_a_law_holds_or_is_false():
    assert rule.judge(rule.Law(True, [])) == "holds"
    assert rule.judge(rule.Law(False, [])) == "false"


# ---------------------------------------------------------------- the rows


def test_every_claim_of_the_list_has_a_row():
    titles = " ".join(row.title for row in rows.ROWS).lower()
    for word in (
        "half the work", "as good", "recentring", "SwiGLU beats", "wider", "order", "float32", "ln V", "deep model",
        "tied", "pre-norm", "RoPE learns", "RoPE carries", "distance", "same compute", "equal active", "collapses",
        "auxiliary loss of 1", "top-1", "expert choice", "decay", "clipping",
    ):  # fmt: skip
        assert word.lower() in titles, word
    assert len({row.title for row in rows.ROWS}) == len(rows.ROWS) >= 22


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.title)
def test_a_rows_command_is_one(row):
    for line in row.command.split("\n"):
        python, script, *flags = line.split()
        path = (FOLDER / script).resolve()
        assert python == "python" and path.is_file(), line
        text = path.read_text(encoding="utf-8")
        for flag, value in zip(flags[::2], flags[1::2]):
            known = {
                "--row": trained.ROWS,
                "--sabotage": re.findall(r'"([a-z0-9-]+)"', text),
                **{flag: [value] for flag in ("--set", "--steps", "--seeds")},  # test_07_readme.py runs one
            }
            assert value in known[flag], line


def test_what_is_trained_is_used_and_what_is_used_is_trained():
    commands = " ".join(row.command for row in rows.ROWS)
    assert set(re.findall(r"--row (\S+)", commands)) == set(trained.ROWS)
    used = {name for conditions in trained.ROWS.values() for c in conditions.values() for name in c.variants}
    assert set(trained.MODELS) - set(study.VARIANTS) <= used <= set(trained.MODELS)


# The rows that read what a page printed, and the pages.
FROM_PAGES = {
    rows.needs_a_norm: (7, 5),
    rows.fresh_loss: (5, 8),
    rows.deep_start: (5, 9),
    rows.by_distance: (7, 8),
    rows.one_is_balance: (18, 4),
    rows.expert_choice: (18, 6),
}


@pytest.mark.parametrize("evidence", FROM_PAGES, ids=lambda evidence: evidence.__name__)
def test_a_page_prints_what_its_row_reads(evidence, step_run, monkeypatch):
    chapter, number = FROM_PAGES[evidence]
    (page,) = chapters.chapter_folder(chapter).glob(f"step_{number:02d}_*.py")
    committed = evidence()
    before = rows.expected

    def expected(of: int, name: str) -> str:
        return step_run(page).out if (of, name) == (chapter, f"step_{number:02d}.txt") else before(of, name)

    monkeypatch.setattr(rows, "expected", expected)
    if evidence is rows.needs_a_norm:  # its table's place is counted in lines
        monkeypatch.setattr(rows, "expected", lambda *a: expected(*a)[expected(*a).index("Validation") :])
    today = evidence()
    assert rule.judge(today) == rule.judge(committed)
    numbers = [
        [rule.mean_of(one.found) for one in ledger.measured_of(found)] for found in (today, committed)
    ]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=0.01)


def test_a_number_that_is_not_there_once_is_refused():
    assert rows.numbers("a 1,234 b 0.5", r"a (\S+) b (\S+)") == [1234.0, 0.5]
    for text in ("nothing", "a 1\na 2"):
        with pytest.raises(ValueError, match="is found"):
            rows.numbers(text, r"^a (\d)$")


def test_the_logs_give_number_seeds_and_answer():
    assert rows.in_log("falling-rate-6-seeds.txt", "LayerNorm", "SwiGLU") == (Interval(0.066, 0.024, 6), "higher")
    assert rows.in_log("400-steps-16-seeds.txt", "RMSNorm", "GELU") == (Interval(0.010, 0.011, 16), "can't tell")
    found, said = rows.default_run(7, "LayerNorm+SwiGLU")
    assert str(found) == "-0.092 ± 0.029" and found.n == 6 and said == "lower"


def test_agreement_by_hand():
    order = {"a": 1.0, "b": 2.0, "c": 3.0}
    assert rows.agreement(order, order) == 1
    assert rows.agreement({"a": 3.0, "b": 2.0, "c": 1.0}, order) == -1
    assert rows.agreement({"a": 2.0, "b": 1.0, "c": 3.0}, order) == pytest.approx(1 / 3)  # one of three pairs


def test_an_expert_is_starved_below_a_tenth_of_its_fair_share():
    assert rows.starved({"load": [0.5, 0.45, 0.026, 0.024]}) == 1 / 4  # fair is 1/4, a tenth of it 0.025


# ---------------------------------------------------------------- when all is there


def invented(trial) -> dict:
    """What is read of a run: a valley at 0.004, and a model's own distance from it by its name's length."""
    loss = 2 + abs(math.log2(trial.rate / 4e-3)) / 10 + 0.009 * len(trial.setting.variant) + 0.001 * (trial.seed % 3)
    of_rope = {f"loss at {length}": loss + length / 1000 for length in trained.LENGTHS}
    return {"loss": loss, "rise": 0.1, "max_violation": 1.5, "dead": 0, "load": [0.99, 0.01, 0.0, 0.0], **of_rope}


@pytest.fixture
def all_there(tmp_path, monkeypatch):
    """Every trained row and every part of the study, with invented losses."""
    (tmp_path / "ledger").mkdir()
    (tmp_path / "study").mkdir()
    for row, conditions in trained.ROWS.items():
        found = trained.known(list(conditions.values()), lambda trial: {trial: invented(trial)})
        trained.write_rows(trained.file_of(tmp_path / "ledger", row), found)
    for name, part in rows.study_page.PARTS.items():
        losses = trained.losses_of(trained.known(part.conditions, lambda trial: {trial: invented(trial)}))
        study.write_rows(study.file_of(tmp_path / "study", name, 1), study.rows_of(part.conditions, losses, 1))
    monkeypatch.setattr(rows, "RESULTS", tmp_path)


def test_with_all_results_every_row_has_a_verdict_and_every_figure_is_drawn(all_there):
    said = {row.title: rule.judge(row.evidence()) for row in rows.ROWS}
    assert not [title for title, verdict_ in said.items() if "not yet" in verdict_ or "so far" in verdict_]
    # A letter more in the name costs 0.009, so SwiGLU is equal everywhere but in make tiny.
    assert said["SwiGLU beats GELU"] == "depends on the learning rate"
    assert said["A wider SwiGLU is no fair winner"] == "equal within 0.02"  # longer by 1
    assert said["RoPE learns faster than learned positions"] == "holds"
    assert said["RoPE carries beyond the trained length"] == "not at this scale"
    assert said["Without a balance loss the router collapses"] == "holds"  # three of four are starved
    for group in rows.swiglu_better().groups[1:]:  # of the study
        assert len(group.said) == len(group.measured)
    assert "after 800 steps" in ledger.beyond() and "Each at its own best" in ledger.top_section()
    assert "not yet run" not in ledger.page().partition("## The rule")[0]
    for _, draw in ledger.FIGURES.values():
        assert len(draw().axes) == 2


# ---------------------------------------------------------------- pages


def test_the_pages_are_what_the_committed_results_give():
    for path, text in ledger.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python ledger.py --write"


def test_every_link_leads_to_a_heading():
    headings = re.findall(r"^## (.+)$", (FOLDER / "LEDGER.md").read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {ledger.anchor(title) for title in headings}
    for page in (FOLDER / "LEDGER.md", FOLDER / "README.md", ROOT / "README.md"):
        text = page.read_text(encoding="utf-8")
        places = dict(re.findall(r"^\[(row \d+)\]: (\S+)$", text, re.MULTILINE))
        assert set(re.findall(r"\]\[(row \d+)\]", text)) == set(places), page
        assert len(places) == len(rows.ROWS)
        for place in places.values():
            file, _, name = place.partition("#")
            assert (page.parent / file).resolve() == FOLDER / "LEDGER.md" or not file
            assert name in anchors, place
    assert ledger.anchor("9. A fresh model's loss is ln V") == "9-a-fresh-models-loss-is-ln-v"


def test_the_figures_are_there():
    for name in ledger.FIGURES:
        assert (FOLDER / "expected" / name).stat().st_size > 5_000


def test_the_readmes_count_the_claims():
    assert f"# {len(rows.ROWS)} claims about" in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f": {len(rows.ROWS)} claims," in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_section_is_replaced_and_nothing_else():
    text = "# Page\n\n## A\n\nold\n\n## B\n\nstays\n"
    assert ledger.with_section(text, "A", "new") == "# Page\n\n## A\n\nnew\n\n## B\n\nstays\n"
    with pytest.raises(UserError, match="once"):
        ledger.with_section(text, "C", "new")


def test_what_is_known_beyond_a_default_run_is_said_by_it(modern):
    assert modern.scope() == ledger.beyond()
    log = "a\n\nAt one shared rate\nit was so.\n\nb\n"
    assert ledger.with_paragraph(log, "now") == "a\n\nnow\n\nb\n"


def test_what_is_said_of_a_schedule():
    """At equal seeds x is lower by 0.1 and y is equal; z swings by 1."""
    base = {seed: 2 + seed / 10 for seed in range(6)}
    losses = {
        rows.BASELINE: base,
        "x": {seed: loss - 0.1 for seed, loss in base.items()},
        "y": base,
        "z": {seed: loss + (-1) ** seed for seed, loss in base.items()},
    }
    models = {
        name: trained.Outcome(0.004, {seed: {"loss": loss} for seed, loss in by_seed.items()})
        for name, by_seed in losses.items()
    }
    said = ledger.at_best_rates(trained.pair(800, "x", schedule="constant"), models)
    assert said.startswith("With a constant rate: lower: x (-0.100 ± 0.000); equal within 0.02: y (+0.000 ± 0.000); can't")
    assert said.count("z (+0.000 ± 1.150).") == 1


def test_the_terminal_gets_80_columns(capsys):
    assert ledger.main([]) == 0
    table = capsys.readouterr().out
    assert all(re.search(rf"^ *{number}  ", table, re.MULTILINE) for number in range(1, len(rows.ROWS) + 1))
    for number, row in enumerate(rows.ROWS, start=1):
        assert ledger.main([str(number)]) == 0
        said = capsys.readouterr().out
        commands = [f"    {line}" for line in row.command.split("\n")]
        lines = [line for line in (table + said).splitlines() if line not in commands]  # no command is cut in two
        assert max(map(len, lines)) <= 80
        assert "\n".join(commands) in said and f"\n\n{rule.judge(row.evidence())}\n\n" in said


def test_a_row_that_is_not_there_is_refused_in_a_line():
    with pytest.raises(UserError, match=rf"no row 99; rows are 1 to {len(rows.ROWS)}"):
        ledger.main(["99"])


# ---------------------------------------------------------------- what is trained


def test_the_seeds_that_choose_a_rate_never_judge():
    for conditions in trained.ROWS.values():
        for condition in conditions.values():
            chosen_on = study.choice_seeds(condition, trained.FIRST_SEED)
            judged_on = study.verdict_seeds(condition, trained.FIRST_SEED)
            assert not set(chosen_on) & set(judged_on) and len(judged_on) >= 4


def started(name: str) -> torch.nn.Module:
    model = trained.MODELS[name]
    built = model.experiment.build_model(model.config(trained.Setting()), 95, 1)
    with torch.no_grad():
        for p in built.parameters():
            p.mul_(20)  # so large that a changed curve shows
    return built.eval()


def test_every_model_computes_something_of_its_own():
    idx = torch.arange(60).view(2, 30)
    with torch.no_grad():
        logits = {name: started(name)(idx)[0] for name in trained.MODELS}
    # These differ in training alone, and the dense model of chapter 18 is one of chapter 07's.
    same = {"decay of all", "decay of matrices", "not clipped", "top-2 alone", "top-2 + bias", "Switch alone", "dense"}
    names = [name for name in logits if name not in same]
    for i, a in enumerate(names):
        for b in names[:i]:
            assert not torch.allclose(logits[a], logits[b], atol=1e-4), (a, b)
    assert torch.equal(logits["not clipped"], logits["LayerNorm+GELU"])
    assert torch.equal(logits["top-2 alone"], logits["top-2 + loss"])
    assert torch.equal(logits["dense"], logits["RMSNorm+SwiGLU"])


def test_the_recentred_norm_is_layernorm_without_its_bias():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)) + 5
    norm = started("recentred").norm_f
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (64,), norm.weight), atol=1e-5, rtol=1e-5)


def test_sizes_of_what_is_compared():
    def size(name: str) -> int:
        model = trained.MODELS[name]
        built = model.experiment.build_model(model.config(trained.Setting()), 4096, 1)
        return sum(p.numel() for p in built.parameters())

    assert size("untied") - size("LayerNorm+GELU") == 4096 * 64
    assert size("SwiGLU, 4C inside") - size("LayerNorm+SwiGLU") == 2 * 3 * 64 * (256 - 170)
    assert abs(size("tied, 7 layers") / size("untied") - 1) < 0.03


def test_decay_by_hand():
    """After steps at rates 0.5 and 1, of warm-up 2, what is named has shrunk by 0.95 and then 0.9."""
    model = torch.nn.ModuleDict({"fc": torch.nn.Linear(2, 3), "norm": torch.nn.LayerNorm(3)})
    before = {name: p.clone() for name, p in model.named_parameters()}
    settings = training.TrainingSettings(steps=9, learning_rate=1.0, warmup=2)
    after_step = trained.decay_by_hand(r"fc\.weight", settings)
    for _ in range(2):
        after_step(model, None)
    for name, p in model.named_parameters():
        shrunk = 0.95 * 0.9 if name == "fc.weight" else 1.0
        torch.testing.assert_close(p, shrunk * before[name])


def test_the_matrices_alone_decay():
    decayed = {
        name for name, _ in started("decay of matrices").named_parameters()
        if re.search(trained.MODELS["decay of matrices"].decayed, name)
    }  # fmt: skip
    of_block = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight")
    assert decayed == {f"blocks.{n}.{name}" for n in (0, 1) for name in of_block}


def test_the_largest_rise_by_hand():
    """Means of ten: 3, 1, 2.5, 0.5, 1.5: from 1 up to 2.5."""
    losses = [loss for mean in (3, 1, 2.5, 0.5, 1.5) for loss in [mean - 1, mean + 1] * 5]
    assert trained.largest_rise(losses) == 1.5
    assert trained.largest_rise([3.0] * 10 + [2.0] * 10) == 0.0


def few_steps(monkeypatch, tmp_path) -> "trained.Context":
    corpus = study.load_text("docs, characters")
    corpus = replace(corpus, validation=corpus.validation[:300])
    store = trained.Store(tmp_path / "ledger" / "runs")
    return trained.Context(store, {"docs, characters": corpus})


@pytest.mark.parametrize(
    ("name", "also"),
    [
        ("RoPE", {"loss at 64", "loss at 128", "loss at 256"}),
        ("Switch alone", {"max_violation", "dead", "dropped", "load"}),
        ("decay of all", set()),
    ],
)
def test_a_run_is_kept_and_read_again(name, also, monkeypatch, tmp_path):
    context = few_steps(monkeypatch, tmp_path)
    trial = trained.Trial(trained.Setting(variant=name, steps=2), 2e-3, 4)
    found = trained.train_trial(context, trial, print)
    assert set(found) == {"loss", "rise"} | also
    assert context.store.read(trial) == {trial: found}
    assert not context.store.read(replace(trial, seed=5))


def test_a_run_that_diverges_has_no_loss(monkeypatch, tmp_path):
    def diverge(*_, **__):
        raise training.NonFiniteLoss(1, math.nan)

    monkeypatch.setattr(training, "train", diverge)
    trial = trained.Trial(trained.Setting(steps=2), 2e-3, 4)
    assert trained.train_trial(few_steps(monkeypatch, tmp_path), trial, print) == {"loss": None}


def test_a_run_of_the_study_is_not_trained_again(tmp_path):
    trial = trained.Trial(trained.Setting("RMSNorm+GELU", steps=2), 2e-3, 4)
    study.Store(tmp_path / "study" / "runs").write(trial, 1.25)
    store = trained.Store(tmp_path / "ledger" / "runs")
    assert store.read(trial) == {trial: {"loss": 1.25}}
    assert not store.read(replace(trial, setting=replace(trial.setting, variant="untied")))


def made_up(condition, loss) -> dict:
    """What a condition's runs found, if loss(variant, rate, seed) were their loss."""

    def read(trial):
        return {trial: {"loss": loss(trial.setting.variant, trial.rate, trial.seed)}}

    return trained.known([condition], read)


def test_each_model_is_judged_at_its_own_best_rate(tmp_path):
    """The valley of `a` is at 0.004, that of `b` at 0.008 and deeper by 0.1; the seeds cancel."""
    condition = trained.pair(2, "a", "b")

    def loss(variant: str, rate: float, seed: int) -> float:
        best = {"a": 4e-3, "b": 8e-3}[variant]
        return abs(math.log2(rate / best)) + 0.01 * seed + 0.1 * (variant == "a")

    found = made_up(condition, loss)
    outcomes = trained.outcomes(condition, found)
    assert [outcome.rate for outcome in outcomes.values()] == [4e-3, 8e-3]
    assert sorted(outcomes["a"].by_seed) == [4, 5, 6, 7, 8, 9]
    gap = trained.difference(outcomes["b"], outcomes["a"])
    assert gap.mean == pytest.approx(-0.1) and gap.half_width == pytest.approx(0, abs=1e-9) and gap.n == 6
    trained.write_rows(tmp_path / "row.json", found)
    assert trained.read_rows(tmp_path / "row.json") == {trial: trained.short(one) for trial, one in found.items()}
    assert trained.short({"loss": 1.23456789, "load": [0.1], "dead": 2}) == {"loss": 1.234568, "load": [0.1], "dead": 2}
    (last, *_) = [trial for trial in found if trial.seed == 9]
    assert trained.outcomes(condition, {t: one for t, one in found.items() if t != last}) is None


def test_at_a_shared_rate_nothing_is_chosen():
    condition = trained.at_high_rate(2, "a", "b")
    found = made_up(condition, lambda variant, rate, seed: {"a": 1.0, "b": None if seed == 4 else 2.0}[variant])
    assert {(trial.rate, trial.seed) for trial in found} == {(1.6e-2, seed) for seed in range(4, 10)}
    outcomes = trained.outcomes(condition, found)
    assert outcomes["b"].diverged == 1
    assert trained.difference(outcomes["b"], outcomes["a"]).n == 5


def test_a_file_that_is_no_row_is_refused(tmp_path):
    assert trained.read_rows(tmp_path / "none.json") == {}
    (tmp_path / "row.json").write_text('{"columns": [], "runs": []}', encoding="utf-8")
    with pytest.raises(UserError, match="row.json"):
        trained.read_rows(tmp_path / "row.json")


def test_the_command_trains_what_is_missing_and_writes_the_row(monkeypatch, tmp_path, capsys):
    condition = replace(trained.at_high_rate(2, "LayerNorm+GELU", "not clipped"), judging=1)
    monkeypatch.setattr(trained, "ROWS", {"clipping": {"a high rate": condition}})

    def run_jobs(function, context, jobs, workers, report):
        for job in jobs:
            one = {"loss": 2.0}
            context.store.write(job, one)
            yield job, one

    monkeypatch.setattr(trained.runs, "run_jobs", run_jobs)
    flags = ["--row", "clipping", "--output-dir", str(tmp_path / "ledger")]
    assert trained.main(flags) == 0
    assert capsys.readouterr().out.count("seed 4: 2.000") == 2
    assert len(trained.read_rows(tmp_path / "ledger" / "clipping.json")) == 2
    assert trained.main(flags) == 0
    assert "seed 4: 2.000" not in capsys.readouterr().out  # nothing is trained twice


def test_a_row_that_is_no_row_is_refused_in_a_line():
    with pytest.raises(UserError, match="invalid choice: 'nonsense'"):
        trained.main(["--row", "nonsense"])


def test_the_list_shows_the_lines_that_each_model_exchanges(capsys):
    assert trained.main(["--list", "--row", "recentring"]) == 0
    said = capsys.readouterr().out
    assert "        + wide = wide - wide.mean(-1, keepdim=True)\n" in said and "experts" not in said
