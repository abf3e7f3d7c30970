"""The loop: its optimizer is torch's, its evaluation covers everything, it stops at the first bad loss."""

import math

import pytest
import torch
import torch.nn as nn

from shared import data, training
from shared.randomness import generator
from shared.training import TrainingSettings, train


@pytest.fixture(scope="module")
def corpus():
    text = "".join(data.torch_docs())[:20_000]
    tokenizer = data.CharTokenizer(text)
    ids = torch.tensor(tokenizer.encode(text))
    return data.Corpus("test", "", len(text), tokenizer, ids[:18_000], ids[18_000:])


def small_model(modern, corpus, seed=1, **config):
    model = modern.ModernGPT(
        modern.ModernConfig(**({"block_size": 16, "n_heads": 2, "d_model": 24} | config)), corpus.vocab_size
    )
    modern.gpt.init_parameters(model, seed)
    return model


def test_the_learning_rate_climbs_and_then_falls_along_a_half_cosine():
    settings = TrainingSettings(steps=110, learning_rate=2.0, warmup=10, final_rate=0.1)
    rates = [training.learning_rate(step, settings) for step in range(111)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == rates[10] == 2.0
    assert rates[60] == pytest.approx(2.0 * 0.55)  # half way down: the middle of 1 and 0.1
    assert rates[110] == pytest.approx(0.2)
    assert all(rate == 3e-3 for rate in (training.learning_rate(s, TrainingSettings()) for s in (0, 99, 199)))


def test_training_twice_gives_the_same_losses_and_another_seed_does_not(modern, corpus):
    settings = TrainingSettings(steps=12, batch_size=4)
    one, two = (train(small_model(modern, corpus), corpus, settings, seed=5) for _ in range(2))
    assert one.losses == two.losses and one.validation_loss == two.validation_loss and len(one.losses) == 12
    other = train(small_model(modern, corpus), corpus, settings, seed=6)
    assert other.losses[0] != one.losses[0]


@pytest.mark.parametrize("schedule", [{}, {"warmup": 3, "final_rate": 0.1}])
def test_training_is_what_a_plain_loop_does(modern, corpus, schedule):
    settings = TrainingSettings(steps=8, batch_size=4, learning_rate=1e-2, **schedule)
    model = small_model(modern, corpus)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    draws, losses = generator(3, "batches"), []
    for step in range(8):
        idx, targets = data.sample_batch(corpus.train, 16, 4, draws)
        logits, _ = model(idx)
        loss = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = training.learning_rate(step, settings)
        optimizer.step()
        losses.append(loss.item())
    ours = train(small_model(modern, corpus), corpus, settings, seed=3)
    assert ours.losses == pytest.approx(losses, abs=2e-5)
    # The validation part, and the model after the last step.
    left_out = training.evaluate(model, corpus.validation, settings)
    assert ours.validation_loss == pytest.approx(left_out, abs=2e-5)


def test_evaluation_is_the_mean_over_every_token(modern, corpus):
    model = small_model(modern, corpus).train()
    loss = training.evaluate(model, corpus.validation, TrainingSettings())
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(corpus.validation) - 1, 16):
            window = corpus.validation[start : start + 17]
            logits = model(window[None, :-1])[0][0]
            total += nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    assert loss == pytest.approx(total / (len(corpus.validation) - 1), abs=1e-5)
    assert model.training  # as it was


class Exploding(nn.Module):
    """A model whose loss is 1, 2, 3, … and infinite at the seventh batch."""

    def __init__(self):
        super().__init__()
        self.cfg, self.calls = TrainingSettings(), 0
        self.weight = nn.Parameter(torch.ones(()))
        self.cfg = type("Config", (), {"block_size": 8})

    def forward(self, idx, targets=None):
        self.calls += 1
        return None, self.weight * (self.calls if self.calls < 7 else math.inf)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_step(corpus):
    with pytest.raises(training.NonFiniteLoss, match="became inf at step 7") as error:
        train(Exploding(), corpus, TrainingSettings(steps=30), seed=1)
    assert error.value.step == 7


