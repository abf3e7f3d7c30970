"""The loop: its optimizer is torch's, its evaluation covers everything, it stops at the first bad loss."""

import math

import pytest
import torch
import torch.nn as nn

from shared import data, training
from shared.kernels import fastest_float32, onednn_is_float32
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


@pytest.mark.parametrize("clip", [1e9, 0.3])
def test_adamw_is_torchs(clip):
    ours, theirs = (nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)) for _ in range(2))
    for p, q in zip(ours.parameters(), theirs.parameters()):
        with torch.no_grad():
            q.copy_(p.normal_(generator=generator(1, tuple(p.shape))))
    optimizer = training.AdamW(ours.parameters(), weight_decay=0.1)
    reference = torch.optim.AdamW(theirs.parameters(), lr=3e-3, weight_decay=0.1)
    draws = generator(1, "inputs")
    for step in range(30):
        x = torch.randn(4, 7, generator=draws) * (5 if step % 3 else 0.01)
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().sum().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        reference.step()
        optimizer.step(3e-3, clip)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, rtol=0, atol=2e-6), (p - q).abs().max()


def test_adamw_leaves_a_parameter_without_a_gradient_alone():
    moving, resting = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = training.AdamW([moving, resting], weight_decay=0.1)
    moving.square().sum().backward()
    optimizer.step(0.1, 1.0)
    assert (moving < 1).all() and torch.equal(resting, torch.ones(3))
    optimizer.zero_grad()
    assert moving.grad is None


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


def test_training_is_what_a_plain_loop_does(modern, corpus):
    settings = TrainingSettings(steps=8, batch_size=4, learning_rate=1e-2)
    model = small_model(modern, corpus)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    draws, losses = generator(3, "batches"), []
    for _ in range(8):
        idx, targets = data.sample_batch(corpus.train, 16, 4, draws)
        logits, _ = model(idx)
        loss = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert train(small_model(modern, corpus), corpus, settings, seed=3).losses == pytest.approx(losses, abs=2e-5)


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
    settings = TrainingSettings(steps=3, batch_size=2, autocast=True, compile="eager")
    half = train(small_model(modern, corpus), corpus, settings, seed=1)
    assert half.losses != plain.losses
    assert half.losses == pytest.approx(plain.losses, abs=0.02)
    assert half.validation_loss == pytest.approx(plain.validation_loss, abs=0.02)


# ---------------------------------------------------------------- kernels


def test_the_fast_products_are_float32(modern, corpus):
    """Loss and gradients agree with torch's default to float32's rounding; bfloat16's would be 1e-3 off."""

    def loss_and_gradients():
        model = small_model(modern, corpus)
        idx = corpus.train[: 5 * 17].view(5, 17)
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        return loss.detach(), [p.grad for p in model.parameters()]

    loss, gradients = loss_and_gradients()
    with fastest_float32() as name:
        fast_loss, fast_gradients = loss_and_gradients()
    assert name == ("oneDNN" if onednn_is_float32() else "torch's default")
    assert abs(fast_loss - loss) < 2e-6
    for g, h in zip(gradients, fast_gradients):
        assert (g - h).abs().max() <= 2e-5 * g.abs().max()


def test_the_choice_of_products_ends_with_its_block():
    attention, precision = nn.functional.scaled_dot_product_attention, torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError, match="inside"), fastest_float32():
        raise RuntimeError("inside")
    assert nn.functional.scaled_dot_product_attention is attention
    assert torch.get_float32_matmul_precision() == precision
