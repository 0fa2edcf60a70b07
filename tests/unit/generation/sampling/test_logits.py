"""Sampling of the next token."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from lmcore.base.errors import ConfigError
from lmcore.generation.sampling.logits import apply_penalties, new_generators, sample
from lmcore.generation.sampling.options import SamplingOptions

LOGITS = [1.0, -0.5, 2.0, 0.0, 2.0, -3.0, 0.7, 1.4]
DRAWS = 20_000
# The 1e-6 quantiles of chi-square, by degrees of freedom: a right sampler never fails.
CHI_SQUARE = {1: 23.93, 2: 27.63, 3: 30.66, 4: 33.38, 5: 35.89, 6: 38.26, 7: 40.52}


def probabilities(logits: list[float], temperature: float = 1.0) -> list[float]:
    """Return the softmax, written out."""
    weights = [math.exp(logit / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def draws(
    options: SamplingOptions, logits: list[float] = LOGITS, *, seed: int = 0, count: int = DRAWS
) -> list[int]:
    """Many draws from *logits*, in one batch."""
    logits_BV = torch.tensor(logits).expand(count, -1)
    generators = new_generators(seed, 1) * count
    return sample(logits_BV, [options] * count, generators).tolist()


def assert_distributed(found: list[int], expected: dict[int, float]) -> None:
    """Compare counts with probabilities by Pearson's chi-square."""
    counts = Counter(found)
    total = sum(expected.values())
    assert set(counts) <= set(expected)
    statistic = sum(
        (counts[i] - len(found) * p / total) ** 2 / (len(found) * p / total)
        for i, p in expected.items()
    )
    assert statistic < CHI_SQUARE[len(expected) - 1]


class TestDistribution:
    """Frequencies are the probabilities that the options ask for."""

    @pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
    def test_temperature(self, temperature: float) -> None:
        """Ids come with the softmax of the logits over the temperature."""
        found = draws(SamplingOptions(temperature=temperature))
        assert_distributed(found, dict(enumerate(probabilities(LOGITS, temperature))))

    def test_wrong_temperature_would_be_noticed(self) -> None:
        """The comparison is sharp enough to tell 1.0 from 1.1."""
        found = draws(SamplingOptions(temperature=1.1))
        with pytest.raises(AssertionError):
            assert_distributed(found, dict(enumerate(probabilities(LOGITS))))

    def test_top_k(self) -> None:
        """Only the k highest can come, in their old proportions."""
        found = draws(SamplingOptions(top_k=3, temperature=1.5))
        kept = probabilities(LOGITS, 1.5)
        assert_distributed(found, {i: kept[i] for i in (2, 4, 7)})

    def test_top_k_keeps_ties(self) -> None:
        """Scores that equal the k-th are kept with it, so that no order decides."""
        found = draws(SamplingOptions(top_k=2), [0.0, 1.0, 0.5, 1.0, 1.0])
        assert_distributed(found, {1: 1.0, 3: 1.0, 4: 1.0})

    def test_top_k_above_the_vocabulary(self) -> None:
        """More than there are keeps all."""
        expected = draws(SamplingOptions())
        assert draws(SamplingOptions(top_k=1000)) == expected

    def test_top_p(self) -> None:
        """The fewest ids that reach p can come; the one that crosses it is among them."""
        kept = probabilities(LOGITS)
        order = sorted(range(len(LOGITS)), key=lambda i: -kept[i])
        below = sum(kept[i] for i in order[:3])
        found = draws(SamplingOptions(top_p=below + 0.01))
        assert_distributed(found, {i: kept[i] for i in order[:4]})

    def test_top_p_after_temperature(self) -> None:
        """The probability is computed from the tempered logits."""
        # Tempered to 0.1 the two highest have all but nothing of the probability.
        assert_distributed(draws(SamplingOptions(top_p=0.99, temperature=0.1)), {2: 1.0, 4: 1.0})

    def test_top_p_small(self) -> None:
        """The most probable id is kept for any p."""
        assert set(draws(SamplingOptions(top_p=1e-9), [0.0, 3.0, 1.0])) == {1}

    def test_top_p_one(self) -> None:
        """The whole probability is no restriction."""
        assert draws(SamplingOptions(top_p=1.0)) == draws(SamplingOptions())

    def test_top_p_in_a_long_tail(self) -> None:
        """The smallest set that reaches p is kept, even if it has thousands of ids."""
        logits = [0.0] * 3000 + [-0.1] * 3000
        # Half of the high ones' weight: ties stay, and the low ones do not come.
        found = draws(SamplingOptions(top_p=0.3), logits, count=200)
        assert max(found) < 3000
        found = draws(SamplingOptions(top_p=0.9), logits, count=200)
        assert max(found) > 3000


