"""Access tokens, and what becomes of one that is no longer good."""

from __future__ import annotations

import itertools
import re
from typing import Any

from tests.contract.fake.failures import unauthenticated


class Tokens:
    """Gives tokens and knows them again.

    Self-signed ones (JSON Web Tokens, which a service account's key makes without asking) are always good.

    Attributes:
        refused: How many calls came with a token that had expired.
    """

    def __init__(self) -> None:
        self.refused = 0
        self._numbers = itertools.count(1)
        self._given = 0
        self._expired = 0
        self._last_call = ""

    def give(self) -> dict[str, Any]:
        """Answers a client that asks for a token."""
        self._given = next(self._numbers)
        return {"access_token": f"fake-{self._given}", "expires_in": 3600, "token_type": "Bearer"}

    def expire_after(self, method: str) -> None:
        """Ends all tokens that were given once the next call of a method has been answered."""
        self._last_call = method

    def answered(self, method: str) -> None:
        if method == self._last_call:
            self._last_call = ""
            self._expired = self._given

    def check(self, authorization: str) -> None:
        """Answers UNAUTHENTICATED to a token that has expired."""
        match = re.fullmatch(r"Bearer fake-(\d+)", authorization)
        if match and int(match[1]) <= self._expired:
            self.refused += 1
            raise unauthenticated()
