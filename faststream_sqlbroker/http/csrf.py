"""No page of another site can let a browser write here."""

import hmac
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from faststream_sqlbroker.http.answers import Problem

HEADER = "X-CSRF-Token"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_MARKS = ("origin", "referer", "cookie", "sec-fetch-site")
"""Headers of a browser: with them, Basic or a cookie may have been added without its user.

Not Sec-Fetch-Mode: browsers send it with Sec-Fetch-Site only, and Node's `fetch` sends it alone.
"""


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
        headers = connection.headers
        if _is_of_another_site(headers):
            raise Problem(403, "a page of another site must not write here")
        token = headers.get(HEADER, field)
        if token is not None:
            if not hmac.compare_digest(token.encode(), self.token(user).encode()):
                raise Problem(403, f"{HEADER} is wrong: load the page again, or read csrf-token")
        elif _may_be_a_browser(headers, method):
            raise Problem(403, f"a write from a browser needs {HEADER}: read it from csrf-token")


def _is_of_another_site(headers: Headers) -> bool:
    host = headers.get("host", "")
    origin = headers.get("origin", f"http://{host}").lower()
    is_own = origin in {f"http://{host}".lower(), f"https://{host}".lower()}
    return not is_own or headers.get("sec-fetch-site", "none") not in {"same-origin", "none"}


def _may_be_a_browser(headers: Headers, method: str) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    # A browser sends a POST of a form's type without asking first, from any page.
    is_form = method == "POST" and kind != "application/json"
    return is_form or any(mark in headers for mark in _MARKS)
