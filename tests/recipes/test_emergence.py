"""Shares of a final gain, by hand."""

from recipes.emergence import share_of_final


def test_share_of_what_the_last_fit_gains():
    table = [
        {"rows removed at step 9": removed, "by dedup alone": 0.1} for removed in (0.1, 0.2, 0.5)
    ]
    assert share_of_final(table, "rows removed at step", "by dedup alone") == [0.0, 0.25, 1.0]
