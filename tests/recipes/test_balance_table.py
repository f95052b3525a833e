"""The balance table: means over the last steps, the worst layer, and the collapsed bound."""

from recipes.balance import WINDOW, summary, table
from topoep_titan.results import RunResult


def step(number: int, first: float, second: float) -> dict:
    layers = [{"expert_max_over_mean": value} for value in (first, second)]
    mean = (first + second) / 2
    return {
        "step": number,
        "loss": 7.0 - number / 100,
        "expert_max_over_mean": mean,
        "layers": layers,
    }


def test_one_row_by_hand():
    early = [step(i, 8.0, 8.0) for i in range(10)]  # outside the window
    late = [step(10 + i, 1.0, 2.0 + (i % 2)) for i in range(WINDOW)]
    result = RunResult(
        kind="measured", recipe="tiny", planner="none", dispatcher="alltoall", routing="natural",
        ranks=1, steps=[*early, *late],
        config={"model": {"balance": "bias", "num_experts": 32, "top_k": 4}},
    )  # fmt: skip
    row = summary(result)
    assert (row["steps"], row["window"], row["collapsed_would_be"]) == (60, 50, 8.0)
    assert row["max_over_mean_first_step"] == 8.0
    assert row["max_over_mean"] == (1.0 + 2.5) / 2  # the second layer alternates between 2 and 3
    assert row["max_over_mean_worst_layer"] == 2.5
    assert row["curve"] == [
        8.0,
        *[1.5] * 5,
    ]  # every tenth step; even ones of the second layer are 2
    assert "| tiny | bias | 8.00 | 1.75 | 2.50 | 8.0 | 6.655 |" in table([row])
