"""Bundles of replicas: the rows that they save, by hand."""

import numpy as np

from recipes.bundles import far_rows, saved_by_bundles


def test_a_row_is_saved_only_by_all_its_experts():
    """Node 1 holds experts 2 and 3, node 2 holds 4 and 5. Twice {2, 3}, once {4}, once {4, 5}."""
    ids_TK = np.array([[2, 3], [3, 2], [0, 4], [4, 5]])
    needs_NE = far_rows(ids_TK, np.array([0, 0, 1, 1, 2, 2]))
    assert needs_NE.astype(int).tolist() == [
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    # One expert saves a row (4); two save two (2 and 3, or 4 and 5); three save three; four all.
    assert saved_by_bundles(needs_NE, (0, 1, 2, 3, 4)) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}


def test_taking_away_finds_a_bundle_that_adding_misses():
    """No single expert of the twenty rows {0, 1, 2} saves anything; expert 3 saves one row."""
    needs_NE = np.zeros((21, 4), dtype=bool)
    needs_NE[:20, :3] = True
    needs_NE[20, 3] = True
    assert saved_by_bundles(needs_NE, (1, 3)) == {1: 1, 3: 20}