class TestGreedy:
    """The highest logit wins."""

    @pytest.mark.parametrize(
        "options",
        [SamplingOptions(greedy=True), SamplingOptions(top_k=1), SamplingOptions(1.7, 1, 0.0)],
    )
    def test_argmax(self, options: SamplingOptions) -> None:
        """Greedy and a top k of 1 are the argmax of each row and draw nothing."""
        logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
        generators = new_generators(1, 64)
        states = [one.get_state() for one in generators]
        found = sample(logits, [options] * 64, generators)
        expected = [max(range(50), key=row.__getitem__) for row in logits.tolist()]
        assert found.tolist() == expected
        assert all(a.get_state().equal(b) for a, b in zip(generators, states, strict=True))


class TestImpossible:
    """Ids without probability never come."""

    def test_impossible_ids(self) -> None:
        """An id with the logit minus infinity never comes."""
        logits = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
        assert_distributed(draws(SamplingOptions(), logits), {1: 1.0, 3: 1.0})


class TestSeeds:
    """Randomness comes from the rows' generators and from nowhere else."""

    def test_same_seed_same_ids(self) -> None:
        """A seed gives the same ids, another seed other ids."""
        assert draws(SamplingOptions(), seed=5) == draws(SamplingOptions(), seed=5)
        assert draws(SamplingOptions(), seed=5) != draws(SamplingOptions(), seed=6)

    def test_rows_are_independent(self) -> None:
        """A row gets the id that it gets alone, independently of other rows."""
        logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
        options = [
            SamplingOptions(),
            SamplingOptions(greedy=True),
            SamplingOptions(top_k=5, temperature=2.0),
            SamplingOptions(top_p=0.7),
            SamplingOptions(min_p=0.2),
        ]
        together = sample(logits, options, new_generators(9, 5))
        for row in range(5):
            one = sample(logits[row : row + 1], options[row : row + 1], new_generators(9 + row, 1))
            assert one.item() == together[row].item()

    def test_global_state_is_left_alone(self) -> None:
        """Sampling neither reads nor moves torch's own generator."""
        before = torch.default_generator.get_state()
        draws(SamplingOptions())
        assert torch.default_generator.get_state().equal(before)

    def test_largest_seed(self) -> None:
        """A seed is any integer; it wraps beyond the range of a generator."""
        assert len(new_generators(2**64, 2)) == 2

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_dtypes(self, dtype: torch.dtype) -> None:
        """Scores of any dtype are drawn from in float64."""
        logits = torch.tensor([[0.0, 1.0, 3.0]], dtype=dtype)
        expected = sample(logits.double(), [SamplingOptions()], new_generators(2, 1))
        assert sample(logits, [SamplingOptions()], new_generators(2, 1)) == expected


class TestMinP:
    """Tokens far less probable than the best are left out."""

    def test_share_of_the_highest(self) -> None:
        """Ids with at least that share of the highest probability can come."""
        kept = probabilities(LOGITS)
        expected = {i: p for i, p in enumerate(kept) if p >= 0.3 * max(kept)}
        assert 1 < len(expected) < len(LOGITS)
        assert_distributed(draws(SamplingOptions(min_p=0.3)), expected)


class TestDecay:
    """Top-p falls with the length of the text."""

    def test_top_p_after(self) -> None:
        """Each token multiplies it, down to the bound."""
        options = SamplingOptions(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3)
        assert [options.top_p_after(count) for count in range(4)] == [0.8, 0.4, 0.3, 0.3]
        assert SamplingOptions(top_p=0.8).top_p_after(9) == 0.8
        # 0 would be all tokens.
        assert 0 < SamplingOptions(top_p=0.9, top_p_decay=0.1).top_p_after(2000) < 1e-20

    def test_rows_of_different_lengths(self) -> None:
        """Each row has the top-p for its length."""
        logits = torch.tensor([[1.0, 1.1, 1.2]]).expand(2000, -1)
        options = [SamplingOptions(top_p=1.0 - 1e-9, top_p_decay=0.1)] * 2000
        counts = [0, 5] * 1000
        found = sample(logits, options, new_generators(0, 2000), counts)
        assert set(found[0::2].tolist()) == {0, 1, 2}
        assert set(found[1::2].tolist()) == {2}