def test_reports_come_early_and_to_the_last_step(modern, corpus):
    reports = []
    history = train(
        small_model(modern, corpus),
        corpus,
        TrainingSettings(steps=23, batch_size=2),
        seed=1,
        report=lambda done, loss, ms: reports.append((done, loss)),
    )
    assert [done for done, _ in reports] == [2, 10, 20, 23]
    assert reports[-1][1] == pytest.approx(sum(history.losses[20:]) / 3)
    assert history.train_loss == pytest.approx(sum(history.losses[-2:]) / 2)


def test_looking_inside_changes_nothing(modern, corpus):
    looks = []

    def observe(model, idx):
        looks.append(torch.is_grad_enabled())
        return {"loss": model(idx, idx)[1].item()}

    settings = TrainingSettings(steps=10, batch_size=2, observe_every=4)
    seen = train(small_model(modern, corpus), corpus, settings, seed=1, observe=observe)
    blind = train(small_model(modern, corpus), corpus, TrainingSettings(steps=10, batch_size=2), seed=1)
    assert seen.losses == blind.losses and seen.validation_loss == blind.validation_loss
    assert looks == [False, False] and [o["step"] for o in seen.observations] == [4, 8]


def test_the_gpus_path_runs_on_the_cpu(modern, corpus):
    """autocast and torch.compile (with the backend that compiles nothing) change the loss by bfloat16's rounding."""
    plain = train(small_model(modern, corpus), corpus, TrainingSettings(steps=3, batch_size=2), seed=1)
    settings = TrainingSettings(steps=3, batch_size=2, precision="bfloat16", compile="eager")
    half = train(small_model(modern, corpus), corpus, settings, seed=1)
    assert half.losses != plain.losses
    assert half.losses == pytest.approx(plain.losses, abs=0.02)
    assert half.validation_loss == pytest.approx(plain.validation_loss, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_dtypes_train_too(modern, corpus, dtype):
    model = small_model(modern, corpus).to(dtype)
    history = train(model, corpus, TrainingSettings(steps=40, batch_size=8), seed=1)
    assert history.losses[-1] < history.losses[0] - 0.5


def test_after_each_step_the_hook_is_told_what_the_loss_told(modern, corpus):
    told = []

    def loss_and_more(model, idx, targets):
        _, loss = model(idx, targets)
        return loss, loss, tuple(idx.shape)

    train(
        small_model(modern, corpus),
        corpus,
        TrainingSettings(steps=3, batch_size=2),
        seed=1,
        training_loss=loss_and_more,
        after_step=lambda model, more: told.append(more),
    )
    assert told == [(2, 16)] * 3


def test_a_validation_loss_that_is_not_finite_is_a_failure_too(modern, corpus, monkeypatch):
    monkeypatch.setattr(training, "evaluate", lambda *_: math.nan)
    with pytest.raises(training.NonFiniteLoss, match="step 3"):
        train(small_model(modern, corpus), corpus, TrainingSettings(steps=3), seed=1)


def test_the_evaluation_is_in_evaluation_mode(modern, corpus):
    model = small_model(modern, corpus).train()
    modes = []
    model.register_forward_hook(lambda module, *_: modes.append(module.training))
    training.evaluate(model, corpus.validation, TrainingSettings())
    assert modes and not any(modes)


def test_what_is_added_to_the_objective_is_not_reported(modern, corpus):
    def with_a_constant(model, idx, targets):
        _, loss = model(idx, targets)
        return loss + 7.0, loss, None

    settings = TrainingSettings(steps=4, batch_size=2)
    plain = train(small_model(modern, corpus), corpus, settings, seed=1)
    other = train(
        small_model(modern, corpus), corpus, settings, seed=1, training_loss=with_a_constant
    )
    assert other.losses == plain.losses and other.validation_loss == plain.validation_loss


def test_the_time_of_a_step_leaves_out_the_first_window_once_there_are_others():
    def of(milliseconds):
        return training.State(None, None, None, None, None, milliseconds).ms_per_step

    assert of([90.0]) == 90.0 and of([90.0, 3.0]) == 3.0 and of([9.0, 3.0, 1.0]) == 3.0
