"""Names are found by where they stand, without a list of them."""

from __future__ import annotations

from dreamgym.experience.exchangeable import exchangeable_words
from tests.experience.test_known_replies import episode


def test_words_that_stand_in_the_same_place_and_vary_between_tasks_are_exchangeable() -> None:
    products = ("chips", "gum", "soda", "cake")
    many = [
        episode(str(n), str(n), ("read A", f"Slot A: {products[n % 4]}, price 2."), ("go left", "Left."))
        for n in range(60)
    ]
    assert exchangeable_words(many) == [frozenset(products)]