class TestPenalties:
    """Tokens of the text so far are less probable."""

    def penalized(
        self, options: SamplingOptions, prompt: list[int], made: list[int]
    ) -> list[float]:
        logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
        apply_penalties(logits, options, prompt, made)
        return logits.tolist()

    def test_repetition(self) -> None:
        """Positive logits are divided, negative ones multiplied, once for prompt and text."""
        options = SamplingOptions(repetition_penalty=2.0)
        assert self.penalized(options, [0, 0], [1, 0]) == [1.0, -4.0, 1.0, 0.5]

    def test_frequency_and_presence(self) -> None:
        """Each generated occurrence of a token counts; occurrences in the prompt do not."""
        options = SamplingOptions(frequency_penalty=0.5, presence_penalty=0.25)
        assert self.penalized(options, [2], [0, 0, 3]) == [0.75, -2.0, 1.0, -0.25]
        assert self.penalized(options, [2], []) == [2.0, -2.0, 1.0, 0.5]


class TestExtremes:
    """Values at the end of their range."""

    def test_tiny_temperature(self) -> None:
        """The smallest temperature gives the highest logit, without an overflow."""
        assert set(draws(SamplingOptions(temperature=5e-324), [1.0, 2.0, 1.5])) == {1}

    def test_tiny_temperature_in_float32(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On devices, where it would be rounded to 0, too."""
        monkeypatch.setattr(
            "lmcore.generation.sampling.logits._wide", lambda one: one.float().clone()
        )
        assert set(draws(SamplingOptions(temperature=5e-324), count=100)) == {2, 4}


class TestOptions:
    """`SamplingOptions` refuses values that make no sense."""

    @pytest.mark.parametrize(
        "values",
        [
            {"temperature": 0.0},
            {"temperature": -1.0},
            {"temperature": 100.1},
            {"temperature": math.nan},
            {"top_k": -1},
            {"top_k": 1001},
            {"top_p": -0.1},
            {"top_p": 1.1},
            {"top_p": math.nan},
            {"top_p_decay": 1.5},
            {"top_p_bound": 0.5},
            {"min_p": -0.1},
            {"min_p": math.nan},
            {"repetition_penalty": 0.009},
            {"repetition_penalty": math.inf},
            {"frequency_penalty": 2.5},
            {"presence_penalty": -2.5},
        ],
    )
    def test_out_of_range(self, values: dict[str, float]) -> None:
        """A value out of range is named by its flag."""
        (name,) = values
        with pytest.raises(ConfigError, match="out of range") as caught:
            SamplingOptions(**values)
        assert "--" + name.replace("_", "-") in caught.value.what

    @pytest.mark.parametrize(
        "values",
        [
            {"top_k": 2, "top_p": 0.5},
            {"top_k": 1, "top_p": 0.5},
            {"greedy": True, "top_k": 2},
            {"greedy": True, "top_p": 0.5},
        ],
    )
    def test_exclusive(self, values: dict[str, float]) -> None:
        """Two sampling methods cannot be combined."""
        with pytest.raises(ConfigError, match="exclude each other"):
            SamplingOptions(**values)

    @pytest.mark.parametrize(
        "values",
        [{"temperature": 100.0}, {"top_k": 1000}, {"top_p": 1.0}, {"greedy": True, "top_k": 1}],
    )
    def test_bounds_are_allowed(self, values: dict[str, float]) -> None:
        """The bounds themselves are right."""
        SamplingOptions(**values)

    def test_all_problems_at_once(self) -> None:
        """Everything that is wrong is said at once."""
        with pytest.raises(ConfigError) as caught:
            SamplingOptions(temperature=0.0, top_k=-1, top_p=2.0)
        assert caught.value.render().count("out of range") == 3
