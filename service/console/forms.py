"""Reads the forms of operators, and refuses those that did not come from a page of this console.

A form has a token that only a page of this console knows: the keyed hash of a cookie that other
sites can neither read nor set (`SameSite=Strict`). What the browser says about the origin of the
form is checked in addition.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

#: The cookie of a browser, and the field of a form with its token.
COOKIE, TOKEN_FIELD = "quire_console", "token"

#: The cookie with what the last form did, for the next page.
NOTICE_COOKIE = "quire_console_notice"

#: How long a notice waits for its page.
NOTICE_SECONDS = 30

#: The largest form, in bytes, and its most fields.
MAX_FORM_BYTES, MAX_FIELDS = 32_768, 200

#: The longest time that a form may take to come.
FORM_SECONDS = 30.0

#: A connection whose body has not come cannot be used again.
CLOSE = {"Connection": "close"}

_SESSION = re.compile(r"[0-9a-f]{32}")


class Tokens:
    """Makes and checks the tokens of forms, with a secret of this process."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def token(self, session: str, user: str) -> str:
        """The token of the forms that this browser and user get."""
        text = f"{session} {user}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

    def check(self, request: Request, fields: Mapping[str, str], user: str) -> None:
        """HTTPException 403 if a form does not come from a page of this console."""
        refuse_other_origins(request)
        session = request.cookies.get(COOKIE, "")
        given = fields.get(TOKEN_FIELD, "")
        if not _SESSION.fullmatch(session) or not hmac.compare_digest(
            given.encode(errors="replace"), self.token(session, user).encode()
        ):
            detail = "This form is too old, or is not of this console. Open the page again."
            raise HTTPException(403, detail)


def refuse_other_origins(request: Request) -> None:
    """HTTPException 403 for what a browser sends for a page of another origin."""
    site = request.headers.get("Sec-Fetch-Site", "same-origin")
    origin = request.headers.get("Origin")
    host = request.headers.get("Host", "")
    is_foreign = origin is not None and urlsplit(origin).netloc.lower() != host.lower()
    if site != "same-origin" or is_foreign:
        raise HTTPException(403, "This form was sent by a page of another site.")


def session_of(request: Request) -> str:
    """The session of a browser; a new one if it has none."""
    known = request.cookies.get(COOKIE, "")
    return known if _SESSION.fullmatch(known) else secrets.token_hex(16)


async def fields_of(request: Request) -> list[tuple[str, str]]:
    """The fields of a form in their order. HTTPException for what is no form of ours."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "A form must be application/x-www-form-urlencoded.")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        detail = "Content-Encoding: a form must not be compressed."
        raise HTTPException(415, detail, {"Accept-Encoding": "identity"})
    body = bytearray()
    try:
        async with asyncio.timeout(FORM_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_FORM_BYTES:
                    raise HTTPException(413, f"A form has at most {MAX_FORM_BYTES:,} bytes.")
    except TimeoutError:
        raise HTTPException(408, "The form did not come in time.", CLOSE) from None
    except ClientDisconnect:
        # Nobody reads this answer.
        raise HTTPException(400, "The form did not come to its end.") from None
    try:
        return parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(body),
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except ValueError:
        raise HTTPException(400, "The form cannot be read.") from None


def keep_cookie(response: Response, name: str, value: str, *, is_secure: bool) -> None:
    """Sets a cookie that no other site and no script can see."""
    seconds = NOTICE_SECONDS if name == NOTICE_COOKIE else None
    response.set_cookie(
        name, value, max_age=seconds, httponly=True, samesite="strict", secure=is_secure
    )
