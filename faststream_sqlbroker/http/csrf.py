"""No page of another site can let a browser write here."""

import hmac
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from faststream_sqlbroker.http.answers import Problem

HEADER = "X-CSRF-Token"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_MARKS = ("origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-mode")
"""Headers of a browser: with them, Basic or a cookie may have been added without its user."""
_JSON = "application/json"


class Csrf:
    """Tokens that only a page of this application can know; nothing is stored of them."""

    def __init__(self, secret: bytes) -> None:
        """All processes that serve one browser need the same `secret`."""
        self._secret = secret

    def token(self, user: str) -> str:
        """The token of a user."""
        return hmac.new(self._secret, b"csrf:" + user.encode(), sha256).hexdigest()

    def signature(self, user: str, text: str) -> str:
        """What shows later that `text` was made here for a user."""
        return hmac.new(self._secret, f"signed:{user}\0{text}".encode(), sha256).hexdigest()

    def is_signed(self, signature: str, user: str, text: str) -> bool:
        """Whether it is the signature of `text`, in a time that does not tell."""
        return hmac.compare_digest(signature.encode(), self.signature(user, text).encode())

    def check(
        self, connection: HTTPConnection, method: str, user: str, field: str | None = None
    ) -> None:
        """Refuse a write that a page of another site may have caused.

        A browser sends Basic and cookies along with whatever any page asks for. It names the page's
        site in Origin and Sec-Fetch-Site; and it asks before it sends what no form can send. The
        token is in a header, or, of a page without JavaScript, in a `field` of its form.

        Raises:
            Problem: the site is another one, or the token is missing or wrong (403).
        """
        if method in SAFE:
            return
        if _is_of_another_site(connection):
            raise Problem(403, "a page of another site must not write here")
        given = connection.headers.get(HEADER, field)
        if given is not None:
            if not hmac.compare_digest(given.encode(), self.token(user).encode()):
                raise Problem(403, f"{HEADER} is wrong: load the page again, or read csrf-token")
        elif _may_be_a_browser(connection, method):
            raise Problem(403, f"a write from a browser needs {HEADER}: read it from csrf-token")


def _is_of_another_site(connection: HTTPConnection) -> bool:
    headers = connection.headers
    if headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
        return True
    origin = headers.get("origin")
    host = headers.get("host", "").lower()
    try:
        return origin is not None and urlsplit(origin).netloc.lower() != host
    except ValueError:
        return True  # It is no URL, so it is not this site's.


def _may_be_a_browser(connection: HTTPConnection, method: str) -> bool:
    headers = connection.headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    # A browser sends a POST of a form's type without asking first, from any page.
    is_form = method == "POST" and kind != _JSON
    return is_form or any(mark in headers for mark in _MARKS)
