"""Protection against writes that pages of other sites cause in a browser."""

import hmac
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from faststream_sqlbroker.http.responses import Problem

HEADER = "X-CSRF-Token"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_BROWSER_HEADERS = ("origin", "referer", "cookie", "sec-fetch-site")
"""Headers of a browser, which may add Basic or a cookie without its user.

Not Sec-Fetch-Mode: browsers send it with Sec-Fetch-Site only, and Node's `fetch` sends it alone.
"""


class Csrf:
    """CSRF tokens that only a page of this application can know; nothing is stored."""

    def __init__(self, secret: bytes) -> None:
        """Use `secret`, which all processes that serve the same browser must share."""
        self._secret = secret

    def create_token(self, user: str) -> str:
        """Return the token of a user."""
        return hmac.new(self._secret, b"csrf:" + user.encode(), sha256).hexdigest()

    def sign(self, user: str, text: str) -> str:
        """Return a signature that proves that `text` was created here for a user."""
        return hmac.new(self._secret, f"signed:{user}\0{text}".encode(), sha256).hexdigest()

    def is_signed(self, signature: str, user: str, text: str) -> bool:
        """Return True if `signature` is valid for `text`, in constant time."""
        return hmac.compare_digest(signature.encode(), self.sign(user, text).encode())

    def check(
        self, connection: HTTPConnection, method: str, user: str, field: str | None = None
    ) -> None:
        """Refuse a write that a page of another site may have caused.

        A browser adds Basic and cookies to requests of any page. It names the page's site in Origin
        and Sec-Fetch-Site, and sends a preflight request before anything that no form can send. The
        token is in a header, or, from a page without JavaScript, in `field` of its form.

        Raises:
            Problem: the site is another one, or the token is missing or wrong (403).
        """
        if method in SAFE_METHODS:
            return
        headers = connection.headers
        if _is_cross_site(headers):
            raise Problem(403, "writes from pages of other sites are refused")
        token = headers.get(HEADER, field)
        if token is not None:
            if not hmac.compare_digest(token.encode(), self.create_token(user).encode()):
                raise Problem(403, f"{HEADER} is wrong: reload the page, or request csrf-token")
        elif _may_be_browser(headers, method):
            raise Problem(
                403, f"a write from a browser needs {HEADER}: request csrf-token to get it"
            )


def _is_cross_site(headers: Headers) -> bool:
    """Return True if a browser says that a page of another site sent the request.

    Programs other than browsers send neither Origin nor Sec-Fetch-Site, so they count as same-site.
    "none" in Sec-Fetch-Site is a request that the user started, for example from a bookmark.
    """
    host = headers.get("host", "")
    origin = headers.get("origin", f"http://{host}").lower()
    is_same_origin = origin in {f"http://{host}".lower(), f"https://{host}".lower()}
    return not is_same_origin or headers.get("sec-fetch-site", "none") not in {
        "same-origin",
        "none",
    }


def _may_be_browser(headers: Headers, method: str) -> bool:
    """Return True if a browser may have sent the write, so that a CSRF token is needed."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    # A browser sends a POST of a form's type from any page, without a preflight request.
    is_form = method == "POST" and media_type != "application/json"
    return is_form or any(header in headers for header in _BROWSER_HEADERS)
