import numpy as np

from shardline.components.validate.plots import ConfusedPair, confused_pairs, most_confused

NAMES = ("a", "b", "c", "d")
MATRIX = (
    (9, 1, 0, 0),
    (0, 10, 0, 0),
    (3, 0, 5, 2),
    (0, 0, 0, 0),  # no example of this class
)


def test_a_small_matrix_stays_as_it_is():
    whole = most_confused(MATRIX, NAMES, 4)

    assert (whole.names, whole.counts, whole.left_out) == (NAMES, MATRIX, 0)


def test_of_a_large_one_the_classes_with_the_most_mistakes_are_kept_in_their_order():
    some = most_confused(MATRIX, NAMES, 2)

    assert some.names == ("a", "c", "2 others")  # 4, 5 mistakes; b has 1, d has 2
    assert some.counts == ((9, 0, 1), (3, 5, 2), (0, 0, 10))
    assert some.left_out == 2
    assert np.sum(some.counts) == np.sum(MATRIX)


def test_pairs_come_by_frequency_and_only_where_there_was_a_mistake():
    pairs = confused_pairs(MATRIX, NAMES, 10)

    assert pairs == (
        ConfusedPair("c", "a", 3, 0.3),
        ConfusedPair("c", "d", 2, 0.2),
        ConfusedPair("a", "b", 1, 0.1),
    )
    assert confused_pairs(MATRIX, NAMES, 1) == pairs[:1]
    assert confused_pairs(np.diag([3, 4]).tolist(), NAMES[:2], 10) == ()
